"""What is written about a run: a line of JSON for each figure, the drafter's own files, a model card, a plot."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import IO, Any, Sequence

from .. import machine
from ..errors import LoadError
from ..files import to_json
from .trainee import Trainee

LOG = "log.jsonl"


class Record:
    """The run's figures, as they come."""

    def __init__(self, folder: Path, step: int | None):
        """step: where the run goes on; lines of later steps are dropped. None: it begins, and what was there is replaced."""
        self.path = folder / LOG
        lines = [] if step is None else [line for line in read_log(folder) if line["step"] <= step]
        self.last: dict[str, Any] = {}
        for line in lines:
            self.last |= line
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = open(self.path, "w", encoding="utf-8")  # noqa: SIM115 (open as long as the run)
            self._file.writelines(to_json(line) + "\n" for line in lines)
            self._file.flush()
        except OSError as error:
            raise LoadError(f"cannot write {self.path}: {error.strerror}") from error

    def add(self, line: dict[str, Any]) -> str:
        """Write it; returns it in words."""
        self.last |= line
        try:
            self._file.write(to_json(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise LoadError(f"cannot write {self.path}: {error.strerror}; the run's last checkpoint is whole") from error
        return in_words(line)


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log; a line that was not finished is left out."""
    path = folder / LOG
    found = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
            try:
                found.append(json.loads(line))
            except ValueError:
                break
    return found


def in_words(line: dict[str, Any]) -> str:
    parts = [f"step {line['step']} of {line['of']}"]
    for name, title in (("train", "loss"), ("held_out", "held out: loss")):
        if name in line:
            part = line[name]
            rates = " ".join(f"{rate:.0%}" for rate in part["acceptance"])
            parts.append(
                f"{title} {part['loss']:.3f}, right {rates}, which implies {part['implied_length']:.2f} tokens per pass"
            )
    if "measured" in line:
        part = line["measured"]
        rate = part["acceptance_rate"]
        kept = "nothing drafted" if rate is None else f"{rate:.0%} of the drafts accepted"
        parts.append(f"measured: {part['acceptance_length']:.2f} tokens per pass on {part['prompts']} prompts, {kept}")
    if line.get("left_s"):
        parts.append(f"{line['left_s'] // 60} min left")
    return "; ".join(parts)


def write_drafter(trainee: Trainee, folder: Path) -> None:
    """The drafter's files, each whole or as it was. Raises LoadError when there is no room."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".drafter-") as scratch:
            trainee.write(Path(scratch))
            for file in Path(scratch).iterdir():
                os.replace(file, folder / file.name)
    except LoadError:
        raise
    except Exception as error:  # safetensors has errors of its own for a full disk
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise LoadError(f"cannot write the drafter to {folder}: {reason}; what was there before is whole") from error


def write_card(folder: Path, facts: dict[str, Any], figures: dict[str, Any], data: dict[str, Any]) -> None:
    """README.md beside the drafter: what it is, how it was made, what it reached."""
    versions = ", ".join(f"{name} {number}" for name, number in machine.versions().items())
    lines = [
        f"# {facts['kind']} drafter for {facts['target']}",
        "",
        f"Trained with Outrider. It drafts for {facts['target']} and for no other model: `outrider run -t {facts['target']} -d FOLDER`.",
        "",
        f"- command: `{' '.join(machine.manifest()['command'])}`",
        f"- versions: {versions}",
        f"- steps: {figures.get('step')} of {figures.get('of')}, {facts['global_batch']} samples each",
        *(f"- {name}: {value}" for name, value in facts["trainee"].items()),
        *(f"- option {name}: {value}" for name, value in facts["options"].items() if value is not None),
        "",
        "## Data",
        "",
        f"{data['samples']} samples, {data['tokens']} tokens, {data['answer_tokens']} of them the target's answers; sources: "
        + ", ".join(f"{name} {count}" for name, count in data["sources"].items())
        + ".",
        "",
        "## Figures",
        "",
    ]
    for name, title in (("train", "training text"), ("held_out", "held-out text")):
        if part := figures.get(name):
            rates = ", ".join(f"{rate:.3f}" for rate in part["acceptance"])
            lines.append(
                f"- {title}: loss {part['loss']:.3f}; right by step {rates}; implied acceptance length {part['implied_length']:.3f}"
            )
    if part := figures.get("measured"):
        lines.append(
            f"- measured by the engine, greedy, {part['prompts']} prompts, at most {part['draft']} drafted tokens: acceptance length "
            f"{part['acceptance_length']:.3f} ({part['emitted']} tokens / {part['passes']} passes)"
        )
    try:
        (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise LoadError(f"cannot write {folder / 'README.md'}: {error.strerror}") from error


def draw(lines: Sequence[dict[str, Any]], path: Path) -> bool:
    """A picture of loss and acceptance length over steps; False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for name, title in (("train", "training text"), ("held_out", "held-out text")):
        chosen = [line for line in lines if name in line]
        steps = [line["step"] for line in chosen]
        left.plot(steps, [line[name]["loss"] for line in chosen], label=title)
        right.plot(steps, [line[name]["implied_length"] for line in chosen], label=f"implied, {title}")
    chosen = [line for line in lines if "measured" in line]
    right.plot(
        [line["step"] for line in chosen], [line["measured"]["acceptance_length"] for line in chosen], "o", label="measured"
    )
    left.set(xlabel="step", ylabel="loss")
    right.set(xlabel="step", ylabel="tokens per pass")
    left.legend()
    right.legend()
    figure.tight_layout()
    try:
        figure.savefig(path)
    except OSError as error:
        raise LoadError(f"cannot write {path}: {error.strerror}") from error
    finally:
        pyplot.close(figure)
    return True
