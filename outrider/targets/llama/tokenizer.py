"""The tokenizer and the chat template that a GGUF file carries."""

from __future__ import annotations

import ctypes
import json
from datetime import datetime
from functools import cached_property
from typing import Any, Mapping, NoReturn, Sequence

from ...errors import ParameterError
from ...text import Message
from .context import Model

NO_VOCABULARY, SENTENCEPIECE = 0, 1  # of llama.cpp's kinds of vocabularies


class GgufTokenizer:
    """A GGUF file's tokenizer as `text.Tokenizer` has it. size: how many ids have a text; what follows only fills up."""

    def __init__(self, model: Model):
        self._model = model
        self._c = model.library
        self._vocabulary = model.vocabulary
        self._pieces: dict[int, bytes] = {}
        is_sentencepiece = self._c.vocab_type(self._vocabulary) == SENTENCEPIECE
        self._adds_space = is_sentencepiece and model.metadata("tokenizer.ggml.add_space_prefix") != "false"
        size = self._c.vocab_n_tokens(self._vocabulary)
        while size > 1 and self._c.is_unused(self._vocabulary, model.pointer, size - 1):
            size -= 1
        self.size: int = size

    @cached_property
    def special(self) -> frozenset[int]:
        return frozenset(token for token in range(self.size) if not self._piece(token))

    def encode(self, text: str) -> list[int]:
        return self._tokenize(text, True)

    def encode_plain(self, text: str) -> list[int]:
        return self._tokenize(text, False)

    def _tokenize(self, text: str, add_special: bool) -> list[int]:
        data = text.encode("utf-8", "replace")
        room = len(data) + 8
        while True:
            buffer = (ctypes.c_int32 * room)()
            n = self._c.tokenize(self._vocabulary, data, len(data), buffer, room, add_special, True)
            if n >= 0:
                return buffer[:n]
            room = -n

    def decode(self, tokens: Sequence[int]) -> str:
        data = b"".join(map(self._piece, tokens))
        if self._adds_space and data[:1] == b" ":
            data = data[1:]
        return data.decode("utf-8", "replace")

    def _piece(self, token: int) -> bytes:
        """The bytes of a token; none for special tokens."""
        piece = self._pieces.get(token)
        if piece is None:
            room = 64
            while True:
                buffer = ctypes.create_string_buffer(room)
                n = self._c.token_to_piece(self._vocabulary, token, buffer, room, 0, False)
                if n >= 0:
                    break
                room = -n
            piece = self._pieces[token] = buffer.raw[:n]
        return piece

    def chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        return self.encode_plain(self.render(messages, tools))

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        if self._template is None:
            raise ParameterError("this model has no chat template; give a plain prompt instead of messages")
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=True,
                bos_token=self._special("bos"),
                eos_token=self._special("eos"),
                tools=list(tools) or None,
                documents=None,
            )
        except Exception as error:  # templates raise errors of their own for turns they do not take
            raise ParameterError(f"the model's chat template refuses these messages: {error}") from error

    @property
    def template(self) -> str | None:
        return self._model.metadata("tokenizer.chat_template")

    @cached_property
    def _template(self) -> Any:
        return compile_template(self.template) if self.template else None

    def _special(self, which: str) -> str:
        token = getattr(self._c, f"vocab_{which}")(self._vocabulary)
        return self.token_text(token) if token >= 0 else ""

    def token_text(self, token: int) -> str:
        text = self._c.vocab_get_text(self._vocabulary, token)
        return text.decode("utf-8", "replace")

    def vocabulary(self) -> dict[str, int]:
        return {self.token_text(token): token for token in range(self.size)}


def compile_template(source: str) -> Any:
    """A chat template in the environment that Hugging Face's templates are written for. Raises ParameterError for a broken one."""
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.exceptions.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(source)
    except jinja2.exceptions.TemplateError as error:
        raise ParameterError(f"the model's chat template is broken: {error}") from error
