"""What a model is made of, as far as its speed depends on it: bytes and operations by layer. No weights are needed.

A model comes from a configuration (a folder, a hub id, or the table in `known`): transformers builds it without storage and its
parameters are counted, so that every architecture it has is counted as it is. Or it comes from the header of a GGUF file, where
each tensor's own size counts.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import LoadError, ParameterError
from .known import CONFIGS

QUANTISATIONS: dict[str, tuple[float, float]] = {
    "F32": (32, 32),
    "BF16": (16, 16),
    "F16": (16, 16),
    "FP8": (8, 16),
    "INT8": (8, 16),
    "AWQ": (4.25, 16),
    "GPTQ": (4.25, 16),
    "MLX-4BIT": (4.5, 4.5),
    "Q8_0": (8.5, 8.5),
    "Q6_K": (6.56, 6.56),
    "Q5_K_M": (5.7, 5.7),
    "Q4_K_M": (4.85, 4.85),
    "Q4_0": (4.5, 4.5),
    "IQ4_XS": (4.3, 4.3),
    "Q3_K_M": (3.9, 3.9),
    "Q2_K": (3.35, 3.35),
}
"""Average bits of a weight: in the layers, and in embeddings and output matrix. A GGUF file's own tensors are exact instead."""

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "global"}
ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k", "moe_top_k")


WHAT = f"give a folder with config.json, a GGUF file, a hub id that can be reached, or one of {', '.join(CONFIGS)}"


@dataclass(frozen=True)
class Part:
    """A number of parameters and the bytes that hold them."""

    parameters: int = 0
    bytes: float = 0.0

    def __add__(self, other: Part) -> Part:
        return Part(self.parameters + other.parameters, self.bytes + other.bytes)


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    dense: what every pass reads (attention, norms, router, shared experts). expert: ONE routed expert; experts, active: how many
    there are, and how many a token takes. kv: elements that the cache holds for a token. scores: multiplications of a row with one key
    and its value, over all heads. window: most keys that a row sees.
    """

    dense: Part
    kv: int
    scores: int
    expert: Part = Part()
    experts: int = 0
    active: int = 0
    window: int | None = None

    @property
    def bytes(self) -> float:
        return self.dense.bytes + self.experts * self.expert.bytes

    def reach(self, context: int) -> int:
        """Keys that a row sees."""
        return context if self.window is None else min(context, self.window)


@dataclass(frozen=True)
class Shape:
    """A model. head: the output matrix and the final norm; of a tied one the bytes count once in memory."""

    name: str
    layers: tuple[Layer, ...]
    embedding: Part
    head: Part
    tied: bool
    hidden: int
    vocabulary: int
    context: int
    quantisation: str
    kv_bits: int = 16
    note: str = ""

    @property
    def parameters(self) -> int:
        layers = sum(x.dense.parameters + x.experts * x.expert.parameters for x in self.layers)
        return layers + self.head.parameters + (0 if self.tied else self.embedding.parameters)

    @property
    def active_parameters(self) -> int:
        """Parameters that take part in one token, without the embeddings' table."""
        return sum(x.dense.parameters + x.active * x.expert.parameters for x in self.layers) + self.head.parameters

    @property
    def bytes(self) -> float:
        """Bytes of all weights in memory."""
        return sum(x.bytes for x in self.layers) + self.head.bytes + (0.0 if self.tied else self.embedding.bytes)

    @property
    def sparse(self) -> bool:
        return any(x.experts for x in self.layers)

    def kv_bytes(self, context: int) -> float:
        """Bytes of one sequence's cache."""
        return sum(x.kv * x.reach(context) for x in self.layers) * self.kv_bits / 8

    def describe(self) -> dict[str, Any]:
        """For tables and JSON."""
        moe = next((x for x in self.layers if x.experts), None)
        return {
            "name": self.name,
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
            "layers": len(self.layers),
            "hidden": self.hidden,
            "vocabulary": self.vocabulary,
            "context": self.context,
            "experts": moe.experts if moe else None,
            "active_experts": moe.active if moe else None,
            "quantisation": self.quantisation,
            "weights_bytes": self.bytes,
            "kv_bytes_per_token": sum(x.kv for x in self.layers) * self.kv_bits / 8,
            "note": self.note,
        }


