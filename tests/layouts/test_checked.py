"""The checked algebra: random layouts against brute force and tensor-layouts, and known bad inputs.

Brute force here works on lists of offsets alone: it divides nothing and knows no rule of CuTe.
"""

import itertools
import pickle
import random
import subprocess
import sys
import time
from functools import cache
from itertools import pairwise, product
from math import prod
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import tensor_layouts as oracle
import torch
from cutlass.cute.runtime import from_dlpack
from hypothesis import given
from hypothesis import strategies as st

from cutelab.layouts import as_numpy, checked, parse, parse_layout, same_function
from cutelab.layouts.derivation import Mode
from cutelab.layouts.errors import LayoutError

CHUNKS = range(4)
CASES = 5000  # in each chunk, of each operation


def leaves(x):
    return [leaf for mode in x for leaf in leaves(mode)] if isinstance(x, tuple) else [x]


def like(shape, values):
    return tuple(like(mode, values) for mode in shape) if isinstance(shape, tuple) else next(values)


def table(shape, stride):
    offsets = np.zeros(1, np.int64)
    for n, d in zip(leaves(shape), leaves(stride), strict=True):
        offsets = np.add.outer(d * np.arange(n), offsets).ravel()
    return offsets


def extended(layout, index):
    """The layout's values at linear indices; its last mode goes on."""
    total, index = 0, np.asarray(index)
    sizes, strides = leaves(layout[0]), leaves(layout[1])
    for i, (n, d) in enumerate(zip(sizes, strides, strict=True)):
        total = total + (index if i == len(sizes) - 1 else index % n) * d
        index = index // n
    return total


def offset(coord, shape, stride):
    """The offset of a coordinate that has the shape's profile and lies within it."""
    if isinstance(shape, tuple):
        return sum(offset(*mode) for mode in zip(coord, shape, stride, strict=True))
    assert 0 <= coord < shape
    return coord * stride


def values(layout):
    return table(layout.shape, layout.stride)


@cache
def pool(seed, chain):
    """Random small layouts with their DSL objects; `chain` favours strides that tile."""
    rng, found = random.Random(seed), []
    while len(found) < 150:
        shape = tuple(
            tuple(rng.choice([1, 2, 2, 3, 4]) for _ in range(2))
            if rng.random() < 0.25
            else rng.choice([1, 2, 3, 4, 6])
            for _ in range(rng.randint(1, 3))
        )
        shape = rng.choice([shape, shape[0]])
        sizes = leaves(shape)
        if prod(sizes) > 48:
            continue
        strides = [rng.choice([0, 1, 1, 2, 3, 4, 5, 6, 8, 12]) for _ in sizes]
        if rng.random() < chain:
            step = rng.choice([1, 1, 1, 2, 3])
            for i in rng.sample(range(len(sizes)), len(sizes)):
                strides[i] = step if rng.random() < 0.9 else 0
                step *= sizes[i] * rng.choice([1, 1, 1, 2])
        stride = like(shape, iter(strides))
        found.append((shape, stride, cute.make_layout(shape, stride=stride), oracle.Layout(shape, stride)))
    return found


def cases(chunk, count=CASES):
    """`count` pairs of layouts, a different set in each chunk."""
    rng = random.Random(chunk)
    first, second = pool(chunk, 0.6), pool(100 + chunk, 0.6)
    return [(rng.choice(first), rng.choice(second)) for _ in range(count)]


@pytest.fixture
def swept(monkeypatch):
    """Spare a sweep the DSL's slow objects: layouts are read once, one result in eight is built."""
    read, build, trees, calls = checked._tree, checked._built, {}, itertools.count()

    def tree(layout):
        if id(layout) not in trees:
            trees[id(layout)] = layout, read(layout)  # the layout too: its id stays its own
        return trees[id(layout)][1]

    def built(result):
        if next(calls) % 8 == 0:
            return build(result)
        return SimpleNamespace(shape=part(result, 0), stride=part(result, 1))

    def part(node, which):
        return node[which] if isinstance(node, Mode) else tuple(part(child, which) for child in node)

    monkeypatch.setattr(checked, "_tree", tree)
    monkeypatch.setattr(checked, "_built", built)


def attempt(operation, *args):
    try:
        return operation(*args), None
    except LayoutError as error:
        return None, error


