"""EAGLE checkpoints of every dialect, written from the description of their formats, and a head overfitted on one text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Sequence

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache

from outrider.drafters.eagle_head import EagleHead
from outrider.targets.attention import NAME
from outrider.targets.base import Target

DIALECTS = ("eagle", "safeailab", "specforge", "speculators")
PREFIX = {"eagle": "layers.0.", "safeailab": "midlayer.", "specforge": "midlayer.", "speculators": "layers.0."}


def layer_config(family: str, hidden: int, heads: int, vocab: int, **changes: Any) -> dict[str, Any]:
    return {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "vocab_size": vocab,
        **changes,
    }


def make(
    dialect: str,
    hidden: int = 32,
    vocab: int = 101,
    draft: Sequence[int] | None = None,
    taken: int = 3,
    heads: int = 4,
    seed: int = 0,
    family: str = "llama",
    scale: float = 0.2,
    **changes: Any,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a random head. draft: the target's ids of the draft vocabulary; None: all. taken: of EAGLE-3, how many
    states make a feature. changes: to the layer's config.
    """
    config = layer_config(family, hidden, heads, vocab, **changes)
    size, narrow = config.get("head_dim", hidden // heads), 1 if dialect == "eagle" else 2
    random = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random) * scale

    def gains(n: int) -> Tensor:
        return 1 + matrix(n)

    p, kv = PREFIX[dialect], config["num_key_value_heads"]
    inner = config["intermediate_size"]
    tensors = {
        f"{p}self_attn.q_proj.weight": matrix(heads * size, narrow * hidden),
        f"{p}self_attn.k_proj.weight": matrix(kv * size, narrow * hidden),
        f"{p}self_attn.v_proj.weight": matrix(kv * size, narrow * hidden),
        f"{p}self_attn.o_proj.weight": matrix(hidden, heads * size),
        f"{p}mlp.gate_proj.weight": matrix(inner, hidden),
        f"{p}mlp.up_proj.weight": matrix(inner, hidden),
        f"{p}mlp.down_proj.weight": matrix(hidden, inner),
        f"{p}post_attention_layernorm.weight": gains(hidden),
    }
    if family == "qwen3":
        tensors |= {f"{p}self_attn.{name}.weight": gains(size) for name in ("q_norm", "k_norm")}
    if dialect == "eagle":
        tensors |= {"fc.weight": matrix(hidden, 2 * hidden), "fc.bias": matrix(hidden)}
        return {**config, "architectures": ["LlamaForCausalLM"], "bias": True}, tensors
    used = torch.arange(vocab) if draft is None else torch.tensor(sorted(draft))
    tensors |= {
        f"{p}input_layernorm.weight": gains(hidden),
        f"{p}hidden_norm.weight": gains(hidden),
        "fc.weight": matrix(hidden, taken * hidden),
        "norm.weight": gains(hidden),
        "lm_head.weight": matrix(len(used), hidden),
    }
    if draft is not None:
        known = torch.zeros(vocab, dtype=torch.bool)
        known[used] = True
        tensors |= {"d2t": used - torch.arange(len(used)), "t2d": known}
    if dialect == "speculators":
        tensors["embed_tokens.weight"] = matrix(vocab, hidden)
        return speculators_config(config, len(used)), tensors
    name = "LlamaForCausalLM" if dialect == "safeailab" else "LlamaForCausalLMEagle3"
    return {**config, "architectures": [name], "draft_vocab_size": len(used)}, tensors


def speculators_config(layer: dict[str, Any], draft: int) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": None, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": draft,
        "norm_before_residual": False,
    }


