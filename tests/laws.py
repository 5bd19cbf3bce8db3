"""The checks behind the claim of losslessness: exact laws of the shipped code, by branching on every random decision.

`test_laws.py` and `test_sampling.py` run these checks on the engine; `test_mutations.py` shows that each of them fails on
an engine that was made wrong on purpose. A check raises `Broken`, an AssertionError, and returns the error it measured.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Sequence
from unittest import mock

import torch

from outrider import accept, sampling
from outrider.accept import Decision
from outrider.sampling import Sampler, SamplingParams
from outrider.tree import DraftTree

EXACT = 1e-9
PROMPT = (1, 2, 1)


class Broken(AssertionError):
    """The engine does not do what it promises."""


def require(condition: bool, message: object) -> None:
    if not condition:
        raise Broken(message)


# ---- a reference for the processors: one row, pure Python, nothing shared with the engine --------------------------------


def reference_scores(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    ends: Sequence[int] = (),
) -> list[float]:
    """Logits after penalties, bias and min_tokens; `output` holds the emitted tokens and the path."""
    x = [float(v) for v in logits]
    for t in {*prompt, *output}:
        x[t] = x[t] / params.repetition_penalty if x[t] > 0 else x[t] * params.repetition_penalty
    for t in output:
        x[t] -= params.frequency_penalty
    for t in set(output):
        x[t] -= params.presence_penalty
    for t, bias in params.logit_bias.items():
        x[t] += bias
    if len(output) < params.min_tokens:
        for t in {*ends, *params.stop_token_ids}:
            x[t] = -math.inf
    return x


def reference_law(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    ends: Sequence[int] = (),
) -> list[float]:
    """The law of the next token after every processor."""
    x = reference_scores(logits, params, prompt, output, ends)
    best = max(x)
    if params.temperature == 0:
        return [float(i == x.index(best)) for i in range(len(x))]
    x = [(v - best) / params.temperature for v in x]
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        total, sum_, kept = sum(math.exp(x[i]) for i in order), 0.0, []
        for i in order:
            if sum_ >= params.top_p:
                break
            kept.append(i)
            sum_ += math.exp(x[i]) / total
        order = kept
    if params.min_p:
        order = [i for i in order if math.exp(x[i]) >= params.min_p * (1 - 1e-12)]
    total = sum(math.exp(x[i]) for i in order)
    return [math.exp(x[i]) / total if i in order else 0.0 for i in range(len(x))]


# ---- laws to test with ---------------------------------------------------------------------------------------------------

KINDS = ("random", "zeros in p", "zeros in q", "ties", "p = q", "disjoint", "one-hot p", "one-hot q")


@dataclass
class Case:
    """A target and a drafter on a few tokens: a law for every context, and the sampling parameters of both."""

    kind: str = "random"
    vocab: int = 3
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0))
    seed: int = 0
    ends: tuple[int, ...] = ()
    emitted: tuple[int, ...] = ()
    prompt: tuple[int, ...] = PROMPT

    def rows(self, path: Sequence[int]) -> tuple[list[float], list[float]]:
        """Unprocessed probabilities of target and drafter after `path`."""
        rng = random.Random(f"{self.kind} {self.vocab} {self.seed} {tuple(path)}")
        p = [rng.random() ** 2 + 0.02 for _ in range(self.vocab)]
        q = [rng.random() ** 2 + 0.02 for _ in range(self.vocab)]
        half = rng.sample(range(self.vocab), self.vocab)[: (self.vocab + 1) // 2]
        if self.kind == "zeros in p":
            p[rng.randrange(self.vocab)] = 0.0
        elif self.kind == "zeros in q":
            q[rng.randrange(self.vocab)] = 0.0
        elif self.kind == "ties":
            p = [rng.choice((1.0, 2.0)) for _ in p]
            q = [rng.choice((1.0, 2.0)) for _ in q]
        elif self.kind == "p = q":
            q = p
        elif self.kind == "disjoint":
            p = [v if i in half else 0.0 for i, v in enumerate(p)]
            q = [0.0 if i in half else v for i, v in enumerate(q)]
        elif self.kind == "one-hot p":
            p = [float(i == half[0]) for i in range(self.vocab)]
        elif self.kind == "one-hot q":
            q = [float(i == half[0]) for i in range(self.vocab)]
        return p, q

    def logits(self, path: Sequence[int], side: int = 0) -> torch.Tensor:
        """Logits ``[V]`` of the target (side 0) or the drafter (side 1)."""
        return torch.tensor(self.rows(path)[side], dtype=torch.float64).log()

    def law(self, path: Sequence[int], side: int = 0) -> list[float]:
        return reference_law(self.logits(path, side).tolist(), self.params, self.prompt, (*self.emitted, *path), self.ends)

    def sampler(self, rule: str) -> Sampler:
        sampler = Sampler(self.params, self.prompt, self.vocab, frozenset(self.ends), rule)
        sampler.commit(self.emitted)
        return sampler


# ---- branching -----------------------------------------------------------------------------------------------------------


class Branch:
    """Random decisions that follow a script; at the first one beyond it the other outcomes are noted in `open`."""

    def __init__(self, script: Sequence[int] = ()):
        self.script = script
        self.taken: list[int] = []
        self.open: list[tuple[int, ...]] = []
        self.weight = 1.0

    def choose(self, weights: Sequence[float]) -> int:
        """An index of a weight above 0; all others become branches."""
        require(all(w >= 0 for w in weights) and sum(weights) > 0, f"no law: {weights}")
        possible = [i for i, w in enumerate(weights) if w > 0]
        at = len(self.taken)
        if at < len(self.script):
            pick = self.script[at]
        else:
            pick = possible[0]
            self.open += [(*self.taken, i) for i in possible[1:]]
        self.taken.append(pick)
        self.weight *= weights[pick] / sum(weights)
        return pick

    def bernoulli(self, p: float) -> bool:
        p = min(p, 1.0)
        return self.choose((1 - p, p)) == 1

    def categorical(self, w: torch.Tensor) -> int:
        return self.choose(w.tolist())

    def coupled(self, w: torch.Tensor, depth: int) -> int:
        raise Broken("not a rule with streams")


class Folded(Branch):
    """A Branch in which the last decision, the token after the path, stays a law: `last`."""

    last: list[float] | None = None

    def choose(self, weights: Sequence[float]) -> int:
        require(self.last is None, "a decision after the last one")
        return super().choose(weights)

    def categorical(self, w: torch.Tensor) -> int:
        require(self.last is None and bool((w >= 0).all()) and float(w.sum()) > 0, f"no law: {w}")
        self.last = (w / w.sum()).tolist()
        return -7


def outcomes(run: Callable[[Any], Any], source: type[Branch] = Branch) -> Iterator[tuple[float, Any, Any]]:
    """Every outcome of ``run(source)`` that has a probability: (probability, result, source)."""
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        branch = source(scripts.pop())
        result = run(branch)
        yield branch.weight, result, branch
        scripts += branch.open


# ---- drafts --------------------------------------------------------------------------------------------------------------


def drawn_law(
    sampler: Sampler, logits: torch.Tensor, path: Sequence[int], k: int = 1
) -> tuple[dict[tuple[int, ...], float], torch.Tensor]:
    """The law of the tokens that ``sampler.draw`` really returns, as its uniform numbers go from 0 to 1; and its q."""
    stream = mock.Mock()
    law: dict[tuple[int, ...], float] = {}

    def draw(us: Sequence[float]) -> sampling.Drawn:
        stream.uniform.side_effect = [*us, *[0.5] * k][:k]
        return sampler.draw(logits[None], [path], k)[0]

    def follow(us: tuple[float, ...], weight: float) -> None:
        """Split [0, 1) for the number after `us` into the intervals of the tokens that it gives."""
        place, low = len(us), 0.0
        first = draw(us)
        if place == len(first.tokens):
            law[tuple(first.tokens)] = weight
            return
        last = draw((*us, 1 - 2**-53)).tokens[place]
        while low < 1:
            here, high, inside = draw((*us, low)).tokens[place], 1.0, low
            while here != last and high - inside > 1e-14:  # the end of this token's interval, by bisection
                middle = (inside + high) / 2
                inside, high = (middle, high) if draw((*us, middle)).tokens[place] == here else (inside, middle)
            follow((*us, (low + high) / 2), weight * (high - low))
            low = high

    with mock.patch.object(sampler, "draft_stream", stream):
        follow((), 1.0)
        q = draw(()).q
    require(q is not None, "drawn without a law")
    return law, q  # type: ignore[return-value]


def without_replacement(q: Sequence[float], k: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Ordered draws of k tokens from q, each renormalised over what is left."""
    if k == 0 or sum(q) <= 0:
        yield 1.0, ()
        return
    for t, w in enumerate(q):
        if w > 0:
            rest = [0.0 if i == t else v for i, v in enumerate(q)]
            for weight, more in without_replacement(rest, k - 1):
                yield w / sum(q) * weight, (t, *more)


