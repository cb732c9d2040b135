"""The end of a GEMM: D = activation(alpha · A·B + beta · C + bias), written in whole vectors.

The accumulators of a thread are scattered over its tile in pairs of columns. They go through shared memory,
where the tile is put together, and leave in vectors as wide as D's alignment allows. C takes the same way
in: its tile is read in vectors into the shared memory that D will occupy, and every thread replaces the
elements of C that it owns by those of D.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutelab.copies import copy_or_zero, tile_copy
from cutelab.layouts import smem_tile

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
TRANSCENDENTAL = ("gelu", "gelu_tanh", "silu")


def activate(x: cute.TensorSSA, activation: str | None) -> cute.TensorSSA:
    """The activation of every element, in fp32; the definitions are torch's. NaN stays NaN."""
    if activation == "relu":
        return cute.where(x < 0.0, cute.full_like(x, 0.0), x)
    if activation == "gelu":
        return 0.5 * x * (1.0 + cute.math.erf(x * 0.7071067811865476))
    if activation == "gelu_tanh":
        # (1 + tanh(y)) / 2 = sigmoid(2 y)
        return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    if activation == "silu":
        return x * sigmoid(x)
    return x


def sigmoid(x: cute.TensorSSA) -> cute.TensorSSA:
    return 1.0 / (1.0 + cute.math.exp(-x, fastmath=True))


@cute.jit
def load_as(src: cute.Tensor, shape: cute.Shape) -> cute.TensorSSA:
    """Loads `src` into a register tensor of congruent size but plainer `shape`: swizzling nests modes."""
    fragment = cute.make_rmem_tensor(shape, src.element_type)
    cute.autovec_copy(src, fragment)
    return fragment.load()


