"""The small steps between the products of a packed model, in fewer calls: RMS norms, gated MLPs, projections of one input.

In a small model a pass takes hundreds of them, and each costs more to start than to compute. A module is exchanged only where
it has the parts that transformers' families name alike and computes, on random numbers, what ours does; every other stays as it is.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch
from torch import Tensor, nn

from .. import kernels
from . import PANEL, TYPES, Packed, PackedLinear

ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    nn.functional.silu,
    lambda x: nn.functional.gelu(x, approximate="tanh"),
)
"""Those that the extension knows, at the number that it knows them by."""
MLP = ("gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj")
TOLERANCE = 2e-5


class FusedNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, float32."""

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.weight = nn.Parameter(weight.detach().float().contiguous(), requires_grad=False)
        self.size, self.eps = len(weight), eps

    def forward(self, x: Tensor) -> Tensor:
        assert kernels._skinny is not None
        x = x.contiguous()
        out, size = torch.empty_like(x), self.size
        kernels._skinny.norm(
            x.data_ptr(), self.weight.data_ptr(), out.data_ptr(), x.numel() // size, size, self.eps, kernels._number
        )
        return out


class GatedMLP(nn.Module):
    """``down(activation(x gate^T) * (x up^T))``: x ``[..., K]`` float32; everything before `down` is one call."""

    def __init__(self, gate: Packed, up: Packed, down: nn.Module, activation: int):
        super().__init__()
        self.gate, self.up, self.down, self.activation = gate, up, down, activation

    def forward(self, x: Tensor) -> Tensor:
        assert kernels._skinny is not None
        gate, up = self.gate, self.up
        gate.check(x)
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], gate.n)
        kernels._skinny.gated(
            x.data_ptr(),
            gate.panels.data_ptr(),
            up.panels.data_ptr(),
            out.data_ptr(),
            x.numel() // gate.k,
            gate.n,
            gate.k,
            TYPES[gate.dtype],
            self.activation,
            kernels._number,
            torch.get_num_threads(),
        )
        return self.down(out)


class Joint(nn.Module):
    """Several projections of one input as one matrix. The part that is called first computes them all."""

    bias: Tensor | None

    def __init__(self, layers: Sequence[PackedLinear]):
        super().__init__()
        biases: list[Any] = [layer.bias for layer in layers if layer.bias is not None]
        panels: list[Any] = [layer.packed.panels for layer in layers]
        self.packed = Packed.of(torch.cat(panels), sum(layer.out_features for layer in layers))
        self.register_buffer("bias", torch.cat(biases) if biases else None, persistent=False)
        self.last = _Last(len(layers))

    def take(self, x: Tensor, part: slice) -> Tensor:
        last = self.last
        if last.input is not x or last.output is None:
            last.input, last.output, last.taken = x, self.packed(x, self.bias), 0
        out = last.output[..., part]
        last.taken += 1
        if last.taken == last.parts:  # so that nothing outlives the pass
            last.input = last.output = None
        return out


class _Last:
    """What `Joint` computed last. Not in the module itself, where setting an attribute costs more than a small product."""

    def __init__(self, parts: int):
        self.parts = parts
        self.taken = 0
        self.input: Tensor | None = None
        self.output: Tensor | None = None


class PartLinear(nn.Module):
    """Takes the place of one of the linear layers that `Joint` joins."""

    def __init__(self, joint: Joint, first: int, size: int):
        super().__init__()
        self.joint, self.part = joint, slice(first, first + size)
        self.in_features, self.out_features = joint.packed.k, size

    def forward(self, x: Tensor) -> Tensor:
        return self.joint.take(x, self.part)


@torch.inference_mode()
def fuse(model: nn.Module) -> int:
    """Exchange what can be in a packed model with float32 arithmetic; returns how many modules were."""
    count = 0
    agree: dict[Any, bool] = {}  # an MLP's class computes the same with every weight
    for parent in list(model.modules()):
        count += _join(parent)
        for name, module in list(parent._modules.items()):
            made: nn.Module | None = None
            if module is not None and type(module).__name__.endswith("RMSNorm"):
                made = next((norm for norm in _norms(module) if _equal(module, norm, norm.size)), None)
            elif module is not None and (mlp := _mlp(module)):
                kind = (type(module), type(module.act_fn))
                if kind not in agree:
                    agree[kind] = _equal(module, mlp, mlp.gate.k)
                made = mlp if agree[kind] else None
            if made is not None:
                setattr(parent, name, made)
                count += 1
    return count


def _norms(module: nn.Module) -> list[FusedNorm]:
    """What a norm may be: with its weight as it is, or as Gemma has it, a distance from one."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not (isinstance(weight, Tensor) and weight.dim() == 1 and weight.is_cpu and isinstance(eps, float)):
        return []
    return [FusedNorm(weight, eps), FusedNorm(weight + 1, eps)]


def _mlp(module: nn.Module) -> GatedMLP | None:
    gate, up, down = (getattr(module, name, None) for name in MLP)
    if not (isinstance(gate, PackedLinear) and isinstance(up, PackedLinear) and isinstance(down, nn.Module)):
        return None
    alike = gate.packed.panels.shape == up.packed.panels.shape and gate.packed.dtype == up.packed.dtype
    if not alike or gate.bias is not None or up.bias is not None or {*module._modules} - {*MLP, "act_fn"}:
        return None
    activation = _activation(getattr(module, "act_fn", None))
    return None if activation is None else GatedMLP(gate.packed, up.packed, down, activation)


def _activation(function: Any) -> int | None:
    x = torch.linspace(-20, 20, 401)
    for number, known in enumerate(ACTIVATIONS):
        if isinstance(function, nn.Module) and torch.allclose(function(x), known(x), atol=1e-6):
            return number
    return None


def _equal(module: nn.Module, made: nn.Module, size: int) -> bool:
    """Whether both say the same of three rows of random numbers, within rounding."""
    x = torch.randn(1, 3, size, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-3, 1.0, 30.0])[:, None]
    try:
        theirs, ours = module(x), made(x)
    except (RuntimeError, TypeError, ValueError):
        return False
    if not isinstance(theirs, Tensor) or theirs.shape != ours.shape or theirs.dtype != ours.dtype:
        return False
    return bool(((theirs - ours).abs() <= TOLERANCE * theirs.abs().amax(dim=-1, keepdim=True)).all())


def _join(parent: nn.Module) -> int:
    """Join the projections of an attention that are given the same input. The weights end up in one matrix, not in two copies."""
    layers = [layer for name in ATTENTION if isinstance(layer := parent._modules.get(name), PackedLinear)]
    if len(layers) < len(ATTENTION) or len(set(layers)) < len(layers):
        return 0
    like = {(layer.packed.k, layer.packed.dtype, layer.bias is None) for layer in layers}
    if len(like) > 1 or any(layer.out_features % PANEL for layer in layers):
        return 0
    joint, first = Joint(layers), 0
    for name, layer in zip(ATTENTION, layers):
        setattr(parent, name, PartLinear(joint, first, layer.out_features))
        first += layer.out_features
    return len(layers)
