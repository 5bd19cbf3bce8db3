"""Drafting from the target's own hidden states, with a head that feeds on its guesses (EAGLE, multi-token prediction).

Such a head runs *pairs*: the feature of position i (the target's hidden state there) with the token of position i + 1, and its output
says what token i + 2 is. The pair of the anchor is the last whose feature the target has computed; below it the head takes its own
output for the feature. Its KV holds pairs with true features alone: what it drafted is dropped after every round, and what the
target accepted of it is run again with the target's features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, Callable, Protocol, Sequence

import torch
from torch import Tensor, nn

from ..sampling import Sampler
from ..targets.attention import CURRENT, KVSlot, Pass, PassCache, Segment, passing
from ..targets.base import LayerKey, Output
from ..tree import DraftTree
from .base import Ask, Drafter, State, Work
from .growth import Growth, TreeOptions

PAIRS = 512
"""Most pairs in a pass, all sequences together."""
MANY = 16
"""From so many missed pairs on, all but the anchor's are run for their keys and values alone."""
FIRST_CAPACITY = 64


class Fuser(Protocol):
    """Makes features of hidden states."""

    def fuse(self, hidden: Tensor) -> Tensor: ...


class FeatureReader(nn.Module, ABC):
    """What follows the text by its features. H: their width."""

    layers: tuple[LayerKey, ...]
    """Hidden states of the target that make a feature."""
    body: Any
    """A decoder of transformers, without embeddings."""
    straight = False
    """Whether `decode` may call the body's layers itself."""

    @abstractmethod
    def fuse(self, hidden: Tensor) -> Tensor:
        """Features ``[n, H]`` of the target's hidden states, `layers` side by side, ``[n, widths]``."""

    @abstractmethod
    def run(
        self, tokens: Sequence[int], features: Tensor, positions: Sequence[int], segments: list[Segment], stores: bool = False
    ) -> Tensor:
        """States ``[n, H]`` of n pairs; the segments say whose they are and what they see. stores: nobody needs these states."""

    def passing(self, segments: list[Segment], stores: bool) -> AbstractContextManager[Pass]:
        """A pass. With `stores` a single layer that norms what it attends with has only its keys and values computed, less than half of
        its work.
        """
        may = self.straight and len(self.body.layers) == 1 and hasattr(self.body.layers[0], "input_layernorm")
        return passing(segments, stores and may)

    def decode(self, inputs: Tensor, positions: Tensor, **how: Any) -> Tensor:
        """``[n, H]`` through the body. how: for its layers, ``cache``, ``attention_mask``; none of it in a `passing` pass."""
        if how:
            return self.body(inputs_embeds=inputs[None], position_ids=positions[None], **how).last_hidden_state[0]
        if not self.straight:
            return self.decode(inputs, positions, cache=PassCache(), use_cache=True)
        states, place = inputs[None], positions[None]
        how = {"position_embeddings": self.body.rotary_emb(states, place), "position_ids": place, "attention_mask": None}
        for layer in self.body.layers:
            if CURRENT.get().stores:
                layer.self_attn(layer.input_layernorm(states), cache=PassCache(), **how)
            else:
                states = layer(states, cache=PassCache(), use_cache=True, **how)
        return self.body.norm(states)[0]

    @torch.inference_mode()
    def straighten(self, states: Callable[[], Tensor]) -> None:
        """Leave out what transformers does around the layers in every pass (masks, defaults, outputs): beside a single layer's small
        products that is much. Only where it changes nothing but rounding. states: runs some rows, the same each time.
        """
        through_body, self.straight = states(), True
        try:
            self.straight = bool((states() - through_body).abs().max() <= 1e-5 * through_body.abs().max())
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError):
            self.straight = False


class FeatureHead(FeatureReader):
    """What `FeatureDrafter` asks of a head."""

    draft_ids: Tensor | None
    """``[Vd]``, rising: the target's ids of a reduced vocabulary; None for all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("draft_ids", None, persistent=False)

    @abstractmethod
    def recycle(self, states: Tensor) -> Tensor:
        """What stands for the feature in a state's place: ``[n, H]`` of ``[n, H]``."""

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """Logits ``[n, V]`` over the target's vocabulary, or ``[n, Vd]`` over the reduced one."""


