"""Tile copies: which thread moves which element, and how wide."""

from itertools import product

import cutlass
import numpy as np
import pytest
from cutlass.cute.nvgpu import CopyUniversalOp
from cutlass.cute.nvgpu.cpasync import CopyG2SOp

from cutelab.copies import copy_atom, tile_copy
from cutelab.layouts import TileError, owners, tv_map

SHAPES = [(128, 64), (128, 32), (64, 64), (128, 256)]
CASES = [
    (dtype, shape, contiguous, vector_bytes, threads)
    for dtype, shape, contiguous, threads in product(
        (cutlass.BFloat16, cutlass.Float32), SHAPES, (0, 1), (128, 256)
    )
    for vector_bytes in (16, 8, 4, 2)
    if vector_bytes * 8 >= dtype.width
]


@pytest.mark.parametrize(("dtype", "shape", "contiguous", "vector_bytes", "threads"), CASES)
def test_threads_share_the_tile(dtype, shape, contiguous, vector_bytes, threads):
    """One step of the copy moves each element of its tiler once; the tiler divides the tile."""
    tiled_copy = tile_copy(dtype, shape, contiguous, vector_bytes, threads)
    coordinates = tv_map(tiled_copy, "src")  # (threads, values, 2)
    assert coordinates.shape[:2] == (threads, vector_bytes * 8 // dtype.width)
    tiler = coordinates.reshape(-1, 2).max(axis=0) + 1
    assert all(extent % step == 0 for extent, step in zip(shape, tiler, strict=True))
    assert (owners(coordinates).thread >= 0).sum() == threads * coordinates.shape[1] == tiler.prod()


@pytest.mark.parametrize(("dtype", "shape", "contiguous", "vector_bytes", "threads"), CASES)
def test_vectors_lie_along_the_contiguous_mode(dtype, shape, contiguous, vector_bytes, threads):
    """A thread's values are neighbours; so are those of neighbouring threads, up to the end of a line."""
    coordinates = tv_map(tile_copy(dtype, shape, contiguous, vector_bytes, threads), "src")
    steps = np.diff(coordinates, axis=1)
    assert (steps[..., contiguous] == 1).all() and (steps[..., 1 - contiguous] == 0).all()
    line = min(shape[contiguous] * dtype.width // 8, vector_bytes * 32, 128) // vector_bytes
    first = coordinates[:line, 0, contiguous]
    assert np.array_equal(first, np.arange(line) * coordinates.shape[1])


def test_cp_async_wherever_it_exists():
    """PTX ISA, "cp.async": 4, 8 or 16 bytes."""
    for vector_bytes, operation in ((16, CopyG2SOp), (8, CopyG2SOp), (4, CopyG2SOp), (2, CopyUniversalOp)):
        atom = copy_atom(cutlass.BFloat16, vector_bytes, asynchronous=True)
        assert isinstance(atom.op, operation)
    assert isinstance(copy_atom(cutlass.BFloat16, 16, asynchronous=False).op, CopyUniversalOp)


def test_a_tile_that_threads_cannot_share_is_refused():
    with pytest.raises(TileError, match="12 must divide 64"):
        tile_copy(cutlass.BFloat16, (64, 64), 1, 16, 96)
