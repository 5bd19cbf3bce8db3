"""How the product of a linear layer is chosen: the decision, the file, what is forced; and that every candidate computes the layer."""

import json

import pytest
import torch
from tiny import tiny_folder
from torch import nn
from toys import uneven_model

from outrider import kernels
from outrider.kernels import PackedLinear, WideEmbedding, choose, pack
from outrider.kernels.choose import Choice, OneDNNLinear, Shape, build, candidates, decide
from outrider.targets.transformers import TransformersTarget
from outrider.tree import DraftTree

ALL = [
    pytest.param("packed", marks=pytest.mark.skipif(kernels.VARIANT == "off", reason="no kernel")),
    "torch",
    pytest.param("onednn", marks=pytest.mark.skipif(not choose.has_onednn(torch.float32), reason="torch without oneDNN")),
]
KINDS = {"packed": PackedLinear, "torch": nn.Linear, "onednn": OneDNNLinear}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.delenv("OUTRIDER_KERNEL", raising=False)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "deep" / "kernels.json"))
    return tmp_path / "deep" / "kernels.json"


@pytest.fixture
def measured(monkeypatch):
    """Fake measurements instead of real ones; the shapes that were asked for, call by call."""
    asked = []

    def measure(wanted, seconds=0.0):
        asked.append(list(wanted))
        speed = {"packed": 3.0, "torch": 2.0, "onednn": 1.0}
        return {s: {name: (speed[name],) * len(choose.ROWS) for name in candidates(s)} for s in wanted}

    monkeypatch.setattr(choose, "measure", measure)
    monkeypatch.setattr(choose, "SMALL", 0)
    return asked


def llama(**more):
    return uneven_model(attention_bias=True, **more)


# ---- the decision ---------------------------------------------------------------------------------------------------


def test_another_candidate_must_be_clearly_faster():
    order = ("packed", "torch", "onednn")
    assert decide({"packed": (1, 1, 1, 1), "torch": (0.96, 0.96, 0.96, 0.96)}, order) == "packed"
    assert decide({"packed": (1, 1, 1, 1), "torch": (0.94, 0.94, 0.94, 0.94)}, order) == "torch"
    assert decide({"packed": (1, 1, 1, 1), "torch": (0.9, 0.9, 0.9, 0.9), "onednn": (0.8, 0.8, 0.8, 0.8)}, order) == "onednn"
    assert decide({"packed": (1, 1, 1, 1), "onednn": (0.1, 0.1, 0.1, 0.1)}, ("packed", "torch")) == "packed"
    assert decide({"torch": (2, 2, 2, 2), "onednn": (1, 1, 1, 1)}, ("torch", "onednn")) == "onednn"


def test_the_mean_is_weighted():
    assert choose.mean((1, 0, 0, 0)) == 0.4 and choose.mean((0, 0, 0, 1)) == 0.1
    assert choose.mean((2, 2, 2, 2)) == 2
    slow_at_one = {"packed": (1.0, 2.0, 3.0, 5.0), "torch": (4.0, 2.0, 2.0, 2.0)}  # 2.1 and 2.8
    assert decide(slow_at_one, ("packed", "torch")) == "packed"


def test_candidates(monkeypatch):
    monkeypatch.setattr(kernels, "VARIANT", "some")
    monkeypatch.setattr(choose, "has_onednn", lambda arithmetic: arithmetic == torch.float32)
    assert candidates(Shape(8, 8, torch.bfloat16)) == ("packed", "torch", "onednn")
    assert candidates(Shape(8, 8, torch.bfloat16, torch.bfloat16)) == ("packed", "torch")
    assert candidates(Shape(8, 8, torch.bfloat16, tied=True)) == ("packed", "torch")  # oneDNN's weights have no rows
    monkeypatch.setattr(kernels, "VARIANT", "off")
    assert candidates(Shape(8, 8, torch.float32)) == ("torch", "onednn")


def test_a_build_without_onednn_has_no_candidate_of_it(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not choose.has_onednn(torch.float32) and not choose.has_onednn(torch.bfloat16)


# ---- measured once, then known --------------------------------------------------------------------------------------


def test_each_shape_is_measured_once(measured, cache):
    model = llama()
    first = choose.choose(model)
    assert [sorted(map(str, call)) for call in measured] == [sorted(map(str, first))]
    assert {(s.n, s.k) for s in first} == {(48, 48), (24, 48), (72, 48), (48, 72), (101, 48)}
    assert {c.chosen for c in first.values()} == {"onednn" if choose.has_onednn(torch.float32) else "torch"}
    assert choose.choose(llama()) == first and len(measured) == 1
    assert json.loads(cache.read_text())["version"] == choose.FILE_VERSION
    assert [p.name for p in cache.parent.iterdir()] == [cache.name]
    assert choose.choose(llama(), torch.bfloat16) and len(measured) == 2  # another arithmetic


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"version": 0, "machines": {}}', '{"version": 1, "machines": 3}', "\x00\xff"]
)
def test_a_broken_file_is_rewritten(measured, cache, content):
    cache.parent.mkdir()
    cache.write_text(content, encoding="latin-1")
    choose.choose(llama())
    assert len(measured) == 1 and choose.key() in json.loads(cache.read_text())["machines"]
    choose.choose(llama())
    assert len(measured) == 1


