"""What `gemm` accepts: its arguments, their checks, and the shape and dtype of the result.

The checks read types, dtypes, shapes and devices, never addresses or strides, so that the fake implementation
shares them with the real one.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple

import torch

from cutelab.kernels.dense_gemm.epilogue import ACTIVATIONS
from cutelab.kernels.runtime.errors import ConfigError, DeviceError, DtypeError, LayoutError, ShapeError

__all__ = ["Arguments", "check_types", "infer_output", "require_tf32"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_DTYPE_NAMES = "torch.float16, torch.bfloat16 and torch.float32"


class Arguments(NamedTuple):
    """The arguments of one call of `gemm`."""

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    c: torch.Tensor | None
    out: torch.Tensor | None
    activation: str | None
    alpha: float
    beta: float
    out_dtype: torch.dtype | None


def check_types(args: Arguments) -> None:
    """Raises DtypeError, LayoutError or ConfigError where an argument is of a kind that gemm doesn't take."""
    for name in ("alpha", "beta"):
        factor = getattr(args, name)
        if not isinstance(factor, (int, float, torch.SymInt, torch.SymFloat)):
            raise DtypeError(
                f"{name} must be a Python number; got {type(factor).__name__}: pass float({name})"
            )
    if args.activation is not None and args.activation not in ACTIVATIONS:
        raise ConfigError(f"activation={args.activation!r} is not one of None, {', '.join(ACTIVATIONS)}")
    for name in ("a", "b", "bias", "c", "out"):
        operand = getattr(args, name)
        if operand is None and name not in ("a", "b"):
            continue
        if not isinstance(operand, torch.Tensor):
            raise DtypeError(f"{name} must be a torch.Tensor; got {type(operand).__name__}")
        if operand.is_nested or operand.layout is not torch.strided:
            layout = "nested" if operand.is_nested else operand.layout
            raise LayoutError(f"{name} is {layout}; gemm takes dense tensors: pass {name}.to_dense()")


def infer_output(args: Arguments) -> tuple[torch.Size, torch.dtype]:
    """Shape and dtype of the result; raises a typed error where the arguments do not fit together."""
    dtype = _output_dtype(args)
    shape = _output_shape(args.a, args.b)
    _check_same_device(args)
    for name, operand in (("bias", args.bias), ("c", args.c)):
        if operand is not None and operand.dtype != dtype:
            raise DtypeError(f"{name} is {operand.dtype}; it must have the dtype of out: {name}.to({dtype})")
    if args.bias is not None and args.bias.shape != shape[-1:]:
        raise ShapeError(f"bias has shape {tuple(args.bias.shape)}; it must be (N,) = {tuple(shape[-1:])}")
    if args.c is not None and _broadcast(args.c.shape, shape) != shape:
        raise ShapeError(f"c has shape {tuple(args.c.shape)}, which does not broadcast to {tuple(shape)}")
    if args.c is None and args.beta != 0:
        raise ConfigError(f"beta={args.beta} scales c, but there is no c: pass c, or leave beta at 0")
    if args.out is not None and args.out.shape != shape:
        raise ShapeError(f"out has shape {tuple(args.out.shape)}; the result has {tuple(shape)}")
    if args.out is not None and args.out.dtype != dtype:
        raise DtypeError(
            f"out is {args.out.dtype} and out_dtype {dtype}; they must agree, or out_dtype be None"
        )
    return shape, dtype


def require_tf32() -> None:
    """Raises DtypeError unless torch's own switch allows tf32 in products of float32 matrices.

    Since torch 2.9, ``fp32_precision`` says so whichever switch was used; before, ``allow_tf32`` did.
    """
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)
    if not (matmul.allow_tf32 if precision is None else precision == "tf32"):
        raise DtypeError(
            "gemm multiplies float32 as tf32 (10 bits of mantissa), which torch does not allow now: set "
            "torch.backends.cuda.matmul.allow_tf32 = True or torch.set_float32_matmul_precision('high'), "
            "or pass float16 or bfloat16"
        )


def _output_dtype(args: Arguments) -> torch.dtype:
    a, b, out_dtype = args.a.dtype, args.b.dtype, args.out_dtype
    if out_dtype is None:
        out_dtype = a if args.out is None else args.out.dtype
    if a not in _DTYPES:
        raise DtypeError(f"a is {a}; gemm takes {_DTYPE_NAMES}")
    if b != a:
        raise DtypeError(f"a is {a} and b is {b}; they must have the same dtype: b.to({a})")
    if out_dtype not in _DTYPES:
        raise DtypeError(f"the output would be {out_dtype}; gemm writes {_DTYPE_NAMES}")
    return out_dtype


def _output_shape(a: torch.Tensor, b: torch.Tensor) -> torch.Size:
    if a.dim() < 2:
        raise ShapeError(
            f"a has shape {tuple(a.shape)}, not (…, M, K); a.unsqueeze(0) makes a vector one row"
        )
    if b.dim() < 2:
        raise ShapeError(
            f"b has shape {tuple(b.shape)}, not (…, K, N); b.unsqueeze(1) makes a vector one column"
        )
    shapes = f"a (…, M, K) is {tuple(a.shape)} and b (…, K, N) is {tuple(b.shape)}"
    if a.shape[-1] != b.shape[-2]:
        raise ShapeError(f"{shapes}: K is {a.shape[-1]} in a and {b.shape[-2]} in b")
    batch = _broadcast(a.shape[:-2], b.shape[:-2])
    if batch is None:
        raise ShapeError(f"{shapes}: the batch dims do not broadcast")
    return torch.Size((*batch, a.shape[-2], b.shape[-1]))


def _check_same_device(args: Arguments) -> None:
    for name, operand in (("b", args.b), ("bias", args.bias), ("c", args.c), ("out", args.out)):
        if operand is not None and operand.device != args.a.device:
            raise DeviceError(
                f"a is on {args.a.device} and {name} on {operand.device}: {name}.to({args.a.device})"
            )


def _broadcast(x: torch.Size, y: torch.Size) -> tuple[int, ...] | None:
    """The common shape, or None. torch.broadcast_shapes would import sympy first, for half a second."""
    pairs = list(zip_longest(reversed(x), reversed(y), fillvalue=1))
    if any(p != q and p != 1 and q != 1 for p, q in pairs):
        return None
    return tuple(q if p == 1 else p for p, q in reversed(pairs))
