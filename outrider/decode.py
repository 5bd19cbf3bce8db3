"""The loop: propose, forward, probabilities, accept, cut, commit, observe. It yields Rounds; all else consumes them.

Plain decoding is the same loop with anchor-only trees. Several sequences advance together, each with its own draft and its
own acceptance; one pass of the target serves them all.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Callable, Iterator
from typing import Sequence as Many

from torch import Tensor

from . import accept, relaxed
from .drafters.base import Ask, Drafter, State, Work
from .errors import DraftError, LogitsError, OutriderError, ParameterError, PromptError
from .logprobs import logprobs_of
from .sampling import Sampler, SamplingParams
from .targets.base import Slot, Target
from .text import Detokenizer, find_stop, held_back
from .trace import Clock, Round
from .tree import Budget, DraftTree

ALONE = 512
"""Prompt tokens that are computed at once where nothing else is running, so that a cancelled prompt ends soon."""


class Pace(ABC):
    """Decides how much each sequence may draft in a round."""

    @abstractmethod
    def budgets(self, sequences: Many[Sequence]) -> list[Budget]:
        """What each sequence may draft; nothing: its drafter is not called."""

    def propose(self, drafter: Drafter, sequences: Many[Sequence], work: Work) -> list[DraftTree]:
        """The drafts of those sequences of a drafter that may draft. What was chosen without chance may be cut here."""
        return drafter.propose(work)

    def learn(self, rounds: Many[Round]) -> None:
        """The rounds that came of it, in the order of the sequences."""


@dataclass(frozen=True)
class Fixed(Pace):
    """The same budget in every round: `draft` nodes, as deep as that allows."""

    draft: int

    def budgets(self, sequences: Many[Sequence]) -> list[Budget]:
        return [Budget(self.draft, self.draft)] * len(sequences)


class Sequence:
    """One prompt and what has been emitted for it. `tokens[-1]` is the anchor; the target's slot holds all before it."""

    def __init__(self, target: Target, prompt: Many[int], params: SamplingParams, rule: str, choice: int = 0, number: int = 0):
        if not prompt:
            raise PromptError("the prompt is empty: give at least one token")
        if len(prompt) > target.context_length:
            raise PromptError(
                f"the prompt has {len(prompt)} tokens, but the context of {target.name} ends at {target.context_length}"
            )
        if outside := next((t for t in prompt if not 0 <= t < target.vocab_size), None):
            raise PromptError(f"the prompt has token id {outside}; ids go from 0 to {target.vocab_size - 1}")
        if params.stop and target.tokenizer is None:
            raise ParameterError("stop needs a tokenizer, and this target has none; use stop_token_ids")
        self.number = number
        self.params = params
        self.rule = rule
        self.accept, self.lossy = find_rule(rule)
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        matcher = target.matcher(params)
        self.sampler = Sampler(params, prompt, target.vocab_size, target.eos, rule, choice, target.tokenizer, matcher)
        self.drafter: Drafter | None = None  # where it is not the batch's own
        self.most_drafted: int | None = None  # nodes in a round, where its owner wants fewer than the pace allows
        self._held: tuple[Slot, State] | None = None
        self.keep_open = False
        self.cancelled = False
        self.finish: str | None = None
        self.error: str | None = None
        self.at_fault = False  # whether the error lies in what it asks for
        self.text = ""
        self.rounds = 0
        self.prefill_ns = 0
        self._limit = min(len(prompt) + params.max_tokens, target.context_length)
        self._ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else target.eos)
        self._detokenizer = Detokenizer(target.tokenizer, prompt) if target.tokenizer else None
        self._unshown: list[tuple[str, bool]] = []
        self._shown = 0

    @property
    def is_open(self) -> bool:
        """Whether it holds a slot of the target and a state of the drafter."""
        return self._held is not None

    @property
    def slot(self) -> Slot:
        assert self._held is not None, "the sequence is not open"
        return self._held[0]

    @property
    def state(self) -> State:
        assert self._held is not None, "the sequence is not open"
        return self._held[1]

    def attach(self, slot: Slot, state: State) -> None:
        """Give it what it decodes with: new, forked, or from the turn before."""
        self._held = (slot, state)

    def detach(self) -> tuple[Slot, State] | None:
        """Take from it what it decoded with, if it still has it."""
        held, self._held = self._held, None
        return held

    @property
    def output(self) -> list[int]:
        """The emitted tokens."""
        return self.tokens[self.prompt_length :]

    @property
    def room(self) -> int:
        """How many more tokens may be emitted."""
        return self._limit - len(self.tokens)

    def cut(self, candidates: Many[int], drafted: int, stuck: int | None = None) -> list[int]:
        """Append `candidates` up to the first reason to end, and set `finish` if there is one. Returns what was kept.

        The one place where a sequence ends: end-of-generation tokens, stop tokens, stop strings, the grammar's end, max_tokens,
        the context limit. A stop within the budget wins over the budget. The first `drafted` candidates came from the draft.
        stuck: only so many of them may be emitted, and no token may follow these.
        """
        kept: list[int] = []
        for token in candidates[:stuck]:
            if self.room <= 0:
                self._finish("length")
                break
            kept.append(token)
            self.tokens.append(token)
            emitted = len(self.tokens) - self.prompt_length
            if token in self._ends:
                self._finish("stop")
                break
            piece = self._detokenizer.push(token) if self._detokenizer else ""
            self._unshown.append((piece, len(kept) <= drafted))
            self.text += piece
            if emitted >= self.params.min_tokens and (stop := find_stop(self.text, len(piece), self.params.stop)):
                self._finish("stop", stop[0])
                break
            if emitted >= self.params.min_tokens and self.sampler.is_over(kept):
                self._finish("stop")
                break
            if self.room <= 0:
                self._finish("length")
                break
        if stuck is not None and not self.finish:
            self._finish("error")
        return kept

    def _finish(self, reason: str, text_end: int | None = None) -> None:
        self.finish = reason
        if text_end is None and self._detokenizer and (rest := self._detokenizer.flush()):
            self.text += rest
            self._unshown.append((rest, False))
            if stop := find_stop(self.text, len(rest), self.params.stop):
                self.finish, text_end = "stop", stop[0]
        if text_end is not None:
            self.text = self.text[:text_end]

    def show(self) -> tuple[tuple[str, bool], ...]:
        """The text that has become final since the last call, in pieces with whether each was drafted."""
        hold = 0 if self.finish else held_back(self.text, self.params.stop)
        ready = len(self.text) - hold - self._shown
        self._shown += max(ready, 0)
        pieces = []
        while self._unshown and ready > 0:
            piece, drafted = self._unshown.pop(0)
            if len(piece) > ready:
                self._unshown.insert(0, (piece[ready:], drafted))
                piece = piece[:ready]
            if piece:
                pieces.append((piece, drafted))
            ready -= len(piece)
        return tuple(pieces)


