"""Training text from the target itself: prompts from files or of its own making (Magpie), answers sampled many at a time."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import Counter, deque
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, Callable, Iterable, Iterator, Sequence

from ..decode import Batch, Fixed
from ..decode import Sequence as Decoding
from ..drafters import NoDrafter
from ..errors import ParameterError
from ..sampling import SamplingParams
from ..targets.base import Target
from ..text import Message
from .prompts import user_prefix
from .store import Sample, Store

SHORTEST = 3  # tokens of a prompt that the target makes
NGRAM = 4


@dataclass(frozen=True)
class Recipe:
    """How text is made. tokens: stop when there are so many. batch: sequences in one pass. temperature, max_tokens: of answers.
    magpie: share of samples whose prompts the target makes. magpie_temperature, magpie_top_p, magpie_tokens: how it draws them.
    max_prompt: longer prompts are left out. min_distinct: an answer with a smaller share of different 4-grams is left out.
    seed: of all draws.
    """

    tokens: int = 500_000
    batch: int = 32
    temperature: float = 0.0
    max_tokens: int = 128
    magpie: float = 0.5
    magpie_temperature: float = 1.0
    magpie_top_p: float = 0.95
    magpie_tokens: int = 96
    max_prompt: int = 1024
    min_distinct: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "batch", "max_tokens", "magpie_tokens", "max_prompt"):
            if getattr(self, name) < 1:
                raise ParameterError(f"{name} must be 1 or more; got {getattr(self, name)}")
        for name in ("magpie", "min_distinct"):
            if not 0 <= getattr(self, name) <= 1:
                raise ParameterError(f"{name} must be from 0 to 1; got {getattr(self, name)}")
        self.params(True, "")
        self.params(False, "")

    def params(self, asks: bool, key: str) -> SamplingParams:
        """For a prompt (asks) or an answer. key: what the draws belong to; another key draws others."""
        digest = hashlib.blake2b(f"{self.seed}/{asks}/{key}".encode(), digest_size=7).digest()
        seed = int.from_bytes(digest, "big")
        if asks:
            return SamplingParams(self.magpie_temperature, top_p=self.magpie_top_p, max_tokens=self.magpie_tokens, seed=seed)
        return SamplingParams(self.temperature, max_tokens=self.max_tokens, seed=seed)


@dataclass(frozen=True)
class Turn:
    """What the target is to say next. asks: whether that is a prompt. key: of the prompt, or the number of a prompt in the making."""

    tokens: tuple[int, ...]
    key: str
    source: str
    asks: bool = False


Progress = Callable[[Store, float], None]
"""Called after each sample with the store and the seconds since the start."""


def generate(
    target: Target,
    store: Store,
    recipe: Recipe,
    prompts: Iterable[list[int]] = (),
    progress: Progress = lambda *_: None,
) -> None:
    """Fill the store up to the recipe's tokens, or until the prompts are used up. What it has already is not made again.

    prompts: token ids from files, in the order in which they are used. May be interrupted at any time: finished samples are kept.
    Raises ParameterError where the target cannot make prompts, and none are given.
    """
    turns = _Turns(target, store, recipe, prompts)
    began = time.perf_counter()
    with store.append() as writer:
        for turn, output in _say(target, turns, recipe):
            if turn.asks:
                if why := turns.answer_next(turn, output):
                    writer.add(None, turn.key, turn.source, why)
                continue
            distinct = len(set(_ngrams(output))) / max(len(output) - NGRAM + 1, 1)
            bad = distinct < recipe.min_distinct and len(output) > NGRAM
            sample = Sample((*turn.tokens, *output), len(turn.tokens))
            writer.add(None if bad else sample, turn.key, turn.source, "repetitive answer" if bad else None)
            progress(store, time.perf_counter() - began)
            if store.total >= recipe.tokens:
                return


class _Turns:
    """What is to be said next: answers to the target's own prompts first, then prompts from files and new ones by their shares."""

    def __init__(self, target: Target, store: Store, recipe: Recipe, prompts: Iterable[list[int]]):
        self._target, self._recipe = target, recipe
        self._prompts: Iterator[list[int]] = iter(prompts)
        self._ready: deque[Turn] = deque()
        self._seen = store.keys
        self._taken = Counter(entry.source for entry in store.entries)
        self._prefix = tuple(user_prefix(target)) if recipe.magpie else ()
        self._number = self._taken["magpie"]

    def __iter__(self) -> Iterator[Turn]:
        return self

    def __next__(self) -> Turn:
        if self._ready:
            return self._ready.popleft()
        if self._recipe.magpie and self._taken["magpie"] <= self._recipe.magpie * (self._taken.total() + 1):
            return self._ask()
        for tokens in self._prompts:
            if (key := _key(tokens)) not in self._seen:
                self._seen.add(key)
                self._taken["file"] += 1
                return Turn(tuple(tokens), key, "file")
        if self._recipe.magpie:
            return self._ask()
        raise StopIteration

    def _ask(self) -> Turn:
        self._taken["magpie"] += 1
        self._number += 1
        return Turn(self._prefix, f"magpie {self._number}", "magpie", asks=True)

    def answer_next(self, turn: Turn, output: Sequence[int]) -> str | None:
        """Have a prompt that the target made answered; why not, if it is of no use."""
        tokenizer = self._target.tokenizer
        assert tokenizer is not None
        if not output or output[-1] not in self._target.eos:
            return "prompt not finished"
        if len(output) <= SHORTEST:
            return "prompt too short"
        text = tokenizer.decode(output[:-1]).strip()
        if not text:
            return "prompt too short"
        tokens = tokenizer.chat([{"role": "user", "content": text}])  # as a server would send it
        if (key := _key(tokens)) in self._seen:
            return "prompt known"
        self._seen.add(key)
        self._ready.append(Turn(tuple(tokens), key, turn.source))
        return None


