"""What the lab shows of a run: its rounds, a draft tree, a sweep, three words."""

from __future__ import annotations

from typing import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from ..accept import RULES
from ..colours import COLOURS
from ..lab.desk import Desk, Taken
from ..lab.words import WORDS, emitted, kept, recovered, ways
from ..text import Tokenizer, alone
from ..trace import Round
from .screen import counts, painted


def word(tokenizer: Tokenizer | None, token: int) -> str:
    """A token as it can be shown in a line."""
    text = str(token) if tokenizer is None else alone(tokenizer, token)
    return text.replace("\n", "\\n").replace("\t", "\\t")


def rounds_table(taken: Taken, tokenizer: Tokenizer | None) -> Group:
    """A line for each round: what was drafted, how much of it was kept, what the target said."""
    table = Table("round", "drafted", "kept", "draft", "then")
    for r in taken.result.rounds:
        draft = Text(" ").join(painted(word(tokenizer, token), role) for token, role in zip(r.tokens[1:], roles(r)[1:]))
        last = painted(word(tokenizer, r.emitted[-1]), r.own) if r.own else Text("")
        table.add_row(str(r.number), str(r.proposed), str(r.accepted), draft, last)
    found = counts(taken.result.rounds)
    s = taken.result.stats
    sums = (
        f"{len(taken.result.rounds)} rounds: {found['drafted']} drafted, {found['accepted']} kept, {s.emitted} tokens emitted"
    )
    return Group(table, Text(sums), key())


def key() -> Text:
    """The legend of the colours."""
    parts = [
        painted(role, role).append(f" {COLOURS[role].meaning}", style="not underline not strike default") for role in COLOURS
    ]
    return Text("; ").join(parts)


def roles(round: Round) -> list[str]:
    """What became of each node: accepted, refused, or drafted where it was never tested."""
    emitted_path = set(round.path[: round.accepted + 1])
    tested = {test.node for test in round.tests}
    return [
        "accepted" if node in emitted_path else "refused" if node in tested else "drafted" for node in range(len(round.tokens))
    ]


def most_branched(rounds: Sequence[Round]) -> Round | None:
    """The round with the most to see: branches first, then kept tokens, then nodes."""

    def branches(r: Round) -> int:
        return len(r.parents) - len(set(r.parents[1:])) - 1

    drafted = [r for r in rounds if r.proposed]
    return max(drafted, key=lambda r: (branches(r) > 0, r.accepted, branches(r), r.proposed), default=None)


def tree_view(round: Round, tokenizer: Tokenizer | None) -> Group:
    """A round's draft tree with p, q and what the rule drew at each node, and the token that followed."""
    became = roles(round)
    tests = {test.node: test for test in round.tests}
    root = Tree(Text(f"{word(tokenizer, round.tokens[0])}  (the last token before the round)"))
    nodes = {0: root}
    for node in range(1, len(round.tokens)):
        label = painted(word(tokenizer, round.tokens[node]), became[node])
        label.append(f"  p {round.p[node]:.3f}", style="not underline not strike default")
        if (q := round.q[node]) is not None:
            label.append(f", q {q:.3f}", style="not underline not strike default")
        if test := tests.get(node):
            drew = f", drew {test.draw:.3f}" if test.draw is not None else ""
            said = f": {'kept' if test.kept else 'refused'} (probability {test.probability:.3f}{drew})"
            label.append(said, style="not underline not strike default")
        nodes[node] = nodes[round.parents[node]].add(label)
    last = Text("the text ended inside the draft")
    if round.own:
        last = (
            Text("then ")
            .append_text(painted(word(tokenizer, round.emitted[-1]), round.own))
            .append("  (the target's own token)")
        )
    return Group(Text(f"round {round.number}, rule {round.rule}, {round.proposed} drafted in one pass"), root, last)


def sweep_table(desk: Desk) -> Table:
    """What was measured for each draft length."""
    table = Table("draft", "tokens/s", "times plain", "tokens per pass")
    table.add_row("0 (plain)", f"{desk.plain_speed:.1f}", "1.000", "1.00")
    for length, speed in sorted(desk.sweep.items()):
        table.add_row(str(length), f"{speed.tokens_per_second:.1f}", f"{speed.ratio:.3f}", f"{speed.acceptance_length:.2f}")
    return table


def words_table(desk: Desk) -> Table:
    """The two laws, and what keeping a drafted word is decided by."""
    table = Table("word", "p (target)", "q (drafter)", "kept if drafted: min(1, p/q)")
    for name, p, q in zip(WORDS, desk.laws.p, desk.laws.q):
        table.add_row(name, f"{p:.3g}", f"{q:.3g}", f"{min(1.0, p / q):.4g}" if q else "-")
    return table


def ways_view(desk: Desk, rule: str) -> Group:
    """Every way of a round under a shipped rule, and the sums."""
    found = ways(RULES[rule], desk.laws)
    each = Table("drafted", "", "emitted", "probability", title=f"every outcome of the rule {rule}", title_justify="left")
    for way in found:
        role = "accepted" if way.kept else "refused"
        each.add_row(
            painted(WORDS[way.drafted], role), "kept" if way.kept else "refused", WORDS[way.emitted], f"{way.probability:.6g}"
        )
    sums = Table("word", "kept", "recovered", "sum", "p")
    for row in zip(WORDS, kept(found), recovered(found), emitted(found), desk.laws.p):
        sums.add_row(row[0], *(f"{value:.6g}" for value in row[1:]))
    return Group(each, sums)
