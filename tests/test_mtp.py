"""Multi-token prediction: every layout is read as its family reads it, the maths are transformers' own, and the modules follow the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Sequence

import mtps
import pytest
import torch
from following import Now, check_accepted, check_cut_and_fork, shadow
from safetensors.torch import load_file, save_file
from torch import Tensor
from toys import letters, plain, run

from outrider.decode import Sequence as Decoded
from outrider.decode import close_sequence, decode, open_sequence
from outrider.drafters import load_drafter
from outrider.drafters.base import Ask
from outrider.drafters.detect import detect
from outrider.drafters.growth import TreeOptions
from outrider.drafters.mtp import ChainedDrafter, MtpDrafter
from outrider.drafters.mtp_head import MtpModule
from outrider.errors import LoadError
from outrider.sampling import SamplingParams
from outrider.targets.table import TableTarget
from outrider.tree import Budget

PROMPT = [5, 6, 7, 8]
LENGTH = 50
pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")


def load(folder: str, model: Any, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, MtpDrafter]:
    target = mtps.target_of(model, folder, dtype)
    return target, MtpDrafter.load(target, TreeOptions(**{"min_probability": 0.0, **options}), MtpDrafter.inside(target))


def built(folder: Path, family: str, modules: int = 1, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    model, tensors = mtps.make(family, modules)
    return load(mtps.write(folder, model, tensors), model, dtype, **options)


def modules_of(drafter: MtpDrafter) -> list[MtpModule]:
    return list(drafter.modules) if isinstance(drafter, ChainedDrafter) else [drafter.head]


def drafted(target: Any, drafter: MtpDrafter, text: Sequence[int], depth: int) -> tuple[list[int], list[Tensor]]:
    """The greedy chain behind a text, and the logits ``[V]`` that it was drawn from."""
    sequence = Decoded(target, text, SamplingParams(), "rejection")
    open_sequence(target, drafter, sequence)
    seen: list[Tensor] = []
    kept = {module: module.logits for module in modules_of(drafter)}
    for module, own in kept.items():
        module.logits = lambda states, own=own: seen.append(own(states)) or seen[-1]  # type: ignore[method-assign,func-returns-value]
    try:
        (tree,) = drafter.propose([Ask(sequence.state, text, Budget(depth, depth))])
    finally:
        for module, own in kept.items():
            module.logits = own  # type: ignore[method-assign]
    close_sequence(target, sequence)
    return list(tree.tokens[1:]), [logits[0] for logits in seen]


# ---- transformers' own -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("modules", [1, 2, 3])
def test_equals_the_generation_of_transformers(
    family: str, modules: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round by round of its generation: the same drafted tokens, from the same logits."""
    from transformers import AutoModelForCausalLM
    from transformers.generation.candidate_generator import MTPCandidateGenerator

    model, tensors = mtps.make(family, modules, spread=0.1)
    folder = mtps.write(tmp_path, model, tensors)
    rounds: list[tuple[list[int], list[int], Tensor]] = []
    own = MTPCandidateGenerator.get_candidates

    def get_candidates(self: Any, input_ids: Tensor, *args: Any, **named: Any) -> Any:
        found = own(self, input_ids, *args, **named)
        if found[1] is not None:
            rounds.append((input_ids[0].tolist(), found[0][0, input_ids.shape[1] :].tolist(), found[1][0]))
        return found

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", get_candidates)
    monkeypatch.setattr(
        type(model), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.[3-5]\..*"]
    )  # for so small a model
    ids = torch.tensor([letters(None, 9)])
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference.generate(
        ids, attention_mask=torch.ones_like(ids), use_mtp=True, max_new_tokens=24, do_sample=False, eos_token_id=None
    )
    assert len(rounds) > 5
    target, drafter = load(folder, model)
    for text, candidates, logits in rounds:
        tokens, mine = drafted(target, drafter, text, modules)
        assert tokens == candidates
        assert (torch.stack(mine) - logits[:, : target.vocab_size]).abs().max() < 1e-5


# ---- the formulas ----------------------------------------------------------------------------------------------------------


