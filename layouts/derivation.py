"""The layout algebra on Python integers, and the record of how a result came about.

A layout is a tree: a leaf is a `Mode` (size, stride), a node a list of trees. The functions here derive;
`cutelab.layouts.checked` verifies what they give against its promise, and is what users call. Nothing here
calls the DSL's own algebra, which ends the process for some inputs.
"""

from contextvars import ContextVar
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any, NamedTuple

import numpy as np

from cutelab.layouts.errors import LayoutError

TABULATED = 1 << 24  # the most coordinates that are tabulated: 128 MiB of offsets


class Mode(NamedTuple):
    size: int
    stride: int


Tree = Any  # Mode | list[Tree]; mypy has no recursive alias for lists in 3.10 syntax
ONE = Mode(1, 0)

_steps: ContextVar[list[str] | None] = ContextVar("steps", default=None)


def note(template: str, *values: Any) -> None:
    """Record a step of the derivation, if `explain` listens; trees are written in CuTe's notation."""
    steps = _steps.get()
    if steps is not None:
        steps.append(template.format(*(text(v) if isinstance(v, (Mode, list)) else v for v in values)))


def flat(tree: Tree) -> list[Mode]:
    """The leaves, first mode first; a scalar layout is its own leaf, an empty one is 1:0."""
    if isinstance(tree, Mode):
        return [tree]
    return [mode for child in tree for mode in flat(child)]


def size(tree: Tree) -> int:
    return prod(mode.size for mode in flat(tree))


def last_offset(tree: Tree) -> int:
    """The largest offset."""
    return sum((mode.size - 1) * max(mode.stride, 0) for mode in flat(tree))


def text(tree: Tree) -> str:
    """The layout in CuTe's notation."""
    return f"{_part(tree, 0)}:{_part(tree, 1)}"


def _part(tree: Tree, which: int) -> str:
    if isinstance(tree, Mode):
        return str(tree[which])
    return f"({','.join(_part(child, which) for child in tree)})"


def grouped(modes: list[Mode]) -> Tree:
    """One leaf as itself, none as 1:0, several as a node."""
    return list(modes) if len(modes) > 1 else modes[0] if modes else ONE


def table(tree: Tree) -> np.ndarray:
    """The offset at every linear index."""
    offsets = np.zeros(1, np.int64)
    for n, stride in flat(tree):
        offsets = (offsets + stride * np.arange(n, dtype=np.int64)[:, None]).ravel()
    return offsets


def at(tree: Tree, index: np.ndarray) -> np.ndarray:
    """The offsets at linear indices; beyond the end the last mode goes on, as in CuTe."""
    if index.size and index.max() < size(tree) <= max(TABULATED >> 4, 4 * index.size):
        return table(tree)[index]
    *modes, (_, last_stride) = flat(tree) or [ONE]
    offsets = np.zeros_like(index)
    for n, stride in modes:
        index, digit = np.divmod(index, n)
        offsets += digit * stride
    return offsets + index * last_stride


def coordinate(tree: Tree, index: int) -> Any:
    """The coordinate of a linear index, in the profile of the layout."""
    if isinstance(tree, Mode):
        return index
    coord = []
    for child in tree:
        coord.append(coordinate(child, index % size(child)))
        index //= size(child)
    return tuple(coord)


# --- coalesce


def coalesce(tree: Tree) -> Tree:
    """The same function with the fewest modes."""
    modes: list[Mode] = []
    for mode in flat(tree):
        if mode.size == 1:
            continue
        if modes and mode.stride == modes[-1].size * modes[-1].stride:
            modes[-1] = Mode(modes[-1].size * mode.size, modes[-1].stride)
        else:
            modes.append(mode)
    return grouped(modes)


# --- composition


def compose(a: Tree, b: Tree) -> Tree:
    """A o B mode by mode of B; what the modes give together is for the caller to verify."""
    if isinstance(b, list):
        return [compose(a, mode) for mode in b]
    a_flat = flat(a) or [ONE]
    division = _divide(a_flat, b)
    if division is None:
        return grouped(_linear_pieces(a, b))
    divided, kept = division
    result = coalesce([mode for _, _, mode in kept])
    if divided:
        note(
            "  {}: {} / {} = {}, its first {}: {}",
            b,
            grouped(a_flat),
            b.stride,
            grouped(divided),
            b.size,
            result,
        )
    return result if b.size > 1 and b.stride else Mode(b.size, 0)


