"""Trace files come back as they were written; figures against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from outrider.accept import Test
from outrider.decode import Fixed, Sequence, decode
from outrider.drafters import NoDrafter
from outrider.drafters.base import Drafter, State, Work
from outrider.drafters.replay import ReplayDrafter
from outrider.errors import LoadError, OutriderError
from outrider.sampling import SamplingParams
from outrider.targets.table import TableTarget
from outrider.trace import Round, Statistics, Times, TokenLogprob, TraceWriter, drafted_nothing, read_trace, statistics
from outrider.tree import Budget, DraftTree

TARGET = TableTarget(seed=3, eos=())


class Sampling(Drafter):
    """Draws from a table of its own, so that its drafts have a q; a tree where k > 1."""

    name = "sampling"

    def __init__(self, k: int = 1):
        super().__init__()
        self.k = k
        self.table = TableTarget(seed=3, noise=1.0, eos=())

    def open(self, sampler: Any) -> State:
        return State(sampler)

    def propose(self, work: Work) -> list[DraftTree]:
        trees = []
        for state, tokens, budget, _ in work:
            drafts, laws, parents = [tokens[-1]], [], [-1]
            while len(drafts) + self.k <= budget.nodes + 1 and len(laws) < budget.depth:
                path = [] if not laws else [drafts[i] for i in range(1, len(drafts), self.k)]  # always the first sibling
                ((new, q, _),) = state.sampler.draw(self.table.logits([*tokens, *path])[None], [path], self.k)
                parent = len(drafts) - self.k if laws else 0
                laws += [q, *[None] * (self.k - 1)] if laws else [q]
                drafts += new
                parents += [parent] * len(new)
            laws += [None] * (len(drafts) - len(laws))
            trees.append(DraftTree(tuple(drafts), tuple(parents), tuple(laws), tuple(1 / (i + 1) for i in range(len(drafts)))))
        return trees


def run(drafter: Drafter, rule: str, draft: int = 4, **params: Any) -> list[Round]:
    given = SamplingParams(**{"temperature": 1.0, "seed": 5, "max_tokens": 24, "logprobs": 3, **params})
    sequences = [Sequence(TARGET, [1, 2, 3 + i], given, rule, number=i) for i in range(2)]
    return list(decode(TARGET, drafter, sequences, Fixed(draft)))


ROUNDS = {
    "plain": lambda: run(NoDrafter(), "rejection"),
    "chain": lambda: run(Sampling(), "block"),
    "tree": lambda: run(Sampling(2), "rejection"),
    "coupled": lambda: run(Sampling(2), "coupled", logprobs=0),
    "lossy": lambda: run(Sampling(), "typical", logprobs=None),
    "script": lambda: run(
        ReplayDrafter(ReplayDrafter.Options(script=tuple(range(12)) * 3, wrong_at=1, shape="tree")), "rejection"
    ),
}


@pytest.mark.parametrize("name", ROUNDS)
def test_round_trip(name: str, tmp_path: Path) -> None:
    rounds = ROUNDS[name]()
    header = {"target": "table", "options": {"draft": 4}, "text": "ä\u2028\x85 \U0001f600"}
    with TraceWriter(tmp_path / "t.jsonl", header) as writer:
        for r in rounds:
            writer.write(r)
    assert read_trace(tmp_path / "t.jsonl") == (header, rounds)
    assert all(hash(r) is not None for r in read_trace(tmp_path / "t.jsonl")[1])  # tuples all the way down
    for line in (tmp_path / "t.jsonl").read_text(encoding="utf-8").split("\n")[:-1]:
        json.loads(line)


def test_rounds_say_what_happened() -> None:
    rounds = ROUNDS["tree"]()
    assert any(r.proposed > 2 for r in rounds) and any(r.accepted > 0 for r in rounds)
    for r in rounds:
        assert len(r.p) == len(r.q) == len(r.tokens) and r.q[0] is None and r.p[0] == 1.0
        assert all(q is not None and 0 < q <= 1 for q in r.q[1:])
        assert r.emitted[: r.accepted] == tuple(r.tokens[i] for i in r.path[1 : r.accepted + 1])
        assert r.logprobs is not None and [entry.token for entry in r.logprobs] == list(r.emitted)
        assert all(len(entry.top) == 3 and entry.top[0][1] >= entry.top[2][1] for entry in r.logprobs)
        assert r.times.total > 0 and r.rows >= len(r.tokens) and r.budget.nodes <= 4
    texts = ["".join(r.text for r in rounds if r.sequence == i) for i in range(2)]
    assert all(len(text) == 24 for text in texts)


def test_logprobs_are_the_targets_own() -> None:
    tokens = [1, 2, 3]
    for r in (r for r in ROUNDS["chain"]() if r.sequence == 0):
        for entry in r.logprobs or ():
            expected = TARGET.logits(tokens).log_softmax(0)
            assert entry.logprob == pytest.approx(float(expected[entry.token]), abs=1e-12)
            assert [t for t, _ in entry.top] == expected.argsort(descending=True)[:3].tolist()
            tokens.append(entry.token)
    assert len(tokens) == 3 + 24


def write(path: Path, rounds: list[Round]) -> bytes:
    with TraceWriter(path, {"target": "t"}) as writer:
        for r in rounds:
            writer.write(r)
    return path.read_bytes()


def test_texts_go_with_the_tokens_that_are_new_in_their_sequence(tmp_path: Path) -> None:
    rounds = ROUNDS["chain"]()
    with TraceWriter(tmp_path / "t", {}) as writer:
        for r in rounds:
            writer.write(r, TARGET.tokenizer)
    known: dict[int, dict[str, str]] = {0: {}, 1: {}}
    for line in (tmp_path / "t").read_text(encoding="utf-8").split("\n")[1:-1]:
        value = json.loads(line)
        mine = known[value["sequence"]]
        assert not value["texts"].keys() & mine.keys(), "told twice"
        mine |= value["texts"]
        assert {str(t) for t in (*value["tokens"], *value["emitted"])} <= mine.keys()
    assert all(text == TARGET.tokenizer.decode([int(t)]) for mine in known.values() for t, text in mine.items())
    assert read_trace(tmp_path / "t")[1] == rounds


def test_draws_say_why_each_drafted_token_was_kept() -> None:
    for name in ("chain", "tree", "script"):
        tests = [test for r in ROUNDS[name]() if r.sequence == 0 for test in r.tests]
        assert {test.kept for test in tests} == {True, False}
        assert all(
            test.draw is not None and 0 <= test.draw < 1 and test.kept == (test.draw < test.probability) for test in tests
        )
        assert len({test.draw for test in tests}) == len(tests), "a number was used twice"
    for name in ("coupled", "lossy"):
        assert all(test.draw is None for r in ROUNDS[name]() for test in r.tests)


def test_p_next_is_the_targets_probability_of_the_token_after_the_path() -> None:
    for r in ROUNDS["plain"]():
        assert r.logprobs is not None and r.p_next == pytest.approx(math.exp(r.logprobs[0].logprob))
    for name in ("chain", "tree"):
        for r in ROUNDS[name]():
            assert r.p_next is not None and r.logprobs is not None
            if len(r.emitted) == len(r.path):
                assert r.p_next == pytest.approx(math.exp(r.logprobs[-1].logprob))


def test_traces_of_version_1_and_fields_of_later_writers_are_read(tmp_path: Path) -> None:
    r = ROUNDS["chain"]()[0]
    line = json.loads(write(tmp_path / "t", [r]).split(b"\n")[1])
    del line["p_next"]
    for test in line["tests"]:
        del test["draw"]
    (tmp_path / "t").write_text('{"outrider_trace": 1}\n' + json.dumps({**line, "from_the_future": [1]}) + "\n")
    old = dataclasses.replace(r, p_next=None, tests=tuple(dataclasses.replace(test, draw=None) for test in r.tests))
    assert read_trace(tmp_path / "t") == ({}, [old])


def test_a_last_line_cut_anywhere_is_left_out(tmp_path: Path) -> None:
    first = dataclasses.replace(ROUNDS["chain"]()[0], pieces=(("\u2028a\x85\x0bö\U0001f600", True),))
    path = tmp_path / "t.jsonl"
    whole = write(path, [first, first])
    last = whole[:-1].rfind(b"\n") + 1
    for end in {*range(last, len(whole) - 1, 7), *range(whole.rfind(b"pieces"), whole.rfind(b"logprobs"))}:
        path.write_bytes(whole[:end])
        assert read_trace(path)[1] == [first]
    for end in (len(whole) - 1, len(whole)):  # only the line feed is missing, or nothing
        path.write_bytes(whole[:end])
        assert read_trace(path)[1] == [first, first]


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    whole = write(path, ROUNDS["chain"]()[:3]).split(b"\n")
    for broken in (b"", b"{", b"5", b"[]", b"{}", b"\xff", whole[2][:-9], whole[2].replace(b'"path"', b'"way"')):
        path.write_bytes(b"\n".join([*whole[:2], broken, *whole[3:]]))
        with pytest.raises(LoadError, match="line 3: not a Round"):
            read_trace(path)


@pytest.mark.parametrize(
    "content", (b"", b"\n", b"hello\n", b"{}\n", b"[1]\n", b"3\n", b'{"other": 1}\n', b"\xff\xfe\x00", b'"a"')
)
def test_not_a_trace(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(LoadError, match="is not an Outrider trace"):
        read_trace(tmp_path / "t")


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    (tmp_path / "v").write_text('{"outrider_trace": 3}\n')
    with pytest.raises(LoadError, match="version 3; this Outrider reads versions 1 to 2"):
        read_trace(tmp_path / "v")
    with pytest.raises(LoadError, match="cannot read"):
        read_trace(tmp_path / "missing")
    with pytest.raises(LoadError, match="cannot read"):
        read_trace(tmp_path)
    with pytest.raises(LoadError, match="cannot write"):
        TraceWriter(tmp_path / "no" / "t", {})


# ---- figures -------------------------------------------------------------------------------------------------------------


def a_round(
    tokens: tuple[int, ...] = (1,),
    parents: tuple[int, ...] = (-1,),
    path: tuple[int, ...] = (0,),
    emitted: tuple[int, ...] = (7,),
    **more: Any,
) -> Round:
    values: dict[str, Any] = {
        "sequence": 0,
        "number": 0,
        "context": 3,
        "tokens": tokens,
        "parents": parents,
        "score": None,
        "p": (1.0,) * len(tokens),
        "q": (None,) * len(tokens),
        "tests": (Test(1, 0.5, True),),
        "path": path,
        "emitted": emitted,
        "pieces": (),
        "logprobs": None,
        "finish": None,
        "error": None,
        "rule": "rejection",
        "lossy": False,
        "seed": 5,
        "drafter": "test",
        "budget": Budget(4, 4),
        "rows": len(tokens),
        "sequences": 1,
        "times": Times(prefill=9, propose=1, forward=6, probabilities=1, accept=1, cut=1, commit=0, observe=0),
    }
    return Round(**{**values, **more})


CHAIN = {"tokens": (1, 2, 3, 4), "parents": (-1, 0, 1, 2)}


def test_figures_of_chains() -> None:
    rounds = [
        a_round(**CHAIN, path=(0, 1, 2), emitted=(2, 3, 9)),  # two of three kept
        a_round(**CHAIN, path=(0,), emitted=(9,)),  # none
        a_round(**CHAIN, path=(0, 1, 2, 3), emitted=(2, 3, 4, 9)),  # all, and a bonus
        a_round(),  # nothing drafted
        a_round(**CHAIN, path=(0, 1, 2, 3), emitted=(2, 3), finish="length", sequence=1),  # all kept, two survive the cut
    ]
    s = statistics(rounds)
    assert (s.sequences, s.passes, s.rows, s.proposed, s.accepted, s.emitted) == (2, 5, 17, 12, 7, 11)
    assert s.reached_by_depth == (4, 3, 2) and s.accepted_by_depth == (3, 3, 1)
    assert s.conditional_rates == [3 / 4, 1.0, 1 / 2]
    assert s.acceptance_rate == 7 / 12 and s.acceptance_length == 11 / 5
    assert s.total_seconds == pytest.approx(50e-9) and s.seconds["prefill"] == pytest.approx(45e-9)
    assert s.tokens_per_second == pytest.approx(11 / 50e-9) and s.overhead == pytest.approx(0.3)
    assert [r.accepted for r in rounds] == [2, 0, 3, 0, 2] and [r.proposed for r in rounds] == [3, 3, 3, 0, 3]
    assert rounds[0].times.total == 10


def test_figures_of_trees() -> None:
    star = {"tokens": (1, 2, 3, 4, 5), "parents": (-1, 0, 0, 2, 2)}
    rounds = [
        a_round(**star, path=(0, 2), emitted=(3, 9)),  # the second sibling; below it nobody
        a_round(**star, path=(0, 1), emitted=(2, 9)),  # the first, a leaf
        a_round(**star, path=(0, 2, 4), emitted=(3, 5, 9)),
    ]
    s = statistics(rounds)
    assert (s.passes, s.rows, s.proposed, s.accepted, s.emitted) == (3, 15, 12, 4, 7)
    assert s.reached_by_depth == (3, 2) and s.accepted_by_depth == (3, 1)
    assert s.conditional_rates == [1.0, 0.5] and s.acceptance_length == 7 / 3


def test_figures_of_nothing() -> None:
    s = statistics([])
    assert (s.passes, s.emitted, s.acceptance_rate, s.acceptance_length, s.tokens_per_second, s.overhead) == (
        0,
        0,
        None,
        None,
        None,
        None,
    )
    assert s.reached_by_depth == () and s.conditional_rates == []
    plain = statistics([a_round(), a_round(number=1)])
    assert plain.acceptance_rate is None and plain.acceptance_length == 1.0
    error = statistics([a_round(emitted=(), error="NaN", finish="error", p=(), tests=())])
    assert error.emitted == 0 and error.acceptance_length == 0
    json.dumps(s.as_dict())
    assert {"acceptance_rate", "conditional_rates", "tokens_per_second", "proposed"} <= set(s.as_dict())


def test_impossible_figures_are_refused() -> None:
    fine = a_round(**CHAIN)  # makes up for the others in the sums
    with pytest.raises(OutriderError, match="proposed 0, kept 0 and emitted 2"):
        statistics([a_round(emitted=(7, 8)), a_round(emitted=())])
    with pytest.raises(OutriderError, match="round 0 of sequence 0 proposed 0, kept 2 and emitted 3"):
        statistics([fine, a_round(path=(0, 1, 2), emitted=(7, 8, 9))])
    figures = statistics([a_round()])
    with pytest.raises(OutriderError, match="1 accepted of 0 proposed"):
        dataclasses.replace(figures, accepted=1).check()
    with pytest.raises(OutriderError, match="3 emitted, 0 accepted in 1 passes"):
        dataclasses.replace(figures, emitted=3).check()


@pytest.mark.parametrize("name", ROUNDS)
def test_figures_of_real_rounds_are_possible_and_add_up(name: str) -> None:
    rounds = ROUNDS[name]()
    s = statistics(rounds)
    assert isinstance(s, Statistics) and s.sequences == 2 and s.emitted == 48
    assert s.accepted <= s.proposed and s.emitted <= s.accepted + s.passes
    assert s.accepted == sum(s.accepted_by_depth)
    assert s.rows == s.proposed + s.passes and all(0 <= rate <= 1 for rate in s.conditional_rates)
    assert s.total_seconds == pytest.approx(sum(r.times.total for r in rounds) / 1e9)
    for r in rounds:
        assert len(r.emitted) <= len(r.path) and r.rows == sum(o.proposed + 1 for o in rounds if o.number == r.number)


def test_drafted_nothing() -> None:
    assert drafted_nothing([a_round()]) and not drafted_nothing([]) and not drafted_nothing([a_round(drafter="none")])
    assert not drafted_nothing([a_round(), a_round(**CHAIN)])


def test_logprob_entries_survive_infinities(tmp_path: Path) -> None:
    entry = TokenLogprob(3, -0.5, ((3, -0.5), (4, -math.inf)))
    r = a_round(logprobs=(entry, TokenLogprob(5, -math.inf)))
    written = write(tmp_path / "t", [r])
    assert read_trace(tmp_path / "t")[1] == [r]
    assert b"Infinity" not in written  # most readers of JSON refuse it
    assert json.loads(written.splitlines()[1])["logprobs"][0]["top"] == [[3, -0.5], [4, None]]
