"""The CPU kernels against float64, on shapes and addresses that fit nothing; and models that run on them."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from toys import UNEVEN, uneven_model
from transformers import AutoConfig, AutoModelForCausalLM

from outrider import kernels
from outrider.kernels import PANEL, Packed, PackedLinear, pack
from outrider.targets.transformers import TransformersTarget
from outrider.tree import DraftTree

pytestmark = pytest.mark.skipif(kernels.VARIANT == "off", reason=kernels.why_not or "turned off by OUTRIDER_KERNEL")

SHAPES = [(1, 1), (5, 7), (31, 33), (32, 64), (100, 257), (64, 513), (193, 96), (33, 1030)]


@pytest.fixture(params=list(kernels.variants()))
def variant(request, monkeypatch):
    monkeypatch.setattr(kernels, "_number", kernels.variants()[request.param])
    return request.param


def random_weight(n, k, dtype, generator):
    spread = torch.exp(3 * torch.randn(n, k, generator=generator))
    return (torch.randn(n, k, generator=generator) * spread).clamp(-1e4, 1e4).to(dtype)


@pytest.mark.parametrize("dtype", list(kernels.TYPES), ids=str)
def test_products_equal_float64(variant, dtype):
    g = torch.Generator().manual_seed(1)
    for n, k in SHAPES:
        weight, bias = random_weight(n, k, dtype, g), torch.randn(n, generator=g)
        packed = Packed(weight)
        for rows in (1, 2, 3, 5, 6, 7, 12, 13, 31, 48, 49, 64):
            room = torch.full((rows * k + 1,), torch.nan)
            x = room[1:].view(rows, k)  # four bytes off any vector's alignment
            x.copy_(torch.randn(rows, k, generator=g))
            exact = x.double() @ weight.double().T + bias.double()
            scale = x.double().abs() @ weight.double().abs().T + bias.double().abs()
            error = ((packed(x, bias) - exact).abs() / scale).max()
            assert error < 3e-7 * max(1, k**0.5), (n, k, rows, error)
            assert not packed(x).isnan().any()


def test_nothing_is_written_beyond_the_result(variant):
    g = torch.Generator().manual_seed(2)
    n, k, rows = 45, 19, 7
    packed = Packed(random_weight(n, k, torch.bfloat16, g))
    out = torch.full((rows * n + 64,), torch.nan)
    x = torch.randn(rows, k, generator=g)
    address = packed.panels.data_ptr()
    at = out[32:].data_ptr()
    kernels._skinny.linear(x.data_ptr(), address, 0, at, rows, n, k, kernels.TYPES[torch.bfloat16], kernels._number, 2)
    assert out[:32].isnan().all() and out[32 + rows * n :].isnan().all()
    assert not out[32 : 32 + rows * n].isnan().any()


def test_a_row_does_not_depend_on_the_rows_beside_it(variant):
    g = torch.Generator().manual_seed(3)
    for n, k in SHAPES:
        packed = Packed(random_weight(n, k, torch.bfloat16, g))
        x = torch.randn(64, k, generator=g)
        alone = torch.cat([packed(row[None]) for row in x])
        for rows in (2, 6, 11, 12, 16, 33, 64):
            assert torch.equal(packed(x[:rows]), alone[:rows])


@pytest.mark.parametrize("dtype", list(kernels.TYPES), ids=str)
def test_every_16_bit_number_is_widened_exactly(variant, dtype):
    if dtype == torch.float32:
        numbers = torch.tensor([0.0, -0.0, 1.5, 3e38, -1e-45])
    else:
        numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        numbers = numbers[numbers.isfinite()]
    wide = Packed(numbers[:, None])(torch.ones(1, 1))[0]
    # A product adds 0.0 to the number, which keeps everything but the sign of zero; subnormal floats may be flushed by nobody.
    assert torch.equal(wide, numbers.float())


def test_rows_are_the_matrix():
    weight = random_weight(70, 11, torch.bfloat16, torch.Generator().manual_seed(4))
    index = torch.tensor([[0, 69, 31], [32, 33, 1]])
    assert torch.equal(Packed(weight).rows(index), weight.float()[index])


def test_an_empty_batch_and_leading_dimensions():
    linear = PackedLinear(Packed(torch.randn(10, 6)), torch.randn(10))
    assert linear(torch.randn(0, 6)).shape == (0, 10)
    assert linear(torch.randn(2, 3, 6)).shape == (2, 3, 10)


@pytest.mark.parametrize("size", [16, 48, 64, 80, 128, 192, 256])
def test_attention_equals_float64(variant, size):
    g = torch.Generator().manual_seed(5)
    for heads, kv_heads, n, m in ((1, 1, 1, 1), (4, 2, 3, 9), (6, 2, 16, 130), (5, 5, 2, 17), (12, 1, 7, 300)):
        store = torch.full((2, kv_heads, m + 5, size), torch.nan)  # what lies behind the kept keys must not be read
        store[:, :, :m] = torch.randn(2, kv_heads, m, size, generator=g)
        keys, values = store[0, :, :m], store[1, :, :m]
        q = 2 * torch.randn(n, heads, size, generator=g).transpose(0, 1)
        columns = min(n, m)
        mask = torch.zeros(n, columns).masked_fill_(torch.rand(n, columns, generator=g) < 0.4, -torch.inf)
        mask[:, 0] = 0
        sinks = torch.randn(heads, generator=g)
        for hide, sink in ((None, None), (mask, None), (mask, sinks)):
            scores = q.double() @ keys.double().repeat_interleave(heads // kv_heads, 0).mT * size**-0.5
            if hide is not None:
                scores[:, :, m - columns :] += hide
            if sink is not None:
                scores = torch.cat([scores, sink.double()[:, None, None].expand(heads, n, 1)], -1)
            exact = scores.softmax(-1)[:, :, :m] @ values.double().repeat_interleave(heads // kv_heads, 0)
            assert kernels.can_attend(q, values)
            out = kernels.attend(q, keys, values, hide, size**-0.5, sink)
            assert (out.transpose(0, 1) - exact).abs().max() < 6e-6


def test_attention_of_a_row_does_not_depend_on_what_it_does_not_see(variant):
    g = torch.Generator().manual_seed(6)
    length, path = 70, [0, 2, 5, 6]  # rows of a tree of 8 that form a path
    keys, values = torch.randn(2, 2, length + 8, 64, generator=g)
    q = torch.randn(6, 8, 64, generator=g)
    hidden = torch.ones(8, 8, dtype=torch.bool)
    for at, row in enumerate(path):
        hidden[row, path[: at + 1]] = False
    for row in {1, 3, 4, 7}:
        hidden[row, row] = False
    tree = kernels.attend(q, keys, values, torch.zeros(8, 8).masked_fill_(hidden, -torch.inf), 0.125, None)
    seen = [*range(length), *(length + row for row in path)]
    for at, row in enumerate(path):
        own = seen[: length + at + 1]
        alone = kernels.attend(q[:, row : row + 1], keys[:, own], values[:, own], None, 0.125, None)
        assert torch.equal(tree[row], alone[0])


CONFIGS = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True, "attention_bias": True},
    "gemma": {"head_dim": 12},
    "gpt2": {"n_positions": 64, "bos_token_id": 1, "eos_token_id": 2},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_packed_model_says_what_the_float32_model_says(name, dtype):
    torch.manual_seed(0)
    model, reference = (uneven_model(name.split("-")[0], **CONFIGS[name]) for _ in range(2))
    for parameter in model.parameters():  # as from_pretrained does it: buffers stay as they are
        parameter.data = parameter.data.to(dtype)
    reference.load_state_dict(model.state_dict())
    held = sum({p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}.values())
    linears = sum(type(m) is nn.Linear for m in model.modules())
    assert pack(model) == linears
    target = TransformersTarget(model)
    tokens = torch.randint(3, 101, (1, 20))
    with torch.no_grad():
        exact = reference(tokens).logits[0]
    slot = target.open()
    list(target.prefill(slot, tokens[0, :15].tolist()))
    (output,) = target.forward([(slot, DraftTree.chain(int(tokens[0, 15]), tokens[0, 16:].tolist()))])
    assert (output.logits - exact[15:]).abs().max() < 1e-4 * exact.abs().max()
    assert torch.equal(target.embed([5, 7]), reference.get_input_embeddings()(torch.tensor([5, 7])).detach())
    padding = (linears + 1) * PANEL * 72 * dtype.itemsize  # outputs are padded to whole panels
    widened = sum(p.numel() * (4 - dtype.itemsize) for p in target.model.parameters() if p.dtype == torch.float32)
    assert held <= target.memory()["weights"] <= held + padding + widened


SPARSE = {
    **UNEVEN,
    "intermediate_size": 40,
    "moe_intermediate_size": 40,
    "head_dim": 12,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_a_sparse_model_reads_only_the_experts_that_its_rows_chose(kind):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SPARSE)
    model, reference = (AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.float32).eval() for _ in range(2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    reference.load_state_dict(model.state_dict())
    reference.set_experts_implementation("eager")
    pack(model)
    target = TransformersTarget(model)
    experts = [m for m in model.modules() if hasattr(m, "packed_up_proj")]
    assert len(experts) == 2
    read, chosen = [], []
    for layer, module in enumerate(experts):
        for number, packed in enumerate(module.packed_up_proj):
            packed.register_forward_hook(lambda m, *_, at=(layer, number): read.append((at, m.panels.nbytes)))
        module.register_forward_pre_hook(
            lambda _, arguments, layer=layer: chosen.extend((layer, e) for e in arguments[1].unique().tolist())
        )
    for rows in (1, 2, 5, 16):
        tokens = torch.randint(3, 101, (1, rows))
        read.clear()
        chosen.clear()
        slot = target.open()
        (output,) = target.forward([(slot, DraftTree.chain(int(tokens[0, 0]), tokens[0, 1:].tolist()))])
        with torch.no_grad():
            exact = reference(tokens).logits[0]
        assert (output.logits - exact).abs().max() < 1e-4 * exact.abs().max()
        assert sorted(at for at, _ in read) == sorted(set(chosen))  # each of the union once, and no other
        one = experts[0].packed_up_proj[0].panels.nbytes
        assert sum(size for _, size in read) == len(chosen) * one
        assert rows > 1 or len(chosen) == 2 * 2


def test_layers_that_share_a_weight_keep_it():
    model = uneven_model()
    first, second = model.model.layers
    second.mlp.gate_proj.weight = first.mlp.gate_proj.weight
    tokens = torch.randint(3, 101, (1, 9))
    with torch.no_grad():
        exact = model(tokens).logits
        pack(model)
        assert torch.allclose(model(tokens).logits, exact, atol=1e-5)


def test_memory_that_another_tensor_has_a_part_of_is_left_alone():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            both = torch.randn(64, 2048)
            self.left, self.right = (nn.Linear(1024, 64, bias=False) for _ in range(2))
            self.left.weight = nn.Parameter(both[:, :1024])
            self.right.weight = nn.Parameter(both[:, 1024:])
            self.alone = nn.Linear(2048, 64, bias=False)
            self.register_buffer("kept", self.alone.weight.detach()[3:5])

        def get_input_embeddings(self):
            return nn.Embedding(1, 1)

        get_output_embeddings = get_input_embeddings

    model = Two()
    x = torch.randn(3, 1024)
    exact, kept = [model.left(x), model.right(x)], model.kept.clone()
    pack(model)
    assert torch.allclose(model.left(x), exact[0], atol=1e-4) and torch.allclose(model.right(x), exact[1], atol=1e-4)
    assert torch.equal(model.kept, kept)


def test_a_copy_of_a_packed_model_has_its_own_weights():
    linear = PackedLinear(Packed(torch.randn(40, 24)))
    x = torch.randn(2, 24)
    exact = linear(x)
    copy = deepcopy(linear)
    linear.packed.panels.zero_()
    assert torch.equal(copy(x), exact) and not linear(x).any()
    with pytest.raises(RuntimeError, match="keeps the type of its weights"):
        copy.to(torch.bfloat16)(x)


def test_a_model_without_parameters_of_its_own_loads(tmp_path):
    """OLMo's norms have no weights: with tied embeddings nothing but packed matrices is left."""
    from tiny import tiny_folder

    config = AutoConfig.for_model(
        "olmo",
        vocab_size=300,
        hidden_size=48,
        intermediate_size=72,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    for file in tiny_folder().iterdir():
        if file.name.startswith(("tokenizer", "chat_template", "special")):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    target = TransformersTarget.load(str(tmp_path), device="cpu")
    assert target.dtype == torch.float32
    (output,) = target.forward([(target.open(), DraftTree.chain(5, [6, 7]))])
    assert output.logits.isfinite().all()
