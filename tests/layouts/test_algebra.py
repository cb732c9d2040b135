"""Layouts as functions, held against the DSL coordinate by coordinate, tensor-layouts, and their laws."""

from itertools import product

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import tensor_layouts as oracle
from hypothesis import given
from hypothesis import strategies as st

from cutelab.layouts import CoordinateError, as_numpy, evaluate, parse_layout, same_function


def nested(leaves):
    """A leaf, or a tuple of them up to any depth."""
    return st.recursive(leaves, lambda x: st.lists(x, min_size=1, max_size=3).map(tuple), max_leaves=4)


def leaves(shape):
    return [leaf for mode in shape for leaf in leaves(mode)] if isinstance(shape, tuple) else [shape]


def like(shape, values):
    """`values`, an iterator, in the profile of `shape`."""
    return tuple(like(mode, values) for mode in shape) if isinstance(shape, tuple) else next(values)


def compact(shape, order):
    """Strides that make `shape` a bijection onto range(size): its leaves lie in memory in the given order."""
    sizes = leaves(shape)
    strides = dict(zip(order, np.cumprod([1, *(sizes[leaf] for leaf in order)]).tolist(), strict=False))
    return like(shape, iter([strides[leaf] for leaf in range(len(sizes))]))


@st.composite
def any_layouts(draw):
    shape = draw(nested(st.integers(1, 6)))
    return shape, like(shape, iter([draw(st.integers(0, 40)) for _ in leaves(shape)]))


@st.composite
def compact_layouts(draw):
    """Bijections onto range(size), all sizes powers of two: row-major, column-major and all between."""
    shape = draw(nested(st.sampled_from([1, 2, 4, 8])))
    return shape, compact(shape, draw(st.permutations(range(len(leaves(shape))))))


@st.composite
def swizzles(draw):
    bits = draw(st.integers(0, 3))
    return bits, draw(st.integers(0, 4)), draw(st.integers(max(bits, 1), 4)) * draw(st.sampled_from([1, -1]))


def dsl(layout):
    return cute.make_layout(layout[0], stride=layout[1])


def function(layout):
    """Offsets at all linear indices."""
    return as_numpy(layout).ravel(order="F").tolist()


def oracle_function(layout):
    return [layout(index) for index in range(oracle.size(layout))]


# --- as_numpy, evaluate, same_function


@given(any_layouts())
def test_as_numpy_is_the_layout(shape_stride):
    layout = dsl(shape_stride)
    table = as_numpy(layout)
    modes = [cute.size(mode) for mode in layout.shape] if isinstance(layout.shape, tuple) else [layout.shape]
    assert table.shape == tuple(modes) and table.dtype == np.int64
    assert function(layout) == [layout(index) for index in range(cute.size(layout))]
    if isinstance(layout.shape, tuple):
        assert all(table[coord] == layout(coord) for coord in product(*map(range, modes)))


@given(any_layouts(), swizzles(), st.integers(0, 100))
def test_as_numpy_of_a_swizzled_layout_is_the_layout(shape_stride, swizzle, offset):
    layout = cute.make_composed_layout(cute.make_swizzle(*swizzle), offset, dsl(shape_stride))
    assert function(layout) == [layout(index) for index in range(cute.size(layout))]


@given(any_layouts(), any_layouts(), st.integers(0, 100))
def test_as_numpy_of_a_composition_is_the_composition(inner, outer, offset):
    layout = cute.make_composed_layout(dsl(inner), offset, dsl(outer))
    assert function(layout) == [layout(index) for index in range(cute.size(layout))]


