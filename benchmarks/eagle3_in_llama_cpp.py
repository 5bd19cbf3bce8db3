"""How many drafted tokens of one EAGLE-3 head are accepted in llama.cpp's own server, and how many here, on the same prompts.

    outrider export HEAD head.gguf --format gguf -t target.gguf
    python benchmarks/eagle3_in_llama_cpp.py --target target.gguf --drafter head.gguf [--draft 4] [--tokens 64] [--prompts FILE.jsonl]

Greedy, chains of always the same length, until the end of the text. A prompt on which the two texts differ (their arithmetic rounds
differently) is shown, and does not count. Needs `xllamacpp`, which is llama.cpp's server as a wheel.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from common import prompts, save

import outrider
from outrider.drafters.eagle import EagleDrafter, EagleOptions
from outrider.models import load_target
from outrider.trace import statistics


def llama_server(options: argparse.Namespace) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.n_gpu_layers, params.verbosity = options.target, 4096, 1, 0, -1
    draft = params.speculative.draft
    params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3]
    draft.mparams.path, draft.n_max = options.drafter, options.draft
    for each in (params.cpuparams, params.cpuparams_batch, draft.cpuparams, draft.cpuparams_batch):
        each.n_threads = torch.get_num_threads()
    return xllamacpp.Server(params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--draft", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--number", type=int, default=8)
    parser.add_argument("--prompts", help="a Spec-Bench file")
    parser.add_argument("--name", help="save the figures under this name")
    options = parser.parse_args()

    target = load_target(options.target, gguf={"n_ctx": 4096})
    drafter = EagleDrafter.load(target, EagleOptions(min_probability=0.0), options.drafter)
    engine = outrider.Engine(target, drafter, options.draft)
    server = llama_server(options)
    assert target.tokenizer is not None
    rows = []
    for text in prompts(options.prompts, ("writing", "coding", "math", "qa"), options.number):
        ids = target.tokenizer.chat([{"role": "user", "content": text}])
        mine = engine.generate(ids, max_tokens=options.tokens)
        figures = statistics(mine.rounds)
        asked = {"prompt": ids, "n_predict": options.tokens, "temperature": 0, "cache_prompt": False}
        found = server.handle_completions(asked)
        times, same = found["timings"], found["choices"][0]["text"].strip() == mine.text.strip()
        row = {"ours": [figures.accepted, figures.proposed], "llama.cpp": [times["draft_n_accepted"], times["draft_n"]]}
        print({**row, "tokens": len(mine.tokens), **({} if same else {"texts": "DIFFER"})}, flush=True)
        rows += [row] if same else []
    total = {who: [sum(row[who][i] for row in rows) for i in (0, 1)] for who in ("ours", "llama.cpp")}
    for who, (accepted, proposed) in total.items():
        share = f"{accepted / proposed:.1%}" if proposed else "nothing drafted"
        print(f"{who}: {accepted} accepted / {proposed} proposed ({share}), {len(rows)} prompts with equal texts")
    if options.name:
        save(options.name, {"arguments": vars(options), "prompts": rows, "total": total})


if __name__ == "__main__":
    main()
