"""A part of the target drafts on the target's cache, and leaves nothing behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_conformance import Watched
from test_real_models import QUESTIONS, SMOL, ask, here, load
from ties import Ledger
from toys import letters, plain, run, tiny_model, tiny_target
from transformers import DynamicCache

from outrider.drafters import load_drafter
from outrider.drafters.early_exit import EarlyExitDrafter, EarlyExitOptions, predicted_speed, search
from outrider.errors import OutriderWarning, ParameterError
from outrider.sampling import SamplingParams
from outrider.targets.attention import FIRST_CAPACITY
from outrider.targets.table import LetterTokenizer, TableTarget
from outrider.targets.transformers import TransformersTarget
from outrider.tree import DraftTree

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
}


def fill(t: Any, tokens: list[int]) -> Any:
    slot = t.open()
    for _ in t.prefill(slot, tokens):
        pass
    return slot


# ---- partial passes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("upto", "skip"), [(2, ()), (None, (1,)), (3, (0,)), (None, (0, 3))])
def test_is_what_transformers_computes_without_these_layers(kind: str, upto: int | None, skip: tuple[int, ...]) -> None:
    """On a cache that all layers have filled: the kept layers read on from their own keys and values."""
    model = tiny_model(kind, spread=0.25, num_hidden_layers=4, **KINDS[kind])
    reference, t = copy.deepcopy(model), TransformersTarget(model)
    text, tail = letters(None, 20), [5, 6, 7]
    cache = DynamicCache(config=reference.config)
    with torch.no_grad():
        reference(torch.tensor([text]), cache=cache, use_cache=True)
        decoder = reference.get_decoder()
        kept = [i for i in range(4) if i not in skip and (upto is None or i < upto)]
        decoder.layers = torch.nn.ModuleList(decoder.layers[i] for i in kept)
        decoder.config.num_hidden_layers = len(kept)
        if kinds := getattr(decoder.config, "layer_types", None):
            decoder.config.layer_types = [kinds[i] for i in kept]
        place = torch.arange(20, 23)[None]
        wanted = reference(torch.tensor([tail]), position_ids=place, cache=cache, use_cache=True).logits[0]
    slot = fill(t, text)
    (output,) = t.forward([(slot, DraftTree.chain(tail[0], tail[1:]))], upto=upto, skip=skip)
    assert (output.logits - wanted).abs().max() < 1e-9
    t.commit(slot, [])
    (whole,) = t.forward([(slot, DraftTree.chain(tail[0], tail[1:]))])
    (fresh,) = t.forward([(fill(t, text), DraftTree.chain(tail[0], tail[1:]))])
    assert torch.equal(whole.logits, fresh.logits)


@pytest.mark.parametrize("length", [20, FIRST_CAPACITY - 3])
def test_nothing_of_a_partial_pass_survives(length: int) -> None:
    """Also where the cache grows while layers are left out, and where a tree's path is kept for a while."""
    t = tiny_target("llama", spread=0.25, max_position_embeddings=512)
    text = letters(None, length)
    slot = fill(t, text)
    tree = DraftTree((5, 6, 7, 8, 9), (-1, 0, 0, 2, 3))
    for _ in range(2):
        t.forward([(slot, tree)], skip=(0, 2))
        t.commit(slot, [0, 2, 3])
    assert slot.length == length + 6
    with pytest.raises(RuntimeError, match="partial passes"):
        t.forward([(slot, tree)])
    with pytest.raises(RuntimeError, match="partial passes"):
        list(t.prefill(slot, [1, 2]))
    assert t.open(slot, slot.length).length == length  # a fork has what is whole
    t.truncate(slot, length)
    (mine,) = t.forward([(slot, tree)])
    (fresh,) = t.forward([(fill(t, text), tree)])
    assert torch.equal(mine.logits, fresh.logits)
    t.commit(slot, [0, 2, 3])
    (mine,) = t.forward([(slot, tree)])
    (fresh,) = t.forward([(fill(t, [*text, 5, 7, 8]), tree)])
    assert (mine.logits - fresh.logits).abs().max() < 1e-9


