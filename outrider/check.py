"""Whether a pair of target and drafter fits, what it costs, and what speed-up to expect: measured, then computed.

Expected speed-up at acceptance rate a and draft length k: ``(1 - a^(k+1)) / (1 - a)`` tokens per pass (Leviathan et al. 2023)
over ``(c(k+1) + draft(k)) / c(1)``, where c(n) is the measured cost of a pass over n rows and draft(k) that of drafting k
tokens. The overhead of the loop itself is left out on both sides.
"""

from __future__ import annotations

import copy
import statistics
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle
from typing import Any, Iterator, Sequence

from . import kernels
from .decode import Sequence as Decoding
from .decode import close_sequence, open_sequence
from .drafters import Ask, Drafter
from .drafters.growth import TreeOptions
from .drafters.vocabulary import Translated, compare
from .errors import PromptError
from .kernels.choose import ROWS as ROWS_MEASURED
from .kernels.choose import cache_file, milliseconds
from .sampling import SamplingParams
from .targets.base import Slot, Target
from .tree import Budget, DraftTree

ROWS = (1, 2, 4, 8, 16)
DRAFTS = (1, 2, 3, 4, 6, 8, 12, 15)
RATES = (0.5, 0.6, 0.7, 0.8, 0.9)
REPEATS = 7
ASKED = (1, 8)
"""Draft lengths at which drafting is measured."""
WORTH = 1.05
"""Least expected speed-up that is called worth it: less than this drowns in the loop's own overhead."""

DEAR = 0.25
"""From this share of a plain pass on, a drafted token is called dear."""
CHEAP_TYPE, CHEAP_BITS, FEW_TOKENS = "q4_0", 4.8, 32768
"""What a cheaper copy is made of; weights of no more bits each are cheap already."""

TEXT = """\
The harbour master keeps a book in which every ship is entered with its name, its captain, the port it came from and the goods
it carries. In the year 1874 there were 312 entries, most of them barges with timber or coal; in 1912 there were 1,906. When the
railway came, the number fell again, because grain and wool could now be sent inland within a day. "We have more clerks than
ships," wrote the master in a letter of 3 May 1921, and asked for a smaller office. The reply is lost. What remains is a drawing
of the quay: six cranes, a row of sheds, a narrow house with a bell, and in front of it two children who sell fish from a cart.
A later hand has added prices in pencil (cod 4d, herring 1d, eel 6d) and the words: do not clean this slate before Friday.
"""


@dataclass(frozen=True)
class Costs:
    """Median milliseconds. rows: of a pass of the target over so many rows. draft: of proposing the first token; step: of each
    further one. context: tokens before them. proposed: how many tokens the drafter proposed on average, by how many were asked for.
    most: tokens that it can draft on a path.
    """

    context: int
    rows: dict[int, float]
    draft: float
    step: float
    proposed: dict[int, float] = field(default_factory=dict)
    most: int = DRAFTS[-1]

    def target(self, n: int) -> float:
        """A pass over n rows, between measured numbers of rows by a straight line."""
        known = sorted(self.rows)
        upper = next((k for k in known if k >= n), known[-1])
        lower = max((k for k in known if k <= n), default=known[0])
        if upper == lower:
            return self.rows[upper]
        return self.rows[lower] + (self.rows[upper] - self.rows[lower]) * (n - lower) / (upper - lower)

    def drafting(self, k: int) -> float:
        """Proposing k tokens."""
        return self.draft + (k - 1) * self.step

    def speedup(self, rate: float, k: int) -> float:
        """Expected speed over plain decoding when each drafted token is accepted with probability `rate`."""
        return (1 - rate ** (k + 1)) / (1 - rate) / ((self.target(k + 1) + self.drafting(k)) / self.target(1))

    @property
    def lengths(self) -> list[int]:
        """The draft lengths to compare."""
        return [k for k in DRAFTS if k <= self.most]

    def best(self, rate: float) -> tuple[int, float]:
        """The best draft length at this acceptance rate, and its expected speed-up."""
        gain, k = max((self.speedup(rate, k), -k) for k in self.lengths)
        return -k, gain

    @property
    def drafted_nothing(self) -> bool:
        """Whether the drafter was asked and proposed no token at all: what a draft costs is not known then."""
        return bool(self.proposed) and not any(self.proposed.values())

    def break_even(self) -> float | None:
        """The lowest acceptance rate, in steps of 0.01, from which some draft length gains; None when there is none."""
        return next((percent / 100 for percent in range(1, 100) if self.best(percent / 100)[1] >= WORTH), None)