def _say(target: Target, turns: Iterator[Turn], recipe: Recipe) -> Iterator[tuple[Turn, list[int]]]:
    """What the target says to each turn, as it is finished; whenever one is, another takes its place in the batch."""
    batch = Batch(target, NoDrafter(), Fixed(0))
    active: dict[int, tuple[Turn, Decoding]] = {}
    try:
        for number in itertools.count():
            while len(active) < recipe.batch and (turn := next(turns, None)):
                key = number * recipe.batch + len(active)
                sequence = Decoding(target, turn.tokens, recipe.params(turn.asks, turn.key), "block", number=key)
                active[key] = turn, sequence
                batch.add(sequence)
            if not active:
                return
            batch.step()
            for key in [key for key, (_, sequence) in active.items() if sequence.finish]:
                turn, sequence = active.pop(key)
                yield turn, sequence.output
    finally:
        batch.close()


def as_tokens(target: Target, conversations: Sequence[Sequence[Message]], recipe: Recipe, raw: bool) -> list[list[int]]:
    """Token ids of prompts, those left out that are longer than `max_prompt`, or too long for the context with their answer.

    raw: a conversation's last turn is a plain text, without a chat template. Raises ParameterError where not one is left.
    """
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise ParameterError(f"{target.name} has no tokenizer, so it cannot read prompts")
    most = min(recipe.max_prompt, target.context_length - recipe.max_tokens)
    made = [tokenizer.encode(c[-1]["content"]) if raw else tokenizer.chat(c) for c in conversations]
    fitting = [tokens for tokens in made if 0 < len(tokens) <= most]
    if made and not fitting:
        raise ParameterError(
            f"every prompt is longer than {most} tokens (the shortest has {min(map(len, made))}): raise --max-prompt, or lower "
            f"--max-tokens; the context of {target.name} ends at {target.context_length}"
        )
    return fitting


def report(store: Store) -> dict[str, Any]:
    """Lengths, the mask's share, where the samples are from and what was left out.

    Raises ParameterError when there is no sample, or when the loss would be taken on all tokens or on none.
    """
    kept = [entry for entry in store.entries if entry.n]
    if not kept:
        raise ParameterError(f"{store.folder} has no samples: {_dropped(store) or 'no prompt was answered'}")
    answers = sum(entry.n - entry.prompt for entry in kept)
    share = answers / store.total
    if not 0 < share < 1:
        raise ParameterError(
            f"{store.folder}: the loss would be taken on {share:.0%} of the tokens; prompts and answers must both be there"
        )
    lengths = [entry.n for entry in kept]
    return {
        "samples": len(kept),
        "tokens": store.total,
        "answer_tokens": answers,
        "mask_share": share,
        "length": {"mean": mean(lengths), "median": median(lengths), "max": max(lengths)},
        "sources": dict(Counter(entry.source for entry in kept)),
        "dropped": dict(_dropped(store)),
        "bytes": sum(path.stat().st_size for path in store.folder.iterdir()),
    }


def _dropped(store: Store) -> Counter[str]:
    return Counter(entry.dropped for entry in store.entries if entry.dropped)


def _ngrams(tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return zip(*(tokens[i:] for i in range(NGRAM)))


def _key(tokens: Sequence[int]) -> str:
    return hashlib.blake2b(str(list(tokens)).encode(), digest_size=8).hexdigest()
