"""When a call may go to its kernel straight away, past torch's dispatcher."""

from __future__ import annotations

import torch
from torch import is_grad_enabled
from torch._C import (  # type: ignore[attr-defined]
    _get_tracing_state,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

__all__ = ["has_tangent", "may_bypass_dispatcher"]

_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


def may_bypass_dispatcher(*tensors: torch.Tensor | None) -> bool:
    """Whether nothing that torch does between the call of an operator and its kernel matters here.

    That is: no gradient, no mode, transform, tracer or forward-mode level, no subclass, no meta tensor, no
    lazy negation.
    """
    grad_enabled = is_grad_enabled()
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in _PLAIN_TYPES or tensor.is_meta or tensor.is_neg():
            return False
        if grad_enabled and tensor.requires_grad:
            return False
    return (
        _len_torch_dispatch_stack() == 0
        and _len_torch_function_stack() == 0
        and peek_interpreter_stack() is None
        and _get_tracing_state() is None
        and forward_ad._current_level < 0
    )


def has_tangent(*tensors: torch.Tensor | None) -> bool:
    """Whether any of them carries a forward-mode derivative."""
    if forward_ad._current_level < 0:
        return False
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)
