"""The layout algebra on Python integers, and the record of how a result came about.

A layout is a tree: a leaf is a `Mode` (size, stride), a node a list of trees. The functions here derive;
`cutelab.layouts.checked` verifies what they give against its promise, and is what users call. Nothing here
calls the DSL's own algebra, which ends the process for some inputs.
"""

from collections.abc import Callable
from contextvars import ContextVar
from itertools import accumulate, compress, count, pairwise, takewhile
from math import prod
from operator import add, mul, not_, sub
from typing import Any, NamedTuple

import numpy as np

from cutelab.layouts.errors import LayoutError

TABULATED = 1 << 24  # the most coordinates that are tabulated: 128 MiB of offsets
DECIDED = 1 << 12  # the most offsets for which inverses are searched: seconds at worst


class Unknown:
    """An integer known only when a kernel runs: a result may be computed from it, not depend on it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __mul__(self, other: Any) -> Any:
        return other and self if isinstance(other, int) and other in (0, 1) else self._apply(mul, other)

    def __add__(self, other: Any) -> "Unknown":
        return self._apply(add, other)

    def __sub__(self, other: Any) -> "Unknown":
        return self._apply(sub, other)

    def _apply(self, operator: Callable[[Any, Any], Any], other: Any) -> "Unknown":
        if not isinstance(other, (int, Unknown)):
            self._refuse()
        return Unknown(operator(self.value, getattr(other, "value", other)))

    def _refuse(self, *_: Any) -> Any:
        problem = "the answer depends on a size or stride that is known only when a kernel runs"
        raise LayoutError("", problem, "static ones, or each mode with its own tiler, would do")

    __array_ufunc__ = None  # NumPy leaves arithmetic with its arrays to the methods here
    __rmul__, __radd__ = __mul__, __add__
    __lt__ = __le__ = __gt__ = __ge__ = __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = _refuse
    __abs__ = __neg__ = __bool__ = __int__ = __index__ = _refuse

    def __str__(self) -> str:
        return "?"


class Mode(NamedTuple):
    size: Any  # int | Unknown, and so the stride
    stride: Any


Tree = Any  # Mode | list[Tree]; mypy has no recursive alias for lists in 3.10 syntax
ONE = Mode(1, 0)

steps: ContextVar[list[str] | None] = ContextVar("steps", default=None)


def note(template: str, *values: Any) -> None:
    """Record a step of the derivation, if `explain` listens; trees are written in CuTe's notation."""
    listening = steps.get()
    if listening is not None:
        listening.append(template.format(*(text(v) if isinstance(v, (Mode, list)) else v for v in values)))


def flat(tree: Tree) -> list[Mode]:
    """The leaves, first mode first."""
    return [tree] if isinstance(tree, Mode) else [mode for child in tree for mode in flat(child)]


def modes(tree: Tree) -> list[Tree]:
    return [tree] if isinstance(tree, Mode) else tree


def size(tree: Tree) -> Any:
    return prod(mode.size for mode in flat(tree))


def known(tree: Tree) -> bool:
    return all(isinstance(n, int) for mode in flat(tree) for n in mode)


def tabulated(tree: Tree, times: int = 1) -> bool:
    """Whether a table of the coordinates, `times` times as long, can be made and is small enough."""
    return known(tree) and size(tree) * times <= TABULATED


def last_offset(tree: Tree) -> Any:
    """The largest offset."""
    return sum((mode.size - 1) * max(mode.stride, 0) for mode in flat(tree))


def text(tree: Tree) -> str:
    """The layout in CuTe's notation."""

    def part(node: Tree, which: int) -> str:
        leaf = isinstance(node, Mode)
        return str(node[which]) if leaf else f"({','.join(part(child, which) for child in node)})"

    return f"{part(tree, 0)}:{part(tree, 1)}"


def grouped(tree: list[Mode]) -> Tree:
    """One leaf as itself, none as 1:0, several as a node."""
    return list(tree) if len(tree) > 1 else tree[0] if tree else ONE


def table(tree: Tree) -> np.ndarray:
    """The offset at every linear index."""
    offsets = np.zeros(1, np.int64)
    for n, stride in flat(tree):
        offsets = (offsets + stride * np.arange(n, dtype=np.int64)[:, None]).ravel()
    return offsets


def at(tree: Tree, index: np.ndarray) -> np.ndarray:
    """The offsets at linear indices; beyond the end the last mode goes on, as in CuTe."""
    if 0 <= index.min() <= index.max() < size(tree) <= max(TABULATED >> 4, 4 * index.size):
        return table(tree)[index]
    *first, (_, last_stride) = flat(tree) or [ONE]
    offsets = np.zeros_like(index)
    for n, stride in first:
        index, digit = np.divmod(index, n)
        offsets += digit * stride
    return offsets + index * last_stride


