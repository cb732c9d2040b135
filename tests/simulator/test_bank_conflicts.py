"""Wavefronts of shared-memory instructions as executed, against the prediction of `cutelab.layouts`."""

import functools

import numpy as np
import pytest
import torch
from run_ptx import kernel, run

from cutelab import simulator
from cutelab.kernels import gemm
from cutelab.layouts import BankReport
from cutelab.simulator.bank_conflicts import BankConflicts


class Compared(BankConflicts):
    """Checks each access against the prediction for its addresses."""

    accesses = 0

    def of_warp(self, kind, size, addresses):
        matrices = int((addresses >= 0).sum()) // 8
        name = {
            "ldmatrix": f"ldmatrix.x{matrices}",
            "stmatrix": f"stmatrix.x{matrices}",
            "cp.async": f"cp.async.{size}",
        }.get(kind, f"{kind}.shared.b{8 * size}")
        report = BankReport(name, addresses)
        found = super().of_warp(kind, size, addresses)
        assert found == (report.wavefronts[0], report.ideal[0])
        self.accesses += 1
        return found


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("ld", 1),
        ("ld", 4),
        ("ld", 8),
        ("ld", 16),
        ("st", 2),
        ("st", 8),
        ("st", 16),
        ("cp.async", 4),
        ("cp.async", 16),
    ],
)
def test_random_addresses(kind, size):
    rng = np.random.default_rng(size)
    for lines in (1, 2, 8, 64):
        for _ in range(20):
            addresses = rng.integers(lines * 128 // size, size=32) * size
            addresses[rng.random(32) < rng.choice([0, 0.3])] = -1
            if rng.random() < 0.5:
                addresses = addresses[np.arange(32) & ~rng.choice([1, 2])]  # lanes that pair up
            Compared().of_warp(kind, size, addresses)


@pytest.mark.parametrize("matrices", [1, 2, 4])
@pytest.mark.parametrize("kind", ["ldmatrix", "stmatrix"])
def test_random_rows_of_matrices(kind, matrices):
    rng = np.random.default_rng(matrices)
    for lines in (1, 2, 8, 64):
        addresses = np.full(32, -1)
        addresses[: 8 * matrices] = rng.integers(lines * 8, size=8 * matrices) * 16
        Compared().of_warp(kind, 16, addresses)


def test_an_executed_load_is_counted_at_its_instruction():
    banks = Compared()
    body = """mov.b32 %r1, smem; shl.b32 %r2, %r31, 7; and.b32 %r2, %r2, 1023; add.s32 %r1, %r1, %r2;
              st.shared.b32 [%r1], %r31;
              bar.sync 0; ld.shared.b32 %r3, [%r1];"""
    run(kernel(body, shared=1024, parameters=1), np.zeros(1, np.uint32), banks=banks)
    costs = {instruction.opcode: cost for instruction, cost in banks.costs.items()}
    assert (costs["st"].executed, costs["st"].wavefronts, costs["st"].ideal) == (1, 8, 1)
    assert costs["ld"].wavefronts == 8
    assert "ld.shared.b32" in str(banks)


def test_a_gemm():
    banks = Compared()
    a, b = torch.randn(64, 64).half(), torch.randn(64, 64).half()
    with simulator.gpu("sm_80", execute=functools.partial(simulator.execute, banks=banks)):
        gemm(a, b)
    executed = {instruction.opcode for instruction in banks.costs}
    assert {"cp", "ldmatrix"} <= executed
    assert banks.accesses == sum(cost.executed for cost in banks.costs.values()) > 100
