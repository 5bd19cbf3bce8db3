"""The prefix cache: continued conversations and shared prompts are computed once, for target and drafter."""

from __future__ import annotations

import threading
from statistics import fmean
from typing import Any

import pytest
from serving import Running, served, serving, tiny_target

from outrider.drafters import NoDrafter
from outrider.drafters.model import ModelDrafter, ModelOptions
from outrider.engine import Engine, load
from outrider.server import Served
from outrider.targets.base import Target

LONG = "The bridge over the river will be closed for cars until the end of the week. " * 12


def turn(server: Running, messages: list[Any], **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The usage and the report of one answer, whose message joins `messages`."""
    got = server.chat(messages=messages, **{"temperature": 0, "speculation": {"report": True}, **body})
    messages.append({"role": "assistant", "content": got["choices"][0]["message"]["content"]})
    return got["usage"], got["speculation"][0]


def cached(usage: dict[str, Any]) -> int:
    return usage["prompt_tokens_details"]["cached_tokens"]


def with_model() -> tuple[Served, ModelDrafter]:
    """A server whose default drafter is a model."""
    target = tiny_target()
    drafter = ModelDrafter(tiny_target(memory=0.1), ModelOptions(min_probability=0.0))
    return Served("tiny", Engine(target, drafter, 4)), drafter


def prefilled(model: Target) -> list[int]:
    """How many tokens each prefill of the model computes from now on."""
    numbers: list[int] = []
    prefill = model.prefill

    def counting(slot: Any, tokens: Any, **more: Any) -> Any:
        numbers.append(len(tokens))
        return prefill(slot, tokens, **more)

    model.prefill = counting  # type: ignore[method-assign]
    return numbers


def test_a_second_turn_computes_only_what_is_new() -> None:
    what, drafter = with_model()
    with serving(what) as server:
        fed = prefilled(drafter.model)
        messages = [{"role": "user", "content": LONG[:800]}]
        first, _ = turn(server, messages)
        assert cached(first) == 0 and sum(fed) >= first["prompt_tokens"] - 1
        fed.clear()
        messages.append({"role": "user", "content": "And then?"})
        second, report = turn(server, messages)
        new = second["prompt_tokens"] - first["prompt_tokens"] - first["completion_tokens"]
        assert second["prompt_tokens"] - cached(second) <= new + 8, "its own text may fall into other tokens at the seam"
        assert sum(fed) <= new + 8, "the drafter's cache went along"
        alone = server.chat(messages=messages[:-1], temperature=0, speculation={"drafter": "none", "report": True})
        assert alone["speculation"][0]["tokens"] == report["tokens"]


@pytest.mark.parametrize("drafter", ["suffix", "model"])
@pytest.mark.parametrize("times", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_acceptance_does_not_suffer(drafter: str, times: int) -> None:
    """The second run of a prompt is as well drafted for as the first, and so are the following ones."""
    with serving(served()) as server:
        rates, texts, hits = [], set(), []
        for _ in range(times):
            ask = {"drafter": drafter, "report": True}
            usage, report = turn(server, [{"role": "user", "content": LONG[:300]}], max_tokens=40, speculation=ask)
            rates.append(report["accepted"] / max(report["proposed"], 1))
            texts.add(tuple(report["tokens"]))
            hits.append(cached(usage))
        assert len(texts) == 1 and hits[0] == 0 and len(set(hits[1:])) == 1 and hits[1] == usage["prompt_tokens"] - 1
        assert rates[0] > 0.2 and max(abs(rate - rates[0]) for rate in rates) <= 0.02, rates


NOTES = "\n".join(
    f"Day {i}: station {chr(65 + i * 7 % 26)} measured {i * 37 % 101} units, {i * 53 % 89} of them at night."
    for i in range(1, 95)
)
QUESTIONS = (
    "Which station measured the most units?",
    "List the first five days again, word for word.",
    "Write a short letter about these measurements.",
    "What happened at night?",
    "Write a Python function that reads such notes.",
)


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "draft"), [("suffix", 4), ("auto", "auto")])
def test_a_conversation_of_two_thousand_tokens(drafter: str, draft: int | str) -> None:
    """The next turn computes only what is new, the second run of it is drafted for as well, and so are two hundred requests in a row.

    How much is drafted follows the clock with `auto`, and the share that is kept with it: held to is what a pass gives.
    """
    engine = load("smollm2", drafter, draft=draft)
    computed = prefilled(engine.target)
    with serving(Served("tiny", engine), prefixes=4) as server:
        messages = [{"role": "user", "content": f"{NOTES}\n\n{QUESTIONS[0]}"}]
        first, _ = turn(server, messages, max_tokens=48)
        assert first["prompt_tokens"] >= 2000 and sum(computed) == first["prompt_tokens"] - 1
        computed.clear()
        messages.append({"role": "user", "content": QUESTIONS[1]})
        second, report = turn(server, messages, max_tokens=48)
        new = second["prompt_tokens"] - first["prompt_tokens"] - first["completion_tokens"]
        assert sum(computed) == second["prompt_tokens"] - 1 - cached(second) <= new + 8
        _, again = turn(server, messages[:-1], max_tokens=48)
        print(
            f"{first['prompt_tokens']} tokens, then {sum(computed)} computed for {new} new; {rate(report):.3f}, {rate(again):.3f} kept"
        )
        assert rate(report) > 0.2 and rate(again) >= rate(report) - 0.02
        kept, per_pass = [], []
        for i in range(200):
            asked = [*messages[:2], {"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}]
            usage, report = turn(server, asked, max_tokens=16)
            assert usage["prompt_tokens"] - cached(usage) < 40
            kept.append(rate(report))
            per_pass.append(len(report["tokens"]) / report["passes"])
    for name, values in (("kept", kept), ("tokens a pass", per_pass)):
        print(f"{name} in each fifty requests: {', '.join(f'{fmean(values[at : at + 50]):.3f}' for at in range(0, 200, 50))}")
    assert fmean(per_pass[100:]) >= 0.97 * fmean(per_pass[:100])
    assert draft == "auto" or fmean(kept[100:]) >= fmean(kept[:100]) - 0.02


def rate(report: dict[str, Any]) -> float:
    """The share of what was drafted that was kept."""
    return report["accepted"] / max(report["proposed"], 1)


def test_a_shared_prompt_is_computed_once_though_all_come_at_once() -> None:
    with serving(batch=8) as server:
        usages: list[dict[str, Any]] = []

        def ask(i: int) -> None:
            messages = [{"role": "system", "content": LONG[:400]}, {"role": "user", "content": f"{i}?"}]
            usages.append(turn(server, messages)[0])

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(cached(usage) == 0 for usage in usages) == [False] * 7 + [True]
        choices = server.chat(n=4, max_tokens=5)
        assert choices["usage"]["prompt_tokens_details"]["cached_tokens"] < choices["usage"]["prompt_tokens"]


def test_the_oldest_go_and_contained_ones_are_not_kept_twice() -> None:
    with serving(prefixes=3) as server:
        for i in range(6):
            turn(server, [{"role": "user", "content": f"{i} " * 20}], max_tokens=3)
        server.until_idle()
        assert len(server.scheduler.prefixes) == 3 and server.slots() == 0
        again, _ = turn(server, [{"role": "user", "content": "5 " * 20}], max_tokens=3)
        gone, _ = turn(server, [{"role": "user", "content": "0 " * 20}], max_tokens=3)
        assert cached(again) == again["prompt_tokens"] - 1 and cached(gone) == 0
        server.until_idle()
        assert len(server.scheduler.prefixes) == 3 and server.slots() == 0


def test_a_limit_of_tokens_evicts_and_then_lets_the_newest_wait() -> None:
    with serving(tokens=260, prefixes=8) as server:
        wanted = [server.chat(prompt=f"{i} over the river", temperature=0, max_tokens=100) for i in range(4)]
        got: dict[int, Any] = {}

        def three(i: int) -> None:  # by themselves too much for the limit, whenever the others come
            got[i] = server.chat(prompt=f"{i} over the river", temperature=0, max_tokens=100, n=3)

        threads = [threading.Thread(target=three, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i, one in enumerate(wanted):
            assert [choice["message"] for choice in got[i]["choices"]] == [one["choices"][0]["message"]] * 3
        assert server.scheduler.preempted > 0 and server.scheduler.held_tokens <= 260
        server.until_idle()
        assert server.slots() == 0


class Watching(NoDrafter):
    """Needs the target's states, and notes from where on it got them."""

    name = "watching"
    layers = ("final",)

    def __init__(self) -> None:
        super().__init__()
        self.starts: list[int] = []

    def observe(self, work: Any) -> None:
        self.starts += [output.start for _, _, output, _ in work]


def test_drafters_that_need_hidden_states_do_not_fork_what_lacks_them() -> None:
    target, watching = tiny_target(), Watching()
    what = Served("tiny", load(target, "suffix"), {"watching": Engine(target, watching)})
    with serving(what) as server:
        other, _ = turn(server, [{"role": "user", "content": LONG[:200]}])
        mine = {"drafter": "watching", "report": True}
        first, _ = turn(server, [{"role": "user", "content": LONG[:200]}], speculation=mine)
        assert cached(first) == 0 and watching.starts[0] == 0, "what the other left has no states for this drafter"
        watching.starts.clear()
        second, _ = turn(server, [{"role": "user", "content": LONG[:200]}], speculation=mine)
        assert cached(second) == other["prompt_tokens"] - 1 == watching.starts[0]
        light, _ = turn(server, [{"role": "user", "content": LONG[:200]}])
        assert cached(light) == other["prompt_tokens"] - 1, "who needs no states can fork either"
