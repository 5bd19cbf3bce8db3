// Reads trace files (docs/trace.md). What can be read is read; what cannot is told in `problems`.
"use strict";

const Trace = (() => {
  const NEWEST = 2;

  /** {name, header, sequences, problems} of a trace file's text. */
  function read(name, text) {
    const problems = [];
    const lines = text.split("\n");
    while (lines.length && !lines[lines.length - 1].trim()) lines.pop();
    if (!lines.length) {
      problems.push(`${name} is empty: nothing was written to it.`);
      return { name, header: {}, sequences: [], problems };
    }
    const all = lines.length;
    const header = readHeader(name, lines, problems);
    const rounds = readRounds(lines, all - lines.length + 1, problems);
    if (!rounds.length) problems.push("There are no rounds in it, so there is nothing to step through.");
    return { name, header, sequences: divide(name, header, rounds, problems), problems };
  }

  /** The header; takes it off `lines` if it is there. */
  function readHeader(name, lines, problems) {
    const first = parsed(lines[0]);
    if (!isObject(first) || !("outrider_trace" in first)) {
      problems.push(`${name} does not begin with a trace's header: it may be no trace of Outrider, or its beginning is lost.`);
      if (!isRound(first)) lines.shift();
      return {};
    }
    lines.shift();
    const version = first.outrider_trace;
    if (!(Number.isInteger(version) && version >= 1 && version <= NEWEST)) {
      problems.push(
        `This is a trace of version ${version}; this page knows versions up to ${NEWEST}. ` +
          "What it understands is shown, and may be incomplete. A newer Outrider shows all of it.",
      );
    }
    return first;
  }

  /** The rounds in `lines`, the first of which is the file's line `first`. */
  function readRounds(lines, first, problems) {
    const rounds = [];
    const bad = [];
    lines.forEach((line, i) => {
      const value = parsed(line);
      if (isRound(value)) rounds.push(value);
      else bad.push(first + i);
    });
    if (lines.length && bad[bad.length - 1] === first + lines.length - 1) {
      bad.pop();
      problems.push("The last line is cut short, as after an interruption. All rounds before it are shown.");
    }
    if (bad.length === 1) problems.push(`Line ${bad[0]} is not a round. It is left out.`);
    if (bad.length > 1) {
      const some = bad.slice(0, 5).join(", ");
      problems.push(`${bad.length} lines are not rounds (${some}${bad.length > 5 ? ", and more" : ""}). They are left out.`);
    }
    return rounds;
  }

  function parsed(line) {
    try {
      return JSON.parse(line);
    } catch {
      return undefined;
    }
  }

  const isObject = (x) => typeof x === "object" && x !== null && !Array.isArray(x);
  const isNumber = (x) => typeof x === "number";
  const areWhole = (x) => Array.isArray(x) && x.every(Number.isInteger);
  const areNumbers = (x, orNull) => Array.isArray(x) && x.every((v) => isNumber(v) || (orNull && v === null));

  /** Whether a line has all that the page shows, in the right shapes. */
  function isRound(r) {
    if (!isObject(r) || !areWhole(r.tokens) || !areWhole(r.parents) || !areWhole(r.path) || !areWhole(r.emitted)) return false;
    const n = r.tokens.length;
    return (
      n > 0 &&
      r.parents.length === n &&
      r.parents.every((parent, i) => (i ? parent >= 0 && parent < i : parent === -1)) &&
      r.path[0] === 0 &&
      r.path.every((node, i) => node < n && (!i || r.parents[node] === r.path[i - 1])) &&
      r.emitted.length <= r.path.length &&
      areNumbers(r.p) && (r.p.length === n || r.p.length === 0) &&
      areNumbers(r.q, true) && r.q.length === n &&
      Array.isArray(r.tests) && r.tests.every((t) => isObject(t) && t.node > 0 && t.node < n && isNumber(t.probability)) &&
      isObject(r.times) && Object.values(r.times).every(isNumber) &&
      [r.sequence, r.number, r.context, r.rows, r.sequences].every(Number.isInteger) &&
      typeof r.rule === "string" && typeof r.drafter === "string"
    );
  }

  /** The rounds by sequence, each with what the header says about it and the texts of its tokens. */
  function divide(name, header, rounds, problems) {
    const found = new Map();
    for (const r of rounds) {
      if (!found.has(r.sequence)) found.set(r.sequence, { number: r.sequence, rounds: [], texts: new Map() });
      const own = found.get(r.sequence);
      own.rounds.push(r);
      for (const [id, text] of Object.entries(isObject(r.texts) ? r.texts : {})) own.texts.set(Number(id), String(text));
    }
    const sequences = [...found.values()].sort((a, b) => a.number - b.number);
    const gaps = sequences.filter((s) => s.rounds.some((r, i) => r.number !== s.rounds[0].number + i) || s.rounds[0].number);
    if (gaps.length) problems.push("Some rounds are missing: the numbers of the others are as they were written.");
    if (sequences.length && sequences.every((s) => !s.texts.size)) {
      problems.push("This trace has no texts of tokens (it is of version 1, or its model has no tokenizer): tokens are shown by number.");
    }
    for (const s of sequences) describe(s, name, header);
    return sequences;
  }

  function describe(s, name, header) {
    const about = (Array.isArray(header.sequences) && header.sequences[s.number]) || {};
    const first = s.rounds[0];
    s.trace = name;
    s.drafter = first.drafter;
    s.drafterName = String(about.drafter ?? header.drafter?.name ?? first.drafter).split("/").pop(); // of a path or a hub id, the end
    s.target = about.target ?? header.target?.name ?? "";
    s.draft = about.draft ?? (about.drafter === "none" ? 0 : header.draft);
    s.batch = about.batch;
    s.repetition = about.repetition;
    s.options = about.options ?? (about.drafter ? undefined : header.drafter?.options);
    s.temperature = header.sampling?.temperature;
    s.category = typeof about.prompt === "string" ? about.prompt : undefined;
    s.promptNumber = Number.isInteger(about.prompt) ? about.prompt : undefined;
    s.prompt = isObject(header.prompts) ? header.prompts[about.prompt] : undefined;
    // What is compared must be one target's answers to one prompt.
    s.question = JSON.stringify([s.target.split("/").pop(), s.prompt ?? [first.context, first.tokens[0]]]);
  }

  return { read, NEWEST };
})();
