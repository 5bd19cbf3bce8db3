"""Under `coupled` one seed means one text: every drafter equals plain decoding, on the table target and on a float64 model."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import dflashes
import eagles
import published
import pytest
from test_conformance import everyone, free_memory, make
from toys import plain, run, tiny_target

from outrider.drafters import TABLE, Drafter, load_drafter
from outrider.drafters.growth import GROWTHS
from outrider.drafters.model import ModelDrafter
from outrider.sampling import SamplingParams
from outrider.targets.table import LetterTokenizer, TableTarget

SEEDS = range(50)
HOW = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 6, "top_p": 0.95},
    {"temperature": 1.3, "min_p": 0.05, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
]
PROMPT = [1, 2, 3, 4, 1, 2, 3]


def each_seed(n: int, **extra: Any) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=n, seed=seed, **HOW[seed % len(HOW)], **extra) for seed in SEEDS]


@everyone
def test_table(name: str, shape: str) -> None:
    t = TableTarget(vocab_size=10, seed=11, sharpness=2.5)
    drafter, extra = make(name, shape, t)
    params = each_seed(24, **extra)
    wanted = plain(t, [PROMPT] * len(params), params, "coupled")
    found, rounds = run(t, drafter, [PROMPT] * len(params), params, "coupled", 5)
    for seed, (one, other) in enumerate(zip(found, wanted)):
        assert one == other, f"seed {seed}"
    assert len({o.tokens for o in found}) > 40, "the seeds must matter"
    if name != "none":
        assert sum(r.accepted for own in rounds for r in own) > 0
    free_memory(drafter)


@functools.cache
def llama(seed: int, noise: int = 0) -> Any:
    """A tiny Llama in float64 with sharp laws; with `noise` a relative of it."""
    t = tiny_target("llama", seed, spread=0.25)
    t.tokenizer = LetterTokenizer([chr(0x4E00 + i) for i in range(t.vocab_size)], t.eos)
    if noise:
        other = tiny_target("llama", noise, spread=0.25)
        for mine, theirs in zip(t.model.parameters(), other.model.parameters()):
            mine.data.lerp_(theirs.data, 0.06)
    return t


@functools.cache
def plain_texts(n: int) -> Any:
    return plain(llama(1), [PROMPT] * len(SEEDS), each_seed(n), "coupled")


@functools.cache
def heads_for_llama(name: str) -> str:
    """Random heads for it."""
    folder = Path(tempfile.mkdtemp(prefix="outrider-heads-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if name == "eagle":
        return eagles.write(folder, "safeailab", *eagles.make("safeailab"))
    if name == "dflash":
        return dflashes.write(folder, *dflashes.make())
    module = published.make(name, llama(1), heads=4)
    return published.write(folder, name, published.config_of(name, 4), published.tensors_of(name, module))


@everyone
def test_llama(name: str, shape: str) -> None:
    t = llama(1)
    entry, options = TABLE[name], {}
    if shape in GROWTHS:
        options |= {"shape": "tree", "growth": shape}
    elif "tree" in entry.shapes:
        options["shape"] = shape
    wanted = plain_texts(16)
    params = each_seed(16)
    drafter: Drafter
    if name == "model":
        drafter = ModelDrafter(llama(1, noise=2))
    elif name == "prediction":
        params = each_seed(16, prediction=wanted[0].text)
        drafter = load_drafter(name, t, options)
    elif name == "replay":
        drafter = load_drafter(name, t, {**options, "script": [*PROMPT, *wanted[0].tokens], "wrong_at": 1})
    elif name == "early-exit":
        drafter = load_drafter(name, t, {**options, "skip": "1"})
    elif entry.load().takes_model and name != "auto":
        drafter = load_drafter(name, t, {**options, "model": heads_for_llama(name)})
    else:
        drafter = load_drafter(name, t, options)
    found, rounds = run(t, drafter, [PROMPT] * len(params), params, "coupled", 4)
    for seed, (one, other) in enumerate(zip(found, wanted)):
        assert one == other, f"seed {seed}"
    if name == "model":
        proposed, accepted = (sum(getattr(r, what) for own in rounds for r in own) for what in ("proposed", "accepted"))
        assert 0.2 < accepted / proposed < 0.99, "the drafter must be sometimes right and sometimes wrong"
    for seed in (0, 7, 31):  # and alone as in a batch of fifty
        solo, _ = run(t, drafter, [PROMPT], params[seed], "coupled", 4)
        assert solo[0] == wanted[seed]


@everyone
def test_choices(name: str, shape: str) -> None:
    """Choices of one seed differ from each other, and each is the same with any drafter, alone and together."""
    t = TableTarget(vocab_size=10, seed=11, sharpness=2.0)
    drafter, extra = make(name, shape, t)
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3, ignore_eos=True, **extra)
    wanted = plain(t, [PROMPT] * 6, params, "coupled", choices=list(range(6)))
    found, _ = run(t, drafter, [PROMPT] * 6, params, "coupled", choices=list(range(6)))
    assert found == wanted
    assert len({o.tokens for o in found}) == 6
    solo, _ = run(t, drafter, [PROMPT], params, "coupled", choices=[4])
    assert solo[0] == wanted[4]


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_other_rules_repeat_too(rule: str) -> None:
    """A seed under the other rules gives the same text with the same drafter, alone or in a batch."""
    t = TableTarget(vocab_size=10, seed=11, sharpness=2.0)
    drafter, _ = make("model", "chain", t)
    params = [SamplingParams(max_tokens=30, temperature=1.0, seed=seed) for seed in range(8)]
    together, _ = run(t, drafter, [PROMPT] * 8, params, rule)
    for seed, outcome in enumerate(together):
        solo, _ = run(t, drafter, [PROMPT], params[seed], rule)
        assert solo[0] == outcome
    assert len({o.tokens for o in together}) > 4
    greedy = [SamplingParams(max_tokens=30, seed=seed) for seed in range(3)]
    assert len({o.tokens for o in run(t, drafter, [PROMPT] * 3, greedy, rule)[0]}) == 1, "at temperature 0 a seed is ignored"
