"""Sequences that join and leave a running batch: prompts in chunks, forks, several drafters, errors of one of many."""

from __future__ import annotations

from typing import Any, Sequence

import pytest
from test_decode import PROMPTS, free, sequences, target
from toys import Scripted, Whatever, plain

from outrider.decode import Batch, Fixed
from outrider.decode import Sequence as Decoded
from outrider.drafters import NoDrafter, load_drafter
from outrider.drafters.model import ModelDrafter
from outrider.errors import CacheError, DraftError
from outrider.sampling import SamplingParams
from outrider.targets.base import Slot
from outrider.targets.table import TableTarget
from outrider.trace import Round
from outrider.tree import DraftTree


def one(t: TableTarget, prompt: list[int], params: SamplingParams, number: int = 0) -> Decoded:
    return Decoded(t, prompt, params, "block", 0, number)


def until_done(batch: Batch) -> list[Round]:
    rounds = []
    while batch.is_busy:
        rounds += batch.step()
    return rounds


@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_who_joins_later_decodes_as_if_alone(chunk: int | None) -> None:
    t, drafter = target(), ModelDrafter(target(noise=0.5))
    made = sequences(t, free(20), free(20, temperature=1.0, seed=3), free(20, presence_penalty=1.0), rule="coupled")
    wanted = [plain(t, [PROMPTS[i % 3]], s.params, "coupled")[0].tokens for i, s in enumerate(made)]
    batch = Batch(t, drafter, Fixed(3), chunk)
    for i, s in enumerate(made):
        batch.add(s)
        for _ in range(2 + i):
            batch.step()
    until_done(batch)
    assert [tuple(s.output) for s in made] == wanted
    assert t.open_slots == drafter.model.open_slots == 0


def test_a_long_prompt_does_not_stall_the_others() -> None:
    t = target()
    running = one(t, PROMPTS[0], free(60))
    late = one(t, [1, 2] * 30, free(3), number=1)
    batch = Batch(t, NoDrafter(), Fixed(0), chunk=4)
    batch.add(running)
    batch.step()
    batch.add(late)
    for done in range(1, 15):
        assert len(batch.step()) == 1, "the one that runs gets its round"
        assert late.slot.length == 4 * done
    assert len(batch.step()) == 2
    until_done(batch)
    assert tuple(late.output) == plain(t, [[1, 2] * 30], free(3))[0].tokens


def test_a_cancelled_prompt_is_freed_before_the_next_round() -> None:
    t = target()
    first, second = one(t, [1, 2] * 60, free(3)), one(t, PROMPTS[0], free(30))
    batch = Batch(t, NoDrafter(), Fixed(0), chunk=4)
    batch.add(second)
    batch.step()
    batch.add(first)
    batch.step()
    assert t.open_slots == 2
    first.cancelled = True
    batch.step()
    assert first.finish == "cancelled" and t.open_slots == 1 and batch.running == [second]
    batch.close()
    assert second.finish == "cancelled" and t.open_slots == 0


def test_a_fork_is_attached_before_its_prompt_is_computed() -> None:
    t, drafter = target(), ModelDrafter(target(noise=0.5))
    prompt = [1, 2, 3, 4, 5, 6]
    source = one(t, prompt, free(8))

    def prepare(s: Decoded) -> None:
        if source.is_open and s is not source:
            s.attach(t.open(source.slot, 4), source.state.fork(s.sampler))
            s.state.truncate(4)

    batch = Batch(t, drafter, Fixed(3), prepare=prepare)
    batch.add(source)
    batch.step()
    computed = t.rows_computed
    late = one(t, [1, 2, 3, 4, 7, 7], free(8), number=1)
    batch.add(late)
    batch._join()
    assert t.rows_computed == computed + 1, "of five prompt tokens before the anchor four were there"
    until_done(batch)
    assert tuple(late.output) == plain(t, [[1, 2, 3, 4, 7, 7]], free(8))[0].tokens
    assert t.open_slots == drafter.model.open_slots == 0


