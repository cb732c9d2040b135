"""A call of `gemm` on plain tensors, without torch's dispatcher: plan, output, launch.

What this costs on the host is what a small product costs, so a call whose signature was seen before does
nothing but look its plan up, allocate the output, and hand addresses to the compiled kernel.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch
from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined]

from cutelab.kernels.dense_gemm.plan import Plan, make_plan, simulates_another
from cutelab.kernels.dense_gemm.problem import Arguments, check_types, require_tf32
from cutelab.kernels.dense_gemm.product import Operand
from cutelab.kernels.runtime.errors import LayoutError

__all__ = ["compute", "forget_plans", "run"]

_MAX_PLANS = 4096
_INPUTS = Arguments._fields[:4]
_plans: dict[tuple[Any, ...], Plan] = {}
_NO_PARTIAL_SUMS = (0, 0)
# Flags of `PartialSums`, a new one for each launch: memory from the allocator holds none by chance.
_ready = itertools.count(random.getrandbits(62) + 1)


def compute(args: Arguments) -> torch.Tensor:
    """The result of `gemm`, in ``args.out`` if given, on the current stream of the operands' device."""
    return run(_plan(args), args)


def run(plan: Plan, args: Arguments) -> torch.Tensor:
    """The same by a plan that was made for such arguments."""
    if plan.tf32:
        require_tf32()
    device_index = plan.device_index
    simulated = device_index < 0
    if not simulated and device_index != torch._C._cuda_getDevice():
        with torch.cuda.device(device_index):
            return run(plan, args)
    a, b, bias, c, out, _, alpha, beta, _ = args
    if out is not None:
        _check_no_overlap(out, args, plan)
    if plan.copies:
        return _compute_from_copies(args, plan)
    if out is None:
        out = _empty(plan.shape, plan.strides, plan.dtype, simulated)
    function = plan.function
    if function is None:
        return out
    if plan.swapped:
        a, b = b, a
    if bias is not None:
        bias = bias.contiguous()
    partial_sums: tuple[int, ...] = ()
    if plan.workspace:
        workspace = _empty((plan.workspace,), (1,), torch.uint8, simulated)  # free for what comes after
        partial_sums = workspace.data_ptr(), next(_ready)
    elif plan.workspace is not None:
        partial_sums = _NO_PARTIAL_SUMS
    function(
        a.data_ptr(),
        b.data_ptr(),
        0 if c is None else c.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        *plan.integers,
        alpha,
        beta,
        *partial_sums,
        0 if simulated else torch._C._cuda_getCurrentRawStream(device_index),
    )
    return out


def _empty(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, simulated: bool
) -> torch.Tensor:
    """A fresh tensor, the way of torch's own compiled code: in a quarter of the time of torch.empty."""
    if simulated:
        return torch.empty_strided(shape, strides, dtype=dtype)
    return _empty_strided_cuda(shape, strides, dtype)


def _plan(args: Arguments) -> Plan:
    """The plan of this signature. `_MAX_PLANS` are kept, then all are forgotten; their kernels are not."""
    a, b, bias, c, out, activation, alpha, beta, out_dtype = args
    try:
        signature = (
            a.shape,
            a.stride(),
            a.dtype,
            a.get_device(),
            a.data_ptr() & 15,
            b.shape,
            b.stride(),
            b.dtype,
            b.get_device(),
            b.data_ptr() & 15,
            None if bias is None else _signature(bias),
            None if c is None else _signature(c),
            None if out is None else _signature(out),
            activation,
            type(alpha),
            type(beta),
            beta == 0,
            out_dtype,
        )
        plan = _plans.get(signature)
    # None has no shape, a sparse tensor no strides, a list no hash: the checks say so in our words.
    except (AttributeError, RuntimeError, TypeError):
        check_types(args)
        raise
    if plan is None or (plan.device_index < 0 and simulates_another(plan, a)):
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        plan = _plans[signature] = make_plan(args)
    return plan


def forget_plans() -> None:
    """The next calls make new ones."""
    _plans.clear()


def _signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), tensor.data_ptr() & 15


def _compute_from_copies(args: Arguments, plan: Plan) -> torch.Tensor:
    """The result by way of contiguous copies, for batches that two batch modes cannot describe."""
    a, b, c, batch = args.a, args.b, args.c, plan.shape[:-2]
    if Operand.A in plan.copies:
        args = args._replace(a=a.expand(*batch, *a.shape[-2:]).contiguous())
    if Operand.B in plan.copies:
        args = args._replace(b=b.expand(*batch, *b.shape[-2:]).contiguous())
    if Operand.C in plan.copies and c is not None:
        args = args._replace(c=c.expand(plan.shape).contiguous())
    if Operand.OUT in plan.copies and args.out is not None:
        return args.out.copy_(compute(args._replace(out=None, out_dtype=plan.dtype)))
    return compute(args)


def _check_no_overlap(out: torch.Tensor, args: Arguments, plan: Plan) -> None:
    """Raises LayoutError where ``out`` surely shares memory with an input that is not c in its very place.

    Surely: both start at one address, or one is without gaps and holds an end of the other. Views with gaps
    that overlap in part or interleave pass, as they do in torch.
    """
    *spans, out_span = plan.spans
    out_start, out_end = out.data_ptr(), out.data_ptr() + out_span
    for name, tensor, span in zip(_INPUTS, args[:4], spans, strict=True):
        if tensor is None or (name == "c" and args.beta == 0):
            continue
        start, end = tensor.data_ptr(), tensor.data_ptr() + span
        if start >= out_end or end <= out_start:
            continue
        shared = (
            start == out_start
            or (out_span == out.nbytes and (start > out_start or end < out_end))
            or (span == tensor.nbytes and (out_start > start or out_end < end))
        )
        in_place = start == out_start and tensor.shape == out.shape and tensor.stride() == out.stride()
        if shared and not (name == "c" and in_place):
            raise LayoutError(
                f"out shares memory with {name}: write to another tensor, or pass {name}.clone()"
            )
