"""Whose tokens are whose: vocabularies compared by the bytes of their tokens, and a drafter that speaks another one.

Token-level intersection (TLI: Timor et al. 2025, arXiv 2502.05202): the drafter's law is restricted to the tokens that both have
and renormalised, and these are drawn under the target's ids. So q is the law each token was really drawn from, and every accept
rule is exact. Different from the paper: a token of the target that the drafter lacks is spelled to it with tokens of its own, so it
always reads the whole text.
"""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Iterator, Sequence

import torch
from torch import Tensor

from ..errors import LoadError, OutriderWarning, ParameterError
from ..targets.base import LayerKey, Output, Slot, Target
from ..text import Tokenizer
from ..tree import DraftTree

IN_PLACE = 0.9
"""From this share of the ids on, ids that only one side has count as padding."""
LEAST_OVERLAP = 0.3
"""Least share of the smaller vocabulary that both must have."""


def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level tokenizers (Radford et al. 2019): printable ones for themselves."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


ALPHABET = _byte_alphabet()
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


def token_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """The bytes of each entry of the vocabulary, by id: the same for one text, however the tokenizer's file writes it.

    Byte-level entries ("Ġthe"), SentencePiece ones ("▁the") and byte tokens ("<0x0A>") become the bytes they stand for; special
    tokens keep their name.
    """
    entries = tokenizer.vocabulary()
    marks = {mark: sum(text.startswith(mark) for text in entries) for mark in ("Ġ", "▁")}
    if marks["Ġ"] > marks["▁"]:
        return {
            i: bytes(map(ALPHABET.__getitem__, text))
            if all(c in ALPHABET for c in text)
            else text.encode("utf-8", "surrogatepass")
            for text, i in entries.items()
        }
    if not marks["▁"]:
        return {i: text.encode("utf-8", "surrogatepass") for text, i in entries.items()}
    return {
        i: bytes([int(text[3:5], 16)])
        if BYTE_TOKEN.fullmatch(text)
        else text.replace("▁", " ").encode("utf-8", "surrogatepass")
        for text, i in entries.items()
    }


@dataclass(frozen=True)
class Overlap:
    """What two vocabularies, each ``{id: bytes}``, have in common."""

    target: dict[int, bytes]
    drafter: dict[int, bytes]

    @cached_property
    def differing(self) -> list[int]:
        """Ids that both have, with different texts."""
        return sorted(i for i in self.target.keys() & self.drafter.keys() if self.target[i] != self.drafter[i])

    @property
    def in_place(self) -> float:
        """The share of the larger vocabulary that has the same text under the same id in both."""
        same = len(self.target.keys() & self.drafter.keys()) - len(self.differing)
        return same / max(len(self.target), len(self.drafter))

    @property
    def is_plain(self) -> bool:
        """Whether they are equal up to padding: no translation is needed."""
        return not self.differing and self.in_place >= IN_PLACE

    @property
    def is_part(self) -> bool:
        """Whether the target has every token of the drafter."""
        return set(self.drafter.values()) <= set(self.target.values())

    @cached_property
    def shared(self) -> dict[int, int]:
        """The drafter's id for each of the target's whose text it has; one for one."""
        theirs = {text: i for i, text in sorted(self.drafter.items(), reverse=True) if text}  # of equals the lowest id
        mine = {text: i for i, text in sorted(self.target.items(), reverse=True) if text}
        return {i: theirs[text] for text, i in sorted(mine.items(), key=lambda item: item[1]) if text in theirs}

    @property
    def share(self) -> float:
        """The shared tokens as a share of the smaller vocabulary."""
        return len(self.shared) / min(len(self.target), len(self.drafter))


def compare(target: Target, model: Target) -> Overlap | None:
    """How far the vocabularies agree; None where one of the two has no tokenizer to ask."""
    if target.tokenizer is None or model.tokenizer is None:
        return None
    return Overlap(token_bytes(target.tokenizer), token_bytes(model.tokenizer))


