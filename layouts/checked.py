"""The DSL's layout algebra, each result verified to be the function that it claims to be.

Arguments and results are the DSL's. The DSL (4.8.1) returns wrong layouts without a word for some inputs, and
divides by zero or aborts the process for others. So its algebra is never called: layouts are derived here on
Python integers, verified over all coordinates, and only then built. What has no answer raises `LayoutError`:
where it goes wrong, the value there and the value required, and what would work.

- A tiler is a layout, an integer n (the layout n:1), or a tuple of tilers, one a mode; None leaves it whole.
- Of a composed layout (a swizzle's, for one) as first argument, the operation is on its `outer` layout,
  because inner(offset + A(B(c))) needs A o B alone; complement and the inverses refuse it.
- Above 2^24 coordinates nothing is tabulated: a composition is accepted where no index carries from one mode
  of A into the next, a recast where whole modes merge, both proofs; the others are exact by construction.
- Sizes and strides known only when a kernel runs are computed with where these proofs hold whatever they are;
  where the answer depends on them, the operation is refused.
- Layouts whose strides are basis elements (identity layouts) are refused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from itertools import zip_longest
from math import gcd, prod
from operator import index
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np

from cutelab.layouts import derivation as d
from cutelab.layouts.derivation import DECIDED, ONE, TABULATED, Mode, Tree, text
from cutelab.layouts.errors import LayoutError
from cutelab.layouts.notation import format

Layout = Any  # cute.Layout | cute.ComposedLayout
Tiler = Any  # cute.Layout | int | tuple of tilers | None


# --- From the DSL's objects and back


def _tree(layout: Any) -> Tree:
    if not isinstance(layout, cute.Layout):
        raise LayoutError("", f"{layout!r} is not a layout", "cute.make_layout makes one of a shape")

    def pair(shape: Any, stride: Any) -> Tree:
        if isinstance(shape, tuple):
            return [pair(s, t) for s, t in zip(shape, stride, strict=True)]
        if isinstance(stride, cute.ScaledBasis):
            nearest = "apply it to a layout of integers, then to the coordinates it gives"
            raise LayoutError("", f"{layout} has strides that are not integers", nearest)
        return Mode(*(n if isinstance(n, int) else d.Unknown(n) for n in (shape, stride)))

    return pair(layout.shape, layout.stride)


def _built(tree: Tree) -> cute.Layout:
    known = [mode for mode in d.flat(tree) if d.known(mode)]
    reach = max(sum((n - 1) * abs(stride) for n, stride in known), d.size(known))
    if max(reach, *(abs(n) for mode in d.flat(tree) for n in mode if isinstance(n, int)), 0) >= 1 << 63:
        raise LayoutError("", f"{text(tree)} does not fit into 64 bits", "sizes and strides below 2^31")

    def part(node: Tree, which: int) -> Any:
        if isinstance(node, list):
            return tuple(part(child, which) for child in node)
        return node[which].value if isinstance(node[which], d.Unknown) else node[which]

    return cute.make_layout(part(tree, 0), stride=part(tree, 1))


def _positive(value: Any, what: str) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 63:
        return value
    if isinstance(value, cutlass.Integer) and not isinstance(value, cutlass.Boolean):
        return d.Unknown(value)
    raise LayoutError("", f"{what} {value!r} is not a positive integer below 2^63", "1 is the smallest")


def _leaves(x: Any) -> list[Any]:
    return [leaf for child in x for leaf in _leaves(child)] if isinstance(x, tuple) else [x]


def _one(tiler: Tiler) -> Tree:
    """A tiler that is no tuple: a layout, or n for n:1."""
    return _tree(tiler) if isinstance(tiler, cute.Layout) else Mode(_positive(tiler, "tiler"), 1)


@contextmanager
def _named(operation: str) -> Iterator[None]:
    """What is refused inside names the operation that was called, and then the step."""
    try:
        yield
    except LayoutError as error:
        error.operation = operation
        raise


def _apply(operation: str, layout: Layout, derive: Callable[..., Tree], *args: Any) -> Layout:
    """`derive` of a layout, or of a composed layout's outer one."""
    composed = isinstance(layout, cute.ComposedLayout) and derive not in (_complement, _left, _right)
    with _named(operation):
        result = _built(derive(_tree(layout.outer if composed else layout), *args))
    return cute.make_composed_layout(layout.inner, layout.offset, result) if composed else result


