"""DFlash drafters of every dialect, written from the description of their formats, and one overfitted on one text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Sequence

import torch
from eagles import hidden_states
from safetensors.torch import save_file
from torch import Tensor

from outrider.drafters.dflash import DFlashHead
from outrider.targets.attention import KVSlot

DIALECTS = ("z-lab", "speculators", "transformers")
MASK = 100


def make(
    hidden: int = 32,
    taken: Sequence[int] = (0, 1),
    layers: int = 2,
    heads: int = 4,
    block: int = 6,
    scale: float = 0.2,
    seed: int = 0,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors as z-lab has them. taken: layers of the target, by output."""
    random, size = torch.Generator().manual_seed(seed), hidden // heads
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": size,
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "vocab_size": 101,
        "rope_theta": 10000.0,
        "block_size": block,
        "num_target_layers": 3,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(taken)},
    }
    shapes = {
        "fc.weight": (hidden, len(taken) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(layers):
        p = f"layers.{i}."
        shapes |= {
            f"{p}self_attn.q_proj.weight": (hidden, hidden),
            f"{p}self_attn.k_proj.weight": (hidden // 2, hidden),
            f"{p}self_attn.v_proj.weight": (hidden // 2, hidden),
            f"{p}self_attn.o_proj.weight": (hidden, hidden),
            f"{p}self_attn.q_norm.weight": (size,),
            f"{p}self_attn.k_norm.weight": (size,),
            f"{p}mlp.gate_proj.weight": (2 * hidden, hidden),
            f"{p}mlp.up_proj.weight": (2 * hidden, hidden),
            f"{p}mlp.down_proj.weight": (hidden, 2 * hidden),
            f"{p}input_layernorm.weight": (hidden,),
            f"{p}post_attention_layernorm.weight": (hidden,),
        }
    return config, {n: torch.randn(*s, generator=random) * scale + float(len(s) == 1) for n, s in shapes.items()}


def in_dialect(
    dialect: str, config: dict[str, Any], tensors: dict[str, Tensor], draft: Sequence[int] | None = None, seed: int = 0
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The same drafter in another dialect. draft: for speculators, the target's ids of a vocabulary of its own."""
    if dialect == "z-lab":
        return config, tensors
    own = config["dflash_config"]
    layer = {k: v for k, v in config.items() if k not in ("architectures", "dflash_config", "block_size", "num_target_layers")}
    if dialect == "transformers":
        names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
        said = {
            **layer,
            "architectures": ["MuseGlimmerAssistantModel"],
            "model_type": "muse_glimmer_assistant",
            "layer_types": ["full_attention"] * config["num_hidden_layers"],
            "block_size": config["block_size"],
            **own,
        }
        return said, {names.get(n, n): t for n, t in tensors.items()}
    said = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": None}},
        "transformer_layer_config": layer,
        "block_size": config["block_size"],
        "mask_token_id": own["mask_token_id"],
        "aux_hidden_state_layer_ids": [i + 1 for i in own["target_layer_ids"]],  # entries
        "draft_vocab_size": 101 if draft is None else len(draft),
        "sample_from_anchor": False,
    }
    if draft is None:
        return said, tensors
    used = torch.tensor(sorted(draft))
    known = torch.zeros(int(used.max()) + 1, dtype=torch.bool)
    known[used] = True
    matrix = torch.randn(len(used), config["hidden_size"], generator=torch.Generator().manual_seed(seed))
    return said, {**tensors, "lm_head.weight": matrix, "d2t": used - torch.arange(len(used)), "t2d": known}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return str(folder)


def write_gguf(path: Path, config: dict[str, Any], tensors: dict[str, Tensor], target: str) -> str:
    """A z-lab drafter as llama.cpp's converter writes it, with the vocabulary of the target's own file."""
    from gguf import GGUFValueType, GGUFWriter, LlamaFileType

    from outrider.gguf_file import add_key, open_gguf

    writer = GGUFWriter(path, "dflash")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_file_type(LlamaFileType.ALL_F32)
    writer.add_uint32("dflash.block_size", config["block_size"])
    entries = [i + 1 for i in config["dflash_config"]["target_layer_ids"]]
    writer.add_key_value("dflash.target_layers", entries, GGUFValueType.ARRAY, GGUFValueType.UINT32)
    known = open_gguf(target)
    for name, value in known.values("tokenizer.").items():
        if name != "tokenizer.chat_template":
            add_key(writer, name, value, known.kinds()[name])
    writer.add_mask_token_id(config["dflash_config"]["mask_token_id"])
    for name, weights in tensors.items():
        parts = name.removesuffix(".weight").split(".")
        outer = {"fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm"}
        named = f"blk.{parts[1]}.{INNER[parts[-1]]}" if parts[0] == "layers" else outer[parts[0]]
        writer.add_tensor(f"{named}.weight", weights.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


INNER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def trained_tensors(head: DFlashHead, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint's `tensors` with the values that the head has now."""
    now = dict(head.named_parameters())
    found = {}
    for name in tensors:
        value = now[name if name in now else f"body.{name}"]
        found[name] = value.detach().clone()
    return found


def fit(head: DFlashHead, target: Any, text: Sequence[int], steps: int, anchors: int = 12, rate: float = 3e-3) -> float:
    """Train a drafter on one text: at each step a block behind some of its positions."""
    hidden = hidden_states(target, text[:-1], head.layers).clone()
    labels, output, size = torch.tensor(list(text)), target.model.get_output_embeddings(), head.recipe.block_size
    trained = list(head.parameters())
    for parameter in trained:
        parameter.requires_grad_(True)
    embed, lend = target.embed, target.head
    target.embed, target.head = lambda tokens: embed(tokens).clone(), output
    optimiser = torch.optim.Adam(trained, lr=rate)
    random, loss = torch.Generator().manual_seed(0), torch.zeros(())
    try:
        for step in range(steps):
            for group in optimiser.param_groups:
                group["lr"] = rate * min(1.0, 2 * (1 - step / steps))
            chosen = torch.randperm(len(text) - 2, generator=random)[:anchors] + 1
            context, parts = head.fuse(hidden), []
            for anchor in chosen.tolist():
                parts.append((KVSlot(), context[:anchor], 0))
            head.remember(parts)
            logits = head([(slot, text[len(c)], len(c)) for slot, c, _ in parts])
            goals = torch.nn.functional.pad(labels, (0, size), value=-1)
            wanted = torch.stack([goals[anchor + 1 : anchor + size] for anchor in chosen.tolist()])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-1)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    finally:
        target.embed, target.head = embed, lend
    for parameter in trained:
        parameter.requires_grad_(False)
    return float(loss.detach())
