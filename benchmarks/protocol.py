"""How every benchmark here measures and what it writes.

Method: all candidates in one process on the same inputs. Each is captured in a CUDA graph. A round times
every candidate once, in turn, after a short pause that keeps the chip from throttling; a figure is the median
over the rounds. Host cost is measured in the same rounds, with the calls themselves instead of a graph.

A result is one JSON object a line, appended to `<op>.jsonl`, newest last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch

RESULTS = Path(__file__).parent / "results"
GRAPH_SECONDS = 0.01  # of work in one graph: long beside the launch, short beside thermal time constants
HOST_CALLS = 200  # in one host measurement: fewer than the launch queue holds, so that none waits for the GPU

Call = Callable[[], object]


def gpu_seconds(calls: Mapping[str, Call], rounds: int, pause: float) -> dict[str, float]:
    """Median seconds that the GPU needs for each call."""
    repeats = {name: graph_length(call) for name, call in calls.items()}
    graphs = {name: capture(call, repeats[name]) for name, call in calls.items()}

    def measure(name: str) -> float:
        return gpu_time(graphs[name].replay) / repeats[name]

    return interleave(calls, measure, rounds, pause)


def host_seconds(calls: Mapping[str, Call], rounds: int, pause: float) -> dict[str, float]:
    """Median seconds that the host needs to issue each call, without waiting for the GPU."""

    def measure(name: str) -> float:
        call = calls[name]
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        seconds = time.perf_counter() - start
        torch.cuda.synchronize()
        return seconds / HOST_CALLS

    for call in calls.values():
        call()
    return interleave(calls, measure, rounds, pause)


def interleave(
    names: Iterable[str], measure: Callable[[str], float], rounds: int, pause: float
) -> dict[str, float]:
    """The median of `measure(name)` for each name, over rounds that measure each name once."""
    samples: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, values in samples.items():
            time.sleep(pause)
            values.append(measure(name))
    return {name: median(values) for name, values in samples.items()}


def gpu_time(work: Call) -> float:
    """Seconds between two events around `work`, which runs once before them to raise the clocks."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    work()
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def graph_length(call: Call) -> int:
    """How many calls fill a graph of about GRAPH_SECONDS. The first call also compiles and warms up."""
    call()
    return max(1, min(200, round(GRAPH_SECONDS / gpu_time(call))))


def capture(call: Call, repeats: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `repeats` calls, one after the other."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    return graph


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of command lines with what every benchmark takes: where to write, and for which commit."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--output", type=Path, default=RESULTS, metavar="DIR")
    result.add_argument("--commit", help="what to record where git is absent; else $CUTELAB_COMMIT")
    return result


def environment(commit: str | None) -> dict[str, str]:
    """What every record says about where it was measured."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "torch": torch.__version__,
        "dsl": version("nvidia-cutlass-dsl"),
        "date": date.today().isoformat(),
        "commit": commit or os.environ.get("CUTELAB_COMMIT") or git_commit(),
    }


def driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return output_of(query).split("\n")[0]


def git_commit() -> str:
    return output_of(["git", "-C", str(RESULTS), "rev-parse", "--short", "HEAD"])


def output_of(command: list[str]) -> str:
    """What the command prints, or "unknown" where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def record(
    op: str, kernel: str, dtype: str, config: dict, values: dict[str, float], unit: str, where: dict[str, str]
) -> dict:
    """One line of a results file. `values` has our figure under "ours" and each peer's under its name."""
    peers = {name: round(value, 3) for name, value in values.items() if name != "ours"}
    ours = round(values["ours"], 3)
    return {
        "op": op,
        "kernel": kernel,
        "dtype": dtype,
        "config": config,
        "ours": ours,
        "peers": peers,
        "unit": unit,
        **where,
    }


def append(records: list[dict], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(r) + "\n" for r in records)


def load(path: Path) -> list[dict]:
    """All records of a results file, newest last."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def newest(records: list[dict]) -> list[dict]:
    """The last record of each (op, kernel, dtype, GPU, config), in order of first appearance."""
    latest = {}
    for r in records:
        latest[r["op"], r["kernel"], r["dtype"], r["gpu"], json.dumps(r["config"], sort_keys=True)] = r
    return list(latest.values())


def table(records: list[dict]) -> str:
    """The records as a Markdown table: our figure, then each peer's with ours as a multiple of it."""
    peers = sorted({name for r in records for name in r["peers"]})
    lines = [["dtype", "config", f"ours ({records[0]['unit']})", *peers]]
    lines += [["---"] * len(lines[0])]
    for r in records:
        against = [f"{v:.4g} ({r['ours'] / v:.2f}×)" if (v := r["peers"].get(p)) else "" for p in peers]
        config = " ".join(str(value) for value in r["config"].values())
        lines.append([r["dtype"], config, f"{r['ours']:.4g}", *against])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
