"""Text that grows token by token is the text of all tokens, never shows half a character, and ends at the first stop string."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decode import Sequence
from outrider.sampling import SamplingParams
from outrider.targets.hf_tokenizer import HFTokenizer
from outrider.targets.table import TableTarget
from outrider.text import REPLACEMENT, Detokenizer, alone, find_stop, held_back

SMALL = st.text(alphabet="abc", max_size=14)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


@functools.cache
def byte_level() -> Any:
    """A token for each byte, as in GPT-2, Llama 3 and Qwen, with a few merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("a", "b"), ("Ġ", "a"), ("Ã", "©")]
    vocabulary |= {a + b: 256 + i for i, (a, b) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


@functools.cache
def byte_fallback() -> Any:
    """Words with their leading space and bytes for the rest, as in Llama 2 and Mistral: the first space is not shown."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{i:02X}>": 3 + i for i in range(256)}
    vocabulary |= {"▁": 259, "a": 260, "b": 261, "▁a": 262, "▁b": 263, "é": 264}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "a"), ("▁", "b")], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"))


TOKENIZERS = pytest.mark.parametrize("tokenizer", [byte_level, byte_fallback], ids=["byte level", "byte fallback"])
HARD = ["é", "中文", "😀👨‍👩‍👧", "naïve café", " a b  ab ", "🇩🇪 ok", "a\n\n  b", "🏳️‍🌈"]


def bytes_of(tokenizer: Any, data: bytes) -> list[int]:
    if tokenizer is byte_level():
        from tokenizers import pre_tokenizers

        shown = sorted(pre_tokenizers.ByteLevel.alphabet())
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        table = {b: chr(b) for b in printable} | {
            b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in printable)
        }
        return [shown.index(table[b]) for b in data]
    return [3 + b for b in data]


def grown(tokenizer: Any, tokens: list[int], context: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, context)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@TOKENIZERS
@pytest.mark.parametrize("text", HARD)
def test_hard_characters(tokenizer: Any, text: str) -> None:
    tokenizer = tokenizer()
    prompt = tokenizer.encode_plain("a b a")
    for tokens in (tokenizer.encode_plain(text), bytes_of(tokenizer, text.encode())):
        pieces = grown(tokenizer, tokens, prompt)
        assert "".join(pieces) == tokenizer.decode([*prompt, *tokens])[len("a b a") :]
        assert REPLACEMENT not in "".join(pieces)
        if tokens == bytes_of(tokenizer, text.encode()):  # a byte a token: each character comes with its last byte
            ends = [len(text[: i + 1].encode()) - 1 for i in range(len(text))]
            assert [i for i, piece in enumerate(pieces) if piece] == ends


VALID, JUNK = st.text(max_size=3), st.binary(max_size=3)


@TOKENIZERS
@settings(max_examples=150, deadline=None)
@given(parts=st.lists(st.one_of(VALID, JUNK), max_size=8))
def test_text_is_that_of_all_tokens(tokenizer: Any, parts: list[str | bytes]) -> None:
    """Characters and invalid bytes mixed; REPLACEMENT at the very end stands for what stayed unfinished."""
    tokenizer = tokenizer()
    fence = tokenizer.encode_plain("xa")[-1:]
    if (
        tokenizer is byte_fallback()
    ):  # there an invalid byte spoils the whole run of byte tokens, characters shown before it too
        parts = [part if isinstance(part, str) else bytes(0x80 | byte & 0x3F for byte in part) for part in parts]
    tokens: list[int] = []
    for part in parts:
        tokens += tokenizer.encode_plain(part) if isinstance(part, str) else [*fence, *bytes_of(tokenizer, part), *fence]
    pieces = grown(tokenizer, tokens, tokenizer.encode_plain("b"))
    whole = tokenizer.decode([*tokenizer.encode_plain("b"), *tokens])[1:]
    assert "".join(pieces).rstrip(REPLACEMENT) == whole.rstrip(REPLACEMENT)
    shown = ""
    for piece in pieces[:-1]:
        shown += piece
        assert whole.startswith(shown), "what was shown is never taken back"


@TOKENIZERS
def test_endless_junk_is_shown(tokenizer: Any) -> None:
    """Bytes that never become a character are not held for ever."""
    tokenizer = tokenizer()
    pieces = grown(tokenizer, bytes_of(tokenizer, b"\xff" * 40), [])
    assert "".join(pieces).count(REPLACEMENT) >= 30


def test_special_tokens_have_no_text() -> None:
    tokenizer = byte_fallback()
    assert "".join(grown(tokenizer, [262, 1, 263, 2, 260], [])) == tokenizer.decode([262, 1, 263, 2, 260]) == "a ba"


@settings(max_examples=400, deadline=None)
@given(text=SMALL, new=st.integers(0, 6), stops=STOPS)
def test_find_stop(text: str, new: int, stops: list[str]) -> None:
    new = min(new, len(text))
    wanted = None
    for end in range(len(text) - new + 1, len(text) + 1):
        if ending := [s for s in stops if text[:end].endswith(s)]:
            wanted = (end - max(map(len, ending)), end)
            break
    assert find_stop(text, new, stops) == wanted


@settings(max_examples=400, deadline=None)
@given(text=SMALL, stops=STOPS)
def test_held_back(text: str, stops: list[str]) -> None:
    lengths = [n for n in range(1, len(text) + 1) for s in stops if len(s) > n and s.startswith(text[-n:])]
    assert held_back(text, stops) == max(lengths, default=0)


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.integers(1, 5), min_size=1, max_size=12), stops=STOPS, chunks=st.lists(st.integers(1, 5), min_size=12)
)
def test_stream_and_text(tokens: list[int], stops: list[str], chunks: list[int]) -> None:
    """However the tokens come in rounds: the text ends before the first stop string, and the stream is the text."""
    texts = ["", "a", "b", "c", "ab", "bca"]
    t = TableTarget(vocab_size=6, texts=texts, eos=())
    s = Sequence(t, [1], SamplingParams(max_tokens=99, stop=tuple(stops)), "rejection")
    shown, left = "", list(tokens)
    for size in chunks:
        if not left or s.finish:
            break
        kept = s.cut(left[:size], size)
        shown += "".join(piece for piece, _ in s.show())
        assert s.text.startswith(shown)
        left = left[len(kept) :]
    whole = "".join(texts[token] for token in tokens)
    found = find_stop(whole, len(whole), stops)
    if found:
        assert (s.text, s.finish, shown) == (whole[: found[0]], "stop", whole[: found[0]])
        assert "".join(texts[token] for token in s.output[:-1]).find(whole[found[0] : found[1]]) == -1
    else:
        assert (s.text, s.finish) == (whole, None)
        assert whole.startswith(shown) and len(whole) - len(shown) == held_back(whole, stops)


def test_a_token_alone_keeps_its_space_and_its_name() -> None:
    class Pieces:
        size = 5
        entries = ("<end>", "\u2581the", "Ġthe", "ðŁ", "e")
        texts = ("", "the", " the", "\ufffd", "e")

        def token_text(self, token: int) -> str:
            return self.entries[token]

        def decode(self, tokens: list[int]) -> str:
            return "".join(self.texts[t] for t in tokens)

    pieces: Any = Pieces()
    assert [alone(pieces, token) for token in range(-1, 6)] == ["", "<end>", " the", " the", "ðŁ", "e", ""]
