"""Prompts to measure with: built in, or from a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ParameterError


@dataclass(frozen=True)
class Prompt:
    """A user's message, with the kind of work that it is."""

    text: str
    category: str = ""


def read_prompts(path: str) -> list[Prompt]:
    """Prompts of a file: JSON lines with ``prompt`` or ``turns`` (the first counts) and perhaps ``category``, as
    Spec-Bench has them, when its name ends in .jsonl; else a text, a prompt in each line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ParameterError(f"cannot read the prompts {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ParameterError(f"the prompts {path} are not UTF-8 text") from error
    filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not filled:
        raise ParameterError(f"{path} has no prompts")
    if not path.endswith(".jsonl"):
        return [Prompt(line.strip()) for _, line in filled]
    return [_from_json(line, f"{path}, line {number}") for number, line in filled]


def _from_json(line: str, where: str) -> Prompt:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise ParameterError(f"{where}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ParameterError(f"{where}: not an object with 'prompt' or 'turns'")
    turns = value.get("turns")
    text = turns[0] if isinstance(turns, list) and turns else value.get("prompt")
    if not isinstance(text, str) or not text.strip():
        raise ParameterError(f"{where}: neither a 'prompt' nor 'turns' with a text")
    return Prompt(text, str(value.get("category") or ""))
