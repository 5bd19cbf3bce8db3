"""The lab's command line: it reads a command, does it on the desk, and checks whether the objective is reached."""

from __future__ import annotations

import textwrap
from contextlib import suppress
from dataclasses import replace
from typing import Callable

from rich.console import Console
from rich.text import Text

from ..demo import REWRITE
from ..errors import OutriderError, ParameterError
from ..lab.course import COURSE, Objective
from ..lab.desk import Desk
from ..lab.progress import Progress
from ..lab.words import Laws
from . import lab_views as views
from .lab import measured
from .options import numbers
from .screen import end_text, legend_of, show
from .session import figures, nothing_drafted, waiting

PROMPT = "lab> "
GOODBYE = "Your progress is kept; `outrider lab` goes on from here."


class Shell:
    """A session. done: names of the objectives that were reached before."""

    def __init__(self, desk: Desk, progress: Progress, done: list[str]):
        self.desk = desk
        self._progress = progress
        self._done = [objective.name for objective in COURSE if objective.name in done]
        self._console = Console(highlight=False)
        self._commands: dict[str, Callable[[list[str]], None]] = {
            "load": self._load,
            "run": self._run,
            "rounds": self._rounds,
            "tree": self._tree,
            "sweep": self._sweep,
            "drafter": self._drafter,
            "draft": self._draft,
            "temperature": self._temperature,
            "seed": self._seed,
            "tokens": self._tokens,
            "words": self._words,
            "enumerate": self._enumerate,
            "answer": lambda words: None,  # the check does it
            "hint": self._hint,
            "solution": self._solution,
            "objectives": self._objectives,
            "clear": self._clear,
            "help": self._help,
        }

    @property
    def objective(self) -> Objective | None:
        """The one to reach next; None when all have been."""
        return next((objective for objective in COURSE if objective.name not in self._done), None)

    def run(self) -> None:
        """Read commands until the end of the input, `quit`, or Ctrl-C at the prompt."""
        with suppress(ImportError):
            import readline  # noqa: F401 (gives input() a history and editing)
        self._say("Outrider's lab. `help` lists the commands; `hint` and `solution` help on; `quit` leaves.")
        if self._done:
            self._resume()
        self._show_objective()
        while True:
            try:
                words = input(PROMPT).split()
            except (EOFError, KeyboardInterrupt):
                self._say(f"\n{GOODBYE}")
                return
            if words[:1] == ["quit"]:
                self._say(GOODBYE)
                return
            if words:
                self._obey(words)

    def _resume(self) -> None:
        self._say(
            f"Going on after {len(self._done)} of {len(COURSE)} objectives; what was measured then is measured anew where "
            f"it is needed."
        )
        try:
            self.desk.load()
        except OutriderError as error:
            self._trouble(str(error))

    def _obey(self, words: list[str]) -> None:
        name, rest = words[0], words[1:]
        if name not in self._commands:
            self._trouble(f"There is no command {name!r}; `help` lists them.")
            return
        try:
            self._commands[name](rest)
            if name not in ("help", "hint", "solution", "objectives", "clear"):
                self._check(rest if name == "answer" else None)
        except OutriderError as error:
            self._trouble(str(error))
        except KeyboardInterrupt:
            end_text()
            self._trouble("Stopped. What was finished is kept.")

    def _check(self, answer: list[str] | None) -> None:
        objective = self.objective
        if objective is None:
            return
        verdict = objective.check(self.desk, answer)
        if verdict.said:
            self._say(verdict.said, "yellow")
        if not verdict.done:
            return
        self._say(f"✓ {objective.title}", "bold green")
        self._say(objective.why(self.desk))
        self._done.append(objective.name)
        self._progress.write(self._done, self.desk.settings)
        self._show_objective()

    def _show_objective(self) -> None:
        objective = self.objective
        if objective is None:
            self._say("\nAll objectives are reached. The commands still work; `clear all` starts over, `quit` leaves.", "bold")
            return
        number = COURSE.index(objective) + 1
        self._say(f"\n{number} of {len(COURSE)}: {objective.title}", "bold")
        self._say(objective.task)

    def _say(self, text: str, style: str = "") -> None:
        width = min(self._console.width, 110)
        lines = [
            textwrap.fill(line, width, subsequent_indent=" " * (len(line) - len(line.lstrip()))) for line in text.split("\n")
        ]
        self._console.print(Text("\n".join(lines), style=style))

    def _trouble(self, text: str) -> None:
        self._say(text, "red")

    # ---- models and settings ---------------------------------------------------------------------------------------------

    def _load(self, words: list[str]) -> None:
        """load: load the pair, and measure what passes and drafts cost"""
        self._no_words("load", words)
        measured(self.desk)

    def _drafter(self, words: list[str]) -> None:
        """drafter NAME [OPTION=VALUE ...]: who drafts from now on (see `outrider drafters`); pair: the pair's own; none: "
        "plain decoding"""
        if not words:
            raise ParameterError("name a drafter, as `drafter suffix shape=tree`")
        pairs = [word.partition("=") for word in words[1:]]
        if wrong := next((name for name, equals, _ in pairs if not equals), None):
            raise ParameterError(f"an option is written name=value; got {wrong!r}")
        self.desk.need()
        before = self.desk.settings
        name, own = self.desk.pair[1:] if words[0] == "pair" else (words[0], ())
        self.desk.change(drafter=name, options=tuple((dict(own) | {option: value for option, _, value in pairs}).items()))
        try:
            self.desk.drafter(self.desk.settings)
        except BaseException:
            self.desk.settings = before
            raise
        self._settings()

    def _draft(self, words: list[str]) -> None:
        """draft N: how many tokens to draft in a round"""
        self.desk.change(draft=self._whole("draft", words, 1, 1024))
        self._settings()

    def _temperature(self, words: list[str]) -> None:
        """temperature X: 0 takes the most likely token"""
        value = self._number("temperature", words)
        replace(self.desk.settings, temperature=value).params()  # it may refuse
        self.desk.change(temperature=value)
        self._settings()

    def _seed(self, words: list[str]) -> None:
        """seed N: the same text again, with any drafter; none: another text each time"""
        self.desk.change(seed=None if words == ["none"] else self._whole("seed", words, 0, 2**63 - 1))
        self._settings()

    def _tokens(self, words: list[str]) -> None:
        """tokens N: length of the answers"""
        self.desk.change(tokens=self._whole("tokens", words, 1, 4096))
        self._settings()

    def _settings(self) -> None:
        s = self.desk.settings
        seed = "no seed" if s.seed is None else f"seed {s.seed}"
        self._say(f"drafter {s.name}, draft {s.draft}, temperature {s.temperature:g}, {seed}, {s.tokens} tokens", "dim")

    # ---- measuring and looking -------------------------------------------------------------------------------------------

    def _run(self, words: list[str]) -> None:
        """run [TEXT]: answer the benchmark request, or TEXT"""
        taken = self.desk.run(" ".join(words) or REWRITE, show)
        end_text()
        self._console.print(legend_of(taken.result.rounds))
        drafter = taken.settings.name
        self._say(figures(taken.result.stats, taken.result.rule, taken.result.lossy, drafter), "dim")
        if drafter != "none" and not taken.result.stats.proposed:
            self._trouble(nothing_drafted(drafter))

    def _rounds(self, words: list[str]) -> None:
        """rounds: what was drafted and kept in each round of the last run"""
        self._no_words("rounds", words)
        if not self.desk.runs:
            raise ParameterError("there is no run yet: `run` first")
        self._console.print(views.rounds_table(self.desk.runs[-1], self.desk.need().tokenizer))

    def _tree(self, words: list[str]) -> None:
        """tree [N]: the draft tree of round N of the last run, or of one with much to see"""
        if not self.desk.runs:
            raise ParameterError("there is no run yet: `run` first")
        taken = self.desk.runs[-1]
        if words:
            number = self._whole("tree", words, 0, len(taken.result.rounds) - 1)
            round = taken.result.rounds[number]
        elif (found := views.most_branched(taken.result.rounds)) is not None:
            round = found
        else:
            raise ParameterError("nothing was drafted in the last run")
        self.desk.shown = taken, round
        self._console.print(views.tree_view(round, self.desk.need().tokenizer))

    def _sweep(self, words: list[str]) -> None:
        """sweep N,N,...: measure these draft lengths beside plain decoding, in turns"""
        if len(words) != 1:
            raise ParameterError("write the lengths with commas between, as `sweep 1,2,4,8,16`")
        lengths = numbers(words[0], "sweep")
        if max(lengths) > 1024:
            raise ParameterError("a draft has at most 1024 tokens")
        self.desk.need()
        with waiting("measuring") as status:
            self.desk.run_sweep(lengths, status.update if status else lambda _: None)
        self._console.print(views.sweep_table(self.desk))

    def _words(self, words: list[str]) -> None:
        """words [P P P Q Q Q]: three words with their two laws, or with laws of your own"""
        if words:
            if len(words) != 6:
                raise ParameterError("six numbers: three probabilities of the target, three of the drafter")
            values = [self._number("words", [word]) for word in words]
            self.desk.laws, self.desk.enumerated = Laws(tuple(values[:3]), tuple(values[3:])), []
        self._console.print(views.words_table(self.desk))

    def _enumerate(self, words: list[str]) -> None:
        """enumerate RULE: follow a shipped accept rule (rejection, block, traversal) through every outcome on the three "
        "words"""
        rules = ("rejection", "block", "traversal")
        if len(words) != 1 or words[0] not in rules:
            raise ParameterError(f"name a rule: {', '.join(rules)}")
        self._console.print(views.ways_view(self.desk, words[0]))
        self.desk.enumerated.append(words[0])

    # ---- help ------------------------------------------------------------------------------------------------------------

    def _hint(self, words: list[str]) -> None:
        """hint: a little help with the objective"""
        if objective := self.objective:
            self._say(objective.hint)

    def _solution(self, words: list[str]) -> None:
        """solution: the commands that come next, as far as they follow from what was measured"""
        if objective := self.objective:
            self._say("Type: " + ", then ".join(f"`{line}`" for line in objective.solution(self.desk)))

    def _objectives(self, words: list[str]) -> None:
        """objectives: all of them, and which are reached"""
        for number, objective in enumerate(COURSE, 1):
            self._say(f"{'✓' if objective.name in self._done else ' '} {number}. {objective.title}")

    def _clear(self, words: list[str]) -> None:
        """clear [all]: clear the screen and forget what was measured for the objective; all: start the lab over"""
        if words not in ([], ["all"]):
            raise ParameterError("`clear`, or `clear all` to start over")
        self.desk.clear()
        if words:
            self._done = []
            self._progress.write(self._done, self.desk.settings)
        self._console.clear()
        self._show_objective()

    def _help(self, words: list[str]) -> None:
        """help: this list"""
        for command in self._commands.values():
            if command.__doc__:
                self._say("  " + command.__doc__)
        self._say("  answer WORDS: the answer that an objective asks for\n  quit: leave; progress is kept")

    # ---- words to values -------------------------------------------------------------------------------------------------

    def _no_words(self, name: str, words: list[str]) -> None:
        if words:
            raise ParameterError(f"`{name}` takes nothing more")

    def _number(self, name: str, words: list[str]) -> float:
        try:
            (word,) = words
            return float(word)
        except ValueError as error:
            raise ParameterError(f"`{name}` takes a number") from error

    def _whole(self, name: str, words: list[str], low: int, high: int) -> int:
        value = self._number(name, words)
        if value != int(value) or not low <= value <= high:
            raise ParameterError(f"`{name}` takes a whole number from {low} to {high}")
        return int(value)
