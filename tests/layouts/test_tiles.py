"""Tiles of shared memory, and the threads that fill them."""

from itertools import product

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
from cutlass.cute.nvgpu import CopyUniversalOp

from cutelab.layouts import TileError, as_numpy, copy_threads, owners, smem_tile, tv_map

SHAPES = [(128, 64), (128, 32), (64, 128), (32, 64), (16, 16), (256, 64)]
TILES = list(product(SHAPES, [0, 1], [16, 32]))  # shape, contiguous mode, bits of an element


def chunks(shape, contiguous, bits):
    """Byte offsets of the 16-byte chunks of a tile: a row for each line of the contiguous mode."""
    table = as_numpy(smem_tile(shape, contiguous, bits)) * bits // 8
    return (table if contiguous == 1 else table.T)[:, :: 128 // bits]


def bank_groups(chunk):
    return chunk // 16 % 8


@pytest.mark.parametrize(("shape", "contiguous", "bits"), TILES)
def test_a_tile_is_a_permutation_that_keeps_chunks_whole(shape, contiguous, bits):
    layout = smem_tile(shape, contiguous, bits)
    table = as_numpy(layout)
    assert table.shape == shape
    assert sorted(table.ravel().tolist()) == list(range(shape[0] * shape[1]))
    lines = (table if contiguous == 1 else table.T).reshape(-1, 128 // bits)
    assert (np.diff(lines, axis=1) == 1).all() and (lines[:, 0] % (128 // bits) == 0).all()


@pytest.mark.parametrize(("shape", "contiguous", "bits"), TILES)
def test_eight_lines_have_their_chunks_in_eight_bank_groups(shape, contiguous, bits):
    """What one 8 x 8 matrix of ldmatrix reads."""
    lines = bank_groups(chunks(shape, contiguous, bits)).reshape(-1, 8, shape[contiguous] * bits // 128)
    assert all(sorted(group) == list(range(8)) for block in lines for group in block.T)


@pytest.mark.parametrize(("shape", "contiguous", "bits"), TILES)
def test_eight_chunks_in_a_row_are_in_eight_bank_groups(shape, contiguous, bits):
    """What eight neighbouring threads of a copy write: 128 bytes along a line, or several short ones."""
    row = bank_groups(chunks(shape, contiguous, bits))
    width = min(row.shape[1], 8)
    blocks = row.reshape(row.shape[0] * width // 8, 8 // width, -1, width).swapaxes(1, 2).reshape(-1, 8)
    assert all(sorted(block) == list(range(8)) for block in blocks)


def test_stages_follow_one_another():
    one, three = smem_tile((64, 32), 1, 16), smem_tile((64, 32, 3), 1, 16)
    assert np.array_equal(as_numpy(three), as_numpy(one)[..., None] + 64 * 32 * np.arange(3))


@pytest.mark.parametrize(
    ("shape", "contiguous", "bits"),
    [
        ((12, 64), 1, 16),
        ((64, 12), 0, 16),
        ((64, 96), 1, 16),
        ((64, 48), 1, 32),
        ((64, 8), 1, 16),
        ((8, 24), 1, 16),
    ],
)
def test_what_the_atom_does_not_divide_is_refused_with_both_shapes(shape, contiguous, bits):
    with pytest.raises(TileError, match=rf"tile \({shape[0]}, {shape[1]}\) .* 8 x \d+ atoms"):
        smem_tile(shape, contiguous, bits)


@pytest.mark.parametrize(
    ("shape", "contiguous", "vector", "threads"),
    [
        ((128, 32), 1, 8, 128),
        ((128, 64), 1, 8, 256),
        ((32, 128), 0, 8, 128),
        ((128, 32), 1, 1, 128),
        ((64, 24), 1, 8, 96),
    ],
)
def test_threads_cover_the_tile_along_the_contiguous_mode(shape, contiguous, vector, threads):
    atom = cute.make_copy_atom(CopyUniversalOp(), cutlass.Float16, num_bits_per_copy=16 * vector)
    copy = cute.make_tiled_copy_tv(atom, *copy_threads(shape, contiguous, vector, threads))
    coordinates = tv_map(copy, "src")
    assert coordinates.shape[:2] == (threads, vector)

    owner = owners(coordinates).thread
    assert owner.shape[-1] == 1 and owner.min() == 0  # each element once, none left out
    assert all(extent % tiler == 0 for extent, tiler in zip(shape, owner.shape[:2], strict=True))
    line = owner[..., 0] if contiguous == 1 else owner[..., 0].T
    assert line[0].tolist() == np.arange(line.shape[1] // vector).repeat(vector).tolist()


def test_threads_that_do_not_fit_are_refused():
    with pytest.raises(TileError, match=r"128 threads with vectors of 8 elements .* \(24, 32\) tile"):
        copy_threads((24, 32), 1, 8, 128)
    with pytest.raises(TileError, match="vectors of 8 elements"):
        copy_threads((128, 36), 1, 8, 128)