def find_rule(name: str) -> tuple[accept.Rule, bool]:
    """The accept rule called `name`, and whether it is lossy."""
    if name in accept.RULES:
        return accept.RULES[name], False
    if name in relaxed.RULES:
        return relaxed.RULES[name], True
    raise ParameterError(f"unknown accept rule {name!r}; exact: {', '.join(accept.RULES)}; lossy: {', '.join(relaxed.RULES)}")


def decode(target: Target, drafter: Drafter, sequences: Many[Sequence], pace: Pace = Fixed(8)) -> Iterator[Round]:
    """Decode `sequences` together until each has ended; yields one Round per sequence and pass.

    Each sequence has its own parameters and accept rule. What ended sequences held is freed, also when the generator is closed
    early, unless they are marked `keep_open`.
    """
    batch = Batch(target, drafter, pace)
    for sequence in sequences:
        batch.add(sequence)
    try:
        while batch.is_busy:
            yield from batch.step()
    finally:
        batch.close()


class Batch:
    """Sequences that decode together; they join and leave between rounds.

    chunk: most prompt tokens that are computed between two rounds, so that a long prompt does not stall the others; None: whole
    prompts. prepare: called with each sequence right before its prompt is computed; it may attach a fork, so that less is to do.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        pace: Pace,
        chunk: int | None = None,
        prepare: Callable[[Sequence], None] | None = None,
    ):
        self.target = target
        self.drafter = drafter
        self.pace = pace
        self.chunk = chunk
        self.prepare = prepare
        self.joining: list[Sequence] = []
        self.running: list[Sequence] = []

    @property
    def is_busy(self) -> bool:
        return bool(self.joining or self.running)

    def add(self, sequence: Sequence) -> None:
        """Let the sequence join. To take it out early, mark it `cancelled`: it leaves before the next round."""
        self.joining.append(sequence)

    def step(self) -> list[Round]:
        """Compute prompts of those that join, and one round of all that run.

        When it raises an OutriderError, no sequence has changed, and `step_apart` can find out whose error it is.
        """
        self._leave()
        self._join()
        rounds = step(self.target, self.drafter, self.running, self.pace) if self.running else []
        self._leave()
        return rounds

    def step_apart(self) -> list[Round]:
        """One round of each sequence by itself, the newest first. What fails ends with its error and frees what it held."""
        rounds = []
        try:
            self._join()
        except OutriderError as error:
            self._fail(self.joining[0], error)
        for sequence in reversed(self.running):
            try:
                rounds += step(self.target, self.drafter, [sequence], self.pace)
            except OutriderError as error:
                self._fail(sequence, error)
        self._leave()
        return rounds

    def close(self) -> None:
        """Cancel what has not ended, and free what all of them held."""
        for sequence in (*self.joining, *self.running):
            sequence.cancelled = True
        self._leave()

    def _join(self) -> None:
        """Compute prompts, in order, as many tokens as are due."""
        left = None if self.chunk is None else self.chunk if self.running else max(self.chunk, ALONE)
        while self.joining and (left is None or left > 0):
            sequence = self.joining[0]
            if self.prepare and not sequence.is_open:
                self.prepare(sequence)
            before = sequence.slot.length if sequence.is_open else 0
            if open_sequence(self.target, self.drafter, sequence, left):
                self.running.append(self.joining.pop(0))
                if sequence.finish:
                    self._leave()
            if left is not None:
                left -= sequence.slot.length - before if sequence.is_open else 0

    def _leave(self) -> None:
        """Let go of what has ended."""
        for group in (self.joining, self.running):
            for sequence in group:
                if sequence.cancelled:
                    sequence.finish = sequence.finish or "cancelled"
                if sequence.finish:
                    close_sequence(self.target, sequence)
            group[:] = [sequence for sequence in group if not sequence.finish]

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        sequence.finish, sequence.error, sequence.keep_open = "error", str(error), False
        sequence.at_fault = isinstance(error, (ParameterError, PromptError))
        close_sequence(self.target, sequence)


def open_sequence(target: Target, drafter: Drafter, sequence: Sequence, most: int | None = None) -> bool:
    """Give the sequence a slot and a drafter state, and prefill all but its anchor; returns whether that is complete.

    A sequence that already holds a slot (a fork, the next turn of a conversation) has only what is new computed.
    most: tokens to compute in this call; None for all.
    """
    began = time.perf_counter_ns()
    drafter = sequence.drafter or drafter
    if not sequence.is_open:
        state = drafter.open(sequence.sampler)
        try:
            sequence.attach(target.open(), state)
        except BaseException:
            state.close()
            raise
    new = sequence.tokens[sequence.slot.length : -1][:most]
    for output in target.prefill(sequence.slot, new, layers=drafter.layers):
        rows = range(sequence.slot.length - output.start)
        drafter.observe([(sequence.state, sequence.tokens, output, rows)])
    sequence.prefill_ns += time.perf_counter_ns() - began
    complete = sequence.slot.length == len(sequence.tokens) - 1
    if complete and sequence.room <= 0:
        sequence.finish = "length"
    return complete


def close_sequence(target: Target, sequence: Sequence) -> None:
    """Free the sequence's slot and state, unless it is kept open for a next turn."""
    if sequence.keep_open:
        return
    if held := sequence.detach():
        slot, state = held
        target.close(slot)
        state.close()


