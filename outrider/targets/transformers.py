"""Targets from Hugging Face: any causal language model of transformers whose attention can be chosen.

Nothing is patched: the model's own modules compute everything but the attention, which goes through transformers' public
`AttentionInterface` to `attention.attend`.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any, Iterator, Sequence

import torch
from torch import Tensor, nn

from .. import kernels
from ..errors import LoadError, ParameterError
from ..kernels.choose import Choice, Shape, choose
from ..tree import DraftTree
from .attention import NAME, KVSlot, PassCache, Segment, passing
from .base import LayerKey, Output, Slot, Target
from .hf_tokenizer import HFTokenizer

PREFILL_ROWS = 512
CHECK_ROWS = 8  # of the check at loading


class TransformersTarget(Target):
    """A causal language model of transformers behind one KV cache per slot."""

    choices: tuple[Choice, ...] = ()
    """What computes the linear layers, by shape, where `load` had the choice."""

    def __init__(self, model: Any, tokenizer: HFTokenizer | None = None, name: str = "", dtype: torch.dtype | None = None):
        """Takes a model that is already loaded; `load` gets one from a folder or a hub id. dtype: of its arithmetic."""
        self.model = model.eval()
        self.tokenizer = tokenizer
        config = self.model.config.get_text_config()
        self.name = name or config.model_type
        self.device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
        self.dtype = dtype or self.model.dtype
        self.n_layers = config.num_hidden_layers
        self.hidden_size = config.hidden_size
        self.context_length = _context_length(config)
        self.vocab_size = min(config.vocab_size, tokenizer.size) if tokenizer else config.vocab_size
        self.eos = frozenset(t for t in _end_tokens(self.model, tokenizer) if 0 <= t < self.vocab_size)
        self.n_parameters = sum(p.numel() for p in self.model.parameters())
        self._decoder = self.model.get_decoder()
        self._partial: dict[frozenset[int], Any] = {}  # the last partial model
        self._refuse_recurrent(config)
        check = [(7 * i + 5) % self.vocab_size for i in range(CHECK_ROWS)]
        own = self._own_logits(check)
        try:
            self.model.set_attn_implementation(NAME)
        except ValueError as error:
            raise LoadError(
                f"{self.name}: transformers does not let this architecture's attention be chosen ({error})"
            ) from error
        self._probe(config, check, own)

    @classmethod
    def load(
        cls,
        source: str,
        device: str = "auto",
        dtype: str = "auto",
        device_map: str | dict[str, Any] | None = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
    ) -> TransformersTarget:
        """A target from a folder, a hub id, or a GGUF file (whose weights become plain floats).

        device: ``auto`` (CUDA, then MPS, then CPU), ``cpu``, ``cuda``, ``cuda:1``, ``mps``. dtype: ``auto`` (the checkpoint's
        own; on a CPU float32 arithmetic on the checkpoint's own weights), ``float32``, ``bfloat16``, ``float16``,
        ``float64``. device_map: as in transformers, instead of a device. Raises LoadError with one line that says what is
        wrong.
        """
        import transformers

        place = _place(source, revision)
        wanted = _device(device) if device_map is None else None
        try:
            config = transformers.AutoConfig.from_pretrained(**place, trust_remote_code=trust_remote_code)
            plain = "gguf_file" in place or getattr(config, "quantization_config", None) is None
            exact = plain and wanted == "cpu" and dtype in ("auto", "float32")
            chooses = (exact or (plain and wanted == "cpu" and dtype == "bfloat16")) and not kernels.TURNED_OFF
            if exact:
                dtype = "auto" if kernels.VARIANT != "off" and "gguf_file" not in place else "float32"
            loader: Any = transformers.AutoModelForCausalLM
            model, info = loader.from_pretrained(
                **place,
                dtype=_dtype(dtype),
                device_map=device_map if wanted is None else {"": wanted},
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(**place, trust_remote_code=trust_remote_code)
        except Exception as error:  # every library below has errors of its own
            raise LoadError(_reason(source, error)) from error
        if missing := sorted(info["missing_keys"]):
            raise LoadError(
                f"{source} has no weights for {missing[0]} and {len(missing) - 1} more: it is not a complete causal language model"
            )
        n_parameters = sum(p.numel() for p in model.parameters())
        choices: dict[Shape, Choice] = {}
        if chooses:
            arithmetic = torch.float32 if exact else torch.bfloat16
            choices = choose(model, arithmetic)
            kernels.pack(model, arithmetic, choices)
        target = cls(model, HFTokenizer(tokenizer), source, torch.float32 if exact else None)
        target.choices = tuple(choices.values())
        target.n_parameters = n_parameters
        return target

    # ---- slots --------------------------------------------------------------------------------------------------

    def open(self, like: Slot | None = None, length: int = 0) -> KVSlot:
        if like is None:
            return KVSlot()
        with torch.inference_mode():
            own = self._own(like)
            return own.copy(min(length, own.whole))

    def truncate(self, slot: Slot, length: int) -> None:
        self._own(slot).truncate(length)

    def commit(self, slot: Slot, path: Sequence[int]) -> None:
        with torch.inference_mode():
            self._own(slot).commit(list(path))

    def close(self, slot: Slot) -> None:
        if not slot.closed:
            self._own(slot).free()

    # ---- passes -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(
        self, slot: Slot, tokens: Sequence[int], layers: Sequence[LayerKey] = (), logits: bool = False
    ) -> Iterator[Output]:
        for start in range(0, len(tokens), PREFILL_ROWS):
            chunk = DraftTree.chain(tokens[start], tokens[start + 1 : start + PREFILL_ROWS])
            (output,) = self._run([(self._own(slot), chunk)], layers, logits)
            self.commit(slot, range(len(chunk)))
            yield output

    @torch.inference_mode()
    def forward(
        self,
        work: Sequence[tuple[Slot, DraftTree]],
        layers: Sequence[LayerKey] = (),
        upto: int | None = None,
        skip: Sequence[int] = (),
    ) -> list[Output]:
        left_out = self._left_out(upto, skip)
        if layers and left_out:
            raise ParameterError("a partial pass (upto, skip) has no hidden states to give")
        return self._run([(self._own(slot), tree) for slot, tree in work], layers, True, left_out)

    def _left_out(self, upto: int | None, skip: Sequence[int]) -> frozenset[int]:
        """The layers that a partial pass does not run."""
        if upto is not None and not 1 <= upto <= self.n_layers:
            raise ParameterError(f"upto must be from 1 to {self.n_layers}, the layers of {self.name}; got {upto}")
        if outside := [k for k in skip if not 0 <= k < self.n_layers]:
            raise ParameterError(f"{self.name} has layers 0 to {self.n_layers - 1}; skip names {outside[0]}")
        left_out = frozenset(skip) | frozenset(range(self.n_layers if upto is None else upto, self.n_layers))
        if len(left_out) == self.n_layers:
            raise ParameterError("upto and skip leave no layer to run")
        return left_out

    def _run(
        self,
        work: list[tuple[KVSlot, DraftTree]],
        layers: Sequence[LayerKey],
        logits: bool,
        left_out: frozenset[int] = frozenset(),
    ) -> list[Output]:
        segments: list[Segment] = []
        tokens: list[int] = []
        positions: list[int] = []
        for slot, tree in work:
            slot.begin(whole=not left_out)
            segments.append(Segment(slot, tree, first=len(tokens)))
            tokens += tree.tokens
            positions += [slot.length + depth for depth in tree.depths]
        model = self._without(left_out) if left_out else self.model if logits else self._decoder
        with passing(segments) as run, _Recorder(self, layers) as recorder:
            result = model(
                input_ids=torch.tensor([tokens], device=self.device),
                position_ids=torch.tensor([positions], device=self.device),
                cache=PassCache(),
                use_cache=True,
            )
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # so that the time of the pass is the time of the pass
        self._last_pass = run
        outputs = []
        for segment in segments:
            rows = slice(segment.first, segment.first + segment.n)
            hidden = {key: states[rows] for key, states in recorder.states.items()}
            row_logits = result.logits[0, rows, : self.vocab_size] if logits else None
            outputs.append(Output(row_logits, hidden, start=segment.slot.length))
        return outputs

    def _without(self, left_out: frozenset[int]) -> Any:
        """The model without these layers: a shallow copy of what leads to them, so that the model itself stays as it is."""
        if left_out not in self._partial:
            path = next(
                name for name, m in self.model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == self.n_layers
            )
            blocks = [_LeftOut() if i in left_out else block for i, block in enumerate(self.model.get_submodule(path))]
            whole = part = _shallow(self.model)
            *above, last = path.split(".")
            for name in above:
                inner = _shallow(part._modules[name])
                part._modules[name] = inner
                part = inner
            part._modules[last] = nn.ModuleList(blocks)
            self._check_partial(whole, left_out)
            self._partial = {left_out: whole}
        return self._partial[left_out]

    def _check_partial(self, model: Any, left_out: frozenset[int]) -> None:
        """One row: the layers that are left out must not run, and the others must take what they get."""
        try:
            with passing([Segment(KVSlot(), DraftTree.chain(0), 0)]) as run:
                ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
                shape = model(input_ids=ids, position_ids=ids, cache=PassCache(), use_cache=True).logits.shape
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
            raise ParameterError(f"{type(self.model).__name__} cannot leave out layers ({error})") from error
        if left_out & run.windows.keys() or tuple(shape[:2]) != (1, 1):
            raise ParameterError(f"{type(self.model).__name__} does not let layers be left out")

    # ---- what heads borrow --------------------------------------------------------------------------------------

    @torch.inference_mode()
    def embed(self, tokens: Sequence[int]) -> Tensor:
        return self.model.get_input_embeddings()(torch.tensor(list(tokens), device=self.device))

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        if not self._lends_head:
            raise ParameterError(f"{type(self.model).__name__} does more than its output projection to hidden states; not lent")
        config = self.model.config.get_text_config()
        logits = self.model.get_output_embeddings()(hidden)[..., : self.vocab_size]
        logits = logits * (getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)
        cap = getattr(config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def memory(self) -> dict[str, int]:
        weights = {t.data_ptr(): t.numel() * t.element_size() for t in (*self.model.parameters(), *self.model.buffers())}
        opaque = sum(getattr(module, "opaque_bytes", 0) for module in self.model.modules())
        return {"weights": sum(weights.values()) + opaque, "kv_per_token": self._kv_per_token}

    # ---- what cannot be decoded is refused at load --------------------------------------------------------------

    def _refuse_recurrent(self, config: Any) -> None:
        kinds = getattr(config, "layer_types", None) or []
        others = sorted({kind for kind in kinds if kind not in ("full_attention", "sliding_attention")})
        if others:
            which = [i for i, kind in enumerate(kinds) if kind == others[0]]
            raise LoadError(
                f"{self.name}: layers {_ranges(which)} are of kind {others[0]!r}; only full and sliding attention keep a cache that "
                "can be rolled back, so this architecture is not supported"
            )
        if getattr(self.model, "_is_stateful", False):
            raise LoadError(
                f"{self.name}: {type(self.model).__name__} keeps a recurrent state, which cannot be rolled back; not supported"
            )

    def _own_logits(self, tokens: list[int]) -> Tensor | None:
        """Logits ``[n, V]`` of the model by itself, before its attention is exchanged."""
        try:
            with torch.inference_mode():
                result = self.model(input_ids=torch.tensor([tokens], device=self.device), use_cache=False)
            return result.logits[0, :, : self.vocab_size].float()
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError):
            return None  # what is wrong is found out, and said, by the pass of ours that follows

    def _probe(self, config: Any, tokens: list[int], own: Tensor | None) -> None:
        """A few rows in two passes: every layer must attend through our function, and the logits must be the model's own."""
        slot = self.open()
        first, node = tokens[: CHECK_ROWS // 2], tokens[CHECK_ROWS // 2 :]
        tree = DraftTree((node[0], node[-1], *node[1:]), (-1, 0, 0, *range(2, len(node))))  # node 1 is a wrong sibling
        rows = [0, *range(2, len(tree))]
        try:
            for _ in self.prefill(slot, first):
                pass
            (output,) = self.forward([(slot, tree)], layers=("final",))
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
            hint = "; OUTRIDER_KERNEL=off leaves it its own layers" if self._is_packed else ""
            raise LoadError(
                f"{self.name}: {type(self.model).__name__} cannot be run one tree at a time ({error}){hint}"
            ) from error
        if not self._last_pass.causal:
            raise LoadError(f"{self.name} is not a causal language model: its attention looks both ways")
        if self._last_pass.masked:
            raise LoadError(f"{self.name}: {type(self.model).__name__} makes an attention mask of its own; not supported")
        called = self._last_pass.windows
        if missing := [i for i in range(self.n_layers) if i not in called]:
            raise LoadError(
                f"{self.name}: layers {_ranges(missing)} of {type(self.model).__name__} do not attend through AttentionInterface; not supported"
            )
        kinds = getattr(config, "layer_types", None) or []
        if deaf := [i for i, kind in enumerate(kinds) if kind == "sliding_attention" and called[i] is None]:
            raise LoadError(
                f"{self.name}: layers {_ranges(deaf)} have a sliding window that {type(self.model).__name__} does not pass on; not supported"
            )
        assert output.logits is not None
        logits = output.logits[rows].float()
        if own is not None and _differ(logits, own[len(first) :], self.dtype):
            raise LoadError(
                f"{self.name}: through a cache of one slot {type(self.model).__name__} says something else than by itself; not supported"
            )
        self._lends_head = True
        try:
            self._lends_head = not _differ(self.head(output.hidden["final"][rows]).float(), logits, self.dtype)
        except (RuntimeError, TypeError, AttributeError):
            self._lends_head = False
        kept = [t for store in (slot.keys, slot.values) for t in store.values()]
        self._kv_per_token = sum(t.shape[0] * t.shape[2] * t.element_size() for t in kept)
        self.close(slot)

    @property
    def _is_packed(self) -> bool:
        return any(isinstance(module, kernels.Packed) for module in self.model.modules())

    @staticmethod
    def _own(slot: Slot) -> KVSlot:
        assert isinstance(slot, KVSlot)
        if slot.closed:
            raise RuntimeError("the slot is closed")
        return slot


class _LeftOut(nn.Module):
    """In the place of a layer that a partial pass does not run."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def _shallow(module: Any) -> Any:
    """A module that shares everything with another, but whose parts can be exchanged."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied


class _Recorder:
    """Records hidden states of one pass with ordinary module hooks, only while layers are asked for."""

    def __init__(self, target: TransformersTarget, layers: Sequence[LayerKey]):
        self.states: dict[LayerKey, Tensor] = {}
        self._handles = []
        if not layers:
            return
        decoder = target._decoder
        blocks = next(m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == target.n_layers)
        for key in layers:
            if key != "final" and not (isinstance(key, int) and 0 <= key <= target.n_layers):
                raise ParameterError(f"no layer {key!r}: hidden states go from 0 to {target.n_layers}, and 'final'")
        for key in layers:
            if key == "final":
                handle = decoder.register_forward_hook(self._after(key))
            elif key == target.n_layers:
                handle = blocks[-1].register_forward_hook(self._after(key))
            else:
                handle = blocks[int(key)].register_forward_pre_hook(self._before(key), with_kwargs=True)
            self._handles.append(handle)

    def _before(self, key: LayerKey) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.states[key] = (args[0] if args else kwargs["hidden_states"])[0]

        return hook

    def _after(self, key: LayerKey) -> Any:
        def hook(_: nn.Module, __: Any, result: Any) -> None:
            self.states[key] = (result if isinstance(result, Tensor) else result[0])[0]

        return hook

    def __enter__(self) -> _Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


def _context_length(config: Any) -> int:
    """Most tokens of a sequence. Under `longrope` only up to where the model changes its position table: the keys in the cache
    were made with the first one, and which one a row gets would depend on the longest row of its pass.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    longest = config.max_position_embeddings
    kinds = [r for r in (rope, *rope.values()) if isinstance(r, dict) and r.get("rope_type") == "longrope"]
    return min([longest, *(r.get("original_max_position_embeddings", longest) for r in kinds)])


def _differ(logits: Tensor, own: Tensor, dtype: torch.dtype) -> bool:
    """Whether two ways to compute the same logits ``[n, V]`` differ by more than rounding; what is not finite proves nothing."""
    scale = own.abs().max()
    tolerance = 1e-3 if dtype in (torch.float32, torch.float64) else 0.1
    return bool(torch.isfinite(scale)) and bool((logits - own).abs().max() > tolerance * scale)


def _place(source: str, revision: str | None) -> dict[str, Any]:
    """Where transformers finds `source`. Raises LoadError for a path that is no model."""
    path = Path(source).expanduser()
    looks_like_path = source.startswith((".", "/", "~")) or source.count("/") > 1 or path.suffix == ".gguf"
    if looks_like_path and not path.exists():
        raise LoadError(f"no such model folder: {source}")
    if path.exists() and revision is not None:
        raise ParameterError(f"revision {revision!r} is for models of the hub; {source} is on this disk")
    if path.suffix == ".gguf":
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    if path.is_dir():
        if not (path / "config.json").exists():
            raise LoadError(f"{source} is not a model folder: it has no config.json")
        return {"pretrained_model_name_or_path": str(path)}
    return {"pretrained_model_name_or_path": source, "revision": revision or "main"}


def _end_tokens(model: Any, tokenizer: HFTokenizer | None) -> frozenset[int]:
    """Every id that the generation config, the config or the tokenizer calls an end."""
    found: set[int] = set()
    owners = (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer and tokenizer._tokenizer)
    for owner in owners:
        ids = getattr(owner, "eos_token_id", None)
        found.update(ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids])
    return frozenset(found)


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind = name.split(":")[0]
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if kind not in there:
        raise ParameterError(f"unknown device {name!r}; known: auto, cpu, cuda, cuda:N, mps")
    if not there[kind]:
        raise ParameterError(f"device {name!r} is not available on this machine")
    return name


def _dtype(name: str) -> str | torch.dtype:
    names = ("auto", "float32", "bfloat16", "float16", "float64")
    if name not in names:
        raise ParameterError(f"unknown dtype {name!r}; known: {', '.join(names)}")
    return name if name == "auto" else getattr(torch, name)


def _reason(source: str, error: Exception) -> str:
    text = str(error)
    if "Unrecognized configuration class" in text or "not a causal" in text.lower():
        return f"{source} is not a causal language model"
    if isinstance(error, OSError) and not os.path.exists(source):
        return f"{source}: no such folder, and no such model in the hub's cache or on the hub ({text.splitlines()[0]})"
    return f"{source} cannot be loaded: {text.splitlines()[0] if text else type(error).__name__}"


def _ranges(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:4]))
    return f"{shown}, ... ({len(numbers)} in all)" if len(numbers) > 4 else shown
