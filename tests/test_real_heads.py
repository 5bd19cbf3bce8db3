"""Medusa and Hydra heads on SmolLM2, packed as it runs on a CPU: greedy and coupled output, and heads overfitted on one text."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import published
import pytest
import torch
from test_heads import Interrupted, accepted
from test_real_models import QUESTIONS, SMOL, TARGET, ask, here, load
from ties import Ledger
from toys import plain, run

from outrider.drafters import load_drafter
from outrider.sampling import SamplingParams

SHAPES: list[dict[str, Any]] = [{}, {"shape": "tree", "width": 2}]
KINDS = ("medusa", "hydra", "hydra-prefix")


@functools.cache
def smol() -> Any:
    t = load(SMOL)
    return t, ask(t, QUESTIONS)


def save(folder: Any, kind: str, module: Any) -> str:
    return published.write(
        Path(folder), kind, published.config_of(kind, len(module.outputs())), published.tensors_of(kind, module)
    )


def check_equal(t: Any, prompts: Any, drafter: Any, name: str, ledger: Ledger, n: int, seeds: int) -> None:
    greedy = SamplingParams(max_tokens=n)
    cases = [("rejection", greedy)] + [("coupled", SamplingParams(max_tokens=n, temperature=0.8, seed=s)) for s in range(seeds)]
    for rule, params in cases:
        wanted = plain(t, prompts, params, rule)
        found, rounds = run(t, drafter, prompts, params, rule, 4)
        assert all(sum(r.proposed for r in own) for own in rounds)
        for number, (one, other) in enumerate(zip(wanted, found)):
            ledger.compare(f"{name}, {rule} {params.seed}, prompt {number}", prompts[number], one.tokens, other.tokens, params)


@here
@pytest.mark.parametrize(("kind", "options"), list(zip(("hydra", "medusa"), SHAPES)))
def test_smollm2(kind: str, options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Heads as their training begins."""
    t, prompts = smol()
    module = published.make(kind, t, heads=2, spread=0.02)
    published.start_from(module, t)
    source = save(tmp_path, kind, module.to(torch.bfloat16))
    ledger = Ledger(t)
    drafter = load_drafter(source, t, {"min_probability": 0.0, **options})
    check_equal(t, prompts[:1], drafter, f"{kind} {options}", ledger, 10, 1)
    with capsys.disabled():
        print(f"\nSmolLM2, {kind}: {ledger}")
    assert not ledger.ties


# ---- run with -m slow ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@here
@pytest.mark.parametrize("kind", KINDS)
def test_overfitted_on_smollm2(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Accepted at 95 % and more, also after rounds in which something else or nothing was drafted; as a tree too."""
    t, prompts = smol()
    prompt, params = prompts[0], SamplingParams(max_tokens=48, ignore_eos=True)
    text = plain(t, [prompt], params)[0].tokens
    module = published.make(kind, t, spread=0.02)
    published.start_from(module, t)
    loss = published.fit(module, t, [*prompt, *text], steps=120, rate=2e-3)
    ledger = Ledger(t)
    with tempfile.TemporaryDirectory() as folder:
        source = save(folder, kind, module)
        drafter = load_drafter(source, t, {"min_probability": 0.0})
        found, rounds = run(t, drafter, [prompt], params, "block", 3)
        ledger.compare("chain", prompt, text, found[0].tokens, params)
        rate = accepted(rounds[0])
        interrupted = Interrupted(load_drafter(source, t, {"min_probability": 0.0}))
        found, rounds = run(t, interrupted, [prompt], params, "block", 3)
        ledger.compare("interrupted", prompt, text, found[0].tokens, params)
        later = accepted(rounds[0], interrupted.mine)
        for options in SHAPES:
            drafter = load_drafter(source, t, {"min_probability": 0.0, **options})
            check_equal(t, [prompt, prompts[1]], drafter, f"{kind} {options}", ledger, 24, 3)
    with capsys.disabled():
        print(f"\nSmolLM2, {kind}: loss {loss:.2g}, accepted {rate:.1%}, interrupted {later:.1%}; {ledger}")
    assert rate >= 0.95 and later >= 0.95


@pytest.mark.slow
@pytest.mark.skipif(not (TARGET / "config.json").exists(), reason=f"no {TARGET}")
@pytest.mark.parametrize("kind", KINDS)
def test_qwen(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    t = load(TARGET)
    prompts = ask(t, QUESTIONS[:1])
    module = published.make(kind, t, heads=2, spread=0.02)
    published.start_from(module, t)
    ledger = Ledger(t)
    with tempfile.TemporaryDirectory() as folder:
        source = save(folder, kind, module.to(torch.bfloat16))
        del module
        for options in SHAPES:
            drafter = load_drafter(source, t, {"min_probability": 0.0, **options})
            check_equal(t, prompts, drafter, f"{kind} {options}", ledger, 12, 1)
    with capsys.disabled():
        print(f"\nQwen 1.5B, {kind}: {ledger}")
