"""The planner against measurement on this machine: predicted first, then measured, in the same run.

    python benchmarks/planner.py record TARGET DRAFTER --out acceptance.json [--lengths 2,4,8] [--tokens 48] [--number 4]
    python benchmarks/planner.py check TARGET DRAFTER --acceptance acceptance.json [--batches 1,2,4]

`record` decodes the prompts once with drafts of the largest length and writes each sequence's verdicts, no times: that is the acceptance.
`check` measures this machine (`plan.here`, which knows nothing of the models), predicts each draft length at each batch size from that and the
recorded acceptance, and only then measures it. The machine is measured again for each batch size and repeat, because what its memory
delivers may change from minute to minute. Greedy; DRAFTER is a model or a drafter's name; draft models draft to the full length.
Predicted and measured are the medians of the repeats.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from pathlib import Path

from common import prompts, save

import outrider
from outrider.drafters import Drafter, load_drafter
from outrider.drafters.model import ModelDrafter, ModelOptions
from outrider.plan import acceptance, here, predict, replay, shapes
from outrider.plan.passes import Placement
from outrider.targets.transformers import TransformersTarget
from outrider.trace import TraceWriter, read_trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("record", "check"))
    parser.add_argument("target")
    parser.add_argument("drafter")
    parser.add_argument("--acceptance", "--out", dest="file", required=True)
    parser.add_argument("--lengths", default="2,4,8")
    parser.add_argument("--batches", default="1,2,4")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--number", type=int, default=4, help="of prompts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--name", default="planner")
    arguments = parser.parse_args()
    lengths = [int(n) for n in arguments.lengths.split(",")]
    target = TransformersTarget.load(arguments.target)
    drafter = load(arguments.drafter, target)
    assert target.tokenizer is not None
    chat = [target.tokenizer.chat([{"role": "user", "content": text}]) for text in prompts(None, (), arguments.number)]
    if arguments.mode == "record":
        record(target, drafter, chat, max(lengths), arguments)
    else:
        check(target, drafter, chat, lengths, arguments)


def load(name: str, target: TransformersTarget) -> Drafter:
    if Path(name).exists():
        return ModelDrafter(TransformersTarget.load(name), ModelOptions(min_probability=0.0))
    return load_drafter(name, target)


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
    own = drafter.model if isinstance(drafter, ModelDrafter) else None
    setting = predict.Setting(
        target=shapes.read_shape(arguments.target),
        drafter=predict.Drafter(drafter.name, shapes.read_shape(arguments.drafter) if own else None),
        hardware=here.here(),
        place=Placement(),
        drafter_on_gpu=False,
        context=round(statistics.mean(map(len, chat)) + arguments.tokens / 2),
    )
    batches = [int(n) for n in arguments.batches.split(",")]
    cells = [(length, batch) for batch in batches for length in (0, *lengths)]
    predicted: dict[tuple[int, int], list[float]] = {cell: [] for cell in cells}
    measured: dict[tuple[int, int], list[float]] = {cell: [] for cell in cells}
    for cell in cells:
        measured_speed(target, drafter, chat[: max(batches)], 6, *cell)
    for _ in range(arguments.repeats):
        for batch in batches:
            setting = dataclasses.replace(setting, hardware=here.here())
            for length in (0, *lengths):
                predicted[length, batch].append(predicted_speed(setting, verdicts, length, batch))
                print(f"predicted draft {length} batch {batch}: {predicted[length, batch][-1]:.2f}", end="; ", flush=True)
                measured[length, batch].append(measured_speed(target, drafter, chat, arguments.tokens, length, batch))
                print(f"measured {measured[length, batch][-1]:.2f} tokens/s", flush=True)
    rows = []
    for cell in cells:
        mine, true = statistics.median(predicted[cell]), statistics.median(measured[cell])
        rows.append({"draft": cell[0], "batch": cell[1], "predicted": predicted[cell], "measured": measured[cell]})
        rows[-1]["error"] = mine / true - 1
        print(f"draft {cell[0]} batch {cell[1]}: predicted {mine:.2f}, measured {true:.2f} tokens/s, {mine / true - 1:+.1%}")
    save(
        arguments.name,
        {
            "target": Path(arguments.target).name,
            "drafter": Path(arguments.drafter).name,
            "prompts": len(chat),
            "tokens": arguments.tokens,
            "last_hardware": setting.hardware.as_dict(),
            "worst": max(abs(row["error"]) for row in rows),
            "cells": rows,
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
