"""JSON schemas made at random, whose values cannot be endless."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("name", "age", "city", "tags", "is_open", "größe", "first name", "id", "note", "level")


def make(seed: int) -> dict[str, Any]:
    """An object schema. Every fourth has a definition that it refers to."""
    rng = random.Random(seed)
    schema = _object(rng, 2)
    if seed % 4 == 0:
        schema["$defs"] = {"shared": _value(rng, 0)}
        schema["properties"]["shared"] = {"$ref": "#/$defs/shared"}
        schema["required"].append("shared")
    return schema


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(1, 3))
    required = [name for name in names if rng.random() < 0.7]
    properties = {name: _value(rng, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["enum", "const", "integer", "boolean", "null", "string", "pattern", "date", "either"]
    kind = rng.choice(kinds + ["object", "array"] * (2 if depth > 0 else 0))
    if kind == "object":
        return _object(rng, depth)
    if kind == "array":
        least = rng.randint(0, 2)
        return {"type": "array", "items": _value(rng, depth - 1), "minItems": least, "maxItems": least + rng.randint(0, 2)}
    if kind == "either":
        return {"anyOf": [{"type": "boolean"}, {"enum": ["unknown", 7]}, {"type": "string", "maxLength": 3}]}
    low = rng.randint(-50, 50)
    return {
        "enum": {"enum": rng.sample(["red", "green", 'a "b"', 3, None, "ä\n", True], 3)},
        "const": {"const": rng.choice(["fixed", 12, False])},
        "integer": {"type": "integer", "minimum": low, "maximum": low + rng.choice((3, 1000))},
        "boolean": {"type": "boolean"},
        "null": {"type": "null"},
        "string": {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(3, 12)},
        "pattern": {"type": "string", "pattern": rng.choice(["^[A-Z]{2}-[0-9]{1,4}$", "^(yes|no|x{2,5})$"])},
        "date": {"type": "string", "format": "date"},
    }[kind]
