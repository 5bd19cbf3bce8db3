"""The plan as flags of Outrider, llama.cpp and vLLM."""

from __future__ import annotations

import json
import shlex
from typing import Any

from .predict import Plan

COPYING = {"lookup": "ngram", "suffix": "suffix", "prediction": "ngram"}


def flags(plan: Plan, sequences: int, target: str, drafter: str) -> dict[str, str]:
    """Command lines by engine; target, drafter: as the user named them."""
    draft = plan.best(sequences).draft
    fit = (plan.setting if draft.widths else plan.without).fit(sequences, draft.nodes + 1)
    made = {
        "outrider": _outrider(plan, sequences, target, drafter),
        "llama.cpp": _llama(plan, sequences, target, drafter),
        "vllm": _vllm(plan, target, drafter),
    }
    if not draft.is_chain:
        made["note"] = f"llama.cpp and vLLM draft chains here; the plan is the tree {draft}"
    if not fit.fits:
        made["memory"] = f"does not fit: {fit.problem}"
    return made


def _outrider(plan: Plan, sequences: int, target: str, drafter: str) -> str:
    draft = plan.best(sequences).draft
    if not draft.widths:
        return shlex.join(["outrider", "run", "-t", target, "-d", "none"])
    shape = [] if draft.is_chain else ["-o", "shape=tree"]
    return shlex.join(["outrider", "run", "-t", target, "-d", drafter, "--draft", str(draft.nodes), *shape])


def _llama(plan: Plan, sequences: int, target: str, drafter: str) -> str:
    depth = len(plan.best(sequences).draft.widths)
    setting = plan.setting if depth else plan.without
    n = len(setting.target.layers)
    layers = "99" if setting.place.gpu_layers >= n else str(setting.place.gpu_layers)
    words = ["llama-server", "-m", target, "-c", str(setting.context * sequences), "-ngl", layers]
    if setting.place.cpu_moe:
        words += ["--n-cpu-moe", str(setting.place.cpu_moe)]
    if sequences > 1:
        words += ["-np", str(sequences)]
    if not depth:
        return shlex.join([*words, "--spec-type", "none"])
    if setting.drafter.shape is None:
        return shlex.join([*words, "--spec-type", "ngram-simple", "--spec-draft-n-max", str(depth)])
    words += ["--spec-type", "draft-simple", "-md", drafter, "-ngld", "99" if setting.drafter_on_gpu else "0"]
    return shlex.join([*words, "--spec-draft-n-max", str(depth)])


def _vllm(plan: Plan, target: str, drafter: str) -> str:
    """With a draft length for each range of numbers of sequences."""
    words = ["vllm", "serve", target, "--max-model-len", str(plan.setting.context)]
    lengths = {n: len(plan.best(n).draft.widths) for n in sorted(plan.predictions)}
    if not any(lengths.values()):
        return shlex.join(words)
    spec: dict[str, Any] = {"method": "draft_model", "model": drafter}
    if plan.setting.drafter.shape is None:
        spec = {"method": COPYING.get(plan.setting.drafter.name, "ngram")}
    spec["num_speculative_tokens"] = max(lengths.values())
    numbers = list(lengths)
    ranges = [(n, numbers[i + 1] - 1 if i + 1 < len(numbers) else max(n, 1024), lengths[n]) for i, n in enumerate(numbers)]
    if len(set(lengths.values())) > 1:
        spec["num_speculative_tokens_per_batch_size"] = [(1 if i == 0 else a, b, k) for i, (a, b, k) in enumerate(ranges)]
    return shlex.join([*words, "--speculative-config", json.dumps(spec)])