def test_what_cannot_be_left_out() -> None:
    t = tiny_target("llama")
    tree = DraftTree.chain(5)
    for named, said in (
        ({"upto": 0}, "from 1 to 3"),
        ({"upto": 4}, "from 1 to 3"),
        ({"skip": (3,)}, "skip names 3"),
        ({"skip": (-1,)}, "skip names -1"),
        ({"skip": (0, 1, 2)}, "no layer to run"),
        ({"upto": 1, "layers": (0,)}, "no hidden states"),
    ):
        with pytest.raises(ParameterError, match=said):
            t.forward([(t.open(), tree)], **named)
    (whole,), (all_three,) = t.forward([(t.open(), tree)]), t.forward([(t.open(), tree)], upto=3)
    assert torch.equal(whole.logits, all_three.logits)


def test_a_model_that_binds_its_forward_is_refused() -> None:
    """What dispatches layers to devices does it by binding methods to the module itself: a copy would run all layers."""
    model = tiny_model("llama")
    decoder = model.get_decoder()
    decoder.forward = decoder.forward  # bound to the original
    t = TransformersTarget(model)
    with pytest.raises(ParameterError, match="layers be left out"):
        t.forward([(t.open(), DraftTree.chain(5))], skip=(1,))


# ---- the drafter -----------------------------------------------------------------------------------------------------------

PROMPTS = [[5, 6, 7, 8], [9] * 30, letters(None, 12)]
SHAPES = [("chain", None), ("tree", "dynamic"), ("tree", "best"), ("tree", "static"), ("tree", "sampled")]


@pytest.mark.parametrize(("shape", "growth"), SHAPES)
@pytest.mark.parametrize(("rule", "temperature"), [("rejection", 0.0), ("coupled", 0.8), ("rejection", 0.9)])
def test_says_what_plain_decoding_says(shape: str, growth: str | None, rule: str, temperature: float) -> None:
    t = tiny_target("llama", spread=0.25, num_hidden_layers=4)
    for left_out in ((3,), (1, 2)):
        options = EarlyExitOptions(shape=shape, growth=growth, min_probability=0.0, skip=left_out)
        drafter = Watched(EarlyExitDrafter.load(t, options))
        params = [SamplingParams(max_tokens=20, temperature=temperature, seed=s, ignore_eos=True) for s in range(3)]
        found, rounds = run(t, drafter, PROMPTS, params, rule, 6)
        if rule == "coupled" or temperature == 0:
            assert [o.tokens for o in found] == [o.tokens for o in plain(t, PROMPTS, params, rule)]
        assert sum(r.proposed for own in rounds for r in own) > 50
        assert (drafter.laws > 0) == (temperature == 0.9 and options.draws)


def idle(layer: Any) -> None:
    """Let a layer add nothing."""
    layer.self_attn.o_proj.weight.data.zero_()
    layer.mlp.down_proj.weight.data.zero_()


@pytest.mark.parametrize("lazy", [(1, 2, 4), (4, 5)])
def test_layers_that_do_nothing_are_found_and_left_out(lazy: tuple[int, ...]) -> None:
    model = tiny_model("llama", spread=0.25, num_hidden_layers=6)
    for layer in lazy:
        idle(model.get_decoder().layers[layer])
    t = TransformersTarget(model, name="lazy")
    t.tokenizer = LetterTokenizer([chr(0x4E00 + i) for i in range(t.vocab_size)], t.eos)
    text = "".join(chr(0x4E00 + i) for i in letters(None, 60))
    with pytest.warns(OutriderWarning, match=f"-o skip={','.join(map(str, lazy))} "):
        drafter = load_drafter("early-exit", t, {"text": text, "min_probability": 0.0})
    assert isinstance(drafter, EarlyExitDrafter) and drafter.part.left_out == lazy
    assert drafter.describe()["agreement"] == 1.0
    found, (rounds,) = run(t, drafter, PROMPTS[:1], SamplingParams(max_tokens=40, ignore_eos=True), "rejection", 4)
    assert [o.tokens for o in found] == [
        o.tokens for o in plain(t, PROMPTS[:1], SamplingParams(max_tokens=40, ignore_eos=True))
    ]
    assert sum(r.accepted for r in rounds) == sum(r.proposed for r in rounds) >= 25


