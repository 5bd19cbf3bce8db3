"""The prefix cache: what ended sequences held, for those that begin with the same tokens.

An entry is a slot of the target with a state of the drafter. A sequence that shares a prefix with an entry, or with a sequence that
still runs, gets forks of both, cut to what they have in common: nothing that they hold is computed again, by target or drafter.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Iterable

import numpy as np

from ..decode import Sequence as Decoding
from ..drafters.base import Drafter, State
from ..targets.base import Slot, Target

LEAST = 8
"""Fewer tokens in common are not worth a fork."""


@dataclass(frozen=True, eq=False)
class Held:
    """What decodes further from `tokens`: the slot holds exactly these."""

    tokens: np.ndarray
    slot: Slot
    state: State
    drafter: Drafter

    def common(self, tokens: np.ndarray) -> int:
        """How many first tokens are the same."""
        most = min(len(self.tokens), len(tokens))
        differ = np.flatnonzero(self.tokens[:most] != tokens[:most])
        return int(differ[0]) if len(differ) else most


class Prefixes:
    """Entries, the last used last. entries: most of them; with 0, prompts are shared among running sequences alone."""

    def __init__(self, target: Target, entries: int):
        self.target = target
        self.entries = entries
        self._held: OrderedDict[int, Held] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def tokens(self) -> int:
        """Of all entries together."""
        return sum(len(each.tokens) for each in self._held.values())

    def attach(self, sequence: Decoding, drafter: Drafter, running: Iterable[Decoding], own: Drafter) -> int:
        """Give `sequence`, which `drafter` drafts for, forks of what begins as it does; how many tokens need not be computed.

        running: sequences that can be forked, too; own: the drafter of those that do not say.
        """
        wanted = np.array(sequence.tokens[:-1], dtype=np.int64)
        live = [held_by(each, each.drafter or own) for each in running if each.is_open]
        best = max([*self._held.values(), *live], key=lambda each: self._worth(each, wanted, drafter), default=None)
        if best is None or (length := self._worth(best, wanted, drafter)) < LEAST:
            return 0
        if id(best) in self._held:
            self._held.move_to_end(id(best))
        slot = self.target.open(best.slot, length)
        try:
            state = best.state.fork(sequence.sampler) if best.drafter is drafter else drafter.open(sequence.sampler)
        except BaseException:
            self.target.close(slot)
            raise
        state.truncate(length)
        sequence.attach(slot, state)
        return slot.length

    @staticmethod
    def _worth(held: Held, wanted: np.ndarray, drafter: Drafter) -> int:
        """Tokens that need not be computed; none where the drafter would lack the target's states of these."""
        return 0 if held.drafter is not drafter and drafter.layers else held.common(wanted)

    def keep(self, sequence: Decoding, drafter: Drafter) -> None:
        """Take over what an ended sequence holds."""
        if not sequence.is_open:
            return
        new = held_by(sequence, drafter)
        sequence.detach()
        short = len(new.tokens) < LEAST
        if not self.entries or short or any(each.common(new.tokens) == len(new.tokens) for each in self._of(drafter)):
            self._free(new)
            return
        for each in self._of(drafter):
            if each.common(new.tokens) == len(each.tokens):
                self._free(self._held.pop(id(each)))
        self._held[id(new)] = new
        while len(self._held) > self.entries:
            self.evict()

    def _of(self, drafter: Drafter) -> list[Held]:
        return [each for each in self._held.values() if each.drafter is drafter]

    def evict(self) -> bool:
        """Free the entry that was not used for the longest time; whether there was one."""
        if not self._held:
            return False
        self._free(self._held.popitem(last=False)[1])
        return True

    def clear(self) -> None:
        while self.evict():
            pass

    def _free(self, held: Held) -> None:
        self.target.close(held.slot)
        held.state.close()


def held_by(sequence: Decoding, drafter: Drafter) -> Held:
    """What a sequence decodes with."""
    return Held(np.array(sequence.tokens[: sequence.slot.length], dtype=np.int64), sequence.slot, sequence.state, drafter)
