"""Traces of real decodings with tiny models, as the commands write them: chains, trees, every accept rule, a text cut short."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tiny import tiny_folder
from typer.testing import CliRunner

from outrider.cli import app

PROMPT = "The bridge over the river will be closed for the cars, and the bridge over the river will be open."
SAMPLED = ("--temperature", "1", "-o", "min_probability=0", "--seed", "5")
TREE = ("-o", "shape=tree", "--draft", "10")


@functools.cache
def folder() -> Path:
    path = Path(tempfile.mkdtemp(prefix="outrider-traces-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def call(*args: Any) -> str:
    """What a command prints."""
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exit_code == 0, result.output
    return result.stdout


def target() -> str:
    return str(tiny_folder(eos=None, sharpness=1.5))


def small() -> str:
    """A drafter that often agrees with the target, and often not."""
    return str(tiny_folder(eos=None, sharpness=1.2))


CASES: dict[str, tuple[str, ...]] = {
    "plain": ("-d", "none"),
    "suffix": ("-d", "suffix", "--draft", "8"),
    "lookup": ("-d", "lookup", "--draft", "5"),
    "block": ("-d", "SMALL", "--draft", "5", *SAMPLED, "--accept", "block", "--logprobs", "3"),
    "rejection": ("-d", "SMALL", "--draft", "5", *SAMPLED, "--accept", "rejection"),
    "traversal": ("-d", "SMALL", *TREE, *SAMPLED, "-o", "growth=sampled", "--accept", "traversal"),
    "siblings": ("-d", "SMALL", *TREE, *SAMPLED, "-o", "growth=sampled", "--accept", "rejection"),
    "chosen": ("-d", "SMALL", *TREE, *SAMPLED, "--accept", "rejection"),
    "coupled": ("-d", "SMALL", *TREE, *SAMPLED),
    "typical": ("-d", "SMALL", *TREE, *SAMPLED, "--accept", "typical"),
}


@functools.cache
def trace(name: str) -> Path:
    """The file of one of CASES, of "bench" (two prompts, two drafters, twice) or of "cut" (a stop text within a draft)."""
    path = folder() / f"{name}.jsonl"
    common = ("-t", target(), "--max-tokens", "48", "--trace", path)
    if name == "bench":
        prompts = folder() / "prompts.txt"
        prompts.write_text("The river of the bridge, the river of the bridge.\nPlease bring a pen, please bring a pen.\n")
        call("bench", *common, "-d", "suffix", "-d", "lookup", "--draft", "4", "--repeat", "2", "--prompts", prompts)
    elif name == "cut":
        text = call("run", "-t", target(), "--max-tokens", "48", "-d", "none", PROMPT)
        call("run", *common, "-d", "prediction", "--prediction", text, "--stop", text[12:15], PROMPT)
    else:
        call("run", *common, *(small() if word == "SMALL" else word for word in CASES[name]), PROMPT)
    return path


def lines(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header and rounds of a trace, as JSON has them."""
    header, *rounds = (json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line)
    return header, rounds
