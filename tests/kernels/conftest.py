"""A stand-in for the compiled GEMM that runs on the CPU, so that all of `gemm` around it can be tested there.

It takes the arguments of `GemmSm80.launch` (addresses, sizes, strides), checks that the alignment that the
configuration promises holds for them, and computes in float64 what the kernel's docstring says.
"""

import ctypes
from collections.abc import Callable, Sequence

import pytest
import torch
from activations import ACTIVATIONS

from cutelab.kernels.dense_gemm import launch, plan
from cutelab.kernels.dense_gemm.config import GemmConfig
from cutelab.kernels.runtime.arch import Arch


def view(address: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """The elements at that address, sharing their memory."""
    if 0 in shape:
        return torch.empty(tuple(shape), dtype=dtype)
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_byte * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def check_alignment(tensor: torch.Tensor, address: int, unit: int, align: int) -> None:
    """What `align` promises: it divides the address, the strides and the extent along the mode `unit`."""
    assert tensor.stride(unit) == 1 or tensor.shape[unit] <= 1
    steps = [stride for mode, stride in enumerate(tensor.stride()) if mode != unit % tensor.dim()]
    assert all(x * tensor.itemsize % align == 0 for x in (*steps, tensor.shape[unit]))
    assert address % align == 0


class ReferenceGemm:
    """Called as the compiled kernel is; remembers the configurations and sizes that it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[GemmConfig, tuple[int, ...]]] = []

    def compile(self, kernel, arch: Arch) -> Callable[..., None]:
        return lambda *args: self.run(kernel.config, *args)

    def run(self, config: GemmConfig, a, b, c, bias, out, m, n, k, l0, l1, *rest) -> None:
        self.calls.append((config, (m, n, k, l0, l1)))
        *strides, alpha, beta, _stream = rest
        a_ld, a_l0, a_l1, b_ld, b_l0, b_l1, c_m, c_n, c_l0, c_l1, out_ld, out_l0, out_l1 = strides
        ab_dtype, out_dtype = getattr(torch, config.ab_dtype), getattr(torch, config.out_dtype)

        a_matrix = (a_ld, 1) if config.a_major == "k" else (1, a_ld)
        b_matrix = (b_ld, 1) if config.b_major == "k" else (1, b_ld)
        tA = view(a, ab_dtype, (l0, l1, m, k), (a_l0, a_l1, *a_matrix))
        tB = view(b, ab_dtype, (l0, l1, n, k), (b_l0, b_l1, *b_matrix))
        tD = view(out, out_dtype, (l0, l1, m, n), (out_l0, out_l1, out_ld, 1))
        if k:
            check_alignment(tA, a, -1 if config.a_major == "k" else -2, config.a_align)
            check_alignment(tB, b, -1 if config.b_major == "k" else -2, config.b_align)
        check_alignment(tD, out, -1, config.out_align)

        value = alpha * (tA.double() @ tB.double().mT)
        if config.c_align:
            tC = view(c, out_dtype, (l0, l1, m, n), (c_l0, c_l1, c_m, c_n))
            if config.c_align > out_dtype.itemsize:
                check_alignment(tC, c, -1, config.c_align)
            value += beta * tC.double()
        if config.bias == "n":
            value += view(bias, out_dtype, (n,), (1,)).double()
        if config.bias == "m":
            value += view(bias, out_dtype, (m,), (1,)).double()[:, None]
        tD.copy_(ACTIVATIONS[config.activation](value))


@pytest.fixture
def reference_gemm(monkeypatch: pytest.MonkeyPatch) -> ReferenceGemm:
    """Makes `gemm` take CPU tensors and call the stand-in, as if the CPU were an sm_80 device."""
    reference = ReferenceGemm()
    monkeypatch.setattr(plan, "_arch_of", lambda tensor: Arch.named("sm_80"))
    monkeypatch.setattr(plan, "compile_simulated", reference.compile)
    monkeypatch.setattr(launch, "_plans", {})
    return reference
