"""What a swizzle is said to do, against what it does to every offset."""

import cutlass.cute as cute
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutelab.layouts import as_numpy, evaluate, parse, parse_layout
from cutelab.layouts.errors import SwizzleError
from cutelab.layouts.swizzle import explain, in_bytes, in_elements

SWIZZLES = st.tuples(st.integers(1, 4), st.integers(0, 5), st.integers(0, 3), st.sampled_from([1, -1])).map(
    lambda x: cute.make_swizzle(x[0], x[1], x[3] * (x[0] + x[2]))
)


def moved(swizzle, count):
    """Where a swizzle puts the offsets 0 … count - 1."""
    return as_numpy(cute.make_composed_layout(swizzle, 0, cute.make_layout(count)))


@given(SWIZZLES)
def test_explanations_hold_for_every_offset(swizzle):
    said = explain(swizzle)
    x = np.arange(2 * said.period)
    y = moved(swizzle, len(x))
    bits = swizzle.num_bits
    field = x >> said.source & (1 << bits) - 1
    assert np.array_equal(y, x ^ field << said.target)

    runs = y.reshape(-1, said.whole)
    assert np.array_equal(runs, runs[:, :1] + np.arange(said.whole))
    assert not np.array_equal(y.reshape(-1, 2 * said.whole), runs[::2, :1] + np.arange(2 * said.whole))

    assert np.array_equal(y[said.period :], y[: said.period] + said.period)
    half = said.period // 2
    assert not np.array_equal(y[half : said.period], y[:half] + half)
    pattern = (y - x).reshape(-1, said.row)
    assert len(np.unique(pattern, axis=0)) == said.period // said.row == 1 << bits
    assert [said.lines(size) for size in (1, 2, 4)] == [-(-said.period * size // 128) for size in (1, 2, 4)]


def test_the_drawing_of_the_128_byte_swizzle():
    assert str(explain(parse("S<3,4,3>"), 1)) == (
        "S<3,4,3> on bytes\n"
        "  bit of the offset  9 8 7 6 5 4 3 2 1 0\n"
        "                     y y y z z z . . . .\n"
        "  y: bits 7–9, read. z: bits 4–6, become z ^ y. The others stay\n"
        "  whole: runs of 2^4 = 16 bytes, each moves to another place in its row\n"
        "  the first that moves: 128 goes to 144\n"
        "  repeats after 2^3 = 8 rows of 128, that is 1024 bytes\n"
        "  128-byte lines that the pattern needs: 8"
    )


def test_the_drawing_of_a_negative_shift():
    assert str(explain(parse("S<1,3,-8>"))) == (
        "S<1,3,-8> on units\n"
        "  bit of the offset  11 10  9  8  7  6  5  4  3  2  1  0\n"
        "                      z  .  .  .  .  .  .  .  y  .  .  .\n"
        "  y: bit 3, read. z: bit 11, become z ^ y. The others stay\n"
        "  whole: runs of 2^3 = 8 units, each moves to another row\n"
        "  the first that moves: 8 goes to 2056\n"
        "  repeats after 2^1 = 2 rows of 2048, that is 4096 units\n"
        "  128-byte lines that the pattern needs: 32 for units of a byte, 64 for 2 bytes, 128 for 4"
    )


def test_elements_are_counted_in_lines():
    assert str(explain(parse("S<3,3,3>"), 2)).endswith(
        "that is 512 elements of 2 bytes\n  128-byte lines that the pattern needs: 8"
    )
    assert "the identity" in str(explain(parse("S<0,4,3>"), 2))


@pytest.mark.parametrize(
    ("of_bytes", "size", "of_elements"),
    [
        ("S<3,4,3>", 1, "S<3,4,3>"),
        ("S<3,4,3>", 2, "S<3,3,3>"),
        ("S<3,4,3>", 4, "S<3,2,3>"),
        ("S<2,4,3>", 4, "S<2,2,3>"),
        ("S<1,4,3>", 8, "S<1,1,3>"),
        ("S<2,4,-3>", 16, "S<2,0,-3>"),
        ("S<0,4,3>", 8, "S<0,4,3>"),
    ],
)
def test_bytes_and_elements(of_bytes, size, of_elements):
    in_b, in_e = parse(of_bytes), parse(of_elements)
    assert in_elements(in_b, size) == in_e and in_bytes(in_e, size) == in_b
    assert np.array_equal(moved(in_e, 4096) * size, moved(in_b, 4096 * size)[::size])


@given(SWIZZLES, st.sampled_from([1, 2, 4, 8]))
def test_a_swizzle_of_elements_is_the_same_function_in_bytes(swizzle, size):
    of_bytes = in_bytes(swizzle, size)
    assert np.array_equal(moved(swizzle, 4096) * size, moved(of_bytes, 4096 * size)[::size])
    assert in_elements(of_bytes, size) == swizzle


@pytest.mark.parametrize(("layout", "at"), [("(32,8):(1,32)", (0, 1)), ("(8,32):(32,1)", (1, 0))])
def test_the_128_byte_swizzle_of_tf32_puts_the_second_row_at_36(layout, at):
    """32 elements are a line of 128 bytes. The second starts one granule of four elements later."""
    right = in_elements(parse("S<3,4,3>"), 4)
    assert evaluate(cute.make_composed_layout(right, 0, parse_layout(layout)), at) == 36
    assert evaluate(parse_layout(f"S<3,4,3> o 0 o {layout}"), at) == 32  # bytes taken for elements


@pytest.mark.parametrize(
    ("convert", "message"),
    [
        (
            lambda: in_elements(parse("S<3,2,3>"), 8),
            "S<3,2,3> moves runs of 4 bytes, and so parts of an element of 8",
        ),
        (lambda: in_elements(parse("S<1,0,-3>"), 2), "only a swizzle with a base of 1 or more"),
        (lambda: in_elements(parse("S<3,4,3>"), 3), "elements of 3 bytes: only for a power of two"),
        (lambda: in_bytes(parse("S<3,4,3>"), 0), "elements of 0 bytes"),
        (lambda: explain(parse("S<3,4,3>"), 6), "elements of 6 bytes"),
        (lambda: in_bytes(parse("S<4,10,16>"), 8), r"S<4,13,16> goes past bit 31"),
    ],
)
def test_what_cannot_be_expressed_is_refused(convert, message):
    with pytest.raises(SwizzleError, match=message):
        convert()
