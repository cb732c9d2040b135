"""Fragments: the registers of a tensor-core operand under another layout. No value moves."""

import cutlass.cute as cute

from cutelab.layouts.errors import LayoutError


def accumulator_as_operand(accumulator: cute.Layout) -> cute.Layout:
    """The registers of a product, seen as the A operand of the next: C (M, N) becomes A (M, K) with K = N.

    mma.sync m16n8k16: ((2,2), MMA_M, MMA_N) → ((2,2,2), MMA_M, MMA_N / 2)
    wgmma:             ((2,2,V), MMA_M, MMA_N) → ((2,2,2), MMA_M, (V / 2, MMA_N))

    Of each eight columns, a lane of C holds two neighbours in row r and two in row r + 8. Of each sixteen, a
    lane of A holds the same four, and then the four that lie eight columns on (PTX ISA, fragments of
    mma.m16n8k16). So the mode that counts eights is divided by two: which of the two joins the values, which
    pair it is becomes the k-block.

    This is for 16-bit A operands: convert the values first, in their order. All warps must lie along M, as
    one along N would hold a part of the columns only, and the columns of C must not be permuted.

    Raises LayoutError if the columns are not whole k-blocks of 16, or `accumulator` is no such fragment.
    """
    shape = accumulator.shape
    if cute.rank(shape) != 3 or cute.rank(shape[0]) not in (2, 3) or shape[0][:2] != (2, 2):
        raise LayoutError(
            "accumulator_as_operand",
            f"{accumulator} is no fragment of C",
            nearest="((2,2), MMA_M, MMA_N) of mma.sync or ((2,2,V), MMA_M, MMA_N) of wgmma would do",
        )
    values, rows, columns = (cute.get(accumulator, mode=[mode]) for mode in range(3))
    pair, halves, *eights = (cute.get(values, mode=[mode]) for mode in range(cute.rank(values)))
    counted, *further = (*eights, columns)
    if cute.size(counted) % 2:
        raise LayoutError(
            "accumulator_as_operand",
            f"{accumulator} has {8 * cute.size(counted)} columns, but A has 16 in a k-block",
            nearest=f"{8 * (cute.size(counted) + 1)} columns would do",
        )
    divided = cute.logical_divide(counted, cute.make_layout(2))
    two, blocks = cute.get(divided, mode=[0]), cute.get(divided, mode=[1])
    k_blocks = _joined(blocks, *further) if further else blocks
    return _joined(_joined(pair, halves, two), rows, k_blocks)


def accumulator_rows(accumulator: cute.Layout) -> cute.Layout:
    """The registers of a product as the matrix that they are to one lane: (its rows, its columns).

    mma.sync: ((2,2), MMA_M, MMA_N) → ((2, MMA_M), (2, MMA_N))
    wgmma:    ((2,2,V), MMA_M, MMA_N) → ((2, MMA_M), (2, V, MMA_N))

    A lane holds two neighbouring columns of each eight, in rows eight apart; the four lanes 4 i … 4 i + 3
    share their rows and nothing else (PTX ISA, fragments of mma.m16n8k16 and wgmma.m64nNk16).

    Raises LayoutError if `accumulator` is no such fragment.
    """
    shape = accumulator.shape
    if cute.rank(shape) != 3 or cute.rank(shape[0]) not in (2, 3) or shape[0][:2] != (2, 2):
        raise LayoutError(
            "accumulator_rows",
            f"{accumulator} is no fragment of C",
            nearest="((2,2), MMA_M, MMA_N) of mma.sync or ((2,2,V), MMA_M, MMA_N) of wgmma would do",
        )
    values, rows, columns = (cute.get(accumulator, mode=[mode]) for mode in range(3))
    pair, halves, *eights = (cute.get(values, mode=[mode]) for mode in range(cute.rank(values)))
    return _joined(_joined(halves, rows), _joined(pair, *eights, columns))


def accumulator_slices(accumulator: cute.Layout, columns: int) -> cute.Layout:
    """The registers of a wgmma product, cut into slices of so many columns.

    ((2,2,V), MMA_M, 1) → ((2,2,columns / 8), 1, 1, slices, MMA_M): the first three modes are what a wgmma of
    64 x `columns` would leave, which for 8 columns is ((2,2), 1, 1). A register counts pairs of columns
    first, then rows eight apart, then eights of columns (PTX ISA, fragments of wgmma.m64nNk16), so that a
    slice is a run of registers.

    Raises LayoutError if `accumulator` is no such fragment, or not made of whole slices.
    """
    shape = accumulator.shape
    if cute.rank(shape) != 3 or cute.rank(shape[0]) != 3 or shape[0][:2] != (2, 2) or shape[2] != 1:
        raise LayoutError(
            "accumulator_slices",
            f"{accumulator} is no fragment of C",
            nearest="((2,2,V), MMA_M, 1) of wgmma would do",
        )
    total = 8 * shape[0][2]
    if columns % 8 or columns <= 0 or total % columns:
        fitting = max(c for c in range(8, total + 1, 8) if total % c == 0 and c <= max(columns, 8))
        raise LayoutError(
            "accumulator_slices",
            f"{total} columns can't be cut into slices of {columns}",
            nearest=f"{fitting} columns would do",
        )
    (pair, half, eight), rows, _ = accumulator.stride
    eights = columns // 8
    values = ((2, 2, eights), (pair, half, eight)) if eights > 1 else ((2, 2), (pair, half))
    return cute.make_layout(
        (values[0], 1, 1, total // columns, shape[1]), stride=(values[1], 0, 0, eight * eights, rows)
    )


def _joined(*modes: cute.Layout) -> cute.Layout:
    """The layout that has `modes` as its modes."""
    return cute.make_layout(tuple(mode.shape for mode in modes), stride=tuple(mode.stride for mode in modes))
