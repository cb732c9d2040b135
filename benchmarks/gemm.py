"""Times `cutelab.kernels.gemm` beside cuBLAS (torch.matmul) and, where it is installed, quack.

    python benchmarks/gemm.py                                    the standard shapes
    python benchmarks/gemm.py --shapes 4096,4096,4096 --dtypes fp16 bf16 --layouts nn nt tn tt
    python benchmarks/gemm.py --tune                             and ours with the fastest of all its tilings
    python benchmarks/gemm.py --kernel sm80                      the Ampere kernel, whatever the GPU
    python benchmarks/gemm.py --host                             host cost of a call at 64 x 64 x 64

A layout names how a (M, K) and b (K, N) are stored: "n" row-major, "t" column-major, so "nt" is x @ w.T.
Appends to <output>/gemm.jsonl and prints a table. Needs a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

import protocol
from cutelab.kernels import gemm
from cutelab.kernels.dense_gemm import launch, plan, tuning
from cutelab.kernels.dense_gemm.problem import Arguments

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32}
LAYOUTS = ("nn", "nt", "tn", "tt")
SHAPES = (
    (8192, 8192, 8192),
    (4096, 4096, 4096),
    (2048, 2048, 2048),
    (1024, 1024, 1024),
    (8192, 8192, 1024),
    (16384, 4096, 4096),
    (4096, 14336, 4096),
    (4096, 4096, 14336),
    (512, 4096, 14336),
    (128, 8192, 8192),
    (16, 8192, 8192),
    (3000, 3000, 3000),
    (1111, 3333, 5560),
)
HOST_SHAPE = (64, 64, 64)
TOLERANCE = 1e-2  # relative difference between two correct products rounded to bf16


def operands(
    shape: tuple[int, int, int], layout: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random normal a (M, K) and b (K, N), stored as `layout` says."""
    m, n, k = shape

    def matrix(rows: int, columns: int, order: str) -> torch.Tensor:
        if order == "n":
            return torch.randn(rows, columns, dtype=dtype, device="cuda")
        return torch.randn(columns, rows, dtype=dtype, device="cuda").T

    return matrix(m, k, layout[0]), matrix(k, n, layout[1])


def arguments_of(a: torch.Tensor, b: torch.Tensor) -> Arguments:
    """As our GEMM gets them."""
    return Arguments(a, b, None, None, None, None, 1.0, 0.0, None)


def kernel_for(a: torch.Tensor, b: torch.Tensor) -> str:
    """The kernel that our GEMM takes."""
    return "sm80" if plan.make_plan(arguments_of(a, b)).problem is None else "sm90"


def tuned_gemm(a: torch.Tensor, b: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Our GEMM as `tune` would have it."""
    args = arguments_of(a, b)
    _, work = tuning.fastest(args)
    tuned = plan.make_plan(args, work)
    return lambda: launch.run(tuned, args)


def candidates(a: torch.Tensor, b: torch.Tensor, with_tuned: bool) -> dict[str, Callable[[], torch.Tensor]]:
    """The functions to compare; each has run once, so it is compiled and tuned, and agrees with cuBLAS."""
    calls = {"ours": lambda: gemm(a, b), "cublas": lambda: torch.matmul(a, b)}
    if with_tuned:
        calls["tuned"] = tuned_gemm(a, b)
    quack = quack_gemm()
    if quack and a.dtype != torch.float32:
        calls["quack"] = lambda: quack(a, b)
    expected = torch.matmul(a, b).float()
    for name, call in calls.items():
        difference = ((call().float() - expected).norm() / expected.norm()).item()
        if not difference <= TOLERANCE:
            raise SystemExit(f"{name} differs from cuBLAS by {difference:.2g} of its norm: nothing to time")
    return calls


def quack_gemm() -> Callable | None:
    """quack's GEMM, which tunes itself on its first call for a shape; None where quack is not installed."""
    try:
        from quack.gemm_interface import gemm as quack
    except ImportError:
        return None
    return quack


def measure(shape: tuple[int, int, int], layout: str, dtype: str, args, where: dict[str, str]) -> dict:
    """The record of one problem: TFLOP/s, or with --host the microseconds that the host spends on a call."""
    m, n, k = shape
    config = {"m": m, "n": n, "k": k, "layout": layout}
    a, b = operands(shape, layout, DTYPES[dtype])
    kernel = kernel_for(a, b)
    calls = candidates(a, b, args.tune and kernel == "sm90")
    if args.host:
        micros = {name: s * 1e6 for name, s in protocol.host_seconds(calls, args.rounds, args.pause).items()}
        return protocol.record("gemm_host", kernel, dtype, config, micros, "us", where)
    seconds = protocol.gpu_seconds(calls, args.rounds, args.pause)
    tflops = {name: 2 * m * n * k / s / 1e12 for name, s in seconds.items()}
    return protocol.record("gemm", kernel, dtype, config, tflops, "TFLOP/s", where)


def parse_shape(text: str) -> tuple[int, int, int]:
    m, n, k = (int(size) for size in text.split(","))
    return m, n, k


def arguments() -> argparse.Namespace:
    parser = protocol.parser(__doc__)
    parser.add_argument(
        "--shapes", nargs="+", type=parse_shape, metavar="M,N,K", help="default: a standard list"
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["nt"])
    parser.add_argument("--tune", action="store_true", help="time the fastest of our tilings as well")
    parser.add_argument("--kernel", choices=("sm80",), help="default: the best for the GPU")
    parser.add_argument("--host", action="store_true", help="host cost of a call instead of throughput")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.1, metavar="SECONDS", help="before each measurement")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gemm.py times kernels on an NVIDIA GPU, and torch sees none")
    if args.kernel == "sm80":
        plan.suits_sm90 = lambda *_: False  # type: ignore[assignment]
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = "tf32" in args.dtypes
    shapes = args.shapes or ([HOST_SHAPE] if args.host else SHAPES)
    where = protocol.environment(args.commit)
    problems = [(s, layout, dtype) for s in shapes for layout in args.layouts for dtype in args.dtypes]
    records = [measure(*problem, args, where) for problem in problems]
    protocol.append(records, args.output / "gemm.jsonl")
    print(protocol.table(records))


if __name__ == "__main__":
    main()