def _divide(a: list[Mode], b: Mode) -> tuple[list[Mode], list[tuple[int, int, Mode]]] | None:
    """CuTe's rule, a proof where it applies: divide A's shape by B's stride, then keep B's size of it.

    Gives the divided modes and, for each mode of A that is walked, its number, the largest coordinate used of
    it, and the mode kept. None where a division leaves a remainder.
    """
    if b.size == 1 or b.stride == 0:
        return [], [(len(a) - 1, 0, Mode(b.size, 0))]
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
        divided.append(Mode(left, step))
        taken = min(n, left)
        if n % taken:
            return None
        kept.append((k, stride * (taken - 1), Mode(taken, step)))
        n //= taken
        stride = 1
    last = a[-1].stride * stride
    divided.append(Mode(-(-a[-1].size // stride), last))
    kept.append((len(a) - 1, stride * (n - 1), Mode(n, last)))
    return divided, kept


def never_carries(a: Tree, b: Tree) -> bool:
    """Whether what B's modes use of each mode of A adds up to less than its size: a proof of `compose`."""
    sizes = [mode.size for mode in flat(a) or [ONE]]
    used = [0] * len(sizes)
    for mode in flat(b):
        pieces = _divide(flat(a) or [ONE], mode)
        if pieces is None:
            return False
        for k, most, _ in pieces[1]:
            used[k] += most
    return all(most < n for most, n in zip(used[:-1], sizes[:-1], strict=True))


def _linear_pieces(a: Tree, b: Mode) -> list[Mode]:
    """A o B for one mode of B, decided by its values.

    As a function g of the index, the longest linear prefix of g is the first mode of any layout of g, up to
    coalescing: its length divides the size, and g(i) = g(i mod length) + g'(i div length), with g' alike.
    """
    if b.stride < 0 and len(flat(a)) > 1:
        raise LayoutError(
            "composition",
            f"{text(b)} gives indices below 0, where {text(a)} has no value",
            coordinate=1,
            got=b.stride,
            required="an index of at least 0",
            nearest=f"{b.size}:{-b.stride} would do, read backwards",
        )
    if b.stride < 0:
        return [Mode(b.size, b.stride * flat(a)[0].stride)]
    if b.size > TABULATED:
        raise LayoutError(
            "composition",
            f"{text(b)} has too many coordinates to decide whether {text(a)} divides",
            nearest=f"a stride and size that divide {text(a)} mode by mode, or at most {TABULATED}",
        )
    values = at(a, np.arange(b.size, dtype=np.int64) * b.stride)
    pieces, every = [], 1
    while len(values) > 1:
        step = int(values[1])
        wrong = values != step * np.arange(len(values))
        length = int(wrong.argmax()) if wrong.any() else len(values)
        if len(values) % length:
            raise _no_mode(a, b, length * every, step * length, int(values[length]), length * every)
        rows = values.reshape(-1, length)
        uneven = rows - rows[:, :1] != step * np.arange(length)
        if uneven.any():
            row, column = np.unravel_index(int(uneven.argmax()), rows.shape)
            raise _no_mode(
                a,
                b,
                int(row * length + column) * every,
                int(rows[row, 0]) + step * int(column),
                int(rows[row, column]),
                length * every,
            )
        pieces.append(Mode(length, step))
        values, every = rows[:, 0], every * length
    note("  {}: {} does not divide {} mode by mode; by its values: {}", b, b.stride, a, grouped(pieces))
    return pieces


def _no_mode(a: Tree, b: Mode, index: int, got: int, required: int, fits: int) -> LayoutError:
    return LayoutError(
        "composition",
        f"no layout of shape {b.size} expresses {text(a)} o {text(b)}",
        coordinate=index,
        got=got,
        required=required,
        nearest=f"{fits}:{b.stride} would do, or cute.make_composed_layout, which composes any two",
    )


# --- complement and inverses


def complement(a: Tree, cotarget: int) -> Tree:
    """A's modes by stride: a gap between two becomes a mode, and so does what remains up to `cotarget`."""
    modes = sorted(
        (mode for mode in flat(coalesce(a)) if mode.size > 1 and mode.stride),
        key=lambda mode: (mode.stride, mode.size),
    )
    if modes and modes[0].stride < 0:
        raise LayoutError(
            "complement",
            f"{text(a)} has a negative stride",
            coordinate=1,
            got=modes[0].stride,
            required="an offset of at least 0",
            nearest=f"stride {-modes[0].stride} would do",
        )
    note("  by stride, without strides of 0: {}", grouped(modes))
    gaps, covered = [], 1
    for n, stride in modes:
        if stride % covered:
            below = stride // covered * covered
            raise LayoutError(
                "complement",
                f"{text(a)} does not tile: stride {stride} is no multiple of the {covered} "
                "offsets that its smaller strides span",
                coordinate=stride,
                got="an overlap or a hole",
                required="every offset once",
                nearest=f"stride {below or covered} or {below + covered} would do",
            )
        if stride > covered:
            note("  {}:{} leaves the gap {}:{}", n, stride, stride // covered, covered)
        gaps.append(Mode(stride // covered, covered))
        covered = n * stride
    rest = -(-cotarget // covered)
    note("  {} offsets, {} times up to {}: {}", covered, rest, cotarget, Mode(rest, covered))
    return coalesce([*gaps, Mode(rest, covered)])


def right_inverse(a: Tree) -> Tree:
    """The longest chain of whole modes, each with the stride that the modes before it span."""
    modes = flat(coalesce(a))
    positions = [1, *accumulate((mode.size for mode in modes), mul)]

    def chain(covered: int, left: tuple[int, ...]) -> list[int]:
        chains = [
            [i, *chain(covered * modes[i].size, tuple(j for j in left if j != i))]
            for i in left
            if modes[i].stride == covered
        ]
        return max(chains, key=lambda c: prod(modes[i].size for i in c), default=[])

    links = chain(1, tuple(range(len(modes))))
    for i in links:
        note("  {} lies at {} in A's order", modes[i], positions[i])
    return coalesce([Mode(modes[i].size, positions[i]) for i in links])


def left_inverse(a: Tree) -> Tree:
    """Sorted by stride, each stride of A divides the next: an offset's digits are A's coordinates."""
    modes = flat(coalesce(a))
    positions = [1, *accumulate((mode.size for mode in modes), mul)]
    by_stride = sorted(
        (mode.stride, mode.size, position)
        for mode, position in zip(modes, positions, strict=False)
        if mode.size > 1
    )
    digits, covered, position = [], 1, 0
    for stride, n, here in by_stride:
        if stride <= 0 or stride % covered:
            raise LayoutError(
                "left_inverse",
                f"{text(a)}: stride {stride} is no positive multiple of the stride {covered} before it",
                nearest=f"stride {max(stride // covered, 1) * covered or covered} would do",
            )
        digits.append(Mode(stride // covered, position))
        covered, position = stride, here
        note("  {}:{} is the digit of weight {}, {} in A's order", n, stride, stride, here)
    return coalesce([*digits, Mode(by_stride[-1][1] if by_stride else 1, position)])


# --- recast


def recast(tree: Tree, up: int, down: int) -> Tree:
    """`up` elements become one, then one becomes `down`; leaf by leaf."""
    if isinstance(tree, list):
        return [recast(child, up, down) for child in tree]
    n, stride = tree
    if up > 1 and stride:
        run = up // abs(stride) if up % abs(stride) == 0 else 1  # this many steps stay within an element
        if (run == 1 and stride % up) or (n % run and run % n):
            raise LayoutError(
                "recast",
                f"{text(tree)}: {up} old elements a new one cut its steps",
                nearest=f"a stride that is a multiple of {up} would do",
            )
        n, stride = max(n // run, 1), stride // up if run == 1 else (1 if stride > 0 else -1)
    if down > 1:
        n, stride = (n * down, stride) if abs(stride) == 1 else (n, stride * down)
    return Mode(n, stride)