class FeatureState(State):
    """One sequence's features, and the head's KV of the pairs that were run.

    Features are known for positions `first` to `end`, without a gap; `raw` holds the latest as they were observed, and
    `features` the others as the head has fused them. They are kept, because a truncated sequence goes on from any of them.
    """

    def __init__(self, sampler: Sampler, reach: int = 1):
        """reach: how many tokens after its own position a row of the KV depends on."""
        super().__init__(sampler)
        self.reach = reach
        self.kv = KVSlot()  # of pairs, the first at position `first`
        self.first = 0
        self.fused = 0
        self._features: Tensor | None = None  # [capacity, H]
        self._raw: list[Tensor] = []

    @property
    def end(self) -> int:
        """The position after the last known feature."""
        return self.first + self.fused + sum(map(len, self._raw))

    @property
    def features(self) -> Tensor:
        """``[fused, H]``, from position `first` on."""
        assert self._features is not None
        return self._features[: self.fused]

    def store(self, start: int, hidden: Tensor) -> None:
        """Keep hidden states ``[n, widths]`` of verified positions from `start` on. What came before a gap is of no use."""
        if start < self.end:
            self.truncate(start)
        if start != self.end:
            self.close()
            self.first = start
        self._raw.append(hidden)

    def fuse(self, head: Fuser) -> None:
        """Make features of all that was observed since the last time, and free what they were made from."""
        while self._raw:
            new = head.fuse(self._raw.pop(0))
            held, total = self._features, self.fused + len(new)
            if held is None or len(held) < total:
                self._features = new.new_empty(max(FIRST_CAPACITY, 2 * total if held is not None else total), new.shape[1])
                if held is not None:
                    self._features[: self.fused] = held[: self.fused]
            assert self._features is not None
            self._features[self.fused : total] = new
            self.fused = total

    def fork(self, sampler: Sampler) -> FeatureState:
        other = type(self)(sampler, self.reach)
        other.kv = self.kv.copy(self.kv.length)
        other.first, other.fused, other._raw = self.first, self.fused, list(self._raw)
        other._features = None if self._features is None else self._features[: max(self.fused, 1)].clone()
        return other

    def truncate(self, length: int) -> None:
        keep = max(length - self.first, 0)
        self.kv.length = min(self.kv.length, max(keep - self.reach, 0))
        self.fused = min(self.fused, keep)
        keep -= self.fused
        raw, self._raw = self._raw, []
        for part in raw:
            if keep > 0:
                self._raw.append(part[:keep])
            keep -= len(part)

    def close(self) -> None:
        self.kv = KVSlot()
        self.fused, self._features, self._raw = 0, None, []


class FeatureDrafter(Drafter):
    """Chains and trees from a `FeatureHead`."""

    options: TreeOptions

    def __init__(self, head: FeatureHead, options: TreeOptions, cost: float = 0.0):
        """cost: of a draft step, as a share of a step of the target; nothing less likely than this is drafted by default."""
        super().__init__(options)
        self.head = head
        self.layers = head.layers
        self.least = min(cost, 0.5)

    def open(self, sampler: Sampler) -> FeatureState:
        return FeatureState(sampler)

    def observe(self, work: Sequence[tuple[Any, Sequence[int], Output, Sequence[int]]]) -> None:
        store(work, self.layers)

    @torch.inference_mode()
    def propose(self, work: Work) -> list[DraftTree]:
        drafts = [_Draft(ask, Growth(ask.state.sampler, ask.tokens[-1], ask.budget, self.options, self.least)) for ask in work]
        catch_up(self.head, [draft for draft in drafts if draft.growth.frontier])
        self.steps = 0
        while active := [draft for draft in drafts if draft.growth.frontier]:
            logits = self.head.logits(torch.cat([draft.states[-len(draft.growth.frontier) :] for draft in active]))
            for draft, rows in zip(active, logits.split([len(draft.growth.frontier) for draft in active])):
                draft.growth.extend(rows, self.head.draft_ids)
            self.steps += 1
            if growing := [draft for draft in active if draft.growth.frontier]:
                parts = [(draft.state, *draft.next_level(self.head)) for draft in growing]
                for draft, states in zip(growing, run_pairs(self.head, parts)):
                    draft.states = torch.cat([draft.states, states])
        for draft in drafts:
            draft.state.kv.length = min(draft.state.kv.length, draft.true_pairs)
        return [draft.growth.tree() for draft in drafts]


@torch.inference_mode()
def store(work: Sequence[tuple[Any, Sequence[int], Output, Sequence[int]]], layers: Sequence[LayerKey]) -> None:
    """What `observe` does: keep these hidden states of the verified positions."""
    for state, _, output, rows in work:
        if len(rows):
            index = torch.tensor(list(rows))
            parts = [output.hidden[key] for key in layers]
            kept = [part[index.to(part.device)].to(parts[0].device) for part in parts]  # layers may be on several devices
            state.store(output.start, torch.cat(kept, dim=-1))