def _by_modes(a: Tree, tiler: tuple, derive: Callable[[Tree, Tiler], Any]) -> list[Any]:
    """`derive` of each mode and its tiler; modes without one are left whole."""
    rank = len(a) if isinstance(a, list) else 1
    if not isinstance(a, list) or not 0 < len(tiler) <= rank:
        nearest = f"a tuple of 1 to {rank} tilers, or a layout, would do"
        raise LayoutError("", f"a tiler of rank {len(tiler)} for {text(a)}, of rank {rank}", nearest)
    results = []
    for k, (mode, t) in enumerate(zip_longest(a, tiler)):
        try:
            results.append(mode if t is None else derive(mode, t))
        except LayoutError as error:
            if error.step == "composition" and error.coordinate is not None:  # else the witness is an offset
                error.coordinate = tuple(error.coordinate if i == k else 0 for i in range(len(tiler)))
            raise
    return results


def _verify(
    step: str, got: Any, required: Any, problem: Callable[[], str], nearest: str, witness: Callable = int
) -> None:
    wrong = got != required
    if wrong.any():
        i = int(wrong.argmax())
        raise LayoutError(step, problem(), nearest, witness(i), int(got[i]), int(required[i]))


# --- Composition


def composition(lhs: Layout, rhs: Tiler) -> Layout:
    """A o B: the R with R(c) = A(B(c)) for every coordinate c of B, whose shape refines B's.

    Beyond A's end its last mode goes on, as everywhere in CuTe. There is such an R exactly if each mode of
    B gives a layout and their sum is the whole; it is unique up to coalescing. A tuple composes mode by mode,
    and A's further modes are left out, as in the DSL.
    """
    return _apply("composition", lhs, _composition, rhs)


def _composition(a: Tree, rhs: Tiler) -> Tree:
    if isinstance(rhs, tuple):
        return _by_modes(a, rhs, _composition)[: len(rhs)]
    return _composed(a, _one(rhs))


def _composed(a: Tree, b: Tree) -> Tree:
    d.note("{} o {}, mode by mode of the second:", a, b)
    result = d.compose(a, b)
    if d.known(a) and d.tabulated(b):

        def problem() -> str:
            product = f"no layout of shape {text(b).split(':')[0]} expresses {text(a)} o {text(b)}"
            return f"{product}: {text(result)}, right along each mode, is wrong"

        nearest = "cute.make_composed_layout(a, 0, b) is that function"
        required = d.at(a, d.table(b))
        _verify("composition", d.table(result), required, problem, nearest, lambda i: d.coordinate(b, i))
    elif not d.never_carries(a, b):
        unverified = f"too many coordinates to verify {text(a)} o {text(b)} at each"
        nearest = f"at most {TABULATED} coordinates, or modes whose indices do not carry into another"
        raise LayoutError("composition", unverified, nearest)
    return result


# --- Complement and inverses


def complement(input: Layout, cotarget: Any) -> cute.Layout:
    """A*: every k of [0, cotarget) is A(c) + A*(c*) for exactly one offset A(c) and one c*.

    A* has positive, ascending strides and reaches past the cotarget by less than A's extent; modes of A with
    stride 0 do not count. `cotarget` is a shape or a layout: its size counts.
    """
    return _apply("complement", input, _complement, cotarget)


def _complement(a: Tree, cotarget: Any) -> Tree:
    if isinstance(cotarget, cute.Layout):
        target = d.size(_tree(cotarget))
    else:
        target = prod(_positive(n, "cotarget") for n in _leaves(cotarget))
    return _rest(a, target)


