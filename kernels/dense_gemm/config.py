"""What is fixed about a GEMM before it is traced, and how to choose it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import cutlass

from cutelab.kernels.dense_gemm.epilogue import ACTIVATIONS, Epilogue
from cutelab.kernels.runtime.arch import Arch
from cutelab.kernels.runtime.errors import ConfigError
from cutelab.mmas import WARP

OUT_DTYPES = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16, "float32": cutlass.Float32}
AB_DTYPES = OUT_DTYPES | {"float32": cutlass.TFloat32}


def is_vector(size: int, element: int) -> bool:
    """Whether `size` bytes are a vector that a thread can copy, of elements of `element` bytes."""
    return element <= size <= 16 and size & (size - 1) == 0


def check_choices(config: Any, choices: dict[str, tuple]) -> None:
    """Raises ConfigError unless the fields in `choices`, and those that all share, have legal values."""
    shared = {
        "out_dtype": tuple(OUT_DTYPES),
        "a_major": ("k", "mn"),
        "b_major": ("k", "mn"),
        "bias": (None, "n", "m"),
        "activation": (None, *ACTIVATIONS),
    }
    for field, values in (choices | shared).items():
        if getattr(config, field) not in values:
            options = ", ".join(map(repr, values))
            name = f"{type(config).__name__}.{field}"
            raise ConfigError(f"{name} is {getattr(config, field)!r}: must be one of {options}")


def check_rules(config: Any, rules: dict[str, tuple[bool, str]]) -> None:
    """Raises ConfigError unless all rules hold, and those about C and D; a rule: (whether, what must be)."""
    element = OUT_DTYPES[config.out_dtype].width // 8
    vector = f"from {element} to 16, a power of two"
    shared = {
        "out_align": (is_vector(config.out_align, element), vector),
        "c_align": (config.c_align == 0 or is_vector(config.c_align, element), f"0 or {vector}"),
    }
    for field, (holds, rule) in (shared | rules).items():
        if not holds:
            name = f"{type(config).__name__}.{field}"
            raise ConfigError(f"{name} is {getattr(config, field)}: must be {rule}")


@dataclass(frozen=True)
class GemmConfig:
    """Everything about a GEMM that is fixed before it is traced.

    ab_dtype: "float16", "bfloat16" or "float32" (multiplied as tf32). out_dtype: of C and D.
    a_major, b_major: "k" if the operand has unit stride along K, else "mn".
    a_align, b_align, out_align, c_align: bytes to which every vector is aligned: base, strides and extent
        along the unit-stride mode. 16, 8 or 4 are copied by cp.async; less, through registers.
        c_align is 0 when there is no C, and the element size when C has no unit stride along N.
    bias: None, "n" (a value for each column) or "m" (for each row).
    tile: (BLK_M, BLK_N, BLK_K); warps: along M and N; stages: of the cp.async ring.
    group: rows of tiles in a group of the rasterisation.
    """

    ab_dtype: str
    out_dtype: str
    a_major: str = "k"
    b_major: str = "k"
    a_align: int = 16
    b_align: int = 16
    out_align: int = 16
    c_align: int = 0
    bias: str | None = None
    activation: str | None = None
    tile: tuple[int, int, int] = (128, 128, 32)
    warps: tuple[int, int] = (2, 2)
    stages: int = 4
    group: int = 8

    def __post_init__(self):
        check_choices(self, {"ab_dtype": tuple(AB_DTYPES)})
        element, k_step = (4, 8) if self.ab_dtype == "float32" else (2, 16)
        m, n, k = self.tile
        rules = {
            "a_align": (is_vector(self.a_align, element), f"from {element} to 16, a power of two"),
            "b_align": (is_vector(self.b_align, element), f"from {element} to 16, a power of two"),
            "tile": (
                m % (16 * self.warps[0]) == n % (16 * self.warps[1]) == k % k_step == 0 and k >= 2 * k_step,
                f"multiples of 16 x warps along M and N, and of {k_step} along K, at least {2 * k_step}",
            ),
            "stages": (self.stages >= 2, "at least 2, to copy one while using the other"),
            "group": (self.group >= 1, "at least 1"),
        }
        check_rules(self, rules)

    @property
    def threads(self) -> int:
        return self.warps[0] * self.warps[1] * WARP

    @property
    def epilogue(self) -> Epilogue:
        dtype = OUT_DTYPES[self.out_dtype]
        return Epilogue(
            self.tile[:2], dtype, self.threads, self.out_align, self.c_align, self.bias, self.activation
        )

    @property
    def ring_bytes(self) -> int:
        """Shared memory of the stages of A and B."""
        m, n, k = self.tile
        return self.stages * (m + n) * k * AB_DTYPES[self.ab_dtype].width // 8

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block: the ring, later overwritten by the output tile."""
        return max(self.ring_bytes, self.epilogue.smem_bytes)


