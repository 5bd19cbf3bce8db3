"""Grammars: what may follow each path, the law under it, drafts that break it, its end, and what it cannot be combined with."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any, Sequence

import laws
import pytest
import test_conformance
import torch
from laws import Branch, Case, check_law, outcomes
from toys import Bushy, Scripted, Whatever, check_figures, plain, run

from outrider.decode import Fixed, decode
from outrider.decode import Sequence as Decoded
from outrider.drafters import NoDrafter
from outrider.engine import Engine
from outrider.errors import DraftError, LogitsError, ParameterError
from outrider.grammar import Grammar, Grammars
from outrider.sampling import Sampler, SamplingParams
from outrider.targets.table import TableTarget
from outrider.tree import Budget, DraftTree

pytest.importorskip("llguidance")

TEXTS = ["<end>", "a", "b", "ab", "c", "ba", "bc"]
WORDS = ("ab", "aab", "abcab", "bca", "cc", "abc")
PROMPT = [1, 2]
JSON_TEXTS = ["<end>", *'{}[]:,"abx01 \n', '"a"', '": ', "true", "null", '{"', "ab"]
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"enum": ["ab", "ba", "x"]},
        "b": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "choices": {"choices": WORDS},
    "regex": {"regex": "(ab|c){2,4}a?"},
    "lark": {"lark": 'start: "a" start "b" | "c"'},
}


def target(texts: Sequence[str] = TEXTS, **changes: Any) -> TableTarget:
    return TableTarget(**{"vocab_size": len(texts), "texts": texts, "seed": 3, "sharpness": 1.5, **changes})


def json_target(**changes: Any) -> TableTarget:
    return target(JSON_TEXTS, **{"sharpness": 1.0, **changes})


def always_plain(t: TableTarget, prompts: Sequence[Sequence[int]], params: Any, rule: str = "rejection") -> Any:
    """Without any draft, of forced tokens either."""
    return plain(t, prompts, params, rule, draft=0)


# ---- masks -----------------------------------------------------------------------------------------------------------------


def may_follow(path: Sequence[int], ends: Sequence[int] = (0,)) -> list[bool]:
    """What `WORDS` allow after `path`, by comparing texts."""
    text = "".join(TEXTS[t] for t in path)
    allowed = [any(word.startswith(text + piece) for word in WORDS) for piece in TEXTS]
    for end in ends:
        allowed[end] = text in WORDS
    return allowed


def test_masks_are_those_of_the_words() -> None:
    """Every path of up to four tokens, in an order in which the parser goes back and forth."""
    matcher = Grammars(target().tokenizer, 7).matcher(Grammar("choices", json.dumps(WORDS)), frozenset((0,)))
    paths = [path for n in range(5) for path in itertools.product(range(1, 7), repeat=n)]
    random.Random(0).shuffle(paths)
    inside = 0
    for path in paths:
        text = "".join(TEXTS[t] for t in path)
        mask = matcher.mask(path)
        if any(word.startswith(text) for word in WORDS):
            inside += 1
            assert mask is not None and mask.tolist() == may_follow(path), path
            longer = any(word.startswith(text) and word != text for word in WORDS)
            assert matcher.is_over(path) == (text in WORDS and not longer)
        else:
            assert mask is None and not matcher.is_over(path)
    assert inside > 20
    assert matcher.mask((3, 0)) is None, "nothing follows an end"


def test_committed_tokens_are_the_root_of_later_paths() -> None:
    matcher = Grammars(target().tokenizer, 7).matcher(Grammar("choices", json.dumps(WORDS)), frozenset((0,)))
    for emitted in ([1], [1, 2], [1, 2, 4]):
        matcher.mask((2, 4, 1))
        matcher.mask((6,))
        matcher.commit(emitted[-1:])
        for token in range(1, 7):
            mask = matcher.mask((token,))
            allowed = may_follow(emitted)[token]
            assert (mask is not None) == allowed
            assert mask is None or mask.tolist() == may_follow((*emitted, token))


@pytest.mark.parametrize("kind", KINDS)
def test_each_path_is_asked_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One mask for each distinct path of a round, whoever asks and how often."""
    t = target()
    params = SamplingParams(**KINDS[kind], temperature=1.0)
    matcher = t.matcher(params)
    assert matcher is not None
    computed = []
    original = matcher._mask
    monkeypatch.setattr(matcher, "_mask", lambda: computed.append(tuple(matcher._at)) or original())
    sampler = Sampler(params, PROMPT, t.vocab_size, t.eos, matcher=matcher)
    tree = DraftTree((2, 1, 1, 4, 2, 3), (-1, 0, 0, 0, 1, 2))
    logits = torch.zeros(6, 7, dtype=torch.float64)
    sampler.probabilities(logits, tree)
    sampler.draw(logits, [tree.path_tokens(i) for i in range(6)])
    matcher.fit(tree, Budget(8, 8))
    assert computed and len(set(computed)) == len(computed)


