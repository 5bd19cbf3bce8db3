"""Models with multi-token-prediction modules, written from the description of each layout, and modules overfitted on one text."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Sequence

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from toys import tiny_model
from transformers import DynamicCache

from outrider.drafters.mtp_head import MtpModule
from outrider.targets.attention import NAME
from outrider.targets.transformers import TransformersTarget

MOE: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
FULL: dict[str, Any] = {"layer_types": ["full_attention"] * 3, "head_dim": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": (
        "nextn",
        {
            **MOE,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "num_key_value_heads": 4,
        },
    ),
    "glm4_moe": ("nextn", {**MOE, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 8}),
    "qwen3_next": ("qwen", {**MOE, **FULL}),
    "qwen3_5_text": ("qwen", FULL),
    "qwen3_5_moe_text": ("qwen", {**MOE, **FULL}),
    "qwen2": ("mimo", {}),  # MiMo's layers are those of Qwen2
}
"""Layout and config of a tiny model of each family. (Qwen's linear attention is left out of it: targets of transformers cannot
have it, and the modules never do.)"""
PREFIXES = {
    "nextn": ("model.layers.{n}.", "model.layers.{n}.", ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
    "qwen": ("mtp.", "mtp.layers.{i}.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
    "mimo": (
        "model.mtp_layers.{i}.",
        "model.mtp_layers.{i}.",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    ),
}


def make(
    family: str, modules: int = 1, seed: int = 0, scale: float = 0.2, copies: bool = True, spread: float = 0.25
) -> tuple[Any, dict[str, Tensor]]:
    """A tiny model and the tensors of random modules under their published names. copies: of what is the target's."""
    layout, config = FAMILIES[family]
    key = {"nextn": "num_nextn_predict_layers", "mimo": "num_nextn_predict_layers", "qwen": "mtp_num_hidden_layers"}[layout]
    model = tiny_model(family, seed, torch.float32, spread=spread, **config, **{key: modules})
    random = torch.Generator().manual_seed(seed + 1)
    hidden, layers = model.config.hidden_size, model.config.num_hidden_layers
    own, block, parts = PREFIXES[layout]
    tensors: dict[str, Tensor] = {}

    def add(name: str, *shape: int) -> None:
        gain = len(shape) == 1 and "norm" in name and layout != "qwen"  # Qwen's gains are kept as their distance from one
        tensors[name] = torch.randn(*shape, generator=random) * scale + float(gain)

    for i in range(modules):
        place = {"i": i, "n": layers + i}
        for name, shape in zip(parts, ((hidden,), (hidden,), (hidden, 2 * hidden), (hidden,))):
            if f"{own.format(**place)}{name}.weight" not in tensors:
                add(f"{own.format(**place)}{name}.weight", *shape)
        for name, value in model.get_decoder().layers[-1].state_dict().items():
            published(block.format(**place) + name, value.shape, add)
        if layout == "nextn" and copies:
            tensors[own.format(**place) + "embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
            tensors[own.format(**place) + "shared_head.head.weight"] = model.get_output_embeddings().weight.detach().clone()
    return model, tensors


def published(name: str, shape: Sequence[int], add: Any) -> None:
    """Experts are published one by one."""
    if len(shape) < 3:
        add(name, *shape)
        return
    owner, _, leaf = name.rpartition(".")
    count, n, k = shape
    for expert in range(count):
        for part in ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,):
            add(f"{owner}.{expert}.{part}.weight", n // (2 if leaf == "gate_up_proj" else 1), k)


def write(folder: Path, model: Any, tensors: dict[str, Tensor]) -> str:
    """A folder of the whole model, as it would be published."""
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({**load_file(file), **{n: t.contiguous() for n, t in tensors.items()}}, file, metadata={"format": "pt"})
    return str(folder)


def target_of(model: Any, name: str, dtype: torch.dtype = torch.float32) -> TransformersTarget:
    model = model.to(dtype)
    model._is_stateful = False  # none of its layers is recurrent here
    return TransformersTarget(model, name=name)


# ---- overfitting -----------------------------------------------------------------------------------------------------------


def states_of(target: Any, tokens: Sequence[int], layers: Sequence[Any]) -> Tensor:
    """The target's states at all `tokens`, ``[n, widths]``, that can be trained on."""
    slot, parts = target.open(), []
    for output in target.prefill(slot, tokens, layers=layers):
        parts.append(torch.cat([output.hidden[key] for key in layers], dim=-1).clone())
    target.close(slot)
    return torch.cat(parts).clone()


def fit(
    modules: Sequence[MtpModule], target: Any, text: Sequence[int], steps: int, depth: int = 5, rate: float = 3e-3
) -> float:
    """Train modules on one text as they draft: one with its own states in the hidden states' place, several as a chain."""
    hidden = states_of(target, text[:-1], modules[0].layers)
    embeddings = target.embed(list(text)).clone()
    labels, output = torch.tensor(list(text)), target.model.get_output_embeddings()
    n = len(text) - 2
    causal, own = torch.ones(n, n).tril() > 0, torch.eye(n) > 0
    trained = list({id(p): p for module in modules for p in module.parameters()}.values())
    for parameter in trained:
        parameter.requires_grad_(True)
    for module in modules:
        module.body.set_attn_implementation("eager")
        module.train()
    optimiser = torch.optim.Adam(trained, lr=rate)
    loss = torch.zeros(())
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, 2 * (1 - step / steps))
        features, cache, total = hidden[:n], DynamicCache(), []
        for k in range(depth if len(modules) == 1 else len(modules)):
            module = modules[k % len(modules)]
            seen = torch.cat([causal, *[own] * k], dim=1) if len(modules) == 1 else causal
            mask = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)[None, None].to(features.dtype)
            shifted = torch.nn.functional.pad(embeddings[1 + k : 1 + n], (0, 0, 0, k))
            features = module(shifted, features, torch.arange(n) + k, cache=cache, attention_mask=mask, use_cache=True)
            logits = output(features)[: n - k, : target.vocab_size]
            total.append(torch.nn.functional.cross_entropy(logits, labels[2 + k :]))
        loss = torch.stack(total).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    for parameter in trained:
        parameter.requires_grad_(False)
    for module in modules:
        module.body.set_attn_implementation(NAME)
        module.eval()
    return float(loss.detach())
