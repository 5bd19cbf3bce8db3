"""Medusa and Hydra heads as their authors' modules are built, so that a state dict has the published names; and their training.

Written from the description of the formats, without anything of the drafters that read them.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, Sequence

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider.targets.base import Target

HEADS = ("medusa", "medusa-2", "vllm", "hydra", "hydra-ungrounded", "hydra-prefix")


class Medusa(nn.ModuleList):
    """``i.l.linear`` and ``i.L``; every head reads the hidden state alone."""

    class Block(nn.Module):
        def __init__(self, width: int):
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            return x + nn.functional.silu(self.linear(x))

    def __init__(self, width: int, vocab: int, heads: int, layers: int = 1):
        super().__init__(
            nn.Sequential(*(self.Block(width) for _ in range(layers)), nn.Linear(width, vocab, bias=False))
            for _ in range(heads)
        )

    def forward(self, hidden: Tensor, following: Tensor) -> list[Tensor]:
        """Logits ``[n, V]`` of each head. following: not used by Medusa."""
        return [head(hidden) for head in self]

    def outputs(self) -> list[nn.Linear]:
        return [head[-1] for head in self]


class Hydra(nn.Module):
    """``hydra_mlp.i.j``, ``hydra_lm_head.i``; with a prefix layer dropout takes every first place of a pair."""

    class Block(nn.Module):
        def __init__(self, width: int, conditions: int = 0):
            super().__init__()
            self.linear = nn.Linear(width * (conditions + 1), width)
            self.res_connection = nn.Linear(width * (conditions + 1), width) if conditions else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.res_connection(x) + nn.functional.silu(self.linear(x))

    def __init__(self, width: int, vocab: int, heads: int, layers: int = 1, grounded: bool = True, prefix: Any = None):
        super().__init__()
        self.grounded = grounded
        gap = [nn.Dropout(0.0)] if prefix is not None else []
        if prefix is not None:
            self.prefix_embeding_layer = prefix
        self.hydra_mlp = nn.ModuleList()
        for i in range(heads):
            blocks = [self.Block(width, (i + 1) * grounded), *(self.Block(width) for _ in range(layers - 1))]
            self.hydra_mlp.append(nn.Sequential(*(part for block in blocks for part in (*copy.deepcopy(gap), block))))
        last = [nn.Linear(width, vocab) for _ in range(heads)]
        self.hydra_lm_head = nn.ModuleList(nn.Sequential(*copy.deepcopy(gap), x) if gap else x for x in last)

    def forward(self, hidden: Tensor, following: Tensor) -> list[Tensor]:
        """Logits ``[n, V]`` of each head. hidden: ``[n, H]``. following: embeddings of the tokens after each, ``[n, heads, H]``."""
        if hasattr(self, "prefix_embeding_layer"):
            hidden = self.prefix_embeding_layer(inputs_embeds=hidden[None]).last_hidden_state[0]
        logits = []
        for i, (mlp, last) in enumerate(zip(self.hydra_mlp, self.hydra_lm_head)):
            seen = [hidden, *following[:, : i + 1].unbind(1)] if self.grounded else [hidden]
            logits.append(last(mlp(torch.cat(seen, dim=-1))))
        return logits

    def outputs(self) -> list[nn.Linear]:
        return [last if isinstance(last, nn.Linear) else last[-1] for last in self.hydra_lm_head]


def make(kind: str, target: Any, heads: int = 3, layers: int = 1, seed: int = 0, spread: float = 0.3) -> Any:
    """A random head of this kind for `target`, in float32."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        width, vocab = target.hidden_size, target.vocab_size
        if not kind.startswith("hydra"):
            return _spread(Medusa(width, vocab, heads, layers), spread)
        prefix = _prefix(target.model.config) if kind == "hydra-prefix" else None
        return _spread(Hydra(width, vocab, heads, layers, kind != "hydra-ungrounded", prefix), spread)


