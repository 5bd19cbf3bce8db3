"""The checks behind the claim of losslessness: exact laws of the shipped code, by branching on every random decision.

`test_laws.py` and `test_sampling.py` run these checks on the engine; `test_mutations.py` shows that each of them fails on
an engine that was made wrong on purpose. A check raises `Broken`, an AssertionError, and returns the error it measured.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from typing import Any, Callable, Iterable, Iterator, Sequence
from unittest import mock

import torch
from enumeration import (
    KINDS,
    PROMPT,
    Case,
    Drafts,
    Folded,
    How,
    Node,
    chosen,
    double,
    drawn,
    drawn_law,
    grow,
    grown,
    mixed,
    mixed_other,
    reference_law,
    reference_scores,
    whimsical,
    without_replacement,
)

from outrider import accept, sampling
from outrider.accept import Decision
from outrider.branching import Branch, Broken, outcomes, require
from outrider.sampling import Sampler, SamplingParams
from outrider.tree import DraftTree

__all__ = [
    "KINDS",
    "Broken",
    "Case",
    "Folded",
    "How",
    "Node",
    "chosen",
    "double",
    "drawn",
    "grown",
    "mixed",
    "mixed_other",
    "outcomes",
    "reference_law",
    "reference_scores",
    "whimsical",
    "without_replacement",
]

EXACT = 1e-9


# ---- check: the law of a rule --------------------------------------------------------------------------------------------


def compare(
    emitted: dict[tuple[int, ...], float], law: Callable[[tuple[int, ...]], Sequence[float]], vocab: int, n: int
) -> float:
    """Greatest error of the law of the first n tokens: `emitted` sequences, extended by the target, against the target."""
    full: defaultdict[tuple[int, ...], float] = defaultdict(float)

    def extend(s: tuple[int, ...], w: float) -> None:
        if len(s) >= n:
            full[s[:n]] += w
            return
        for t, v in enumerate(law(s)):
            if v:
                extend((*s, t), w * v)

    for s, w in emitted.items():
        extend(s, w)
    exact = {s: math.prod(law(s[:i])[s[i]] for i in range(n)) for s in itertools.product(range(vocab), repeat=n)}
    return max(abs(full[s] - w) for s, w in exact.items())


def drafts_of(
    rule: str, case: Case, shape: Sequence[int], how: How = drawn, alter: Callable[[Node], Node] = lambda root: root
) -> Iterator[tuple[float, DraftTree]]:
    """Every draft of this shape, with its probability."""
    for weight, root in Drafts(case, case.sampler(rule), how).nodes(shape):
        yield weight, grow(alter(root))


def rule_law(rule: str, case: Case, drafts: Iterable[tuple[float, DraftTree]]) -> tuple[dict[Any, float], float]:
    """The exact law of what one round emits, {tokens: probability}, and the expected number of accepted tokens."""
    sampler = case.sampler(rule)
    verdict = getattr(accept, rule)
    emitted: defaultdict[tuple[int, ...], float] = defaultdict(float)
    accepted = 0.0
    for weight, tree in drafts:
        logits = torch.stack([case.logits(tree.path_tokens(i)) for i in range(len(tree))])
        p = sampler.probabilities(logits, tree)

        def run(source: Folded, tree: DraftTree = tree, p: torch.Tensor = p) -> Decision:
            return verdict(tree, p, source)

        for chance, decision, source in outcomes(run, Folded):
            require(decision.next == -7 and tree.path(decision.path[-1]) == decision.path, "a path, then the last draw")
            accepted += weight * chance * (len(decision.path) - 1)
            for t, w in enumerate(source.last):
                if w:
                    emitted[(*tree.path_tokens(decision.path[-1]), t)] += weight * chance * w
    return emitted, accepted


def check_law(
    rule: str, case: Case, shape: Sequence[int], how: How = drawn, alter: Callable[[Node], Node] = lambda root: root
) -> float:
    """What one round emits has exactly the target's law, over every draft and every decision. Returns the error.

    shape: siblings at each level. how: which siblings are drawn. alter: what a faulty drafter does to its draft.
    """
    return check_law_of(rule, case, drafts_of(rule, case, shape, how, alter), len(shape) + 1)


def check_law_of(rule: str, case: Case, drafts: Iterable[tuple[float, DraftTree]], n: int) -> float:
    """The same for given drafts, on the first n tokens."""
    emitted, _ = rule_law(rule, case, drafts)
    memo: dict[tuple[int, ...], list[float]] = {}

    def law(path: tuple[int, ...]) -> list[float]:
        if path not in memo:
            memo[path] = case.law(path)
        return memo[path]

    error = compare(emitted, law, case.vocab, n)
    error = max(error, abs(sum(emitted.values()) - 1))
    require(error < EXACT, f"{rule}, {case}: the law is wrong by {error:.2e}")
    return error


# ---- check: draws --------------------------------------------------------------------------------------------------------


def check_draw(case: Case, k: int = 1) -> float:
    """q is the drafter's processed law, and the tokens that `draw` returns are drawn from it without replacement. Returns the
    greatest error of q and of the law of the tokens.
    """
    sampler = case.sampler("rejection")
    worst = 0.0
    for path in ((), (1,), (2, 2)):
        expected = case.law(path, side=1)
        law, q = drawn_law(sampler, case.logits(path, side=1), path, k)
        wanted = {tokens: weight for weight, tokens in without_replacement(expected, k)}
        worst = max(worst, *(abs(law.get(tokens, 0.0) - wanted.get(tokens, 0.0)) for tokens in law.keys() | wanted.keys()))
        worst = max(worst, *(abs(a - b) for a, b in zip(q.tolist(), expected)))
    require(worst < EXACT, f"draw: the tokens do not follow the law, by {worst:.2e}")
    return worst


def check_many_draws(k: int, n: int = 6000, seed: int = 3) -> None:
    """Many draws of k tokens, as ordered tuples, against drawing without replacement from q: chi-square."""
    q = [0.45, 0.3, 0.15, 0.1]
    params = SamplingParams(temperature=1.0, seed=seed)
    sampler = Sampler(params, PROMPT, 4, rule="rejection")
    logits = torch.tensor(q, dtype=torch.float64).log()
    counts = Counter(tuple(sampler.draw(logits[None], [()], k)[0].tokens) for _ in range(n))
    check_counts(counts, {tokens: w for w, tokens in without_replacement(q, k)})


def check_counts(counts: Counter[Any], law: dict[Any, float]) -> None:
    """Chi-square of counts against a law; fails at about 4 standard deviations."""
    n = counts.total()
    require(all(law.get(x, 0) > 0 for x in counts), f"impossible outcomes in {counts}")
    cells = [x for x, w in law.items() if w > 0]
    statistic = sum((counts[x] - n * law[x]) ** 2 / (n * law[x]) for x in cells)
    freedom = max(len(cells) - 1, 1)
    limit = freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson and Hilferty
    require(statistic < limit, f"chi-square {statistic:.1f} over {limit:.1f} with {freedom} degrees of freedom")


def check_uniform(values: Sequence[float]) -> None:
    """Kolmogorov-Smirnov against the uniform law on [0, 1]; fails at about p = 0.0003."""
    x = sorted(values)
    n = len(x)
    distance = max(max((i + 1) / n - v, v - i / n) for i, v in enumerate(x))
    require(distance * math.sqrt(n) < 2.1, f"not uniform: distance {distance:.4f} in {n} values")


def check_zero_uniform(rule: str) -> None:
    """With every uniform number 0.0 no token of probability 0 is kept or drawn, by the shipped Draws."""
    for case, shape, how in itertools.product(
        (Case("disjoint", 4), Case("zeros in p", 3), Case("one-hot p", 3)), ((1,), (1, 1), (2,)), (drawn, chosen)
    ):
        if rule == "block" and 2 in shape:
            continue
        sampler = case.sampler(rule)
        zero = mock.Mock()
        zero.uniform.return_value = 0.0
        for _, root in Drafts(case, sampler, how).nodes(shape):
            tree = grow(root)
            p = sampler.probabilities(torch.stack([case.logits(tree.path_tokens(i)) for i in range(len(tree))]), tree)
            with mock.patch.multiple(sampler, draft_stream=zero, accept_stream=zero, residual_stream=zero):
                decision = getattr(accept, rule)(tree, p, sampler.draws)
            tokens = (*tree.path_tokens(decision.path[-1]), decision.next)
            for i, t in enumerate(tokens):
                require(case.law(tokens[:i])[t] > 0, f"{rule} emitted token {t} of probability 0")


# ---- check: streams ------------------------------------------------------------------------------------------------------


class Tape:
    """A stream of the uniform numbers that a test gives it."""

    def __init__(self, values: Sequence[float]):
        self._values = iter(values)

    def uniform(self) -> float:
        return next(self._values)


def check_grid_law(rule: str, p: Sequence[float], q: Sequence[float], length: int = 1, m: int = 4) -> float:
    """The law of a round through the shipped Draws, when each stream's numbers run over a grid, independently.

    p, q, their ratios and residuals are multiples of 1/m, so the grid's law is the exact one. Returns the error.
    """
    target, drafter = (torch.tensor(x, dtype=torch.float64).log() for x in (p, q))
    emitted: defaultdict[tuple[int, ...], float] = defaultdict(float)
    grid = [(i + 0.5) / m for i in range(m)]
    needs = (length, length, 1)
    for values in itertools.product(grid, repeat=sum(needs)):
        numbers = iter(values)
        tapes = [[next(numbers) for _ in range(n)] for n in needs]
        with mock.patch.object(sampling, "Stream", lambda seed, choice, name, tapes=tapes: Tape(tapes[name])):
            sampler = Sampler(SamplingParams(temperature=1.0), PROMPT, len(p), rule=rule)
        drafts: list[int] = []
        laws = []
        for _ in range(length):
            (((token,), law, _),) = sampler.draw(drafter[None], [drafts])
            drafts.append(token)
            laws.append(law)
        tree = DraftTree.chain(PROMPT[-1], drafts, laws)
        decision = getattr(accept, rule)(tree, sampler.probabilities(target.expand(length + 1, -1), tree), sampler.draws)
        emitted[(*tree.path_tokens(decision.path[-1]), decision.next)] += 1 / m ** sum(needs)
    error = compare(emitted, lambda path: p, len(p), length + 1)
    require(error < EXACT, f"{rule}: streams that repeat or follow each other: the law is wrong by {error:.2e}")
    return error


def check_streams() -> None:
    """A Sampler's three streams are distinct, never repeat and do not disturb each other; seed and choice fix them."""

    def streams(seed: int | None, choice: int = 0) -> list[sampling.Stream]:
        s = Sampler(SamplingParams(temperature=1.0, seed=seed), PROMPT, 4, choice=choice)
        return [s.draft_stream, s.accept_stream, s.residual_stream]

    def values(seed: int | None, choice: int = 0) -> list[list[float]]:
        return [[stream.uniform() for _ in range(200)] for stream in streams(seed, choice)]

    require(values(7) == values(7), "the same seed must reproduce")
    which = [
        (7, 0),
        (7, 1),
        (7, 2),
        (8, 0),
        (0, 0),
        (0, 7),
        (7 + 2**32, 0),
        (7 + 2**33, 0),
        (2**63 - 1, 0),
        (None, 0),
        (None, 0),
    ]
    every = [u for seed, choice in which for stream in values(seed, choice) for u in stream]
    require(len(set(every)) == len(every), "streams repeat numbers")
    check_uniform(every)
    for used in range(3):  # reading one stream leaves the others as they were
        left, alone = streams(7), values(7)
        for _ in range(10):
            left[used].uniform()
        for other in {0, 1, 2} - {used}:
            require([left[other].uniform() for _ in range(200)] == alone[other], f"stream {other} follows stream {used}")
    for a, b in itertools.combinations([torch.tensor(x) for x in values(7)], 2):
        correlation = float(torch.corrcoef(torch.stack([a, b]))[0, 1])
        require(abs(correlation) < 0.25, f"streams of one sampler correlate: {correlation}")