Node = tuple[Any, tuple[tuple[int, Any], ...]]
"""A tree while it is built: the law of the children, and each child's token and node."""
How = Callable[[Sequence[int]], str]
"""For a path: are the children below it ``drawn``, or ``chosen``, or chosen with a ``double``?"""


class Drafts:
    """Every tree that a drafter can draw through the shipped Sampler, with its probability."""

    def __init__(self, case: Case, sampler: Sampler, how: How):
        self.case, self.sampler, self.how = case, sampler, how
        self._memo: dict[tuple[Any, ...], list[tuple[float, tuple[int, ...], Any]]] = {}

    def siblings(self, path: tuple[int, ...], k: int) -> list[tuple[float, tuple[int, ...], Any]]:
        if (path, k) not in self._memo:
            logits = self.case.logits(path, side=1)
            how = self.how(path)
            if how != "drawn" or self.case.params.temperature == 0:
                ((tokens, q, _),) = self.sampler.draw(logits[None], [path], k, greedy=True)
                require(q is None and len(set(tokens)) == len(tokens), "chosen tokens are distinct and have no law")
                found = [(1.0, (*tokens, *tokens[:1] * (how == "double")), None)]
            elif k == 1:
                law, q = drawn_law(self.sampler, logits, path)
                found = [(w, tokens, q) for tokens, w in law.items()]
            else:
                q = self.sampler.draw(logits[None], [path], k)[0].q
                require(q is not None, "drawn without a law")
                found = [(w, tokens, q) for w, tokens in without_replacement(q.tolist(), k)]  # type: ignore[union-attr]
            self._memo[path, k] = found
        return self._memo[path, k]

    def nodes(self, shape: Sequence[int], path: tuple[int, ...] = ()) -> Iterator[tuple[float, Node]]:
        if not shape:
            yield 1.0, (None, ())
            return
        for weight, tokens, q in self.siblings(path, shape[0]):
            for below in itertools.product(*(list(self.nodes(shape[1:], (*path, t))) for t in tokens)):
                yield weight * math.prod(w for w, _ in below), (q, tuple(zip(tokens, (node for _, node in below))))


