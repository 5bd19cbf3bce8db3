"""Frozen dataclasses filled from names and values, as ``-o name=value`` on the command line gives them."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Mapping, TypeVar

from .errors import ParameterError

T = TypeVar("T")


def fill(cls: type[T], values: Mapping[str, Any], owner: str, kind: str) -> T:
    """A `cls` with these values; strings become what the field's type says. Raises ParameterError for a name it has not got.

    owner, kind: what has the fields and what they are called, for messages.
    """
    hints = typing.get_type_hints(cls)
    known = {f.name: hints[f.name] for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    made = {}
    for name, value in values.items():
        if name not in known:
            allowed = f"it has {', '.join(known)}" if known else "it has none"
            raise ParameterError(f"{owner} has no {kind} {name!r}; {allowed}")
        made[name] = _convert(f"{kind} {name}", value, known[name])
    return cls(**made)


def _convert(what: str, value: Any, wanted: Any) -> Any:
    optional = typing.get_origin(wanted) in (types.UnionType, typing.Union)
    (kind,) = [t for t in typing.get_args(wanted) if t is not type(None)] if optional else [wanted]
    if value is None and optional:
        return None
    origin = typing.get_origin(kind) or kind
    try:
        if not isinstance(value, str) or origin is str:
            return float(value) if origin is float else value
        if origin is bool:
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[value.lower()]
        if origin is tuple:
            return tuple(_item(part, typing.get_args(kind)[0]) for part in value.replace(",", " ").split())
        return origin(value)
    except (KeyError, ValueError, TypeError):
        raise ParameterError(f"{what} must be {origin.__name__}; got {value!r}") from None


def _item(text: str, kind: Any) -> Any:
    """One item of a list: a number, a text, or several numbers joined by dots."""
    return tuple(int(part) for part in text.split(".")) if typing.get_origin(kind) is tuple else kind(text)