def check_rounds(rule: str, n: int = 3, length: int = 2) -> float:
    """The law of the first n tokens over several rounds, each with a fresh draft of `length`. Returns the error.

    The draft stream runs over a grid that is exact for a uniform q on two tokens; accept and residual decisions branch.
    """
    case = Case("random", vocab=2, seed=5, prompt=(1, 0))
    q = torch.zeros(2, dtype=torch.float64)
    verdict = getattr(accept, rule)

    class Numbers:
        """The draft stream; `keyed` is for the faulty engine whose numbers belong to positions."""

        def __init__(self, source: Branch):
            self._source = source
            self._known: dict[int, float] = {}

        def uniform(self) -> float:
            return (0.25, 0.75)[self._source.choose((0.5, 0.5))]

        def keyed(self, position: int) -> float:
            if position not in self._known:
                self._known[position] = self.uniform()
            return self._known[position]

    def run(source: Branch) -> tuple[int, ...]:
        sampler = case.sampler(rule)
        sampler.draft_stream = Numbers(source)  # type: ignore[assignment]
        output: list[int] = []
        while len(output) < n:
            drafts: list[int] = []
            laws = []
            for _ in range(min(length, n - len(output))):
                (((token,), law, _),) = sampler.draw(q[None], [drafts])
                drafts.append(token)
                laws.append(law)
            tree = DraftTree.chain(output[-1] if output else case.prompt[-1], drafts, laws)
            logits = torch.stack([case.logits((*output, *tree.path_tokens(i))) for i in range(len(tree))])
            decision = verdict(tree, sampler.probabilities(logits, tree), source)
            new = [*tree.path_tokens(decision.path[-1]), decision.next]
            output += new
            sampler.commit(new)
        return tuple(output[:n])

    emitted: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for weight, tokens, _ in outcomes(run):
        emitted[tokens] += weight
    error = compare(emitted, case.law, 2, n)
    require(error < EXACT, f"{rule}: over several rounds the law is wrong by {error:.2e}")
    return error


