"""The CPU matrix product of the verification pass, and the modules that use it in place of a model's own.

A pass over a few rows is bound by reading the weights. They stay in the checkpoint's own 16 bits, are packed once in the order in
which they are read, and widened to float32 exactly in registers; activations and sums are float32. A row's result does not
depend on the rows beside it, to the last bit.

The C extension is optional: without it models run on torch's own products, and `why_not` says why.
"""

from __future__ import annotations

import importlib
import os
from collections import Counter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ParameterError

PANEL = 32
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def _load() -> tuple[ModuleType | None, str]:
    """The compiled extension, or None and the reason. torch comes first: its OpenMP threads are the ones we run on."""
    try:
        return importlib.import_module("._skinny", __name__), ""
    except ImportError as error:
        return None, f"the CPU kernels were not compiled when Outrider was installed ({error})"


_skinny, why_not = _load()


def variants() -> dict[str, int]:
    """The instruction sets that this processor can run, best first, with the number that the extension knows them by."""
    return dict(_skinny.variants()) if _skinny else {}


def _choose() -> tuple[str, int]:
    """The best variant, or the one that OUTRIDER_KERNEL names; ``off`` there turns the kernels off."""
    there = variants()
    name = os.environ.get("OUTRIDER_KERNEL") or next(iter(there), "off")
    if name != "off" and name not in there:
        raise ParameterError(f"OUTRIDER_KERNEL is {name!r}; this processor has {', '.join((*there, 'off'))}")
    return name, there.get(name, -1)


VARIANT, _number = _choose()
"""Name of the variant in use, or ``off``."""


class Packed(nn.Module):
    """A weight matrix ``[N, K]`` in panels of 32 outputs, ``[ceil(N / 32), K, 32]``, in its own type."""

    panels: Tensor

    def __init__(self, weight: Tensor):
        super().__init__()
        assert _skinny is not None
        weight = weight.detach().contiguous()
        self.n, self.k = weight.shape
        panels = torch.empty((self.n + PANEL - 1) // PANEL, self.k, PANEL, dtype=weight.dtype)
        _skinny.pack(weight.data_ptr(), panels.data_ptr(), self.n, self.k, weight.element_size(), torch.get_num_threads())
        self.register_buffer("panels", panels, persistent=False)
        self._weights = (panels.data_ptr(), self.n, self.k, TYPES[weight.dtype])

    def rows(self, index: Tensor) -> Tensor:
        """Rows ``[..., K]`` of the matrix, float32."""
        flat = index.reshape(-1)
        return self.panels[flat // PANEL, :, flat % PANEL].float().view(*index.shape, self.k)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ W.T + bias``: x ``[..., K]`` float32, result ``[..., N]`` float32."""
        assert _skinny is not None
        weights, n, k, kind = self._weights
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], n)
        at = 0 if bias is None else bias.data_ptr()
        _skinny.linear(x.data_ptr(), weights, at, out.data_ptr(), x.numel() // k, n, k, kind, _number, torch.get_num_threads())
        return out


class PackedLinear(nn.Module):
    """Takes the place of an `nn.Linear` on the CPU. float32 in and out."""

    def __init__(self, packed: Packed, bias: Tensor | None = None):
        super().__init__()
        self.packed = packed
        self.in_features, self.out_features = packed.k, packed.n
        self.register_buffer("bias", None if bias is None else bias.detach().float().contiguous(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.packed(x, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}"


class WideEmbedding(nn.Module):
    """Takes the place of an `nn.Embedding`: rows of a matrix in its own type, widened to float32.

    table: the embedding's weight ``[V, H]``, or the packed output projection where both are one matrix.
    scale: what some architectures multiply their embeddings with.
    """

    embed_scale: Tensor | None

    def __init__(self, table: nn.Parameter | Packed, scale: Tensor | None = None):
        super().__init__()
        self.table = table
        self.register_buffer("embed_scale", None if scale is None else scale.float(), persistent=False)

    def forward(self, index: Tensor) -> Tensor:
        if isinstance(self.table, Packed):
            rows = self.table.rows(index)
        else:
            rows = nn.functional.embedding(index, self.table).float()
        return rows if self.embed_scale is None else rows * self.embed_scale


def release(weight: Tensor) -> None:
    """Give the memory of a tensor back that nobody will read again: of a mapped file its pages would stay counted as ours."""
    assert _skinny is not None
    _skinny.release(weight.data_ptr(), weight.nbytes)


def pack(model: Any) -> int:
    """Put packed modules in place of the linear layers, experts and embeddings of a transformers model on the CPU.

    Each weight is freed as soon as it is packed, so that memory never holds much more than one copy. Everything else becomes
    float32. Returns how many matrices were packed.
    """
    from .experts import pack_experts

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and type(head) is nn.Linear and head.weight.data_ptr() == embedding.weight.data_ptr()
    count = pack_experts(model)
    owners = Counter(weight.data_ptr() for _, weight in model.named_parameters(remove_duplicate=False))
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype in TYPES and child.weight.device.type == "cpu":
                weight = child.weight
                del child.weight
                setattr(parent, name, PackedLinear(Packed(weight), child.bias))
                if owners[weight.data_ptr()] == 1:
                    release(weight)
                del weight
                count += 1
    scale = getattr(embedding, "embed_scale", None)
    if tied:
        embedding.weight = None
        table = model.get_output_embeddings().packed
    else:
        table = embedding.weight
    model.set_input_embeddings(WideEmbedding(table, scale))
    for module in model.modules():
        if not isinstance(module, (Packed, WideEmbedding)):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if tensor.is_floating_point():
                    tensor.data = tensor.data.float()
    return count
