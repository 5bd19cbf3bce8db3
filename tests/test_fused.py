"""The fused steps of packed models: each says what the module that it replaces says, and a row is not changed by its neighbours."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, Qwen3Config
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from outrider import kernels
from outrider.kernels import Packed, PackedLinear, pack
from outrider.kernels.fused import ACTIVATIONS, FusedNorm, GatedMLP, Joint, PartLinear, fuse

pytestmark = pytest.mark.skipif(kernels.VARIANT == "off", reason=kernels.why_not or "turned off by OUTRIDER_KERNEL")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture(params=list(kernels.variants()))
def variant(request, monkeypatch):
    monkeypatch.setattr(kernels, "_number", kernels.variants()[request.param])
    return request.param


def unaligned(rows, size, generator):
    """Random numbers four bytes off any vector's alignment, NaN before and behind them."""
    room = torch.full((rows * size + 2,), torch.nan)
    x = room[1:-1].view(rows, size)
    return x.copy_(torch.randn(rows, size, generator=generator))


@pytest.mark.parametrize("size", [1, 7, 16, 31, 64, 100, 577])
def test_a_norm_equals_float64(variant, size):
    g = torch.Generator().manual_seed(size)
    norm = FusedNorm(torch.randn(size, generator=g), 1e-5)
    x = unaligned(9, size, g) * torch.tensor([1e-4, 1.0, 1e4]).repeat(3)[:, None]
    exact = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight.double()
    assert torch.allclose(norm(x).double(), exact, rtol=2e-6, atol=0)
    for row in range(len(x)):
        assert torch.equal(norm(x[row : row + 1])[0], norm(x)[row])


@pytest.mark.parametrize("activation", range(len(ACTIVATIONS)))
@pytest.mark.parametrize("dtype", list(kernels.TYPES), ids=str)
def test_a_gated_mlp_equals_float64(variant, dtype, activation):
    g = torch.Generator().manual_seed(3)
    for n, k in ((1, 1), (33, 31), (64, 100), (45, 530)):
        gate, up = (torch.randn(n, k, generator=g).mul(2 / k**0.5).to(dtype) for _ in "ab")
        mlp = GatedMLP(Packed(gate), Packed(up), nn.Identity(), activation)
        for rows in (1, 2, 13, 49):
            x = unaligned(rows, k, g) * 4
            exact = ACTIVATIONS[activation](x.double() @ gate.double().T) * (x.double() @ up.double().T)
            assert (mlp(x) - exact).abs().max() < 1e-5 * exact.abs().max().clamp(min=1)
            assert torch.equal(mlp(x[-1:])[0], mlp(x)[-1])


def test_extreme_gates_stay_finite(variant):
    x = torch.tensor([[-1e4], [-88.0], [-1e-30], [0.0], [1e-30], [88.0], [1e4]])
    one = Packed(torch.ones(1, 1))
    for number, activation in enumerate(ACTIVATIONS):
        out = GatedMLP(one, Packed(torch.ones(1, 1)), nn.Identity(), number)(x)
        assert torch.allclose(out, activation(x) * x, rtol=1e-5, atol=1e-30)
    assert GatedMLP(one, one, nn.Identity(), 0)(torch.tensor([[torch.nan]])).isnan().all()


def kinds(model):
    return {type(module) for module in model.modules()}


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**SIZES), Qwen3Config(**SIZES, head_dim=32), GemmaConfig(**SIZES, head_dim=32)],
    ids=lambda c: c.model_type,
)
def test_a_fused_model_says_what_it_said(config, variant):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 0.5)
    tokens = torch.randint(0, 96, (1, 12))
    with torch.inference_mode():
        before = model(tokens).logits
        pack(model)
        after = model(tokens).logits
    assert {FusedNorm, GatedMLP, Joint} <= kinds(model)
    assert not any(type(m).__name__.endswith("RMSNorm") for m in model.modules())
    assert (before - after).abs().max() < 1e-5 * before.abs().max()


class OddRMSNorm(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x) + 1


class OddMLP(nn.Module):
    """Has the parts of a gated MLP, and another order of them."""

    def __init__(self):
        super().__init__()
        linear = [PackedLinear(Packed(torch.randn(32, 32))) for _ in range(3)]
        self.gate_proj, self.up_proj, self.down_proj = linear
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


def test_modules_that_compute_something_else_stay(variant):
    odd = nn.ModuleList([OddRMSNorm(32), OddMLP(), nn.LayerNorm(32)])
    assert fuse(odd) == 0
    plain = nn.ModuleList([LlamaRMSNorm(32), GemmaRMSNorm(32)])
    assert fuse(plain) == 2 and kinds(plain) == {nn.ModuleList, FusedNorm}


def test_joined_projections_notice_another_input(variant):
    attention = nn.Module()
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(attention, name, PackedLinear(Packed(torch.randn(32, 16)), torch.randn(32)))
    q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
    assert fuse(attention) == 3 and isinstance(attention.q_proj, PartLinear)
    x, y = torch.randn(2, 16), torch.randn(5, 16)
    for _ in range(2):
        assert torch.equal(attention.q_proj(x), q(x))
        assert torch.equal(attention.k_proj(y), k(y)) and torch.equal(attention.v_proj(y), v(y))
        assert torch.equal(attention.q_proj(y), q(y))
        assert torch.equal(attention.v_proj(x), v(x))
    joint, z = attention.q_proj.joint, torch.ones(1, 16)
    for part in (attention.q_proj, attention.k_proj, attention.v_proj):
        part(z)
    assert joint.last.input is None and joint.last.output is None
