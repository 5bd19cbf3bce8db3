"""The dialects in which EAGLE heads are published, and what each says about its head.

``eagle``: EAGLE-1 and 2 as SafeAILab's repository writes them. ``safeailab``, ``specforge``, ``speculators``, ``gguf``: EAGLE-3 of
SafeAILab/EAGLE, of sgl-project/SpecForge and SGLang, of vllm-project/speculators, and of llama.cpp. They share the maths, but not the
names of tensors, the meaning of layer numbers, and the defaults. What is read here is written in `outrider.export`, by the same table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Collection, Mapping

from ..errors import LoadError
from ..targets.base import LayerKey, Target
from .checkpoint import Checkpoint

if TYPE_CHECKING:
    from .eagle import EagleOptions


@dataclass(frozen=True)
class Dialect:
    """title: in words. first: what the names of the first layer's tensors begin with. outputs: its numbers of the target's layers
    mean what leaves a layer, not what enters it. nested: the decoder layer has a config of its own within the head's.
    """

    title: str
    first: str = "layers.0."
    outputs: bool = False
    nested: bool = False


DIALECTS = {
    "eagle": Dialect("EAGLE-1/2 (SafeAILab)"),
    "safeailab": Dialect("EAGLE-3 (SafeAILab)", "midlayer.", outputs=True),
    "specforge": Dialect("EAGLE-3 (SpecForge, SGLang)", "midlayer.", outputs=True),
    "speculators": Dialect("EAGLE-3 (speculators, vLLM)", nested=True),
    "gguf": Dialect("EAGLE-3 (GGUF, llama.cpp)", nested=True),
}

SAYS_NOTHING = frozenset(
    {
        "architectures",
        "auto_map",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "model_type",
        "use_cache",
        "initializer_range",
        "_name_or_path",
        "vocab_size",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "tie_word_embeddings",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "torchscript",
        "pretraining_tp",
        "attention_dropout",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
    }
)
"""Keys of a config that say nothing about the maths, or that are read by name below."""
HEAD_KEYS = frozenset(
    {
        "draft_vocab_size",
        "target_hidden_size",
        "bias",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "use_aux_norm",
        "eagle_aux_hidden_state_layer_ids",
        "num_aux_hidden_states",
        "eagle_config",
        "embed_requires_grad",
    }
)
NESTED_KEYS = HEAD_KEYS | {
    "general.architecture",
    "speculators_model_type",
    "speculators_version",
    "speculators_config",
    "transformer_layer_config",
}
EAGLE_CONFIG_KEYS = frozenset({"eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state", "norm_before_fc"})
"""Of the config within the config, which goes before the other: NVIDIA's heads have `norm_before_fc` there (vLLM's pull request 42143)."""


@dataclass(frozen=True)
class Recipe:
    """What a checkpoint says about its head, all defaults filled in.

    config: transformers' own, of the decoder layers. layers: hidden states of the target, by entry. prefix: of the first layer's
    tensors. fc_bias, fc_norm, input_norm: which parts there are between the hidden states and the feature.
    """

    dialect: str
    config: Any
    layers: tuple[LayerKey, ...]
    prefix: str
    fc_bias: bool = False
    fc_norm: bool = False
    input_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False


def detect(checkpoint: Checkpoint) -> str | None:
    """The dialect of an EAGLE head, by its content; None for anything else."""
    config, tensors = checkpoint.config, checkpoint.tensors
    if config.get("general.architecture") == "eagle3":
        return "gguf"
    if "speculators_model_type" in config or "speculators_config" in config:
        kind = config.get("speculators_model_type")
        return "speculators" if kind == "eagle3" else None
    if any(name.startswith("midlayer.") for name in tensors):
        names = config.get("architectures") or [""]
        return "specforge" if "Eagle3" in str(names[0]) or "eagle_config" in config else "safeailab"
    is_first = "fc.weight" in tensors and any(name.startswith("layers.0.") for name in tensors)
    return "eagle" if is_first and "layers.0.hidden_norm.weight" not in tensors else None


def read_recipe(checkpoint: Checkpoint, target: Target, options: EagleOptions) -> Recipe:
    """What the checkpoint says, and `options` overrides. Raises LoadError for what is not known here, or does not fit `target`."""
    dialect = detect(checkpoint)
    if dialect is None:
        raise LoadError(
            f"{checkpoint.folder} is not an EAGLE head of a known dialect ({', '.join(d.title for d in DIALECTS.values())})"
        )
    config = _layer_config(checkpoint, dialect, options)
    first = DIALECTS[dialect].first
    if dialect == "eagle":
        return Recipe(dialect, config, ("final",), first, fc_bias=_has(checkpoint, "bias", "fc.bias"))
    wanted = checkpoint.value("target_hidden_size", int, config.hidden_size)
    if wanted != target.hidden_size:
        raise LoadError(
            f"{checkpoint.folder}: the head reads hidden states of {wanted} numbers (target_hidden_size, else its own hidden_size), those "
            f"of {target.name} have {target.hidden_size}: it was made for another target"
        )
    residual, output = options.norm_before_residual, options.norm_output
    inner = replace(checkpoint, config=checkpoint.value("eagle_config", dict, {}), asked=set())
    _refuse_unknown(inner, EAGLE_CONFIG_KEYS, options, "eagle_config.")
    recipe = Recipe(
        dialect,
        config,
        _layers(checkpoint, inner, dialect, target, options),
        first,
        fc_bias=_has(checkpoint, "bias", "fc.bias"),
        fc_norm=_has(checkpoint, "fc_norm", "fc_norm.0.weight") or checkpoint.value("use_aux_norm", bool, False),
        input_norm=inner.value("norm_before_fc", bool, _has(checkpoint, "norm_before_fc", "input_norm.weight")),
        norm_before_residual=checkpoint.value("norm_before_residual", bool, False) if residual is None else residual,
        norm_output=checkpoint.value("norm_output", bool, False) if output is None else output,
    )
    if recipe.fc_norm and recipe.input_norm:
        raise LoadError(f"{checkpoint.folder}: fc_norm and norm_before_fc exclude each other, but it has both")
    return recipe


def _has(checkpoint: Checkpoint, key: str, tensor: str) -> bool:
    """What the config says; where it says nothing, whether the tensor is there."""
    return checkpoint.value(key, bool, tensor in checkpoint)


def _layers(
    checkpoint: Checkpoint, inner: Checkpoint, dialect: str, target: Target, options: EagleOptions
) -> tuple[LayerKey, ...]:
    """The layers whose inputs make a feature. inner: the config within the config.

    SpecForge and SGLang number outputs: their i is the entry of layer i + 1, except where the last number is the target's number of
    layers. speculators and vLLM number entries.
    """
    total, width = target.n_layers, checkpoint.shape("fc.weight")[-1]
    count, rest = divmod(width, target.hidden_size)
    if rest or not count:
        raise LoadError(
            f"{checkpoint.folder}: tensor fc.weight takes {width} inputs, which is no multiple of the {target.hidden_size} of a hidden "
            f"state of {target.name}: the head was made for another target"
        )
    if (said := checkpoint.value("num_aux_hidden_states", int, count)) != count:
        raise LoadError(f"{checkpoint.folder}: num_aux_hidden_states is {said}, but tensor fc.weight takes {count} states")
    if not inner.value("use_aux_hidden_state", bool, True):
        raise LoadError(f"{checkpoint.folder}: eagle_config.use_aux_hidden_state is false; such heads are not supported")
    key = "eagle_aux_hidden_state_layer_ids"
    given = inner.value(key, list, None) or checkpoint.value(key, list, None)
    hint = "give the right ones: -o layers=..."
    if wrong := [k for k in given or () if not isinstance(k, int) or isinstance(k, bool)]:
        raise LoadError(f"{checkpoint.folder}: {key} must hold layer numbers; got {wrong[0]!r}")
    if options.layers is not None:
        keys, origin = list(options.layers), "option layers"
    elif given is not None:
        keys, origin = list(given), key
        if DIALECTS[dialect].outputs and max(keys, default=0) != total:
            keys = [k + 1 for k in keys]
    elif count == 3:
        keys, origin = default_layers(total), "the default"
    else:
        raise LoadError(
            f"{checkpoint.folder} does not say which {count} layers of the target it reads; give them: -o layers=..."
        )
    if len(keys) != count:
        raise LoadError(f"{checkpoint.folder}: {origin} names {len(keys)} layers, but fc.weight takes {count}; {hint}")
    if outside := [k for k in keys if not 0 <= k <= total]:
        raise LoadError(f"{checkpoint.folder}: {origin} means layer {outside[0]}, but {target.name} has {total} layers; {hint}")
    return tuple(keys)


def default_layers(total: int) -> list[int]:
    """The entries that every dialect means by naming none, of a target with so many layers."""
    return [2, total // 2, total - 3]


def _layer_config(checkpoint: Checkpoint, dialect: str, options: EagleOptions) -> Any:
    """transformers' config of the decoder layers. Raises LoadError for a family or a key that is not known."""
    from transformers import AutoConfig

    part = checkpoint
    if DIALECTS[dialect].nested:
        _refuse_unknown(checkpoint, NESTED_KEYS | SAYS_NOTHING, options)
        part = replace(checkpoint, config=checkpoint.value("transformer_layer_config", dict))
    values = dict(part.config)
    family = values.pop("model_type", None) or "llama"
    try:
        plain = AutoConfig.for_model(family)
    except (ValueError, KeyError) as error:
        raise LoadError(f"{checkpoint.folder}: model_type {family!r} is not known to this transformers") from error
    known = set(plain.to_dict()) | set(plain.attribute_map)
    where = "transformer_layer_config." if part is not checkpoint else ""
    _refuse_unknown(part, known | SAYS_NOTHING | (frozenset() if where else HEAD_KEYS), options, where)
    for key in HEAD_KEYS | {"architectures", "torch_dtype", "dtype", "auto_map", "quantization_config"}:
        values.pop(key, None)
    theta = options.rope_theta
    if theta is None and not DIALECTS[dialect].nested and not (values.get("rope_theta") or values.get("rope_parameters")):
        theta = 10000.0  # what SafeAILab and SGLang take; the target's own is another
    if theta is not None:
        parameters = values.get("rope_parameters")
        values |= {"rope_parameters": {**parameters, "rope_theta": theta}} if parameters else {"rope_theta": theta}
    values.setdefault("num_hidden_layers", 1)
    values |= {"vocab_size": 8, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}  # its embeddings are not used
    try:
        return AutoConfig.for_model(family, **values)
    except Exception as error:  # transformers' configs have checks of many kinds
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise LoadError(f"{checkpoint.folder}: config.json is no config of a {family} layer: {first}") from error


def _refuse_unknown(checkpoint: Checkpoint, known: Collection[str], options: EagleOptions, where: str = "") -> None:
    ignored = {key.strip() for key in (options.ignore or "").split(",")}
    config: Mapping[str, Any] = checkpoint.config
    for key, value in config.items():
        if key not in known and where + key not in ignored and value not in (None, False, [], {}):
            raise LoadError(
                f"{checkpoint.folder}: config.json has {where}{key} = {value!r}, which is not known here and may change the maths; if it "
                f"does not: -o ignore={where}{key}"
            )
