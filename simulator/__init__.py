"""Compiled CuTe DSL kernels on a CPU: `with simulator.gpu("sm_90a"):` around a program with CPU tensors.

`CUTELAB_SIMULATE=sm_90a` in the environment does the same for the whole program that imports this package;
`CUTELAB_SIMULATE=sm_90a:4` with 4 multiprocessors.
"""

import os

from cutelab.simulator.costs import Costs
from cutelab.simulator.debugger import Debugger, Place
from cutelab.simulator.errors import SimulationError
from cutelab.simulator.execution import execute
from cutelab.simulator.launch import Allocation, Gpu, Launch, LaunchError, current_gpu, gpu
from cutelab.simulator.timeline import Span, Timeline
from cutelab.simulator.timing import trace
from cutelab.simulator.values import Operand

__all__ = [
    "Allocation",
    "Costs",
    "Debugger",
    "Gpu",
    "Launch",
    "LaunchError",
    "Operand",
    "Place",
    "SimulationError",
    "Span",
    "Timeline",
    "current_gpu",
    "execute",
    "gpu",
    "trace",
]


if asked := os.environ.get("CUTELAB_SIMULATE"):
    arch, _, multiprocessors = asked.partition(":")
    whole_program = gpu(arch, multiprocessors=int(multiprocessors) if multiprocessors else None)
    whole_program.__enter__()
