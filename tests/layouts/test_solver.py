"""The solver against every swizzle there is, on the answers that the field knows, and where there is none."""

import time
from itertools import product

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest

from cutelab.copies import operand_copies, tile_copy
from cutelab.layouts import as_numpy, format, operand_tile, parse, parse_layout
from cutelab.layouts.banks import INACTIVE, BankReport
from cutelab.layouts.errors import AccessError, SwizzleError
from cutelab.layouts.solver import solve
from cutelab.layouts.swizzle import in_bytes
from cutelab.layouts.traffic import bank_report, element_bytes
from cutelab.mmas import tiled_mma

BOTH = ["ldmatrix.x4", "cp.async.16"]
COLUMN = ("ld.shared.b32", "across")

# tile, accesses, type → the least swizzle
KNOWN = {
    "rows of 128 bytes": ("(8,64):(64,1)", BOTH, "bf16", "S<3,3,3>"),
    "rows of 64 bytes": ("(8,32):(32,1)", BOTH, "bf16", "S<2,3,3>"),
    "rows of 32 bytes": ("(16,16):(16,1)", BOTH, "bf16", "S<1,3,3>"),
    "rows of 16 bytes": ("(32,8):(8,1)", BOTH, "bf16", "S<0,4,3>"),
    "rows of 256 bytes": ("(8,128):(128,1)", BOTH, "bf16", "S<3,3,4>"),
    "columns of 128 bytes": ("(64,8):(1,64)", ["ldmatrix.x4.trans", "cp.async.16"], "fp16", "S<3,3,3>"),
    "bytes": ("(8,128):(128,1)", BOTH, "fp8", "S<3,4,3>"),
    "tf32": ("(8,32):(32,1)", BOTH, "tf32", "S<3,2,3>"),
    "tf32, columns": ("(32,8):(1,32)", ["cp.async.16", ("st.shared.b128", "across")], "tf32", "S<3,2,3>"),
    "a column of words": ("(32,32):(32,1)", [COLUMN, "st.shared.b32"], "fp32", "S<5,0,5>"),
    "a column of pairs": ("(32,32):(32,1)", [("ld.shared.b64", "across")], "fp32", "S<4,1,4>"),
    "padded rows need none": ("(32,32):(33,1)", [COLUMN, "st.shared.b32"], "fp32", "S<0,4,3>"),
    "nobody asks": ("(8,64):(64,1)", [], "bf16", "S<0,4,3>"),
    "one bit, though others are shorter": ("(16,8):(8,1)", [("ld.shared.b32", "across")], "bf16", "S<1,2,4>"),
    "of equals, TMA's": ("((2,4),64):((0,64),1)", ["ldmatrix.x4"], "bf16", "S<2,3,3>"),
    "of equals, the shorter period": ("(2,32):(96,1)", [("ld.shared.b32", "across")], "fp32", "S<1,4,1>"),
    "of equals, the larger base": ("(16,8):(8,1)", [("ld.shared.b16", "across")], "bf16", "S<1,2,4>"),
    "24 rows": ("(24,64):(64,1)", ["ldmatrix.x2", ("ld.shared.b128", "across")], "bf16", "S<3,3,3>"),
}


@pytest.mark.parametrize("case", KNOWN)
def test_the_least_swizzle_is_the_known_one(case):
    layout, accesses, dtype, swizzle = KNOWN[case]
    solution = solve(parse_layout(layout), accesses, dtype)
    assert format(solution.swizzle) == swizzle
    assert_solves(solution, parse_layout(layout), accesses, dtype)


def assert_solves(solution, layout, accesses, dtype):
    """By the swizzled layout alone: free of conflicts, vectors whole, a permutation of the tile's offsets."""
    assert solution.layout.inner == solution.swizzle and solution.layout.outer == layout
    for access, ours in zip(accesses, solution.reports, strict=True):
        report = bank_report(solution.layout, *as_request(access, dtype))  # raises for vectors in parts
        assert not report.conflicts.any()
        assert report.access == ours.access and np.array_equal(report.addresses, ours.addresses)
    plain, swizzled = as_numpy(layout), as_numpy(solution.layout)
    assert len(np.unique(swizzled)) == len(np.unique(plain))
    assert swizzled.min() >= 0 and swizzled.max() <= plain.max()


