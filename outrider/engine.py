"""The library's front door: load a target with a drafter, generate, stream, converse."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Iterator, Mapping
from typing import Sequence as Many

from .calibrate import Calibrator
from .decode import Fixed, Pace, Sequence, close_sequence, decode, find_rule, open_sequence
from .drafters import Drafter, NoDrafter, load_drafter
from .drafters.auto import AutoDrafter
from .errors import LogitsError, ParameterError, PromptError
from .models import GGUF_ONLY, load_target, target_loading
from .sampling import SamplingParams
from .targets.base import Target
from .text import Message
from .trace import Round, Statistics, TokenLogprob, statistics

Prompt = str | Many[Message] | Many[int]
"""A text, a conversation, or token ids."""
AUTO = "auto"
"""The drafter, and the draft length, that are chosen in each round."""
WARM_TOKENS = 80
TEXT = """The ferry leaves at seven, crosses the bay and returns with the evening tide. def mean(values): return sum(values) / \
len(values)  # an empty list raises ZeroDivisionError. In 1854 a survey of 312 lighthouses found that most of them burnt whale oil; by 1910 \
none did, and the cheapest were unmanned."""
"""What passes are timed on: identical tokens would hide what a sparse model's experts cost."""
ACCEPTED = "give a text, a list of messages, a list of token ids (or a tensor or array of them), or a list of these"


