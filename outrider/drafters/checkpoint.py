"""Weights of heads as they are published: a folder with `config.json` and safetensors or `.bin`/`.pt` files, or its hub id.

Nothing is executed: pickles are read with ``weights_only=True`` alone. Nothing is left over in silence: a loader *takes* each
tensor by name and shape, and `refuse_rest` names what nobody took. Tensors are read from the files when they are taken.
"""

from __future__ import annotations

import json
import re
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Callable, Literal, overload

import torch
from torch import Tensor

from ..errors import LoadError
from ..files import to_json
from ..models import SHIPPED, shipped

PICKLES = ("*.bin", "*.pt", "*.pth")
NOT_WEIGHTS = re.compile(r"openvino|training_args|optimizer|scheduler|rng_state|scaler|trainer_state")
CONFIG, WEIGHTS = "config.json", "model.safetensors"
KINDS = {"float": "floating-point numbers", "int": "integers", "bool": "true or false"}
_REQUIRED: Any = object()


@dataclass(frozen=True)
class Stored:
    """One tensor of a file. load: reads it."""

    shape: tuple[int, ...]
    load: Callable[[], Tensor]
    file: str


@dataclass
class Checkpoint:
    """Config and tensors of one folder (or file), and which of them a loader has used.

    config: of `config.json`; empty without that file. tensors: by name. prefix: what `under` cut off the names.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Stored]
    prefix: str = ""
    taken: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, folder: str | Path) -> Checkpoint:
        """What a folder holds. Raises LoadError with one line for a folder without weights, damaged files, pickles with code."""
        folder = Path(folder).expanduser()
        if not folder.is_dir():
            raise LoadError(f"no such folder: {folder}")
        tensors: dict[str, Stored] = {}
        for file in _weight_files(folder):
            for name, stored in (_open_safetensors if file.suffix == ".safetensors" else _open_pickle)(file).items():
                if name in tensors:
                    raise LoadError(f"{folder}: tensor {name} is in both {tensors[name].file} and {file.name}")
                tensors[name] = stored
        if not tensors:
            raise LoadError(f"{folder} has no weights: no .safetensors, .bin or .pt file with tensors in it")
        return cls(folder, read_config(folder), tensors)

    # ---- tensors ------------------------------------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    @overload
    def take(self, name: str, *shape: int | None, kind: str = "float", optional: Literal[False] = False) -> Tensor: ...
    @overload
    def take(self, name: str, *shape: int | None, kind: str = "float", optional: bool) -> Tensor | None: ...

    def take(self, name: str, *shape: int | None, kind: str = "float", optional: bool = False) -> Tensor | None:
        """The tensor `name`, in the type it is stored in, which must have this shape (None: any size there).

        kind: ``float``, ``int`` or ``bool``. Raises LoadError naming the tensor when it is missing (unless optional) or does
        not fit.
        """
        if name not in self.tensors:
            if optional:
                return None
            raise LoadError(f"{self.folder} has no tensor {self.prefix}{name}: it is incomplete, or of another dialect")
        stored = self.tensors[name]
        if len(stored.shape) != len(shape) or any(want not in (None, have) for want, have in zip(shape, stored.shape)):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise LoadError(
                f"{self.folder}: tensor {self.prefix}{name} has shape [{', '.join(map(str, stored.shape))}], where [{wanted}] is "
                "needed: it was made for another target, or is damaged"
            )
        tensor = stored.load()
        found = "bool" if tensor.dtype == torch.bool else "float" if tensor.dtype.is_floating_point else "int"
        if found != kind or tensor.is_complex():
            raise LoadError(
                f"{self.folder}: tensor {self.prefix}{name} is {str(tensor.dtype).removeprefix('torch.')}; {KINDS[kind]} expected"
            )
        self.taken.add(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of tensor `name` without reading it. Raises LoadError when it is missing."""
        if name not in self.tensors:
            raise LoadError(f"{self.folder} has no tensor {self.prefix}{name}: it is incomplete, or of another dialect")
        return self.tensors[name].shape

    def count(self, pattern: str) -> int:
        """How many tensors have names that match `pattern`, whose first group counts 0, 1, 2, ... Raises LoadError for gaps."""
        found = sorted({int(match[1]) for name in self.tensors if (match := re.fullmatch(pattern, name))})
        if gap := next((i for i, number in enumerate(found) if i != number), None) if found else None:
            raise LoadError(
                f"{self.folder}: of the tensors {self.prefix}{pattern} number {gap} is missing, but not {found[-1]}"
            )
        if found and found[0] != 0:
            raise LoadError(f"{self.folder}: of the tensors {self.prefix}{pattern} number 0 is missing")
        return len(found)

    def ignore(self, *names: str) -> None:
        """Mark tensors as known and not needed, where they are there."""
        self.taken.update(names)

    def under(self, prefix: str) -> Checkpoint:
        """The part whose names begin with `prefix`, without it in the names."""
        part = {name.removeprefix(prefix): stored for name, stored in self.tensors.items() if name.startswith(prefix)}
        return replace(self, tensors=part, prefix=self.prefix + prefix, taken=set())

    @property
    def rest(self) -> list[str]:
        """Names of the tensors that nobody has taken."""
        return sorted(self.tensors.keys() - self.taken)

    def refuse_rest(self) -> None:
        """Raise LoadError, naming the first of them, when there are tensors that nobody has taken."""
        if rest := self.rest:
            more = f" and {len(rest) - 1} more" if len(rest) > 1 else ""
            raise LoadError(
                f"{self.folder}: nothing here uses tensor {self.prefix}{rest[0]}{more}; a dialect that is not known would draft "
                "nonsense, so it is refused"
            )

    # ---- config -------------------------------------------------------------------------------------------------

    @property
    def config_file(self) -> Path:
        """What the config was read from."""
        return self.folder if self.folder.is_file() else self.folder / CONFIG

    def value(self, key: str, kind: type = int, default: Any = _REQUIRED) -> Any:
        """The config's value for `key`, of this kind (``bool``, ``int``, ``float``, ``str``, ``list``, ``dict``).

        A missing key or null is the default. Raises LoadError naming the key for another kind, or when it is needed and missing.
        """
        self.asked.add(key)
        value = self.config.get(key)
        if value is None:
            if default is _REQUIRED:
                raise LoadError(f"{self.config_file} has no {key!r}, which is needed here")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise LoadError(f"{self.config_file}: {key!r} must be {kind.__name__}; got {value!r}")
        return value

    def refuse_flags(self, *prefixes: str) -> None:
        """Raise LoadError for a config key with one of these prefixes that nobody has asked for and that is not off."""
        for key, value in self.config.items():
            if key.startswith(prefixes) and key not in self.asked and value not in (None, False):
                raise LoadError(f"{self.config_file}: {key!r} ({value!r}) is not known here; what it changes would be ignored")


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a folder; empty when there is none."""
    path = folder / CONFIG
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path} is not a JSON object")
    return value


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """A new folder with `config.json` in it. Raises OSError."""
    folder.mkdir()
    (folder / CONFIG).write_text(to_json(config, indent=2) + "\n", encoding="utf-8")


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """A new folder with `config.json` and safetensors. Raises OSError where it cannot be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    write_config(folder, config)
    try:
        save_file({name: values.contiguous() for name, values in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error


def resolve(source: str) -> Path:
    """The folder of `source`: itself, that of a drafter inside this package, or the snapshot of a hub id, fetched if it is not in
    the hub's cache.

    Raises LoadError when there is neither.
    """
    path = shipped(source) if source in SHIPPED else Path(source).expanduser()
    if path.exists():
        return path
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise LoadError(f"no such model folder: {source}")
    from huggingface_hub import snapshot_download

    try:
        place = Path(snapshot_download(source, allow_patterns=["*.json", "*.safetensors"]))
        if not any(place.glob("*.safetensors")):
            place = Path(snapshot_download(source, allow_patterns=["*.json", *PICKLES]))
    except Exception as error:  # the hub, the network and the cache have errors of their own
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise LoadError(f"{source}: no such folder, and no such model in the hub's cache or on the hub ({first[0]})") from error
    return place


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files, else the pickles; with an index those that it names."""
    for name, patterns in ((WEIGHTS, ("*.safetensors",)), ("pytorch_model.bin", PICKLES)):
        index = folder / f"{name}.index.json"
        if index.exists():
            try:
                files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                raise LoadError(f"{index} is not an index of weights: {error!r}") from error
            if missing := [file for file in files if not (folder / file).is_file()]:
                raise LoadError(f"{folder} is incomplete: {index.name} names {missing[0]}, which is not there")
            return [folder / file for file in files]
        found = sorted({file for pattern in patterns for file in folder.glob(pattern) if not NOT_WEIGHTS.search(file.name)})
        if found:
            return found
    return []


def _open_safetensors(path: Path) -> dict[str, Stored]:
    from safetensors import SafetensorError, safe_open

    def load(name: str) -> Tensor:
        try:
            return file.get_tensor(name)
        except SafetensorError as error:
            raise LoadError(f"{path} is damaged at tensor {name}: {error}") from error

    try:
        file: Any = safe_open(path, framework="pt")
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{path} is not a safetensors file, or damaged: {error}") from error
    return {name: Stored(shape, lambda name=name: load(name), path.name) for name, shape in shapes.items()}  # type: ignore[misc]


def _open_pickle(path: Path) -> dict[str, Stored]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except UnpicklingError as error:
        code = re.search(r"GLOBAL (\S+)", str(error))
        if not code and not re.search("Can only|Trying to", str(error)):
            raise LoadError(f"{path} is damaged, or not a file of PyTorch weights") from error
        named = f" ({code[1]})" if code else ""
        raise LoadError(
            f"{path} holds more than tensors{named}: loading it would run code, so it is refused; use a safetensors file"
        ) from error
    except Exception as error:  # of many kinds, for a damaged file
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise LoadError(f"{path} is damaged, or not a file of PyTorch weights: {first[0]}") from error
    if not isinstance(content, dict):
        raise LoadError(f"{path} holds a {type(content).__name__}, not tensors by name")
    if wrong := next((name for name, value in content.items() if not isinstance(value, Tensor)), None):
        raise LoadError(f"{path}: {wrong!r} is a {type(content[wrong]).__name__}, not a tensor; only tensors by name are read")
    return {
        str(name): Stored(tuple(value.shape), lambda value=value: value, path.name)  # type: ignore[misc]
        for name, value in content.items()
    }
