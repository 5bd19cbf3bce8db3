"""Medusa and Hydra: checkpoints of every layout, the right wiring (an overfitted head is accepted), and greedy and coupled output."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import published
import pytest
import torch
from tiny import tiny_folder
from toys import letters, plain, run, tiny_target

from outrider.drafters import load_drafter
from outrider.drafters.base import Ask, Drafter
from outrider.drafters.heads import HeadsDrafter, LastState
from outrider.engine import Engine
from outrider.errors import LoadError, OutriderWarning, ParameterError
from outrider.models import load_target
from outrider.sampling import Sampler, SamplingParams
from outrider.tree import Budget, DraftTree

every = pytest.mark.parametrize("kind", published.HEADS)
TREE = {"shape": "tree", "width": 3}


def folder_for(tmp_path: Path, kind: str, module: Any, heads: int = 3, layers: int = 1, **changes: Any) -> str:
    """A checkpoint of `module`; a Medusa-2 folder begins as a copy of a tiny model."""
    place = tmp_path / kind
    if kind == "medusa-2" and not place.exists():
        shutil.copytree(tiny_folder(), place)
    return published.write(place, kind, published.config_of(kind, heads, layers, **changes), published.tensors_of(kind, module))


def load(source: str, target: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OutriderWarning)
        return load_drafter(source, target, {"min_probability": 0.0, **options})


def targets(kind: str) -> Any:
    """float32, with tensors of the dialect's own base model where it has one."""
    return tiny_target(dtype=torch.float32, eos_token_id=None)


# ---- checkpoints -------------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("layers", [1, 2])
def test_round_trip(tmp_path: Path, kind: str, layers: int) -> None:
    """The drafter says what the published module says, on states and tokens of a text."""
    t = targets(kind)
    module = published.make(kind, t, heads=3, layers=layers, seed=layers)
    drafter = load(folder_for(tmp_path, kind, module, 3, layers), t)
    assert drafter.name == ("hydra" if kind.startswith("hydra") else "medusa") and len(drafter.heads) == 3
    text = letters(t.model, 12)
    hidden, embedded = published.hidden_states(t, text[:8]), t.embed(text)
    following = torch.stack([embedded[1 + i : 9 + i] for i in range(3)], dim=1)
    with torch.no_grad():
        wanted = module(hidden, following)
    # the drafter itself goes along the text: each head's logits, at the last position, as it draws from them
    sampler = Sampler(SamplingParams(), text[:9], t.vocab_size)
    state = drafter.open(sampler)
    slot = t.open()
    for output in t.prefill(slot, text[:8], layers=drafter.layers):
        drafter.observe([(state, text[:8], output, range(len(output.hidden["final"])))])
    seen: list[torch.Tensor] = []

    def draw(logits: torch.Tensor, paths: Any, k: Any = 1, *how: Any) -> Any:
        seen.append(logits[0].clone())
        forced = logits.new_full(logits.shape, -10.0)
        forced[:, text[8 + len(seen)]] = 10.0  # the text goes on, whatever the heads say
        return original(forced, paths, k, *how)

    original, sampler.draw = sampler.draw, draw  # type: ignore[method-assign]
    (tree,) = drafter.propose([Ask(state, text[:9], Budget(5, 5))])
    assert tree.tokens == tuple(text[8:12])
    for mine, theirs in zip(seen, wanted, strict=True):
        assert torch.allclose(mine, theirs[-1], atol=1e-5, rtol=0), (mine - theirs[-1]).abs().max()


def test_reduced_vocabulary_and_shared_output_matrix(tmp_path: Path) -> None:
    t = targets("vllm")
    module = published.make("vllm", t, heads=2)
    tensors = published.tensors_of("vllm", module)
    ids = torch.tensor([50, 4, 9])
    for i in range(2):
        tensors[f"lm_heads.{i}.weight"] = tensors[f"lm_heads.{i}.weight"][:3]
    config = published.config_of("vllm", 2, truncated_vocab_size=3)
    drafter = load(published.write(tmp_path / "a", "vllm", config, {**tensors, "token_map": ids}), t)
    logits = drafter.heads(0, torch.ones(1, 32))
    assert drafter.heads.token_map.tolist() == [4, 9, 50]
    own = torch.ones(1, 32)
    assert torch.allclose(logits[0, [2, 0, 1]], module[0][-1].weight[:3] @ module[0][0](own)[0], atol=1e-5)
    shared = {name: x for name, x in published.tensors_of("vllm", module).items() if not name.startswith("lm_heads")}
    shared["lm_head.weight"] = module[0][-1].weight.detach()
    drafter = load(published.write(tmp_path / "b", "vllm", published.config_of("vllm", 2, original_lm_head=True), shared), t)
    assert drafter.heads.outputs[0] is drafter.heads.outputs[1]
    bad = {**tensors, "token_map": torch.tensor([1, 1, 2])}
    with pytest.raises(LoadError, match="token_map"):
        load(published.write(tmp_path / "c", "vllm", config, bad), t)


