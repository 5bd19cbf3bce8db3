"""The front door: prompts of every kind, several choices, streams, conversations, and errors that say what to do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from test_decode import Sick
from test_model_drafter import Compared
from toys import plain, tiny_target

import outrider
from outrider.decode import Fixed
from outrider.drafters import load_drafter
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.errors import LogitsError, ParameterError, PromptError
from outrider.sampling import SamplingParams
from outrider.targets.table import TableTarget

LAW: dict[str, Any] = {"vocab_size": 12, "seed": 5}


def engine(drafter: str = "suffix", options: dict[str, Any] | None = None, draft: Any = 8, **more: Any) -> Engine:
    return outrider.load(TableTarget(**LAW), drafter, options, draft, **more)


def test_prompts_of_every_kind() -> None:
    e = engine()
    text = e.generate("bcd", max_tokens=9)
    assert text.tokens == e.generate([1, 2, 3], max_tokens=9).tokens
    assert text.tokens == e.generate([{"role": "user", "content": "bcd"}], max_tokens=9).tokens
    several = e.generate(["bcd", [1, 2, 3], [{"role": "user", "content": "bcd"}]], max_tokens=9)
    assert [r.tokens for r in several] == [text.tokens] * 3
    assert text.prompt_tokens == 3 and text.finish_reason in ("stop", "length") and text.error is None
    assert text.stats.emitted == len(text.tokens) == sum(len(r.emitted) for r in text.rounds)
    assert e.target.open_slots == 0
    for empty in ("", [], [[]], ["b", ""]):
        with pytest.raises(PromptError, match="empty"):
            e.generate(empty)
    with pytest.raises(ParameterError, match="no token for '!'"):
        e.generate("!")
    e.target.tokenizer = None
    with pytest.raises(PromptError, match="no tokenizer"):
        e.generate("bcd")


def test_prompts_as_tensors_and_arrays() -> None:
    e = engine()
    wanted = e.generate([1, 2, 3], max_tokens=9).tokens
    ids = torch.tensor([1, 2, 3])
    for prompt in (ids, ids.numpy(), list(ids.numpy()), list(ids), (1, 2, 3), range(1, 4), {"role": "user", "content": "bcd"}):
        assert e.generate(prompt, max_tokens=9).tokens == wanted
        assert [t for c in e.stream(prompt, max_tokens=9) for t in c.tokens] == list(wanted)
    for prompt in (torch.stack([ids, ids]), torch.stack([ids, ids]).numpy(), [ids, ids.numpy()], ("bcd", [1, 2, 3])):
        assert [r.tokens for r in e.generate(prompt, max_tokens=9)] == [wanted] * 2
    assert [r.tokens for r in e.generate(ids[None], max_tokens=9)] == [wanted]
    message = {"role": "user", "content": "bcd"}
    for prompt in (
        *(None, 5, 1.5, b"bcd", {1, 2}, (i for i in (1, 2)), object(), torch.tensor(5)),
        *(
            [1.0, 2.0],
            [True],
            [1, "b"],
            [message, "bcd"],
            [1, message],
            [["a", "b"], "c"],
            torch.ones(2),
            ids[None, None],
            [None],
        ),
    ):
        with pytest.raises(PromptError, match="give a text, a list of messages, a list of token ids"):
            e.generate(prompt)
    with pytest.raises(PromptError, match="cannot be one prompt"):
        e.encode(["bcd", "c"])


def test_parameters() -> None:
    e = engine()
    for wrong in ({"max_tokens": 3}, 5, [{"max_tokens": 3}]):
        with pytest.raises(ParameterError, match="params must be SamplingParams"):
            e.generate("bcd", wrong)
    base = SamplingParams(max_tokens=5)
    assert len(e.generate("bcd", base, ignore_eos=True).tokens) == 5
    with pytest.raises(ParameterError, match="unknown sampling parameter 'tempratur'; known: temperature"):
        e.generate("bcd", tempratur=1)
    with pytest.raises(ParameterError, match="unknown sampling parameter 'tempratur'"):
        e.generate("bcd", base, tempratur=1)
    with pytest.raises(ParameterError, match="2 prompts, but 1 sampling parameters"):
        e.generate(["b", "c"], [base])
    with pytest.raises(ParameterError, match="give max_tokens in each"):
        e.generate(["b", "c"], [base, base], max_tokens=3)
    each = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 6)]
    assert [len(r.tokens) for r in e.generate(["b", "c"], each)] == [3, 6]
    for n in (0, -1, 2.0):
        with pytest.raises(ParameterError, match="n must be 1 or more"):
            e.generate("bcd", n=n)


def test_which_rule() -> None:
    chain, tree = engine(), engine(options={"shape": "tree"})
    assert [e.generate("bcd", max_tokens=2).rule for e in (chain, tree)] == ["block", "traversal"]
    assert [e.generate("bcd", max_tokens=2, seed=1).rule for e in (chain, tree)] == ["coupled"] * 2
    assert engine(accept="rejection").generate("bcd", max_tokens=2, seed=1).rule == "rejection"
    with pytest.raises(ParameterError, match="'block' is defined for chains"):
        engine(options={"shape": "tree"}, accept="block")
    mixed = chain.generate(["b", "c"], [SamplingParams(seed=1, max_tokens=9), SamplingParams(max_tokens=9)])
    assert [r.rule for r in mixed] == ["coupled", "block"]
    assert mixed[0].tokens == chain.generate("b", seed=1, max_tokens=9).tokens
    both = engine(accept="coupled").generate(["b", "c"], [SamplingParams(seed=1, max_tokens=2), SamplingParams(max_tokens=2)])
    assert [r.rule for r in both] == ["coupled"] * 2
    with pytest.raises(ParameterError, match="unknown accept rule"):
        engine(accept="best")
    for draft in (-1, 1025):
        with pytest.raises(ParameterError, match="draft must be from 0 to 1024"):
            engine(draft=draft)
    for wrong in (4.0, "4", True, None):
        with pytest.raises(ParameterError, match=r"draft must be a whole number, 'auto' or a Pace; got"):
            engine(draft=wrong)
    assert engine(draft=Fixed(3)).generate("bcd", max_tokens=2).tokens
    nothing = engine("replay", {"script": "1 2 3 4 5 6"}, draft=0).generate("bcd", max_tokens=5)
    assert nothing.stats.proposed == 0 and nothing.stats.acceptance_length == 1.0
    lossy = engine(accept="typical").generate("bcd", max_tokens=2)
    assert lossy.lossy and not both[0].lossy


def test_a_prediction_needs_a_drafter_that_uses_it() -> None:
    for name in ("none", "lookup", "replay"):
        e = engine(name)
        with pytest.raises(ParameterError, match=f"'{name}' does not use a prediction"):
            e.generate("bcd", prediction="efg")
        with pytest.raises(ParameterError, match="does not use a prediction"):
            e.generate(["bcd", "c"], [SamplingParams(), SamplingParams(prediction="")])
    wanted = engine("none").generate("bcd", max_tokens=30, ignore_eos=True)
    for name in ("suffix", "prediction"):
        found = engine(name).generate("bcd", max_tokens=30, ignore_eos=True, prediction=wanted.text)
        assert found.tokens == wanted.tokens and found.stats.accepted > 10


def test_several_choices() -> None:
    e = outrider.load(TableTarget(**LAW), ModelDrafter(TableTarget(**LAW, noise=0.5)))
    long, timed = [1, 2, 3, 4] * 10, e.target.rows_computed
    results = e.generate(long, n=4, temperature=1.0, seed=3, max_tokens=15, ignore_eos=True)
    assert len({r.tokens for r in results}) == 4
    computed = sum(r.stats.rows for r in results)
    assert e.target.rows_computed - timed == 39 + computed, "the prompt is computed once"
    assert results[0].stats.seconds["prefill"] > 0
    wanted = plain(
        TableTarget(**LAW),
        [long] * 4,
        SamplingParams(temperature=1.0, seed=3, max_tokens=15, ignore_eos=True),
        "coupled",
        choices=[0, 1, 2, 3],
    )
    assert [r.tokens for r in results] == [o.tokens for o in wanted]
    two = e.generate([long, "bcd"], n=2, temperature=1.0, seed=3, max_tokens=15, ignore_eos=True)
    assert [r.tokens for r in two[:2]] == [r.tokens for r in results[:2]] and len(two) == 4
    assert len({r.tokens for r in e.generate("bcd", n=3, max_tokens=9)}) == 1, "greedy choices are equal"
    unseeded = e.generate("bcd", n=3, temperature=1.0, max_tokens=20, ignore_eos=True)
    assert len({r.tokens for r in unseeded}) == 3
    (one,) = e.generate(["bcd"], n=1, max_tokens=3)
    assert len(one.tokens) <= 3
    assert e.target.open_slots == e.drafter.model.open_slots == 0


def test_choices_that_fail_to_open_leave_nothing() -> None:
    e = engine()

    def fails(*_: Any) -> Any:
        raise MemoryError

    e.drafter.observe = fails
    with pytest.raises(MemoryError):
        e.generate("bcd", n=3)
    assert e.target.open_slots == 0


@pytest.mark.parametrize("stop", [(), ("e", "cd"), ("zz",)])
def test_the_stream_is_the_result(stop: tuple[str, ...]) -> None:
    e = engine()
    for values in ({"max_tokens": 30}, {"max_tokens": 30, "temperature": 1.0, "seed": 4}):
        whole = e.generate(["bcd", "c"], stop=stop, **values)
        chunks = list(e.stream(["bcd", "c"], stop=stop, **values))
        for number, result in enumerate(whole):
            own = [c for c in chunks if c.sequence == number]
            assert "".join(c.text for c in own) == result.text
            assert tuple(t for c in own for t in c.tokens) == result.tokens
            assert all("".join(text for text, _ in c.pieces) == c.text for c in own)
            assert [c.finish_reason for c in own] == [None] * (len(own) - 1) + [result.finish_reason]


def test_a_stream_that_is_given_up() -> None:
    e = engine()
    stream = e.stream("bcd", max_tokens=50, ignore_eos=True)
    assert e.target.open_slots == 0, "nothing is opened before the first chunk is asked for"
    next(stream)
    assert e.target.open_slots == 1
    stream.close()
    assert e.target.open_slots == 0
    wanted = engine("none").generate("bcd", max_tokens=20)
    assert e.generate("bcd", max_tokens=20).tokens == wanted.tokens, "and the next request is as ever"


def test_a_stream_without_room_says_so() -> None:
    e = outrider.load(TableTarget(**LAW, context_length=3), "none")
    (chunk,) = e.stream("bcd")
    assert (chunk.finish_reason, chunk.tokens, chunk.round) == ("length", (), None)
    result = e.generate("bcd")
    assert (result.finish_reason, result.tokens, result.stats.acceptance_length) == ("length", (), None)
    assert e.target.open_slots == 0


def test_logits_that_are_no_distribution() -> None:
    e = outrider.load(Sick(**LAW), "none")
    with pytest.raises(LogitsError, match="position 7 are nan"):
        e.generate([4, 5], max_tokens=20, ignore_eos=True)
    chunks = []
    with pytest.raises(LogitsError):
        for chunk in e.stream([4, 5], max_tokens=20, ignore_eos=True):
            chunks.append(chunk)
    assert chunks[-1].finish_reason == "error" and sum(len(c.tokens) for c in chunks) == 5
    good, bad = e.generate([[1, 2], [4, 5]], max_tokens=20, ignore_eos=True)
    assert (good.error, good.finish_reason, len(good.tokens)) == (None, "length", 20)
    assert bad.finish_reason == "error" and "nan" in bad.error and len(bad.tokens) == 5 and bad.text
    assert e.target.open_slots == 0


# ---- conversations -----------------------------------------------------------------------------------------------------


def say(chat: Any, text: str, **values: Any) -> str:
    return "".join(chunk.text for chunk in chat.send(text, **values))


@pytest.mark.parametrize("drafter", ["none", "suffix", "lookup", "model"])
def test_a_conversation_reuses_its_cache(drafter: str) -> None:
    t = TableTarget(**LAW, context_length=400)
    d = ModelDrafter(TableTarget(**LAW, noise=0.5, context_length=400)) if drafter == "model" else load_drafter(drafter, t)
    e = outrider.load(t, d)
    chat = e.chat([{"role": "system", "content": "bbbb" * 5}])
    for turn, text in enumerate(("bcd" * 6, "efg", "b")):
        before, messages = t.rows_computed, [*chat.messages, {"role": "user", "content": text}]
        chunks = list(chat.send(text, max_tokens=20, stop=("jk",)))
        answer = "".join(c.text for c in chunks)
        computed = t.rows_computed - before
        fresh = outrider.load(TableTarget(**LAW, context_length=400), "none").generate(messages, max_tokens=20, stop=("jk",))
        assert answer == fresh.text and chat.messages[-1] == {"role": "assistant", "content": answer}
        new = len(e.encode(messages)) - 1 if turn == 0 else computed - sum(len(c.round.tokens) for c in chunks)
        assert computed == new + sum(len(c.round.tokens) for c in chunks)
        if turn:
            assert new <= len(text) + 2, "only what is new is computed"
    assert t.open_slots == 1
    chat.close()
    chat.close()
    assert t.open_slots == 0 and getattr(getattr(d, "model", None), "open_slots", 0) == 0


@pytest.mark.parametrize("drafter", ["suffix", "model"])
def test_a_conversation_with_other_prefixes(drafter: str) -> None:
    """History that was changed, shortened or replaced between turns; the model's drafts are those of a fresh cache."""
    e = engine() if drafter == "suffix" else outrider.load(TableTarget(**LAW), Compared(TableTarget(**LAW, noise=0.5)))
    chat = e.chat()
    say(chat, "bcd" * 5, max_tokens=10)
    for messages in (chat.messages[:1], [], [{"role": "user", "content": "kkkk"}], [{"role": "user", "content": "bcdbcdk"}]):
        chat.messages = list(messages)
        wanted = engine("none").generate([*messages, {"role": "user", "content": "ef"}], max_tokens=12, temperature=1.0, seed=2)
        assert say(chat, "ef", max_tokens=12, temperature=1.0, seed=2) == wanted.text
    chat.close()
    assert e.target.open_slots == 0


