"""The objectives: what to do, how it is checked against what the engine did, and why it is so.

A check looks at the desk after every command. `answer` holds the words after the command ``answer``, or None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Sequence

from ..accept import RULES
from .desk import Desk, Taken
from .words import WORDS, emitted, keep_the_likeliest, kept, recovered, redraw_from_p, ways

NEAR = 0.006
"""How far an answer with two figures after the point may be off."""
EVEN = 0.03
"""Speeds this near to the best count as the best: no machine measures more exactly."""
FAR = 16
"""Up to this draft length must have been measured before `never` can be said."""
DRAFTERS = 3
"""How many drafters, plain decoding among them, must have given the same text."""

Answer = Sequence[str] | None


@dataclass(frozen=True)
class Verdict:
    """done: whether the objective is reached. said: what to tell the learner, if anything."""

    done: bool
    said: str = ""


WAITING = Verdict(False)


@dataclass(frozen=True)
class Objective:
    """solution: the commands that reach it, as far as they can be known from what was measured. why: shown when it is "
    "reached."""

    name: str
    title: str
    task: str
    hint: str
    check: Callable[[Desk, Answer], Verdict]
    solution: Callable[[Desk], list[str]]
    why: Callable[[Desk], str]


def numbers(answer: Sequence[str]) -> list[float] | None:
    """Numbers, fractions or percentages as a person writes them; None for anything else."""
    try:
        return [_number(word.strip(",;")) for word in answer]
    except (ValueError, ZeroDivisionError):
        return None


def _number(word: str) -> float:
    if word.endswith("%"):
        return float(word[:-1]) / 100
    above, stroke, below = word.partition("/")
    return float(above) / float(below) if stroke else float(word)


# ---- 1. a pair ------------------------------------------------------------------------------------------------------


def _check_pair(desk: Desk, answer: Answer) -> Verdict:
    return Verdict(desk.target is not None and desk.costs is not None)


def _why_pair(desk: Desk) -> str:
    assert desk.costs is not None and desk.target is not None
    rows = desk.costs.rows
    return (
        f"One token costs the target a pass: {rows[1]:.1f} ms. A pass over 8 tokens costs {rows[8]:.1f} ms here, "
        f"{rows[8] / rows[1]:.1f} "
        f"times as much and not 8 times, because the weights are read only once. Drafting a first token costs "
        f"{desk.costs.draft:.2f} ms. "
        "All of speculative decoding lives on this difference: guess several tokens cheaply, check them in one pass."
    )


# ---- 2. the acceptance rate -----------------------------------------------------------------------------------------


def _drafted(desk: Desk) -> Taken | None:
    """The last run, if something was drafted in it."""
    last = desk.runs[-1] if desk.runs else None
    return last if last and last.result.stats.proposed else None


def _check_rate(desk: Desk, answer: Answer) -> Verdict:
    if answer is None:
        return WAITING
    if (last := _drafted(desk)) is None:
        return Verdict(False, "There is no run with drafts yet: `run` first.")
    s = last.result.stats
    given = numbers(answer)
    if given is None or len(given) != 1:
        return Verdict(False, "The answer is one number, such as 0.35, 35% or 12/34.")
    assert s.acceptance_rate is not None and s.acceptance_length is not None
    if abs(given[0] - s.acceptance_rate) <= NEAR:
        return Verdict(True)
    others = {
        "the acceptance length, tokens per pass": s.acceptance_length,
        "accepted per emitted token": s.accepted / s.emitted,
        "the share that was refused": 1 - s.acceptance_rate,
        "accepted tokens per pass": s.accepted / s.passes,
    }
    wrong = next((f" That is {name}." for name, value in others.items() if abs(given[0] - value) <= NEAR), "")
    return Verdict(False, f"No.{wrong} Of every token that was drafted, how many were kept?")


def _solve_rate(desk: Desk) -> list[str]:
    last = _drafted(desk)
    return ["run"] if last is None else [f"answer {last.result.stats.accepted}/{last.result.stats.proposed}"]