@dataclass(frozen=True)
class Result:
    """What came of one prompt.

    tokens: every emitted token, the one that ended it included. text: without that token and without the stop string.
    finish_reason: ``stop``, ``length``, ``cancelled`` or ``error`` (then `error` says why, and `text` is what came before).
    logprobs: one entry a token, if asked for. seed: with rule `coupled` it gives the same text again.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] | None
    stats: Statistics
    rounds: tuple[Round, ...]
    prompt_tokens: int
    seed: int
    rule: str
    lossy: bool
    error: str | None = None


@dataclass(frozen=True)
class Chunk:
    """What one round added to one sequence. pieces: the text in parts, with whether each was drafted."""

    sequence: int
    text: str
    tokens: tuple[int, ...]
    pieces: tuple[tuple[str, bool], ...]
    finish_reason: str | None
    round: Round | None


class Engine:
    """A target with a drafter.

    draft: tokens to draft in a round; ``auto``, as many as pay; or a Pace that decides. Of several drafters in one the calibrator
    always chooses; a number is then the most that it may draft. accept: name of the accept rule; by default `coupled` when a seed is
    given, else the longest exact rule for what the drafter draws.
    """

    def __init__(self, target: Target, drafter: Drafter, draft: int | str | Pace = AUTO, accept: str | None = None):
        if isinstance(draft, bool) or not (isinstance(draft, (int, Pace)) or draft == AUTO):
            raise ParameterError(f"draft must be a whole number, 'auto' or a Pace; got {draft!r}")
        if isinstance(draft, int) and not 0 <= draft <= 1024:
            raise ParameterError(f"draft must be from 0 to 1024; got {draft}")
        if accept is not None:
            find_rule(accept)
        if accept == "block" and drafter.drafts_trees:
            raise ParameterError(
                "the accept rule 'block' is defined for chains, and this drafter draws trees; use 'traversal', 'rejection' or 'coupled'"
            )
        self.target = target
        self.drafter = drafter
        self.pace = make_pace(drafter, draft)
        self.accept = accept

    def warm_up(self) -> None:
        """Let a calibrator time a few passes over different tokens, for about a second at most. Later it goes on with what rounds take."""
        if isinstance(self.pace, Calibrator) and not isinstance(self.drafter, NoDrafter):
            tokenizer, most = self.target.tokenizer, min(self.target.context_length, WARM_TOKENS)
            try:
                ids = tokenizer.encode_plain(TEXT) if tokenizer else []
            except ParameterError:  # it has not all of these letters
                ids = []
            if len(ids) < most:
                ids = [token % self.target.vocab_size for token in range(most)]
            self.pace.warm_up(self.target, ids[:most])

    def rule_for(self, params: SamplingParams) -> str:
        """The accept rule in force for `params`."""
        if self.accept:
            return self.accept
        if params.seed is not None:
            return "coupled"
        return "traversal" if self.drafter.drafts_trees else "block"

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of one prompt of any kind."""
        prompts, many = read_prompts(prompt)
        if many:
            raise PromptError(f"a list of prompts cannot be one prompt; {ACCEPTED}")
        (one,) = prompts
        if not one:
            raise PromptError("the prompt is empty")
        if isinstance(one, list) and isinstance(one[0], int):
            return one
        if self.target.tokenizer is None:
            raise PromptError(f"{self.target.name} has no tokenizer: give token ids")
        return self.target.tokenizer.encode(one) if isinstance(one, str) else self.target.tokenizer.chat(one)

    def sequences(self, prompts: Many[Prompt], params: SamplingParams | Many[SamplingParams], n: int = 1) -> list[Sequence]:
        """A Sequence for each prompt and choice, not yet opened."""
        if not isinstance(n, int) or n < 1:
            raise ParameterError(f"n must be 1 or more; got {n!r}")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        if not isinstance(each, Many) or not all(isinstance(p, SamplingParams) for p in each):
            raise ParameterError(f"params must be SamplingParams, or a list of them; got {params!r}")
        if len(each) != len(prompts):
            raise ParameterError(f"{len(prompts)} prompts, but {len(each)} sampling parameters")
        if any(p.prediction is not None for p in each) and not self.drafter.takes_prediction:
            raise ParameterError(
                f"the drafter {self.drafter.name!r} does not use a prediction; take 'prediction' or 'suffix', or leave it out"
            )
        made: list[Sequence] = []
        for prompt, p in zip(prompts, each):
            ids = self.encode(prompt)
            for choice in range(n):
                made.append(Sequence(self.target, ids, p, self.rule_for(p), choice, len(made)))
        return made

    def decode(self, sequences: Many[Sequence]) -> Iterator[Round]:
        """The Rounds of these sequences, decoded together."""
        return decode(self.target, self.drafter, sequences, self.pace)

    def generate(
        self,
        prompt: Prompt | Many[Prompt],
        params: SamplingParams | Many[SamplingParams] | None = None,
        n: int = 1,
        **values: Any,
    ) -> Any:
        """A Result for one prompt; a list of Results for a list of prompts, or when `n` asks for several choices of one.

        prompt: a text, a conversation (messages), token ids, or a list of any of these, decoded together.
        params, or its fields by name. Raises PromptError and ParameterError for what cannot be decoded, and LogitsError
        when the target's logits are no distribution (for a list the Result says so instead).
        """
        prompts, many = read_prompts(prompt)
        sequences = self.sequences(prompts, _params(params, values), n)
        rounds: dict[int, list[Round]] = defaultdict(list)
        self._share_prompts(sequences, n)
        for round in self.decode(sequences):
            rounds[round.sequence].append(round)
        results = [self.result(s, rounds[s.number]) for s in sequences]
        if many or n > 1:
            return results
        if results[0].error:
            raise LogitsError(results[0].error)
        return results[0]

    def stream(
        self,
        prompt: Prompt | Many[Prompt],
        params: SamplingParams | Many[SamplingParams] | None = None,
        n: int = 1,
        **values: Any,
    ) -> Iterator[Chunk]:
        """Like `generate`, a Chunk for each round as it comes. Closing the iterator ends the decoding and frees its memory."""
        sequences = self.sequences(read_prompts(prompt)[0], _params(params, values), n)
        return self._stream(sequences, n)

    def _stream(self, sequences: list[Sequence], n: int = 1) -> Iterator[Chunk]:
        self._share_prompts(sequences, n)
        silent = {s.number for s in sequences}
        for round in self.decode(sequences):
            silent.discard(round.sequence)
            yield Chunk(round.sequence, round.text, round.emitted, round.pieces, round.finish, round)
            if round.error and len(sequences) == 1:
                raise LogitsError(round.error)
        for number in sorted(silent):  # no room for a single token
            yield Chunk(number, "", (), (), sequences[number].finish, None)

    def chat(self, messages: Many[Message] = ()) -> Chat:
        """A conversation that keeps its cache between turns."""
        return Chat(self, messages)

    def close(self) -> None:
        """Free the drafter. The target's memory goes with the last reference to it."""
        self.drafter.close()

    def _share_prompts(self, sequences: list[Sequence], n: int) -> None:
        """Several choices of one prompt prefill it once and fork."""
        try:
            for at in range(0, len(sequences) if n > 1 else 0, n):
                first, *others = sequences[at : at + n]
                open_sequence(self.target, self.drafter, first)
                for other in others:
                    other.attach(self.target.open(first.slot, first.slot.length), first.state.fork(other.sampler))
        except BaseException:
            for sequence in sequences:
                close_sequence(self.target, sequence)
            raise

    @staticmethod
    def result(s: Sequence, rounds: Many[Round]) -> Result:
        """What came of a sequence, from its Rounds."""
        logprobs = None
        if s.params.logprobs is not None:
            logprobs = tuple(entry for r in rounds for entry in r.logprobs or ())
        return Result(
            text=s.text,
            tokens=tuple(s.output),
            finish_reason=s.finish or "cancelled",
            logprobs=logprobs,
            stats=statistics(rounds),
            rounds=tuple(rounds),
            prompt_tokens=s.prompt_length,
            seed=s.sampler.seed,
            rule=s.rule,
            lossy=s.lossy,
            error=s.error,
        )