def step(target: Target, drafter: Drafter, active: Many[Sequence], pace: Pace) -> list[Round]:
    """One round of every active sequence, through one pass of the target."""
    clock = Clock()
    drafters = [s.drafter or drafter for s in active]
    budgets = [_within_limits(*each) for each in zip(pace.budgets(active), active, drafters, strict=True)]
    trees = _propose(drafters, active, budgets, pace, target.vocab_size)
    clock.lap("propose")
    layers = list(dict.fromkeys(key for each in drafters for key in each.layers))
    outputs = target.forward([(s.slot, tree) for s, tree in zip(active, trees)], layers=layers)
    clock.lap("forward")

    laws: list[Tensor | LogitsError] = []
    for s, tree, output in zip(active, trees, outputs):
        try:
            assert output.logits is not None
            laws.append(s.sampler.probabilities(output.logits, tree))
        except LogitsError as error:
            laws.append(error)
    clock.lap("probabilities")

    decisions = [
        s.accept(tree, p, s.sampler.draws) if isinstance(p, Tensor) else accept.Decision((0,), -1)
        for s, tree, p in zip(active, trees, laws)
    ]
    clock.lap("accept")

    emitted: list[list[int]] = []
    for s, tree, p, decision in zip(active, trees, laws, decisions):
        if isinstance(p, LogitsError):
            s.finish, s.error = "error", str(p)
            emitted.append([])
        else:
            drafted = [tree.tokens[node] for node in decision.path[1:]]
            emitted.append(s.cut([*drafted, decision.next], len(drafted), s.sampler.stuck_at(decision.path)))
            s.sampler.commit(emitted[-1])
            if s.finish == "error":
                s.error, s.at_fault = s.sampler.why_stuck(), True
    clock.lap("cut")

    kept = [decision.path[: len(tokens)] for decision, tokens in zip(decisions, emitted)]
    for s, path in zip(active, kept):
        target.commit(s.slot, path)
    clock.lap("commit")
    for each, mine in _by_drafter(drafters):
        each.observe([(active[i].state, active[i].tokens, outputs[i], kept[i]) for i in mine])
    clock.lap("observe")

    rows = sum(map(len, trees))
    rounds = []
    for s, own, tree, budget, output, p, decision, tokens in zip(
        active, drafters, trees, budgets, outputs, laws, decisions, emitted
    ):
        known = isinstance(p, Tensor)
        at = accept.at_tokens(tree, p, [(decision.path[-1], decision.next)]) if known else []
        rounds.append(
            Round(
                sequence=s.number,
                number=s.rounds,
                context=len(s.tokens) - len(tokens),
                tokens=tree.tokens,
                parents=tree.parents,
                score=tree.score,
                p=tuple(at[:-1]),
                q=_q_of(tree),
                tests=_with_draws(decision.tests, s.sampler.draws.tossed()),
                path=decision.path,
                p_next=at[-1] if known else None,
                emitted=tuple(tokens),
                pieces=s.show(),
                logprobs=logprobs_of(output, decision.path, tokens, s.params.logprobs) if known else None,
                finish=s.finish,
                error=s.error,
                rule=s.rule,
                lossy=s.lossy,
                seed=s.sampler.seed,
                drafter=tree.drafter or own.name,
                budget=budget,
                rows=rows,
                sequences=len(active),
                times=clock.share(len(active), prefill=s.prefill_ns if s.rounds == 0 else 0),
            )
        )
        s.rounds += 1
    pace.learn(rounds)
    return rounds


