"""The planner against measurement on this machine: predicted first, then measured, in the same run.

    python benchmarks/planner.py record TARGET DRAFTER --file acceptance.jsonl [--lengths 2,4,8] [--tokens 48] [--number 4]
    python benchmarks/planner.py check TARGET DRAFTER --file acceptance.jsonl [--batches 1,2,4] [--repeats 1] --name NAME

`record` decodes the prompts once with drafts of the largest length and writes each sequence's verdicts, no times: that is the acceptance.
`check` goes through all draft lengths and batch sizes. For each it measures the machine (`plan.here`, which knows nothing of the models),
predicts from that and the recorded acceptance, and only then measures. The machine is measured anew each time because what its memory
delivers may change from minute to minute. Greedy; DRAFTER is a model, a head, `suffix` or `lookup`; models and heads draft to the full
length. Runs with the same name add up; predicted and measured are medians over them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from common import RESULTS, prompts, save

import outrider
from outrider.drafters import Drafter, load_drafter
from outrider.plan import acceptance, predict, replay, shapes
from outrider.plan.here import Gauge
from outrider.plan.passes import Placement
from outrider.targets.transformers import TransformersTarget
from outrider.trace import TraceWriter, read_trace

GAUGED = 2
"""Repeats of the machine's measurement before each cell."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("record", "check"))
    parser.add_argument("target")
    parser.add_argument("drafter")
    parser.add_argument("--file", required=True)
    parser.add_argument("--lengths", default="2,4,8")
    parser.add_argument("--batches", default="1,2,4")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--number", type=int, default=4, help="of prompts")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--name", default="planner")
    arguments = parser.parse_args()
    lengths = [int(n) for n in arguments.lengths.split(",")]
    target = TransformersTarget.load(arguments.target)
    drafter = load_drafter(arguments.drafter, target, {"min_probability": 0.0} if is_model(arguments.drafter) else {})
    assert target.tokenizer is not None
    chat = [target.tokenizer.chat([{"role": "user", "content": text}]) for text in prompts(None, (), arguments.number)]
    if arguments.mode == "record":
        record(target, drafter, chat, max(lengths), arguments)
    else:
        check(target, drafter, chat, lengths, arguments)


def is_model(name: str) -> bool:
    return name not in ("suffix", "lookup")


def record(
    target: TransformersTarget, drafter: Drafter, chat: list[list[int]], length: int, arguments: argparse.Namespace
) -> None:
    with TraceWriter(arguments.file, {}) as trace:
        for r in outrider.Engine(target, drafter, length).generate(chat, max_tokens=arguments.tokens, ignore_eos=True):
            for round in r.rounds:
                trace.write(dataclasses.replace(round, times=outrider.trace.Times()))
    print(f"wrote {arguments.file}")


def check(
    target: TransformersTarget, drafter: Drafter, chat: list[list[int]], lengths: list[int], arguments: argparse.Namespace
) -> None:
    verdicts = replay.Replay(read_trace(arguments.file)[1])
    if len(verdicts.sequences) != len(chat):
        raise SystemExit(f"{arguments.file} has {len(verdicts.sequences)} prompts; record as many as are measured (--number)")
    shape, own = shapes.read_shape(arguments.target), is_model(arguments.drafter)
    batches = [int(n) for n in arguments.batches.split(",")]
    cells = [(length, batch) for batch in batches for length in (0, *lengths)]
    path = RESULTS / f"{arguments.name}.json"
    known: list[dict[str, Any]] = json.loads(path.read_text())["cells"] if path.exists() else []
    found = {(c["draft"], c["batch"]): c for c in known}
    gauge = Gauge()
    setting = predict.Setting(
        target=shape,
        drafter=predict.Drafter(drafter.name, shapes.read_shape(arguments.drafter) if own else None),
        hardware=gauge.measure(),
        place=Placement(),
        drafter_on_gpu=False,
        context=round(statistics.mean(map(len, chat)) + arguments.tokens / 2),
    )
    measured_speed(target, drafter, chat[: max(batches)], 12, max(lengths), max(batches))
    for _ in range(arguments.repeats):
        for length, batch in cells:
            setting = dataclasses.replace(setting, hardware=gauge.measure(GAUGED))
            cell = found.setdefault((length, batch), {"draft": length, "batch": batch, "predicted": [], "measured": []})
            cell["predicted"].append(predicted_speed(setting, verdicts, length, batch))
            print(f"draft {length} batch {batch}: predicted {cell['predicted'][-1]:.2f}", end=", ", flush=True)
            cell["measured"].append(measured_speed(target, drafter, chat, arguments.tokens, length, batch))
            print(f"measured {cell['measured'][-1]:.2f} tokens/s", flush=True)
    for cell in found.values():
        mine, true = statistics.median(cell["predicted"]), statistics.median(cell["measured"])
        cell["error"] = mine / true - 1
        print(f"draft {cell['draft']} batch {cell['batch']}: predicted {mine:.2f}, measured {true:.2f}, {cell['error']:+.1%}")
    save(
        arguments.name,
        {
            "target": Path(arguments.target).name,
            "drafter": Path(arguments.drafter).name,
            "prompts": len(chat),
            "tokens": arguments.tokens,
            "last_hardware": setting.hardware.as_dict(),
            "worst": max(abs(cell["error"]) for cell in found.values()),
            "cells": list(found.values()),
        },
    )


def predicted_speed(setting: predict.Setting, verdicts: replay.Replay, length: int, batch: int) -> float:
    """Tokens per second of all prompts, decoded `batch` at a time: as sequences end, fewer are left in the passes."""
    draft = acceptance.Draft.chain(length)
    seconds = 0.0
    for at in range(0, len(verdicts.sequences), batch):
        walks = [verdicts.walk(positions, draft) for positions in verdicts.sequences[at : at + batch]]
        lasting = sorted(rounds for rounds, _, _ in walks)
        nodes = sum(nodes for _, nodes, _ in walks) / sum(rounds for rounds, _, _ in walks)
        before = 0.0
        for i, rounds in enumerate(lasting):
            active = len(lasting) - i
            seconds += (rounds - before) * predict.round_seconds(setting, draft, active, nodes)
            before = rounds
    return sum(map(len, verdicts.sequences)) / seconds


def measured_speed(
    target: TransformersTarget, drafter: Drafter, chat: list[list[int]], tokens: int, length: int, batch: int
) -> float:
    engine = outrider.Engine(target, drafter if length else outrider.drafters.NoDrafter(), length)
    seconds = emitted = 0.0
    for at in range(0, len(chat), batch):
        for result in engine.generate(chat[at : at + batch], max_tokens=tokens, ignore_eos=True):
            seconds += result.stats.total_seconds
            emitted += result.stats.emitted
    return emitted / seconds


if __name__ == "__main__":
    main()
