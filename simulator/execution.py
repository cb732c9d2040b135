"""Executes launches: from what the program's host code handed over to the end of its last CTA."""

import ctypes
from functools import lru_cache

import numpy as np

from cutelab.simulator import ptx, workers
from cutelab.simulator.bank_conflicts import BankConflicts
from cutelab.simulator.errors import SimulationError
from cutelab.simulator.grid import Grid
from cutelab.simulator.memory import GlobalMemory, Region, variables
from cutelab.simulator.standin import Allocation, Launch
from cutelab.simulator.translate import Program, translate


@lru_cache(maxsize=64)
def module_of(text: str) -> ptx.Module:
    """A PTX module as loaded: its variables keep their values from launch to launch. Raises PtxError."""
    return ptx.parse(text)


@lru_cache(maxsize=64)
def program_of(text: str, kernel: str, stepwise: bool = False) -> Program:
    """The translated kernel of a PTX module: see `translate`. Raises SimulationError."""
    try:
        return translate(module_of(text).kernels[kernel], stepwise)
    except ptx.PtxError as error:
        raise SimulationError(f"cannot read the PTX of {kernel}: {error}") from error


def region(allocation: Allocation) -> Region:
    """The bytes of an allocation, to be read and written in place."""
    data = (ctypes.c_uint8 * allocation.size).from_address(allocation.address)
    return Region(np.ctypeslib.as_array(data), allocation.address, allocation.name)


def execute(
    launch: Launch,
    seed: int | None = None,
    banks: BankConflicts | None = None,
    processes: int | None = None,
) -> None:
    """Runs a kernel launch to its end, with all checks.

    seed: None lets warps run in step, which is fastest; a number lets chance pick which warp goes on, and
    which CTA where they wait for each other, so that other numbers try other orders. banks: counts bank
    conflicts. processes: how many a long launch may be spread over whose CTAs don't wait for each other; by
    default $CUTELAB_PROCESSES, or one for each core. Raises SimulationError for what the kernel does wrong,
    and ValueError for fewer processes than one.
    """
    grid = grid_of(launch, program_of(launch.ptx, launch.kernel), seed, banks)
    workers.run(grid, workers.available(processes))


def grid_of(
    launch: Launch,
    program: Program,
    seed: int | None = None,
    banks: BankConflicts | None = None,
    grid_type: type[Grid] = Grid,
) -> Grid:
    """A launch, ready to run."""
    block = bytearray()
    for parameter, value in zip(program.kernel.parameters, launch.parameters, strict=True):
        block += bytes(parameter.offset - len(block)) + value
    tensors = [each for each in launch.tensors if each.size]
    return grid_type(
        program,
        launch.grid,
        launch.block,
        launch.dynamic_shared_bytes,
        bytes(block),
        GlobalMemory([*map(region, tensors), *variables(program.kernel.module)]),
        seed,
        launch.cluster,
        banks,
        launch.gpu,
    )
