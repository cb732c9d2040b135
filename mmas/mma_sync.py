"""mma.sync: warp-wide matrix multiply-accumulate on the tensor cores (sm_80 and newer).

One instruction multiplies a 16 x K tile of A by a K x 8 tile of B into 16 x 8 accumulators spread over the
32 lanes (PTX ISA, "Matrix fragments for mma.m16n8k16"). Here fp16, bf16 and tf32 operands accumulate in fp32.
The DSL also has fp8 operands, from sm_89 on, and fp16 accumulators; it has no int8 form of mma.sync (4.8.1).
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu.warp import MmaF16BF16Op, MmaTF32Op

from cutelab.mmas.errors import MmaError

WARP = 32


def mma_op(dtype: type[cutlass.Numeric]) -> MmaF16BF16Op | MmaTF32Op:
    """The mma.sync with the largest K for A and B of `dtype`, accumulating in fp32."""
    if dtype in (cutlass.Float16, cutlass.BFloat16):
        return MmaF16BF16Op(dtype, cutlass.Float32, (16, 8, 16))
    if dtype is cutlass.TFloat32:
        return MmaTF32Op((16, 8, 8))
    raise MmaError(f"mma.sync tiles take Float16, BFloat16 or TFloat32 operands, got {dtype}")


def tiled_mma(dtype: type[cutlass.Numeric], warps: tuple[int, int]) -> cute.TiledMma:
    """`warps` = (along M, along N) of them, each computing 16 x 16 pieces of the tile in turn.

    A warp takes two 8-column atoms at a time, so that one ldmatrix.x4 loads the B operand of both.
    """
    op = mma_op(dtype)
    m, n, k = op.shape_mnk
    return cute.make_tiled_mma(
        op, cute.make_layout((*warps, 1)), permutation_mnk=(warps[0] * m, warps[1] * n * 2, k)
    )
