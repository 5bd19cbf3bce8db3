"""The oracle matrix: a scripted drafter replays the target's own continuation with an error at one place, or none.

Whatever the place, the kind of stop, the sampling parameters and the batch, the outcome equals plain decoding: tokens, text,
finish reason, log-probabilities and the stream.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, Iterator

import pytest
from toys import Bushy, Mixed, Outcome, Scripted, Shaped, Whatever, plain, run

from outrider.errors import DraftError, PromptError
from outrider.sampling import SamplingParams
from outrider.targets.table import TableTarget
from outrider.tree import DraftTree

DRAFT = 3
LONG = 10
TEXTS = ["<end>", "a", "b", "ab", "ba", "abc", "c", "ca", "a b", " b", "cab", "bb"]
PROMPTS = [[1, 2, 3], [4, 5], [6, 1, 2, 7, 3]]

PARAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": 2},
    "repetition": {"repetition_penalty": 1.6, "logprobs": 0},
    "presence and frequency": {"presence_penalty": 1.5, "frequency_penalty": 0.8},
    "negative frequency": {"frequency_penalty": -1.0, "repetition_penalty": 0.8},
    "logit_bias": {"logit_bias": {3: 4.0, 5: -100.0, 8: -1.0}},
    "min_tokens": {"min_tokens": 4, "logit_bias": {0: 3.0}},
    "coupled": {"temperature": 0.9, "seed": 5, "logprobs": 1},
    "coupled, cut": {"temperature": 1.2, "seed": 6, "min_p": 0.1, "top_k": 6, "top_p": 0.95},
    "coupled, all": {
        "temperature": 1.1,
        "seed": 7,
        "min_p": 0.05,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "logit_bias": {4: 1.0},
        "min_tokens": 3,
        "logprobs": 3,
    },
}
DRAFTERS: dict[str, tuple[type[Scripted], dict[str, Any], tuple[str, ...]]] = {
    **{f"chain, wrong at {j}": (Scripted, {"wrong_at": j}, ("block", "rejection")) for j in range(-1, DRAFT)},
    **{f"tree, wrong at {j}": (Scripted, {"wrong_at": j, "shape": "tree"}, ("rejection",)) for j in range(DRAFT)},
    "bushy tree": (Bushy, {}, ("traversal",)),
}


def target(**changes: Any) -> TableTarget:
    return TableTarget(**{"vocab_size": len(TEXTS), "texts": TEXTS, "seed": 3, "sharpness": 1.5, **changes})


def stops(free: Outcome, params: SamplingParams) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Every kind of stop at every offset of a draft: what it is, changes of the target, changes of the parameters.

    free: the first prompt's continuation when nothing stops it.
    """
    for at in range(DRAFT + 2):
        yield f"EOS at {at}", {"eos": (free.tokens[at],)}, {}
        yield f"stop token at {at}", {}, {"stop_token_ids": (free.tokens[at], 0)}
    yield "both", {"eos": free.tokens[3:5]}, {"stop_token_ids": free.tokens[4:6], "stop": (free.text[2:4],)}
    yield "ignored EOS", {"eos": free.tokens[:3]}, {"ignore_eos": True}
    for at, size in itertools.product(range(min(8, len(free.text) - 3)), (1, 2, 3)):
        if (at + size) % 2 or size == 3:  # one character or more, within tokens and across them, across rounds
            yield f"stop string at {at}+{size}", {}, {"stop": (free.text[at : at + size],)}
    yield "stop strings", {}, {"stop": ("zz", free.text[3:6], free.text[4:6] + "z", free.text[2:5] + "?")}
    for most in (1, 2, 3, DRAFT + 1, DRAFT + 3):
        yield f"max_tokens {most}", {}, {"max_tokens": most, "min_tokens": min(most, params.min_tokens)}
    yield "stop within the budget", {"eos": (free.tokens[1],)}, {"max_tokens": max(2, params.min_tokens)}
    for room in range(4):
        yield f"room {room}", {"context_length": max(map(len, PROMPTS)) + room}, {}


def same(found: Outcome, wanted: Outcome, case: str) -> None:
    assert found == wanted, f"{case}:\n  found  {found}\n  wanted {wanted}"


