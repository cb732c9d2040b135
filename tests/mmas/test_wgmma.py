"""Products of wgmma on integers, which are exact, in the simulator and on a GPU; and what is refused."""

import re
from dataclasses import dataclass
from itertools import product

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Float32, Int32
from run_hopper import WHERE, launch_of, run

from cutelab import simulator
from cutelab.layouts import owners, swizzled_tensor, tma_tile, tv_map
from cutelab.mmas import MMA_ROWS, WARPGROUP, MmaError, StagedProduct, warpgroup_mma

STAGES = 2
COLUMNS = (8, 16, 64, 128, 192, 256)
MAJORS = {"k": 1, "mn": 0}


@dataclass(frozen=True)
class Product:
    """One warpgroup multiplies two stages of A and B.

    first: whether the first stage overwrites the accumulators, which are NaN, or adds to them, which are 1.
    """

    dtype: torch.dtype
    columns: int
    majors: tuple[str, str] = ("k", "k")
    row_blocks: int = 1
    depth: int = 32
    first: bool = True
    in_registers: bool = False  # A

    @property
    def rows(self):
        return MMA_ROWS * self.row_blocks

    @cute.jit
    def launch(self, a: cute.Pointer, b: cute.Pointer, d: cute.Pointer, stream):
        """D (M, N) = A·Bᵀ, A (M, K, stages), B (N, K, stages), the first mode of each contiguous."""
        mA = cute.make_tensor(a, cute.make_layout((self.rows, self.depth, STAGES)))
        mB = cute.make_tensor(b, cute.make_layout((self.columns, self.depth, STAGES)))
        mD = cute.make_tensor(d, cute.make_layout((self.rows, self.columns)))
        self.kernel(mA, mB, mD).launch(grid=(1, 1, 1), block=(WARPGROUP, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, mA: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        smem = cutlass.memory.SmemAllocator()
        stages = []
        for mX, major in zip((mA, mB), self.majors):  # noqa: B905 — the DSL has no `strict`
            layout = tma_tile(mX.shape, MAJORS[major], mX.element_type.width)
            room = smem.allocate(cute.size(mX) * mX.element_type.width // 8, byte_alignment=1024)
            sX = swizzled_tensor(room, layout, mX.element_type)
            for i in cutlass.range(thread, cute.size(mX), WARPGROUP):
                at = mX.layout.get_hier_coord(i)
                sX[at] = mX[at]
            stages.append(sX)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        mma = warpgroup_mma(mA.element_type, self.columns, *self.majors, self.in_registers)
        tCrA = None, None
        if cutlass.const_expr(self.in_registers):
            stages[0], tCrA = (
                None,
                [self.fragment(mma, mA[None, None, stage], thread) for stage in range(STAGES)],
            )
        products = StagedProduct.partition(mma, *stages)
        acc = cute.make_rmem_tensor(mma.partition_shape_C((self.rows, self.columns)), Float32)
        acc.fill(float("nan") if cutlass.const_expr(self.first) else 1.0)
        products.start(Int32(0), acc, self.first, tCrA[0])
        products.start(Int32(1), acc, False, tCrA[1])
        products.wait(0)
        tCgD = mma.get_slice(thread).partition_C(mD)
        cute.autovec_copy(acc, tCgD)

    def fragment(self, mma: cute.TiledMma, mA: cute.Tensor, thread: Int32) -> cute.Tensor:
        """One stage of A in registers, (MMA, MMA_M, MMA_K)."""
        tCgA = mma.get_slice(thread).partition_A(mA)
        tCrA = cute.make_rmem_tensor(tCgA.shape, mA.element_type)
        cute.autovec_copy(tCgA, tCrA)
        return tCrA


def integers(*shape, dtype):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def operands(case):
    """A and B, (stages, depth, rows or columns), and D."""
    a = integers(STAGES, case.depth, case.rows, dtype=case.dtype)
    b = integers(STAGES, case.depth, case.columns, dtype=case.dtype)
    return a, b, torch.full((case.columns, case.rows), torch.nan)


def name(case):
    source = "registers-" if case.in_registers else ""
    kind = f"{source}{str(case.dtype)[6:]}-{'-'.join(case.majors)}"
    return f"{kind}-{case.row_blocks}x64x{case.columns}x{case.depth}"


EVERY = list(product(MAJORS, repeat=2))
PRODUCTS = [
    *(Product(torch.float16, n, majors) for majors in EVERY for n in COLUMNS if (n, majors[1]) != (8, "mn")),
    *(Product(torch.bfloat16, n, majors) for majors in EVERY for n in (16, 128)),
    *(Product(torch.float16, n, majors, row_blocks=2) for majors in EVERY for n in (16, 128)),
    *(Product(torch.bfloat16, 64, majors, depth=depth) for majors in EVERY[::3] for depth in (16, 64)),
    *(Product(torch.float16, n, majors, in_registers=True) for majors in EVERY[:2] for n in (16, 64, 256)),
    Product(torch.bfloat16, 128, ("k", "mn"), row_blocks=2, depth=64, in_registers=True),
]


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("case", PRODUCTS, ids=name)
def test_products_are_exact(case, device):
    a, b, d = operands(case)
    _, _, d = run(case, a, b, d, device=device)
    assert torch.equal(d, torch.einsum("skn,skm->nm", b.float(), a.float()))


@pytest.mark.parametrize("device", WHERE)
def test_what_is_not_the_first_stage_adds(device):
    case = Product(torch.float16, 64, first=False)
    a, b, d = operands(case)
    _, _, d = run(case, a, b, d, device=device)
    assert torch.equal(d, 1 + torch.einsum("skn,skm->nm", b.float(), a.float()))


@pytest.mark.parametrize("seed", range(3))
def test_in_every_order_of_warps(seed):
    case = PRODUCTS[0]
    a, b, d = operands(case)
    _, _, d = run(case, a, b, d, seed=seed)
    assert torch.equal(d, torch.einsum("skn,skm->nm", b.float(), a.float()))


@pytest.mark.parametrize("case", [PRODUCTS[2], PRODUCTS[41]], ids=name)
def test_instructions(case):
    ptx = launch_of(case, *operands(case)).ptx
    lines = [line.strip() for line in ptx.splitlines() if line.strip().startswith("wgmma")]
    kind = "bf16" if case.dtype == torch.bfloat16 else "f16"
    products = [line for line in lines if "mma_async" in line]
    assert len(products) == STAGES * case.row_blocks * case.depth // 16
    for line in products:
        assert line.startswith(f"wgmma.mma_async.sync.aligned.m64n{case.columns}k16.f32.{kind}.{kind}")
        transposed = [int(major == "mn") for major in case.majors]
        assert re.search(r"1,\s+1, (\d), (\d);$", line).groups() == tuple(map(str, transposed))
    others = [line.split(";")[0] for line in lines if "mma_async" not in line]
    whole = ["wgmma.fence.sync.aligned", "wgmma.commit_group.sync.aligned"]
    assert others == [*whole * STAGES, "wgmma.wait_group.sync.aligned \t0"]


@pytest.mark.parametrize(
    ("dtype", "columns", "message"),
    [
        (cutlass.Float32, 64, "Float16 or BFloat16 operands, got .*Float32"),
        (cutlass.TFloat32, 64, "Float16 or BFloat16 operands, got .*TFloat32"),
        (cutlass.Int8, 64, "Float16 or BFloat16 operands, got .*Int8"),
        (cutlass.Float16, 0, "8, 16, … 256 columns, got 0: the nearest that it has is 8"),
        (cutlass.Float16, 12, "got 12: the nearest that it has is 16"),
        (cutlass.Float16, 67, "got 67: the nearest that it has is 64"),
        (cutlass.Float16, 264, "got 264: the nearest that it has is 256"),
        (cutlass.Float16, -8, "got -8: the nearest that it has is 8"),
    ],
)
def test_what_there_is_no_instruction_for_is_refused(dtype, columns, message):
    with pytest.raises(MmaError, match=message):
        warpgroup_mma(dtype, columns)


@pytest.mark.parametrize("majors", [("m", "k"), ("k", "n")])
def test_other_majors_are_refused(majors):
    with pytest.raises(MmaError, match=r"along 'k' or 'mn', got '[mn]'"):
        warpgroup_mma(cutlass.Float16, 64, *majors)


@pytest.mark.parametrize("columns", COLUMNS)
def test_each_accumulator_has_one_owner(columns):
    with simulator.gpu("sm_90a"):
        coordinates = tv_map(warpgroup_mma(cutlass.Float16, columns), "C")
    assert coordinates.shape[:2] == (WARPGROUP, MMA_ROWS * columns // WARPGROUP)
    held = owners(coordinates).thread
    assert held.shape == (MMA_ROWS, columns, 1) and held.min() == 0
    for row in range(MMA_ROWS):  # 16 rows a warp; a row belongs to four lanes, in turn (PTX ISA, m64nNk16)
        assert set(held[row].ravel() // 32) == {row // 16}
        assert [held[row, column, 0] % 4 for column in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert set(held[row].ravel() % 32 // 4) == {row % 8}
