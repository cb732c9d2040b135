"""The tensors of attention, from the pointers, sizes and strides that its launch gets."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64


def rows_tensor(
    pointer: cute.Pointer, shape: tuple[Int32, int, Int32, Int32], strides: tuple[Int64, Int64, Int64]
) -> cute.Tensor:
    """(rows, columns, heads, sequences), contiguous along the columns; `strides` are the other modes'."""
    along_rows, along_heads, along_sequences = strides
    return cute.make_tensor(
        pointer, cute.make_layout(shape, stride=(along_rows, 1, along_heads, along_sequences))
    )


def bounds_tensor(pointer: cute.Pointer, varlen: bool, sequences: Int32) -> cute.Tensor | None:
    """Where the sequences begin, and the last one ends; None if all have the same length."""
    return cute.make_tensor(pointer, cute.make_layout(sequences + 1)) if varlen else None


@cute.jit
def rows_of(
    mX: cute.Tensor,  # (rows, columns, heads, sequences)
    bounds: cute.Tensor | None,  # (sequences + 1,)
    head: Int32,
    sequence: Int32,
) -> cute.Tensor:
    """One head of one sequence, (rows, columns). Offsets are in 64 bits, whatever the sizes."""
    rows, columns = mX.shape[:2]
    along_rows, _, along_heads, along_sequences = mX.stride
    offset = Int64(head) * along_heads + Int64(sequence) * along_sequences
    if cutlass.const_expr(bounds is not None):
        begin = bounds[sequence]  # type: ignore[index]
        rows = bounds[sequence + 1] - begin  # type: ignore[index]
        offset += Int64(begin) * along_rows
    address = mX.iterator.toint() + offset * (mX.element_type.width // 8)
    pointer = cute.make_ptr(
        mX.element_type, address, cute.AddressSpace.gmem, assumed_align=mX.iterator.alignment
    )
    return cute.make_tensor(pointer, cute.make_layout((rows, columns), stride=(along_rows, 1)))


def transposed(mX: cute.Tensor) -> cute.Tensor:
    """(rows, columns) as (columns, rows)."""
    return cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=[1, 0]))
