"""`outrider serve`: an OpenAI-compatible server."""

from __future__ import annotations

import re
import socket
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Sequence

from typer import Option

from ..errors import LoadError, ParameterError
from .options import Decoding, Pair, flags
from .session import open_drafter, open_engine, say

if TYPE_CHECKING:
    from ..engine import Engine

NETWORK, LIMITS = "The network", "Limits"


@dataclass(frozen=True)
class Network:
    """Where it listens, and to whom."""

    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 for all.", rich_help_panel=NETWORK)] = "127.0.0.1"
    port: Annotated[int, Option(min=0, max=65535, help="0: any that is free.", rich_help_panel=NETWORK)] = 8000
    api_key: Annotated[
        str | None,
        Option(
            envvar="OUTRIDER_API_KEY",
            show_envvar=True,
            help="What requests must bring as a bearer token.",
            rich_help_panel=NETWORK,
        ),
    ] = None
    cors: Annotated[
        list[str], Option(metavar="ORIGIN", help="Pages of this origin may ask; repeatable.", rich_help_panel=NETWORK)
    ] = field(default_factory=list)
    allow_host: Annotated[
        list[str],
        Option(
            metavar="NAME",
            help="Requests may call it by this name, too; repeatable. On a loopback address, or where one is given, names other than "
            "localhost are refused.",
            rich_help_panel=NETWORK,
        ),
    ] = field(default_factory=list)
    grace: Annotated[
        float, Option(min=0, max=3600, help="Seconds for running requests at shutdown.", rich_help_panel=NETWORK)
    ] = 30.0


@dataclass(frozen=True)
class Bounds:
    """How much it takes on."""

    batch: Annotated[int, Option(min=1, max=1024, help="Most sequences that decode together.", rich_help_panel=LIMITS)] = 16
    queue: Annotated[int, Option(min=0, help="Most that wait beyond these.", rich_help_panel=LIMITS)] = 64
    chunk: Annotated[int, Option(min=1, help="Prompt tokens computed between two rounds.", rich_help_panel=LIMITS)] = 128
    prefixes: Annotated[int, Option(min=0, help="Ended sequences kept for those that begin alike.", rich_help_panel=LIMITS)] = (
        16
    )
    cache_tokens: Annotated[
        int | None, Option(min=1, help="Most tokens in the cache; default: what fits.", rich_help_panel=LIMITS)
    ] = None
    max_body: Annotated[int, Option(min=1024, help="Bytes of a request.", rich_help_panel=LIMITS)] = 8 * 2**20


@dataclass(frozen=True)
class Public:
    """What requests see of it, and what is kept of them."""

    name: Annotated[str | None, Option(help="The model's name in requests; default: the target's last part.")] = None
    also: Annotated[list[str], Option(metavar="DRAFTER", help="Another drafter that requests may choose; repeatable.")] = field(
        default_factory=list
    )
    traces: Annotated[str | None, Option(metavar="FOLDER", help="Keep traces of requests that ask for one.")] = None
    log_prompts: Annotated[bool, Option("--log-prompts", help="Write prompts and answers to the log.")] = False


@flags
def serve(pair: Pair, loading: Decoding, network: Network, bounds: Bounds, public: Public) -> None:
    """Serve a model over HTTP as OpenAI's API does. Ctrl-C lets running requests finish; a second one ends them."""
    try:
        from ..server import Limits, Options, Served, make_app
        from ..server.serve import Server, is_loopback
    except ImportError as error:
        raise LoadError(f"the server needs {error.name}: pip install 'outrider[server]'") from error
    for name in network.allow_host:
        if not re.fullmatch(r"[^/:@\s]+", name):
            raise ParameterError(f"--allow-host {name!r}: give a name alone, without scheme, port or path")
    with closing(listen(network)) as listener, closing(open_engine(pair, loading)) as engine:
        served = Served(public.name or public_name(pair.target), engine, other_drafters(public.also, engine, loading))
        limits = Limits(bounds.batch, bounds.queue, bounds.chunk, bounds.prefixes, cache_tokens(bounds, engine))
        host, port = listener.getsockname()[:2]
        hosts = tuple(network.allow_host) if network.allow_host or is_loopback(host) else None
        options = Options(
            limits, network.api_key, tuple(network.cors), hosts, bounds.max_body, public.traces, public.log_prompts
        )
        app = make_app(served, options)
        if not network.api_key and not is_loopback(host):
            say("warning: everybody who reaches this machine can use the server: set --api-key or OUTRIDER_API_KEY")
        shown = f"[{host}]" if ":" in host else host
        say(f"serving {served.name!r} at http://{shown}:{port} (OpenAI's API at /v1, a chat page at /)")
        with suppress(KeyboardInterrupt):  # the signal that ended it, raised once more when all is over
            Server(app, host, port, network.grace).run(sockets=[listener])


def listen(network: Network) -> socket.socket:
    """The socket, before a model is loaded in vain."""
    family = socket.AF_INET6 if ":" in network.host else socket.AF_INET
    try:
        return socket.create_server((network.host, network.port), family=family)
    except OSError as error:
        raise ParameterError(
            f"cannot listen on {network.host}, port {network.port}: {error.strerror or error}; choose another --host or --port"
        ) from error


def public_name(target: str) -> str:
    """The last part of a path or hub id."""
    return Path(target).name.removesuffix(".gguf") or target


def other_drafters(names: Sequence[str], engine: Engine, loading: Decoding) -> dict[str, Engine]:
    """Engines over the same target, by the drafter's name as it was given, its folders left out."""
    from ..drafters import TABLE
    from ..engine import Engine

    made: dict[str, Engine] = {}
    for name in names:
        drafter = open_drafter(name, engine.target, {}, loading)
        public = name if name in TABLE else public_name(name)
        made[public] = Engine(engine.target, drafter, engine.pace, engine.accept)
    return made


def cache_tokens(bounds: Bounds, engine: Engine) -> int | None:
    """As asked for; else what the library has set aside, or half of the memory that is free."""
    import psutil
    import torch

    target = engine.target
    if bounds.cache_tokens is not None:
        return bounds.cache_tokens
    if set_aside := target.describe().get("placement", {}).get("n_ctx"):
        return set_aside
    per_token = target.memory().get("kv_per_token")
    if not per_token:
        return None
    free = torch.cuda.mem_get_info(target.device)[0] if target.device.type == "cuda" else psutil.virtual_memory().available
    return max(free // 2 // (2 * per_token), target.context_length)  # a slot's memory grows by doubling
