"""An independent small model as the drafter (Leviathan et al. 2023, Chen et al. 2023).

It runs behind a Target of its own, on any backend, and drafts one token at a time through the sequence's Sampler, so that q is
the law each token was really drawn from. Its cache follows the tokens by itself: what differs from them is cropped, what is
missing is fed.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Sequence

from torch import Tensor

from ..errors import OutriderWarning, ParameterError
from ..sampling import Sampler
from ..targets.base import Slot, Target
from ..tree import Budget, DraftTree
from .base import Drafter, Options, State, Work
from .vocabulary import in_words_of

PREFILL_FROM = 16


@dataclass(frozen=True)
class ModelOptions(Options):
    """greedy: draft the most likely token instead of drawing one (at temperature 0 it is the same).
    min_probability: stop before a token whose path would be less likely than this; by default what a draft step costs, as the
    drafter's share of the target's parameters, at most a half. device, dtype: where and how the drafter
    runs; by default like the target.
    """

    greedy: bool = False
    min_probability: float | None = None
    device: str | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.min_probability is not None and not 0 <= self.min_probability < 1:
            raise ParameterError(f"option min_probability must be at least 0 and below 1; got {self.min_probability}")


class ModelState(State):
    """A slot of the draft model, and the tokens whose KV it holds."""

    def __init__(self, sampler: Sampler, model: Target, like: Slot | None = None):
        super().__init__(sampler)
        self.model = model
        self.slot: Slot = model.open(like, like.length if like else 0)
        self.fed: list[int] = []
        self.agreed = 0  # tokens known to be fed as they are
        self.foreign = False  # the sequence holds a token that the drafter does not have

    def fork(self, sampler: Sampler) -> ModelState:
        other = ModelState(sampler, self.model, self.slot)
        other.fed, other.agreed, other.foreign = list(self.fed), self.agreed, self.foreign
        return other

    def truncate(self, length: int) -> None:
        self.agreed = min(self.agreed, length)
        self.foreign = False

    def close(self) -> None:
        self.model.close(self.slot)

    def catch_up(self, tokens: Sequence[int]) -> list[int]:
        """Crop the cache to what `tokens` begins with; returns the tokens still to feed, the anchor last."""
        common = min(self.agreed, len(tokens) - 1, len(self.fed))
        while common < min(len(self.fed), len(tokens) - 1) and self.fed[common] == tokens[common]:
            common += 1
        if common < self.slot.length:
            self.model.truncate(self.slot, common)
        del self.fed[common:]
        self.agreed = common
        missing = list(tokens[common:])
        self.foreign |= any(token >= self.model.vocab_size for token in missing)
        if not self.foreign and len(missing) > PREFILL_FROM:
            for _ in self.model.prefill(self.slot, missing[:-1]):
                pass
            self.fed += missing[:-1]
            missing = missing[-1:]
        return missing

    def feed(self, tokens: Sequence[int]) -> None:
        """Note that a pass over this chain was made; its KV is kept until `catch_up` crops it."""
        self.model.commit(self.slot, range(len(tokens)))
        self.fed += tokens


class ModelDrafter(Drafter):
    """Chains from a smaller causal language model, with the target's vocabulary or another."""

    name = "model"
    Options = ModelOptions
    options: ModelOptions

    def __init__(self, model: Target, options: ModelOptions | None = None, cost: float = 0.0):
        """cost: of one draft step, as a share of a step of the target; no token less likely than this is drafted by default."""
        super().__init__(options)
        self.model = model
        self.context_length = model.context_length
        least = self.options.min_probability
        self.least = min(cost, 0.5) if least is None else least

    @classmethod
    def load(cls, target: Target, options: Any, source: str | None = None, **loading: Any) -> ModelDrafter:
        from ..models import load_target

        assert source is not None
        loading |= {name: value for name in ("device", "dtype") if (value := getattr(options, name)) is not None}
        model = load_target(source, **loading)
        model = in_words_of(target, model)
        if target.n_parameters and model.n_parameters >= target.n_parameters:
            ratio = model.n_parameters / target.n_parameters
            warnings.warn(
                f"the drafter {model.name} has {ratio:.2g} times the parameters of the target {target.name}: each drafted token "
                "costs about as many passes, so speculation cannot pay",
                OutriderWarning,
                stacklevel=2,
            )
        return cls(model, options, model.n_parameters / target.n_parameters if target.n_parameters else 0.0)

    def open(self, sampler: Sampler) -> ModelState:
        return ModelState(sampler, self.model)

    def propose(self, work: Work) -> list[DraftTree]:
        drafts = [_Draft(state, tokens, budget) for state, tokens, budget in work]  # type: ignore[arg-type]
        while active := [draft for draft in drafts if draft.to_feed]:
            trees = [DraftTree.chain(draft.to_feed[0], draft.to_feed[1:]) for draft in active]
            outputs = self.model.forward([(draft.state.slot, tree) for draft, tree in zip(active, trees)])
            for draft, output in zip(active, outputs):
                assert output.logits is not None
                draft.advance(output.logits[-1], self.least, self.options.greedy)
        return [draft.tree() for draft in drafts]


class _Draft:
    """One sequence's chain while it grows."""

    def __init__(self, state: ModelState, tokens: Sequence[int], budget: Budget):
        self.state = state
        self.anchor = tokens[-1]
        self.budget = budget
        self.tokens: list[int] = []
        self.q: list[Tensor | None] = []
        self.score: list[float] = []
        self.likely = 1.0
        self.to_feed = state.catch_up(tokens)
        if state.foreign:
            self.to_feed = []

    def advance(self, logits: Tensor, least: float, greedy: bool) -> None:
        """Take note of the pass over `to_feed`; draw the next token from its last row ``[V]``, or stop before that."""
        self.state.feed(self.to_feed)
        self.to_feed = []
        total = logits.logsumexp(0)
        if self.likely * float((logits.max() - total).exp()) < max(least, self.budget.price):
            return
        drawn, q = self.state.sampler.draw(logits, self.tokens, greedy=greedy)
        if not drawn:
            return
        chance = float((logits[drawn[0]] - total).exp())
        self.tokens += drawn
        self.q.append(q)
        self.likely *= chance
        self.score.append(chance)
        if len(self.tokens) < min(self.budget.nodes, self.budget.depth) and drawn[0] < self.state.model.vocab_size:
            self.to_feed = drawn

    def tree(self) -> DraftTree:
        return DraftTree.chain(self.anchor, self.tokens, self.q if any(q is not None for q in self.q) else None, self.score)
