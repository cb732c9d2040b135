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
from cutelab.kernels.attention.blocks import Band, KeyBlocks, LongestFirst, Tile
from cutelab.kernels.attention.branch import turns
from cutelab.kernels.attention.config import DTYPES
from cutelab.kernels.attention.config_sm90 import Sm90ForwardConfig
from cutelab.kernels.attention.epilogue import store_lse
from cutelab.kernels.attention.fa2_sm80 import matrix_view
from cutelab.kernels.attention.mask import Mask
from cutelab.kernels.attention.operands import bounds_tensor, rows_of, rows_tensor
from cutelab.kernels.attention.softmax import Softmax, modify
from cutelab.kernels.dense_gemm.epilogue_sm90 import Output
from cutelab.layouts import accumulator_as_operand, swizzled_tensor, tma_tile
from cutelab.mmas import MMA_ROWS, WARP, WARPGROUP, StagedProduct, warpgroup_mma

EPILOGUE, TURN, CLEARED = 1, 4, 7
"""Named barriers: of the way out, + warpgroup; of its turn at the tensor cores, + warpgroup; of all who
multiply. 0 is `sync_threads`."""
VECTOR = 8  # elements of 16 bytes


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
class Results:
    """Where output and LSE go."""

    store_O: cute.CopyAtom | None  # by TMA; None where a sequence may end within a tile, and another begin
    tmaO: cute.Tensor | None  # (queries, Dv, heads, sequences) coordinates
    mO: cute.Tensor  # (queries, Dv, heads, sequences)
    mLSE: cute.Tensor  # (queries, 1, heads, sequences)


@dataclass(frozen=True)
class Sequence:
    """The rows of a sequence, of q and of k and v: the first, and how many. batch: its index in that mode."""

    first_query: Int32
    queries: Int32
    first_key: Int32
    keys: Int32
    batch: Int32


@dataclass(frozen=True)
class Work:
    """All tiles of queries, which the CTAs share out in turn, and what they see."""

    order: LongestFirst
    queries: Int32
    keys: Int32
    q_bounds: cute.Tensor | None
    k_bounds: cute.Tensor | None
    left: Int32 | None
    right: Int32 | None

    @property
    def total(self) -> Int32:
        return self.order.grid()[0]

    def sequence(self, batch: Int32) -> Sequence:
        """That of the batch, without keys at its beginning that no query sees: those may hold anything."""
        first_query, first_key, queries, keys = Int32(0), Int32(0), self.queries, self.keys
        if self.q_bounds is not None and self.k_bounds is not None:
            first_query, first_key = self.q_bounds[batch], self.k_bounds[batch]
            queries = self.q_bounds[batch + 1] - first_query
            keys = self.k_bounds[batch + 1] - first_key
            batch = Int32(0)
        unseen = Band(queries, keys, self.left, self.right).first(Int32(0))
        return Sequence(first_query, queries, first_key + unseen, keys - unseen, batch)

    def band(self, sequence: Sequence) -> Band:
        return Band(sequence.queries, sequence.keys, self.left, self.right)


