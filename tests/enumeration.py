"""What the checks in `laws` enumerate with: reference laws, branching on random decisions, every draft of a drafter."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Sequence
from unittest import mock

import torch

from outrider import sampling
from outrider.branching import Branch, require
from outrider.sampling import Sampler, SamplingParams
from outrider.tree import DraftTree

PROMPT = (1, 2, 1)


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


# ---- drafts that grow node by node ---------------------------------------------------------------------------------------

Policy = Callable[[tuple[int, ...], tuple[int, ...]], int | None]
"""For the tokens and parents drafted so far: the node that gets one more child, or None at the end."""


def grown(case: Case, policy: Policy) -> Iterator[tuple[float, DraftTree]]:
    """Every tree that grows under `policy`, one drawn token at a time, with its probability.

    The policy may look at everything drawn so far, wherever in the tree; what it cannot do is to leave out a token.
    """

    def path(tree: DraftTree, node: int) -> tuple[int, ...]:
        return tree.path_tokens(node)

    def follow(tokens: tuple[int, ...], parents: tuple[int, ...], weight: float) -> Iterator[tuple[float, DraftTree]]:
        tree = DraftTree(tokens, parents)
        node = policy(tokens, parents)
        law = [] if node is None else case.law(path(tree, node), side=1)
        for child in () if node is None else tree.children[node]:
            law[tokens[child]] = 0.0
        if node is None or sum(law) <= 0:
            laws = [torch.tensor(case.law(path(tree, i), side=1), dtype=torch.float64) for i in range(len(tree))]
            yield weight, DraftTree(tokens, parents, tuple(q if tree.children[i] else None for i, q in enumerate(laws)))
            return
        for token, w in enumerate(law):
            if w > 0:
                yield from follow((*tokens, token), (*parents, node), weight * w / sum(law))

    yield from follow((case.prompt[-1],), (-1,), 1.0)


def whimsical(seed: int, nodes: int, depth: int, width: int) -> Policy:
    """A policy that decides from everything drawn so far, by a hash of it."""

    def policy(tokens: tuple[int, ...], parents: tuple[int, ...]) -> int | None:
        tree = DraftTree(tokens, parents)
        rng = random.Random(f"{seed} {tokens} {parents}")
        open_ = [i for i in range(len(tree)) if tree.depths[i] < depth and len(tree.children[i]) < width]
        return rng.choice(open_) if open_ and len(tree) <= nodes and rng.random() < 0.9 else None

    return policy
