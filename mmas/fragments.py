"""Fragments: the registers that feed the tensor cores, and the pipeline that keeps them full."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.arch import cvt_f32_tf32
from cutlass.cute.nvgpu.warp import MmaTF32Op


@cute.jit
def round_to_tf32(fragment: cute.Tensor):
    """Rounds the fp32 bit patterns in `fragment` (Int32, as the DSL keeps tf32) to tf32, ties away from zero.

    The tensor core ignores the 13 low bits of a tf32 operand: without this, every value is truncated towards
    zero, which doubles the error and biases it (PTX ISA, "cvt.rna.tf32.f32").
    """
    values = cute.recast_tensor(fragment, cutlass.Float32)
    for i in cutlass.range_constexpr(cute.size(fragment)):
        fragment[i] = cutlass.Int32(cvt_f32_tf32(values[i]))


@dataclass(frozen=True)
class StagedOperand:
    """One operand of a warp's products, loaded k-block by k-block from a ring of tiles in shared memory."""

    copy: cute.TiledCopy
    fragment: cute.Tensor  # (MMA, MMA_MN, MMA_K)
    tXsX: cute.Tensor  # (CPY, CPY_MN, CPY_K, PIPE)
    tXrX: cute.Tensor  # (CPY, CPY_MN, CPY_K): the registers of `fragment`, as ldmatrix fills them

    @classmethod
    def partition(cls, copy: cute.TiledCopy, fragment: cute.Tensor, sX: cute.Tensor, thread: cutlass.Int32):
        """The share of one thread; `copy` loads `fragment` from the ring sX (BLK_MN, BLK_K, PIPE)."""
        thr_copy = copy.get_slice(thread)
        return cls(copy, fragment, thr_copy.partition_S(sX), thr_copy.retile(fragment))

    @classmethod
    def of_A(cls, tiled_mma: cute.TiledMma, copy: cute.TiledCopy, sA: cute.Tensor, thread: cutlass.Int32):
        """sA: (BLK_M, BLK_K, PIPE)."""
        tCsA = tiled_mma.get_slice(thread).partition_A(sA[None, None, 0])  # (MMA, MMA_M, MMA_K)
        return cls.partition(copy, tiled_mma.make_fragment_A(tCsA), sA, thread)

    @classmethod
    def of_B(cls, tiled_mma: cute.TiledMma, copy: cute.TiledCopy, sB: cute.Tensor, thread: cutlass.Int32):
        """sB: (BLK_N, BLK_K, PIPE)."""
        tCsB = tiled_mma.get_slice(thread).partition_B(sB[None, None, 0])  # (MMA, MMA_N, MMA_K)
        return cls.partition(copy, tiled_mma.make_fragment_B(tCsB), sB, thread)

    @property
    def k_blocks(self) -> int:
        return cute.size(self.fragment, mode=[2])

    @property
    def pieces(self) -> int:
        """Instructions that load a k-block."""
        return cute.size(self.tXrX, mode=[1])

    @cute.jit
    def load(self, k_block: cutlass.Constexpr, stage: cutlass.Int32):
        """Shared memory → registers for one k-block of stage `stage`."""
        cute.copy(self.copy, self.tXsX[None, None, k_block, stage], self.tXrX[None, None, k_block])

    @cute.jit
    def load_piece(self, index: cutlass.Constexpr, stage: cutlass.Int32):
        """One instruction's part of a k-block; `index` counts these, one k-block after the other."""
        k_block, piece = index // self.pieces, index % self.pieces
        cute.copy(self.copy, self.tXsX[None, piece, k_block, stage], self.tXrX[None, piece, k_block])