def in_words_of(target: Target, model: Target) -> Target:
    """`model` as a drafter for `target`: itself where the ids are the same, else behind a translation.

    Raises LoadError where they have too little in common.
    """
    overlap = compare(target, model)
    if overlap is None:
        if target.vocab_size != model.vocab_size:
            raise LoadError(
                f"{model.name} has {model.vocab_size} token ids and {target.name} has {target.vocab_size}, without a tokenizer to compare"
            )
        return model
    if overlap.is_plain:
        return model
    shared = len(overlap.shared)
    if overlap.share < LEAST_OVERLAP:
        raise LoadError(
            f"the drafter {model.name} cannot draft for {target.name}: they share {shared} tokens, {overlap.share:.0%} of the smaller "
            f"vocabulary, and at least {LEAST_OVERLAP:.0%} are needed; use a drafter whose tokenizer is closer to the target's"
        )
    if not overlap.is_part:  # what was cut out of the target's vocabulary is meant to be smaller
        warnings.warn(
            f"{model.name} has another vocabulary than {target.name}: it drafts only the {shared} tokens that both have "
            f"({shared / len(overlap.target):.0%} of the target's, {shared / len(overlap.drafter):.0%} of its own)",
            OutriderWarning,
            stacklevel=3,
        )
    return Translated(model, target.vocab_size, overlap)


def _fewest(text: bytes, pieces: dict[bytes, int]) -> tuple[int, ...]:
    """The fewest pieces that spell `text`; bytes that no piece has are left out, as few as can be."""
    best: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]  # of each prefix: bytes left out, number of pieces, the pieces
    for end in range(1, len(text) + 1):
        ways = [(best[end - 1][0] + 1, *best[end - 1][1:])]
        for start in range(end):
            if (piece := pieces.get(text[start:end])) is not None:
                left_out, number, before = best[start]
                ways.append((left_out, number + 1, (*before, piece)))
        best.append(min(ways, key=lambda way: way[:2]))
    return best[-1][2]


class Spelling:
    """The drafter's ids for each token of the target: its own where it has that token, else the fewest that spell it; at least one.

    vocab_size, drafter_size: ids from there on are nobody's. end: the drafter's id for what it cannot spell at all.
    """

    def __init__(self, overlap: Overlap, vocab_size: int, drafter_size: int, end: int):
        shared = {mine: theirs for mine, theirs in overlap.shared.items() if mine < vocab_size and theirs < drafter_size}
        self.shared = shared
        """As in `Overlap`, without what is padding."""
        self._end = end
        self._texts = overlap.target
        self._by_text = {text: i for i, text in sorted(overlap.drafter.items(), reverse=True) if text and i < drafter_size}
        self._known: dict[int, tuple[int, ...]] = {mine: (theirs,) for mine, theirs in shared.items()}

    def __call__(self, token: int) -> tuple[int, ...]:
        if token not in self._known:
            self._known[token] = _fewest(self._texts.get(token, b""), self._by_text) or (self._end,)
        return self._known[token]


class _Translation(Slot):
    """A slot of the model behind, and where each of the target's tokens ends in it."""

    def __init__(self, inner: Slot, ends: Sequence[int] = ()):
        self.inner = inner
        self.ends = list(ends)
        self.pending: tuple[list[list[int]], bool] | None = None  # the rows of each node of the last pass; whether it was run

    @property
    def length(self) -> int:  # type: ignore[override]
        return len(self.ends)

    def inner_length(self, length: int) -> int:
        """Tokens of the model behind that the first `length` of the target's take."""
        return self.ends[length - 1] if length else 0


