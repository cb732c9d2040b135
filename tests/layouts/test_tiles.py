"""Tiles of shared memory, and the threads that fill them."""

from itertools import product

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
from cutlass.cute.nvgpu import CopyUniversalOp

from cutelab.layouts import (
    TileError,
    as_numpy,
    copy_threads,
    in_bytes,
    owners,
    smem_tile,
    swizzled_tensor,
    tma_tile,
    tv_map,
)

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


def test_the_order_says_which_mode_the_atoms_follow_first():
    """Atoms of 8 x 64 elements of 16 bits: along the rows first, or along the columns, or stage by stage."""

    def atoms(order, shape=(16, 128, 2)):
        return as_numpy(smem_tile(shape, 1, 16, order=order))[::8, ::64] // (8 * 64)

    assert atoms(None).ravel(order="F").tolist() == list(range(8))
    assert atoms((0, 1, 2)).ravel(order="F").tolist() == list(range(8))
    assert atoms((1, 0, 2)).swapaxes(0, 1).ravel(order="F").tolist() == list(range(8))
    assert atoms((1, 2, 0)).transpose(2, 0, 1).ravel(order="F").tolist() == list(range(8))


TMA_TILES = [
    (shape if contiguous == 1 else (shape[1], shape[0], *shape[2:]), contiguous, bits)
    for contiguous in (1, 0)
    for shape, bits in [
        ((24, 16), 16),
        ((64, 32), 16),
        ((64, 64, 3), 16),
        ((40, 128, 2), 16),
        ((64, 8), 32),
        ((24, 16, 2), 32),
        ((64, 64), 32),
        ((64, 128, 2), 8),
    ]
]


@pytest.mark.parametrize(("shape", "contiguous", "bits"), TMA_TILES)
def test_a_tma_tile_is_a_row_of_boxes(shape, contiguous, bits):
    """Each box as wide as a swizzle can be, up to 128 bytes, and a run of memory, line after line; the stages
    follow one another."""
    layout = tma_tile(shape, contiguous, bits)
    lines = as_numpy(layout.outer) * bits // 8
    lines = lines if contiguous == 1 else lines.swapaxes(0, 1)
    per_line = lines.shape[1] * bits // 8
    width = min(per_line, 128)
    stage = lines.shape[0] * per_line
    for line, column, *number in np.ndindex(lines.shape):
        byte = column * bits // 8
        box = byte // width * width * lines.shape[0]
        expected = sum(number) * stage + box + line * width + byte % width
        assert lines[(line, column, *number)] == expected


@pytest.mark.parametrize(("shape", "contiguous", "bits"), TMA_TILES)
def test_a_tma_tile_swizzles_bytes_as_smem_tile_does_elements(shape, contiguous, bits):
    """Its swizzle counts bytes, 16 at a time, as the pointer does that it goes with."""
    order = (0, 1, 2) if contiguous == 1 else (1, 0, 2)
    layout, in_elements = (
        tma_tile(shape, contiguous, bits),
        smem_tile(shape, contiguous, bits, order=order[: len(shape)]),
    )
    width = min(shape[contiguous] * bits // 8, 128)
    assert (
        layout.inner
        == in_bytes(in_elements.inner, bits // 8)
        == cute.make_swizzle(width.bit_length() - 5, 4, 3)
    )
    address = as_numpy(layout.outer) * bits // 8
    swizzled = address ^ (address >> 7 & width // 16 - 1) << 4
    assert np.array_equal(swizzled, as_numpy(in_elements) * bits // 8)


def test_a_swizzled_tensor_has_its_swizzle_in_the_pointer():
    seen = []

    @cute.jit
    def traced():
        pointer = cute.make_ptr(cutlass.Uint8, 0, cute.AddressSpace.smem, assumed_align=1024)
        tensor = swizzled_tensor(pointer, tma_tile((64, 32, 2), 1, 16), cutlass.Float16)
        seen.append((tensor.element_type, str(tensor.iterator.type), str(tensor.layout)))

    traced()
    dtype, pointer, layout = seen[0]
    assert dtype is cutlass.Float16 and "S<2,4,3>" in pointer
    assert layout == str(tma_tile((64, 32, 2), 1, 16).outer)


@pytest.mark.parametrize(
    ("shape", "contiguous", "bits"),
    [
        ((12, 64), 1, 16),
        ((64, 12), 0, 16),
        ((64, 40), 1, 16),
        ((64, 12), 1, 32),
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
