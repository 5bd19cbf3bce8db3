"""`outrider data`: training text from the target itself."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from typer import Argument, Option

from ..errors import ParameterError
from .options import Place, flags
from .session import INTERRUPTED, has_template, on_stdout, open_target, print_json, say

if TYPE_CHECKING:
    from ..train.store import Store

EVERY = 10.0
"""Seconds between two lines of progress."""


@flags
def data(
    loading: Place,
    target: Annotated[str, Argument(help="Target: a packaged model's name, a folder, a hub id, a GGUF file.")],
    out: Annotated[str, Option("-o", "--out", metavar="DIR", help="Where the data goes; what is there is gone on with.")],
    prompts: Annotated[
        list[str] | None,
        Option("--prompts", metavar="FILE", help="JSONL with prompts, in one of the usual shapes; repeatable."),
    ] = None,
    magpie: Annotated[
        float | None,
        Option(help="Share of samples whose prompts the target makes itself; by default 1 without --prompts, else 0."),
    ] = None,
    tokens: Annotated[int, Option(help="Stop at so many tokens, prompts included.")] = 500_000,
    max_tokens: Annotated[int, Option(help="Of an answer.")] = 128,
    max_prompt: Annotated[int, Option(help="Longer prompts are left out.")] = 1024,
    temperature: Annotated[float, Option(help="Of answers; 0 is best for a drafter that will draft greedy text.")] = 0.0,
    magpie_temperature: Annotated[float, Option(help="Of prompts that the target makes.")] = 1.0,
    magpie_top_p: Annotated[float, Option(help="Of prompts that the target makes.")] = 0.95,
    min_distinct: Annotated[float, Option(help="Least share of different 4-grams in an answer.")] = 0.5,
    batch: Annotated[int, Option(help="Sequences in one pass.")] = 32,
    seed: Annotated[int, Option(help="Of all draws.")] = 0,
    raw: Annotated[bool, Option("--raw", help="Prompts are plain text, without a chat template.")] = False,
    json: Annotated[bool, Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Make training text for a drafter: prompts from files or of the target's own making, answered by the target."""
    from ..train.data import Recipe, as_tokens, generate, report
    from ..train.prompts import read_conversations

    recipe = Recipe(
        tokens=tokens,
        batch=batch,
        temperature=temperature,
        max_tokens=max_tokens,
        magpie=magpie if magpie is not None else 0.0 if prompts else 1.0,
        magpie_temperature=magpie_temperature,
        magpie_top_p=magpie_top_p,
        max_prompt=max_prompt,
        min_distinct=min_distinct,
        seed=seed,
    )
    conversations = [conversation for path in prompts or () for conversation in read_conversations(path)]
    if raw and recipe.magpie:
        raise ParameterError(
            "--raw is for prompts from files: without a chat template the target makes none; give --prompts and --magpie 0"
        )
    model = open_target(target, loading)
    if not raw and not has_template(model):
        raise ParameterError(f"{target} has no chat template: give --prompts with --raw, so that they are taken as plain text")
    ready = as_tokens(model, conversations, recipe, raw)
    if len(ready) < len(conversations):
        say(f"{len(conversations) - len(ready)} of {len(conversations)} prompts are too long and left out")
    store = open_store(Path(out), model.vocab_size, target, asdict(recipe))
    interrupted = False
    try:
        generate(model, store, recipe, ready, Progress(tokens, store.total))
    except KeyboardInterrupt:
        interrupted = True
        say(f"interrupted; {store.total} tokens are kept, the same command goes on")
    if not interrupted or store.total:
        found = report(store)
        if json:
            print_json({"folder": out, **found})
        else:
            on_stdout().print(table(found))
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def open_store(folder: Path, vocab_size: int, target: str, recipe: dict[str, Any]) -> Store:
    """What is there already, if it is of this target; else a new one."""
    from ..train.store import Store

    if not (folder / "data.json").exists():
        return Store.create(folder, vocab_size, {"target": target, "recipe": recipe})
    store = Store(folder)
    if (made := store.facts.get("target")) != target:
        raise ParameterError(f"{folder} holds text of {made}, not of {target}: give another -o")
    return store


class Progress:
    """A line every few seconds."""

    def __init__(self, wanted: int, had: int):
        self.wanted, self.had = wanted, had
        self._last = time.perf_counter()

    def __call__(self, store: Store, seconds: float) -> None:
        if time.perf_counter() - self._last < EVERY and store.total < self.wanted:
            return
        self._last = time.perf_counter()
        rate = (store.total - self.had) / seconds
        left = f", {(self.wanted - store.total) / rate / 60:.0f} min left" if rate and store.total < self.wanted else ""
        print(f"{store.total} of {self.wanted} tokens, {rate:.0f} tokens/s{left}", file=sys.stderr, flush=True)


def table(found: dict[str, Any]) -> Table:
    result = Table("", "")
    for name in ("samples", "tokens", "answer_tokens"):
        result.add_row(name.replace("_", " "), str(found[name]))
    result.add_row("share of the mask", f"{found['mask_share']:.1%}")
    result.add_row("tokens a sample", ", ".join(f"{name} {value:.0f}" for name, value in found["length"].items()))
    for name in ("sources", "dropped"):
        result.add_row(name, ", ".join(f"{key} {count}" for key, count in found[name].items()) or "none")
    result.add_row("size", f"{found['bytes'] / 1e6:.2f} MB")
    return result
