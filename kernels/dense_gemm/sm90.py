"""GEMM for Hopper: TMA, mbarriers, wgmma, and warps with roles of their own. Runs on sm_90a.

Read it after `sm80.py`, `copies/tma.py`, `copies/pipeline.py` and `mmas/wgmma.py`, whose parts it puts
together.
"""

from dataclasses import dataclass
from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, nullptr

from cutelab.copies import TmaLoader, load_atom, store_atom
from cutelab.kernels.dense_gemm.config import AB_DTYPES, OUT_DTYPES
from cutelab.kernels.dense_gemm.config_sm90 import PRODUCER_REGISTERS, Sm90Config
from cutelab.kernels.dense_gemm.epilogue_sm90 import Output
from cutelab.kernels.dense_gemm.operands import bias_tensor, c_tensor, flat_batch, operand_tensor
from cutelab.kernels.dense_gemm.partial_sums import PartialSums
from cutelab.kernels.dense_gemm.scheduler import GroupedRaster, Schedule
from cutelab.layouts import swizzled_tensor, tma_tile
from cutelab.mmas import WARP, WARPGROUP, StagedProduct, warpgroup_mma

CONTIGUOUS = {"k": 1, "mn": 0}


class Barriers(IntEnum):
    """Named barriers; 0 is `sync_threads`."""

    EPILOGUE = 1  # + warpgroup
    TURN = 4  # + warpgroup: its turn to use the tensor cores, in ping-pong


@dataclass(frozen=True)
class Places:
    """Where in the output a cluster's tiles lie: which tile of which batch is this CTA's."""

    raster: GroupedRaster
    cluster: tuple[int, int]
    tiles: tuple[Int32, Int32]  # of the size of a cluster
    batch: tuple[Int32, Int32]
    rank: tuple[Int32, Int32]  # of this CTA in its cluster, along M and N

    @property
    def size(self) -> int:
        """CTAs in a cluster."""
        return self.cluster[0] * self.cluster[1]

    @property
    def cta(self) -> Int32:
        return self.rank[0] + self.rank[1] * self.cluster[0]

    @cute.jit
    def tile(self, index: Int32):
        """The (m, n) tile and the (l0, l1) batch coordinate of this CTA in the cluster's tile `index`."""
        m_tile, n_tile, batch = self.raster.tile(index, self.tiles, self.batch)
        return m_tile * self.cluster[0] + self.rank[0], n_tile * self.cluster[1] + self.rank[1], batch


@dataclass(frozen=True)
class Inputs:
    """How TMA reads A and B."""

    load_A: cute.CopyAtom
    tmaA: cute.Tensor  # (M, K, L0, L1) coordinates
    load_B: cute.CopyAtom
    tmaB: cute.Tensor  # (N, K, L0, L1) coordinates