def _why_rate(desk: Desk) -> str:
    last = _drafted(desk)
    assert last is not None
    s = last.result.stats
    return (
        f"Acceptance rate = accepted / proposed = {s.accepted} / {s.proposed} = {s.acceptance_rate:.2f}. The acceptance "
        f"length is another figure: "
        f"emitted / passes = {s.emitted} / {s.passes} = {s.acceptance_length:.2f} tokens per pass, the target's own token "
        f"at the end of each "
        "round included. Without a drafter it is 1."
    )


# ---- 3. how far to draft --------------------------------------------------------------------------------------------


def best_lengths(desk: Desk) -> list[int]:
    best = max(speed.ratio for speed in desk.sweep.values())
    return sorted(n for n, speed in desk.sweep.items() if speed.ratio >= (1 - EVEN) * best)


def first_loss(desk: Desk) -> int | None:
    """The shortest measured draft that was slower than plain decoding."""
    return min((n for n, speed in desk.sweep.items() if speed.ratio < 1), default=None)


def _check_length(desk: Desk, answer: Answer) -> Verdict:
    if answer is None:
        return WAITING
    if len(desk.sweep) < 4:
        return Verdict(False, "Measure at least four lengths first, for example `sweep 1,2,4,8,16`.")
    if len(answer) != 2:
        return Verdict(
            False, "Two words: the fastest length, and the shortest that was slower than plain decoding, or `never`."
        )
    if answer[0] not in map(str, best_lengths(desk)):
        return Verdict(False, f"Draft {answer[0]} was not the fastest: look for the highest number under `times plain`.")
    loss = first_loss(desk)
    if answer[1] == "never" and loss is None and max(desk.sweep) < FAR:
        return Verdict(False, f"Up to {max(desk.sweep)} it paid; measure as far as {FAR} before you say never.")
    if answer[1] != (str(loss) if loss is not None else "never"):
        return Verdict(False, "The first word is right. It stops paying where `times plain` first falls below 1.")
    desk.change(draft=int(answer[0]))
    return Verdict(True)


def _solve_length(desk: Desk) -> list[str]:
    if len(desk.sweep) < 4 or max(desk.sweep) < FAR:
        return ["sweep 1,2,4,8,16"]
    return [f"answer {best_lengths(desk)[0]} {first_loss(desk) or 'never'}"]


def _why_length(desk: Desk) -> str:
    loss = first_loss(desk)
    end = (
        f"From {loss} on it is slower than not drafting at all."
        if loss
        else "This drafter is so cheap that it never cost more than it gained."
    )
    return (
        "A longer draft is checked in the same pass, but each further token is less likely to be reached: all before it "
        "must have been "
        f"kept. And each costs a row and a draft step. {end} The draft length is {desk.settings.draft} from now on."
    )


# ---- 4. a tree ------------------------------------------------------------------------------------------------------


def _check_tree(desk: Desk, answer: Answer) -> Verdict:
    if answer is None:
        return WAITING
    if desk.shown is None:
        return Verdict(False, "Look at a tree first: `drafter pair shape=tree min_probability=0`, `draft 8`, `run`, `tree`.")
    _, round = desk.shown
    if all(parent == node - 1 for node, parent in enumerate(round.parents)):
        return Verdict(
            False,
            "What you looked at is a chain. Trees branch with shape=tree, min_probability=0 and a `draft` of 8 or so: set these, `run`, and "
            "look at a `tree`.",
        )
    if len(answer) != 2 or not answer[0].isdigit():
        return Verdict(False, "A number and a word: how many drafted tokens were kept, then `recovered` or `bonus`.")
    if int(answer[0]) != round.accepted:
        return Verdict(False, "Count the kept nodes again. The root is the last token of the text before; it was not drafted.")
    if answer[1] != round.own:
        return Verdict(
            False, "The number is right. A bonus token follows a path that was kept to its end, a recovered one a refusal."
        )
    return Verdict(True)


