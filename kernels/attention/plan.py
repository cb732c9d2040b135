"""From tensors to a compiled kernel and its arguments.

All that depends on shapes, strides and alignments is worked out once, in a `Plan`; a call adds the addresses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cutelab.kernels.attention.config import ForwardConfig, choose_tiling
from cutelab.kernels.attention.fa2_sm80 import FlashAttention2Forward
from cutelab.kernels.attention.problem import Arguments, check_types, infer_shapes
from cutelab.kernels.runtime.arch import Arch
from cutelab.kernels.runtime.compile import compile_kernel
from cutelab.kernels.runtime.errors import LayoutError, ShapeError
from cutelab.kernels.runtime.simulated import arch_of, compile_simulated

__all__ = ["Plan", "make_plan", "simulates_another"]

MAX_LENGTH = 2**31 - 1024  # of a sequence: 32-bit in the kernel, and the last tile may stick out
VECTOR_BYTES = 16
L2_BYTES = 16 * 2**20  # of keys and values that tiles which run at the same time may expect to share
LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Plan:
    """How to compute one signature of attention.

    shape, strides, lse_shape, lse_strides, dtype, device_index: of the results; the index is -1 on the CPU,
    in the simulator.
    arch: that it was made for.
    copies: which of q, k, v have to be copied first, as their rows aren't aligned to vectors.
    function: the compiled kernel; None for empty outputs.
    numbers: sizes, strides and factors, in the order of the kernel's arguments.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    lse_shape: tuple[int, ...]
    lse_strides: tuple[int, ...]
    dtype: torch.dtype
    device_index: int
    arch: Arch
    copies: tuple[bool, bool, bool] = (False, False, False)
    function: Callable[..., Any] | None = None
    numbers: tuple[int | float, ...] = ()


def make_plan(args: Arguments) -> Plan:
    """Checks the arguments and compiles the kernel they need. Of addresses, only the alignment counts."""
    check_types(args)
    shape, lse_shape = infer_shapes(args)
    arch = _arch_of(args)
    tensors = args.q, args.k, args.v
    for name, tensor in zip("qkv", tensors, strict=True):
        if tensor.stride(-1) != 1:
            raise LayoutError(
                f"{name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}; the last must be 1: "
                f"pass {name}.contiguous()"
            )
    for name, bounds in (("cu_seqlens_q", args.cu_seqlens_q), ("cu_seqlens_k", args.cu_seqlens_k)):
        if bounds is not None and not bounds.is_contiguous():
            raise LayoutError(f"{name} has stride {bounds.stride(0)}; it must be 1: {name}.contiguous()")
    results = shape, _row_major(shape), lse_shape, _row_major(lse_shape), args.q.dtype
    device_index = args.q.get_device()
    if 0 in shape:
        return Plan(*results, device_index, arch)

    copies = tuple(not _is_aligned(tensor) for tensor in tensors)
    strides = [
        _row_major(tensor.shape) if copied else _needed_strides(tensor)
        for tensor, copied in zip(tensors, copies, strict=True)
    ]
    sizes = Sizes.of(args)
    config, scalars = _config(args, sizes, arch)
    compile_for = compile_simulated if device_index < 0 else compile_kernel
    function = compile_for(FlashAttention2Forward(config), arch)
    numbers = (
        *(sizes.sequences, sizes.heads, sizes.key_heads, sizes.queries, sizes.keys),
        *_band(args, sizes),
        _group(sizes, config),
        *(s for x in (*strides, results[1]) for s in _kernel_strides(x)),
        *((0, *results[3][:1]) if args.varlen else results[3][:2]),
        *scalars,
    )
    numbers = tuple(0 if number is None else number for number in numbers)
    return Plan(*results, device_index, arch, copies, function, numbers)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Sizes:
    """queries, keys: of a sequence, or the most that any has."""

    sequences: int
    heads: int
    key_heads: int
    queries: int
    keys: int

    @classmethod
    def of(cls, args: Arguments) -> Sizes:
        heads, key_heads = args.q.shape[-2], args.k.shape[-2]
        if args.cu_seqlens_q is None:
            sequences, queries, keys = args.q.shape[0], args.q.shape[1], args.k.shape[1]
        else:
            assert args.max_seqlen_q is not None and args.max_seqlen_k is not None
            sequences = args.cu_seqlens_q.shape[0] - 1
            queries, keys = min(args.max_seqlen_q, args.q.shape[0]), min(args.max_seqlen_k, args.k.shape[0])
        for name, length in (("queries", queries), ("keys", keys)):
            if length > MAX_LENGTH:
                raise ShapeError(f"a sequence has {length} {name}; at most {MAX_LENGTH} are supported")
        return cls(sequences, heads, key_heads, queries, keys)


def simulates_another(plan: Plan, args: Arguments) -> bool:
    """Whether another GPU is simulated now than when the plan was made."""
    return plan.arch != _arch_of(args)


def _arch_of(args: Arguments) -> Arch:
    return arch_of(args.q, args.name, "torch.nn.functional.scaled_dot_product_attention")


def _config(args: Arguments, sizes: Sizes, arch: Arch) -> tuple[ForwardConfig, tuple[float, float]]:
    """The kernel's configuration, and its scale and factor."""
    head_dim, value_dim = args.q.shape[-1], args.v.shape[-1]
    scale = head_dim**-0.5 if args.scale is None else args.scale
    scores, scalars = "plain", (scale * LOG2_E, 1.0)
    if args.softcap > 0:
        scores, scalars = "capped", (args.softcap * LOG2_E, scale / args.softcap)
    elif scale <= 0:
        scores, scalars = "scaled", (LOG2_E, scale)
    left, right = _band(args, sizes)
    tiling = choose_tiling(head_dim, value_dim, sizes.queries, sizes.heads * sizes.sequences, arch)
    config = ForwardConfig(
        str(args.q.dtype).removeprefix("torch."),
        head_dim,
        value_dim,
        left is not None,
        right is not None,
        scores,
        args.varlen,
        **tiling,
    )
    tiles = -(-sizes.queries // config.tile[0]) * sizes.heads * sizes.sequences
    if tiles >= 2**31:
        raise ShapeError(
            f"there are {tiles} tiles of {config.tile[0]} queries; at most {2**31 - 1} are supported: "
            "split the batch"
        )
    return config, scalars


def _band(args: Arguments, sizes: Sizes) -> tuple[int | None, int | None]:
    """The sides of the window, None where they let every key be seen."""
    left, right = args.left, 0 if args.causal else args.right
    return (
        None if left is None or left >= sizes.keys - 1 else left,
        None if right is None or right >= sizes.queries - 1 else right,
    )


def _group(sizes: Sizes, config: ForwardConfig) -> int:
    """How many heads of queries have keys and values that L2 holds together; heads that share them count."""
    head_bytes = max(sizes.keys, 1) * (config.head_dim + config.value_dim) * 2
    return max(1, L2_BYTES // head_bytes) * (sizes.heads // sizes.key_heads)


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Whether every row can be copied in vectors."""
    addresses = tensor.data_ptr(), *(step * tensor.itemsize for step in _needed_strides(tensor)[:-1])
    return all(address % VECTOR_BYTES == 0 for address in addresses)


def _needed_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its strides, 0 for modes of a single element, which may have any."""
    return tuple(step if size > 1 else 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _kernel_strides(strides: tuple[int, ...]) -> tuple[int, int, int]:
    """Those of the batch, the sequence and the heads. Sequences that vary in length have no batch."""
    batch, sequence, head = (0, *strides[:-1])[-3:]
    return batch, sequence, head


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides that torch gives to a fresh tensor."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))
