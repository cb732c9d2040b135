"""The DSL's layout algebra, each result verified to be the function that it claims to be.

Arguments and results are the DSL's. The DSL (4.8.1) returns wrong layouts without a word for some inputs, and
divides by zero or aborts the process for others. So static layouts are derived here on Python integers, then
verified over all coordinates, and only then built. What has no answer raises `LayoutError`: where it goes
wrong, the value there and the value required, and what would work.

- A tiler is a layout, an integer n (the layout n:1), or a tuple of tilers, one a mode; None leaves it whole.
- A composed layout (a swizzle's, for one) is taken as first argument: the operation is on its `outer`
  layout, because inner(offset + A(B(c))) needs A o B alone. As second argument it is refused.
- Above 2^24 coordinates nothing is tabulated: a composition is accepted where no index carries from one mode
  of A into the next, a recast where whole modes merge, both proofs; the others are exact by construction.
- Sizes or strides that are known only when a kernel runs pass to the DSL unverified, except in
  `right_inverse`, which the DSL refuses.
- Layouts whose strides are basis elements (identity layouts) are refused.
"""

from collections.abc import Callable
from itertools import zip_longest
from math import gcd, prod
from operator import index
from typing import Any

import cutlass.cute as cute
import numpy as np

from cutelab.layouts import derivation as d
from cutelab.layouts.derivation import ONE, TABULATED, Mode, Tree, text
from cutelab.layouts.errors import LayoutError

Layout = Any  # cute.Layout | cute.ComposedLayout
Tiler = Any  # cute.Layout | int | tuple of tilers | None


# --- From the DSL's objects and back


def _tree(operation: str, layout: Any) -> Tree:
    if not isinstance(layout, cute.Layout):
        raise LayoutError(
            operation, f"{layout!r} is not a layout", nearest="cute.make_layout makes one of a shape"
        )

    def pair(shape: Any, stride: Any) -> Tree:
        if isinstance(shape, tuple):
            return [pair(s, t) for s, t in zip(shape, stride, strict=True)]
        if not isinstance(stride, int):
            raise LayoutError(
                operation,
                f"{layout} has strides that are not integers",
                nearest="apply it to a layout of integers, then to the coordinates it gives",
            )
        return Mode(shape, stride)

    return pair(layout.shape, layout.stride)


def _built(operation: str, tree: Tree) -> cute.Layout:
    reach = sum((n - 1) * abs(stride) for n, stride in d.flat(tree))
    if max(reach, d.size(tree)) >= 1 << 63:
        raise LayoutError(
            operation, f"{text(tree)} does not fit into 64 bits", nearest="sizes and strides below 2^31"
        )

    def part(node: Tree, which: int) -> Any:
        return node[which] if isinstance(node, Mode) else tuple(part(child, which) for child in node)

    return cute.make_layout(part(tree, 0), stride=part(tree, 1))


def _static(*args: Any) -> bool:
    return all(cute.is_static(arg) for arg in args if isinstance(arg, (cute.Layout, cute.ComposedLayout)))


def _apply(operation: str, layout: Layout, derive: Callable[[Tree], Tree], *others: Any) -> Layout:
    """`derive` of a layout, or of a composed layout's outer one; dynamic ones go to the DSL."""
    outer = layout.outer if isinstance(layout, cute.ComposedLayout) else layout
    if not isinstance(outer, cute.Layout):
        _tree(operation, outer)
    if not _static(outer, *_leaves(others)):
        return getattr(cute, operation)(layout, *others)
    result = _built(operation, derive(_tree(operation, outer)))
    if isinstance(layout, cute.ComposedLayout):
        result = cute.make_composed_layout(layout.inner, layout.offset, result)
    d.note("= {}", result)
    return result


def _leaves(x: Any) -> list[Any]:
    return [leaf for child in x for leaf in _leaves(child)] if isinstance(x, tuple) else [x]


