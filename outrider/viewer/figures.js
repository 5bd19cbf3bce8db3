// Every number and every verdict that the page shows, as functions of rounds (docs/trace.md). No other script computes any.
"use strict";

const Figures = (() => {
  const PHASES = ["propose", "forward", "probabilities", "accept", "cut", "commit", "observe"];

  // ---- one round --------------------------------------------------------------------------------------------------

  const roundNumber = (r) => r.number + 1; // people count from 1, files from 0
  const proposed = (r) => r.tokens.length - 1;
  const accepted = (r) => Math.min(r.path.length - 1, r.emitted.length);
  const isChain = (r) => r.parents.every((parent, i) => parent === i - 1);
  const nanoseconds = (r, phase) => r.times[phase] ?? 0;
  const duration = (r) => PHASES.reduce((sum, phase) => sum + nanoseconds(r, phase), 0); // ns, without the prefill

  /** What the emitted token that was not drafted is: "recovered", "bonus", "plain"; null where there is none. */
  function own(r) {
    if (r.emitted.length <= accepted(r)) return null;
    if (!proposed(r)) return "plain";
    return r.parents.indexOf(r.path[r.path.length - 1], 1) > 0 ? "recovered" : "bonus";
  }

  /** The node that the recovered token replaces: the first child of the last kept node. */
  const replaced = (r) => r.parents.indexOf(r.path[r.path.length - 1], 1);

  function depths(r) {
    const found = [0];
    for (let i = 1; i < r.parents.length; i++) found.push(found[r.parents[i]] + 1);
    return found;
  }

  /** The nodes that a node sees beside the context: its ancestors and itself, from the anchor down. */
  function sees(r, node) {
    const path = [];
    for (let i = node; i >= 0; i = r.parents[i]) path.unshift(i);
    return path;
  }

  /**
   * What became of each node: "anchor"; "accepted"; "cut" (kept, but the text had ended); "refused"; "below" (it follows a refused
   * one); "spared" (a sibling had been kept before its turn); "unchecked" (the pass failed).
   */
  function outcomes(r) {
    if (!judged.has(r)) judged.set(r, judge(r));
    return judged.get(r);
  }

  const judged = new WeakMap();

  function judge(r) {
    const place = new Map(r.path.map((node, i) => [node, i]));
    const tested = new Set(r.tests.map((test) => test.node));
    const last = r.path[r.path.length - 1];
    return r.tokens.map((_, node) => {
      if (!node) return "anchor";
      if (r.error) return "unchecked";
      if (place.has(node)) return place.get(node) <= accepted(r) ? "accepted" : "cut";
      const parent = r.parents[node];
      if (!place.has(parent)) return "below";
      return parent === last || tested.has(node) ? "refused" : "spared";
    });
  }

  const test = (r, node) => r.tests.find((t) => t.node === node);

  /** p of each emitted token under the target: of drafted ones at their node, of the last by itself; null where the trace has none. */
  function emittedP(r) {
    const kept = accepted(r);
    return r.emitted.map((_, i) => (i < kept ? (r.p[r.path[i + 1]] ?? null) : (r.p_next ?? null)));
  }

  /** Places of a round's emitted tokens in the output, from 1: the first and the last. */
  function places(sequence, index) {
    const r = sequence.rounds[index];
    const first = r.context - sequence.rounds[0].context + 1;
    return [first, first + r.emitted.length - 1];
  }

  // ---- several rounds -----------------------------------------------------------------------------------------------

  /** The figures of some rounds, as `outrider.statistics` has them. */
  function statistics(rounds) {
    const s = { passes: rounds.length, rows: 0, proposed: 0, accepted: 0, emitted: 0, seconds: 0, prefill: 0, forward: 0, propose: 0 };
    for (const r of rounds) {
      s.rows += r.tokens.length;
      s.proposed += proposed(r);
      s.accepted += accepted(r);
      s.emitted += r.emitted.length;
      s.seconds += duration(r) / 1e9;
      s.prefill += nanoseconds(r, "prefill") / 1e9;
      s.forward += nanoseconds(r, "forward") / 1e9;
      s.propose += nanoseconds(r, "propose") / 1e9;
    }
    s.rest = s.seconds - s.forward - s.propose;
    s.perPass = s.passes ? s.emitted / s.passes : null;
    s.rate = s.proposed ? s.accepted / s.proposed : null;
    s.draftPerPass = s.passes ? s.proposed / s.passes : null;
    s.speed = s.seconds ? s.emitted / s.seconds : null;
    return s;
  }

  /** Seconds at which each round ends; the first begins at 0, or after the prefill where that counts. */
  function ends(rounds, withPrefill) {
    let at = 0;
    return rounds.map((r) => (at += (duration(r) + (withPrefill ? nanoseconds(r, "prefill") : 0)) / 1e9));
  }

  /** How many rounds have ended at `seconds`, of those that end at `ends`. */
  function endedBy(ends, seconds) {
    let low = 0;
    let high = ends.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (ends[middle] <= seconds) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** Tokens emitted after 0, 1, ... rounds. */
  function grown(rounds) {
    let sum = 0;
    return [0, ...rounds.map((r) => (sum += r.emitted.length))];
  }

  /** The stretches of `width` rounds with the fewest and the most tokens per pass: {index, width, perPass} of each; null for short texts. */
  function stretches(rounds, width = 8) {
    if (rounds.length < 2 * width) return null;
    const tokens = grown(rounds);
    const found = [];
    for (let i = 0; i + width <= rounds.length; i++) found.push({ index: i, width, perPass: (tokens[i + width] - tokens[i]) / width });
    const best = (better) => found.reduce((a, b) => (better(b.perPass, a.perPass) ? b : a));
    return { hard: best((a, b) => a < b), easy: best((a, b) => a > b) };
  }

  /** For each depth from 1: in how many rounds a token was drafted there below a kept path, and in how many it was kept. */
  function byDepth(rounds) {
    const reached = [];
    const kept = [];
    for (const r of rounds) {
      const count = accepted(r);
      for (let d = 0; d < count; d++) {
        reached[d] = (reached[d] ?? 0) + 1;
        kept[d] = (kept[d] ?? 0) + 1;
      }
      if (r.parents.indexOf(r.path[count], 1) > 0 && r.emitted.length > count) reached[count] = (reached[count] ?? 0) + 1;
    }
    return Array.from(reached, (all, d) => ({ depth: d + 1, reached: all ?? 0, kept: kept[d] ?? 0 }));
  }

  /** The first place (from 1) at which two outputs differ; null where one is the beginning of the other. */
  function parting(one, other) {
    const [a, b] = [one, other].map((s) => s.rounds.flatMap((r) => r.emitted));
    for (let i = 0; i < Math.min(a.length, b.length); i++) if (a[i] !== b[i]) return i + 1;
    return null;
  }

  /** Speed of `mine` over that of `base`; null where one is unknown. */
  const ratio = (mine, base) => (mine.speed && base.speed ? mine.speed / base.speed : null);

  /** The probability of a log-probability; null stands for minus infinity. */
  const chance = (logprob) => (logprob === null ? 0 : Math.exp(logprob));

  // ---- as text --------------------------------------------------------------------------------------------------------

  /** A probability; never rounded to 0 or 1. */
  function probability(x) {
    if (x === 0 || x === 1) return String(x);
    if (x > 0.9995) return "> 0.999";
    return x < 0.0001 ? x.toExponential(1).replace("-", "\u2212") : x.toPrecision(3);
  }

  const milliseconds = (ns) => (ns < 995e3 ? (ns / 1e6).toFixed(3) : ns < 99.95e6 ? (ns / 1e6).toFixed(1) : (ns / 1e6).toFixed(0));
  const seconds = (x) => (x < 9.995 ? x.toFixed(2) : x.toFixed(1));
  const decimal = (x) => x.toFixed(2);
  const perSecond = (x) => x.toFixed(1);
  const percent = (x) => (100 * x).toFixed(0);
  const whole = (x) => String(x);

  return {
    PHASES, roundNumber, proposed, accepted, isChain, nanoseconds, duration, own, replaced, depths, sees, outcomes, test, emittedP, places,
    statistics, ends, endedBy, grown, stretches, byDepth, parting, ratio, chance,
    probability, milliseconds, seconds, decimal, perSecond, percent, whole,
  };
})();
