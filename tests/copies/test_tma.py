"""TMA: what arrives in shared memory, what is written back, and that nothing else is touched.

Matrices lie among NaNs, which must not arrive; what is stored goes among sevens, which must stay.
"""

import math
import re
from contextlib import nullcontext
from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, nullptr
from run_hopper import DTYPES, WHERE, launch_of, run

from cutelab.copies import CopyError, TmaLoader, load_atom, store_atom, store_tile
from cutelab.layouts import as_numpy, smem_tile, swizzled_tensor, tma_tile

THREADS = 64
SEVEN = 7.0


def tensor_of(x, sizes, contiguous, ld=None, step_0=0, step_1=0):
    """(rows, columns, L0, L1), with `contiguous` of rows and columns so, and strides that TMA can take."""
    ld = sizes[contiguous] if ld is None else ld
    ld, *steps = (
        cute.assume(each, divby=128 // x.dtype.width) if isinstance(each, Int64) else each
        for each in (ld, step_0, step_1)
    )
    strides = (ld, 1, *steps) if contiguous == 1 else (1, ld, *steps)
    return cute.make_tensor(x, cute.make_layout(sizes, stride=strides))


@dataclass(frozen=True)
class Load:
    """A CTA for each tile: loads it by TMA to a stage, and copies it from there as it is, and as a matrix."""

    dtype: torch.dtype
    tile: tuple[int, int]
    contiguous: int
    prefetch: bool = False

    @cute.jit
    def launch(
        self,
        x: cute.Pointer,
        memory: cute.Pointer,
        matrix: cute.Pointer,
        rows: Int32,
        columns: Int32,
        l0: Int32,
        l1: Int32,
        ld: Int64,
        step_0: Int64,
        step_1: Int64,
        stream,
    ):
        mX = tensor_of(x, (rows, columns, l0, l1), self.contiguous, ld, step_0, step_1)
        atom, tmaX = load_atom(mX, tma_tile(self.tile, self.contiguous, x.dtype.width))
        grid = (cute.ceil_div(rows, self.tile[0]), cute.ceil_div(columns, self.tile[1]), l0 * l1)
        results = cute.make_layout((*self.tile, *grid))
        memory, matrix = cute.make_tensor(memory, results), cute.make_tensor(matrix, results)
        self.kernel(atom, tmaX, memory, matrix, l0).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self, atom: cute.CopyAtom, tmaX: cute.Tensor, memory: cute.Tensor, matrix: cute.Tensor, l0: Int32
    ):
        thread, _, _ = cute.arch.thread_idx()
        m, k, batch = cute.arch.block_idx()
        dtype = DTYPES[self.dtype]
        rows, columns = self.tile
        stages, size = 2, rows * columns * dtype.width // 8
        smem = cutlass.memory.SmemAllocator().allocate(stages * size + 8, byte_alignment=1024)
        full = cute.recast_ptr(smem + stages * size, dtype=Int64)
        if thread == 0:
            cute.arch.mbarrier_init(full, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        sX = swizzled_tensor(smem, tma_tile((*self.tile, stages), self.contiguous, dtype.width), dtype)
        loader = TmaLoader.partition(atom, tmaX, sX)
        stage = batch % stages
        if thread < 32:
            if cutlass.const_expr(self.prefetch):
                loader.prefetch((m, k, batch % l0, batch // l0))
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, size)
            loader.load((m, k, batch % l0, batch // l0), stage, full)
        cute.arch.mbarrier_wait(full, 0)
        plain = cute.make_tensor(
            cute.recast_ptr(smem, dtype=dtype), cute.make_layout((rows * columns, stages))
        )
        for i in cutlass.range(thread, rows * columns, THREADS):
            row, column = i % rows, i // rows
            memory[row, column, m, k, batch] = plain[i, stage]
            matrix[row, column, m, k, batch] = sX[row, column, stage]


def numbers(dtype, sizes, contiguous):
    """(L1, L0, rows, columns) of numbers, with `contiguous` of rows and columns so, in a buffer of NaNs; the
    buffer, the numbers as a view of it, and its strides other than 1."""
    rows, columns, l0, l1 = sizes
    lines, length = (rows, columns) if contiguous == 1 else (columns, rows)
    whole = 16 // dtype.itemsize
    ld = -(-length // whole) * whole + whole
    buffer = torch.full((l1 + 1, l0 + 1, lines + 1, ld), torch.nan, dtype=dtype)
    generator = torch.Generator().manual_seed(lines)
    view = buffer[:l1, :l0, :lines, :length]
    view.copy_(torch.randint(1, 2000, view.shape, generator=generator))
    return buffer, view if contiguous == 1 else view.mT, (ld, buffer.stride(1), buffer.stride(0))


def in_tiles(matrix, tile):
    """(batch, tiles of columns, tiles of rows, columns, rows), with zeros around the edges."""
    rows, columns = matrix.shape[-2:]
    down, across = -(-rows // tile[0]), -(-columns // tile[1])
    padded = torch.zeros((matrix.shape[0] * matrix.shape[1], down * tile[0], across * tile[1]))
    padded[:, :rows, :columns] = matrix.flatten(0, 1)
    return (
        padded.reshape(-1, down, tile[0], across, tile[1])
        .permute(0, 3, 1, 4, 2)
        .to(matrix.dtype)
        .contiguous()
    )


def as_tma_writes(tile, contiguous):
    """A (rows, columns) tile as it lies in memory (PTX ISA, "Tensor swizzling modes"): boxes of up to 128
    bytes, one after the other; in each, the 16-byte chunks of a line change places with the number of the
    128 bytes that the line is in."""
    lines = tile if contiguous == 1 else tile.T
    whole, bytes_ = 16 // tile.itemsize, lines.shape[1] * tile.itemsize
    width = min(bytes_, 128)
    memory = np.zeros((tile.size // whole, whole), tile.dtype)
    for box in range(bytes_ // width):
        for line in range(len(lines)):
            for chunk in range(width // 16):
                address = line * width + 16 * chunk
                moved = address ^ (address // 128 % (width // 16)) * 16
                column = (box * width + 16 * chunk) // tile.itemsize
                memory[(box * len(lines) * width + moved) // 16] = lines[line, column : column + whole]
    return memory.ravel()


LOADS = [
    Load(dtype, tile if contiguous == 1 else tile[::-1], contiguous)
    for dtype in (torch.float16, torch.float32)
    for contiguous in (1, 0)
    for tile in [(24, size // dtype.itemsize) for size in (32, 64, 128, 256)]
]


def name(case):
    if not hasattr(case, "tile"):
        return None
    return f"{str(case.dtype)[6:]}-{case.tile[0]}x{case.tile[1]}-{'mn' if case.contiguous == 0 else 'k'}"


def load(case, sizes, device="cpu", seed=None):
    """What the kernel found: the matrix's tiles, and the memory of each, and what should be there."""
    buffer, matrix, strides = numbers(case.dtype, sizes, case.contiguous)
    expected = in_tiles(matrix, case.tile)
    poison = torch.full_like(expected, torch.nan)
    _, memory, found = run(case, buffer, poison, poison, *sizes, *strides, device=device, seed=seed)
    return found, memory, expected


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("case", LOADS, ids=name)
def test_tiles_arrive_with_zeros_around_the_edges(case, device):
    """Of two matrices: one that ends within tiles, and one smaller than a tile, of one row or column."""
    for sizes in [(case.tile[0] + 5, case.tile[1] + 3, 2, 2), (1, 7, 1, 2), (9, 1, 2, 1)]:
        found, memory, expected = load(case, sizes, device)
        assert torch.equal(found, expected)
        for place in np.ndindex(*expected.shape[:3]):
            written = as_tma_writes(expected[place].T.numpy(), case.contiguous)
            np.testing.assert_array_equal(memory[place].flatten(), written)


@pytest.mark.parametrize("case", [LOADS[2], LOADS[6]], ids=name)
def test_what_tma_writes_is_what_the_layouts_say(case):
    tile = np.arange(math.prod(case.tile), dtype=np.float16).reshape(case.tile)
    order = (0, 1) if case.contiguous == 1 else (1, 0)
    memory = np.empty(tile.size, np.float16)
    memory[as_numpy(smem_tile(case.tile, case.contiguous, 16, order=order))] = tile
    np.testing.assert_array_equal(memory, as_tma_writes(tile, case.contiguous))


@pytest.mark.parametrize("device", WHERE)
def test_a_batch_that_all_share(device):
    """A stride of 0, as that of an operand that is broadcast."""
    case, sizes = LOADS[2], (24, 64, 3, 2)
    buffer, matrix, (ld, _, step) = numbers(case.dtype, (24, 64, 1, 2), 1)
    expected = in_tiles(matrix.expand(2, 3, 24, 64), case.tile)
    poison = torch.full_like(expected, torch.nan)
    _, _, found = run(case, buffer, poison, poison, *sizes, ld, 0, step, device=device)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("device", WHERE)
def test_a_prefetch_changes_nothing(device):
    case, sizes = replace(LOADS[2], prefetch=True), (29, 67, 2, 1)
    found, _, expected = load(case, sizes, device)
    assert torch.equal(found, expected)


def instructions(kernel, *arguments):
    """The names of the bulk-copy instructions that a kernel has, without the number of modes."""
    words = launch_of(kernel, *arguments).ptx.replace(";", " ").split()
    return {re.sub(r"\.\dd", "", each) for each in words if each.startswith(("cp.async", "cp.reduce"))}


LOADED = "cp.async.bulk.tensor.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
PREFETCHED = "cp.async.bulk.prefetch.tensor.L2.global.tile.L2::cache_hint"


def test_instructions_of_a_load():
    buffer, _, strides = numbers(torch.float16, (29, 67, 2, 1), 1)
    arguments = buffer, buffer, buffer, 29, 67, 2, 1, *strides
    assert instructions(LOADS[2], *arguments) == {LOADED}
    assert instructions(replace(LOADS[2], prefetch=True), *arguments) == {LOADED, PREFETCHED}


# --- What TMA can't reach


class Unreachable:
    """Makes a tensor map of a matrix."""

    def __init__(self, atom, strides, assumed=1):
        self.atom, self.strides, self.assumed = atom, strides, assumed

    @cute.jit
    def launch(self, x: cute.Pointer, ld: Int64, stream):
        ld = cute.assume(ld, divby=self.assumed)
        strides = [ld if each is None else each for each in self.strides]
        mX = cute.make_tensor(x, cute.make_layout((40, 72, 2, 1), stride=tuple(strides)))
        atom, _ = self.atom(mX, tma_tile((16, 32), 1, x.dtype.width))
        self.kernel(atom).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, atom: cute.CopyAtom):
        cpasync.prefetch_descriptor(atom)


@pytest.mark.parametrize("atom", [load_atom, store_atom])
@pytest.mark.parametrize(
    ("dtype", "align", "strides", "assumed", "message"),
    [
        (cutlass.Float16, 16, (71, 1, 0, 0), 1, "strides of 8 elements of Float16 or multiples.* is 71"),
        (cutlass.Float32, 16, (74, 1, 0, 0), 1, "strides of 4 elements of Float32 or multiples.* is 74"),
        (cutlass.Float16, 16, (72, 1, 2884, 0), 1, "one of .*2884.* is 2884"),
        (cutlass.Float16, 16, (None, 1, 0, 0), 4, "is only known to be a multiple of 4"),
        (cutlass.Float16, 8, (72, 1, 0, 0), 1, "multiples of 16 bytes, got a pointer aligned to 8"),
        (cutlass.Float16, 16, (None, 1, 2880, 1), 8, None),
        (cutlass.Float32, 16, (76, 1, 0, 3), 1, None),
    ],
)
def test_what_a_tensor_map_has_no_room_for_is_refused(atom, dtype, align, strides, assumed, message):
    """A mode of size 1 may have any stride."""
    kernel = Unreachable(atom, strides, assumed)
    pointer = nullptr(dtype, cute.AddressSpace.gmem, assumed_align=align)
    with pytest.raises(CopyError, match=message) if message else nullcontext():
        cute.compile(kernel.launch, pointer, 1, make_fake_stream(), options="--gpu-arch sm_90a")


# --- Multicast


@dataclass(frozen=True)
class Multicast:
    """A cluster loads the tiles of A of its rows and those of B of its columns; a CTA shows what it got.

    loading: the CTAs of the cluster that load their slices.
    """

    cluster: tuple[int, int]
    contiguous: int
    loading: tuple[int, ...]

    dtype = torch.float16
    tile = 32, 16

    @cute.jit
    def launch(self, a: cute.Pointer, b: cute.Pointer, got_a: cute.Pointer, got_b: cute.Pointer, stream):
        rows, columns = self.tile
        cluster_m, cluster_n = self.cluster
        mA = tensor_of(a, (rows * cluster_m, columns, 1, 1), self.contiguous)
        mB = tensor_of(b, (rows * cluster_n, columns, 1, 1), self.contiguous)
        tile = tma_tile(self.tile, self.contiguous, 16)
        results = cute.make_layout((rows, columns, cluster_m * cluster_n))
        self.kernel(
            *load_atom(mA, tile, cluster_n),
            *load_atom(mB, tile, cluster_m),
            cute.make_tensor(got_a, results),
            cute.make_tensor(got_b, results),
        ).launch(
            grid=(cluster_m * cluster_n, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(cluster_m * cluster_n, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        load_A: cute.CopyAtom,
        tmaA: cute.Tensor,
        load_B: cute.CopyAtom,
        tmaB: cute.Tensor,
        got_A: cute.Tensor,
        got_B: cute.Tensor,
    ):
        thread, _, _ = cute.arch.thread_idx()
        cta = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        cluster_m, cluster_n = self.cluster
        rank_m, rank_n = cta % cluster_m, cta // cluster_m
        row = sum(1 << (i * cluster_m) for i in range(cluster_n)) << rank_m
        column = ((1 << cluster_m) - 1) << (rank_n * cluster_m)
        size = math.prod(self.tile)
        smem = cutlass.memory.SmemAllocator().allocate(4 * size + 8, byte_alignment=1024)
        layout = tma_tile((*self.tile, 1), self.contiguous, 16)
        sA = swizzled_tensor(smem, layout, cutlass.Float16)
        sB = swizzled_tensor(smem + 2 * size, layout, cutlass.Float16)
        for i in cutlass.range(thread, size, THREADS):
            sA[i % self.tile[0], i // self.tile[0], 0] = cutlass.Float16(-1)
            sB[i % self.tile[0], i // self.tile[0], 0] = cutlass.Float16(-1)
        cute.arch.fence_proxy("async.shared", space="cta")
        full = cute.recast_ptr(smem + 4 * size, dtype=Int64)
        if thread == 0:
            cute.arch.mbarrier_init(full, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

        loads, coming = cutlass.Boolean(False), Int32(0)
        for other in self.loading:
            loads = loads | (other == cta)
            coming += Int32(other % cluster_m == rank_m) * (2 * size // cluster_n)
            coming += Int32(other // cluster_m == rank_n) * (2 * size // cluster_m)
        if thread < 32:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, coming)
            if loads:
                A = TmaLoader.partition(load_A, tmaA, sA, cluster_n, rank_n, row if cluster_n > 1 else None)
                B = TmaLoader.partition(
                    load_B, tmaB, sB, cluster_m, rank_m, column if cluster_m > 1 else None
                )
                A.load((rank_m, 0, 0, 0), Int32(0), full)
                B.load((rank_n, 0, 0, 0), Int32(0), full)
        cute.arch.mbarrier_wait(full, 0)
        for i in cutlass.range(thread, size, THREADS):
            r, c = i % self.tile[0], i // self.tile[0]
            got_A[r, c, cta] = sA[r, c, 0]
            got_B[r, c, cta] = sB[r, c, 0]
        cute.arch.cluster_arrive()  # shared memory must not go away before it has been written
        cute.arch.cluster_wait()


def multicast(case, device="cpu", seed=None):
    """(A, B) as loaded, each (CTAs, rows, columns), and as they should be if all load."""
    rows, columns = case.tile
    whole = [
        torch.arange(1, size * rows * columns + 1).remainder(1999).half().reshape(size, rows, columns)
        for size in case.cluster
    ]
    given = [x if case.contiguous == 1 else x.flatten(0, 1).mT.contiguous() for x in whole]
    cluster_m, cluster_n = case.cluster
    poison = torch.full((cluster_m * cluster_n, columns, rows), torch.nan).half()
    got = run(case, *given, poison, poison, device=device, seed=seed)[2:]
    ctas = range(cluster_m * cluster_n)
    exact = (
        torch.stack([whole[0][i % cluster_m] for i in ctas]),
        torch.stack([whole[1][i // cluster_m] for i in ctas]),
    )
    return [x.mT for x in got], exact


CLUSTERS = [(2, 1), (1, 2), (2, 2), (4, 1)]


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("contiguous", [1, 0])
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_cluster_shares_what_it_loads(cluster, contiguous, device):
    case = Multicast(cluster, contiguous, tuple(range(math.prod(cluster))))
    for seed in (None, 0, 1) if device == "cpu" else (None,):
        got, exact = multicast(case, device, seed)
        assert torch.equal(got[0], exact[0]) and torch.equal(got[1], exact[1])


@pytest.mark.parametrize("cluster", CLUSTERS[:3])
def test_each_cta_loads_a_slice_of_its_own(cluster):
    """If one CTA alone loads: the slice arrives where it is wanted, and nowhere else."""
    cluster_m, cluster_n = cluster
    ctas = range(cluster_m * cluster_n)
    arrived = []
    for loading in ctas:
        got, exact = multicast(Multicast(cluster, 1, (loading,)))
        there = [g != -1 for g in got]
        for n in range(2):
            assert torch.equal(got[n], torch.where(there[n], exact[n], -1))
        for cta in ctas:
            shares_a, shares_b = (
                cta % cluster_m == loading % cluster_m,
                cta // cluster_m == loading // cluster_m,
            )
            assert there[0][cta].sum() == shares_a * math.prod(Multicast.tile) // cluster_n
            assert there[1][cta].sum() == shares_b * math.prod(Multicast.tile) // cluster_m
        arrived.append(there)
    for n in range(2):  # together they are the tile, once
        assert (sum(there[n].int() for there in arrived) == 1).all()


@dataclass(frozen=True)
class Narrow(Multicast):
    tile = 8, 16


@pytest.mark.parametrize("cluster", [(4, 1), (1, 4)])
def test_slices_that_tma_cannot_write_are_refused(cluster):
    x = torch.zeros(1).half()
    with pytest.raises(CopyError, match=r"4 CTAs can't share a tile of 256 bytes: .* multiples of 128"):
        run(Narrow(cluster, 1, (0,)), x, x, x, x)


@pytest.mark.parametrize("cluster", CLUSTERS[:3])
def test_instructions_of_a_multicast(cluster):
    case = Multicast(cluster, 1, (0,))
    x = torch.zeros(1).half()
    shared = LOADED.replace("::cta", "::cluster").replace(".L2", ".multicast::cluster.L2")
    assert instructions(case, x, x, x, x) == ({shared} if cluster == (2, 2) else {LOADED, shared})


# --- Stores


@dataclass(frozen=True)
class Store:
    """A CTA for each tile of a matrix: writes numbers to shared memory, and stores or adds it by TMA.

    times: in how many groups of copies, one after the other.
    """

    dtype: torch.dtype
    tile: tuple[int, int]
    contiguous: int
    add: bool = False
    times: int = 1

    @cute.jit
    def launch(
        self,
        y: cute.Pointer,
        rows: Int32,
        columns: Int32,
        l0: Int32,
        l1: Int32,
        ld: Int64,
        step_0: Int64,
        step_1: Int64,
        stream,
    ):
        mY = tensor_of(y, (rows, columns, l0, l1), self.contiguous, ld, step_0, step_1)
        atom, tmaY = store_atom(mY, tma_tile(self.tile, self.contiguous, y.dtype.width), self.add)
        grid = (cute.ceil_div(rows, self.tile[0]), cute.ceil_div(columns, self.tile[1]), l0 * l1)
        self.kernel(atom, tmaY, l0).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, atom: cute.CopyAtom, tmaY: cute.Tensor, l0: Int32):
        thread, _, _ = cute.arch.thread_idx()
        m, n, batch = cute.arch.block_idx()
        dtype = DTYPES[self.dtype]
        rows, columns = self.tile
        smem = cutlass.memory.SmemAllocator().allocate(rows * columns * dtype.width // 8, byte_alignment=1024)
        sY = swizzled_tensor(smem, tma_tile(self.tile, self.contiguous, dtype.width), dtype)
        for i in cutlass.range(thread, rows * columns, THREADS):
            row, column = i // columns, i % columns
            sY[row, column] = dtype(row % 8 * 8 + column % 8 + 1)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        if thread < 32:
            gY = cute.local_tile(tmaY, self.tile, (m, n, batch % l0, batch // l0))
            for _ in cutlass.range_constexpr(self.times):
                store_tile(atom, sY, gY)
            cute.arch.cp_async_bulk_wait_group(0, read=True)


def written(tile):
    row, column = np.indices(tile)
    return torch.from_numpy(row % 8 * 8 + column % 8 + 1)


STORES = [
    Store(dtype, tile if contiguous == 1 else tile[::-1], contiguous)
    for dtype in (torch.float16, torch.float32)
    for contiguous in (1, 0)
    for tile in [(24, size // dtype.itemsize) for size in (32, 64, 256)]
]
SUMS = [
    Store(dtype, (64, 32), contiguous, add=True, times=times)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for contiguous, times in [(1, 1), (1, 2), (0, 2)]
]


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("case", [*STORES, *SUMS], ids=name)
def test_tiles_are_written_up_to_the_edges(case, device):
    for sizes in [(case.tile[0] + 5, case.tile[1] + 3, 2, 2), (1, 7, 1, 2), (9, 1, 2, 1)]:
        buffer, matrix, strides = numbers(case.dtype, sizes, case.contiguous)
        buffer.nan_to_num_(SEVEN)
        matrix.copy_(matrix % 16 if case.add else torch.nan)
        (after,) = run(case, buffer, *sizes, *strides, device=device)
        tiles = written(case.tile).repeat(2, 2)[: sizes[0], : sizes[1]]
        matrix.copy_(matrix + case.times * tiles if case.add else tiles)
        assert torch.equal(after, buffer)


@pytest.mark.parametrize("device", WHERE)
def test_ctas_add_to_one_tile(device):
    case, (rows, columns, ctas) = SUMS[0], (61, 29, 5)
    for seed in range(3):
        buffer, matrix, (ld, _, _) = numbers(case.dtype, (rows, columns, 1, 1), 1)
        buffer.nan_to_num_(SEVEN)
        (after,) = run(case, buffer, rows, columns, ctas, 1, ld, 0, 0, device=device, seed=seed)
        matrix += ctas * written(case.tile)[:rows, :columns]
        assert torch.equal(after, buffer)


STORED = "cp.async.bulk.tensor.global.shared::cta.tile.bulk_group.L2::cache_hint"
GROUPS = {"cp.async.bulk.commit_group", "cp.async.bulk.wait_group.read"}


@pytest.mark.parametrize("add", [False, True])
def test_instructions_of_a_store(add):
    case = Store(torch.float32, (64, 32), 1, add)
    stored = STORED.replace("async", "reduce.async").replace("tile", "add.tile") if add else STORED
    assert instructions(case, torch.zeros(1), *(1,) * 7) == {stored, *GROUPS}