def test_each_sequence_may_have_its_own_drafter_and_length() -> None:
    t = target()
    made = sequences(t, *[free(24)] * 4)
    wanted = [plain(t, [PROMPTS[i % 3]], free(24))[0].tokens for i in range(4)]
    made[1].drafter = load_drafter("suffix", t)
    made[2].drafter = NoDrafter()
    made[3].most_drafted = 2
    model = ModelDrafter(target(noise=0.5))
    batch = Batch(t, model, Fixed(5))
    for s in made:
        batch.add(s)
    rounds = until_done(batch)
    assert [tuple(s.output) for s in made] == wanted
    by_sequence = [[r for r in rounds if r.sequence == i] for i in range(4)]
    assert [{r.drafter for r in own} for own in by_sequence] == [{"model"}, {"suffix"}, {"none"}, {"model"}]
    assert max(r.proposed for r in by_sequence[0]) > 2 >= max(r.proposed for r in by_sequence[3]) > 0
    assert t.open_slots == model.model.open_slots == 0


def test_a_drafter_that_breaks_its_contract_for_one_ends_that_one() -> None:
    t = target()
    made = sequences(t, free(12), free(12), free(12))

    def wrong_for_one(tokens: Sequence[int], *_: Any) -> DraftTree:
        return DraftTree.chain(tokens[-1] if list(tokens[:2]) != PROMPTS[1] else tokens[-1] + 1, [1])

    batch = Batch(t, Whatever(wrong_for_one), Fixed(3))
    for s in made:
        batch.add(s)
    with pytest.raises(DraftError, match="not below the anchor"):
        batch.step()
    batch.step_apart()
    assert made[1].finish == "error" and "not below the anchor" in (made[1].error or "") and not made[1].is_open
    until_done(batch)
    assert [tuple(s.output) for s in (made[0], made[2])] == [plain(t, [PROMPTS[i]], free(12))[0].tokens for i in (0, 2)]
    assert t.open_slots == 0


class Small(TableTarget):
    """Has room for so many tokens in all."""

    cells = 40

    def forward(self, work: Any, *more: Any, **values: Any) -> Any:
        self.held = {id(slot): slot for slot in (*getattr(self, "held", {}).values(), *(s for s, _ in work)) if not slot.closed}
        if sum(slot.length for slot in self.held.values()) + sum(len(tree) for _, tree in work) > self.cells:
            raise CacheError("no room")
        return super().forward(work, *more, **values)


def test_no_room_ends_the_newest_and_the_others_go_on() -> None:
    t = Small(vocab_size=12, seed=5)
    old, new = one(t, PROMPTS[0], free(25)), one(t, PROMPTS[1], free(25))
    batch = Batch(t, Scripted([[1] * 40] * 2), Fixed(2))
    batch.add(old)
    batch.add(new)
    failed = 0
    while batch.is_busy:
        try:
            batch.step()
        except CacheError:
            failed += 1
            batch.step_apart()
    assert failed and new.finish == "error" and new.error == "no room" and old.finish == "length"
    assert tuple(old.output) == plain(target(), [PROMPTS[0]], free(25))[0].tokens
    assert t.open_slots == 0


def test_a_state_is_freed_when_the_target_has_no_slot() -> None:
    class Full(TableTarget):
        def open(self, like: Slot | None = None, length: int = 0) -> Any:
            raise CacheError("no slot")

    drafter = ModelDrafter(target(noise=0.5))
    batch = Batch(Full(vocab_size=12, seed=5), drafter, Fixed(2))
    alone = one(target(), PROMPTS[0], SamplingParams())
    batch.add(alone)
    with pytest.raises(CacheError):
        batch.step()
    batch.step_apart()
    assert alone.finish == "error" and drafter.model.open_slots == 0 and not batch.is_busy