def _rest(a: Tree, target: Any) -> Tree:
    d.note("complement of {} in {}:", a, target)
    result = d.complement(a, target)
    kept = [mode for mode in d.flat(a) if mode.stride]
    if d.tabulated([*kept, result]):
        counts = np.bincount((d.table(kept)[:, None] + d.table(result)).ravel(), minlength=target)
        nearest = "an injective layout would do"
        once = np.ones_like(counts)
        _verify("complement", counts, once, lambda: f"{text(result)} is no complement of {text(a)}", nearest)
    return result


def right_inverse(input: Layout) -> cute.Layout:
    """R with A(R(i)) = i for every i < size(R), inside A's coordinates; no such layout is longer.

    Where A has more than 4096 coordinates, or sizes known only when a kernel runs, R is the longest of whole
    modes of the coalesced A: the longest of all if A has no negative strides and takes no offset twice.
    """
    return _apply("right_inverse", input, _right)


def _right(a: Tree) -> Tree:
    d.note("right inverse of {}: from stride 1 on, the mode whose stride is what is covered so far", a)
    result = d.right_inverse(a)
    if d.known(a) and d.size(a) <= DECIDED:
        result = d.longest_right_inverse(a, result)
    if d.tabulated(a):
        got = d.at(a, d.table(result))
        nearest = "an injective layout would do"
        _verify("", got, np.arange(len(got)), lambda: f"{text(result)} is wrong", nearest)
    return result


def left_inverse(input: Layout) -> cute.Layout:
    """L with L(A(i)) = i for every i < size(A); so A takes no offset twice, and none below 0.

    Any such layout L is found where A's offsets are below 4096; beyond, where A's strides in ascending order
    divide one another.
    """
    return _apply("left_inverse", input, _left)


def _left(a: Tree) -> Tree:
    lowest = min((mode.stride for mode in d.flat(a) if mode.size != 1), default=1)
    if lowest < 1:
        problem = f"{text(a)} has a stride below 1, so it takes an offset twice or one below 0"
        raise LayoutError("", problem, "stride 1 is the smallest", None, lowest, 1)
    d.note("left inverse of {}: the digits of an offset, by ascending stride", a)
    digits = d.left_inverse(a)
    if d.is_mixed_radix(a):
        return digits
    if not (d.known(a) and max(d.size(a), d.last_offset(a) + 1) <= DECIDED):
        nearest = f"strides that do, or offsets below {DECIDED}, would do"
        raise LayoutError("", f"{text(a)}: its strides, ascending, do not divide one another", nearest)
    offsets, order = d.table(a), np.arange(d.size(a))
    _, firsts, which = np.unique(offsets, return_index=True, return_inverse=True)
    injective = "an injective layout would do"
    _verify("", firsts[which], order, lambda: f"{text(a)} takes an offset twice", injective)
    got = d.at(digits, offsets)
    found = digits if np.array_equal(got, order) else d.any_left_inverse(a)
    if found is None:
        nearest = "strides that, ascending, divide one another would do"
        _verify("", got, order, lambda: f"no layout inverts {text(a)}: {text(digits)} is wrong", nearest)
    return found


# --- Divide


def logical_divide(target: Layout, tiler: Tiler) -> Layout:
    """A o (B, complement(B, size(A))): mode 0 is a tile, mode 1 runs over the tiles.

    Where the tiles do not come out even, the last ones reach past A's end, where A's last mode goes on:
    `predicate` tells which coordinates lie inside.
    """
    return _apply("logical_divide", target, _logical, tiler)


def zipped_divide(target: Layout, tiler: Tiler) -> Layout:
    """`logical_divide` by modes, with the tile's modes gathered and the rest's: (tile, rest)."""
    return _apply("zipped_divide", target, _zipped, tiler)


def tiled_divide(target: Layout, tiler: Tiler) -> Layout:
    """`zipped_divide` with the rest's modes unpacked: (tile, rest...)."""
    return _apply("tiled_divide", target, lambda a: _second_open(_zipped(a, tiler)))


def flat_divide(target: Layout, tiler: Tiler) -> Layout:
    """`zipped_divide` with both modes unpacked: (tile..., rest...)."""
    return _apply("flat_divide", target, lambda a: _both_open(_zipped(a, tiler)))


