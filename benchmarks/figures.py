"""Draws the newest results of an operation as bars: python benchmarks/figures.py results/gemm.jsonl."""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

import protocol

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "cutelab"  # the same results give the same file

import matplotlib.pyplot as plt  # noqa: E402  (after the backend is chosen)


def draw(records: list[dict], path: Path) -> None:
    """One group of bars a record, one bar a library; all records share a unit and a GPU."""
    series = ["ours", *sorted({name for r in records for name in r["peers"]})]
    labels = [f"{r['dtype']} {' '.join(map(str, r['config'].values()))}" for r in records]
    rows, height = range(len(records)), 0.8 / len(series)
    figure, axes = plt.subplots(figsize=(8, 1 + 0.5 * len(records)), layout="constrained")
    for i, name in enumerate(series):
        values = [r["ours"] if name == "ours" else r["peers"].get(name, 0.0) for r in records]
        bars = axes.barh(
            [y + (i + 0.5) * height - 0.4 for y in range(len(records))], values, height, label=name
        )
        axes.bar_label(bars, fmt="%.4g", padding=3, fontsize="small")
    axes.set_yticks(rows, labels)
    axes.invert_yaxis()
    axes.set_xlabel(f"{records[0]['unit']}, {records[0]['gpu']}, torch {records[0]['torch']}")
    figure.legend(loc="outside upper center", ncols=len(series))
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="?", type=Path, default=protocol.RESULTS / "gemm.jsonl")
    parser.add_argument("--op", help="draw only this operation; default: that of the file's name")
    parser.add_argument("-o", "--output", type=Path, help="default: the results file with .svg")
    args = parser.parse_args()
    op = args.op or args.results.stem
    records = [r for r in protocol.newest(args.results) if r["op"] == op]
    draw(records, args.output or args.results.with_suffix(".svg"))


if __name__ == "__main__":
    main()
