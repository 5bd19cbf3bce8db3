"""One loop for every drafter that can be trained: steps, judgement on held-out text, checkpoints. What is written about it: `record`.

Everything that a step does is a function of the state before it and of its number, so a run that was stopped and goes on ends where one
that was not stopped ends. Several processes (through accelerate) share a step's samples; gradients are sums over all of them.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, Iterator

import torch
from torch import Tensor

from ..errors import ParameterError
from ..targets.base import Target
from . import checkpoint
from .features import Features
from .kinds import KINDS
from .measure import Measure, measured
from .order import Order, split
from .record import Record, write_drafter
from .store import Store
from .teacher import Teacher
from .trainee import Scores, Trainee

PRECISIONS = ("float32", "bfloat16")
FREE = ("batch", "accumulate", "log", "evaluate", "save", "measure")
"""What of a plan may be another when a run goes on: the samples of a step are compared, and the rest says when to look."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """How long and how fast. epochs: over the data; steps: in their place. samples: only the first so
    many. batch: samples in a pass of one process; accumulate: passes
    in a step. lr: at its highest, after `warmup` of the steps; it falls to 0 along a cosine. clip: of the gradient's norm. learn_prompts: take the loss on the
    prompts' tokens, too, which the target did not say, but has a law for: more to learn from little data. held_out:
    samples that only judge. log, evaluate, save, measure: every so many steps; 0: never (measure: at the end alone).
    """

    epochs: float = 3.0
    steps: int | None = None
    samples: int | None = None
    batch: int = 8
    accumulate: int = 1
    lr: float = 1e-3
    warmup: float = 0.05
    clip: float = 1.0
    weight_decay: float = 0.0
    learn_prompts: bool = False
    precision: str = "bfloat16"
    seed: int = 0
    held_out: int = 32
    log: int = 10
    evaluate: int = 100
    save: int = 100
    measure: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "accumulate", "log", "held_out"):
            if getattr(self, name) < 1:
                raise ParameterError(f"{name} must be 1 or more; got {getattr(self, name)}")
        for name in ("epochs", "lr", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ParameterError(f"{name} must be above 0; got {getattr(self, name)}")
        for name in ("steps", "samples"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ParameterError(f"{name} must be 1 or more; got {value}")
        if not 0 <= self.warmup < 1 or self.weight_decay < 0 or min(self.evaluate, self.save, self.measure) < 0:
            raise ParameterError("warmup must be from 0 to below 1; weight_decay, evaluate, save and measure 0 or more")
        if self.precision not in PRECISIONS:
            raise ParameterError(f"precision must be {' or '.join(PRECISIONS)}; got {self.precision!r}")

    def rate(self, step: int, total: int) -> float:
        """The learning rate of this step, from 0."""
        rising = max(round(self.warmup * total), 1)
        if step < rising:
            return self.lr * (step + 1) / rising
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(total - rising, 1)))


@dataclass(frozen=True)
class Settings:
    """kind, options: of the drafter. cache: keep the target's states beside the data. start: another run's folder, or a finished
    drafter's, whose weights this one begins with. restart: forget a run that is there.
    """

    kind: str
    options: Any
    plan: Plan
    cache: bool = True
    start: Path | None = None
    restart: bool = False


class Run:
    """One training run: what it learns from, what it has learnt."""

    def __init__(self, target: Target, store: Store, settings: Settings, folder: Path, say: Say = lambda _: None):
        """folder: of the drafter; the run's own files are in `training` within, and gone on with. say: told one line at a time.
        Raises LoadError and ParameterError.
        """
        from accelerate import Accelerator

        self.target, self.store, self.settings, self.folder, self.say = target, store, settings, folder, say
        self.plan = settings.plan
        self.accelerator: Any = Accelerator(cpu=target.device.type == "cpu", mixed_precision="no")
        self.is_main: bool = self.accelerator.is_main_process
        self.world: int = self.accelerator.num_processes
        self.place = folder / "training"
        before = None if settings.restart else checkpoint.load(self.place)
        if before is not None:
            checkpoint.refuse_other(before["recipe"], self._recipe(), folder)
        self.samples = store.samples()[: before["samples"] if before else self.plan.samples]
        if not any(len(s.tokens) > s.prompt + 1 for s in self.samples):
            raise ParameterError(f"{store.folder} has no answer to learn from: make data with `outrider data`")
        self.train_on, self.judge_by = split(len(self.samples), self.plan.held_out)
        self.total = self.plan.steps or max(round(self.plan.epochs * len(self.train_on) / self.global_batch), 1)
        self.order = Order(self.train_on, self.global_batch, self.plan.seed)
        start = self._beginning(settings.start) if settings.start and before is None else None
        self._build(before, start)
        self.step = 0
        if before is not None:
            self.trainee.load_state_dict(before["trainee"])
            self.optimizer.load_state_dict(before["optimizer"])
            self.step = before["step"]
        elif start is not None:
            self._begin_with(start)
        self.model = self.accelerator.prepare(self.trainee)
        self.record = Record(self.place, self.step if before is not None else None) if self.is_main else None

    def _build(self, before: dict[str, Any] | None, start: dict[str, Any] | None) -> None:
        """Teacher, drafter and optimiser. before: the state of this run; start: of another one, whose weights are for its vocabulary."""
        plan, options = self.plan, self.settings.options
        trainee, _, layers_of = KINDS[self.settings.kind].load()
        learnt = [self.samples[i] for i in self.train_on]
        vocabulary = trainee.vocabulary(self.target, learnt, options)
        self.counted = vocabulary
        if before is not None and not torch.equal(before.get("counted", before["vocabulary"]), vocabulary):
            raise ParameterError(
                f"{self.folder}: {self.store.folder} is not the data that this run began with; give it, or --restart"
            )
        known = (before or start or {}).get("vocabulary", vocabulary)
        self.teacher = Teacher(self.target, known if len(known) == len(vocabulary) else vocabulary)
        cache = self.store.folder if self.settings.cache else None
        self.features = Features(self.teacher, self.samples, layers_of(self.target, options), cache)
        torch.manual_seed(plan.seed)
        self.trainee: Trainee = trainee(self.teacher, options, self.features)
        learning = [p for p in self.trainee.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(learning, lr=plan.lr, betas=(0.9, 0.95), weight_decay=plan.weight_decay)

    @property
    def global_batch(self) -> int:
        return self.plan.batch * self.plan.accumulate * self.world

    def _recipe(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        plan = {name: value for name, value in asdict(self.plan).items() if name not in FREE}
        options = {
            f"option {name}": list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self.settings.options).items()
        }
        return {"kind": self.settings.kind, "target": self.target.name, **options, **plan, "global batch": self.global_batch}

    def _beginning(self, other: Path) -> dict[str, Any]:
        """The state of another run; nothing for a finished drafter, whose own files are read when this one is built."""
        state = checkpoint.load(other / "training")
        if state is None and not other.is_dir():
            raise ParameterError(f"--start {other}: there is no run in that folder")
        return state or {}

    def _begin_with(self, state: dict[str, Any]) -> None:
        given = state["trainee"] if state else self.trainee.read(self.settings.start or Path())
        if given is None:
            raise ParameterError(f"--start {self.settings.start}: there is no run in that folder")
        mine = self.trainee.state_dict()
        taken = {name: t for name, t in given.items() if name in mine and mine[name].shape == t.shape}
        learnt = {name for name, p in self.trainee.named_parameters() if p.requires_grad}
        fixed = {name for name, p in self.trainee.named_parameters() if not p.requires_grad} | {"ids"}
        if missing := sorted(learnt - taken.keys()):
            raise ParameterError(
                f"--start {self.settings.start}: its {missing[0]} does not fit; give the options that it was trained with"
            )
        self.trainee.load_state_dict({**mine, **{name: t for name, t in taken.items() if name not in fixed}})

    # ---- the loop -----------------------------------------------------------------------------------------------

    def go(self, measure: Measure | None = None) -> dict[str, Any]:
        """Train to the end, or until it is interrupted, which keeps everything. Returns the last figures."""
        with _interrupts() as interrupted:
            self._fill(interrupted)
            if self.step == 0 and not interrupted:
                self._judge()
            began, first = time.perf_counter(), self.step
            while self.step < self.total and not interrupted:
                self._train_step(time.perf_counter() - began, first)
                plan, done = self.plan, self.step == self.total
                if done or (plan.evaluate and self.step % plan.evaluate == 0):
                    self._judge()
                if done or interrupted or (plan.save and self.step % plan.save == 0):
                    self.save()
                if measure and not interrupted and (done or (plan.measure and self.step % plan.measure == 0)):
                    self._measure(measure)
        if interrupted:
            raise KeyboardInterrupt
        return self.record.last if self.record else {}

    def facts(self) -> dict[str, Any]:
        """What the card says about the run."""
        return {
            "kind": self.settings.kind,
            "target": self.target.name,
            "options": asdict(self.settings.options),
            "plan": asdict(self.plan),
            "processes": self.world,
            "global_batch": self.global_batch,
            "trainee": self.trainee.facts(),
        }

    def _fill(self, interrupted: Any) -> None:
        """Compute the states that the cache lacks, each process its own part."""
        if self.features.is_cached:
            mine = [*self.judge_by, *self.train_on][self.accelerator.process_index :: self.world]
            last = time.perf_counter()
            for done, number in enumerate(mine, 1):
                if interrupted:
                    return
                self.features.look(number)
                if self.is_main and (time.perf_counter() - last > 10 or done == len(mine)):
                    last = time.perf_counter()
                    self.say(f"the target's states: {done} of {len(mine)} samples")
            self.accelerator.wait_for_everyone()

    def _arithmetic(self) -> torch.autocast:
        """Products in the precision of the plan; accelerate's own setting is one for the whole process."""
        return torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.plan.precision == "bfloat16")

    def _train_step(self, seconds: float, first: int) -> None:
        plan = self.plan
        numbers = self.order(self.step)
        guessed = sum(len(self.samples[i].tokens) - (0 if plan.learn_prompts else self.samples[i].prompt) for i in numbers)
        mine = numbers[self.accelerator.process_index :: self.world]
        losses: list[Scores] = []
        for part in range(plan.accumulate):
            batch = self.features.batch(mine[part * plan.batch : (part + 1) * plan.batch], plan.learn_prompts)
            last = part == plan.accumulate - 1
            with nullcontext() if last else self.accelerator.no_sync(self.model):
                with self._arithmetic():
                    scores = self.model(batch)
                self.accelerator.backward(scores.loss * self.world / max(guessed, 1))
            losses.append(scores)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), plan.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = plan.rate(self.step, self.total)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        if self.step % plan.log == 0 or self.step == self.total:
            line = self._figures(losses)
            rate = self.optimizer.param_groups[0]["lr"]
            done = self.step - first
            left = (self.total - self.step) * seconds / done if done else 0.0
            self._note(
                {"step": self.step, "of": self.total, "lr": rate, "norm": float(norm), "left_s": round(left), "train": line}
            )

    def _figures(self, scores: list[Scores]) -> dict[str, Any]:
        """Over all processes: loss, per-step losses and acceptance, and the acceptance length that they imply."""
        parts = [torch.stack([s.losses.float(), s.right.float(), s.seen.float()]) for s in scores]
        sums: Tensor = self.accelerator.reduce(torch.stack(parts).sum(dim=0), "sum")
        return figures(sums)

    @torch.no_grad()
    def _judge(self) -> None:
        """On held-out text."""
        self.trainee.eval()
        size = self.plan.batch
        mine = self.judge_by[self.accelerator.process_index :: self.world]
        sums = torch.zeros(3, self.trainee.steps, device=self.target.device)
        for at in range(0, len(mine), size):
            with self._arithmetic():
                s = self.trainee(self.features.batch(mine[at : at + size]))
            sums += torch.stack([s.losses.float(), s.right.float(), s.seen.float()])
        self.trainee.train()
        self._note({"step": self.step, "of": self.total, "held_out": figures(self.accelerator.reduce(sums, "sum"))})

    def _measure(self, measure: Measure) -> None:
        """The drafter as it is now, in the engine."""
        if self.is_main:
            write_drafter(self.trainee, self.folder)
            self._note({"step": self.step, "of": self.total, "measured": measured(self.target, self.folder, measure)})
        self.accelerator.wait_for_everyone()

    def _note(self, line: dict[str, Any]) -> None:
        if self.record is not None:
            self.say(self.record.add(line))

    def save(self) -> None:
        """The drafter and the run's state. Raises LoadError when there is no room; what was there before is whole then."""
        if self.is_main:
            state = {
                "recipe": self._recipe(),
                "samples": len(self.samples),
                "vocabulary": self.teacher.ids.cpu(),
                "counted": self.counted,
                "step": self.step,
                "trainee": self.trainee.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            }
            checkpoint.save(self.place, state)
            write_drafter(self.trainee, self.folder)
        self.accelerator.wait_for_everyone()


def figures(sums: Tensor) -> dict[str, Any]:
    """From sums of losses, right guesses and guesses ``[3, steps]``: means, and the acceptance length 1 + Σ Π that they imply."""
    losses, right, seen = sums.tolist()
    rates = [r / n if n else 0.0 for r, n in zip(right, seen)]
    implied = 1 + sum(math.prod(rates[: k + 1]) for k in range(len(rates)))
    means = [loss / n if n else 0.0 for loss, n in zip(losses, seen)]
    return {"loss": sum(means) / len(means), "losses": means, "acceptance": rates, "implied_length": implied}


class _Flag:
    """Whether an interrupt came; a second one is not held back."""

    def __init__(self) -> None:
        self.is_set = False

    def __bool__(self) -> bool:
        return self.is_set

    def __call__(self, *_: Any) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True


@contextmanager
def _interrupts() -> Iterator[_Flag]:
    """Holds back Ctrl-C and SIGTERM until a step is complete."""
    flag, before = _Flag(), {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, flag) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
