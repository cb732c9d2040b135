"""What is fixed about a Hopper GEMM before it is traced."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import ceil, gcd
from typing import Any, ClassVar, NamedTuple

from cutelab.copies import TMA_ALIGNMENT, TmaRing
from cutelab.kernels.dense_gemm.config import AB_DTYPES, OUT_DTYPES, check_choices, check_rules
from cutelab.kernels.dense_gemm.epilogue import TRANSCENDENTAL, Epilogue
from cutelab.kernels.dense_gemm.epilogue_sm90 import WARPS, WarpgroupEpilogue
from cutelab.kernels.dense_gemm.partial_sums import PartialSums
from cutelab.kernels.runtime.arch import Arch
from cutelab.kernels.runtime.errors import ConfigError
from cutelab.layouts.tiles import LINE_BYTES
from cutelab.mmas import MMA_ROWS, WARP, WARPGROUP

REGISTERS = 65536
"""Of a multiprocessor; a thread block gets them all."""

PRODUCER_REGISTERS = 40
"""Of a thread of the warpgroup that copies, once it has given the others up."""


@dataclass(frozen=True)
class Sm90Config:
    """Everything about a Hopper GEMM that is fixed before it is traced.

    ab_dtype: "float16" or "bfloat16". out_dtype: of C and D. a_major, b_major: "k" if the operand has unit
        stride along K, else "mn". a_align, b_align: what TMA asks of their addresses and strides.
    out_align: 16 if D has, too: then TMA writes it. Else, and c_align, bias, activation: as in `GemmConfig`.
    tile: (BLK_M, BLK_N, BLK_K); stages: of the ring of TMA copies.
    consumers: warpgroups that multiply, each its rows of every tile; in `pingpong`, whole tiles in turn.
    cluster: thread blocks along M and N that share tiles of A and B.
    group: rows of clusters' tiles in a group of the rasterisation.
    buffers: of each consumer, for output on its way to TMA.
    stream_k: whether tiles can be cut along K, see `Schedule`.
    early_launch: whether the kernel starts while the one before it ends (programmatic dependent launch).
    """

    a_align: ClassVar[int] = TMA_ALIGNMENT
    b_align: ClassVar[int] = TMA_ALIGNMENT

    ab_dtype: str
    out_dtype: str
    a_major: str = "k"
    b_major: str = "k"
    out_major: str = "k"
    out_align: int = 16
    c_align: int = 0
    bias: str | None = None
    activation: str | None = None
    tile: tuple[int, int, int] = (128, 256, 64)
    stages: int = 4
    consumers: int = 2
    pingpong: bool = False
    cluster: tuple[int, int] = (2, 1)
    group: int = 8
    buffers: int = 2
    stream_k: bool = False
    early_launch: bool = False

    def __post_init__(self) -> None:
        check_choices(self, {"ab_dtype": ("float16", "bfloat16"), "consumers": (1, 2, 3)})
        m, n, k = self.tile
        parts = 1 if self.pingpong else self.consumers
        check_rules(
            self,
            {
                "tile": (
                    m % (MMA_ROWS * parts) == 0 < m <= 256
                    and (n in (16, 32) or n % 64 == 0 < n <= 256)
                    and k in (64, 128),
                    f"a multiple of {MMA_ROWS * parts} rows up to 256, 16, 32, 64, 128, 192 or 256 columns, "
                    "and 64 or 128 along K",
                ),
                "stages": (self.stages >= 2, "at least 2, to copy one while using the other"),
                "pingpong": (
                    not self.pingpong
                    or (self.consumers, self.out_align, self.c_align, self.stream_k) == (2, 16, 0, False),
                    "False unless there are 2 consumers, no C, no stream_k, and out_align is 16",
                ),
                "cluster": (all(size in (1, 2) for size in self.cluster), "1 or 2 along M and N"),
                "group": (self.group >= 1, "at least 1"),
                "buffers": (self.buffers >= 1, "at least 1"),
            },
        )
        if self.accumulators > self.consumer_registers - 32:
            raise ConfigError(
                f"Sm90Config.tile is {self.tile}: a thread would keep {self.accumulators} accumulators, and "
                f"has {self.consumer_registers} registers, of which others need 32"
            )

    @property
    def consumer_registers(self) -> int:
        """Of a thread that multiplies: setmaxnreg hands out multiples of 8, the instruction set has 255."""
        per_thread = (REGISTERS // WARPGROUP - PRODUCER_REGISTERS) // self.consumers
        return min(per_thread // 8 * 8, 240)

    @property
    def threads(self) -> int:
        """One warpgroup to copy, the others to multiply."""
        return (1 + self.consumers) * WARPGROUP

    @property
    def rows(self) -> int:
        """Rows of a tile that one warpgroup computes."""
        return self.tile[0] if self.pingpong else self.tile[0] // self.consumers

    @property
    def ring(self) -> TmaRing:
        m, n, k = self.tile
        element = AB_DTYPES[self.ab_dtype].width // 8
        warps = WARPS * (1 if self.pingpong else self.consumers)
        return TmaRing(self.stages, (m * k * element, n * k * element), warps, self.cluster)

    @property
    def ring_bytes(self) -> int:
        """Shared memory of the stages of A and B."""
        return self.stages * self.ring.transaction_bytes

    @property
    def epilogue(self) -> WarpgroupEpilogue:
        dtype = OUT_DTYPES[self.out_dtype]
        # An activation takes registers, which are few beside the accumulators: then slices of half a line.
        line_bytes = LINE_BYTES // 2 if self.activation in TRANSCENDENTAL else LINE_BYTES
        columns = gcd(self.tile[1], line_bytes * 8 // dtype.width)
        contiguous = 1 if self.out_major == "k" else 0
        slices = Epilogue(
            (MMA_ROWS // WARPS, columns),
            dtype,
            WARP,
            self.out_align,
            self.c_align,
            self.bias,
            self.activation,
            contiguous,
            in_flight=8,
        )
        # As many slices as fill the buffers a whole number of times: each tile begins with the first buffer.
        buffers = gcd(self.rows // MMA_ROWS * (self.tile[1] // columns), self.buffers)
        return WarpgroupEpilogue(slices, AB_DTYPES[self.ab_dtype], self.rows, self.tile[1], buffers)

    @property
    def accumulators(self) -> int:
        """Of a thread."""
        return self.rows * self.tile[1] // WARPGROUP

    @property
    def smem_bytes(self) -> int:
        """Shared memory: [ A | B | the warpgroups' epilogues | mbarriers | alpha, in 16 bytes ]."""
        return self.ring_bytes + self.consumers * self.epilogue.smem_bytes + self.ring.barrier_bytes + 16


class Size(NamedTuple):
    """Of a batch of products."""

    m: int
    n: int
    k: int
    batch: int


@dataclass(frozen=True)
class Tiling:
    """How a Hopper GEMM is cut up; the fields are those of `Sm90Config`, and

    rate: of multiply-adds, relative to the fastest tiling. epilogue: seconds that a tile takes beside them.
    """

    tile: tuple[int, int, int]
    stages: int
    cluster: tuple[int, int]
    consumers: int = 2
    pingpong: bool = False
    buffers: int = 2
    rate: float = 1.0
    epilogue: float = 0.0

    def options(self) -> dict[str, Any]:
        """As keyword arguments of Sm90Config."""
        return {name: x for name, x in vars(self).items() if name not in ("rate", "epilogue")}

    @property
    def ctas(self) -> int:
        """In a cluster."""
        return self.cluster[0] * self.cluster[1]

    @property
    def accumulators(self) -> int:
        """Of a thread."""
        parts = 1 if self.pingpong else self.consumers
        return self.tile[0] * self.tile[1] // (WARPGROUP * parts)

    def cluster_tiles(self, size: Size) -> int:
        """Tiles of the output, of the size that a cluster works on."""
        rows, columns = (self.tile[i] * self.cluster[i] for i in (0, 1))
        return ceil(size.m / rows) * ceil(size.n / columns) * size.batch


TILINGS = (
    Tiling((128, 256, 64), 4, (2, 1), rate=1.0, epilogue=0.6e-6),
    Tiling((128, 192, 64), 5, (2, 1), pingpong=True, buffers=1, rate=1.0, epilogue=0.4e-6),
    Tiling((128, 128, 64), 6, (2, 1), rate=0.93, epilogue=0.4e-6),
    Tiling((128, 128, 64), 6, (1, 2), rate=0.93, epilogue=0.4e-6),
    Tiling((128, 64, 64), 8, (1, 1), consumers=1, rate=0.8, epilogue=0.3e-6),
    Tiling((64, 64, 64), 8, (1, 1), consumers=1, rate=0.6, epilogue=0.3e-6),
)

# What an H200 does (benchmarks/NOTES.md); for another Hopper the proportions are what counts.
MACS = 3.1e12
"""Multiply-adds a second and multiprocessor, at the power limit."""
DRAM, L2 = 4.2e12, 10e12
"""Bytes a second."""
LAUNCH, EARLY_LAUNCH = 3.8e-6, 2.3e-6
"""Seconds from the end of one kernel to the full speed of the next."""
EARLY_COST = 0.005
"""Of the time: what an early launch costs a kernel that fills the GPU."""
EXCHANGE = 3e-6
"""Seconds to leave and to add partial sums."""


@dataclass(frozen=True)
class Work:
    """A tiling and what its clusters do: see `Schedule`."""

    tiling: Tiling
    clusters: int
    shared: int
    early_launch: bool

    def options(self) -> dict[str, Any]:
        """As keyword arguments of Sm90Config."""
        return {**self.tiling.options(), "stream_k": self.shared > 0, "early_launch": self.early_launch}

    @property
    def workspace_bytes(self) -> int:
        """For partial sums."""
        if not self.shared:
            return 0
        slots = self.clusters * self.tiling.ctas * self.tiling.consumers
        return PartialSums.bytes(self.tiling.accumulators, slots)


def candidates(size: Size, arch: Arch, plain: bool = True) -> list[Work]:
    """Every tiling, with tiles left whole, and with those of the last wave, or of the last two, shared.

    plain: whether TMA can write D, and there is no C. If not, ping-pong has too few registers.
    """
    found = []
    for tiling in TILINGS:
        tiles, workers = tiling.cluster_tiles(size), max(1, arch.sm_count // tiling.ctas)
        last = tiles % workers
        k_tiles = ceil(size.k / tiling.tile[2])
        if tiling.pingpong and not plain:
            continue
        for shared in {0} if tiling.pingpong or not last else {0, last, min(last + workers, tiles)}:
            if (workers + 1) * shared * k_tiles < 2**31:  # `Schedule` counts in 32 bits
                clusters = workers if shared else min(workers, tiles)
                found += [Work(tiling, clusters, shared, early) for early in (False, True)]
    return found


def choose_work(size: Size, arch: Arch, plain: bool = True) -> Work:
    """The work that should take the least time."""
    return min(candidates(size, arch, plain), key=lambda work: estimate(work, size, arch))


def estimate(work: Work, size: Size, arch: Arch) -> float:
    """Seconds: what the tensor cores need, or memory if that is slower, and what is done one after the other.

    Whole tiles take rounds, in the last of which some workers idle; shared ones take exactly their share.
    """
    tiling = work.tiling
    rows, columns, depth = tiling.tile
    k_tiles, tiles = ceil(size.k / depth), tiling.cluster_tiles(size)
    k_tile = rows * columns * depth / (MACS * tiling.rate)
    rounds = ceil((tiles - work.shared) / work.clusters)
    products = (rounds + work.shared / work.clusters) * k_tiles * k_tile
    tails = (rounds + ceil(work.shared / work.clusters)) * tiling.epilogue + (EXCHANGE if work.shared else 0)
    loads = 2 * depth * (rows / tiling.cluster[1] + columns / tiling.cluster[0])
    l2 = tiles * tiling.ctas * k_tiles * loads / L2
    operands = 2 * size.batch * (size.m * size.k + size.n * size.k + size.m * size.n)
    busy = max(products + tails, l2, operands / DRAM)
    return busy * (1 + EARLY_COST) + EARLY_LAUNCH if work.early_launch else busy + LAUNCH


def shipped_sm90_configs() -> Iterator[Sm90Config]:
    """A sample of what `gemm` may compile for Hopper, chosen to reach every branch of the kernel."""
    for tiling in TILINGS:
        options = tiling.options()
        majors = list(product(("k", "mn"), repeat=2))
        for a_major, b_major in majors if tiling is TILINGS[0] else majors[::3]:
            yield Sm90Config("bfloat16", "bfloat16", a_major, b_major, **options)
        yield Sm90Config("float16", "float32", bias="n", early_launch=True, **options)
        out_align = 16 if tiling.pingpong else 2
        yield Sm90Config("float16", "float16", out_align=out_align, activation="gelu", **options)
        yield Sm90Config("bfloat16", "bfloat16", bias="m", activation="silu", **options)
        if not tiling.pingpong:
            yield Sm90Config("bfloat16", "bfloat16", bias="m", c_align=2, **options)
            yield Sm90Config(
                "float16", "float16", "k", "mn", bias="n", c_align=16, activation="silu", **options
            )
            yield Sm90Config("bfloat16", "bfloat16", stream_k=True, **options)
            yield Sm90Config("float16", "float32", c_align=16, bias="n", stream_k=True, **options)
