"""The mask: what becomes of the scores of keys that a query does not see."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutelab.kernels.attention.blocks import Band


@dataclass(frozen=True)
class Mask:
    """Sets the scores that do not count to -inf, in a lane's accumulators.

    coordinates: (rows, columns) of (query, key) within a tile, as `accumulator_rows` lays them out, whatever
    instruction left the scores.
    """

    band: Band
    coordinates: cute.Tensor  # (rows, columns)

    @cute.jit
    def apply(self, scores: cute.Tensor, query: Int32, key: Int32):
        """scores: (rows, columns), of the tile whose first query and key are `query` and `key`."""
        rows, columns = scores.shape
        # Bounds relative to the lane's first column: the others are constants away from it.
        column = self.coordinates[0, 0][1]
        key += column
        for i in cutlass.range_constexpr(cute.size(rows)):
            row = query + self.coordinates[i, 0][0]
            first, end = self.band.first(row) - key, self.band.end(row) - key
            for j in cutlass.range_constexpr(cute.size(columns)):
                distance = self.coordinates[0, j][1] - column
                seen = distance < end
                if cutlass.const_expr(self.band.left is not None):
                    seen = seen & (distance >= first)
                scores[i, j] = cutlass.select_(seen, scores[i, j], -Float32.inf)
