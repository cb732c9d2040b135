"""What is fixed about Hopper's attention before it is traced."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from cutelab.copies import TmaRing
from cutelab.kernels.attention.config import DTYPES, SCORES, check_choice, check_operands
from cutelab.kernels.dense_gemm.epilogue import Epilogue
from cutelab.kernels.dense_gemm.epilogue_sm90 import WARPS, WarpgroupEpilogue
from cutelab.kernels.runtime.arch import Arch
from cutelab.kernels.runtime.errors import ConfigError
from cutelab.mmas import MMA_ROWS, WARP, WARPGROUP

STATE_REGISTERS = 44
"""Of a thread, beside what it holds of tiles. With fewer, ptxas spills."""


def padded(head_dim: int) -> int:
    """The head dim that TMA and wgmma can share: whole rows of 64 or 128 bytes. TMA fills in zeros."""
    step = 32 if head_dim <= 96 else 64
    return -(-head_dim // step) * step


@dataclass(frozen=True)
class Sm90ForwardConfig:
    """Everything about a forward pass on wgmma that is fixed before it is traced.

    dtype, head_dim, value_dim, left, right, scores, varlen: as in `ForwardConfig`.
    tile: (queries, keys): 64 queries for each warpgroup that multiplies, of which there are one to three.
    stages: of the rings of k and v.
    pingpong: whether warpgroups take turns at the tensor cores.
    """

    dtype: str
    head_dim: int
    value_dim: int
    left: bool = False
    right: bool = False
    scores: str = "plain"
    varlen: bool = False
    tile: tuple[int, int] = (128, 128)
    stages: int = 2
    pingpong: bool = True

    def __post_init__(self) -> None:
        check_operands(self)
        check_choice(self, "scores", SCORES)
        queries, keys = self.tile
        if queries not in (64, 128, 192) or keys % 16 or not 16 <= keys <= 256:
            raise ConfigError(
                f"Sm90ForwardConfig.tile is {self.tile}: must be 64, 128 or 192 queries and a multiple of 16 "
                "keys up to 256"
            )
        if self.stages < 1:
            raise ConfigError(f"Sm90ForwardConfig.stages is {self.stages}: must be at least 1")

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
    def registers_needed(self) -> int:
        """Of a thread that multiplies: output, scores and their powers, addresses and the softmax's state."""
        return self.value_width // 2 + self.tile[1] * 3 // 4 + STATE_REGISTERS

    def fits(self, arch: Arch) -> bool:
        return self.registers_needed <= self.consumer_registers and self.smem_bytes <= arch.smem_per_block

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


def choose_tile(head_dim: int, value_dim: int, masked: bool, arch: Arch) -> tuple[int, int]:
    """The tile of 128 queries with the most keys for which there is room.

    masked: whether queries see different keys. Then 128 keys at most: of the blocks at the edge of what a
    tile sees, half is computed for nothing, and that half grows with the block.
    """
    widest = 128 if masked else 192
    for keys in range(widest, 0, -16):
        tile = 128, keys
        if Sm90ForwardConfig("bfloat16", head_dim, value_dim, tile=tile).fits(arch):
            return tile
    raise ConfigError(f"no tile of attention fits on {arch.name} with head dims {head_dim} and {value_dim}")


def shipped_configs(arch: Arch) -> Iterator[Sm90ForwardConfig]:
    """A sample of what attention may compile for Hopper, chosen to reach every branch of the kernel."""
    for dims in ((64, 64), (128, 128), (256, 256)):
        whole, masked = (choose_tile(*dims, masked, arch) for masked in (False, True))
        yield Sm90ForwardConfig("bfloat16", *dims, tile=whole)
        yield Sm90ForwardConfig("float16", *dims, right=True, tile=masked)
        yield Sm90ForwardConfig("bfloat16", *dims, True, True, "capped", varlen=True, tile=masked)
    for dims in ((8, 8), (72, 96), (192, 128), (192, 192), (40, 256)):
        yield Sm90ForwardConfig("bfloat16", *dims, right=True, tile=choose_tile(*dims, True, arch))
    yield Sm90ForwardConfig("float16", 64, 64, True, scores="scaled", tile=choose_tile(64, 64, True, arch))
