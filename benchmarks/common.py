"""What the benchmarks share: prompts, the machine's name, result files."""

from __future__ import annotations

import json
import os
import platform
import statistics
from pathlib import Path
from typing import Any

import torch

from outrider import kernels

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """The processor, its cores, the threads in use, and which of the kernels fit it."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        name = next((line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line), name)
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "kernels": kernels.VARIANT,
        "torch": torch.__version__,
    }


def prompts(path: str | None, categories: tuple[str, ...], number: int) -> list[str]:
    """The first `number` prompts of these categories of a Spec-Bench file, or built-in ones without a file."""
    if path is None:
        return BUILT_IN[:number]
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [row["turns"][0] for row in rows if row["category"] in categories][:number]


def save(name: str, result: dict[str, Any]) -> None:
    """Write the result with the machine's name beside it."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")
    print(f"wrote {path}")


median = statistics.median

BUILT_IN = [
    "Write a Python function that returns the n-th Fibonacci number without recursion, and explain it in two sentences.",
    "Write a C++ program that reads a list of integers and prints the second largest.",
    "Implement binary search in Python with type hints and three test cases.",
    "Write a SQL query that finds the ten customers with the highest total order value.",
    "Write a bash script that renames all .jpeg files in a folder to .jpg.",
    "Fix this Python code: def mean(xs): return sum(xs) / len(x)",
    "Write a JavaScript function that debounces another function.",
    "Explain what a hash map is and implement a small one in Python.",
]
