"""The server under load: throughput with speculation beside without, and requests that bring a prediction.

    python benchmarks/server.py load TARGET [--drafter auto] [--draft auto] [--prompts SPEC_BENCH.jsonl] [--clients 1,2,4,8,16]
    python benchmarks/server.py prediction TARGET [--lines 150]

The defaults of --drafter and --draft are the server's own. Results are saved in benchmarks/results, as server-KIND.json or as --name says.

load: runs with and without speculation alternate. In a run each client sends its requests one after another; its throughput is all
tokens over the run's time, prompts included. No prefix is kept between requests. The ratio's 95 % bound is Student's, over pairs.
prediction: one file is to be copied with a small edit; the same greedy request without speculation, without the prediction, and with the
old file as its prediction. An answer may have as many tokens as the file: small models may not find the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any, Iterator, Sequence

import httpx2
from common import prompts, save

import outrider
from outrider.server import Limits, Options, Served, make_app
from outrider.server.serve import Server

T95 = (math.nan, 6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)
"""Student's 95 % quantile, one-sided, by degrees of freedom."""
NAME = "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    load = kinds.add_parser("load")
    load.add_argument("target")
    load.add_argument("--prompts")
    load.add_argument("--categories", default="coding,writing,math,extraction", help="of Spec-Bench, with commas")
    load.add_argument("--clients", default="1,2,4,8,16")
    load.add_argument("--requests", type=int, default=8, help="of a run at least; no client sends fewer than one")
    load.add_argument("--tokens", type=int, default=48)
    load.add_argument("--pairs", type=int, default=4)
    prediction = kinds.add_parser("prediction")
    prediction.add_argument("target")
    prediction.add_argument("--lines", type=int, default=150)
    for each in (load, prediction):
        each.add_argument("--drafter", default=outrider.engine.AUTO)
        each.add_argument("--draft", default=outrider.engine.AUTO)
        each.add_argument("--name", default=None)
    arguments = parser.parse_args()
    asyncio.run((under_load if arguments.kind == "load" else with_prediction)(arguments))


