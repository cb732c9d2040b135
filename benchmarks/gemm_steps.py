"""Times what each idea of the Hopper GEMM is worth: the same product by kernels that have one idea more each.

    python benchmarks/gemm_steps.py
    python benchmarks/gemm_steps.py --shapes 4096,4096,4096

The first two steps are `plain_gemm.py`, the others `GemmSm90`. All share the tile 128 x 256 x 64, but for
ping-pong, whose accumulators need a smaller one. bf16, a (M, K) and b (N, K) row-major, result row-major.
Appends a record for each shape and step to <output>/gemm_steps.jsonl and prints a table. Needs a Hopper GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import torch
from gemm import TOLERANCE, parse_shape
from plain_gemm import PlainConfig, PlainGemm

import protocol
from cutelab.kernels.dense_gemm.config_sm90 import Sm90Config
from cutelab.kernels.dense_gemm.partial_sums import PartialSums
from cutelab.kernels.dense_gemm.sm90 import GemmSm90
from cutelab.kernels.runtime.arch import Arch
from cutelab.kernels.runtime.compile import compile_kernel

SHAPES = ((8192, 8192, 8192), (4096, 4096, 4096), (2048, 2048, 2048), (8192, 8192, 1024))
PATIENCE = 10.0  # seconds until a kernel counts as hanging
READY = 0x6F7370657473  # see `PartialSums`: the flag of a launch whose workspace begins as zeros

Compile = Callable[[PlainGemm | GemmSm90, Arch], Callable[..., object]]


@dataclass(frozen=True)
class Step:
    """A kernel, and how many of its clusters share the work.

    persistent: as many clusters as fit on the GPU, each with many tiles; else a cluster for each tile.
    """

    name: str
    kernel: PlainGemm | GemmSm90
    persistent: bool = True

    def call(
        self, a: torch.Tensor, b: torch.Tensor, arch: Arch, compile_for: Compile
    ) -> Callable[[], torch.Tensor]:
        """A function that computes a · bᵀ into the same tensor each time and returns it."""
        out = torch.empty(a.shape[0], b.shape[0], dtype=a.dtype, device=a.device)
        sizes = a.shape[0], b.shape[0], a.shape[1]
        function = compile_for(self.kernel, arch)
        pointers = a.data_ptr(), b.data_ptr(), out.data_ptr()
        strides = a.stride(0), b.stride(0), out.stride(0)
        if isinstance(self.kernel, PlainGemm):
            arguments: tuple = (*pointers, *sizes, *strides)
            workspace = None
        else:
            clusters, shared = self.work(*sizes, arch)
            workspace = torch.zeros(self.workspace_bytes(clusters), dtype=torch.uint8, device=a.device)
            arguments = (
                *(pointers[0], pointers[1], 0, 0, pointers[2], *sizes, 1, 1),
                *(strides[0], 0, 0, strides[1], 0, 0, 0, 0, 0, 0, strides[2], 0, 0),
                *(clusters, shared, 1.0, 0.0, workspace.data_ptr(), READY),
            )

        def run(keep_alive=(a, b, workspace)) -> torch.Tensor:
            function(*arguments, torch.cuda.current_stream().cuda_stream if out.is_cuda else 0)
            return out

        return run

    def work(self, m: int, n: int, k: int, arch: Arch) -> tuple[int, int]:
        """Clusters, and the tiles that they share: with stream-K, those of the last two waves."""
        config = self.gemm_config()
        rows, columns = (config.tile[i] * config.cluster[i] for i in (0, 1))
        tiles = ceil(m / rows) * ceil(n / columns)
        fit = max(1, arch.sm_count // (config.cluster[0] * config.cluster[1]))
        if config.stream_k and tiles % fit:
            return fit, min(tiles % fit + fit, tiles)
        return (min(tiles, fit) if self.persistent else tiles), 0

    def gemm_config(self) -> Sm90Config:
        """That of a step of GemmSm90; a plain one has no clusters."""
        if isinstance(self.kernel, PlainGemm):
            raise TypeError(f"{self.name} has no clusters that share work")
        return self.kernel.config

    def workspace_bytes(self, clusters: int) -> int:
        config = self.gemm_config()
        slots = clusters * config.cluster[0] * config.cluster[1] * config.consumers
        return PartialSums.bytes(config.accumulators, slots) if config.stream_k else 0


def steps(tile: tuple[int, int, int] = (128, 256, 64), pingpong_tile=(128, 192, 64)) -> list[Step]:
    """From the simplest kernel on; stream-K and early launch are what "cluster" has and one idea more."""

    def gemm(**options) -> GemmSm90:
        return GemmSm90(Sm90Config("bfloat16", "bfloat16", **{"tile": tile, "stages": 4, **options}))

    pingpong = {"tile": pingpong_tile, "stages": 5, "pingpong": True, "buffers": 1}
    return [
        Step("single stage", PlainGemm(PlainConfig(tile, stages=1))),
        Step("multistage", PlainGemm(PlainConfig(tile, stages=4))),
        Step("warp-specialised", gemm(cluster=(1, 1)), persistent=False),
        Step("persistent", gemm(cluster=(1, 1))),
        Step("cluster", gemm(cluster=(2, 1))),
        Step("ping-pong", gemm(cluster=(2, 1), **pingpong)),
        Step("stream-K", gemm(cluster=(2, 1), stream_k=True)),
        Step("early launch", gemm(cluster=(2, 1), early_launch=True)),
    ]


def wait_or_abort(name: str) -> None:
    """Until the GPU has done all that it was given; ends the process if it does not.

    A hanging kernel would keep whatever waits for it from ending, the normal end of a process included.
    """
    event = torch.cuda.Event()
    event.record()
    deadline = time.monotonic() + PATIENCE
    while not event.query():
        if time.monotonic() > deadline:
            print(f"{name} is not done after {PATIENCE:g} s: it hangs", file=sys.stderr, flush=True)
            os._exit(1)
        time.sleep(0.001)


def candidates(shape: tuple[int, int, int], arch: Arch) -> dict[str, Callable[[], torch.Tensor]]:
    """cuBLAS and all steps, each compiled, and in agreement with cuBLAS when it is run again."""
    m, n, k = shape
    a = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    b = torch.randn(n, k, dtype=torch.bfloat16, device="cuda")
    expected = torch.matmul(a, b.T).float()
    calls: dict[str, Callable[[], torch.Tensor]] = {"cublas": lambda: torch.matmul(a, b.T)}
    for step in steps():
        call = calls[step.name] = step.call(a, b, arch, compile_kernel)
        call().fill_(torch.nan)
        result = call()
        wait_or_abort(f"{step.name} at {m} x {n} x {k}")
        difference = ((result.float() - expected).norm() / expected.norm()).item()
        if not difference <= TOLERANCE:
            raise SystemExit(f"{step.name} differs from cuBLAS by {difference:.2g} of its norm")
    return calls


def measure(shape: tuple[int, int, int], arch: Arch, args, where: dict[str, str]) -> list[dict]:
    """A record for each step."""
    m, n, k = shape
    seconds = protocol.gpu_seconds(candidates(shape, arch), args.rounds, args.pause)
    tflops = {name: 2 * m * n * k / s / 1e12 for name, s in seconds.items()}
    cublas = tflops.pop("cublas")
    return [
        protocol.record(
            "gemm_steps",
            "sm90",
            "bf16",
            {"m": m, "n": n, "k": k, "step": name},
            {"ours": value, "cublas": cublas},
            "TFLOP/s",
            where,
        )
        for name, value in tflops.items()
    ]


def arguments() -> argparse.Namespace:
    parser = protocol.parser(__doc__)
    parser.add_argument("--shapes", nargs="+", type=parse_shape, metavar="M,N,K", default=SHAPES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.1, metavar="SECONDS", help="before each measurement")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit(
            "benchmarks/gemm_steps.py times kernels on a Hopper NVIDIA GPU, and torch sees no such one"
        )
    # The cache on disk knows when cutelab's sources have changed, but not that plain_gemm.py has.
    os.environ["CUTELAB_CACHE"] = "0"
    torch.manual_seed(0)
    arch, where = Arch.of(torch.device("cuda")), protocol.environment(args.commit)
    records = []
    for shape in args.shapes:
        found = measure(shape, arch, args, where)
        protocol.append(found, args.output / "gemm_steps.jsonl")
        records += found
    print(protocol.table(records))


if __name__ == "__main__":
    main()
