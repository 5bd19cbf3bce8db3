// What happened in a round, in sentences. A sentence is a list of texts, tokens {token}, names {verbatim} and numbers {name, text} of `Figures`.
"use strict";

const Words = (() => {
  const F = Figures;
  const number = (name, text) => ({ name, text });
  /** "p = 0.5", or "p > 0.999". */
  const is = (letter, name, x) => [letter, F.probability(x).startsWith(">") ? "\u00a0" : "\u00a0=\u00a0", number(name, F.probability(x))];
  const p = (r, node) => is("p", "p", r.p[node]);
  const q = (r, node) => is("q", "q", r.q[node]);
  const pNext = (r) => (typeof r.p_next === "number" ? [" (", ...is("p", "p-next", r.p_next), ")"] : []);
  const verbatim = (text) => ({ verbatim: text }); // names, which may have digits that are no figures
  const nth = (node) => number("node", F.whole(node));

  /** A token's text as it can be read alone; its id where the trace has no text. */
  function readable(sequence, id) {
    const text = sequence.texts.get(id);
    if (text === undefined || text === "") return `#${id}`;
    if (/^ +$/.test(text)) return "\u2423".repeat(text.length);
    return text.replaceAll("\n", "\u23ce").replaceAll("\t", "\u21e5").replaceAll("\r", "\u240d");
  }

  const token = (sequence, id) => ({ token: readable(sequence, id) });
  const nodeToken = (sequence, r, node) => token(sequence, r.tokens[node]);
  const nextToken = (sequence, r) => token(sequence, r.emitted[r.emitted.length - 1]);
  const many = (count, one, more = one + "s") => (count === 1 ? one : more);

  const OUTCOMES = {
    anchor: { mark: "\u25cf", word: "anchor", meaning: "the last token of the text so far; the draft goes on from it" },
    drafted: { mark: "\u25cb", word: "drafted", meaning: "proposed by the drafter" },
    accepted: { mark: "\u2713", word: "accepted", meaning: "drafted and kept" },
    refused: { mark: "\u2717", word: "refused", meaning: "drafted and not kept" },
    below: { mark: "\u2193", word: "fell too", meaning: "followed a refused token, so it fell with it" },
    spared: { mark: "\u2013", word: "not needed", meaning: "a sibling had been kept before its turn" },
    cut: { mark: "\u2702", word: "cut off", meaning: "kept, but the text had ended before it" },
    unchecked: { mark: "?", word: "unchecked", meaning: "the pass of the target failed" },
    recovered: { mark: "\u21bb", word: "recovered", meaning: "the target's own, after a refusal" },
    bonus: { mark: "+", word: "bonus", meaning: "the target's own, after a draft that was kept whole" },
    plain: { mark: "\u00b7", word: "plain", meaning: "the target's own, in a round without a draft" },
  };

  // ---- why a node was kept or not -------------------------------------------------------------------------------------

  /** Why a node had its outcome, by what its rule really tested. */
  function why(sequence, r, node) {
    const outcome = F.outcomes(r)[node];
    const name = ["Token ", nth(node), " ", nodeToken(sequence, r, node)];
    if (outcome === "anchor") return [nodeToken(sequence, r, 0), " is the last token of the text so far."];
    if (outcome === "unchecked") return [...name, " was not checked: the pass of the target failed."];
    if (outcome === "spared") return [...name, " was not looked at: another token in its place had been kept before its turn."];
    if (outcome === "below") return [...name, " fell with ", ...fallenWith(sequence, r, node), ", which it follows.", ...tried(r, node)];
    const cut = outcome === "cut" ? [" But the text had ended before it."] : [];
    const verb = outcome === "refused" ? " was refused: " : " was kept: ";
    return [...name, verb, ...reason(sequence, r, node, outcome === "refused"), ...replacement(sequence, r, node), ...cut];
  }

  /** The refused token nearest above a node. */
  function fallenWith(sequence, r, node) {
    let above = r.parents[node];
    while (!r.path.includes(r.parents[above])) above = r.parents[above];
    return ["token ", number("fallen-with", F.whole(above)), " ", nodeToken(sequence, r, above)];
  }

  /** Under rules that look at whole paths, longest first, what was tested with a node that fell. */
  function tried(r, node) {
    const test = F.test(r, node);
    if (!test || !hasDraw(test)) return [];
    return [" The path down to it had been tried before: probability ", probabilityOf(test), ", drawn ", draw(test), "."];
  }

  function reason(sequence, r, node, refused) {
    const test = F.test(r, node);
    if (r.rule === "typical") {
      return [`the target finds it ${refused ? "im" : ""}plausible (`, ...p(r, node), "), by a rule that is not exact."];
    }
    if (r.rule === "coupled") return coupledReason(sequence, r, node, refused);
    if (refused && r.p[node] === 0) return impossible(sequence, r, node);
    if (r.rule === "block" || (r.rule === "traversal" && isDrawn(r))) return pathReason(r, node, test, refused);
    if (!test) return ["it was not tried, since the drafter cannot have drawn it there."];
    return singleReason(r, node, test);
  }

  const isDrawn = (r) => r.q.some((value) => value !== null);
  const hasDraw = (test) => typeof test.draw === "number";
  const probabilityOf = (test) => number("test", F.probability(test.probability));
  const draw = (test) => number("draw", F.probability(test.draw));
  const drawn = (test) => (hasDraw(test) ? [", drawn ", draw(test), test.kept ? ", which is below it." : ", which is not below it."] : ["."]);

  function coupledReason(sequence, r, node, refused) {
    const given = ["the target gives it ", ...p(r, node)];
    const chosen = sequence.temperature === 0 ? "likeliest token" : "choice under this seed's noise";
    if (refused) return [...given, `, but the target's ${chosen} here was another.`];
    return [...given, `, and it is the target's own ${chosen} here.`];
  }

  function impossible(sequence, r, node) {
    if (sequence.temperature === 0) {
      return ["the target gives it ", ...p(r, node), ", for without sampling only the target's likeliest token counts."];
    }
    return ["the target gives it ", ...p(r, node), " here, so it cannot stand."];
  }

  /** Rules that test one token after the other. */
  function singleReason(r, node, test) {
    const first = r.parents.indexOf(r.parents[node]) === node;
    const given = ["the target gave it ", ...p(r, node)];
    if (r.q[node] === null) {
      const how = first ? ", and a token chosen without chance is kept with just that probability" : rest(test);
      return [...given, how].flat().concat(drawn(test));
    }
    const both = [...given, ", the drafter ", ...q(r, node)];
    if (!first) return [...both, ...rest(test), ...drawn(test)];
    return [...both, ", so it is kept with probability min(1, p/q) = ", probabilityOf(test), ...drawn(test)];
  }

  const rest = (test) => ["; of what the refusals before it left, it is kept with probability ", probabilityOf(test)];

  /** Rules that test whole paths, longest first. */
  function pathReason(r, node, test, refused) {
    const given = ["the target gave it ", ...p(r, node)];
    if (r.q[node] !== null) given.push(", the drafter ", ...q(r, node));
    if (refused) {
      if (!test) return [...given, ". The path down to it was not tried, since nothing of it could be kept."];
      return [...given, ". The path down to it would be kept with probability ", probabilityOf(test), ...drawn(test)];
    }
    const end = r.path[r.path.length - 1];
    const tested = F.test(r, end);
    if (end !== node) return [...given, ". It is on the path that was kept, which ends with token ", number("path-end", F.whole(end)), "."];
    if (!tested) return [...given, "."];
    return [...given, ". The path that ends with it was kept with probability ", probabilityOf(tested), ...drawn(tested)];
  }

  /** After the first refused child of the last kept node: what came instead. */
  function replacement(sequence, r, node) {
    if (F.own(r) !== "recovered" || node !== F.replaced(r)) return [];
    return [" ", nextToken(sequence, r), " replaced it", ...source(sequence, r)];
  }

  /** Where the recovered token came from. */
  function source(sequence, r) {
    const chance = pNext(r);
    if (sequence.temperature === 0) return [", the target's own choice", ...chance, "."];
    if (r.rule === "coupled") return [", which this seed's noise picks from the target's law", ...chance, "."];
    if (r.lossy) return [", drawn from the target's law", ...chance, "."];
    return [", drawn from the residual, what the target gives beyond what was refused", ...chance, "."];
  }

  // ---- a round ----------------------------------------------------------------------------------------------------------

  /** One sentence for each step of a round. */
  function steps(sequence, r) {
    const count = F.proposed(r);
    const anchor = nodeToken(sequence, r, 0);
    const ms = (name, ns) => [number(name, F.milliseconds(ns)), " ms"];
    const nothing = r.budget?.nodes === 0 ? "was not asked" : "proposed nothing";
    return {
      draft: count
        ? ["The drafter ", verbatim(sequence.drafterName), " proposed ", number("proposed", F.whole(count)), ` ${many(count, "token")} after `, anchor, ", in ", ...ms("propose", F.nanoseconds(r, "propose")), "."]
        : r.drafter === "none"
          ? ["Plain decoding: nothing is drafted after ", anchor, "."]
          : ["The drafter ", verbatim(sequence.drafterName), ` ${nothing} after `, anchor, ", in ", ...ms("propose", F.nanoseconds(r, "propose")), "."],
      verify: [count ? "One pass of the target gave its probabilities for all of them at once: " : "One pass of the target gave its probabilities: ", number("rows", F.whole(r.tokens.length)), ` ${many(r.tokens.length, "row")}, `, ...ms("forward", F.nanoseconds(r, "forward")), "."],
      keep: r.error ? ["The pass failed: ", verbatim(r.error)] : [...verdict(sequence, r), " ", ...next(sequence, r)],
      commit: [
        number("emitted", F.whole(r.emitted.length)), ` ${many(r.emitted.length, "token")} joined the text from one pass, in `,
        ...ms("duration", F.duration(r)), " altogether", r.lossy ? ", by a LOSSY rule: this is not the target's own law." : ".",
        ...ending(r),
      ],
    };
  }

  function verdict(sequence, r) {
    const count = F.proposed(r);
    if (!count) return [];
    const kept = F.accepted(r);
    const refused = F.own(r) === "recovered" ? F.replaced(r) : 0;
    const head = [`The rule ${r.rule} kept `, number("accepted", F.whole(kept)), " of ", number("proposed", F.whole(count))];
    if (!refused) return [...head, "."];
    return [...head, "; token ", number("refused-first", F.whole(refused)), " ", nodeToken(sequence, r, refused), " was refused."];
  }

  function next(sequence, r) {
    const kind = F.own(r);
    if (!kind) return r.emitted.length ? ["The text ended with a drafted token."] : [];
    const chance = pNext(r);
    const it = nextToken(sequence, r);
    if (kind === "recovered") return [it, " replaced it", ...source(sequence, r)];
    if (kind === "bonus") return ["The path was kept to its end, so the same pass gave one token more: the bonus ", it, ...chance, "."];
    return ["The pass gave ", it, ...chance, "."];
  }

  const FINISH = {
    stop: " The text ends here: an end token or a stop text.",
    length: " The text ends here: no more tokens were allowed.",
    cancelled: " The text was broken off here.",
    error: " The text ends here: the pass failed.",
  };
  const ending = (r) => (r.finish ? [FINISH[r.finish] ?? ` The text ends here: ${r.finish}.`] : []);

  /** What the target found likeliest where the last token was drawn, before any processing; null where the trace does not say. */
  function favourites(sequence, r) {
    const entry = F.own(r) && r.logprobs?.[r.emitted.length - 1];
    if (!entry?.top?.length) return null;
    const each = entry.top.map(([id, logprob], i) => [i ? ", " : "", token(sequence, id), " ", number("favourite", F.probability(F.chance(logprob)))]);
    return ["Where ", nextToken(sequence, r), " came from, the target found likeliest, before any sampling parameter: ", ...each.flat(), "."];
  }

  /** One line for the whole round, for the live region. */
  function summary(sequence, r) {
    const s = steps(sequence, r);
    return ["Round ", number("round", F.whole(F.roundNumber(r))), ". ", ...s.keep, " ", ...s.commit];
  }

  /** A sentence as plain text. */
  const plain = (parts) => parts.map((part) => part.token !== undefined ? `\u2018${part.token}\u2019` : (part.verbatim ?? part.text ?? part)).join("");

  return { readable, OUTCOMES, why, steps, favourites, summary, plain, number, token, many };
})();
