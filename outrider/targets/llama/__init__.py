"""llama.cpp and its relatives through their C interface: which library there is, and what all of them offer.

`library.Library` is what the GGUF target sees; `ik.py` and `mainline.py` are the libraries.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util

from ...errors import LoadError, ParameterError
from .library import Library

PLACES = {"ik": ("ik_llama_cpp", "ik:IkLibrary"), "llama.cpp": ("llama_cpp", "mainline:MainlineLibrary")}
"""Name on the command line: the Python package, and where its module here is."""
INSTALL = "pip install 'outrider[gguf]', or llama-cpp-python for GPUs (docs/gguf.md)"


def installed() -> list[str]:
    """Names of the libraries whose Python package is there."""
    return [name for name, (package, _) in PLACES.items() if importlib.util.find_spec(package) is not None]


def candidates(name: str = "auto") -> list[Library]:
    """The libraries to try for a model, best first: the one called `name`, or all that load.

    With `auto` a library that can use a GPU comes first; without one, ik_llama.cpp, whose passes over several rows cost less
    on a CPU. Raises LoadError where there is none, ParameterError for a name that is not known.
    """
    if name != "auto" and name not in PLACES:
        raise ParameterError(f"unknown GGUF library {name!r}; known: auto, {', '.join(PLACES)}, transformers")
    there = installed()
    if name != "auto":
        if name not in there:
            raise LoadError(f"the GGUF library {name!r} needs the package {PLACES[name][0]}, which is not installed: {INSTALL}")
        return [_open(name)]
    if not there:
        raise LoadError(f"GGUF files need llama.cpp, and no binding of it is installed: {INSTALL}")
    found, problems = [], []
    for each in there:
        try:
            found.append(_open(each))
        except LoadError as error:
            problems.append(error)
    if not found:
        raise problems[0]
    return sorted(found, key=lambda library: not library.has_gpu)


@functools.cache
def _open(name: str) -> Library:
    package, place = PLACES[name]
    module, cls = place.split(":")
    try:
        return getattr(importlib.import_module(f".{module}", __package__), cls)()
    except (OSError, ImportError, AttributeError, RuntimeError) as error:
        raise LoadError(f"the package {package} is installed, but does not load: {error}") from error
