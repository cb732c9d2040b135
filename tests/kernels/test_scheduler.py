"""The order of the output tiles, computed by the kernel's own code on the host."""

import cutlass.cute as cute
import numpy as np
import pytest
from cutlass import Constexpr, Int32
from cutlass.cute.runtime import from_dlpack

from cutelab.kernels.dense_gemm.scheduler import GroupedRaster


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
