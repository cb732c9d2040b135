"""What attention accepts: its arguments, their checks, and the shapes of the results.

The checks read types, dtypes, shapes and devices, never addresses, strides or the contents of tensors, so
that the fake implementations share them with the real ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cutelab.kernels.attention.config import HEAD_DIM_STEP, MAX_HEAD_DIM, legal_head_dims
from cutelab.kernels.runtime.errors import ConfigError, DeviceError, DtypeError, LayoutError, ShapeError

__all__ = ["Arguments", "check_types", "infer_shapes", "window_sides"]

_DTYPES = (torch.float16, torch.bfloat16)
_INTEGERS = (int, torch.SymInt)
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
_LARGEST = torch.finfo(torch.float32).max


class Arguments(NamedTuple):
    """The arguments of one call. What begins with cu_ or max_ is None unless sequences vary in length."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    causal: bool
    left: int | None
    right: int | None
    scale: float | None
    softcap: float

    @property
    def varlen(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def name(self) -> str:
        return "flash_attention_varlen" if self.varlen else "flash_attention"


def window_sides(window: Any) -> tuple[int | None, int | None]:
    """The two sides of ``window``. Raises ConfigError for what is no window."""
    if not (isinstance(window, (tuple, list)) and len(window) == 2):
        raise ConfigError(f"window={window!r} must be a pair (left, right); (None, None) is unbounded")
    for side in window:
        if side is not None and (not isinstance(side, _INTEGERS) or isinstance(side, bool) or side < 0):
            raise ConfigError(
                f"window={tuple(window)!r}: each side counts keys, from 0 on, or is None, which is unbounded"
            )
    left, right = window
    return left, right


def check_types(args: Arguments) -> None:
    """Raises DtypeError, LayoutError or ConfigError where an argument is of a kind that isn't taken."""
    for name in ("q", "k", "v", *(("cu_seqlens_q", "cu_seqlens_k") if args.varlen else ())):
        operand = getattr(args, name)
        if not isinstance(operand, torch.Tensor):
            raise DtypeError(f"{name} must be a torch.Tensor; got {type(operand).__name__}")
        if operand.is_nested or operand.layout is not torch.strided:
            layout = "nested" if operand.is_nested else operand.layout
            raise LayoutError(f"{name} is {layout}; {args.name} takes dense tensors: {name}.to_dense()")
    if args.scale is not None and not isinstance(args.scale, _NUMBERS):
        raise DtypeError(f"scale must be a Python number or None; got {type(args.scale).__name__}")
    if not isinstance(args.softcap, _NUMBERS):
        raise DtypeError(f"softcap must be a Python number; got {type(args.softcap).__name__}")
    if args.scale is not None and not abs(args.scale) <= _LARGEST:
        raise ConfigError(f"scale={args.scale} must be a finite float32; None is 1 / sqrt(D)")
    if not 0 <= args.softcap <= _LARGEST:
        raise ConfigError(f"softcap={args.softcap} must be a finite float32 and not negative; 0.0 is none")
    for name in ("max_seqlen_q", "max_seqlen_k") if args.varlen else ():
        length = getattr(args, name)
        if not isinstance(length, _INTEGERS):
            raise DtypeError(f"{name} must be a Python int; got {type(length).__name__}: int({name})")
        if length < 0:
            raise ShapeError(f"{name} is {length}; it must be at least 0")


def infer_shapes(args: Arguments) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of output and LSE; raises a typed error where the arguments don't fit together."""
    q, k, v = args.q, args.k, args.v
    _check_dtypes(args)
    expected = ("(T, H, D)", 3) if args.varlen else ("(B, S, H, D)", 4)
    for name, operand in (("q", q), ("k", k), ("v", v)):
        if operand.dim() != expected[1]:
            raise ShapeError(
                f"{name} has shape {tuple(operand.shape)}; {args.name} takes {expected[0]}"
                + ("" if args.varlen or operand.dim() != 3 else f": {name}[None] is a batch of one")
            )
    shapes = f"q is {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"
    if k.shape[:-1] != v.shape[:-1]:
        raise ShapeError(f"{shapes}: k and v must agree in all but the head dim")
    if q.shape[-1] != k.shape[-1]:
        raise ShapeError(f"{shapes}: q and k must have the same head dim")
    if not args.varlen and q.shape[0] != k.shape[0]:
        raise ShapeError(f"{shapes}: q, k and v must have the same batch size")
    heads, key_heads = q.shape[-2], k.shape[-2]
    if heads and (not key_heads or heads % key_heads):
        fitting = [n for n in range(1, heads + 1) if heads % n == 0]
        nearest = min(fitting, key=lambda n: abs(n - key_heads))
        raise ShapeError(
            f"q has {heads} heads and k and v have {key_heads}: the first must be a multiple of the second; "
            f"the nearest that divides {heads} is {nearest}"
        )
    for name, operand in (("q and k", q), ("v", v)):
        head_dim = operand.shape[-1]
        if head_dim % HEAD_DIM_STEP or not HEAD_DIM_STEP <= head_dim <= MAX_HEAD_DIM:
            raise ShapeError(
                f"the head dim of {name} is {head_dim}: it must be {legal_head_dims(head_dim)}"
                + (", to which torch.nn.functional.pad pads with zeros" if head_dim < MAX_HEAD_DIM else "")
            )
    if args.varlen:
        _check_bounds(args)
        return (q.shape[0], heads, v.shape[-1]), (heads, q.shape[0])
    return (*q.shape[:-1], v.shape[-1]), (q.shape[0], heads, q.shape[1])


def _check_dtypes(args: Arguments) -> None:
    q = args.q
    if q.dtype not in _DTYPES:
        raise DtypeError(f"q is {q.dtype}; {args.name} takes torch.float16 and torch.bfloat16: q.half()")
    for name, operand in (("k", args.k), ("v", args.v)):
        if operand.dtype != q.dtype:
            raise DtypeError(
                f"q is {q.dtype} and {name} {operand.dtype}; all must have the same dtype: "
                f"{name}.to({q.dtype})"
            )
    names = ("k", "v", "cu_seqlens_q", "cu_seqlens_k") if args.varlen else ("k", "v")
    for name in names:
        if (device := getattr(args, name).device) != q.device:
            raise DeviceError(f"q is on {q.device} and {name} on {device}: {name}.to({q.device})")


def _check_bounds(args: Arguments) -> None:
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        bounds = getattr(args, name)
        if bounds.dtype != torch.int32:
            raise DtypeError(f"{name} is {bounds.dtype}; it must be torch.int32: {name}.int()")
        if bounds.dim() != 1 or bounds.shape[0] < 1:
            raise ShapeError(
                f"{name} has shape {tuple(bounds.shape)}; it must be (B + 1,): where each of B sequences "
                "begins, from 0 on, and where the last one ends"
            )
    q_bounds, k_bounds = args.cu_seqlens_q, args.cu_seqlens_k
    assert q_bounds is not None and k_bounds is not None
    if q_bounds.shape != k_bounds.shape:
        raise ShapeError(
            f"cu_seqlens_q has {q_bounds.shape[0]} entries and cu_seqlens_k {k_bounds.shape[0]}; "
            "both count the same sequences"
        )
