"""How fast `auto` follows a change of text: prose, then a copy of what the prompt has, then prose. Drafted and kept tokens by round, as a plot.

    python benchmarks/auto_change.py TOKENIZER_FOLDER --rows 1:13.7,2:13.0,4:13.5,6:13.4,8:14.3,16:18.8 --plot docs/change-of-text.png

The texts are fixed, the drafter is `suffix`, a round takes what its rows cost; see `auto_replay.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

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
    parser.add_argument("--plot")
    parser.add_argument("--name", default="auto-change")
    arguments = parser.parse_args()
    rows = {int(n): float(ms) for n, ms in (part.split(":") for part in arguments.rows.split(","))}
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    prose, passage, more = (tokenizer.encode(text, add_special_tokens=False) for text in (PROSE[0], PASSAGE, PROSE[1]))
    answer = [*prose, *passage, *more]
    text = Text("change", passage, answer, [False] * len(answer), [0.0] * len(answer))
    replay = Replay([text], rows, 0.0, 0.0, len(tokenizer))
    drafter, pace = replay.calibrator(["suffix"])
    found = replay.decode(text, drafter, pace)["rounds"]
    starts, at = [], 0
    for _, _, kept in found:
        starts.append(at)
        at += kept + 1
    edges = [next(i for i, start in enumerate(starts) if start >= length) for length in (len(prose), len(prose) + len(passage))]
    copying = found[edges[0] : edges[1]]
    kept = sorted(k for _, _, k in copying if k)
    typical = kept[len(kept) // 2]
    first = next(i for i, (_, drafted, _) in enumerate(copying) if drafted >= typical)
    after = found[edges[1] : edges[1] + 30]
    quiet = next(i for i in range(len(after)) if sum(d for _, d, _ in after[i : i + 5]) <= 5)
    print(f"copying begins in round {edges[0]}; it drafts {typical} nodes or more from its round {first} on")
    print(f"copying ends in round {edges[1]}; next to nothing is drafted from round {quiet} after it on")
    save(
        arguments.name, {"rows_ms": rows, "edges": edges, "rounds_to_copying": first, "rounds_to_prose": quiet, "rounds": found}
    )
    if arguments.plot:
        plot(found, edges, arguments.plot)


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