class Translated(Target):
    """A draft model with other token ids than its target, which takes and gives the target's.

    Tokens that it has are fed as such, others as the fewest of its own that spell them. Logits of tokens that it lacks are
    -inf; beyond its own context all are, and nothing is run.
    """

    def __init__(self, model: Target, vocab_size: int, overlap: Overlap):
        self.inner = model
        self.overlap = overlap
        self.vocab_size = vocab_size
        self.name, self.tokenizer, self.device, self.dtype = model.name, model.tokenizer, model.device, model.dtype
        self.n_layers, self.hidden_size, self.n_parameters = model.n_layers, model.hidden_size, model.n_parameters
        self.context_length = model.context_length
        self.spell = Spelling(overlap, vocab_size, model.vocab_size, min(model.eos, default=0))
        shared = self.spell.shared
        back = {theirs: mine for mine, theirs in shared.items()}
        self.eos = frozenset(back[t] for t in model.eos if t in back)
        self._mine = torch.tensor(list(shared), device=model.device)  # [S]
        self._theirs = torch.tensor(list(shared.values()), device=model.device)  # [S]

    def open(self, like: Slot | None = None, length: int = 0) -> Slot:
        if like is None:
            return _Translation(self.inner.open())
        assert isinstance(like, _Translation)
        kept = like.inner_length(length)
        return _Translation(self.inner.open(like.inner, min(kept, like.inner.length)), like.ends[:length])

    def truncate(self, slot: Slot, length: int) -> None:
        assert isinstance(slot, _Translation)
        self.inner.truncate(slot.inner, min(slot.inner_length(min(length, slot.length)), slot.inner.length))
        del slot.ends[length:]

    def prefill(
        self, slot: Slot, tokens: Sequence[int], layers: Sequence[LayerKey] = (), logits: bool = False
    ) -> Iterator[Output]:
        assert isinstance(slot, _Translation)
        if layers or logits:
            raise ParameterError("a drafter with another vocabulary gives no hidden states, and logits of drafts only")
        start, before = slot.length, slot.inner_length(slot.length)
        pieces: list[int] = []
        for token in tokens:
            pieces += self.spell(token)
            slot.ends.append(before + len(pieces))
        if slot.inner.length == before:
            for _ in self.inner.prefill(slot.inner, pieces[: max(0, self.inner.context_length - before)]):
                pass
        yield Output(None, start=start)

    def forward(
        self,
        work: Sequence[tuple[Slot, DraftTree]],
        layers: Sequence[LayerKey] = (),
        upto: int | None = None,
        skip: Sequence[int] = (),
    ) -> list[Output]:
        if layers:
            raise ParameterError("a drafter with another vocabulary gives no hidden states")
        slots: list[_Translation] = []
        inner: list[tuple[Slot, DraftTree]] = []
        for slot, tree in work:
            assert isinstance(slot, _Translation)
            wider, rows = self._wider(tree)
            before = slot.inner_length(slot.length)
            run = slot.inner.length == before and before + wider.depth < self.inner.context_length
            slot.pending = rows, run
            slots.append(slot)
            if run:
                inner.append((slot.inner, wider))
        passed = iter(self.inner.forward(inner, (), upto, skip) if inner else ())
        return [Output(self._logits(slot, passed), start=slot.length) for slot in slots]

    def _logits(self, slot: _Translation, passed: Iterator[Output]) -> Tensor:
        """Logits ``[n, V]`` of the slot's last pass under the target's ids."""
        assert slot.pending is not None
        rows, run = slot.pending
        if not run:
            return torch.full((len(rows), self.vocab_size), -math.inf, device=self.device)
        logits = next(passed).logits
        assert logits is not None
        last = torch.tensor([own[-1] for own in rows], device=logits.device)
        mine = logits.new_full((len(rows), self.vocab_size), -math.inf)
        return mine.index_copy_(1, self._mine, logits[last].index_select(1, self._theirs))

    def _wider(self, tree: DraftTree) -> tuple[DraftTree, list[list[int]]]:
        """The tree in the drafter's ids, each node a chain of what spells it, and the rows of each node."""
        tokens: list[int] = []
        parents: list[int] = []
        rows: list[list[int]] = []
        for token, parent in zip(tree.tokens, tree.parents):
            above = rows[parent][-1] if parent >= 0 else -1
            rows.append([])
            for piece in self.spell(token):
                rows[-1].append(len(tokens))
                tokens.append(piece)
                parents.append(above)
                above = rows[-1][-1]
        return DraftTree(tuple(tokens), tuple(parents)), rows

    def commit(self, slot: Slot, path: Sequence[int]) -> None:
        assert isinstance(slot, _Translation) and slot.pending is not None
        rows, run = slot.pending
        slot.pending = None
        if run:
            self.inner.commit(slot.inner, [row for node in path for row in rows[node]])
        for node in path:
            slot.ends.append(slot.inner_length(slot.length) + len(rows[node]))

    def close(self, slot: Slot) -> None:
        assert isinstance(slot, _Translation)
        self.inner.close(slot.inner)
        slot.closed = True

    def memory(self) -> dict[str, int]:
        return self.inner.memory()

    def describe(self) -> dict[str, Any]:
        return self.inner.describe()
