"""From logits to probabilities, for target and drafter alike, and every random draw of the engine.

One Sampler belongs to one sequence. It turns logits into p (for the target's rows) and into q (for a drafter's), each
row with the tokens on its own path, so that penalties and limits hold inside a draft tree exactly as they would one
token at a time. Processors, in order: the grammar, repetition, presence and frequency penalties, logit_bias, min_tokens,
temperature, top_k, top_p, min_p. Temperature 0 is a one-hot distribution; ties go to the lowest id.

Randomness. The rule `coupled` uses noise that is a function of (seed, choice, position, token id) alone. The other rules
take three independent streams (draft, accept, residual) whose values are never used twice.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from typing import Callable, NamedTuple, Sequence

import numpy as np
import torch
from torch import Tensor

from .errors import LogitsError, ParameterError
from .grammar import Matcher
from .params import SamplingParams
from .text import Tokenizer
from .tree import DraftTree

WIDE, BLOCK = 16384, 64
"""From how many entries on a row is searched for its largest by blocks of so many."""


class Stream:
    """Uniform numbers in [0, 1) that are never used twice."""

    def __init__(self, seed: int, choice: int, name: int):
        words = (seed & 0xFFFFFFFF, seed >> 32, choice, name)  # of one width each: (seed, choice, name) alone would collide
        self._generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))

    def uniform(self) -> float:
        return float(self._generator.random())


class Draws:
    """Every random decision of the accept rules; a test replaces it to branch on each outcome."""

    def __init__(self, sampler: Sampler):
        self._sampler = sampler
        self._tossed: list[float] = []

    def bernoulli(self, p: float) -> bool:
        """True with probability `p`; never when p is 0, always when it is 1 or more."""
        self._tossed.append(self._sampler.accept_stream.uniform())
        return self._tossed[-1] < p

    def tossed(self) -> list[float]:
        """The numbers that decided each `bernoulli` since the last call, for a trace."""
        numbers, self._tossed = self._tossed, []
        return numbers

    def categorical(self, w: Tensor) -> int:
        """Index i with probability ``w[i] / w.sum()``, ``w`` of shape ``[V]``, not negative, not all zero."""
        if self._sampler.greedy:  # then all of w is on one token
            return int(_first_best(w[None])[0])
        return inverse_cdf(w, self._sampler.residual_stream.uniform())

    def coupled(self, w: Tensor, depth: int) -> int:
        """The token that the position-keyed noise picks from law ``w`` ``[V]``, `depth` tokens after the anchor."""
        return int(self._sampler.coupled(w, depth)[0])


def inverse_cdf(w: Tensor, u: float) -> int:
    """The index at quantile `u` in [0, 1) of the law proportional to ``w`` ``[V]``; never one of weight 0."""
    return without_replacement(w, lambda: u, 1)[0]


def without_replacement(w: Tensor, uniform: Callable[[], float], k: int) -> list[int]:
    """Up to k distinct indices of ``w`` ``[V]``, each drawn in proportion to w among those not yet drawn; never one of weight 0.

    uniform: gives the quantile, in [0, 1), of each draw.
    """
    if k == 1:
        cumulative = w.to("cpu", torch.float64).cumsum(0)
        at = int(torch.searchsorted(cumulative, uniform() * float(cumulative[-1]), right=True))
        return [at if at < len(w) else int(w.nonzero()[-1, 0])]  # rounding at the upper end
    support = w.nonzero()[:, 0]
    cumulative = w[support].to("cpu", torch.float64).cumsum(0)
    total = left = float(cumulative[-1])
    taken: list[tuple[int, float, float]] = []  # place in the support, where its interval begins and ends
    order = []
    for _ in range(min(k, len(support))):
        x = uniform() * left
        for _, start, end in sorted(taken):  # x counts what is left; on the whole axis it lies beyond what was taken below it
            x = max(x + end - start, end) if x >= start else x
        at = int(torch.searchsorted(cumulative, x, right=True)) if x < total else len(support)
        places = {place for place, _, _ in taken}
        while at >= len(support) or at in places:  # rounding at the upper end
            at -= 1
        start, end = float(cumulative[at - 1]) if at else 0.0, float(cumulative[at])
        taken.append((at, start, end))
        left = max(left - (end - start), 0.0)
        order.append(int(support[at]))
    return order


_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) on one 64-bit word."""
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def exponential_noise(seed: int, choice: int, position: int, tokens: Tensor) -> Tensor:
    """Standard exponential noise for `tokens` ``[m]`` at `position`, float64: a pure function of its arguments.

    ``-log`` of it is Gumbel noise, so the token with the smallest ``noise / p`` is a draw from p (the exponential race).
    """
    key = _mix(_mix(_mix(seed) ^ choice) ^ position)

    def shifted(x: Tensor, by: int) -> Tensor:  # a logical shift: int64 is all that every device has
        return (x >> by) & ((1 << (64 - by)) - 1)

    def signed(word: int) -> int:
        return word - (1 << 64) if word >> 63 else word

    x = tokens.to(torch.int64) * signed(_GOLDEN) + signed(key)
    x = (x ^ shifted(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ shifted(x, 27)) * signed(0x94D049BB133111EB)
    x = x ^ shifted(x, 31)
    uniform = (shifted(x, 12).to(torch.float64) + 0.5) * 2.0**-52  # in (0, 1), without rounding
    return -uniform.log()


class Drawn(NamedTuple):
    """Children for one node of a draft tree, as `Sampler.draw` gives them.

    tokens: distinct, in drawing order. q: the law ``[V]`` that they were drawn from, or None for a point mass. chances: the
    probability of each token under the drafter's own logits, before any processing.
    """

    tokens: list[int]
    q: Tensor | None
    chances: list[float]


class Sampler:
    """One sequence's SamplingParams with its prompt, what it has emitted, and its random streams.

    rule: the accept rule in force; under ``coupled`` drafts are drawn with the target's own noise.
    choice: number of the completion when several are made from one prompt and seed.
    end_tokens: the target's end-of-generation ids, which min_tokens holds back.
    matcher: at the start of the grammar that the output must follow, if there is one.
    Raises ParameterError where the grammar and min_tokens leave no token to begin with.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        vocab_size: int,
        end_tokens: frozenset[int] = frozenset(),
        rule: str = "rejection",
        choice: int = 0,
        tokenizer: Tokenizer | None = None,
        matcher: Matcher | None = None,
    ):
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            for token in ids:
                if token >= vocab_size:
                    raise ParameterError(f"{name} names token {token}, but the vocabulary ends at {vocab_size - 1}")
        self.params = params
        self.vocab_size = vocab_size
        self.rule = rule
        self.choice = choice
        self.tokenizer = tokenizer
        self.matcher = matcher
        self.stuck: frozenset[int] = frozenset()
        """Nodes of the last tree whose law is empty: nothing that the grammar allows there is allowed otherwise."""
        self.seed = secrets.randbits(62) if params.seed is None else params.seed
        self.draft_stream = Stream(self.seed, choice, 0)
        self.accept_stream = Stream(self.seed, choice, 1)
        self.residual_stream = Stream(self.seed, choice, 2)
        self.draws = Draws(self)
        self.greedy = params.temperature == 0
        self._held_back = sorted(end_tokens | set(params.stop_token_ids)) if params.min_tokens else []
        self._penalised = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)
        self._prompt = frozenset(prompt)
        self._counts: Counter[int] = Counter()
        self.position = len(prompt) - 1  # of the anchor
        self.emitted = 0
        if matcher:
            self._check_start(matcher)

    def _check_start(self, matcher: Matcher) -> None:
        allowed, what = matcher.mask(()), self.params.grammar.kind if self.params.grammar else "the grammar"
        assert allowed is not None
        if not bool(allowed.any()):
            why = f" ({matcher.trouble})" if matcher.trouble else ""
            raise ParameterError(f"{what}: no token of this model begins what it allows{why}; change it")
        if self._held_back and not bool(allowed.index_fill(0, torch.tensor(self._held_back), False).any()):
            raise ParameterError(
                f"min_tokens ({self.params.min_tokens}) holds back the end, and {what} allows nothing else at the start; leave one of them out"
            )

    def commit(self, tokens: Sequence[int]) -> None:
        """Take note of the tokens that were emitted."""
        if self._penalised:
            self._counts.update(tokens)
        if self.matcher:
            self.matcher.commit(tokens)
        self.position += len(tokens)
        self.emitted += len(tokens)

    def is_over(self, path: Sequence[int]) -> bool:
        """Whether the grammar is complete after these tokens below the anchor, and nothing more may follow."""
        return self.matcher is not None and self.matcher.is_over(path)

    def stuck_at(self, path: Sequence[int]) -> int | None:
        """How many tokens of a Decision may be emitted before its path comes to a stuck node; None where it does not."""
        return next((depth for depth, node in enumerate(path) if node in self.stuck), None)

    def why_stuck(self) -> str:
        """Why no token may follow what was emitted."""
        where = f"after {self.emitted} tokens no token is left: "
        if self.matcher and self.matcher.trouble:
            return f"{where}the grammar cannot be followed further ({self.matcher.trouble})"
        if self.emitted < self.params.min_tokens and self.matcher and self.matcher.is_over(()):
            return f"{where}the grammar ends here, and min_tokens ({self.params.min_tokens}) holds back the end"
        return f"{where}nothing that the grammar allows here has a token that may be chosen"

    # ---- the law of the next token ------------------------------------------------------------------------------

    def probabilities(self, logits: Tensor, tree: DraftTree) -> Tensor:
        """p ``[n, V]`` after every processor, each node of `tree` with its own path. Raises LogitsError for NaN.

        The rows of `stuck` nodes hold some law or other: the sequence fails where it comes to one.
        """
        paths = [tree.path_tokens(i) for i in range(len(tree))] if self._penalised or self.matcher else None
        logits = self.constrain(logits, paths or ())
        return self._law(logits, paths, tree.depths)

    def constrain(self, logits: Tensor, paths: Sequence[Sequence[int]], ids: Tensor | None = None) -> Tensor:
        """Logits ``[n, V]`` with -inf for what the grammar does not allow after each path. ids: as in `draw`."""
        return self.matcher.constrain(self._whole(logits, ids, -math.inf), paths) if self.matcher else logits

    def draw(
        self,
        logits: Tensor,
        paths: Sequence[Sequence[int]],
        k: int | Sequence[int] = 1,
        greedy: bool = False,
        ids: Tensor | None = None,
    ) -> list[Drawn]:
        """Up to k distinct children for each of n nodes of a draft tree, with their law.

        logits: the drafter's, ``[n, V]`` or narrower (a smaller vocabulary proposes nothing beyond its own). ids: ``[Vd]``, rising,
        what the columns stand for; None: 0, 1, ... paths: for each node the drafted tokens after the anchor that lead to it. k: one
        number, or one for each node.
        The children are drawn from q without replacement, in that order. They are a point mass, with q None, at temperature
        0, under `coupled`, and when `greedy` asks for the most likely tokens. From logits that are no distribution, and where
        k is 0, comes nothing. All nodes together cost a constant number of transfers to the host.
        """
        counts = [k] * len(paths) if isinstance(k, int) else list(k)
        rows = logits if ids is not None else logits[:, : self.vocab_size]
        if self.matcher or self._penalised or self._held_back or self.params.logit_bias:  # these name tokens
            rows, ids = self._whole(rows, ids, -math.inf), None
        if self.matcher:
            counts = [0 if self.matcher.mask(path) is None else count for path, count in zip(paths, counts)]
            rows = self.constrain(rows, paths)
        scores = self._processed(rows, paths, [len(path) for path in paths])
        best = scores.amax(dim=-1)
        sound = torch.isfinite(best if scores is rows else best + rows.amax(dim=-1)).tolist()
        counts = [count if ok else 0 for count, ok in zip(counts, sound)]
        if self.greedy or greedy:
            return [Drawn(tokens, None, chances) for tokens, chances in _best(scores, rows, counts, ids)]
        q = self._whole(self._softmax(scores, best), ids, 0.0).cpu()  # one transfer, for all draws
        tokens = [self._drawn(row, len(path), count) for row, path, count in zip(q, paths, counts)]
        keep_q = self.rule != "coupled"
        return [
            Drawn(mine, q[i] if keep_q and mine else None, chances)
            for i, (mine, chances) in enumerate(zip(tokens, _chances(rows, tokens, ids)))
        ]

    def _whole(self, x: Tensor, ids: Tensor | None, rest: float) -> Tensor:
        """x ``[n, Vd]`` over the whole vocabulary, ``[n, V]``, with `rest` in the columns that are not there."""
        if x.shape[1] == self.vocab_size:
            return x
        if ids is None:
            return torch.nn.functional.pad(x, (0, self.vocab_size - x.shape[1]), value=rest)
        return x.new_full((len(x), self.vocab_size), rest).index_copy_(1, ids, x)

    def _drawn(self, q: Tensor, depth: int, k: int) -> list[int]:
        if k == 0:
            return []
        if self.rule == "coupled":
            return self.coupled(q, depth, k)
        return without_replacement(q, self.draft_stream.uniform, k)

    def coupled(self, w: Tensor, depth: int, k: int = 1) -> list[int]:
        """Up to k first tokens of the race between law ``w`` ``[V]`` and the noise, `depth` tokens after the anchor."""
        return self.race(w, depth, k)[1].tolist()

    def race(self, w: Tensor, depth: int, k: int) -> tuple[Tensor, Tensor]:
        """The k best perturbed scores ``log w + Gumbel`` and their tokens, ``[k]`` each (fewer if w has fewer), best first."""
        if w.device.type == "mps":  # no float64 there
            w = w.cpu()
        tokens = w.nonzero()[:, 0]
        if len(tokens) == 1:
            return torch.zeros(1, dtype=torch.float64), tokens
        noise = exponential_noise(self.seed, self.choice, self.position + 1 + depth, tokens)
        finish = noise / w[tokens].to(torch.float64)
        if k == 1:
            first = finish.argmin()[None]
        else:
            first = finish.topk(min(k, len(tokens)), largest=False).indices
        return -finish[first].log(), tokens[first]

    # ---- processors ---------------------------------------------------------------------------------------------

    def _law(self, logits: Tensor, paths: Sequence[Sequence[int]] | None, depths: Sequence[int]) -> Tensor:
        x = self._processed(logits, paths, depths)
        token = _first_best(x)
        best = x.gather(1, token[:, None])[:, 0]
        self.stuck = frozenset((best == -math.inf).nonzero()[:, 0].tolist()) if self.matcher else frozenset()
        if self.stuck:
            x = x.index_fill(0, torch.tensor(sorted(self.stuck), device=x.device), 0.0)
            token = _first_best(x)
            best = x.gather(1, token[:, None])[:, 0]
        if not bool(torch.isfinite(best).all()):
            row = int((~torch.isfinite(best)).nonzero()[0, 0])
            raise LogitsError(
                f"the model's logits for position {self.position + 1 + depths[row]} are {float(best[row])}; nothing was "
                "emitted from them (try --dtype float32, or check the model's files)"
            )
        if self.greedy:
            return torch.zeros_like(x).scatter_(1, token[:, None], 1.0)
        return self._softmax(x, best)

    def _softmax(self, x: Tensor, best: Tensor) -> Tensor:
        """Probabilities ``[n, V]`` at the temperature, filtered; x: processed logits, best: the largest of each row."""
        temperature = min(max(self.params.temperature, 1e-30), 1e30)  # beyond float32 the quotients would be NaN
        return self._filtered((x - best[:, None]) / temperature).softmax(dim=-1)

    def _processed(self, logits: Tensor, paths: Sequence[Sequence[int]] | None, depths: Sequence[int]) -> Tensor:
        """Penalties, bias and min_tokens; float32 or float64 ``[n, V]``, the argument itself when there are none."""
        x = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
        params = self.params
        held = [i for i, depth in enumerate(depths) if self.emitted + depth < params.min_tokens] if self._held_back else []
        if not (self._penalised or params.logit_bias or held):
            return x
        x = x.clone()
        if self._penalised:
            self._penalise(x, paths or [()] * len(x))
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=x.device)
            x[:, ids] += torch.tensor(list(params.logit_bias.values()), dtype=x.dtype, device=x.device)
        if held:
            rows = torch.tensor(held, device=x.device)[:, None]
            x[rows, torch.tensor(self._held_back, device=x.device)] = -math.inf
        return x

    def _penalise(self, x: Tensor, paths: Sequence[Sequence[int]]) -> None:
        seen = sorted(self._prompt | self._counts.keys())
        raw = x.clone()
        every = torch.arange(len(x), device=x.device)[:, None]
        columns = torch.tensor(seen, dtype=torch.int64, device=x.device)
        x[every, columns] = self._penalty(raw[every, columns], [[self._counts[t] for t in seen]])
        entries = [  # what the row's own path adds
            (row, token, self._counts[token] + times)
            for row, path in enumerate(paths)
            for token, times in Counter(path).items()
            if token < x.shape[1]
        ]
        if entries:
            rows, columns, counts = torch.tensor(entries, device=x.device).T
            x[rows, columns] = self._penalty(raw[rows, columns], counts)

    def _penalty(self, raw: Tensor, counts: object) -> Tensor:
        params = self.params
        times = torch.as_tensor(counts, dtype=raw.dtype, device=raw.device)
        penalty = min(max(params.repetition_penalty, 1e-30), 1e30)  # beyond float32 there would be infinities
        x = torch.where(raw > 0, raw / penalty, raw * penalty)
        return x - params.frequency_penalty * times - params.presence_penalty * (times > 0).to(raw.dtype)

    def _filtered(self, x: Tensor) -> Tensor:
        """top_k, top_p and min_p: everything they exclude becomes -inf. x: ``[n, V]`` logits over the temperature."""
        params = self.params
        n, width = x.shape
        if 0 < params.top_k < width:
            x = x.masked_fill(~_largest(x, torch.full((n,), params.top_k, device=x.device)), -math.inf)
        if params.top_p < 1:
            x = x.masked_fill(~_largest(x, _nucleus(x, params.top_p, params.top_k)), -math.inf)
        if params.min_p > 0:
            floor = x.max(dim=-1, keepdim=True).values + math.log(params.min_p)
            x = x.masked_fill(x < floor, -math.inf)
        return x


def _largest(x: Tensor, count: Tensor) -> Tensor:
    """Marks the ``count[i]`` largest entries of each row of x ``[n, V]``; of equal ones the lowest ids. Bool ``[n, V]``."""
    most = min(int(count.max()), x.shape[1])
    least = _top(x, most)[0].gather(1, (count[:, None] - 1).clamp(max=most - 1))
    above = x > least
    equal = x == least
    room = count[:, None] - above.sum(dim=-1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=-1) <= room))


def _first_best(x: Tensor) -> Tensor:
    """The largest entry of each row of x ``[n, V]``, of equal ones the lowest id; NaN wins. Ids ``[n]``."""
    if x.device.type == "cpu":  # several times as fast as PyTorch's on a wide row
        return torch.from_numpy(x.numpy().argmax(axis=-1))
    return x.max(dim=-1).indices


def _best(scores: Tensor, raw: Tensor, counts: Sequence[int], ids: Tensor | None) -> list[tuple[list[int], list[float]]]:
    """The ``counts[i]`` largest entries above -inf of each row of scores ``[n, V]``, largest first, of equal ones the lowest ids,
    and what softmax(raw) is there.
    """
    most = max(counts, default=0)
    if most == 0:
        return [([], []) for _ in counts]
    if scores is raw and raw.stride(0) == 0:  # one row for all nodes
        scores = raw = raw[:1]
    if most == 1:
        places = _first_best(scores)[:, None]
        values = scores.gather(1, places).tolist()
    else:
        top, places = _top(scores, min(most + 1, scores.shape[1]))
        values = top.tolist()
        for row, found in enumerate(values):
            if most < len(found) and found[most - 1] == found[most] > -math.inf:  # _top takes any of equal ones
                lowest = _largest(scores[row, None], torch.tensor([most], device=scores.device))[0].nonzero()[:, 0]
                places[row, :most] = lowest
                found[:most] = scores[row, lowest].tolist()
    exact = raw if raw.dtype == torch.float64 else raw.float()
    chances = exact.log_softmax(dim=-1).gather(1, places).exp().tolist()
    tokens = (places if ids is None else ids[places]).tolist()
    ranked = [
        sorted((-value, token, chance) for value, token, chance in list(zip(*row))[:most] if value > -math.inf)
        for row in zip(values, tokens, chances)
    ]
    ranked *= len(counts) // len(ranked)
    return [([token for _, token, _ in row[:k]], [chance for *_, chance in row[:k]]) for row, k in zip(ranked, counts)]


def _top(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest entries of each row of x ``[n, V]`` and where they are, ``[n, k]`` each, largest first; of equal ones any.

    `topk`, on a wide row several times as fast: they are in the k blocks with the largest maxima, or behind the last block.
    """
    n, width = x.shape
    whole = width - width % BLOCK
    if width < max(k, WIDE // BLOCK) * BLOCK:
        return tuple(x.topk(k, dim=-1))  # type: ignore[return-value]
    blocks = x[:, :whole].unflatten(1, (-1, BLOCK))
    first = blocks.amax(dim=-1).topk(k, dim=-1).indices  # [n, k]
    places = (first[:, :, None] * BLOCK + torch.arange(BLOCK, device=x.device)).flatten(1)
    places = torch.cat([places, torch.arange(whole, width, device=x.device).expand(n, -1)], dim=1)
    values, at = x.gather(1, places).topk(k, dim=-1)
    return values, places.gather(1, at)


def _chances(logits: Tensor, tokens: Sequence[Sequence[int]], ids: Tensor | None) -> list[list[float]]:
    """softmax(logits) ``[n, V]`` at some tokens of each row. One transfer."""
    entries = [(row, token) for row, mine in enumerate(tokens) for token in mine]
    if not entries:
        return [[] for _ in tokens]
    rows, columns = torch.tensor(entries, device=logits.device).T
    if ids is not None:
        columns = torch.searchsorted(ids, columns.contiguous())
    raw = logits if logits.dtype == torch.float64 else logits.float()
    values = iter(raw.log_softmax(dim=-1)[rows, columns].exp().tolist())  # on a CPU a third of logsumexp's time
    return [[next(values) for _ in mine] for mine in tokens]


def _nucleus(x: Tensor, top_p: float, top_k: int) -> Tensor:
    """How many of the most likely tokens of each row of logits x ``[n, V]`` hold at least `top_p` together: ``[n]``."""
    p = x.softmax(dim=-1)
    width = x.shape[1]
    some = min(top_k or 1024, width)
    cumulative = p.topk(some, dim=-1).values.to(torch.float64).cumsum(dim=-1)
    if some < width and top_k == 0 and bool((cumulative[:, -1] < top_p).any()):
        cumulative = p.sort(dim=-1, descending=True).values.to(torch.float64).cumsum(dim=-1)
    return ((cumulative < top_p).sum(dim=-1) + 1).clamp(max=cumulative.shape[1])