# ---- check: processors ---------------------------------------------------------------------------------------------------


def check_processors(params: SamplingParams, seed: int = 0, vocab: int = 11, tolerance: float = EXACT) -> float:
    """Every row of a tree's p, and every q, against the reference with the row's own path. Returns the greatest error."""
    rng = random.Random(f"{params} {seed}")
    prompt = [rng.randrange(vocab) for _ in range(4)]
    output = [rng.randrange(vocab) for _ in range(rng.choice((0, 1, 3)))]
    ends = (0, 3)
    sampler = Sampler(params, prompt, vocab, frozenset(ends))
    for token in output:
        sampler.commit([token])
    tokens = [prompt[-1], *(rng.randrange(vocab) for _ in range(8))]
    tree = DraftTree(tuple(tokens), (-1, 0, 1, 2, 0, 4, 4, 6, 7))
    logits = torch.tensor(
        [[rng.choice((rng.gauss(0, 2), 1.0, -0.5)) for _ in range(vocab)] for _ in tokens], dtype=torch.float64
    )
    p = sampler.probabilities(logits, tree)
    require(p.shape == logits.shape, f"p has shape {tuple(p.shape)}")
    worst = 0.0
    for i in range(len(tree)):
        path = tree.path_tokens(i)
        expected = reference_law(logits[i].tolist(), params, prompt, (*output, *path), ends)
        worst = max(worst, *(abs(a - b) for a, b in zip(p[i].tolist(), expected)))
        ((drafted, q, _),) = sampler.draw(logits[i : i + 1], [path])
        if params.temperature == 0:
            require(q is None and drafted == [expected.index(1.0)], "a greedy draft is the most likely token")
        else:
            require(expected[drafted[0]] > 0, "a token outside the law was drawn")
            worst = max(worst, *(abs(a - b) for a, b in zip(q.tolist(), expected)))
    require(worst < tolerance, f"{params}: p differs from the reference by {worst:.2e}")
    return worst
