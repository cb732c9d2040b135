"""ldmatrix and stmatrix: from shared memory to the registers of a tensor-core operand, and back.

ldmatrix hands a warp 8x8 matrices of 16-bit elements: lane i supplies the address of one row, and receives
elements (i / 4, 2·(i % 4)) and the next of each matrix, which is how mma.sync wants its operands
(PTX ISA, "ldmatrix"). With .trans the matrices arrive transposed, so an operand that is contiguous along M
or N needs no shuffling. A 32-bit element passes as two 16-bit halves, but can't be transposed that way:
such operands take plain loads. stmatrix, which came with Hopper, is the mirror image: the accumulators of
mma.sync and wgmma lie as its matrices do, and .trans stores them contiguous along M. Before Hopper, results
go back through ordinary stores, as wide as a thread's neighbouring elements allow (`cute.autovec_copy`).
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import CopyUniversalOp
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp, StMatrix8x8x16bOp

from cutelab.copies.errors import CopyError


def operand_atom(dtype: type[cutlass.Numeric], major: str, matrices: int = 4) -> cute.CopyAtom:
    """The widest copy from shared memory that yields an mma.sync operand of `dtype`.

    major: "k" if the operand is contiguous along K in shared memory, "mn" if along M or N.
    matrices: 8x8 matrices for each ldmatrix, 1, 2 or 4.
    """
    if matrices not in (1, 2, 4):
        raise CopyError(f"ldmatrix loads 1, 2 or 4 matrices, got {matrices}")
    if dtype.width not in (16, 32):
        raise CopyError(f"ldmatrix moves elements of 16 or 32 bits, got {dtype} of {dtype.width}")
    if major not in ("k", "mn"):
        raise CopyError(f"an operand is contiguous along 'k' or 'mn', got {major!r}")
    if dtype.width == 32 and major == "mn":
        return cute.make_copy_atom(CopyUniversalOp(), dtype, num_bits_per_copy=32)
    return cute.make_copy_atom(LdMatrix8x8x16bOp(transpose=major == "mn", num_matrices=matrices), dtype)


def operand_copies(
    tiled_mma: cute.TiledMma, dtype: type[cutlass.Numeric], a_major: str, b_major: str
) -> tuple[cute.TiledCopy, cute.TiledCopy]:
    """TiledCopies that load the A and the B operand of `tiled_mma` from shared memory."""
    copy_A = cute.make_tiled_copy_A(operand_atom(dtype, a_major), tiled_mma)
    copy_B = cute.make_tiled_copy_B(operand_atom(dtype, b_major), tiled_mma)
    return copy_A, copy_B


def stmatrix_copy(dtype: type[cutlass.Numeric], tiled_mma: cute.TiledMma, contiguous: int) -> cute.TiledCopy:
    """Stores the accumulators of `tiled_mma`, as 16-bit `dtype`, to a tile whose mode `contiguous` is so.

    Runs on sm_90 and newer; the tile has a multiple of 16 columns. PTX ISA, "stmatrix".
    """
    if dtype.width != 16:
        raise CopyError(f"stmatrix moves elements of 16 bits, got {dtype} of {dtype.width}")
    atom = cute.make_copy_atom(StMatrix8x8x16bOp(transpose=contiguous == 0, num_matrices=4), dtype)
    return cute.make_tiled_copy_C(atom, tiled_mma)