def is_mode(g):
    """Whether values g are a layout of some shape of that size, by trying every first mode."""
    n = len(g)
    if n == 1 or np.array_equal(g, g[1] * np.arange(n)):
        return True
    for p in range(2, n):
        rows = g.reshape(-1, p) if n % p == 0 else None
        if (
            rows is not None
            and np.array_equal(rows, rows[:, :1] + g[1] * np.arange(p))
            and is_mode(rows[:, 0])
        ):
            return True
    return False


def expressible(g, shape):
    """Whether values g are a layout whose shape refines `shape`."""
    total, weight = np.zeros(1, np.int64), 1
    for n in leaves(shape):
        mode = g[: n * weight : weight]
        if not is_mode(mode):
            return False
        total, weight = np.add.outer(mode, total).ravel(), weight * n
    return np.array_equal(total, g)


def tiling(shape, stride, target):
    """The offsets that repeat a tile to cover range(target) once, lowest first; None if there are none."""
    kept = [(n, d) for n, d in zip(leaves(shape), leaves(stride), strict=True) if d]
    tile = table(tuple(n for n, _ in kept), tuple(d for _, d in kept)).tolist()
    if len(set(tile)) < len(tile):
        return None
    covered, low, found = set(), 0, []
    while low < target or len(covered) > low:
        placed = [low + t for t in tile]
        if not covered.isdisjoint(placed):
            return None
        covered.update(placed)
        found.append(low)
        while low in covered:
            low += 1
    return np.array(found)


def oracle_is_wrong(compute, expected):
    """Whether tensor-layouts refuses or gives other values: then a refusal of ours may stand."""
    try:
        result = compute()
        return [result(i) for i in range(oracle.size(result))] != list(expected)
    except (ValueError, AssertionError, TypeError, ZeroDivisionError, IndexError):
        return True


# --- Random layouts


@pytest.mark.parametrize("chunk", CHUNKS)
def test_composition(chunk, swept):
    refused = 0
    for n, (a, b) in enumerate(cases(chunk)):
        expected = extended(a, table(*b[:2]))
        result, error = attempt(checked.composition, a[2], b[2])
        assert (error is None) == expressible(expected, b[0]), (a[:2], b[:2], error)
        if error is None:
            assert np.array_equal(values(result), expected), (a[:2], b[:2])
        else:
            refused += 1
            index = offset(error.coordinate, *b[:2])
            assert error.required == extended(a, index) != error.got, (a[:2], b[:2], error)
        if n % 4 == 0 and error is not None:
            assert oracle_is_wrong(lambda a=a, b=b: oracle.compose(a[3], b[3]), expected), (a[:2], b[:2])
    assert 0 < refused < CASES


@pytest.mark.parametrize("chunk", CHUNKS)
def test_complement(chunk, swept):
    rng, refused = random.Random(chunk), 0
    for a, _ in cases(chunk):
        target = rng.randint(1, 60)
        result, error = attempt(checked.complement, a[2], target)
        expected = tiling(*a[:2], target)
        assert (expected is None) == (error is not None), (a[:2], target, error)
        refused += error is not None
        if expected is not None:
            assert np.array_equal(values(result), expected), (a[:2], target)
            assert leaves(result.stride) == sorted(leaves(result.stride))
    assert 0 < refused < CASES


def divided(a, b):
    """The values of A o (B, complement(B, size A)) and the shape they need; None where nothing tiles."""
    size = prod(leaves(a[0]))
    rest = tiling(*b[:2], size)
    return None if rest is None else extended(a, np.add.outer(rest, table(*b[:2])).ravel())


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", ["logical_divide", "zipped_divide", "tiled_divide", "flat_divide"])
def test_divide(name, chunk, swept):
    refused = 0
    for n, (a, b) in enumerate(cases(chunk)):
        result, error = attempt(getattr(checked, name), a[2], b[2])
        expected = divided(a, b)
        if error is None:
            assert expected is not None and np.array_equal(values(result), expected), (a[:2], b[:2])
            assert name == "flat_divide" or prod(leaves(result.shape[0])) == prod(leaves(b[0]))
        else:
            refused += 1
            if expected is not None:
                rest = checked.complement(b[2], prod(leaves(a[0])))
                assert not expressible(expected, (b[0], rest.shape)), (a[:2], b[:2], error)
                if n % 4 == 0:
                    assert oracle_is_wrong(lambda a=a, b=b: oracle.logical_divide(a[3], b[3]), expected)
    assert 0 < refused < CASES


