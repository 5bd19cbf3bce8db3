"""What a request asks for: how tokens are chosen, what they must look like, and when the text ends."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields
from typing import Mapping

from .errors import ParameterError
from .grammar import Grammar


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    temperature: 0 takes the most likely token; otherwise logits are divided by it.
    top_k: keep the k most likely tokens (0: all). top_p: keep the smallest set with at least this probability.
    min_p: keep tokens at least this probable relative to the most likely one.
    repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the output (Keskar et
        al. 2019). presence_penalty, frequency_penalty: subtracted once, or once per occurrence, for tokens of the output.
    logit_bias: added to the logits of these token ids. min_tokens: no end before this many tokens were emitted.
    ignore_eos: go on after an end-of-generation token. max_tokens: at most this many new tokens.
    stop: strings that end the text (not part of it). stop_token_ids: tokens that end it like an end-of-generation token.
    seed: with the rule `coupled` (the default when a seed is given) the same seed gives the same text with any drafter.
    logprobs: log-probabilities of the emitted tokens and of this many alternatives, from the target's own logits
        before any processing.
    prediction: a text that the caller expects to see in the output; drafters that can, draft from it.
    json_object, json_schema, regex, choices, lark: what the output must look like, one of them: any JSON object; JSON of a schema
        (a mapping, or its text); a regular expression for all of it; one of these texts; a grammar in llguidance's Lark syntax.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    max_tokens: int = 256
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    prediction: str | None = None
    json_object: bool = False
    json_schema: str | None = None
    regex: str | None = None
    choices: tuple[str, ...] = ()
    lark: str | None = None

    def __post_init__(self) -> None:
        for name, kind, what in (
            ("stop", tuple, "strings"),
            ("stop_token_ids", tuple, "token ids"),
            ("choices", tuple, "texts"),
            ("logit_bias", dict, "a bias for each token id"),
        ):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, (value,) if kind is tuple and isinstance(value, str) else kind(value))
            except (TypeError, ValueError):
                raise ParameterError(f"{name} must hold {what}; got {value!r}") from None
        for name, allowed, ok in (
            ("temperature", "0 or more", lambda v: 0 <= v < math.inf),
            ("top_k", "a whole number, 0 (off) or more", lambda v: v >= 0 and v == int(v)),
            ("top_p", "above 0 and at most 1", lambda v: 0 < v <= 1),
            ("min_p", "at least 0 and at most 1", lambda v: 0 <= v <= 1),
            ("repetition_penalty", "above 0", lambda v: 0 < v < math.inf),
            ("presence_penalty", "from -2 to 2", lambda v: -2 <= v <= 2),
            ("frequency_penalty", "from -2 to 2", lambda v: -2 <= v <= 2),
            ("min_tokens", "a whole number, 0 or more", lambda v: v >= 0 and v == int(v)),
            ("max_tokens", "a whole number, 1 or more", lambda v: v >= 1 and v == int(v)),
            ("logprobs", "None, or from 0 to 20", lambda v: v is None or (0 <= v <= 20 and v == int(v))),
            ("seed", "None, or from 0 to 2**63 - 1", lambda v: v is None or (0 <= v < 2**63 and v == int(v))),
        ):
            value = getattr(self, name)
            try:
                fine = not isinstance(value, bool) and ok(value)
            except (TypeError, ValueError, OverflowError):
                fine = False
            if not fine:
                raise ParameterError(f"{name} must be {allowed}; got {value!r}")
            if name in ("top_k", "min_tokens", "max_tokens", "logprobs", "seed") and value is not None:
                object.__setattr__(self, name, int(value))  # JSON may say 5.0
        if self.min_tokens > self.max_tokens:
            raise ParameterError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise ParameterError(f"stop must hold non-empty strings; got {self.stop!r}")
        for token, bias in self.logit_bias.items():
            number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
            if not _is_token(token) or not number or not -100 <= bias <= 100:
                raise ParameterError(f"logit_bias must map token ids to numbers from -100 to 100; got {token!r}: {bias!r}")
        if not all(map(_is_token, self.stop_token_ids)):
            raise ParameterError(f"stop_token_ids must hold token ids; got {self.stop_token_ids!r}")
        if not isinstance(self.ignore_eos, bool):
            raise ParameterError(f"ignore_eos must be true or false; got {self.ignore_eos!r}")
        if self.prediction is not None and not isinstance(self.prediction, str):
            raise ParameterError(f"prediction must be None or a text; got {self.prediction!r}")
        self._check_grammar()

    def _check_grammar(self) -> None:
        if isinstance(self.json_schema, Mapping):
            object.__setattr__(self, "json_schema", _as_json(self.json_schema))
        for name in ("json_schema", "regex", "lark"):
            if not isinstance(value := getattr(self, name), str | None):
                raise ParameterError(f"{name} must be None or a text; got {value!r}")
        if not isinstance(self.json_object, bool):
            raise ParameterError(f"json_object must be true or false; got {self.json_object!r}")
        if any(not isinstance(choice, str) or not choice for choice in self.choices):
            raise ParameterError(f"choices must hold non-empty texts; got {self.choices!r}")
        if self.json_schema is not None:
            _check_schema(self.json_schema)
        given = [
            n for n in ("json_object", "json_schema", "regex", "choices", "lark") if getattr(self, n) not in (None, False, ())
        ]
        if len(given) > 1:
            raise ParameterError(f"{' and '.join(given)} cannot be given together: the output has one grammar")
        if given and self.ignore_eos:
            raise ParameterError(f"ignore_eos and {given[0]} cannot be given together: an end token ends a grammar")

    @property
    def grammar(self) -> Grammar | None:
        """What the output must look like, if anything."""
        if self.json_object:
            return Grammar("json_schema", '{"type": "object"}')
        if self.choices:
            return Grammar("choices", _as_json(self.choices))
        for kind in ("json_schema", "regex", "lark"):
            if (source := getattr(self, kind)) is not None:
                return Grammar(kind, source)
        return None

    @classmethod
    def make(cls, **values: object) -> SamplingParams:
        """SamplingParams from names and values; an unknown name is an error that lists the known ones."""
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise ParameterError(f"unknown sampling parameter {name!r}; known: {', '.join(known)}")
        return cls(**values)  # type: ignore[arg-type]


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _as_json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ParameterError(f"json_schema cannot be written as JSON: {error}") from None


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise ParameterError(f"json_schema is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise ParameterError(f"json_schema must be a JSON object; got {text[:60]}")
