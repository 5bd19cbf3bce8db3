"""`outrider demo`: four kinds of work, each answered by plain decoding and with a drafter, to see that the text is the same."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Any, Callable, Sequence

from .bench.compare import Difference, comparable, difference
from .bench.prompts import Prompt
from .decode import Sequence as Decoding
from .engine import Engine, Result
from .trace import Round

REWRITE = """\
Copy this text, but replace "Tuesday" with "Friday":

The meeting of the garden club will take place on Tuesday at seven in the evening in the library. Please bring a notebook and \
a pen. Mrs. Miller will show us how to cut apple trees in winter, and Mr. Brown will speak about the water supply of small \
gardens. After the talks, there will be tea and cake. If you want to bring a guest, please write to us before Tuesday so that \
we can put out enough chairs. The club has bought a new ladder and two saws, which every member can borrow for a week. The old \
tools will be sold for a small price after the meeting. The next meeting will be announced in the newsletter."""

FIX = '''\
This function should return the average of a list of numbers, but it fails for an empty list. Return the corrected function.

```python
def average(numbers):
    """Return the average of a list of numbers, or None if the list is empty."""
    total = 0
    count = 0
    for number in numbers:
        total = total + number
        count = count + 1
    return total / count
```'''

EXTRACT = """\
Read this passage and list the sentences that contain a number, word for word.

The lighthouse was built in 1874 by two brothers from the mainland. It stands on a rock in front of the harbour. The tower is \
38 metres high and has a staircase of 197 steps. On clear days the keeper could see the ships far out on the sea. The lamp was \
changed from oil to electricity in 1931. Today the tower is a museum. It is open from May to October."""

CHAT = "What is the difference between a lake and a pond?"

PROMPTS = (Prompt(REWRITE, "rewrite"), Prompt(FIX, "fix"), Prompt(EXTRACT, "extract"), Prompt(CHAT, "chat"))
"""The built-in prompts: rewrite a text, fix a function, extract from a passage, chat. Also what `outrider bench` takes."""


@dataclass(frozen=True)
class Outcome:
    """One prompt, answered twice. difference: where the texts part, if they do. comparable: whether they must not."""

    prompt: Prompt
    plain: Result
    drafted: Result
    comparable: bool
    difference: Difference | None

    @property
    def ratio(self) -> float | None:
        """Speed with the drafter over that of plain decoding: tokens per second, each without its prefill."""
        mine, plain = self.drafted.stats.tokens_per_second, self.plain.stats.tokens_per_second
        return mine / plain if mine and plain else None


Show = Callable[[str, Round | None], None]
"""Called with ``plain`` or ``drafted``: before each decoding with None, then with each Round."""


def play(plain: Engine, drafted: Engine, prompt: Prompt, asked: tuple[Decoding, Decoding], show: Show) -> Outcome:
    """Answer one prompt with both engines, which share a target. asked: a sequence of it for each, not yet opened. Each Round
    goes to `show` as it comes.
    """
    results = []
    for name, engine, sequence in zip(("plain", "drafted"), (plain, drafted), asked):
        show(name, None)
        rounds = []
        with closing(engine.decode([sequence])) as decoding:  # type: ignore[type-var]
            for round in decoding:
                rounds.append(round)
                show(name, round)
        results.append(engine.result(sequence, rounds))
    one, other = results
    first, params = asked[0], asked[0].params
    same = comparable(params, other.rule)
    ids = first.tokens[: first.prompt_length]
    where = difference(plain.target, ids, params, one.tokens, other.tokens) if same else None
    return Outcome(prompt, one, other, same, where)


def warm_up(engines: Sequence[Engine], messages: Any) -> None:
    """A few tokens, not counted: the first passes of a process are slow."""
    for engine in engines:
        engine.generate(messages, max_tokens=6)