def multiplied(a, b):
    """A's values plus those of its tiling at B's; None where A does not tile."""
    index = table(*b[:2])
    rest = tiling(*a[:2], prod(leaves(a[0])) * (int(index.max()) + 1))
    return None if rest is None else (table(*a[:2]), rest[index])


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", ["logical_product", "zipped_product", "tiled_product", "flat_product"])
def test_product(name, chunk, swept):
    refused = 0
    for n, (a, b) in enumerate(cases(chunk)):
        result, error = attempt(getattr(checked, name), a[2], b[2])
        parts = multiplied(a, b)
        expected = None if parts is None else np.add.outer(parts[1], parts[0]).ravel()
        if error is None:
            assert expected is not None and np.array_equal(values(result), expected), (a[:2], b[:2])
        else:
            refused += 1
            assert parts is None or not expressible(parts[1], b[0]), (a[:2], b[:2], error)
            if parts is not None and n % 4 == 0:
                assert oracle_is_wrong(lambda a=a, b=b: oracle.logical_product(a[3], b[3]), expected)
    assert 0 < refused < CASES


def sizes(shape, rank):
    modes = shape if isinstance(shape, tuple) else (shape,)
    return [prod(leaves(mode)) for mode in modes] + [1] * (rank - len(modes))


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", ["blocked_product", "raked_product"])
def test_product_by_modes(name, chunk, swept):
    refused = 0
    for a, b in cases(chunk):
        rank = max(len(x[0]) if isinstance(x[0], tuple) else 1 for x in (a, b))
        result, error = attempt(getattr(checked, name), a[2], b[2])
        parts = multiplied(a, b)
        if error is None:
            grid = (
                np.add.outer(parts[1], parts[0])
                .ravel()
                .reshape(sizes(a[0], rank) + sizes(b[0], rank), order="F")
            )
            order = [i + side * rank for i in range(rank) for side in ((0, 1) if name[0] == "b" else (1, 0))]
            assert np.array_equal(values(result), grid.transpose(order).ravel(order="F")), (a[:2], b[:2])
        else:
            refused += 1
            assert parts is None or not expressible(parts[1], b[0]), (a[:2], b[:2], error)
    assert 0 < refused < CASES


@pytest.mark.parametrize("chunk", CHUNKS)
def test_right_inverse(chunk, swept):
    for (shape, stride, layout), (small, _) in zip(distinct(chunk), cases(chunk), strict=True):
        inverse, forward = values(checked.right_inverse(layout)), table(shape, stride)
        assert np.array_equal(forward[inverse], np.arange(len(inverse)))
        where = {int(value): i for i, value in enumerate(forward)}
        run = next(n for n in range(len(forward) + 1) if n not in where)
        assert not any(
            is_mode(np.array([where[i] for i in range(n)])) for n in range(len(inverse) + 1, run + 1)
        )
        inverse, forward = values(checked.right_inverse(small[2])), table(*small[:2])
        assert np.array_equal(forward[inverse], np.arange(len(inverse)))
        assert len(forward) > 12 or len(inverse) == longest(tuple(forward.tolist())), small[:2]