def test_medusa_2_is_its_own_target(tmp_path: Path) -> None:
    place = tmp_path / "medusa-2"
    shutil.copytree(tiny_folder(), place)
    t = load_target(str(place), device="cpu")
    folder_for(tmp_path, "medusa-2", published.make("medusa-2", t))
    t = load_target(str(place), device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error", OutriderWarning)
        for name in (str(place), "medusa"):
            drafter = load_drafter(name, t)
            assert drafter.name == "medusa" and "Medusa-2" in drafter.describe()["dialect"]
    with pytest.warns(OutriderWarning, match="trained together"):
        load_drafter(str(place), load_target(str(tiny_folder()), device="cpu"))
    with pytest.raises(ParameterError, match="'medusa' needs"):
        load_drafter("medusa", load_target(str(tiny_folder()), device="cpu"))


@every
def test_a_bf16_checkpoint_takes_the_targets_types(tmp_path: Path, kind: str) -> None:
    t = targets(kind)
    module = published.make(kind, t).to(torch.bfloat16)
    drafter = load(folder_for(tmp_path, kind, module), t)
    assert {p.dtype for p in drafter.heads.parameters()} == {torch.float32}
    _, rounds = run(t, drafter, [letters(t.model, 9)], SamplingParams(max_tokens=6), "block", 3)
    assert sum(r.proposed for r in rounds[0]) > 0


# ---- bad input ---------------------------------------------------------------------------------------------------------


def refused(source: str, target: Any, **options: Any) -> str:
    with pytest.raises((LoadError, ParameterError)) as caught:
        load(source, target, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


@every
def test_what_does_not_fit_is_named(tmp_path: Path, kind: str) -> None:
    """Another target's sizes, another vocabulary, a missing tensor, one too many."""
    t = targets(kind)
    tensors = published.tensors_of(kind, published.make(kind, t))

    def put(name: str, changed: dict[str, torch.Tensor], **changes: Any) -> str:
        if kind == "medusa-2":
            shutil.copytree(tiny_folder(), tmp_path / name)
        return published.write(tmp_path / name, kind, published.config_of(kind, 3, **changes), changed)

    for lost in tensors:
        if kind == "hydra-prefix" and lost == "prefix_embeding_layer.embed_tokens.weight":
            continue  # nobody reads it
        text = refused(put(f"without {lost}", {name: x for name, x in tensors.items() if name != lost}), t)
        stem = lost.rsplit(".", 1)[0]
        assert lost in text or stem in text or "number" in text, (lost, text)
    wide = tiny_target(dtype=torch.float32, hidden_size=64)
    text = refused(put("wide", tensors), wide)
    assert "32" in text and "64" in text and "another target" in text
    few = tiny_target(dtype=torch.float32, vocab_size=5000)
    text = refused(put("few", tensors), few)
    assert "101" in text and "5000" in text
    extra = "medusa_head.9.surprise" if kind == "medusa-2" else "surprise.weight"
    assert "surprise" in refused(put("extra", {**tensors, extra: torch.ones(2)}), t)
    flag = "hydra_dance" if kind.startswith("hydra") else "medusa_dance"
    if kind != "vllm":
        assert flag in refused(put("flag", tensors, **{flag: "yes"}), t)
    assert "no option 'colour'" in refused(put("option", tensors), t, colour="red")


def test_hydras_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    t = targets("hydra")
    module = published.make("hydra", t)
    for name in ("cross-attn", "eagle-attn"):
        text = refused(folder_for(tmp_path / name, "hydra", module, hydra_head_arch=name), t)
        assert name in text and "prefix-mlp" in text
    assert "hidden_state_offset" in refused(folder_for(tmp_path / "offset", "hydra", module, hidden_state_offset=2), t)


def test_the_wrong_name_for_a_folder(tmp_path: Path) -> None:
    t = targets("hydra")
    hydra, medusa = (folder_for(tmp_path, kind, published.make(kind, t)) for kind in ("hydra", "medusa"))
    for name, folder in (("medusa", hydra), ("hydra", medusa), ("medusa", str(tiny_folder()))):
        with pytest.raises(LoadError, match=f"has no {name.title()} heads"):
            load_drafter(name, t, {"model": folder})
    for name, folder in (("hydra", hydra), ("medusa", medusa)):
        assert load_drafter(name, t, {"model": folder}).name == name
        with pytest.raises(ParameterError, match="no option 'model'"):
            load_drafter(folder, t, {"model": folder})
        with pytest.raises(ParameterError, match=f"'{name}' needs {name.title()} heads"):
            load_drafter(name, t)


# ---- following the text ------------------------------------------------------------------------------------------------


class Interrupted(Drafter):
    """Lets the heads draft in some rounds; in others nothing is drafted, or something else is, while they observe all the same."""

    name = "interrupted"

    def __init__(self, inner: Drafter, others: Any = None):
        super().__init__()
        self.inner, self.layers = inner, inner.layers
        self.round = 0
        self.mine: list[int] = []

    def open(self, sampler: Sampler) -> Any:
        return self.inner.open(sampler)

    def propose(self, work: Any) -> list[DraftTree]:
        self.round += 1
        turn = self.round % 3
        if turn == 0:
            return [DraftTree.chain(ask.tokens[-1]) for ask in work]
        if turn == 1:
            return [DraftTree.chain(ask.tokens[-1], [7, 8][: min(ask.budget.nodes, ask.budget.depth)]) for ask in work]
        self.mine.append(self.round - 1)
        return self.inner.propose(work)

    def observe(self, work: Any) -> None:
        self.inner.observe(work)


def accepted(rounds: Any, numbers: Any = None) -> float:
    chosen = [r for r in rounds if numbers is None or r.number in numbers]
    proposed = sum(r.proposed for r in chosen)
    assert proposed >= 10, "a test of heads that draft nothing shows nothing"
    return sum(r.accepted for r in chosen) / proposed


@every
def test_an_overfitted_head_is_accepted(tmp_path: Path, kind: str) -> None:
    t = targets(kind)
    prompt = letters(t.model, 12)
    params = SamplingParams(max_tokens=48)
    text = plain(t, [prompt], params)[0].tokens
    module = published.make(kind, t)
    published.fit(module, t, [*prompt, *text], steps=300)
    source = folder_for(tmp_path, kind, module)
    for options in ({}, TREE):
        drafter = load(source, t, **options)
        found, rounds = run(t, drafter, [prompt], params, "rejection", 3)
        assert found[0].tokens == text
        if not options:
            assert accepted(rounds[0]) >= 0.95
        else:
            assert sum(r.accepted for r in rounds[0]) / sum(min(3, r.budget.depth) for r in rounds[0][1:]) >= 0.95
    interrupted = Interrupted(load(source, t))
    found, rounds = run(t, interrupted, [prompt], params, "block", 3)
    assert found[0].tokens == text and accepted(rounds[0], interrupted.mine) >= 0.95


@every
def test_greedy_and_coupled_equal_plain(tmp_path: Path, kind: str) -> None:
    """In float64, in batches of three: token for token."""
    t = tiny_target(eos_token_id=None)
    source = folder_for(tmp_path, kind, published.make(kind, t, spread=1.0))
    prompts = [letters(t.model, n, seed=n) for n in (9, 3, 1)]
    for options in ({}, TREE, {"shape": "tree", "growth": "best", "nodes": 5}):
        drafter = load(source, t, **options)
        for values, rule in (
            ({}, "rejection"),
            ({"seed": 3, "temperature": 1.0}, "coupled"),
            ({"repetition_penalty": 1.3}, "coupled"),
        ):
            params = SamplingParams(max_tokens=14, **values)
            found, rounds = run(t, drafter, prompts, params, rule, 6)
            assert found == plain(t, prompts, params, rule), (options, values)
            assert all(sum(r.proposed for r in own) > 0 for own in rounds)


@pytest.mark.parametrize("kind", ["medusa", "hydra", "hydra-prefix"])
def test_the_next_turn_and_several_choices(tmp_path: Path, kind: str) -> None:
    """What is drafted depends on the text alone: not on how much of it was there before, nor on a fork."""
    t = load_target(str(tiny_folder(eos=None, context=512)), device="cpu")
    drafter = load(folder_for(tmp_path, kind, published.make(kind, t, spread=1.0)), t)
    engine = Engine(t, drafter, draft=3)
    chat = engine.chat()
    first = list(chat.send("one or two", max_tokens=9))
    assert sum(chunk.round.proposed for chunk in first) > 0
    second = list(chat.send("and three", max_tokens=9))
    fresh = list(engine.stream([*chat.messages[:-1]], max_tokens=9))
    assert [c.round.tokens for c in second] == [c.round.tokens for c in fresh]
    assert sum(c.round.proposed for c in second) > 0
    single = engine.generate("one or two", max_tokens=9, temperature=1.0, seed=5)
    choices = engine.generate("one or two", max_tokens=9, temperature=1.0, seed=5, n=2)
    assert [r.tokens for r in choices[0].rounds] == [r.tokens for r in single.rounds]
    assert choices[1].tokens != choices[0].tokens and all(r.proposed for r in (choices[1].rounds[0], choices[1].rounds[1]))


def test_the_state_follows_forks_and_turns() -> None:
    state = LastState(Sampler(SamplingParams(), [1], 5))
    state.hidden, state.position = torch.ones(2), 4
    other = state.fork(state.sampler)
    assert other.position == 4 and other.hidden is state.hidden
    other.truncate(5)
    assert other.position == 4
    other.truncate(4)
    assert other.hidden is None and other.position == -1 and state.position == 4


def test_no_more_than_a_token_for_each_head(tmp_path: Path) -> None:
    t = targets("medusa")
    drafter = load(folder_for(tmp_path, "medusa", published.make("medusa", t, heads=2), heads=2), t)
    assert isinstance(drafter, HeadsDrafter)
    _, rounds = run(t, drafter, [letters(t.model, 5)], SamplingParams(max_tokens=20), "block", 8)
    assert max(r.proposed for r in rounds[0]) == 2
