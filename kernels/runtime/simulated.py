"""Kernels on CPU tensors, where the program runs in the simulator.

The simulator knows nothing of the kernels, and the kernels need nothing of it: it is asked only if the
program has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cutlass.cute as cute

from cutelab.kernels.runtime.arch import Arch
from cutelab.kernels.runtime.compile import Kernel, compiled_once

__all__ = ["compile_simulated", "simulated_arch"]


def simulated_arch() -> Arch | None:
    """The architecture that the program simulates at this moment, or None."""
    simulator = sys.modules.get("cutelab.simulator")
    gpu = None if simulator is None else simulator.current_gpu()
    return None if gpu is None else replace(Arch.named(gpu.arch), sm_count=gpu.multiprocessors)


def compile_simulated(kernel: Kernel, arch: Arch) -> Callable[..., Any]:
    """As `cutelab.kernels.runtime.compile.compile_kernel`, for CPU tensors and the simulator that is open.

    The function takes the same arguments and returns when the kernel has run. Nothing is kept on disk.
    """
    key = ("simulated", type(kernel), kernel.config, arch.name)
    return compiled_once(key, lambda: cute.compile(kernel.launch, *kernel.example_args()))
