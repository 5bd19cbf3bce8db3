"""The expert-union law, against counts in real modules."""

import json

import pytest
import torch
from test_kernels import SPARSE
from tiny import save, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from outrider import kernels
from outrider.bench.roofline import count
from outrider.cli import app
from outrider.errors import LoadError, ParameterError
from outrider.kernels import pack
from outrider.plan.unions import Unions, count_experts, independent, read_unions
from outrider.targets.transformers import TransformersTarget

EXPERTS, ACTIVE = 32, 4


def sparse(seed=0, experts=EXPERTS, active=ACTIVE):
    """A random mixture whose router, fed with independent random embeddings, is uniform on average over models."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=experts,
        num_experts_per_tok=active,
        decoder_sparse_step=1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
        for layer in model.model.layers:
            gate = layer.mlp.gate.weight
            gate.copy_(torch.linalg.qr(torch.randn(64, experts))[0].T)  # orthogonal: no expert is preferred
            layer.self_attn.o_proj.weight.mul_(0.0)  # a row's choice depends on its own token
    return model


@torch.inference_mode()
def mean_union(model, rows, passes, draw):
    with count_experts(model) as found:
        for _ in range(passes):
            model(draw(rows)[None])
    assert found.active == ACTIVE and len(found.chosen) == 2
    return found.mean


def test_a_uniform_router_follows_the_law():
    model = sparse()
    generator = torch.Generator().manual_seed(1)
    for rows in (1, 2, 4, 8):
        measured = mean_union(model, rows, 400, lambda n: torch.randint(0, 4096, (n,), generator=generator))
        assert measured == pytest.approx(independent(EXPERTS, ACTIVE, rows), rel=0.02)


def test_correlated_tokens_stay_below_it():
    model = sparse()
    generator = torch.Generator().manual_seed(2)

    def repeating(n):
        few = torch.randint(0, 4096, (2,), generator=generator)
        return few[torch.randint(0, 2, (n,), generator=generator)]

    for rows in (4, 8):
        assert mean_union(model, rows, 100, repeating) < 0.8 * independent(EXPERTS, ACTIVE, rows)


@pytest.mark.skipif(kernels.VARIANT == "off", reason=f"no CPU kernels: {kernels.why_not}")
def test_the_cpu_engine_reads_the_measured_union():
    """Bytes of a pass = a constant + union x bytes of an expert; the rest of the pass grows by the rows of the embeddings."""
    model = sparse()
    pack(model)
    target = TransformersTarget(model)
    slot = target.open()
    list(target.prefill(slot, [5] * 10))
    expert = 4 * 3 * 64 * 16
    left = set()
    for tokens in ([1], [1, 2], [9, 30, 77, 100], list(range(200, 208)), [3, 3, 3, 3]):
        with count_experts(model) as found:
            work = count(target, slot, tokens)
        union = sum(sum(passes) for passes in found.chosen.values())
        left.add(work.bytes - union * expert - len(tokens) * 64 * 4)
    assert len(left) == 1


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_every_kind_of_expert_is_counted(name):
    config = AutoConfig.for_model(name, **SPARSE)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with count_experts(model) as found, torch.inference_mode():
        model(torch.tensor([[3, 4, 5]]))
    assert found.active == 2 and list(found.experts.values()) == [8, 8]
    assert all(2 <= n <= 6 for passes in found.chosen.values() for n in passes) and len(found.chosen) == 2
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_experts_in_a_list_of_modules():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(5))

        def forward(self, x, chosen):
            for i, expert in enumerate(self.experts):
                expert(x[chosen == i])

    layer = torch.nn.Sequential()
    layer.add_module("mlp", Layer())
    with count_experts(layer) as found:
        layer.mlp(torch.randn(3, 4), torch.tensor([0, 2, 2]))
        layer.mlp(torch.randn(3, 4), torch.tensor([1, 2, 3]))
    assert found.chosen == {"mlp.experts": [2, 3]} and found.experts == {"mlp.experts": 5}


def test_a_dense_model_is_refused():
    with pytest.raises(ParameterError, match="no layers with experts"), count_experts(torch.nn.Linear(2, 2)):
        pass


def test_the_law_and_what_is_preferred_to_it(tmp_path):
    assert independent(8, 2, 1) == pytest.approx(2) and independent(8, 2, 4) == pytest.approx(8 * (1 - 0.75**4))
    assert Unions().of(128, 8, 4) == pytest.approx(8 * 4**0.75) and independent(128, 8, 4) > 8 * 4**0.75
    assert Unions(1.0).of(128, 8, 7) == pytest.approx(independent(128, 8, 7))
    assert Unions().of(128, 8, 1, sequences=4) == pytest.approx(independent(128, 8, 4))  # unrelated texts
    file = tmp_path / "unions.json"
    file.write_text(json.dumps({"active": 8, "unions": {"1": 8.0, "4": 18.98, "8": 30.0}}))
    measured = read_unions(file)
    assert measured.of(128, 8, 4) == pytest.approx(18.98) and 18.98 < measured.of(128, 8, 6) < 30 < measured.of(128, 8, 16)
    assert measured.of(128, 8, 10**6) == 128
    for text in (
        "{",
        "{}",
        '{"active": 0, "unions": {"1": 2}}',
        '{"active": 8, "unions": {}}',
        '{"active": 8, "unions": {"0": 8}}',
    ):
        file.write_text(text)
        with pytest.raises(LoadError, match="unions"):
            read_unions(file)
    with pytest.raises(ParameterError, match="beta"):
        Unions(1.5)


def test_the_command_measures_and_the_plan_uses_it(tmp_path):
    tokenizer = tiny_tokenizer()
    save(sparse(), tokenizer, tmp_path)
    found = CliRunner().invoke(app, ["plan", str(tmp_path), "--measure-unions", "--json"])
    assert found.exit_code == 0, found.output
    value = json.loads(found.stdout)
    unions = {int(n): u for n, u in value["unions"].items()}
    assert (value["experts"], value["active"], unions[1]) == (EXPERTS, ACTIVE, ACTIVE)
    assert all(ACTIVE < unions[n] <= min(EXPERTS, ACTIVE * n) for n in (2, 4, 8, 16))
    file = tmp_path / "unions.json"
    file.write_text(found.stdout)
    arguments = ["plan", str(tmp_path), "--host", "DDR4-3200", "--context", "100", "--batch", "1", "--draft", "3", "--json"]
    planned = CliRunner().invoke(app, [*arguments, "--unions", str(file)])
    assert planned.exit_code == 0, planned.output
    one = json.loads(planned.stdout)["acceptance"]["0.7"]["predictions"][1]
    (experts,) = [t for t in one["terms"] if t["what"] == "experts"]
    assert experts["bytes"] == pytest.approx(2 * unions[4] * 3 * 64 * 16 * 4) and experts["where"] == "host"
