"""The assertion's message, and the pytest plugin as its users meet it."""

import subprocess
import sys

import cutlass
import pytest

from cutelab.copies import operand_copies
from cutelab.layouts import parse_layout
from cutelab.layouts.banks import BankReport
from cutelab.layouts.errors import AccessError
from cutelab.layouts.testing import assert_conflict_free, draw_conflicts
from cutelab.layouts.traffic import bank_report
from cutelab.mmas import tiled_mma

pytest_plugins = "pytester"

CONFLICT = """\
ldmatrix.x4 of (16,32):(32,1), elements of 2 bytes: 24 of 32 wavefronts are bank conflicts, 0 allowed
instruction 0: 16 wavefronts, 4 without conflicts; needed of each bank
  bank     0       8       16      24
  phase 0  4444............4444............  lanes 0–7
  phase 1  ....4444............4444........  lanes 8–15
  phase 2  ........4444............4444....  lanes 16–23
  phase 3  ............4444............4444  lanes 24–31
  phase 0, banks 0–3: lanes 0, 2, 4, 6 at bytes 0, 128, 256, 384
  phase 0, banks 16–19: lanes 1, 3, 5, 7 at bytes 64, 192, 320, 448
  phase 1, banks 4–7: lanes 8, 10, 12, 14 at bytes 16, 144, 272, 400
  phase 1, banks 20–23: lanes 9, 11, 13, 15 at bytes 80, 208, 336, 464
  phase 2, banks 8–11: lanes 16, 18, 20, 22 at bytes 32, 160, 288, 416
  phase 2, banks 24–27: lanes 17, 19, 21, 23 at bytes 96, 224, 352, 480
  phase 3, banks 12–15: lanes 24, 26, 28, 30 at bytes 48, 176, 304, 432
  phase 3, banks 28–31: lanes 25, 27, 29, 31 at bytes 112, 240, 368, 496
without conflicts: S<2,3,3> o 0 o (16,32):(32,1)"""


def failure(*args, **options):
    with pytest.raises(AssertionError) as caught:
        assert_conflict_free(*args, **options)
    return str(caught.value)


def test_the_message_draws_the_conflict_and_proposes_a_swizzle():
    assert failure(parse_layout("(16,32):(32,1)"), "ldmatrix.x4", "bf16") == CONFLICT
    assert_conflict_free(parse_layout("S<2,3,3> o 0 o (16,32):(32,1)"), "ldmatrix.x4", "bf16")


def test_the_wrong_swizzle_is_replaced_by_the_right_one():
    text = failure(parse_layout("S<2,4,3> o 0 o (16,32):(32,1)"), "ldmatrix.x4", "bf16")
    assert "8 of 16 wavefronts are bank conflicts" in text
    assert text.endswith("without conflicts: S<2,3,3> o 0 o (16,32):(32,1)")


def test_some_conflicts_may_be_allowed():
    tile = parse_layout("(16,32):(32,1)")
    assert_conflict_free(tile, "ldmatrix.x4", "bf16", allow=24)
    assert "24 of 32 wavefronts are bank conflicts, 23 allowed" in failure(
        tile, "ldmatrix.x4", "bf16", allow=23
    )


def test_tiled_copies_and_mmas_have_their_operand():
    mma = tiled_mma(cutlass.BFloat16, (2, 2))
    copy, _ = operand_copies(mma, cutlass.BFloat16, "k", "k")
    tile, swizzled = parse_layout("(32,64):(64,1)"), parse_layout("S<3,3,3> o 0 o (32,64):(64,1)")
    assert failure(tile, copy, "bf16", "src").endswith("without conflicts: S<3,3,3> o 0 o (32,64):(64,1)")
    assert_conflict_free(swizzled, copy, "bf16", "src")
    assert failure(tile, mma, cutlass.BFloat16, "A").startswith("ld.shared.b32 of (32,64):(64,1)")
    assert_conflict_free(swizzled, mma, cutlass.BFloat16, "A")
    with pytest.raises(AccessError, match="'src' or 'dst'"):
        assert_conflict_free(tile, copy, "bf16")


def test_where_no_swizzle_helps_the_message_says_why():
    text = failure(parse_layout("(32,32):(0,1)"), "cp.async.4", "fp32", "across")
    assert "none of 1 swizzles frees every access" in text
    text = failure(parse_layout("(32,32):(1,32) o 0 o (32,32):(32,1)"), "ld.shared.b32", "fp32", "across")
    assert text.endswith("is not a plain layout, so none is proposed")


@pytest.mark.parametrize(
    "access", ["ld.shared.b8", "ld.shared.b16", "cp.async.4", "st.shared.b128", "ldmatrix.x4"]
)
@pytest.mark.parametrize("stride", [16, 32, 48, 64, 128, 144, 264])
def test_a_drawing_is_compact_and_complete(access, stride):
    """Every phase and collision of the report is there, up to the limit, in lines that fit a terminal."""
    report = BankReport(access, [(i % 4 * stride + i // 4 * 2 * stride) // 16 * 16 for i in range(32)])
    lines = draw_conflicts(report, 0).splitlines()
    assert len(lines) <= 30 and max(map(len, lines)) <= 130
    marks = [line[11:43] for line in lines if line.startswith("  phase") and "," not in line[:11]]
    degrees = [max(10 if mark == "+" else int(mark.replace(".", "0")) for mark in row) for row in marks]
    assert len(marks) == len(report.phases(0))
    if "+" not in "".join(marks):
        assert sum(degrees) == report.wavefronts[0]
    for number, row in enumerate(marks):
        busy = {bank for phase, bank, _ in report.collisions(0) if phase == number}
        assert {bank for bank, mark in enumerate(row) if mark not in ".1"} == busy


def test_an_instruction_can_be_chosen():
    report = bank_report(parse_layout("(16,32):(32,1)"), "ldmatrix.x4", "bf16")
    assert draw_conflicts(report, 1).splitlines()[0].startswith("instruction 1: 16 wavefronts")
    assert "lanes 0, 2, 4, 6 at bytes 512, 640, 768, 896" in draw_conflicts(report, 1)


SUITE = """
    import pytest

    from cutelab.layouts import parse_layout, smem_tile


    def test_swizzled(assert_conflict_free):
        assert_conflict_free(smem_tile((64, 64), 1, 16), "ldmatrix.x4", "bf16")


    def test_plain(assert_conflict_free):
        assert_conflict_free(parse_layout("(16,32):(32,1)"), "ldmatrix.x4", "bf16")
"""


def test_the_fixture_in_somebody_elses_suite(pytester):
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    first, *_, last = CONFLICT.splitlines()
    result.stdout.fnmatch_lines([f"*AssertionError: {first}".replace("[", "[[]"), f"E*{last}"])
    result.stdout.no_fnmatch_line("*def assert_conflict_free*")  # the traceback ends in the test


def test_the_plugin_is_documented(pytester):
    pytester.makepyfile("def test(): pass")
    result = pytester.runpytest_subprocess("--fixtures")
    result.stdout.fnmatch_lines(["assert_conflict_free*", "*cutelab.layouts.testing.assert_conflict_free*"])


def test_pytest_starts_without_the_dsl():
    """In a process of its own: the plugin is loaded, what it stands for is not."""
    modules = ("cutlass", "torch", "numpy", "cutelab")
    code = f"import sys, pytest_cutelab; print([m for m in {modules} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
