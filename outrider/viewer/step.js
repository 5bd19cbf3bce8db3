// A round, step by step: draft, verify, keep, commit.
"use strict";

const StepView = (() => {
  const { element, number, token, flowing, sentence, mark, legend, roundTitle } = Dom;
  const F = Figures;
  const PHASES = ["draft", "verify", "keep", "commit"];
  const TITLES = { draft: "Draft", verify: "Verify", keep: "Keep", commit: "Commit" };
  const SHOWN_BEFORE = 60; // tokens of the text so far

  function render(state, actions) {
    const { sequence, round: r, index, phase } = state;
    const reached = PHASES.indexOf(phase);
    const steps = Words.steps(sequence, r);
    return element(
      "div",
      { class: "step-view", "data-round": r.number },
      roundTitle(sequence, r),
      phases(phase, steps, actions),
      element("section", { class: "card", "aria-label": "The text" }, element("div", { class: "tail" }, textSoFar(sequence, index, reached))),
      F.proposed(r) ? table(state, reached, actions) : null,
      reached >= 2 ? favourites(sequence, r) : null,
      element("div", { class: "foot" }, times(r), legend(outcomesOf(r))),
    );
  }

  /** The four steps, each with its sentence; those still to come are pale. */
  function phases(phase, steps, actions) {
    const at = PHASES.indexOf(phase);
    return element(
      "ol",
      { class: "phases" },
      PHASES.map((name, i) =>
        element(
          "li",
          { class: i === at ? "now" : i > at ? "later" : "" },
          element("button", { "data-key": `phase-${name}`, "aria-current": i === at ? "step" : null, onclick: () => actions.go({ phase: name }) }, element("span", { class: "ordinal" }, `${i + 1}`), TITLES[name]),
          element("p", { "data-step": name, "aria-hidden": i > at ? "true" : null }, sentence(steps[name])),
        ),
      ),
    );
  }

  /** The end of the text, the drafted tokens in it, and what joined it. */
  function textSoFar(sequence, index, reached) {
    const r = sequence.rounds[index];
    const before = [];
    for (let i = index - 1; i >= 0 && before.length < SHOWN_BEFORE; i--) before.unshift(...emitted(sequence, sequence.rounds[i]));
    const anchor = flowing(Words.readable(sequence, r.tokens[0]), "anchor");
    if (before.length) before.pop(); // the anchor is the last of them
    const shown = before.slice(-SHOWN_BEFORE);
    const outcomes = F.outcomes(r);
    const chain = F.isChain(r);
    const drafted = r.tokens.slice(1).map((id, i) => {
      const role = reached < 2 ? "drafted" : outcomes[i + 1];
      if (reached === 3 && role !== "accepted") return null;
      if (!chain && reached < 2) return null;
      return chain || role === "accepted" ? flowing(Words.readable(sequence, id), role) : null;
    });
    const own = reached >= 2 && F.own(r) ? flowing(Words.readable(sequence, r.emitted[r.emitted.length - 1]), F.own(r)) : null;
    return element(
      "p",
      { class: "text", "data-text": "so-far" },
      before.length > shown.length || index === 0 ? element("span", { class: "ellipsis", "aria-hidden": "true" }, index ? "\u2026" : "prompt \u2026") : null,
      shown, anchor, drafted, own,
    );
  }

  function favourites(sequence, r) {
    const parts = Words.favourites(sequence, r);
    return parts && element("p", { class: "note", "data-step": "favourites" }, sentence(parts));
  }

  /** The tokens that a round added to the text, with what they were. */
  function emitted(sequence, r) {
    const kept = F.accepted(r);
    return r.emitted.map((id, i) => flowing(Words.readable(sequence, id), i < kept ? "accepted" : F.own(r)));
  }

  function table(state, reached, actions) {
    const { sequence, round: r } = state;
    const tree = !F.isChain(r);
    const outcomes = F.outcomes(r);
    const head = ["#", "Token", tree ? "After" : null, "Target p", "Drafter q", "Kept with", "Drawn", "Outcome", "Why"];
    const titles = {
      "Target p": "probability of the token under the target, all sampling parameters applied",
      "Drafter q": "probability with which it was drafted; \u2013: chosen without chance",
      "Kept with": "probability of the test that the accept rule really made",
      Drawn: "the random number of that test: kept if it is smaller",
    };
    return element(
      "section",
      { class: "card scroll", "aria-label": "The drafted tokens" },
      element(
        "table",
        { class: "nodes" },
        element("caption", {}, "Each drafted token, and why it was kept or not"),
        element("thead", {}, element("tr", {}, head.filter((h) => h !== null).map((h) => element("th", { scope: "col", title: titles[h] }, h)))),
        element("tbody", {}, r.tokens.map((_, node) => (node ? row(state, node, reached, tree, outcomes[node], actions) : null))),
      ),
    );
  }

  function row(state, node, reached, tree, outcome, actions) {
    const { sequence, round: r } = state;
    const test = F.test(r, node);
    const dash = () => element("span", { class: "none" }, "\u2013");
    const seen = (from, content) => (reached >= from ? content : element("span", { class: "none" }, "\u00a0"));
    const cell = (label, content) => element("td", { "data-label": label }, content);
    const parent = r.parents[node];
    return element(
      "tr",
      { "data-node": node, class: `row-${reached < 2 ? "drafted" : outcome}` + (state.node === node ? " chosen" : ""), onclick: () => actions.choose(node), "aria-selected": state.node === node ? "true" : null },
      element("th", { scope: "row" }, number("node", F.whole(node))),
      cell("Token", token(Words.readable(sequence, r.tokens[node]), reached < 2 ? "drafted" : outcome)),
      tree ? cell("After", parent ? [number("parent", F.whole(parent)), " ", token(Words.readable(sequence, r.tokens[parent]))] : token(Words.readable(sequence, r.tokens[0]))) : null,
      cell("Target p", seen(1, r.p.length ? number("p", F.probability(r.p[node])) : dash())),
      cell("Drafter q", r.q[node] === null ? dash() : number("q", F.probability(r.q[node]))),
      cell("Kept with", seen(2, test ? number("test", F.probability(test.probability)) : dash())),
      cell("Drawn", seen(2, test && typeof test.draw === "number" ? number("draw", F.probability(test.draw)) : dash())),
      cell("Outcome", reached < 2 ? mark("drafted") : mark(outcome)),
      element("td", { class: "why", "data-label": "Why" }, seen(2, element("span", {}, sentence(Words.why(sequence, r, node))))),
    );
  }

  function outcomesOf(r) {
    const found = new Set(F.outcomes(r).slice(1));
    if (F.own(r)) found.add(F.own(r));
    return Object.keys(Words.OUTCOMES).filter((name) => found.has(name));
  }

  /** How the round's time was spent. */
  function times(r) {
    const total = F.duration(r);
    const parts = F.PHASES.map((phase) => [phase, F.nanoseconds(r, phase)]);
    return element(
      "section",
      { class: "times", "aria-label": "Time of the round" },
      element("div", { class: "bar", "aria-hidden": "true" }, parts.map(([phase, ns]) => element("span", { class: `time-${phase}`, style: `flex-grow:${total ? ns / total : 0}` }))),
      element(
        "ul",
        {},
        parts.map(([phase, ns]) => element("li", {}, element("span", { class: `swatch time-${phase}`, "aria-hidden": "true" }), `${phase} `, number(`time-${phase}`, F.milliseconds(ns), "ms"))),
      ),
      r.sequences > 1 ? element("p", { class: "note" }, "One pass served ", number("sequences", F.whole(r.sequences)), " sequences; these are this one's share.") : null,
    );
  }

  return { render, PHASES, emitted };
})();
