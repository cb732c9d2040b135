"""The instructions by which threads access a shared-memory tile, and the addresses of their lanes."""

from itertools import product
from typing import TypeAlias

import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass.cute.nvgpu import CopyUniversalOp
from cutlass.cute.nvgpu.cpasync import CopyG2SOp
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp, StMatrix8x8x16bOp

from cutelab.layouts.arrays import as_numpy
from cutelab.layouts.banks import INACTIVE, ROWS, WARP, Access, BankReport
from cutelab.layouts.errors import AccessError
from cutelab.layouts.tv import tv_map

DTYPES = {
    "fp8": cutlass.Float8E4M3FN,
    "int8": cutlass.Int8,
    "fp16": cutlass.Float16,
    "bf16": cutlass.BFloat16,
    "tf32": cutlass.TFloat32,
    "fp32": cutlass.Float32,
    "fp64": cutlass.Float64,
}
"""Short names of element types, wherever one is asked for."""

Layout: TypeAlias = cute.Layout | cute.ComposedLayout


def element_bytes(dtype: str | type[cutlass.Numeric]) -> int:
    """Bytes of an element of a DSL type or one of the short names in DTYPES. Raises AccessError."""
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    width = getattr(found, "width", 0)
    if width < 8 or width % 8:
        raise AccessError(f"expected a DSL type of whole bytes or one of {', '.join(DTYPES)}; got {dtype!r}")
    return width // 8


def bank_report(
    layout: Layout,
    access: str | Access | cute.TiledCopy | cute.TiledMma,
    dtype: str | type[cutlass.Numeric],
    operand: str | None = None,
) -> BankReport:
    """What it costs to access all of a shared-memory tile once: one row of the report an instruction.

    layout: of the tile, static, offsets in elements of `dtype`, its base 128-byte aligned.
    access, operand: who accesses it, and as what:
        - a TiledCopy, with "src" or "dst", whichever lies in shared memory: each instruction of each warp
          and of each repetition over the tile;
        - a TiledMma, with "A", "B" or "C": plain loads (stores of C), as wide as a thread's values are
          neighbours, 16 bytes at most: what `cute.autovec_copy` makes of them;
        - an Access or its name, for a tile of rank 2, where operand says which way the lanes go:
          "along" the contiguous mode first (the default), or "across" it. Matrices of ldmatrix and stmatrix
          are always eight neighbours across by 16 bytes along.

    Raises AccessError if a vector is not whole in memory or not aligned, or the tile is not a whole number
    of what one pass covers.
    """
    size = element_bytes(dtype)
    if isinstance(access, cute.TiledCopy):
        return _copy_report(layout, access, size, operand)
    if isinstance(access, cute.TiledMma):
        return _mma_report(layout, access, size, operand)
    return _lane_report(layout, Access.parse(access), size, operand or "along")


def _copy_report(layout: Layout, copy: cute.TiledCopy, size: int, side: str | None) -> BankReport:
    if side not in ("src", "dst"):
        raise AccessError(f"say which side of the TiledCopy is the tile: 'src' or 'dst', got {side!r}")
    atom = copy.layout_src_tv if side == "src" else copy.layout_dst_tv
    values = cute.size(atom, mode=[1])
    access = _copy_access(copy, side, values * size)
    offsets = _offsets(layout, tv_map(copy, side))
    return _report(access, offsets.reshape(*offsets.shape[:2], -1, values), size)


def _copy_access(copy: cute.TiledCopy, side: str, vector_bytes: int) -> Access:
    op = copy.op
    if isinstance(op, LdMatrix8x8x16bOp) and side == "src":
        return Access("ldmatrix", 16, op.num_matrices, op.transpose)
    if isinstance(op, StMatrix8x8x16bOp) and side == "dst":
        return Access("stmatrix", 16, op.num_matrices, op.transpose)
    if isinstance(op, CopyG2SOp) and side == "dst":
        return Access("cp.async", vector_bytes)
    if isinstance(op, CopyUniversalOp):
        return Access.parse(f"{'ld' if side == 'src' else 'st'}.shared.b{vector_bytes * 8}")
    raise AccessError(
        f"the {side} of {type(op).__name__} is not accessed through a warp's shared-memory lanes"
    )


