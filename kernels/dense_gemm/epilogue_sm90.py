"""The end of a Hopper GEMM: a warpgroup's accumulators to global memory, slice by slice."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutelab.copies import stmatrix_copy, store_tile
from cutelab.kernels.dense_gemm.epilogue import Epilogue
from cutelab.layouts import accumulator_slices, swizzled_tensor, tma_tile
from cutelab.mmas import MMA_ROWS, warpgroup_mma


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

    Slices of 64 rows and up to 128 bytes of columns go through `buffers` buffers of shared memory each
    warpgroup has for itself: while TMA reads one, the next slice is worked out. Warpgroups don't wait for
    each other, so that one finishes a tile while the other's products keep the tensor cores busy.
    """

    slices: Epilogue
    dtype: type[cutlass.Numeric]  # of A and B
    rows: int
    columns: int
    buffers: int

    @property
    def ring(self) -> cute.ComposedLayout:
        """The buffers: (64, slice columns, buffers)."""
        shape = (*self.slices.tile, self.buffers)
        return tma_tile(shape, self.slices.contiguous, self.slices.dtype.width)

    @property
    def bias_extent(self) -> int:
        return 0 if self.slices.bias is None else self.columns if self.slices.bias == "n" else self.rows

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a warpgroup: [ buffers | bias in fp32 ]."""
        bias_bytes = -(-4 * self.bias_extent // 1024) * 1024
        return self.buffers * self.slices.tile_bytes + bias_bytes

    @cute.jit
    def store(
        self,
        acc: cute.Tensor,  # (MMA, MMA_M, MMA_N)
        smem: cute.Pointer,  # this warpgroup's
        output: Output,
        sAlpha: cute.Tensor,
        place: tuple[Int32, Int32],  # of the part, in parts of (rows, columns)
        batch: tuple[Int32, Int32],
        thread: Int32,
        barrier: cutlass.Constexpr,
    ):
        slices = self.slices
        m, n, _ = output.mD.shape
        down, across = self.rows // MMA_ROWS, self.columns // slices.tile[1]
        layout = accumulator_slices(acc.layout, slices.tile[1])
        pieces = cute.make_tensor(acc.iterator, layout)  # (MMA, 1, 1, across, down)
        sD = swizzled_tensor(smem, self.ring, slices.dtype)  # (64, slice columns, buffers)
        mma = warpgroup_mma(self.dtype, slices.tile[1])
        cD = cute.make_identity_tensor((m, n))
        bias_layout = cute.make_layout(
            (self.rows, self.columns), stride=(0, 1) if slices.bias == "n" else (1, 0)
        )
        bias_pointer = cute.recast_ptr(smem + self.buffers * slices.tile_bytes, dtype=Float32)
        sBias = cute.make_tensor(bias_pointer, bias_layout)  # (rows, columns)
        if cutlass.const_expr(slices.bias is not None):
            part = cute.local_tile(cD, (self.rows, self.columns), place)
            slices.load_bias(output.bias, sBias, part, (m, n), thread)
        for i in cutlass.range_constexpr(down):
            for j in cutlass.range_constexpr(across):
                buffer = (i * across + j) % self.buffers
                tile = place[0] * down + i, place[1] * across + j
                self.wait_for_buffer(thread)
                barrier.arrive_and_wait()
                if cutlass.const_expr(slices.c_align):
                    gC = cute.local_tile(output.mC[None, None, batch], slices.tile, tile)
                    slices.load_c(gC, sD[None, None, buffer], self.tile_of(cD, tile), (m, n), thread)
                    barrier.arrive_and_wait()
                sBias_slice = cute.local_tile(sBias, slices.tile, (i, j))
                thr_mma = mma.get_slice(thread)
                tCsD = thr_mma.partition_C(sD[None, None, buffer])  # (MMA, 1, 1)
                alpha = sAlpha[0] if cutlass.const_expr(slices.sliced) else output.alpha
                tCrD = slices.combine(
                    pieces[None, None, None, j, i],
                    tCsD,
                    thr_mma.partition_C(sBias_slice),
                    alpha,
                    output.beta,
                )
                self.to_shared(tCrD, mma, sD[None, None, buffer], tCsD, thread)
                self.to_global(sD[None, None, buffer], output, cD, tile, batch, thread, barrier)

    def tile_of(self, mX: cute.Tensor, tile: tuple) -> cute.Tensor:
        return cute.local_tile(mX, self.slices.tile, tile)

    @cute.jit
    def to_shared(
        self, tCrD: cute.Tensor, mma: cute.TiledMma, sD: cute.Tensor, tCsD: cute.Tensor, thread: Int32
    ):
        """A slice from registers to its buffer: stmatrix for 16-bit elements."""
        if cutlass.const_expr(self.slices.dtype.width == 16):
            copy = stmatrix_copy(self.slices.dtype, mma, self.slices.contiguous)
            thr_copy = copy.get_slice(thread)
            cute.copy(copy, thr_copy.retile(tCrD), thr_copy.partition_D(sD))
        else:
            cute.autovec_copy(tCrD, tCsD)

    @cute.jit
    def to_global(
        self,
        sD: cute.Tensor,  # (64, slice columns)
        output: Output,
        cD: cute.Tensor,  # (M, N) coordinates
        tile: tuple[Int32, Int32],
        batch: tuple[Int32, Int32],
        thread: Int32,
        barrier: cutlass.Constexpr,
    ):
        if cutlass.const_expr(output.store is not None):
            cute.arch.fence_proxy("async.shared", space="cta")
            barrier.arrive_and_wait()
            if thread < 32:
                gD = cute.local_tile(output.tmaD, self.slices.tile, (*tile, *batch))
                store_tile(output.store, sD, gD)
        else:
            barrier.arrive_and_wait()
            gD = cute.local_tile(output.mD[None, None, batch], self.slices.tile, tile)
            self.slices.store_d(sD, gD, self.tile_of(cD, tile), output.mD.shape[:2], thread)

    @cute.jit
    def wait_for_buffer(self, thread: Int32):
        """The thread that started TMA stores waits until the oldest buffer has been read."""
        if thread < 32:
            cute.arch.cp_async_bulk_wait_group(self.buffers - 1, read=True)

    @cute.jit
    def drain(self, thread: Int32):
        """Shared memory must not go away before TMA has read it."""
        if thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