def test_a_turn_that_is_given_up() -> None:
    e = engine()
    chat = e.chat()
    stream = chat.send("bcd", max_tokens=50, ignore_eos=True)
    first = next(stream).text
    stream.close()
    assert chat.messages[-1]["role"] == "assistant" and chat.messages[-1]["content"].startswith(first)
    chat.send("kjihg")  # not started: nothing happens, and nothing is lost
    assert len(chat.messages) == 2 and e.target.open_slots == 1
    wanted = engine("none").generate([*chat.messages, {"role": "user", "content": "e"}], max_tokens=9)
    assert say(chat, "e", max_tokens=9) == wanted.text
    with pytest.raises(PromptError):
        chat.send("b" * 300)
    assert len(chat.messages) == 4
    say(chat, "f", max_tokens=9)
    chat.close()
    assert e.target.open_slots == 0


def test_one_answer_at_a_time() -> None:
    e = engine()
    chat = e.chat()
    stream = chat.send("bcd", max_tokens=50, ignore_eos=True)
    next(stream)
    with pytest.raises(ParameterError, match="the last answer is not finished"):
        chat.send("e")
    answer = "".join(c.text for c in stream)
    assert chat.messages[-1]["content"].endswith(answer) and len(chat.messages) == 2, (
        "the answer goes on as if nothing had been"
    )
    wanted = engine("none").generate([*chat.messages, {"role": "user", "content": "e"}], max_tokens=9)
    early = chat.send("k")
    late = chat.send("e", max_tokens=9)
    with pytest.raises(ParameterError, match="cannot begin: another message was sent"):
        next(early)
    assert "".join(c.text for c in late) == wanted.text and len(chat.messages) == 4
    chat.close()
    assert e.target.open_slots == 0