def coordinate(tree: Tree, index: Any) -> Any:
    """The coordinate of a linear index, in the profile of the layout."""
    if isinstance(tree, Mode):
        return index
    coord = []
    for child in tree:
        coord.append(coordinate(child, index % size(child)))
        index //= size(child)
    return tuple(coord)


def coalesce(tree: Tree) -> Tree:
    """The same function with the fewest modes; a mode whose size is not known stays one."""
    merged: list[Mode] = []
    for mode in flat(tree):
        if mode.size == 1:
            continue
        if merged and known([merged[-1], mode]) and mode.stride == merged[-1].size * merged[-1].stride:
            merged[-1] = Mode(merged[-1].size * mode.size, merged[-1].stride)
        else:
            merged.append(mode)
    return grouped(merged)


# --- composition


def compose(a: Tree, b: Tree) -> Tree:
    """A o B mode by mode of B; what the modes give together is for the caller to verify."""
    a = flat(a) or [ONE]

    def along(mode: Tree, weight: Any) -> Tree:  # neighbours in this mode lie `weight` apart in B's order
        if isinstance(mode, list):
            weights = accumulate(map(size, mode[:-1]), mul, initial=weight)
            return [along(child, w) for child, w in zip(mode, weights, strict=False)]
        division = _divide(a, mode)
        if division is None:
            return grouped(_by_values(a, mode, lambda index: coordinate(b, index * weight)))
        if mode.size == 1 or mode.stride == 0:
            return Mode(mode.size, 0)
        divided, kept = division
        result = coalesce([part for _, _, part in kept])
        note("  {}: {} / {} = {}, its first {}: {}", mode, a, mode.stride, divided, mode.size, result)
        return result

    return along(b, 1)


def _divide(a: list[Mode], b: Mode) -> tuple[list[Mode], list[tuple[int, Any, Mode]]] | None:
    """CuTe's rule, a proof where it applies: divide A's shape by B's stride, then keep B's size of it.

    Gives the divided modes and, for each mode of A that is walked, its number, the largest coordinate used of
    it, and the mode kept. None where a division leaves a remainder.
    """
    if b.size == 1 or b.stride == 0:
        return [], []
    if b.stride < 0:
        return None
    divided, kept, stride, n = [], [], b.stride, b.size
    for k, (s, step) in enumerate(a[:-1]):
        if stride % s == 0:
            stride //= s
            divided.append(ONE)
            continue
        if s % stride:
            return None
        left, step = s // stride, step * stride
        taken = min(n, left)
        if n % taken:
            return None
        divided.append(Mode(left, step))
        kept.append((k, stride * (taken - 1), Mode(taken, step)))
        n //= taken
        stride = 1
    last = a[-1].stride * stride
    divided.append(Mode(ceil_div(a[-1].size, stride), last))
    kept.append((len(a) - 1, (n - 1) * stride, Mode(n, last)))
    return divided, kept


