"""A Hopper GEMM without roles: what TMA and wgmma are worth before warps specialise. Runs on sm_90a.

Its tile, its two warpgroups, its order of tiles and its epilogue are those of `GemmSm90`, so that the two
differ in nothing but who copies when. The first two steps of `gemm_steps.py` are this kernel.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, pipeline
from cutlass.cute.runtime import make_fake_stream, nullptr

from cutelab.copies import TmaLoader, TmaRing, load_atom, store_atom
from cutelab.kernels.dense_gemm.config_sm90 import Sm90Config
from cutelab.kernels.dense_gemm.epilogue_sm90 import Output
from cutelab.kernels.dense_gemm.operands import flat_batch, operand_tensor
from cutelab.kernels.dense_gemm.scheduler import GroupedRaster
from cutelab.layouts import swizzled_tensor, tma_tile
from cutelab.mmas import WARP, WARPGROUP, StagedProduct, warpgroup_mma


@dataclass(frozen=True)
class PlainConfig:
    """tile: (BLK_M, BLK_N, BLK_K). stages: of the ring of TMA copies; with one, nothing overlaps."""

    tile: tuple[int, int, int] = (128, 256, 64)
    stages: int = 1

    @property
    def like(self) -> Sm90Config:
        """The GEMM with roles whose tile, warpgroups and epilogue this one has."""
        return Sm90Config("bfloat16", "bfloat16", tile=self.tile, cluster=(1, 1))

    @property
    def ring(self) -> TmaRing:
        return TmaRing(self.stages, self.like.ring.copy_bytes, self.like.ring.readers)

    @property
    def ahead(self) -> int:
        """K-tiles whose copies have been started when the first one is multiplied."""
        return max(self.stages - 1, 1)

    @property
    def ring_bytes(self) -> int:
        return self.stages * self.ring.transaction_bytes

    @property
    def smem_bytes(self) -> int:
        """Shared memory: [ A | B | the warpgroups' epilogues | mbarriers ]."""
        return self.ring_bytes + self.like.consumers * self.like.epilogue.smem_bytes + self.ring.barrier_bytes


class PlainGemm:
    """D = A·Bᵀ in bf16, A (M, K) and B (N, K) with unit stride along K, D (M, N) with unit stride along N.

    A CTA computes one tile, each of its two warpgroups half of the rows. Warp 0 multiplies as all others do
    and starts the TMA copies besides, for a stage as soon as all have released it:

        1 stage    copy 0 ───┤ mma 0 │ copy 1 ───┤ mma 1 │ copy 2 ───┤ mma 2 │ …
        4 stages   copy 0 ───┤ mma 0 │ mma 1 │ mma 2 │ mma 3 │ …
                   copy 1 ───┤       │ copy 4 ───┤
                   copy 2 ───┤               │ copy 5 ───┤
    """

    def __init__(self, config: PlainConfig):
        self.config = config
        self.raster = GroupedRaster()

    def example_args(self) -> tuple:
        pointer = nullptr(BFloat16, cute.AddressSpace.gmem, assumed_align=16)
        return (pointer, pointer, pointer, *(1,) * 6, make_fake_stream())

    @cute.jit
    def launch(
        self,
        a: cute.Pointer,
        b: cute.Pointer,
        d: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        a_ld: Int64,
        b_ld: Int64,
        d_ld: Int64,
        stream,
    ):
        cfg = self.config
        one, still = (1, 1), (Int64(0), Int64(0))  # a batch of one
        mA = flat_batch(operand_tensor(a, (m, k, one), "k", 16, a_ld, still))
        mB = flat_batch(operand_tensor(b, (n, k, one), "k", 16, b_ld, still))
        mD = operand_tensor(d, (m, n, one), "k", 16, d_ld, still)
        blk_m, blk_n, blk_k = cfg.tile
        load_A = load_atom(mA, tma_tile((blk_m, blk_k), 1, 16))
        load_B = load_atom(mB, tma_tile((blk_n, blk_k), 1, 16))
        store_D, tmaD = store_atom(flat_batch(mD), tma_tile(cfg.like.epilogue.slices.tile, 1, 16))
        output = Output(store_D, tmaD, mD, None, None, Float32(1.0), Float32(0.0))
        tiles = cute.ceil_div((m, n), (blk_m, blk_n))
        self.kernel(*load_A, *load_B, output).launch(
            grid=self.raster.grid(tiles, one), block=(2 * WARPGROUP, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        load_A: cute.CopyAtom,
        tmaA: cute.Tensor,
        load_B: cute.CopyAtom,
        tmaB: cute.Tensor,
        output: Output,
    ):
        cfg, epilogue = self.config, self.config.like.epilogue
        blk_m, blk_n, blk_k = cfg.tile
        m, n, _ = output.mD.shape
        warpgroup = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP)
        smem = cutlass.memory.SmemAllocator().allocate(cfg.smem_bytes, byte_alignment=1024)
        bytes_A = cfg.stages * cfg.ring.copy_bytes[0]
        sA = swizzled_tensor(smem, tma_tile((blk_m, blk_k, cfg.stages), 1, 16), BFloat16)
        sB = swizzled_tensor(smem + bytes_A, tma_tile((blk_n, blk_k, cfg.stages), 1, 16), BFloat16)
        ring = cfg.ring.create(smem + (cfg.smem_bytes - cfg.ring.barrier_bytes))
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()

        tiles = cute.ceil_div((m, n), (blk_m, blk_n))
        m_tile, n_tile, batch = self.raster.tile(cute.arch.block_idx()[0], tiles, (1, 1))
        loaders = TmaLoader.partition(load_A, tmaA, sA), TmaLoader.partition(load_B, tmaB, sB)
        rows_A = cute.local_tile(sA, (blk_m // 2, blk_k, cfg.stages), (warpgroup, 0, 0))
        mma = warpgroup_mma(BFloat16, blk_n)
        product = StagedProduct.partition(mma, rows_A, sB)
        acc = cute.make_rmem_tensor(mma.partition_shape_C((blk_m // 2, blk_n)), Float32)
        self.mainloop(ring, loaders, (m_tile, n_tile), product, cute.ceil_div(tmaA.shape[1], blk_k), acc)

        smem = smem + cfg.ring_bytes + cute.assume(warpgroup * epilogue.smem_bytes, divby=1024)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        place = m_tile * 2 + warpgroup, n_tile
        epilogue.store(acc, smem, output, None, place, batch, thread, None)
        epilogue.drain()

    @cute.jit
    def mainloop(
        self,
        ring: pipeline.PipelineTmaAsync,
        loaders: tuple[TmaLoader, TmaLoader],
        place: tuple[Int32, Int32],
        product: StagedProduct,
        k_tiles: Int32,
        acc: cute.Tensor,  # (MMA, MMA_M, MMA_N)
    ):
        """acc = A·Bᵀ. With several stages, one k-tile's products are at work while the next are started."""
        cfg = self.config
        at_work = min(cfg.stages - 1, 1)
        fetching = cfg.ring.producer_state()
        reading, done = cfg.ring.consumer_state(), cfg.ring.consumer_state()
        for _ in cutlass.range_constexpr(cfg.ahead):
            self.fetch(ring, loaders, place, fetching, k_tiles)
            fetching.advance()
        acc.fill(0.0)
        for k_tile in cutlass.range(k_tiles, unroll=1):
            ring.consumer_wait(reading)
            product.start(reading.index, acc)
            reading.advance()
            product.wait(at_work)
            if k_tile >= at_work:
                ring.consumer_release(done)
                done.advance()
            self.fetch(ring, loaders, place, fetching, k_tiles)
            fetching.advance()
        product.wait(0)

    @cute.jit
    def fetch(
        self,
        ring: pipeline.PipelineTmaAsync,
        loaders: tuple[TmaLoader, TmaLoader],
        place: tuple[Int32, Int32],
        state: pipeline.PipelineState,
        k_tiles: Int32,
    ):
        """Warp 0 starts the copies of the next k-tile, if there is one, when its stage is empty."""
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARP)
        if warp == 0 and state.count < k_tiles:
            ring.producer_acquire(state)
            for loader, tile in zip(loaders, place, strict=True):
                loader.load((tile, state.count, 0, 0), state.index, ring.producer_get_barrier(state))
