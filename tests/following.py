"""What follows a text by the target's hidden states: checks that every such drafter passes."""

from __future__ import annotations

from typing import Any, Sequence

import pytest
from toys import run

from outrider.decode import Pace, close_sequence, decode, open_sequence
from outrider.decode import Sequence as Decoded
from outrider.drafters.base import Ask, Drafter, State
from outrider.sampling import SamplingParams
from outrider.tree import Budget, DraftTree


class Now(Pace):
    """Budgets by round: so much where `on` says so."""

    def __init__(self, on: Any, budget: Budget = Budget(6, 3)):
        self.on, self.budget, self.calls = on, budget, 0

    def budgets(self, sequences: Sequence[Any]) -> list[Budget]:
        self.calls += 1
        return [self.budget if self.on(self.calls, s.number) else Budget(0, 0) for s in sequences]


def shadow(target: Any, drafter: Drafter, state: Any, tokens: Sequence[int], budget: Budget = Budget(12, 4)) -> None:
    """The state proposes what a new one proposes that has seen the same text, with the same scores."""
    sequence = Decoded(target, tokens, SamplingParams(), "rejection")
    open_sequence(target, drafter, sequence)
    state.sampler = sequence.sampler
    mine, fresh = drafter.propose([Ask(state, tokens, budget), Ask(sequence.state, tokens, budget)])
    assert len(mine) > 1 and mine.score is not None and fresh.score is not None
    assert (mine.tokens, mine.parents) == (fresh.tokens, fresh.parents)
    assert mine.score == pytest.approx(fresh.score, rel=1e-9)
    close_sequence(target, sequence)


class Turns(Drafter):
    """Two drafters by turns; both see every round."""

    name = "turns"

    def __init__(self, one: Drafter, other: Drafter):
        super().__init__()
        self.both, self.layers, self.calls = (one, other), one.layers, 0
        self.asked: list[bool] = []

    def open(self, sampler: Any) -> Any:
        state = State(sampler)
        state.both = [drafter.open(sampler) for drafter in self.both]  # type: ignore[attr-defined]
        return state

    def propose(self, work: Any) -> list[DraftTree]:
        self.calls += 1
        turn = self.calls % 2
        self.asked.append(turn == 0)
        return self.both[turn].propose([ask._replace(state=ask.state.both[turn]) for ask in work])

    def observe(self, work: Any) -> None:
        for i, drafter in enumerate(self.both):
            drafter.observe([(state.both[i], *rest) for state, *rest in work])


class Wrong(Drafter):
    """Drafts tokens that are hardly ever right, in a tree."""

    name = "wrong"

    def open(self, sampler: Any) -> State:
        return State(sampler)

    def propose(self, work: Any) -> list[DraftTree]:
        return [DraftTree((ask.tokens[-1], 98, 99, 98), (-1, 0, 0, 2)) for ask in work]


def share(rounds: Sequence[Any]) -> float:
    """Accepted tokens of those that a path could hold, rounds that end the text left out."""
    rounds = [r for r in rounds if r.proposed and not r.finish]
    depths = [DraftTree(r.tokens, r.parents).depth for r in rounds]
    assert len(rounds) >= 4 and min(depths) > 0
    return sum(r.accepted for r in rounds) / sum(depths)


def check_cut_and_fork(target: Any, drafter: Drafter, kept: int) -> None:
    """The next turn of a conversation shares its first tokens; a fork has a text of its own."""
    sequence = Decoded(target, [9, 8, 7] * 10, SamplingParams(max_tokens=9, ignore_eos=True), "rejection")
    sequence.keep_open = True
    for _ in decode(target, drafter, [sequence], Now(lambda *_: True)):
        pass
    slot, state = sequence.detach()
    fork, other = target.open(slot, slot.length), state.fork(sequence.sampler)
    for each, copy, end in ((slot, state, [40, 41, 42, 43]), (fork, other, [50, 51])):
        target.truncate(each, kept)
        copy.truncate(kept)
        then = Decoded(target, [*sequence.tokens[:kept], *end], SamplingParams(), "rejection")
        then.attach(each, copy)
        open_sequence(target, drafter, then)
        shadow(target, drafter, copy, then.tokens)
    shadow(target, drafter, state, [*sequence.tokens[:kept], 40, 41, 42, 43])  # asked again, after the fork went its own way


def check_accepted(t: Any, drafter: Drafter, prompt: list[int], text: list[int], drafts: Sequence[int]) -> None:
    """An overfitted drafter's drafts are kept on the text that it knows: always, after a pause, and after another's rounds."""
    params = SamplingParams(max_tokens=len(text) - len(prompt), ignore_eos=True)
    for draft in drafts:
        found, (rounds,) = run(t, drafter, [prompt], params, "rejection", draft)
        assert [*prompt, *found[0].tokens] == text
        assert share(rounds) >= 0.95, draft

    sequence = Decoded(t, prompt, params, "rejection")
    rounds = list(decode(t, drafter, [sequence], Now(lambda call, _: call % 3 == 0, Budget(4, 4))))
    assert share(rounds) >= 0.95, "after rounds in which nobody proposed"

    turns = Turns(drafter, Wrong())
    _, (rounds,) = run(t, turns, [prompt], params, "rejection", 4)
    assert share([r for r, mine in zip(rounds, turns.asked) if mine]) >= 0.95, "after rounds of another drafter"