@pytest.mark.parametrize(
    "layout",
    [
        lambda: cute.make_identity_layout((4, 8)),
        lambda: cute.make_composed_layout(
            cute.make_layout((4, 8)), (1, 2), cute.make_identity_layout((2, 2))
        ),
        lambda: cute.make_composed_layout(lambda index: index // 2, 0, cute.make_layout(8)),
    ],
)
def test_what_gives_no_integers_is_not_tabulated(layout):
    with pytest.raises(TypeError, match="cannot tabulate"):
        as_numpy(layout())


def test_evaluate_takes_every_form_of_a_coordinate():
    layout = cute.make_layout((4, (2, 8)), stride=(16, (8, 1)))
    assert evaluate(layout, (3, (1, 7))) == evaluate(layout, (3, 15)) == evaluate(layout, 63) == 63
    assert evaluate(layout, (np.int64(3), np.int32(15))) == 63
    assert evaluate(parse_layout("S<3,0,3> o 0 o (8,8):(8,1)"), (1, 0)) == 9


@pytest.mark.parametrize(
    ("coord", "message"),
    [
        ((4, 0), r"coordinate \(4, 0\) of shape \(4, \(2, 8\)\): 4 is not in \[0, 4\)"),
        ((0, 16), r"16 is not in \[0, 16\)"),
        ((0, (0, 8)), r"8 is not in \[0, 8\)"),
        (-1, r"-1 is not in \[0, 64\)"),
        ((0, 0, 0), "does not fit the profile"),
        ((0, (0, 0, 0)), "does not fit the profile"),
        (((0,), 0), r"\(0,\) does not fit the profile of 4"),
        ((None, 0), "None is not an integer"),
        ((0.5, 0), "0.5 is not an integer"),
    ],
)
def test_evaluate_refuses_what_lies_outside(coord, message):
    with pytest.raises(CoordinateError, match=message):
        evaluate(cute.make_layout((4, (2, 8)), stride=(16, (8, 1))), coord)


def test_same_function_forgets_the_shape_but_not_the_size():
    row_major = cute.make_layout((4, 8), stride=(8, 1))
    assert same_function(row_major, cute.make_layout((2, 2, 8), stride=(8, 16, 1)))
    assert not same_function(row_major, cute.make_layout((4, 8)))
    assert not same_function(cute.make_layout(4), cute.make_layout(8))
    assert same_function(parse_layout("S<0,4,3> o 0 o 32:1"), cute.make_layout(32))
    assert not same_function(parse_layout("S<1,0,1> o 0 o 32:1"), cute.make_layout(32))


# --- The algebra against tensor-layouts


@given(any_layouts())
def test_offsets_agree(shape_stride):
    assert function(dsl(shape_stride)) == oracle_function(oracle.Layout(*shape_stride))


@given(any_layouts())
def test_coalesce_agrees(shape_stride):
    layout = cute.coalesce(dsl(shape_stride))
    assert function(layout) == oracle_function(oracle.coalesce(oracle.Layout(*shape_stride)))
    assert same_function(layout, dsl(shape_stride))
    assert cute.depth(layout) <= 1


@given(compact_layouts(), st.data())
def test_composition_agrees(a, data):
    size = cute.size(a[0])
    length = 2 ** data.draw(st.integers(0, size.bit_length() - 1))
    stride = 2 ** data.draw(st.integers(0, (size // length).bit_length() - 1))
    layout = cute.composition(dsl(a), cute.make_layout(length, stride=stride))
    assert function(layout) == oracle_function(
        oracle.compose(oracle.Layout(*a), oracle.Layout(length, stride))
    )
    assert function(layout) == [function(dsl(a))[index * stride] for index in range(length)]


@given(compact_layouts(), st.integers(0, 3))
def test_complement_agrees_and_fills_the_gaps(a, extra):
    shape, stride = a[0], like(a[0], iter([4 * s for s in leaves(a[1])]))
    cosize = 4 * cute.size(shape) << extra
    layout = cute.complement(cute.make_layout(shape, stride=stride), cosize)
    assert function(layout) == oracle_function(oracle.complement(oracle.Layout(shape, stride), cosize))
    ours = np.add.outer(function(cute.make_layout(shape, stride=stride)), function(layout))
    assert sorted(ours.ravel().tolist()) == list(range(cosize))


@given(compact_layouts(), st.data())
def test_logical_divide_agrees_and_starts_with_the_tile(a, data):
    tile = 2 ** data.draw(st.integers(0, cute.size(a[0]).bit_length() - 1))
    divided = cute.logical_divide(dsl(a), cute.make_layout(tile))
    expected = oracle.logical_divide(oracle.Layout(*a), oracle.Layout(tile, 1))
    assert function(divided) == oracle_function(expected) == function(dsl(a))
    assert function(cute.get(divided, mode=[0])) == function(dsl(a))[:tile]


@given(compact_layouts(), compact_layouts())
def test_logical_product_agrees_and_repeats_the_tile(tile, repetition):
    layout = cute.logical_product(dsl(tile), dsl(repetition))
    expected = oracle.logical_product(oracle.Layout(*tile), oracle.Layout(*repetition))
    assert function(layout) == oracle_function(expected)
    assert cute.get(layout, mode=[0]) == dsl(tile)


@given(compact_layouts())
def test_right_inverse_agrees_and_inverts(a):
    inverse = cute.right_inverse(dsl(a))
    assert function(inverse) == oracle_function(oracle.right_inverse(oracle.Layout(*a)))
    forward = function(dsl(a))
    assert [forward[index] for index in function(inverse)] == list(range(cute.size(a[0])))


@given(swizzles(), st.integers(0, 9))
def test_swizzles_agree(swizzle, log_size):
    layout = cute.make_composed_layout(cute.make_swizzle(*swizzle), 0, cute.make_layout(2**log_size))
    expected = oracle.Swizzle(*swizzle) if swizzle[0] else (lambda index: index)
    assert function(layout) == [expected(index) for index in range(2**log_size)]


# --- Results in print, some of them printed wrongly elsewhere


def test_shape_division():
    assert cute.shape_div((3, 6, 2, 8), 3) == (1, 6, 2, 8)
    assert cute.shape_div((3, 6, 2, 8), 6) == (1, 3, 2, 8)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("(10,2):(16,4)", "(3,4):(1,5)", "(3,(2,2)):(16,(80,4))"),
        ("(2,3):(1,2)", "(2,3):(3,1)", "(2,3):(3,1)"),
        ("(4,6,8,10):(2,3,5,7)", "6:12", "(2,3):(9,5)"),
    ],
)
def test_composition_examples(a, b, expected):
    a, b = parse_layout(a), parse_layout(b)
    assert cute.composition(a, b) == parse_layout(expected)
    assert function(cute.composition(a, b)) == [a(index) for index in function(b)]


def test_complement_examples():
    layout = cute.make_layout(6, stride=4)
    rest = cute.complement(layout, 24)
    assert rest == cute.make_layout(4, stride=1)
    assert str(cute.coalesce(cute.make_layout((4, 6), stride=(rest.stride, layout.stride)))) == "24:1"


def test_division_that_does_not_come_out_even_runs_past_the_end():
    divided = cute.logical_divide(cute.make_layout(10), cute.make_layout(4))
    assert str(divided) == "(4,3):(1,4)"
    assert sorted(set(function(divided)) - set(range(10))) == [10, 11]


def test_zipped_divide_keeps_tile_and_rest_apart():
    divided = cute.zipped_divide(parse_layout("(2,6):(6,1)"), (1, 2))
    assert str(divided) == "((1,2),(2,3)):((0,1),(6,2))"
    assert as_numpy(divided).shape == (2, 6)


def test_a_mode_of_size_one_does_not_count():
    assert same_function(parse_layout("(32,1):(1,1)"), parse_layout("32:1"))
    assert str(cute.coalesce(parse_layout("(32,1):(1,1)"))) == "32:1"
    assert str(cute.coalesce(parse_layout("(1,32):(1,1)"))) == "32:1"
    assert cute.cosize(parse_layout("(32,1):(1,1)")) == 32


def test_a_register_fragment_of_a_swizzled_tile_is_compact():
    pointer = cute.make_ptr(cutlass.Float16, 0, cute.AddressSpace.smem, assumed_align=128)
    tile = cute.make_tensor(pointer, parse_layout("S<3,3,3> o 0 o (8,64):(64,1)"))
    fragment = cute.make_rmem_tensor_like(tile)
    assert fragment.shape == (8, 64) and sorted(function(fragment.layout)) == list(range(512))
