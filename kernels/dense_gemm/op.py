"""`gemm` as PyTorch sees it: the function, and the operators behind it.

A call in eager mode that needs no gradient goes straight to the kernel: the dispatcher would cost more than
all the rest of the host's work. Every other call goes through ``torch.ops.cutelab.gemm``, which torch can
trace, differentiate and compile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from cutelab.kernels.dense_gemm.launch import compute
from cutelab.kernels.dense_gemm.problem import Arguments, check_types, infer_output
from cutelab.kernels.runtime.dispatch import has_tangent, may_bypass_dispatcher

__all__ = ["gemm"]

# The activations whose gradient needs their input, which a fused kernel does not store.
_SMOOTH_ACTIVATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    c: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """act(alpha · a @ b + beta · c + bias), accumulated in float32.

    a: (…, M, K); b: (…, K, N), of the same dtype: float16, bfloat16, or float32 where torch allows tf32.
        Batch dims broadcast. One of the last two dims must have stride 1; other strides are free.
    bias: (N,), of the dtype of the output.
    activation: None, "relu", "gelu", "gelu_tanh" or "silu".
    c: broadcasts to the output and has its dtype. May be ``out`` itself.
    alpha, beta: Python numbers; beta is 1 by default. When it is 0, c is not read.
    out: where to write the result. Its elements share memory neither with each other nor with an input.
    out_dtype: float16, bfloat16 or float32; by default that of ``out``, or else of a.

    Returns (…, M, N), row-major unless ``out`` is given. Differentiable in a, b, bias and c; where a gradient
    is needed, torch applies gelu and silu to the stored product, because their gradient needs it.
    Autocast does not cast the operands. Runs on the current stream of the operands' device. The first call of
    a kind compiles or loads its kernel: make one before capturing a CUDA graph.

    Raises ShapeError, LayoutError, DeviceError or ConfigError (ValueErrors), or DtypeError (a TypeError).
    """
    if beta is None:
        beta = 0.0 if c is None else 1.0
    args = Arguments(a, b, bias, c, out, activation, alpha, beta, out_dtype)
    if torch.compiler.is_compiling() or not may_bypass_dispatcher(a, b, bias, c, out):
        return _dispatch(args)
    result = compute(args)
    if out is not None:
        torch.autograd.graph.increment_version(out)
    return result


def _dispatch(args: Arguments) -> torch.Tensor:
    """The result by way of torch's dispatcher."""
    check_types(args)
    a, b, bias, c, out, activation, alpha, beta, out_dtype = args
    inputs = [tensor for tensor in (a, b, bias, c) if tensor is not None]
    if has_tangent(*inputs):
        raise NotImplementedError("gemm has no forward-mode derivative; torch.matmul has")
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    if out is not None:
        if needs_grad or (torch.is_grad_enabled() and out.requires_grad):
            raise NotImplementedError("gemm with out= is not differentiable; call it under torch.no_grad()")
        torch.ops.cutelab.gemm_out(a, b, bias, c, activation, alpha, beta, out_dtype, out)
        return out
    if needs_grad and activation in _SMOOTH_ACTIVATIONS:
        product = torch.ops.cutelab.gemm(a, b, bias, c, None, alpha, beta, out_dtype)
        return _SMOOTH_ACTIVATIONS[activation](product)
    return torch.ops.cutelab.gemm(a, b, bias, c, activation, alpha, beta, out_dtype)


_SCHEMA = (
    "Tensor a, Tensor b, Tensor? bias, Tensor? c, str? activation, float alpha, float beta, "
    "ScalarType? out_dtype"
)


@torch.library.custom_op("cutelab::gemm", mutates_args=(), schema=f"({_SCHEMA}) -> Tensor")
def _gemm(a, b, bias, c, activation, alpha, beta, out_dtype):
    return compute(Arguments(a, b, bias, c, None, activation, alpha, beta, out_dtype))


@_gemm.register_fake
def _fake_gemm(a, b, bias, c, activation, alpha, beta, out_dtype):
    shape, dtype = infer_output(Arguments(a, b, bias, c, None, activation, alpha, beta, out_dtype))
    return a.new_empty(shape, dtype=dtype)


@torch.library.custom_op(
    "cutelab::gemm_out", mutates_args=("out",), schema=f"({_SCHEMA}, Tensor(a!) out) -> ()"
)
def _gemm_out(a, b, bias, c, activation, alpha, beta, out_dtype, out):
    compute(Arguments(a, b, bias, c, out, activation, alpha, beta, out_dtype))


@_gemm_out.register_fake
def _fake_gemm_out(a, b, bias, c, activation, alpha, beta, out_dtype, out):
    infer_output(Arguments(a, b, bias, c, out, activation, alpha, beta, out_dtype))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, bias, c, activation, alpha, beta, _ = inputs
    if activation in _SMOOTH_ACTIVATIONS:
        raise NotImplementedError(
            f"torch.ops.cutelab.gemm has no gradient of {activation}; "
            "cutelab.kernels.gemm applies it after the product"
        )
    ctx.save_for_backward(a, b, output if activation == "relu" else None)
    ctx.bias_shape = None if bias is None else bias.shape
    ctx.c_shape = None if c is None else c.shape
    ctx.alpha, ctx.beta = alpha, beta


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """alpha · g·bᵀ, alpha · aᵀ·g, Σ g and beta · g, where g is the gradient before the activation."""
    a, b, out = ctx.saved_tensors
    if out is not None:
        grad = torch.ops.aten.threshold_backward(grad, out, 0)
    needs_a, needs_b, needs_bias, needs_c, *_ = ctx.needs_input_grad
    factor = grad.to(a.dtype).contiguous()
    return (
        _scaled_product(factor, b.mT, ctx.alpha).sum_to_size(a.shape) if needs_a else None,
        _grad_b(a, factor, b.shape, ctx.alpha) if needs_b else None,
        grad.sum_to_size(ctx.bias_shape) if needs_bias else None,
        (ctx.beta * grad).sum_to_size(ctx.c_shape) if needs_c else None,
        *(None,) * 4,
    )


def _grad_b(a: torch.Tensor, grad: torch.Tensor, shape: torch.Size, alpha: float) -> torch.Tensor:
    if math.prod(shape[:-2]) != 1:
        return _scaled_product(a.mT, grad, alpha).sum_to_size(shape)
    # b is one matrix: the sum over the batch is the inner sum of one product over all rows.
    return _scaled_product(a.flatten(0, -2).mT, grad.flatten(0, -2), alpha).reshape(shape)


def _scaled_product(x: torch.Tensor, y: torch.Tensor, alpha: float) -> torch.Tensor:
    return torch.ops.cutelab.gemm(x, y, None, None, None, alpha, 0.0, None)


_gemm.register_autograd(_backward, setup_context=_setup_context)
