"""Runs PTX text on NumPy arrays: what the tests of the simulator share."""

import numpy as np

from cutelab.simulator import ptx
from cutelab.simulator.bank_conflicts import BankConflicts
from cutelab.simulator.gpus import Gpu
from cutelab.simulator.grid import run_grid
from cutelab.simulator.memory import GlobalMemory, Region, variables
from cutelab.simulator.standin import Allocation, Launch
from cutelab.simulator.translate import translate

HEADER = ".version 8.8\n.target sm_90a\n.address_size 64\n"


def kernel(body: str, shared: int = 0, parameters: int = 2) -> str:
    """A kernel with `parameters` pointers, already in %rd0, %rd1, …, and registers of every kind.

    %rd8 is thread * 8, %rd9 thread * 4, %r31 the thread.
    """
    declared = ", ".join(f".param .b64 p{i}" for i in range(parameters))
    loads = "".join(f"ld.param.b64 %rd{i}, [p{i}];\n" for i in range(parameters))
    memory = f".shared .align 16 .b8 smem[{shared}];\n" if shared else ""
    return f"""{HEADER}.visible .entry k({declared}) {{
        .reg .pred %p<8>; .reg .b16 %rs<8>; .reg .b32 %r<32>; .reg .b64 %rd<16>;
        {memory}{loads}
        mov.u32 %r31, %tid.x;
        mul.wide.u32 %rd8, %r31, 8;
        mul.wide.u32 %rd9, %r31, 4;
        {body}
        ret;
        }}"""


def run(
    text: str,
    *arrays: np.ndarray,
    threads: int = 32,
    grid: int = 1,
    shared: int = 0,
    seed: int | None = None,
    cluster: int = 1,
    banks: BankConflicts | None = None,
    gpu: Gpu | None = None,
):
    """Launches the only kernel of `text` with pointers to `arrays`."""
    (found,) = ptx.parse(text).kernels.values()
    regions = [
        Region(array.view(np.uint8).reshape(-1), array.ctypes.data, f"array {i}")
        for i, array in enumerate(arrays)
    ]
    parameters = np.array([array.ctypes.data for array in arrays], np.uint64).tobytes()
    memory = GlobalMemory([*regions, *variables(found.module)])
    sizes = (grid, 1, 1), (threads, 1, 1), shared
    run_grid(translate(found), *sizes, parameters, memory, seed, (cluster, 1, 1), banks, gpu)


def launch_of(
    text: str,
    *arrays: np.ndarray,
    threads: int = 32,
    grid: int = 1,
    shared: int = 0,
    cluster: int = 1,
    gpu: str = "sm_90a",
) -> Launch:
    """The launch that `run` makes, not yet run."""
    (found,) = ptx.parse(text).kernels.values()
    return Launch(
        kernel=found.name,
        ptx=text,
        grid=(grid, 1, 1),
        block=(threads, 1, 1),
        cluster=(cluster, 1, 1),
        dynamic_shared_bytes=shared,
        parameters=tuple(np.uint64(array.ctypes.data).tobytes() for array in arrays),
        stream=0,
        attributes={},
        tensors=tuple(Allocation(a.ctypes.data, a.nbytes, f"array {i}", a) for i, a in enumerate(arrays)),
        gpu=Gpu.named(gpu),
    )
