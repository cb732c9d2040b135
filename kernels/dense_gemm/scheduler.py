"""Which output tile a thread block computes: an order that re-uses L2."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@dataclass(frozen=True)
class GroupedRaster:
    """Tiles in groups of `group` rows: down a group's first column, then its second, and so on.

    Blocks start in order of their index, so those that run at the same time form a nearly square patch of the
    output, which reads the fewest rows of A and columns of B: with 132 multiprocessors, 8 x 16.5 tiles
    instead of 132 tiles of one row. The grid is one-dimensional: any batch count fits.
    """

    group: int = 8

    def grid(self, tiles: tuple[Int32, Int32], batch: tuple[Int32, Int32]) -> tuple[Int32, int, int]:
        return tiles[0] * tiles[1] * batch[0] * batch[1], 1, 1

    @cute.jit
    def tile(self, block: Int32, tiles: tuple[Int32, Int32], batch: tuple[Int32, Int32]):
        """The (m, n) tile and the (l0, l1) batch coordinate of a block."""
        m_tiles, n_tiles = tiles
        per_batch, per_group = m_tiles * n_tiles, self.group * n_tiles
        batch_index, index = block // per_batch, block % per_batch
        first = index // per_group * self.group
        rows = cutlass.min(m_tiles - first, self.group)  # the last group may be smaller
        index = index % per_group
        return first + index % rows, index // rows, (batch_index % batch[0], batch_index // batch[0])
