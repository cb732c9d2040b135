"""GEMM for Ampere: cp.async, swizzled shared memory, ldmatrix, mma.sync. Runs on sm_80 and everything newer.

Read it after `layouts/tiles.py`, `copies/vectorized.py`, `copies/cp_async.py` and `mmas/fragments.py`, whose
parts it puts together.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, nullptr

from cutelab.copies import CpAsyncRing, TileLoader, operand_copies, tile_copy
from cutelab.kernels.dense_gemm.config import AB_DTYPES, OUT_DTYPES, GemmConfig
from cutelab.kernels.dense_gemm.operands import bias_tensor, c_tensor, operand_tensor
from cutelab.kernels.dense_gemm.scheduler import GroupedRaster
from cutelab.layouts import operand_tile
from cutelab.mmas import OperandPipeline, tiled_mma


class GemmSm80:
    """D = activation(alpha · A·Bᵀ + beta · C + bias), A (M, K), B (N, K), C and D (M, N), each batched.

    Roles: all warps do everything: each copies a share of the tiles and computes its part of the output.

    Pipelines: a ring of `stages` shared-memory buffers, filled by cp.async `stages - 1` k-tiles ahead; inside
    a k-tile, the operands of k-block i + 1 are loaded into registers while those of i are multiplied.

        k-block   0 of k-tile t       1              …   last                      0 of t + 1
        cp.async  share of t + S - 1  another share  …   wait for t + 1, barrier   share of t + S
        ldmatrix  k-block 1           2              …   0 of t + 1                1
        mma       k-block 0           1              …   last                      0

    The k-tile that may stick out of A and B is loaded first, with predicates along K: the order of a sum
    doesn't matter, and the loop that follows needs none. K = 0 is such a k-tile, all of it zeros.

    Shared memory: [ A: stages × (BLK_M, BLK_K) | B: stages × (BLK_N, BLK_K) ], overwritten at the end by
    [ D: (BLK_M, BLK_N) | alpha | bias ]. Registers: (BLK_M · BLK_N) / threads accumulators, and the operands
    of a k-tile, of which no more than two k-blocks are alive at a time.
    """

    def __init__(self, config: GemmConfig):
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
        config has none. The arguments are flat, since a foreign-function call passes plain numbers fastest.
        """
        cfg = self.config
        batch = (l0, l1)
        mA = operand_tensor(a, (m, k, batch), cfg.a_major, cfg.a_align, a_ld, (a_l0, a_l1))
        mB = operand_tensor(b, (n, k, batch), cfg.b_major, cfg.b_align, b_ld, (b_l0, b_l1))
        mD = operand_tensor(d, (m, n, batch), "k", cfg.out_align, d_ld, (d_l0, d_l1))
        mC = c_tensor(c, (m, n, batch), cfg.c_align, c_m, c_n, (c_l0, c_l1))
        mBias = bias_tensor(bias, cfg.bias, m, n)
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
        m, n, batch = mD.shape
        k = mA.shape[1]
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        m_tile, n_tile, coord = self.raster.tile(block, cute.ceil_div((m, n), cfg.tile[:2]), batch)

        smem = cutlass.memory.SmemAllocator().allocate(cfg.smem_bytes, byte_alignment=1024)
        sA, sB = self.ring_tensors(smem, mA.element_type)  # (BLK_M, BLK_K, PIPE), (BLK_N, BLK_K, PIPE)
        loader_A = self.loader(mA[None, None, coord], cfg.a_major, cfg.a_align, m_tile, sA, thread)
        loader_B = self.loader(mB[None, None, coord], cfg.b_major, cfg.b_align, n_tile, sB, thread)
        mma = tiled_mma(mA.element_type, cfg.warps)
        copy_A, copy_B = operand_copies(mma, mA.element_type, cfg.a_major, cfg.b_major)
        operands = OperandPipeline.partition(mma, copy_A, copy_B, sA, sB, thread)
        acc = cute.make_rmem_tensor(mma.partition_shape_C(cfg.tile[:2]), Float32)  # (MMA, MMA_M, MMA_N)
        acc.fill(0.0)

        self.mainloop(loader_A, loader_B, operands, cute.ceil_div(k, cfg.tile[2]), acc)

        # Each (BLK_M, BLK_N); cD holds the coordinates in D.
        cD = cute.local_tile(cute.make_identity_tensor((m, n)), cfg.tile[:2], (m_tile, n_tile))
        gD = cute.local_tile(mD[None, None, coord], cfg.tile[:2], (m_tile, n_tile))
        gC = None
        if cutlass.const_expr(mC is not None):
            gC = cute.local_tile(mC[None, None, coord], cfg.tile[:2], (m_tile, n_tile))  # type: ignore[index]
        thr_mma = mma.get_slice(thread)
        cfg.epilogue.store(acc, thr_mma, smem, gC, mBias, gD, cD, (m, n), alpha, beta)

    def ring_tensors(
        self, smem: cute.Pointer, dtype: type[cutlass.Numeric]
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """The ring in shared memory: (BLK_M, BLK_K, PIPE) of A, then (BLK_N, BLK_K, PIPE) of B."""
        cfg = self.config
        blk_m, blk_n, blk_k = cfg.tile
        layout_A = operand_tile((blk_m, blk_k, cfg.stages), cfg.a_major, dtype.width)
        layout_B = operand_tile((blk_n, blk_k, cfg.stages), cfg.b_major, dtype.width)
        pointer = cute.recast_ptr(smem, dtype=dtype)
        sA = cute.make_tensor(pointer, layout_A)
        return sA, cute.make_tensor(pointer + cute.cosize(layout_A), layout_B)

    def loader(
        self, mX: cute.Tensor, major: str, align: int, tile: Int32, sX: cute.Tensor, thread: Int32
    ) -> TileLoader:
        """The global-to-shared loader of an operand: mX is (M or N, K), sX its ring of stages."""
        block = cute.size(sX, mode=[0]), cute.size(sX, mode=[1])
        contiguous = 1 if major == "k" else 0
        copy = tile_copy(mX.element_type, block, contiguous, align, self.config.threads, asynchronous=True)
        return TileLoader.partition(copy, mX, sX, tile, thread)

    @cute.jit
    def mainloop(
        self,
        loader_A: TileLoader,
        loader_B: TileLoader,
        operands: OperandPipeline,
        k_tiles: Int32,
        acc: cute.Tensor,  # (MMA, MMA_M, MMA_N)
    ):
        """acc += A·Bᵀ over all k-tiles, in the order last, 0, 1, 2, …"""
        ring = CpAsyncRing(self.config.stages)
        k_tiles = cutlass.max(k_tiles, 1)  # K = 0: one k-tile of zeros
        loader_A.load_last(k_tiles - 1, 0)
        loader_B.load_last(k_tiles - 1, 0)
        ring.commit()
        for stage in cutlass.range_constexpr(1, ring.stages - 1):
            if stage < k_tiles:
                loader_A.load_next(stage, (0, loader_A.vectors))
                loader_B.load_next(stage, (0, loader_B.vectors))
            ring.commit()

        ring.wait()
        operands.load(0, ring.read)
        copying = cutlass.max(k_tiles - (ring.stages - 1), 0)
        for _ in cutlass.range(copying):
            self.multiply_k_tile(ring, operands, acc, (loader_A, loader_B))
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
        loaders: tuple[TileLoader, ...] = (),
    ):
        """acc += A·Bᵀ for the k-tile in stage `ring.read`, while the loaders fill stage `ring.write`.

        The copies are spread over the k-blocks: issued at once, they would hold up the ldmatrix behind them.
        """
        last = operands.k_blocks - 1
        for k_block in cutlass.range_constexpr(last):
            operands.load(k_block + 1, ring.read)
            for loader in loaders:
                loader.load_next(ring.write, share(loader.vectors, k_block, last))
            operands.mma(k_block, acc)
        ring.commit()
        ring.wait()
        operands.load(0, ring.next)
        operands.mma(last, acc)


def share(count: int, part: int, parts: int) -> tuple[int, int]:
    """The bounds of the `part`-th of `parts` nearly equal shares of `count` things."""
    return count * part // parts, count * (part + 1) // parts