def test_the_search_takes_the_best_of_what_it_tried() -> None:
    t = tiny_target("llama", spread=0.25, num_hidden_layers=5)
    passes: list[tuple[int, ...]] = []
    own = t.forward
    t.forward = lambda work, layers=(), upto=None, skip=(): passes.append(tuple(sorted(skip))) or own(work, layers, upto, skip)  # type: ignore[method-assign]
    found = search(t, letters(None, 64))
    assert found.left_out in passes and len(set(passes)) > 10 and passes[0] == ()
    slot = t.open()
    tree = DraftTree.chain(3, letters(None, 63))
    (a,) = own([(slot, tree)])
    t.commit(slot, [])
    (b,) = own([(slot, tree)], skip=found.left_out)
    assert 0 <= found.agreement <= 1 and a.logits.shape == b.logits.shape
    assert found.speed == pytest.approx(predicted_speed(found.agreement, found.cost))


def test_predicted_speed() -> None:
    assert predicted_speed(1.0, 0.5) == pytest.approx(9 / 5)  # the longest draft
    assert predicted_speed(0.0, 0.5) == pytest.approx(1 / 1.5)  # the shortest
    assert predicted_speed(0.8, 0.1) == pytest.approx(max((1 - 0.8 ** (n + 1)) / 0.2 / (1 + 0.1 * n) for n in range(1, 9)))


def test_bad_options() -> None:
    t = tiny_target("llama")
    for options, said in (
        ({"skip": "7"}, "0 to 2"),
        ({"upto": 4}, "0 to 2"),
        ({"upto": 3}, "leave out some"),
        ({"skip": "0 1 2"}, "leave out some"),
        ({"skip": "x"}, "skip must be"),
        ({"skip": "1", "text": "a"}, "option text"),
        ({}, "needs a tokenizer"),
        ({"layers": "1"}, "no option 'layers'"),
    ):
        with pytest.raises(ParameterError, match=said):
            load_drafter("early-exit", t, options)
    assert load_drafter("early-exit", t, {"skip": "1,2"}).part.left_out == (1, 2)  # type: ignore[attr-defined]
    assert load_drafter("early-exit", t, {"upto": 1}).part.left_out == (1, 2)  # type: ignore[attr-defined]
    assert load_drafter("early-exit", TableTarget(), {"upto": 1}).part.left_out == (1,)  # type: ignore[attr-defined]


def test_without_its_place_in_the_cache_it_drafts_nothing() -> None:
    from outrider.drafters import Ask, Budget
    from outrider.sampling import Sampler

    t = tiny_target("llama")
    drafter = load_drafter("early-exit", t, {"skip": "1"})
    sampler = Sampler(SamplingParams(), [5, 6, 7], t.vocab_size, t.eos, "rejection")
    slot = fill(t, [5])
    for place in (None, slot):
        (tree,) = drafter.propose([Ask(drafter.open(sampler), [5, 6, 7], Budget(4, 4), place)])
        assert len(tree) == 1
    assert slot.length == 1


@here
def test_smollm2(capsys: pytest.CaptureFixture[str]) -> None:
    """Packed weights and fused steps leave layers out too; what is kept is plain decoding's text."""
    t = load(SMOL)
    prompts = ask(t, QUESTIONS[:2])
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    wanted, ledger = plain(t, prompts, params), Ledger(t)
    for shape in ("chain", "tree"):
        drafter = EarlyExitDrafter.load(t, EarlyExitOptions(shape=shape, min_probability=0.05, skip=(5,)))
        found, rounds = run(t, drafter, prompts, params, "rejection", 4)
        for number, outcome in enumerate(found):
            ledger.compare(f"{shape}, prompt {number}", prompts[number], wanted[number].tokens, outcome.tokens, params)
        assert sum(r.accepted for own in rounds for r in own) >= 20
    with capsys.disabled():
        print(f"\nSmolLM2 without layer 5 as its own drafter, greedy: {ledger}")
    assert len(ledger.ties) <= 2
