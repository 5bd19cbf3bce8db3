"""EAGLE heads written in the dialects that `eagle_formats` reads, by the same tables.

A head is first brought into no dialect: the decoder layer's config with all defaults filled in, layers of the target by entry, tensors by
the names that `eagle_head` asks for. From there it is written, so that a head that comes back from another format gives the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

import torch
from torch import Tensor

from ..errors import ParameterError
from ..gguf_file import open_gguf
from ..targets.described import DescribedTarget
from ..targets.gguf import is_gguf
from . import eagle_gguf
from .checkpoint import Checkpoint, write_folder
from .eagle import EagleOptions, open_checkpoint, read_head
from .eagle_formats import DIALECTS, SAYS_NOTHING, Recipe, default_layers
from .eagle_head import EagleHead

LAYER_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "rms_norm_eps",
    "hidden_act",
    "max_position_embeddings",
)
"""Of the decoder layer's config, what is always written."""
SPECULATORS_VERSION = "0.9.0"
"""Of the speculators library whose format this is."""
FAMILIES = {"speculators": ("llama", "qwen3")}
"""Families of decoder layers that an engine has, where it is more than Llama's."""
ROTATIONS = {"safeailab": ("default", "linear", "dynamic"), "gguf": ("default", "linear", "llama3")}
"""Kinds of rotation that an engine knows, where it is not all of transformers'."""
SHOWN = {
    "safeailab": "SafeAILab's code",
    "specforge": "SGLang",
    "speculators": "vLLM's and speculators' code",
    "gguf": "llama.cpp",
}


@dataclass(frozen=True)
class BareHead:
    """A head in no dialect.

    layer: config of its decoder layers by `LAYER_KEYS`, with a `vocab_size` that is the target's and `rope_parameters`. more: what else
    that config says, other than by default. tensors: as stored.
    """

    recipe: Recipe
    layer: dict[str, Any]
    more: dict[str, Any]
    tensors: dict[str, Tensor]
    target: DescribedTarget

    @property
    def draft_vocabulary(self) -> int | None:
        """None where the output matrix is the target's."""
        return len(self.tensors["lm_head.weight"]) if "lm_head.weight" in self.tensors else None

    @property
    def states(self) -> tuple[int, ...]:
        return tuple(key for key in self.recipe.layers if isinstance(key, int))

    @property
    def is_default(self) -> bool:
        """Whether it reads the states that every dialect means by naming none."""
        return list(self.states) == default_layers(self.target.n_layers)


def read(source: str, target: DescribedTarget, options: EagleOptions) -> BareHead:
    """The head in a folder, a GGUF file or on the hub. Raises LoadError and ParameterError as for drafting."""
    checkpoint = open_checkpoint(source)
    head = read_head(checkpoint, target, options)
    recipe = head.recipe
    names = sorted(name for name in checkpoint.taken if name in checkpoint and not name.endswith("rotary_emb.inv_freq"))
    tensors = {}
    for name in names:
        bare = name.removeprefix(recipe.prefix)
        tensors[name if bare == name else f"layers.0.{bare}"] = checkpoint.tensors[name].load()
    if head.lm_head is not None:
        tensors["lm_head.weight"] = head.lm_head.weight.data  # also where it is tied to the head's own embeddings
    if "d2t" in tensors:
        tensors["d2t"] = tensors["d2t"].long()
        tensors["t2d"] = _known(head, checkpoint, tensors, target)
    layer = {key: getattr(recipe.config, key) for key in LAYER_KEYS}
    layer |= {
        "vocab_size": _vocabulary(tensors, target),
        "rope_parameters": dict(sorted(recipe.config.rope_parameters.items())),
    }
    usual = type(recipe.config)().to_dict()
    said = {key: value for key, value in recipe.config.to_diff_dict().items() if key not in {*SAYS_NOTHING, *layer}}
    more = {key: value for key, value in said.items() if value != usual.get(key)}
    return BareHead(recipe, layer, more, dict(sorted(tensors.items())), target)


def _vocabulary(tensors: dict[str, Tensor], target: DescribedTarget) -> int:
    """How many tokens the target has in the head's eyes, padding included."""
    for name in ("t2d", "embed_tokens.weight", *(["lm_head.weight"] if "d2t" not in tensors else [])):
        if name in tensors:
            return len(tensors[name])
    return target.vocab_size


