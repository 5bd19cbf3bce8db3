"""The drafter inside the package: what it is, and that it is of use on the packaged model."""

from __future__ import annotations

import pytest

import outrider
from outrider.bench.compare import difference
from outrider.demo import PROMPTS
from outrider.drafters import load_drafter
from outrider.drafters.checkpoint import Checkpoint
from outrider.drafters.detect import detect
from outrider.models import PACKAGED, SHIPPED, folder, shipped
from outrider.trace import combine

QUESTIONS = (
    "What is the difference between a lake and a pond?",
    "Tom has 12 apples and buys 7 more. How many has he?",
    PROMPTS[1].text,
)


@pytest.mark.parametrize("name", SHIPPED)
def test_it_is_small_and_says_what_it_is(name):
    place = shipped(name)
    assert sum(file.stat().st_size for file in place.iterdir()) <= 25e6
    card = (place / "README.md").read_text(encoding="utf-8")
    assert "smollm2" in card and "outrider train" in card and "Figures" in card
    tensors = Checkpoint.read(place)
    if detect(name).drafter == "model":
        assert (place / "tokenizer.json").exists() and tensors.shape("model.embed_tokens.weight") == (8192, 576)
        return
    offsets, known = tensors.take("d2t", None, kind="int"), tensors.take("t2d", None, kind="bool")
    assert len(offsets) == int(known.sum()) == tensors.shape("lm_head.weight")[0]


here = pytest.mark.skipif(
    not (folder("smollm2") / "config.json").exists(), reason="the packaged model is not here: outrider models get smollm2"
)


@here
def test_auto_takes_the_head_and_each_text_is_the_targets():
    target = outrider.load("smollm2", None).target
    auto = load_drafter("auto", target)
    assert [part.name for part in auto.parts] == ["suffix", "eagle"]
    messages = [{"role": "user", "content": QUESTIONS[1]}]
    one, other = (outrider.load(target, drafter).generate(messages, max_tokens=48) for drafter in (None, auto))
    where = difference(
        target, outrider.load(target, None).encode(messages), outrider.SamplingParams(max_tokens=48), one.tokens, other.tokens
    )
    assert where is None or where.near_tie


@here
@pytest.mark.parametrize("name", SHIPPED)
def test_it_drafts_for_the_packaged_model(name):
    assert "smollm2" in PACKAGED
    plain = outrider.load("smollm2", None)
    drafted = outrider.load(plain.target, load_drafter(name, plain.target, {"shape": "tree"}), draft=16)
    stats = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        one, other = (engine.generate(messages, max_tokens=48) for engine in (plain, drafted))
        ids = plain.encode(messages)
        where = difference(plain.target, ids, outrider.SamplingParams(max_tokens=48), one.tokens, other.tokens)
        assert where is None or where.near_tie
        stats.append(other.stats)
    assert combine(stats).acceptance_length > 1.3