def as_request(access, dtype):
    access, *operand = access if isinstance(access, tuple) else (access,)
    return access, dtype, *operand


def every_swizzle(layout, dtype, most_bits):
    """All that keep words whole and the tile in place, with either sign of the shift, fewest bits first."""
    size = element_bytes(dtype)
    end = int(as_numpy(layout).max()) + 1
    top = end.bit_length()
    for bits, base, shift, sign in product(range(most_bits + 1), range(top), range(top), (1, -1)):
        if shift >= bits and bits + base + shift <= top and size << base >= 4:
            swizzle = cute.make_swizzle(bits, base, sign * shift)
            if as_numpy(cute.make_composed_layout(swizzle, 0, layout)).max() < end:
                yield swizzle


def is_free(layout, swizzle, accesses, dtype):
    """Whether the addresses that a plain tile is accessed at have no conflicts once they are swizzled."""
    of_bytes = in_bytes(swizzle, element_bytes(dtype))
    moved = as_numpy(cute.make_composed_layout(of_bytes, 0, cute.make_layout(1 << 14)))
    for access in accesses:
        plain = bank_report(layout, *as_request(access, dtype))
        if swizzle.num_bits and plain.access.bytes > 1 << of_bytes.num_base:
            return False
        addresses = np.where(plain.addresses == INACTIVE, INACTIVE, moved[plain.addresses])
        if BankReport(plain.access, addresses).conflicts.any():
            return False
    return True


@pytest.mark.parametrize(
    ("layout", "accesses", "dtype"),
    [
        ("(8,64):(64,1)", ["ldmatrix.x4"], "bf16"),
        ("(16,32):(32,1)", BOTH, "bf16"),
        ("(16,16):(16,1)", [("ld.shared.b32", "across"), "cp.async.8"], "bf16"),
        ("(16,32):(32,1)", [("ld.shared.b64", "across"), ("st.shared.b128", "across")], "tf32"),
        ("(32,32):(1,32)", [("st.shared.b32", "across")], "fp32"),
        ("(24,32):(32,1)", [("st.shared.b128", "across")], "fp32"),
        ("(8,(8,4)):(8,(1,64))", ["ldmatrix.x4"], "bf16"),
        ("(32,16):(16,1)", [("ld.shared.b16", "across"), ("ld.shared.b128", "along")], "bf16"),
        ("(32,48):(48,1)", [("ld.shared.b32", "across")], "bf16"),
        ("(32,20):(20,1)", [("ld.shared.b32", "across")], "fp32"),
        ("(40,16):(16,1)", [("cp.async.8", "across")], "bf16"),
        ("(64,8):(16,1)", ["cp.async.16"], "fp32"),
    ],
)
def test_no_swizzle_of_fewer_bits_does(layout, accesses, dtype):
    layout = parse_layout(layout)
    try:
        solution = solve(layout, accesses, dtype)
    except SwizzleError:
        assert not any(is_free(layout, s, accesses, dtype) for s in every_swizzle(layout, dtype, 5))
    else:
        assert_solves(solution, layout, accesses, dtype)
        fewer = every_swizzle(layout, dtype, solution.swizzle.num_bits - 1)
        assert not any(is_free(layout, s, accesses, dtype) for s in fewer)


@pytest.mark.parametrize(("tile", "major"), [((128, 64), "k"), ((128, 64), "mn"), ((64, 32), "k")])
def test_tiled_copies_and_mmas_are_accesses(tile, major):
    mma = tiled_mma(cutlass.BFloat16, (2, 2))
    consumer, _ = operand_copies(mma, cutlass.BFloat16, major, major)
    producer = tile_copy(cutlass.BFloat16, tile, 1 if major == "k" else 0, 16, 128, asynchronous=True)
    wanted = operand_tile((*tile, 2), major, 16)
    accesses = [(producer, "dst"), (consumer, "src")]
    solution = solve(wanted.outer, accesses, "bf16")
    assert solution.layout == wanted
    assert_solves(solution, wanted.outer, accesses, "bf16")
    if major == "k":
        accesses = [(mma, "A"), "st.shared.b128"]
        assert_solves(
            solve(parse_layout("(64,64):(64,1)"), accesses, "bf16"),
            parse_layout("(64,64):(64,1)"),
            accesses,
            "bf16",
        )


