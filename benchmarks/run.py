"""Every benchmark that the embedded model can answer; with a pair of models, those about pairs too.

    python benchmarks/run.py [--target FOLDER --drafter FOLDER] [--prompts SPEC_BENCH.jsonl]

Results go to benchmarks/results/. Nothing else should use the processor meanwhile.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from outrider.models import get

HERE = Path(__file__).parent


def run(script: str, *arguments: str) -> None:
    print(f"== {script} {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, str(HERE / script), *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--drafter")
    parser.add_argument("--prompts")
    arguments = parser.parse_args()
    if bool(arguments.target) != bool(arguments.drafter):
        parser.error("--target and --drafter go together")
    small = str(get("smollm2", print))
    texts = ["--prompts", arguments.prompts] if arguments.prompts else []
    run("lookup_cost.py", "--tokenizer", small, *texts)
    run("acceptance.py")
    run("overhead.py", small, "--name", "overhead-smollm2")
    run("trees.py", small, "--name", "trees-smollm2")
    run("cpu_engine.py", small, "--contexts", "128,4096", "--name", "cpu-engine-smollm2")
    if arguments.target:
        run("overhead.py", arguments.target, arguments.drafter, "--name", "overhead-pair")
        run("trees.py", arguments.target, "--name", "trees-target")
        run("cpu_engine.py", arguments.target, "--contexts", "128,4096", "--name", "cpu-engine-pair")
        run(
            "pair.py",
            arguments.target,
            arguments.drafter,
            *texts,
            "--categories",
            "coding,math",
            "--number",
            "4",
            "--name",
            "pair",
        )


if __name__ == "__main__":
    main()
