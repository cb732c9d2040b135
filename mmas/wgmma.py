"""wgmma: matrix multiply-accumulate by a whole warpgroup, with operands in shared memory (sm_90a).

One instruction multiplies a 64 x K tile of A by a K x N tile of B, both named by descriptors, into 64 x N
accumulators spread over the registers of 128 threads. It is asynchronous: `fence` orders it after what the
registers held before, `commit_group` closes a group of instructions, and `wait_group` waits until at most so
many of the newest groups are still at work (PTX ISA, "Asynchronous warpgroup level matrix instructions").
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cutelab.mmas.errors import MmaError

WARPGROUP = 128
MMA_ROWS = 64


def warpgroup_mma(
    dtype: type[cutlass.Numeric], columns: int, a_major: str = "k", b_major: str = "k"
) -> cute.TiledMma:
    """The 64 x `columns` product of one warpgroup, accumulating in fp32.

    a_major, b_major: "k" if the operand is contiguous along K in shared memory, else "mn".
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
        warpgroup.OperandSource.SMEM,
        majors[a_major],
        majors[b_major],
    )
    return cute.make_tiled_mma(op)


@dataclass(frozen=True)
class StagedProduct:
    """acc += A·Bᵀ for one stage of a ring of operand tiles in shared memory, by one warpgroup.

    The fragments are descriptors, not data: the tensor cores read shared memory themselves.
    """

    tiled_mma: cute.TiledMma
    tCrA: cute.Tensor  # (MMA, MMA_M, MMA_K, PIPE) descriptors
    tCrB: cute.Tensor  # (MMA, MMA_N, MMA_K, PIPE) descriptors

    @classmethod
    def partition(
        cls,
        tiled_mma: cute.TiledMma,
        sA: cute.Tensor,  # (rows, BLK_K, PIPE): the warpgroup's rows of A
        sB: cute.Tensor,  # (BLK_N, BLK_K, PIPE)
    ):
        thr_mma = tiled_mma.get_slice(0)  # descriptors are the same for all threads
        return cls(
            tiled_mma,
            tiled_mma.make_fragment_A(thr_mma.partition_A(sA)),
            tiled_mma.make_fragment_B(thr_mma.partition_B(sB)),
        )

    @cute.jit
    def start(self, stage: Int32, acc: cute.Tensor, first: cutlass.Constexpr = False):
        """Starts the products of a stage, as one group.

        acc: (MMA, MMA_M, MMA_N); overwritten, not added to, in the `first` stage.
        """
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(self.tCrA, mode=[2])):
            self.tiled_mma.set(warpgroup.Field.ACCUMULATE, not first or k > 0)
            cute.gemm(
                self.tiled_mma, acc, self.tCrA[None, None, k, stage], self.tCrB[None, None, k, stage], acc
            )
        warpgroup.commit_group()

    def wait(self, groups: int):
        """Waits until at most the `groups` newest groups of the warpgroup are still at work."""
        warpgroup.wait_group(groups)
