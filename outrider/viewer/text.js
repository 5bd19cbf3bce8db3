// Acceptance over the text: where it was easy and where it was hard, with the draft length of each round.
"use strict";

const TextView = (() => {
  const { element, number, flowing, legend } = Dom;
  const F = Figures;
  const AROUND = 60; // rounds on each side of the current one whose text is shown
  const HEIGHT = 120;

  function render(state, actions) {
    const { sequence, index } = state;
    const rounds = sequence.rounds;
    const s = F.statistics(rounds);
    const from = Math.max(0, Math.min(index - AROUND, rounds.length - 2 * AROUND - 1));
    const to = Math.min(rounds.length, from + 2 * AROUND + 1);
    const shown = rounds.slice(from, to);
    return element(
      "div",
      { class: "text-view", "data-round": state.round.number },
      element("h2", { class: "unseen" }, "Acceptance over the text"),
      element(
        "p",
        { class: "lead" },
        number("emitted-all", F.whole(s.emitted)), ` tokens from `, number("passes", F.whole(s.passes)), " passes: ",
        s.perPass === null ? "" : [number("per-pass", F.decimal(s.perPass)), " tokens per pass. "],
        s.rate === null
          ? "Nothing was drafted."
          : [number("accepted-all", F.whole(s.accepted)), " of ", number("proposed-all", F.whole(s.proposed)), " drafted tokens were accepted (", number("rate", F.percent(s.rate), "%"), "); ", number("draft-per-pass", F.decimal(s.draftPerPass)), " were drafted in a pass on average."],
      ),
      stretches(sequence, actions),
      element(
        "section",
        { class: "card", "aria-label": "Draft length and accepted tokens over the text" },
        element("h3", {}, "Draft length (outline) and accepted tokens (filled), over the place in the text"),
        overview(state, actions),
        byDepth(rounds),
      ),
      element(
        "section",
        { class: "card", "aria-label": "Text by acceptance" },
        element("h3", {}, "The text around this round. Fainter ground: the target was surer. Choose a token to see its round."),
        element("p", { class: "text wide" }, shown.map((r, i) => roundText(state, r, from + i, actions))),
        here(state),
      ),
      legend(["accepted", "recovered", "bonus", "plain"].filter((name) => name !== "plain" || rounds.some((r) => F.own(r) === "plain"))),
    );
  }

  function stretches(sequence, actions) {
    const found = F.stretches(sequence.rounds);
    if (!found) return null;
    const link = (name, stretch) => {
      const [first, last] = [sequence.rounds[stretch.index], sequence.rounds[stretch.index + stretch.width - 1]];
      return element("button", { class: "link", onclick: () => actions.go({ index: stretch.index }) }, "rounds ", number(`${name}-first`, F.whole(F.roundNumber(first))), " to ", number(`${name}-last`, F.whole(F.roundNumber(last))));
    };
    return element("p", {}, "Hardest: ", link("hard", found.hard), " with ", number("hard", F.decimal(found.hard.perPass)), " tokens per pass. Easiest: ", link("easy", found.easy), " with ", number("easy", F.decimal(found.easy.perPass)), ".");
  }

  /** A bar for each round, as wide as the tokens that it emitted. */
  function overview(state, actions) {
    const { sequence, index } = state;
    const rounds = sequence.rounds;
    const tokens = F.grown(rounds);
    const total = tokens[rounds.length] || 1;
    const most = Math.max(1, ...[0].concat(rounds.reduce((m, r) => Math.max(m, F.proposed(r)), 0)));
    const canvas = element("canvas", { class: "overview", height: HEIGHT, role: "img", "aria-label": "Overview of the text; the rounds are the same as on the slider", onclick: (event) => actions.go({ index: roundAt(event.offsetX / canvas.clientWidth) }) });
    const roundAt = (share) => Math.max(0, Math.min(rounds.length - 1, tokens.findIndex((count) => count > share * total) - 1));
    const draw = () => {
      const width = canvas.clientWidth;
      const scale = devicePixelRatio || 1;
      canvas.width = width * scale;
      canvas.height = HEIGHT * scale;
      const g = canvas.getContext("2d");
      g.scale(scale, scale);
      const [outline, filled, line, current] = ["--c-outline", "--accepted", "--soft", "--focus"].map((name) => Dom.colour(canvas, name));
      const fine = width / rounds.length > 4;
      rounds.forEach((r, i) => {
        const x = (tokens[i] / total) * width;
        const w = Math.max((r.emitted.length / total) * width - (fine ? 1.5 : 0), 0.6);
        const up = (count) => (count / most) * (HEIGHT - 8);
        g.fillStyle = outline;
        g.fillRect(x, HEIGHT - up(F.proposed(r)), w, up(F.proposed(r)));
        g.fillStyle = filled;
        g.fillRect(x, HEIGHT - up(F.accepted(r)), w, up(F.accepted(r)));
        g.fillStyle = line;
        g.fillRect(x, HEIGHT - 1, w, 1);
      });
      g.fillStyle = current;
      const x = (tokens[index] / total) * width;
      g.fillRect(x, 0, Math.max((rounds[index].emitted.length / total) * width, 2), 3);
      g.globalAlpha = 0.12;
      g.fillRect(x, 0, Math.max((rounds[index].emitted.length / total) * width, 2), HEIGHT);
    };
    requestAnimationFrame(() => canvas.isConnected && draw());
    return element("div", { class: "overview-box" }, canvas, element("p", { class: "axis" }, element("span", {}, "place ", number("first-place", F.whole(1))), element("span", {}, "longest draft: ", number("longest", F.whole(most))), element("span", {}, "place ", number("last-place", F.whole(total)))));
  }

  /** How often each depth of the draft was reached and kept. */
  function byDepth(rounds) {
    const found = F.byDepth(rounds);
    if (!found.length) return null;
    return element(
      "details",
      {},
      element("summary", {}, "By depth of the draft"),
      element(
        "table",
        { class: "plain-table" },
        element("thead", {}, element("tr", {}, ["Depth", "Looked at", "Kept", "Share"].map((h) => element("th", { scope: "col" }, h)))),
        element(
          "tbody",
          {},
          found.map(({ depth, reached, kept }) =>
            element("tr", { "data-depth": depth }, element("th", { scope: "row" }, number("depth", F.whole(depth))), element("td", {}, number("reached", F.whole(reached))), element("td", {}, number("kept", F.whole(kept))), element("td", {}, reached ? number("kept-share", F.percent(kept / reached), "%") : "\u2013")),
          ),
        ),
      ),
    );
  }

  function roundText(state, r, i, actions) {
    const p = F.emittedP(r);
    const kept = F.accepted(r);
    return r.emitted.map((id, k) => {
      const made = flowing(Words.readable(state.sequence, id), k < kept ? "accepted" : F.own(r));
      made.classList.toggle("current", i === state.index);
      if (p[k] !== null) made.style.setProperty("--hard", String(1 - p[k]));
      made.addEventListener("click", () => actions.go({ index: i, node: k < kept ? r.path[k + 1] : null }));
      return made;
    });
  }

  function here(state) {
    const { sequence, round: r, index } = state;
    const [first, last] = F.places(sequence, index);
    if (last < first) return null;
    const places = first === last ? ["Place ", number("place-first", F.whole(first))] : ["Places ", number("place-first", F.whole(first)), " to ", number("place-last", F.whole(last))];
    return element("p", { class: "note" }, places, " of the text came in round ", number("round", F.whole(F.roundNumber(r))), ": ", number("proposed", F.whole(F.proposed(r))), " drafted, ", number("accepted", F.whole(F.accepted(r))), " accepted, ", number("emitted", F.whole(r.emitted.length)), " emitted.");
  }

  return { render };
})();
