"""The planner's arithmetic by hand: shapes, passes, placement, drafts, words, flags; and the command."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import gguf
import numpy as np
import pytest
from tiny import tiny_folder
from typer.testing import CliRunner

from outrider.cli import app
from outrider.errors import LoadError, ParameterError
from outrider.models import shipped
from outrider.plan import flags, words
from outrider.plan.acceptance import Acceptance, Draft, fit
from outrider.plan.hardware import GPUS, HOSTS, Device, Hardware, Overheads, read_hardware
from outrider.plan.passes import Load, Placement, one_pass
from outrider.plan.placement import Tenant, place
from outrider.plan.placement import fit as fit_memory
from outrider.plan.predict import Drafter, Setting, make_plan, predict, settle
from outrider.plan.shapes import Layer, Part, Shape, read_shape
from outrider.plan.unions import Unions

NONE = Overheads()
FAST = Device("fast", 100e9, 1000.0, 1e6, 1.0, 1.0, NONE)
SLOW = Device("slow", 1000e9, 100.0, 1e5, 1.0, 1.0, NONE)


def toy(layers=4, experts=0, **more):
    layer = Layer(Part(50, 100.0), kv=3, scores=6, expert=Part(10, 20.0), experts=experts, active=2 if experts else 0)
    values = {"embedding": Part(80, 160.0), "head": Part(80, 160.0), "tied": False, "hidden": 8, "vocabulary": 10}
    return Shape("toy", (layer,) * layers, context=1000, quantisation="F16", **{**values, **more})


# ---- shapes ---------------------------------------------------------------------------------------------------------------


def test_a_dense_configuration():
    shape = read_shape(str(tiny_folder(eos=None)))
    layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64 + 2 * 32
    assert [x.dense.parameters for x in shape.layers] == [layer] * 2
    assert shape.layers[0].kv == 2 * 16 and shape.layers[0].scores == 2 * 32
    assert shape.parameters == 2 * layer + 2 * 300 * 32 + 32 and shape.bytes == pytest.approx(4 * shape.parameters - 2 * 32)
    assert shape.kv_bytes(10) == 2 * 32 * 10 * 2


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [
        ("qwen2.5-coder-32b", 32.76, 32.0),
        ("qwen3-coder-30b-a3b", 30.53, 3.04),
        ("mixtral-8x7b", 46.70, 12.75),
        ("llama-3.1-8b", 8.03, 7.5),
    ],
)
def test_known_models_have_their_published_sizes(name, parameters, active):
    shape = read_shape(name, "Q4_K_M")
    assert shape.parameters / 1e9 == pytest.approx(parameters, abs=0.01)
    assert shape.active_parameters / 1e9 == pytest.approx(active, abs=0.03)


def test_experts_and_latent_attention(tmp_path):
    moe = read_shape("qwen3-coder-30b-a3b").layers[0]
    assert (moe.experts, moe.active, moe.expert.parameters) == (128, 8, 3 * 2048 * 768)
    config = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "vocab_size": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(str(tmp_path), "4")
    assert [x.experts for x in shape.layers] == [0, 8] and shape.layers[1].expert == Part(3 * 64 * 16, 3 * 64 * 16 / 2)
    assert shape.layers[0].kv == 16 + 4 and "4 times as large" in shape.note  # 4 heads x (8 + 4 + 8) for 20


def header(path, **keys):
    """A GGUF file that ends where its tensors' data would begin."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_context_length(512)
    writer.add_token_list(["a", "b", "ü"])
    for name, value in keys.items():
        writer.add_uint32(name, value)
    q8, f32 = gguf.GGMLQuantizationType.Q8_0, None
    tensors = {"token_embd.weight": (96, 64), "output_norm.weight": (64,), "blk.0.attn_q.weight": (64, 64)}
    tensors |= {"blk.0.ffn_gate_inp.weight": (8, 64), "blk.0.ffn_up_exps.weight": (8, 32, 64)}
    for name, dims in tensors.items():
        quantised = name.endswith("exps.weight")
        kind = np.dtype(np.uint8) if quantised else np.dtype(np.float32)
        shape = gguf.quant_shape_to_byte_shape(dims, q8) if quantised else dims
        writer.add_tensor_info(name, shape, kind, 4 * int(np.prod(dims)), q8 if quantised else f32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


def test_a_gguf_header_without_its_data(tmp_path):
    file = header(tmp_path / "x.gguf", **{"llama.expert_count": 8, "llama.expert_used_count": 2})
    shape = read_shape(str(file))
    (layer,) = shape.layers
    assert layer.dense == Part(64 * 64 + 8 * 64, 4 * (64 * 64 + 8 * 64))
    assert (layer.experts, layer.active, layer.expert) == (8, 2, Part(32 * 64, 32 * 64 * 34 / 32))
    assert layer.kv == 2 * (16 + 16) and layer.scores == 4 * 32
    assert shape.tied and shape.vocabulary == 96 and shape.context == 512
    with pytest.raises(ParameterError, match="own quantisation"):
        read_shape(str(file), "Q8_0")


# ---- passes ---------------------------------------------------------------------------------------------------------------


def test_a_pass_by_hand():
    """Four layers of 100 bytes and 50 parameters, two of them on the GPU with the rest on the host."""
    load = Load(rows=3, sequences=2, context=10)
    found = {
        (t.what, t.where): t
        for t in one_pass(toy(), Hardware(FAST, SLOW, crossing=0.5, link=1e9), Placement(2), load, Unions()).terms
    }
    dense = found["dense layers", "host"]
    assert (dense.bytes, dense.flops) == (200.0, 2 * 100 * 6) and dense.seconds == 2.0 and dense.bound == "memory"
    assert found["dense layers", "gpu"].seconds == 0.2
    attention = found["attention", "host"]
    assert attention.bytes == 2 * 2 * (3 * 10 * 2) and attention.flops == 2 * 2 * 6 * 13 * 6
    assert found["output", "host"].bytes == 160.0
    assert found["crossings", "link"].seconds == pytest.approx(2 * 0.5)  # host to GPU, and back to the output
    host = Hardware(host=SLOW)
    many = one_pass(toy(), host, Placement(), Load(10000), Unions())
    assert many.bound == "arithmetic"
    with_calls = replace(SLOW, overheads=Overheads(layer=100.0, layer_sequence=10.0, whole=1.0))
    called = one_pass(toy(), Hardware(host=with_calls), Placement(), Load(1, 2), Unions())
    assert called.part(bound="overhead") == 4 * (100 + 2 * 10) + 1 and called.bound == "overhead"


def test_experts_are_read_by_their_union_and_overlap_hides_the_shorter():
    hardware = Hardware(FAST, SLOW, crossing=0.0)
    found = one_pass(toy(experts=16), hardware, Placement(4, 1), Load(4), Unions())
    terms = {(t.what, t.where): t for t in found.terms}
    union = 2 * 4**0.75
    assert terms["experts", "host"].bytes == pytest.approx(union * 20) and terms["experts", "gpu"].bytes == pytest.approx(
        3 * union * 20
    )
    assert terms["experts", "gpu"].flops == 3 * 2 * 2 * 10 * 4
    hidden = one_pass(toy(experts=16), replace(hardware, overlap=1.0), Placement(4, 1), Load(4), Unions())
    assert found.seconds - hidden.seconds == pytest.approx(min(found.part(where="gpu"), found.part(where="host")))


def test_a_window_limits_the_cache():
    shape = toy()
    short = replace(shape, layers=(replace(shape.layers[0], window=5), *shape.layers[1:]))
    assert shape.kv_bytes(20) == 4 * 3 * 20 * 2 and short.kv_bytes(20) == (3 * 20 + 5) * 3 * 2


def test_placement_fills_the_gpu_and_experts_leave_first():
    layer = 100.0 + 3 * 10 * 2
    hardware = Hardware(replace(FAST, memory=2.5 * layer + 40), SLOW, reserve=0.0)
    assert place(toy(), hardware, [], 10, 1, 1) == Placement(2)
    sparse = toy(experts=16)
    hardware = Hardware(replace(FAST, memory=4 * layer + 160 + 40 + 2.5 * 320), SLOW, reserve=0.0)
    assert place(sparse, hardware, [], 10, 1, 1) == Placement(4, 2)
    used = fit_memory(hardware, [Tenant(sparse, Placement(4, 2))], 10, 1, 1)
    assert used.fits and used.used["gpu"] == 4 * layer + 160 + 40 + 2 * 320 and used.used["host"] == 2 * 320 + 160
    tight = fit_memory(replace(hardware, host=replace(SLOW, memory=1.0)), [Tenant(sparse, Placement(4, 2))], 10, 1, 1)
    assert not tight.fits and "host" in tight.problem and "gpu" not in tight.problem


# ---- drafts ---------------------------------------------------------------------------------------------------------------


def test_tokens_per_pass():
    rate = Acceptance((0.8,))
    assert rate.tokens(Draft.chain(4)) == pytest.approx((1 - 0.8**5) / 0.2)
    assert Acceptance((0.9, 0.5)).tokens(Draft.chain(3)) == pytest.approx(1 + 0.9 + 0.45 + 0.225)
    tree = Draft.parse("3x2")
    assert tree.nodes == 9 and str(tree) == "3x2" and str(Draft.parse("4")) == "4" == str(Draft.chain(4))
    assert rate.at(1, 2) == pytest.approx(1 - 0.2 * 0.6)
    assert fit(rate.tokens(Draft.chain(4)), Draft.chain(4)).rates[0] == pytest.approx(0.8)
    for wrong in ("", "x", "4x0", "-1", "64x64"):
        with pytest.raises(ParameterError, match="draft"):
            Draft.parse(wrong)
    with pytest.raises(ParameterError, match="tokens per pass"):
        fit(9.0, Draft.chain(4))


def test_a_prediction_by_hand():
    setting = Setting(toy(), Drafter("model", toy(1)), Hardware(host=SLOW), Placement(), False, 0)
    found = predict(setting, Draft.chain(3), 2, Acceptance((0.5,)))
    assert found.drafting == pytest.approx(3 * (100 + 160 + 2 * 16) / 100, rel=1e-3)  # a pass of the drafter for each token
    assert found.speed == pytest.approx(2 * 1.875 / (found.target.seconds + found.drafting))
    assert predict(setting, Draft.parse("2x2"), 1, Acceptance((0.5,))).drafting == pytest.approx(
        (2 * 260 + 16 + 2 * 16) / 100, rel=1e-3
    )


def test_the_gain_ends_where_batches_are_bound_by_arithmetic():
    shape, drafts = read_shape("llama-3.1-8b"), [Draft.chain(k) for k in (1, 2, 4)]
    setting = settle(shape, Drafter("suffix"), Hardware(GPUS["RTX 4090"]), 512, Unions(), Acceptance((0.6,)), 1, drafts)
    plan = make_plan(setting, Acceptance((0.6,)), drafts, [1, 64, 1024])
    assert plan.gain(plan.best(1)) > 2 and plan.ends == 1024 and plan.plain(1024).target.bound == "arithmetic"
    assert "from 1024 on" in words.batches(plan) and "draft 4" in words.reason(plan, 1)
    lines = flags.flags(plan, 1, "T", "suffix")
    assert "--draft 4" in lines["outrider"] and "-ngl 99" in lines["llama.cpp"] and "--spec-draft-n-max 4" in lines["llama.cpp"]
    spec = json.loads(lines["vllm"].split("'")[1])
    assert spec["method"] == "suffix" and spec["num_speculative_tokens_per_batch_size"][-1] == [1024, 1024, 0]


# ---- the command ------------------------------------------------------------------------------------------------------------


def invoke(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments])