# tile, type → what TMA and wgmma can do; None: nothing
ROW = ("ld.shared.b128", "along")
HARDWARE = [
    ("(8,64):(64,1)", "bf16", ["ldmatrix.x4"], "S<3,3,3>", "S<3,3,3>"),
    ("(8,32):(32,1)", "bf16", ["ldmatrix.x4"], "S<2,3,3>", "S<2,3,3>"),
    ("(16,16):(16,1)", "bf16", ["ldmatrix.x4"], "S<1,3,3>", "S<1,3,3>"),
    ("(32,8):(8,1)", "bf16", ["ldmatrix.x4"], "S<0,4,3>", "S<0,4,3>"),
    ("(8,32):(32,1)", "tf32", ["ldmatrix.x4"], "S<3,2,3>", "S<3,2,3>"),
    ("(8,64):(64,1)", "bf16", [ROW], "S<0,4,3>", "S<3,3,3>"),  # wgmma reads such rows in no other way
    ("(64,8):(1,64)", "bf16", [], "S<0,4,3>", "S<3,3,3>"),
    ("(8,(64,2)):(64,(1,512))", "bf16", ["ldmatrix.x4"], "S<3,3,3>", "S<3,3,3>"),
    ("(32,8):(1,32)", "tf32", [], "S<0,4,3>", None),  # contiguous along M: 16-bit types only
    ("(8,128):(128,1)", "bf16", [], "S<0,4,3>", None),  # rows of 256 bytes
    ("(8,512):(512,1)", "bf16", [], None, None),  # a box has 256 elements at most
    ("(8,64):(72,1)", "bf16", [], "S<0,4,3>", None),  # rows with gaps
    ("(4,64):(64,1)", "bf16", [], "S<0,4,3>", None),  # half an atom
    ("(8,12):(12,1)", "bf16", [], None, None),
]


@pytest.mark.parametrize(("layout", "dtype", "accesses", "tma", "wgmma"), HARDWARE)
def test_hardware_has_its_own_modes(layout, dtype, accesses, tma, wgmma):
    for within, expected in (("tma", tma), ("wgmma", wgmma)):
        if expected is None:
            with pytest.raises(SwizzleError, match=within):
                solve(parse_layout(layout), accesses, dtype, within)
        else:
            solution = solve(parse_layout(layout), accesses, dtype, within)
            assert format(solution.swizzle) == expected
            assert_solves(solution, parse_layout(layout), accesses, dtype)
            bits = in_bytes(solution.swizzle, element_bytes(dtype))
            assert bits in [parse(f"S<{b},4,3>") for b in range(4)]


def message(layout, accesses, dtype, within="any"):
    with pytest.raises(SwizzleError) as caught:
        solve(parse_layout(layout), accesses, dtype, within)
    return str(caught.value)


def test_the_error_says_what_is_left_and_what_would_help():
    text = message("(64,64):(64,1)", [COLUMN, "ld.shared.b32"], "bf16", "tma")
    assert text.splitlines() == [
        "none of 2 swizzles frees every access to (64,64):(64,1), of 2-byte elements, of bank conflicts; "
        "the best, S<3,3,3>, leaves",
        "  access 0, ld.shared.b32: 256 wavefronts, 192 conflicts",
        "  access 1, ld.shared.b32: 64 wavefronts, no conflicts",
        "this would help:",
        "  any swizzle: S<5,1,5>",
        "  without access 0: S<0,4,3>",
        "  rows padded by 2 elements, without a swizzle: (64,64):(66,1)",
    ]


