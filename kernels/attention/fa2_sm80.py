"""FlashAttention-2, forward: cp.async, swizzled shared memory, ldmatrix, mma.sync. Runs on sm_80 and newer.

Read it after `layouts/tiles.py`, `layouts/fragments.py`, `copies/rows.py` and `mmas/fragments.py`, whose
parts it puts together, and beside `softmax.py`, `blocks.py` and `mask.py`, which know nothing of this
hardware. The algorithm is Dao's (FlashAttention-2, 2023).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, nullptr

from cutelab.copies import RowLoader, opaque, operand_atom, tile_copy
from cutelab.kernels.attention.blocks import Band, KeyBlocks, LongestFirst
from cutelab.kernels.attention.branch import turns
from cutelab.kernels.attention.config import DTYPES, ForwardConfig
from cutelab.kernels.attention.epilogue import store_lse
from cutelab.kernels.attention.mask import Mask
from cutelab.kernels.attention.operands import bounds_tensor, rows_of, rows_tensor, transposed
from cutelab.kernels.attention.softmax import Softmax, modify
from cutelab.layouts import accumulator_as_operand, accumulator_rows, operand_tile
from cutelab.mmas import StagedOperand, multiply, tiled_mma


class FlashAttention2Forward:
    """O = softmax(scale · Q·Kᵀ + mask)·V for one tile of queries of one head in each block.

    Roles: all warps do everything. A warp owns whole rows of the tile: it computes their scores, their
    softmax and their part of the output, and never asks another warp. All share the copies of q, k and v.

    Pipelines: the blocks of keys come in order from the last to the first: the diagonal, with its mask,
    first. Blocks of k and v take turns in a ring of cp.async groups, k₀ v₀ k₁ v₁ …, of which 2 · stages - 1
    are in flight; q comes with k₀. A wait and a barrier stand before each product.

        cp.async  v of block j + S - 1     k of block j + S
        ldmatrix  q, k of block j                             v of block j
        mma       Q·Kᵀ                                        P·V
        alu                                mask, softmax
        barrier                          ↑                                   ↑
                         v of j landed, k of j read           k of j + 1 landed, v of j read

    Within a product, the operands of k-block i + 1 are loaded into registers while those of i are multiplied.
    Only blocks that some query of the tile does not see whole pay for the mask, and for comparisons in their
    copies. The blocks that no query sees are not loaded at all.

    Shared memory: [ q: (BLK_M, D) | k: stages × (BLK_N, D) | v: stages × (Dv, BLK_N) ], overwritten at the
    end by [ output: (BLK_M, Dv) ]; D and Dv padded. Registers: the output, BLK_M · Dv / threads, and the
    scores, BLK_M · BLK_N / threads, which become P, and P the A operand of the second product, where they
    are; q where it stays in registers, else two k-blocks of it.
    """

    def __init__(self, config: ForwardConfig):
        self.config = config

    def example_args(self) -> tuple:
        """Arguments of the right types for `cute.compile(self.launch, …)`: null pointers and ones."""
        dtype = DTYPES[self.config.dtype]
        operand = nullptr(dtype, cute.AddressSpace.gmem, assumed_align=16)
        lse = nullptr(Float32, cute.AddressSpace.gmem, assumed_align=4)
        bounds = nullptr(Int32, cute.AddressSpace.gmem, assumed_align=4)
        return (*(operand,) * 4, lse, bounds, bounds, *(1,) * 22, 1.0, 1.0, make_fake_stream())

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
        scale: Float32,
        factor: Float32,
        stream,
    ):
        """Launches the kernel. Strides are in elements, of the batch (b), the sequence (s) and the heads (h).

        queries, keys: of a sequence; the most of any where their lengths differ, and then sequence i has the
        rows from bounds[i] to bounds[i + 1]. lse may be null. left, right: of `Band`, ignored if the config
        has none. group: of `LongestFirst`. scale: of `Softmax`; factor: of `modify`.
        """
        cfg = self.config
        divisor = 128 // DTYPES[cfg.dtype].width  # vectors are aligned to 16 bytes
        q_s, q_h, q_b, k_s, k_h, k_b, v_s, v_h, v_b, o_s, o_h, o_b = (
            cute.assume(x, divby=divisor)
            for x in (q_s, q_h, q_b, k_s, k_h, k_b, v_s, v_h, v_b, o_s, o_h, o_b)
        )
        mQ = rows_tensor(q, (queries, cfg.width, heads, sequences), (q_s, q_h, q_b))
        mK = rows_tensor(k, (keys, cfg.width, key_heads, sequences), (k_s, k_h, k_b))
        mV = rows_tensor(v, (keys, cfg.value_width, key_heads, sequences), (v_s, v_h, v_b))
        mO = rows_tensor(o, (queries, cfg.value_width, heads, sequences), (o_s, o_h, o_b))
        mLSE = rows_tensor(lse, (queries, 1, heads, sequences), (Int64(1), lse_h, lse_b))
        q_bounds = bounds_tensor(q_bounds, cfg.varlen, sequences)
        k_bounds = bounds_tensor(k_bounds, cfg.varlen, sequences)
        order = LongestFirst(cute.ceil_div(queries, cfg.tile[0]), heads, sequences, group)
        self.kernel(mQ, mK, mV, mO, mLSE, q_bounds, k_bounds, left, right, group, scale, factor).launch(
            grid=order.grid(), block=(cfg.threads, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,  # (queries, D, heads, sequences)
        mK: cute.Tensor,  # (keys, D, key heads, sequences)
        mV: cute.Tensor,  # (keys, Dv, key heads, sequences)
        mO: cute.Tensor,  # (queries, Dv, heads, sequences)
        mLSE: cute.Tensor,  # (queries, 1, heads, sequences)
        q_bounds: cute.Tensor | None,  # (sequences + 1,)
        k_bounds: cute.Tensor | None,  # (sequences + 1,)
        left: Int32,
        right: Int32,
        group: Int32,
        scale: Float32,
        factor: Float32,
    ):
        cfg = self.config
        block, _, _ = cute.arch.block_idx()
        queries, _, heads, sequences = mQ.shape
        order = LongestFirst(cute.ceil_div(queries, cfg.tile[0]), heads, sequences, group)
        tile = order.tile(block)
        key_head = tile.head // (heads // mK.shape[2])
        gQ = rows_of(mQ, q_bounds, tile.head, tile.batch)  # (queries, D)
        gK = rows_of(mK, k_bounds, key_head, tile.batch)  # (keys, D)
        gV = rows_of(mV, k_bounds, key_head, tile.batch)  # (keys, Dv)
        left = left if cutlass.const_expr(cfg.left) else None
        right = right if cutlass.const_expr(cfg.right) else None
        band = Band(gQ.shape[0], gK.shape[0], left, right)
        if tile.number * cfg.tile[0] < band.queries:
            smem = cutlass.memory.SmemAllocator().allocate(cfg.smem_bytes, byte_alignment=1024)
            mma = tiled_mma(gQ.element_type, (cfg.warps, 1))
            acc, softmax = self.attend(gQ, gK, transposed(gV), band, tile.number, smem, mma, scale, factor)
            # Where the output lies is worked out only now: the main loop needs the registers.
            tile = order.tile(opaque(block))
            gO = rows_of(mO, q_bounds, tile.head, tile.batch)  # (queries, Dv)
            gLSE = rows_of(mLSE, q_bounds, tile.head, tile.batch)  # (queries, 1)
            with_lse = mLSE.iterator.toint() != 0
            self.finish(acc, softmax, mma, smem, gO, gLSE, with_lse, tile.number)

    @cute.jit
    def attend(
        self,
        gQ: cute.Tensor,  # (queries, D)
        gK: cute.Tensor,  # (keys, D)
        gV: cute.Tensor,  # (Dv, keys)
        band: Band,
        tile: Int32,
        smem: cute.Pointer,
        mma: cute.TiledMma,
        scale: Float32,
        factor: Float32,
    ) -> tuple[cute.Tensor, Softmax]:
        """The tile of that number: its output (MMA, MMA_M, MMA_N), still to be divided by the sums."""
        cfg = self.config
        thread, _, _ = cute.arch.thread_idx()
        sQ, sK, sV = self.smem_tensors(smem)  # (BLK_M, D, 1), (BLK_N, D, PIPE), (Dv, BLK_N, PIPE)
        load_q = self.loader(gQ, sQ, 1, cfg.head_dim, thread)
        load_k = self.loader(gK, sK, 1, cfg.head_dim, thread)
        load_v = self.loader(gV, sV, 0, cfg.value_dim, thread)
        load_q.load(tile, Int32(0), (Int32(0), band.queries))

        k_major, mn_major = operand_atom(gQ.element_type, "k"), operand_atom(gQ.element_type, "mn")
        q = StagedOperand.of_A(mma, cute.make_tiled_copy_A(k_major, mma), sQ, thread)
        k = StagedOperand.of_B(mma, cute.make_tiled_copy_B(k_major, mma), sK, thread)
        v = StagedOperand.of_B(mma, cute.make_tiled_copy_B(mn_major, mma), sV, thread)
        output_shape = mma.partition_shape_C((cfg.tile[0], cfg.value_width))
        acc = cute.make_rmem_tensor(output_shape, Float32)  # (MMA, MMA_M, MMA_N)
        acc.fill(0.0)
        softmax = Softmax.start(cute.size(matrix_view(acc), mode=[0]), scale)
        blocks = band.key_blocks(tile * cfg.tile[0], cfg.tile[0], cfg.tile[1])
        self.mainloop((load_k, load_v), (mma, q, k, v), blocks, band, softmax, acc, tile, factor)
        return acc, softmax

    @cute.jit
    def finish(
        self,
        acc: cute.Tensor,  # (MMA, MMA_M, MMA_N)
        softmax: Softmax,
        mma: cute.TiledMma,
        smem: cute.Pointer,
        gO: cute.Tensor,  # (queries, Dv)
        gLSE: cute.Tensor,  # (queries, 1)
        with_lse: Boolean,
        tile: Int32,
    ):
        """Writes what `attend` computed."""
        thread, _, _ = cute.arch.thread_idx()
        lse = cute.make_rmem_tensor(softmax.total.shape, Float32)  # (rows,)
        softmax.finish(matrix_view(acc), lse)
        if with_lse:
            store_lse(lse, self.coordinates(mma, thread), gLSE[None, 0], tile * self.config.tile[0])
        self.config.output.store(acc, mma.get_slice(thread), smem, gO, tile)

    def coordinates(self, mma: cute.TiledMma, thread: Int32) -> cute.Tensor:
        """(query, key) within the tile of the scores of a thread: (rows, columns)."""
        cS = cute.make_identity_tensor(self.config.tile)
        return matrix_view(mma.get_slice(thread).partition_C(cS))  # of (MMA, MMA_M, MMA_N)

    def smem_tensors(self, smem: cute.Pointer) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        """q (BLK_M, D, 1), then the rings of k (BLK_N, D, PIPE) and v (Dv, BLK_N, PIPE) in shared memory."""
        cfg = self.config
        queries, keys = cfg.tile
        pointer = cute.recast_ptr(smem, dtype=DTYPES[cfg.dtype])
        tensors = []
        for shape, major in (
            ((queries, cfg.width, 1), "k"),
            ((keys, cfg.width, cfg.stages), "k"),
            ((cfg.value_width, keys, cfg.stages), "mn"),
        ):
            layout = operand_tile(shape, major, DTYPES[cfg.dtype].width)
            tensors.append(cute.make_tensor(pointer, layout))
            pointer += cute.cosize(layout)
        return tuple(tensors)

    def loader(
        self, mX: cute.Tensor, sX: cute.Tensor, contiguous: int, columns: int, thread: Int32
    ) -> RowLoader:
        """Loads tiles of rows of mX, of which `columns` are there, into sX."""
        shape = cute.size(sX, mode=[0]), cute.size(sX, mode=[1])
        copy = tile_copy(mX.element_type, shape, contiguous, 16, self.config.threads, asynchronous=True)
        return RowLoader.partition(copy, mX, sX, contiguous, columns, thread)

    @cute.jit
    def mainloop(
        self,
        loaders: tuple[RowLoader, RowLoader],
        operands: tuple[cute.TiledMma, StagedOperand, StagedOperand, StagedOperand],
        blocks: KeyBlocks,
        band: Band,
        softmax: Softmax,
        acc: cute.Tensor,  # (MMA, MMA_M, MMA_N)
        tile: Int32,
        factor: Float32,
    ):
        """acc and softmax over all blocks of keys. The copies of q are under way."""
        cfg = self.config
        thread, _, _ = cute.arch.thread_idx()
        mma, q, k, v = operands
        load_k, load_v = loaders
        ahead = 2 * cfg.stages - 1  # groups of copies
        for step in cutlass.range_constexpr(ahead):
            self.copy_block(loaders[step % 2], blocks, blocks.end - 1 - step // 2, Int32(step // 2))
        self.wait()
        if cutlass.const_expr(cfg.q_in_registers):
            for k_block in cutlass.range_constexpr(q.k_blocks):
                q.load(k_block, Int32(0))

        scores = cute.make_rmem_tensor(mma.partition_shape_C(cfg.tile), Float32)  # (MMA, MMA_M, MMA_N)
        powers = cute.make_rmem_tensor(scores.shape, mma.op.ab_dtype)  # (MMA, MMA_M, MMA_N)
        tOrP = cute.make_tensor(powers.iterator, accumulator_as_operand(powers.layout))  # (MMA, MMA_M, MMA_K)
        stage = Int32(0)
        for block in cutlass.range(blocks.end - 1, blocks.begin - 1, -1):
            before = cutlass.select_(stage == 0, Int32(cfg.stages - 1), stage - 1)
            self.copy_block(load_v, blocks, block - (cfg.stages - 1), before)
            scores.fill(0.0)
            multiply(
                mma, scores, q.fragment if cutlass.const_expr(cfg.q_in_registers) else q, k, Int32(0), stage
            )
            self.wait()
            self.copy_block(load_k, blocks, block - cfg.stages, stage)
            modify(scores, cfg.scores, factor)
            for _ in cutlass.range(turns(blocks.needs_mask(block)), unroll=1):
                mask = Mask(band, self.coordinates(mma, opaque(thread)))
                mask.apply(matrix_view(scores), tile * cfg.tile[0], block * cfg.tile[1])
            risen = softmax.raise_maximum(matrix_view(scores))
            softmax.exponentiate(matrix_view(scores), matrix_view(powers))
            for _ in cutlass.range(turns(risen), unroll=1):
                softmax.rescale(matrix_view(acc))
            multiply(mma, acc, tOrP, v, Int32(0), stage)
            self.wait()
            stage = cutlass.select_(stage + 1 == cfg.stages, Int32(0), stage + 1)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

    @cute.jit
    def copy_block(self, loader: RowLoader, blocks: KeyBlocks, block: Int32, stage: Int32):
        """Starts copying a block of keys or values, if there is one so far down.

        It closes a group in any case: the count of groups must go on.
        """
        if block >= blocks.begin:
            inside = loader.is_inside(block, blocks.keys)
            for _ in cutlass.range(turns(inside), unroll=1):
                loader.load(block, stage)
            for _ in cutlass.range(turns(~inside), unroll=1):
                loader.load(block, stage, blocks.keys)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def wait(self):
        """Waits for the oldest copies, in all threads, which then are also done with the last product."""
        cute.arch.cp_async_wait_group(2 * self.config.stages - 2)
        cute.arch.sync_threads()


def matrix_view(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator (MMA, MMA_M, MMA_N), or its coordinates, as the (rows, columns) of one lane."""
    return cute.make_tensor(acc.iterator, accumulator_rows(acc.layout))
