"""Shared-memory tiles and the threads that fill them: all the layout arithmetic of the kernels.

A tile is `(rows, columns)`; one of its two modes is contiguous in memory. Extents and vectors are in
elements. Every function is plain Python over the DSL's layouts, so it gives the same answer at a prompt as
inside a `@cute.jit` function.
"""

from math import gcd

import cutlass
import cutlass.cute as cute

from cutelab.layouts.errors import TileError

LINE_BYTES = 128
"""Bytes that the 32 banks of shared memory deliver in one wavefront: 32 banks of 4 bytes."""


GRANULE_BYTES = 16
"""What cp.async, TMA, ldmatrix and 128-bit accesses move as a whole."""


def log2(value: int) -> int:
    return value.bit_length() - 1


def line_swizzle(row_bytes: int, element_bits: int, granule_bytes: int = GRANULE_BYTES) -> cute.Swizzle:
    """The swizzle that spreads the granules of equal columns over the banks.

    Rows of `row_bytes` (at most 128, a power of two) lie one after the other, so the same column of
    neighbouring 128-byte lines falls into the same bank. XOR-ing the number of the granule within its row
    with the number of the line moves it to another bank in each of the next lines. Granules stay whole:
    16 bytes for cp.async, ldmatrix and 128-bit accesses.
    """
    granule = granule_bytes * 8 // element_bits
    base = log2(granule)
    shift = log2(LINE_BYTES * 8 // element_bits) - base
    return cute.make_swizzle(log2(row_bytes // granule_bytes), base, shift)


def smem_tile(
    shape: tuple[int, ...],
    contiguous: int,
    element_bits: int,
    granule_bytes: int = GRANULE_BYTES,
    order: tuple[int, ...] | None = None,
) -> cute.ComposedLayout:
    """A swizzled shared-memory layout of `shape` = (rows, columns) or (rows, columns, stages).

    `contiguous` is the mode (0 or 1) whose neighbours are neighbours in memory. The tile is paved with
    atoms of eight runs, the shape that one ldmatrix 8x8 matrix or eight 16-byte cp.async touch: swizzled,
    both are free of bank conflicts in either direction. A run is 128 bytes long, or 64 or 32 where the
    extent of the contiguous mode is no multiple of more.
    """
    run = atom_run(shape[contiguous], element_bits)
    if shape[1 - contiguous] % 8 or run * element_bits < 256:
        raise TileError(
            f"tile {shape} can't be paved with 8 x {run} atoms: mode {contiguous}, the contiguous one, must "
            f"be a multiple of {256 // element_bits}, 32 bytes, and the other of 8"
        )
    if contiguous == 1:
        atom = cute.make_layout((8, run), stride=(run, 1))
    else:
        atom = cute.make_layout((run, 8), stride=(1, run))
    swizzle = line_swizzle(run * element_bits // 8, element_bits, granule_bytes)
    return cute.tile_to_shape(
        cute.make_composed_layout(swizzle, 0, atom), shape, order or tuple(range(len(shape)))
    )


def atom_run(extent: int, element_bits: int) -> int:
    """Elements of a row of a swizzle atom, of a tile whose contiguous mode has `extent`: up to 128 bytes."""
    return gcd(extent, LINE_BYTES * 8 // element_bits)


def tma_tile(shape: tuple[int, ...], contiguous: int, element_bits: int) -> cute.ComposedLayout:
    """A tile, or a ring of them, as TMA writes and reads it and wgmma reads it: `shape` as for `smem_tile`.

    The atoms are those of `smem_tile`, but lie one after the other across the contiguous mode first: then the
    up to 128 bytes wide box that one TMA instruction moves is one run of shared memory. The swizzle is that
    of byte addresses, as the hardware applies it, to go with the pointer: see `swizzled_tensor`.
    """
    order = (0, 1, 2) if contiguous == 1 else (1, 0, 2)
    layout = smem_tile(shape, contiguous, element_bits, order=order[: len(shape)])
    row_bytes = atom_run(shape[contiguous], element_bits) * element_bits // 8
    return cute.make_composed_layout(line_swizzle(row_bytes, 8), 0, layout.outer)


def swizzled_tensor(
    pointer: cute.Pointer, layout: cute.ComposedLayout, dtype: type[cutlass.Numeric]
) -> cute.Tensor:
    """The tensor at `pointer`, aligned to 1024 bytes, with swizzled addresses: `layout` is a `tma_tile`."""
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=dtype), layout.outer)


def operand_tile(shape: tuple[int, int, int], major: str, element_bits: int) -> cute.ComposedLayout:
    """A ring of stages of a tensor-core operand: (BLK_MN, BLK_K, PIPE), contiguous along K ("k") or "mn".

    Free of bank conflicts for cp.async and for the loads into the tensor cores' registers. Those are
    ldmatrix, but for 32-bit elements contiguous along M or N: there plain loads take four columns of eight
    elements at a time, so eight of them form a granule.
    """
    if major not in ("k", "mn"):
        raise TileError(f"an operand is contiguous along 'k' or 'mn', got {major!r}")
    granule_bytes = 32 if element_bits == 32 and major == "mn" else GRANULE_BYTES
    return smem_tile(shape, 1 if major == "k" else 0, element_bits, granule_bytes)


def copy_threads(
    shape: tuple[int, int], contiguous: int, vector: int, threads: int
) -> tuple[cute.Layout, cute.Layout]:
    """Thread and value layouts for copying a tile with one vector per thread and step.

    Neighbouring threads take neighbouring vectors along the contiguous mode, so that a warp touches as much
    of a line of global memory as the tile and the vectors allow; the other mode takes what is left of them.
    """
    along = gcd(shape[contiguous] // vector, threads)
    across = threads // along
    if shape[contiguous] % vector or shape[1 - contiguous] % across:
        raise TileError(
            f"{threads} threads with vectors of {vector} elements can't share a {shape} tile evenly: "
            f"{along} take vectors side by side, so {across} must divide {shape[1 - contiguous]}"
        )
    if contiguous == 1:
        return cute.make_layout((across, along), stride=(along, 1)), cute.make_layout((1, vector))
    return cute.make_layout((along, across), stride=(1, along)), cute.make_layout((vector, 1))