# ---- laws ------------------------------------------------------------------------------------------------------------------


@dataclass
class Constrained(Case):
    """A case whose tokens must match `ENDLESS`, a language without an end."""

    def allowed(self, path: Sequence[int]) -> list[bool]:
        text = "".join("abc"[t] for t in (*self.emitted, *path))
        return [re.fullmatch(r"((a|bb)c?)*b?", text + letter) is not None for letter in "abc"]

    def law(self, path: Sequence[int], side: int = 0) -> list[float]:
        logits = self.logits(path, side).tolist()
        if self.allowed(path).count(True) and self.reachable(path):
            logits = [x if ok else -math.inf for x, ok in zip(logits, self.allowed(path))]
        return laws.reference_law(logits, self.params, self.prompt, (*self.emitted, *path), self.ends)

    def reachable(self, path: Sequence[int]) -> bool:
        return all(self.allowed(path[:i])[t] for i, t in enumerate(path))

    def sampler(self, rule: str) -> Sampler:
        matcher = ENDLESS.matcher(Grammar("regex", "((a|bb)c?)*"), frozenset(self.ends))
        sampler = Sampler(self.params, self.prompt, self.vocab, frozenset(self.ends), rule, matcher=matcher)
        sampler.commit(self.emitted)
        return sampler


ENDLESS = Grammars(TableTarget(3, eos=(), texts=list("abc")).tokenizer, 3)


@pytest.mark.parametrize("how", [laws.drawn, laws.chosen, laws.mixed], ids=lambda how: how.__name__)
@pytest.mark.parametrize("rule", ["rejection", "block", "traversal"])
def test_the_law_under_a_grammar(rule: str, how: laws.How) -> None:
    """q and p are both within the grammar; what one round emits has exactly the law of the constrained target."""
    shapes = [(1,), (1, 1), (1, 1, 1)] + ([] if rule == "block" else [(2,), (2, 1), (2, 2)])
    for seed, shape, emitted in itertools.product(range(2), shapes, ((), (0,), (1, 1, 2))):
        check_law(rule, Constrained(seed=seed, emitted=emitted), shape, how)
    hot = SamplingParams(temperature=0.8, top_k=2, repetition_penalty=1.3, logit_bias={1: 0.4})
    check_law(rule, Constrained(seed=4, params=hot), (1, 1), how)


def brute(t: TableTarget, tokens: tuple[int, ...] = ()) -> dict[tuple[tuple[int, ...], str], float]:
    """The law of (tokens, finish reason) of decoding within `WORDS`, one token at a time."""
    text = "".join(TEXTS[x] for x in tokens)
    if text in WORDS and not any(word.startswith(text) and word != text for word in WORDS):
        return {(tokens, "stop"): 1.0}
    logits = t.logits([*PROMPT, *tokens]).masked_fill(~torch.tensor(may_follow(tokens)), -math.inf)
    law: defaultdict[tuple[tuple[int, ...], str], float] = defaultdict(float)
    for token, p in enumerate(logits.softmax(dim=-1).tolist()):
        if p > 0:
            after = {((*tokens, 0), "stop"): 1.0} if token == 0 else brute(t, (*tokens, token))
            for outcome, chance in after.items():
                law[outcome] += p * chance
    return law


class Tossing(Branch):
    """Branches where the loop expects a sampler's draws."""

    def tossed(self) -> list[float]:
        return []


def chain_draft(tokens: Sequence[int], budget: Budget, times: int) -> DraftTree:
    """Right, wrong and illegal tokens, more than the words have."""
    return DraftTree.chain(tokens[-1], [(3, 4, 1, 5), (1, 2, 4), (4, 4, 4), (0, 1), ()][times % 5])


def tree_draft(tokens: Sequence[int], budget: Budget, times: int) -> DraftTree:
    nodes = (tokens[-1], 1, 3, 6, 0, 3, 2, 4, 1)
    return DraftTree(nodes, (-1, 0, 0, 0, 0, 1, 1, 2, 3))


