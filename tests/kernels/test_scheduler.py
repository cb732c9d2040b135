"""The order of the output tiles, computed by the kernel's own code on the host."""

import functools

import cutlass.cute as cute
import numpy as np
import pytest
from cutlass import Constexpr, Int32
from cutlass.cute.runtime import from_dlpack

from cutelab.kernels.dense_gemm.scheduler import GroupedRaster, Schedule


@cute.jit
def record(raster: Constexpr, m: Int32, n: Int32, l0: Int32, l1: Int32, order: cute.Tensor):
    for block in range(order.shape[0]):
        m_tile, n_tile, batch = raster.tile(block, (m, n), (l0, l1))
        order[block, 0], order[block, 1], order[block, 2], order[block, 3] = (
            m_tile,
            n_tile,
            batch[0],
            batch[1],
        )


def tiles(group, m, n, l0=1, l1=1):
    order = np.full((m * n * l0 * l1, 4), -1, dtype=np.int32)
    record(GroupedRaster(group), m, n, l0, l1, from_dlpack(order))
    return order


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (8, 8), (9, 5), (7, 1), (1, 7), (17, 3)])
@pytest.mark.parametrize(("l0", "l1"), [(1, 1), (2, 3)])
def test_each_tile_is_computed_once(group, m, n, l0, l1):
    order = tiles(group, m, n, l0, l1)
    assert len(np.unique(order, axis=0)) == len(order)
    assert (order >= 0).all() and (order.max(axis=0) == np.array([m, n, l0, l1]) - 1).all()


def test_blocks_go_down_the_columns_of_a_group():
    order = tiles(4, 6, 3)[:, :2].tolist()
    first = [[row, column] for column in range(3) for row in range(4)]
    second = [[row, column] for column in range(3) for row in (4, 5)]  # the last group is smaller
    assert order == first + second


@cute.jit
def record_pieces(workers: Int32, tiles: Int32, shared: Int32, k_tiles: Int32, found: cute.Tensor):
    """Into `found`: worker, tile, first k-tile, end; and how far the workers up to it have come."""
    row = Int32(0)
    for worker in range(workers):
        schedule = Schedule(worker, workers, tiles, shared, k_tiles)
        for number in range(schedule.pieces()):
            piece = schedule.piece(number)
            found[row, 0], found[row, 1], found[row, 2], found[row, 3] = (
                worker,
                piece.tile,
                piece.k_begin,
                piece.k_end,
            )
            found[row, 4] = schedule.covered(worker, piece.tile)
            row += 1


@functools.cache
def pieces(workers, tiles, shared, k_tiles):
    found = np.full((tiles + 2 * workers, 5), -1, dtype=np.int32)
    record_pieces(workers, tiles, shared, k_tiles, from_dlpack(found))
    return found[found[:, 0] >= 0]


SCHEDULES = [
    (workers, tiles, shared, k_tiles)
    for workers in (1, 2, 5, 66)
    for tiles in (1, 2, 7, 66, 67, 200)
    for shared in {0, min(tiles, 1), tiles % workers, min(tiles, tiles % workers + workers), tiles}
    for k_tiles in (1, 2, 3, 64)
]


@pytest.mark.parametrize(("workers", "tiles", "shared", "k_tiles"), SCHEDULES)
def test_each_k_tile_is_multiplied_once(workers, tiles, shared, k_tiles):
    times = np.zeros((tiles, k_tiles), int)
    for _, tile, begin, end, _ in pieces(workers, tiles, shared, k_tiles):
        assert 0 <= begin < end <= k_tiles
        times[tile, begin:end] += 1
        assert tile < shared or (begin, end) == (0, k_tiles)
    assert (times == 1).all()


@pytest.mark.parametrize(("workers", "tiles", "shared", "k_tiles"), SCHEDULES)
def test_shared_work_is_dealt_evenly_and_first(workers, tiles, shared, k_tiles):
    found = pieces(workers, tiles, shared, k_tiles)
    is_shared = found[:, 1] < shared
    counts = [(found[is_shared & (found[:, 0] == w), 3] - found[is_shared & (found[:, 0] == w), 2]).sum()
              for w in range(workers)]  # fmt: skip
    assert max(counts) - min(counts) <= 1
    for worker in range(workers):
        mine = is_shared[found[:, 0] == worker]
        assert (np.sort(mine)[::-1] == mine).all()


@pytest.mark.parametrize(("workers", "tiles", "shared", "k_tiles"), SCHEDULES)
def test_who_begins_a_tile_knows_whom_to_wait_for(workers, tiles, shared, k_tiles):
    """The parts after the first are the first pieces of the workers after it, which so wait for nobody."""
    found = pieces(workers, tiles, shared, k_tiles)
    for tile in range(shared):
        parts = found[found[:, 1] == tile]
        sharing = found[found[:, 1] < shared, 0]
        busy = [worker for worker in range(parts[0, 0], parts[-1, 0] + 1) if worker in sharing]
        assert parts[:, 0].tolist() == busy
        assert (parts[:, 4] == parts[:, 3]).all()  # covered: up to the end of the worker's own part
        for worker, _, begin, *_ in parts[1:]:
            assert begin > 0
            assert found[found[:, 0] == worker][0, 1] == tile
