"""Tiny models as GGUF files, written with the `gguf` package from the same weights that transformers computes with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

ROTATED = {"llama"}
"""Architectures whose rows of q and k are stored so that the two halves of a rotation lie side by side."""
ARCHITECTURE = {"qwen3_moe": "qwen3moe"}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
INNER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}


def write_gguf(
    path: str | Path,
    model: Any,
    tokenizer: Any = None,
    eos: int | None = 0,
    template: str | None = None,
    padding: int = 0,
    quantisation: str | None = None,
    tensors_of_a_file: int = 0,
) -> str:
    """A transformers model as a float32 GGUF file; returns its path, the first one's where it is split.

    tokenizer: a BPE of transformers, byte-level or as SentencePiece has it, or None for a file without a vocabulary. padding: tokens
    that only fill up. quantisation: of the matrices. tensors_of_a_file: most of them in one file; 0 for one file of all.
    """
    config = model.config
    architecture = ARCHITECTURE.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(str(path), architecture, split_max_tensors=tensors_of_a_file)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size + padding)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    if head := getattr(config, "head_dim", None):
        writer.add_key_length(head)
        writer.add_value_length(head)
        writer.add_rope_dimension_count(head)
    if experts := getattr(config, "num_local_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    _write_vocabulary(writer, tokenizer, eos, padding)
    if template:
        writer.add_chat_template(template)
    for name, weights in _tensors(model, padding).items():
        values = weights.to(torch.float32).contiguous().numpy()
        if quantisation is None or values.ndim < 2:
            writer.add_tensor(name, values)
        else:
            kind = gguf.GGMLQuantizationType[quantisation]
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(writer.format_shard_names(Path(path))[0])


def _tensors(model: Any, padding: int) -> dict[str, torch.Tensor]:
    config, found = model.config, {}
    for name, weights in model.state_dict().items():
        stem, _, kind = name.rpartition(".")
        weights = weights.detach()
        if padding and stem in ("model.embed_tokens", "lm_head"):
            weights = torch.cat([weights, torch.zeros(padding, weights.shape[1])])
        if stem in NAMES:
            found[f"{NAMES[stem]}.{kind}"] = weights
            continue
        _, _, layer, inner = name.split(".", 3)
        if "experts." in inner:
            which = inner.rpartition(".")[2]
            parts = {"down_proj": ["ffn_down_exps"], "gate_up_proj": ["ffn_gate_exps", "ffn_up_exps"]}[which]
            for part, chunk in zip(parts, weights.chunk(len(parts), dim=1)):
                found[f"blk.{layer}.{part}.weight"] = chunk
            continue
        stem = inner.rpartition(".")[0]
        if config.model_type in ROTATED and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads
            weights = weights.view(heads, 2, -1, weights.shape[1]).swapaxes(1, 2).reshape(weights.shape)
        found[f"blk.{layer}.{INNER[stem]}.{kind}"] = weights
    return found


def _write_vocabulary(writer: gguf.GGUFWriter, tokenizer: Any, eos: int | None, padding: int) -> None:
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
        return
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    special = {entry["content"] for entry in content["added_tokens"] if entry["special"]}
    types = [gguf.TokenType.CONTROL if text in special else gguf.TokenType.NORMAL for text in vocabulary]
    merges = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in content["model"]["merges"]]
    if is_sentencepiece := content["model"]["byte_fallback"]:
        types = [gguf.TokenType.BYTE if text.startswith("<0x") else kind for text, kind in zip(vocabulary, types)]
        types[tokenizer.unk_token_id] = gguf.TokenType.UNKNOWN
        rank = {a + b: -float(i) for i, (a, b) in enumerate(merges)}
        writer.add_token_scores([rank.get(text, 0.0) for text in vocabulary] + [0.0] * padding)
        writer.add_bos_token_id(tokenizer.bos_token_id)
        writer.add_unk_token_id(tokenizer.unk_token_id)
    else:
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_tokenizer_model("llama" if is_sentencepiece else "gpt2")
    writer.add_token_list(vocabulary + [f"[PAD{i}]" for i in range(padding)])
    writer.add_token_types(types + [gguf.TokenType.UNUSED] * padding)
    if eos is not None:
        writer.add_eos_token_id(eos)
    writer.add_add_bos_token(is_sentencepiece)


def quantised(path: str | Path, tensor: str) -> np.ndarray:
    """A tensor of a GGUF file as floats."""
    (found,) = [t for t in gguf.GGUFReader(str(path)).tensors if t.name == tensor]
    return gguf.quants.dequantize(found.data, found.tensor_type)
