"""What the roofline says a pass must read and compute, against numbers made by hand."""

import json

import pytest
import torch
from test_kernel_choice import ALL
from test_kernels import SPARSE
from tiny import tiny_folder
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from outrider import kernels
from outrider.bench import roofline
from outrider.bench.roofline import Rates, Work, count
from outrider.cli import app
from outrider.errors import ParameterError, PromptError
from outrider.kernels import choose, pack
from outrider.kernels.choose import Choice
from outrider.targets.transformers import TransformersTarget

MODEL = str(tiny_folder(eos=None))
CONTEXT = 10


def seen(rows, window=None):
    """Keys that the rows of a chain behind the context look at, all together."""
    return sum(min(CONTEXT + i + 1, window or 1000) for i in range(rows))


def counted(target, tokens):
    slot = target.open()
    list(target.prefill(slot, [5] * CONTEXT))
    found = count(target, slot, tokens)
    assert slot.length == CONTEXT
    assert not any(m._forward_pre_hooks_with_kwargs for m in target.model.modules())
    target.close(slot)
    return found


def test_the_limit_is_the_longer_of_two():
    rates = Rates(bandwidth=10.0, flops=100.0)
    assert Work(50, 100).seconds(rates) == 5.0 and Work(50, 100).bound(rates) == "memory"
    assert Work(50, 1000).seconds(rates) == 10.0 and Work(50, 1000).bound(rates) == "arithmetic"


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_a_dense_model(name, weights):
    """Hidden 32, four heads of 8 over two of keys and values, 64 between, two layers, 300 tokens."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=weights).eval()
    pack(model, torch.float32, {s: Choice(s, name, {}) for s in choose.shapes(model, torch.float32).values()})
    target = TransformersTarget(model)
    layer = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 32 * 64
    matrices, norms = 2 * layer + 300 * 32, 5 * 32
    size = weights.itemsize if name == "packed" else 4
    for rows in (1, 2, 5):
        found = counted(target, list(range(20, 20 + rows)))
        keys_and_values = CONTEXT * 2 * 2 * (2 * 8) * 4
        assert found.bytes == matrices * size + norms * 4 + rows * 32 * weights.itemsize + keys_and_values
        assert found.flops == 2 * matrices * rows + 2 * 2 * 4 * (8 + 8) * seen(rows)


def test_tied_embeddings_biases_and_a_window():
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        attention_bias=True,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if kernels.VARIANT != "off":
        pack(model)
    target = TransformersTarget(model)
    matrices = 2 * 16 * 16 + 2 * 8 * 16 + 3 * 16 * 24 + 100 * 16
    biases, norms = 16 + 8 + 8 + 16, 3 * 16
    found = counted(target, [1, 2, 3])
    assert found.bytes == 4 * (matrices + biases + norms + 3 * 16 + CONTEXT * 2 * 8)
    assert found.flops == 2 * matrices * 3 + 2 * 2 * (8 + 8) * seen(3)
    slot = target.open()
    list(target.prefill(slot, [5] * CONTEXT))
    target._last_pass.windows[0] = 4  # three of the context's keys and its own
    work = roofline._attention(target, slot, 3)
    assert work.bytes == 4 * 3 * 2 * 8 and work.flops == 2 * 2 * (8 + 8) * 3 * 4 == 2 * 2 * (8 + 8) * seen(3, window=4)


@pytest.mark.parametrize(
    "packed", [pytest.param(True, marks=pytest.mark.skipif(kernels.VARIANT == "off", reason="off")), False]
)
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_a_sparse_model_reads_the_experts_that_its_rows_chose(kind, packed):
    """Hidden 48, four heads of 12 over two, two layers of eight experts with 40 between, two chosen by each row."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SPARSE), dtype=torch.float32).eval()
    if packed:
        pack(model)
    target = TransformersTarget(model)
    chosen: list[int] = []
    for module in model.modules():
        if hasattr(module, "packed_up_proj") or hasattr(module, "gate_up_proj"):
            module.register_forward_pre_hook(lambda _, arguments: chosen.append(len(arguments[1].unique())))
    dense = 2 * (2 * 48 * 48 + 2 * 24 * 48 + 8 * 48) + 101 * 48
    norms = (2 * 2 + 1) * 48 + (2 * 2 * 12 if kind == "qwen3_moe" else 0)
    expert = 3 * 40 * 48
    for tokens in ([7], [7, 50], list(range(10, 22))):
        handle = len(chosen)
        found = counted(target, tokens)
        union = sum(chosen[-2:])  # of the two layers in the counted pass
        assert len(chosen) == handle + 4 and (len(tokens) > 1 or union == 4) and union <= 16
        kv = CONTEXT * 2 * 2 * 24
        assert found.bytes == 4 * (dense + norms + expert * union + len(tokens) * 48 + kv)
        assert found.flops == 2 * len(tokens) * (dense + 2 * 2 * expert) + 2 * 2 * 4 * (12 + 12) * seen(len(tokens))


