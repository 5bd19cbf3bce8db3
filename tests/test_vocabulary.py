"""Drafters with another vocabulary: compared by text, translated exactly, refused where too little is shared."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import dataclass
from typing import Any, Sequence

import laws
import pytest
import torch
from ties import Ledger
from toys import plain, run, tiny_model

from outrider import models
from outrider.drafters.model import ModelDrafter, ModelOptions
from outrider.drafters.vocabulary import ALPHABET, Overlap, Translated, in_words_of, token_bytes
from outrider.errors import LoadError, OutriderWarning, ParameterError
from outrider.sampling import SamplingParams
from outrider.targets.base import Target
from outrider.targets.table import LetterTokenizer, TableTarget
from outrider.targets.transformers import TransformersTarget
from outrider.tree import DraftTree

MINE = ("a", "b", "ab", "c", "d", "abc")
THEIRS = ("d", "a", "x", "cd", "b", "c", "dd")
"""Lacks "ab" and "abc", has three of its own, and the shared ones elsewhere."""


def table(texts: Sequence[str], seed: int = 0, **law: Any) -> TableTarget:
    return TableTarget(vocab_size=len(texts), seed=seed, texts=list(texts), **{"sharpness": 1.2, "eos": (), **law})


def translated(target: Target, model: Target) -> Translated:
    with pytest.warns(OutriderWarning, match="another vocabulary"):
        made = in_words_of(target, model)
    assert isinstance(made, Translated)
    return made


def text_of(tokens: Sequence[int]) -> list[int]:
    """The tokens of MINE in those of THEIRS, written by hand."""
    spelled = {0: (1,), 1: (4,), 2: (1, 4), 3: (5,), 4: (0,), 5: (1, 4, 5)}
    return [piece for token in tokens for piece in spelled[token]]


# ---- the same text, however it is written ----------------------------------------------------------------------------------


class Entries(LetterTokenizer):
    def __init__(self, entries: Sequence[str]):
        super().__init__(entries)


def test_entries_become_bytes() -> None:
    assert len(ALPHABET) == len(set(ALPHABET.values())) == 256
    byte_level = token_bytes(Entries(["Ġthe", "Ċ", "Ã¤", "<|end|>", "Ġ", "<日>", "<0x0A>"]))
    assert list(byte_level.values()) == [b" the", b"\n", "ä".encode(), b"<|end|>", b" ", "<日>".encode(), b"<0x0A>"]
    pieces = token_bytes(Entries(["▁the", "<0x0A>", "ä", "<|end|>", "▁", "a▁b", "<0xZZ>"]))
    assert list(pieces.values()) == [b" the", b"\n", "ä".encode(), b"<|end|>", b" ", b"a b", b"<0xZZ>"]
    assert list(token_bytes(Entries(["the", "ä"])).values()) == [b"the", "ä".encode()]


def test_overlap() -> None:
    found = Overlap(token_bytes(Entries(MINE)), token_bytes(Entries(THEIRS)))
    assert found.shared == {0: 1, 1: 4, 3: 5, 4: 0} and found.share == 4 / 6
    assert found.differing == [0, 1, 2, 3, 4, 5] and not found.is_plain
    twice = Overlap({0: b"x", 1: b"x", 2: b"y"}, {0: b"y", 4: b"x", 5: b"x"})
    assert twice.shared == {0: 4, 2: 0}


def named(texts: Sequence[str], name: str) -> TableTarget:
    t = table(texts)
    t.name = name
    return t


def test_which_pairs_need_what() -> None:
    texts = [f"t{i}" for i in range(100)]
    big = named(texts, "big")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for small in (named(texts, "small"), named(texts[:95], "small"), named([*texts, "p0", "p1"], "small")):
            assert in_words_of(big, small) is small
        assert isinstance(in_words_of(big, named(texts[:50], "small")), Translated)  # cut out of the target's: meant to be so
    with pytest.warns(OutriderWarning, match=r"small has another .* than big.* the 99 tokens .*99% of the target's, 99% of"):
        assert isinstance(in_words_of(big, named([*texts[:39], "other", *texts[40:]], "small")), Translated)
    with pytest.warns(OutriderWarning, match="49% of the target's, 98% of its own"):
        assert isinstance(in_words_of(big, named([*texts[:49], "other"], "small")), Translated)
    with pytest.raises(
        LoadError, match=r"small cannot draft for big: they share 29 tokens, 29% of the smaller .* 30% are needed"
    ):
        in_words_of(big, named([*texts[:29], *(f"s{i}" for i in range(71))], "small"))
    one, other = TransformersTarget(tiny_model("llama")), TransformersTarget(tiny_model("llama", vocab_size=80))
    with pytest.raises(LoadError, match="80 token ids and llama has 101"):
        in_words_of(one, other)
    assert in_words_of(one, one) is one


# ---- exactness -------------------------------------------------------------------------------------------------------------


@dataclass
class Translation(laws.Case):
    """A target and a drafter with another vocabulary; the drafter's logits are those that the shipped translation gives."""

    def __post_init__(self) -> None:
        self.model = translated(table(MINE), table(THEIRS, self.seed + 1))
        self.memo: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(self, path: Sequence[int], side: int = 0) -> torch.Tensor:
        if side == 0:
            return super().logits(path)
        path = tuple(path)
        if path not in self.memo:
            slot = self.model.open()
            text = (*self.prompt, *self.emitted, *path)
            for _ in self.model.prefill(slot, text[:-1]):
                pass
            (output,) = self.model.forward([(slot, DraftTree.chain(text[-1]))])
            assert output.logits is not None
            self.memo[path] = output.logits[0]
            self.model.close(slot)
        return self.memo[path]


