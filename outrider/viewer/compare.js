// Several decodings of one prompt side by side: figures, and the text's growth over passes and over time.
"use strict";

const CompareView = (() => {
  const { element, svg, number } = Dom;
  const F = Figures;
  const CHART = { width: 520, height: 240, left: 44, right: 14, top: 10, bottom: 30 };
  const DASHES = ["", "7 4", "2 4", "10 4 2 4", "1 3", "14 5"];

  function render(state, actions) {
    const sequences = state.candidates;
    const plain = sequences.find((s) => s.drafter === "none");
    const base = plain ? F.statistics(plain.rounds) : null;
    return element(
      "div",
      { class: "compare-view" },
      element("h2", { class: "unseen" }, "Drafters compared"),
      sequences.length > 1
        ? element("p", { class: "lead" }, number("candidates", F.whole(sequences.length)), " decodings of one prompt.")
        : element("p", { class: "note" }, "Only one decoding of this prompt is open. Open traces of the same prompt with other drafters beside it: ", element("code", {}, "outrider view lookup.jsonl model.jsonl"), ", or ", element("code", {}, "outrider bench --view"), "."),
      element("section", { class: "card scroll", "aria-label": "Figures" }, table(sequences, plain, base, actions)),
      element(
        "div",
        { class: "charts" },
        chart("Tokens over passes of the target", "passes", sequences, (s) => s.rounds.map((_, i) => i + 1), F.whole),
        chart("Tokens over seconds, the prefill not counted", "seconds", sequences, (s) => F.ends(s.rounds, false), F.seconds),
      ),
    );
  }

  function table(sequences, plain, base, actions) {
    const heads = ["", "Decoding", "Tokens", "Passes", "Tokens per pass", "Accepted / proposed", "Seconds", "Drafting", "Tokens/s", "Against plain", "Text"];
    return element(
      "table",
      { class: "plain-table compared" },
      element("caption", {}, "Seconds and tokens/s are measured, after the prefill. Against plain: tokens/s over those of plain decoding here."),
      element("thead", {}, element("tr", {}, heads.map((h) => element("th", { scope: "col" }, h)))),
      element("tbody", {}, sequences.map((s, i) => row(s, i, plain, base, actions))),
    );
  }

  function row(sequence, i, plain, base, actions) {
    const s = F.statistics(sequence.rounds);
    const against = base ? F.ratio(s, base) : null;
    const cell = (label, ...content) => element("td", { "data-label": label }, content);
    return element(
      "tr",
      { "data-trace": sequence.trace, "data-sequence": sequence.number },
      element("td", { class: "sample" }, line(i)),
      element("th", { scope: "row" }, element("button", { class: "link", onclick: () => actions.open(sequence), "data-verbatim": true }, sequence.label)),
      cell("Tokens", number("emitted-all", F.whole(s.emitted))),
      cell("Passes", number("passes", F.whole(s.passes))),
      cell("Tokens per pass", s.perPass === null ? "\u2013" : number("per-pass", F.decimal(s.perPass))),
      cell("Accepted / proposed", number("accepted-all", F.whole(s.accepted)), " / ", number("proposed-all", F.whole(s.proposed))),
      cell("Seconds", number("seconds", F.seconds(s.seconds))),
      cell("Drafting", s.seconds ? number("propose-share", F.percent(s.propose / s.seconds), "%") : "\u2013"),
      cell("Tokens/s", s.speed === null ? "\u2013" : number("speed", F.perSecond(s.speed))),
      cell("Against plain", against === null ? "\u2013" : number("ratio", F.decimal(against))),
      cell("Text", sameText(sequence, plain)),
    );
  }

  function sameText(sequence, plain) {
    if (!plain || sequence === plain) return "\u2013";
    const at = F.parting(sequence, plain);
    return at === null ? "same as plain" : ["parts from plain at token ", number("parting", F.whole(at))];
  }

  const line = (i) => svg("svg", { width: 44, height: 12, "aria-hidden": "true" }, svg("path", { class: `series series-${i % 6}`, d: "M2 6H42", "stroke-dasharray": DASHES[i % 6] }));

  /** Tokens over something: one line for each decoding, told apart by dashes too. */
  function chart(title, unit, sequences, across, write) {
    const inner = { width: CHART.width - CHART.left - CHART.right, height: CHART.height - CHART.top - CHART.bottom };
    const all = sequences.map((s) => ({ xs: [0, ...across(s)], ys: F.grown(s.rounds) }));
    const furthest = Math.max(...all.map(({ xs }) => xs[xs.length - 1]), 1e-9);
    const most = Math.max(...all.map(({ ys }) => ys[ys.length - 1]), 1);
    const x = (value) => CHART.left + (value / furthest) * inner.width;
    const y = (value) => CHART.top + inner.height - (value / most) * inner.height;
    const lines = all.map(({ xs, ys }, i) => {
      const step = Math.max(1, Math.floor(xs.length / 600));
      const kept = xs.map((_, k) => k).filter((k) => k % step === 0 || k === xs.length - 1);
      return svg("path", { class: `series series-${i % 6}`, "stroke-dasharray": DASHES[i % 6], d: "M" + kept.map((k) => `${x(xs[k]).toFixed(1)} ${y(ys[k]).toFixed(1)}`).join("L") });
    });
    const label = (name, value, at, anchor) => svg("text", { x: at[0], y: at[1], "text-anchor": anchor, class: "small", "data-n": name }, value);
    return element(
      "section",
      { class: "card", "data-chart": unit, "aria-label": title },
      element("h3", {}, title),
      svg(
        "svg",
        { class: "chart", viewBox: `0 0 ${CHART.width} ${CHART.height}`, role: "img", "aria-label": `${title}; the table has the figures` },
        svg("path", { class: "axis-line", d: `M${CHART.left} ${CHART.top}V${CHART.top + inner.height}H${CHART.width - CHART.right}` }),
        label("zero", F.whole(0), [CHART.left, CHART.height - 10], "middle"),
        label(`most-${unit}`, write(furthest), [CHART.width - CHART.right, CHART.height - 10], "end"),
        svg("text", { x: CHART.left + inner.width / 2, y: CHART.height - 10, "text-anchor": "middle", class: "small" }, unit),
        label("most-tokens", F.whole(most), [CHART.left - 6, CHART.top + 10], "end"),
        lines,
      ),
    );
  }

  return { render };
})();