def grow(root: Node) -> DraftTree:
    """The DraftTree of nested nodes, level by level."""
    tokens, parents, laws, queue = [PROMPT[-1]], [-1], [root[0]], [(0, root)]
    for index, (_, children) in queue:
        for token, node in children:
            queue.append((len(tokens), node))
            tokens.append(token)
            parents.append(index)
            laws.append(node[0])
    return DraftTree(tuple(tokens), tuple(parents), tuple(laws) if any(q is not None for q in laws) else None)


def drawn(path: Sequence[int]) -> str:
    return "drawn"


def chosen(path: Sequence[int]) -> str:
    return "chosen"


def double(path: Sequence[int]) -> str:
    return "double"


def mixed(path: Sequence[int]) -> str:
    return "drawn" if sum(path) % 2 else "chosen"


def mixed_other(path: Sequence[int]) -> str:
    return "chosen" if sum(path) % 2 else "drawn"


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


def rule_law(
    rule: str, case: Case, shape: Sequence[int], how: How, alter: Callable[[Node], Node]
) -> tuple[dict[Any, float], float]:
    """The exact law of what one round emits, {tokens: probability}, and the expected number of accepted tokens."""
    sampler = case.sampler(rule)
    verdict = getattr(accept, rule)
    emitted: defaultdict[tuple[int, ...], float] = defaultdict(float)
    accepted = 0.0
    for weight, root in Drafts(case, sampler, how).nodes(shape):
        tree = grow(alter(root))
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
    emitted, _ = rule_law(rule, case, shape, how, alter)
    memo: dict[tuple[int, ...], list[float]] = {}

    def law(path: tuple[int, ...]) -> list[float]:
        if path not in memo:
            memo[path] = case.law(path)
        return memo[path]

    error = compare(emitted, law, case.vocab, len(shape) + 1)
    error = max(error, abs(sum(emitted.values()) - 1))
    require(error < EXACT, f"{rule} on {shape}, {case}: the law is wrong by {error:.2e}")
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
