"""DFlash: every dialect is read as its engine reads it, the maths are transformers' own, and the drafter follows the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Sequence

import dflashes
import pytest
import torch
from dflashes import MASK
from following import Now, check_accepted, check_cut_and_fork, shadow
from test_conformance import Watched
from torch import Tensor
from toys import letters, plain, run, tiny_model, tiny_target

from outrider.decode import Sequence as Decoded
from outrider.decode import close_sequence, decode, open_sequence
from outrider.drafters import load_drafter
from outrider.drafters.base import Ask
from outrider.drafters.detect import detect
from outrider.drafters.dflash import DFlashDrafter, DFlashOptions
from outrider.errors import LoadError
from outrider.sampling import SamplingParams
from outrider.targets.table import TableTarget
from outrider.targets.transformers import TransformersTarget
from outrider.tree import Budget

PROMPT = [5, 6, 7, 8]
LENGTH = 50
pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")


def load(target: Any, folder: str, **options: Any) -> DFlashDrafter:
    return DFlashDrafter.load(target, DFlashOptions(**{"min_probability": 0.0, **options}), folder)


@pytest.fixture
def target() -> Any:
    return tiny_target("llama", spread=0.25)


@pytest.fixture
def drafter(target: Any, tmp_path: Path) -> DFlashDrafter:
    return load(target, dflashes.write(tmp_path, *dflashes.make()), shape="tree")


def marginals(target: Any, drafter: DFlashDrafter, text: Sequence[int]) -> Tensor:
    """Logits ``[drafts, V]`` behind a text, or ``Vd`` of a reduced vocabulary."""
    sequence = Decoded(target, text, SamplingParams(), "rejection")
    open_sequence(target, drafter, sequence)
    seen: list[Tensor] = []
    hook = drafter.head.register_forward_hook(lambda _, __, out: seen.append(out[0]))
    (tree,) = drafter.propose([Ask(sequence.state, text, Budget(99, 99))])
    hook.remove()
    close_sequence(target, sequence)
    if not drafter.drafts_trees:
        best, ids = seen[0].argmax(-1), drafter.head.draft_ids
        assert list(tree.tokens[1:]) == (best if ids is None else ids[best]).tolist()
    return seen[0]


# ---- transformers' own -----------------------------------------------------------------------------------------------------


def test_equals_the_generation_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Round by round of its generation: the same drafted tokens, from the same logits."""
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator
    from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    config, _ = dflashes.in_dialect("transformers", *dflashes.make(taken=(0, 2, 1)))
    config.pop("model_type"), config.pop("vocab_size")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        assistant = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**config)).eval()
        for parameter in assistant.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    assistant.save_pretrained(tmp_path)
    model = tiny_model("llama", dtype=torch.float32, spread=0.1)
    rounds: list[tuple[list[int], list[int], Tensor]] = []
    own = DFlashTokenCandidateGenerator.get_candidates

    def get_candidates(self: Any, input_ids: Tensor, *args: Any, **named: Any) -> Any:
        found = own(self, input_ids, *args, **named)
        if found[1] is not None:
            rounds.append((input_ids[0].tolist(), found[0][0, input_ids.shape[1] :].tolist(), found[1][0]))
        return found

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", get_candidates)
    ids = torch.tensor([letters(None, 9)])
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=assistant,
        speculation_type="dflash",
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=None,
    )
    assert len(rounds) > 5
    target = TransformersTarget(model)
    drafter = load(target, str(tmp_path))
    assert detect(str(tmp_path)).drafter == "dflash" and drafter.layers == (1, "final", 2)
    for text, candidates, logits in rounds:
        mine = marginals(target, drafter, text)
        assert mine.argmax(-1).tolist()[: len(candidates)] == candidates
        assert (mine[: len(logits)] - logits).abs().max() < 1e-5


# ---- dialects --------------------------------------------------------------------------------------------------------------


