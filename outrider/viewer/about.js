// What the trace says about itself: its problems, the prompt, the header.
"use strict";

const About = (() => {
  const { element } = Dom;

  /** What could not be read, one note for each trace that has trouble. */
  const problems = (traces) =>
    traces
      .filter((trace) => trace.problems.length)
      .map((trace) => element("div", { class: "problem", role: "alert" }, element("strong", {}, trace.name), element("ul", {}, trace.problems.map((text) => element("li", {}, text)))));

  function of(sequence, trace) {
    return [
      sequence.prompt === undefined ? null : element("details", { class: "card" }, element("summary", {}, "The prompt"), element("pre", { "data-prompt": true }, sequence.prompt)),
      element("details", { class: "card" }, element("summary", {}, "About this trace"), element("dl", { class: "header" }, flat(trace.header).map(([path, value]) => [element("dt", {}, path), element("dd", { "data-header": path }, value)]))),
    ];
  }

  /** The header's fields by path; what belongs to single sequences is left out. */
  function flat(value, path = "") {
    if (path === "sequences" || path === "prompts") return [];
    if (Array.isArray(value)) return [[path, value.map((x) => (typeof x === "object" ? JSON.stringify(x) : String(x))).join(" ")]];
    if (typeof value !== "object" || value === null) return [[path, String(value)]];
    return Object.entries(value).flatMap(([name, inner]) => flat(inner, path ? `${path}.${name}` : name));
  }

  const nothing = () =>
    element(
      "section",
      { class: "card empty" },
      element("h2", {}, "No rounds to show"),
      element("p", {}, "A trace is written by ", element("code", {}, "--trace FILE"), " of ", element("code", {}, "outrider run"), ", ", element("code", {}, "bench"), " and ", element("code", {}, "demo"), ". Open one with the button above, or drop it here."),
    );

  return { problems, of, nothing };
})();