@pytest.mark.parametrize("name", PARAMS)
def test_matrix(name: str) -> None:
    base = SamplingParams(max_tokens=LONG, **PARAMS[name])
    rule = "coupled" if base.temperature else "rejection"
    free = plain(target(), PROMPTS[:1], replace(base, ignore_eos=True), rule)[0]
    cases = ended = 0
    for stop, of_target, of_params in stops(free, base):
        t = target(**of_target)
        params = replace(base, **of_params)
        wanted = [plain(t, [p], params, rule)[0] for p in PROMPTS]
        assert plain(t, PROMPTS, params, rule) == wanted, f"{name}, {stop}: a plain batch is not its sequences"
        # the scripts go on past every stop
        onward = replace(params, ignore_eos=True, stop=(), stop_token_ids=(), max_tokens=LONG + 5, min_tokens=base.min_tokens)
        endless = target(**of_target | {"context_length": 99})
        scripts = [p + list(o.tokens) for p, o in zip(PROMPTS, plain(endless, PROMPTS, onward, rule))]
        for which, (kind, options, rules) in DRAFTERS.items():
            for draft_rule in {"coupled", *rules} if rule != "coupled" else {"coupled"}:
                case = f"{name}, {stop}, {which}, {draft_rule}"
                found, rounds = run(t, kind(scripts[:1], **options), PROMPTS[:1], params, draft_rule, DRAFT)
                same(found[0], wanted[0], case)
                drafter = kind(scripts, **options)
                found, rounds = run(t, drafter, PROMPTS, params, draft_rule, DRAFT)
                for number in range(3):
                    same(found[number], wanted[number], f"{case}, sequence {number} of a batch")
                cases += 2
                ended += found[0].finish == "stop"
                if all(len(o.tokens) > 1 for o in wanted) and params.max_tokens > 1 and not stop.startswith("room"):
                    assert drafter.asked[0] == 3, f"{case}: a batch must be proposed for in one call"
                right = all(
                    script[len(p) :][: len(o.tokens)] == list(o.tokens) for script, p, o in zip(scripts, PROMPTS, wanted)
                )
                if "wrong at -1" in which and right and not stop.startswith("room"):  # the fewest passes possible
                    passes = [-(-len(o.tokens) // (DRAFT + 1)) for o in wanted]
                    assert [len(own) for own in rounds] == passes, case
    assert cases > 300 and ended > 100, (cases, ended)


def test_unequal_acceptance() -> None:
    """Three sequences that accept 0, 1 and all of their drafts in the same rounds."""
    t = target()
    for rule, shape in itertools.product(("block", "rejection", "coupled"), ("chain", "tree")):
        if (rule, shape) == ("block", "tree"):
            continue
        params = [
            SamplingParams(max_tokens=n, repetition_penalty=r, ignore_eos=True) for n, r in ((12, 1.0), (9, 1.4), (14, 0.8))
        ]
        wanted = [plain(t, [p], q)[0] for p, q in zip(PROMPTS, params)]
        scripts = [p + list(o.tokens) for p, o in zip(PROMPTS, wanted)]
        scripts[0] = PROMPTS[0] + [(x + 1) % 12 for x in wanted[0].tokens]
        scripts[1] = PROMPTS[1] + [x if i % 2 else (x + 1) % 12 for i, x in enumerate(wanted[1].tokens)]
        found, rounds = run(t, Scripted(scripts, shape=shape), PROMPTS, params, rule)
        assert found == wanted
        assert sum(r.accepted for r in rounds[0]) == 0
        assert len(rounds[2]) == 3 and sum(r.accepted for r in rounds[1]) > 0


SHAPES: dict[str, dict[str, Any]] = {
    "one node": {"widths": (1,)},
    "a chain": {"widths": (1, 1, 1, 1)},
    "a star": {"widths": (6,)},
    "last of three at each depth": {"widths": (3, 3, 3)},
    "full": {"widths": (3, 2, 2), "full": True},
}


@pytest.mark.parametrize("name", ["logprobs", "presence and frequency", "coupled, all"])
def test_shapes_of_trees(name: str) -> None:
    """The accepted path is scattered over the tree, as the last child at each depth; each sequence of the batch has its own tree."""
    params = SamplingParams(max_tokens=LONG, ignore_eos=True, **PARAMS[name])
    t, cases = target(), 0
    for rule in ("coupled",) if params.temperature else ("rejection", "traversal", "coupled"):
        wanted = [plain(t, [p], params, rule)[0] for p in PROMPTS]
        scripts = [p + list(o.tokens) for p, o in zip(PROMPTS, wanted)]
        for which, options in SHAPES.items():
            found, rounds = run(t, Shaped(scripts, **options), PROMPTS, params, rule, 24)
            assert found == wanted, which
            deep = len(options["widths"])
            assert all(r.accepted == min(deep, LONG - 1 - i * (deep + 1)) for own in rounds for i, r in enumerate(own)), which
            cases += 1
        mixed = Mixed([Shaped([script], **options) for script, options in zip(scripts, list(SHAPES.values())[2:])])
        found, rounds = run(t, mixed, PROMPTS, params, rule, 24)
        assert found == wanted and len({own[0].parents for own in rounds}) == 3
    assert cases == len(SHAPES) * (1 if params.temperature else 3)


# ---- drafters that misbehave -----------------------------------------------------------------------------------------------

LAST = {"temperature": 1.0, "seed": 3, "max_tokens": 12}
GREEDY = {"max_tokens": 12, "repetition_penalty": 1.2}


def free(params: dict[str, Any], **changes: Any) -> list[int]:
    (outcome,) = plain(target(**changes), PROMPTS[:1], SamplingParams(**params, ignore_eos=True), "coupled")
    return PROMPTS[0] + list(outcome.tokens)


ODD = {
    "a false EOS": lambda tokens, budget, _: DraftTree.chain(tokens[-1], [0] * budget.depth),
    "outside the vocabulary": lambda tokens, budget, i: DraftTree.chain(
        tokens[-1], [(-1, 12, 10**9, -(10**9))[i % 4], 1][: budget.depth]
    ),
    "outside, later": lambda tokens, budget, i: DraftTree.chain(tokens[-1], [1, 12, 2]),
    "over-long": lambda tokens, budget, _: DraftTree.chain(tokens[-1], [1] * 40),
    "over-wide": lambda tokens, budget, _: DraftTree((tokens[-1], *range(12), *range(12)), (-1, *[0] * 12, *range(1, 13))),
    "nothing, for ever": lambda tokens, budget, _: DraftTree.chain(tokens[-1]),
    "every other time nothing": lambda tokens, budget, i: DraftTree.chain(tokens[-1], [3, 3][: budget.depth] if i % 2 else []),
    "siblings that are equal": lambda tokens, budget, _: DraftTree((tokens[-1], 1, 1, 2, 2), (-1, 0, 0, 1, 2)),
    "siblings that cover all": lambda tokens, budget, _: DraftTree((tokens[-1], *range(12)), (-1, *[0] * 12)),
}


@pytest.mark.parametrize("params", [GREEDY, LAST], ids=["greedy", "coupled"])
@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("draft", [1, 5, 30])
def test_odd_drafts(what: str, params: dict[str, Any], draft: int) -> None:
    t = target(eos_bias=1.0)
    for rule in ("coupled",) if params is LAST else ("rejection", "coupled", "block"):
        if rule == "block" and ("sibling" in what or "wide" in what):
            continue
        wanted = plain(t, PROMPTS, SamplingParams(**params), rule)
        found, rounds = run(t, Whatever(ODD[what]), PROMPTS, SamplingParams(**params), rule, draft)
        assert found == wanted
        assert all(0 <= token < 12 for own in rounds for r in own for token in r.tokens)


def test_right_then_nothing() -> None:
    """A round without drafts follows one in which several tokens were accepted."""
    script = free(GREEDY)

    def every_other(tokens: Any, budget: Any, i: int) -> DraftTree:
        return DraftTree.chain(tokens[-1], script[len(tokens) : len(tokens) + budget.depth] if i % 2 == 0 else [])

    params = SamplingParams(**GREEDY, ignore_eos=True)
    found, (rounds,) = run(target(), Whatever(every_other), PROMPTS[:1], params)
    assert [*PROMPTS[0], *found[0].tokens] == script
    assert [r.accepted for r in rounds[:4]] == [4, 0, 4, 0]


def test_wrong_anchor() -> None:
    t = target()
    with pytest.raises(DraftError, match="anchor"):
        run(t, Whatever(lambda tokens, *_: DraftTree.chain((tokens[-1] + 1) % 12, [1])), PROMPTS, SamplingParams())
    assert t.open_slots == 0


@pytest.mark.parametrize("drafts", [[1] * 9, [12], [-1]])
def test_drawn_tokens_are_not_cut_in_silence(drafts: list[int]) -> None:
    """What was drawn under a q and cannot be kept would bias the output."""
    t = target()
    q = t.logits([1]).softmax(0)
    drafter = Whatever(lambda tokens, *_: DraftTree.chain(tokens[-1], drafts, [q] * len(drafts)))
    with pytest.raises(DraftError, match="beyond its budget"):
        run(t, drafter, PROMPTS, SamplingParams(temperature=1.0))
    assert t.open_slots == 0


def test_too_few_trees() -> None:
    class Short(Whatever):
        def propose(self, work: Any) -> list[DraftTree]:
            return super().propose(work)[1:]

    with pytest.raises(DraftError, match="2 trees for 3"):
        run(target(), Short(lambda tokens, *_: DraftTree.chain(tokens[-1])), PROMPTS, SamplingParams())


def test_one_token_of_room() -> None:
    """The last token needs no draft, and none is asked for."""
    asked = []

    def greedy(tokens: Any, budget: Any, _: int) -> DraftTree:
        asked.append((len(tokens), budget.depth))
        return DraftTree.chain(tokens[-1], [1] * budget.depth)

    for params in (SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)):
        asked.clear()
        found, _ = run(target(), Whatever(greedy), PROMPTS[:1], replace(params, ignore_eos=True), draft=8)
        assert len(found[0].tokens) == params.max_tokens
        assert all(depth <= 3 + params.max_tokens - length - 1 and depth > 0 for length, depth in asked)
        assert bool(asked) == (params.max_tokens > 1)


def test_context_is_full() -> None:
    t = target(context_length=3)
    found, rounds = run(t, Scripted([[1] * 9]), [[1, 2, 3]], SamplingParams())
    assert (found[0].tokens, found[0].finish, rounds[0]) == ((), "length", [])
    with pytest.raises(PromptError, match="4 tokens"):
        run(t, Scripted([[1] * 9]), [[1, 2, 3, 4]], SamplingParams())
