"""A real server for tests: the application under uvicorn in a thread, on a port of its own, with a tiny model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator

import httpx2
from tiny import tiny_folder

from outrider.drafters.model import ModelDrafter, ModelOptions
from outrider.engine import Engine, load
from outrider.server import Limits, Options, Served, make_app
from outrider.server.serve import Server
from outrider.targets.transformers import TransformersTarget

NAME = "tiny"


class Running:
    """url: of the server. service: what its routes work with."""

    def __init__(self, server: Server, app: Any, port: int):
        self.server = server
        self.app = app
        self.service = app.state.service
        self.scheduler = self.service.scheduler
        self.url = f"http://127.0.0.1:{port}"

    def client(self, **options: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, **{"timeout": 300, **options})

    def chat(self, **body: Any) -> dict[str, Any]:
        """The answer to one request; an AssertionError for any other status than 200."""
        messages = body.pop("messages", None) or [{"role": "user", "content": body.pop("prompt", "The bridge over the river")}]
        with self.client() as client:
            got = client.post("/v1/chat/completions", json={"model": NAME, "messages": messages, "max_tokens": 24, **body})
        assert got.status_code == 200, got.text
        return got.json()

    def until_idle(self, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while self.scheduler.running or self.scheduler.waiting:
            assert time.monotonic() < end, "the engine does not come to rest"
            time.sleep(0.01)

    def slots(self) -> int:
        """Slots that the target has open beyond those of the prefix cache."""
        return count_open(self.service.served.engine.target) - len(self.scheduler.prefixes)


def tiny_target(**values: Any) -> TransformersTarget:
    """A tiny model in float32, which counts its open slots."""
    return Counting.load(str(tiny_folder(context=512, eos=None, **values)), device="cpu", dtype="float32")


class Counting(TransformersTarget):
    opened = 0

    def open(self, *args: Any, **values: Any) -> Any:
        self.opened += 1
        return super().open(*args, **values)

    def close(self, slot: Any) -> None:
        self.opened -= not slot.closed
        super().close(slot)


def count_open(target: Any) -> int:
    return target.opened


def served(drafter: str = "suffix", draft: int = 4, **values: Any) -> Served:
    """A tiny target; requests may also choose a model drafter, nearly the same model."""
    target = tiny_target(**values)
    engine = load(target, drafter, draft=draft)
    model = ModelDrafter(tiny_target(memory=0.1), ModelOptions(min_probability=0.0))
    return Served(NAME, engine, {"model": Engine(target, model, draft)})


@contextmanager
def serving(what: Served | None = None, grace: float = 5.0, **options: Any) -> Iterator[Running]:
    """A running server; options: `Options`' and `Limits`'."""
    limits = {name: options.pop(name) for name in Limits.__dataclass_fields__ if name in options}
    app = make_app(what or served(), Options(Limits(**limits), **options))
    server = Server(app, "127.0.0.1", 0, grace)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Running(server, app, port)
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive(), "the server does not end"


@contextmanager
def process(log: Path, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`outrider serve` as a process of its own; its address and the process. log: gets what it writes. It is ended by SIGTERM."""
    command = [
        sys.executable,
        "-c",
        "from outrider.cli import main; main()",
        "serve",
        "--port",
        "0",
        "--name",
        NAME,
        *arguments,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with open(log, "wb") as file, subprocess.Popen(command, stderr=file, stdout=file, env=environment) as running:
        try:
            end = time.monotonic() + 120
            while " at http" not in (said := log.read_text()):
                assert running.poll() is None and time.monotonic() < end, said
                time.sleep(0.1)
            url = said.split(" at ")[1].split(" ")[0]
            with httpx2.Client() as client:
                while True:
                    try:
                        client.get(f"{url}/health")
                        break
                    except httpx2.TransportError:
                        time.sleep(0.05)
            yield url, running
        finally:
            running.send_signal(signal.SIGTERM)
            running.wait(60)
