"""The end of a Hopper GEMM: a warpgroup's accumulators to global memory, slice by slice of each warp."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutelab.copies import stmatrix_copy, store_tile
from cutelab.kernels.dense_gemm.epilogue import Epilogue
from cutelab.layouts import accumulator_slices, swizzled_tensor, tma_tile
from cutelab.mmas import MMA_ROWS, WARP, WARPGROUP, tiled_mma

WARPS = WARPGROUP // WARP


@dataclass(frozen=True)
class Output:
    """Where a GEMM's results go, and what is added to them."""

    store: cute.CopyAtom | None  # by TMA; None where D's pitch is none that TMA can take
    tmaD: cute.Tensor | None  # (M, N, L0, L1) coordinates
    mD: cute.Tensor  # (M, N, (L0, L1))
    mC: Any  # (M, N, (L0, L1)), or None
    bias: Any  # (N,) or (M,), or None
    alpha: Float32
    beta: Float32


@dataclass(frozen=True)
class WarpgroupEpilogue:
    """D = activation(alpha · acc + beta · C + bias) for a warpgroup's (rows, columns) of a tile.

    Slices of 16 rows and up to 128 bytes of columns go through `buffers` buffers of shared memory that each
    warp has for itself: while TMA reads one, the next slice is worked out. Warps don't wait for each other,
    except for a bias, so that one finishes a tile while others' products keep the tensor cores busy.
    """

    slices: Epilogue
    dtype: type[cutlass.Numeric]  # of A and B
    rows: int
    columns: int
    buffers: int

    @property
    def ring(self) -> cute.ComposedLayout:
        """The buffers of a warp: (16, slice columns, buffers)."""
        shape = (*self.slices.tile, self.buffers)
        return tma_tile(shape, self.slices.contiguous, self.slices.dtype.width)

    @property
    def bias_extent(self) -> int:
        return 0 if self.slices.bias is None else self.columns if self.slices.bias == "n" else self.rows

    @property
    def warp_bytes(self) -> int:
        return self.buffers * self.slices.tile_bytes

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a warpgroup: [ buffers of each warp | bias in fp32 ], in whole swizzle atoms."""
        return -(-(WARPS * self.warp_bytes + 4 * self.bias_extent) // 1024) * 1024

    @cute.jit
    def store(
        self,
        acc: cute.Tensor,  # (MMA, MMA_M, MMA_N)
        smem: cute.Pointer,  # this warpgroup's
        output: Output,
        sAlpha: cute.Tensor,
        place: tuple[Int32, Int32],  # of the part, in parts of (rows, columns)
        batch: tuple[Int32, Int32],
        thread: Int32,  # of the warpgroup
        barrier: cutlass.Constexpr,
    ):
        slices = self.slices
        m, n, _ = output.mD.shape
        warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
        down, across = self.rows // MMA_ROWS, self.columns // slices.tile[1]
        pieces = cute.make_tensor(acc.iterator, accumulator_slices(acc.layout, slices.tile[1]))
        offset = cute.assume(warp * self.warp_bytes, divby=slices.tile_bytes)
        sD = swizzled_tensor(smem + offset, self.ring, slices.dtype)  # (16, slice columns, buffers)
        cD = cute.make_identity_tensor((m, n))
        bias_layout = cute.make_layout(
            (self.rows, self.columns), stride=(0, 1) if slices.bias == "n" else (1, 0)
        )
        bias_pointer = cute.recast_ptr(smem + WARPS * self.warp_bytes, dtype=Float32)
        sBias = cute.make_tensor(bias_pointer, bias_layout)  # (rows, columns)
        if cutlass.const_expr(slices.bias is not None):
            barrier.arrive_and_wait()  # the tile before has been finished with the bias
            part = cute.local_tile(cD, (self.rows, self.columns), place)
            slices.load_bias(output.bias, sBias, part, (m, n), thread, WARPGROUP)
            barrier.arrive_and_wait()
        for i in cutlass.range_constexpr(down):
            for j in cutlass.range_constexpr(across):
                row, column = i * WARPS + warp, j
                tile = place[0] * down * WARPS + row, place[1] * across + column
                alpha = sAlpha[0] if cutlass.const_expr(slices.sliced) else output.alpha
                self.store_slice(
                    pieces[None, None, None, j, i],
                    sD[None, None, (i * across + j) % self.buffers],
                    cute.local_tile(sBias, slices.tile, (row, column)),
                    output,
                    alpha,
                    cD,
                    tile,
                    batch,
                    lane,
                )

    @cute.jit
    def store_slice(
        self,
        piece: cute.Tensor,  # (MMA, 1, 1): this thread's accumulators
        sD: cute.Tensor,  # (16, slice columns)
        sBias: cute.Tensor,  # (16, slice columns)
        output: Output,
        alpha: Float32,
        cD: cute.Tensor,  # (M, N) coordinates
        tile: tuple[Int32, Int32],
        batch: tuple[Int32, Int32],
        lane: Int32,
    ):
        """A warp's slice, from accumulators to D."""
        slices = self.slices
        m, n, _ = output.mD.shape
        # A warp holds rows of wgmma's accumulators as it would those of mma.sync.
        mma = tiled_mma(self.dtype, (1, 1))
        thr_mma = mma.get_slice(lane)
        acc = cute.make_tensor(piece.iterator, cute.make_layout(mma.partition_shape_C(slices.tile)))
        tCsD = thr_mma.partition_C(sD)  # (MMA, 1, MMA_N)
        self.wait_for_buffer()
        if cutlass.const_expr(slices.c_align):
            gC = cute.local_tile(output.mC[None, None, batch], slices.tile, tile)
            slices.load_c(gC, sD, cute.local_tile(cD, slices.tile, tile), (m, n), lane)
            cute.arch.sync_warp()
        tCrD = slices.combine(acc, tCsD, thr_mma.partition_C(sBias), alpha, output.beta)
        if cutlass.const_expr(slices.dtype.width == 16):
            copy = stmatrix_copy(slices.dtype, mma, slices.contiguous)
            thr_copy = copy.get_slice(lane)
            cute.copy(copy, thr_copy.retile(tCrD), thr_copy.partition_D(sD))
        else:
            cute.autovec_copy(tCrD, tCsD)
        if cutlass.const_expr(output.store is not None):
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            store_tile(output.store, sD, cute.local_tile(output.tmaD, slices.tile, (*tile, *batch)))
        else:
            cute.arch.sync_warp()
            gD = cute.local_tile(output.mD[None, None, batch], slices.tile, tile)
            slices.store_d(sD, gD, cute.local_tile(cD, slices.tile, tile), (m, n), lane)

    @cute.jit
    def wait_for_buffer(self):
        """Until the oldest buffer of this warp can be written again: TMA, or all lanes, have read it."""
        cute.arch.cp_async_bulk_wait_group(self.buffers - 1, read=True)
        cute.arch.sync_warp()

    @cute.jit
    def drain(self):
        """Shared memory must not go away before TMA has read it."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)
