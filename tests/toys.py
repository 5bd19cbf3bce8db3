"""What the tests of the loop share: running a few sequences to their end, drafters made for it, tiny random models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Sequence

import torch

from outrider.decode import Fixed, decode
from outrider.decode import Sequence as Decoded
from outrider.drafters import Drafter, NoDrafter
from outrider.drafters.replay import ReplayDrafter, ReplayOptions
from outrider.sampling import SamplingParams
from outrider.targets.base import Target
from outrider.targets.transformers import TransformersTarget
from outrider.trace import Round, TokenLogprob, statistics
from outrider.tree import Budget, DraftTree

# ---- running ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Outcome:
    """What decoding must agree on, whatever was drafted."""

    tokens: tuple[int, ...]
    text: str
    finish: str | None
    logprobs: tuple[TokenLogprob, ...]
    tolerance: float = field(default=0.0, compare=False)
    """By how much log-probabilities may differ on a target whose rounding depends on how many rows it computes."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Outcome):
            return NotImplemented
        same = (self.tokens, self.text, self.finish) == (other.tokens, other.text, other.finish)
        return same and len(self.logprobs) == len(other.logprobs) and all(map(self._near, self.logprobs, other.logprobs))

    def _near(self, one: TokenLogprob, other: TokenLogprob) -> bool:
        if not self.tolerance:
            return one == other
        mine, theirs = dict(one.top), dict(other.top)
        both = [(one.logprob, other.logprob), *((mine[t], theirs[t]) for t in mine.keys() & theirs.keys())]
        return one.token == other.token and all(a == b or abs(a - b) < self.tolerance for a, b in both)


def run(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    rule: str = "block",
    draft: int = 4,
    choices: Sequence[int] | None = None,
) -> tuple[list[Outcome], list[list[Round]]]:
    """Decode `prompts` together; the outcome and the Rounds of each, checked for what must hold in any case."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    numbers = choices or [0] * len(prompts)
    sequences = [Decoded(target, p, q, rule, c, i) for i, (p, q, c) in enumerate(zip(prompts, each, numbers))]
    rounds: list[list[Round]] = [[] for _ in sequences]
    for r in decode(target, drafter, sequences, Fixed(draft)):
        rounds[r.sequence].append(r)
    for s, own in zip(sequences, rounds):
        check_figures(s, own)
    assert getattr(target, "open_slots", 0) == 0, "a slot was left open"
    tolerance = getattr(target, "tolerance", 0.0)
    outcomes = [
        Outcome(tuple(s.output), s.text, s.finish, tuple(x for r in own for x in r.logprobs or ()), tolerance)
        for s, own in zip(sequences, rounds)
    ]
    return outcomes, rounds


def plain(target: Target, prompts: Sequence[Sequence[int]], params: Any, rule: str = "block", **more: Any) -> list[Outcome]:
    return run(target, NoDrafter(), prompts, params, rule, **more)[0]


def check_figures(s: Decoded, rounds: Sequence[Round]) -> None:
    figures = statistics(rounds)
    assert figures.emitted == len(s.output) == sum(len(r.emitted) for r in rounds)
    assert figures.accepted <= figures.proposed and figures.emitted <= figures.accepted + figures.passes
    assert "".join(r.text for r in rounds) == s.text, "the stream is not the text"
    assert [r.finish for r in rounds[:-1]] == [None] * (len(rounds) - 1)
    assert not rounds or rounds[-1].finish == s.finish
    assert len(s.output) <= s.params.max_tokens
    if s.params.logprobs is not None:
        entries = [x for r in rounds for x in r.logprobs or ()]
        assert [x.token for x in entries] == s.output
    context = s.prompt_length
    for number, r in enumerate(rounds):
        assert (r.number, r.context) == (number, context)
        assert r.proposed <= r.budget.nodes and len(r.path) - 1 <= r.budget.depth
        assert len(r.emitted) <= r.accepted + 1 <= r.budget.depth + 1
        assert r.times.total >= 0 and r.rows >= len(r.tokens)
        context += len(r.emitted)


# ---- drafters --------------------------------------------------------------------------------------------------------------


class Scripted(ReplayDrafter):
    """A ReplayDrafter that gives each sequence, as it is opened, the next of `scripts`, and counts what it is asked."""

    def __init__(self, scripts: Sequence[Sequence[int]], **options: Any):
        super().__init__(ReplayOptions(**options))
        self._scripts = iter(scripts)
        self.asked: list[int] = []

    def open(self, sampler: Any) -> Any:
        state = super().open(sampler)
        state.script = next(self._scripts)
        return state

    def propose(self, work: Any) -> list[DraftTree]:
        self.asked.append(len(work))
        return super().propose(work)


class Bushy(Scripted):
    """Below each right token two wrong siblings and then the next right one: the accepted path is scattered over the tree."""

    def _tree(self, state: Any, tokens: Sequence[int], length: int) -> DraftTree:
        nodes, parents, right = [tokens[-1]], [-1], 0
        vocabulary = state.sampler.vocab_size
        for token in state.script[len(tokens) : len(tokens) + (length + 2) // 3]:
            below = right
            for guess in ((token + 1) % vocabulary, (token + 2) % vocabulary, token):
                if len(nodes) <= length:
                    right = len(nodes)
                    nodes.append(guess)
                    parents.append(below)
        return DraftTree(tuple(nodes), tuple(parents))


class Shaped(Scripted):
    """Trees of a given shape, the right token as the last child at each depth.

    widths: siblings at each depth; those that are wrong have children only in a full tree.
    """

    def __init__(self, scripts: Sequence[Sequence[int]], widths: Sequence[int] = (2, 2, 2), full: bool = False):
        super().__init__(scripts)
        self.widths, self.full = widths, full

    def _tree(self, state: Any, tokens: Sequence[int], length: int) -> DraftTree:
        nodes, parents, above = [tokens[-1]], [-1], [0]
        vocabulary = state.sampler.vocab_size
        coming = state.script[len(tokens) : len(tokens) + min(length, len(self.widths))]
        for token, width in zip(coming, self.widths):
            here = []
            for parent in above if self.full else above[-1:]:
                for wrong in reversed(range(width)):
                    nodes.append((token + wrong) % vocabulary)
                    parents.append(parent)
                    here.append(len(nodes) - 1)
            above = here
        return DraftTree(tuple(nodes), tuple(parents))


class Mixed(Drafter):
    """A drafter of its own for each sequence, in the order in which they are opened."""

    name = "mixed"

    def __init__(self, drafters: Sequence[Drafter]):
        super().__init__()
        self._drafters = iter(drafters)
        self._own: dict[int, Drafter] = {}

    def open(self, sampler: Any) -> Any:
        drafter = next(self._drafters)
        state = drafter.open(sampler)
        self._own[id(state)] = drafter
        return state

    def propose(self, work: Any) -> list[DraftTree]:
        return [self._own[id(ask.state)].propose([ask])[0] for ask in work]


class Whatever(Drafter):
    """Proposes what `make(tokens, budget, times asked)` returns."""

    name = "whatever"

    def __init__(self, make: Callable[[Sequence[int], Budget, int], DraftTree]):
        super().__init__()
        self._make = make
        self._times = -1

    def open(self, sampler: Any) -> Any:
        return NoDrafter().open(sampler)

    def propose(self, work: Any) -> list[DraftTree]:
        self._times += 1
        return [self._make(ask.tokens, ask.budget, self._times) for ask in work]


# ---- tiny models -----------------------------------------------------------------------------------------------------------

COMMON: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


UNEVEN: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""Sizes that divide into no kernel's blocks."""