def _logical(a: Tree, tiler: Tiler) -> list[Tree]:
    return _by_modes(a, tiler, _logical) if isinstance(tiler, tuple) else _divided(a, tiler)


def _zipped(a: Tree, tiler: Tiler) -> list[Tree]:
    if not isinstance(tiler, tuple):
        return [a, ONE] if tiler is None else _divided(a, tiler)
    pairs = _by_modes(a, tuple([t] for t in tiler), lambda mode, t: _zipped(mode, *t))
    tiles, rests = zip(*pairs[: len(tiler)], strict=True)
    return [list(tiles), [*rests, *pairs[len(tiler) :]]]


def _divided(a: Tree, tiler: Tiler) -> list[Tree]:
    b = _one(tiler)
    both = [b, _rest(b, d.size(a))]
    result = _composed(a, both)
    if not d.known([a, *both]):
        d.note("  whether the tiles come out even is known only when a kernel runs")
    elif d.last_offset(both) >= d.size(a):
        inside = "predicate(target, tiler) tells which are inside"
        d.note("  indices up to {} of {}: {}", d.last_offset(both), d.size(a), inside)
    return result


def _second_open(pair: list[Tree]) -> list[Tree]:
    return [pair[0], *d.modes(pair[1])]


def _both_open(pair: list[Tree]) -> list[Tree]:
    return [*d.modes(pair[0]), *d.modes(pair[1])]


def predicate(target: Layout, tiler: Tiler) -> np.ndarray:
    """Which coordinates (tile, rest) of ``zipped_divide(target, tiler)`` lie inside the target.

    A boolean array with an axis for each, all true where the tiles come out even.
    """
    with _named("predicate"):
        a = _tree(target.outer if isinstance(target, cute.ComposedLayout) else target)
        if not d.tabulated(a):
            problem = f"{text(a)} has {d.size(a)} coordinates, too many to list"
            raise LayoutError("", problem, f"at most {TABULATED} would do, known before a kernel runs")
        return _inside(a, tiler)


def _inside(a: Tree, tiler: Tiler) -> np.ndarray:
    if tiler is None:
        return np.ones((d.size(a), 1), bool)
    if not isinstance(tiler, tuple):
        b = _one(tiler)
        return d.table(b)[:, None] + d.table(_rest(b, d.size(a))) < d.size(a)
    inside = np.ones((1, 1), bool)
    parts = _by_modes(a, tuple([t] for t in tiler), lambda mode, t: _inside(mode, *t))
    for part in (p if isinstance(p, np.ndarray) else np.ones((1, d.size(p)), bool) for p in parts):
        both = part[:, None, :, None] & inside[None, :, None, :]  # the first mode varies fastest
        shape = [n * m for n, m in zip(inside.shape, part.shape, strict=True)]
        inside = both.transpose(1, 0, 3, 2).reshape(shape, order="F")
    return inside


# --- Product


def logical_product(block: Layout, tiler: Tiler) -> Layout:
    """(A, A* o B) with A* = complement(A, size(A) cosize(B)): A repeated as B says, the copies disjoint."""
    return _apply("logical_product", block, _by_mode_product, tiler)


def zipped_product(block: Layout, tiler: Layout) -> Layout:
    """`logical_product` of layouts: (block, repetitions)."""
    return _apply("zipped_product", block, lambda a: _product(a, _one(tiler)))


def tiled_product(block: Layout, tiler: Layout) -> Layout:
    """`logical_product` with the tiler's modes unpacked: (block, repetitions...)."""
    return _apply("tiled_product", block, lambda a: _second_open(_product(a, _one(tiler))))


def flat_product(block: Layout, tiler: Layout) -> Layout:
    """`logical_product` with both modes unpacked: (block..., repetitions...)."""
    return _apply("flat_product", block, lambda a: _both_open(_product(a, _one(tiler))))


def blocked_product(block: Layout, tiler: Layout) -> Layout:
    """`logical_product` mode by mode, ((block 0, tiler 0), ...): neighbours in a block stay neighbours."""
    return _apply("blocked_product", block, lambda a: _by_rank(a, _one(tiler)))


