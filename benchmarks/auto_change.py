"""How fast `auto` follows a change of text: prose, then a copy of what the prompt has, then prose. Drafted and kept tokens by round, as a plot.

    python benchmarks/auto_change.py TOKENIZER_FOLDER --rows 1:13.7,2:13.0,4:13.5,6:13.4,8:14.3,16:18.8 --plot docs/change-of-text.png

The texts are fixed, the drafter is `suffix`, a round takes what its rows cost; see `auto_replay.py`.
"""

from __future__ import annotations

import argparse
from itertools import accumulate
from pathlib import Path
from typing import Any

from auto_replay import Replay, Text
from common import save
from transformers import AutoTokenizer

PASSAGE = """The reading room of the harbour library opens at nine. Visitors leave coats and bags at the desk, take a numbered card and choose a
seat. Charts are brought to the table by the staff, three at a time, and go back in the order in which they came. Pencils only; ink, food and
flash photography are forbidden. The room closes at six, and on the last Friday of the month at noon, when the collection is counted."""
PROSE = (
    """Most people who grow tomatoes under glass learn the hard way that warmth alone does little. A plant which is fed too early turns
all leaf, and one that dries out twice in a week drops its first flowers. My neighbour, who has won more ribbons than she can hang, waters at
dawn, opens every window before breakfast and talks to nobody until the kettle has boiled. Her fruit is small, dark and improbably sweet.""",
    """Later that evening a wind got up from the west. We could hear shutters banging along the quay, a dog somewhere, then rain. Nobody wanted
to be first to say that the picnic was off, so cards were dealt, candles found, and an uncle began the story about the goat again.""",
)


AROUND = 20
"""Rounds of prose that the plot shows on either side."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer")
    parser.add_argument("--rows", required=True)
    parser.add_argument("--plot", help="of the first run")
    parser.add_argument("--seeds", type=int, default=12, help="runs, each with other noise of the clock")
    parser.add_argument("--name", default="auto-change")
    arguments = parser.parse_args()
    rows = {int(n): float(ms) for n, ms in (part.split(":") for part in arguments.rows.split(","))}
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    prose, passage, more = (tokenizer.encode(text, add_special_tokens=False) for text in (PROSE[0], PASSAGE, PROSE[1]))
    answer = [*prose, *passage, *more]
    text = Text("change", passage, answer, [False] * len(answer), [0.0] * len(answer))
    runs = [
        one_run(text, rows, len(tokenizer), (len(prose), len(prose) + len(passage)), seed) for seed in range(arguments.seeds)
    ]
    for name in ("first_draft", "full_draft", "quiet"):
        print(f"{name}: after {min(run[name] for run in runs)} to {max(run[name] for run in runs)} rounds")
    save(
        arguments.name,
        {
            "rows_ms": rows,
            "runs": [{k: v for k, v in run.items() if k != "rounds"} for run in runs],
            "rounds": runs[0]["rounds"],
        },
    )
    if arguments.plot:
        plot(runs[0]["rounds"], runs[0]["edges"], arguments.plot)


def one_run(text: Text, rows: dict[int, float], vocabulary: int, ends: tuple[int, int], seed: int) -> dict[str, Any]:
    """ends: tokens after which copying begins and ends. edges: the rounds in which it does; first_draft, full_draft: rounds of copying before
    one that drafts anything, and as much as is kept there typically; quiet: rounds of the prose after it before next to nothing is drafted.
    """
    replay = Replay([text], rows, 0.0, 0.0, vocabulary, seed)
    drafter, pace = replay.calibrator(["suffix"])
    found = replay.decode(text, drafter, pace)["rounds"]
    starts = [0, *accumulate(kept + 1 for _, _, kept in found)]
    edges = [next(i for i, start in enumerate(starts) if start >= end) for end in ends]
    copying = found[edges[0] : edges[1]]
    kept = sorted(k for _, _, k in copying if k)
    typical = kept[len(kept) // 2]
    after = found[edges[1] : edges[1] + 30]
    return {
        "edges": edges,
        "first_draft": next(i for i, (_, drafted, _) in enumerate(copying) if drafted),
        "full_draft": next(i for i, (_, drafted, _) in enumerate(copying) if drafted >= typical),
        "quiet": next(i for i in range(len(after)) if sum(d for _, d, _ in after[i : i + 5]) <= 5),
        "rounds": found,
    }


def plot(found: list[tuple[str, int, int]], edges: list[int], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 3))
    first, last = max(edges[0] - AROUND, 0), min(edges[1] + AROUND, len(found))
    places = range(first, last)
    axes.bar(places, [drafted for _, drafted, _ in found[first:last]], color="#c9d6e3", label="drafted")
    axes.bar(places, [kept for _, _, kept in found[first:last]], color="#2f6f9f", label="kept")
    for edge in edges:
        axes.axvline(edge - 0.5, color="black", linewidth=0.8, linestyle=":")
    for name, left, right in zip(("prose", "copying", "prose"), (first, *edges), (*edges, last)):
        axes.text((left + right - 1) / 2, axes.get_ylim()[1], name, ha="center", va="bottom")
    axes.set(xlabel="round", ylabel="tokens")
    axes.legend(frameon=False)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
