"""A cheaper drafter from a GGUF file: coarser weights, the output matrix included, and fewer tokens.

A drafter is worth what it costs. Most of a small model's cost is reading its weights, and with a large vocabulary much of that
is the output matrix; both can be made smaller at little loss, because a drafter may be wrong.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import tempfile
from ctypes import c_bool, c_char_p, c_int, c_int32, c_uint32, c_void_p
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, Callable, Iterator

from .errors import LoadError, ParameterError

TYPES = {  # name: number among the kinds of files, number among the kinds of tensors
    "q8_0": (7, 8),
    "q6_k": (18, 14),
    "q5_k": (16, 13),
    "q5_1": (9, 7),
    "q5_0": (8, 6),
    "q4_k": (14, 12),
    "q4_1": (3, 3),
    "q4_0": (2, 2),
    "iq4_nl": (25, 20),
    "iq4_xs": (30, 23),
    "q3_k": (11, 11),
    "q2_k": (10, 10),
}
PROGRESS = re.compile(r"\[\s*(\d+)/\s*(\d+)\]")
NORMAL, UNUSED = 1, 5
"""Kinds of tokens."""
SPACES = {ord(mark): text for mark, text in (("Ġ", " "), ("Ċ", "\n"), ("▁", " "))}
LEAST_TOKENS = 256
ROWS = 64
"""The output matrix keeps a multiple of this many rows, so that libraries can interleave them."""

Say = Callable[[int, int], None]
"""Told how many of how many tensors are done."""


class IkParameters(ctypes.Structure):
    """ik_llama.cpp's `llama_model_quantize_params`, which its binding does not declare."""

    _fields_ = [
        ("nthread", c_int32),
        ("ftype", c_int),
        ("output_tensor_type", c_int),
        ("token_embedding_type", c_int),
        ("other_types", c_int * 9),
        ("allow_requantize", c_bool),
        ("quantize_output_tensor", c_bool),
        ("only_copy", c_bool),
        ("pure", c_bool),
        ("more", ctypes.c_uint8 * 200),  # flags and pointers that stay as they are
    ]


@dataclass(frozen=True)
class Smaller:
    """What was made: the file, its size and that of the original in bytes, and how many tokens it has of how many."""

    path: str
    size: int
    original_size: int
    tokens: int
    original_tokens: int


def requantise(
    source: str,
    destination: str,
    kind: str = "q4_0",
    output_kind: str | None = None,
    vocabulary: int | None = None,
    library: str = "auto",
    threads: int | None = None,
    overwrite: bool = False,
    say: Say = lambda done, of: None,
) -> Smaller:
    """Write a smaller copy of the GGUF file `source` to `destination`, which appears when it is complete, or not at all.

    kind: of the weights; output_kind: of the output matrix, if another. Matrices whose rows do not divide into a kind's blocks
    get the library's nearest. vocabulary: keep about this many tokens, those of the lowest ids and all that are not plain text. library:
    as `load` takes it. Raises LoadError and ParameterError with one line that says what is wrong.
    """
    from .targets import llama
    from .targets.gguf import look_at

    for name in (kind, output_kind or kind):
        if name not in TYPES:
            raise ParameterError(f"unknown type {name!r}; known: {', '.join(TYPES)}")
    if vocabulary is not None and vocabulary < LEAST_TOKENS:
        raise ParameterError(f"vocabulary must be at least {LEAST_TOKENS}; got {vocabulary}")
    look_at(source)
    place = Path(destination)
    _check_place(Path(source), place, overwrite)
    chosen = llama.candidates(library)[0]
    try:
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.") as scratch:
            small = Path(scratch, "fewer.gguf")
            tokens, original = _fewer_tokens(source, small, vocabulary) if vocabulary else (0, 0)
            part = Path(scratch, "part.gguf")
            _quantise(chosen, str(small) if vocabulary else source, str(part), kind, output_kind or kind, threads, say)
            os.replace(part, place)
    except OSError as error:
        raise LoadError(f"cannot write {destination}: {error.strerror}") from error
    if not vocabulary:
        tokens = original = _count_tokens(source)
    return Smaller(destination, place.stat().st_size, Path(source).stat().st_size, tokens, original)


def _check_place(source: Path, place: Path, overwrite: bool) -> None:
    if place.exists() and (not overwrite or place.is_dir() or place.samefile(source)):
        raise ParameterError(
            f"{place} is there already; give another name, or --overwrite to replace a file that is not the source"
        )
    if not place.parent.is_dir():
        raise ParameterError(f"there is no folder {place.parent}")
    needed, free = 2 * source.stat().st_size, shutil.disk_usage(place.parent).free
    if free < needed:
        raise LoadError(f"{place.parent} has {free / 2**30:.1f} GiB free, and up to {needed / 2**30:.1f} GiB may be needed")


