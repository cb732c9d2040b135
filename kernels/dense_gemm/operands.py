"""The tensors of a GEMM, from the pointers, sizes and strides that its launch gets."""

import cutlass.cute as cute
from cutlass import Int32, Int64


def operand_tensor(
    pointer: cute.Pointer, shape: tuple, major: str, align: int, ld: Int64, batch_strides: tuple[Int64, Int64]
) -> cute.Tensor:
    """A (rows, columns, (L0, L1)) tensor with unit stride along columns ("k") or rows ("mn").

    Tells the compiler which strides are multiples of `align` bytes, which is what vector copies ask for.
    """
    divisor = align * 8 // pointer.dtype.width
    ld, l0, l1 = (cute.assume(x, divby=divisor) for x in (ld, *batch_strides))
    strides = (ld, 1, (l0, l1)) if major == "k" else (1, ld, (l0, l1))
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=strides))


def c_tensor(
    c: cute.Pointer, shape: tuple, align: int, c_m: Int64, c_n: Int64, batch_strides: tuple[Int64, Int64]
) -> cute.Tensor | None:
    """C, (M, N, (L0, L1)), in vectors along N of `align` bytes, or of any strides if that is an element's."""
    if align == 0:
        return None
    if align * 8 > c.dtype.width:
        return operand_tensor(c, shape, "k", align, c_m, batch_strides)
    return cute.make_tensor(c, cute.make_layout(shape, stride=(c_m, c_n, batch_strides)))


def bias_tensor(bias: cute.Pointer, along: str | None, m: Int32, n: Int32) -> cute.Tensor | None:
    """The bias: a value for each column (`along` is "n"), for each row ("m"), or None."""
    return None if along is None else cute.make_tensor(bias, cute.make_layout(n if along == "n" else m))


def flat_batch(mX: cute.Tensor) -> cute.Tensor:
    """(rows, columns, (L0, L1)) as (rows, columns, L0, L1): the modes of a tensor map."""
    rows, columns, (l0, l1) = mX.shape
    across, along, (step_0, step_1) = mX.stride
    return cute.make_tensor(
        mX.iterator, cute.make_layout((rows, columns, l0, l1), stride=(across, along, step_0, step_1))
    )
