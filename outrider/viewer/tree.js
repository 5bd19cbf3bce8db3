// The draft tree with its tree-attention mask beside it. A node and its row of the mask are marked together.
"use strict";

const TreeView = (() => {
  const { element, svg, number, token, sentence, mark, legend, roundTitle } = Dom;
  const F = Figures;
  const BOX = { width: 134, height: 42, across: 164, down: 52 };

  function render(state, actions) {
    const { sequence, round: r } = state;
    const outcomes = F.outcomes(r);
    const selected = state.node ?? (F.proposed(r) ? 1 : 0);
    const size = r.tokens.length;
    return element(
      "div",
      { class: "tree-view", "data-round": r.number },
      roundTitle(sequence, r),
      element("p", { class: "lead", "data-step": "keep" }, sentence(Words.steps(sequence, r).keep)),
      element(
        "div",
        { class: "panes" },
        element("section", { class: "card scroll", "aria-label": "Draft tree" }, drawing(state, outcomes, selected, actions)),
        element(
          "section",
          { class: "card mask-card", "aria-label": "Tree-attention mask" },
          element("h3", {}, "What each row of the pass sees"),
          mask(r, outcomes, selected, actions),
          detail(state, outcomes[selected], selected),
        ),
      ),
      size > 1 ? legend([...new Set(["anchor", ...outcomes.slice(1), ...(F.own(r) ? [F.own(r)] : [])])]) : null,
    );
  }

  /** Where each node stands: its depth across, and down in the order of the leaves. The token after the path is the last. */
  function layout(r) {
    const across = F.depths(r);
    const down = new Array(r.tokens.length).fill(null);
    let line = 0;
    const place = (node) => {
      const children = [];
      for (let i = node + 1; i < r.parents.length; i++) if (r.parents[i] === node) children.push(i);
      children.forEach(place);
      down[node] = children.length ? down[children[0]] : line++;
    };
    if (F.isChain(r)) down.fill(0);
    else place(0);
    return { across, down, lines: Math.max(line, 1) };
  }

  function drawing(state, outcomes, selected, actions) {
    const { sequence, round: r } = state;
    const { across, down, lines } = layout(r);
    const x = (node) => 8 + across[node] * BOX.across;
    const y = (node) => 8 + down[node] * BOX.down;
    const kind = F.own(r);
    const end = r.path[r.path.length - 1];
    const extra = kind ? { x: x(end) + BOX.across, y: 8 + (kind === "recovered" ? lines : down[end]) * BOX.down } : null;
    const width = Math.max(...across) * BOX.across + BOX.across + (extra ? BOX.across : 0) + 16;
    const height = (lines + (kind === "recovered" ? 1 : 0)) * BOX.down + 16;
    const line = (x1, y1, x2, y2, role) =>
      svg("path", { class: `edge edge-${role}`, d: `M${x1} ${y1}C${(x1 + x2) / 2} ${y1} ${(x1 + x2) / 2} ${y2} ${x2} ${y2}` });
    const middle = BOX.height / 2;
    const edges = r.parents.map((parent, node) =>
      node ? line(x(parent) + BOX.width, y(parent) + middle, x(node), y(node) + middle, outcomes[node]) : null,
    );
    if (extra) edges.push(line(x(end) + BOX.width, y(end) + middle, extra.x, extra.y + middle, kind));
    const boxes = r.tokens.map((id, node) =>
      box({ x: x(node), y: y(node), role: outcomes[node], text: Words.readable(sequence, id), node, selected: node === selected, figures: figures(r, node), label: Words.plain(Words.why(sequence, r, node)), choose: () => actions.choose(node) }),
    );
    if (extra) {
      const p = typeof r.p_next === "number" ? [["p-next", "p ", F.probability(r.p_next)]] : [];
      const text = Words.readable(sequence, r.emitted[r.emitted.length - 1]);
      boxes.push(box({ ...extra, role: kind, text, figures: p, label: `${text}, ${Words.OUTCOMES[kind].meaning}` }));
    }
    return svg("svg", { class: "tree", width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Draft tree: the anchor on the left, each token after the one that it follows" }, edges, boxes);
  }

  const figures = (r, node) => {
    if (!node || !r.p.length) return [];
    const p = ["p", "p ", F.probability(r.p[node])];
    return r.q[node] === null ? [p] : [p, ["q", "q ", F.probability(r.q[node])]];
  };

  function box({ x, y, role, text, node, selected, figures, label, choose }) {
    const short = text.length > 10 ? text.slice(0, 9) + "\u2026" : text;
    const key = choose && ((event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), choose()));
    return svg(
      "g",
      { class: `node role-${role}${selected ? " chosen" : ""}`, transform: `translate(${x} ${y})`, "data-node": node, "data-key": choose ? `tree-${node}` : null, role: choose ? "button" : "img", tabindex: choose ? 0 : null, "aria-label": label, "aria-pressed": choose ? String(Boolean(selected)) : null, ...(choose ? { onclick: choose, onkeydown: key } : {}) },
      svg("title", {}, label),
      svg("rect", { width: BOX.width, height: BOX.height, rx: 7 }),
      node ? svg("text", { class: "small", x: 8, y: 17, "data-n": "node" }, F.whole(node)) : null,
      svg("text", { class: "name", x: node ? 26 : 8, y: 17, "data-token": true }, short.replace(/^ /, "\u00a0")),
      svg("text", { class: "mark", x: BOX.width - 8, y: 17, "text-anchor": "end", "aria-hidden": "true" }, Words.OUTCOMES[role].mark),
      figures.map(([name, before, value], i) => svg("text", { class: "small", x: 8 + i * 62, y: 34 }, before, svg("tspan", { "data-n": name }, value))),
    );
  }

  /** Rows are nodes, columns what they may see. One path for each row, so that a large mask stays cheap. */
  function mask(r, outcomes, selected, actions) {
    const size = r.tokens.length;
    const cell = Math.max(2, Math.min(22, Math.floor(330 / size)));
    const side = size * cell;
    const rows = r.tokens.map((_, node) => {
      const seen = F.sees(r, node);
      const d = runs(seen).map(([from, to]) => `M${from * cell} ${node * cell}h${(to - from + 1) * cell - 1}v${cell - 1}h${-((to - from + 1) * cell - 1)}z`).join("");
      const over = svg("rect", { class: "hit", x: 0, y: node * cell, width: side, height: cell });
      return svg("g", { class: `row role-${outcomes[node]}${node === selected ? " chosen" : ""}`, "data-node": node, "data-sees": seen.join(" "), onclick: () => actions.choose(node) }, over, svg("path", { d }));
    });
    return svg("svg", { class: "mask", width: side, height: side, viewBox: `0 0 ${side} ${side}`, role: "img", "aria-label": "Mask: one row and one column for each node; the sentence below says what the chosen row sees" }, rows);
  }

  /** Neighbouring numbers of a rising list, as [first, last]. */
  function runs(values) {
    const found = [];
    for (const value of values) {
      if (found.length && found[found.length - 1][1] === value - 1) found[found.length - 1][1] = value;
      else found.push([value, value]);
    }
    return found;
  }

  function detail(state, outcome, node) {
    const { sequence, round: r } = state;
    const seen = F.sees(r, node);
    return element(
      "div",
      { class: "detail", "data-node": node },
      element("p", {}, mark(outcome), " ", sentence(Words.why(sequence, r, node))),
      element(
        "p",
        { "data-step": "sees" },
        "Its row sees the whole text before the draft, and: ",
        seen.map((i, place) => [place ? ", " : "", number("sees", F.whole(i)), " ", token(Words.readable(sequence, r.tokens[i]))]),
        ".",
      ),
      r.score ? element("p", { class: "note" }, "The drafter itself guessed: ", number("score", F.probability(r.score[node])), ".") : null,
    );
  }

  return { render };
})();
