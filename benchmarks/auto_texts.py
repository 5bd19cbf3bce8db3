"""Texts for `auto_replay.py`: what a target says to the prompts of `auto.py`, and which of it a draft model would have guessed.

    python benchmarks/auto_texts.py TARGET [--model FOLDER_OR_GGUF] [--prompts SPEC_BENCH.jsonl] [--tokens 128] --out TEXTS.json

Greedy. For each token of an answer: whether the draft model's most likely token is the same, and its probability. Goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from auto import REWRITE, chosen

import outrider
from outrider.drafters import load_drafter
from outrider.tree import DraftTree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--model")
    parser.add_argument("--prompts")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--each", type=int, default=1)
    parser.add_argument("--rewrites", type=int, default=len(REWRITE))
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    out = Path(arguments.out)
    engine = outrider.load(arguments.target, drafter="suffix", draft=6)
    target = engine.target
    made: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"vocabulary": target.vocab_size, "texts": []}
    drafter = load_drafter(arguments.model, target) if arguments.model else None
    prompts = list(chosen(arguments, target.tokenizer))
    for category, ids in prompts[len(made["texts"]) :]:
        answer = list(engine.generate(ids, max_tokens=arguments.tokens).tokens)
        hits, scores = guesses(drafter.model, ids, answer) if drafter else ([False] * len(answer), [0.0] * len(answer))  # type: ignore[attr-defined]
        made["texts"].append({"category": category, "prompt": ids, "answer": answer, "hits": hits, "scores": scores})
        out.write_text(json.dumps(made))
        print(len(made["texts"]), "of", len(prompts), flush=True)


def guesses(model: Any, prompt: list[int], answer: list[int]) -> tuple[list[bool], list[float]]:
    """Whether `model` would have said each token of the answer, and how sure it was of what it would have said."""
    slot = model.open()
    for _ in model.prefill(slot, prompt[:-1]):
        pass
    hits, scores, anchor = [], [], prompt[-1]
    for at in range(0, len(answer), 16):
        chunk = answer[at : at + 16]
        (output,) = model.forward([(slot, DraftTree.chain(anchor, chunk[:-1]))])
        law = output.logits.float().softmax(dim=-1)
        best = law.argmax(dim=-1).tolist()
        hits += [guess == token for guess, token in zip(best, chunk)]
        scores += law.amax(dim=-1).tolist()
        model.commit(slot, range(len(chunk)))
        anchor = chunk[-1]
    model.close(slot)
    return hits, scores


if __name__ == "__main__":
    main()