@pytest.mark.parametrize("times", [[], "nonsense", [0, 1, 1, 1], [1, 1, 1], ["x", 1, 1, 1], [None] * 4])
def test_broken_entries_are_measured_again(measured, cache, times):
    shape = str(Shape(48, 48, torch.float32))
    cache.parent.mkdir()
    cache.write_text(json.dumps({"version": 1, "machines": {choose.key(): {shape: {"torch": times}}}}))
    choose.choose(llama())
    assert len(measured) == 1 and len(choose.recall()[shape]["torch"]) == len(choose.ROWS)


def test_other_machines_are_measured_and_kept(measured, cache, monkeypatch):
    choose.choose(llama())
    here = choose.key()
    assert f"{torch.get_num_threads()} threads" in here and torch.__version__ in here and kernels.VARIANT in here
    monkeypatch.setattr(choose, "KERNEL_VERSION", "other")
    choose.choose(llama())
    assert len(measured) == 2 and set(json.loads(cache.read_text())["machines"]) == {here, choose.key()}


def test_a_cache_that_cannot_be_written_is_no_error(measured, cache):
    cache.parent.write_text("a file where the folder should be")
    assert choose.choose(llama()) and choose.choose(llama())
    assert len(measured) == 2


def test_a_forced_variant_is_not_measured(measured, monkeypatch):
    monkeypatch.setenv("OUTRIDER_KERNEL", kernels.VARIANT)
    found = choose.choose(llama())
    assert not measured
    assert {(c.chosen, c.why) for c in found.values()} == {
        (candidates(Shape(1, 1, torch.float32))[0], "OUTRIDER_KERNEL is set")
    }


def test_small_models_are_not_measured(measured, monkeypatch):
    monkeypatch.setattr(choose, "SMALL", 8 << 20)
    assert {c.why for c in choose.choose(llama()).values()} == {"too small to measure"} and not measured


def test_on_a_busy_machine_nothing_is_believed(measured, cache, monkeypatch):
    monkeypatch.setattr(choose, "measure", lambda wanted: {})
    found = choose.choose(llama())
    assert {(c.chosen, c.why) for c in found.values()} == {(candidates(next(iter(found)))[0], "the machine is busy")}
    assert not cache.exists()


def test_waiting_for_cores_ends_the_measurement(monkeypatch):
    count = iter(range(0, 10**6, 1000))
    monkeypatch.setattr(choose, "_waited", lambda: next(count))
    monkeypatch.setattr(choose, "_time", lambda shape, pools, seconds: {})
    assert choose.measure([Shape(8, 8, torch.float32)]) == {}
    monkeypatch.setattr(choose, "_waited", lambda: 0)
    assert choose.measure([Shape(8, 8, torch.float32)]) == {Shape(8, 8, torch.float32): {}}


def test_the_real_measurement_gives_a_time_for_everything(monkeypatch):
    monkeypatch.setattr(choose, "MOST_COPIES", 1 << 20)
    monkeypatch.setattr(choose, "_waited", lambda: 0)
    wanted = [Shape(40, 64, torch.bfloat16), Shape(70, 33, torch.bfloat16, torch.bfloat16), Shape(5000, 96, torch.float32)]
    found = choose.measure(wanted, 0.01)
    for shape in wanted:
        assert set(found[shape]) == set(candidates(shape))
        assert all(len(times) == len(choose.ROWS) and min(times) > 0 for times in found[shape].values())


@pytest.mark.parametrize("name", ALL)
def test_a_layer_in_several_places_is_built_once(name):
    """Shared by two parents, and under two names of one."""
    model, reference = llama(), llama()
    for m in (model, reference):
        first, second = m.model.layers
        first.mlp.gate_proj = first.mlp.up_proj
        second.mlp.gate_proj = second.mlp.up_proj = first.mlp.up_proj
    places = [(parent, name) for parent, name, layer in choose.linears(model) if layer is model.model.layers[0].mlp.up_proj]
    assert len(places) == 4
    shapes = set(choose.shapes(model, torch.float32).values())
    pack(model, torch.float32, {s: Choice(s, name, {}) for s in shapes})
    modules = {getattr(parent, place) for parent, place in places}
    assert len(modules) == 1 and type(modules.pop()) is KINDS[name]
    tokens = torch.randint(3, 101, (1, 9))
    with torch.no_grad():
        assert (model(tokens).logits - reference(tokens).logits).abs().max() < 1e-4


