"""GEMM for Ampere: cp.async, swizzled shared memory, ldmatrix, mma.sync. Runs on sm_80 and everything newer.

Read it after `layouts/tiles.py`, `copies/vectorized.py`, `copies/cp_async.py` and `mmas/fragments.py`, whose
parts it puts together.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, nullptr

from cutelab.copies import CpAsyncRing, TileLoader, operand_copies, tile_copy
from cutelab.kernels.dense_gemm.epilogue import ACTIVATIONS, Epilogue
from cutelab.kernels.dense_gemm.scheduler import GroupedRaster
from cutelab.kernels.runtime.arch import Arch
from cutelab.kernels.runtime.errors import ConfigError
from cutelab.layouts.tiles import smem_tile
from cutelab.mmas import WARP, OperandPipeline, tiled_mma

OUT_DTYPES = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16, "float32": cutlass.Float32}
AB_DTYPES = OUT_DTYPES | {"float32": cutlass.TFloat32}


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
    def stage_bytes(self) -> int:
        """Bytes of one stage of A and B."""
        m, n, k = self.tile
        return (m + n) * k * AB_DTYPES[self.ab_dtype].width // 8

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block: the ring, later overwritten by the output tile."""
        return max(self.stages * self.stage_bytes, self.epilogue.smem_bytes)