def test_a_conversation_that_is_closed_in_the_middle_of_an_answer() -> None:
    e = engine()
    chat = e.chat()
    stream = chat.send("bcd", max_tokens=50, ignore_eos=True)
    first = next(stream).text
    chat.close()
    assert list(stream) == [] and e.target.open_slots == 0
    assert chat.messages[-1] == {"role": "assistant", "content": first}
    unheard = chat.send("e")
    chat.close()
    with pytest.raises(ParameterError, match="the conversation was closed"):
        next(unheard)
    assert say(chat, "e", max_tokens=9)
    chat.close()
    assert e.target.open_slots == 0


def test_a_new_prediction_for_each_turn() -> None:
    for name in ("suffix", "prediction"):
        e = engine(name)
        chat = e.chat()
        for text in ("bcd", "efg"):
            wanted = engine("none").generate(
                [*chat.messages, {"role": "user", "content": text}], max_tokens=25, ignore_eos=True
            )
            chunks = list(chat.send(text, max_tokens=25, ignore_eos=True, prediction=wanted.text))
            assert "".join(c.text for c in chunks) == wanted.text
            assert sum(c.round.accepted for c in chunks) > 12
        chat.close()
        assert e.target.open_slots == 0


def test_a_conversation_on_a_real_cache() -> None:
    t = tiny_target("gemma3_text", 1, head_dim=8, sliding_window=16)
    from outrider.targets.table import LetterTokenizer

    t.tokenizer = LetterTokenizer([chr(0x4E00 + i) for i in range(t.vocab_size)])
    e = outrider.load(t, "suffix")
    chat = e.chat()
    for turn in range(4):
        text = "".join(chr(0x4E00 + 3 + (turn * 7 + i) % 90) for i in range(6))
        wanted = e.generate([*chat.messages, {"role": "user", "content": text}], max_tokens=11, temperature=0.8, seed=turn)
        assert say(chat, text, max_tokens=11, temperature=0.8, seed=turn) == wanted.text
    chat.close()


