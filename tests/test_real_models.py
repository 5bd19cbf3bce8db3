"""Real models against transformers' own generation, in float32 and tie-aware: every exception is listed."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ties import Ledger, first_difference
from toys import plain, run

from outrider import models
from outrider.drafters import Drafter, load_drafter, make_options
from outrider.drafters.model import ModelDrafter, ModelOptions
from outrider.drafters.replay import ReplayDrafter, ReplayOptions
from outrider.sampling import SamplingParams
from outrider.targets.transformers import TransformersTarget

SMOL = models.folder("smollm2")
TARGET, DRAFTER = (models.directory() / f"qwen2.5-coder-{size}-instruct" for size in ("1.5b", "0.5b"))
SPEC_BENCH = os.environ.get("OUTRIDER_SPEC_BENCH")

here = pytest.mark.skipif(not (SMOL / "config.json").exists(), reason=f"no {SMOL}: run `outrider models get smollm2`")
qwen = pytest.mark.skipif(
    not all((place / "config.json").exists() for place in (TARGET, DRAFTER)),
    reason=f"no {TARGET.name} and {DRAFTER.name} in {TARGET.parent}",
)
bench = pytest.mark.skipif(SPEC_BENCH is None, reason="OUTRIDER_SPEC_BENCH does not name a file of Spec-Bench questions")

QUESTIONS = [
    "What is the capital of France?",
    "Repeat this list, and add two more: apple, pear, plum, apple, pear, plum.",
    "Write a Python function that reverses a string.",
    "Übersetze ins Englische: Die Katze schläft auf dem Sofa. 😀",
]


def reference(place: Path, prompts: list[list[int]], n: int) -> list[list[int]]:
    """Greedy generation by transformers itself, with a copy of the model that is its own."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = {
            "max_new_tokens": n,
            "do_sample": False,
            "repetition_penalty": 1.0,
            "temperature": None,
            "top_p": None,
            "top_k": None,
        }
        out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
        found.append(out[0, len(prompt) :].tolist())
    return found


def load(place: Path) -> TransformersTarget:
    return TransformersTarget.load(str(place), device="cpu", dtype="float32")


def ask(t: TransformersTarget, questions: list[str]) -> list[list[int]]:
    assert t.tokenizer is not None
    return [t.tokenizer.chat([{"role": "user", "content": question}]) for question in questions]


class Replay(ReplayDrafter):
    """Replays for each prompt what is known to follow it."""

    def __init__(self, texts: list[list[int]], **options: Any):
        super().__init__(ReplayOptions(**options))
        self.texts = texts

    def _tree(self, state: Any, tokens: Any, length: int) -> Any:
        state.script = max(
            self.texts, key=lambda text: next((i for i, (a, b) in enumerate(zip(text, tokens)) if a != b), len(tokens))
        )
        return super()._tree(state, tokens, length)


def drafters(t: TransformersTarget, texts: list[list[int]]) -> dict[str, Drafter]:
    return {
        "none": load_drafter("none", t),
        "suffix": load_drafter("suffix", t),
        "suffix tree": load_drafter("suffix", t, {"shape": "tree"}),
        "lookup": load_drafter("lookup", t),
        "replay": Replay(texts),
        "replay, wrong at 2": Replay(texts, wrong_at=2),
        "replay, tree": Replay(texts, wrong_at=1, shape="tree"),
    }


@pytest.fixture(scope="module")
def smol() -> Any:
    t = load(SMOL)
    prompts = ask(t, QUESTIONS)
    return t, prompts, reference(SMOL, prompts, 32)


@here
def test_smollm2_greedy(smol: Any, capsys: pytest.CaptureFixture[str]) -> None:
    t, prompts, wanted = smol
    ledger = Ledger(t)
    params = SamplingParams(max_tokens=32)
    texts = [prompt + tokens for prompt, tokens in zip(prompts, wanted)]
    for name, drafter in drafters(t, texts).items():
        found, rounds = run(t, drafter, prompts, params, "traversal" if "tree" in name else "rejection", 5)
        for number, outcome in enumerate(found):
            ledger.compare(f"{name}, prompt {number}", prompts[number], wanted[number], outcome.tokens, params)
            assert outcome.text == t.tokenizer.decode(outcome.tokens)
        assert name == "none" or sum(r.accepted for own in rounds for r in own) > 0
    solo, _ = run(t, load_drafter("suffix", t), prompts[1:2], params, "block", 5)
    ledger.compare("suffix alone", prompts[1], wanted[1], solo[0].tokens, params)
    with capsys.disabled():
        print(f"\nSmolLM2, greedy: {ledger}")
    assert len(ledger.ties) <= 3, "ties are rare; so many say that something else is wrong"