def test_dialects_say_the_same(target: Any, tmp_path: Path) -> None:
    config, tensors = dflashes.make()
    found = []
    for dialect in dflashes.DIALECTS:
        folder = dflashes.write(tmp_path / dialect, *dflashes.in_dialect(dialect, config, tensors))
        assert detect(folder).drafter == "dflash"
        drafter = load(target, folder)
        assert drafter.layers == (1, 2) and drafter.describe()["drafts"] == 5
        found.append(marginals(target, drafter, letters(None, 12)))
    assert found[0].shape == (5, 101)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_equals_the_formulas(target: Any, tmp_path: Path) -> None:
    """In plain tensors, without a cache and without the modules."""
    config, tensors = dflashes.make()
    drafter = load(target, dflashes.write(tmp_path, config, tensors))
    text = letters(None, 9)
    w = {name: t.double() for name, t in tensors.items()}
    states = torch.cat([target_states(target, text[:-1])[k] for k in (1, 2)], dim=-1)
    table, output = target.model.get_input_embeddings().weight, target.model.lm_head.weight

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain

    def turn(x: Tensor, positions: Tensor) -> Tensor:  # [n, heads, 8]
        angle = positions[:, None, None] * 10000.0 ** (-torch.arange(4).double() / 4)
        a, b = x[..., :4], x[..., 4:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    context = norm(states @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = table[torch.tensor([text[-1], *[MASK] * 5])].detach()
    every, own = torch.arange(14.0).double(), torch.arange(8.0, 14.0).double()
    for i in range(2):
        p = {n.removeprefix(f"layers.{i}."): t for n, t in w.items() if n.startswith(f"layers.{i}.")}
        y = norm(x, p["input_layernorm.weight"])
        both = torch.cat([context, y])
        q = turn(norm((y @ p["self_attn.q_proj.weight"].T).view(6, 4, 8), p["self_attn.q_norm.weight"]), own)
        k = turn(norm((both @ p["self_attn.k_proj.weight"].T).view(14, 2, 8), p["self_attn.k_norm.weight"]), every)
        v = (both @ p["self_attn.v_proj.weight"].T).view(14, 2, 8)
        weight = (torch.einsum("nhd,mhd->hnm", q, k.repeat_interleave(2, 1)) / 8**0.5).softmax(-1)
        x = x + torch.einsum("hnm,mhd->nhd", weight, v.repeat_interleave(2, 1)).reshape(6, -1) @ p["self_attn.o_proj.weight"].T
        y = norm(x, p["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(y @ p["mlp.gate_proj.weight"].T) * (y @ p["mlp.up_proj.weight"].T)
        x = x + gate @ p["mlp.down_proj.weight"].T
    wanted = norm(x, w["norm.weight"])[1:] @ output.detach().T
    assert (marginals(target, drafter, text) - wanted).abs().max() < 1e-5


def target_states(target: Any, text: Sequence[int]) -> dict[Any, Tensor]:
    slot = target.open()
    (output,) = target.prefill(slot, text, layers=(1, 2))
    return {key: state.clone() for key, state in output.hidden.items()}


def test_every_tensor_counts(target: Any, tmp_path: Path) -> None:
    config, tensors = dflashes.make()
    before = marginals(target, load(target, dflashes.write(tmp_path, config, tensors)), letters(None, 12))
    for name, tensor in tensors.items():
        dflashes.write(tmp_path, config, {**tensors, name: tensor + torch.randn_like(tensor)})
        assert not torch.equal(before, marginals(target, load(target, str(tmp_path)), letters(None, 12))), name


def test_a_vocabulary_of_its_own(target: Any, tmp_path: Path) -> None:
    config, tensors = dflashes.in_dialect("speculators", *dflashes.make(), draft=range(3, 60, 2))
    drafter = load(target, dflashes.write(tmp_path, config, tensors))
    logits = marginals(target, drafter, letters(None, 12))
    assert logits.shape[-1] == 29 and drafter.head.draft_ids.tolist() == list(range(3, 60, 2))
    assert drafter.describe()["output matrix"] == "its own"


def test_the_anchor_may_draft_too(target: Any, tmp_path: Path) -> None:
    config, tensors = dflashes.in_dialect("speculators", *dflashes.make())
    with_anchor = load(target, dflashes.write(tmp_path / "a", {**config, "sample_from_anchor": True}, tensors))
    without = load(target, dflashes.write(tmp_path / "b", config, tensors))
    a, b = (marginals(target, d, letters(None, 12)) for d in (with_anchor, without))
    assert len(a) == 6 and torch.allclose(a[1:], b, atol=1e-9, rtol=0)


def test_which_layers_it_reads(tmp_path: Path) -> None:
    t = tiny_target("llama", num_hidden_layers=9)

    def layers(dialect: str, ids: list[int] | None, **options: Any) -> tuple[Any, ...]:
        config, tensors = dflashes.make(taken=(0, 1))
        config["dflash_config"] = {"mask_token_id": MASK, "target_layer_ids": ids or [0, 1]}
        config, tensors = dflashes.in_dialect(dialect, config, tensors)
        if ids is None:
            del config["dflash_config"]["target_layer_ids"]
        return load(t, dflashes.write(tmp_path, config, tensors), **options).layers

    assert layers("z-lab", [3, 8]) == (4, "final")  # the last entry of transformers' list is normed
    assert layers("speculators", [3, 8]) == (4, 9)
    assert layers("z-lab", None) == (2, 7)  # outputs of layers 1 and 6
    assert layers("z-lab", [3, 8], layers=(5, 9)) == (5, 9)


# ---- the drafter follows the text ------------------------------------------------------------------------------------------


def test_comes_back_after_any_rounds(target: Any, drafter: DFlashDrafter) -> None:
    prompts = [PROMPT, [9] * 30, [11, 3, 4]]
    sequences = [
        Decoded(target, p, SamplingParams(max_tokens=23, ignore_eos=True), "rejection", 0, i) for i, p in enumerate(prompts)
    ]
    for sequence in sequences:
        sequence.keep_open = True
    for _ in decode(target, drafter, sequences, Now(lambda call, number: (call + number) % 4 < 2)):
        pass
    for sequence in sequences:
        assert sequence.state.kv.length <= len(sequence.tokens) - 1
        shadow(target, drafter, sequence.state, sequence.tokens)


@pytest.mark.parametrize("kept", [1, 2, 12, 30, 33])
def test_goes_on_after_a_cut_and_a_fork(target: Any, drafter: DFlashDrafter, kept: int) -> None:
    check_cut_and_fork(target, drafter, kept)


@pytest.mark.parametrize("growth", [None, "dynamic", "static", "sampled", "chain"])
@pytest.mark.parametrize(("rule", "temperature"), [("rejection", 0.0), ("coupled", 0.8), ("rejection", 0.9)])
def test_says_what_plain_decoding_says(
    target: Any, drafter: DFlashDrafter, growth: str | None, rule: str, temperature: float
) -> None:
    shape = {"shape": "chain"} if growth == "chain" else {"shape": "tree", "growth": growth}
    drafter.options = DFlashOptions(**shape, min_probability=0.0)  # type: ignore[arg-type]
    watched = Watched(drafter)
    prompts = [PROMPT, [9] * 20, letters(None, 7)]
    params = [SamplingParams(max_tokens=20, temperature=temperature, seed=s, ignore_eos=True) for s in range(3)]
    found, rounds = run(target, watched, prompts, params, rule, 6)
    if rule == "coupled" or temperature == 0:
        assert [o.tokens for o in found] == [o.tokens for o in plain(target, prompts, params, rule)]
    assert sum(r.proposed for own in rounds for r in own) > 50
    assert (watched.laws > 0) == (temperature == 0.9 and drafter.options.draws)


def test_a_tree_takes_the_likeliest_combinations(target: Any, drafter: DFlashDrafter) -> None:
    """Best-first over the marginals: of all paths of two tokens from the four best each, the likeliest nodes."""
    text = letters(None, 12)
    p = marginals(target, drafter, text)[:2].softmax(-1)
    best, one = p[0].topk(4), {}
    for a, pa in zip(best.indices.tolist(), best.values.tolist()):
        one[(a,)] = pa
        second = p[1].topk(4)
        for b, pb in zip(second.indices.tolist(), second.values.tolist()):
            one[(a, b)] = pa * pb
    wanted = sorted(one, key=lambda path: -one[path])[:7]
    sequence = Decoded(target, text, SamplingParams(), "rejection")
    open_sequence(target, drafter, sequence)
    (tree,) = drafter.propose([Ask(sequence.state, text, Budget(7, 2))])
    assert {tree.path_tokens(node) for node in range(1, len(tree))} == set(wanted)
    close_sequence(target, sequence)


@pytest.fixture(scope="module")
def overfitted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    t = tiny_target("llama", spread=0.25)
    text = [*PROMPT, *plain(t, [PROMPT], SamplingParams(max_tokens=LENGTH, ignore_eos=True))[0].tokens]
    assert len(set(text)) > 15
    drafter = load(t, dflashes.write(tmp_path_factory.mktemp("dflash"), *dflashes.make(scale=0.1)))
    dflashes.fit(drafter.head, t, text, 250)
    return t, drafter, text


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_an_overfitted_drafter_is_accepted(overfitted: Any, shape: str) -> None:
    t, drafter, text = overfitted
    drafter.options = DFlashOptions(shape=shape, min_probability=0.01)
    check_accepted(t, drafter, PROMPT, text, (1, 4, 5))


# ---- what does not fit -----------------------------------------------------------------------------------------------------


def refusal(target: Any, folder: str, **options: Any) -> str:
    with pytest.raises(LoadError) as error:
        load(target, folder, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("dialect", dflashes.DIALECTS)
def test_each_missing_wrong_and_unknown_tensor_is_named(dialect: str, target: Any, tmp_path: Path) -> None:
    config, tensors = dflashes.in_dialect(dialect, *dflashes.make(), draft=range(40) if dialect == "speculators" else None)
    for name, tensor in tensors.items():
        if name in ("d2t", "t2d"):
            continue
        rest = {key: value for key, value in tensors.items() if key != name}
        assert name in refusal(target, dflashes.write(tmp_path, config, rest))
        wrong = {**tensors, name: tensor[..., :-1].contiguous()}
        assert name in refusal(target, dflashes.write(tmp_path, config, wrong))
    for extra in ("markov_w1.weight", "layers.0.self_attn.q_proj.bias"):
        assert extra in refusal(target, dflashes.write(tmp_path, config, {**tensors, extra: torch.zeros(32)}))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"block_size": None}, "block_size"),
    ({"block_size": 1}, "block_size"),
    ({"dflash_config": {"target_layer_ids": [0, 1]}}, "mask_token_id"),
    ({"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 3]}}, "has 3"),
    ({"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, "x"]}}, "'x'"),
    ({"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1, 2]}}, "fc.weight"),
    ({"dflash_config": {"mask_token_id": MASK, "causal": True}}, "dflash_config.causal"),
    ({"dflash_config": {"mask_token_id": 5000, "target_layer_ids": [0, 1]}}, "another target"),
    ({"hidden_size": 48}, "another target"),
    ({"layer_types": ["sliding_attention"] * 2}, "sliding window"),
    ({"selector": 3}, "selector"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ({"num_hidden_layers": 3}, "layers.2."),
    ({"hidden_act": "nothing"}, "cannot build"),
]


@pytest.mark.parametrize(("changes", "said"), BAD, ids=[said for _, said in BAD])
def test_bad_configs(changes: dict[str, Any], said: str, target: Any, tmp_path: Path) -> None:
    config, tensors = dflashes.make()
    assert said in refusal(target, dflashes.write(tmp_path, {**config, **changes}, tensors))


def test_other_folders_and_targets(target: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no weights" in refusal(target, str(tmp_path / "empty"))
    config, tensors = dflashes.make()
    folder = dflashes.write(tmp_path / "a", config, tensors)
    assert "lend" in refusal(TableTarget(hidden_size=32, vocab_size=101), folder, layers=(0, 1))
    del config["dflash_config"]
    assert "not a DFlash drafter" in refusal(target, dflashes.write(tmp_path / "b", config, tensors))
    dspark = {**dflashes.in_dialect("speculators", *dflashes.make())[0], "speculators_model_type": "dspark"}
    with pytest.raises(LoadError, match="dspark"):
        detect(dflashes.write(tmp_path / "c", dspark, tensors))
    config, tensors = dflashes.in_dialect("speculators", *dflashes.make(), draft=range(90, 101))
    bad = {**tensors, "d2t": tensors["d2t"] + 5}
    assert "d2t" in refusal(target, dflashes.write(tmp_path / "d", config, bad))
    odd = dflashes.write(tmp_path / "e", {**dflashes.make()[0], "odd": 3}, dflashes.make()[1])
    assert json.loads((tmp_path / "e" / "config.json").read_text())["odd"] == 3
    load_drafter(odd, target, {"ignore": "odd"})