@pytest.mark.parametrize("kind", ["random", "zeros in p", "ties"])
@pytest.mark.parametrize("how", [laws.drawn, laws.chosen, laws.mixed])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_law_is_the_targets(rule: str, how: laws.How, kind: str) -> None:
    for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=0.7, top_k=3, repetition_penalty=1.3)):
        case = Translation(kind, len(MINE), params)
        for length in (1, 2):
            laws.check_law(rule, case, (1,) * length, how)
        if rule == "rejection":
            laws.check_law(rule, case, (2,), how)


def test_the_drafters_law_is_its_own_on_the_shared_tokens() -> None:
    mine, theirs = table(MINE), table(THEIRS, 5)
    model = translated(mine, theirs)
    for text in itertools.product(range(6), repeat=3):
        slot = model.open()
        for _ in model.prefill(slot, text[:2]):
            pass
        (output,) = model.forward([(slot, DraftTree.chain(text[2]))])
        own = theirs.logits(text_of(text))
        assert output.logits is not None
        assert output.logits[0].tolist() == [float(own[1]), float(own[4]), -math.inf, float(own[5]), float(own[0]), -math.inf]


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_decoding(rule: str) -> None:
    """Through the whole loop: drafts hold shared tokens only, q is what they were drawn from, slots follow."""
    target, model = table(MINE, 3, sharpness=2.0), table(THEIRS, 4, sharpness=2.0)
    drafter = ModelDrafter(translated(target, model), ModelOptions(min_probability=0.0))
    prompts = [[0, 1, 2], [5, 2] * 20, [3]]
    for values in ({}, {"temperature": 1.0, "seed": 4}):
        params = SamplingParams(max_tokens=50, ignore_eos=True, **values)
        found, rounds = run(target, drafter, prompts, params, rule)
        if rule == "coupled" or not values:
            assert found == plain(target, prompts, params, rule)
        drafted = {token for own in rounds for r in own for token in r.tokens[1:]}
        assert drafted == {0, 1, 3, 4} if values else drafted <= {0, 1, 3, 4}
        assert any(token in (2, 5) for o in found for token in o.tokens)
        for number, own in enumerate(rounds):
            text = [*prompts[number], *found[number].tokens]
            for r in own:
                seen = text[: r.context]
                for token, q in zip(r.tokens[1:], r.q[1:]):
                    law = model.logits(text_of(seen))[[1, 4, 5, 0]].softmax(0)
                    if q is not None:
                        assert q == pytest.approx(float(law[[0, 1, 3, 4].index(token)]), abs=1e-12)
                    seen.append(token)
    assert model.open_slots == 0