@here
def test_smollm2_coupled(smol: Any, capsys: pytest.CaptureFixture[str]) -> None:
    t, prompts, _ = smol
    ledger = Ledger(t)
    params = [SamplingParams(max_tokens=18, temperature=1.0, top_k=50, seed=s, logprobs=1) for s in range(len(prompts))]
    wanted = plain(t, prompts, params, "coupled")
    texts = [prompt + list(o.tokens) for prompt, o in zip(prompts, wanted)]
    for name, drafter in drafters(t, texts).items():
        found, _ = run(t, drafter, prompts, params, "coupled", 5)
        for number, (one, other) in enumerate(zip(wanted, found)):
            ledger.compare(f"{name}, seed {number}", prompts[number], one.tokens, other.tokens, params[number])
            for a, b in zip(one.logprobs, other.logprobs):
                if (a.token, one.tokens) == (b.token, other.tokens):
                    assert abs(a.logprob - b.logprob) < 1e-3
    with capsys.disabled():
        print(f"\nSmolLM2, coupled: {ledger}")
    assert len(ledger.ties) <= 3


@here
def test_smollm2_drafts_for_itself(smol: Any) -> None:
    """The model as its own drafter, in slots of its own: all drafts are right but for ties."""
    t, prompts, _ = smol
    for rule, values in (("block", {}), ("block", {"temperature": 0.8}), ("coupled", {"temperature": 0.8})):
        _, rounds = run(t, ModelDrafter(t), prompts[:2], SamplingParams(max_tokens=20, seed=3, **values), rule, 4)
        proposed, accepted = (sum(getattr(r, what) for own in rounds for r in own) for what in ("proposed", "accepted"))
        ended = sum(r.finish == "stop" and r.proposed for own in rounds for r in own)  # what was drafted past the end
        assert accepted >= 0.97 * (proposed - ended)


GROWN: list[dict[str, Any]] = [
    {},
    {"shape": "tree", "width": 3},
    {"shape": "tree", "growth": "best"},
    {"shape": "tree", "growth": "static", "paths": "0 1 2 0.0 0.1 1.0 0.0.0"},
    {"shape": "tree", "growth": "sampled"},
]


def unsure(place: Path) -> TransformersTarget:
    """The model with noise on its weights: a drafter that is sometimes right."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for weights in model.parameters():
            if weights.ndim == 2:
                weights.mul_(1 + 0.1 * torch.randn_like(weights))
    return TransformersTarget(model, name="unsure")


def check_grown(t: TransformersTarget, model: TransformersTarget, prompts: list[list[int]], cases: Any, n: int) -> Ledger:
    """Trees and chains of a draft model against plain decoding, greedy under every rule, and `coupled` seed by seed."""
    ledger = Ledger(t)
    for options, rule in cases:
        drafter = ModelDrafter(model, make_options(ModelOptions, {"min_probability": 0.02, **options}, "model"))
        if rule == "block" and drafter.drafts_trees:
            continue
        for values in ({}, {"temperature": 1.0, "top_k": 50}) if rule == "coupled" else ({},):
            params = [SamplingParams(max_tokens=n, seed=s, ignore_eos=True, **values) for s in range(len(prompts))]
            wanted = plain(t, prompts, params, rule)
            found, rounds = run(t, drafter, prompts, params, rule, 7)
            for number, (one, other) in enumerate(zip(wanted, found)):
                case = f"{options}, {rule}, {values}, prompt {number}"
                ledger.compare(case, prompts[number], one.tokens, other.tokens, params[number])
            passes = sum(len(own) for own in rounds)
            assert passes < n * len(prompts), "nothing was accepted"
            assert any(r.accepted < r.proposed for own in rounds for r in own), "nothing was refused"
    return ledger


@here
def test_smollm2_trees_of_a_model(smol: Any, capsys: pytest.CaptureFixture[str]) -> None:
    t, prompts, _ = smol
    cases = [(GROWN[1], "traversal"), (GROWN[4], "coupled")]
    ledger = check_grown(t, unsure(SMOL), prompts[:2], cases, 14)
    with capsys.disabled():
        print(f"\nSmolLM2, trees of a model: {ledger}")
    assert len(ledger.ties) <= 2


@pytest.mark.slow
@here
def test_smollm2_every_tree_and_rule(smol: Any, capsys: pytest.CaptureFixture[str]) -> None:
    t, prompts, _ = smol
    cases = itertools.product(GROWN, ("rejection", "block", "traversal", "coupled"))
    ledger = check_grown(t, unsure(SMOL), prompts, cases, 32)
    with capsys.disabled():
        print(f"\nSmolLM2, every tree and rule: {ledger}")


@pytest.mark.slow
@qwen
def test_qwen_trees(capsys: pytest.CaptureFixture[str]) -> None:
    t = load(TARGET)
    cases = [(GROWN[1], "traversal"), (GROWN[2], "rejection"), (GROWN[3], "traversal"), (GROWN[4], "coupled")]
    ledger = check_grown(t, load(DRAFTER), ask(t, QUESTIONS[:3]), cases, 24)
    with capsys.disabled():
        print(f"\nQwen 1.5B, trees of the 0.5B: {ledger}")


@here
def test_a_difference_that_is_no_tie_is_found(smol: Any) -> None:
    """The comparison itself: it fails on another token and on a text that ends too early."""
    t, prompts, wanted = smol
    params = SamplingParams(max_tokens=32)
    other = [*wanted[0][:3], (wanted[0][3] + 1) % t.vocab_size, *wanted[0][4:]]
    tie = first_difference(t, prompts[0], wanted[0], other, params)
    assert tie is not None and tie.at == 3 and not tie.within()
    with pytest.raises(AssertionError, match="not a tie"):
        Ledger(t).compare("wrong", prompts[0], wanted[0], other, params)
    with pytest.raises(AssertionError, match="ends after 4"):
        Ledger(t).compare("short", prompts[0], wanted[0], wanted[0][:4], params)


# ---- larger: run with -m slow ----------------------------------------------------------------------------------------------


def questions(n: int) -> list[str]:
    """`n` first turns, spread evenly over the file and so over its kinds of task."""
    assert SPEC_BENCH is not None
    lines = Path(SPEC_BENCH).read_text(encoding="utf-8").splitlines()
    return [json.loads(lines[i * len(lines) // n])["turns"][0] for i in range(n)]


def check_greedy(t: TransformersTarget, place: Path, chosen: dict[str, Drafter], capsys: Any) -> None:
    prompts = ask(t, questions(12))
    params = SamplingParams(max_tokens=64)
    wanted = reference(place, prompts, 64)
    ledger = Ledger(t)
    for name, drafter in chosen.items():
        for number, prompt in enumerate(prompts):
            found, _ = run(t, drafter, [prompt], params, "rejection", 5)
            ledger.compare(f"{name}, question {number}", prompt, wanted[number], found[0].tokens, params)
    with capsys.disabled():
        print(f"\n{place.name}, greedy: {ledger}")


@pytest.mark.slow
@here
@bench
def test_spec_bench_smollm2(capsys: pytest.CaptureFixture[str]) -> None:
    t = load(SMOL)
    chosen = {name: load_drafter(name, t) for name in ("none", "suffix", "lookup")}
    check_greedy(t, SMOL, chosen, capsys)


@pytest.mark.slow
@qwen
@bench
def test_spec_bench_qwen(capsys: pytest.CaptureFixture[str]) -> None:
    t = load(TARGET)
    chosen: dict[str, Drafter] = {"none": load_drafter("none", t), "suffix": load_drafter("suffix", t)}
    chosen["model"] = ModelDrafter(load(DRAFTER))
    check_greedy(t, TARGET, chosen, capsys)


@pytest.mark.slow
@here
def test_coupled_seeds_smollm2(smol: Any, capsys: pytest.CaptureFixture[str]) -> None:
    t, prompts, _ = smol
    ledger = Ledger(t)
    for seed in range(12):
        how = [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.2, "repetition_penalty": 1.2}][
            seed % 3
        ]
        params = SamplingParams(max_tokens=48, seed=seed, **how)
        wanted = plain(t, prompts, params, "coupled")
        texts = [prompt + list(o.tokens) for prompt, o in zip(prompts, wanted)]
        for name, drafter in {**drafters(t, texts), "itself": ModelDrafter(t)}.items():
            if name == "none":
                continue
            found, _ = run(t, drafter, prompts, params, "coupled", 5)
            for number, (one, other) in enumerate(zip(wanted, found)):
                ledger.compare(f"{name}, seed {seed}, prompt {number}", prompts[number], one.tokens, other.tokens, params)
    with capsys.disabled():
        print(f"\nSmolLM2, coupled: {ledger}")