def _quantise(library: Any, source: str, destination: str, kind: str, output: str, threads: int | None, say: Say) -> None:
    """Through the library's own function, in a thread of its own, so that it can be interrupted."""
    structure = getattr(library.binding, "llama_model_quantize_params", IkParameters)
    params = library.bind("llama_model_quantize_default_params", structure, ())()
    run = library.bind("llama_model_quantize", c_uint32, (c_char_p, c_char_p, c_void_p))
    params.nthread = threads or os.cpu_count() or 1
    params.ftype, params.output_tensor_type = TYPES[kind][0], TYPES[output][1]
    params.token_embedding_type = TYPES[kind][1]
    params.allow_requantize = params.quantize_output_tensor = params.pure = True
    status: list[int] = []
    library.forget_log()
    worker = Thread(target=lambda: status.append(run(source.encode(), destination.encode(), ctypes.byref(params))), daemon=True)
    worker.start()
    told = 0
    while worker.is_alive():
        worker.join(0.1)
        lines = [match for text in library.log() if (match := PROGRESS.search(text))]
        if lines and (done := int(lines[-1][1])) > told:
            told = done
            say(done, int(lines[-1][2]))
    if status != [0]:
        raise LoadError(
            f"{source} cannot be requantised: {library.last_error() or 'the library does not say why'} ({library.title})"
        )


# ---- fewer tokens ----------------------------------------------------------------------------------------------------------


def _count_tokens(source: str) -> int:
    from .gguf_file import open_gguf

    return open_gguf(source).length("tokenizer.ggml.tokens")


def _fewer_tokens(source: str, destination: Path, most: int) -> tuple[int, int]:
    """Write `source` with about `most` tokens; returns how many it has now, and had."""
    from gguf import GGUFWriter

    from .gguf_file import add_key, open_gguf

    reader = open_gguf(source)
    values, kinds = reader.values(), reader.kinds()
    tokens = values.get("tokenizer.ggml.tokens")
    if not tokens:
        raise LoadError(f"{source} has no vocabulary that could be made smaller")
    kept = _kept(values, most)
    new = {old: i for i, old in enumerate(kept)}
    texts = {tokens[i] for i in kept}
    writer = GGUFWriter(destination, values["general.architecture"])
    for name, value in values.items():
        if name == "general.architecture":
            continue
        if name in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.scores"):
            value = [value[i] for i in kept]
        elif name == "tokenizer.ggml.merges":
            value = [merge for merge in value if {*merge.split(" ", 1), merge.replace(" ", "", 1)} <= texts]
        elif name.endswith("_token_id"):
            value = new[value]
        elif name.endswith(".vocab_size"):
            value = len(kept)
        add_key(writer, name, value, kinds[name])
    for tensor in _tensors(source, reader, len(tokens)):
        by_token = tensor.name.split(".")[0] in ("token_embd", "output")
        writer.add_tensor(tensor.name, tensor.data[kept] if by_token else tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return len(kept), len(tokens)


def _tensors(source: str, reader: Any, tokens: int) -> Iterator[Any]:
    for tensor in reader.tensors:
        if tensor.name.split(".")[0] in ("token_embd", "output") and len(tensor.data) != tokens:
            raise LoadError(
                f"{source}: {tensor.name} has {len(tensor.data)} rows for {tokens} tokens; its vocabulary cannot be made smaller"
            )
        yield tensor


def _kept(values: dict[str, Any], most: int) -> list[int]:
    """Ids of the tokens that stay. Those of low ids are the frequent ones in vocabularies made by merging; with them stay their
    parts, so that a text is still cut as before wherever it can be."""
    tokens = values["tokenizer.ggml.tokens"]
    kinds = values.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    needed = {i for i, kind in enumerate(kinds) if kind not in (NORMAL, UNUSED) or (kind == NORMAL and len(tokens[i]) == 1)}
    needed |= {value for name, value in values.items() if name.endswith("_token_id")}
    template = str(values.get("tokenizer.chat_template") or "")
    needed |= {i for i, kind in enumerate(kinds) if kind == NORMAL and tokens[i].translate(SPACES) in template}
    plain = [i for i, kind in enumerate(kinds) if kind == NORMAL and i not in needed]
    number = -(-max(most, len(needed)) // ROWS) * ROWS
    return sorted([*needed, *plain[: number - len(needed)]])
