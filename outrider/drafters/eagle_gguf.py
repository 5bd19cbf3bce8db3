"""EAGLE-3 heads in GGUF files, as llama.cpp has them (architecture `eagle3`): read as a checkpoint, and written.

A file is read as if it were a folder: its keys become the config of a head, its tensors get the names that `eagle_head` asks for. What
differs is undone on the way: rows of q and k are permuted so that the two numbers of a rotation lie side by side, `d2t` holds ids of the
target instead of offsets, and norms are always float32. llama.cpp knows layers of Llama's kind alone, one layer, and three states.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..gguf_file import FLOATS, Reader, add_key, open_gguf
from .checkpoint import Checkpoint
from .gguf_checkpoint import LAYER_KEYS, keys, stored

ARCHITECTURE = "eagle3"
NAMES = {
    "fc.weight": "fc.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
    "layers.0.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "token_embd.weight",
    "d2t": "d2t",
    "rope_factors": "rope_freqs.weight",
}
"""Of tensors: a checkpoint's name, and the file's."""
ROTATED = {"layers.0.self_attn.q_proj.weight": "num_attention_heads", "layers.0.self_attn.k_proj.weight": "num_key_value_heads"}
"""Whose rows are permuted, and what counts their heads."""
FLAGS = ("norm_before_residual", "norm_before_fc")
OPTIONAL = {"attention.key_length", "attention.value_length", "rope.freq_base", "rope.dimension_count", "vocab_size", *FLAGS}
ROPE = "outrider.rope_parameters"
"""A key of ours: transformers' description of the rotation, of which llama.cpp keeps a factor for each frequency alone."""


def read(path: Path) -> Checkpoint:
    """The head in a GGUF file as a checkpoint. Raises LoadError for a damaged file, or keys and tensors that are not known."""
    reader = open_gguf(path)
    states = (
        "target_layers" if f"{ARCHITECTURE}.target_layers" in reader.kinds() else "extract_layers"
    )  # its name until summer 2026
    known = {*LAYER_KEYS.values(), *OPTIONAL, states, "target_hidden_size"}
    values = keys(path, reader, ARCHITECTURE, known, OPTIONAL)
    layer = {name: values[key] for name, key in LAYER_KEYS.items() if key in values}
    layer |= {"model_type": "llama", "hidden_act": "silu", "vocab_size": reader.length("tokenizer.ggml.tokens")}
    own = reader.values(ROPE)
    theta = values.get("rope.freq_base", 10000.0)
    layer["rope_parameters"] = json.loads(own[ROPE]) if own else {"rope_theta": theta, "rope_type": "default"}
    config = {
        "general.architecture": ARCHITECTURE,
        "transformer_layer_config": layer,
        "eagle_aux_hidden_state_layer_ids": values[states],
        "target_hidden_size": values["target_hidden_size"],
        **{name: values.get(name, False) for name in FLAGS},
    }
    names = {theirs: ours for ours, theirs in NAMES.items()}
    tensors = stored(
        path, reader, names, lambda name, rows: unpermuted(rows, layer[ROTATED[name]]) if name in ROTATED else rows
    )
    if own:
        tensors.pop("rope_factors", None)
    return Checkpoint(path, config, tensors)


def permuted(rows: Tensor, heads: int) -> Tensor:
    """Rows ``[heads * size, k]`` of q or k, the halves of each head interleaved."""
    return rows.view(heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def unpermuted(rows: Tensor, heads: int) -> Tensor:
    """The reverse of `permuted`."""
    return rows.view(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


# ---- writing ---------------------------------------------------------------------------------------------------------------


def write(
    path: Path,
    layer: dict[str, Any],
    states: tuple[int, ...],
    flags: dict[str, bool],
    tensors: dict[str, Tensor],
    target: Reader,
) -> None:
    """A head as a GGUF file.

    layer: config of the decoder layer with the keys of `LAYER_KEYS` and `rope_parameters`. states: the target's, by entry. flags: those of
    `FLAGS`. tensors: by the names of `NAMES`, `d2t` as offsets. target: the target's own file, whose vocabulary is copied. Raises
    OSError where it cannot be written.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType

    kinds = {kind: number for number, kind in FLOATS.items()}
    writer = GGUFWriter(path, ARCHITECTURE)
    for name, key in LAYER_KEYS.items():
        add = writer.add_float32 if isinstance(layer[name], float) else writer.add_uint32
        add(f"{ARCHITECTURE}.{key}", layer[name])
    rope = layer["rope_parameters"]
    writer.add_value_length(layer["head_dim"])
    writer.add_rope_dimension_count(layer["head_dim"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(target.length("tokenizer.ggml.tokens"))
    writer.add_array(f"{ARCHITECTURE}.target_layers", list(states))
    writer.add_uint32(f"{ARCHITECTURE}.target_hidden_size", tensors["fc.weight"].shape[1] // len(states))
    for name in FLAGS:
        writer.add_bool(f"{ARCHITECTURE}.{name}", flags[name])
    if "rope_factors" in tensors:
        writer.add_string(ROPE, json.dumps(rope, sort_keys=True))
    types = {"F32": LlamaFileType.ALL_F32, "F16": LlamaFileType.MOSTLY_F16, "BF16": LlamaFileType.MOSTLY_BF16}
    writer.add_file_type(types[kinds[tensors["fc.weight"].dtype].name])
    described = target.kinds()
    for name, value in target.values("tokenizer.").items():
        if name != "tokenizer.chat_template":
            add_key(writer, name, value, described[name])
    for name, values in tensors.items():
        if name == "d2t":
            ids = (values + torch.arange(len(values))).numpy()
            writer.add_tensor(NAMES[name], ids, raw_dtype=GGMLQuantizationType.I64)
            continue
        values = permuted(values, layer[ROTATED[name]]) if name in ROTATED else values
        kind = kinds[torch.float32 if values.dim() == 1 else values.dtype]
        writer.add_tensor(NAMES[name], _bytes(values.to(FLOATS[kind])), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _bytes(values: Tensor) -> np.ndarray:
    """For the writer, which has no bfloat16: then its bytes."""
    values = values.contiguous()
    return (values.view(torch.uint8) if values.dtype == torch.bfloat16 else values).numpy()
