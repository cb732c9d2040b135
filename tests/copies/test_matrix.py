"""ldmatrix delivers to each thread what mma.sync expects of it; stmatrix brings the results back."""

from dataclasses import dataclass
from functools import partial
from itertools import product

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import torch
from run_hopper import WHERE, launch_of, run

from cutelab import simulator
from cutelab.copies import CopyError, operand_atom, operand_copies, stmatrix_copy
from cutelab.layouts import smem_tile, swizzled_tensor, tma_tile, tv_map
from cutelab.layouts.testing import assert_conflict_free
from cutelab.mmas import MMA_ROWS, WARPGROUP, tiled_mma, warpgroup_mma
from cutelab.simulator.bank_conflicts import BankConflicts

DTYPES = (cutlass.Float16, cutlass.BFloat16, cutlass.TFloat32)


def elements(coordinates):
    """For each thread the set of elements it holds, as sorted rows."""
    flat = coordinates[..., 0] * 1000 + coordinates[..., 1]
    return np.sort(flat, axis=1)


@pytest.mark.parametrize("warps", [(1, 1), (2, 2), (2, 4)])
@pytest.mark.parametrize(("dtype", "majors"), list(product(DTYPES, product(("k", "mn"), repeat=2))))
def test_registers_hold_what_the_mma_reads(dtype, majors, warps):
    mma = tiled_mma(dtype, warps)
    for copy, operand in zip(operand_copies(mma, dtype, *majors), "AB", strict=True):
        assert np.array_equal(elements(tv_map(copy, "dst")), elements(tv_map(mma, operand)))


@pytest.mark.parametrize("matrices", [1, 2, 4])
@pytest.mark.parametrize("major", ["k", "mn"])
def test_ldmatrix_forms(matrices, major):
    atom = operand_atom(cutlass.BFloat16, major, matrices)
    assert (atom.op.num_matrices, atom.op.transpose) == (matrices, major == "mn")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((cutlass.BFloat16, "k", 3), "1, 2 or 4 matrices, got 3"),
        ((cutlass.BFloat16, "n"), "along 'k' or 'mn', got 'n'"),
        ((cutlass.Float8E4M3FN, "mn"), "16 or 32 bits, got .* of 8"),
    ],
)
def test_other_forms_are_refused(arguments, message):
    with pytest.raises(CopyError, match=message):
        operand_atom(*arguments)


# --- stmatrix


@dataclass(frozen=True)
class Stored:
    """A warpgroup stores accumulators that say where they belong to a swizzled tile, and copies it out."""

    columns: int
    contiguous: int

    @cute.jit
    def launch(self, y: cute.Pointer, stream):
        mY = cute.make_tensor(y, cute.make_layout((MMA_ROWS, self.columns)))
        self.kernel(mY).launch(grid=(1, 1, 1), block=(WARPGROUP, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, mY: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        shape, dtype = (MMA_ROWS, self.columns), cutlass.Int16
        smem = cutlass.memory.SmemAllocator().allocate(2 * cute.size(shape), byte_alignment=1024)
        sY = swizzled_tensor(smem, tma_tile(shape, self.contiguous, 16), dtype)
        mma = warpgroup_mma(cutlass.Float16, self.columns)
        tCrY = cute.make_rmem_tensor(mma.partition_shape_C(shape), dtype)
        tCcY = mma.get_slice(thread).partition_C(cute.make_identity_tensor(shape))
        for i in cutlass.range(cute.size(tCrY), unroll_full=True):
            tCrY[i] = dtype(tCcY[i][0] + MMA_ROWS * tCcY[i][1])
        copy = stmatrix_copy(dtype, mma, self.contiguous)
        share = copy.get_slice(thread)
        cute.copy(copy, share.retile(tCrY), share.partition_D(sY))
        cute.arch.sync_threads()
        for i in cutlass.range(thread, cute.size(shape), WARPGROUP):
            mY[i % MMA_ROWS, i // MMA_ROWS] = sY[i % MMA_ROWS, i // MMA_ROWS]


STORED = [Stored(n, c) for n in (16, 32, 64, 128) for c in (1, 0)]


def at_home(case):
    return torch.arange(case.columns * MMA_ROWS, dtype=torch.int16).reshape(case.columns, MMA_ROWS)


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("case", STORED, ids=lambda case: f"{case.columns}-{case.contiguous}")
def test_stmatrix_brings_accumulators_home(case, device):
    (got,) = run(case, torch.full_like(at_home(case), -1), device=device)
    assert torch.equal(got, at_home(case))


@pytest.mark.parametrize("case", STORED, ids=lambda case: f"{case.columns}-{case.contiguous}")
def test_stmatrix_has_no_bank_conflicts(case):
    """As predicted for the layout, and as counted in the simulator."""
    shape, order = (MMA_ROWS, case.columns), (0, 1) if case.contiguous == 1 else (1, 0)
    with simulator.gpu("sm_90a"):
        copy = stmatrix_copy(cutlass.Float16, warpgroup_mma(cutlass.Float16, case.columns), case.contiguous)
        assert_conflict_free(smem_tile(shape, case.contiguous, 16, order=order), copy, cutlass.Float16, "dst")
    banks = BankConflicts()
    run(case, at_home(case), execute=partial(simulator.execute, banks=banks))
    costs = [cost for each, cost in banks.costs.items() if each.opcode == "stmatrix"]
    assert sum(cost.executed for cost in costs) == 4 * case.columns // 16
    assert all(cost.wavefronts == cost.ideal == 4 * cost.executed for cost in costs)


@pytest.mark.parametrize("contiguous", [1, 0])
def test_stmatrix_instruction(contiguous):
    case = Stored(64, contiguous)
    words = launch_of(case, at_home(case)).ptx.split()
    trans = ".trans" if contiguous == 0 else ""
    assert {each for each in words if each.startswith("stmatrix")} == {
        f"stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16"
    }


@pytest.mark.parametrize("contiguous", [1, 0])
@pytest.mark.parametrize("columns", [16, 64, 256])
def test_stmatrix_takes_what_the_mma_leaves(columns, contiguous):
    with simulator.gpu("sm_90a"):
        mma = warpgroup_mma(cutlass.BFloat16, columns)
        stored = tv_map(stmatrix_copy(cutlass.BFloat16, mma, contiguous), "src")
    left = elements(tv_map(mma, "C"))
    assert np.array_equal(elements(stored), left)


@pytest.mark.parametrize("dtype", [cutlass.Float32, cutlass.Float8E4M3FN])
def test_stmatrix_moves_16_bits(dtype):
    with pytest.raises(CopyError, match=r"stmatrix moves elements of 16 bits, got .* of (8|32)"):
        stmatrix_copy(dtype, None, 1)
