"""The dialects in which DFlash drafters are published.

``z-lab``: the paper's own, a Qwen3 config with a `dflash_config`; layer numbers name outputs. ``speculators``: of
vllm-project/speculators, with a vocabulary that may be reduced; layer numbers name entries. ``transformers``: drafters with a config
of their own there (Muse-Glimmer's assistant); layer numbers name outputs. ``gguf``: of llama.cpp (`dflash_gguf`); they name entries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..errors import LoadError
from ..targets.base import LayerKey, Target
from .checkpoint import Checkpoint
from .eagle_formats import SAYS_NOTHING

DIALECTS = {
    "z-lab": "DFlash (z-lab)",
    "speculators": "DFlash (speculators, vLLM)",
    "transformers": "DFlash (transformers)",
    "gguf": "DFlash (GGUF, llama.cpp)",
}
NESTED = ("speculators", "gguf")
"""Dialects in which the layers have a config of their own within the drafter's, and layer numbers name entries."""
OWN_KEYS = frozenset({"dflash_config", "block_size", "num_target_layers", "target_layer_ids", "mask_token_id", "layer_types"})
DFLASH_CONFIG_KEYS = frozenset({"mask_token_id", "target_layer_ids", "block_size"})
NESTED_KEYS = frozenset(
    {
        "general.architecture",
        "speculators_model_type",
        "speculators_version",
        "speculators_config",
        "transformer_layer_config",
        "aux_hidden_state_layer_ids",
        "mask_token_id",
        "block_size",
        "sample_from_anchor",
        "draft_vocab_size",
        "target_hidden_size",
        "sliding_window_non_causal",
    }
)


@dataclass(frozen=True)
class Recipe:
    """What a checkpoint says about its drafter.

    config: transformers' own, of Qwen3 layers. layers: hidden states of the target, by entry. mask: the mask token's id. from_anchor:
    whether the anchor's row drafts too. fc, norm: names of the layers that fuse the hidden states.
    """

    dialect: str
    config: Any
    layers: tuple[LayerKey, ...]
    mask: int
    block_size: int
    from_anchor: bool = False
    fc: str = "fc"
    norm: str = "hidden_norm"


def detect(config: dict[str, Any]) -> str | None:
    """The dialect, by the config; None for anything else."""
    if config.get("general.architecture") == "dflash":
        return "gguf"
    if "dflash_config" in config:
        return "z-lab"
    if config.get("speculators_model_type") == "dflash":
        return "speculators"
    if {"block_size", "mask_token_id", "target_layer_ids"} <= config.keys():
        return "transformers"
    return None


def read_recipe(checkpoint: Checkpoint, target: Target, layers: tuple[int, ...] | None, ignore: str | None) -> Recipe:
    """What the checkpoint says. Raises LoadError for what is not known here, or does not fit `target`."""
    dialect = detect(checkpoint.config)
    if dialect is None:
        raise LoadError(f"{checkpoint.folder} is not a DFlash drafter of a known dialect ({', '.join(DIALECTS.values())})")
    part, own, key = checkpoint, checkpoint, "target_layer_ids"
    if dialect in NESTED:
        _refuse_unknown(checkpoint, NESTED_KEYS | SAYS_NOTHING, ignore)
        part = replace(checkpoint, config=checkpoint.value("transformer_layer_config", dict))
        key = "aux_hidden_state_layer_ids"
    elif dialect == "z-lab":
        own = replace(checkpoint, config=checkpoint.value("dflash_config", dict))
        _refuse_unknown(own, DFLASH_CONFIG_KEYS, ignore, "dflash_config.")
    config = _layer_config(part, ignore, "transformer_layer_config." if dialect in NESTED else "")
    if config.hidden_size != target.hidden_size:
        raise LoadError(
            f"{checkpoint.folder}: the drafter is {config.hidden_size} wide and {target.name} is {target.hidden_size}: it was made for another "
            "target"
        )
    size = own.value("block_size", int, None) or checkpoint.value("block_size", int)
    if size < 2:
        raise LoadError(f"{checkpoint.folder}: block_size must be 2 or more; got {size}")
    return Recipe(
        DIALECTS[dialect],
        config,
        _layers(own, key, dialect, target, config.num_hidden_layers, layers),
        own.value("mask_token_id", int),
        size,
        checkpoint.value("sample_from_anchor", bool, False),
        *(("encoder.fc", "encoder.output_norm_enc") if dialect == "transformers" else ()),
    )


def _layers(
    own: Checkpoint, key: str, dialect: str, target: Target, drafter_layers: int, given: tuple[int, ...] | None
) -> tuple[LayerKey, ...]:
    total, hint = target.n_layers, "give the right ones: -o layers=..."
    numbers = own.value(key, list, None)
    if given is None and numbers is None:
        if dialect in NESTED:
            raise LoadError(f"{own.folder} does not say which layers of the target it reads ({key}); give them: -o layers=...")
        n, last = drafter_layers, max(total - 3, 1)
        numbers = [total // 2] if n == 1 else [round(1 + i * (last - 1) / (n - 1)) for i in range(n)]
    if wrong := [k for k in numbers or () if not isinstance(k, int) or isinstance(k, bool)]:
        raise LoadError(f"{own.folder}: {key} must hold layer numbers; got {wrong[0]!r}")
    entries = list(given) if given is not None else [k + (dialect not in NESTED) for k in numbers or ()]
    if not entries or any(not 0 <= k <= total for k in entries):
        raise LoadError(f"{own.folder}: it reads layers {entries} of the target, but {target.name} has {total}; {hint}")
    if given is None and dialect not in NESTED:  # they read transformers' list of states, whose last is normed
        return tuple("final" if k == total else k for k in entries)
    return tuple(entries)


def _layer_config(part: Checkpoint, ignore: str | None, where: str) -> Any:
    from transformers import AutoConfig

    known = set(AutoConfig.for_model("qwen3").to_dict())
    _refuse_unknown(part, known | SAYS_NOTHING | OWN_KEYS, ignore, where)
    kinds = part.value("layer_types", list, [])
    if any(kind != "full_attention" for kind in kinds) or part.config.get("use_sliding_window"):
        raise LoadError(f"{part.folder}: layers with a sliding window are not supported in DFlash drafters")
    dropped = (OWN_KEYS - {"layer_types"}) | {"architectures", "auto_map", "model_type", "torch_dtype", "dtype", "vocab_size"}
    values = {name: value for name, value in part.config.items() if name not in dropped}
    values |= {"vocab_size": 8, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}  # its embeddings are not used
    try:
        return AutoConfig.for_model("qwen3", **values)
    except Exception as error:  # transformers' configs have checks of many kinds
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise LoadError(f"{part.folder}: config.json is no config of Qwen3 layers: {first}") from error


def _refuse_unknown(part: Checkpoint, known: frozenset[str] | set[str], ignore: str | None, where: str = "") -> None:
    ignored = {key.strip() for key in (ignore or "").split(",")}
    for key, value in part.config.items():
        if key not in known and where + key not in ignored and value not in (None, False, [], {}):
            raise LoadError(
                f"{part.folder}: config.json has {where}{key} = {value!r}, which is not known here and may change the maths; if it "
                f"does not: -o ignore={where}{key}"
            )