def _within_limits(budget: Budget, sequence: Sequence, drafter: Drafter) -> Budget:
    """No token is drafted that could not be emitted, or that the drafter has no position for."""
    nodes = budget.nodes if sequence.most_drafted is None else min(budget.nodes, sequence.most_drafted)
    depth = min(budget.depth, nodes, sequence.room - 1)
    if drafter.context_length is not None:
        depth = min(depth, drafter.context_length - len(sequence.tokens))
    if depth <= 0:
        nodes = depth = 0
    return budget if (nodes, depth) == (budget.nodes, budget.depth) else replace(budget, nodes=nodes, depth=depth)


def _propose(
    drafters: Many[Drafter], active: Many[Sequence], budgets: Many[Budget], pace: Pace, vocab_size: int
) -> list[DraftTree]:
    """Ask the drafter of every sequence that may draft; the others get the anchor alone."""
    trees = [DraftTree.chain(s.tokens[-1]) for s in active]
    for drafter, mine in _by_drafter(drafters):
        asked = [i for i in mine if budgets[i].nodes > 0]
        if not asked:
            continue
        work = [Ask(active[i].state, active[i].tokens, budgets[i], active[i].slot) for i in asked]
        proposed = pace.propose(drafter, [active[i] for i in asked], work)
        if len(proposed) != len(asked):
            raise DraftError(f"the drafter {drafter.name!r} returned {len(proposed)} trees for {len(asked)} sequences")
        for i, tree in zip(asked, proposed):
            trees[i] = _admitted(drafter, tree, active[i], budgets[i], vocab_size)
    return trees


