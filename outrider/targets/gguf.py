"""Targets from GGUF files, quantised as they are, through llama.cpp or ik_llama.cpp.

All slots share one KV cache of the library. A cell may belong to several sequences: a fork shares its prefix's cells, and in a
pass over a draft tree every leaf has a sequence of its own, which begins with the slot's cells and takes in the nodes above that
leaf. So each node sees its ancestors alone, and a commit keeps one of the sequences; no key or value is moved.
"""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Iterator, Sequence

import psutil
import torch
from torch import Tensor

from ..errors import CacheError, LoadError, ParameterError
from ..tree import DraftTree
from . import llama
from .base import LayerKey, Output, Slot, Target
from .llama.context import NO_ROOM, Context, Model
from .llama.library import Library
from .llama.placement import CACHE_TYPES, Placement
from .llama.tokenizer import NO_VOCABULARY, GgufTokenizer
from .llama.weights import Matrices

DEFAULT_CONTEXT = 8192
SPARE_CELLS = 256
"""Beyond the context, so that a draft tree's refused branches find room at its very end."""
PREFILL_ROWS = 512
STATE_ROWS = 64
"""Rows of a prefill chunk where the last states are asked for: the library computes logits for each of them, asked for or not."""
HEAD_DIFFERS = 0.1
"""Most that the library's rounding of a quantised output matrix's products may come to, as a share of the logits' norm."""


@dataclass
class Laid:
    """A tree of the pass that is not yet committed. ids: the sequences of each node; extra: those made for its leaves."""

    tree: DraftTree
    ids: list[list[int]]
    extra: list[int]


class GgufSlot(Slot):
    """A sequence of the shared KV cache."""

    def __init__(self, sequence: int, tokens: Sequence[int] = ()):
        self.sequence = sequence
        self.tokens = list(tokens)
        self.pending: Laid | None = None

    @property
    def length(self) -> int:  # type: ignore[override]
        return len(self.tokens)