class Reference:
    """A module in plain tensors around a decoder layer of transformers, without a cache."""

    def __init__(self, family: str, model: Any, tensors: dict[str, Tensor], number: int):
        self.layout, _ = mtps.FAMILIES[family]
        own, block, self.parts = mtps.PREFIXES[self.layout]
        place = {"i": number, "n": model.config.num_hidden_layers + number}
        self.own = {n.removeprefix(own.format(**place)): t for n, t in tensors.items()}
        inner = {n.removeprefix(p): t for n, t in tensors.items() if n.startswith(p := block.format(**place))}
        decoder = model.get_decoder()
        self.layer = type(decoder.layers[-1])(model.config, model.config.num_hidden_layers - 1)
        for name, value in self.layer.state_dict().items():
            value.copy_(inner[name] if name in inner else self.experts(inner, name, len(value)))
        self.eps, self.rotary, self.gain = model.config.rms_norm_eps, decoder.rotary_emb, float(self.layout == "qwen")

    @staticmethod
    def experts(inner: dict[str, Tensor], name: str, count: int) -> Tensor:
        owner, _, leaf = name.rpartition(".")
        parts = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else [leaf]
        return torch.stack([torch.cat([inner[f"{owner}.{i}.{part}.weight"] for part in parts]) for i in range(count)])

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * (self.gain + self.own[f"{name}.weight"])

    def __call__(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """States ``[n, H]`` of a sequence of n pairs."""
        embedding_norm, hidden_norm, projection, last = self.parts
        e, h = self.norm(embeddings, embedding_norm), self.norm(hidden, hidden_norm)
        x = torch.cat([h, e] if self.layout == "mimo" else [e, h], dim=-1) @ self.own[f"{projection}.weight"].T
        n = len(x)
        positions = torch.arange(n)[None]
        mask = torch.zeros(n, n).masked_fill_(torch.ones(n, n).triu(1) > 0, -torch.inf)[None, None]
        rotary = self.rotary(x[None], positions)
        x = self.layer(x[None], position_embeddings=rotary, attention_mask=mask, position_ids=positions)
        return self.norm(x[0], last)


@pytest.mark.parametrize("family", mtps.FAMILIES)
@pytest.mark.parametrize("modules", [1, 2])
def test_equals_the_formulas(family: str, modules: int, tmp_path: Path) -> None:
    model, tensors = mtps.make(family, modules)
    model.set_attn_implementation("eager")
    text = letters(None, 11)
    with torch.no_grad():
        found = model(torch.tensor([text]), use_cache=False, output_hidden_states=True)
        hidden = found.hidden_states[-1][0]  # after the final norm
        if family == "qwen2":
            caught: list[Tensor] = []
            hook = model.get_decoder().norm.register_forward_pre_hook(lambda _, args: caught.append(args[0][0]))
            model(torch.tensor([text]), use_cache=False)
            hook.remove()
            hidden = caught[0]
        references = [Reference(family, model, tensors, i) for i in range(modules)]
        table, output = model.get_input_embeddings(), model.get_output_embeddings()
        wanted: list[Tensor] = []
        own: list[Tensor] = []  # states of a module that goes on by itself
        tokens, states = text[1:], hidden[:-1]
        for k in range(modules if modules > 1 else 3):
            if modules == 1:
                states = torch.cat([hidden[:-1], *own])
            states = references[k % modules](table(torch.tensor(tokens[-len(states) :])), states)
            own.append(states[-1:])
            wanted.append(output(states[-1]))
            tokens = [*tokens, int(wanted[-1].argmax())]
    target, drafter = load(mtps.write(tmp_path, model, tensors), model)
    mine, logits = drafted(target, drafter, text, len(wanted))
    assert mine == tokens[len(text) - 1 :]
    assert torch.allclose(torch.stack(logits), torch.stack(wanted), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", mtps.FAMILIES)
def test_every_tensor_counts(family: str, tmp_path: Path) -> None:
    """Each tensor of a module, changed in the file, changes what is drafted; of the copies of the target's own, none does."""
    model, tensors = mtps.make(family)
    folder, text = mtps.write(tmp_path, model, tensors), letters(None, 12)
    target, drafter = load(folder, model)
    _, before = drafted(target, drafter, text, 2)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    for name in tensors:
        noise = torch.randn_like(tensors[name])
        save_file({**stored, name: tensors[name] + (5 * noise if "gate" in name else noise)}, file, metadata={"format": "pt"})
        _, after = drafted(target, MtpDrafter.load(target, TreeOptions(min_probability=0.0), folder), text, 2)
        is_copy = name.endswith(("embed_tokens.weight", "shared_head.head.weight"))
        expert = ".experts." in name  # that one may not be chosen
        assert expert or is_copy == all(torch.equal(a, b) for a, b in zip(before, after)), name


def test_experts_may_be_stored_together(tmp_path: Path) -> None:
    model, tensors = mtps.make("qwen3_5_moe_text")
    target, drafter = load(mtps.write(tmp_path / "a", model, tensors), model)
    name = "mtp.layers.0.mlp.experts"
    together = {n: t for n, t in tensors.items() if not n.startswith(name)}
    for leaf in ("gate_up_proj", "down_proj"):
        together[f"{name}.{leaf}"] = modules_of(drafter)[0].body.layers[0].mlp.experts.get_parameter(leaf).detach()
    _, other = load(mtps.write(tmp_path / "b", model, together), model)
    _, one = drafted(target, drafter, letters(None, 12), 3)
    _, two = drafted(target, other, letters(None, 12), 3)
    assert torch.allclose(torch.stack(one), torch.stack(two), atol=1e-5, rtol=0)


# ---- the modules follow the text -------------------------------------------------------------------------------------------


@pytest.fixture(params=["qwen2 1", "qwen2 3", "qwen3_5_text 2"])
def pair(request: Any, tmp_path: Path) -> Any:
    family, modules = request.param.split()
    return built(tmp_path, family, int(modules), torch.float64, shape="tree")


def test_comes_back_after_any_rounds(pair: Any) -> None:
    target, drafter = pair
    prompts = [PROMPT, [9] * 30, [11, 3, 4]]
    sequences = [
        Decoded(target, p, SamplingParams(max_tokens=23, ignore_eos=True), "rejection", 0, i) for i, p in enumerate(prompts)
    ]
    for sequence in sequences:
        sequence.keep_open = True
    for _ in decode(target, drafter, sequences, Now(lambda call, number: (call + number) % 4 < 2)):
        pass
    for sequence in sequences:
        assert sequence.state.kv.length <= len(sequence.tokens) - len(modules_of(drafter))
        shadow(target, drafter, sequence.state, sequence.tokens)


@pytest.mark.parametrize("kept", [1, 2, 3, 12, 29, 30, 33])
def test_goes_on_after_a_cut_and_a_fork(pair: Any, kept: int) -> None:
    target, drafter = pair
    check_cut_and_fork(target, drafter, kept)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_short_prompts(pair: Any, length: int) -> None:
    """A chain of modules drafts no further than there are positions to run."""
    target, drafter = pair
    drafter.options = TreeOptions(min_probability=0.0)
    text = letters(None, length)
    sequence = Decoded(target, text, SamplingParams(), "rejection")
    open_sequence(target, drafter, sequence)
    (tree,) = drafter.propose([Ask(sequence.state, text, Budget(9, 4))])
    modules = len(modules_of(drafter))
    assert tree.depth == (0 if length == 1 else 4 if modules == 1 else min(modules, length - 1))


def test_long_prompts_run_in_parts(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = pair
    prompt = letters(None, 100)
    sequences = [Decoded(target, prompt[:n], SamplingParams(), "rejection", 0, n) for n in (100, 40)]
    for sequence in sequences:
        open_sequence(target, drafter, sequence)
    whole = drafter.propose([Ask(s.state, s.tokens, Budget(9, 3)) for s in sequences])
    for place in ("features", "mtp"):
        monkeypatch.setattr(f"outrider.drafters.{place}.PAIRS", 14)
    for sequence in sequences:
        sequence.state.kv.length = 0
    parts = drafter.propose([Ask(s.state, s.tokens, Budget(9, 3)) for s in sequences])
    assert [(t.tokens, t.parents) for t in whole] == [(t.tokens, t.parents) for t in parts]


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize(("rule", "temperature"), [("rejection", 0.0), ("coupled", 0.8)])
def test_says_what_plain_decoding_says(pair: Any, shape: str, rule: str, temperature: float) -> None:
    target, drafter = pair
    drafter.options = TreeOptions(shape=shape, min_probability=0.0)
    prompts = [PROMPT, [9] * 20, letters(None, 7)]
    params = [SamplingParams(max_tokens=20, temperature=temperature, seed=s, ignore_eos=True) for s in range(3)]
    wanted = plain(target, prompts, params, rule)
    found, rounds = run(target, drafter, prompts, params, rule, 6)
    assert [o.tokens for o in found] == [o.tokens for o in wanted]
    assert sum(r.proposed for own in rounds for r in own) > 50


# ---- right wiring: overfitted modules are accepted -------------------------------------------------------------------------


@pytest.fixture(
    scope="module", params=["deepseek_v3 1", "glm4_moe 1", "glm4_moe 3", "qwen3_next 1", "qwen3_5_text 1", "qwen2 1"]
)
def overfitted(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    family, modules = request.param.split()
    model, tensors = mtps.make(family, int(modules), scale=0.1)
    folder = mtps.write(tmp_path_factory.mktemp("mtp"), model, tensors)
    target, drafter = load(folder, model)
    text = [*PROMPT, *plain(target, [PROMPT], SamplingParams(max_tokens=LENGTH, ignore_eos=True))[0].tokens]
    assert len(set(text)) > 12
    mtps.fit(modules_of(drafter), target, text, 150)
    return target, drafter, text


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_overfitted_modules_are_accepted(overfitted: Any, shape: str) -> None:
    target, drafter, text = overfitted
    drafter.options = TreeOptions(shape=shape, min_probability=0.01)
    check_accepted(target, drafter, PROMPT, text, (1, 4, 6))


# ---- what does not fit -----------------------------------------------------------------------------------------------------


def refusal(folder: str, target: Any) -> str:
    with pytest.raises(LoadError) as error:
        MtpDrafter.load(target, TreeOptions(), folder)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_moe_text", "qwen2"])
def test_each_missing_and_each_wrong_tensor_is_named(family: str, tmp_path: Path) -> None:
    model, tensors = mtps.make(family, 1, copies=False)
    folder = mtps.write(tmp_path, model, {})
    target = mtps.target_of(model, folder)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    for name, tensor in tensors.items():
        rest = {key: value for key, value in tensors.items() if key != name}
        save_file({**stored, **rest}, file)
        said = refusal(folder, target)
        assert name in said or "no multi-token-prediction module" in said, said
        save_file({**stored, **tensors, name: tensor[..., :-1].contiguous()}, file)
        assert name in refusal(folder, target)
    block = next(name for name in tensors if "input_layernorm" in name).removesuffix("input_layernorm.weight")
    for extra in ("self_attn.sinks", "mlp.gate.weight_scale_inv"):
        save_file({**stored, **tensors, block + extra: torch.ones(4)}, file)
        assert block + extra in refusal(folder, target)


def test_modules_of_another_model(tmp_path: Path) -> None:
    model, tensors = mtps.make("glm4_moe", 2)
    folder = mtps.write(tmp_path / "a", model, tensors)
    other = mtps.tiny_model("glm4_moe", 0, torch.float32, **{**mtps.FAMILIES["glm4_moe"][1], "num_hidden_layers": 4})
    assert "numbered from 4 on" in refusal(folder, mtps.target_of(other, "deeper"))
    gap = {name: t for name, t in tensors.items() if ".layers.3." not in name}
    assert "there are 4" in refusal(mtps.write(tmp_path / "b", model, gap), mtps.target_of(model, "gap"))
    assert "has shape" in refusal(
        mtps.write(tmp_path / "c", model, mtps.make("qwen2")[1]),
        mtps.target_of(
            mtps.tiny_model("qwen2", 0, torch.float32, hidden_size=48, num_attention_heads=6, num_key_value_heads=2), "wide"
        ),
    )


def test_by_name_it_is_the_targets_own_folder(tmp_path: Path) -> None:
    model, tensors = mtps.make("glm4_moe", 2)
    folder = mtps.write(tmp_path / "whole", model, tensors)
    target = mtps.target_of(model, folder)
    inside = load_drafter("mtp", target, {})
    assert isinstance(inside, ChainedDrafter) and len(inside.modules) == 2
    apart = tmp_path / "apart"
    apart.mkdir()
    save_file(tensors, apart / "model.safetensors")
    for name, options in (("mtp", {"model": str(apart)}), (str(apart), {})):
        assert isinstance(load_drafter(name, target, options), ChainedDrafter)
    assert detect(folder).drafter == "model"


def test_folders_and_targets_without_modules(tmp_path: Path) -> None:
    model, _ = mtps.make("qwen2")
    folder = mtps.write(tmp_path, model, {})
    target = mtps.target_of(model, folder)
    assert "no multi-token-prediction module of a known layout" in refusal(folder, target)
    assert "no such" in refusal(str(tmp_path / "nowhere"), target)
    with pytest.raises(LoadError, match="needs a target of transformers"):
        load_drafter("mtp", TableTarget(), {})