class GemmSm90:
    """D = activation(alpha · A·Bᵀ + beta · C + bias), A (M, K), B (N, K), C and D (M, N), each batched.

    Roles: warpgroup 0 gives its registers away, and one of its warps is the producer, which copies tiles of A
    and B by TMA. The other warpgroups are consumers, which multiply and write the output. As many clusters as
    fit on the GPU stay resident; each works through its `Schedule`, whose pieces are whole tiles or parts of
    them along K.

    Pipeline: a ring of `stages` k-tiles in shared memory, with a full and an empty mbarrier each. Of the
    consumers' products, one k-tile's are always at work while the next one's are started.

        cooperative: each warpgroup multiplies its own rows of the tile
          producer      copy 0  copy 1  copy 2  …  (as stages become empty, across tiles)
          consumer 1            mma 0   mma 1   …  mma K  │ epilogue │ mma 0 …
          consumer 2            mma 0   mma 1   …  mma K  │ epilogue │ mma 0 …

        ping-pong: the warpgroups take turns, a whole tile each, so that one's epilogue hides behind the
        other's products
          consumer 1            mma 0 … mma K │ epilogue              │ mma 0 … mma K │ epilogue
          consumer 2                          │ mma 0 … mma K         │ epilogue      │ mma 0 …

    In the epilogue, slices go through `buffers` buffers to TMA stores, which nobody waits for: see
    `WarpgroupEpilogue`. CTAs of a cluster share what they load: those in a row of it the tile of A, those in
    a column that of B, each copying a slice to all by multicast.

    Shared memory: [ A: stages × (BLK_M, BLK_K) | B: stages × (BLK_N, BLK_K) | for each consumer: buffers of
    64 × up to 128 bytes, bias | mbarriers ]. Registers: (rows · BLK_N) / 128 accumulators, which wgmma keeps,
    and next to nothing else: its operands stay in shared memory.
    """

    def __init__(self, config: Sm90Config):
        self.config = config
        self.raster = GroupedRaster(config.group)

    def example_args(self) -> tuple:
        """Arguments of the right types for `cute.compile(self.launch, …)`: null pointers and ones."""
        cfg = self.config
        ab, out = AB_DTYPES[cfg.ab_dtype], OUT_DTYPES[cfg.out_dtype]

        def pointer(dtype, align):
            return nullptr(dtype, cute.AddressSpace.gmem, assumed_align=max(align, dtype.width // 8))

        a, b = pointer(ab, 16), pointer(ab, 16)
        c, bias, d = pointer(out, cfg.c_align), pointer(out, 0), pointer(out, cfg.out_align)
        workspace = pointer(Float32, 16)
        return (a, b, c, bias, d, *(1,) * 20, 1.0, 0.0, workspace, 1, make_fake_stream())

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
        clusters: Int32,
        shared: Int32,
        alpha: Float32,
        beta: Float32,
        workspace: cute.Pointer,
        ready: Int64,
        stream,
    ):
        """Launches the kernel. Arguments as in `GemmSm80.launch`, and

        clusters: how many, each a worker of `Schedule`. shared: of its tiles. workspace, ready: those of
            `PartialSums`, for one slot for each consumer warpgroup; unused if no tile is shared.
        """
        cfg = self.config
        batch = (l0, l1)
        mA = flat_batch(operand_tensor(a, (m, k, batch), cfg.a_major, 16, a_ld, (a_l0, a_l1)))
        mB = flat_batch(operand_tensor(b, (n, k, batch), cfg.b_major, 16, b_ld, (b_l0, b_l1)))
        mD = operand_tensor(d, (m, n, batch), cfg.out_major, cfg.out_align, d_ld, (d_l0, d_l1))
        mC = c_tensor(c, (m, n, batch), cfg.c_align, c_m, c_n, (c_l0, c_l1))
        mBias = bias_tensor(bias, cfg.bias, m, n)

        blk_m, blk_n, blk_k = cfg.tile
        dtype = mA.element_type
        layout_A = tma_tile((blk_m, blk_k), CONTIGUOUS[cfg.a_major], dtype.width)
        layout_B = tma_tile((blk_n, blk_k), CONTIGUOUS[cfg.b_major], dtype.width)
        inputs = Inputs(*load_atom(mA, layout_A, cfg.cluster[1]), *load_atom(mB, layout_B, cfg.cluster[0]))
        store_D, tmaD = None, None
        if cutlass.const_expr(cfg.out_align == 16):
            slices = cfg.epilogue.slices
            tile_D = tma_tile(slices.tile, slices.contiguous, slices.dtype.width)
            store_D, tmaD = store_atom(flat_batch(mD), tile_D)
        output = Output(store_D, tmaD, mD, mC, mBias, alpha, beta)
        size = cfg.cluster[0] * cfg.cluster[1]
        self.kernel(inputs, output, workspace, ready, shared).launch(
            grid=(clusters * size, 1, 1),
            block=(cfg.threads, 1, 1),
            cluster=(size, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=cfg.early_launch,
        )

    @cute.kernel
    def kernel(self, inputs: Inputs, output: Output, workspace: cute.Pointer, ready: Int64, shared: Int32):
        cfg = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARP)
        warpgroup = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP)
        if warp == 0:
            cpasync.prefetch_descriptor(inputs.load_A)
            cpasync.prefetch_descriptor(inputs.load_B)

        smem = cutlass.memory.SmemAllocator().allocate(cfg.smem_bytes, byte_alignment=1024)
        sA, sB = self.ring_tensors(smem)  # (BLK_M, BLK_K, PIPE), (BLK_N, BLK_K, PIPE)
        ring = cfg.ring.create(smem + (cfg.smem_bytes - 16 - cfg.ring.barrier_bytes))
        sAlpha = cute.make_tensor(cute.recast_ptr(smem + (cfg.smem_bytes - 16), dtype=Float32), 1)
        if cute.arch.thread_idx()[0] == 0:
            sAlpha[0] = output.alpha
        pipeline.pipeline_init_arrive(cluster_shape_mn=cfg.cluster, is_relaxed=True)
        schedule, places = self.work(output.mD, inputs.tmaA.shape[1], shared)
        slots = places.size * schedule.workers * cfg.consumers
        sums = PartialSums.at(workspace, cfg.accumulators, slots, ready)
        pipeline.pipeline_init_wait(cluster_shape_mn=cfg.cluster)
        if cutlass.const_expr(cfg.early_launch):
            # What the kernel before wrote is there from here on; the one after may set itself up.
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

        if warpgroup == 0:
            if cutlass.const_expr(cfg.consumers > 1):
                cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self.produce(ring, *self.loaders(inputs, sA, sB, places), schedule, places)
        else:
            if cutlass.const_expr(cfg.consumers > 1):
                cute.arch.setmaxregister_increase(cfg.consumer_registers)
            smem = smem + cfg.ring_bytes
            self.consume(ring, sA, sB, warpgroup - 1, smem, schedule, places, output, sums, sAlpha)

    def ring_tensors(self, smem: cute.Pointer) -> tuple[cute.Tensor, cute.Tensor]:
        """The ring in shared memory: (BLK_M, BLK_K, PIPE) of A, then (BLK_N, BLK_K, PIPE) of B."""
        cfg = self.config
        dtype = AB_DTYPES[cfg.ab_dtype]
        blk_m, blk_n, blk_k = cfg.tile
        layout_A = tma_tile((blk_m, blk_k, cfg.stages), CONTIGUOUS[cfg.a_major], dtype.width)
        layout_B = tma_tile((blk_n, blk_k, cfg.stages), CONTIGUOUS[cfg.b_major], dtype.width)
        bytes_A = cfg.stages * cfg.ring.copy_bytes[0]
        return swizzled_tensor(smem, layout_A, dtype), swizzled_tensor(smem + bytes_A, layout_B, dtype)

    @cute.jit
    def work(self, mD: cute.Tensor, k: Int32, shared: Int32) -> tuple[Schedule, Places]:
        """What this CTA's cluster has to do, and where in the output."""
        cfg = self.config
        m, n, batch = mD.shape
        size = cfg.cluster[0] * cfg.cluster[1]
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        tiles = cute.ceil_div(cute.ceil_div((m, n), cfg.tile[:2]), cfg.cluster)
        places = Places(
            self.raster, cfg.cluster, tiles, batch, (rank % cfg.cluster[0], rank // cfg.cluster[0])
        )
        worker, workers = cute.arch.block_idx()[0] // size, cute.arch.grid_dim()[0] // size
        total = tiles[0] * tiles[1] * batch[0] * batch[1]
        shared = shared if cutlass.const_expr(cfg.stream_k) else Int32(0)
        return Schedule(worker, workers, total, shared, cute.ceil_div(k, cfg.tile[2])), places

    def loaders(
        self, inputs: Inputs, sA: cute.Tensor, sB: cute.Tensor, places: Places
    ) -> tuple[TmaLoader, TmaLoader]:
        """The producer's loaders. The CTAs of a row of the cluster share A, those of a column B."""
        cluster_m, cluster_n = self.config.cluster
        rank_m, rank_n = places.rank
        row = sum(1 << (i * cluster_m) for i in range(cluster_n)) << rank_m if cluster_n > 1 else None
        column = ((1 << cluster_m) - 1) << (rank_n * cluster_m) if cluster_m > 1 else None
        return (
            TmaLoader.partition(inputs.load_A, inputs.tmaA, sA, cluster_n, rank_n, row),
            TmaLoader.partition(inputs.load_B, inputs.tmaB, sB, cluster_m, rank_m, column),
        )

    @cute.jit
    def produce(
        self,
        ring: pipeline.PipelineTmaAsync,
        loader_A: TmaLoader,
        loader_B: TmaLoader,
        schedule: Schedule,
        places: Places,
    ):
        """The producer warp: copies the k-tiles of all pieces, as stages become empty."""
        state = self.config.ring.producer_state()
        for number in cutlass.range(schedule.pieces()):
            piece = schedule.piece(number)
            m_tile, n_tile, (l0, l1) = places.tile(piece.tile)
            for k_tile in cutlass.range(piece.k_begin, piece.k_end):
                ring.producer_acquire(state)
                full = ring.producer_get_barrier(state)
                loader_A.load((m_tile, k_tile, l0, l1), state.index, full)
                loader_B.load((n_tile, k_tile, l0, l1), state.index, full)
                state.advance()
        ring.producer_tail(state)

    @cute.jit
    def consume(
        self,
        ring: pipeline.PipelineTmaAsync,
        sA: cute.Tensor,  # (BLK_M, BLK_K, PIPE)
        sB: cute.Tensor,  # (BLK_N, BLK_K, PIPE)
        warpgroup: Int32,
        smem: cute.Pointer,
        schedule: Schedule,
        places: Places,
        output: Output,
        sums: PartialSums,
        sAlpha: cute.Tensor,
    ):
        """A consumer warpgroup: multiplies, and finishes what it has multiplied."""
        cfg = self.config
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        epilogue = cfg.epilogue
        smem = smem + cute.assume(warpgroup * epilogue.smem_bytes, divby=1024)
        barrier = pipeline.NamedBarrier(Barriers.EPILOGUE + warpgroup, WARPGROUP)
        part = 0 if cutlass.const_expr(cfg.pingpong) else warpgroup
        rows_A = cute.local_tile(sA, (cfg.rows, cfg.tile[2], cfg.stages), (part, 0, 0))
        mma = warpgroup_mma(sA.element_type, cfg.tile[1], cfg.a_major, cfg.b_major)
        product = StagedProduct.partition(mma, rows_A, sB)
        acc = cute.make_rmem_tensor(mma.partition_shape_C((cfg.rows, cfg.tile[1])), Float32)
        state = cfg.ring.consumer_state()
        first, step = Int32(0), 1
        if cutlass.const_expr(cfg.pingpong):
            first, step = warpgroup, cfg.consumers
            if warpgroup > 0:
                state.advance(schedule.piece(0).k_tiles)
                pass_turn(Int32(0))
        for number in cutlass.range(first, schedule.pieces(), step):
            piece = schedule.piece(number)
            # Where the tile lies takes divisions: in a shuffle, they can't sink below the products.
            m_tile, n_tile, batch = uniform(places.tile(piece.tile))
            place = m_tile * (cfg.tile[0] // cfg.rows) + part, n_tile
            if cutlass.const_expr(cfg.pingpong):
                await_turn(warpgroup)
            state = self.mainloop(ring, state, product, piece.k_tiles, acc)
            if cutlass.const_expr(cfg.pingpong):
                pass_turn(1 - warpgroup)  # the other's products queue up behind the last ones of this
            product.wait(0)
            ring.consumer_release(state)
            state.advance()
            if cutlass.const_expr(cfg.pingpong):
                state.advance(schedule.piece(number + 1).k_tiles)  # the other's
            if cutlass.const_expr(cfg.stream_k):
                self.exchange(sums, acc, schedule, piece, places, warpgroup, thread, barrier)
            if piece.k_begin == 0:
                epilogue.store(acc, smem, output, sAlpha, place, batch, thread, barrier)
        epilogue.drain()

    @cute.jit
    def exchange(self, sums, acc, schedule, piece, places, warpgroup, thread, barrier):
        """Leaves the sums of a piece to the worker that has the tile's beginning, or adds those of others."""
        cfg = self.config
        if piece.k_begin > 0:
            slot = (schedule.worker * places.size + places.cta) * cfg.consumers + warpgroup
            sums.leave(acc, slot, thread, barrier)
        else:
            covered, worker = piece.k_end, schedule.worker
            while covered < schedule.k_tiles:
                worker = worker + 1
                before, covered = covered, schedule.covered(worker, piece.tile)
                if covered > before:  # else there is less to share than workers, and this one has nothing
                    slot = (worker * places.size + places.cta) * cfg.consumers + warpgroup
                    sums.add(acc, slot, thread, barrier)

    @cute.jit
    def mainloop(
        self,
        ring: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState,
        product: StagedProduct,
        k_tiles: Int32,
        acc: cute.Tensor,  # (MMA, MMA_M, MMA_N)
    ) -> pipeline.PipelineState:
        """Starts acc = A·Bᵀ over the next k-tiles of the ring, each while the one before is multiplied.

        A stage is released when the products that read it are done, which is one k-tile later. The last
        k-tile's are still under way at the end; returns the state that is at its stage.
        """
        ring.consumer_wait(state)
        product.start(state.index, acc, first=True)
        for _ in cutlass.range(k_tiles - 1, unroll=1):
            before = state.clone()
            state.advance()
            ring.consumer_wait(state)
            product.start(state.index, acc)
            product.wait(1)
            ring.consumer_release(before)
        return state


def uniform(values: tuple) -> tuple:
    """The same values, which all lanes of a warp agree on, from a shuffle: the compiler won't move it."""
    return tuple(
        uniform(x) if isinstance(x, tuple) else cute.arch.make_warp_uniform(Int32(x)) for x in values
    )


def await_turn(warpgroup: Int32):
    """Waits until the other of two warpgroups has passed the tensor cores on."""
    cute.arch.barrier(barrier_id=Barriers.TURN + warpgroup, number_of_threads=2 * WARPGROUP)


def pass_turn(warpgroup: Int32):
    """Passes the tensor cores on to a warpgroup."""
    cute.arch.barrier_arrive(barrier_id=Barriers.TURN + warpgroup, number_of_threads=2 * WARPGROUP)