def read_shape(source: str, quantisation: str | None = None, kv_bits: int = 16) -> Shape:
    """The shape of `source`: a name of the table of known models, a folder, a hub id, a GGUF file.

    quantisation: a name of QUANTISATIONS or bits per weight; by default what the model says. Raises LoadError, ParameterError.
    """
    path = Path(source)
    if path.suffix == ".gguf" or (path.is_file() and path.suffix != ".json"):
        if quantisation is not None:
            raise ParameterError(f"{source}: a GGUF file has its own quantisation; leave out {quantisation}")
        from .gguf_header import read_gguf

        return replace(read_gguf(path), kv_bits=kv_bits)
    return replace(from_config(_config(source), Path(source).name, quantisation), kv_bits=kv_bits)


def bits_of(quantisation: str) -> tuple[float, float]:
    """Bits of a weight in the layers, and in embeddings and output matrix."""
    if found := QUANTISATIONS.get(quantisation.upper()):
        return found
    try:
        bits = float(quantisation)
    except ValueError:
        bits = math.nan
    if not 0.5 <= bits <= 64:
        known = ", ".join(QUANTISATIONS)
        raise ParameterError(f"unknown quantisation {quantisation!r}; known: {known}, or a number of bits per weight")
    return bits, bits


def _config(source: str) -> Any:
    from transformers import AutoConfig

    from .. import models

    if source in models.PACKAGED and (models.folder(source) / "config.json").exists():
        source = str(models.folder(source))
    if source in models.SHIPPED:
        source = str(models.shipped(source))
    if known := CONFIGS.get(Path(source).name.lower()) if not Path(source).exists() else None:
        return AutoConfig.for_model(**known)
    if "/" not in source and not Path(source).exists():
        raise LoadError(f"there is no model {source}; {WHAT}")
    try:
        return AutoConfig.from_pretrained(source)
    except Exception as error:  # of many kinds: no file, no network, an unknown architecture, broken JSON
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise LoadError(f"cannot read the configuration of {source}: {reason}; {WHAT}") from error


def from_config(config: Any, name: str, quantisation: str | None = None) -> Shape:
    """The shape of the model that a transformers configuration describes. Raises LoadError for what the planner does not know."""
    import torch
    from transformers import AutoModelForCausalLM

    chosen = quantisation or _own_quantisation(config, name)
    bits, outer_bits = bits_of(chosen)
    text = config.get_text_config()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(text)
    except Exception as error:  # of many kinds, from the model's own code
        raise LoadError(f"{name}: transformers cannot build this model ({str(error).strip().splitlines()[0]})") from error
    stacks = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == text.num_hidden_layers]
    if not stacks:
        raise LoadError(f"{name}: no list of {text.num_hidden_layers} decoder layers was found in {type(model).__name__}")
    layers = tuple(_layer(module, text, number, name, bits) for number, module in enumerate(stacks[0]))
    inside = {id(p) for p in stacks[0].parameters()}
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    tables = {id(p) for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()}
    rest = sum(p.numel() for p in model.parameters() if id(p) not in inside | tables | {id(output.weight)})
    made = Shape(
        name=name,
        layers=layers,
        embedding=_part(embedding.weight.numel(), outer_bits),
        head=_part(output.weight.numel(), outer_bits) + _part(rest, 16),
        tied=bool(text.tie_word_embeddings),
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        context=getattr(text, "max_position_embeddings", None) or 1 << 20,
        quantisation=chosen,
        note=_mla_note(text),
    )
    drafts = getattr(text, "draft_vocab_size", None)
    return _eagle3(made, drafts, bits, outer_bits) if drafts else made


