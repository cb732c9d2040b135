"""The Ampere GEMM's shared memory: its swizzles are what `solve` finds, and no access has a bank conflict."""

import cutlass
import cutlass.cute as cute
import pytest

from cutelab.copies import operand_copies, tile_copy
from cutelab.kernels.dense_gemm.config import AB_DTYPES, OUT_DTYPES, shipped_configs
from cutelab.kernels.dense_gemm.epilogue import Epilogue
from cutelab.kernels.runtime.arch import Arch
from cutelab.layouts import operand_tile
from cutelab.layouts.banks import BankReport
from cutelab.layouts.solver import solve
from cutelab.layouts.traffic import bank_report
from cutelab.mmas import tiled_mma

ARCHS = [Arch.named(f"sm_{chip}") for chip in ("80", "86", "87", "89", "90a", "120a")]
CONFIGS = {config for arch in ARCHS for config in shipped_configs(arch)}

# What decides how an operand's ring is laid out and accessed: type, operand, extent, BLK_K, stages, major,
# alignment, warps.
OPERANDS = {
    (config.ab_dtype, operand, extent, config.tile[2], config.stages, major, align, config.warps)
    for config in CONFIGS
    for operand, extent, major, align in (
        ("A", config.tile[0], config.a_major, config.a_align),
        ("B", config.tile[1], config.b_major, config.b_align),
    )
}
# The same for the tile of C and D, and the bias.
EPILOGUES = {
    (c.ab_dtype, c.out_dtype, c.tile[:2], c.out_align, c.c_align, str(c.bias), c.warps): c for c in CONFIGS
}


def name(case):
    return "-".join(map(str, case)).replace(" ", "")


@pytest.mark.parametrize("case", sorted(OPERANDS), ids=name)
def test_operand_tiles_come_out_of_solve(assert_conflict_free, case):
    ab_dtype, operand, extent, blk_k, stages, major, align, warps = case
    dtype, threads = AB_DTYPES[ab_dtype], warps[0] * warps[1] * 32
    tile = operand_tile((extent, blk_k, stages), major, dtype.width)
    contiguous = 1 if major == "k" else 0
    producer = tile_copy(dtype, (extent, blk_k), contiguous, align, threads, asynchronous=True)
    copies = operand_copies(tiled_mma(dtype, warps), dtype, major, major)
    consumer = copies["AB".index(operand)]

    solution = solve(tile.outer, [(producer, "dst"), (consumer, "src")], dtype)
    assert solution.layout == tile
    assert_conflict_free(tile, producer, dtype, "dst")
    assert_conflict_free(tile, consumer, dtype, "src")


def accesses(epilogue: Epilogue, mma: cute.TiledMma) -> list:
    """All that touch the tile of C and D: C comes in, becomes D where it lies, and D leaves."""
    found = [(mma, "C"), (epilogue.copy(epilogue.d_align), "src")]
    if epilogue.c_align:
        found.append((epilogue.copy(epilogue.c_align, asynchronous=True), "dst"))
    return found


@pytest.mark.parametrize("case", sorted(EPILOGUES), ids=name)
def test_epilogue_tiles_come_out_of_solve(assert_conflict_free, case):
    config = EPILOGUES[case]
    dtype, epilogue = OUT_DTYPES[config.out_dtype], config.epilogue
    mma = tiled_mma(AB_DTYPES[config.ab_dtype], config.warps)
    found = accesses(epilogue, mma)
    assert solve(epilogue.layout.outer, found, dtype).layout == epilogue.layout
    for access, operand in found:
        assert_conflict_free(epilogue.layout, access, dtype, operand)
    if epilogue.c_align:  # each thread reads the elements of C that it replaces
        stored = bank_report(epilogue.layout, mma, dtype, "C")
        assert not loads(stored).conflicts.any()


@pytest.mark.parametrize("case", sorted(case for case, c in EPILOGUES.items() if c.bias), ids=name)
def test_the_bias_is_stored_and_read_without_conflicts(assert_conflict_free, case):
    config = EPILOGUES[case]
    epilogue = config.epilogue
    extent = epilogue.bias_bytes // 4
    assert_conflict_free(cute.make_layout((1, extent), stride=(extent, 1)), "st.shared.b32", cutlass.Float32)
    mma = tiled_mma(AB_DTYPES[config.ab_dtype], config.warps)
    assert not loads(bank_report(epilogue.bias_layout, mma, cutlass.Float32, "C")).conflicts.any()


def loads(stored: BankReport) -> BankReport:
    """Loads from the addresses of stores."""
    return BankReport(stored.access.name.replace("st.", "ld."), stored.addresses)
