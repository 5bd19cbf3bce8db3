"""Configurations of common models, so that a plan can be made without the hub. Only what decides a model's size."""

from __future__ import annotations

from typing import Any


def _qwen2(layers: int, hidden: int, ffn: int, heads: int, kv: int, vocabulary: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
    }


def _llama(layers: int, hidden: int, ffn: int, heads: int, kv: int, tied: bool = False) -> dict[str, Any]:
    return {
        **_qwen2(layers, hidden, ffn, heads, kv, 128256, tied),
        "model_type": "llama",
        "max_position_embeddings": 131072,
        "head_dim": hidden // heads,
    }


def _qwen3(layers: int, hidden: int, ffn: int, heads: int, kv: int, tied: bool, **moe: int) -> dict[str, Any]:
    return {
        **_qwen2(layers, hidden, ffn, heads, kv, 151936, tied),
        "model_type": "qwen3_moe" if moe else "qwen3",
        "head_dim": 128,
        "max_position_embeddings": 40960,
        **moe,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2.5-coder-0.5b": _qwen2(24, 896, 4864, 14, 2, 151936, True),
    "qwen2.5-coder-1.5b": _qwen2(28, 1536, 8960, 12, 2, 151936, True),
    "qwen2.5-coder-3b": _qwen2(36, 2048, 11008, 16, 2, 151936, True),
    "qwen2.5-coder-7b": _qwen2(28, 3584, 18944, 28, 4, 152064, False),
    "qwen2.5-coder-14b": _qwen2(48, 5120, 13824, 40, 8, 152064, False),
    "qwen2.5-coder-32b": _qwen2(64, 5120, 27648, 40, 8, 152064, False),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, 8, True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32, 8, False),
    "qwen3-30b-a3b": _qwen3(
        48, 2048, 6144, 32, 4, False, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, decoder_sparse_step=1
    ),
    "llama-3.2-1b": _llama(16, 2048, 8192, 32, 8, True),
    "llama-3.1-8b": _llama(32, 4096, 14336, 32, 8),
    "llama-3.3-70b": _llama(80, 8192, 28672, 64, 8),
    "mixtral-8x7b": {
        **_llama(32, 4096, 14336, 32, 8),
        "model_type": "mixtral",
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}
CONFIGS["qwen3-coder-30b-a3b"] = CONFIGS["qwen3-30b-a3b"]
