"""From tensors to a compiled kernel and its arguments.

All that depends on shapes, strides and alignments is worked out once, in a `Plan`; a call adds the addresses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cutelab.copies import TMA_ALIGNMENT
from cutelab.kernels.dense_gemm.config import GemmConfig, choose_tile, count_tiles
from cutelab.kernels.dense_gemm.config_sm90 import Size, Sm90Config, Work, choose_work
from cutelab.kernels.dense_gemm.problem import Arguments, check_types, infer_output, require_tf32
from cutelab.kernels.dense_gemm.product import MAX_EXTENT, Mode, Operand, OperandLayout, Product
from cutelab.kernels.dense_gemm.sm80 import GemmSm80
from cutelab.kernels.dense_gemm.sm90 import GemmSm90
from cutelab.kernels.dense_gemm.tuned import Problem, recall
from cutelab.kernels.runtime.arch import Arch
from cutelab.kernels.runtime.compile import compile_kernel
from cutelab.kernels.runtime.errors import LayoutError, ShapeError
from cutelab.kernels.runtime.simulated import arch_of, compile_simulated

__all__ = ["Plan", "make_plan", "simulates_another"]

_NO_MODE = Mode(1, (0, 0, 0, 0))


@dataclass(frozen=True, slots=True)
class Plan:
    """How to compute one signature of `gemm`.

    shape, strides, dtype, device_index: of the output; the index is -1 on the CPU, in the simulator.
    arch: that it was made for.
    spans: bytes from the first element to the end of the last, of a, b, bias, c and out.
    tf32: whether torch must allow tf32 at the call.
    copies: the operands for which a contiguous copy has to stand in.
    function: the compiled kernel; None where there are copies, or an empty output.
    swapped: whether the kernel computes outᵀ = bᵀ·aᵀ.
    integers: sizes and strides, and how many workers share what, in the order of the kernel's arguments.
    workspace: bytes that the kernel needs for partial sums; None if it knows of none.
    problem: what can be tuned, if anything.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device_index: int
    arch: Arch
    spans: tuple[int, ...]
    tf32: bool
    copies: frozenset[Operand] = frozenset()
    function: Callable[..., Any] | None = None
    swapped: bool = False
    integers: tuple[int, ...] = ()
    workspace: int | None = None
    problem: Problem | None = None


def make_plan(args: Arguments, work: Work | None = None) -> Plan:
    """Checks the arguments and compiles the kernel they need. Of addresses, only the alignment counts.

    work: how the Hopper kernel shall go about it; by default what was tuned, or else chosen.
    """
    check_types(args)
    shape, dtype = infer_output(args)
    a, b, out = args.a, args.b, args.out
    arch = _arch_of(a)
    _check_extents(shape, a.shape[-1])
    _check_unit_stride("a", a)
    _check_unit_stride("b", b)
    strides = _row_major_strides(shape)
    if out is not None:
        _check_unit_stride("out", out)
        _check_no_internal_overlap(out)
        strides = out.stride()
    tf32 = a.dtype == torch.float32
    if tf32:
        require_tf32()

    spans = tuple(0 if tensor is None else _span(tensor) for tensor in args[:5])
    plan = Plan(tuple(shape), strides, dtype, a.get_device(), arch, spans, tf32)
    if 0 in shape:
        return plan
    c = None if args.beta == 0 else args.c
    product = Product.of(a, b, c, shape, strides).with_coalesced_batch()
    if len(product.batch) > 2:
        return replace(plan, copies=frozenset(product.scattered()))
    return _with_kernel(plan, args, product.with_batch_as_rows(), arch, work)


def simulates_another(plan: Plan, a: torch.Tensor) -> bool:
    """Whether another GPU is simulated now than when the plan was made, for operands like `a` on the CPU."""
    return plan.arch != _arch_of(a)


