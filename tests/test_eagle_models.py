"""EAGLE heads on real models: overfitted on one answer they are accepted, and whatever they draft the text is plain decoding's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import eagles
import pytest
from test_real_models import QUESTIONS, SMOL, TARGET, ask, here, load, qwen
from ties import Ledger
from toys import plain, run

from outrider import kernels
from outrider.drafters.eagle import EagleDrafter, EagleOptions
from outrider.sampling import SamplingParams
from outrider.tree import DraftTree

TOKENS = 24
SHAPES = {"chain": {"shape": "chain"}, "tree": {"shape": "tree"}, "sampled tree": {"shape": "tree", "growth": "sampled"}}


def drafters(head: Any) -> dict[str, EagleDrafter]:
    return {name: EagleDrafter(head, EagleOptions(**values, min_probability=0.0)) for name, values in SHAPES.items()}


def overfit(t: Any, dialect: str, text: list[int], steps: int, folder: Path) -> str:
    """A checkpoint of a head trained on one text."""
    config, tensors = eagles.make(
        dialect, t.hidden_size, t.vocab_size, None if dialect == "eagle" else {*text, *range(400)}, heads=8, scale=0.02
    )
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor.fill_(1.0)
    choices, t.choices = t.choices, ()  # packed weights cannot be trained
    try:
        head = EagleDrafter.load(t, EagleOptions(), eagles.write(folder / "new", dialect, config, tensors)).head
        eagles.fit(head, t, text, steps, depth=4, rate=2e-3)
    finally:
        t.choices = choices
    trained = eagles.tensors_of(head, tensors)
    half = {name: x.bfloat16() if x.is_floating_point() else x for name, x in trained.items()}  # as they are published
    return eagles.write(folder / "trained", dialect, config, half)


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Any:
    t = load(SMOL)
    prompts = ask(t, QUESTIONS[1:3])
    wanted = plain(t, prompts, SamplingParams(max_tokens=TOKENS, ignore_eos=True), draft=1)
    folder = overfit(t, "safeailab", [*prompts[1], *wanted[1].tokens], 60, tmp_path_factory.mktemp("eagle"))
    return t, prompts, wanted, EagleDrafter.load(t, EagleOptions(), folder).head


def check_accepted(t: Any, head: Any, prompt: list[int], wanted: Any) -> None:
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    for name in ("chain", "tree"):
        found, (rounds,) = run(t, drafters(head)[name], [prompt], params, "rejection", 4)
        assert found[0].tokens == wanted.tokens
        rounds = [r for r in rounds if r.proposed and not r.finish]
        accepted = sum(r.accepted for r in rounds)
        assert accepted >= 0.95 * sum(DraftTree(r.tokens, r.parents).depth for r in rounds) and len(rounds) >= 4, name


@here
def test_an_overfitted_head_is_accepted(smol: Any) -> None:
    t, prompts, wanted, head = smol
    assert any(isinstance(part, kernels.Packed) for part in head.modules()) == (kernels.VARIANT != "off")
    check_accepted(t, head, prompts[1], wanted[1])


@pytest.mark.slow
@here
def test_an_overfitted_eagle_1_head_is_accepted(smol: Any, tmp_path: Path) -> None:
    t, prompts, wanted, _ = smol
    folder = overfit(t, "eagle", [*prompts[1], *wanted[1].tokens], 150, tmp_path)
    check_accepted(t, EagleDrafter.load(t, EagleOptions(), folder).head, prompts[1], wanted[1])


@here
def test_smollm2_greedy(smol: Any, capsys: pytest.CaptureFixture[str]) -> None:
    t, prompts, wanted, head = smol
    ledger = Ledger(t)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    for name, drafter in drafters(head).items():
        found, rounds = run(t, drafter, prompts, params, "rejection", 6)
        for number, outcome in enumerate(found):
            ledger.compare(f"{name}, prompt {number}", prompts[number], wanted[number].tokens, outcome.tokens, params)
        assert sum(r.accepted for own in rounds for r in own) >= TOKENS // 2
    with capsys.disabled():
        print(f"\nSmolLM2 with an EAGLE head, greedy: {ledger}")
    assert len(ledger.ties) <= 3


@here
def test_smollm2_coupled(smol: Any, capsys: pytest.CaptureFixture[str]) -> None:
    t, prompts, _, head = smol
    ledger = Ledger(t)
    params = [SamplingParams(max_tokens=18, temperature=0.7, top_k=50, seed=s, ignore_eos=True) for s in range(len(prompts))]
    wanted = plain(t, prompts, params, "coupled")
    for name, drafter in drafters(head).items():
        found, _ = run(t, drafter, prompts, params, "coupled", 6)
        for number, (one, other) in enumerate(zip(wanted, found)):
            ledger.compare(f"{name}, seed {number}", prompts[number], one.tokens, other.tokens, params[number])
    with capsys.disabled():
        print(f"\nSmolLM2 with an EAGLE head, coupled: {ledger}")
    assert len(ledger.ties) <= 3


@pytest.mark.slow
@qwen
def test_qwen_greedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Random heads of every dialect, hardly ever right."""
    t = load(TARGET)
    prompts = ask(t, QUESTIONS[:2])
    params = SamplingParams(max_tokens=24)
    ledger = Ledger(t)
    wanted = plain(t, prompts, params)
    for dialect in eagles.DIALECTS:
        draft = None if dialect == "eagle" else range(0, t.vocab_size, 5)
        config, tensors = eagles.make(dialect, t.hidden_size, t.vocab_size, draft, heads=12, scale=0.03)
        folder = eagles.write(
            tmp_path / dialect, dialect, config, {n: x.bfloat16() if x.is_floating_point() else x for n, x in tensors.items()}
        )
        head = EagleDrafter.load(t, EagleOptions(), folder).head
        for name, drafter in drafters(head).items():
            found, rounds = run(t, drafter, prompts, params, "rejection", 6)
            assert sum(r.proposed for own in rounds for r in own) > 0
            for number, outcome in enumerate(found):
                ledger.compare(
                    f"{dialect}, {name}, prompt {number}", prompts[number], wanted[number].tokens, outcome.tokens, params
                )
    with capsys.disabled():
        print(f"\n{TARGET.name} with random EAGLE heads, greedy: {ledger}")
