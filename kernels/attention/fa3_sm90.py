"""FlashAttention-3, forward: TMA, wgmma, and softmax beside the tensor cores. Runs on sm_90a.

Read it after `fa2_sm80.py`, with which it shares softmax, mask and blocks, and after the Hopper GEMM
(`dense_gemm/sm90.py`), with which it shares TMA rings, wgmma and the way out. The schedule is that of Shah et
al., FlashAttention-3, 2024.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, nullptr

from cutelab.copies import TmaLoader, load_atom, opaque, store_atom
from cutelab.kernels.attention.blocks import Band, KeyBlocks, LongestFirst
from cutelab.kernels.attention.branch import turns
from cutelab.kernels.attention.config import DTYPES
from cutelab.kernels.attention.config_sm90 import Sm90ForwardConfig
from cutelab.kernels.attention.epilogue import store_lse
from cutelab.kernels.attention.fa2_sm80 import matrix_view
from cutelab.kernels.attention.mask import Mask
from cutelab.kernels.attention.operands import rows_tensor
from cutelab.kernels.attention.softmax import Softmax, modify
from cutelab.kernels.dense_gemm.epilogue_sm90 import Output
from cutelab.layouts import accumulator_as_operand, swizzled_tensor, tma_tile
from cutelab.mmas import MMA_ROWS, WARP, WARPGROUP, StagedProduct, warpgroup_mma

EPILOGUE, TURN = 1, 4
"""Named barriers, each + warpgroup: of the way out; of its turn at the tensor cores. 0 is `sync_threads`."""


@dataclass(frozen=True)
class Inputs:
    """How TMA reads q, k and v."""

    load_Q: cute.CopyAtom
    tmaQ: cute.Tensor  # (queries, D, heads, sequences) coordinates
    load_K: cute.CopyAtom
    tmaK: cute.Tensor  # (keys, D, key heads, sequences) coordinates
    load_V: cute.CopyAtom
    tmaV: cute.Tensor  # (Dv, keys, key heads, sequences) coordinates


@dataclass(frozen=True)
class Work:
    """The tiles of queries of one CTA, every `workers`-th from `worker` on, and what each of them sees."""

    order: LongestFirst
    queries: Int32
    keys: Int32
    left: Int32 | None
    right: Int32 | None
    worker: Int32
    workers: Int32

    @property
    def total(self) -> Int32:
        return self.order.grid()[0]

    @property
    def band(self) -> Band:
        return Band(self.queries, self.keys, self.left, self.right)


@dataclass(frozen=True)
class Rings:
    """The rings of tiles in shared memory, with their mbarriers."""

    q: pipeline.PipelineTmaAsync
    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync
    sQ: cute.Tensor  # (BLK_M, D, 1)
    sK: cute.Tensor  # (BLK_N, D, PIPE)
    sV: cute.Tensor  # (Dv, BLK_N, PIPE)


class FlashAttention3Forward:
    """O = softmax(scale · Q·Kᵀ + mask)·V, for tiles of queries of one head after the other.

    Roles: a producer warp, which copies q, k and v by TMA, and two or three warpgroups with 64 rows of the
    tile each, which multiply and compute the softmax of their rows.

    Pipelines: one stage of q, a ring of k and a ring of v. The blocks of keys come from the last to the
    first. A warpgroup starts the scores of block j + 1 and the output of block j together; while the tensor
    cores work on the second, it computes the softmax of the first's results. In ping-pong, the warpgroups
    take turns at starting products, so that the softmax of one falls beside the products of the other.

        tensor cores   S₀ ₁  S₀ ₂  S₁ O₀ ₁  S₁ O₀ ₂  S₂ O₁ ₁ …       (of warpgroups 1 and 2)
        warpgroup 1          softmax₀       softmax₁         softmax₂
        warpgroup 2                softmax₀         softmax₁

    Shared memory: [ q: (BLK_M, D) | k: stages × (BLK_N, D) | v: stages × (Dv, BLK_N) | output: 16 rows of up
    to 128 bytes for each warp | mbarriers ]. Registers: the output (Dv / 2), the scores (BLK_N / 2) and their
    powers, as 16-bit operand of the second product (BLK_N / 4).
    """

    def __init__(self, config: Sm90ForwardConfig):
        self.config = config

    def example_args(self) -> tuple:
        """Arguments of the right types for `cute.compile(self.launch, …)`: null pointers and ones."""
        operand = nullptr(DTYPES[self.config.dtype], cute.AddressSpace.gmem, assumed_align=16)
        lse = nullptr(Float32, cute.AddressSpace.gmem, assumed_align=4)
        return (*(operand,) * 4, lse, *(1,) * 22, 1, 1.0, 1.0, make_fake_stream())

    @cute.jit
    def launch(
        self,
        q: cute.Pointer,
        k: cute.Pointer,
        v: cute.Pointer,
        o: cute.Pointer,
        lse: cute.Pointer,
        sequences: Int32,
        heads: Int32,
        key_heads: Int32,
        queries: Int32,
        keys: Int32,
        left: Int32,
        right: Int32,
        group: Int32,
        q_b: Int64,
        q_s: Int64,
        q_h: Int64,
        k_b: Int64,
        k_s: Int64,
        k_h: Int64,
        v_b: Int64,
        v_s: Int64,
        v_h: Int64,
        o_b: Int64,
        o_s: Int64,
        o_h: Int64,
        lse_b: Int64,
        lse_h: Int64,
        workers: Int32,
        scale: Float32,
        factor: Float32,
        stream,
    ):
        """Launches the kernel. Arguments as in `FlashAttention2Forward.launch`; workers: CTAs, see `Work`."""
        cfg = self.config
        divisor = 128 // DTYPES[cfg.dtype].width  # TMA's alignment is 16 bytes
        q_s, q_h, q_b, k_s, k_h, k_b, v_s, v_h, v_b, o_s, o_h, o_b = (
            cute.assume(x, divby=divisor)
            for x in (q_s, q_h, q_b, k_s, k_h, k_b, v_s, v_h, v_b, o_s, o_h, o_b)
        )
        mQ = rows_tensor(q, (queries, cfg.head_dim, heads, sequences), (q_s, q_h, q_b))
        mK = rows_tensor(k, (keys, cfg.head_dim, key_heads, sequences), (k_s, k_h, k_b))
        mV = rows_tensor(v, (keys, cfg.value_dim, key_heads, sequences), (v_s, v_h, v_b))
        mV = cute.make_tensor(mV.iterator, cute.select(mV.layout, mode=[1, 0, 2, 3]))  # (Dv, keys, …)
        mO = rows_tensor(o, (queries, cfg.value_dim, heads, sequences), (o_s, o_h, o_b))
        mLSE = rows_tensor(lse, (queries, 1, heads, sequences), (Int64(1), lse_h, lse_b))

        layout_Q, layout_K, layout_V = self.layouts()
        inputs = Inputs(*load_atom(mQ, layout_Q), *load_atom(mK, layout_K), *load_atom(mV, layout_V))
        slices = cfg.epilogue.slices
        store_O, tmaO = store_atom(mO, tma_tile(slices.tile, 1, slices.dtype.width))
        output = Output(store_O, tmaO, cute.group_modes(mO, 2, 4), None, None, Float32(1.0), Float32(0.0))
        self.kernel(inputs, output, mLSE, keys, left, right, group, scale, factor).launch(
            grid=(workers, 1, 1), block=(cfg.threads, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    def layouts(self, staged: bool = False) -> tuple:
        """Of the tiles of q (BLK_M, D), k (BLK_N, D), v (Dv, BLK_N) in shared memory, or of their rings."""
        cfg = self.config
        queries, keys = cfg.tile
        stages = [(ring.stages,) if staged else () for ring in cfg.rings]
        bits = DTYPES[cfg.dtype].width
        return (
            tma_tile((queries, cfg.width, *stages[0]), 1, bits),
            tma_tile((keys, cfg.width, *stages[1]), 1, bits),
            tma_tile((cfg.value_width, keys, *stages[2]), 0, bits),
        )

    @cute.kernel
    def kernel(
        self,
        inputs: Inputs,
        output: Output,
        mLSE: cute.Tensor,  # (queries, 1, heads, sequences)
        keys: Int32,
        left: Int32,
        right: Int32,
        group: Int32,
        scale: Float32,
        factor: Float32,
    ):
        cfg = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARP)
        warpgroup = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP)
        if warp == 0:
            for atom in (inputs.load_Q, inputs.load_K, inputs.load_V):
                cpasync.prefetch_descriptor(atom)
        smem = cutlass.memory.SmemAllocator().allocate(cfg.smem_bytes, byte_alignment=1024)
        rings = self.rings(smem)
        pipeline.pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
        queries, _, (heads, sequences) = output.mD.shape
        work = Work(
            LongestFirst(cute.ceil_div(queries, cfg.tile[0]), heads, sequences, group),
            queries,
            keys,
            left if cutlass.const_expr(cfg.left) else None,
            right if cutlass.const_expr(cfg.right) else None,
            cute.arch.block_idx()[0],
            cute.arch.grid_dim()[0],
        )
        pipeline.pipeline_init_wait(cluster_shape_mn=(1, 1))
        if warpgroup == 0:
            cute.arch.setmaxregister_decrease(cfg.producer_registers)
            if warp == 0:
                self.produce(rings, inputs, work)
        else:
            cute.arch.setmaxregister_increase(cfg.consumer_registers)
            self.consume(rings, smem + cfg.ring_bytes, warpgroup - 1, work, output, mLSE, scale, factor)

    def rings(self, smem: cute.Pointer) -> Rings:
        """The rings of q, k and v, one after the other in shared memory, and their mbarriers at its end."""
        cfg = self.config
        barriers = smem + (cfg.smem_bytes - sum(ring.barrier_bytes for ring in cfg.rings))
        pipelines, tensors = [], []
        for ring, layout in zip(cfg.rings, self.layouts(staged=True), strict=True):
            pipelines.append(ring.create(barriers))
            barriers = barriers + ring.barrier_bytes
            tensors.append(swizzled_tensor(smem, layout, DTYPES[cfg.dtype]))
            smem = smem + ring.stages * ring.transaction_bytes
        return Rings(*pipelines, *tensors)

    @cute.jit
    def produce(self, rings: Rings, inputs: Inputs, work: Work):
        """The producer warp: q of each tile, then k and v of each block that it needs."""
        cfg = self.config
        load_Q = TmaLoader.partition(inputs.load_Q, inputs.tmaQ, rings.sQ)
        load_K = TmaLoader.partition(inputs.load_K, inputs.tmaK, rings.sK)
        load_V = TmaLoader.partition(inputs.load_V, inputs.tmaV, rings.sV)
        heads_per_key_head = inputs.tmaQ.shape[2] // inputs.tmaK.shape[2]
        q_state, k_state, v_state = (ring.producer_state() for ring in cfg.rings)
        for index in cutlass.range(work.worker, work.total, work.workers):
            tile = work.order.tile(index)
            key_head = tile.head // heads_per_key_head
            blocks = work.band.key_blocks(tile.number * cfg.tile[0], *cfg.tile)
            rings.q.producer_acquire(q_state)
            load_Q.load((tile.number, 0, tile.head, tile.batch), 0, rings.q.producer_get_barrier(q_state))
            q_state.advance()
            for step in cutlass.range(blocks.count):
                block = blocks.end - 1 - step
                rings.k.producer_acquire(k_state)
                full = rings.k.producer_get_barrier(k_state)
                load_K.load((block, 0, key_head, tile.batch), k_state.index, full)
                k_state.advance()
                rings.v.producer_acquire(v_state)
                full = rings.v.producer_get_barrier(v_state)
                load_V.load((0, block, key_head, tile.batch), v_state.index, full)
                v_state.advance()
        rings.q.producer_tail(q_state)
        rings.k.producer_tail(k_state)
        rings.v.producer_tail(v_state)

    @cute.jit
    def consume(
        self,
        rings: Rings,
        smem: cute.Pointer,
        warpgroup: Int32,
        work: Work,
        output: Output,
        mLSE: cute.Tensor,  # (queries, 1, heads, sequences)
        scale: Float32,
        factor: Float32,
    ):
        """A warpgroup that multiplies: 64 queries of each tile."""
        cfg = self.config
        dtype = DTYPES[cfg.dtype]
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        smem = smem + cute.assume(warpgroup * cfg.epilogue.smem_bytes, divby=1024)
        barrier = pipeline.NamedBarrier(EPILOGUE + warpgroup, WARPGROUP)
        score_mma = warpgroup_mma(dtype, cfg.tile[1])
        output_mma = warpgroup_mma(dtype, cfg.value_width, b_major="mn", a_in_registers=True)
        rows_Q = cute.local_tile(rings.sQ, (MMA_ROWS, cfg.width), (warpgroup, 0, 0))  # (64, D)
        tCrQ = score_mma.make_fragment_A(score_mma.get_slice(0).partition_A(rows_Q))  # (MMA, MMA_M, MMA_K)
        products = (
            StagedProduct.partition(score_mma, None, rings.sK),
            StagedProduct.partition(output_mma, None, rings.sV),
        )
        acc = cute.make_rmem_tensor(output_mma.partition_shape_C((MMA_ROWS, cfg.value_width)), Float32)
        q_state, k_state, v_state = (ring.consumer_state() for ring in cfg.rings)
        if warpgroup == cfg.consumers - 1:
            self.pass_turn(warpgroup)
        for index in cutlass.range(work.worker, work.total, work.workers):
            tile = work.order.tile(index)
            first_query = tile.number * cfg.tile[0]
            blocks = work.band.key_blocks(first_query, *cfg.tile)
            first_query = first_query + warpgroup * MMA_ROWS
            acc.fill(0.0)
            softmax = Softmax.start(cute.size(matrix_view(acc), mode=[0]), scale)
            rings.q.consumer_wait(q_state)
            if blocks.count > 0:
                k_state, v_state = self.attend(
                    rings, (q_state, k_state, v_state), products, tCrQ, acc, softmax, blocks, work.band,
                    first_query, warpgroup, factor,
                )  # fmt: skip
            else:
                rings.q.consumer_release(q_state)
            q_state.advance()
            lse = cute.make_rmem_tensor(softmax.total.shape, Float32)  # (rows,)
            softmax.finish(matrix_view(acc), lse)
            if mLSE.iterator.toint() != 0:
                column = mLSE[None, 0, tile.head, tile.batch]  # (queries,)
                store_lse(lse, self.coordinates(thread), column, first_query)
            place = tile.number * cfg.consumers + warpgroup, Int32(0)
            cfg.epilogue.store(acc, smem, output, None, place, (tile.head, tile.batch), thread, barrier)
        cfg.epilogue.drain()

    @cute.jit
    def attend(
        self,
        rings: Rings,
        states: tuple[pipeline.PipelineState, pipeline.PipelineState, pipeline.PipelineState],
        products: tuple[StagedProduct, StagedProduct],
        tCrQ: cute.Tensor,  # (MMA, MMA_M, MMA_K) descriptors
        acc: cute.Tensor,  # (MMA, MMA_M, MMA_N)
        softmax: Softmax,
        blocks: KeyBlocks,
        band: Band,
        first_query: Int32,
        warpgroup: Int32,
        factor: Float32,
    ) -> tuple[pipeline.PipelineState, pipeline.PipelineState]:
        """acc and softmax over all blocks of keys, of which there is one at least. Releases q."""
        cfg = self.config
        q_state, k_state, v_state = states
        score, out = products
        shape = score.tiled_mma.partition_shape_C((MMA_ROWS, cfg.tile[1]))
        scores = cute.make_rmem_tensor(shape, Float32)  # (MMA, MMA_M, MMA_N)
        powers = cute.make_rmem_tensor(shape, DTYPES[cfg.dtype])  # (MMA, MMA_M, MMA_N)
        tOrP = cute.make_tensor(powers.iterator, accumulator_as_operand(powers.layout))  # (MMA, MMA_M, MMA_K)

        rings.k.consumer_wait(k_state)
        self.await_turn(warpgroup)
        score.start(k_state.index, scores, first=True, tCrA=tCrQ)
        self.pass_turn(warpgroup)
        score.wait(0)
        rings.k.consumer_release(k_state)
        k_state.advance()
        self.look_at(scores, softmax, blocks, blocks.end - 1, band, first_query, factor)
        softmax.exponentiate(matrix_view(scores), matrix_view(powers))
        for step in cutlass.range(1, blocks.count, unroll=1):
            rings.k.consumer_wait(k_state)
            self.await_turn(warpgroup)
            score.start(k_state.index, scores, first=True, tCrA=tCrQ)
            rings.v.consumer_wait(v_state)
            out.start(v_state.index, acc, tCrA=tOrP)
            self.pass_turn(warpgroup)
            score.wait(1)
            rings.k.consumer_release(k_state)
            k_state.advance()
            risen = self.look_at(scores, softmax, blocks, blocks.end - 1 - step, band, first_query, factor)
            softmax.exponentiate(matrix_view(scores), matrix_view(scores))
            out.wait(0)
            rings.v.consumer_release(v_state)
            v_state.advance()
            for _ in cutlass.range(turns(risen), unroll=1):
                softmax.rescale(matrix_view(acc))
            powers.store(scores.load().to(powers.element_type))
        rings.q.consumer_release(q_state)  # so that the next tile's is on its way beside the last product
        rings.v.consumer_wait(v_state)
        out.start(v_state.index, acc, tCrA=tOrP)
        out.wait(0)
        rings.v.consumer_release(v_state)
        v_state.advance()
        return k_state, v_state

    @cute.jit
    def look_at(
        self,
        scores: cute.Tensor,  # (MMA, MMA_M, MMA_N)
        softmax: Softmax,
        blocks: KeyBlocks,
        block: Int32,
        band: Band,
        first_query: Int32,
        factor: Float32,
    ) -> cutlass.Boolean:
        """Modifies and masks the scores of a block, and raises the maxima; whether acc must be rescaled."""
        cfg = self.config
        modify(scores, cfg.scores, factor)
        for _ in cutlass.range(turns(blocks.needs_mask(block)), unroll=1):
            mask = Mask(band, self.coordinates(opaque(cute.arch.thread_idx()[0] % WARPGROUP)))
            mask.apply(matrix_view(scores), first_query, block * cfg.tile[1])
        return softmax.raise_maximum(matrix_view(scores))

    def coordinates(self, thread: Int32) -> cute.Tensor:
        """(query, key) of the scores of a thread among its warpgroup's: (rows, columns)."""
        mma = warpgroup_mma(DTYPES[self.config.dtype], self.config.tile[1])
        cS = cute.make_identity_tensor((MMA_ROWS, self.config.tile[1]))
        return matrix_view(mma.get_slice(thread).partition_C(cS))  # of (MMA, MMA_M, MMA_N)

    @cute.jit
    def await_turn(self, warpgroup: Int32):
        """Waits until the warpgroup before this one has passed the tensor cores on."""
        if cutlass.const_expr(self.config.pingpong):
            cute.arch.barrier(barrier_id=TURN + warpgroup, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def pass_turn(self, warpgroup: Int32):
        """Passes the tensor cores on to the next warpgroup."""
        if cutlass.const_expr(self.config.pingpong):
            after = (warpgroup + 1) % self.config.consumers
            cute.arch.barrier_arrive(barrier_id=TURN + after, number_of_threads=2 * WARPGROUP)