@pytest.mark.parametrize(
    ("rule", "draft"),
    [("rejection", chain_draft), ("block", chain_draft), ("rejection", tree_draft), ("traversal", tree_draft), ("block", None)],
)
def test_the_law_of_whole_texts(rule: str, draft: Any) -> None:
    """Over every decision of every round, with ends, illegal drafts and forced tokens: the law of what comes out."""
    t = target(sharpness=0.7)
    params = SamplingParams(temperature=1.0, choices=WORDS)
    drafted = 0

    def one(source: Tossing) -> tuple[tuple[int, ...], str]:
        nonlocal drafted
        sequence = Decoded(t, PROMPT, params, rule)
        sequence.sampler.draws = source  # type: ignore[assignment]
        drafter = Whatever(draft) if draft else NoDrafter()
        rounds = list(decode(t, drafter, [sequence], Fixed(8)))
        check_figures(sequence, rounds)
        drafted += sum(r.proposed for r in rounds)
        return tuple(sequence.output), sequence.finish or ""

    found: defaultdict[tuple[tuple[int, ...], str], float] = defaultdict(float)
    for weight, outcome, _ in outcomes(one, Tossing):
        found[outcome] += weight
    wanted = brute(t)
    assert len(wanted) > 10 and drafted > 0
    assert found.keys() == wanted.keys()
    assert max(abs(found[key] - p) for key, p in wanted.items()) < 1e-9


# ---- the oracle under a grammar ----------------------------------------------------------------------------------------------

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "logprobs": 2},
    "bias": {"logit_bias": {0: 50.0, 4: -100.0, 7: 20.0}},
    "coupled": {"temperature": 1.0, "seed": 5},
    "coupled, cut": {"temperature": 1.4, "seed": 8, "top_k": 4, "top_p": 0.9, "presence_penalty": 0.7},
}
DRAFT = 4


