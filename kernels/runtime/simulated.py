"""Kernels on CPU tensors, where the program runs in the simulator.

The simulator knows nothing of the kernels, and the kernels need nothing of it: it is asked only if the
program has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import cutlass.cute as cute

from cutelab.kernels.runtime.arch import Arch
from cutelab.kernels.runtime.compile import Kernel, compiled_once
from cutelab.kernels.runtime.errors import DeviceError

if TYPE_CHECKING:
    import torch

__all__ = ["arch_of", "compile_simulated", "simulated_arch"]


def simulated_arch() -> Arch | None:
    """The architecture that the program simulates at this moment, or None."""
    simulator = sys.modules.get("cutelab.simulator")
    gpu = None if simulator is None else simulator.current_gpu()
    return None if gpu is None else replace(Arch.named(gpu.arch), sm_count=gpu.multiprocessors)


def arch_of(tensor: torch.Tensor, op: str, instead: str) -> Arch:
    """The architecture that a call on ``tensor`` runs on: its GPU's, or that which is simulated for the CPU.

    op, instead: names for the DeviceError, of what was called and of what torch has.
    """
    if tensor.device.type == "cpu" and (arch := simulated_arch()):
        return arch
    if tensor.device.type != "cuda":
        raise DeviceError(
            f"{op} runs on CUDA devices of compute capability 8.0 or newer; got {tensor.device.type}: "
            f"move the operands there with .cuda(), use {instead}, or run the kernel on the CPU within "
            "`with cutelab.simulator.gpu('sm_90a'):`"
        )
    return Arch.of(tensor.device)


def compile_simulated(kernel: Kernel, arch: Arch) -> Callable[..., Any]:
    """As `cutelab.kernels.runtime.compile.compile_kernel`, for CPU tensors and the simulator that is open.

    The function takes the same arguments and returns when the kernel has run. Nothing is kept on disk.
    """
    key = ("simulated", type(kernel), kernel.config, arch.name)
    return compiled_once(key, lambda: cute.compile(kernel.launch, *kernel.example_args()))
