"""Layouts as functions: evaluated at one coordinate, at all of them, and compared."""

from operator import index
from typing import Any

import cutlass.cute as cute
import numpy as np


class CoordinateError(ValueError):
    """A coordinate that a layout's shape does not contain."""


def evaluate(layout: cute.Layout | cute.ComposedLayout, coord: Any) -> Any:
    """`layout(coord)` for a coordinate that is checked first; the DSL itself extrapolates.

    `coord` may give an integer for a nested mode, as everywhere in CuTe; leaves may be NumPy integers. Raises
    `CoordinateError` if it does not fit `layout.shape` or lies outside.
    """
    return layout(_checked(coord, layout.shape, f"coordinate {coord} of shape {layout.shape}"))


def _checked(coord: Any, shape: Any, where: str) -> Any:
    if isinstance(coord, tuple):
        if not isinstance(shape, tuple) or len(coord) != len(shape):
            raise CoordinateError(f"{where}: {coord} does not fit the profile of {shape}")
        return tuple(_checked(c, s, where) for c, s in zip(coord, shape, strict=True))
    size = cute.size(shape)
    try:
        value = index(coord)
    except TypeError:
        raise CoordinateError(f"{where}: {coord!r} is not an integer") from None
    if not 0 <= value < size:
        raise CoordinateError(f"{where}: {value} is not in [0, {size})")
    return value


def as_numpy(layout: cute.Layout | cute.ComposedLayout) -> np.ndarray:
    """The offset of every coordinate, as int64 of shape (size of mode 0, size of mode 1, ...).

    A nested mode becomes one axis, in CuTe's order: its leftmost mode varies fastest. Takes static layouts
    with integer strides, and compositions of a swizzle or such a layout with one; else raises TypeError.
    """
    if isinstance(layout, cute.Layout):
        return _offsets(layout)
    offsets = _offsets(layout.outer) + _integer(layout.offset, layout)
    inner = layout.inner
    if isinstance(inner, cute.Swizzle):
        return _swizzle(inner, offsets)
    if isinstance(inner, cute.Layout):
        return _at_index(inner, offsets)
    raise TypeError(f"cannot tabulate {layout}: its inner function is neither a swizzle nor a layout")


def same_function(a: cute.Layout | cute.ComposedLayout, b: cute.Layout | cute.ComposedLayout) -> bool:
    """Whether `a` and `b` have the same size and the same offset at every linear index.

    `a == b`, the DSL's own comparison, asks more: the same shape and strides as well.
    """
    return bool(np.array_equal(as_numpy(a).ravel(order="F"), as_numpy(b).ravel(order="F")))


def _integer(value: Any, layout: Any) -> int:
    if isinstance(value, int):
        return value
    raise TypeError(f"cannot tabulate {layout}: {value} is not a static integer")


def _modes(layout: cute.Layout) -> list[tuple[int, int]]:
    """(size, stride) of the flattened layout, first mode first."""
    flat = cute.flatten(layout)
    shape, stride = cute.flatten_to_tuple(flat.shape), cute.flatten_to_tuple(flat.stride)
    return [(_integer(s, layout), _integer(d, layout)) for s, d in zip(shape, stride, strict=True)]


def _offsets(layout: cute.Layout) -> np.ndarray:
    """The offsets of a layout: one axis for each top-level mode."""
    if not isinstance(layout.shape, tuple):
        return _flat_offsets(layout)
    table = np.zeros((), np.int64)
    for mode in range(cute.rank(layout)):
        table = table[..., None] + _flat_offsets(cute.get(layout, mode=[mode]))
    return table


def _flat_offsets(layout: cute.Layout) -> np.ndarray:
    """The offset at every linear index."""
    offsets = np.zeros(1, np.int64)
    for size, stride in _modes(layout):
        offsets = (offsets + stride * np.arange(size, dtype=np.int64)[:, None]).ravel()
    return offsets


def _at_index(layout: cute.Layout, index: np.ndarray) -> np.ndarray:
    """The offsets at linear indices; beyond the end the last mode goes on, as in CuTe."""
    *modes, (_, last_stride) = _modes(layout)
    offsets = np.zeros_like(index)
    for size, stride in modes:
        offsets += index % size * stride
        index = index // size
    return offsets + index * last_stride


def _swizzle(swizzle: cute.Swizzle, offsets: np.ndarray) -> np.ndarray:
    """XOR `num_bits` bits, from bit `num_base` on, with those `num_shift` bits higher (lower if negative)."""
    shift = swizzle.num_shift
    source = ((1 << swizzle.num_bits) - 1) << (swizzle.num_base + max(shift, 0))
    bits = offsets & source
    return offsets ^ (bits >> shift if shift >= 0 else bits << -shift)