def measure(target: Target, drafter: Drafter, context: int, rows: Sequence[int] = ROWS, repeats: int = REPEATS) -> Costs:
    """Measure a pair on `context` tokens of a real text, with different tokens in every row."""
    drafter = _tireless(drafter)
    more = max(max(rows), len(ASKED) * (repeats + 1))
    prompt, ahead = text_tokens(target, context, more)
    sequence = Decoding(target, prompt, SamplingParams(max_tokens=more + 2), "block")
    try:
        open_sequence(target, drafter, sequence)
        costs = measure_rows(target, sequence.slot, [sequence.tokens[-1], *ahead], rows, repeats)
        coming = cycle(prompt)  # the text begins again, so that drafters that copy find something
        (first, few), (all_of_them, some) = (_measure_draft(target, drafter, sequence, k, coming, repeats) for k in ASKED)
    finally:
        close_sequence(target, sequence)
    step = max(0.0, (all_of_them - first) / (some - few)) if some > few else 0.0
    most = DRAFTS[-1] if drafter.most_depth is None else min(drafter.most_depth, DRAFTS[-1])
    return Costs(context, costs, first, step, dict(zip(ASKED, (few, some))), most)


def text_tokens(target: Target, context: int, more: int) -> tuple[list[int], list[int]]:
    """The first tokens of a real text, and `more` that follow; over and over where it ends. Raises PromptError when the target's
    context is too short for them.
    """
    if context + more > target.context_length:
        raise PromptError(
            f"{context} tokens of context and {more} to measure with are too many: the context of {target.name} ends at "
            f"{target.context_length}"
        )
    if target.tokenizer is None:
        raise PromptError(f"{target.name} has no tokenizer to make a text of")
    once = target.tokenizer.encode_plain(TEXT)
    tokens = (once * ((context + more) // len(once) + 1))[: context + more]
    return tokens[:context], tokens[context:]


def measure_rows(target: Target, slot: Slot, tokens: Sequence[int], rows: Sequence[int], repeats: int) -> dict[int, float]:
    """Median milliseconds of a pass over the first n tokens, by n; the numbers take turns, so that a change of the machine's
    speed meets all of them.
    """
    length = slot.length

    def one(n: int) -> None:
        target.forward([(slot, DraftTree.chain(tokens[0], tokens[1:n]))])
        target.commit(slot, (0,))
        target.truncate(slot, length)

    found: dict[int, list[float]] = {n: [] for n in rows}
    for repeat in range(repeats + 1):
        for n in rows:
            taken = milliseconds(lambda n=n: one(n))  # type: ignore[misc]
            if repeat:  # the first round warms up
                found[n].append(taken)
    return {n: statistics.median(times) for n, times in found.items()}


def _tireless(drafter: Drafter) -> Drafter:
    """The drafter without its stop at unlikely tokens: what a step costs is measured by taking it."""
    if isinstance(drafter.options, TreeOptions):
        drafter = copy.copy(drafter)
        drafter.options = replace(drafter.options, min_probability=0.0)  # type: ignore[call-arg]
    return drafter


def _measure_draft(
    target: Target, drafter: Drafter, sequence: Decoding, k: int, coming: Iterator[int], repeats: int
) -> tuple[float, float]:
    """Median milliseconds of proposing k tokens, and how many were proposed on average. Before each time the text grows by one
    token, as in decoding, so that what a drafter does with new tokens is part of it.
    """
    times, proposed = [], []

    def one() -> None:
        (tree,) = drafter.propose([Ask(sequence.state, sequence.tokens, Budget(k, k), sequence.slot)])
        proposed.append(len(tree) - 1)

    for _ in range(repeats + 1):
        (output,) = target.forward([(sequence.slot, DraftTree.chain(sequence.tokens[-1]))], layers=drafter.layers)
        target.commit(sequence.slot, (0,))
        sequence.tokens.append(token := next(coming))
        sequence.sampler.commit([token])
        drafter.observe([(sequence.state, sequence.tokens, output, (0,))])
        times.append(milliseconds(one))
    return statistics.median(times[1:]), statistics.mean(proposed[1:])  # the first one warms up


# ---- what does not need measuring -----------------------------------------------------------------------------------


def describe(model: Target, draft: int) -> dict[str, Any]:
    """Facts about one model, with bytes at full context and for the logits of `draft` + 1 rows."""
    memory = model.memory()
    per_token = memory.get("kv_per_token")
    tokenizer = model.tokenizer
    return {
        **model.describe(),
        "end_tokens": {str(t): tokenizer.token_text(t) if tokenizer else None for t in sorted(model.eos)},
        "weights_bytes": memory.get("weights"),
        "kv_bytes_per_token": per_token,
        "kv_bytes_full_context": None if per_token is None else per_token * model.context_length,
        "logits_bytes": (draft + 1) * model.vocab_size * 4,
    }


def tokenizers(target: Target, model: Target) -> dict[str, Any]:
    """How far the vocabularies agree, by the text of the tokens; overlap: the shared ones as a share of the smaller vocabulary."""
    overlap = model.overlap if isinstance(model, Translated) else compare(target, model)
    facts: dict[str, Any] = dict.fromkeys(("equal", "different", "only_target", "only_drafter", "shared", "overlap"))
    if overlap is not None:
        both = len(overlap.target.keys() & overlap.drafter.keys())
        facts = {
            "equal": overlap.target == overlap.drafter,
            "different": len(overlap.differing),
            "only_target": len(overlap.target) - both,
            "only_drafter": len(overlap.drafter) - both,
            "shared": len(overlap.shared),
            "overlap": overlap.share,
        }
    return {**facts, "translated": isinstance(model, Translated), "same_end": target.eos == model.eos}


def chosen(model: Target) -> list[dict[str, Any]]:
    """What computes a model's linear layers on this CPU, by shape, with the times that decided it."""
    return [choice.as_dict() for choice in getattr(model, "choices", ())]


def check(target: Target, drafter: Drafter, context: int = 128, draft: int = 8) -> dict[str, Any]:
    """Everything about a pair, as `outrider check --json` prints it."""
    model = getattr(drafter, "model", None)
    model = model if isinstance(model, Target) else None
    own = model.inner if isinstance(model, Translated) else model
    costs = measure(target, drafter, context)
    silent = costs.drafted_nothing and drafter.name != "none"
    rates = () if silent else RATES
    return {
        "target": describe(target, draft),
        "drafter": {
            "name": drafter.name,
            "options": asdict(drafter.options),
            "model": describe(own, draft) if own else None,
            "weights": drafter.describe(),
        },
        "tokenizers": tokenizers(target, model) if model else None,
        "kernels": {
            "variant": kernels.VARIANT,
            "why_not": "OUTRIDER_KERNEL is off" if kernels.TURNED_OFF else kernels.why_not,
            "cache": str(cache_file()),
            "rows": ROWS_MEASURED,
            "target": chosen(target),
            "drafter": chosen(own) if own else [],
        },
        "costs_ms": {**asdict(costs), "rows_relative": {n: costs.target(n) / costs.target(1) for n in costs.rows}},
        "speedup": {rate: {k: costs.speedup(rate, k) for k in costs.lengths} for rate in rates},
        "best": {rate: costs.best(rate) for rate in rates},
        "break_even": None if silent else costs.break_even(),
        "verdict": verdict(costs, drafter.name),
        "proposal": cheaper(costs, own) if own else None,
    }


def cheaper(costs: Costs, model: Target) -> str | None:
    """How to make a drafter cheaper that costs much for its target; None where it does not, or nothing is known to help."""
    share = max(costs.step, costs.draft) / costs.target(1)
    if share < DEAR or costs.drafted_nothing or not model.name.endswith(".gguf") or not model.n_parameters:
        return None
    bits = 8 * model.memory()["weights"] / model.n_parameters
    options = [f"--type {CHEAP_TYPE}"] * (bits > CHEAP_BITS) + [f"--vocabulary {FEW_TOKENS}"] * (
        model.vocab_size > 2 * FEW_TOKENS
    )
    if not options:
        return None
    return (
        f"A drafted token costs {share:.0%} of a plain pass. A smaller copy of the drafter may gain: outrider models requantise "
        f"{model.name} OUT.gguf {' '.join(options)} (measure its acceptance with `outrider bench`)."
    )


def verdict(costs: Costs, drafter: str) -> str:
    """In words: from which acceptance rate it pays, or why it cannot."""
    share = costs.step / costs.target(1) if costs.step else 0.0
    first = costs.draft / costs.target(1)
    two, nine = costs.target(2) / costs.target(1), costs.target(9) / costs.target(1)
    reasons = []
    if max(share, first) > 0.3:
        reasons.append(f"each drafted token costs {max(share, first):.0%} of a plain pass")
    if two > 1.5 or nine > 4:
        reasons.append(f"a pass over 2 rows costs {two:.1f} times one over 1 row, over 9 rows {nine:.1f} times")
    because = " and ".join(reasons) or f"rows and drafts together cost too much (9 rows: {nine:.1f} passes)"
    even = costs.break_even()
    if drafter == "none":
        return (
            f"Plain decoding: {costs.target(1):.1f} ms a token. With a free drafter the best case at acceptance rate 0.8 would be "
            f"{costs.best(0.8)[1]:.2f} times that speed."
        )
    if costs.drafted_nothing:
        return f"The drafter {drafter} proposed nothing on the measured text: what its drafts cost and whether they pay is not known."
    if even is None:
        return f"It cannot pay: even with 99 % of the drafted tokens accepted it would not be faster, because {because}."
    k, gain = costs.best(0.7)
    text = f"It pays from an acceptance rate of about {even:.2f} on"
    if even > 0.7:
        return f"{text}, which is rarely reached, because {because}."
    return f"{text}. At 0.7 the best draft length is {k}, with an expected {gain:.2f} times the speed of plain decoding."