def _mma_report(layout: Layout, mma: cute.TiledMma, size: int, operand: str | None) -> BankReport:
    if operand not in ("A", "B", "C"):
        raise AccessError(f"say which operand of the TiledMma is the tile: 'A', 'B' or 'C', got {operand!r}")
    offsets = _offsets(layout, tv_map(mma, operand))
    values = offsets.shape[2]
    widths = (w for w in (16 // size, 8 // size, 4 // size, 2 // size) if w > 1 and values % w == 0)
    width = next((w for w in widths if _whole(offsets.reshape(*offsets.shape[:2], -1, w), size).all()), 1)
    access = Access.parse(f"{'st' if operand == 'C' else 'ld'}.shared.b{width * size * 8}")
    return _report(access, offsets.reshape(*offsets.shape[:2], -1, width), size)


def _lane_report(layout: Layout, access: Access, size: int, order: str) -> BankReport:
    if order not in ("along", "across"):
        raise AccessError(f"lanes go 'along' the contiguous mode or 'across' it, got {order!r}")
    table = as_numpy(layout)
    if table.ndim != 2 or access.bytes % size:
        raise AccessError(
            f"{access.name} of elements of {size} bytes on {layout}: the tile must have rank 2 and "
            f"{access.bytes} bytes be a whole number of elements"
        )
    vector = access.bytes // size
    mode = contiguous_mode(table, 1)
    table = table if mode == 1 else table.T  # (across, along)
    rows = ROWS if access.matrices else 1
    across, along = table.shape
    if across % rows or along % vector:
        raise AccessError(
            f"{access.name} on {layout}: its vectors are {vector} elements along mode {mode}, the contiguous "
            f"one{f', and {ROWS} rows across' if access.matrices else ''}; the tile is not a multiple of that"
        )
    vectors = table.reshape(across, along // vector, vector)
    if access.matrices:  # neighbouring matrices lie along the rows
        vectors = vectors.reshape(-1, ROWS, along // vector, vector).swapaxes(1, 2)
    elif order == "across":
        vectors = vectors.swapaxes(0, 1)
    vectors = vectors.reshape(-1, vector)
    missing = -len(vectors) % access.lanes
    if missing:
        raise AccessError(
            f"{access.name} takes {access.lanes} vectors of {vector} elements at a time, and {layout} has "
            f"{len(vectors)}: {missing} more, or fewer matrices, would make whole instructions"
        )
    lanes = vectors.reshape(-1, access.lanes, vector)
    padding = np.repeat(lanes[:, :1], WARP - access.lanes, axis=1)  # lanes whose address nobody looks at
    lanes = np.concatenate([lanes, padding], axis=1)
    return _report(access, lanes.swapaxes(0, 1)[None, :, :, :], size)


def contiguous_mode(table: np.ndarray, step: int) -> int:
    """The mode of a (rows, columns) table of offsets in which neighbours are `step` apart; 1 if neither."""
    corner = table[0, 0]
    return next((m for m in (1, 0) if table.shape[m] > 1 and table.take(1, m)[0] == corner + step), 1)


def _offsets(layout: Layout, coordinates: np.ndarray) -> np.ndarray:
    """The offset of every value of every thread in every repetition of what `coordinates` covers.

    coordinates (threads, values, rank of the covered tile) → offsets (repetitions, threads, values).
    """
    table = as_numpy(layout)
    covered = tuple(int(extent) for extent in coordinates.max(axis=(0, 1)) + 1)
    rank = len(covered)
    if table.ndim < rank or any(have % need for have, need in zip(table.shape, covered, strict=False)):
        raise AccessError(
            f"one pass covers a tile of {covered}; {layout} must have these modes, in multiples of them"
        )
    in_tile = tuple(np.moveaxis(coordinates, -1, 0))
    repeats = [range(0, have, need) for have, need in zip(table.shape, covered, strict=False)]
    further = [range(extent) for extent in table.shape[rank:]]
    offsets = []
    for starts in product(*repeats):
        index = tuple(at + start for at, start in zip(in_tile, starts, strict=True))
        offsets += [table[index + rest] for rest in product(*further)]
    return np.stack(offsets)


def _whole(vectors: np.ndarray, size: int) -> np.ndarray:
    """Which vectors are contiguous and aligned: offsets (…, vector) in elements → bool (…)."""
    length = vectors.shape[-1]
    return (vectors == vectors[..., :1] + np.arange(length)).all(-1) & (vectors[..., 0] % length == 0)


def _report(access: Access, vectors: np.ndarray, size: int) -> BankReport:
    """The report of vectors (repetitions, threads, instructions of a thread, vector), offsets in elements."""
    whole = _whole(vectors, size)
    if not whole.all():
        repetition, thread, instruction = np.argwhere(~whole)[0]
        offsets = vectors[repetition, thread, instruction].tolist()
        raise AccessError(
            f"{access.name} needs {len(offsets)} neighbouring elements, the first at a multiple of that; "
            f"instruction {instruction} of thread {thread} has them at {offsets}"
        )
    if (vectors < 0).any():
        raise AccessError(f"the tile reaches {vectors.min()}, an offset before its base")
    repetitions, threads, instructions, _ = vectors.shape
    if threads % WARP:
        vectors = np.concatenate(
            [vectors, np.full((repetitions, -threads % WARP, *vectors.shape[2:]), INACTIVE)], 1
        )
    addresses = np.where(vectors[..., 0] == INACTIVE, INACTIVE, vectors[..., 0] * size)
    by_warp = addresses.reshape(repetitions, -1, WARP, instructions)
    return BankReport(access, by_warp.transpose(0, 1, 3, 2).reshape(-1, WARP))
