"""Tokenizers from Hugging Face."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from ..errors import ParameterError
from ..text import Message


class HFTokenizer:
    """A Hugging Face tokenizer as `text.Tokenizer` has it."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.size = max(tokenizer.get_vocab().values()) + 1
        marked = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special = frozenset({*tokenizer.all_special_ids, *marked})

    def encode(self, text: str) -> list[int]:
        return self._tokenizer(text)["input_ids"]

    def encode_plain(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        return self.encode_plain(self.render(messages, tools))

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        if not self._tokenizer.chat_template:
            raise ParameterError("this model has no chat template; give a plain prompt instead of messages")
        shown = {"tools": list(tools)} if tools else {}
        try:
            return self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False, **shown)
        except Exception as error:  # templates raise errors of their own for turns they do not take
            raise ParameterError(f"the model's chat template refuses these messages: {error}") from error

    @property
    def template(self) -> str | None:
        return self._tokenizer.get_chat_template(tools=[{}]) if self._tokenizer.chat_template else None

    def token_text(self, token: int) -> str:
        return self._tokenizer.convert_ids_to_tokens(token)

    def vocabulary(self) -> dict[str, int]:
        return self._tokenizer.get_vocab()