@dataclass(frozen=True)
class Tiling:
    """How a GEMM is cut up. `rate`: its throughput on a large problem, relative to the fastest.

    The rates of 16-bit tilings were measured (benchmarks/NOTES.md), the others are estimates.
    """

    tile: tuple[int, int, int]
    warps: tuple[int, int]
    stages: int
    rate: float

    def options(self) -> dict[str, Any]:
        """As keyword arguments of GemmConfig."""
        return {"tile": self.tile, "warps": self.warps, "stages": self.stages}


# Of the tilings with the same output tile, the first that a chip can hold is used there.
TILINGS_16_BIT = (
    Tiling((128, 256, 64), (2, 4), 4, 1.0),
    Tiling((128, 256, 64), (2, 4), 3, 1.0),
    Tiling((128, 256, 32), (2, 4), 4, 0.98),
    Tiling((128, 128, 64), (2, 2), 3, 0.95),
    Tiling((128, 128, 32), (2, 2), 3, 0.90),
    Tiling((64, 128, 64), (2, 2), 3, 0.78),
    Tiling((64, 64, 64), (2, 2), 3, 0.64),
)
TILINGS_32_BIT = (Tiling((128, 128, 32), (2, 4), 3, 1.0), Tiling((64, 64, 32), (2, 2), 3, 0.7))
# Operands that aren't aligned to 16 bytes take many copies a thread, so more threads share a tile.
TILINGS_NARROW = (Tiling((128, 128, 32), (2, 4), 3, 1.0), Tiling((64, 64, 32), (2, 2), 3, 0.8))
WARPS_PER_SM = 8  # two for each of the four schedulers of a multiprocessor: with one, nothing hides a stall
RESERVED_BYTES = 1024  # of shared memory, that the system takes for each block


def tilings(ab_dtype: str, out_dtype: str, align: int, arch: Arch) -> list[Tiling]:
    """The tilings that `arch` can hold, for operands whose vectors are aligned to `align` bytes."""
    candidates = (
        TILINGS_32_BIT if ab_dtype == "float32" else TILINGS_16_BIT if align == 16 else TILINGS_NARROW
    )
    fitting: dict[tuple[int, int], Tiling] = {}
    for tiling in candidates:
        config = GemmConfig(ab_dtype, out_dtype, bias="n", **tiling.options())
        blocks = max(1, WARPS_PER_SM * WARP // config.threads)
        if blocks * (config.smem_bytes + RESERVED_BYTES) <= arch.smem_per_block + RESERVED_BYTES:
            fitting.setdefault(tiling.tile[:2], tiling)
    return list(fitting.values())


def count_tiles(tile: tuple[int, int, int], m: int, n: int, batch: int) -> int:
    """Tiles of the output, which is also the number of blocks."""
    return -(-m // tile[0]) * -(-n // tile[1]) * batch


def choose_tile(
    ab_dtype: str, out_dtype: str, m: int, n: int, batch: int, arch: Arch, align: int = 16
) -> dict[str, Any]:
    """The tile, warps and stages that should take the least time, as keyword arguments of GemmConfig.

    Every multiprocessor works through its share of the tiles one after the other, so the time goes with
    the number of such rounds and the size of a tile. align: the smaller of A's and B's.
    """

    def cost(tiling: Tiling) -> float:
        rounds = -(-count_tiles(tiling.tile, m, n, batch) // arch.sm_count)
        return rounds * tiling.tile[0] * tiling.tile[1] / tiling.rate

    return min(tilings(ab_dtype, out_dtype, align, arch), key=cost).options()


def shipped_configs(arch: Arch) -> Iterator[GemmConfig]:
    """A sample of what `gemm` may compile for `arch`, chosen to reach every branch of the kernel: each tiling
    with each way of storing the operands, each alignment, and the epilogues that need the most registers."""
    majors = list(product(("k", "mn"), repeat=2))
    vectors = [("bfloat16", align) for align in (16, 8, 4, 2)] + [("float32", align) for align in (16, 8, 4)]
    for dtype, align in vectors:
        for tiling in tilings(dtype, dtype, align, arch):
            for a_major, b_major in majors if align == 16 else majors[::3]:
                yield GemmConfig(dtype, dtype, a_major, b_major, align, align, align, **tiling.options())
    for tiling in tilings("bfloat16", "bfloat16", 8, arch):
        yield GemmConfig("bfloat16", "bfloat16", "k", "mn", 16, 2, 8, **tiling.options())
    for tiling in tilings("float16", "float32", 16, arch):
        yield GemmConfig("float16", "float32", bias="n", **tiling.options())
    for tiling in tilings("float16", "float16", 16, arch)[:2]:
        base = GemmConfig("float16", "float16", **tiling.options())
        for activation, bias, c_align in product((None, *ACTIVATIONS), (None, "n"), (0, 16)):
            if activation in (None, "gelu") or (bias and c_align):
                yield replace(base, activation=activation, bias=bias, c_align=c_align)
        yield GemmConfig("float16", "bfloat16", "mn", "mn", activation="gelu", **tiling.options())
        yield GemmConfig("bfloat16", "bfloat16", c_align=2, bias="m", **tiling.options())