def _solve_tree(desk: Desk) -> list[str]:
    if desk.shown is None or all(parent == node - 1 for node, parent in enumerate(desk.shown[1].parents)):
        return ["drafter pair shape=tree min_probability=0", "draft 8", "run", "tree"]
    return [f"answer {desk.shown[1].accepted} {desk.shown[1].own}"]


def _why_tree(desk: Desk) -> str:
    assert desk.shown is not None
    _, round = desk.shown
    return (
        f"All {round.proposed} guesses went through the target in one pass: each sees its own ancestors only, through the "
        f"attention mask. At most one child of "
        "a node can be kept, so at most one path; siblings are second chances where a chain would have ended. The token "
        "after the path is the "
        "target's own, whatever happened: so every pass yields at least one token."
    )


# ---- 5. one seed, one text ------------------------------------------------------------------------------------------


def same_seed(desk: Desk) -> list[Taken]:
    """The last run of each drafter, of those with the settings and prompt of the last run but for drafter and draft "
    "length."""
    if not desk.runs:
        return []
    last = desk.runs[-1]
    key = (last.prompt, last.settings.temperature, last.settings.seed, last.settings.tokens)
    found = {
        run.settings.name: run
        for run in desk.runs
        if (run.prompt, run.settings.temperature, run.settings.seed, run.settings.tokens) == key
    }
    return list(found.values())


def _check_seed(desk: Desk, answer: Answer) -> Verdict:
    runs = same_seed(desk)
    if not runs or runs[-1].settings.seed is None or runs[-1].settings.temperature == 0:
        return (
            WAITING
            if answer is None
            else Verdict(False, "Nothing to answer here: set a `temperature` and a `seed`, then `run`.")
        )
    first = runs[0]
    for other in runs[1:]:
        if (where := desk.parted(first, other)) and not where.near_tie:
            return Verdict(
                False, f"{first.settings.name} and {other.settings.name} gave different texts, at {where}. That must not be."
            )
    if len(runs) < DRAFTERS:
        names = ", ".join(run.settings.name for run in runs)
        return Verdict(False, f"With this seed so far: {names}. {DRAFTERS - len(runs)} more to go.")
    return Verdict(True)


def _solve_seed(desk: Desk) -> list[str]:
    chosen = ["pair", "suffix", "none", "lookup"]
    if desk.pair[1] in chosen:
        chosen.remove(desk.pair[1])
    chosen = chosen[:DRAFTERS]
    return ["temperature 0.8", "seed 7", *(line for name in chosen for line in (f"drafter {name}", "run"))]


def _why_seed(desk: Desk) -> str:
    texts = {run.result.text for run in same_seed(desk)}
    said = "the same text to the last character" if len(texts) == 1 else "the same text but for a tie within rounding"
    return (
        f"{len(same_seed(desk))} drafters, one of them perhaps none at all, and {said}. With a seed the rule `coupled` is "
        f"in force: the noise of each position "
        "belongs to the position, not to the draft, so the target's choice does not depend on what was proposed. A "
        "drafter decides how "
        "fast you get the text, never which text."
    )


# ---- 6, 7. three words ----------------------------------------------------------------------------------------------


def _check_kept(desk: Desk, answer: Answer) -> Verdict:
    if answer is None:
        return WAITING
    found = ways(RULES["rejection"], desk.laws)
    right = [*kept(found), sum(recovered(found))]
    given = numbers(answer)
    if given is None or len(given) != len(right):
        return Verdict(
            False, f"Four numbers: for {', '.join(WORDS)} the probability that it is drafted and kept; then that of a refusal."
        )
    wrong = [name for name, one, value in zip((*WORDS, "the refusal"), given, right) if abs(one - value) > NEAR]
    if not wrong:
        return Verdict(True)
    if all(abs(one - min(1.0, p / q)) <= NEAR for one, p, q in zip(given, desk.laws.p, desk.laws.q) if q > 0):
        return Verdict(
            False, "These are the probabilities of keeping a word once it is drafted; how likely is it that it is drafted?"
        )
    return Verdict(False, f"The engine finds something else for {', '.join(wrong)}.")