# ---- the candidates compute the layer -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "weights, arithmetic",
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
def test_products_equal_float64(name, weights, arithmetic, bias):
    if name == "onednn" and not choose.has_onednn(arithmetic):
        pytest.skip("no bfloat16 in oneDNN here")
    torch.manual_seed(1)
    for n, k in ((1, 1), (33, 65), (128, 192)):
        layer = nn.Linear(k, n, bias=bias, dtype=weights).requires_grad_(False)
        w, b = layer.weight.double(), layer.bias.double() if bias else 0.0
        module = build(name, layer, arithmetic)
        assert type(module) is KINDS[name] and (module.in_features, module.out_features) == (k, n)
        for rows in (0, 1, 2, 7, 16, 33):
            x = torch.randn(1, rows, k).to(arithmetic)
            out = module(x)
            assert out.shape == (1, rows, n) and out.dtype == arithmetic
            scale = x.double().abs() @ w.abs().T + 1
            error = (out - (x.double() @ w.T + b)).abs() / scale
            assert rows == 0 or error.max() < (1e-6 if arithmetic == torch.float32 else 1e-2)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", ["plain", "tied", "gemma"])
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("arithmetic", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_of_each_candidate_equals_the_reference(name, kind, weights, arithmetic):
    if arithmetic == torch.bfloat16 and (weights != arithmetic or (name == "onednn" and not choose.has_onednn(arithmetic))):
        pytest.skip("bfloat16 arithmetic is for bfloat16 weights, and where oneDNN has it")
    torch.manual_seed(0)
    model, reference = (
        uneven_model("gemma", head_dim=12) if kind == "gemma" else llama(tie_word_embeddings=kind == "tied") for _ in range(2)
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(weights)
    reference.load_state_dict(model.state_dict())
    shapes = set(choose.shapes(model, arithmetic).values())
    assert {s.tied for s in shapes} == ({True, False} if kind != "plain" else {False})
    choices = {s: Choice(s, "torch" if s.tied and name == "onednn" else name, {}) for s in shapes}
    held = sum({p.data_ptr(): p.numel() for p in model.parameters()}.values())
    pack(model, arithmetic, choices)
    assert any(type(m) is KINDS[name] for m in model.modules())
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if kind != "plain":  # one matrix for both
        table = embedding.table if isinstance(embedding, WideEmbedding) else embedding.weight
        assert table is (head.packed if name == "packed" else head.weight)
    target = TransformersTarget(model)
    size = 4 if name != "packed" and arithmetic == torch.float32 else weights.itemsize
    untied = embedding.table.nbytes if kind == "plain" and isinstance(embedding, WideEmbedding) else 0
    assert target.memory()["weights"] <= held * max(size, weights.itemsize) * (1.6 if name == "packed" else 1.1) + untied
    tokens = torch.randint(3, 101, (1, 20))
    with torch.no_grad():
        exact = reference(tokens).logits[0]
    slot = target.open()
    list(target.prefill(slot, tokens[0, :15].tolist()))
    (output,) = target.forward([(slot, DraftTree.chain(int(tokens[0, 15]), tokens[0, 16:].tolist()))])
    close = 1e-4 if arithmetic == torch.float32 else 5e-2
    assert (output.logits - exact[15:]).abs().max() < close * exact.abs().max()


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_load_takes_what_was_chosen(measured, dtype):
    target = TransformersTarget.load(str(tiny_folder(eos=None)), device="cpu", dtype=dtype)
    arithmetic = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    best = "onednn" if choose.has_onednn(arithmetic) else "torch"
    assert {c.chosen for c in target.choices} == {best} and len(measured) == 1
    assert all(c.shape.arithmetic == arithmetic for c in target.choices) and target.dtype == arithmetic
    assert any(type(m) is KINDS[best] for m in target.model.modules())


def test_load_leaves_a_model_alone_when_the_kernels_are_turned_off(measured, monkeypatch):
    monkeypatch.setattr(kernels, "VARIANT", "off")
    monkeypatch.setattr(kernels, "TURNED_OFF", True)
    target = TransformersTarget.load(str(tiny_folder(eos=None)), device="cpu")
    assert not measured and not target.choices and type(target.model.get_output_embeddings()) is nn.Linear


def test_without_a_compiler_onednn_is_still_there(measured, monkeypatch):
    monkeypatch.setattr(kernels, "VARIANT", "off")
    monkeypatch.setattr(kernels, "_skinny", None)
    monkeypatch.setattr(kernels, "_number", -1)
    target = TransformersTarget.load(str(tiny_folder(eos=None)), device="cpu")
    best = "onednn" if choose.has_onednn(torch.float32) else "torch"
    assert {c.chosen for c in target.choices} == {best} and target.dtype == torch.float32
    assert not any(isinstance(m, PackedLinear) for m in target.model.modules())