def test_the_command_plans_and_draws(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "x.png"
    arguments = ("llama-3.1-8b", "-d", "llama-3.2-1b", "--quant", "Q4_K_M", "--gpu", "rtx3060", "--host", "DDR4-3200")
    arguments += ("--acceptance", "0.6,0.8", "--batch", "1,4", "--draft", "2,4,2x2")
    found = invoke(*arguments, "--plot", str(picture), "--json")
    assert found.exit_code == 0, found.output
    value = json.loads(found.stdout)
    assert list(value["acceptance"]) == ["0.6", "0.8"] and picture.read_bytes().startswith(b"\x89PNG")
    one = value["acceptance"]["0.8"]
    assert [p["draft"] for p in one["predictions"][:4]] == ["0", "2", "4", "2x2"] and one["memory"]["fits"]
    again = tmp_path / "hardware.json"
    again.write_text(json.dumps(value["hardware"]))
    assert read_hardware(again) == Hardware(GPUS["RTX 3060"], HOSTS["DDR4-3200"])
    shown = invoke(*arguments)
    assert shown.exit_code == 0 and "expected" in shown.output and "vllm serve" in shown.output and "overhead" in shown.output


def test_this_machine_is_measured():
    from outrider.plan.here import here

    host = here(repeats=1).host
    assert host.bandwidth > 1e9 and host.flops > 1e9 and host.overheads.layer > 0 and host.overheads.turn > 0
    assert (
        all(slack > 0.2 for _, slack in host.curve)
        and host.slack(1) == host.curve[0][1]
        and host.slack(1000) == host.curve[-1][1]
    )


def test_an_eagle_head_is_counted_as_its_file_has_it():
    """All but the product that makes features, which does not run for each drafted token."""
    from safetensors import safe_open

    with safe_open(shipped("eagle3-smollm2") / "model.safetensors", "pt") as file:
        names = file.keys()
        sizes = {name: math.prod(file.get_slice(name).get_shape()) for name in names}
    shape = read_shape("eagle3-smollm2")
    assert shape.parameters == sum(sizes.values()) - sizes["fc.weight"] - sizes["d2t"] - sizes["t2d"]
    assert shape.bytes == 2 * shape.parameters and shape.vocabulary == sizes["d2t"]
    assert shape.head.parameters == sizes["lm_head.weight"] + sizes["norm.weight"]


GPU = ("--gpu", "RTX 3090")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "TARGET"),
        (("llama-3.1-8b",), "needs a GPU"),
        (("nothing", *GPU), "no model nothing"),
        (("llama-3.1-8b", "--gpu", "RTX 3091"), "RTX 3090"),
        (("llama-3.1-8b", *GPU, "--here"), "one of --here"),
        (("llama-3.1-8b", *GPU, "--quant", "Q99"), "Q4_K_M"),
        (("llama-3.1-8b", *GPU, "--acceptance", "2"), "from 0 to 1"),
        (("llama-3.1-8b", *GPU, "--acceptance", "x"), "--acceptance"),
        (("llama-3.1-8b", *GPU, "--draft", "4x"), "4x2x1"),
        (("llama-3.1-8b", *GPU, "--ngl", "3"), "one memory"),
        (("llama-3.1-8b", "--host", "DDR4-3200", "--ngl", "3"), "no GPU"),
        (("llama-3.1-8b", *GPU, "--host", "DDR4-3200", "--n-cpu-moe", "3"), "no experts"),
        (("llama-3.1-8b", *GPU, "--beta", "0.5"), "none"),
        (("llama-3.1-8b", *GPU, "--link", "3"), "--link"),
        (("llama-3.1-8b", *GPU, "--host-efficiency", "0.5"), "no host"),
        (("llama-3.1-8b", *GPU, "--gpu-efficiency", "2"), "at most 1"),
        (("llama-3.1-8b", *GPU, "--context", "999999"), "131072"),
        (("llama-3.1-8b", *GPU, "-d", "replay"), "-d MODEL"),
        (("llama-3.1-8b", *GPU, "--drafter-quant", "Q8_0"), "no weights"),
        (("llama-3.1-8b", *GPU, "--plot", "x.txt"), ".png"),
        (("llama-3.1-8b", "--hardware", "/nowhere.json"), "cannot read"),
        (("/nowhere.gguf", *GPU), "no file"),
        (("--trace", "/nowhere.jsonl"), "cannot read"),
        (("--trace", "x", *GPU), "TARGET"),
        (("--measure-unions",), "TARGET"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    found = invoke(*arguments)
    assert found.exit_code == 2 and found.stdout == "" and message in found.stderr, found.output
    assert found.stderr.count("\n") == 1 and "Traceback" not in found.stderr


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"gpu": {"name": "x"}}', '{"gpu": {"speed": 1}}', '{"other": 1}'])
def test_a_broken_description_of_hardware(tmp_path, text):
    file = tmp_path / "h.json"
    file.write_text(text)
    with pytest.raises((LoadError, ParameterError)):
        read_hardware(file)


def test_a_broken_gguf(tmp_path):
    good = header(tmp_path / "x.gguf").read_bytes()
    for cut in (3, 40, len(good) // 2):
        (tmp_path / "y.gguf").write_bytes(good[:cut])
        with pytest.raises(LoadError, match="GGUF header"):
            read_shape(str(tmp_path / "y.gguf"))


def test_without_matplotlib_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['matplotlib'] = None\nfrom outrider.cli import main\n"
        "sys.argv = ['outrider', 'plan', 'x', '--gpu', 'T4', '--plot', 'x.png']\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "pip install 'outrider[plot]'" in done.stderr and done.stderr.count("\n") == 1
