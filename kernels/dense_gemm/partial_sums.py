"""Sums over a part of K that one CTA leaves in global memory for another, which finishes the tile."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cutelab.mmas.wgmma import WARPGROUP

VECTOR = 4  # of fp32: 16 bytes


@dataclass(frozen=True)
class PartialSums:
    """A slot for the accumulators of each warpgroup of each CTA, with a flag that says that they are there.

    A thread of the reader finds what the same thread of the writer left, so the accumulators need no order
    of their own: 128 threads write 16 bytes each side by side. A flag that says so holds `ready`, 64 bits
    that the caller drew at random for this launch, and 0 again when the sums have been read. So the memory
    need not be prepared: what lay there before is equal to `ready` with a chance of 2⁻⁶⁴.
    """

    values: cute.Tensor  # (VECTOR, vectors, WARPGROUP, warpgroups · CTAs), fp32
    flags: cute.Tensor  # (warpgroups · CTAs,), Int64
    ready: Int64

    @classmethod
    def at(cls, workspace: cute.Pointer, accumulators: int, slots: Int32, ready: Int64):
        """accumulators: of a thread. The flags lie at the end."""
        vectors = accumulators // VECTOR
        layout = cute.make_layout(
            (VECTOR, vectors, WARPGROUP, slots),
            stride=(1, WARPGROUP * VECTOR, VECTOR, WARPGROUP * accumulators),
        )
        flags = cute.recast_ptr(workspace + WARPGROUP * accumulators * slots, dtype=Int64)
        return cls(
            cute.make_tensor(workspace, layout), cute.make_tensor(flags, cute.make_layout(slots)), ready
        )

    @staticmethod
    def bytes(accumulators: int, slots: int) -> int:
        """Of the workspace."""
        return slots * (WARPGROUP * accumulators * 4 + 8)

    @cute.jit
    def leave(self, acc: cute.Tensor, slot: Int32, thread: Int32, barrier: cutlass.Constexpr):
        """Writes the accumulators of one warpgroup and, when all its threads have, sets the flag."""
        mine = self.values[None, None, thread, slot]  # (VECTOR, vectors)
        cute.autovec_copy(cute.make_tensor(acc.iterator, cute.make_layout(mine.shape)), mine)
        barrier.arrive_and_wait()
        if thread == 0:
            cute.arch.store(self.flags.iterator + slot, self.ready, sem="release", scope="gpu")

    @cute.jit
    def add(self, acc: cute.Tensor, slot: Int32, thread: Int32, barrier: cutlass.Constexpr):
        """Adds what a warpgroup has left in a slot, or is about to; the flag is 0 again afterwards."""
        flag = self.flags.iterator + slot
        if thread == 0:
            while cute.arch.load(flag, Int64, sem="acquire", scope="gpu") != self.ready:
                pass
            self.flags[slot] = Int64(0)
        barrier.arrive_and_wait()
        mine = self.values[None, None, thread, slot]  # (VECTOR, vectors)
        sums = cute.make_tensor(acc.iterator, cute.make_layout(mine.shape))
        sums.store(sums.load() + mine.load())
