// The same answer decoded in several ways on one axis of measured time, playable at true speed.
"use strict";

const RaceView = (() => {
  const { element, number } = Dom;
  const F = Figures;
  const TRACK = 30;
  const REBUILT = 160; // rounds whose text is shown after a jump
  let race = null;

  function render(state, actions) {
    const key = JSON.stringify([state.lanes.map((s) => [s.trace, s.number]), state.prefill]);
    const at = race && race.key === key ? race.at : Infinity; // at first all is there to read; playing begins anew
    stop();
    const plain = state.lanes.find((sequence) => sequence.drafter === "none");
    const lanes = state.lanes.map((sequence) => lane(sequence, state.prefill, plain));
    const total = Math.max(...lanes.map((l) => l.total), 1e-9);
    race = { key, lanes, at: Math.min(at, total), total, playing: false, speed: 1 };
    const view = element(
      "div",
      { class: "race-view" },
      element("h2", { class: "unseen" }, "One pass per token against many"),
      plain && state.lanes.length > 1 ? null : advice(),
      controls(state, actions),
      lanes.map((l) => l.element),
    );
    requestAnimationFrame(() => {
      if (!view.isConnected) return;
      lanes.forEach((l) => paint(l));
      show();
    });
    return view;
  }

  const advice = () =>
    element(
      "p",
      { class: "note" },
      "There is no plain decoding of this prompt beside it. ",
      element("code", {}, "outrider demo --view"), " has both; or trace the same prompt with ", element("code", {}, "-d none"),
      " and open both files: ", element("code", {}, "outrider view plain.jsonl drafted.jsonl"), ".",
    );

  function controls(state, actions) {
    race.button = element("button", { class: "main-button", "data-key": "play", onclick: toggle }, "Play");
    race.slider = element("input", { type: "range", min: 0, max: 1000, value: 0, "aria-label": "Time", oninput: () => seek((race.slider.value / 1000) * race.total) });
    race.clock = element("span", { class: "clock" });
    const speeds = element(
      "select",
      { "aria-label": "Speed of playing", onchange: (event) => (race.speed = Number(event.target.value)) },
      [[0.1, "a tenth of the speed"], [0.25, "a quarter of the speed"], [1, "true speed"], [4, "four times as fast"]].map(([value, name]) => element("option", { value, selected: value === 1 }, name)),
    );
    const prefill = element("label", {}, element("input", { type: "checkbox", checked: state.prefill, onchange: (event) => actions.go({ prefill: event.target.checked }) }), " count the prompt's prefill");
    const chosen = new Set(state.lanes);
    const lanes = state.candidates.length > 2
      ? element("details", { class: "choice" }, element("summary", {}, "What races"), state.candidates.map((s) => element("label", {}, element("input", { type: "checkbox", checked: chosen.has(s), onchange: (event) => actions.lane(s, event.target.checked) }), element("span", { "data-verbatim": true }, ` ${s.label}`))))
      : null;
    return element("section", { class: "card race-controls", "aria-label": "Playing" }, race.button, speeds, race.slider, race.clock, prefill, lanes, legend());
  }

  const legend = () =>
    element(
      "p",
      { class: "note" },
      "Each block is a round, as long as it took: ",
      [["propose", "drafting"], ["forward", "the target's pass"], ["rest", "the rest"]].map(([name, words], i) => [i ? ", " : "", element("span", { class: `swatch time-${name}`, "aria-hidden": "true" }), words]),
      ".",
    );

  function lane(sequence, prefill, plain) {
    const ends = F.ends(sequence.rounds, prefill);
    const s = F.statistics(sequence.rounds);
    const against = plain && plain !== sequence ? F.ratio(s, F.statistics(plain.rounds)) : null;
    const l = { sequence, ends, grown: F.grown(sequence.rounds), total: ends[ends.length - 1], shown: -1 };
    l.text = element("p", { class: "text lane-text", tabindex: 0, "aria-label": `Text of ${sequence.label}` });
    l.canvas = element("canvas", { class: "track", height: TRACK, "aria-hidden": "true" });
    l.now = element("p", { class: "lane-now" });
    l.element = element(
      "section",
      { class: "card lane", "data-trace": sequence.trace, "data-sequence": sequence.number, "aria-label": sequence.label },
      element("h3", { "data-verbatim": true }, sequence.label),
      element(
        "p",
        { class: "lane-figures" },
        number("emitted-all", F.whole(s.emitted)), " tokens, ", number("passes", F.whole(s.passes)), " passes, ", number("per-pass", F.decimal(s.perPass)), " tokens per pass; ",
        number("seconds", F.seconds(s.seconds), "s"), s.speed === null ? "" : [", ", number("speed", F.perSecond(s.speed)), " tokens/s"], " after a prefill of ", number("prefill", F.seconds(s.prefill), "s"), against === null ? "." : [": ", number("ratio", F.decimal(against)), " times the speed of plain decoding."],
      ),
      l.canvas,
      l.now,
      l.text,
    );
    return l;
  }

  /** The passes of a lane on the axis, painted once. */
  function paint(l) {
    const width = l.canvas.clientWidth;
    const scale = devicePixelRatio || 1;
    l.canvas.width = width * scale;
    l.canvas.height = TRACK * scale;
    const picture = document.createElement("canvas");
    picture.width = l.canvas.width;
    picture.height = l.canvas.height;
    const g = picture.getContext("2d");
    g.scale(scale, scale);
    const colours = Object.fromEntries(F.PHASES.map((phase) => [phase, Dom.colour(l.canvas, `--c-${phase}`)]));
    const x = (seconds) => (seconds / race.total) * width;
    l.sequence.rounds.forEach((r, i) => {
      let at = l.ends[i] - F.duration(r) / 1e9;
      const gap = x(F.duration(r) / 1e9) > 3 ? 1 : 0;
      for (const phase of F.PHASES) {
        const length = F.nanoseconds(r, phase) / 1e9;
        g.fillStyle = colours[phase];
        g.fillRect(x(at), 4, Math.max(x(length), 0.2), TRACK - 8);
        at += length;
      }
      if (gap) g.clearRect(x(l.ends[i]) - 1, 0, 1, TRACK);
    });
    l.picture = picture;
    l.ink = Dom.colour(l.canvas, "--ink");
  }

  function show() {
    for (const l of race.lanes) {
      const count = F.endedBy(l.ends, race.at);
      draw(l);
      if (count !== l.shown) write(l, count);
    }
    race.slider.value = String(Math.round((race.at / race.total) * 1000));
    race.slider.setAttribute("aria-valuetext", `${F.seconds(race.at)} seconds`);
    race.clock.replaceChildren(number("clock", F.seconds(race.at), "s"), " of ", number("total", F.seconds(race.total), "s"));
    race.button.textContent = race.playing ? "Pause" : "Play";
  }

  function draw(l) {
    if (!l.picture) return;
    const g = l.canvas.getContext("2d");
    const { width, height } = l.canvas;
    const x = Math.round((race.at / race.total) * width);
    g.clearRect(0, 0, width, height);
    g.globalAlpha = 0.28;
    g.drawImage(l.picture, 0, 0);
    g.globalAlpha = 1;
    if (x > 0) {
      g.clearRect(0, 0, x, height);
      g.drawImage(l.picture, 0, 0, x, height, 0, 0, x, height);
    }
    g.fillStyle = l.ink;
    g.fillRect(Math.min(x, width - 2), 0, 2, height);
  }

  /** The text after `count` rounds: what is new is added, after a jump its end is made anew. */
  function write(l, count) {
    const rounds = l.sequence.rounds;
    const adds = count > l.shown && l.shown >= 0 && count - l.shown < REBUILT;
    const from = adds ? l.shown : Math.max(0, count - REBUILT);
    const tokens = rounds.slice(from, count).flatMap((r) => StepView.emitted(l.sequence, r));
    if (adds) l.text.append(...tokens);
    else l.text.replaceChildren(...(from ? [element("span", { class: "ellipsis" }, "\u2026")] : []), ...tokens);
    l.text.scrollTop = l.text.scrollHeight;
    l.shown = count;
    const tokensSoFar = l.grown[count];
    l.now.replaceChildren(number("tokens-now", F.whole(tokensSoFar)), ` ${Words.many(tokensSoFar, "token")} after `, number("passes-now", F.whole(count)), ` ${Words.many(count, "pass", "passes")}`, ...(count === rounds.length ? [": done at ", number("done", F.seconds(l.total), "s")] : []));
  }

  function seek(seconds) {
    race.at = Math.max(0, Math.min(seconds, race.total));
    show();
  }

  function toggle() {
    if (!race) return;
    race.playing = !race.playing;
    if (!race.playing) return show();
    if (race.at >= race.total) race.at = 0;
    const own = race;
    let last = performance.now();
    const frame = (now) => {
      if (race !== own || !own.playing) return;
      own.at = Math.min(own.at + ((now - last) / 1000) * own.speed, own.total);
      last = now;
      if (own.at >= own.total) own.playing = false;
      show();
      if (own.playing) requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  function stop() {
    if (race) race.playing = false;
  }

  return { render, stop, toggle };
})();