def told(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments for a result file: of paths the last part."""
    return {
        name: Path(value).name if name in ("target", "prompts") and value else value for name, value in vars(arguments).items()
    }


class Running:
    """A server on a free port of this process, and a client for it."""

    def __init__(self, arguments: argparse.Namespace):
        draft = int(arguments.draft) if arguments.draft.isdecimal() else arguments.draft
        self.engine = outrider.load(arguments.target, arguments.drafter, draft=draft)
        app = make_app(Served(NAME, self.engine), Options(Limits(prefixes=0)))
        self.server = Server(app, "127.0.0.1", 0)

    async def __aenter__(self) -> Running:
        self._task = asyncio.create_task(asyncio.to_thread(self.server.run))
        while not self.server.started:
            await asyncio.sleep(0.01)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        limits = httpx2.Limits(max_connections=64)
        self.client = httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600, limits=limits)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()
        self.server.should_exit = True
        await self._task

    async def ask(self, **body: Any) -> dict[str, Any]:
        """One streamed chat completion: seconds, seconds to the first token, text, usage, what was drafted."""
        body = {"model": NAME, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}, **body}
        began, first, text = time.perf_counter(), None, ""
        usage: dict[str, Any] = {}
        report: dict[str, Any] = {}
        async with self.client.stream("POST", "/v1/chat/completions", json=body) as got:
            assert got.status_code == 200, await got.aread()
            async for line in got.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                for choice in chunk["choices"]:
                    text += choice["delta"].get("content") or ""
                    first = first or (time.perf_counter() if choice["delta"].get("content") else None)
                usage = chunk.get("usage", usage)
                report = chunk.get("speculation", report)
        ended = time.perf_counter()
        return {
            "seconds": ended - began,
            "first": (first or ended) - began,
            "text": text,
            "usage": usage,
            "report": {name: report.get(name) for name in ("passes", "proposed", "accepted")},
        }


# ---- load ------------------------------------------------------------------------------------------------------------------


async def under_load(arguments: argparse.Namespace) -> None:
    texts = prompts(arguments.prompts, tuple(arguments.categories.split(",")), 40)
    levels: list[dict[str, Any]] = []
    async with Running(arguments) as server:
        await run(server, texts[:4], 2, arguments.tokens, True)  # warm
        for clients in map(int, arguments.clients.split(",")):
            number = max(arguments.requests, clients)
            found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
            for pair in range(arguments.pairs):
                asked = [texts[(pair * number + i) % len(texts)] for i in range(number)]
                for on in (True, False) if pair % 2 else (False, True):
                    found[on].append(await run(server, asked, clients, arguments.tokens, on))
            levels.append(level(clients, found))
            print(shown(levels[-1]), flush=True)
    solo = next((max(each["on"], each["off"]) for each in levels if each["clients"] == 1), None)
    for each in levels:
        if solo:
            each["of_best_solo"] = max(each["on"], each["off"]) / solo
            print(f"{each['clients']} clients: {each['of_best_solo']:.2f} times the best of one after another")
    save(arguments.name or "server-load", {"arguments": told(arguments), "levels": levels})


async def run(server: Running, asked: Sequence[str], clients: int, tokens: int, on: bool) -> dict[str, float]:
    """Throughput and times of one run: `clients` share the requests."""
    waiting: Iterator[str] = iter(asked)
    answers: list[dict[str, Any]] = []

    async def client() -> None:
        for text in waiting:
            body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens}
            answers.append(await server.ask(**body, speculation={"report": True, **({} if on else {"drafter": "none"})}))

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    seconds = time.perf_counter() - began
    emitted = sum(answer["usage"]["completion_tokens"] for answer in answers)
    drafted = {name: sum(a["report"][name] or 0 for a in answers) for name in ("proposed", "accepted")}
    return {"throughput": emitted / seconds, "first": statistics.median(a["first"] for a in answers), **drafted}


def level(clients: int, found: dict[bool, list[dict[str, float]]]) -> dict[str, Any]:
    ratios = [on["throughput"] / off["throughput"] for on, off in zip(found[True], found[False])]
    mean, n = statistics.fmean(ratios), len(ratios)
    bound = mean - T95[min(n - 1, len(T95) - 1)] * statistics.stdev(ratios) / math.sqrt(n) if n > 1 else None
    made: dict[str, Any] = {"clients": clients, "ratio": mean, "bound": bound, "ratios": ratios}
    for on, name in ((True, "on"), (False, "off")):
        made[name] = statistics.fmean(each["throughput"] for each in found[on])
        made[f"first_{name}"] = statistics.median(each["first"] for each in found[on])
    for name in ("proposed", "accepted"):
        made[name] = sum(each[name] for each in found[True])
    return made


def shown(one: dict[str, Any]) -> str:
    bound = f", 95 % bound {one['bound']:.3f}" if one["bound"] is not None else ""
    return (
        f"{one['clients']:3} clients: {one['on']:7.1f} tokens/s with, {one['off']:7.1f} without speculation; ratio {one['ratio']:.3f}{bound}; "
        f"first token after {one['first_on']:.2f} and {one['first_off']:.2f} s; {one['accepted']:.0f} of {one['proposed']:.0f} drafted kept"
    )


# ---- prediction ------------------------------------------------------------------------------------------------------------


def a_file(lines: int) -> str:
    """Python source of so many lines."""
    made = ["import math", "", ""]
    for i in range(10_000):
        made += [
            f"def measure_{i}(values, scale={i + 1}):",
            f'    """Return measure {i} of the values, times the scale."""',
            "    if not values:",
            f"        raise ValueError('measure {i} needs values')",
            f"    total = sum(value ** {i % 4 + 1} for value in values)",
            f"    return scale * math.sqrt(total) + {i * 7 % 11}",
            "",
            "",
        ]
        if len(made) >= lines:
            break
    return "\n".join(made[:lines]) + "\n"


async def with_prediction(arguments: argparse.Namespace) -> None:
    source = a_file(arguments.lines)
    task = f"Rename the function measure_3 to spread in this file, and answer with the whole file and nothing else.\n\n```python\n{source}```"
    body: dict[str, Any] = {"messages": [{"role": "user", "content": task}], "stop": "\n```"}
    predicted = {"prediction": {"type": "content", "content": f"```python\n{source}```"}}
    runs = (
        ("without speculation", {"speculation": {"drafter": "none", "report": True}}),
        ("without the prediction", {"speculation": {"report": True}}),
        ("with the prediction", {**predicted, "speculation": {"report": True}}),
    )
    found: dict[str, Any] = {}
    async with Running(arguments) as server:
        await server.ask(messages=[{"role": "user", "content": a_file(8)}], max_tokens=8)  # warm
        body["max_tokens"] = len(server.engine.encode(source)) + 16
        for name, more in runs:
            got = found[name] = await server.ask(**body, **more)
            usage, seconds = got["usage"], got["seconds"]
            speed = usage["completion_tokens"] / seconds
            print(
                f"{name}: {usage['completion_tokens']} tokens in {seconds:.1f} s, the first after {got['first']:.1f} s "
                f"({speed:.1f} tokens/s), {got['report']}, usage {usage}",
                flush=True,
            )
    plain = found["without speculation"]
    for name, got in found.items():
        print(f"{name}: {plain['seconds'] / got['seconds']:.2f} times as fast, the same text: {got['text'] == plain['text']}")
    save(arguments.name or "server-prediction", {"arguments": told(arguments), "runs": found})


if __name__ == "__main__":
    main()
