"""TMA: one thread copies a whole tile between global and shared memory (sm_90 and newer).

A tensor map, made once by the host code of a launch, holds address, sizes, strides, the box and the swizzle;
the instruction names the map and the coordinates of a box. What lies outside the tensor is read as zero and
not written. A load says that it is done by counting down the bytes that an mbarrier expects; stores are
collected into groups (PTX ISA, "cp.async.bulk.tensor").
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.core import get_divisibility
from cutlass.cute.nvgpu import cpasync

from cutelab.copies.errors import CopyError

TMA_ALIGNMENT = 16
"""Bytes that divide the address and every stride of a tensor that TMA can reach, but the one that is 1."""

BOX_ALIGNMENT = 128
"""Bytes that divide the address of a box in shared memory."""


def extent(tile: cute.ComposedLayout) -> tuple[int, int]:
    return cute.size(tile, mode=[0]), cute.size(tile, mode=[1])


def check_reachable(mX: cute.Tensor) -> None:
    """Raises CopyError unless TMA can reach mX, as far as the compiler knows: `cute.assume` tells it more.

    A tensor map has no room for the bits of other addresses and strides; without a word they would be lost.
    """
    alignment, unit = mX.iterator.alignment, TMA_ALIGNMENT * 8 // mX.element_type.width
    if alignment % TMA_ALIGNMENT:
        raise CopyError(
            f"TMA reaches multiples of {TMA_ALIGNMENT} bytes, got a pointer aligned to {alignment}"
        )
    for mode, stride in zip(cute.flatten_to_tuple(mX.shape), cute.flatten_to_tuple(mX.stride), strict=True):
        counts = not (isinstance(stride, int) and stride == 1) and not (isinstance(mode, int) and mode == 1)
        known = get_divisibility(stride)
        if counts and known % unit:
            what = f"is {stride}" if isinstance(stride, int) else f"is only known to be a multiple of {known}"
            raise CopyError(
                f"TMA takes strides of {unit} elements of {mX.element_type} or multiples, but one of "
                f"{mX.layout} {what}"
            )


def load_atom(
    mX: cute.Tensor, tile: cute.ComposedLayout, multicast: int = 1
) -> tuple[cute.CopyAtom, cute.Tensor]:
    """The copy of a `tile`, a layout in shared memory, from mX; and mX as TMA coordinates.

    multicast: CTAs that share a tile. Each loads a slice of it, into the shared memory of all.
    Raises CopyError if a slice would not be a multiple of 128 bytes, or TMA can't reach mX.
    """
    check_reachable(mX)
    size = cute.size(tile) * mX.element_type.width // 8
    if multicast > 1 and size % (multicast * BOX_ALIGNMENT):
        raise CopyError(
            f"{multicast} CTAs can't share a tile of {size} bytes: each loads a slice of it, and TMA writes "
            f"to multiples of {BOX_ALIGNMENT} bytes"
        )
    op = cpasync.CopyBulkTensorTileG2SOp() if multicast == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
    atom, coordinates = cpasync.make_tiled_tma_atom(op, mX, tile, extent(tile), multicast)
    return atom, coordinates


def store_atom(
    mX: cute.Tensor, tile: cute.ComposedLayout, add: bool = False
) -> tuple[cute.CopyAtom, cute.Tensor]:
    """The copy of a `tile`, a layout in shared memory, to mX; and mX as TMA coordinates.

    add: to what mX holds, each element atomically (PTX ISA, "cp.reduce.async.bulk.tensor").
    Raises CopyError if TMA can't reach mX.
    """
    check_reachable(mX)
    op = cpasync.CopyReduceBulkTensorTileS2GOp() if add else cpasync.CopyBulkTensorTileS2GOp()
    atom, coordinates = cpasync.make_tiled_tma_atom(op, mX, tile, extent(tile))
    return atom, coordinates


@dataclass(frozen=True)
class TmaLoader:
    """Loads tiles of a matrix into a ring of shared-memory stages, alone or for a row of CTAs."""

    atom: cute.CopyAtom
    tXsX: cute.Tensor  # (TMA, PIPE)
    tXgX: cute.Tensor  # (TMA, tiles of M or N, tiles of K, L0, L1) coordinates
    mask: Int32 | None  # the CTAs of the cluster that get the tile

    @classmethod
    def partition(
        cls,
        atom: cute.CopyAtom,
        mX: cute.Tensor,  # (MN, K, L0, L1) coordinates
        sX: cute.Tensor,  # (BLK_MN, BLK_K, PIPE)
        sharers: int = 1,
        rank: Int32 | int = 0,
        mask: Int32 | None = None,
    ):
        """rank: of this CTA among the `sharers` of a tile, which `mask` names."""
        tile = cute.size(sX, mode=[0]), cute.size(sX, mode=[1])
        gX = cute.local_tile(mX, tile, (None, None, None, None))  # (BLK_MN, BLK_K, mn, k, l0, l1)
        tXsX, tXgX = cpasync.tma_partition(
            atom, rank, cute.make_layout(sharers), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
        )
        return cls(atom, tXsX, tXgX, mask)

    @cute.jit
    def load(self, coordinate: tuple, stage: Int32, barrier: cute.Pointer):
        """Starts the copy of the tile at `coordinate` = (tile of M or N, tile of K, l0, l1) to a stage.

        To be called by a whole warp, of which one thread starts it. The bytes count down `barrier`.
        """
        options = {} if cutlass.const_expr(self.mask is None) else {"mcast_mask": self.mask}
        tile = (None, *coordinate)
        cute.copy(self.atom, self.tXgX[tile], self.tXsX[None, stage], tma_bar_ptr=barrier, **options)

    @cute.jit
    def prefetch(self, coordinate: tuple):
        """Brings the tile at `coordinate`, or this CTA's slice of it, into L2 only."""
        tile = (None, *coordinate)
        cute.prefetch(self.atom, self.tXgX[tile])


@cute.jit
def store_tile(atom: cute.CopyAtom, sX: cute.Tensor, gX: cute.Tensor):
    """Starts the copy of a whole tile from shared memory, as a group of its own; to be called by one warp.

    What other threads wrote to the tile must have passed a `fence.proxy.async` and a barrier. sX, gX: the
    tile, and where it goes as TMA coordinates, both (rows, columns).
    """
    whole = cute.make_layout(1)
    tXsX, tXgX = cpasync.tma_partition(
        atom, 0, whole, cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
    )  # (TMA,)
    cute.copy(atom, tXsX, tXgX)
    cute.arch.cp_async_bulk_commit_group()