def make_pace(drafter: Drafter, draft: int | str | Pace) -> Pace:
    """The Pace that `draft` means for a drafter."""
    if isinstance(draft, Pace):
        return draft
    if isinstance(draft, int) and (draft == 0 or not isinstance(drafter, AutoDrafter)):
        return Fixed(draft)
    return Calibrator(drafter, draft) if isinstance(draft, int) else Calibrator(drafter)


class Chat:
    """A conversation. Each turn reuses the cache of what the turns have in common."""

    def __init__(self, engine: Engine, messages: Many[Message] = ()):
        self.engine = engine
        self.messages: list[Message] = list(messages)
        self._last: Sequence | None = None
        self._answering = False

    def send(self, text: str, params: SamplingParams | None = None, **values: Any) -> Iterator[Chunk]:
        """Say `text`; yields the answer as it comes. The turn joins `messages` when the answer is complete or given up: before
        that, nothing else can be said.
        """
        if self._answering:
            raise ParameterError(
                "the last answer is not finished: exhaust its iterator or close it, then send the next message"
            )
        turn = [*self.messages, {"role": "user", "content": text}]
        (sequence,) = self.engine.sequences([turn], _params(params, values))
        self._reuse(sequence)
        sequence.keep_open = True
        self._last = sequence
        return self._stream(sequence, turn)

    def _stream(self, sequence: Sequence, turn: list[Message]) -> Iterator[Chunk]:
        if self._answering or sequence is not self._last:
            raise ParameterError("this answer cannot begin: another message was sent, or the conversation was closed")
        self._answering = True
        try:
            yield from self.engine._stream([sequence])
        finally:
            self._answering = False
            self.messages = [*turn, {"role": "assistant", "content": sequence.text}]

    def _reuse(self, sequence: Sequence) -> None:
        last, self._last = self._last, None
        held = last and last.detach()
        if last is None or not held:
            return
        slot, state = held
        known = last.tokens[: slot.length]
        most = min(len(known), len(sequence.tokens) - 1)
        common = next((i for i in range(most) if known[i] != sequence.tokens[i]), most)
        self.engine.target.truncate(slot, common)
        state.truncate(common)
        state.sampler = sequence.sampler
        sequence.attach(slot, state)

    def close(self) -> None:
        """Free the conversation's cache. An answer that is still coming ends, and frees it then."""
        if self._last and self._answering:
            self._last.cancelled, self._last.keep_open = True, False
        elif held := self._last and self._last.detach():
            slot, state = held
            self.engine.target.close(slot)
            state.close()
        self._last = None


