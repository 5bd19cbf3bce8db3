"""DFlash drafters in GGUF files, as llama.cpp has them (architecture `dflash`), read as checkpoints.

DSpark and DFlash2 have the same architecture there and further tensors, by which they are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import LoadError
from ..gguf_file import open_gguf
from .checkpoint import Checkpoint
from .gguf_checkpoint import LAYER_KEYS, keys, stored

ARCHITECTURE = "dflash"
OUTER = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
    "token_embd.weight": "embed_tokens.weight",
    "d2t": "d2t",
}
"""Of tensors: the file's name, and a checkpoint's."""
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""The same of a layer's, without ``blk.N.`` and ``.weight``."""
KEYS = {**LAYER_KEYS, "rope_theta": "rope.freq_base"}
OPTIONAL = {"attention.value_length", "rope.dimension_count", "vocab_size", "sample_from_anchor", "attention.causal"}
MASK = "tokenizer.ggml.mask_token_id"


def read(path: Path) -> Checkpoint:
    """The drafter in a GGUF file as a checkpoint. Raises LoadError for a damaged file, or keys and tensors that are not known."""
    reader = open_gguf(path)
    known = {*KEYS.values(), *OPTIONAL, "block_size", "target_layers"}
    values = keys(path, reader, ARCHITECTURE, known, OPTIONAL)
    if values.get("attention.causal", False):
        raise LoadError(
            f"{path}: {ARCHITECTURE}.attention.causal is set; blocks whose rows see only what is before them are not supported"
        )
    mask = reader.values(MASK).get(MASK)
    if mask is None:
        raise LoadError(f"{path} has no key {MASK}: it is incomplete")
    config: dict[str, Any] = {
        "general.architecture": ARCHITECTURE,
        "transformer_layer_config": {name: values[key] for name, key in KEYS.items()},
        "aux_hidden_state_layer_ids": values["target_layers"],
        "block_size": values["block_size"],
        "mask_token_id": mask,
        "sample_from_anchor": values.get("sample_from_anchor", False),
    }
    inner = {
        f"blk.{i}.{theirs}.weight": f"layers.{i}.{ours}.weight"
        for i in range(values["block_count"])
        for theirs, ours in INNER.items()
    }
    return Checkpoint(path, config, stored(path, reader, {**OUTER, **inner}))
