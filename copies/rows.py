"""Tiles of whole rows, from a matrix whose rows are contiguous: what attention loads of q, k and v."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from cutelab.copies.registers import opaque
from cutelab.copies.vectorized import copy_or_zero


@dataclass(frozen=True)
class RowLoader:
    """Loads tiles of rows of one matrix, all their columns at once, into a ring of shared-memory stages.

    Rows outside the bounds that a caller gives arrive as zeros, and so do columns from `columns` to the width
    of the tile: whatever lies there is not read, so it may be NaN, or nobody's memory. A tile that is all
    inside can do without the comparisons.
    """

    tiled_copy: cute.TiledCopy
    height: int  # rows of a tile
    width: int  # its columns
    columns: int
    contiguous: int  # the mode of the tile along a row
    tXgX: cute.Tensor  # (CPY, CPY_0, CPY_1, tiles)
    tXsX: cute.Tensor  # (CPY, CPY_0, CPY_1, PIPE)
    thread: Int32

    @classmethod
    def partition(
        cls,
        tiled_copy: cute.TiledCopy,
        mX: cute.Tensor,  # (rows, columns), or (columns, rows)
        sX: cute.Tensor,  # (BLK_0, BLK_1, PIPE), modes as in mX
        contiguous: int,
        columns: int,
        thread: Int32,
    ):
        """The share of one thread. Mode `contiguous` of mX has unit stride and the extent of the tile, or
        more; of it, `columns` are there."""
        thr_copy = tiled_copy.get_slice(thread)
        block = cute.size(sX, mode=[0]), cute.size(sX, mode=[1])
        gX = cute.local_tile(mX, block, (None, 0) if contiguous == 1 else (0, None))  # (BLK_0, BLK_1, tiles)
        return cls(
            tiled_copy,
            block[1 - contiguous],
            block[contiguous],
            columns,
            contiguous,
            thr_copy.partition_S(gX),
            thr_copy.partition_D(sX),
            thread,
        )

    def is_inside(self, tile: Int32, bounds: tuple[Int32, Int32]) -> Boolean:
        """Whether all rows of a tile lie within `bounds` = (first, end)."""
        begin, (first, end) = tile * self.height, bounds
        return (begin >= first) & (begin + self.height <= end)

    @cute.jit
    def load(self, tile: Int32, stage: Int32, bounds: Any = None):
        """Starts copying a tile. Rows outside of `bounds` = (first, end) become zeros; None: none is."""
        if cutlass.const_expr(bounds is None):
            self.copy(tile, stage, None)
        else:
            begin = tile * self.height
            self.copy(tile, stage, (bounds[0] - begin, bounds[1] - begin))

    @cute.jit
    def copy(self, tile: Int32, stage: Int32, bounds: Any):
        """Issues the copies of a tile; `bounds` are relative to it, None if all of its rows are wanted."""
        tXgX, tXsX = self.tXgX[None, None, None, tile], self.tXsX[None, None, None, stage]
        shape = (self.height, self.width) if self.contiguous == 1 else (self.width, self.height)
        # Coordinates within the tile; worked out here, as few tiles need them.
        thr_copy = self.tiled_copy.get_slice(opaque(self.thread))
        tXcX = thr_copy.partition_S(cute.make_identity_tensor(shape))  # (CPY, CPY_0, CPY_1)
        for i in cutlass.range_constexpr(cute.size(tXcX, mode=[2 - self.contiguous])):
            row = (None, i, None) if cutlass.const_expr(self.contiguous == 1) else (None, None, i)
            if cutlass.const_expr(bounds is None and self.columns == self.width):
                cute.copy(self.tiled_copy, tXgX[row], tXsX[row])
            else:
                copy_or_zero(self.tiled_copy, tXgX[row], tXsX[row], self.wanted(tXcX[row], bounds))

    @cute.jit
    def wanted(self, tXcX: cute.Tensor, bounds: Any) -> cute.Tensor:
        """Which vectors of a row to copy: (1, vectors). tXcX: (CPY, vectors)."""
        pred = cute.make_rmem_tensor((1, tXcX.shape[1]), cutlass.Boolean)
        for j in cutlass.range_constexpr(tXcX.shape[1]):
            wanted = tXcX[0, j][self.contiguous] < self.columns
            if cutlass.const_expr(bounds is not None):
                row = tXcX[0, j][1 - self.contiguous]
                wanted = wanted and row >= bounds[0] and row < bounds[1]
            pred[0, j] = wanted
        return pred
