"""What drafting with heads costs, as a share of a pass of the target over one row.

Heads with random weights, in bfloat16, of the sizes that are usual for the target: what they say does not matter for what they
cost. Chains, with every level drafted. Usage: ``python benchmarks/head_cost.py TARGET...``
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any, Callable

import torch
from common import save
from safetensors.torch import save_file
from torch import Tensor

from outrider.check import measure
from outrider.drafters import load_drafter
from outrider.models import load_target

HEADS = 3
DRAFT_VOCABULARY = 32000
POOL = (torch.randn(65521) * 0.02).to(torch.bfloat16)
Tensors = dict[str, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--only", default=",".join(MADE), help="kinds of heads, with commas between")
    arguments = parser.parse_args()
    for name in arguments.targets:
        results = []
        target = load_target(name)
        for kind in arguments.only.split(","):
            with tempfile.TemporaryDirectory() as folder:
                config, tensors = MADE[kind](target.model.config.get_text_config(), target.vocab_size)  # type: ignore[attr-defined]
                Path(folder, "config.json").write_text(json.dumps(config))
                save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, Path(folder, "model.safetensors"))
                del tensors
                drafter = load_drafter(folder, target, {"min_probability": 0.0})
            costs = measure(target, drafter, arguments.context)
            del drafter
            row = {"target": Path(name).name, "heads": kind, "pass": costs.rows[1], "first": costs.draft, "further": costs.step}
            row |= {"first_share": costs.draft / costs.rows[1], "further_share": costs.step / costs.rows[1]}
            results.append(row)
            print(
                f"{row['target']:28} {kind:14} pass {row['pass']:7.2f} ms   first drafted token {row['first']:6.2f} ms "
                f"({row['first_share']:6.1%})   each further one {row['further']:6.2f} ms ({row['further_share']:6.1%})",
                flush=True,
            )
        save(f"head_cost-{Path(name).name}", {"context": arguments.context, "heads": HEADS, "rows": results})


def weights(*shape: int) -> Tensor:
    """A few random numbers over and over: drawing them all would take longer than the measurement."""
    n = math.prod(shape)
    return POOL.repeat(n // len(POOL) + 1)[:n].view(shape)


def medusa(config: Any, vocab: int) -> tuple[dict[str, Any], Tensors]:
    width = config.hidden_size
    tensors: Tensors = {}
    for i in range(HEADS):
        tensors |= {f"{i}.0.linear.weight": weights(width, width), f"{i}.0.linear.bias": weights(width)}
        tensors[f"{i}.1.weight"] = weights(vocab, width)
    return {"medusa_num_heads": HEADS, "medusa_num_layers": 1}, tensors


def hydra(config: Any, vocab: int, prefix: bool = False) -> tuple[dict[str, Any], Tensors]:
    width = config.hidden_size
    tensors: Tensors = {}
    block, last = ("1", ".1") if prefix else ("0", "")
    for i in range(HEADS):
        for name in ("linear", "res_connection"):
            tensors |= {f"hydra_mlp.{i}.{block}.{name}.weight": weights(width, (i + 2) * width)}
            tensors |= {f"hydra_mlp.{i}.{block}.{name}.bias": weights(width)}
        tensors |= {f"hydra_lm_head.{i}{last}.weight": weights(vocab, width), f"hydra_lm_head.{i}{last}.bias": weights(vocab)}
    if prefix:
        tensors |= {f"prefix_embeding_layer.layers.0.{name}": x for name, x in layer(config, width).items()}
        tensors["prefix_embeding_layer.norm.weight"] = weights(width)
    return {"hydra_num_heads": HEADS, "hydra_head_arch": "prefix-mlp" if prefix else "mlp"}, tensors


def layer(config: Any, inputs: int, bias: bool = True) -> Tensors:
    """A decoder layer like the target's, its attention reading `inputs` numbers. bias: of q, k and v, if the target's have one."""
    width, inner = config.hidden_size, config.intermediate_size
    size = getattr(config, "head_dim", None) or width // config.num_attention_heads
    rows = {
        "q": config.num_attention_heads * size,
        "k": config.num_key_value_heads * size,
        "v": config.num_key_value_heads * size,
    }
    tensors = {f"self_attn.{name}_proj.weight": weights(n, inputs) for name, n in rows.items()}
    if bias and config.model_type == "qwen2":
        tensors |= {f"self_attn.{name}_proj.bias": weights(n) for name, n in rows.items()}
    tensors |= {"mlp.gate_proj.weight": weights(inner, width), "mlp.up_proj.weight": weights(inner, width)}
    tensors |= {"mlp.down_proj.weight": weights(width, inner), "self_attn.o_proj.weight": weights(width, rows["q"])}
    return tensors | {f"{name}_layernorm.weight": weights(width) for name in ("input", "post_attention")}


def llama_config(config: Any, vocab: int) -> dict[str, Any]:
    names = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
        "max_position_embeddings",
    )
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "vocab_size": vocab} | {
        name: getattr(config, name) for name in names
    }


def eagle(config: Any, vocab: int) -> tuple[dict[str, Any], Tensors]:
    width = config.hidden_size
    tensors = {f"layers.0.{name}": x for name, x in layer(config, width, False).items() if name != "input_layernorm.weight"}
    return {**llama_config(config, vocab), "bias": False}, tensors | {"fc.weight": weights(width, 2 * width)}


def eagle3(config: Any, vocab: int) -> tuple[dict[str, Any], Tensors]:
    width, draft = config.hidden_size, min(DRAFT_VOCABULARY, vocab)
    tensors = {f"midlayer.{name}": x for name, x in layer(config, 2 * width, False).items()}
    tensors |= {"midlayer.hidden_norm.weight": weights(width), "norm.weight": weights(width)}
    tensors |= {"fc.weight": weights(width, 3 * width), "lm_head.weight": weights(draft, width)}
    known = torch.zeros(vocab, dtype=torch.bool)
    known[:draft] = True
    tensors |= {"d2t": torch.zeros(draft, dtype=torch.int64), "t2d": known}
    return {**llama_config(config, vocab), "draft_vocab_size": draft}, tensors


MADE: dict[str, Callable[[Any, int], tuple[dict[str, Any], Tensors]]] = {
    "medusa": medusa,
    "hydra": hydra,
    "hydra-prefix": lambda config, vocab: hydra(config, vocab, True),
    "eagle": eagle,
    "eagle3": eagle3,
}

if __name__ == "__main__":
    main()
