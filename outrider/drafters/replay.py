"""Drafts a script: the tokens that a test expects, with wrong ones where it asks for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

from ..errors import ParameterError
from ..sampling import Sampler
from ..tree import DraftTree
from .base import Drafter, Options, State, Work


@dataclass(frozen=True)
class ReplayOptions(Options):
    """script: tokens of the whole sequence, prompt included. wrong_at: in each draft, the place (from 0) of a wrong token;
    -1 for none. shift: what is added to the token there. shape: chain, or tree (the wrong token gets a right sibling after it).
    """

    script: tuple[int, ...] = ()
    wrong_at: int = -1
    shift: int = 1
    shape: str = "chain"

    def __post_init__(self) -> None:
        if self.shape not in ("chain", "tree"):
            raise ParameterError(f"option shape must be chain or tree; got {self.shape!r}")


class ReplayState(State):
    """`script` may be set to give this sequence its own."""

    script: Sequence[int] | None = None


class ReplayDrafter(Drafter):
    """Point-mass drafts from a script, by position."""

    name = "replay"
    Options = ReplayOptions
    options: ReplayOptions

    def open(self, sampler: Sampler) -> ReplayState:
        return ReplayState(sampler)

    def propose(self, work: Work) -> list[DraftTree]:
        return [self._tree(ask.state, ask.tokens, min(ask.budget.nodes, ask.budget.depth)) for ask in work]

    def _tree(self, state: State, tokens: Sequence[int], length: int) -> DraftTree:
        assert isinstance(state, ReplayState)
        script = self.options.script if state.script is None else state.script
        drafts = list(script[len(tokens) : len(tokens) + length])
        at = self.options.wrong_at
        if not 0 <= at < len(drafts):
            return DraftTree.chain(tokens[-1], drafts)
        right = drafts[at]
        drafts[at] = (right + self.options.shift) % state.sampler.vocab_size
        if self.options.shape == "chain":
            return DraftTree.chain(tokens[-1], drafts)
        # The wrong token stands alone; the right one and all after it follow as its later sibling.
        wrong = drafts[at]
        drafts[at] = right
        tokens_, parents = [tokens[-1], *drafts[:at], wrong], [*range(-1, at + 1 - 1), at]
        for token in drafts[at : length - 1]:
            parents.append(at if len(tokens_) == at + 2 else len(tokens_) - 1)
            tokens_.append(token)
        return DraftTree(tuple(tokens_), tuple(parents))
