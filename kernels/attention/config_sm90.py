"""What is fixed about Hopper's attention before it is traced."""

from dataclasses import dataclass
from math import gcd

from cutelab.copies import TmaRing
from cutelab.kernels.attention.config import DTYPES
from cutelab.kernels.dense_gemm.epilogue import Epilogue
from cutelab.kernels.dense_gemm.epilogue_sm90 import WARPS, WarpgroupEpilogue
from cutelab.mmas import MMA_ROWS, WARP, WARPGROUP


def padded(head_dim: int) -> int:
    """The head dim that TMA and wgmma can share: whole rows of 64 or 128 bytes. TMA fills in zeros."""
    step = 32 if head_dim <= 96 else 64
    return -(-head_dim // step) * step


@dataclass(frozen=True)
class Sm90ForwardConfig:
    """Everything about a forward pass on wgmma that is fixed before it is traced.

    dtype, head_dim, value_dim, left, right, scores: as in `ForwardConfig`.
    tile: (queries, keys): 64 queries for each warpgroup that multiplies. stages: of the rings of k and v.
    pingpong: whether warpgroups take turns at the tensor cores.
    """

    dtype: str
    head_dim: int
    value_dim: int
    left: bool = False
    right: bool = False
    scores: str = "plain"
    tile: tuple[int, int] = (128, 128)
    stages: int = 2
    pingpong: bool = True

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return self.tile[0] // MMA_ROWS

    @property
    def threads(self) -> int:
        return (1 + self.consumers) * WARPGROUP

    @property
    def producer_registers(self) -> int:
        return 24 if self.consumers < 3 else 32

    @property
    def consumer_registers(self) -> int:
        """Of a thread, of which a multiprocessor has 512 x 128."""
        return min((512 - self.producer_registers) // self.consumers // 8 * 8, 240)

    @property
    def width(self) -> int:
        """Columns of the tiles of q and k."""
        return padded(self.head_dim)

    @property
    def value_width(self) -> int:
        """Columns of the tiles of v and the output."""
        return padded(self.value_dim)

    @property
    def rings(self) -> tuple[TmaRing, TmaRing, TmaRing]:
        """Of q, k and v."""
        queries, keys = self.tile
        readers = self.consumers * WARPS
        return (
            TmaRing(1, (2 * queries * self.width,), readers),
            TmaRing(self.stages, (2 * keys * self.width,), readers),
            TmaRing(self.stages, (2 * keys * self.value_width,), readers),
        )

    @property
    def ring_bytes(self) -> int:
        """Shared memory of q, k and v."""
        return sum(ring.stages * ring.transaction_bytes for ring in self.rings)

    @property
    def epilogue(self) -> WarpgroupEpilogue:
        """Of the output: one buffer for each warp."""
        dtype = DTYPES[self.dtype]
        columns = gcd(self.value_width, 64)
        slices = Epilogue((MMA_ROWS // WARPS, columns), dtype, WARP, 16, 0, None, None)
        return WarpgroupEpilogue(slices, dtype, MMA_ROWS, self.value_width, 1)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block: [ q | k | v | output on its way | mbarriers ]."""
        barriers = sum(ring.barrier_bytes for ring in self.rings)
        return self.ring_bytes + self.consumers * self.epilogue.smem_bytes + barriers