def shapes(limit, count):
    """Every shape of 1 to `count` modes larger than 1 with at most `limit` coordinates."""
    found = [(n,) for n in range(2, limit + 1)]
    return found + [
        (n, *rest) for n in range(2, limit // 2 + 1) if count > 1 for rest in shapes(limit // n, count - 1)
    ]


@cache
def layouts_by_size():
    """The values of every layout with values of 0 to 11, by its size, 1 to 12: no layout has more modes."""
    found = {1: np.zeros((1, 1), np.int64)}
    for shape in shapes(12, 3):
        strides = np.array(list(product(range(12), repeat=len(shape))))
        rows = strides @ np.array([np.unravel_index(range(prod(shape)), shape, order="F")])[0]
        found[prod(shape)] = np.concatenate([found.get(prod(shape), rows[:0]), rows[rows.max(axis=1) < 12]])
    return found


@cache
def longest(forward):
    """The size of the longest layout R with forward[R(i)] = i, by trying all."""
    offsets = np.array([*forward, *[-1] * (12 - len(forward))])
    sizes = layouts_by_size().items()
    return max(n for n, rows in sizes if (offsets[rows] == np.arange(n)).all(axis=1).any())


def test_no_layout_is_a_longer_right_inverse(swept):
    rng = random.Random(0)
    for shape in [*shapes(12, 3), *shapes(12, 1)]:
        drawn = list(product([-2, -1, 0, 1, 2, 3, 4, 5, 6, 8], repeat=len(shape)))
        for stride in rng.sample(drawn, min(100, len(drawn))):
            forward = table(shape, stride)
            inverse = values(checked.right_inverse(cute.make_layout(shape, stride=stride)))
            assert np.array_equal(forward[inverse], np.arange(len(inverse)))
            assert len(inverse) == longest(tuple(forward.tolist())), (shape, stride)


def test_no_left_inverse_is_missed(swept):
    x, strides = np.arange(12), np.indices((23, 23, 23), np.int16).reshape(3, -1).T - 11
    every = np.concatenate(  # the values at 0 to 11 of all layouts of three modes with these strides
        [strides @ np.array([x % n, x // n % m, x // (n * m)], np.int16) for n, m in shapes(12, 2)[11:]]
    )
    refused = set()
    for shape in shapes(12, 3):
        for stride in product(range(1, 12), repeat=len(shape)):
            forward = table(shape, stride)
            if forward.max() >= 12:
                continue
            result, error = attempt(checked.left_inverse, cute.make_layout(shape, stride=stride))
            if error is None:
                got = extended((result.shape, result.stride), forward)
                assert np.array_equal(got, np.arange(len(forward))), (shape, stride)
            elif tuple(forward) not in refused:
                refused.add(tuple(forward))
                inverses = every
                for i, value in enumerate(forward):
                    inverses = inverses[inverses[:, value] == i]
                assert not len(inverses), (shape, stride)
                assert error.got != error.required
                assert len(set(forward)) == len(forward) or forward[error.got] == forward[error.required]
    assert any(len(set(forward)) == len(forward) for forward in refused)


def distinct(chunk):
    """`CASES` layouts, every shape with strides drawn anew."""
    rng = random.Random(chunk)
    for _ in range(CASES):
        shape, _, _, _ = rng.choice(pool(chunk, 0.6))
        count = leaves(shape)
        strides, step = [0] * len(count), 1
        for i in rng.sample(range(len(count)), len(count)):
            strides[i] = step
            step = step * count[i] * rng.choice([1, 1, 1, 2]) + (rng.random() < 0.15)
        stride = like(shape, iter(strides))
        yield shape, stride, cute.make_layout(shape, stride=stride)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_left_inverse(chunk, swept):
    refused = 0
    for shape, stride, layout in distinct(chunk):
        result, error = attempt(checked.left_inverse, layout)
        forward = table(shape, stride)
        if error is None:
            got = extended((result.shape, result.stride), forward)
            assert np.array_equal(got, np.arange(len(forward))), (shape, stride)
        else:
            refused += 1
            steps = sorted(d for n, d in zip(leaves(shape), leaves(stride), strict=True) if n > 1)
            assert any(large % small for small, large in pairwise(steps)) and error.got != error.required
    assert 0 < refused < CASES


@pytest.mark.parametrize("chunk", CHUNKS)
def test_coalesce(chunk, swept):
    for shape, stride, layout in distinct(chunk):
        result = checked.coalesce(layout)
        assert np.array_equal(values(result), table(shape, stride))
        n, d = leaves(result.shape), leaves(result.stride)
        assert all(d[i + 1] != n[i] * d[i] for i in range(len(n) - 1)) and (len(n) == 1 or 1 not in n)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_recast_layout(chunk, swept):
    rng, refused = random.Random(chunk), 0
    for a, _ in cases(chunk):
        new, old = rng.choice([(8, 16), (16, 8), (8, 4), (4, 32), (32, 8), (6, 8), (12, 8)])
        result, error = attempt(checked.recast_layout, new, old, a[2])
        if error is None:
            before = {bit for e in table(*a[:2]).tolist() for bit in range(e * old, (e + 1) * old)}
            assert before == {bit for e in values(result).tolist() for bit in range(e * new, (e + 1) * new)}
        else:
            refused += 1
            assert new > old or new % old
    assert 0 < refused < CASES


@pytest.mark.parametrize("chunk", CHUNKS)
def test_tile_to_shape(chunk, swept):
    rng, refused = random.Random(chunk), 0
    for a, _ in cases(chunk):
        rank = len(a[0]) if isinstance(a[0], tuple) else 1
        block = sizes(a[0], rank)
        shape = tuple(n * rng.randint(1, 3) + (rng.random() < 0.05) for n in block)
        order = tuple(rng.sample(range(rank), rank))
        result, error = attempt(checked.tile_to_shape, a[2], shape, order)
        fits = all(n % b == 0 for n, b in zip(shape, block, strict=True))
        repeats = [n // b for n, b in zip(shape, block, strict=True)]
        rest = tiling(*a[:2], prod(block) * prod(repeats))
        if error is not None:
            refused += 1
            if fits and rest is not None:
                strides = [prod(repeats[j] for j in range(rank) if order[j] < order[i]) for i in range(rank)]
                assert not expressible(rest[table(tuple(repeats), tuple(strides))], tuple(repeats)), (
                    a[:2],
                    shape,
                )
            continue
        assert fits and sizes(result.shape, rank) == list(shape)
        grid = values(result).reshape(
            [n for pair in zip(block, repeats, strict=True) for n in pair], order="F"
        )
        tiles = grid.transpose([*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)]).reshape(
            prod(block), -1, order="F"
        )
        assert (
            np.array_equal(tiles[:, 0], table(*a[:2]))
            and (tiles - tiles[:, :1] == tiles[:1] - tiles[0, 0]).all()
        )
        first = np.array(list(np.ndindex(*repeats[::-1])))[:, ::-1]
        by_order = np.lexsort([first[:, i] for i in sorted(range(rank), key=lambda i: order[i])])
        assert np.array_equal(tiles[0][by_order] - tiles[0, 0], rest[: prod(repeats)])
    assert 0 < refused < CASES


@given(st.data())
def test_by_mode_tilers_divide_mode_by_mode(data):
    shape = tuple(data.draw(st.integers(1, 12)) for _ in range(2))
    tiler = tuple(data.draw(st.integers(1, 12)) for _ in range(2))
    layout = cute.make_layout(shape, stride=(shape[1], 1))
    result = as_numpy(checked.zipped_divide(layout, tiler))
    inside = checked.predicate(layout, tiler)
    assert result.shape == inside.shape and inside.sum() == prod(shape)
    assert sorted(result[inside].tolist()) == list(range(prod(shape)))
    for (i, j), (r, c) in product(
        np.ndindex(*tiler), np.ndindex(*(-(-s // t) for s, t in zip(shape, tiler, strict=True)))
    ):
        row, column = i + r * tiler[0], j + c * tiler[1]
        at = i + tiler[0] * j, r + -(-shape[0] // tiler[0]) * c
        assert inside[at] == (row < shape[0] and column < shape[1])
        assert result[at] == row * shape[1] + column


# --- Known cases


def test_a_wrong_composition_is_refused_at_its_witness():
    with pytest.raises(LayoutError, match=r"no layout of shape \(3,2\) expresses .* at \(2, 1\)") as raised:
        checked.composition(parse_layout("(6,2):(1,7)"), parse_layout("(3,2):(2,3)"))
    error = raised.value
    assert (error.coordinate, error.got, error.required) == (
        (2, 1),
        7,
        8,
    ) and "make_composed_layout" in error.nearest


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("composition", ("(10,2):(16,4)", "(3,4):(1,5)"), "(3,(2,2)):(16,(80,4))"),
        ("composition", ("(2,3):(1,2)", "(2,3):(3,1)"), "(2,3):(3,1)"),
        ("composition", ("(4,6,8,10):(2,3,5,7)", "6:12"), "(2,3):(9,5)"),
        ("composition", ("S<3,3,3> o 0 o (8,64):(64,1)", "16:2"), "S<3,3,3> o 0 o (4,4):(128,1)"),
        ("complement", ("6:4", 24), "4:1"),
        ("logical_divide", ("10:1", "4:1"), "(4,3):(1,4)"),
        ("zipped_divide", ("(2,6):(6,1)", (1, 2)), "((1,2),(2,3)):((0,1),(6,2))"),
        ("left_inverse", ("(2,2):(1,3)",), "(3,2):(1,2)"),
        ("tile_to_shape", ("(8,64):(64,1)", (128, 128), (0, 1)), "((8,16),(64,2)):((64,512),(1,8192))"),
        ("recast_layout", (16, 8, "S<2,4,3> o 0 o (8,8):(8,1)"), "S<2,3,3> o 0 o (8,4):(4,1)"),
    ],
)
def test_examples(name, args, expected):
    args = [parse_layout(arg) if isinstance(arg, str) else arg for arg in args]
    assert getattr(checked, name)(*args) == parse_layout(expected)
    assert str(checked.explain(name, *args)).splitlines()[-1].endswith(expected.split(" o ")[-1])


def test_a_complement_fills_the_gaps():
    rest = checked.complement(parse_layout("6:4"), 24)
    both = cute.make_layout((rest.shape, 6), stride=(rest.stride, 4))
    assert checked.coalesce(both) == parse_layout("24:1")


def test_coordinates_past_the_end_need_a_predicate():
    inside = checked.predicate(parse_layout("10:1"), parse_layout("4:1"))
    assert np.argwhere(~inside).tolist() == [[2, 2], [3, 2]]
    assert "predicate" in str(checked.explain("logical_divide", parse_layout("10:1"), 4))
    assert checked.predicate(parse_layout("12:1"), 4).all()


def test_shape_division_is_printed_as_it_is_computed():
    steps = str(checked.explain("composition", parse_layout("(3,6,2,8):(1,3,18,36)"), parse_layout("12:6")))
    assert "/ 6 = (1,3,2,8):" in steps
    steps = str(
        checked.explain(checked.composition, parse_layout("(3,6,2,8):(1,3,18,36)"), parse_layout("6:3"))
    )
    assert "/ 3 = (1,6,2,8):" in steps


def test_an_atom_that_does_not_divide_names_both_shapes():
    with pytest.raises(LayoutError, match=r"\(8, 64\) does not divide the shape \(120, 100\); \(120, 128\)"):
        checked.tile_to_shape(parse_layout("S<3,3,3> o 0 o (8,64):(64,1)"), (120, 100), (0, 1))


def test_right_inverse_of_a_dynamic_size():
    found, out = [], torch.full((3, 32), -1, dtype=torch.int32)

    @cute.jit
    def store(n: cutlass.Int32, out: cute.Tensor):
        for row, layout in enumerate(
            [
                cute.make_layout((16, n), stride=(1, 16)),
                cute.make_layout((n, 16), stride=(16, 1)),
                cute.make_layout((n, 16), stride=(n, 1)),
            ]
        ):
            inverse = checked.right_inverse(layout)
            found.append(str(inverse))
            for i in cutlass.range_constexpr(32 if row < 2 else 16):
                out[row, i] = layout(inverse(i))

    store(cutlass.Int32(2), from_dlpack(out))
    assert found == ["(16,?):(1,16)", "(16,?):(?,1)", "16:?"]
    assert out[:2].tolist() == [list(range(32))] * 2 and out[2, :16].tolist() == list(range(16))


DYNAMIC = """
import random, sys
import cutlass, cutlass.cute as cute, torch
from cutlass.cute.runtime import from_dlpack
from cutelab.layouts import checked
from cutelab.layouts.errors import LayoutError

N, WIDTH, rng = int(sys.argv[1]), 8, random.Random(sys.argv[1])
number = lambda *fixed: rng.choice(["n", *fixed, *fixed])
size = lambda: number(1, 2, 3, 4, 6, 12)

def layout():
    rank = rng.randint(1, 3)
    return [size() for _ in range(rank)], [number(0, 1, 2, 3, 4, 6, 12, 24, -1) for _ in range(rank)]

def argument(name, k):
    if name == "recast_layout":
        return layout() if k == 2 else rng.choice([4, 8, 16])
    if name == "tile_to_shape" and k:
        return tuple(size() for _ in range(2)) if k == 1 else (0, 1)
    if k == 1 and rng.random() < 0.5:
        return rng.choice([size(), (size(),), (size(), size())])
    return layout()

def made(x, n):
    if isinstance(x, list):
        return [made(y, n) for y in x]
    if isinstance(x, tuple) and isinstance(x[0], list):
        return cute.make_layout(tuple(made(x[0], n)), stride=tuple(made(x[1], n)))
    return tuple(made(y, n) for y in x) if isinstance(x, tuple) else n if x == "n" else x

def attempt(name, args, n):
    try:
        return getattr(checked, name)(*(made(arg, n) for arg in args))
    except LayoutError:
        return None

def value(name, args, n, result, i):
    if "inverse" not in name:
        return result(i % cute.size(result))
    layout = made(args[0], n)  # inverses are compared with the identity: more than one may be right
    first, second = (result, layout) if name[0] == "r" else (layout, result)
    return second(first(i % cute.size(first))) - i % cute.size(first)

ranks = {"recast_layout": 3, "tile_to_shape": 3, "coalesce": 1, "right_inverse": 1, "left_inverse": 1}
cases = []
for name in [name for name in checked.OPERATIONS for _ in range(30)]:
    cases.append((name, [argument(name, k) for k in range(ranks.get(name, 2))]))
static = [attempt(*case, N) for case in cases]
out = torch.full((len(cases), WIDTH), -1 << 20, dtype=torch.int32)
given = []

@cute.jit
def store(n: cutlass.Int32, out: cute.Tensor):
    for row, case in enumerate(cases):
        result = attempt(*case, n)
        given.append(result is not None)
        if cutlass.const_expr(result is not None):
            for i in cutlass.range_constexpr(WIDTH):
                out[row, i] = value(*case, n, result, i)

store(cutlass.Int32(N), from_dlpack(out))
for row, (case, expected) in enumerate(zip(cases, static)):
    if given[row] and "n" in str(case):
        assert expected is not None, case
        expected = [0 if "inverse" in case[0] else value(*case, N, expected, i) for i in range(WIDTH)]
        assert out[row].tolist() == expected, (case, out[row])
computed = {name for (name, args), g in zip(cases, given) if g and "n" in str(args)}
assert len(computed) >= 10, computed
"""


@pytest.mark.parametrize("n", [1, 6])
def test_dynamic_layouts_are_computed_or_refused(n, tmp_path):
    (tmp_path / "dynamic.py").write_text(DYNAMIC)
    run = subprocess.run([sys.executable, "dynamic.py", str(n)], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.parametrize("swizzle", [(1, 0, 0), (4, 0, 3), (-1, 0, 3), (2, -1, 3), (3, 20, 12), (1.5, 0, 3)])
def test_what_is_no_swizzle_is_refused(swizzle):
    with pytest.raises(LayoutError, match="is not a swizzle"):
        checked.make_swizzle(*swizzle)
    assert checked.make_swizzle(3, 4, 3) == cute.make_swizzle(3, 4, 3)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("zipped_divide", ("12:1", "(2,2):(2,3)"), "zipped_divide: complement: (2,2):(2,3) does not tile"),
        ("logical_divide", ("(6,2):(1,7)", "4:1"), "logical_divide: composition: no layout of shape "),
        ("tiled_product", ("(2,2):(2,3)", "4:1"), "tiled_product: complement: (2,2):(2,3) does not tile"),
        ("raked_product", ("4:2", "(3,2):(1,1)"), "raked_product: composition: no layout of shape "),
        ("tile_to_shape", ("2:-1", 4, 0), "tile_to_shape: complement: (2):(-1) does not tile"),
        ("complement", ("(2,2):(2,3)", 24), "complement: (2,2):(2,3) does not tile"),
        ("predicate", ("12:1", "4:-1"), "predicate: complement: 4:-1 does not tile"),
        ("recast_layout", (16, 8, "3:1"), "recast_layout: 3:1: 2 old elements"),
    ],
)
def test_a_refusal_names_the_operation_and_the_step(name, args, message):
    args = [parse_layout(arg) if isinstance(arg, str) else arg for arg in args]
    with pytest.raises(LayoutError) as raised:
        getattr(checked, name)(*args)
    error = raised.value
    assert str(error).startswith(message) and error.got != error.required
    assert str(pickle.loads(pickle.dumps(error))).endswith(error.nearest)


def test_a_tuple_of_tilers_has_its_witness_in_its_mode():
    with pytest.raises(LayoutError) as raised:
        checked.composition(parse_layout("(4,(6,2)):(1,(4,30))"), (2, parse_layout("(3,2):(2,3)")))
    error = raised.value
    assert (error.coordinate, error.got, error.required) == ((0, (2, 1)), 28, 30 + 4)
    with pytest.raises(LayoutError, match="too many coordinates") as raised:
        checked.composition(parse_layout("(4,(6,65536)):(1,(1,7))"), (2, parse_layout("(3,16777216):(2,3)")))
    assert raised.value.coordinate is None


def test_a_derivation_is_shown_as_text_in_a_notebook():
    shown = checked.explain("composition", parse_layout("S<1,0,1> o 0 o 8:1"), 2)._repr_html_()
    assert shown.startswith("<pre>") and "= S&lt;1,0,1&gt; o 0 o 2:1" in shown


HUGE = "(8589934593,(4294967296,2147483647)):(7,(8589934593,3))"


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("logical_divide", ("((6,3),8):((36,12),1)", "((6,2),(2,4)):((2,24),(16,1))")),
        ("zipped_divide", ("(3,(12,8,2)):(60,(24,72,2))", "(2,6):(24,12)")),
        ("logical_product", ("((5,5),(2)):((4,12),(1))", "12:8")),
        ("blocked_product", ("(2,(6,5,2)):(2,(12,12,10))", "(12):(24)")),
        ("raked_product", ("(5,(6,1),2):(10,(12,40),5)", "3:-20")),
        ("logical_product", (HUGE, "4294967296:1")),
        ("complement", (HUGE, 6)),
        ("left_inverse", (HUGE,)),
        ("left_inverse", ("(4,8):(8,0)",)),
        ("complement", ("(2,2):(2,3)", 24)),
        ("complement", ("4:-1", 24)),
        ("complement", ("4:1", 0)),
        ("recast_layout", (0, 8, "4:1")),
        ("recast_layout", (64, 0, "4:1")),
        ("recast_layout", (-1, 2**31, "4:1")),
        ("recast_layout", (16, 8, "S<2,0,3> o 0 o (8,8):(8,1)")),
        ("tile_to_shape", ("(2,(8),(3)):(16,(20),(4))", (12, 1, 6), (2, 0, 1))),
        ("tile_to_shape", ("(2,2):(1,2)", (4, 4), (0, 1, 2))),
        ("composition", ("6:15", "S<1,0,1>")),
        ("composition", ("6:15", "S<1,0,1> o 0 o 4:1")),
        ("composition", ("(2,2):(1,5)", "4:-1")),
        ("composition", ("6:1", -1)),
        ("composition", ("6:1", ())),
        ("flat_divide", ("12:2", ())),
        ("flat_divide", ("12:2", 2.5)),
        ("logical_divide", ("(12,3):(1,12)", (2, 3, 4))),
        ("right_inverse", (None,)),
        ("coalesce", (3,)),
    ],
)
def test_what_ends_the_process_or_has_no_answer_is_refused(name, args):
    args = [parse(arg) if isinstance(arg, str) else arg for arg in args]
    with pytest.raises(LayoutError) as raised:
        getattr(checked, name)(*args)
    assert raised.value.nearest in str(raised.value)
    assert "refused" in str(checked.explain(name, *args))


@given(st.sampled_from(sorted(checked.OPERATIONS)), st.data())
def test_no_arguments_end_the_process(name, data):
    wild = st.sampled_from(
        [
            HUGE,
            "4:1",
            "(2,2):(0,-3)",
            "(2,2):(1,1)",
            "S<2,0,-3> o 3 o (4,8):(8,1)",
            "()",
            "S<1,0,1>",
            "(4,2)",
            None,
            0,
            -1,
            3,
            2**63,
            2**31,
            (),
            (2, None),
            ((2, 2), 1),
            "word",
            1.5,
            True,
        ]
    )
    count = {"complement": 2, "right_inverse": 1, "left_inverse": 1, "coalesce": 1}.get(name, 2)
    args = data.draw(st.tuples(*[wild] * (3 if name in ("recast_layout", "tile_to_shape") else count)))
    args = [parse(arg) if isinstance(arg, str) and arg[0] in "(S4" else arg for arg in args]
    assert str(checked.explain(name, *args))


def test_large_layouts_are_verified_without_being_tabulated():
    matrix = parse_layout("(65536,65536):(65536,1)")
    divided = checked.zipped_divide(matrix, (128, 128))
    assert divided == parse_layout("((128,128),(512,512)):((65536,1),(8388608,128))")
    with pytest.raises(LayoutError, match="too many coordinates"):
        checked.composition(parse_layout("(6,65536):(1,7)"), parse_layout("(3,2,65536,256):(2,3,6,393216)"))


def test_a_million_coordinates_are_verified_in_50_ms():
    a, b = parse_layout("(100,100,100):(1,100,10000)"), parse_layout("(10,100,1000):(100000,1000,1)")
    times = []
    for _ in range(5):
        start = time.perf_counter()
        result = checked.composition(a, b)
        times.append(time.perf_counter() - start)
    assert same_function(result, b) and min(times) <= 0.05