def write(folder: Path, dialect: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """A folder with the file that the dialect's own exporter writes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if dialect in ("eagle", "safeailab"):
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return str(folder)


# ---- overfitting -----------------------------------------------------------------------------------------------------------


def hidden_states(target: Target, tokens: Sequence[int], layers: Sequence[Any]) -> Tensor:
    """The target's states at all `tokens`, ``[n, widths]``."""
    slot = target.open()
    parts = []
    for output in target.prefill(slot, tokens, layers=layers):
        parts.append(torch.cat([output.hidden[key] for key in layers], dim=-1).clone())
    target.close(slot)
    return torch.cat(parts)


def fit(head: EagleHead, target: Any, text: Sequence[int], steps: int, depth: int = 6, rate: float = 3e-3) -> float:
    """Train a head on one text with the unrolled loss of EAGLE-3 ("training-time test"); returns the last loss.

    At depth k the head gets its own state in the feature's place, stands k positions further, and sees the pairs with true features
    up to its own and its own row at the depths before, as when it drafts.
    """
    (_,) = head._target
    with torch.inference_mode():
        states = hidden_states(target, text[:-1], head.layers)
        embeddings = head.embed(list(text))
    states, embeddings = states.clone(), embeddings.clone()  # no longer of inference mode
    n = len(text) - 2  # pairs whose next token is known
    causal, own = torch.ones(n, n).tril() > 0, torch.eye(n) > 0
    trained = [p for name, p in head.named_parameters() if not name.startswith("embed_tokens.")]
    for parameter in trained:
        parameter.requires_grad_(True)
    head.body.set_attn_implementation("eager")
    head.train()
    optimiser = torch.optim.Adam(trained, lr=rate)
    labels = torch.tensor(list(text))
    loss = torch.zeros(())
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, 2 * (1 - step / steps))
        features, cache, total = head.fuse(states)[:n], DynamicCache(), []
        for k in range(min(depth, n)):
            seen = torch.cat([causal, *[own] * k], dim=1)
            mask = torch.zeros(seen.shape, dtype=features.dtype).masked_fill_(~seen, -torch.inf)[None, None]
            shifted = torch.nn.functional.pad(embeddings[1 + k : 1 + n], (0, 0, 0, k))
            place = torch.arange(n) + k
            out = head(shifted, features, place, cache=cache, attention_mask=mask, use_cache=True)
            total.append(
                torch.nn.functional.cross_entropy(trainable_logits(head, target, out, labels)[: n - k], labels[2 + k :])
            )
            features = head.recycle(out)
        loss = torch.stack(total).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    for parameter in trained:
        parameter.requires_grad_(False)
    head.body.set_attn_implementation(NAME)
    head.eval()
    return float(loss.detach())


def trainable_logits(head: EagleHead, target: Any, states: Tensor, text: Tensor) -> Tensor:
    """`every_logit` with gradients; of a packed output matrix that is borrowed, the text's tokens and 4,096 others alone."""
    if head.lm_head is not None:
        return every_logit(head, states)
    output = target.model.get_output_embeddings()
    if isinstance(output, torch.nn.Linear):
        return output(head.norm(states))[:, : target.vocab_size]
    ids = torch.cat([text, torch.randint(0, target.vocab_size, (4096,))]).unique()
    every = states.new_full((len(states), target.vocab_size), -torch.inf)
    every[:, ids] = head.norm(states) @ output.packed.rows(ids).T
    return every


def every_logit(head: Any, states: Tensor) -> Tensor:
    """``head.logits`` over the target's whole vocabulary, ``[n, V]``: -inf for what a reduced one lacks."""
    logits = head.logits(states)
    if head.draft_ids is None:
        return logits
    every = logits.new_full((len(logits), head.vocab_size), -torch.inf)
    every[:, head.draft_ids] = logits
    return every


def tensors_of(head: EagleHead, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint's `tensors` with the values that the head has now."""
    now = dict(head.named_parameters())
    inner = {"input_layernorm.": "input_layernorm.embedding_norm.", "hidden_norm.": "input_layernorm.feature_norm."}
    found = {}
    for name, tensor in tensors.items():
        place = name
        for prefix in ("midlayer.", "layers.0."):
            if name.startswith(prefix):
                place = "body.layers.0." + name.removeprefix(prefix)
                for old, new in inner.items() if head.recipe.dialect != "eagle" else ():
                    place = place.replace(f"layers.0.{old}", f"layers.0.{new}")
        value = now.get(place)
        found[name] = tensor if value is None else value.detach().clone().to(tensor.dtype)
    return found