@pytest.mark.parametrize("name", PARAMS)
def test_errors_at_each_offset(name: str) -> None:
    """A script goes on past the end of the grammar and has an illegal token at one place: the outcome is that of plain decoding."""
    t = json_target()
    prompts = [[3, 4], [7], [8, 9, 1]]
    ended = cut = 0
    for grammar in ({"json_schema": SCHEMA}, {"json_object": True}, {"regex": '(\\{|"a"|ab){3,9}'}):
        params = SamplingParams(max_tokens=40, **PARAMS[name], **grammar)
        rules = ("coupled",) if params.temperature else ("rejection", "block", "traversal", "coupled")
        for rule in rules:
            wanted = always_plain(t, prompts, params, rule)
            for outcome in wanted:
                if outcome.finish == "stop" and "json_schema" in grammar:
                    value = json.loads(outcome.text)
                    assert value["a"] in ("ab", "ba", "x") and 1 <= len(value["b"]) <= 2
            scripts = [[*p, *o.tokens, *[7, 3, 0, 5] * 3] for p, o in zip(prompts, wanted)]
            kinds = [(Scripted, {"wrong_at": j, "shift": shift}) for j in range(-1, DRAFT) for shift in (1, 5)]
            for kind, options in [*kinds, *([(Bushy, {})] if rule != "block" else [])]:
                found, rounds = run(t, kind(scripts, **options), prompts, params, rule, DRAFT)
                assert found == wanted, (grammar, rule, options)
                ended += sum(o.finish == "stop" for o in found)
                cut += sum(r.budget.nodes > r.proposed for own in rounds for r in own)
                if options.get("wrong_at") == -1:
                    assert [len(own) for own in rounds] == [-(-len(o.tokens) // (DRAFT + 1)) for o in wanted]
    assert ended > 50 and cut > 20, (ended, cut)


def test_illegal_tokens_are_not_run() -> None:
    """A draft of nothing but illegal tokens costs no row of the target."""
    t = json_target()
    params = SamplingParams(max_tokens=30, json_schema=SCHEMA)
    bad = Whatever(lambda tokens, budget, times: DraftTree.chain(tokens[-1], [2, 2, 2, 2]))  # } is never the only thing to come
    wanted, without = run(t, NoDrafter(), [[3, 4]], params, "block")
    found, rounds = run(t, bad, [[3, 4]], params, "block")
    assert found == wanted
    assert sum(r.rows for r in rounds[0]) <= sum(r.rows for r in without[0]) + 2


def test_forced_tokens_are_drafted_by_any_drafter() -> None:
    t = json_target()
    params = SamplingParams(max_tokens=60, json_schema=SCHEMA)
    slow, plain_rounds = run(t, NoDrafter(), [[3, 4]], params, "block", 0)
    fast, rounds = run(t, NoDrafter(), [[3, 4]], params, "block", 8)
    assert fast == slow and sum(r.proposed for r in plain_rounds[0]) == 0
    assert sum(r.accepted for r in rounds[0]) > 0 and len(rounds[0]) < len(plain_rounds[0])


def test_a_drawn_token_outside_the_grammar_is_a_fault_of_the_drafter() -> None:
    t = target()
    law = torch.full((7,), 1 / 7, dtype=torch.float64)
    own_law = Whatever(lambda tokens, budget, times: DraftTree.chain(tokens[-1], [5], [law]))
    with pytest.raises(DraftError, match="grammar"):
        run(t, own_law, [PROMPT], SamplingParams(temperature=1.0, choices=("cc",)), "block")


# ---- ends ------------------------------------------------------------------------------------------------------------------


def test_the_grammars_end_is_a_stop_and_not_a_length() -> None:
    t = target()
    params = SamplingParams(choices=("cc",), max_tokens=2)
    for draft in (0, 4):
        (outcome,), _ = run(t, NoDrafter(), [PROMPT], params, "block", draft)
        assert (outcome.text, outcome.finish, len(outcome.tokens)) == ("cc", "stop", 2)
    (short,), _ = run(t, NoDrafter(), [PROMPT], replace(params, max_tokens=1))
    assert (short.text, short.finish) == ("c", "length")


def test_end_tokens_come_only_where_the_grammar_may_end() -> None:
    t = target(eos_bias=50.0)
    (outcome,) = always_plain(t, [PROMPT], SamplingParams(regex="(ab){0,2}c(ab){0,9}"))
    assert outcome.finish == "stop" and outcome.tokens[-1] == 0 and outcome.text.count("c") == 1
    params = SamplingParams(regex="(ab){0,2}c(ab){0,9}", stop_token_ids=(5,), logit_bias={5: 100})  # "ba": not as text either
    (other,) = always_plain(target(), [PROMPT], params)
    assert other.finish == "stop" and other.tokens[-1] == 5 and "c" in other.text


def test_stop_strings_end_a_text_within_its_grammar() -> None:
    t = target()
    params = SamplingParams(choices=("abcab",), stop=("ca",))
    for draft in (0, 5):
        (outcome,), _ = run(t, NoDrafter(), [PROMPT], params, "block", draft)
        assert (outcome.text, outcome.finish) == ("ab", "stop")


@pytest.mark.parametrize("draft", [0, 5])
@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_no_token_left_is_an_error_of_that_sequence_alone(rule: str, draft: int) -> None:
    """It comes after the tokens that could be emitted, whatever was drafted; the others go on."""
    t = target()
    params = [
        SamplingParams(choices=("abcab",), min_tokens=9),
        SamplingParams(max_tokens=9),
        SamplingParams(choices=("abcab",), min_tokens=1),
    ]
    sequences = [Decoded(t, PROMPT, p, rule, 0, i) for i, p in enumerate(params)]
    rounds = list(decode(t, NoDrafter(), sequences, Fixed(draft)))
    first, free, last = sequences
    assert (first.text, first.finish) == ("abcab", "error") and "min_tokens (9)" in (first.error or "")
    assert first.output == last.output and last.finish == "stop" and last.error is None
    assert len(free.output) == 9 and free.finish == "length"
    assert [r.error for r in rounds if r.sequence == 0][-1] == first.error
    assert t.open_slots == 0
    with pytest.raises(LogitsError, match="min_tokens"):
        Engine(t, NoDrafter(), draft, rule).generate(PROMPT, params[0])


def test_a_text_that_the_vocabulary_cannot_write() -> None:
    t = target()
    (outcome,), rounds = run(t, NoDrafter(), [PROMPT], SamplingParams(regex="ab(z|é)"))
    assert (outcome.text, outcome.finish) == ("ab", "error") and "no token is left" in (rounds[0][-1].error or "")


def test_a_grammar_that_becomes_too_complex_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser never recovers from its limits: what it had is given to a new one, and the sequence ends with an error."""
    t = target()
    sequence = Decoded(t, PROMPT, SamplingParams(regex="(a|b|c){6}"), "block")
    matcher = sequence.sampler.matcher
    assert matcher is not None

    class Failing:
        """A parser that fails after two tokens."""

        def __init__(self, inner: Any):
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def compute_bitmask(self) -> bytes:
            if len(matcher._emitted) + len(matcher._at) >= 2:
                self.inner.consume_token(5000)
            return self.inner.compute_bitmask()

    matcher._parser = Failing(matcher._parser)
    original = matcher._compiled
    monkeypatch.setattr(matcher, "_compiled", type("", (), {"deep_copy": lambda self: Failing(original.deep_copy())})())
    rounds = list(decode(t, NoDrafter(), [sequence]))
    assert sequence.finish == "error" and len(sequence.text) >= 2 and "cannot be followed" in (rounds[-1].error or "")


# ---- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"json_object": True, "regex": "a"}, "json_object and regex cannot be given together"),
        ({"choices": ("a",), "lark": "start: /a/"}, "choices and lark"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos and regex"),
        ({"json_schema": "{"}, "json_schema is not JSON"),
        ({"json_schema": "[]"}, "json_schema must be a JSON object"),
        ({"json_schema": {"a": math.nan}}, "json_schema cannot be written as JSON"),
    ],
)
def test_parameters_that_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"regex": "(a"}, "regex cannot be used: .*unclosed group"),
        ({"lark": "begin: /a/"}, "lark cannot be used"),
        ({"json_schema": {"type": "strin"}}, "json_schema cannot be used"),
        ({"json_schema": {"not": {"type": "string"}}}, "json_schema cannot be used: .*not"),
        ({"json_schema": '{"allOf": [' * 200 + "{}" + "]}" * 200}, "json_schema cannot be used: .*recursion"),
        ({"regex": "z"}, "regex: no token of this model begins"),
        ({"regex": "", "min_tokens": 2, "stop_token_ids": (0,)}, "min_tokens .2. holds back the end, and regex allows"),
    ],
)
def test_grammars_that_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Engine(target(), NoDrafter()).generate(PROMPT, **values)


def test_a_target_without_a_tokenizer_has_no_grammar() -> None:
    t = target()
    t.tokenizer = None  # type: ignore[assignment]
    with pytest.raises(ParameterError, match="regex needs a tokenizer"):
        Decoded(t, PROMPT, SamplingParams(regex="a"), "block")


def test_choices_are_taken_as_they_are_written() -> None:
    texts = ["<end>", "a", '"', "\\", "\n", "é", "/", "$", "|", " ", "(", "n", "😀"]
    t = target(texts)
    for choice in ('a"a', "\\n", "a\na", "é|a", "/a/", "$a (", " a", "😀é"):
        for outcome in always_plain(t, [[1]], SamplingParams(choices=(choice,))):
            assert (outcome.text, outcome.finish) == (choice, "stop")


def test_several_choices_of_one_prompt() -> None:
    t = json_target()
    results = Engine(t, NoDrafter()).generate([3, 4], n=4, json_schema=SCHEMA, temperature=1.5, seed=3, max_tokens=80)
    texts = {r.text for r in results if r.finish_reason == "stop"}
    assert len(texts) > 1 and all(json.loads(text)["a"] for text in texts)


# ---- every drafter ---------------------------------------------------------------------------------------------------------

LETTERS = {"regex": "([b-f]{2}|[e-j]{3}c){3,5}"}


@test_conformance.everyone
def test_every_drafter_under_a_grammar(name: str, shape: str) -> None:
    """Greedy and coupled equal constrained plain decoding; what is drawn is within the grammar, and nothing of it is left out."""
    t = test_conformance.target()
    prompts = test_conformance.PROMPTS[:2]
    for values, rule in (({}, "rejection"), ({"temperature": 1.2, "seed": 4}, "coupled"), ({"temperature": 1.0}, "traversal")):
        drafter, extra = test_conformance.make(name, shape, t)
        params = SamplingParams(max_tokens=40, **LETTERS, **values, **extra)
        watched = test_conformance.Watched(drafter)
        found, _ = run(t, watched, prompts, params, rule, 5)
        assert all(re.fullmatch(LETTERS["regex"], o.text) for o in found if o.finish == "stop")
        if rule != "traversal":
            assert found == always_plain(t, prompts, params, rule)
        test_conformance.free_memory(drafter)