def _solve_kept(desk: Desk) -> list[str]:
    found = ways(RULES["rejection"], desk.laws)
    return ["words", "answer " + " ".join(f"{value:.3g}" for value in (*kept(found), sum(recovered(found))))]


def _why_kept(desk: Desk) -> str:
    return (
        "Drafted with q and kept with min(1, p/q): together min(p, q). Where the drafter says a word less often than the "
        "target would, every "
        "draft of it is kept and still too few come; where it says it too often, just as many are kept as the target "
        "would say. Nothing "
        "is said too often. What is missing adds up to the probability of a refusal."
    )


def _check_sums(desk: Desk, answer: Answer) -> Verdict:
    if answer is None:
        return WAITING
    found = ways(RULES["rejection"], desk.laws)
    given = numbers(answer)
    if given is None or len(given) != 2 * len(WORDS):
        return Verdict(
            False, "Six numbers: how likely each word comes in the place of a refused one, then how likely each comes at all."
        )
    names = [*(f"{word} in place of a refused one" for word in WORDS), *(f"{word} at all" for word in WORDS)]
    wrong = [n for n, one, value in zip(names, given, (*recovered(found), *emitted(found))) if abs(one - value) > NEAR]
    if wrong:
        return Verdict(False, f"The engine finds something else for: {', '.join(wrong)}.")
    if "rejection" not in desk.enumerated:
        return Verdict(False, "Right. Now see what the engine's own rule does: `enumerate rejection`, then answer again.")
    return Verdict(True)


def _solve_sums(desk: Desk) -> list[str]:
    found = ways(RULES["rejection"], desk.laws)
    values = " ".join(f"{value:.3g}" for value in (*recovered(found), *emitted(found)))
    return ["enumerate rejection", f"answer {values}"]


def _why_sums(desk: Desk) -> str:
    worst = {rule: _error(desk, rule) for rule in ("rejection", "block", "traversal")}
    errors = ", ".join(f"{rule} {error:.1g}" for rule, error in worst.items())
    return (
        "Kept, min(p, q), and recovered, max(p - q, 0), add up to p for every word. The engine's shipped rules, followed "
        "through every "
        f"outcome of every draw, are off by at most: {errors}. The test suite does the same with trees, ties and zeros, "
        f"to 1e-9."
    )


def _error(desk: Desk, rule: str) -> float:
    return max(abs(sum_ - p) for sum_, p in zip(emitted(ways(RULES[rule], desk.laws)), desk.laws.p))


# ---- 8. why ---------------------------------------------------------------------------------------------------------

CHOICES = {
    "a": "The drafter is nearly as good as the target, so its tokens are nearly right.",
    "b": "A token that the target finds likelier than any other is kept; any other is replaced by a draw from the target.",
    "c": "Each token is kept with probability min(1, p/q), and a refused one is replaced from what p has more than q, "
    "max(p - q, 0).",
    "d": "Each token is kept with probability min(1, p/q), and a refused one is replaced by a fresh draw from p.",
}


def _check_why(desk: Desk, answer: Answer) -> Verdict:
    if answer is None:
        return WAITING
    choice = answer[0].lower() if len(answer) == 1 else ""
    if choice == "c":
        return Verdict(_error(desk, "rejection") < 1e-9)
    if choice == "a":
        bad = type(desk.laws)(desk.laws.p, (0.0, 0.1, 0.9))
        sums = emitted(ways(RULES["rejection"], bad))
        return Verdict(
            False, f"No: with a drafter that says {_law(bad.q)} the engine's rule still emits {_law(sums)}. It is only slower."
        )
    if choice in ("b", "d"):
        sums = emitted(ways(keep_the_likeliest if choice == "b" else redraw_from_p, desk.laws))
        off = f"No: followed through every outcome, that rule emits {_law(sums)}, where the target says {_law(desk.laws.p)}."
        return Verdict(False, off)
    return Verdict(False, f"One of {', '.join(CHOICES)}.")