@dataclass(frozen=True)
class Epilogue:
    """What happens to the accumulators of one (BLK_M, BLK_N) tile.

    dtype: of C and D. d_align, c_align: bytes to which every vector along the contiguous mode is aligned;
    c_align = 0: no C. bias: None, "n" (one value for each column) or "m" (for each row).
    contiguous: the mode of C and D with unit stride, 1 (along N) or 0.
    in_flight: rows of vectors that a thread copies at a time, of the up to 128 that narrow vectors take: many
        hide latency, few save registers.
    """

    tile: tuple[int, int]
    dtype: type[cutlass.Numeric]
    threads: int
    d_align: int
    c_align: int
    bias: str | None
    activation: str | None
    contiguous: int = 1
    in_flight: int = 16

    @property
    def layout(self) -> cute.ComposedLayout:
        """The tile in shared memory; two neighbouring columns of 32 bits stay together, 16 bytes always."""
        return smem_tile(
            self.tile, self.contiguous, self.dtype.width, granule_bytes=32 if self.dtype.width == 32 else 16
        )

    @property
    def bias_layout(self) -> cute.Layout:
        """One value for each column (or row), broadcast over the tile by a stride of 0."""
        return cute.make_layout(self.tile, stride=(0, 1) if self.bias == "n" else (1, 0))

    @property
    def bias_bytes(self) -> int:
        return 0 if self.bias is None else self.tile[1 if self.bias == "n" else 0] * 4

    @property
    def sliced(self) -> bool:
        """Whether the arithmetic takes so many registers that it must be done in slices: see `store`."""
        return self.activation in TRANSCENDENTAL

    @property
    def tile_bytes(self) -> int:
        return self.tile[0] * self.tile[1] * self.dtype.width // 8

    @property
    def smem_bytes(self) -> int:
        """Shared memory: [ D | alpha, alone in 16 bytes | bias ]."""
        return self.tile_bytes + 16 + self.bias_bytes

    def copy(self, align: int, asynchronous: bool = False) -> cute.TiledCopy:
        """Moves the tile between global and shared memory in vectors of `align` bytes."""
        return tile_copy(self.dtype, self.tile, self.contiguous, align, self.threads, asynchronous)

    @cute.jit
    def store(
        self,
        acc: cute.Tensor,  # (MMA, MMA_M, MMA_N)
        thr_mma: cute.ThrMma,
        smem: cute.Pointer,
        gC: cute.Tensor | None,  # (BLK_M, BLK_N)
        bias: cute.Tensor | None,  # (M,) or (N,)
        gD: cute.Tensor,  # (BLK_M, BLK_N)
        cD: cute.Tensor,  # (BLK_M, BLK_N) coordinates in D
        extent: tuple[Int32, Int32],
        alpha: Float32,
        beta: Float32,
    ):
        """Combines the tile and writes it to `gD`. All of `smem` must be free, for every thread.

        A thread works on one row of atoms after the other. The compiler merges such slices where it can, and
        for a transcendental activation the intermediate values of the whole tile would not fit in registers.
        It can't merge them if each begins with a load from shared memory, of alpha, that stays behind the
        barrier which ended the one before.
        """
        thread, _, _ = cute.arch.thread_idx()
        sD = cute.make_tensor(cute.recast_ptr(smem, dtype=self.dtype), self.layout)  # (BLK_M, BLK_N)
        sAlpha = cute.make_tensor(cute.recast_ptr(smem + self.tile_bytes, dtype=Float32), 1)
        bias_pointer = cute.recast_ptr(smem + (self.tile_bytes + 16), dtype=Float32)
        sBias = cute.make_tensor(bias_pointer, self.bias_layout)  # (BLK_M, BLK_N)
        if thread == 0:
            sAlpha[0] = alpha
        if cutlass.const_expr(self.c_align):
            self.load_c(gC, sD, cD, extent, thread)
        if cutlass.const_expr(self.bias is not None):
            self.load_bias(bias, sBias, cD, extent, thread, self.threads)
        if cutlass.const_expr(self.sliced or self.c_align or self.bias is not None):
            cute.arch.sync_threads()

        tCsD = thr_mma.partition_C(sD)  # (MMA, MMA_M, MMA_N)
        tCsBias = thr_mma.partition_C(sBias)  # (MMA, MMA_M, MMA_N)
        for i in cutlass.range_constexpr(acc.shape[1]):
            factor = sAlpha[0] if cutlass.const_expr(self.sliced) else alpha
            tCsD_row = tCsD[None, i, None]
            tCrD = self.combine(acc[None, i, None], tCsD_row, tCsBias[None, i, None], factor, beta)
            cute.autovec_copy(tCrD, tCsD_row)
            if cutlass.const_expr(self.sliced):
                cute.arch.sync_warp()
        cute.arch.sync_threads()
        self.store_d(sD, gD, cD, extent, thread)

    @cute.jit
    def combine(
        self,
        acc: cute.Tensor,  # (MMA, …)
        tCsC: cute.Tensor,  # (MMA, …)
        tCsBias: cute.Tensor,  # (MMA, …)
        alpha: Float32,
        beta: Float32,
    ) -> cute.Tensor:
        """The arithmetic, in fp32, for a thread's accumulators or some of them: its elements of D."""
        value = acc.load() * alpha
        if cutlass.const_expr(self.c_align):
            value = value + load_as(tCsC, acc.shape).to(Float32) * beta
        if cutlass.const_expr(self.bias is not None):
            value = value + load_as(tCsBias, acc.shape)
        tCrD = cute.make_rmem_tensor(acc.shape, self.dtype)
        tCrD.store(activate(value, self.activation).to(self.dtype))
        return tCrD

    @cute.jit
    def load_c(
        self, gC: cute.Tensor, sD: cute.Tensor, cD: cute.Tensor, extent: tuple[Int32, Int32], thread: Int32
    ):
        """C into the shared memory that D will occupy; zeros outside the matrix."""
        tiled_copy = self.copy(self.c_align, asynchronous=True)
        thr_copy = tiled_copy.get_slice(thread)
        tDgC = thr_copy.partition_S(gC)  # (CPY, CPY_M, CPY_N)
        tDsC = thr_copy.partition_D(sD)  # (CPY, CPY_M, CPY_N)
        tDcC = thr_copy.partition_S(cD)  # (CPY, CPY_M, CPY_N)
        for i in cutlass.range(tDgC.shape[1], unroll=self.in_flight):
            pred = row_inside(tDcC[None, i, None], extent)
            copy_or_zero(tiled_copy, tDgC[None, i, None], tDsC[None, i, None], pred)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def load_bias(
        self,
        bias: cute.Tensor,
        sBias: cute.Tensor,
        cD: cute.Tensor,
        extent: tuple[Int32, Int32],
        thread: Int32,
        threads: int,
    ):
        """The part of `bias` that belongs to the tile of coordinates cD, in fp32; zeros beyond the matrix."""
        mode = 1 if cutlass.const_expr(self.bias == "n") else 0
        values = cute.size(sBias, mode=[mode])
        sVector = cute.make_tensor(sBias.iterator, values)
        for i in cutlass.range(thread, values, threads):
            index = cD[0, 0][mode] + i
            value = Float32(0.0)
            if index < extent[mode]:
                value = bias[index].to(Float32)
            sVector[i] = value

    @cute.jit
    def store_d(
        self, sD: cute.Tensor, gD: cute.Tensor, cD: cute.Tensor, extent: tuple[Int32, Int32], thread: Int32
    ):
        """The finished tile from shared memory to D, except what lies outside the matrix."""
        tiled_copy = self.copy(self.d_align)
        thr_copy = tiled_copy.get_slice(thread)
        tDsD = thr_copy.partition_S(sD)  # (CPY, CPY_M, CPY_N)
        tDgD = thr_copy.partition_D(gD)  # (CPY, CPY_M, CPY_N)
        tDcD = thr_copy.partition_D(cD)  # (CPY, CPY_M, CPY_N)
        for i in cutlass.range(tDgD.shape[1], unroll=self.in_flight):
            tDrD = cute.make_rmem_tensor_like(tDsD[None, i, None])
            cute.autovec_copy(tDsD[None, i, None], tDrD)
            cute.copy(tiled_copy, tDrD, tDgD[None, i, None], pred=row_inside(tDcD[None, i, None], extent))


@cute.jit
def row_inside(tXcX: cute.Tensor, extent: tuple[Int32, Int32]) -> cute.Tensor:
    """Predicate of a row of vectors: which lie inside a matrix of shape `extent`.

    tXcX: (CPY, CPY_N) coordinates; the result is (1, CPY_N).
    """
    tXpX = cute.make_rmem_tensor((1, tXcX.shape[1]), cutlass.Boolean)
    for j in cutlass.range_constexpr(tXcX.shape[1]):
        tXpX[0, j] = cute.elem_less(tXcX[0, j], extent)
    return tXpX