@cute.jit
def multiply(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,  # (MMA, MMA_M, MMA_N)
    A: StagedOperand | cute.Tensor,  # (MMA, MMA_M, MMA_K) where it is a tensor: in registers already
    B: StagedOperand,
    a_stage: cutlass.Int32,
    b_stage: cutlass.Int32,
    ahead: cutlass.Constexpr = 2,
):
    """acc += A·Bᵀ over all k-blocks of a stage, with few registers for the operands.

    B is loaded piece by piece, `ahead` pieces before the products that need them, and A a k-block at a time:
    k-block i + 1 as the last pieces of B of i are multiplied.
    """
    pieces, k_blocks = B.pieces, B.k_blocks
    atoms = cute.make_layout(cute.size(acc, mode=[2]) // pieces)
    acc = cute.logical_divide(acc, (None, None, atoms))  # (MMA, MMA_M, (atoms of a piece, pieces))
    tCrB = cute.logical_divide(B.fragment, (None, atoms, None))  # (MMA, (atoms of a piece, pieces), MMA_K)
    staged = isinstance(A, StagedOperand)
    tCrA: Any = A.fragment if cutlass.const_expr(staged) else A
    if cutlass.const_expr(staged):
        A.load(0, a_stage)
    for index in cutlass.range_constexpr(min(ahead, pieces * k_blocks)):
        B.load_piece(index, b_stage)
    for index in cutlass.range_constexpr(pieces * k_blocks):
        k_block, piece = index // pieces, index % pieces
        if cutlass.const_expr(index + ahead < pieces * k_blocks):
            B.load_piece(index + ahead, b_stage)
        if cutlass.const_expr(staged and piece == max(pieces - ahead, 0) and k_block + 1 < k_blocks):
            A.load(k_block + 1, a_stage)
        part = acc[None, None, (None, piece)]  # (MMA, MMA_M, atoms of a piece)
        cute.gemm(tiled_mma, part, tCrA[None, None, k_block], tCrB[None, (None, piece), k_block], part)


@dataclass(frozen=True)
class OperandPipeline:
    """The operands of one warp: loads k-block `i + 1` while the tensor cores work on `i`.

    A k-block is one instruction deep: 16 columns of K for 16-bit types. The fragments hold all k-blocks of a
    k-tile, but a block is dead once multiplied, so the compiler needs registers for two.
    """

    tiled_mma: cute.TiledMma
    copy_A: cute.TiledCopy
    copy_B: cute.TiledCopy
    tCrA: cute.Tensor  # (MMA, MMA_M, MMA_K)
    tCrB: cute.Tensor  # (MMA, MMA_N, MMA_K)
    tXsA: cute.Tensor  # (CPY, CPY_M, CPY_K, PIPE)
    tXsB: cute.Tensor  # (CPY, CPY_N, CPY_K, PIPE)
    tXrA: cute.Tensor  # (CPY, CPY_M, CPY_K): the registers of tCrA, as ldmatrix fills them
    tXrB: cute.Tensor  # (CPY, CPY_N, CPY_K)

    @classmethod
    def partition(
        cls,
        tiled_mma: cute.TiledMma,
        copy_A: cute.TiledCopy,
        copy_B: cute.TiledCopy,
        sA: cute.Tensor,  # (BLK_M, BLK_K, PIPE)
        sB: cute.Tensor,  # (BLK_N, BLK_K, PIPE)
        thread: cutlass.Int32,
    ):
        """The share of one thread; copy_A and copy_B load the operands of `tiled_mma` from shared memory."""
        thr_mma = tiled_mma.get_slice(thread)
        thr_copy_A, thr_copy_B = copy_A.get_slice(thread), copy_B.get_slice(thread)
        tCrA = tiled_mma.make_fragment_A(thr_mma.partition_A(sA[None, None, 0]))
        tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(sB[None, None, 0]))
        return cls(
            tiled_mma,
            copy_A,
            copy_B,
            tCrA,
            tCrB,
            thr_copy_A.partition_S(sA),
            thr_copy_B.partition_S(sB),
            thr_copy_A.retile(tCrA),
            thr_copy_B.retile(tCrB),
        )

    @property
    def k_blocks(self) -> int:
        return cute.size(self.tCrA, mode=[2])

    @cute.jit
    def load(self, k_block: cutlass.Constexpr, stage: cutlass.Int32):
        """Shared memory → registers for one k-block of pipeline stage `stage`."""
        cute.copy(self.copy_A, self.tXsA[None, None, k_block, stage], self.tXrA[None, None, k_block])
        cute.copy(self.copy_B, self.tXsB[None, None, k_block, stage], self.tXrB[None, None, k_block])
        if cutlass.const_expr(isinstance(self.tiled_mma.op, MmaTF32Op)):
            round_to_tf32(self.tCrA[None, None, k_block])
            round_to_tf32(self.tCrB[None, None, k_block])

    @cute.jit
    def mma(self, k_block: cutlass.Constexpr, acc: cute.Tensor):
        """acc += A[:, k_block] · B[:, k_block]ᵀ.  acc: (MMA, MMA_M, MMA_N)."""
        cute.gemm(self.tiled_mma, acc, self.tCrA[None, None, k_block], self.tCrB[None, None, k_block], acc)