States = tuple[pipeline.PipelineState, pipeline.PipelineState, pipeline.PipelineState]
"""How far the rings of q, k and v have turned."""


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
        bounds = nullptr(Int32, cute.AddressSpace.gmem, assumed_align=4)
        return (*(operand,) * 4, lse, bounds, bounds, *(1,) * 25, 1.0, 1.0, make_fake_stream())

    @cute.jit
    def launch(
        self,
        q: cute.Pointer,
        k: cute.Pointer,
        v: cute.Pointer,
        o: cute.Pointer,
        lse: cute.Pointer,
        q_bounds: cute.Pointer,
        k_bounds: cute.Pointer,
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
        q_rows: Int32,
        k_rows: Int32,
        workers: Int32,
        scale: Float32,
        factor: Float32,
        stream,
    ):
        """Launches the kernel. Arguments as in `FlashAttention2Forward.launch`.

        q_rows, k_rows: of all sequences together where their lengths differ. workers: CTAs.
        """
        cfg = self.config
        divisor = 128 // DTYPES[cfg.dtype].width  # TMA's alignment is 16 bytes
        q_s, q_h, q_b, k_s, k_h, k_b, v_s, v_h, v_b, o_s, o_h, o_b = (
            cute.assume(x, divby=divisor)
            for x in (q_s, q_h, q_b, k_s, k_h, k_b, v_s, v_h, v_b, o_s, o_h, o_b)
        )
        batches = 1 if cutlass.const_expr(cfg.varlen) else sequences
        if cutlass.const_expr(not cfg.varlen):
            q_rows, k_rows = queries, keys
        mQ = rows_tensor(q, (q_rows, cfg.head_dim, heads, batches), (q_s, q_h, q_b))
        mK = rows_tensor(k, (k_rows, cfg.head_dim, key_heads, batches), (k_s, k_h, k_b))
        mV = rows_tensor(v, (k_rows, cfg.value_dim, key_heads, batches), (v_s, v_h, v_b))
        mV = cute.make_tensor(mV.iterator, cute.select(mV.layout, mode=[1, 0, 2, 3]))  # (Dv, keys, …)
        mO = rows_tensor(o, (q_rows, cfg.value_dim, heads, batches), (o_s, o_h, o_b))
        mLSE = rows_tensor(lse, (q_rows, 1, heads, batches), (Int64(1), lse_h, lse_b))

        layout_Q, layout_K, layout_V = self.layouts()
        inputs = Inputs(*load_atom(mQ, layout_Q), *load_atom(mK, layout_K), *load_atom(mV, layout_V))
        slices = cfg.epilogue.slices
        store_O, tmaO = None, None
        if cutlass.const_expr(not cfg.varlen):
            store_O, tmaO = store_atom(mO, tma_tile(slices.tile, 1, slices.dtype.width))
        work = Work(
            LongestFirst(cute.ceil_div(queries, cfg.tile[0]), heads, sequences, group),
            queries,
            keys,
            bounds_tensor(q_bounds, cfg.varlen, sequences),
            bounds_tensor(k_bounds, cfg.varlen, sequences),
            left if cutlass.const_expr(cfg.left) else None,
            right if cutlass.const_expr(cfg.right) else None,
        )
        self.kernel(inputs, Results(store_O, tmaO, mO, mLSE), work, scale, factor).launch(
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
        results: Results,
        work: Work,
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
        pipeline.pipeline_init_wait(cluster_shape_mn=(1, 1))
        if warpgroup == 0:
            cute.arch.setmaxregister_decrease(cfg.producer_registers)
            if warp == 0:
                self.produce(rings, inputs, work)
        else:
            cute.arch.setmaxregister_increase(cfg.consumer_registers)
            self.consume(rings, smem + cfg.ring_bytes, results, work, scale, factor)

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
        q_state, k_state, v_state = (ring.producer_state() for ring in cfg.rings)
        for index in cutlass.range(cute.arch.block_idx()[0], work.total, cute.arch.grid_dim()[0]):
            tile = work.order.tile(index)
            sequence = work.sequence(tile.batch)
            if tile.number * cfg.tile[0] < sequence.queries:
                states = q_state, k_state, v_state
                q_state, k_state, v_state = self.load(rings, states, inputs, work, tile, sequence)
        rings.q.producer_tail(q_state)
        rings.k.producer_tail(k_state)
        rings.v.producer_tail(v_state)

    @cute.jit
    def load(
        self, rings: Rings, states: States, inputs: Inputs, work: Work, tile: Tile, sequence: Sequence
    ) -> States:
        """Copies what a tile needs. Returns the rings' states after it."""
        cfg = self.config
        q_state, k_state, v_state = states
        tmaQ = cute.domain_offset((sequence.first_query, 0, 0, 0), inputs.tmaQ)
        tmaK = cute.domain_offset((sequence.first_key, 0, 0, 0), inputs.tmaK)
        tmaV = cute.domain_offset((0, sequence.first_key, 0, 0), inputs.tmaV)
        load_Q = TmaLoader.partition(inputs.load_Q, tmaQ, rings.sQ)
        load_K = TmaLoader.partition(inputs.load_K, tmaK, rings.sK)
        load_V = TmaLoader.partition(inputs.load_V, tmaV, rings.sV)
        key_head = tile.head // (inputs.tmaQ.shape[2] // inputs.tmaK.shape[2])
        blocks = work.band(sequence).key_blocks(tile.number * cfg.tile[0], *cfg.tile)
        rings.q.producer_acquire(q_state)
        full = rings.q.producer_get_barrier(q_state)
        load_Q.load((tile.number, 0, tile.head, sequence.batch), 0, full)
        q_state.advance()
        for step in cutlass.range(blocks.count):
            block = blocks.end - 1 - step
            rings.k.producer_acquire(k_state)
            full = rings.k.producer_get_barrier(k_state)
            load_K.load((block, 0, key_head, sequence.batch), k_state.index, full)
            k_state.advance()
            rings.v.producer_acquire(v_state)
            full = rings.v.producer_get_barrier(v_state)
            load_V.load((0, block, key_head, sequence.batch), v_state.index, full)
            v_state.advance()
        return q_state, k_state, v_state

    @cute.jit
    def consume(
        self,
        rings: Rings,
        smem: cute.Pointer,
        results: Results,
        work: Work,
        scale: Float32,
        factor: Float32,
    ):
        """A warpgroup that multiplies: 64 queries of each tile."""
        cfg = self.config
        warpgroup = self.consumer()
        smem = smem + cute.assume(warpgroup * cfg.epilogue.smem_bytes, divby=1024)
        q_state, k_state, v_state = (ring.consumer_state() for ring in cfg.rings)
        if warpgroup == cfg.consumers - 1:
            self.pass_turn(warpgroup)
        for index in cutlass.range(cute.arch.block_idx()[0], work.total, cute.arch.grid_dim()[0]):
            tile = work.order.tile(index)
            sequence = work.sequence(tile.batch)
            first_query = tile.number * cfg.tile[0]
            if first_query < sequence.queries:
                band = work.band(sequence)
                blocks = band.key_blocks(first_query, *cfg.tile)
                acc = self.accumulators()
                softmax = Softmax.start(cute.size(matrix_view(acc), mode=[0]), scale)
                rings.q.consumer_wait(q_state)
                if blocks.count > 0:
                    states = q_state, k_state, v_state
                    k_state, v_state = self.attend(
                        rings, states, acc, softmax, blocks, band, first_query, factor
                    )
                else:
                    rings.q.consumer_release(q_state)
                q_state.advance()
                self.finish(acc, softmax, smem, results, work, tile)
        cfg.epilogue.drain()

    def consumer(self) -> Int32:
        """The number of this warpgroup among those that multiply."""
        return cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP) - 1

    def products(self, rings: Rings, warpgroup: Int32) -> tuple[StagedProduct, cute.Tensor, StagedProduct]:
        """Q·Kᵀ with the descriptors of the warpgroup's rows of q, and P·V."""
        cfg = self.config
        score_mma = warpgroup_mma(DTYPES[cfg.dtype], cfg.tile[1])
        rows_Q = cute.local_tile(rings.sQ, (MMA_ROWS, cfg.width), (warpgroup, 0, 0))  # (64, D)
        tCrQ = score_mma.make_fragment_A(score_mma.get_slice(0).partition_A(rows_Q))  # (MMA, MMA_M, MMA_K)
        scores = StagedProduct.partition(score_mma, None, rings.sK)
        return scores, tCrQ, StagedProduct.partition(self.output_mma(), None, rings.sV)

    def output_mma(self) -> cute.TiledMma:
        cfg = self.config
        return warpgroup_mma(DTYPES[cfg.dtype], cfg.value_width, b_major="mn", a_in_registers=True)

    def accumulators(self) -> cute.Tensor:
        """Of the output, zeros: (MMA, MMA_M, MMA_N)."""
        shape = self.output_mma().partition_shape_C((MMA_ROWS, self.config.value_width))
        acc = cute.make_rmem_tensor(shape, Float32)
        acc.fill(0.0)
        return acc

    @cute.jit
    def finish(
        self,
        acc: cute.Tensor,  # (MMA, MMA_M, MMA_N)
        softmax: Softmax,
        smem: cute.Pointer,
        results: Results,
        work: Work,
        tile: Tile,
    ):
        """Writes a warpgroup's rows of a tile."""
        cfg = self.config
        warpgroup, thread = self.consumer(), cute.arch.thread_idx()[0] % WARPGROUP
        part = tile.number * cfg.consumers + warpgroup
        lse = cute.make_rmem_tensor(softmax.total.shape, Float32)  # (rows,)
        softmax.finish(matrix_view(acc), lse)
        if results.mLSE.iterator.toint() != 0:
            gLSE = rows_of(results.mLSE, work.q_bounds, tile.head, tile.batch)  # (queries, 1)
            store_lse(lse, self.coordinates(thread), gLSE[None, 0], part * MMA_ROWS)
        mO, batch = cute.group_modes(results.mO, 2, 4), (tile.head, tile.batch)
        if cutlass.const_expr(cfg.varlen):
            gO, batch = rows_of(results.mO, work.q_bounds, tile.head, tile.batch), (Int32(0), Int32(0))
            layout = cute.make_layout((*gO.shape, (1, 1)), stride=(*gO.stride, (0, 0)))
            mO = cute.make_tensor(gO.iterator, layout)
        output = Output(results.store_O, results.tmaO, mO, None, None, Float32(1.0), Float32(0.0))
        barrier = pipeline.NamedBarrier(EPILOGUE + warpgroup, WARPGROUP)
        cfg.epilogue.store(acc, smem, output, None, (part, Int32(0)), batch, thread, barrier)

    @cute.jit
    def attend(
        self,
        rings: Rings,
        states: States,
        acc: cute.Tensor,  # (MMA, MMA_M, MMA_N)
        softmax: Softmax,
        blocks: KeyBlocks,
        band: Band,
        first_query: Int32,
        factor: Float32,
    ) -> tuple[pipeline.PipelineState, pipeline.PipelineState]:
        """acc and softmax over all blocks of keys, of which there is one at least. Releases q."""
        cfg = self.config
        q_state, k_state, v_state = states
        warpgroup = self.consumer()
        first_query = first_query + warpgroup * MMA_ROWS
        score, tCrQ, out = self.products(rings, warpgroup)
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
        if cutlass.const_expr(cfg.varlen):
            rings.v.consumer_wait(v_state)
            self.clear(rings.sV[None, None, v_state.index], band.keys - (blocks.end - 1) * cfg.tile[1])
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
    def clear(self, sV: cute.Tensor, rows: Int32):
        """Zeros in a tile of v (Dv, BLK_N) from that row on: those of another sequence may be no numbers."""
        cfg = self.config
        threads, vectors = cfg.consumers * WARPGROUP, cfg.value_width // VECTOR
        zeros = cute.make_rmem_tensor((VECTOR, 1), sV.element_type)
        zeros.fill(0.0)
        first = rows * vectors + cute.arch.thread_idx()[0] - WARPGROUP
        for index in cutlass.range(first, cfg.tile[1] * vectors, threads, unroll=1):
            vector = cute.local_tile(sV, (VECTOR, 1), (index % vectors, index // vectors))
            cute.autovec_copy(zeros, vector)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=CLEARED, number_of_threads=threads)

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