@torch.inference_mode()
def last_states(reader: FeatureReader, work: Work) -> list[Tensor | None]:
    """For each sequence the state ``[H]`` of its anchor's pair; None where a feature was never seen."""
    known = [_Known(ask) for ask in work]
    catch_up(reader, [one for one in known if one.is_complete])
    return [one.states[0] if one.is_complete else None for one in known]


def catch_up(reader: FeatureReader, behind: Sequence[_Known]) -> None:
    """Run the pairs with true features that the readers' KV lacks, the anchor's last; its state is kept."""
    for one in behind:
        one.state.fuse(reader)
    while far := [one for one in behind if one.true_pairs - one.state.kv.length > MANY]:
        share = max(1, PAIRS // len(far))
        lacking = (min(share, one.true_pairs - 1 - one.state.kv.length) for one in far)
        run_pairs(reader, [(one.state, *one.missing(many)) for one, many in zip(far, lacking)], stores=True)
    while behind := [one for one in behind if one.state.kv.length < one.true_pairs]:
        parts = [(one.state, *one.missing(max(1, PAIRS // len(behind)))) for one in behind]
        for one, states in zip(behind, run_pairs(reader, parts)):
            one.states = states[-1:]


def run_pairs(
    reader: FeatureReader, parts: Sequence[tuple[FeatureState, DraftTree, int, int, Tensor]], stores: bool = False
) -> list[Tensor]:
    """One pass. Each part: the state, the tree of the pairs, how many of them have been run already, the position of the first pair,
    the features of the others ``[n, H]``. Returns their states ``[n, H]``; with `stores` they are not to be used.
    """
    segments: list[Segment] = []
    tokens: list[int] = []
    positions: list[int] = []
    for state, tree, since, start, _ in parts:
        segments.append(Segment(state.kv, tree, len(tokens), since))
        tokens += tree.tokens[since:]
        positions += [start + depth for depth in tree.depths[since:]]
    states = reader.run(tokens, torch.cat([features for *_, features in parts]), positions, segments, stores)
    for segment in segments:
        segment.slot.length += segment.n
    return list(states.split([segment.n for segment in segments]))


class _Known:
    """One sequence's pairs with true features, the anchor's last."""

    def __init__(self, ask: Ask):
        assert isinstance(ask.state, FeatureState)
        self.state = ask.state
        self.tokens = ask.tokens
        self.states: Tensor  # [1, H] of the anchor's pair, once it has been run
        position = len(ask.tokens) - 1
        if self.state.end > position:
            self.state.truncate(position)
        self.true_pairs = max(position - self.state.first, 0)
        self.is_complete = self.state.end == position and self.true_pairs > 0
        if self.is_complete and self.state.kv.length == self.true_pairs:  # asked again: the anchor's state is needed once more
            self.state.kv.length -= 1

    def missing(self, most: int) -> tuple[DraftTree, int, int, Tensor]:
        """Up to so many of the pairs with true features that come next."""
        have = self.state.kv.length
        count = min(most, self.true_pairs - have)
        first = self.state.first + have
        chain = DraftTree.chain(self.tokens[first + 1], self.tokens[first + 2 : first + 1 + count])
        return chain, 0, first, self.state.features[have : have + count]


class _Draft(_Known):
    """One sequence's draft while it grows, and the pairs that the head has run for it: node 0's is the anchor's."""

    def __init__(self, ask: Ask, growth: Growth):
        super().__init__(ask)
        self.growth = growth
        self._pairs = DraftTree.chain(ask.tokens[-1])
        self._row = {0: 0}  # of each node whose pair was run
        if not self.is_complete:
            growth.frontier = []

    def next_level(self, head: FeatureHead) -> tuple[DraftTree, int, int, Tensor]:
        """The pairs of the growth's frontier: each node's token, with its parent's state for a feature."""
        growth, before = self.growth, self._pairs
        above = [self._row[growth.parents[node]] for node in growth.frontier]
        for node in growth.frontier:
            self._row[node] = len(self._row)
        new = (growth.tokens[node] for node in growth.frontier)
        self._pairs = DraftTree((*before.tokens, *new), (*before.parents, *above))
        return self._pairs, len(before), self.state.first + self.true_pairs - 1, head.recycle(self.states[above])