class GgufTarget(Target):
    """A GGUF model behind one KV cache with many sequences."""

    def __init__(self, model: Model, path: str, placement: Placement):
        """Takes a model that is already loaded; `load` loads one."""
        self.model = model
        self.name = self.path = path
        self.placement = placement
        self.library: Library = model.library
        self._c = self.library
        self.n_layers = self._c.model_n_layer(model.pointer)
        self.hidden_size = self._c.model_n_embd(model.pointer)
        self.n_parameters = self._c.model_n_params(model.pointer)
        self._refuse_what_cannot_roll_back()
        trained = self._c.model_n_ctx_train(model.pointer)
        cells = placement.n_ctx or min(DEFAULT_CONTEXT, trained)
        self.context_length = min(cells, trained)
        self._cells = cells + SPARE_CELLS
        self._refuse_what_does_not_fit(cells)
        self._context = self._new_context(shows=False)
        has_text = self._c.vocab_type(model.vocabulary) != NO_VOCABULARY
        self.tokenizer = GgufTokenizer(model) if has_text else None
        self.vocab_size = self.tokenizer.size if self.tokenizer else self._context.width
        ends = (t for t in range(self.vocab_size) if has_text and self._c.vocab_is_eog(model.vocabulary, t))
        self.eos = frozenset(ends)
        self._free = list(range(placement.n_seq_max))[::-1]
        self._slots: dict[int, GgufSlot] = {}
        self._matrices = Matrices(path)

    @classmethod
    def load(cls, source: str, library: str = "auto", device: str = "auto", placement: Placement | None = None) -> GgufTarget:
        """A target from a GGUF file (of a split model, its first part).

        library: ``auto``, ``ik`` or ``llama.cpp``. device: ``auto``, ``cpu``, or a GPU that the library was built for (``cuda``,
        ``cuda:1``, ``mps``). Raises LoadError with one line that says what is wrong.
        """
        look_at(source)
        problem = ""
        for each in llama.candidates(library):
            placed = _threads(_on_device(placement or Placement(), device, each))
            each.check(placed)
            if pointer := each.load_model(source, placed):
                if (most := each.most_rows(pointer)) is not None:
                    placed = replace(placed, n_ubatch=min(placed.n_ubatch, most))
                return cls(Model(each, pointer), source, placed)
            problem = problem or f"{_explain(each.last_error())} ({each.title} {each.version})"
        raise LoadError(f"{source} cannot be loaded: {problem}")

    # ---- slots --------------------------------------------------------------------------------------------------

    def open(self, like: Slot | None = None, length: int = 0) -> GgufSlot:
        slot = GgufSlot(self._take_id())
        self._slots[slot.sequence] = slot
        if like is not None:
            source = self._own(like)
            slot.tokens = source.tokens[:length]
            self._share(source.sequence, slot.sequence, len(slot.tokens))
        return slot

    def truncate(self, slot: Slot, length: int) -> None:
        own = self._own(slot)
        if length < own.length:
            self._context.seq_rm(own.sequence, length)
            del own.tokens[length:]

    def commit(self, slot: Slot, path: Sequence[int]) -> None:
        own = self._own(slot)
        laid, own.pending = own.pending, None
        assert laid is not None, "nothing to commit"
        start, kept = own.length, len(path)
        winner = laid.ids[path[-1]][0] if path else own.sequence
        if winner != own.sequence:
            self._context.seq_rm(own.sequence, start)
            self._context.seq_cp(winner, own.sequence, start, start + kept)
        self._give_back(laid.extra)
        if winner == own.sequence and kept < len(laid.tree):
            self._context.seq_rm(own.sequence, start + kept)
        own.tokens += [laid.tree.tokens[node] for node in path]

    def close(self, slot: Slot) -> None:
        if slot.closed:
            return
        own = self._own(slot)
        own.closed = True
        if own.pending is not None:
            self._give_back(own.pending.extra)
        del self._slots[own.sequence]
        self._give_back([own.sequence])

    @property
    def open_slots(self) -> int:
        return len(self._slots)

    def _take_id(self) -> int:
        if not self._free:
            raise CacheError(
                f"{self.name}: more than n_seq_max = {self.placement.n_seq_max} sequences and leaves of draft trees at once; load it "
                "with a larger n_seq_max, or draft smaller trees"
            )
        return self._free.pop()

    def _give_back(self, ids: Sequence[int]) -> None:
        for each in ids:
            self._context.seq_rm(each)
        self._free += ids

    def _share(self, source: int, destination: int, length: int) -> None:
        if length:
            self._context.seq_cp(source, destination, 0, length)

    @staticmethod
    def _own(slot: Slot) -> GgufSlot:
        assert isinstance(slot, GgufSlot)
        if slot.closed:
            raise RuntimeError("the slot is closed")
        return slot

    # ---- passes -------------------------------------------------------------------------------------------------

    def prefill(
        self, slot: Slot, tokens: Sequence[int], layers: Sequence[LayerKey] = (), logits: bool = False
    ) -> Iterator[Output]:
        wants_last = logits or any(key in (self.n_layers, "final") for key in layers)
        rows = min(STATE_ROWS if wants_last else PREFILL_ROWS, self.placement.n_batch)
        for start in range(0, len(tokens), rows):
            chunk = DraftTree.chain(tokens[start], tokens[start + 1 : start + rows])
            (output,) = self._run([(self._own(slot), chunk)], layers, wants_last)
            if not logits:
                output.logits = None
            self.commit(slot, range(len(chunk)))
            yield output

    def forward(
        self,
        work: Sequence[tuple[Slot, DraftTree]],
        layers: Sequence[LayerKey] = (),
        upto: int | None = None,
        skip: Sequence[int] = (),
    ) -> list[Output]:
        if upto is not None or skip:
            raise ParameterError("partial passes (upto, skip) are not supported by the GGUF target")
        return self._run([(self._own(slot), tree) for slot, tree in work], layers, True)

    def _run(self, work: list[tuple[GgufSlot, DraftTree]], layers: Sequence[LayerKey], wants: bool) -> list[Output]:
        names = {key: self._tensor(key) for key in layers}
        if names and not self._context.shows:
            self._show_states()
        self._lay(work)
        try:
            logits, states = self._pass(work, names, wants)
            if isinstance(logits, int):
                raise self._failed(logits, sum(len(tree) for _, tree in work))
        except BaseException:
            for slot, _ in work:
                self._drop(slot)
            raise
        outputs, first = [], 0
        for slot, tree in work:
            rows = slice(first, first := first + len(tree))
            own = logits[rows, : self.vocab_size] if logits is not None else None
            outputs.append(Output(own, {key: state[rows] for key, state in states.items()}, start=slot.length))
        return outputs

    def _lay(self, work: list[tuple[GgufSlot, DraftTree]]) -> None:
        """Give every node the sequences of the leaves below it. Raises CacheError, nothing done, where there are too few."""
        needed = sum(sum(not below for below in tree.children) - 1 for _, tree in work)
        if needed > len(self._free):
            leaves = needed + len(work)
            raise CacheError(
                f"{self.name}: {leaves} leaves of draft trees and {len(self._slots)} open sequences are too many for n_seq_max = "
                f"{self.placement.n_seq_max}; load it with a larger n_seq_max, or draft smaller trees"
            )
        for slot, tree in work:
            assert slot.pending is None, "commit must follow each pass"
            ids: list[list[int]] = [[] for _ in tree.tokens]
            extra: list[int] = []
            for node in range(len(tree) - 1, -1, -1):  # children come after their parents
                if not ids[node]:
                    is_last = node == len(tree) - 1
                    ids[node].append(slot.sequence if is_last else self._take_id())
                    extra += [] if is_last else ids[node]
                if node:
                    ids[tree.parents[node]] += ids[node]
            for each in extra:
                self._share(slot.sequence, each, slot.length)
            slot.pending = Laid(tree, ids, extra)

    def _pass(
        self, work: list[tuple[GgufSlot, DraftTree]], names: dict[LayerKey, bytes], wants: bool
    ) -> tuple[Tensor | int | None, dict[LayerKey, Tensor]]:
        """Logits ``[rows, V]`` (None where none are wanted, the library's status where it failed) and states of all rows."""
        tokens: list[int] = []
        positions: list[int] = []
        ids: list[list[int]] = []
        for slot, tree in work:
            assert slot.pending is not None
            tokens += tree.tokens
            positions += [slot.length + depth for depth in tree.depths]
            ids += slot.pending.ids
        context = self._context
        context.watch = {name: [] for name in names.values()}
        parts = []
        for first in range(0, len(tokens), context.rows):
            rows = slice(first, first + context.rows)
            if status := context.decode(tokens[rows], positions[rows], ids[rows], wants):
                for slot, _ in work:
                    self._forget_pass(slot)
                return status, {}
            if wants:
                part = context.logits(len(tokens[rows]))
                parts.append(part if len(tokens) <= context.rows else part.clone())
        states = {key: self._state(key, context.watch[name], len(tokens)) for key, name in names.items()}
        context.watch = {}
        return (parts[0] if len(parts) == 1 else torch.cat(parts)) if wants else None, states

    def _forget_pass(self, slot: GgufSlot) -> None:
        """Take away what a failed pass may have left in the cache."""
        assert slot.pending is not None
        for each in (slot.sequence, *slot.pending.extra):
            self._context.seq_rm(each, slot.length)

    def _drop(self, slot: GgufSlot) -> None:
        if slot.pending is not None:
            self._forget_pass(slot)
            self._give_back(slot.pending.extra)
            slot.pending = None

    def _failed(self, status: int, rows: int) -> CacheError:
        if status != NO_ROOM:
            return CacheError(
                f"{self.name}: {self._c.title} failed ({status}): {self._c.last_error() or 'it does not say why'}"
            )
        held = sum(slot.length for slot in self._slots.values())
        return CacheError(
            f"{self.name}: no room in the KV cache for {rows} rows: n_ctx = {self._cells - SPARE_CELLS} cells serve {len(self._slots)} "
            f"sequences of {held} tokens together; decode fewer at once, or load it with a larger n_ctx"
        )

    # ---- hidden states ------------------------------------------------------------------------------------------

    def _tensor(self, key: LayerKey) -> bytes:
        """llama.cpp's name of the tensor with these states."""
        if key == "final":
            return b"result_norm"
        if isinstance(key, int) and 0 <= key <= self.n_layers:
            return b"l_out-%d" % (key - 1) if key else self._c.embedded
        raise ParameterError(f"unknown layer {key!r}; {self.name} has 0 to {self.n_layers}, and 'final'")

    def _state(self, key: LayerKey, parts: list[Tensor], rows: int) -> Tensor:
        found = torch.cat(parts) if parts else torch.empty(0)
        if found.numel() != rows * self.hidden_size:
            raise ParameterError(f"{self.name}: {self._c.title} does not show the states of layer {key!r} of this architecture")
        return found.view(rows, self.hidden_size)

    def _show_states(self) -> None:
        """A context whose inner tensors can be watched in place of the present one; what slots hold is computed again."""
        self._context = self._new_context(shows=True)
        for slot in self._slots.values():
            assert slot.pending is None, "commit must follow each pass"
            tokens, slot.tokens = slot.tokens, []
            for _ in self.prefill(slot, tokens):
                pass

    # ---- what heads borrow --------------------------------------------------------------------------------------

    def embed(self, tokens: Sequence[int]) -> Tensor:
        return self._matrices.embedding(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        if not self._lends_head:
            raise ParameterError(
                f"{self.name}: this architecture does more than its output projection to hidden states; not lent"
            )
        return self._project(hidden)

    def _project(self, hidden: Tensor) -> Tensor:
        return hidden.float() @ self._matrices.output[: self.vocab_size].T

    @cached_property
    def _lends_head(self) -> bool:
        """Whether the output matrix alone makes the library's logits of its final states, but for its rounding."""
        slot = self.open()
        tokens = [(7 * i + 5) % self.vocab_size for i in range(4)]
        try:
            (output,) = self.forward([(slot, DraftTree.chain(tokens[0], tokens[1:]))], ("final",))
            assert output.logits is not None
            difference = self._project(output.hidden["final"]) - output.logits
            return bool(difference.norm() <= HEAD_DIFFERS * output.logits.norm())
        finally:
            self.close(slot)

    # ---- what is known about it ---------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        known = {"weights": self._c.model_size(self.model.pointer)}
        per_token = self._bytes_per_token()
        return known if per_token is None else {**known, "kv_per_token": per_token}

    def describe(self) -> dict[str, Any]:
        cells = {"n_ctx": self._cells - SPARE_CELLS, "n_gpu_layers": min(self._c.gpu_layers(self.placement), self.n_layers + 1)}
        return {
            **super().describe(),
            "dtype": self._description(),
            "library": f"{self._c.title} ({self._c.package} {self._c.version})",
            "placement": {**asdict(self.placement), **cells},
        }

    def _description(self) -> str:
        buffer = ctypes.create_string_buffer(256)
        self._c.model_desc(self.model.pointer, buffer, 256)
        return buffer.value.decode("utf-8", "replace")

    def _bytes_per_token(self) -> int | None:
        """Of the KV cache; None where the metadata do not say it in the usual way."""
        number = self.model.number
        heads = number("attention.head_count")
        kv_heads = number("attention.head_count_kv") or (None if self._has("attention.head_count_kv") else heads)
        if not heads or not kv_heads or self._has("attention.kv_lora_rank"):
            return None
        width = self.hidden_size // heads
        key, value = number("attention.key_length") or width, number("attention.value_length") or width
        k, v = (CACHE_TYPES[name][1] for name in (self.placement.cache_type_k, self.placement.cache_type_v))
        return round(self.n_layers * kv_heads * (key * k + value * v))

    def _has(self, key: str) -> bool:
        return self.model.metadata(f"{self.model.metadata('general.architecture')}.{key}") is not None

    # ---- what cannot be decoded is refused at load --------------------------------------------------------------

    def _refuse_what_cannot_roll_back(self) -> None:
        pointer = self.model.pointer
        if self._c.model_is_recurrent(pointer) or self._c.model_is_hybrid(pointer):
            raise LoadError(
                f"{self.name}: {self.model.metadata('general.architecture')} keeps a recurrent state, which cannot be rolled back; not "
                "supported"
            )
        if self._c.model_has_encoder(pointer):
            raise LoadError(f"{self.name} is not a causal language model: it has an encoder")

    def _refuse_what_does_not_fit(self, cells: int) -> None:
        per_token = self._bytes_per_token()
        if per_token is None or self._c.gpu_layers(self.placement):
            return  # the library finds out by itself
        needed, free = per_token * self._cells, psutil.virtual_memory().available
        if needed > free:
            raise LoadError(
                f"{self.name}: a KV cache of n_ctx = {cells} needs {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free; load it "
                "with a smaller n_ctx, or a smaller cache_type_k and cache_type_v"
            )

    def _new_context(self, shows: bool) -> Context:
        try:
            return Context(self.model, self.placement, self._cells, shows)
        except MemoryError as error:
            raise LoadError(f"{self.name}: no context of n_ctx = {self._cells - SPARE_CELLS} cells: {error}") from error


def is_gguf(source: str) -> bool:
    """Whether a source is called like a GGUF file, or is one."""
    if source.lower().endswith(".gguf"):
        return True
    try:
        with open(source, "rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def look_at(source: str) -> None:
    """Raise LoadError for what is plainly no GGUF file, before a library is asked."""
    try:
        with open(source, "rb") as file:
            magic = file.read(4)
    except FileNotFoundError:
        raise LoadError(f"{source}: no such file") from None
    except OSError as error:
        raise LoadError(f"{source} cannot be read: {error.strerror}") from error
    if magic != b"GGUF":
        raise LoadError(f"{source} is not a GGUF file: it begins with {magic!r} instead of b'GGUF'")


def _explain(problem: str) -> str:
    if "clip" in problem.lower():
        return "it is a vision projector, not a language model; give the language model's own file"
    return problem or "the library does not say why"


def _on_device(placement: Placement, device: str, library: Library) -> Placement:
    """The placement with what `device` says about GPUs."""
    kind, _, number = device.partition(":")
    if device == "auto" or (kind in ("cuda", "mps") and library.has_gpu and not number):
        return placement
    if device == "cpu":
        if placement.n_gpu_layers:
            raise ParameterError(f"device 'cpu' and n_gpu_layers = {placement.n_gpu_layers} contradict each other")
        return replace(placement, n_gpu_layers=0)
    if kind not in ("cuda", "mps") or (number and not number.isdigit()):
        raise ParameterError(f"unknown device {device!r}; known: auto, cpu, cuda, cuda:N, mps")
    if not library.has_gpu:
        raise ParameterError(
            f"device {device!r} is not available: {library.package} {library.version} is built without a GPU backend (docs/gguf.md)"
        )
    return replace(placement, main_gpu=int(number))


def _threads(placement: Placement) -> Placement:
    threads = placement.threads or torch.get_num_threads()
    return replace(placement, threads=threads, threads_batch=placement.threads_batch or threads)
