"""CuTe's notation: everything printed reads back, and everything else is refused where it goes wrong."""

import cutlass
import cutlass.cute as cute
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutelab.layouts import NotationError, format, parse, parse_layout

INTEGERS = st.integers(-(2**63) + 1, 2**63 - 1)
SIZES = st.integers(1, 1000)
STRIDES = st.integers(-(2**40), 2**40)
BASES = st.builds(cute.ScaledBasis, st.integers(1, 1000), st.lists(st.integers(0, 5), min_size=1, max_size=3))


def nested(leaves, min_size=0):
    return st.recursive(leaves, lambda x: st.lists(x, min_size=min_size, max_size=3).map(tuple), max_leaves=6)


def same_profile(shape, leaves):
    if isinstance(shape, tuple):
        return st.tuples(*(same_profile(mode, leaves) for mode in shape))
    return leaves


def layouts(strides):
    return nested(SIZES, min_size=1).flatmap(
        lambda shape: same_profile(shape, strides).map(lambda stride: cute.make_layout(shape, stride=stride))
    )


@st.composite
def swizzles(draw):
    bits = draw(st.integers(0, 8))
    shift = draw(st.integers(max(bits, 1), 12)) * draw(st.sampled_from([1, -1]))
    return cute.make_swizzle(bits, draw(st.integers(0, 12)), shift)


@given(nested(INTEGERS | BASES) | layouts(STRIDES | BASES) | swizzles())
def test_what_is_formatted_reads_back(value):
    assert parse(format(value)) == value


@given(layouts(STRIDES) | swizzles(), st.integers(0, 2**31), layouts(STRIDES))
def test_composed_layouts_read_back(inner, offset, outer):
    layout = cute.make_composed_layout(inner, offset, outer)
    assert parse(format(layout)) == layout


@given(nested(INTEGERS) | layouts(STRIDES | BASES))
def test_what_the_dsl_prints_reads_back(value):
    assert parse(str(value)) == value


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("S<3,4,3> o 0 o (8,64):(64,1)", "S<3,4,3> o 0 o (8,64):(64,1)"),
        ("Sw<3,4,3> o _0 o (_8,_64):(_64,_1)", "S<3,4,3> o 0 o (8,64):(64,1)"),
        ("((_4,_8),_2):((_32,_1),_16)", "((4,8),2):((32,1),16)"),
        ("(4,8):(8,1)o 3 o(2,2)", "(4,8):(8,1) o 3 o (2,2):(1,2)"),
        ("Sw<2,4,-3>", "S<2,4,-3>"),
        ("(1@0,2@1@0)", "(1@0,2@1@0)"),
        ("(4,(2,2)):(E<0>,(E<1,0>,E<1,1>))", "(4,(2,2)):(1@0,(1@0@1,1@1@1))"),
        (" ( 4 , 8 ) : ( 8 , 1 ) ", "(4,8):(8,1)"),
        ("8", "8"),
        ("(8)", "(8)"),
        ("(8,)", "(8)"),
        ("()", "()"),
    ],
)
def test_examples(text, printed):
    assert format(parse(text)) == printed


def test_the_type_follows_the_text():
    assert parse("(8,(2,3))") == (8, (2, 3)) and parse("(8)") == (8,) and parse("-8") == -8
    assert isinstance(parse("8:1"), cute.Layout)
    assert isinstance(parse("S<3,4,3>"), cute.Swizzle)
    assert isinstance(parse("S<3,4,3> o 0 o 8:1"), cute.ComposedLayout)
    assert parse("1@0") == cute.E(0)


def test_a_shape_alone_is_compact_column_major_where_a_layout_is_wanted():
    assert parse_layout("(4,(2,8))") == cute.make_layout((4, (2, 8)), stride=(1, (4, 8)))
    assert parse_layout("8") == cute.make_layout(8)
    assert format(parse_layout("S<3,4,3> o 0 o (8,64)")) == "S<3,4,3> o 0 o (8,64):(1,8)"
    assert parse_layout("(4,8):(8,1)") == parse("(4,8):(8,1)")


def test_the_same_inside_a_kernel():
    seen = []

    @cute.jit
    def traced():
        seen.append(format(parse("S<3,4,3> o 0 o (8,64):(64,1)")))

    traced()
    assert seen == ["S<3,4,3> o 0 o (8,64):(64,1)"]


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("", 0, r"expected an integer or '\('"),
        ("shape", 0, r"expected an integer or '\('"),
        ("(8,64):(64,1", 12, "expected ','"),
        ("(8 64):(64,1)", 3, "expected ','"),
        ("(8,,64)", 3, r"expected an integer or '\('"),
        ("(8,64):(64,1) x", 14, "expected the end"),
        ("(8,64):(64,1))", 13, "expected the end"),
        ("(8,64):", 7, r"expected an integer or '\('"),
        ("(8,64):(64)", 7, r"strides with the profile of the shape \(8,64\)"),
        ("(8,64):(64,(1,2))", 7, "strides with the profile"),
        ("(8,0):(64,1)", 3, "a size is a positive integer"),
        ("(8,_-64):(64,1)", 3, "a size is a positive integer"),
        ("(8,1@0):(64,1)", 4, "a size is a positive integer"),
        ("(?,8):(1,?)", 1, "known only when a kernel runs"),
        ("(8,²):(64,1)", 3, "expected an integer"),
        ("9223372036854775808:1", 0, "does not fit into 64 bits"),
        ("1@", 2, "expected an integer"),
        ("E<0", 3, "expected '>'"),
        ("S<3,4,2>", 0, r"\|shift\|"),
        ("S<-1,4,3>", 0, "0 <= bits"),
        ("S<3,-1,3>", 0, "base >= 0"),
        ("S<3,4>", 5, "expected ','"),
        ("S<3,4,3> o 0", 12, "expected 'o'"),
        ("S<3,4,3> o 0 o S<3,4,3>", 15, r"expected an integer or '\('"),
        ("S<3,4,3> o (1,2) o (8,64)", 0, r"S<3,4,3> does not take what \(1,2\) and"),
        ("S<3,4,3> o 0 o (8,64):(1@0,1@1)", 0, "does not take"),
        ("8:1 o 0 o 4:1 o 0 o 2:1", 14, "expected the end"),
    ],
)
def test_errors_point_at_the_character(text, position, message):
    with pytest.raises(NotationError, match=message) as caught:
        parse(text)
    assert (caught.value.text, caught.value.position) == (text, position)
    first, shown, caret = str(caught.value).split("\n")
    assert shown == f"  {text}" and caret.index("^") == 2 + position and first


@pytest.mark.parametrize(
    ("text", "message"),
    [("S<3,4,3>", "no shape of its own"), ("(4,0)", "positive"), ("2@0", "positive"), ("-4", "positive")],
)
def test_parse_layout_wants_a_layout(text, message):
    with pytest.raises(NotationError, match=message):
        parse_layout(text)


def test_dynamic_layouts_are_refused():
    with pytest.raises(NotationError, match="known only when a kernel runs"):
        parse(str(cute.make_layout((cutlass.Int32(4), 8))))