def load(
    target: str | Target,
    drafter: str | Drafter | None = AUTO,
    options: Mapping[str, Any] | None = None,
    draft: int | str | Pace = AUTO,
    accept: str | None = None,
    **loading: Any,
) -> Engine:
    """An Engine for `target` with `drafter`.

    target: a packaged model's name, a folder, a hub id, a GGUF file, or a Target. drafter: a name of the table
    (`outrider drafters`), the path or hub id of a smaller model, a Drafter, or None for plain decoding; options: its own.
    draft, accept: as `Engine` has them. loading: ``device``, ``dtype``, ``device_map``, ``trust_remote_code``, ``revision``,
    ``gguf_library``, ``gguf``, as `load_target` takes them.
    """
    if not isinstance(target, Target):
        target = load_target(target, **target_loading(target, _models_of(drafter, options), loading))
    elif loading:
        raise ParameterError(f"{', '.join(loading)}: the target is loaded already")
    if not isinstance(drafter, Drafter):
        passed = {name: loading[name] for name in ("device", "dtype", "trust_remote_code", *GGUF_ONLY) if name in loading}
        name = drafter or "none"
        drafter = load_drafter(name, target, options_for(name, options, accept), **passed)
    elif options:
        raise ParameterError("options: the drafter is made already")
    engine = Engine(target, drafter, draft, accept)
    engine.warm_up()
    return engine


def options_for(drafter: str, options: Mapping[str, Any] | None, accept: str | None) -> dict[str, Any]:
    """The options of a drafter under this rule: `block` is for chains, so ``auto`` drafts chains unless it is told otherwise."""
    chains = {"shape": "chain"} if drafter == AUTO and accept == "block" else {}
    return {**chains, **(options or {})}


def _models_of(drafter: Any, options: Mapping[str, Any] | None) -> list[str]:
    """What may name a draft model."""
    given = (drafter, (options or {}).get("model"))
    return [name for names in given if isinstance(names, str) for name in names.split(",")]


def _params(params: Any, values: dict[str, Any]) -> Any:
    if params is None:
        return SamplingParams.make(**values)
    if values:
        if not isinstance(params, SamplingParams):
            raise ParameterError(f"give {', '.join(values)} in each of the sampling parameters")
        SamplingParams.make(**values)  # for its message about unknown names
        return replace(params, **values)
    return params


def read_prompts(given: Any) -> tuple[list[Any], bool]:
    """The prompts in `given`, each a text, a list of messages or a list of token ids; and whether it was a list of prompts.

    Tensors and arrays count as lists, one message as a conversation. Raises PromptError for anything else.
    """
    if hasattr(given, "tolist"):
        given = given.tolist()
    if isinstance(given, str):
        return [given], False
    if isinstance(given, Mapping):
        return [[given]], False
    if isinstance(given, (bytes, bytearray)) or not isinstance(given, Many):
        raise PromptError(f"a prompt cannot be {type(given).__name__}; {ACCEPTED}")
    items = [item.tolist() if hasattr(item, "tolist") else item for item in given]
    if all(isinstance(item, Integral) and not isinstance(item, bool) for item in items):
        return [[int(item) for item in items]], False
    if all(isinstance(item, Mapping) for item in items):
        return [items], False
    prompts: list[Any] = []
    for item in items:
        if isinstance(item, Mapping) or not isinstance(item, Many):
            kinds = ", ".join(dict.fromkeys(type(i).__name__ for i in items))
            raise PromptError(f"a prompt cannot be a list of {kinds}; {ACCEPTED}")
        inner, many = read_prompts(item)
        if many:
            raise PromptError(f"a list of prompts cannot be one prompt; {ACCEPTED}")
        prompts += inner
    return prompts, True