def start_from(module: Any, target: Any) -> None:
    """As their trainers begin: blocks that add nothing, and the target's own output matrix, which then stays as it is."""
    rows = [target.head(torch.eye(target.hidden_size)[i : i + 64]) for i in range(0, target.hidden_size, 64)]
    matrix = torch.cat(rows).T.contiguous().clone()
    assert matrix.shape == (target.vocab_size, target.hidden_size)
    for output in module.outputs():
        output.weight.data = matrix
        output.requires_grad_(False)
        if output.bias is not None:
            output.bias.data.zero_()


def _prefix(config: Any) -> Any:
    """A decoder of one layer like the target's, run over hidden states."""
    from transformers import AutoModel

    config = copy.deepcopy(config)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    return AutoModel.from_config(config, attn_implementation="eager").float()


def _spread(module: nn.Module, spread: float) -> nn.Module:
    for name, weight in module.named_parameters():
        if weight.dim() > 1 or name.endswith("bias"):
            weight.data.normal_(std=spread / weight.shape[-1] ** 0.5 if weight.dim() > 1 else 0.1)
    return module


def config_of(kind: str, heads: int, layers: int = 1, **changes: Any) -> dict[str, Any]:
    """What is in the published config.json."""
    if kind.startswith("hydra"):
        return {
            "hydra_num_heads": heads,
            "hydra_num_layers": layers,
            "hydra_head_arch": "prefix-mlp" if kind == "hydra-prefix" else "mlp",
            "grounded_heads": kind != "hydra-ungrounded",
            "hidden_state_offset": 0,
            "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
            **changes,
        }
    if kind == "vllm":
        return {"num_heads": heads, "num_hidden_layers": layers, "max_paths": 64, "topk": 10, "medusa_fc_bias": True, **changes}
    return {"medusa_num_heads": 2, "medusa_num_layers": layers, "base_model_name_or_path": "x", "version": "2", **changes}


def tensors_of(kind: str, module: Any) -> dict[str, Tensor]:
    """The published names."""
    tensors = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    if kind == "medusa-2":
        return {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
    if kind == "vllm":
        renamed = {}
        for name, tensor in tensors.items():
            head, place, *rest = name.split(".")
            renamed[f"lm_heads.{head}.weight" if rest == ["weight"] else f"blocks.{head}.layers.{place}.{rest[-1]}"] = tensor
        return renamed
    return tensors


def write(folder: Path, kind: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """A folder with the file that the dialect has. A Medusa-2 folder gets the heads beside what is in it."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    if kind == "medusa-2":
        config = json.loads((folder / "config.json").read_text()) | config
        from safetensors.torch import load_file

        tensors = load_file(folder / "model.safetensors") | tensors
    (folder / "config.json").write_text(json.dumps(config))
    if kind in ("medusa", "hydra", "hydra-ungrounded", "hydra-prefix"):
        torch.save(tensors, folder / f"{kind.split('-')[0]}_lm_head.pt")
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


# ---- overfitting -----------------------------------------------------------------------------------------------------------


def hidden_states(target: Target, tokens: Sequence[int]) -> Tensor:
    """The target's last hidden states ``[n, H]``, float32."""
    slot = target.open()
    parts = [output.hidden["final"].float().clone() for output in target.prefill(slot, tokens, layers=("final",))]
    target.close(slot)
    return torch.cat(parts)


def fit(module: Any, target: Any, text: Sequence[int], steps: int, rate: float = 3e-3) -> float:
    """Train the heads on one text: at position t head i has to say what stands at t + 2 + i. Returns the last loss."""
    heads = len(module.outputs())
    n = len(text) - 1 - heads
    hidden = hidden_states(target, text[:n]).clone()
    embedded = target.embed(list(text)).float().clone()
    following = torch.stack([embedded[1 + i : 1 + i + n] for i in range(heads)], dim=1)
    labels = torch.tensor(text)
    optimiser = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=rate)
    loss = torch.zeros(())
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, 2 * (1 - step / steps))
        logits = module(hidden, following)
        loss = torch.stack([nn.functional.cross_entropy(x, labels[2 + i : 2 + i + n]) for i, x in enumerate(logits)]).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    module.requires_grad_(False)
    return float(loss.detach())