def _by_drafter(drafters: Many[Drafter]) -> list[tuple[Drafter, list[int]]]:
    """Each drafter with the sequences that it drafts for."""
    groups: dict[int, tuple[Drafter, list[int]]] = {}
    for i, drafter in enumerate(drafters):
        groups.setdefault(id(drafter), (drafter, []))[1].append(i)
    return list(groups.values())


def _admitted(drafter: Drafter, tree: DraftTree, sequence: Sequence, budget: Budget, vocab_size: int) -> DraftTree:
    """The tree without what goes beyond the budget, the vocabulary or the grammar (DraftError where that was drawn under a q), and
    with what the grammar forces.
    """
    anchor, matcher = sequence.tokens[-1], sequence.sampler.matcher
    if tree.tokens[0] != anchor:
        raise DraftError(
            f"the drafter {drafter.name!r} returned a tree below token {tree.tokens[0]}, not below the anchor {anchor}"
        )
    keep = [0 <= token < vocab_size and depth <= budget.depth for token, depth in zip(tree.tokens, tree.depths)]
    keep[budget.nodes + 1 :] = [False] * len(keep[budget.nodes + 1 :])
    try:
        tree = tree if all(keep) else tree.prune(keep)
        return matcher.fit(tree, budget) if matcher else tree
    except DraftError as error:
        raise DraftError(f"{drafter.name!r} went beyond its budget, the vocabulary or the grammar with drawn tokens") from error


def _q_of(tree: DraftTree) -> tuple[float | None, ...]:
    values = accept.q_at_tokens(tree)
    drawn = [tree.law(parent) is not None for parent in tree.parents[1:]]
    return (None, *(value if is_drawn else None for value, is_drawn in zip(values[1:], drawn)))


def _with_draws(tests: tuple[accept.Test, ...], numbers: list[float]) -> tuple[accept.Test, ...]:
    """The tests with the numbers that decided them; rules that toss for one test toss for each, in order."""
    return tuple(replace(test, draw=number) for test, number in zip(tests, numbers, strict=True)) if numbers else tests