def _law(law: Sequence[float]) -> str:
    return ", ".join(f"{word} {value:.3g}" for word, value in zip(WORDS, law))


COURSE: tuple[Objective, ...] = (
    Objective(
        "pair",
        "A pair of models",
        "Load a target and a drafter, and see what their passes cost here. The command is `load`.",
        "Type `load`. Another pair is chosen when the lab starts: outrider lab -t TARGET -d DRAFTER.",
        _check_pair,
        lambda desk: ["load"],
        _why_pair,
    ),
    Objective(
        "rate",
        "The acceptance rate",
        "`run` the benchmark request. `rounds` shows what each pass of the target kept. Compute the acceptance rate and "
        "`answer` it.",
        "Add up `drafted` and `kept` over all rounds, or take the sums below the table: kept / drafted.",
        _check_rate,
        _solve_rate,
        _why_rate,
    ),
    Objective(
        "length",
        "How far to draft",
        "Measure several draft lengths with `sweep 1,2,4,8,16`. Then `answer` with the fastest length, and the shortest "
        "one that was slower "
        "than plain decoding (or `never`).",
        "`times plain` is the speed over that of plain decoding in the same sweep. The fastest has the highest; it stops "
        "paying below 1.",
        _check_length,
        _solve_length,
        _why_length,
    ),
    Objective(
        "tree",
        "A draft tree",
        "Let the drafter guess a tree: `drafter pair shape=tree min_probability=0` (or `drafter suffix shape=tree`), `draft 8`, then `run` "
        "and `tree`. `answer` "
        "with how many drafted tokens of that tree were kept, and what the token after them is: `recovered` or `bonus`.",
        "Kept nodes are green and underlined. Below the tree stands the token that followed; did it come after a refusal?",
        _check_tree,
        _solve_tree,
        _why_tree,
    ),
    Objective(
        "seed",
        "One seed, one text",
        f"Set `temperature 0.8` and `seed 7`, and `run` with {DRAFTERS} different drafters, `drafter none` among them if "
        f"you like. The texts are compared.",
        "`drafter suffix`, `run`, `drafter none`, `run`, `drafter lookup`, `run`. The names are in `outrider drafters`.",
        _check_seed,
        _solve_seed,
        _why_seed,
    ),
    Objective(
        "kept",
        "Three words: what is kept",
        "`words` shows a vocabulary of three words, what the target says (p) and what the drafter says (q). One word is "
        "drawn from q and kept with "
        "probability min(1, p/q). By hand: how likely is it, for each word, that it is drafted and kept? And that the "
        "draft is refused? "
        "`answer` with four numbers.",
        "Drafted and kept: q times min(1, p/q). A refusal: 1 minus the three.",
        _check_kept,
        _solve_kept,
        _why_kept,
    ),
    Objective(
        "sums",
        "Three words: the sums",
        "A refused word is replaced by one drawn in proportion to max(p - q, 0). By hand: how likely does each word come "
        "in the place of a refused one, "
        "and how likely does each come at all? `answer` with six numbers, and see the engine's rule with `enumerate "
        "rejection`.",
        "In place of a refused one: the probability of a refusal times the word's share of max(p - q, 0). At all: kept "
        "plus that.",
        _check_sums,
        _solve_sums,
        _why_sums,
    ),
    Objective(
        "why",
        "Why sampling stays exact",
        "Which of these is the reason that the text follows the target's law exactly? `answer` with a letter.\n"
        + "\n".join(f"  {letter}) {text}" for letter, text in CHOICES.items()),
        "The last two objectives have it: what is kept is min(p, q). What must be added to that to get p?",
        _check_why,
        lambda desk: ["answer c"],
        lambda desk: (
            f"min(p, q) + max(p - q, 0) = p, for every word and every drafter. Here: "
            f"{_law(emitted(ways(RULES['rejection'], desk.laws)))}. A bad drafter costs "
            "time; it cannot change what is said."
        ),
    ),
)
