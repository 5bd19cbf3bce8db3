"""What the drafters without a model cost: time to index a context, memory, and time of one proposal.

    python benchmarks/lookup_cost.py [--prompts FILE.jsonl --tokenizer FOLDER_OR_HUB_ID] [--out FILE.json]

FILE.jsonl has a list of texts under "turns" or one under "prompt" in each line (Spec-Bench's format). Without it the text is made
up: words drawn by rank, in sentences of which some come again. Proposals are timed after every token or two of more of the same
text; memory is what tracemalloc counts in a second run, the tokens themselves not included.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
import tracemalloc
from pathlib import Path

from outrider.drafters import Ask, Drafter
from outrider.drafters.lookup import IndexState, LookupDrafter
from outrider.drafters.suffix import SuffixDrafter, SuffixOptions, SuffixState
from outrider.sampling import Sampler, SamplingParams
from outrider.tree import Budget

SIZES = (8192, 16384, 32768, 65536)
ROUNDS = 400
DRAFT = Budget(16, 16)


def real_text(path: str, tokenizer: str) -> list[int]:
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(tokenizer).encode
    tokens: list[int] = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for text in row.get("turns") or [row["prompt"]]:
            tokens += encode(text, add_special_tokens=False)
    return tokens


def made_up_text(n: int) -> list[int]:
    rng = random.Random(0)
    ranks = range(20000)
    weights = [1 / (rank + 3) for rank in ranks]
    sentences: list[list[int]] = []
    tokens: list[int] = []
    while len(tokens) < n:
        if sentences and rng.random() < 0.3:
            sentence = rng.choice(sentences)
        else:
            sentence = rng.choices(ranks, weights, k=rng.randint(5, 30))
            sentences.append(sentence)
        tokens += sentence
    return tokens[:n]


def measure(drafter: Drafter, text: list[int], size: int) -> dict[str, float]:
    """Cost of `drafter` at a context of `size` tokens of `text`; the text must be longer by 2 * ROUNDS."""
    tokens = text[:size]
    sampler = Sampler(SamplingParams(), tokens, max(text) + 1)

    def opened() -> IndexState:
        state = drafter.open(sampler)
        assert isinstance(state, IndexState)
        return state

    state = opened()
    began = time.perf_counter()
    state.catch_up(tokens)
    build = time.perf_counter() - began

    live = list(tokens)
    drafter.propose([Ask(state, live, DRAFT)])  # the new list is compared once
    times, proposed = [], 0
    rng = random.Random(1)
    for _ in range(ROUNDS):
        live += text[len(live) : len(live) + rng.randint(1, 2)]
        began = time.perf_counter()
        (tree,) = drafter.propose([Ask(state, live, DRAFT)])
        times.append(time.perf_counter() - began)
        proposed += len(tree) - 1
    times.sort()

    tracemalloc.start()
    second = opened()
    second.catch_up(tokens)
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    row = {
        "build_ms": build * 1e3,
        "build_us_per_token": build / size * 1e6,
        "memory_mib": memory / 2**20,
        "bytes_per_token": memory / size,
        "propose_median_us": statistics.median(times) * 1e6,
        "propose_p95_us": times[int(0.95 * len(times))] * 1e6,
        "proposed_per_round": proposed / ROUNDS,
    }
    if isinstance(second, SuffixState):
        row["states_per_token"] = len(second.automaton.length) / size
        row["transitions_per_token"] = sum(map(len, second.automaton.after)) / size
    return row


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts")
    parser.add_argument("--tokenizer")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "lookup_cost.json"))
    arguments = parser.parse_args()
    if bool(arguments.prompts) != bool(arguments.tokenizer):
        parser.error("--prompts and --tokenizer go together")

    most = max(SIZES) + 2 * ROUNDS
    rng = random.Random(2)
    texts = {
        "real text": real_text(arguments.prompts, arguments.tokenizer) if arguments.prompts else [],
        "made-up text": made_up_text(most),
        "one token": [7] * most,
        "period 100": [i % 100 for i in range(most)],
        "random, 2 tokens": rng.choices(range(2), k=most),
        "random, 50000 tokens": rng.choices(range(50000), k=most),
    }
    drafters = {
        "suffix": SuffixDrafter(),
        "suffix, tree": SuffixDrafter(SuffixOptions(shape="tree")),
        "lookup": LookupDrafter(),
    }
    rows = []
    print(
        f"{'text':22}{'drafter':14}{'tokens':>7}{'build ms':>10}{'MiB':>8}{'B/token':>9}{'median us':>11}{'95% us':>9}{'drafted':>9}"
    )
    for text_name, text in texts.items():
        for drafter_name, drafter in drafters.items():
            for size in SIZES:
                if len(text) < size + 2 * ROUNDS:
                    continue
                row = measure(drafter, text, size)
                rows.append(
                    {"text": text_name, "drafter": drafter_name, "tokens": size, **{k: round(v, 3) for k, v in row.items()}}
                )
                print(
                    f"{text_name:22}{drafter_name:14}{size:7}{row['build_ms']:10.1f}{row['memory_mib']:8.1f}{row['bytes_per_token']:9.0f}"
                    f"{row['propose_median_us']:11.1f}{row['propose_p95_us']:9.1f}{row['proposed_per_round']:9.1f}"
                )
    machine = {"processor": processor(), "system": platform.platform(), "python": platform.python_version()}
    result = {"machine": machine, "rounds": ROUNDS, "draft": DRAFT.nodes, "rows": rows}
    Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
    Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
