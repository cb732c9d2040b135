"""Thread-value maps against the DSL's own partitions, thread by thread, and against the PTX ISA's tables."""

import threading

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync, warp

from cutelab.layouts import owners, tv_map


def f16_mma(warps=(2, 2, 1), permutation=None):
    op = warp.MmaF16BF16Op(cutlass.Float16, cutlass.Float32, (16, 8, 16))
    return cute.make_tiled_mma(op, warps, permutation_mnk=permutation)


def bf16_m16n8k8():
    op = warp.MmaF16BF16Op(cutlass.BFloat16, cutlass.Float32, (16, 8, 8))
    return cute.make_tiled_mma(op, (2, 2, 1))


def tf32_mma():
    return cute.make_tiled_mma(warp.MmaTF32Op((16, 8, 8)), (2, 2, 1), permutation_mnk=(32, 32, 8))


def interleaved():
    """The warps along N take turns of eight columns: a permutation that is more than a size."""
    return f16_mma(permutation=(32, cute.make_layout((8, 2, 2), stride=(1, 16, 8)), 16))


MMAS = {
    "one warp": lambda: f16_mma((1, 1, 1)),
    "2 x 2 warps": f16_mma,
    "2 x 2 warps, two atoms along N": lambda: f16_mma(permutation=(32, 32, 16)),
    "4 x 1 warps, two atoms along K": lambda: f16_mma((4, 1, 1), (64, 16, 32)),
    "two warps along K": lambda: f16_mma((1, 1, 2)),
    "interleaved": interleaved,
    "bf16 m16n8k8": bf16_m16n8k8,
    "tf32": tf32_mma,
}


def tile_copy(op, dtype, bits, threads, values):
    return cute.make_tiled_copy_tv(cute.make_copy_atom(op, dtype, num_bits_per_copy=bits), threads, values)


def rows(op, dtype, bits):
    """32 x 4 threads, each with one vector along the columns."""
    vector = cute.make_layout((1, bits // dtype.width))
    return tile_copy(op, dtype, bits, cute.make_layout((32, 4), stride=(4, 1)), vector)


def columns(op, dtype, bits):
    vector = cute.make_layout((bits // dtype.width, 1))
    return tile_copy(op, dtype, bits, cute.make_layout((4, 32)), vector)


def ldmatrix(make, transpose, matrices, mma):
    return make(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose, matrices), cutlass.Float16), mma)


def wide_mma():
    return f16_mma(permutation=(32, 32, 16))


COPIES = {
    "cp.async 128 bits": lambda: rows(cpasync.CopyG2SOp(), cutlass.Float16, 128),
    "cp.async 32 bits": lambda: columns(cpasync.CopyG2SOp(), cutlass.BFloat16, 32),
    "universal 128 bits": lambda: columns(CopyUniversalOp(), cutlass.Float32, 128),
    "universal 16 bits": lambda: rows(CopyUniversalOp(), cutlass.Float16, 16),
    "universal, three vectors": lambda: tile_copy(
        CopyUniversalOp(),
        cutlass.Float16,
        64,
        cute.make_layout((8, 4)),
        cute.make_layout((3, 4), stride=(4, 1)),
    ),
    "universal, one mode": lambda: tile_copy(
        CopyUniversalOp(), cutlass.Float16, 32, cute.make_layout(32), cute.make_layout(4)
    ),
    "ldmatrix x4, A": lambda: ldmatrix(cute.make_tiled_copy_A, False, 4, wide_mma()),
    "ldmatrix x4 transposed, A": lambda: ldmatrix(cute.make_tiled_copy_A, True, 4, wide_mma()),
    "ldmatrix x4, B": lambda: ldmatrix(cute.make_tiled_copy_B, False, 4, wide_mma()),
    "ldmatrix x4 transposed, B": lambda: ldmatrix(cute.make_tiled_copy_B, True, 4, wide_mma()),
    "ldmatrix x2, B": lambda: ldmatrix(cute.make_tiled_copy_B, False, 2, f16_mma()),
    "ldmatrix x4, B interleaved": lambda: ldmatrix(cute.make_tiled_copy_B, False, 4, interleaved()),
    "accumulators": lambda: cute.make_tiled_copy_C(
        cute.make_copy_atom(CopyUniversalOp(), cutlass.Float32), wide_mma()
    ),
}


def tile_shape(coordinates):
    return tuple((coordinates.max(axis=(0, 1)) + 1).tolist())


def assert_matches(coordinates, partition):
    """`partition(thread, identity tensor of the tile)` holds the coordinates in row `thread`, in order."""
    tile = cute.make_identity_tensor(tile_shape(coordinates))
    for thread, row in enumerate(coordinates.tolist()):
        share = partition(thread, tile)
        assert [list(share[value]) for value in range(cute.size(share))] == row


@pytest.mark.parametrize("name", MMAS)
def test_mma_maps_are_the_partitions(name):
    mma = MMAS[name]()
    a, b, c = (tv_map(mma, operand) for operand in "ABC")
    m, n, k = (mma.get_tile_size(mode) for mode in range(3))
    assert (tile_shape(a), tile_shape(b), tile_shape(c)) == ((m, k), (n, k), (m, n))
    assert a.shape[0] == b.shape[0] == c.shape[0] == mma.size
    assert_matches(a, lambda thread, tile: mma.get_slice(thread).partition_A(tile))
    assert_matches(b, lambda thread, tile: mma.get_slice(thread).partition_B(tile))
    assert_matches(c, lambda thread, tile: mma.get_slice(thread).partition_C(tile))


@pytest.mark.parametrize("name", COPIES)
def test_copy_maps_are_the_partitions(name):
    copy = COPIES[name]()
    assert_matches(tv_map(copy, "src"), lambda thread, tile: copy.get_slice(thread).partition_S(tile))
    assert_matches(tv_map(copy, "dst"), lambda thread, tile: copy.get_slice(thread).partition_D(tile))


def test_fragments_of_m16n8k16_are_those_of_the_ptx_isa():
    """PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type"."""
    mma = f16_mma((1, 1, 1))
    lane = np.arange(32)[:, None]
    group, thread_in_group = lane // 4, lane % 4

    i = np.arange(8)
    row = np.where((i < 2) | ((i >= 4) & (i < 6)), group, group + 8)
    column = np.where(i < 4, thread_in_group * 2 + (i & 1), thread_in_group * 2 + (i & 1) + 8)
    assert np.array_equal(tv_map(mma, "A"), np.stack([row, column], axis=-1))

    i = np.arange(4)
    k = np.where(i < 2, thread_in_group * 2 + (i & 1), thread_in_group * 2 + (i & 1) + 8)
    n = np.broadcast_to(group, k.shape)
    assert np.array_equal(tv_map(mma, "B"), np.stack([n, k], axis=-1))

    row = np.where(i < 2, group, group + 8)
    column = thread_in_group * 2 + (i & 1)
    assert np.array_equal(tv_map(mma, "C"), np.stack([row, column], axis=-1))


@pytest.mark.parametrize("transpose", [False, True])
def test_ldmatrix_fills_the_fragment_of_the_mma(transpose):
    mma = wide_mma()
    for make, operand in [(cute.make_tiled_copy_A, "A"), (cute.make_tiled_copy_B, "B")]:
        loaded = tv_map(ldmatrix(make, transpose, 4, mma), "dst")
        wanted = tv_map(mma, operand)
        assert np.array_equal(np.sort(loaded.view("i8,i8")[..., 0]), np.sort(wanted.view("i8,i8")[..., 0]))


@pytest.mark.parametrize("transpose", [False, True])
def test_a_lane_of_ldmatrix_points_at_eight_neighbours(transpose):
    src = tv_map(ldmatrix(cute.make_tiled_copy_A, transpose, 4, wide_mma()), "src")
    along = 0 if transpose else 1
    assert np.array_equal(np.diff(src, axis=1)[..., along], np.ones((128, 7)))
    assert np.array_equal(np.diff(src, axis=1)[..., 1 - along], np.zeros((128, 7)))


@pytest.mark.parametrize("name", MMAS)
def test_owners_inverts_the_map(name):
    mma = MMAS[name]()
    for operand in "ABC":
        coordinates = tv_map(mma, operand)
        thread, value = owners(coordinates)
        assert thread.shape == value.shape == (*tile_shape(coordinates), thread.shape[-1])
        assert thread.size == coordinates.shape[0] * coordinates.shape[1]
        element = np.moveaxis(np.indices(thread.shape)[:2], 0, -1)
        assert np.array_equal(coordinates[thread, value], element)
        assert (np.diff(thread, axis=-1) >= 0).all()


def test_warps_along_n_hold_copies_of_a_and_those_along_m_of_b():
    mma = f16_mma((2, 2, 1))
    assert owners(tv_map(mma, "A")).thread[0, 0].tolist() == [0, 64]
    assert owners(tv_map(mma, "B")).thread[0, 0].tolist() == [0, 32]
    assert owners(tv_map(mma, "C")).thread[0, 0].tolist() == [0]


def test_elements_with_fewer_owners_are_marked():
    coordinates = np.array([[[0, 0], [0, 2]], [[0, 0], [1, 1]]])
    thread, value = owners(coordinates)
    assert thread.tolist() == [[[0, 1], [-1, -1], [0, -1]], [[-1, -1], [1, -1], [-1, -1]]]
    assert value.tolist() == [[[0, 0], [-1, -1], [1, -1]], [[-1, -1], [1, -1], [-1, -1]]]


@pytest.mark.parametrize(("make", "operand"), [(f16_mma, "src"), (COPIES["cp.async 128 bits"], "A")])
def test_other_operands_are_refused(make, operand):
    with pytest.raises(ValueError, match=rf"has operands .*; got '{operand}'"):
        tv_map(make(), operand)


def test_a_fresh_thread_reads_maps_of_objects_made_elsewhere():
    copy, mma, seen = COPIES["ldmatrix x4, B"](), wide_mma(), []
    thread = threading.Thread(target=lambda: seen.extend([tv_map(copy, "src"), tv_map(mma, "C")]))
    thread.start()
    thread.join()
    assert np.array_equal(seen[0], tv_map(copy, "src")) and np.array_equal(seen[1], tv_map(mma, "C"))
