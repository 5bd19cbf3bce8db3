"""Between token ids and text: what a tokenizer must offer, text that grows token by token, stop strings."""

from __future__ import annotations

from typing import Any, Mapping, Protocol, Sequence

Message = Mapping[str, Any]
"""One turn of a conversation: ``{"role": "user", "content": "..."}``, as chat templates take it."""

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 6
MAX_PENDING = 16


class Tokenizer(Protocol):
    """What a target's tokenizer offers, whatever library it comes from."""

    size: int
    """One more than the highest token id that has a text."""

    @property
    def special(self) -> frozenset[int]:
        """Ids that stand for no text: `decode` leaves them out."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the model expects around it."""

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text that stands in the middle of others: no special tokens are added."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of these tokens, special tokens left out."""

    def chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Token ids of a conversation up to where the assistant's next turn starts. tools: definitions, for the template to show."""

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The same as text."""

    @property
    def template(self) -> str | None:
        """The chat template's source, the one for tools if there are several; None where there is none."""

    def token_text(self, token: int) -> str:
        """The vocabulary's entry for `token`, as written in the tokenizer's file."""

    def vocabulary(self) -> dict[str, int]:
        """Every entry of the vocabulary with its id."""


def alone(tokenizer: Tokenizer, token: int) -> str:
    """The text of one token by itself, for people to read: its leading space kept, special tokens and parts of characters by name."""
    if not 0 <= token < tokenizer.size:
        return ""  # an id that only fills up the vocabulary
    entry = tokenizer.token_text(token)
    text = tokenizer.decode([token])
    if not text or REPLACEMENT in text:
        return entry
    return " " + text if entry.startswith("\u2581") and not text.startswith(" ") else text


class Detokenizer:
    """Text of a growing list of tokens; half a character is held back until the rest of it arrives.

    A few tokens before the first new one give the context that some tokenizers need for a leading space.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._window = list(context[-CONTEXT_TOKENS:])
        self._read = len(self._window)
        self._known = tokenizer.decode(self._window)

    def push(self, token: int) -> str:
        """The text that `token` completes: often empty, when a character is not finished."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        pending = len(self._window) - self._read
        if text.endswith(REPLACEMENT) and pending < MAX_PENDING:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """What is still held back when nothing more will come, without a character that stays unfinished."""
        return self._advance(self._tokenizer.decode(self._window)).rstrip(REPLACEMENT)

    def _advance(self, text: str) -> str:
        new = text[len(self._known) :]
        newest = self._window[self._read :]
        if known := self._tokenizer.decode(newest):
            self._window, self._known = newest, known
        else:  # special tokens have no text; what came before them still decides about a leading space
            self._known = text
        self._read = len(self._window)
        return new


def find_stop(text: str, new: int, stops: Sequence[str]) -> tuple[int, int] | None:
    """Start and end of the first stop string that ends within the last `new` characters of `text`.

    The first is the one that is completed first; of several completed at the same place, the longest.
    """
    best: tuple[int, int] | None = None
    for stop in stops:
        at = text.find(stop, max(0, len(text) - new - len(stop) + 1))
        if at >= 0 and (best is None or (at + len(stop), at) < (best[1], best[0])):
            best = (at, at + len(stop))
    return best


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` might still become a stop string."""
    for n in range(min(len(text), max(map(len, stops), default=0)), 0, -1):
        if any(len(stop) > n and stop.startswith(text[-n:]) for stop in stops):
            return n
    return 0