def uneven_model(kind: str = "llama", **config: Any) -> Any:
    """A model of `UNEVEN` sizes with transformers' own random weights, always the same, in float32."""
    import transformers

    made = transformers.AutoConfig.for_model(kind, **{**UNEVEN, **config})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval()


def tiny_model(
    kind: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float64, spread: float = 0.05, **config: Any
) -> Any:
    """A random model of this type. spread: deviation of what is added to the weights; more makes sharper laws."""
    import transformers

    made = transformers.AutoConfig.for_model(kind, **{**COMMON, **config})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(made).to(dtype).eval()
        for weights in model.parameters():
            weights.data.add_(torch.randn_like(weights) * spread)
    return model


def tiny_target(kind: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float64, spread: float = 0.3, **config: Any):
    return TransformersTarget(tiny_model(kind, seed, dtype, spread, **config), name=f"tiny-{kind}-{seed}")


def letters(model: Any, n: int, seed: int = 0) -> list[int]:
    """`n` random token ids of `model`, none of them special."""
    return torch.randint(3, 100, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def fill(t: Target, tokens: list[int], **options: Any) -> Any:
    slot = t.open()
    for _ in t.prefill(slot, tokens, **options):
        pass
    return slot


def bushy(text: list[int], at: int, n: int) -> tuple[DraftTree, list[int]]:
    """A tree below ``text[at]`` whose last child at each depth is right, and the nodes of the right path."""
    tokens, parents, right = [text[at]], [-1], [0]
    for token in text[at + 1 : at + n]:
        for guess in ((token + 7) % 100, (token + 13) % 100, token):
            tokens.append(guess)
            parents.append(right[-1])
        tokens.append(3)  # a grandchild on a wrong branch, between the right nodes
        parents.append(len(tokens) - 4)
        right.append(len(tokens) - 2)
    return DraftTree(tuple(tokens), tuple(parents)), right