def _with_kernel(plan: Plan, args: Arguments, product: Product, arch: Arch, work: Work | None) -> Plan:
    """The plan with its kernel for ``product``. A fresh output is aligned to 256 bytes or more."""
    a, b, c, out = args.a, args.b, args.c, args.out
    out_layout = product.layout(Operand.OUT, 0 if out is None else out.data_ptr(), plan.dtype.itemsize)
    swapped = out_layout.major == "mn"
    if swapped:
        product, a, b = product.swapped(), b, a
    a_layout = product.layout(Operand.A, a.data_ptr(), a.itemsize)
    b_layout = product.layout(Operand.B, b.data_ptr(), b.itemsize)
    batch = math.prod(mode.size for mode in product.batch)
    size = Size(product.m.size, product.n.size, product.k.size, batch)
    shared: dict[str, Any] = {
        "ab_dtype": _name(a.dtype),
        "out_dtype": _name(plan.dtype),
        "a_major": a_layout.major,
        "b_major": b_layout.major,
        "out_align": out_layout.align,
        "c_align": 0 if c is None or args.beta == 0 else _c_align(product, c),
        "bias": None if args.bias is None else "m" if swapped else "n",
        "activation": args.activation,
    }
    integers = _integers(product, a_layout, b_layout, out_layout)
    compile_for = compile_simulated if plan.device_index < 0 else compile_kernel
    plan = replace(plan, swapped=swapped, integers=integers)
    if suits_sm90(a_layout, b_layout, a.dtype, product.k.size, arch):
        if out_layout.step_align == TMA_ALIGNMENT:
            shared["out_align"] = TMA_ALIGNMENT
        gpu = "simulated" if plan.device_index < 0 else torch.cuda.get_device_name(plan.device_index)
        names = _name(a.dtype), _name(plan.dtype), a_layout.major, b_layout.major
        plain = shared["out_align"] == TMA_ALIGNMENT and not shared["c_align"]
        problem = Problem(gpu, *names, plain, size)
        work = work or recall(problem) or choose_work(size, arch, plain)
        function = compile_for(GemmSm90(Sm90Config(**shared, **work.options())), arch)
        integers = (*integers, work.clusters, work.shared)
        return replace(
            plan, function=function, integers=integers, workspace=work.workspace_bytes, problem=problem
        )
    extents = size.m, size.n, batch
    tiling = choose_tile(
        shared["ab_dtype"], shared["out_dtype"], *extents, arch, min(a_layout.align, b_layout.align)
    )
    config = GemmConfig(**shared, a_align=a_layout.align, b_align=b_layout.align, **tiling)
    _check_blocks(config, *extents)
    return replace(plan, function=compile_for(GemmSm80(config), arch))


def suits_sm90(a: OperandLayout, b: OperandLayout, dtype: torch.dtype, k: int, arch: Arch) -> bool:
    """Whether the Hopper kernel can compute it: what wgmma multiplies, from where TMA can fetch it."""
    reachable = a.step_align == b.step_align == TMA_ALIGNMENT
    return arch.name == "sm_90a" and reachable and dtype.itemsize == 2 and k > 0


def _integers(product: Product, a: OperandLayout, b: OperandLayout, out: OperandLayout) -> tuple[int, ...]:
    """The sizes and strides that `GemmSm80.launch` takes, in its order."""
    outer, inner = (_NO_MODE, _NO_MODE, *product.batch)[-2:]
    a_batch, b_batch, c_batch, out_batch = ((outer.stride(x), inner.stride(x)) for x in Operand)
    return (
        *(product.m.size, product.n.size, product.k.size, outer.size, inner.size),
        *(a.leading_stride, *a_batch),
        *(b.leading_stride, *b_batch),
        *(product.m.stride(Operand.C), product.n.stride(Operand.C), *c_batch),
        *(out.leading_stride, *out_batch),
    )


def _c_align(product: Product, c: torch.Tensor) -> int:
    """The alignment of vectors of c along N; that of an element where it has no unit stride there."""
    if not product.n.is_unit(Operand.C):
        return c.itemsize
    return product.alignment(Operand.C, product.n, product.m, c.data_ptr(), c.itemsize)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _arch_of(tensor: torch.Tensor) -> Arch:
    return arch_of(tensor, "gemm", "torch.matmul")


def _check_extents(shape: Sequence[int], k: int) -> None:
    extents = {"M": shape[-2], "N": shape[-1], "K": k, "the number of batches": math.prod(shape[:-2])}
    for name, extent in extents.items():
        if extent > MAX_EXTENT:
            raise ShapeError(f"{name} is {extent}; at most {MAX_EXTENT} is supported: split the product")


def _check_blocks(config: GemmConfig, m: int, n: int, batch: int) -> None:
    blocks = count_tiles(config.tile, m, n, batch)
    if blocks >= 2**31:
        raise ShapeError(
            f"the output has {blocks} tiles of {config.tile[0]} x {config.tile[1]}; "
            f"at most {2**31 - 1} are supported: split the batch"
        )


def _check_unit_stride(name: str, matrix: torch.Tensor) -> None:
    if not any(
        size <= 1 or stride == 1 for size, stride in zip(matrix.shape[-2:], matrix.stride()[-2:], strict=True)
    ):
        fix = "pass a contiguous one" if name == "out" else f"pass {name}.contiguous()"
        raise LayoutError(
            f"{name} of shape {tuple(matrix.shape)} has strides {matrix.stride()}; "
            f"one of its last two must be 1: {fix}"
        )


def _check_no_internal_overlap(out: torch.Tensor) -> None:
    """Every mode must step over all that the modes of smaller strides reach."""
    reach = 1
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)):
        if size > 1 and stride < reach:
            raise LayoutError(
                f"out of shape {tuple(out.shape)} has strides {out.stride()}: elements share memory; "
                "pass one whose elements are distinct"
            )
        reach += (size - 1) * stride


def _row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides that torch gives to a fresh tensor."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def _span(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize
