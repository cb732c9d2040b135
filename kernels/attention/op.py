"""Attention as PyTorch sees it: the functions, and the operators behind them.

A call in eager mode that needs no gradient goes straight to the kernel: the dispatcher would cost more than
all the rest of the host's work. Every other call goes through ``torch.ops.cutelab``, which torch can trace
and compile.
"""

from __future__ import annotations

from typing import Any

import torch

from cutelab.kernels.attention.launch import compute
from cutelab.kernels.attention.problem import Arguments, check_types, infer_shapes, window_sides
from cutelab.kernels.runtime.dispatch import has_tangent, may_bypass_dispatcher

__all__ = ["flash_attention", "flash_attention_varlen"]

Window = tuple[int | None, int | None]


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: Window = (None, None),
    scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale · q·kᵀ + mask) · v for each head, accumulated in float32.

    q: (B, Sq, Hq, D); k: (B, Sk, Hk, D); v: (B, Sk, Hk, Dv), float16 or bfloat16. Hq is a multiple of Hk: Hq
        / Hk neighbouring heads of q share one of k and v. D and Dv are multiples of 8 up to 256. The last dim
        has stride 1; other strides are free. Where they or the address are no multiples of 16 bytes, a copy
        is made first.
    causal: query i sees key j where j ≤ i + Sk - Sq: the last query sees all keys.
    window: (left, right): query i sees keys from i + Sk - Sq - left to i + Sk - Sq + right, both included;
        None is unbounded. With causal, both must hold.
    scale: 1 / sqrt(D) by default.
    softcap: if not 0, scores become softcap · tanh(score / softcap) before the mask.
    deterministic: of no effect here: equal inputs give equal bits in any case.
    return_lse: also return the logarithm of the sum of exponentials of each row of scores.

    Returns (B, Sq, Hq, Dv), contiguous, and with return_lse float32 (B, Hq, Sq). A query that sees no key
    gives 0, and -inf. Keys that no query of a tile sees are not read, so they may be NaN. Runs on the current
    stream of the operands' device. The first call of a kind compiles or loads its kernel: make one before
    capturing a CUDA graph. It has no gradient yet: where one is needed, NotImplementedError says so.

    Raises ShapeError, LayoutError, DeviceError or ConfigError (ValueErrors), or DtypeError (a TypeError).
    """
    left, right = window_sides(window)
    args = Arguments(q, k, v, None, None, None, None, bool(causal), left, right, scale, softcap)
    return _call(args, return_lse)


def flash_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: Window = (None, None),
    scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`flash_attention` for sequences of different lengths, which lie one after the other without padding.

    q: (Tq, Hq, D); k: (Tk, Hk, D); v: (Tk, Hk, Dv), with the tokens of all sequences.
    cu_seqlens_q, cu_seqlens_k: int32 (B + 1,), on the device of q: sequence b has the tokens from entry b to
        entry b + 1. Either may be empty. What lies behind the last entry of cu_seqlens_q is left undefined in
        the results.
    max_seqlen_q, max_seqlen_k: no sequence is longer; not checked, since the lengths are on the device.

    Returns (Tq, Hq, Dv), contiguous, and with return_lse float32 (Hq, Tq). All else is as for
    `flash_attention`, with each sequence's own Sq and Sk.
    """
    left, right = window_sides(window)
    args = Arguments(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        *(bool(causal), left, right, scale, softcap),
    )
    return _call(args, return_lse)


def _call(args: Arguments, return_lse: bool) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    tensors = args[:5]
    if torch.compiler.is_compiling() or not may_bypass_dispatcher(*tensors):
        out, lse = _dispatch(args)
    else:
        out, lse = compute(args, return_lse)  # type: ignore[assignment]
    return (out, lse) if return_lse else out


def _dispatch(args: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """The results by way of torch's dispatcher."""
    check_types(args)
    inputs = args[:3]
    if has_tangent(*inputs):
        raise NotImplementedError(f"{args.name} has no forward-mode derivative")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        raise NotImplementedError(_no_gradient(args.name))
    if args.varlen:
        return torch.ops.cutelab.flash_attention_varlen(*args)
    return torch.ops.cutelab.flash_attention(*inputs, *args[7:])


def _no_gradient(name: str) -> str:
    return (
        f"{name} has no gradient yet: call it under torch.no_grad() or on detached tensors, or use "
        "torch.nn.functional.scaled_dot_product_attention where a gradient is needed"
    )


_OPTIONS = "bool causal, SymInt? left, SymInt? right, float? scale, float softcap"


@torch.library.custom_op(
    "cutelab::flash_attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
)
def _flash_attention(q, k, v, *options):
    return compute(Arguments(q, k, v, None, None, None, None, *options), True)


@_flash_attention.register_fake
def _fake_flash_attention(q, k, v, *options):
    return _fake(Arguments(q, k, v, None, None, None, None, *options))


@torch.library.custom_op(
    "cutelab::flash_attention_varlen",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
        f"SymInt max_seqlen_k, {_OPTIONS}) -> (Tensor, Tensor)"
    ),
)
def _flash_attention_varlen(*args):
    return compute(Arguments(*args), True)


@_flash_attention_varlen.register_fake
def _fake_flash_attention_varlen(*args):
    return _fake(Arguments(*args))


def _fake(args: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    shape, lse_shape = infer_shapes(args)
    return args.q.new_empty(shape), args.q.new_empty(lse_shape, dtype=torch.float32)


def _refuse_gradient(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    raise NotImplementedError(_no_gradient("attention"))


def _backward(ctx: Any, *gradients: Any) -> None:
    raise NotImplementedError(_no_gradient("attention"))


for _op in (_flash_attention, _flash_attention_varlen):
    _op.register_autograd(_backward, setup_context=_refuse_gradient)