def test_trees_branch_by_branch() -> None:
    """Rows of a tree whose nodes are several tokens of the drafter's equal those of its paths; and so after a commit."""
    model = translated(table(MINE), table(THEIRS, 7, order=4))
    tree = DraftTree((2, 5, 0, 2, 1, 3), (-1, 0, 0, 1, 2, 3))
    slot = model.open()
    for _ in model.prefill(slot, [3, 2, 5]):
        pass
    (output,) = model.forward([(slot, tree)])
    assert output.start == 3
    for node in range(len(tree)):
        context = [3, 2, 5, 2, *tree.path_tokens(node)]
        assert torch.equal(output.logits[node, [0, 1, 3, 4]], model.inner.logits(text_of(context))[[1, 4, 5, 0]])  # type: ignore[index,attr-defined]
    model.commit(slot, (0, 1, 3))
    assert slot.length == 6 and slot.inner.tokens == text_of([3, 2, 5, 2, 5, 2])  # type: ignore[attr-defined]
    fork = model.open(slot, 4)
    assert fork.length == 4 and fork.inner.tokens == text_of([3, 2, 5, 2])  # type: ignore[attr-defined]
    model.truncate(slot, 2)
    assert slot.length == 2 and slot.inner.tokens == text_of([3, 2])  # type: ignore[attr-defined]
    model.forward([(slot, tree)])
    model.commit(slot, ())
    assert slot.length == 2 and slot.inner.tokens == text_of([3, 2])  # type: ignore[attr-defined]


def test_a_context_that_the_spelling_fills() -> None:
    """The drafter's context counts its own tokens: beyond it, it drafts nothing, and going back revives it."""
    target = table(MINE, 3)
    model = translated(target, table(THEIRS, 4, context_length=30))
    drafter = ModelDrafter(model, ModelOptions(min_probability=0.0))
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    for prompt in ([5] * 8, [5] * 20, [0]):
        found, (rounds,) = run(target, drafter, [prompt], params)
        assert found == plain(target, [prompt], params)
        for r in rounds:
            fed = len(text_of([*prompt, *found[0].tokens][: r.context]))
            assert not r.proposed or fed + r.proposed - 1 < 31
        assert any(r.proposed for r in rounds) == (len(prompt) < 20)
    slot = model.open()
    assert len(list(model.prefill(slot, [5] * 20))) == 1 and slot.length == 20
    (output,) = model.forward([(slot, DraftTree.chain(0))])
    assert output.logits is not None and bool((output.logits == -math.inf).all())
    model.commit(slot, (0,))
    model.truncate(slot, 4)
    (output,) = model.forward([(slot, DraftTree.chain(0))])
    assert output.logits is not None and bool((output.logits > -math.inf).any())


def test_what_cannot_be_spelled() -> None:
    """A byte that the drafter has no token for is left out; a token of such bytes alone is its end token."""
    model = translated(table(["a", "b", "é", "aéb", "c"]), table(["b", "c", "a", "."], eos=(3,)))
    assert [model.spell(t) for t in (0, 1, 2, 3, 4, 77)] == [(2,), (0,), (3,), (2, 0), (1,), (3,)]
    assert not model.eos
    with pytest.raises(ParameterError, match="hidden states"):
        model.forward([], layers=(1,))
    with pytest.raises(ParameterError, match="hidden states"):
        list(model.prefill(model.open(), [0], logits=True))


# ---- real models -----------------------------------------------------------------------------------------------------------

SMOL = models.folder("smollm2")
QWEN = models.directory() / "qwen2.5-coder-0.5b-instruct"
here = pytest.mark.skipif(
    not all((place / "config.json").exists() for place in (SMOL, QWEN)),
    reason=f"no {SMOL.name} and {QWEN.name} in {SMOL.parent}",
)


@here
@pytest.mark.slow
def test_smollm2_drafts_for_qwen() -> None:
    from outrider.drafters import load_drafter

    target = TransformersTarget.load(str(QWEN), device="cpu", dtype="float32")
    with pytest.warns(OutriderWarning, match="drafts only the .* tokens that both have"):
        drafter = load_drafter("smollm2", target, device="cpu", dtype="float32")
    assert target.tokenizer is not None
    questions = ["What is the capital of France?", "Übersetze: Die Katze schläft auf dem Sofa. 😀"]
    prompts = [target.tokenizer.chat([{"role": "user", "content": q}]) for q in questions]
    ledger = Ledger(target)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    found, rounds = run(target, drafter, prompts, params)
    for prompt, one, other in zip(prompts, found, plain(target, prompts, params)):
        ledger.compare("greedy", prompt, one.tokens, other.tokens, params)
    accepted = sum(r.accepted for own in rounds for r in own)
    assert accepted >= 5, f"{accepted} accepted"
    seeded = SamplingParams(max_tokens=16, temperature=0.7, seed=3, ignore_eos=True)
    found, _ = run(target, drafter, prompts, seeded, "coupled")
    for prompt, one, other in zip(prompts, found, plain(target, prompts, seeded, "coupled")):
        ledger.compare("coupled", prompt, one.tokens, other.tokens, seeded)
    drafter.close()
