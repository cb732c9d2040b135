"""Counts the shared-memory wavefronts of every instruction of the GEMM with Nsight Compute.

    python benchmarks/shared_memory.py

A wavefront is what the 32 banks deliver at once; an instruction that takes more of them than its width
demands has bank conflicts. Appends a record for each way of storing the operands to
<output>/shared_memory.jsonl and prints a table. Needs a GPU, `ncu` and the right to read its counters.
"""

from __future__ import annotations

import csv
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterable

import ncu
import torch
from gemm import DTYPES, LAYOUTS, operands

import protocol

SHAPE = (2048, 2048, 2048)
PROBLEMS = tuple(itertools.product(("bf16", "tf32"), LAYOUTS))


def run_problems() -> None:
    """What is profiled: one launch of the mma.sync kernel for each problem."""
    from cutelab.kernels import gemm
    from cutelab.kernels.dense_gemm import plan

    plan.suits_sm90 = lambda *_: False  # type: ignore[assignment]
    torch.backends.cuda.matmul.allow_tf32 = True
    for dtype, layout in PROBLEMS:
        gemm(*operands(SHAPE, layout, DTYPES[dtype]))
    torch.cuda.synchronize()


def profile() -> list[str]:
    """The lines of ncu's listing: each instruction of each launch with its counters, as CSV."""
    command = [sys.executable, __file__, "--run-problems"]
    return ncu.listing(command, ["--section", "SourceCounters"], ["source", "--print-source", "sass"])


def wavefronts(listing: Iterable[str]) -> list[dict[str, dict[str, int]]]:
    """For each launch and each opcode that touches shared memory: its wavefronts, and the fewest possible."""
    launches: list[dict[str, dict[str, int]]] = []
    columns: dict[str, int] = {}
    for row in csv.reader(listing):
        if row[:1] == ["Kernel Name"]:
            launches.append(defaultdict(lambda: {"wavefronts": 0, "ideal": 0}))
        elif row[:1] == ["Address"]:
            columns = {name: index for index, name in enumerate(row)}
        elif columns and len(row) == len(columns):
            words = row[columns["Source"]].split()
            opcode = next(word for word in words if not word.startswith("@"))
            counts = {
                "wavefronts": number(row[columns["L1 Wavefronts Shared"]]),
                "ideal": number(row[columns["L1 Wavefronts Shared Ideal"]]),
            }
            if any(counts.values()):
                for name, count in counts.items():
                    launches[-1][opcode][name] += count
    return [dict(launch) for launch in launches]


def number(text: str) -> int:
    """The leading number of a cell; what follows, in parentheses, splits it by cause."""
    return int(text.split()[0].replace(",", "")) if text else 0


def records(launches: list[dict[str, dict[str, int]]], where: dict[str, str]) -> list[dict]:
    m, n, k = SHAPE
    return [
        {
            "op": "shared_memory",
            "kernel": "sm80",
            "dtype": dtype,
            "config": {"m": m, "n": n, "k": k, "layout": layout},
            "ours": launch,
            "unit": "wavefronts",
            **where,
        }
        for (dtype, layout), launch in zip(PROBLEMS, launches, strict=True)
    ]


def table(results: list[dict]) -> str:
    lines = [
        "| dtype | layout | instruction | wavefronts | of them conflicts |",
        "| --- | --- | --- | --- | --- |",
    ]
    for result in results:
        for opcode, counts in result["ours"].items():
            conflicts = counts["wavefronts"] - counts["ideal"]
            head = f"| {result['dtype']} | {result['config']['layout']} | {opcode} "
            lines.append(f"{head}| {counts['wavefronts']} | {conflicts} |")
    return "\n".join(lines)


def main() -> None:
    parser = protocol.parser(__doc__)
    parser.add_argument("--run-problems", action="store_true", help="only launch the kernels, to be profiled")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/shared_memory.py profiles kernels on an NVIDIA GPU, and torch sees none")
    if args.run_problems:
        return run_problems()
    results = records(wavefronts(profile()), protocol.environment(args.commit))
    protocol.append(results, args.output / "shared_memory.jsonl")
    print(table(results))


if __name__ == "__main__":
    main()
