"""Executes launches: from what the program's host code handed over to the end of its last CTA."""

import ctypes
from functools import lru_cache

import numpy as np

from cutelab.simulator import ptx
from cutelab.simulator.bank_conflicts import BankConflicts
from cutelab.simulator.errors import SimulationError
from cutelab.simulator.machine import run_grid
from cutelab.simulator.memory import GlobalMemory, Region
from cutelab.simulator.standin import Allocation, Launch
from cutelab.simulator.translate import Program, translate


@lru_cache(maxsize=64)
def program_of(text: str, kernel: str) -> Program:
    """The translated kernel of a PTX module. Raises SimulationError."""
    try:
        return translate(ptx.parse(text).kernels[kernel])
    except ptx.PtxError as error:
        raise SimulationError(f"cannot read the PTX of {kernel}: {error}") from error


def region(allocation: Allocation) -> Region:
    """The bytes of an allocation, to be read and written in place."""
    data = (ctypes.c_uint8 * allocation.size).from_address(allocation.address)
    return Region(np.ctypeslib.as_array(data), allocation.address, allocation.name)


def execute(launch: Launch, seed: int | None = None, banks: BankConflicts | None = None) -> None:
    """Runs a kernel launch to its end, with all checks.

    seed: None lets warps run in step, which is fastest; a number lets chance pick which warp goes on, so that
    other numbers try other orders. banks: counts bank conflicts. Raises SimulationError for what the kernel
    does wrong.
    """
    program = program_of(launch.ptx, launch.kernel)
    block = bytearray()
    for parameter, value in zip(program.kernel.parameters, launch.parameters, strict=True):
        block += bytes(parameter.offset - len(block)) + value
    run_grid(
        program,
        launch.grid,
        launch.block,
        launch.dynamic_shared_bytes,
        bytes(block),
        GlobalMemory([region(each) for each in launch.tensors if each.size]),
        seed,
        launch.cluster,
        banks,
    )