def _eagle3(shape: Shape, drafts: int, bits: float, outer_bits: float) -> Shape:
    """An EAGLE-3 head that was counted as a model: its projections read an embedding, the target's, beside the feature, and it drafts
    fewer words than there are. What makes a feature of the target's states, once for each kept token, is left out.
    """
    more = [shape.hidden * (x.scores // 2 + x.kv + 1) for x in shape.layers]  # to queries, keys and values; a norm
    layers = tuple(replace(x, dense=x.dense + _part(n, bits)) for x, n in zip(shape.layers, more))
    spare = _part((shape.vocabulary - drafts) * shape.hidden, outer_bits)
    head = Part(shape.head.parameters - spare.parameters, shape.head.bytes - spare.bytes)
    return replace(shape, layers=layers, embedding=Part(), head=head, vocabulary=drafts)


def _own_quantisation(config: Any, name: str) -> str:
    text = config.get_text_config()
    own = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    if own:
        own = own if isinstance(own, dict) else own.to_dict()
        method = str(own.get("quant_method", "")).upper()
        bits = own.get("bits") or own.get("w_bit")
        if method == "FP8" or bits == 8:
            return "FP8"
        if bits == 4 or method in ("AWQ", "GPTQ", "MXFP4"):
            return "AWQ"
        raise LoadError(f"{name}: quantised by {method or 'an unknown method'}; say the bits per weight with --quant")
    dtype = getattr(config, "dtype", None) or getattr(text, "dtype", None)
    return DTYPES.get(str(dtype).removeprefix("torch."), "BF16")


def _part(parameters: int, bits: float) -> Part:
    return Part(parameters, parameters * bits / 8)


def _layer(module: Any, config: Any, number: int, name: str, bits: float) -> Layer:
    kinds = getattr(config, "layer_types", None)
    kind = kinds[number] if kinds else "full_attention"
    heads = getattr(config, "num_attention_heads", None)
    if kind not in ATTENTION or not heads:
        what = kind if kind not in ATTENTION else "no attention"
        raise LoadError(
            f"{name}: layer {number} has {what}; the planner knows layers with attention over a cache of keys and values"
        )
    expert, count = _experts(module)
    total = sum(p.numel() for p in module.parameters())
    kv, scores = _attention(module, config)
    window = getattr(config, "sliding_window", None) if kind == "sliding_attention" else None
    if kind == "chunked_attention":
        window = getattr(config, "attention_chunk_size", None)
    return Layer(
        dense=_part(total - count * expert, bits),
        kv=kv,
        scores=scores,
        expert=_part(expert, bits),
        experts=count,
        active=_active(config, name) if count else 0,
        window=window,
    )


def _experts(module: Any) -> tuple[int, int]:
    """Parameters of one routed expert, and how many experts a layer has."""
    import torch

    for part_name, part in module.named_modules():
        stacks = [p for p in part.parameters(recurse=False) if p.dim() == 3]
        if stacks and "expert" in part_name:
            count = stacks[0].shape[0]
            return sum(p.numel() for p in part.parameters(recurse=False)) // count, count
        if isinstance(part, torch.nn.ModuleList) and part_name.endswith("experts") and len(part) > 1:
            return sum(p.numel() for p in part.parameters()) // len(part), len(part)
    return 0, 0


def _active(config: Any, name: str) -> int:
    places = (config, getattr(config, "ffn_config", None))
    for place in places:
        for key in ACTIVE:
            if isinstance(value := getattr(place, key, None), int):
                return value
    raise LoadError(f"{name}: its configuration does not say how many experts a token takes (one of {', '.join(ACTIVE)})")


def _attention(module: Any, config: Any) -> tuple[int, int]:
    """Cached elements of a token, and multiplications of a row with one key and its value."""
    heads = config.num_attention_heads
    if rank := getattr(config, "kv_lora_rank", None):  # multi-head latent attention: the cache holds the latent vector
        rope = getattr(config, "qk_rope_head_dim", 0)
        return rank + rope, heads * (2 * rank + rope)
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    named = {part_name.rsplit(".", 1)[-1]: part for part_name, part in module.named_modules()}
    if all(hasattr(named.get(proj), "out_features") for proj in ("k_proj", "v_proj")):
        kv = named["k_proj"].out_features + named["v_proj"].out_features
    else:
        kv = 2 * (getattr(config, "num_key_value_heads", None) or heads) * size
    return kv, 2 * heads * size


def _mla_note(config: Any) -> str:
    rank = getattr(config, "kv_lora_rank", None)
    if not rank:
        return ""
    full = config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    latent = rank + config.qk_rope_head_dim
    return (
        f"cache counted as the latent vector (llama.cpp, vLLM); transformers' own cache is {full / latent:.0f} times as large"
    )


# ---- GGUF names ------------------------------------------------------------------------------------------------------

Tensors = dict[str, tuple[tuple[int, ...], Part]]
"""By name: dimensions (GGUF order: inputs first, experts last) and size."""


def from_gguf(name: str, tensors: Tensors, keys: dict[str, Any], quantisation: str) -> Shape:
    """The shape of a model by the tensors and keys of a GGUF header."""
    architecture = keys.get("general.architecture")

    def key(what: str, default: Any = None) -> Any:
        return keys.get(f"{architecture}.{what}", default)

    if any(k.startswith(f"{architecture}.ssm.") for k in keys):
        raise LoadError(
            f"{name}: has recurrent layers; the planner knows layers with attention over a cache of keys and values"
        )
    count, hidden = key("block_count"), key("embedding_length")
    if not count or not hidden or "token_embd.weight" not in tensors:
        raise LoadError(f"{name}: not a language model (no block_count, embedding_length or token_embd.weight in its header)")
    blocks: dict[int, Tensors] = defaultdict(dict)
    for tensor, value in tensors.items():
        if found := re.fullmatch(r"blk\.(\d+)\.(.+)", tensor):
            blocks[int(found[1])][found[2]] = value
    count -= key("nextn_predict_layers", 0)
    layers = tuple(_gguf_layer(blocks[n], n, key, hidden, name) for n in range(count))
    outside = [part for tensor, (_, part) in tensors.items() if tensor.startswith("output")]
    embedding = tensors["token_embd.weight"][1]
    tied = "output.weight" not in tensors
    return Shape(
        name=name,
        layers=layers,
        embedding=embedding,
        head=sum(outside, embedding if tied else Part()),
        tied=tied,
        hidden=hidden,
        vocabulary=tensors["token_embd.weight"][0][-1],
        context=key("context_length", 1 << 20),
        quantisation=quantisation,
        note="windows of sliding attention are not in the header: counted as full" if key("attention.sliding_window") else "",
    )


def _gguf_layer(tensors: Tensors, number: int, key: Any, hidden: int, name: str) -> Layer:
    def each(what: str, default: Any = None) -> Any:
        value = key(what, default)
        return value[number] if isinstance(value, (list, tuple)) else value

    heads = each("attention.head_count")
    if not tensors or not heads:
        raise LoadError(f"{name}: layer {number} has no tensors or no attention; the planner cannot count it")
    routed = {n: v for n, v in tensors.items() if re.fullmatch(r"ffn_\w*_exps\.\w+", n)}
    experts = each("expert_count", 0) if routed else 0
    total = sum((part for _, part in tensors.values()), Part())
    of_experts = sum((part for _, part in routed.values()), Part())
    size = each("attention.key_length", hidden // heads)
    kv = each("attention.head_count_kv", heads) * (size + each("attention.value_length", size))
    scores = heads * (size + each("attention.value_length", size))
    if rank := each("attention.kv_lora_rank"):
        rope = each("rope.dimension_count", 0)
        kv, scores = rank + rope, heads * (2 * rank + rope)
    return Layer(
        dense=Part(total.parameters - of_experts.parameters, total.bytes - of_experts.bytes),
        kv=kv,
        scores=scores,
        expert=Part(of_experts.parameters // experts, of_experts.bytes / experts) if experts else Part(),
        experts=experts,
        active=each("expert_used_count", 0) if experts else 0,
    )
