"""A part of a tokenizer's vocabulary as a tokenizer of its own, closed under merges: whatever it has, it can also make.

For tokenizers of the `tokenizers` library with byte-pair encoding (Sennrich et al. 2016). A token's merges are found by encoding it, so those
with several ways to be made are made as the whole tokenizer makes them; the merges that are left out never come in between.
"""

from __future__ import annotations

import json
import math
from typing import Any, Collection, Iterable, Mapping, Sequence

from ..drafters.vocabulary import token_bytes
from ..errors import ParameterError
from ..targets.hf_tokenizer import HFTokenizer
from ..text import Tokenizer

Pair = tuple[str, str]


def closed_subset(tokenizer: Tokenizer | None, order: Iterable[int], size: int, needed: Collection[int] = ()) -> list[int]:
    """Ids, ascending, of at most `size` tokens: the `needed` ones, all special ones, all that stand for a single byte, so that any text can
    be spelled, and of the others the first of `order`, each with what it is merged from.

    Raises ParameterError for a tokenizer of another kind, and where `size` is too small.
    """
    content = _content(tokenizer)
    assert tokenizer is not None
    ids = tokenizer.vocabulary()
    names = {i: text for text, i in ids.items()}
    added = {entry["content"] for entry in content["added_tokens"]}
    ranks: dict[Pair, int] = {(one, other): rank for rank, (one, other) in enumerate(content["model"]["merges"])}
    kept = {i for i, text in token_bytes(tokenizer).items() if len(text) == 1} | {*tokenizer.special, *needed}
    if (unknown := content["model"].get("unk_token")) is not None:
        kept.add(ids[unknown])
    if len(kept) > size:
        raise ParameterError(
            f"vocabulary must be {len(kept)} or more for this tokenizer, which has so many special tokens and single bytes; got {size}"
        )
    for token in order:
        if len(kept) == size:
            break
        if token in kept or token not in names:
            continue
        parts = {names[token]} if names[token] in added else _parts(names[token], ranks)
        if parts and parts <= ids.keys():
            more = {ids[part] for part in parts} - kept
            if len(kept) + len(more) <= size:
                kept |= more
    return sorted(kept)


def _parts(text: str, ranks: Mapping[Pair, int]) -> set[str]:
    """All that `text` is merged from, itself included; nothing where merges do not lead there."""
    now = list(text)
    parts = set(now)
    while len(now) > 1:
        rank, at = min((ranks.get((now[i], now[i + 1]), math.inf), i) for i in range(len(now) - 1))
        if rank == math.inf:
            return set()
        now[at : at + 2] = [now[at] + now[at + 1]]
        parts.add(now[at])
    return parts


def part_of(tokenizer: Tokenizer | None, kept: Sequence[int]) -> Any:
    """transformers' tokenizer of these tokens alone, ids ascending, numbered from 0. Raises ParameterError for one of another kind."""
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    content = _content(tokenizer)
    assert isinstance(tokenizer, HFTokenizer)
    number = {token: i for i, token in enumerate(kept)}
    model = content["model"]
    vocab = {text: number[i] for text, i in model["vocab"].items() if i in number}
    model["vocab"] = vocab
    model["merges"] = [[a, b] for a, b in model["merges"] if a in vocab and b in vocab and a + b in vocab]
    content["added_tokens"] = [{**e, "id": number[e["id"]]} for e in content["added_tokens"] if e["id"] in number]
    _renumber(content["post_processor"], number)
    whole = tokenizer._tokenizer
    made = PreTrainedTokenizerFast(
        tokenizer_object=Backend.from_str(json.dumps(content)), chat_template=whole.chat_template, **whole.special_tokens_map
    )
    if made.get_vocab() != {text: number[i] for text, i in whole.get_vocab().items() if i in number}:
        raise ParameterError(
            "this tokenizer's added tokens stand between the others; a part of it cannot be taken: vocabulary=0"
        )
    return made


def _content(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """tokenizer.json of a tokenizer that a part can be taken of."""
    backend = getattr(getattr(tokenizer, "_tokenizer", None), "backend_tokenizer", None)
    content = json.loads(backend.to_str()) if backend is not None else {"model": {"type": None}}
    model = content["model"]
    if model["type"] != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise ParameterError(
            "a part of the vocabulary can be taken of tokenizers with byte-pair encoding alone; keep all of this one: vocabulary=0"
        )
    return content


def _renumber(part: Any, number: Mapping[int, int]) -> None:
    """The special tokens that a post-processor adds, wherever it names them."""
    if isinstance(part, dict):
        for key, value in part.items():
            if key == "ids":
                part[key] = [number[i] for i in value]
            else:
                _renumber(value, number)
    elif isinstance(part, list):
        for value in part:
            _renumber(value, number)
