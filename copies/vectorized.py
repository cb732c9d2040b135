"""Tile copies between global memory, shared memory and registers, as wide as alignment allows.

Shapes: a thread's share of a `(BLK_MN, BLK_K)` tile is `(CPY, CPY_MN, CPY_K)`: CPY is one vector, the other
two count its repetitions along each mode. Predicates have one entry for each vector.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import CopyUniversalOp, LoadCacheMode
from cutlass.cute.nvgpu.cpasync import CopyG2SOp

from cutelab.layouts import copy_threads

CP_ASYNC_BYTES = (4, 8, 16)
"""Sizes of a cp.async (PTX ISA, "Data Movement: cp.async"); only 16 bytes can bypass L1 (.cg)."""


def copy_atom(dtype: type[cutlass.Numeric], vector_bytes: int, asynchronous: bool) -> cute.CopyAtom:
    """A copy of `vector_bytes`: cp.async where asked and possible, else a load and a store."""
    bits = vector_bytes * 8
    if not asynchronous or vector_bytes not in CP_ASYNC_BYTES:
        return cute.make_copy_atom(CopyUniversalOp(), dtype, num_bits_per_copy=bits)
    cache = LoadCacheMode.GLOBAL if vector_bytes == 16 else LoadCacheMode.ALWAYS
    return cute.make_copy_atom(CopyG2SOp(cache_mode=cache), dtype, num_bits_per_copy=bits)


def tile_copy(
    dtype: type[cutlass.Numeric],
    shape: tuple[int, int],
    contiguous: int,
    vector_bytes: int,
    threads: int,
    asynchronous: bool = False,
) -> cute.TiledCopy:
    """A TiledCopy for a `shape` tile whose mode `contiguous` (0 or 1) has unit stride in global memory."""
    thread_layout, value_layout = copy_threads(shape, contiguous, vector_bytes * 8 // dtype.width, threads)
    atom = copy_atom(dtype, vector_bytes, asynchronous)
    return cute.make_tiled_copy_tv(atom, thread_layout, value_layout)


@dataclass(frozen=True)
class TileLoader:
    """Loads k-tiles of one GEMM operand from global into a ring of shared-memory stages.

    A thread keeps the address of the first vector of each of its rows and moves it on by one k-tile as it
    copies; the other vectors of a row are a fixed distance away. Rows beyond the matrix are read from its
    last ones instead: they only reach rows of the output that nobody stores, so the loop needs no
    predicates. Columns beyond it must count as zero: `load_last` sees to that, and has to be called before
    `load_next`, once.

    Vectors must be whole: their length has to divide the extent of the matrix along the mode of unit stride,
    and the other stride. The matrix has at least one row.
    """

    tiled_copy: cute.TiledCopy
    columns: cutlass.Int32  # K
    tXcX: cute.Tensor  # (CPY, CPY_MN, CPY_K, k) coordinates in the matrix
    tXsX: cute.Tensor  # (CPY, CPY_MN, CPY_K, PIPE)
    address: cute.Tensor  # (CPY_MN,) in registers: of a row's first vector, in the k-tile copied last
    tile_step: cutlass.Int64  # bytes from a k-tile to the next
    vector_step: cutlass.Int64  # bytes from a vector of a row to the next

    @classmethod
    def partition(
        cls,
        tiled_copy: cute.TiledCopy,
        mX: cute.Tensor,  # (MN, K)
        sX: cute.Tensor,  # (BLK_MN, BLK_K, PIPE)
        tile: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """The share of one thread of the row `tile` of tiles."""
        thr_copy = tiled_copy.get_slice(thread)
        block = cute.size(sX, mode=[0]), cute.size(sX, mode=[1])
        cX = cute.local_tile(cute.make_identity_tensor(mX.shape), block, (tile, None))  # (BLK_MN, BLK_K, k)
        tXcX = thr_copy.partition_S(cX)  # (CPY, CPY_MN, CPY_K, k)
        cpy, cpy_mn, cpy_k, _ = tXcX.shape

        def column_bytes(columns: int) -> cutlass.Int64:
            return cutlass.Int64(cute.crd2idx((0, columns), mX.layout) * (mX.element_type.width // 8))

        tile_step = column_bytes(block[1])
        last_row = mX.shape[0] - 1 - (tXcX[cute.size(cpy) - 1, 0, 0, 0][0] - tXcX[0, 0, 0, 0][0])
        address = cute.make_rmem_tensor(cpy_mn, cutlass.Int64)
        for i in range(cpy_mn):
            row, column = tXcX[0, i, 0, 0]
            start = mX.iterator + cute.crd2idx((cutlass.min(row, last_row), column), mX.layout)
            address[i] = start.toint() - tile_step
        tXsX = thr_copy.partition_D(sX)
        return cls(tiled_copy, mX.shape[1], tXcX, tXsX, address, tile_step, column_bytes(block[1] // cpy_k))

    @property
    def vectors(self) -> int:
        """Vectors that each thread copies for a k-tile, numbered down the rows first."""
        return cute.size(self.tXcX, mode=[1]) * cute.size(self.tXcX, mode=[2])

    @cute.jit
    def load_next(self, stage: cutlass.Int32, vectors: cutlass.Constexpr):
        """Copies the vectors numbered `vectors` = (first, end) of the next k-tile, all inside the matrix.

        An address moves on before the copy, not after it: a cp.async reads its address register late, and by
        now the one of the k-tile before has. With 32-wide k-tiles it is worth 3 % (benchmarks/NOTES.md).
        """
        for v in cutlass.range_constexpr(*vectors):
            if cutlass.const_expr(v < cute.size(self.address)):
                self.address[v] = self.address[v] + self.tile_step
            cute.copy(self.tiled_copy, self._source(v, 0), self._destination(v, stage))

    @cute.jit
    def load_last(self, k_tile: cutlass.Int32, stage: cutlass.Int32):
        """Copies the k-tile that may stick out of the matrix, with zeros for what does. Call it first."""
        pred = cute.make_rmem_tensor((1, 1), cutlass.Boolean)
        for v in cutlass.range_constexpr(self.vectors):
            i, j = self._position(v)
            pred[0, 0] = self.tXcX[0, i, j, k_tile][1] < self.columns
            source = self._source(v, self.tile_step * (k_tile + 1))
            copy_or_zero(self.tiled_copy, source, self._destination(v, stage), pred)

    def _position(self, v: int) -> tuple[int, int]:
        return v % cute.size(self.address), v // cute.size(self.address)

    def _source(self, v: int, offset: cutlass.Int64 | int) -> cute.Tensor:
        i, j = self._position(v)
        dtype, length = self.tXsX.element_type, cute.size(self.tXcX, mode=[0])
        address = self.address[i] + (offset + self.vector_step * j)
        align = length * dtype.width // 8
        pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)
        return cute.make_tensor(pointer, cute.make_layout(((length, 1), 1)))  # ((vector, 1), 1)

    def _destination(self, v: int, stage: cutlass.Int32) -> cute.Tensor:
        i, j = self._position(v)
        return cute.append_ones(self.tXsX[None, i, j, stage], up_to_rank=2)  # ((vector, 1), 1)


@cute.jit
def copy_or_zero(tiled_copy: cute.TiledCopy, src: cute.Tensor, dst: cute.Tensor, pred: cute.Tensor):
    """Copies if `pred` says so and writes zeros if not.

    A predicated cp.async does so by itself: its source size becomes 0 and the hardware fills the rest of
    the destination (PTX ISA, cp.async, `src-size`). A plain load leaves its register alone, so the registers
    are cleared first.
    """
    if cutlass.const_expr(isinstance(tiled_copy.op, CopyG2SOp)):
        cute.copy(tiled_copy, src, dst, pred=pred)
    else:
        staged = cute.make_rmem_tensor_like(src)
        staged.fill(0)
        cute.copy(tiled_copy, src, staged, pred=pred)
        cute.copy(tiled_copy, staged, dst)