class GemmSm80:
    """D = activation(alpha · A·Bᵀ + beta · C + bias), A (M, K), B (N, K), C and D (M, N), each batched.

    Roles: all warps do everything: each copies a share of the tiles and computes its part of the output.

    Pipelines: a ring of `stages` shared-memory buffers, filled by cp.async `stages - 1` k-tiles ahead; inside
    a k-tile, the operands of k-block i + 1 are loaded into registers while those of i are multiplied.

        k-tile    t                                              t + 1
        k-block   0            1            …   last             0
        cp.async  A,B(t+S-1)   ·                wait(t+1), sync  A,B(t+S)
        ldmatrix  1            2            …   0 of t + 1       1
        mma       0            1            …   last             0

    The k-tile that may stick out of A and B is loaded first, with predicates along K; the order of a sum
    doesn't matter, and the loop that follows needs predicates along M and N alone. K = 0 is such a tile: all zeros.

    Shared memory: [ A: stages × (BLK_M, BLK_K) | B: stages × (BLK_N, BLK_K) ], overwritten at the end by
    [ D: (BLK_M, BLK_N) | bias ].  Registers: (BLK_M · BLK_N) / threads accumulators and two k-blocks of operands.
    """

    def __init__(self, config: GemmConfig):
        check(config)
        self.config = config
        self.raster = GroupedRaster(config.group)

    def example_args(self) -> tuple:
        """Arguments of the right types for `cute.compile(self.launch, …)`: null pointers and ones."""
        cfg = self.config
        ab, out = AB_DTYPES[cfg.ab_dtype], OUT_DTYPES[cfg.out_dtype]

        def pointer(dtype, align):
            return nullptr(dtype, cute.AddressSpace.gmem, assumed_align=max(align, dtype.width // 8))

        a, b = pointer(ab, cfg.a_align), pointer(ab, cfg.b_align)
        c, bias, d = pointer(out, cfg.c_align), pointer(out, 0), pointer(out, cfg.out_align)
        sizes, strides = (1,) * 5, (1,) * 13
        return (a, b, c, bias, d, *sizes, *strides, 1.0, 0.0, make_fake_stream())

    @cute.jit
    def launch(
        self,
        a: cute.Pointer,
        b: cute.Pointer,
        c: cute.Pointer,
        bias: cute.Pointer,
        d: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        l0: Int32,
        l1: Int32,
        a_ld: Int64,
        a_l0: Int64,
        a_l1: Int64,
        b_ld: Int64,
        b_l0: Int64,
        b_l1: Int64,
        c_m: Int64,
        c_n: Int64,
        c_l0: Int64,
        c_l1: Int64,
        d_ld: Int64,
        d_l0: Int64,
        d_l1: Int64,
        alpha: Float32,
        beta: Float32,
        stream,
    ):
        """Launches the kernel. Sizes and strides are in elements; `ld` is the stride of the mode whose stride
        isn't 1, l0 and l1 are the two batch modes (stride 0 broadcasts). C and bias are ignored if the
        config has none."""
        cfg = self.config
        batch = (l0, l1)
        mA = operand(a, (m, k, batch), cfg.a_major, cfg.a_align, a_ld, (a_l0, a_l1))
        mB = operand(b, (n, k, batch), cfg.b_major, cfg.b_align, b_ld, (b_l0, b_l1))
        mD = operand(d, (m, n, batch), "k", cfg.out_align, d_ld, (d_l0, d_l1))
        mC, mBias = None, None
        if cutlass.const_expr(cfg.c_align * 8 > mD.element_type.width):
            mC = operand(c, (m, n, batch), "k", cfg.c_align, c_m, (c_l0, c_l1))
        elif cutlass.const_expr(cfg.c_align):
            mC = cute.make_tensor(c, cute.make_layout((m, n, batch), stride=(c_m, c_n, (c_l0, c_l1))))
        if cutlass.const_expr(cfg.bias is not None):
            mBias = cute.make_tensor(bias, cute.make_layout(n if cutlass.const_expr(cfg.bias == "n") else m))
        tiles = cute.ceil_div((m, n), cfg.tile[:2])
        self.kernel(mA, mB, mC, mBias, mD, alpha, beta).launch(
            grid=self.raster.grid(tiles, batch),
            block=(cfg.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mA: cute.Tensor,  # (M, K, (L0, L1))
        mB: cute.Tensor,  # (N, K, (L0, L1))
        mC: cute.Tensor | None,  # (M, N, (L0, L1))
        mBias: cute.Tensor | None,  # (N,) or (M,)
        mD: cute.Tensor,  # (M, N, (L0, L1))
        alpha: Float32,
        beta: Float32,
    ):
        cfg = self.config
        blk_m, blk_n, blk_k = cfg.tile
        m, n, batch = mD.shape
        k = mA.shape[1]
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        m_tile, n_tile, l = self.raster.tile(block, cute.ceil_div((m, n), cfg.tile[:2]), batch)

        smem = cutlass.memory.SmemAllocator().allocate(cfg.smem_bytes, byte_alignment=1024)
        sA, sB = self.stages(smem, mA.element_type)  # (BLK_M, BLK_K, PIPE), (BLK_N, BLK_K, PIPE)
        load_A = self.loader("a", mA[None, None, l], m_tile, sA, thread)
        load_B = self.loader("b", mB[None, None, l], n_tile, sB, thread)
        mma = tiled_mma(mA.element_type, cfg.warps)
        copy_A, copy_B = operand_copies(mma, mA.element_type, cfg.a_major, cfg.b_major)
        operands = OperandPipeline.partition(mma, copy_A, copy_B, sA, sB, thread)
        acc = cute.make_rmem_tensor(mma.partition_shape_C((blk_m, blk_n)), Float32)  # (MMA, MMA_M, MMA_N)
        acc.fill(0.0)

        self.mainloop(load_A, load_B, operands, cute.ceil_div(k, blk_k), acc)

        cD = cute.local_tile(cute.make_identity_tensor((m, n)), (blk_m, blk_n), (m_tile, n_tile))
        gD = cute.local_tile(mD[None, None, l], (blk_m, blk_n), (m_tile, n_tile))
        gC = None
        if cutlass.const_expr(mC is not None):
            gC = cute.local_tile(mC[None, None, l], (blk_m, blk_n), (m_tile, n_tile))
        thr_mma = mma.get_slice(thread)
        cfg.epilogue.store(acc, thr_mma, smem, gC, mBias, gD, cD, (m, n), alpha, beta, thread)

    def stages(self, smem: cute.Pointer, dtype: type[cutlass.Numeric]) -> tuple[cute.Tensor, cute.Tensor]:
        """The ring in shared memory: (BLK_M, BLK_K, PIPE) of A, then (BLK_N, BLK_K, PIPE) of B."""
        cfg = self.config
        blk_m, blk_n, blk_k = cfg.tile
        layout_A = operand_tile((blk_m, blk_k, cfg.stages), cfg.a_major, dtype.width)
        layout_B = operand_tile((blk_n, blk_k, cfg.stages), cfg.b_major, dtype.width)
        pointer = cute.recast_ptr(smem, dtype=dtype)
        return cute.make_tensor(pointer, layout_A), cute.make_tensor(pointer + cute.cosize(layout_A), layout_B)

    def loader(
        self, operand: str, mX: cute.Tensor, tile: Int32, sX: cute.Tensor, thread: Int32
    ) -> TileLoader:
        """The global-to-shared loader of operand "a" or "b": mX is (M or N, K), sX its ring of stages."""
        cfg = self.config
        major, align = (cfg.a_major, cfg.a_align) if operand == "a" else (cfg.b_major, cfg.b_align)
        block = cute.size(sX, mode=[0]), cute.size(sX, mode=[1])
        contiguous = 1 if major == "k" else 0
        copy = tile_copy(mX.element_type, block, contiguous, align, cfg.threads, asynchronous=True)
        return TileLoader.partition(copy, mX, sX, tile, thread)

    @cute.jit
    def mainloop(
        self,
        load_A: TileLoader,
        load_B: TileLoader,
        operands: OperandPipeline,
        k_tiles: Int32,
        acc: cute.Tensor,  # (MMA, MMA_M, MMA_N)
    ):
        """acc += A·Bᵀ over all k-tiles, in the order last, 0, 1, 2, …"""
        ring = CpAsyncRing(self.config.stages)
        k_tiles = cutlass.max(k_tiles, 1)  # K = 0: one k-tile of zeros
        load_A.load_last(k_tiles - 1, 0)
        load_B.load_last(k_tiles - 1, 0)
        ring.commit()
        for stage in cutlass.range_constexpr(1, ring.stages - 1):
            if stage < k_tiles:
                load_A.load_next(stage, (0, load_A.vectors))
                load_B.load_next(stage, (0, load_B.vectors))
            ring.commit()

        ring.wait()
        operands.load(0, ring.read)
        copying = cutlass.max(k_tiles - (ring.stages - 1), 0)
        for _ in cutlass.range(copying):
            self.multiply_k_tile(ring, operands, acc, load_A, load_B)
            ring.advance()
        for _ in cutlass.range(k_tiles - copying):
            self.multiply_k_tile(ring, operands, acc)
            ring.advance()
        ring.drain()

    @cute.jit
    def multiply_k_tile(
        self,
        ring: CpAsyncRing,
        operands: OperandPipeline,
        acc: cute.Tensor,
        load_A: TileLoader | None = None,
        load_B: TileLoader | None = None,
    ):
        """acc += A·Bᵀ for the k-tile in stage `ring.read`, while the loaders fill stage `ring.write`.

        The copies are spread over the k-blocks: issued at once, they would hold up the ldmatrix behind them.
        """
        last = operands.k_blocks - 1
        for k_block in cutlass.range_constexpr(last):
            operands.load(k_block + 1, ring.read)
            if cutlass.const_expr(load_A is not None):
                load_A.load_next(ring.write, share(load_A.vectors, k_block, last))
                load_B.load_next(ring.write, share(load_B.vectors, k_block, last))
            operands.mma(k_block, acc)
        ring.commit()
        ring.wait()
        operands.load(0, ring.next)
        operands.mma(last, acc)


def share(count: int, part: int, parts: int) -> tuple[int, int]:
    """The bounds of the `part`-th of `parts` nearly equal shares of `count` things."""
    return count * part // parts, count * (part + 1) // parts


def operand_tile(shape: tuple[int, int, int], major: str, bits: int) -> cute.ComposedLayout:
    """Shared memory of an operand: (BLK_MN, BLK_K, PIPE), conflict-free for cp.async and for the loads into
    the tensor cores' registers: ldmatrix, or, for 32-bit elements contiguous along M or N, plain loads that
    want eight neighbours kept together."""
    granule = 32 if bits == 32 and major == "mn" else 16
    return smem_tile(shape, 1 if major == "k" else 0, bits, granule)


def operand(
    pointer: cute.Pointer, shape: tuple, major: str, align: int, ld: Int64, batch_strides: tuple[Int64, Int64]
) -> cute.Tensor:
    """A (rows, columns, (L0, L1)) tensor with unit stride along columns ("k") or rows ("mn").

    Tells the compiler which strides are multiples of `align` bytes, which is what vector copies ask for.
    """
    divisor = align * 8 // pointer.dtype.width
    ld, l0, l1 = (cute.assume(x, divby=divisor) for x in (ld, *batch_strides))
    strides = (ld, 1, (l0, l1)) if major == "k" else (1, ld, (l0, l1))
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=strides))


@dataclass(frozen=True)
class Tiling:
    """How a GEMM is cut up. `rate`: its throughput in the middle of a large problem, relative to the fastest."""

    tile: tuple[int, int, int]
    warps: tuple[int, int]
    stages: int
    rate: float

    def options(self) -> dict:
        return {"tile": self.tile, "warps": self.warps, "stages": self.stages}


TILINGS_16_BIT = (
    Tiling((128, 256, 64), (2, 4), 4, 1.0),
    Tiling((128, 256, 64), (2, 4), 3, 1.0),
    Tiling((128, 128, 64), (2, 2), 3, 0.95),
    Tiling((128, 128, 32), (2, 2), 4, 0.9),
    Tiling((64, 64, 64), (2, 2), 4, 0.6),
)
TILINGS_32_BIT = (Tiling((128, 128, 32), (2, 4), 3, 1.0), Tiling((64, 64, 32), (2, 2), 4, 0.7))
TILINGS_NARROW = (Tiling((128, 128, 32), (2, 4), 3, 1.0), Tiling((64, 64, 32), (2, 2), 4, 0.8))


def choose_tile(ab_dtype: str, m: int, n: int, k: int, batch: int, arch: Arch, align: int = 16) -> dict:
    """The tile, warps and stages that should take the least time, as keyword arguments of GemmConfig.

    Every multiprocessor works through its share of the tiles one after the other, so the time goes with
    the number of such waves and the size of a tile.
    """
    tilings = TILINGS_32_BIT if ab_dtype == "float32" else TILINGS_16_BIT if align == 16 else TILINGS_NARROW

    def cost(tiling: Tiling) -> float:
        blk_m, blk_n, _ = tiling.tile
        tiles = -(-m // blk_m) * -(-n // blk_n) * batch
        return -(-tiles // arch.sm_count) * blk_m * blk_n / tiling.rate

    element = 4 if ab_dtype == "float32" else 2
    fitting = [t for t in tilings if (t.tile[0] + t.tile[1]) * t.tile[2] * element * t.stages <= arch.smem_per_block]
    return min(fitting, key=cost).options()


def check(config: GemmConfig):
    """Raises ConfigError, naming the field, its value and what is legal."""

    def require(condition: bool, field: str, legal: str):
        if not condition:
            raise ConfigError(f"GemmConfig.{field} = {getattr(config, field)!r}: must be {legal}")

    require(config.ab_dtype in AB_DTYPES, "ab_dtype", f"one of {', '.join(AB_DTYPES)}")
    require(config.out_dtype in OUT_DTYPES, "out_dtype", f"one of {', '.join(OUT_DTYPES)}")
    for field in ("a_major", "b_major"):
        require(getattr(config, field) in ("k", "mn"), field, "'k' or 'mn'")
    require(config.bias in (None, "m", "n"), "bias", "None, 'n' or 'm'")
    require(
        config.activation in (None, *ACTIVATIONS), "activation", f"None or one of {', '.join(ACTIVATIONS)}"
    )
    require(config.stages >= 2, "stages", "at least 2")
