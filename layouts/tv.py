"""Thread-value maps: which element of the tile each value of each thread is, and who owns an element.

A TiledCopy or TiledMma shares a tile out among threads. Its TV layout takes (thread, value) to a linear index
into the tile; here the index is a coordinate, which is how a reader looks at a tile.
"""

from typing import NamedTuple

import cutlass.cute as cute
import numpy as np

from cutelab.layouts.arrays import as_numpy


def tv_map(tiled: cute.TiledCopy | cute.TiledMma, operand: str) -> np.ndarray:
    """The coordinate in the tile of each value of each thread: int64 of shape (threads, values, tile's rank).

    `operand` is "src" or "dst" of a TiledCopy, whose tile is its tiler; or "A" (M, K), "B" (N, K) or "C"
    (M, N) of a TiledMma, whose tile is what one call of all its atoms covers. Row t lists, in order, what
    `tiled.get_slice(t)` partitions off a tensor of that size. Raises ValueError for another operand.
    """
    layouts = _copy_layouts(tiled) if isinstance(tiled, cute.TiledCopy) else _mma_layouts(tiled)
    if operand not in layouts:
        raise ValueError(f"{type(tiled).__name__} has operands {', '.join(layouts)}; got {operand!r}")
    tv_layout, tiler = layouts[operand]
    modes = [as_numpy(mode).ravel(order="F") for mode in tiler]
    in_modes = np.unravel_index(as_numpy(tv_layout), [len(mode) for mode in modes], order="F")
    return np.stack([mode[i] for mode, i in zip(modes, in_modes, strict=True)], axis=-1)


class Owners(NamedTuple):
    """Who holds each element: arrays of the tile's shape, with a last axis for its copies, ordered by thread.

    Operands have copies: all warps along N hold the same A. Past an element's last copy, both arrays are -1.
    """

    thread: np.ndarray
    value: np.ndarray


def owners(coordinates: np.ndarray) -> Owners:
    """The inverse of a thread-value map: which (thread, value) hold each element of the tile."""
    shape = coordinates.max(axis=(0, 1)) + 1
    element = np.ravel_multi_index(tuple(np.moveaxis(coordinates, -1, 0)), shape).ravel()
    by_element = np.argsort(element, kind="stable")
    element = element[by_element]
    copy = np.arange(element.size) - np.searchsorted(element, element)
    table = np.full((2, shape.prod(), copy.max() + 1), -1)
    table[:, element, copy] = np.unravel_index(by_element, coordinates.shape[:2])
    return Owners(*table.reshape(2, *shape, -1))


def _copy_layouts(copy: cute.TiledCopy) -> dict[str, tuple[cute.Layout, list[cute.Layout]]]:
    src, dst = copy.layout_src_tv_tiled, copy.layout_dst_tv_tiled
    tiler = list(copy.tiler_mn)
    return {"src": (src, tiler), "dst": (dst, tiler)}


def _mma_layouts(mma: cute.TiledMma) -> dict[str, tuple[cute.Layout, list[cute.Layout]]]:
    a, b, c = mma.tv_layout_A_tiled, mma.tv_layout_B_tiled, mma.tv_layout_C_tiled
    m, n, k = (cute.make_layout(mma.get_tile_size(mode)) for mode in range(3))
    return {"A": (a, [m, k]), "B": (b, [n, k]), "C": (c, [m, n])}
