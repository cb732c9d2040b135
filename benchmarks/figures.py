"""Draws the newest results of an operation, of the kernel and the GPU measured last, as bars.

From the root of the repository: python benchmarks/figures.py benchmarks/results/gemm.jsonl
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

import protocol

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "cutelab"  # the same results give the same file

import matplotlib.pyplot as plt  # noqa: E402  (after the backend is chosen)


def draw(records: list[dict], path: Path) -> None:
    """One group of bars a record, one bar a library measured there; all records share a unit and a GPU."""
    series = ["ours", *sorted({name for r in records for name in r["peers"]})]
    labels = [f"{r['dtype']} {' '.join(map(str, r['config'].values()))}" for r in records]
    height = 0.8 / len(series)
    figure, axes = plt.subplots(figsize=(8, 1 + 0.5 * len(records)), layout="constrained")
    for i, name in enumerate(series):
        values = {row: r["ours"] if name == "ours" else r["peers"].get(name) for row, r in enumerate(records)}
        measured = {row: value for row, value in values.items() if value is not None}
        places = [row + (i + 0.5) * height - 0.4 for row in measured]
        bars = axes.barh(places, list(measured.values()), height, label=name)
        axes.bar_label(bars, fmt="%.4g", padding=3, fontsize="small")
    axes.set_yticks(range(len(records)), labels)
    axes.invert_yaxis()
    axes.set_xlabel(f"{records[0]['unit']}, {records[0]['gpu']}, torch {records[0]['torch']}")
    figure.legend(loc="outside upper center", ncols=len(series))
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def of_one_gpu(records: list[dict]) -> list[dict]:
    """The newest records of the kernel and the GPU of the last one."""
    last = records[-1]
    newest = protocol.newest(records)
    return [r for r in newest if (r["gpu"], r["kernel"]) == (last["gpu"], last["kernel"])]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="?", type=Path, default=protocol.RESULTS / "gemm.jsonl")
    parser.add_argument("--op", help="draw only this operation; default: that of the file's name")
    parser.add_argument("-o", "--output", type=Path, help="default: the results file with .svg")
    args = parser.parse_args(arguments)
    op = args.op or args.results.stem
    comparisons = [r for r in protocol.load(args.results) if "peers" in r]
    records = [r for r in comparisons if r["op"] == op]
    if not records:
        present = ", ".join(sorted({r["op"] for r in comparisons})) or "nothing"
        parser.error(f"{args.results} compares no libraries in {op!r}; it does in: {present}")
    draw(of_one_gpu(records), args.output or args.results.with_suffix(".svg"))


if __name__ == "__main__":
    main()