def test_the_result_adds_up():
    found = roofline.roofline(TransformersTarget.load(MODEL, device="cpu"), 32, 2, Rates(1e9, 1e9))
    assert [row["rows"] for row in found["rows"]] == list(roofline.ROWS)
    for row in found["rows"]:
        assert row["limit_ms"] == pytest.approx(max(row["bytes"], row["flops"]) / 1e6)
        assert row["of_limit"] == pytest.approx(row["ms"] / row["limit_ms"]) and row["ms"] > 0
        assert row["bound"] == ("memory" if row["bytes"] >= row["flops"] else "arithmetic")
    assert found["rows"][0]["of_one_row"] == 1.0
    assert roofline.table(found).row_count == len(roofline.ROWS)


def test_a_context_that_is_too_short():
    with pytest.raises(PromptError, match=r"^250 tokens of context and 32 to measure with are too many.*256$"):
        roofline.roofline(TransformersTarget.load(MODEL, device="cpu"), 250, 1, Rates(1e9, 1e9))


def test_only_a_transformers_target_has_one():
    with pytest.raises(ParameterError, match="transformers"):
        roofline.roofline(object.__new__(_Other))


class _Other(TransformersTarget):
    name = "other"
    device = torch.device("meta")


# ---- the command ----------------------------------------------------------------------------------------------------


def call(*args):
    return CliRunner().invoke(app, ["bench", "-t", MODEL, *map(str, args)])


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(roofline, "measure_rates", lambda dtype: Rates(2e10, 1e11))


def test_command(quick, tmp_path):
    result = call("--roofline", "--context", 16, "--repeat", 2, "--out", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    assert "16 tokens of context, medians of 2; this machine reads 20.0 GB/s and does 100 GFLOP/s" in result.stdout
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["outrider_roofline"] == 1 and written["machine"]["threads"] == torch.get_num_threads()
    (target,) = written["targets"]
    assert target["target"]["name"] == MODEL and target["repeats"] == 2 and len(target["rows"]) == len(roofline.ROWS)
    assert call("--roofline", "--out", tmp_path / "r.json").exit_code == 2
    value = json.loads(call("--roofline", "--context", 16, "--repeat", 1, "--json").stdout)
    assert value["targets"][0]["rows"][0]["bytes"] == target["rows"][0]["bytes"]


@pytest.mark.parametrize(
    "more",
    [("-d", "lookup"), ("--draft", 4), ("--limit", 3), ("--raw",), ("--temperature", 1), ("--accept", "block"), ("-o", "a=b")],
)
def test_what_says_nothing_to_a_roofline_is_refused(quick, more):
    result = call("--roofline", *more)
    assert result.exit_code == 2 and "roofline" in result.stderr
    assert call("--context", 16).exit_code == 2


def test_check_shows_what_was_chosen():
    arguments = ["check", MODEL, "none", "--context", "16"]
    value = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    shapes = value["kernels"]["target"]
    if kernels.TURNED_OFF:
        assert not shapes
        return
    assert value["kernels"]["rows"] == list(choose.ROWS) and value["kernels"]["variant"] == kernels.VARIANT
    assert len(shapes) == 5 and all(s["ms"] == {} and s["why"] for s in shapes)
    shown = CliRunner().invoke(app, arguments).stdout
    assert "Linear layers of the target" in shown and shapes[0]["why"] in shown and shapes[0]["shape"] in shown
    value["kernels"]["target"][0] |= {"ms": {"packed": {1: 0.5, 4: 0.6, 8: 0.7, 16: 1.25}}, "chosen": "packed", "why": ""}
    assert value["kernels"]["why_not"] == kernels.why_not and ("no CPU kernels" in shown) == bool(kernels.why_not)
    from outrider.cli.check import products

    assert products(value["kernels"], "target").row_count == 5


@pytest.mark.parametrize("turned_off", [True, False])
def test_check_says_why_there_are_no_kernels(monkeypatch, turned_off):
    monkeypatch.setattr(kernels, "VARIANT", "off")
    monkeypatch.setattr(kernels, "_skinny", None)
    monkeypatch.setattr(kernels, "_number", -1)
    monkeypatch.setattr(kernels, "TURNED_OFF", turned_off)
    monkeypatch.setattr(kernels, "why_not", "nobody compiled them")
    reason = "OUTRIDER_KERNEL is off" if turned_off else "nobody compiled them"
    arguments = ["check", MODEL, "none", "--context", "16"]
    assert f"no CPU kernels: {reason}" in CliRunner().invoke(app, arguments).stdout
    assert json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)["kernels"]["why_not"] == reason


@pytest.mark.slow
def test_real_rates_are_positive():
    rates = roofline.measure_rates(torch.bfloat16)
    assert len(rates.ways) == 3 + 2 * (kernels.VARIANT != "off") and min(rates.ways.values()) > 1e8
    assert {rates.bandwidth, rates.flops} <= set(rates.ways.values())
