"""GEMM for Hopper: TMA, mbarriers, wgmma, and warps with roles of their own. Runs on sm_90a.

Read it after `sm80.py`, `copies/tma.py`, `copies/pipeline.py` and `mmas/wgmma.py`, whose parts it puts together.
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
from cutelab.kernels.dense_gemm.config_sm90 import Sm90Config
from cutelab.kernels.dense_gemm.epilogue_sm90 import Output
from cutelab.kernels.dense_gemm.partial_sums import PartialSums
from cutelab.kernels.dense_gemm.scheduler import GroupedRaster, Schedule
from cutelab.kernels.dense_gemm.sm80 import operand_tensor
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


class GemmSm90:
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
        return (a, b, c, bias, d, *(1,) * 18, 1.0, 0.0, workspace, 1, 0, make_fake_stream())

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
        workspace: cute.Pointer,
        clusters: Int32,
        shared: Int32,
        stream,
    ):
        cfg = self.config
        batch = (l0, l1)
        mA = flat_batch(operand_tensor(a, (m, k, batch), cfg.a_major, 16, a_ld, (a_l0, a_l1)))
        mB = flat_batch(operand_tensor(b, (n, k, batch), cfg.b_major, 16, b_ld, (b_l0, b_l1)))
        mD = operand_tensor(d, (m, n, batch), cfg.out_major, cfg.out_align, d_ld, (d_l0, d_l1))
        mC, mBias = None, None
        if cutlass.const_expr(cfg.c_align * 8 > mD.element_type.width):
            c_ld = c_m if cutlass.const_expr(cfg.out_major == "k") else c_n
            mC = operand_tensor(c, (m, n, batch), cfg.out_major, cfg.c_align, c_ld, (c_l0, c_l1))
        elif cutlass.const_expr(cfg.c_align):
            mC = cute.make_tensor(c, cute.make_layout((m, n, batch), stride=(c_m, c_n, (c_l0, c_l1))))
        if cutlass.const_expr(cfg.bias is not None):
            mBias = cute.make_tensor(bias, cute.make_layout(n if cutlass.const_expr(cfg.bias == "n") else m))

        blk_m, blk_n, blk_k = cfg.tile
        dtype = mA.element_type
        load_A, tmaA = load_atom(
            mA, tma_tile((blk_m, blk_k), CONTIGUOUS[cfg.a_major], dtype.width), cfg.cluster[1]
        )
        load_B, tmaB = load_atom(
            mB, tma_tile((blk_n, blk_k), CONTIGUOUS[cfg.b_major], dtype.width), cfg.cluster[0]
        )
        store_D, tmaD = None, None
        if cutlass.const_expr(cfg.out_align == 16):
            slices = cfg.epilogue.slices
            tile_D = tma_tile(slices.tile, slices.contiguous, slices.dtype.width)
            store_D, tmaD = store_atom(flat_batch(mD), tile_D)
        output = Output(store_D, tmaD, mD, mC, mBias, alpha, beta)
        size = cfg.cluster[0] * cfg.cluster[1]
        self.kernel(load_A, tmaA, load_B, tmaB, output, workspace, shared).launch(
            grid=(clusters * size, 1, 1),
            block=(cfg.threads, 1, 1),
            cluster=(size, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=cfg.early_launch,
        )

    @cute.kernel
    def kernel(
        self,
        load_A: cute.CopyAtom,
        tmaA: cute.Tensor,  # (M, K, L0, L1) coordinates
        load_B: cute.CopyAtom,
        tmaB: cute.Tensor,  # (N, K, L0, L1) coordinates
        output: Output,
        workspace: cute.Pointer,
        shared: Int32,
    ):
        cfg = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARP)
        warpgroup = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP)
        if warp == 0:
            cpasync.prefetch_descriptor(load_A)
            cpasync.prefetch_descriptor(load_B)

        smem = cutlass.memory.SmemAllocator().allocate(cfg.smem_bytes, byte_alignment=1024)
        sA, sB = self.ring_tensors(smem)  # (BLK_M, BLK_K, PIPE), (BLK_N, BLK_K, PIPE)
        ring = cfg.ring.create(smem + (cfg.smem_bytes - cfg.ring.barrier_bytes))
        pipeline.pipeline_init_arrive(cluster_shape_mn=cfg.cluster, is_relaxed=True)
        schedule, places = self.work(output.mD, tmaA.shape[1], shared)
        pipeline.pipeline_init_wait(cluster_shape_mn=cfg.cluster)
        if cutlass.const_expr(cfg.early_launch):
            # What the kernel before wrote is there from here on; the one after may set itself up.
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

        if warpgroup == 0:
            if cutlass.const_expr(cfg.consumers > 1):
                cute.arch.setmaxregister_decrease(40)
            if warp == 0:
                loader_A, loader_B = self.loaders(load_A, tmaA, sA, load_B, tmaB, sB, places)
                self.produce(ring, loader_A, loader_B, schedule, places)
        else:
            if cutlass.const_expr(cfg.consumers > 1):
                cute.arch.setmaxregister_increase(232)
            self.consume(
                ring, sA, sB, warpgroup - 1, smem + cfg.ring_bytes, schedule, places, output, workspace
            )

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
        self,
        load_A: cute.CopyAtom,
        tmaA: cute.Tensor,
        sA: cute.Tensor,
        load_B: cute.CopyAtom,
        tmaB: cute.Tensor,
        sB: cute.Tensor,
        places: Places,
    ) -> tuple[TmaLoader, TmaLoader]:
        """The producer's loaders. The CTAs of a row of the cluster share A, those of a column B."""
        cluster_m, cluster_n = self.config.cluster
        rank_m, rank_n = places.rank
        row = sum(1 << (i * cluster_m) for i in range(cluster_n)) << rank_m if cluster_n > 1 else None
        column = ((1 << cluster_m) - 1) << (rank_n * cluster_m) if cluster_m > 1 else None
        return (
            TmaLoader.partition(load_A, tmaA, sA, cluster_n, rank_n, row),
            TmaLoader.partition(load_B, tmaB, sB, cluster_m, rank_m, column),
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
        workspace: cute.Pointer,
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
        sums = PartialSums.at(workspace, cfg.accumulators, places.size * schedule.workers * cfg.consumers)
        state = cfg.ring.consumer_state()
        first, step = Int32(0), 1
        if cutlass.const_expr(cfg.pingpong):
            first, step = warpgroup, cfg.consumers
            if warpgroup > 0:
                state.advance(schedule.piece(0).k_tiles)
                pass_turn(Int32(0))
        for number in cutlass.range(first, schedule.pieces(), step):
            piece = schedule.piece(number)
            if cutlass.const_expr(cfg.pingpong):
                await_turn(warpgroup)
            state = self.mainloop(ring, state, product, piece.k_tiles, acc)
            if cutlass.const_expr(cfg.pingpong):
                pass_turn(1 - warpgroup)
                state.advance(schedule.piece(number + 1).k_tiles)  # the other's
            if cutlass.const_expr(cfg.stream_k):
                self.exchange(sums, acc, schedule, piece, places, warpgroup, thread, barrier)
            if piece.k_begin == 0:
                m_tile, n_tile, batch = places.tile(piece.tile)
                row = m_tile * (cfg.tile[0] // cfg.rows) + part
                epilogue.store(acc, smem, output, (row, n_tile), batch, thread, barrier)
        epilogue.drain(thread)

    @cute.jit
    def exchange(self, sums, acc, schedule, piece, places, warpgroup, thread, barrier):
        """Leaves the sums of a piece to the worker that has the tile's beginning, or adds what others left."""
        cfg = self.config
        if piece.k_begin > 0:
            slot = (schedule.worker * places.size + places.cta) * cfg.consumers + warpgroup
            sums.leave(acc, slot, thread, barrier)
        else:
            covered, worker = piece.k_end, schedule.worker
            while covered < schedule.k_tiles:
                worker = worker + 1
                slot = (worker * places.size + places.cta) * cfg.consumers + warpgroup
                sums.add(acc, slot, thread, barrier)
                covered = schedule.covered(worker, piece.tile)

    @cute.jit
    def mainloop(
        self,
        ring: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState,
        product: StagedProduct,
        k_tiles: Int32,
        acc: cute.Tensor,  # (MMA, MMA_M, MMA_N)
    ) -> pipeline.PipelineState:
        """acc = A·Bᵀ over the next k-tiles of the ring; while one is multiplied, the next is started.

        A stage is released when the products that read it are done, which is one k-tile later.
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
        product.wait(0)
        ring.consumer_release(state)
        state.advance()
        return state


def await_turn(warpgroup: Int32):
    """Waits until the other of two warpgroups has passed the tensor cores on."""
    cute.arch.barrier(barrier_id=Barriers.TURN + warpgroup, number_of_threads=2 * WARPGROUP)


def pass_turn(warpgroup: Int32):
    """Passes the tensor cores on to a warpgroup."""
    cute.arch.barrier_arrive(barrier_id=Barriers.TURN + warpgroup, number_of_threads=2 * WARPGROUP)


def flat_batch(mX: cute.Tensor) -> cute.Tensor:
    """(rows, columns, (L0, L1)) as (rows, columns, L0, L1): the modes of a tensor map."""
    rows, columns, (l0, l1) = mX.shape
    across, along, (step_0, step_1) = mX.stride
    return cute.make_tensor(
        mX.iterator, cute.make_layout((rows, columns, l0, l1), stride=(across, along, step_0, step_1))
    )