def raked_product(block: Layout, tiler: Layout) -> Layout:
    """`logical_product` mode by mode, ((tiler 0, block 0), ...): the blocks interleave."""
    return _apply("raked_product", block, lambda a: [pair[::-1] for pair in _by_rank(a, _one(tiler))])


def _by_mode_product(a: Tree, tiler: Tiler) -> list[Tree]:
    return _by_modes(a, tiler, _by_mode_product) if isinstance(tiler, tuple) else _product(a, _one(tiler))


def _product(a: Tree, b: Tree) -> list[Tree]:
    return [a, _composed(_rest(a, d.size(a) * (d.last_offset(b) + 1)), b)]


def _by_rank(a: Tree, b: Tree) -> list[list[Tree]]:
    rank = max(len(d.modes(a)), len(d.modes(b)))
    padded = ([*d.modes(tree), *[ONE] * (rank - len(d.modes(tree)))] for tree in (a, b))
    return [list(pair) for pair in zip(*_product(*padded), strict=True)]


def tile_to_shape(atom: Layout, trg_shape: Any, order: Any) -> Layout:
    """The atom repeated until each mode has the size asked for; the repeats lie in memory in `order`.

    Mode i of the result is (atom's mode i, repeats), by `blocked_product`. The atom has to divide the shape.
    """
    return _apply("tile_to_shape", atom, _tiled, trg_shape, order)


