"""EAGLE checkpoints that do not fit: one line that names the tensor or the key, for every dialect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import eagles
import pytest
import torch
from test_eagle import load, refusal
from toys import tiny_target

from outrider.drafters.eagle import EagleOptions
from outrider.errors import ParameterError


@pytest.fixture
def target() -> Any:
    return tiny_target("llama", spread=0.25)


@pytest.mark.parametrize("dialect", eagles.DIALECTS)
def test_each_missing_tensor_is_named(dialect: str, target: Any, tmp_path: Path) -> None:
    config, tensors = eagles.make(dialect, draft=range(40))
    for name in tensors:
        if name in ("t2d", "d2t", "embed_tokens.weight"):
            continue
        rest = {key: value for key, value in tensors.items() if key != name}
        said = refusal(target, eagles.write(tmp_path / name, dialect, config, rest))
        assert name in said or "not an EAGLE head" in said, said


@pytest.mark.parametrize("dialect", eagles.DIALECTS)
def test_each_wrong_shape_and_each_unknown_tensor_is_named(dialect: str, target: Any, tmp_path: Path) -> None:
    config, tensors = eagles.make(dialect, draft=range(40))
    for name, tensor in tensors.items():
        wrong = tensor[..., :-1].contiguous()
        said = refusal(target, eagles.write(tmp_path / name, dialect, config, {**tensors, name: wrong}))
        assert name in said or (name == "t2d" and "d2t" in said), said
    for extra in ("mask_hidden", eagles.PREFIX[dialect] + "self_attn.q_proj.bias"):
        more = {**tensors, extra: torch.zeros(32)}
        assert extra in refusal(target, eagles.write(tmp_path / extra, dialect, config, more))


@pytest.mark.parametrize("dialect", eagles.DIALECTS)
def test_a_head_for_another_target(dialect: str, tmp_path: Path) -> None:
    config, tensors = eagles.make(dialect)
    folder = eagles.write(tmp_path / "width", dialect, config, tensors)
    assert "another target" in refusal(tiny_target("llama", hidden_size=48, num_attention_heads=6), folder)
    large = tiny_target("llama", vocab_size=3000)
    if dialect != "eagle":  # that has nothing of a vocabulary's size
        assert "another target" in refusal(large, folder)
    wanted = {**config, "target_hidden_size": 4096}
    if dialect != "eagle":
        said = refusal(tiny_target("llama"), eagles.write(tmp_path / "says", dialect, wanted, tensors))
        assert "target_hidden_size" in said and "of 4096 numbers" in said


@pytest.mark.parametrize("dialect", eagles.DIALECTS)
def test_unknown_flags_are_refused_by_name(dialect: str, target: Any, tmp_path: Path) -> None:
    config, tensors = eagles.make(dialect)
    folder = eagles.write(tmp_path / "a", dialect, {**config, "double_norm": True}, tensors)
    assert "double_norm" in refusal(target, folder)
    load(target, folder, ignore="double_norm")
    eagles.write(tmp_path / "a", dialect, {**config, "double_norm": False}, tensors)
    load(target, folder)
    quantised = {**config, "quantization_config": {"quant_method": "fp8"}}
    assert "quantization_config" in refusal(target, eagles.write(tmp_path / "b", dialect, quantised, tensors))
    if dialect == "speculators":
        inner = {**config, "transformer_layer_config": {**config["transformer_layer_config"], "gated": 3}}
        assert "transformer_layer_config.gated" in refusal(target, eagles.write(tmp_path / "c", dialect, inner, tensors))
    if dialect == "specforge":
        for key, value in (("use_aux_hidden_state", False), ("parallel", True)):
            inner = {**config, "eagle_config": {key: value}}
            assert f"eagle_config.{key}" in refusal(target, eagles.write(tmp_path / "d", dialect, inner, tensors))


BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "no-such-family"}, "no-such-family"),
    ({"model_type": "phi3"}, "not built like Llama"),
    ({"hidden_size": "wide"}, "hidden_size"),
    ({"hidden_size": None}, "hidden_size"),
    ({"num_attention_heads": 5}, "q_proj"),
    ({"num_hidden_layers": 2}, "layers.1."),
    ({"norm_output": "yes"}, "norm_output"),
    ({"fc_norm": True}, "fc_norm.0.weight"),
    ({"norm_before_fc": True}, "input_norm.weight"),
    ({"bias": True}, "fc.bias"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}, "2 layers, but fc.weight takes 3"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 7]}}, "layer 8"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, "x"]}}, "'x'"),
    ({"eagle_config": [1]}, "eagle_config"),
    ({"eagle_config": {"norm_before_fc": True}}, "input_norm.weight"),
    ({"eagle_config": {"norm_before_fc": 1}}, "norm_before_fc"),
    ({"num_aux_hidden_states": 4}, "num_aux_hidden_states is 4"),
]


@pytest.mark.parametrize(("changes", "said"), BAD_CONFIGS, ids=[said for _, said in BAD_CONFIGS])
def test_bad_configs(changes: dict[str, Any], said: str, target: Any, tmp_path: Path) -> None:
    config, tensors = eagles.make("specforge")
    assert said in refusal(target, eagles.write(tmp_path, "specforge", {**config, **changes}, tensors))


def test_bad_vocabularies(target: Any, tmp_path: Path) -> None:
    config, tensors = eagles.make("safeailab", draft=range(1, 90, 2))
    for name, value, said in (
        ("d2t", tensors["d2t"] + 90, "d2t"),
        ("d2t", torch.arange(1, 90, 2), "d2t"),  # ids, not offsets
        ("d2t", tensors["d2t"].double(), "d2t"),
        ("t2d", ~tensors["t2d"], "t2d"),
        ("t2d", tensors["t2d"].int(), "t2d"),
    ):
        assert said in refusal(target, eagles.write(tmp_path, "safeailab", config, {**tensors, name: value}))


def test_other_folders_and_options(target: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no weights" in refusal(target, str(tmp_path / "empty"))
    assert "no such" in refusal(target, str(tmp_path / "nowhere"))
    config, tensors = eagles.make("speculators")
    other = eagles.write(tmp_path / "p", "speculators", {**config, "speculators_model_type": "peagle"}, tensors)
    assert "not an EAGLE head" in refusal(target, other)
    config, tensors = eagles.make("eagle")
    folder = eagles.write(tmp_path / "e", "eagle", config, tensors)
    with pytest.raises(ParameterError, match="layers is for EAGLE-3"):
        load(target, folder, layers=(1, 2, 3))
    with pytest.raises(ParameterError, match="rope_theta"):
        EagleOptions(rope_theta=0.0)


def test_a_target_that_lends_nothing(tmp_path: Path) -> None:
    from outrider.targets.base import Target
    from outrider.targets.table import TableTarget

    class Mean(TableTarget):
        embed = Target.embed

    table = Mean(hidden_size=32, vocab_size=101)
    config, tensors = eagles.make("safeailab")
    folder = eagles.write(tmp_path / "a", "safeailab", config, tensors)
    assert "does not lend its embeddings" in refusal(table, folder, layers=(0, 1, 2))
    full = {**tensors, "embed_tokens.weight": torch.randn(101, 32)}
    load(table, eagles.write(tmp_path / "b", "safeailab", config, full), layers=(0, 1, 2))
