"""Tiles of mma.sync: who multiplies what."""

import cutlass
import pytest

from cutelab.layouts import owners, tv_map
from cutelab.mmas import WARP, MmaError, mma_op, tiled_mma

SHAPES = {cutlass.Float16: (16, 8, 16), cutlass.BFloat16: (16, 8, 16), cutlass.TFloat32: (16, 8, 8)}


@pytest.mark.parametrize("dtype", SHAPES)
def test_the_largest_instruction_is_taken(dtype):
    assert mma_op(dtype).shape_mnk == SHAPES[dtype]


@pytest.mark.parametrize("dtype", [cutlass.Int8, cutlass.Float32, cutlass.Float64])
def test_other_types_are_refused(dtype):
    with pytest.raises(MmaError, match="Float16, BFloat16 or TFloat32"):
        mma_op(dtype)


@pytest.mark.parametrize("warps", [(1, 1), (2, 2), (2, 4), (4, 2)])
@pytest.mark.parametrize("dtype", SHAPES)
def test_each_accumulator_has_one_owner(dtype, warps):
    mma = tiled_mma(dtype, warps)
    coordinates = tv_map(mma, "C")
    assert coordinates.shape[0] == mma.size == warps[0] * warps[1] * WARP
    assert owners(coordinates).thread.shape[:2] == (warps[0] * 16, warps[1] * 16)
    assert (owners(coordinates).thread >= 0).sum() == warps[0] * warps[1] * 16 * 16


@pytest.mark.parametrize("dtype", SHAPES)
def test_warps_divide_rows_and_columns(dtype):
    """All warps of one row of warps read the same rows of A; of one column, the same columns of B."""
    mma = tiled_mma(dtype, (2, 4))
    rows = tv_map(mma, "A")[..., 0].reshape(8, -1)
    columns = tv_map(mma, "B")[..., 0].reshape(8, -1)
    for warp in range(8):
        assert set(rows[warp]) == set(rows[warp % 2])
        assert set(columns[warp]) == set(columns[warp // 2 * 2])
