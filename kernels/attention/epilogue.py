"""The end of attention: the output leaves in whole vectors, and the logarithm of the sums beside it."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutelab.copies import tile_copy
from cutelab.layouts import smem_tile

VECTOR_BYTES = 16


@dataclass(frozen=True)
class OutputTile:
    """The (queries, columns) tile of the output of a block, put together in shared memory.

    columns: of those of the tile, how many the output has; the rest is padding.
    """

    shape: tuple[int, int]
    columns: int
    dtype: type[cutlass.Numeric]
    threads: int

    @property
    def layout(self) -> cute.ComposedLayout:
        return smem_tile(self.shape, 1, self.dtype.width)

    @property
    def smem_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.dtype.width // 8

    @property
    def copy(self) -> cute.TiledCopy:
        return tile_copy(self.dtype, self.shape, 1, VECTOR_BYTES, self.threads)

    @cute.jit
    def store(
        self,
        acc: cute.Tensor,  # (MMA, MMA_M, MMA_N)
        thr_mma: cute.ThrMma,
        smem: cute.Pointer,
        mO: cute.Tensor,  # (queries, columns)
        tile: Int32,
    ):
        """Writes the tile of that number. All of `smem` must be free, for every thread."""
        thread, _, _ = cute.arch.thread_idx()
        sO = cute.make_tensor(cute.recast_ptr(smem, dtype=self.dtype), self.layout)  # (BLK_M, BLK_N)
        tCsO = thr_mma.partition_C(sO)  # (MMA, MMA_M, MMA_N)
        tCrO = cute.make_rmem_tensor(acc.shape, self.dtype)  # (MMA, MMA_M, MMA_N)
        tCrO.store(acc.load().to(self.dtype))
        cute.autovec_copy(tCrO, tCsO)
        cute.arch.sync_threads()

        gO = cute.local_tile(mO, self.shape, (tile, 0))  # (BLK_M, BLK_N)
        cO = cute.local_tile(cute.make_identity_tensor(mO.shape), self.shape, (tile, 0))  # coordinates
        tiled_copy = self.copy
        thr_copy = tiled_copy.get_slice(thread)
        tOsO = thr_copy.partition_S(sO)  # (CPY, CPY_M, CPY_N)
        tOgO = thr_copy.partition_D(gO)  # (CPY, CPY_M, CPY_N)
        tOcO = thr_copy.partition_D(cO)  # (CPY, CPY_M, CPY_N)
        for i in cutlass.range_constexpr(tOgO.shape[1]):
            tOrO = cute.make_rmem_tensor_like(tOsO[None, i, None])  # (CPY, CPY_N)
            cute.autovec_copy(tOsO[None, i, None], tOrO)
            pred = cute.make_rmem_tensor((1, tOcO.shape[2]), cutlass.Boolean)
            for j in cutlass.range_constexpr(tOcO.shape[2]):
                row, column = tOcO[0, i, j]
                pred[0, j] = row < mO.shape[0] and column < self.columns
            cute.copy(tiled_copy, tOrO, tOgO[None, i, None], pred=pred)


@cute.jit
def store_lse(
    lse: cute.Tensor,  # (rows,) of this lane
    coordinates: cute.Tensor,  # (rows, columns) of (query, column) within the tile
    mLSE: cute.Tensor,  # (queries,)
    first_query: Int32,
):
    """The first of the lanes that share rows writes them."""
    if coordinates[0, 0][1] == 0:
        for i in cutlass.range_constexpr(cute.size(lse)):
            query = first_query + coordinates[i, 0][0]
            if query < mLSE.shape[0]:
                mLSE[query] = Float32(lse[i])
