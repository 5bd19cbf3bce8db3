"""Targets and drafters that exist only as laws: known acceptance, known costs, a clock that is told what time it is.

The optimum for them is computed by dynamic programming, so that what a calibrator achieves can be held against it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Callable, Sequence

import numpy as np

from outrider.calibrate import Calibrator
from outrider.drafters.base import Ask, Drafter, State
from outrider.targets.table import TableTarget
from outrider.trace import Round, Times
from outrider.tree import Budget, DraftTree

LONGEST = 16

CURVES: dict[str, dict[int, float]] = {
    # milliseconds of a pass by rows, measured on CPUs
    "Qwen 1.5B, transformers": {1: 392, 2: 825, 3: 1430, 4: 1176, 6: 1199, 8: 1256, 16: 1460, 32: 1843},
    "Qwen 1.5B Q4_K_M, llama.cpp": {1: 56, 2: 102, 3: 142, 4: 180, 6: 283, 8: 469, 16: 609, 32: 1012},
    "Qwen 1.5B Q4_K_M, ik_llama.cpp, repacked": {1: 52, 2: 55, 3: 65, 4: 75, 6: 98, 8: 128, 16: 230, 32: 467},
    "Qwen 1.5B Q4_K_M, ik_llama.cpp": {1: 56, 2: 74, 3: 95, 4: 111, 6: 146, 8: 217, 16: 417, 32: 817},
    "Qwen 0.5B Q4_K_M, ik_llama.cpp": {1: 28, 2: 37, 4: 40, 6: 55, 8: 67, 16: 134, 32: 225},
    "SmolLM2, transformers": {1: 69, 2: 115, 3: 144, 4: 127, 6: 141, 8: 120, 16: 117, 32: 160},
    "Qwen 1.5B, six rows at a time": {1: 155, 2: 176, 4: 183, 6: 209, 8: 327, 16: 503},
    "SmolLM2, six rows at a time": {1: 29.5, 2: 33, 4: 36, 6: 38, 8: 49, 16: 66},
    # made up: convex; and a sparse model whose rows touch more and more of 128 experts, 8 each
    "convex": {n: 10 + 0.15 * n * n for n in range(1, 33)},
    "experts": {n: 10 + 40 * (1 - (1 - 8 / 128) ** n) for n in range(1, 33)},
}


def curve(name: str) -> Callable[[int], float]:
    """Seconds of a pass by rows; straight between what was measured, and beyond."""
    known = CURVES[name]
    rows, values = np.array(list(known), float), np.array(list(known.values())) / 1000
    slope = (values[-1] - values[-2]) / (rows[-1] - rows[-2])
    return lambda n: float(np.interp(n, rows, values) + slope * max(n - rows[-1], 0))


@dataclass(frozen=True)
class Text:
    """Which drafted tokens a text keeps: by depth, and by a state that stays with probability `stay` at each token.

    chances: by state, a function of depth. scored: whether the drafter knows the chance.
    """

    chances: tuple[Callable[[int], float], ...]
    stay: float = 1.0
    scored: bool = False


def constant(p: float, scored: bool = False) -> Text:
    return Text((lambda k: p,), scored=scored)


def decaying(p: float, ratio: float) -> Text:
    return Text((lambda k: p * ratio ** (k - 1),))


def bursty(high: float, low: float, stay: float, scored: bool = False) -> Text:
    return Text((lambda k: high, lambda k: low), stay, scored)


class Simulation:
    """One text, a drafter with a cost for each level, a target with a curve; runs under any pace."""

    def __init__(self, text: Text, cost: Callable[[int], float], step: float, seed: int = 0, noise: float = 0.0):
        """step: seconds of a drafted level. noise: deviation of every time that is measured, as a share."""
        self.text, self.cost, self.step, self.noise = text, cost, step, noise
        self.random, self.text_random = random.Random(seed), random.Random(seed)
        self.now = 0.0
        self.states: list[int] = [0]
        self.luck: list[float] = [0.0]
        self.drafter: Drafter = Simulated(self)
        self.share = 1.0  # of the chances, that the drafter which was asked last has
        self.each = 0.0  # seconds that a pass takes longer for each further sequence
        self.claims: float | None = None  # the score that the drafter gives every token, whatever its true chance

    def clock(self) -> int:
        return round(self.now * 1e9)

    def state_at(self, position: int) -> int:
        while len(self.states) <= position:
            switch = self.text_random.random() >= self.text.stay
            self.states.append((self.states[-1] + switch) % len(self.text.chances))
            self.luck.append(self.text_random.random())
        return self.states[position]

    def spend(self, seconds: float) -> float:
        seconds *= max(1 + self.noise * self.random.gauss(0, 1), 0.3)
        self.now += seconds
        return seconds

    def run(self, pace: Any, tokens: int, sequence: Any = None) -> tuple[float, list[Round]]:
        """Seconds for so many tokens, and the rounds."""
        s = sequence or Stub(self.drafter)
        began, rounds = self.now, []
        until = len(s.tokens) + tokens
        while len(s.tokens) < until:
            (budget,) = pace.budgets([s])
            tree, proposing = DraftTree.chain(0), self.now
            if budget.nodes > 0:
                (tree,) = pace.propose(self.drafter, [s], [Ask(s.state, s.tokens, budget)])
            proposed = self.now - proposing
            seconds = self.spend(self.cost(len(tree)))
            kept = self.kept(len(s.tokens), len(tree) - 1)
            times = Times(propose=round(proposed * 1e9), forward=round(seconds * 1e9))
            rounds.append(round_of(s, tree, budget, kept, times))
            s.tokens += [0] * (kept + 1)
            s.rounds += 1
            pace.learn(rounds[-1:])
        return self.now - began, rounds

    def run_together(self, pace: Any, rounds: int, sequences: Sequence[Any]) -> tuple[float, list[Round]]:
        """Seconds for so many rounds of a batch, and the rounds of all of them."""
        began, made = self.now, []
        for _ in range(rounds):
            budgets, proposing = pace.budgets(sequences), self.now
            asked = [i for i, budget in enumerate(budgets) if budget.nodes > 0]
            trees = [DraftTree.chain(0) for _ in sequences]
            if asked:
                work = [Ask(sequences[i].state, sequences[i].tokens, budgets[i]) for i in asked]
                for i, tree in zip(asked, pace.propose(self.drafter, [sequences[i] for i in asked], work)):
                    trees[i] = tree
            proposed, rows = self.now - proposing, sum(map(len, trees))
            seconds = self.spend(self.cost(rows) + self.each * (len(trees) - 1))
            times = Times(propose=round(proposed * 1e9) // len(trees), forward=round(seconds * 1e9) // len(trees))
            new = []
            for s, tree, budget in zip(sequences, trees, budgets):
                kept = self.kept(len(s.tokens), len(tree) - 1)
                new.append(replace(round_of(s, tree, budget, kept, times), rows=rows, sequences=len(trees)))
                s.tokens += [0] * (kept + 1)
                s.rounds += 1
            pace.learn(new)
            made += new
        return self.now - began, made

    def kept(self, position: int, drafted: int) -> int:
        for k in range(1, drafted + 1):
            state = self.state_at(position + k - 1)
            if self.luck[position + k - 1] >= self.share * self.text.chances[state](k):
                return k - 1
        return drafted


class Stub:
    """What a pace sees of a sequence."""

    def __init__(self, drafter: Drafter | None = None, length: int = 20):
        self.tokens = [0] * length
        self.room = 1 << 20
        self.drafter = drafter
        self.rounds = 0
        self.state: Any = SimpleNamespace()
        self.sampler = SimpleNamespace(matcher=None)


class Simulated(Drafter):
    """Chains whose levels cost what the simulation says, with the true chance as their score if the text knows it.

    dear, share: what a level costs, and how likely it is to be kept, against what the simulation says.
    """

    name = "simulated"

    def __init__(self, simulation: Simulation, dear: float = 1.0, share: float = 1.0):
        super().__init__()
        self.simulation = simulation
        self.dear, self.share = dear, share
        self.least = dear * simulation.step / simulation.cost(1)
        self.asked = 0

    def open(self, sampler: Any) -> State:
        return State(sampler)

    def propose(self, work: Any) -> list[DraftTree]:
        return [self._draft(ask.tokens, ask.budget) for ask in work]

    def _draft(self, tokens: Sequence[int], budget: Budget) -> DraftTree:
        sim = self.simulation
        self.asked += 1
        sim.share = self.share
        n = min(budget.depth, budget.nodes)
        sim.spend(self.dear * sim.step * n)
        score = None
        if sim.text.scored:
            score = [sim.text.chances[sim.state_at(len(tokens) + k - 1)](k) for k in range(1, n + 1)]
        elif sim.claims is not None:
            score = [sim.claims] * n
        return DraftTree.chain(0, [1] * n, score=score)


class Careful(Simulated):
    """Stops as draft models do: before a step that is not worth its price, and after one that gave nothing likely enough. Reads the tokens
    of a sequence when it is first asked, at `feed` seconds each.
    """

    feed = 0.0

    def _draft(self, tokens: Sequence[int], budget: Budget) -> DraftTree:
        sim, likely, scores = self.simulation, 1.0, []
        self.asked += 1
        self.steps, sim.share = 0, self.share
        while len(scores) < min(budget.depth, budget.nodes) and likely >= (budget.step if scores else 0.0):
            self.steps += 1
            score = sim.text.chances[sim.state_at(len(tokens) + len(scores))](len(scores) + 1)
            likely *= score
            if likely < budget.price:
                break
            scores.append(score)
        sim.spend(sim.step * self.steps)
        return DraftTree.chain(0, [1] * len(scores), score=scores)

    def propose(self, work: Any) -> list[DraftTree]:
        for ask in work:
            unread = len(ask.tokens) - getattr(ask.state, "read", 0) - 16
            self.simulation.spend(self.feed * max(unread, 0))
            ask.state.read = len(ask.tokens)
        return super().propose(work)


def round_of(s: Any, tree: DraftTree, budget: Budget, kept: int, times: Times) -> Round:
    n = len(tree)
    return Round(
        sequence=0,
        number=s.rounds,
        context=len(s.tokens),
        tokens=tree.tokens,
        parents=tree.parents,
        score=tree.score,
        p=(1.0,) * n,
        q=(None,) * n,
        tests=(),
        path=tuple(range(kept + 1)),
        emitted=(0,) * (kept + 1),
        pieces=(),
        logprobs=None,
        finish=None,
        error=None,
        rule="block",
        lossy=False,
        seed=0,
        drafter="simulated",
        budget=budget,
        rows=n,
        sequences=1,
        times=times,
    )


def calibrator(simulation: Simulation) -> Calibrator:
    """A calibrator that has timed its few passes at the start."""
    made = Calibrator(simulation.drafter, clock=simulation.clock)
    made.warm_up(Timed(simulation), list(range(40)))
    return made


class Timed(TableTarget):
    """A target of which only the costs matter."""

    def __init__(self, simulation: Simulation):
        super().__init__(vocab_size=40)
        self.simulation = simulation

    def forward(self, work: Any, *args: Any, **more: Any) -> Any:
        self.simulation.spend(self.simulation.cost(sum(len(tree) for _, tree in work)))
        return super().forward(work, *args, **more)


# ---- the optimum ------------------------------------------------------------------------------------------------------------


def optimum(simulation: Simulation) -> Optimal:
    """The policy with the most tokens a second of all that know the laws and see what is kept (but no scores)."""
    text = simulation.text
    laws = _plain_laws(text) if len(text.chances) == 1 else _hidden(text)
    seconds = [simulation.cost(n + 1) + simulation.step * n for n in range(LONGEST + 1)]
    return Optimal(text, *_average(laws, seconds))


class Optimal:
    """A pace that drafts by policy, as a function of the belief that the text is in its first state. rate: tokens a second."""

    def __init__(self, text: Text, rate: float, policy: np.ndarray):
        self.text, self.rate, self.policy = text, rate, policy
        self.belief = 1.0

    def budgets(self, sequences: Any) -> list[Budget]:
        n = int(self.policy[round(self.belief * (len(self.policy) - 1))])
        return [Budget(n, n)]

    def propose(self, drafter: Drafter, sequences: Any, work: Any) -> list[DraftTree]:
        return drafter.propose(work)

    def learn(self, rounds: Sequence[Round]) -> None:
        for r in rounds if len(self.text.chances) == 2 else ():
            high, low = self.text.chances
            for k in range(1, len(r.path) + 1):
                if k < len(r.tokens):
                    kept = k < len(r.path)
                    up, down = (high(k), low(k)) if kept else (1 - high(k), 1 - low(k))
                    up, down = up * self.belief, down * (1 - self.belief)
                    self.belief = up / (up + down)
                self.belief = float(_moved(np.array(self.belief), self.text.stay))


def clairvoyant(simulation: Simulation, start: int, tokens: int) -> float:
    """Fewest seconds for the next `tokens` after the first `start`, for who knows the chance of every token of the text: no policy that
    sees scores can do better on average.
    """
    text, step = simulation.text, simulation.step
    least = [0.0] * (tokens + LONGEST + 2)
    seconds = [simulation.cost(n + 1) + step * n for n in range(LONGEST + 1)]
    chances = [text.chances[simulation.state_at(start + t)](1) for t in range(tokens + LONGEST)]
    for t in reversed(range(tokens)):
        reach, spent, best = 1.0, 0.0, float("inf")
        for n in range(LONGEST + 1):
            best = min(best, seconds[n] + spent + reach * least[t + n + 1])
            spent += reach * (1 - chances[t + n]) * least[t + n + 1]
            reach *= chances[t + n]
        least[t] = best
    return least[0]


Law = tuple[np.ndarray, np.ndarray]
"""Of one draft length: expected tokens by state [S], and the law of the next state [S, S]."""


def _average(laws: list[Law], seconds: list[float]) -> tuple[float, np.ndarray]:
    """The best long-run rate and its policy, by policy iteration on a semi-Markov process."""
    size = len(laws[0][0])
    every = np.arange(size)
    policy = np.zeros(size, dtype=int)
    rate = 0.0
    tokens, moves, spent = np.array([t for t, _ in laws]), np.array([m for _, m in laws]), np.array(seconds)
    for _ in range(100):
        # values relative to state 0, and the rate
        system = np.column_stack([(np.eye(size) - moves[policy, every])[:, 1:], spent[policy]])
        found = np.linalg.lstsq(system, tokens[policy, every], rcond=None)[0]
        values, rate = np.concatenate([[0.0], found[:-1]]), float(found[-1])
        worth = tokens - rate * spent[:, None] + moves @ values
        better = np.where(worth.max(axis=0) > worth[policy, every] + 1e-9, worth.argmax(axis=0), policy)
        if (better == policy).all():
            break
        policy = better
    return rate, policy


def _plain_laws(text: Text) -> list[Law]:
    """One state."""
    reach = np.cumprod([1.0, *(text.chances[0](k) for k in range(1, LONGEST + 1))]).cumsum()
    return [(np.array([tokens]), np.ones((1, 1))) for tokens in reach]


def _hidden(text: Text, grid: int = 201) -> list[Law]:
    """States are beliefs that the text is in its first state."""
    high, low, stay = text.chances[0], text.chances[1], text.stay
    beliefs = np.linspace(0, 1, grid)

    def spread(b: np.ndarray, weight: np.ndarray, move: np.ndarray) -> None:
        at = np.clip(b * (grid - 1), 0, grid - 1)
        left = np.minimum(at.astype(int), grid - 2)
        share = at - left
        np.add.at(move, (np.arange(grid), left), weight * (1 - share))
        np.add.at(move, (np.arange(grid), left + 1), weight * share)

    laws = []
    for n in range(LONGEST + 1):
        b, reach, tokens = beliefs.copy(), np.ones(grid), np.ones(grid)
        move = np.zeros((grid, grid))
        for k in range(1, n + 1):
            up, down = b * high(k), (1 - b) * low(k)
            chance = up + down
            missed = np.divide(b * (1 - high(k)), 1 - chance, out=b.copy(), where=chance < 1)
            spread(_moved(missed, stay), reach * (1 - chance), move)
            reach = reach * chance
            tokens = tokens + reach
            b = _moved(np.divide(up, chance, out=b.copy(), where=chance > 0), stay)
        spread(_moved(b, stay), reach, move)
        laws.append((tokens, move))
    return laws


def _moved(b: np.ndarray, stay: float) -> np.ndarray:
    return b * stay + (1 - b) * (1 - stay)
