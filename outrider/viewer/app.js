// What is shown: state, the address's part after #, keys. A view is a function of the state.
"use strict";

(() => {
  const { element, number, sentence } = Dom;
  const F = Figures;
  const VIEWS = { step: ["Step through", StepView], race: ["Race", RaceView], tree: ["Tree", TreeView], text: ["Over the text", TextView], compare: ["Compare", CompareView] };
  const WITH_ROUNDS = ["step", "tree", "text"];
  const $ = (id) => document.getElementById(id);
  const state = { traces: [], sequences: [], sequence: null, round: null, index: 0, phase: "commit", view: "step", node: null, lanes: null, prefill: false };

  // ---- opening --------------------------------------------------------------------------------------------------------

  function open(files) {
    for (const [name, text] of files) state.traces.push(Trace.read(name, text));
    state.sequences = state.traces.flatMap((trace, t) => trace.sequences.map((s) => Object.assign(s, { t })));
    const labels = state.sequences.map(label);
    state.sequences.forEach((s, i) => {
      const twice = labels.filter((other) => other === labels[i]).length > 1;
      s.label = labels[i] + (twice ? `, sequence ${s.number}` : "");
    });
    $("problems").replaceChildren(...About.problems(state.traces));
    $("sequences").replaceChildren(...state.sequences.map((s, i) => element("option", { value: i }, s.label)));
  }

  function label(s) {
    const parts = [s.drafter === "none" ? "plain decoding" : s.drafterName];
    if (s.drafter !== "none" && s.draft !== undefined) parts.push(`draft ${s.draft}`);
    if (s.options?.shape === "tree") parts.push("tree");
    if (s.batch > 1) parts.push(`batch ${s.batch}`);
    if (s.category) parts.push(s.category);
    if (s.promptNumber !== undefined && state.traces[s.t].sequences.length > 1) parts.push(`prompt ${s.promptNumber + 1}`);
    if (s.repetition) parts.push(`repetition ${s.repetition + 1}`);
    if (new Set(state.sequences.map((other) => other.target)).size > 1) parts.push(s.target.split("/").pop());
    return (state.traces.length > 1 ? `${s.trace}: ` : "") + parts.join(", ");
  }

  // ---- going somewhere ------------------------------------------------------------------------------------------------

  const actions = {
    go(changes) {
      const before = { sequence: state.sequence, index: state.index };
      Object.assign(state, changes);
      settle(before, changes);
      remember();
      render();
      announce(before, changes);
    },
    choose: (node) => actions.go({ node }),
    open: (sequence) => actions.go({ sequence, index: 0, view: "step" }),
    lane(sequence, wanted) {
      const lanes = new Set(state.lanes);
      if (wanted) lanes.add(sequence);
      else if (lanes.size > 1) lanes.delete(sequence);
      actions.go({ lanes: state.candidates.filter((s) => lanes.has(s)) });
    },
  };

  /** Make the state one that can be shown. */
  function settle(before, changes) {
    if (!state.sequences.length) return;
    state.sequence ??= state.sequences.find((s) => s.drafter !== "none") ?? state.sequences[0];
    const count = state.sequence.rounds.length;
    state.index = Math.max(0, Math.min(state.index, count - 1));
    state.round = state.sequence.rounds[state.index];
    const moved = state.sequence !== before.sequence || state.index !== before.index;
    if (moved && !("node" in changes)) state.node = null;
    if (state.node !== null && !(state.node >= 0 && state.node < state.round.tokens.length)) state.node = null;
    if (state.sequence !== before.sequence || !state.candidates) {
      state.candidates = state.sequences.filter((s) => s.question === state.sequence.question);
      if (!state.lanes?.every((s) => state.candidates.includes(s))) state.lanes = null;
      const plain = state.candidates.find((s) => s.drafter === "none");
      const other = state.sequence.drafter === "none" ? state.candidates.find((s) => s.drafter !== "none") : state.sequence;
      state.lanes ??= [...new Set([plain, other ?? state.sequence])].filter(Boolean);
    }
    if (!(state.view in VIEWS)) state.view = "step";
    if (!StepView.PHASES.includes(state.phase)) state.phase = "commit";
  }

  const move = (by) => actions.go({ index: state.index + by, phase: "commit" });

  function step(by) {
    const at = StepView.PHASES.indexOf(state.phase) + by;
    const name = StepView.PHASES[at];
    if (state.view !== "step") return move(by);
    if (name) return actions.go({ phase: name });
    const index = state.index + Math.sign(by);
    if (index < 0 || index >= state.sequence.rounds.length) return;
    actions.go({ index, phase: by > 0 ? "draft" : "commit" });
  }

  function chooseBy(by) {
    const size = state.round.tokens.length;
    if (size > 1) actions.choose(Math.max(1, Math.min(size - 1, (state.node ?? (by > 0 ? 0 : size)) + by)));
  }

  // ---- the address ------------------------------------------------------------------------------------------------------

  /** The link to what is shown: everything counts from 1, but sequences have the trace's numbers. */
  function remember() {
    if (!state.sequence) return;
    const parts = [["view", state.view], ["trace", state.sequence.t + 1], ["sequence", state.sequence.number], ["round", F.roundNumber(state.round)]];
    if (state.view === "step" && state.phase !== "commit") parts.push(["step", state.phase]);
    if (state.node !== null) parts.push(["token", state.node]);
    const hash = "#" + parts.map(([name, value]) => `${name}=${value}`).join("&");
    if (location.hash !== hash) history.replaceState(null, "", hash);
  }

  function recall() {
    const given = new URLSearchParams(location.hash.slice(1));
    const whole = (name) => (/^\d+$/.test(given.get(name) ?? "") ? Number(given.get(name)) : null);
    const trace = (whole("trace") ?? 1) - 1;
    const sequence = state.sequences.find((s) => s.t === trace && (whole("sequence") === null || s.number === whole("sequence")));
    const chosen = given.has("sequence") || given.has("trace") ? sequence : null;
    const round = whole("round");
    const rounds = (chosen ?? state.sequence ?? state.sequences.find((s) => s.drafter !== "none") ?? state.sequences[0])?.rounds ?? [];
    const found = round === null ? 0 : rounds.findIndex((r) => F.roundNumber(r) === round);
    return {
      ...(chosen ? { sequence: chosen } : {}),
      index: found < 0 ? rounds.length - 1 : found,
      view: given.get("view") ?? "step",
      phase: given.get("step") ?? "commit",
      node: whole("token"),
    };
  }

  // ---- showing ------------------------------------------------------------------------------------------------------------

  function render() {
    const main = $("main");
    document.body.dataset.view = state.view;
    $("controls").hidden = !state.sequence || !WITH_ROUNDS.includes(state.view);
    $("views").replaceChildren(...Object.entries(VIEWS).map(([name, [title]]) => element("a", { href: `#view=${name}`, "data-key": `view-${name}`, "aria-current": name === state.view ? "page" : null, onclick: (event) => (event.preventDefault(), actions.go({ view: name })) }, title)));
    if (!state.sequence) return main.replaceChildren(About.nothing());
    RaceView.stop();
    const key = document.activeElement?.dataset?.key;
    const scrolled = [...main.querySelectorAll(".scroll")].map((box) => [box.scrollLeft, box.scrollTop]);
    const { sequence, round } = state;
    Object.assign(main.dataset, { trace: sequence.trace, sequence: sequence.number });
    main.replaceChildren(VIEWS[state.view][1].render(state, actions));
    main.querySelectorAll(".scroll").forEach((box, i) => scrolled[i] && ([box.scrollLeft, box.scrollTop] = scrolled[i]));
    if (key) document.querySelector(`[data-key="${key}"]`)?.focus({ preventScroll: true });
    showPlace(sequence, round);
    if (main.dataset.about !== sequence.label) {
      main.dataset.about = sequence.label;
      $("about").replaceChildren(...About.of(sequence, state.traces[sequence.t]).filter(Boolean));
    }
  }

  function showPlace(sequence, round) {
    $("sequences").value = state.sequences.indexOf(sequence);
    const slider = $("slider");
    slider.max = sequence.rounds.length - 1;
    slider.value = state.index;
    const last = sequence.rounds[sequence.rounds.length - 1];
    slider.setAttribute("aria-valuetext", `Round ${F.roundNumber(round)} of ${F.roundNumber(last)}`);
    $("place").dataset.round = round.number;
    $("place").replaceChildren("Round ", number("round", F.whole(F.roundNumber(round))), " of ", number("last-round", F.whole(F.roundNumber(last))));
    for (const id of ["first", "previous"]) $(id).disabled = state.index === 0;
    for (const id of ["last", "next"]) $(id).disabled = state.index === sequence.rounds.length - 1;
  }

  /** Tell in words what changed, for those who do not see it. */
  function announce(before, changes) {
    const { sequence, round } = state;
    if (!sequence || !WITH_ROUNDS.includes(state.view)) return;
    if (state.node !== null && "node" in changes) return say(Words.plain(Words.why(sequence, round, state.node)));
    if ("phase" in changes && state.phase !== "commit") {
      const moved = state.index !== before.index ? `Round ${F.roundNumber(round)}. ` : "";
      return say(moved + Words.plain(Words.steps(sequence, round)[state.phase]));
    }
    say(Words.plain(Words.summary(sequence, round)));
  }

  const say = (text) => ($("live").textContent = text);

  // ---- finding ------------------------------------------------------------------------------------------------------------

  /** Go to a round by its number, or to the next place in the output where a text stands. */
  function find(sought) {
    const { rounds, texts } = state.sequence;
    if (/^\d+$/.test(sought.trim())) {
      const index = rounds.findIndex((r) => F.roundNumber(r) === Number(sought));
      if (index < 0) return say(`There is no round ${sought.trim()}`);
      return actions.go({ index, phase: "commit" });
    }
    let text = "";
    const starts = rounds.map((r) => {
      const start = text.length;
      text += r.emitted.map((id) => texts.get(id) ?? "").join("");
      return start;
    });
    const low = text.toLowerCase();
    const from = starts[state.index + 1] ?? text.length;
    let at = low.indexOf(sought.toLowerCase(), from);
    if (at < 0) at = low.indexOf(sought.toLowerCase());
    if (at < 0) {
      $("sought").setCustomValidity("not in this text");
      $("sought").reportValidity();
      return say(`${sought} is not in this text`);
    }
    actions.go({ index: starts.findLastIndex((start) => start <= at), phase: "commit" });
  }

  // ---- buttons, keys, files -----------------------------------------------------------------------------------------------

  const THEMES = ["light dark", "light", "dark"];

  function theme(next) {
    const at = THEMES.indexOf(document.documentElement.style.colorScheme || THEMES[0]);
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.style.colorScheme = next ?? (at === 0 ? (dark ? "light" : "dark") : THEMES[3 - at]);
    try {
      localStorage.setItem("outrider-theme", document.documentElement.style.colorScheme);
    } catch {} // a page from disk may not be allowed to keep anything
    if (!next) render(); // canvases have their colours painted in
  }

  async function copy() {
    try {
      await navigator.clipboard.writeText(location.href);
      say("The link is copied");
      $("copy").textContent = "Copied";
    } catch {
      prompt("A link to this round:", location.href);
    }
    setTimeout(() => ($("copy").textContent = "Link"), 1500);
  }

  const KEYS = {
    ArrowRight: (event) => (event.shiftKey ? move(1) : step(1)),
    ArrowLeft: (event) => (event.shiftKey ? move(-1) : step(-1)),
    ArrowDown: () => chooseBy(1),
    ArrowUp: () => chooseBy(-1),
    PageDown: () => move(1),
    PageUp: () => move(-1),
    Home: () => move(-Infinity),
    End: () => move(Infinity),
    "/": () => $("sought").focus(),
    "?": () => $("keys").showModal(),
    t: () => theme(),
    c: () => copy(),
  };
  Object.keys(VIEWS).forEach((name, i) => (KEYS[String(i + 1)] = () => actions.go({ view: name })));

  function onkey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || $("keys").open) return;
    const target = event.target;
    if (target.matches("select, textarea, input:not([type=range]):not([type=checkbox])")) {
      if (event.key === "Escape") target.blur();
      return;
    }
    if (target.matches("input[type=range]") && event.key.startsWith("Arrow") && state.view === "race") return;
    if (event.key === " " && state.view === "race" && !target.matches("button, input, summary")) {
      event.preventDefault();
      return RaceView.toggle();
    }
    if (!(event.key in KEYS) || !state.sequence) return;
    if (event.key.length > 1 && !WITH_ROUNDS.includes(state.view)) return;
    event.preventDefault();
    KEYS[event.key](event);
  }

  async function take(files) {
    open(await Promise.all([...files].map(async (file) => [file.name, await file.text()])));
    const fresh = state.sequences.find((s) => s.t === state.traces.length - 1 && s.drafter !== "none");
    actions.go({ candidates: null, ...(fresh ? { sequence: fresh, index: 0 } : {}) });
  }

  function listen() {
    document.addEventListener("keydown", onkey);
    addEventListener("hashchange", () => location.hash !== "#main" && actions.go(recall())); // that one skips to the content
    addEventListener("resize", () => ["race", "text"].includes(state.view) && state.sequence && render());
    $("sequences").addEventListener("change", (event) => actions.go({ sequence: state.sequences[event.target.value], index: 0 }));
    $("slider").addEventListener("input", (event) => actions.go({ index: Number(event.target.value), phase: "commit" }));
    $("find").addEventListener("submit", (event) => {
      event.preventDefault();
      if ($("sought").value.trim()) find($("sought").value);
    });
    $("sought").addEventListener("input", () => $("sought").setCustomValidity(""));
    const buttons = { first: () => move(-Infinity), previous: () => move(-1), back: () => step(-1), forward: () => step(1), next: () => move(1), last: () => move(Infinity), theme: () => theme(), copy, help: () => $("keys").showModal() };
    for (const [id, act] of Object.entries(buttons)) $(id).addEventListener("click", () => act());
    $("open").addEventListener("change", (event) => take(event.target.files));
    document.addEventListener("dragover", (event) => event.preventDefault());
    document.addEventListener("drop", (event) => {
      event.preventDefault();
      if (event.dataTransfer.files.length) take(event.dataTransfer.files);
    });
  }

  try {
    theme(localStorage.getItem("outrider-theme") ?? "light dark");
  } catch {
    theme("light dark");
  }
  open([...document.querySelectorAll("script[type='application/x-ndjson']")].map((script) => [script.dataset.name, script.textContent]));
  listen();
  actions.go(recall());
})();
