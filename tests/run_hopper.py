"""Runs small Hopper kernels on tensors, simulated or on a GPU: what the tests of TMA and wgmma share."""

import functools

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass.cute.runtime import make_fake_stream, nullptr

from cutelab import simulator

DTYPES = {
    torch.float16: cutlass.Float16,
    torch.bfloat16: cutlass.BFloat16,
    torch.float32: cutlass.Float32,
    torch.int16: cutlass.Int16,
}
WHERE = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
"""Values of `device` for a test that runs a kernel."""


def compiled(kernel, dtypes, numbers, options=""):
    """`kernel.launch` of pointers to these types, aligned for TMA, some integers and a stream."""
    pointers = [nullptr(DTYPES[dtype], cute.AddressSpace.gmem, assumed_align=16) for dtype in dtypes]
    arguments = *pointers, *(1,) * numbers, make_fake_stream()
    return cute.compile(kernel.launch, *arguments, options=f"--enable-tvm-ffi {options}")


@functools.cache
def simulated(kernel, dtypes, numbers):
    with simulator.gpu("sm_90a"):
        return compiled(kernel, dtypes, numbers)


@functools.cache
def on_gpu(kernel, dtypes, numbers):
    return compiled(kernel, dtypes, numbers, "--gpu-arch sm_90a")


def run(kernel, *arguments, device="cpu", seed=None, execute=None):
    """What the tensors hold when the kernel has run on copies of them, which are on `device`.

    kernel: hashable, so that it is compiled once; its `launch` takes the tensors' pointers, then the integers
    among the arguments, then a stream. seed: of the simulated order of warps. execute: in place of that.
    """
    tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
    numbers = arguments[len(tensors) :]
    dtypes = tuple(each.dtype for each in tensors)
    there = [each.clone().to(device) for each in tensors]
    pointers = [each.data_ptr() for each in there]
    if device == "cpu":
        with simulator.gpu("sm_90a", execute=execute or functools.partial(simulator.execute, seed=seed)):
            simulated(kernel, dtypes, len(numbers))(*pointers, *numbers, 0)
    else:
        stream = torch.cuda.current_stream().cuda_stream
        on_gpu(kernel, dtypes, len(numbers))(*pointers, *numbers, stream)
    return [each.cpu() for each in there]


def launch_of(kernel, *arguments):
    """The launch that `run` makes, not yet run. Its tensors are kept with it."""
    launches = []
    run(kernel, *arguments, execute=launches.append)
    return launches[0]
