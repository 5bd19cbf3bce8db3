"""Experts of sparse models on the packed product: a pass reads the weights of the experts that its rows chose, and no others.

transformers' models with experts call the function registered here through `ExpertsInterface`.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from . import TYPES, Owners, Packed

NAME = "outrider"


def pack_experts(model: Any, owners: Owners) -> int:
    """Pack the experts of a transformers model on the CPU, one matrix each; returns how many. Models without any stay as they are."""
    count = 0
    for module in list(model.modules()):
        up_name = "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"
        up, down = getattr(module, up_name, None), getattr(module, "down_proj", None)
        if not (hasattr(module, "is_transposed") and _stacked(up) and _stacked(down)):
            continue
        for name, weight in ((up_name, up), ("down_proj", down)):
            delattr(module, name)
            packed = nn.ModuleList(Packed(matrix.T if module.is_transposed else matrix) for matrix in weight.detach())
            setattr(module, f"packed_{name.removeprefix('gate_')}", packed)
            count += len(packed)
            owners.release(weight)
    if count:
        model.set_experts_implementation(NAME)
    return count


def _stacked(weight: Any) -> TypeGuard[Tensor]:
    return isinstance(weight, Tensor) and weight.dim() == 3 and weight.dtype in TYPES and weight.device.type == "cpu"


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The function behind ExpertsInterface: hidden_states ``[n, H]``, chosen experts and their weights ``[n, k]``; ``[n, H]``."""
    up_bias, down_bias = None, None
    out = torch.zeros_like(hidden_states)
    for expert in top_k_index.unique().tolist():
        if not 0 <= expert < len(module.packed_up_proj):  # stands for an expert on another device
            continue
        rows, place = torch.where(top_k_index == expert)
        if module.has_bias:
            up_bias = (module.gate_up_proj_bias if module.has_gate else module.up_proj_bias)[expert]
            down_bias = module.down_proj_bias[expert]
        x = module.packed_up_proj[expert](hidden_states[rows], up_bias)
        x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
        x = module.packed_down_proj[expert](x, down_bias)
        if module.has_post_expert_norm:
            x = module.post_expert_norm(x)
        out.index_add_(0, rows, x * top_k_weights[rows, place, None].to(x.dtype))
    return out


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