def _positive(operation: str, value: Any, what: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 63:
        return value
    raise LayoutError(
        operation, f"{what} {value!r} is not a positive integer below 2^63", nearest="1 is the smallest"
    )


def _tiler(operation: str, tiler: Tiler) -> Tree:
    """A tiler that is no tuple: a layout, or n for n:1."""
    return (
        _tree(operation, tiler)
        if isinstance(tiler, cute.Layout)
        else Mode(_positive(operation, tiler, "tiler"), 1)
    )


def _pairs(operation: str, a: Tree, tiler: tuple) -> list[tuple[Tree, Tiler]]:
    """Each mode with its tiler; None for those that are left whole."""
    if not isinstance(a, list) or not 0 < len(tiler) <= len(a):
        rank = len(a) if isinstance(a, list) else 1
        raise LayoutError(
            operation,
            f"a tiler of rank {len(tiler)} for {text(a)}, of rank {rank}",
            nearest=f"a tuple of 1 to {rank} tilers, or a layout, would do",
        )
    return list(zip_longest(a, tiler))


# --- Composition


def composition(lhs: Layout, rhs: Tiler) -> Layout:
    """A o B: the R with R(c) = A(B(c)) for every coordinate c of B, whose shape refines B's.

    Beyond A's end its last mode goes on, as everywhere in CuTe. There is such an R exactly if each mode of
    B gives a layout and their sum is the whole; it is unique up to coalescing. A tuple composes mode by mode,
    and A's further modes are left out, as in the DSL.
    """
    return _apply("composition", lhs, lambda a: _composition(a, rhs), rhs)


def _composition(a: Tree, rhs: Tiler) -> Tree:
    if isinstance(rhs, tuple):
        pairs = _pairs("composition", a, rhs)[: len(rhs)]
        return [m if t is None else _composition(m, t) for m, t in pairs]
    return _composed(a, _tiler("composition", rhs))


def _composed(a: Tree, b: Tree) -> Tree:
    d.note("{} o {}, mode by mode of the second:", a, b)
    result = d.compose(a, b)
    if d.size(b) > TABULATED:
        if not d.never_carries(a, b):
            raise LayoutError(
                "composition",
                f"{text(b)} has too many coordinates to verify {text(a)} o {text(b)} at each",
                nearest=f"at most {TABULATED} coordinates, or modes whose indices do not carry into another",
            )
        return result
    inner = d.table(b)
    if inner.min() < 0 and len(d.flat(a)) > 1:
        where = int(inner.argmin())
        raise LayoutError(
            "composition",
            f"{text(b)} gives indices below 0",
            coordinate=d.coordinate(b, where),
            got=int(inner[where]),
            required="an index of at least 0",
            nearest="positive strides",
        )
    got, required = d.table(result), d.at(a, inner)
    wrong = got != required
    if wrong.any():
        where = int(wrong.argmax())
        raise LayoutError(
            "composition",
            f"no layout of shape {text(b).split(':')[0]} expresses {text(a)} o {text(b)}: "
            f"{text(result)}, right along each mode, is wrong",
            coordinate=d.coordinate(b, where),
            got=int(got[where]),
            required=int(required[where]),
            nearest="cute.make_composed_layout(a, 0, b) is that function",
        )
    return result


# --- Complement and inverses


def complement(input: Layout, cotarget: Any) -> cute.Layout:
    """A*: every k of [0, cotarget) is A(c) + A*(c*) for exactly one offset A(c) and one c*.

    A* has positive, ascending strides and reaches past the cotarget by less than A's extent; modes of A with
    stride 0 do not count. `cotarget` is a shape or a layout: its size counts.
    """
    if isinstance(input, cute.Layout) and not _static(input, cotarget):
        return cute.complement(input, cotarget)
    if isinstance(cotarget, cute.Layout):
        target = d.size(_tree("complement", cotarget))
    else:
        target = prod(_positive("complement", n, "cotarget") for n in _leaves(cotarget))
    tree = _complement(_tree("complement", input), target)
    d.note("= {}", tree)
    return _built("complement", tree)


def _complement(a: Tree, target: int) -> Tree:
    d.note("complement of {} in {}:", a, target)
    result = d.complement(a, target)
    kept = [mode for mode in d.flat(a) if mode.stride]
    total = d.size(kept) * d.size(result)
    if total <= TABULATED:
        sums = (d.table(kept)[:, None] + d.table(result)).ravel()
        counts = np.bincount(sums, minlength=max(target, total))
        if (counts != 1).any():
            k = int((counts != 1).argmax())
            raise LayoutError(
                "complement",
                f"{text(result)} does not complement {text(a)}",
                coordinate=k,
                got=int(counts[k]),
                required=1,
                nearest="an injective layout would do",
            )
    return result


def right_inverse(input: Layout) -> cute.Layout:
    """R with A(R(i)) = i for every i < size(R), made of whole modes of the coalesced A; no such R is longer.

    For an injective A no layout whatever has a longer run. A dynamic size is allowed where it ends the run.
    """
    if isinstance(input, cute.Layout) and not _static(input):
        return _dynamic_right_inverse(input)
    a = _tree("right_inverse", input)
    d.note("right inverse of {}: from stride 1 on, the mode whose stride is what is covered so far", a)
    return _verified_inverse("right_inverse", a, d.right_inverse(a), right=True)


def _dynamic_right_inverse(a: cute.Layout) -> cute.Layout:
    shape, stride = cute.flatten_to_tuple(a.shape), cute.flatten_to_tuple(a.stride)
    positions: list[Any] = [1]
    for n in shape:
        positions.append(positions[-1] * n)
    sizes, strides, covered = [], [], 1
    while isinstance(covered, int):
        found = [
            i
            for i, (n, t) in enumerate(zip(shape, stride, strict=True))
            if isinstance(t, int) and t == covered and not (isinstance(n, int) and n == 1)
        ]
        if not found:
            break
        sizes.append(shape[found[0]])
        strides.append(positions[found[0]])
        covered = covered * shape[found[0]]
    return cute.make_layout(tuple(sizes) or 1, stride=tuple(strides) or 0)


def left_inverse(input: Layout) -> cute.Layout:
    """L with L(A(i)) = i for every i < size(A); A is injective and its sorted strides divide one another."""
    if isinstance(input, cute.Layout) and not _static(input):
        return cute.left_inverse(input)
    a = _tree("left_inverse", input)
    d.note("left inverse of {}: the digits of an offset, by ascending stride", a)
    return _verified_inverse("left_inverse", a, d.left_inverse(a), right=False)


def _verified_inverse(operation: str, a: Tree, inverse: Tree, right: bool) -> cute.Layout:
    first, second = (inverse, a) if right else (a, inverse)
    if d.size(first) <= TABULATED:
        values = d.at(second, d.table(first))
        wrong = values != np.arange(len(values))
        if wrong.any():
            i = int(wrong.argmax())
            raise LayoutError(
                operation,
                f"{text(a)} has no such inverse: {text(inverse)} is wrong",
                coordinate=i,
                got=int(values[i]),
                required=i,
                nearest="an injective layout would do",
            )
    elif not right:
        reach = 0
        for mode in sorted(d.flat(a), key=lambda mode: mode.stride):
            if mode.size > 1 and mode.stride <= reach:
                raise LayoutError(
                    operation, f"{text(a)} is not injective", nearest=f"stride {reach + 1} would do"
                )
            reach += (mode.size - 1) * mode.stride
    d.note("= {}", inverse)
    return _built(operation, inverse)


# --- Divide


def logical_divide(target: Layout, tiler: Tiler) -> Layout:
    """A o (B, complement(B, size(A))): mode 0 is a tile, mode 1 runs over the tiles.

    Where the tiles do not come out even, the last ones reach past A's end, where A's last mode goes on:
    `predicate` tells which coordinates lie inside.
    """
    return _apply("logical_divide", target, lambda a: _logical(a, tiler, "logical_divide"), tiler)


def zipped_divide(target: Layout, tiler: Tiler) -> Layout:
    """`logical_divide` by modes, with the tile's modes gathered and the rest's: (tile, rest)."""
    return _apply("zipped_divide", target, lambda a: list(_zipped(a, tiler, "zipped_divide")), tiler)


def tiled_divide(target: Layout, tiler: Tiler) -> Layout:
    """`zipped_divide` with the rest's modes unpacked: (tile, rest...)."""
    return _apply(
        "tiled_divide", target, lambda a: _unpacked(_zipped(a, tiler, "tiled_divide"), flat=False), tiler
    )


def flat_divide(target: Layout, tiler: Tiler) -> Layout:
    """`zipped_divide` with both modes unpacked: (tile..., rest...)."""
    return _apply(
        "flat_divide", target, lambda a: _unpacked(_zipped(a, tiler, "flat_divide"), flat=True), tiler
    )


def _divide(a: Tree, tiler: Tiler, operation: str) -> list[Tree]:
    if tiler is None:
        return [a, ONE]
    b = _tiler(operation, tiler)
    rest = _complement(b, d.size(a))
    result = _composed(a, [b, rest])
    touched = d.last_offset([b, rest]) + 1
    if touched > d.size(a):
        d.note(
            "  indices up to {} of {}: predicate(target, tiler) tells which are inside",
            touched - 1,
            d.size(a),
        )
    return result


def _logical(a: Tree, tiler: Tiler, operation: str) -> Tree:
    if isinstance(tiler, tuple):
        return [m if t is None else _logical(m, t, operation) for m, t in _pairs(operation, a, tiler)]
    return _divide(a, tiler, operation)


def _zipped(a: Tree, tiler: Tiler, operation: str) -> tuple[Tree, Tree]:
    if not isinstance(tiler, tuple):
        tile, rest = _divide(a, tiler, operation)
        return tile, rest
    pairs = [_zipped(m, t, operation) for m, t in _pairs(operation, a, tiler)[: len(tiler)]]
    return [tile for tile, _ in pairs], [*(rest for _, rest in pairs), *a[len(tiler) :]]


def _unpacked(parts: Any, flat: bool) -> list[Tree]:
    first, second = parts
    seconds = second if isinstance(second, list) else [second]
    return [*(first if flat and isinstance(first, list) else [first]), *seconds]


def predicate(target: Layout, tiler: Tiler) -> np.ndarray:
    """Which coordinates (tile, rest) of ``zipped_divide(target, tiler)`` lie inside the target.

    A boolean array with an axis for each, all true where the tiles come out even.
    """
    outer = target.outer if isinstance(target, cute.ComposedLayout) else target
    return _inside(_tree("predicate", outer), tiler)


def _inside(a: Tree, tiler: Tiler) -> np.ndarray:
    if tiler is None:
        return np.ones((d.size(a), 1), bool)
    if not isinstance(tiler, tuple):
        b = _tiler("predicate", tiler)
        rest = _complement(b, d.size(a))
        return d.table(b)[:, None] + d.table(rest) < d.size(a)
    inside = np.ones((1, 1), bool)
    for m, t in _pairs("predicate", a, tiler):
        mode = _inside(m, t) if t is not None else np.ones((1, d.size(m)), bool)
        both = mode[:, None, :, None] & inside[None, :, None, :]  # the first mode varies fastest
        inside = both.transpose(1, 0, 3, 2).reshape(
            (inside.shape[0] * mode.shape[0], inside.shape[1] * mode.shape[1]), order="F"
        )
    return inside


# --- Product


def logical_product(block: Layout, tiler: Tiler) -> Layout:
    """(A, A* o B) with A* = complement(A, size(A) cosize(B)): A repeated as B says, the copies disjoint."""
    return _apply("logical_product", block, lambda a: _by_mode_product(a, tiler), tiler)


def _by_mode_product(a: Tree, tiler: Tiler) -> Tree:
    if isinstance(tiler, tuple):
        return [m if t is None else _by_mode_product(m, t) for m, t in _pairs("logical_product", a, tiler)]
    return _product(a, _tiler("logical_product", tiler))


def _product(a: Tree, b: Tree) -> list[Tree]:
    return [a, _composed(_complement(a, d.size(a) * (d.last_offset(b) + 1)), b)]


def zipped_product(block: Layout, tiler: Layout) -> Layout:
    """`logical_product` of layouts: (block, repetitions)."""
    return _apply("zipped_product", block, lambda a: _product(a, _tiler("zipped_product", tiler)), tiler)


def tiled_product(block: Layout, tiler: Layout) -> Layout:
    """`logical_product` with the tiler's modes unpacked: (block, repetitions...)."""
    return _apply(
        "tiled_product",
        block,
        lambda a: _unpacked(_product(a, _tiler("tiled_product", tiler)), flat=False),
        tiler,
    )


def flat_product(block: Layout, tiler: Layout) -> Layout:
    """`logical_product` with both modes unpacked: (block..., repetitions...)."""
    return _apply(
        "flat_product",
        block,
        lambda a: _unpacked(_product(a, _tiler("flat_product", tiler)), flat=True),
        tiler,
    )


def blocked_product(block: Layout, tiler: Layout) -> Layout:
    """`logical_product` mode by mode, ((block 0, tiler 0), ...): neighbours in a block stay neighbours."""
    return _apply(
        "blocked_product",
        block,
        lambda a: [list(pair) for pair in _by_rank(a, _tiler("blocked_product", tiler))],
        tiler,
    )


def raked_product(block: Layout, tiler: Layout) -> Layout:
    """`logical_product` mode by mode, ((tiler 0, block 0), ...): the blocks interleave."""
    return _apply(
        "raked_product",
        block,
        lambda a: [[t, b] for b, t in _by_rank(a, _tiler("raked_product", tiler))],
        tiler,
    )


def _by_rank(a: Tree, b: Tree) -> list[tuple[Tree, Tree]]:
    a, b = (tree if isinstance(tree, list) else [tree] for tree in (a, b))
    rank = max(len(a), len(b))
    a, b = ([*tree, *[ONE] * (rank - len(tree))] for tree in (a, b))
    return list(zip(*_product(a, b), strict=True))


def tile_to_shape(atom: Layout, trg_shape: Any, order: Any) -> Layout:
    """The atom repeated until each mode has the size asked for; the repeats lie in memory in `order`.

    Mode i of the result is (atom's mode i, repeats), by `blocked_product`. The atom has to divide the shape.
    """
    shape = tuple(trg_shape) if isinstance(trg_shape, tuple) else (trg_shape,)
    return _apply("tile_to_shape", atom, lambda a: _tiled(a, shape, order), trg_shape, order)


def _tiled(a: Tree, shape: tuple, order: Any) -> Tree:
    target = [prod(_positive("tile_to_shape", n, "size") for n in _leaves(mode)) for mode in shape]
    ranks = _leaves(order)
    modes = a if isinstance(a, list) else [a]
    modes = [*modes, *[ONE] * (len(target) - len(modes))]
    block = [d.size(mode) for mode in modes]
    if len(block) != len(target) or any(n % b for n, b in zip(target, block, strict=True)):
        fits = tuple(-(-n // b) * b for n, b in zip(target, block, strict=False))
        raise LayoutError(
            "tile_to_shape",
            f"an atom of shape {tuple(block)} does not divide the shape {tuple(target)}",
            nearest=f"{fits} would do",
        )
    if len(ranks) != len(target) or not all(isinstance(r, int) for r in ranks):
        raise LayoutError(
            "tile_to_shape",
            f"order {order!r} does not rank the {len(target)} modes of {tuple(target)}",
            nearest=f"{tuple(range(len(target)))} would do",
        )
    repeats, stride = [n // b for n, b in zip(target, block, strict=True)], 1
    tiler: list[Tree] = [ONE] * len(target)
    for i in sorted(range(len(target)), key=lambda i: ranks[i]):
        tiler[i] = Mode(repeats[i], stride if repeats[i] > 1 else 0)
        stride *= repeats[i]
    return [list(pair) for pair in _by_rank(modes, tiler)]


# --- Coalesce, recast, swizzle


def coalesce(input: Layout, *, target_profile: Any = None) -> Layout:
    """The same function with the fewest modes; with a profile, of each of its modes, which stay apart."""
    if isinstance(input, (cute.Layout, cute.ComposedLayout)) and not _static(
        input.outer if isinstance(input, cute.ComposedLayout) else input
    ):
        return cute.coalesce(input, target_profile=target_profile)
    return _apply("coalesce", input, lambda a: _coalesced(a, target_profile))


def _coalesced(a: Tree, profile: Any) -> Tree:
    if isinstance(profile, tuple) and profile:
        return [m if p is None else _coalesced(m, p) for m, p in _pairs("coalesce", a, profile)]
    return d.coalesce(a)


def recast_layout(new_type_bits: int, old_type_bits: int, src_layout: Layout) -> Layout:
    """The layout of the same bits in elements of another width.

    The elements of the result cover exactly the bits that those of `src_layout` cover.
    """
    new, old = (_positive("recast_layout", bits, "width") for bits in (new_type_bits, old_type_bits))
    up, down = new // gcd(new, old), old // gcd(new, old)
    if not isinstance(src_layout, cute.ComposedLayout):
        if isinstance(src_layout, cute.Layout) and not _static(src_layout):
            return cute.recast_layout(new, old, src_layout)
        return _apply("recast_layout", src_layout, lambda a: _recast(a, up, down))
    inner, offset = src_layout.inner, src_layout.offset
    if not isinstance(inner, cute.Swizzle):
        raise LayoutError(
            "recast_layout", f"{inner} is not a swizzle", nearest="recast the composition's result"
        )
    outer = _apply("recast_layout", src_layout.outer, lambda a: _recast(a, up, down))
    base = inner.num_base - up.bit_length() + down.bit_length()
    exact = not (up & (up - 1) or down & (down - 1) or offset % up)
    if inner.num_bits and (base < 0 or not exact):
        raise LayoutError(
            "recast_layout",
            f"{src_layout} moves pieces of an element of {new} bits",
            nearest=f"at most {old << inner.num_base} bits, a power of two times {old}, would do",
        )
    return cute.make_composed_layout(
        make_swizzle(inner.num_bits, base if inner.num_bits else 4, inner.num_shift),
        offset // up * down,
        outer,
    )


def _recast(a: Tree, up: int, down: int) -> Tree:
    result = d.recast(a, up, down)
    if max(d.size(a) * down, d.size(result) * up) <= TABULATED:
        before = np.unique((d.table(a)[:, None] * down + np.arange(down)).ravel())
        after = np.unique((d.table(result)[:, None] * up + np.arange(up)).ravel())
        if not np.array_equal(before, after):
            where = int(np.setxor1d(before, after)[0])
            raise LayoutError(
                "recast_layout",
                f"{text(result)} does not cover what {text(a)} covers",
                coordinate=where,
                got=where in after,
                required=where in before,
                nearest=f"a contiguous run of a multiple of {up} elements would do",
            )
    elif (
        any(n * t % up for n, t in d.flat(a) if t % up)
        or sum(n > 1 and t % up != 0 for n, t in d.flat(a)) > 1
    ):
        raise LayoutError(
            "recast_layout",
            f"{text(a)} has too many coordinates to verify that {up} elements always merge",
            nearest=f"at most {TABULATED} coordinates, or strides that {up} divides but for one mode",
        )
    return result


def make_swizzle(b: int, m: int, s: int) -> cute.Swizzle:
    """S<b,m,s>; the DSL turns what is none into the identity without a word."""
    try:
        b, m, s = index(b), index(m), index(s)
    except TypeError:
        b, m, s = -1, 0, 0
    if not (0 <= b <= abs(s) and m >= 0 and b + m + abs(s) <= 32):
        raise LayoutError(
            "make_swizzle",
            f"S<{b},{m},{s}> is not a swizzle",
            nearest="0 <= bits <= |shift|, base >= 0 and bits + base + |shift| <= 32 would do",
        )
    return cute.make_swizzle(b, m, s)


# --- Explain


class Derivation:
    """The steps of an operation and its verified result, or the error that refused it; `str` prints them."""

    def __init__(self, steps: list[str], result: Layout | LayoutError) -> None:
        self.steps = steps
        self.result = result

    def __str__(self) -> str:
        last = [f"refused: {self.result}"] if isinstance(self.result, LayoutError) else []
        return "\n".join([*self.steps, *last])

    __repr__ = __str__


def explain(operation: str | Callable[..., Layout], *args: Any, **kwargs: Any) -> Derivation:
    """Run an operation of this module and show the steps: ``explain("composition", a, b)``."""
    name = operation if isinstance(operation, str) else operation.__name__
    if name not in OPERATIONS:
        raise LayoutError(
            "explain", f"there is no operation {name!r}", nearest=f"one of {', '.join(OPERATIONS)}"
        )
    steps: list[str] = []
    token = d._steps.set(steps)
    try:
        result: Layout | LayoutError = OPERATIONS[name](*args, **kwargs)
    except LayoutError as error:
        result = error
    finally:
        d._steps.reset(token)
    return Derivation(steps, result)


OPERATIONS: dict[str, Callable[..., Layout]] = {
    f.__name__: f
    for f in (
        composition, complement, right_inverse, left_inverse, coalesce, recast_layout, tile_to_shape,
        logical_divide, zipped_divide, tiled_divide, flat_divide,
        logical_product, zipped_product, tiled_product, flat_product, blocked_product, raked_product,
    )
}  # fmt: skip
