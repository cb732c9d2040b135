"""A call of attention on plain tensors, without torch's dispatcher: plan, outputs, launch.

What this costs on the host is what a small problem costs, so a call whose signature was seen before does
nothing but look its plan up, allocate the outputs, and hand addresses to the compiled kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined]

from cutelab.kernels.attention.plan import Plan, make_plan, simulates_another
from cutelab.kernels.attention.problem import Arguments, check_types

__all__ = ["compute", "forget_plans"]

_MAX_PLANS = 4096
_plans: dict[tuple[Any, ...], Plan] = {}


def compute(args: Arguments, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output and, where asked for, the LSE; on the current stream of the operands' device."""
    return run(_plan(args), args, with_lse)


def run(plan: Plan, args: Arguments, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same by a plan that was made for such arguments."""
    device_index = plan.device_index
    simulated = device_index < 0
    if not simulated and device_index != torch._C._cuda_getDevice():
        with torch.cuda.device(device_index):
            return run(plan, args, with_lse)
    empty = torch.empty_strided if simulated else _empty_strided_cuda
    out = _allocate(empty, plan.shape, plan.strides, plan.dtype)
    lse = _allocate(empty, plan.lse_shape, plan.lse_strides, torch.float32) if with_lse else None
    function = plan.function
    if function is None:
        return out, None if lse is None else lse.fill_(-torch.inf)
    q, k, v = args[:3]
    if True in plan.copies:
        q, k, v = (
            tensor.clone(memory_format=torch.contiguous_format) if copied else tensor
            for tensor, copied in zip((q, k, v), plan.copies, strict=True)
        )
    cu_seqlens_q, cu_seqlens_k = args.cu_seqlens_q, args.cu_seqlens_k
    function(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        0 if cu_seqlens_q is None else cu_seqlens_q.data_ptr(),
        0 if cu_seqlens_k is None else cu_seqlens_k.data_ptr(),
        *plan.numbers,
        0 if simulated else torch._C._cuda_getCurrentRawStream(device_index),
    )
    return out, lse


def _allocate(
    empty: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """The way of torch's own compiled code, in a quarter of the time of torch.empty."""
    return (
        empty(shape, strides, dtype=dtype) if empty is torch.empty_strided else empty(shape, strides, dtype)
    )


def _plan(args: Arguments) -> Plan:
    """The plan of this signature. `_MAX_PLANS` are kept, then all are forgotten; their kernels are not."""
    q, k, v, cu_seqlens_q, cu_seqlens_k, *rest = args
    try:
        signature = (
            q.shape,
            q.stride(),
            q.dtype,
            q.get_device(),
            q.data_ptr() & 15,
            k.shape,
            k.stride(),
            k.dtype,
            k.get_device(),
            k.data_ptr() & 15,
            v.shape,
            v.stride(),
            v.dtype,
            v.get_device(),
            v.data_ptr() & 15,
            None if cu_seqlens_q is None else _signature(cu_seqlens_q),
            None if cu_seqlens_k is None else _signature(cu_seqlens_k),
            *rest,
        )
        plan = _plans.get(signature)
    # None has no shape, a sparse tensor no strides, a list no hash: the checks say so in our words.
    except (AttributeError, RuntimeError, TypeError):
        check_types(args)
        raise
    if plan is None or (plan.device_index < 0 and simulates_another(plan, args)):
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        plan = _plans[signature] = make_plan(args)
    return plan


def forget_plans() -> None:
    """The next calls make new ones."""
    _plans.clear()


def _signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()