def _known(head: EagleHead, checkpoint: Checkpoint, tensors: dict[str, Tensor], target: DescribedTarget) -> Tensor:
    """``t2d``: which tokens the head has. llama.cpp's files have none."""
    if "t2d" in tensors:
        return tensors["t2d"]
    size = len(tensors["embed_tokens.weight"]) if "embed_tokens.weight" in tensors else target.vocab_size
    said = checkpoint.config.get("transformer_layer_config", checkpoint.config).get("vocab_size") or 0
    known = torch.zeros(max(size, said), dtype=torch.bool)
    known[tensors["d2t"] + torch.arange(len(tensors["d2t"]))] = True
    return known


# ---- what has no place -----------------------------------------------------------------------------------------------------


def refuse(head: BareHead, form: str) -> None:
    """Raise ParameterError for the first thing that this format, or the code that reads it elsewhere, has no place for."""
    if head.recipe.dialect == "eagle":
        if form != "safeailab":
            raise ParameterError(
                f"{DIALECTS['eagle'].title} heads cannot be written as {form}, which is a format of EAGLE-3; the only one for them is "
                "safeailab"
            )
        return
    for problem in _problems(head, form):
        raise ParameterError(f"cannot be written as {form}: {problem}")


def _problems(head: BareHead, form: str) -> Iterator[str]:
    recipe, layer, engine = head.recipe, head.layer, SHOWN[form]
    families = FAMILIES.get(form, ("llama",))
    if layer["model_type"] not in families:
        yield f"its decoder layer is of the family {layer['model_type']!r}; {engine} has {' and '.join(families)} alone"
    if layer["num_hidden_layers"] != 1 and form != "speculators":
        yield f"it has {layer['num_hidden_layers']} decoder layers; {engine} has one"
    if head.more and form != "speculators":
        key, value = next(iter(head.more.items()))
        yield f"its layer's config has {key} = {value!r}, which {engine} would ignore"
    for name, flag, places in (
        ("norm_before_residual", recipe.norm_before_residual, ("speculators", "gguf")),
        ("norm_output", recipe.norm_output, ("specforge", "speculators")),
        ("fc_norm", recipe.fc_norm, ("specforge", "speculators")),
        ("norm_before_fc", recipe.input_norm, ("specforge", "speculators", "gguf")),
        ("bias of fc", recipe.fc_bias, ("safeailab", "specforge")),
    ):
        if flag and form not in places:
            yield f"it has {name}, which {engine} would ignore"
    rotation = layer["rope_parameters"].get("rope_type", "default")
    if rotation not in ROTATIONS.get(form, (rotation,)):
        yield f"its rotation is of the kind {rotation!r}, which {engine} does not have"
    if "rope_factors" in head.tensors and form != "gguf":
        yield "its file says by factors alone how its rotation is stretched, and not which kind that is"
    if head.draft_vocabulary is None and form in ("safeailab", "speculators"):
        yield f"it has no output matrix of its own, and {engine} does not take the target's"
    yield from _layer_problems(head, form)
    if form == "gguf":
        yield from _gguf_problems(head)


def _layer_problems(head: BareHead, form: str) -> Iterator[str]:
    states = head.states
    if form == "safeailab" and not head.is_default:
        yield f"it reads layers {_list(states)}; SafeAILab's code reads {_list(default_layers(head.target.n_layers))} of this target alone"
    if form == "gguf" and len(states) != 3:
        yield f"it reads {len(states)} layers of the target; llama.cpp takes three"
    if form == "specforge" and 0 in states and head.target.n_layers not in states:
        yield "it reads the embeddings (layer 0), which SGLang's numbers of outputs cannot name"


def _gguf_problems(head: BareHead) -> Iterator[str]:
    target = head.target
    if not is_gguf(target.name):
        yield f"the target must be given as its GGUF file (-t FILE.gguf): its vocabulary goes along; got {target.name}"
    if head.layer["hidden_act"] != "silu":
        yield f"its activation is {head.layer['hidden_act']!r}; llama.cpp has silu"
    if "d2t" in head.tensors:
        most = int((head.tensors["d2t"] + torch.arange(len(head.tensors["d2t"]))).max())
        if most >= target.vocab_size:
            yield f"it drafts token {most}, and {target.name} has {target.vocab_size} tokens"
    for name in head.tensors:
        if name not in eagle_gguf.NAMES and name != "t2d":
            yield f"tensor {name} has no name there"


def _list(numbers: Any) -> str:
    return ", ".join(map(str, numbers))


# ---- writing ---------------------------------------------------------------------------------------------------------------


def write(head: BareHead, form: str, place: Path) -> None:
    """Write a head that `refuse` lets pass: a folder, or the file of ``gguf``. Raises OSError."""
    if form == "gguf":
        _write_gguf(head, place)
        return
    dialect = "eagle" if head.recipe.dialect == "eagle" else form
    first = DIALECTS[dialect].first
    tensors = {
        first + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name: values
        for name, values in head.tensors.items()
    }
    config = _speculators_config(head) if form == "speculators" else _flat_config(head, dialect)
    write_folder(place, config, dict(sorted(tensors.items())))


def _flat_config(head: BareHead, dialect: str) -> dict[str, Any]:
    """Of the dialects in which the layer's config and the head's are one."""
    recipe, layer = head.recipe, dict(head.layer)
    rope = layer.pop("rope_parameters")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if dialect == "specforge" else "LlamaForCausalLM"],
        **layer,
        "rope_theta": rope["rope_theta"],
        "tie_word_embeddings": False,
        "torch_dtype": _type(head),
        "bias": recipe.fc_bias,
    }
    if rope.get("rope_type", "default") != "default":
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        config["rope_scaling"] = {**scaling, "type": rope["rope_type"]}
    if dialect == "eagle":
        return {**config, **head.more}
    config["draft_vocab_size"] = head.draft_vocabulary
    wide = head.tensors["fc.weight"].shape[1] // len(head.states)
    if wide != layer["hidden_size"]:
        config["target_hidden_size"] = wide
    if dialect == "specforge":
        flags = {"norm_output": recipe.norm_output, "fc_norm": recipe.fc_norm, "norm_before_fc": recipe.input_norm}
        config |= {name: True for name, flag in flags.items() if flag}
        if not head.is_default:
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": _outputs(head), "use_aux_hidden_state": True}
    return config


def _outputs(head: BareHead) -> list[int]:
    """The layers whose outputs are the states; entries where the last state is among them (`eagle_formats`)."""
    return list(head.states) if head.target.n_layers in head.states else [k - 1 for k in head.states]


def _speculators_config(head: BareHead) -> dict[str, Any]:
    recipe, target = head.recipe, head.target
    name = None if is_gguf(target.name) else target.name  # those who read it take configs of transformers alone
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": name, "architectures": target.architectures},
        },
        "transformer_layer_config": {**head.layer, **head.more},
        "draft_vocab_size": head.draft_vocabulary,
        "target_hidden_size": head.tensors["fc.weight"].shape[1] // len(head.states),
        "eagle_aux_hidden_state_layer_ids": list(head.states),
        "norm_before_residual": recipe.norm_before_residual,
        "norm_before_fc": recipe.input_norm,
        "fc_norm": recipe.fc_norm,
        "norm_output": recipe.norm_output,
        "tie_word_embeddings": False,
        "dtype": _type(head),
    }


def _type(head: BareHead) -> str:
    return str(head.tensors["fc.weight"].dtype).removeprefix("torch.")


def _write_gguf(head: BareHead, place: Path) -> None:
    recipe = head.recipe
    tensors = {name: values for name, values in head.tensors.items() if name != "t2d"}
    if head.layer["rope_parameters"].get("rope_type", "default") != "default":
        tensors["rope_factors"] = _rope_factors(recipe.config)
    flags = {"norm_before_residual": recipe.norm_before_residual, "norm_before_fc": recipe.input_norm}
    eagle_gguf.write(place, head.layer, head.states, flags, tensors, open_gguf(head.target.name))


def _rope_factors(config: Any) -> Tensor:
    """How much slower each frequency turns than without stretching, ``[head_dim / 2]``."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope_parameters
    turns, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    plain = 1.0 / (rope["rope_theta"] ** (torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim))
    return plain / turns
