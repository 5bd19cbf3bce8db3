"""The CPU matrix product of the verification pass, and the modules that use it in place of a model's own.

A pass over a few rows is bound by reading the weights. They stay in the checkpoint's own 16 bits, are packed once in the order in
which they are read, and widened to float32 exactly in registers; activations and sums are float32. A row's result does not
depend on the rows beside it, to the last bit.

The C extension is optional: without it models run on torch's own products, and `why_not` says why.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import TYPE_CHECKING, Any, Mapping

import torch
from torch import Tensor, nn

from ..errors import ParameterError

if TYPE_CHECKING:
    from .choose import Choice, Shape

PANEL = 32
HEAD_MULTIPLE = 16
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
TURNED_OFF = os.environ.get("OUTRIDER_KERNEL") == "off"
"""Whether models keep their own linear layers because the user says so."""


class Packed(nn.Module):
    """A weight matrix ``[N, K]`` in panels of 32 outputs, ``[ceil(N / 32), K, 32]``, in its own type.

    Of 16-bit types, outputs c and c + 16 of a panel stand side by side.
    """

    panels: Tensor

    def __init__(self, weight: Tensor):
        super().__init__()
        assert _skinny is not None
        weight = weight.detach().contiguous()
        self.n, self.k = weight.shape
        self.dtype = weight.dtype
        panels = torch.empty((self.n + PANEL - 1) // PANEL, self.k, PANEL, dtype=weight.dtype)
        _skinny.pack(weight.data_ptr(), panels.data_ptr(), self.n, self.k, weight.element_size(), torch.get_num_threads())
        self.register_buffer("panels", panels, persistent=False)

    @classmethod
    def of(cls, panels: Tensor, n: int) -> Packed:
        """Around panels that there are already, with n outputs."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self.n, self.k, self.dtype = n, panels.shape[1], panels.dtype
        self.register_buffer("panels", panels, persistent=False)
        return self

    def rows(self, index: Tensor) -> Tensor:
        """Rows ``[..., K]`` of the matrix, float32."""
        flat = index.reshape(-1)
        place = flat % PANEL
        if self.dtype != torch.float32:
            place = place % (PANEL // 2) * 2 + place // (PANEL // 2)
        return self.panels[flat // PANEL, :, place].float().view(*index.shape, self.k)

    def check(self, x: Tensor) -> None:
        """Raise RuntimeError unless x and the panels are where, and of the type, that the extension is told."""
        if not (x.is_cpu and self.panels.is_cpu and self.panels.dtype == self.dtype and x.dtype == torch.float32):
            raise RuntimeError("a packed model stays on the CPU and keeps the type of its weights")

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ W.T + bias``: x ``[..., K]`` float32, result ``[..., N]`` float32."""
        assert _skinny is not None
        panels, n, k = self.panels, self.n, self.k
        self.check(x)
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], n)
        _skinny.linear(
            x.data_ptr(),
            panels.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            x.numel() // k,
            n,
            k,
            TYPES[self.dtype],
            _number,
            torch.get_num_threads(),
        )
        return out


def can_attend(q: Tensor, values: Tensor) -> bool:
    """Whether `attend` takes these queries ``[heads, n, d]`` and values ``[kv_heads, m, d]``."""
    return (
        _number >= 0
        and q.device.type == "cpu"
        and q.dtype == values.dtype == torch.float32
        and q.shape[-1] % HEAD_MULTIPLE == 0
        and values.shape[-1] % HEAD_MULTIPLE == 0
    )


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float, sinks: Tensor | None) -> Tensor:
    """Softmax attention of n rows ``[heads, n, d]`` over m keys ``[kv_heads, m, d]``; ``[n, heads, d]``, float32.

    mask: added to the scores of the last columns, ``[n, columns]``. sinks: for each head a score that takes part in the softmax
    without a value. A row's result does not depend on the rows beside it, nor on keys that its mask hides.
    """
    assert _skinny is not None
    heads, n, size = q.shape
    kv_heads, m, value_size = values.shape
    q = q if q.stride(2) == 1 else q.contiguous()
    keys = keys if keys.stride()[1:] == (size, 1) else keys.contiguous()
    values = values if values.stride()[1:] == (value_size, 1) else values.contiguous()
    sinks = None if sinks is None else sinks.float().contiguous()
    out = q.new_empty(n, heads, value_size)
    _skinny.attend(
        q.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        0 if mask is None else mask.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        heads,
        kv_heads,
        n,
        m,
        size,
        value_size,
        0 if mask is None else mask.shape[1],
        q.stride(0),
        q.stride(1),
        keys.stride(0),
        values.stride(0),
        scaling,
        _number,
        torch.get_num_threads(),
    )
    return out


class PackedLinear(nn.Module):
    """Takes the place of an `nn.Linear` on the CPU. Out comes the type that goes in; the arithmetic is float32."""

    def __init__(self, packed: Packed, bias: Tensor | None = None):
        super().__init__()
        self.packed = packed
        self.in_features, self.out_features = packed.k, packed.n
        self.register_buffer("bias", None if bias is None else bias.detach().float().contiguous(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return self.packed(x, self.bias)
        return self.packed(x.float(), self.bias).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}"


class WideEmbedding(nn.Module):
    """Takes the place of an `nn.Embedding`: rows of a matrix in its own type, widened to the model's.

    table: the embedding's weight ``[V, H]``, or the packed output projection where both are one matrix.
    scale: what some architectures multiply their embeddings with.
    """

    embed_scale: Tensor | None

    def __init__(self, table: nn.Parameter | Packed, scale: Tensor | None = None, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.table = table
        self.dtype = dtype
        self.register_buffer("embed_scale", None if scale is None else scale.to(dtype), persistent=False)

    def forward(self, index: Tensor) -> Tensor:
        if isinstance(self.table, Packed):
            rows = self.table.rows(index).to(self.dtype)
        else:
            rows = nn.functional.embedding(index, self.table).to(self.dtype)
        return rows if self.embed_scale is None else rows * self.embed_scale


class Owners:
    """Which memory belongs to one tensor of a model alone, so that it can be given back when that tensor is packed."""

    def __init__(self, model: nn.Module):
        tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        self._ranges = [_range(tensor) for _, tensor in tensors if tensor.is_cpu]

    def release(self, weight: Tensor) -> None:
        """Give back the pages of a weight that nobody will read again, unless another tensor has a part of them.

        Of a mapped file they would otherwise stay counted as ours until the last tensor of that file is gone.
        """
        first, last = _range(weight)
        shared = sum(begin < last and first < end for begin, end in self._ranges) > 1
        if _skinny is not None and weight.is_contiguous() and not shared:
            _skinny.release(first, last - first)


def _range(tensor: Tensor) -> tuple[int, int]:
    """First and last address that a tensor's elements span."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


def pack(model: Any, arithmetic: torch.dtype = torch.float32, choices: Mapping[Shape, Choice] | None = None) -> int:
    """Put what `choose` chose (our kernel, without choices) in place of the linear layers of a transformers model on the CPU.

    With float32 arithmetic experts and embeddings are packed too, and everything else becomes float32. Each weight is freed as
    soon as it is packed, so that memory never holds much more than one copy. Returns how many matrices were replaced.
    """
    from . import choose
    from .experts import pack_experts
    from .fused import fuse

    embedding, tied = model.get_input_embeddings(), choose.is_tied(model)
    owners = Owners(model)
    count = pack_experts(model, owners) if arithmetic == torch.float32 and VARIANT != "off" else 0
    count += pack_linears(model, arithmetic, choices, owners)
    _widen_embedding(model, embedding, model.get_output_embeddings() if tied else None, arithmetic)
    for module in model.modules():
        if arithmetic == torch.float32 and not isinstance(module, (Packed, WideEmbedding)):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if tensor.is_floating_point():
                    tensor.data = tensor.data.float()
    if arithmetic == torch.float32 and VARIANT != "off":
        fuse(model)
    return count


def pack_linears(
    model: nn.Module,
    arithmetic: torch.dtype = torch.float32,
    choices: Mapping[Shape, Choice] | None = None,
    owners: Owners | None = None,
) -> int:
    """Put what `choose` chose in place of a module's linear layers on the CPU, and nothing else. Returns how many were replaced."""
    from . import choose

    owners = owners or Owners(model)
    count = 0
    shapes = choose.shapes(model, arithmetic)
    built: dict[nn.Module, nn.Module] = {}  # a layer may stand in several places
    for parent, name, layer in list(choose.linears(model)):
        if layer not in built:
            weight = layer.weight.detach()
            choice = (choices or {}).get(shapes[layer])
            module = choose.build(choice.chosen if choice else choose.candidates(shapes[layer])[0], layer, arithmetic)
            kept = module is layer and layer.weight.data_ptr() == weight.data_ptr()
            if not kept:
                owners.release(weight)
            built[layer] = module
            count += module is not layer
            del weight
        setattr(parent, name, built[layer])
    return count


def _widen_embedding(model: Any, embedding: Any, head: nn.Module | None, arithmetic: torch.dtype) -> None:
    """Read the embeddings from the packed matrix of the output projection that is tied to them, or from their own 16 bits."""
    scale = getattr(embedding, "embed_scale", None)
    if isinstance(head, PackedLinear):
        embedding.weight = None
        model.set_input_embeddings(WideEmbedding(head.packed, scale, arithmetic))
    elif embedding.weight.dtype != arithmetic:
        model.set_input_embeddings(WideEmbedding(embedding.weight, scale, arithmetic))
