// Small helpers that make elements. A number on the page is always a `number` element, so that each can be told and checked.
"use strict";

const Dom = (() => {
  const SVG = "http://www.w3.org/2000/svg";

  /** An element; properties that begin with "on" are listeners, others attributes (null and false are left out). */
  function element(tag, properties = {}, ...children) {
    return fill(document.createElement(tag), properties, children);
  }

  function svg(tag, properties = {}, ...children) {
    return fill(document.createElementNS(SVG, tag), properties, children);
  }

  function fill(made, properties, children) {
    for (const [name, value] of Object.entries(properties)) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
    return made;
  }

  /** A figure: its name, its text as `Figures` writes it, and perhaps a unit. */
  const number = (name, text, unit) => element("span", { class: "number", "data-n": name }, text, unit ? element("span", { class: "unit" }, unit) : null);

  /** A token's text in a box that shows its spaces. */
  const token = (text, role) => element("code", { class: "token" + (role ? ` role-${role}` : "") }, text);

  /** A token within running text: its line breaks break lines. */
  const flowing = (text, role) => token(text.replaceAll("\u23ce", "\u23ce\n"), role);

  /** A name from the trace. */
  const verbatim = (text) => element("span", { "data-verbatim": true }, text);

  /** A sentence of `Words`. */
  const sentence = (parts) =>
    parts.map((part) => (part.token !== undefined ? token(part.token) : part.verbatim !== undefined ? verbatim(part.verbatim) : part.name ? number(part.name, part.text) : part));

  /** The mark of an outcome with its word beside or behind it. */
  function mark(outcome, hidden = false) {
    const { mark, word, meaning } = Words.OUTCOMES[outcome];
    return element(
      "span",
      { class: `outcome role-${outcome}`, title: meaning },
      element("span", { class: "mark", "aria-hidden": "true" }, mark),
      element("span", { class: hidden ? "unseen" : "word" }, word),
    );
  }

  /** What the colours and marks mean. */
  function legend(outcomes) {
    return element(
      "ul",
      { class: "legend", "aria-label": "Legend" },
      outcomes.map((outcome) => element("li", {}, mark(outcome), element("span", { class: "meaning" }, Words.OUTCOMES[outcome].meaning))),
    );
  }

  /** The colour that a custom property of the stylesheet has here, as a canvas takes it. */
  function colour(place, name) {
    const probe = element("span", { style: `color: var(${name})` });
    place.parentNode.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  }

  /** The heading of what is shown of one round. */
  const roundTitle = (sequence, r) =>
    element("h2", { class: "round-title" }, "Round ", number("round", Figures.whole(Figures.roundNumber(r))), element("small", {}, sequence.drafter === "none" ? "plain decoding" : ["drafter ", verbatim(sequence.drafterName), `, rule ${r.rule}`], r.lossy ? ": LOSSY" : ""));

  return { roundTitle, colour, element, svg, number, token, flowing, verbatim, sentence, mark, legend };
})();
