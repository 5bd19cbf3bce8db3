"""Prompts for training data: read from files of the usual shapes, or the prefix after which a target makes its own (Magpie)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Mapping

from ..errors import ParameterError
from ..targets.base import Target
from ..text import Message

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
SHAPES = "prompt, question, instruction (with input), text, turns, messages, conversations"
MARK = "\u2402outrider\u2403"


def read_conversations(path: str | Path) -> list[list[Message]]:
    """The conversations of a JSONL file, each up to the last turn of its user; what was answered to that is the target's to say.

    A line is a text or an object with one of: ``prompt``, ``question``, ``text``; ``instruction`` and perhaps ``input`` (Alpaca);
    ``turns`` (the first counts, as in Spec-Bench); ``messages`` (role, content); ``conversations`` (from, value; ShareGPT).
    Raises ParameterError that names file and line for anything else.
    """
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ParameterError(f"cannot read the prompts {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ParameterError(f"the prompts {path} are not UTF-8 text") from error
    found = [_conversation(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ParameterError(f"{path} has no prompts")
    return found


def _conversation(line: str, where: str) -> list[Message]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ParameterError(f"{where}: not JSON ({error})") from error
    messages: list[Message] = [{"role": "user", "content": value}] if isinstance(value, str) else _messages(value)
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages or not all(isinstance(m["content"], str) and m["content"].strip() for m in messages):
        raise ParameterError(f"{where}: no prompt of a known shape ({SHAPES})")
    return messages


def _messages(value: Any) -> list[Message]:
    """Turns of one object, unchecked; empty for a shape that is not known."""
    if not isinstance(value, Mapping):
        return []
    for name, role, content in (("messages", "role", "content"), ("conversations", "from", "value")):
        turns = value.get(name)
        if isinstance(turns, list):
            known = [t for t in turns if isinstance(t, Mapping) and t.get(role) in ROLES]
            return [{"role": ROLES[t[role]], "content": t.get(content)} for t in known] if len(known) == len(turns) else []
    if isinstance(turns := value.get("turns"), list) and turns:
        return [{"role": "user", "content": turns[0]}]
    if isinstance(text := value.get("instruction"), str):
        more = value.get("input")
        return [{"role": "user", "content": f"{text}\n\n{more}" if isinstance(more, str) and more.strip() else text}]
    text = next((value[name] for name in ("prompt", "question", "text") if value.get(name)), None)
    return [{"role": "user", "content": text}]


def user_prefix(target: Target) -> list[int]:
    """Ids of the chat template up to where the user's first words stand. Raises ParameterError for a target without a template.

    What a model that was tuned on conversations says after it is what a user might have asked (Magpie, Xu et al. 2024).
    """
    if target.tokenizer is None:
        raise ParameterError(f"{target.name} has no tokenizer, so no chat template: it cannot make prompts of its own")
    marked = target.tokenizer.chat([{"role": "user", "content": MARK}])
    mark = target.tokenizer.encode_plain(MARK)
    for start in range(len(marked) - len(mark), -1, -1):
        if marked[start : start + len(mark)] == mark:
            return marked[:start]
    raise ParameterError(
        f"the chat template of {target.name} does not leave the user's words as they are; give prompts in a file"
    )