def ceil_div(n: Any, by: Any) -> Any:
    if isinstance(n, Unknown) and isinstance(by, int):
        return n if by == 1 else Unknown((n.value + (by - 1)) // by)
    return -(-n // by)


def never_carries(a: Tree, b: Tree) -> bool:
    """Whether what B's modes use of each mode of A adds up to less than its size: a proof of `compose`."""
    sizes = [mode.size for mode in flat(a) or [ONE]]
    used: list[Any] = [0] * len(sizes)
    for mode in flat(b):
        division = _divide(flat(a) or [ONE], mode)
        if division is None:
            return False
        for k, most, _ in division[1]:
            used[k] += most
    return all(most < n for most, n in zip(used[:-1], sizes[:-1], strict=True))


def _by_values(a: list[Mode], b: Mode, witness: Callable[[int], Any]) -> list[Mode]:
    """A o B for one mode of B, decided by its values; `witness` is the coordinate of an index.

    As a function g of the index, the longest linear prefix of g is the first mode of any layout of g, up to
    coalescing: its length divides the size, and g(i) = g(i mod length) + g'(i div length), with g' alike.
    """
    if b.stride < 0 and len(a) == 1:
        return [Mode(b.size, b.stride * a[0].stride)]
    if b.stride < 0:
        problem = f"{text(b)} gives indices below 0, where {text(a)} has no value"
        nearest = f"{b.size}:{-b.stride} would do, read backwards"
        raise LayoutError("composition", problem, nearest, witness(1), b.stride, 0)
    if not (known(a) and tabulated(b)):
        raise LayoutError(
            "composition",
            f"{text(b)} has too many coordinates, or unknown ones, to decide whether it divides {text(a)}",
            f"a size and stride that divide {text(a)} mode by mode, or at most {TABULATED}",
        )
    values = at(a, np.arange(b.size, dtype=np.int64) * b.stride)
    pieces, every = [], 1
    while len(values) > 1:
        line = values[1] * np.arange(len(values))
        length = int((values != line).argmax()) or len(values)
        where = 0 if len(values) % length == 0 else length
        if not where:
            rows = values.reshape(-1, length)
            line = (rows[:, :1] + line[:length]).ravel()
            where = int((values != line).argmax())
        if where:
            raise LayoutError(
                "composition",
                f"no layout of shape {b.size} expresses {text(a)} o {text(b)}",
                f"{length * every}:{b.stride} would do, or cute.make_composed_layout, which composes any two",
                witness(where * every),
                int(line[where]),
                int(values[where]),
            )
        pieces.append(Mode(length, int(values[1])))
        values, every = rows[:, 0], every * length
    note("  {}: {} does not divide {} mode by mode; by its values: {}", b, b.stride, a, grouped(pieces))
    return pieces


# --- complement and inverses


def complement(a: Tree, cotarget: Any) -> Tree:
    """A's modes by stride: a gap between two becomes a mode, and so does what remains up to `cotarget`."""
    by_stride = sorted((stride, n) for n, stride in flat(coalesce(a)) if n > 1 and stride)
    note("  by stride, without strides of 0: {}", grouped([Mode(n, stride) for stride, n in by_stride]))
    gaps, covered = [], 1
    for stride, n in by_stride:
        if stride < 0 or stride % covered:
            why = f"does not tile: a stride is no multiple of the {covered} offsets that smaller ones span"
            legal = max(ceil_div(stride, covered), 1) * covered
            nearest = f"stride {legal} in place of {stride} would do"
            raise LayoutError("complement", f"{text(a)} {why}", nearest, None, stride, legal)
        if stride > covered:
            note("  {}:{} leaves the gap {}:{}", n, stride, stride // covered, covered)
        gaps.append(Mode(stride // covered, covered))
        covered = n * stride
    rest = ceil_div(cotarget, covered)
    note("  {} offsets, {} times up to {}: {}", covered, rest, cotarget, Mode(rest, covered))
    return coalesce([*gaps, Mode(rest, covered)])


def _with_positions(a: Tree) -> list[tuple[Mode, Any]]:
    """The modes of the coalesced A, each with its weight in A's order."""
    merged = flat(coalesce(a))
    weights = accumulate((mode.size for mode in merged), mul, initial=1)
    return [(mode, weight) for mode, weight in zip(merged, weights, strict=False) if mode.size != 1]


def right_inverse(a: Tree) -> Tree:
    """The longest chain of whole modes, each with the stride that the modes before it span."""

    def chain(covered: Any, left: list[tuple[Mode, Any]]) -> list[tuple[Mode, Any]]:
        chains = [
            [link, *chain(covered * link[0].size, [other for other in left if other is not link])]
            for link in left
            if link[0].stride == covered
        ]
        return max(chains, key=lambda links: prod(mode.size for mode, _ in links), default=[])

    links = chain(1, _with_positions(a))
    for mode, weight in links:
        note("  {} lies at {} in A's order", mode, weight)
    return coalesce([Mode(mode.size, weight) for mode, weight in links])


def longest_right_inverse(a: Tree, best: Tree) -> Tree:
    """The longest R with A(R(i)) = i, `best` if no other is longer: every mode that can follow is tried.

    R(i) = d where A(d) = i, so the stride of the mode that follows the first w values is one of the d with
    A(d) = w. Two R of the same values are one; no R passes the first offset that A never takes.
    """
    offsets = table(a)
    taken: dict[int, list[int]] = {}
    for index, offset in enumerate(offsets.tolist()):
        taken.setdefault(offset, []).append(index)
    run = next(n for n in count() if n not in taken)
    seen = set()

    def extend(found: list[Mode], values: np.ndarray) -> None:
        nonlocal best
        w = len(values)
        if w > size(best):
            best = grouped(found)
        following = []
        for stride in taken.get(w, []):
            rows = values + stride * np.arange(run // w)[:, None]
            right = offsets.take(rows, mode="clip") == np.arange(rows.size).reshape(rows.shape)
            wrong = ~(right & (rows < len(offsets))).all(axis=1)
            most = int(wrong.argmax()) or len(rows)
            following += [Mode(n, stride) for n in range(2, most + 1)]
        for mode in sorted(following, reverse=True):
            longer = flat(coalesce([*found, mode]))
            if run // (w * mode.size) * w * mode.size > size(best) and tuple(longer) not in seen:
                seen.add(tuple(longer))
                extend(longer, (values + mode.stride * np.arange(mode.size)[:, None]).ravel())

    extend([], np.zeros(1, np.int64))
    note("  no other is longer than {}: no layout passes offset {}", best, run)
    return best


def left_inverse(a: Tree) -> Tree:
    """An offset's digits in the weights that A's strides are; right where `is_mixed_radix`."""
    digits, covered, position = [], 1, 0
    by_stride = sorted((mode.stride, weight, mode.size) for mode, weight in _with_positions(a))
    for stride, weight, n in by_stride:
        digits.append(Mode(max(stride // covered, 1), position))
        covered, position = stride, weight
        note("  {}:{} is the digit of weight {}, {} in A's order", n, stride, stride, weight)
    return coalesce([*digits, Mode(by_stride[-1][2] if by_stride else 1, position)])


def is_mixed_radix(a: Tree) -> bool:
    """Whether, by ascending stride, each stride is a multiple of the one before and not within its span."""
    by_stride = sorted((mode.stride, mode.size) for mode, _ in _with_positions(a))
    return all(low > 0 and high % low == 0 and n * low <= high for (low, n), (high, _) in pairwise(by_stride))


def any_left_inverse(a: Tree) -> Tree | None:
    """Any L with L(A(i)) = i, or None if there is none.

    A layout of sizes s0, s1, ... is the sum of e_k floor(x / w_k) with w_k = s0 ... s_(k-1) and integers e_k,
    the unknowns of linear equations. More weights give no less, so all chains of weights with prime ratios
    are tried up to the last offset; one is left as soon as the offsets that further weights cannot tell apart
    contradict one another.
    """
    points = sorted(zip(table(a).tolist(), count(), strict=False))
    last = points[-1][0]
    primes = [p for p in range(2, last + 1) if all(p % q for q in range(2, int(p**0.5) + 1))]

    def extend(weights: list[int], point: list[int], free: list[list[int]], pairs: list) -> Tree | None:
        point, free = [*point, 0], [*([*v, 0] for v in free), [*[0] * len(point), 1]]
        rows = [([y // w - x // w for w in weights], j - i) for (x, i), (y, j) in pairs]
        found = _solved(rows, point, free)
        if found is not None:
            ratios = [high // low for low, high in pairwise([*weights, last + weights[-1]])]
            digits, stride = [], 0
            for e, before, ratio in zip(found[0], [0, *ratios], ratios, strict=False):
                stride = e + stride * before
                digits.append(Mode(ratio, stride))
            return coalesce(digits)
        for w in takewhile(lambda w: w <= last, (weights[-1] * p for p in primes)):
            apart = [x // w != y // w for (x, _), (y, _) in pairs]
            found = _solved(list(compress(rows, map(not_, apart))), point, free)
            result = None if found is None else extend([*weights, w], *found, list(compress(pairs, apart)))
            if result is not None:
                return result
        return None

    return extend([1], [], [], list(pairwise(points)))


def _solved(rows: list, point: list[int], free: list[list[int]]) -> tuple[list[int], list[list[int]]] | None:
    """The integer solutions of rows (coefficients, value) among `point` + sums of `free`; None if none."""
    for row, value in rows:
        pivot: list[int] = []
        kept = []
        for v in free:
            while pivot and _dot(row, v):  # Euclid: in the end only the pivot changes this row
                times = _dot(row, pivot) // _dot(row, v)
                pivot, v = v, [p - times * q for p, q in zip(pivot, v, strict=True)]
            if not pivot and _dot(row, v):
                pivot = v
            else:
                kept.append(v)
        missing, step = value - _dot(row, point), _dot(row, pivot)
        if missing % step if step else missing:
            return None
        if step:
            point = [p + missing // step * q for p, q in zip(point, pivot, strict=True)]
        free = kept
    return point, free


def _dot(row: list[int], v: list[int]) -> int:
    return sum(map(mul, row, v))


# --- recast


def recast(tree: Tree, up: int, down: int) -> Tree:
    """`up` elements become one, then one becomes `down`; leaf by leaf."""
    if isinstance(tree, list):
        return [recast(child, up, down) for child in tree]
    n, stride = tree
    if stride % up == 0:
        stride //= up
    else:
        run = up // abs(stride) if up % abs(stride) == 0 else int(n == 1)  # so many steps stay in an element
        if not run or (n % run and run % n):
            problem = f"{text(tree)}: {up} old elements a new one cut its steps"
            raise LayoutError("", problem, f"a stride that is a multiple of {up} would do", None, stride, up)
        n, stride = max(n // run, 1), 1 if stride > 0 else -1
    if down > 1 and abs(stride) == 1:
        return Mode(n * down, stride)
    return Mode(n, stride * down)
