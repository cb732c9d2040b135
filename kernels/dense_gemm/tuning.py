"""`tune`: measures every tiling of a product, and remembers the fastest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from cutelab.kernels.dense_gemm import launch
from cutelab.kernels.dense_gemm.config_sm90 import Work, candidates
from cutelab.kernels.dense_gemm.plan import make_plan
from cutelab.kernels.dense_gemm.problem import Arguments
from cutelab.kernels.dense_gemm.tuned import Problem, remember
from cutelab.kernels.runtime.errors import DeviceError

__all__ = ["fastest", "tune"]

ROUNDS = 7
GRAPH_SECONDS = 2e-3  # of launches in one measurement: long beside the resolution of events


def tune(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    progress: bool = True,
) -> Work:
    """Finds the fastest way to compute `gemm(a, b, …)` on this GPU, and makes `gemm` use it from now on.

    Arguments as for `gemm`; operands of the same sizes, dtypes and strides will profit, whatever they hold,
    also in other processes: the result is kept in the directory of compiled kernels, unless that is off.
    Takes some seconds, most of it to compile; `progress` shows a bar. Returns what it found.

    Raises DeviceError unless the Hopper kernel computes this product, and whatever `gemm` raises.
    """
    args = Arguments(a, b, bias, None, None, activation, 1.0, 0.0, out_dtype)
    problem, best = fastest(args, progress)
    remember(problem, best)
    launch.forget_plans()
    return best


def fastest(args: Arguments, progress: bool = False) -> tuple[Problem, Work]:
    """The work that takes the least time, and for which problem."""
    chosen = make_plan(args)
    if chosen.problem is None or chosen.device_index < 0:
        raise DeviceError(
            "tune measures the Hopper kernel, on a Hopper GPU, for float16 and bfloat16 operands whose "
            "addresses and strides are multiples of 16 bytes; for this product gemm has nothing to choose"
        )
    with torch.cuda.device(chosen.device_index):
        calls = {}
        works = candidates(chosen.problem.size, chosen.arch, chosen.problem.plain)
        for work in _with_progress(works, "compiling", progress):
            plan = make_plan(args, work)
            calls[work] = _graph(partial(launch.run, plan, args))
        seconds: dict[Work, list[float]] = {work: [] for work in calls}
        for _ in _with_progress(range(ROUNDS), "measuring", progress):
            for work, call in calls.items():
                seconds[work].append(_seconds(call))
    return chosen.problem, min(seconds, key=lambda work: median(seconds[work]))


def _with_progress(items, title: str, progress: bool):
    from tqdm.auto import tqdm  # 40 ms that no other function needs

    return tqdm(items, desc=title, disable=not progress)


def _graph(call: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """A CUDA graph of as many calls as take GRAPH_SECONDS, so that the host's work doesn't count."""
    call()
    count = max(1, min(100, round(GRAPH_SECONDS / _seconds(call))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return graph.replay


def _seconds(call: Callable[[], object]) -> float:
    """Of the GPU's time, for a call after one that warmed up."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