def _tiled(a: Tree, shape: Any, order: Any) -> list[list[Tree]]:
    modes = shape if isinstance(shape, tuple) else (shape,)
    target = tuple(prod(_positive(n, "size") for n in _leaves(mode)) for mode in modes)
    block = tuple(d.size(mode) for mode in d.modes(a)) + (1,) * (len(target) - len(d.modes(a)))
    if len(block) != len(target) or any(n % b for n, b in zip(target, block, strict=True)):
        fits = tuple(d.ceil_div(n, b) * b for n, b in zip(target, block, strict=False))
        problem = f"an atom of shape {block} does not divide the shape {target}"
        raise LayoutError("", problem, f"{fits} would do")
    ranks = _leaves(order)
    if len(ranks) != len(target) or not all(isinstance(r, int) for r in ranks):
        problem = f"order {order!r} does not rank the {len(target)} modes of {target}"
        raise LayoutError("", problem, f"{tuple(range(len(target)))} would do")
    tiler, stride = [ONE] * len(target), 1
    for i in sorted(range(len(target)), key=lambda i: ranks[i]):
        tiler[i] = Mode(target[i] // block[i], stride if target[i] > block[i] else 0)
        stride *= tiler[i].size
    return _by_rank(a, tiler)


# --- Coalesce, recast, swizzle


def coalesce(input: Layout, *, target_profile: Any = None) -> Layout:
    """The same function with the fewest modes; with a profile, of each of its modes, which stay apart."""
    return _apply("coalesce", input, _coalesced, target_profile)


def _coalesced(a: Tree, profile: Any) -> Tree:
    return _by_modes(a, profile, _coalesced) if isinstance(profile, tuple) and profile else d.coalesce(a)


def recast_layout(new_type_bits: int, old_type_bits: int, src_layout: Layout) -> Layout:
    """The layout of the same bits in elements of another width.

    The elements of the result cover exactly the bits that those of `src_layout` cover.
    """
    with _named("recast_layout"):
        new, old = (_positive(bits, "width") for bits in (new_type_bits, old_type_bits))
        up, down = new // gcd(new, old), old // gcd(new, old)
        if not isinstance(src_layout, cute.ComposedLayout):
            return _apply("recast_layout", src_layout, _recast, up, down)
        inner, offset = src_layout.inner, src_layout.offset
        if not isinstance(inner, cute.Swizzle) or not isinstance(offset, int):
            problem = f"{format(src_layout)} is no swizzle of a known offset and a layout"
            raise LayoutError("", problem, "recast the composition's result")
        base = inner.num_base - up.bit_length() + down.bit_length()
        exact = not (up & (up - 1) or down & (down - 1) or offset % up)
        if inner.num_bits and (base < 0 or not exact):
            nearest = f"at most {old << inner.num_base} bits, a power of two times {old}, would do"
            problem = f"{format(src_layout)} moves pieces of an element of {new} bits"
            raise LayoutError("", problem, nearest, None, new, old << inner.num_base)
        swizzle = make_swizzle(inner.num_bits, base if inner.num_bits else 4, inner.num_shift)
        outer = _apply("recast_layout", src_layout.outer, _recast, up, down)
        return cute.make_composed_layout(swizzle, offset // up * down, outer)


def _recast(a: Tree, up: int, down: int) -> Tree:
    result = d.recast(a, up, down)
    if d.tabulated(a, down) and d.tabulated(result, up):
        before = np.unique((d.table(a)[:, None] * down + np.arange(down)).ravel())
        after = np.unique((d.table(result)[:, None] * up + np.arange(up)).ravel())
        if not np.array_equal(before, after):
            problem = f"{text(result)} does not cover what {text(a)} covers: times that it holds a piece"
            nearest = f"a contiguous run of a multiple of {up} elements would do"
            piece = int(np.setxor1d(before, after)[0])
            raise LayoutError("", problem, nearest, piece, int(piece in after), int(piece in before))
        return result
    cut = [mode for mode in d.flat(a) if mode.stride % up]
    units = [stride for _, stride in d.flat(d.recast(a, up, 1)) if abs(stride) == 1]
    whole = len(cut) == 1 and cut[0].stride == 1 and cut[0].size % up == 0
    if (up > 1 and not whole) or (down > 1 and units != [1]):
        problem = f"{text(a)} has too many coordinates to verify that elements merge and split whole"
        nearest = (
            f"at most {TABULATED} coordinates, or one mode of stride 1 and {up} times any size, would do"
        )
        raise LayoutError("", problem, nearest)
    return result


def make_swizzle(b: int, m: int, s: int) -> cute.Swizzle:
    """S<b,m,s>; the DSL turns what is none into the identity without a word."""
    try:
        b, m, s = index(b), index(m), index(s)
    except TypeError:
        b, m, s = -1, 0, 0
    if not (0 <= b <= abs(s) and m >= 0 and b + m + abs(s) <= 32):
        nearest = "0 <= bits <= |shift|, base >= 0 and bits + base + |shift| <= 32 would do"
        raise LayoutError("make_swizzle", f"S<{b},{m},{s}> is not a swizzle", nearest)
    return cute.make_swizzle(b, m, s)


# --- Explain


@dataclass(repr=False)
class Derivation:
    """The steps of an operation and its verified result, or the error that refused it; `str` prints them."""

    steps: list[str]
    result: Layout | LayoutError

    def __str__(self) -> str:
        refused = isinstance(self.result, LayoutError)
        return "\n".join([*self.steps, f"refused: {self.result}" if refused else f"= {format(self.result)}"])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def explain(operation: str | Callable[..., Layout], *args: Any, **kwargs: Any) -> Derivation:
    """Run an operation of this module and show the steps: ``explain("composition", a, b)``."""
    name = operation if isinstance(operation, str) else operation.__name__
    if name not in OPERATIONS:
        raise LayoutError("explain", f"there is no operation {name!r}", f"one of {', '.join(OPERATIONS)}")
    token = d.steps.set([])
    try:
        result: Layout | LayoutError = OPERATIONS[name](*args, **kwargs)
    except LayoutError as error:
        result = error
    steps = d.steps.get()
    d.steps.reset(token)
    return Derivation(steps or [], result)


OPERATIONS: dict[str, Callable[..., Layout]] = {
    f.__name__: f
    for f in (
        composition, complement, right_inverse, left_inverse, coalesce, recast_layout, tile_to_shape,
        logical_divide, zipped_divide, tiled_divide, flat_divide,
        logical_product, zipped_product, tiled_product, flat_product, blocked_product, raked_product,
    )
}  # fmt: skip