# ---- loading -----------------------------------------------------------------------------------------------------------


def test_load() -> None:
    t = TableTarget(**LAW)
    assert outrider.load(t, None).drafter.name == "none"
    with pytest.raises(ParameterError, match="device: the target is loaded already"):
        outrider.load(t, device="cpu")
    with pytest.raises(ParameterError, match="options: the drafter is made already"):
        outrider.load(t, load_drafter("none", t), {"a": 1})
    with pytest.raises(ParameterError, match="'suffix' has no option 'lenght'; it has shape, "):
        outrider.load(t, "suffix", {"lenght": 3})
    with pytest.raises(ParameterError, match="'none' has no option 'x'; it has none"):
        outrider.load(t, "none", {"x": 3})
    with pytest.raises(ParameterError, match="'model' needs a model"):
        outrider.load(t, "model")
    with pytest.raises(ParameterError, match="shape must be chain or tree; got 'bush'"):
        outrider.load(t, "suffix", {"shape": "bush"})
    with pytest.raises(ParameterError, match="option wrong_at must be int; got 'two'"):
        outrider.load(t, "replay", {"wrong_at": "two"})
    assert outrider.load(t, "replay", {"script": "1, 2 3", "wrong_at": "2"}).drafter.options.script == (1, 2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outrider.load(t).close()