def test_what_would_help_does():
    rows, column = "ld.shared.b128", ("ld.shared.b32", "across")
    text = message("(32,32):(32,1)", [rows, column], "fp32")
    assert "  without access 0: S<5,0,5>" in text and "  without access 1: S<0,4,3>" in text
    assert "padded" not in text  # by a word, 128-bit vectors are not aligned; by more, columns collide
    text = message("(32,32):(32,1)", ["cp.async.8", column], "fp32")
    assert "  access 0 by cp.async.4: S<5,0,5>" in text
    assert format(solve(parse_layout("(32,32):(32,1)"), ["cp.async.4", column], "fp32").swizzle) == "S<5,0,5>"


def test_rows_of_ldmatrix_cannot_be_halved():
    accesses = ["ldmatrix.x1", ("ld.shared.b64", "across")]
    assert "access 0 by" not in message("(32,32):(32,1)", accesses, "fp32")


def test_room_after_the_last_row_may_be_needed():
    """The last row of a padded tile ends before its line does, and a swizzle would move it there."""
    padded = "(64,8):(16,1)"
    text = message(padded, ["cp.async.16"], "fp32")
    assert "  room for 1024 elements: S<1,3,2>" in text.splitlines()
    swizzled = as_numpy(parse_layout(f"S<1,3,2> o 0 o {padded}"))
    assert as_numpy(parse_layout(padded)).max() < swizzled.max() < 1024


def test_rows_with_gaps_have_no_mode_of_tma():
    assert "none of 1 swizzles" in message("(8,64):(128,1)", ["ldmatrix.x4"], "bf16", "tma")


def test_nothing_may_help():
    text = message("(32,2):(32,1)", [("cp.async.4", "along"), ("cp.async.4", "across")], "fp32", "tma")
    assert "no mode of tma has rows of 8 bytes" in text
    broadcast = "(32,4):(0,1)"  # every lane writes the same words
    assert message(broadcast, [("cp.async.4", "across")], "fp32").endswith(
        "neither would one access less, nor shorter vectors, nor padding"
    )


@pytest.mark.parametrize(
    ("layout", "accesses", "within", "error", "match"),
    [
        ("(8,64):(64,1)", BOTH, "cp.async", SwizzleError, "'any', 'tma', 'wgmma'; got 'cp.async'"),
        ("S<3,3,3> o 0 o (8,64):(64,1)", BOTH, "any", SwizzleError, "swizzled already: pass its `.outer`"),
        ("(8,64):(65,1)", BOTH, "any", AccessError, "8 neighbouring elements"),
        ("(8,64):(64,1)", ["ldmatrix.x3"], "any", AccessError, "no access"),
    ],
)
def test_what_cannot_be_asked_is_refused(layout, accesses, within, error, match):
    with pytest.raises(error, match=match):
        solve(parse_layout(layout), accesses, "bf16", within)


def test_the_answer_says_why():
    assert str(solve(parse_layout("(8,64):(64,1)"), BOTH, "bf16")).splitlines() == [
        "S<3,3,3> on elements of 2 bytes: in bytes S<3,4,3>; the 15 candidates of fewer bits leave conflicts",
        "  ldmatrix.x4: 8 wavefronts, no conflicts, 56 without a swizzle",
        "  cp.async.16: 8 wavefronts, no conflicts, 0 without a swizzle",
    ]
    assert str(solve(parse_layout("(32,8):(8,1)"), ["ldmatrix.x4"], "bf16")).splitlines() == [
        "S<0,4,3> on elements of 2 bytes: no swizzle is needed",
        "  ldmatrix.x4: 4 wavefronts, no conflicts",
    ]


def test_a_tile_is_solved_within_100_ms():
    mma = tiled_mma(cutlass.BFloat16, (2, 4))
    consumer, _ = operand_copies(mma, cutlass.BFloat16, "k", "k")
    producer = tile_copy(cutlass.BFloat16, (128, 64), 1, 16, 256, asynchronous=True)
    tile = parse_layout("(128,64):(64,1)")

    def seconds():
        start = time.process_time()
        solve(tile, [(producer, "dst"), (consumer, "src")], "bf16")
        return time.process_time() - start

    assert min(seconds() for _ in range(3)) <= 0.1
