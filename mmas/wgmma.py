"""wgmma: matrix multiply-accumulate by a whole warpgroup, with operands in shared memory (sm_90a).

One instruction multiplies a 64 x K tile of A by a K x N tile of B, both named by descriptors, into 64 x N
accumulators spread over the registers of 128 threads. It is asynchronous: `fence` orders it after what the
registers held before, `commit_group` closes a group of instructions, and `wait_group` waits until at most so
many of the newest groups are still at work (PTX ISA, "Asynchronous warpgroup level matrix instructions").
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.arch import inline_ptx
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cutelab.mmas.errors import MmaError

WARPGROUP = 128
MMA_ROWS = 64


def warpgroup_mma(
    dtype: type[cutlass.Numeric],
    columns: int,
    a_major: str = "k",
    b_major: str = "k",
    a_in_registers: bool = False,
) -> cute.TiledMma:
    """The 64 x `columns` product of one warpgroup, accumulating in fp32.

    a_major, b_major: "k" if the operand is contiguous along K in shared memory, else "mn".
    a_in_registers: A comes from the registers of the warpgroup, laid out as an accumulator is.
    Raises MmaError where there is no such instruction.
    """
    if dtype not in (cutlass.Float16, cutlass.BFloat16):
        raise MmaError(f"wgmma tiles take Float16 or BFloat16 operands, got {dtype}")
    if columns % 8 or not 8 <= columns <= 256:
        nearest = min(max(8, (columns + 4) // 8 * 8), 256)
        raise MmaError(f"wgmma has 8, 16, … 256 columns, got {columns}: the nearest that it has is {nearest}")
    majors = {"k": OperandMajorMode.K, "mn": OperandMajorMode.MN}
    for major in (a_major, b_major):
        if major not in majors:
            raise MmaError(f"an operand is contiguous along 'k' or 'mn', got {major!r}")
    op = warpgroup.MmaF16BF16Op(
        dtype,
        cutlass.Float32,
        (MMA_ROWS, columns, 16),
        warpgroup.OperandSource.RMEM if a_in_registers else warpgroup.OperandSource.SMEM,
        majors[a_major],
        majors[b_major],
    )
    return cute.make_tiled_mma(op)


@dataclass(frozen=True)
class StagedProduct:
    """acc += A·Bᵀ for one stage of a ring of operand tiles in shared memory, by one warpgroup.

    The fragments are descriptors, not data: the tensor cores read shared memory themselves. A may also be the
    same for all stages, or in registers: then `start` gets it.
    """

    tiled_mma: cute.TiledMma
    tCrA: Any  # (MMA, MMA_M, MMA_K, PIPE) descriptors, or None
    tCrB: cute.Tensor  # (MMA, MMA_N, MMA_K, PIPE) descriptors

    @classmethod
    def partition(
        cls,
        tiled_mma: cute.TiledMma,
        sA: cute.Tensor | None,  # (rows, BLK_K, PIPE): the warpgroup's rows of A
        sB: cute.Tensor,  # (BLK_N, BLK_K, PIPE)
    ):
        thr_mma = tiled_mma.get_slice(0)  # descriptors are the same for all threads
        tCrA = None if sA is None else tiled_mma.make_fragment_A(thr_mma.partition_A(sA))
        return cls(tiled_mma, tCrA, tiled_mma.make_fragment_B(thr_mma.partition_B(sB)))

    @cute.jit
    def start(
        self,
        stage: Int32,
        acc: cute.Tensor,  # (MMA, MMA_M, MMA_N)
        first: cutlass.Constexpr = False,
        tCrA: Any = None,  # (MMA, MMA_M, MMA_K): A, where it doesn't come in stages
    ):
        """Starts the products of a stage, as one group. acc is overwritten, not added to, in the `first`."""
        a = tCrA if cutlass.const_expr(self.tCrA is None) else self.tCrA[None, None, None, stage]
        if cutlass.const_expr(self.tiled_mma.op.a_src == warpgroup.OperandSource.RMEM):
            pin(a)
        # An object of its own: whether it accumulates is traced state, which may not outlive a branch.
        mma = cute.make_tiled_mma(self.tiled_mma.op)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(self.tCrB, mode=[2])):
            mma.set(warpgroup.Field.ACCUMULATE, not first or k > 0)
            cute.gemm(mma, acc, a[None, None, k], self.tCrB[None, None, k, stage], acc)
        warpgroup.commit_group()

    def wait(self, groups: int):
        """Waits until at most the `groups` newest groups of the warpgroup are still at work."""
        warpgroup.wait_group(groups)


@cute.jit
def pin(fragment: cute.Tensor):
    """Keeps what computes the registers of a fragment in front of a fence that follows.

    To the compiler wgmma.fence has nothing to do with registers, so it may move arithmetic behind it.
    """
    words = cute.recast_tensor(fragment, Int32)
    for i in cutlass.range_constexpr(cute.size(words)):
        words[i] = inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[words[i]])
