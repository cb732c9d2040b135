"""What is fixed about an attention kernel before it is traced, and how to choose it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import cutlass

from cutelab.kernels.attention.epilogue import OutputTile
from cutelab.kernels.runtime.arch import Arch
from cutelab.kernels.runtime.errors import ConfigError
from cutelab.mmas import WARP

DTYPES = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}
SCORES = ("plain", "scaled", "capped")
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8  # elements of 16 bytes: the vectors that are copied
RESERVED_BYTES = 1024  # of shared memory, that the system takes for each block


@dataclass(frozen=True)
class ForwardConfig:
    """Everything about a forward pass on mma.sync that is fixed before it is traced.

    head_dim, value_dim: of q and k, and of v and the output; multiples of 8.
    left, right: whether the keys that a query sees are bounded on that side.
    scores: "plain" (the softmax's scale is positive and all there is), "scaled" (it may be anything), or
        "capped" (softcap).
    varlen: whether sequences of different lengths lie one after the other.
    tile: (queries, keys); warps: along the queries; stages: of the ring of k and v.
    q_in_registers: whether q is read from shared memory once, or for every block of keys.
    """

    dtype: str
    head_dim: int
    value_dim: int
    left: bool = False
    right: bool = False
    scores: str = "plain"
    varlen: bool = False
    tile: tuple[int, int] = (128, 64)
    warps: int = 4
    stages: int = 1
    q_in_registers: bool = False

    def __post_init__(self):
        check_operands(self)
        check_choice(self, "scores", SCORES)
        queries, keys = self.tile
        rules = {
            "tile": (
                queries > 0 and keys > 0 and queries % (16 * self.warps) == keys % 16 == 0,
                "multiples of 16 x warps queries, and of 16 keys",
            ),
            "stages": (self.stages >= 1, "at least 1"),
        }
        for field, (holds, rule) in rules.items():
            if not holds:
                raise ConfigError(f"ForwardConfig.{field} is {getattr(self, field)}: must be {rule}")

    @property
    def threads(self) -> int:
        return self.warps * WARP

    def padded(self, head_dim: int) -> int:
        """What the tensor cores take, whole k-blocks of 16, and the threads that copy can share evenly."""
        vectors = self.threads // math.gcd(self.threads, self.tile[1])  # of a row, one for each thread
        step = max(16 if max(self.head_dim, self.value_dim) <= 128 else 32, HEAD_DIM_STEP * vectors)
        return -(-head_dim // step) * step

    @property
    def width(self) -> int:
        """Columns of the tiles of q and k."""
        return self.padded(self.head_dim)

    @property
    def value_width(self) -> int:
        """Columns of the tiles of v and the output."""
        return self.padded(self.value_dim)

    @property
    def output(self) -> OutputTile:
        """The tile of the output; its bytes take the place of everything else in shared memory."""
        shape = self.tile[0], self.value_width
        return OutputTile(shape, self.value_dim, DTYPES[self.dtype], self.threads)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block: q and the ring of k and v, later overwritten by the output."""
        queries, keys = self.tile
        elements = queries * self.width + self.stages * keys * (self.width + self.value_width)
        return max(2 * elements, self.output.smem_bytes)


def check_operands(config: Any) -> None:
    """Raises ConfigError unless dtype, head_dim and value_dim of a configuration can be computed with."""
    check_choice(config, "dtype", tuple(DTYPES))
    for field in ("head_dim", "value_dim"):
        value = getattr(config, field)
        if value % HEAD_DIM_STEP or not HEAD_DIM_STEP <= value <= MAX_HEAD_DIM:
            raise ConfigError(f"{type(config).__name__}.{field} is {value}: must be {legal_head_dims(value)}")


def check_choice(config: Any, field: str, values: tuple[str, ...]) -> None:
    """Raises ConfigError unless the field is one of `values`."""
    value = getattr(config, field)
    if value not in values:
        options = ", ".join(map(repr, values))
        raise ConfigError(f"{type(config).__name__}.{field} is {value!r}: must be one of {options}")


def legal_head_dims(value: int) -> str:
    """What a head dim must be, with the nearest that is so."""
    nearest = min(max(HEAD_DIM_STEP, -(-value // HEAD_DIM_STEP) * HEAD_DIM_STEP), MAX_HEAD_DIM)
    return f"a multiple of {HEAD_DIM_STEP} from {HEAD_DIM_STEP} to {MAX_HEAD_DIM}; the nearest is {nearest}"


@dataclass(frozen=True)
class Tiling:
    """How a forward pass is cut up, for head dims up to `head_dim`.

    blocks: on a multiprocessor at a time, for which there must be shared memory: two, so that the tensor
    cores work for one while the other computes its softmax, or one that has the warps of two.
    rate: throughput on a long sequence, relative to the fastest; estimates.
    """

    head_dim: int
    tile: tuple[int, int]
    warps: int
    stages: int
    q_in_registers: bool = False
    blocks: int = 2
    rate: float = 1.0

    def options(self) -> dict[str, Any]:
        """As keyword arguments of ForwardConfig."""
        return {
            "tile": self.tile,
            "warps": self.warps,
            "stages": self.stages,
            "q_in_registers": self.q_in_registers,
        }


# Of the tilings with as many queries, the first that takes the head dim and that a chip can hold is used.
TILINGS = (
    Tiling(64, (128, 64), 4, 2, q_in_registers=True),
    Tiling(64, (64, 64), 4, 2, q_in_registers=True, rate=0.8),
    Tiling(128, (128, 64), 4, 2),
    Tiling(128, (128, 64), 4, 1),
    Tiling(128, (128, 32), 4, 1),
    Tiling(128, (64, 64), 4, 2, rate=0.7),
    Tiling(128, (64, 64), 4, 1, rate=0.7),
    Tiling(256, (128, 64), 8, 2, blocks=1),
    Tiling(256, (128, 64), 8, 1, blocks=1),
    Tiling(256, (64, 64), 4, 1, rate=0.8),
    Tiling(256, (64, 64), 4, 1, blocks=1, rate=0.8),
)


def tilings(head_dim: int, value_dim: int, arch: Arch) -> list[Tiling]:
    """The tilings that `arch` can hold with the larger head dim, with different numbers of queries."""
    fitting: dict[int, Tiling] = {}
    widest = max(head_dim, value_dim)
    for tiling in TILINGS:
        if widest > tiling.head_dim:
            continue
        config = ForwardConfig("bfloat16", widest, widest, **tiling.options())
        if tiling.blocks * (config.smem_bytes + RESERVED_BYTES) <= arch.smem_per_block + RESERVED_BYTES:
            fitting.setdefault(tiling.tile[0], tiling)
    return list(fitting.values())


def choose_tiling(head_dim: int, value_dim: int, queries: int, heads: int, arch: Arch) -> dict[str, Any]:
    """The tiling that should take the least time, as keyword arguments of ForwardConfig.

    queries: of a sequence. heads: of queries, over the whole batch.
    """

    def cost(tiling: Tiling) -> float:
        tiles = -(-queries // tiling.tile[0]) * heads
        rounds = -(-tiles // (arch.sm_count * tiling.blocks))
        return rounds * tiling.tile[0] * tiling.blocks / tiling.rate

    return min(tilings(head_dim, value_dim, arch), key=cost).options()


def shipped_configs(arch: Arch) -> Iterator[ForwardConfig]:
    """A sample of what attention may compile for `arch`, chosen to reach every branch of the kernel."""
    for dims in ((64, 64), (128, 128), (256, 256)):
        for tiling in tilings(*dims, arch):
            base = ForwardConfig("bfloat16", *dims, **tiling.options())
            yield base
            yield replace(base, dtype="float16", right=True)
            yield replace(base, left=True, right=True, varlen=True, scores="capped")
    for dims in (
        (8, 8),
        (32, 32),
        (72, 72),
        (96, 96),
        (80, 112),
        (192, 128),
        (64, 128),
        (40, 256),
        (136, 136),
    ):
        for tiling in tilings(*dims, arch):
            yield ForwardConfig("bfloat16", *dims, right=True, **tiling.options())
    for tiling in tilings(64, 64, arch):
        yield ForwardConfig("float16", 64, 64, left=True, scores="scaled", **tiling.options())
