"""Pictures of layouts, thread-value maps, banks and registers, which a notebook shows by itself.

Each function here makes one kind of `Picture`: SVG of tables with a cell for each element, vector or word.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

import cutlass.cute as cute
import numpy as np

from cutelab.layouts.arrays import as_numpy
from cutelab.layouts.banks import BANKS, WORD_BYTES, BankReport
from cutelab.layouts.notation import format
from cutelab.layouts.svg import COLOURS, MAX_CELLS, Axis, Cell, Grid, Legend, Picture, PictureError, arrange
from cutelab.layouts.tiles import GRANULE_BYTES, LINE_BYTES
from cutelab.layouts.traffic import Layout
from cutelab.layouts.tv import Owners, owners, tv_map

# Layouts


def _leaves(shape: Any) -> tuple[int, ...]:
    return tuple(cute.flatten_to_tuple(shape))


def _coordinate(index: int, shape: Any) -> Any:
    """The coordinate of a linear index, nested as `shape` is."""
    if not isinstance(shape, tuple):
        return int(index)
    coordinate = []
    for mode in shape:
        index, rest = divmod(index, prod(_leaves(mode)))
        coordinate.append(_coordinate(rest, mode))
    return tuple(coordinate)


def _runs(count: int, of: str, first: int = 0) -> tuple[int, Legend]:
    """Shares `count` numbers out among the colours in runs of a power of two: its length, and the legend."""
    run = 1 << max(0, -(-count // len(COLOURS)) - 1).bit_length()
    starts = range(first, first + count, run)
    spans = [_span(start, min(run, first + count - start)) for start in starts]
    return run, [(f"k{n}", f"{of}{'s' if '–' in span else ''} {span}") for n, span in enumerate(spans)]


def _span(start: int, count: int) -> str:
    return str(start) if count == 1 else f"{start}–{start + count - 1}"


def _offset_grids(
    layout: Any,
    at: Callable[[int, int], tuple[int, ...]],
    axes: tuple[Axis, Axis],
    titles: Mapping[tuple[int, ...], str],
) -> tuple[list[Grid], Legend]:
    """A grid for each key of `titles`: its cell (i, j) is the coordinate (*at(i, j), *key)."""
    table = as_numpy(layout)
    lowest = int(table.min())
    run, entries = _runs(int(table.max()) - lowest + 1, "offset", lowest)
    shape = layout.shape if isinstance(layout.shape, tuple) else (layout.shape,)

    def cell(index: tuple[int, ...]) -> Cell:
        offset = int(table[index])
        coordinate = tuple(_coordinate(i, mode) for i, mode in zip(index, shape, strict=True))
        return Cell(((str(offset), (offset - lowest) // run),), f"{format(coordinate)} → {offset}")

    every = list(product(range(len(axes[0])), range(len(axes[1]))))
    grids = [Grid(title, axes, {ij: cell((*at(*ij), *key)) for ij in every}) for key, title in titles.items()]
    used = {f"k{colour}" for grid in grids for c in grid.cells.values() for _, colour in c.bands}
    return grids, [("", "number: offset"), *(entry for entry in entries if entry[0] in used)]


def _few(layout: Layout, most: int = MAX_CELLS) -> None:
    """Refuses a large layout before it is tabulated."""
    if cute.size(layout) > most:
        raise PictureError(
            f"{format(layout)} has {cute.size(layout)} elements, but at most {most} are drawn; "
            "draw a smaller tile or one stage"
        )


def offsets(layout: Layout) -> Picture:
    """The offset of each coordinate: mode 0 down, mode 1 across, a panel for each index of the others.

    A nested mode has frames and a row of ticks for each of its leaves, the innermost nearest to the cells.
    """
    _few(layout)
    shape = layout.shape if isinstance(layout.shape, tuple) else (layout.shape,)
    if len(shape) == 1:
        axes = Axis("", (1,), ("",)), Axis("mode 0", _leaves(shape[0]))
        grids, legend = _offset_grids(layout, lambda _, j: (j,), axes, {(): ""})
    else:
        axes = Axis("mode 0", _leaves(shape[0])), Axis("mode 1", _leaves(shape[1]))
        rest = product(*(range(prod(_leaves(mode))) for mode in shape[2:]))
        titles = {key: ", ".join(f"mode {2 + n} = {i}" for n, i in enumerate(key)) for key in rest}
        grids, legend = _offset_grids(layout, lambda i, j: (i, j), axes, titles)
    return arrange(format(layout), [grids], legend, f"The offset of each coordinate of {format(layout)}.")


def tiles(layout: Layout) -> Picture:
    """A result of `zipped_divide` as the matrix it came from: mode 0 is where in a tile, mode 1 which tile.

    `offsets` shows the same layout with a row for each element of a tile, a column for each tile.
    """
    _few(layout)
    shape = layout.shape
    if not (isinstance(shape, tuple) and len(shape) == 2 and all(cute.rank(mode) == 2 for mode in shape)):
        raise PictureError(f"tiles of a matrix have a shape ((rows, columns), (tiles, tiles)); got {shape}")
    (tile_m, tile_n), (grid_m, grid_n) = shape
    tile, grid = [prod(_leaves(mode)) for mode in shape[0]], prod(_leaves(grid_m))

    def at(i: int, j: int) -> tuple[int, int]:
        return i % tile[0] + j % tile[1] * tile[0], i // tile[0] + j // tile[1] * grid

    axes = Axis("rows", _leaves((tile_m, grid_m))), Axis("columns", _leaves((tile_n, grid_n)))
    title = "a frame a tile: inner ticks in the tile, outer ticks of tiles"
    grids, legend = _offset_grids(layout, at, axes, {(): title})
    return arrange(format(layout), [grids], legend, f"The tiles of {format(layout)}, each in a frame.")


# Threads and values

_SIDES = ("mode 0", "mode 1")
_MODES = {"A": ("M", "K"), "B": ("N", "K"), "C": ("M", "N"), "src": _SIDES, "dst": _SIDES}


def _tv_grid(tiled: Any, operand: str, run: int, title: str, transpose: bool, vectors: bool) -> Grid:
    coordinates = tv_map(tiled, operand)
    if coordinates.shape[-1] == 1:
        coordinates = np.insert(coordinates, 0, 0, axis=-1)
    if coordinates.shape[-1] != 2:
        raise PictureError(f"tiles of rank 1 and 2 are drawn; this one has {coordinates.shape[-1]} modes")
    names = _MODES[operand]
    if transpose:
        coordinates, names = coordinates[..., ::-1], names[::-1]
    held = owners(coordinates)
    sizes = _vector(held) if vectors else (1, 1)
    threads, values = (table[:: sizes[0], :: sizes[1]] for table in held)
    several = threads.shape[2] > 1
    cells = {}
    for i, j in np.ndindex(threads.shape[:2]):
        have = [(int(t), int(v)) for t, v in zip(threads[i, j], values[i, j], strict=True) if t >= 0]
        texts = [f"T{t}{' ' if several else chr(10)}V{_span(v, prod(sizes))}" for t, v in have]
        bands = tuple((text, t // run % len(COLOURS)) for text, (t, _) in zip(texts, have, strict=True))
        at = (_span(i * sizes[0], sizes[0]), _span(j * sizes[1], sizes[1]))
        who = ", ".join(f"thread {t} value {_span(v, prod(sizes))}" for t, v in have) or "no thread"
        cells[i, j] = Cell(bands or (("", -1),), f"({', '.join(at[::-1] if transpose else at)}): {who}")
    axes = [Axis(name, *_ticks(n, size)) for name, n, size in zip(names, threads.shape, sizes, strict=False)]
    return Grid(title, axes, cells)


def _ticks(cells: int, size: int) -> tuple[tuple[int], list[str]]:
    """Sizes and labels of an axis whose cells are `size` elements each."""
    return (cells,), [_span(n * size, size) for n in range(cells)]


def _vector(held: Owners) -> tuple[int, int]:
    """The extent of the largest blocks, along one mode, in which every owner has consecutive values."""
    for mode in (1, 0):
        threads, values = (np.moveaxis(table, mode, 0) for table in held)
        size = 1
        while len(threads) % (2 * size) == 0:
            blocks = threads.reshape(-1, 2 * size, *threads.shape[1:])
            steps = np.diff(values.reshape(blocks.shape), axis=1)
            if (blocks != blocks[:, :1]).any() or (steps[blocks[:, 1:] >= 0] != 1).any():
                break
            size *= 2
        if size > 1:
            return (size, 1) if mode == 0 else (1, size)
    return 1, 1


def _tv_picture(
    tiled: Any,
    title: str,
    operands: Mapping[tuple[int, int], tuple[str, str]],
    description: str,
    vectors: bool,
) -> Picture:
    """`operands` gives (operand, title) at a place of the arrangement; in the top row of two, transposed."""
    run, colours = _runs(tiled.size, "thread")
    rows, columns = (1 + max(at[mode] for at in operands) for mode in range(2))
    grids = {
        at: _tv_grid(tiled, operand, run, name, rows == 2 and at[0] == 0, vectors)
        for at, (operand, name) in operands.items()
    }
    if rows == 2:  # one size of cells, so that A, B and C line up
        fits = [grid.fitted() for grid in grids.values()]
        cell = max(w for w, _ in fits), max(h for _, h in fits)
        grids = {at: replace(grid, cell=cell) for at, grid in grids.items()}
    legend: Legend = [("", "T: thread, V: which of its values"), *colours]
    if any(cell.bands[0][1] < 0 for grid in grids.values() for cell in grid.cells.values()):
        legend.append(("empty", "no thread"))
    arranged = [[grids.get((i, j)) for j in range(columns)] for i in range(rows)]
    return arrange(title, arranged, legend, description, "each of these threads has its own copy")


def tv(tiled: cute.TiledCopy | cute.TiledMma, operand: str, *, vectors: bool = False) -> Picture:
    """Which thread has which element, as which of its values: operands as for `tv_map`.

    With `vectors`, a cell is a run of neighbours that are consecutive values of the same threads.
    """
    what = f"{type(tiled).__name__} of {tiled.size} threads, {operand}"
    grids = {(0, 0): (operand, "")}
    return _tv_picture(tiled, what, grids, f"The owners of each element: {what}.", vectors)


def copy(tiled: cute.TiledCopy, *, vectors: bool = False) -> Picture:
    """Both sides of a copy: who points at an element on the left, who receives it on the right."""
    sides = {(0, 0): ("src", "source: who points at it"), (0, 1): ("dst", "destination: who receives it")}
    title = f"TiledCopy of {tiled.size} threads"
    return _tv_picture(tiled, title, sides, "The owners of each element on both sides of the copy.", vectors)


def mma(tiled: cute.TiledMma) -> Picture:
    """C with A to its left and B above, transposed: an element of C sums over its row and its column."""
    operands = {(0, 1): ("B", "B"), (1, 0): ("A", "A"), (1, 1): ("C", "C")}
    m, n, k = (tiled.get_tile_size(mode) for mode in range(3))
    title = f"TiledMma of {m} × {n} × {k}, {tiled.size} threads"
    return _tv_picture(tiled, title, operands, "The owners of each element of A, B and C.", False)


# Shared memory

_GROUPS = [(f"k{g}", f"banks {4 * g}–{4 * g + 3}") for g in range(LINE_BYTES // GRANULE_BYTES)]


def _stage(layout: Layout, stage: int) -> np.ndarray:
    """The offsets of a tile (rows, columns), or of one of the stages of (rows, columns, stages)."""
    _few(layout, 16 * MAX_CELLS)  # a cell is 16 bytes
    table = as_numpy(layout)
    if table.ndim not in (2, 3):
        raise PictureError(f"a tile is (rows, columns) or (rows, columns, stages); got {layout.shape}")
    if table.ndim == 3 and not 0 <= stage < table.shape[2]:
        raise PictureError(f"stage {stage} of {format(layout)}, which has {table.shape[2]}")
    return table if table.ndim == 2 else table[..., stage]


def _granule_grid(
    title: str, table: np.ndarray, bits: int, followed: frozenset[tuple[int, int]] = frozenset()
) -> Grid:
    """A cell for each 16 bytes of a tile, or for each element where the 16 bytes don't lie side by side."""
    per = GRANULE_BYTES * 8 // bits
    sizes = next((size for size in ((1, per), (per, 1)) if _contiguous(table, size)), (1, 1))
    cells = {}
    for i, j in np.ndindex(table.shape[0] // sizes[0], table.shape[1] // sizes[1]):
        row, column = i * sizes[0], j * sizes[1]
        offset = int(table[row, column])
        byte = offset * bits // 8
        inside = product(range(row, row + sizes[0]), range(column, column + sizes[1]))
        tip = f"({_span(row, sizes[0])}, {_span(column, sizes[1])}) → offset {offset}, byte {byte}"
        group = byte % LINE_BYTES // GRANULE_BYTES
        cells[i, j] = Cell(((str(offset), group),), tip, "" if followed.isdisjoint(inside) else "followed")
    axes = [
        Axis(name, *_ticks(extent // size, size))
        for name, extent, size in zip(("rows", "columns"), table.shape, sizes, strict=True)
    ]
    along = 0 if sizes[1] > 1 else 1  # the mode in which neighbours are not neighbours in memory
    colours = np.array([[cells[i, j].bands[0][1] for j in range(len(axes[1]))] for i in range(len(axes[0]))])
    eight = np.moveaxis(colours, along, 0)[:8]
    spread = min(len(set(line)) for line in eight.T.tolist())
    one = axes[1 - along].name.removesuffix("s")
    note = f"{axes[along].name} {_span(0, len(eight))} of a {one}: {spread} of 8 bank groups"
    return Grid(title, axes, cells, note)


def _contiguous(table: np.ndarray, size: tuple[int, int]) -> bool:
    """Whether each block of `size`, which is 1 along one mode, is one aligned granule of memory."""
    (m, n), per = table.shape, max(size)
    if m % size[0] or n % size[1]:
        return False
    blocks = table.reshape(m // size[0], size[0], n // size[1], size[1]).swapaxes(1, 2).reshape(-1, per)
    return bool((blocks[:, :1] % per == 0).all() and (np.diff(blocks, axis=1) == 1).all())


def granules(
    layout: Layout,
    tiled_copy: cute.TiledCopy | None = None,
    side: str = "src",
    *,
    thread: int = 0,
    stage: int = 0,
    element_bits: int = 16,
) -> Picture:
    """The banks of a shared-memory tile, 16 bytes a cell, and what a thread of `tiled_copy` touches first."""
    followed: frozenset[tuple[int, int]] = frozenset()
    legend = [("", "number: offset of the first element"), *_GROUPS]
    if tiled_copy is not None:
        coordinates = tv_map(tiled_copy, side)
        if not 0 <= thread < len(coordinates):
            raise PictureError(f"thread {thread} of a copy by {len(coordinates)} threads")
        if coordinates.shape[-1] != 2:
            raise PictureError(
                f"the copy's tile has {coordinates.shape[-1]} modes; only rows and columns are drawn"
            )
        followed = frozenset((int(row), int(column)) for row, column in coordinates[thread])
        legend.append(("followed", f"thread {thread}, {side} of the copy"))
    grid = _granule_grid(f"stage {stage}", _stage(layout, stage), element_bits, followed)
    return arrange(format(layout), [[grid]], legend, f"The banks of {format(layout)}.")


def swizzle(layout: Layout, by: cute.Swizzle | None = None, *, element_bits: int = 16) -> Picture:
    """A tile before and after swizzling, 16 bytes a cell, coloured by the four banks that they lie in.

    `by` swizzles a plain layout; a layout that is already swizzled is shown beside its plain one.
    """
    if isinstance(layout, cute.ComposedLayout):
        if by is not None or not isinstance(layout.inner, cute.Swizzle):
            raise PictureError(
                f"give a plain layout and a swizzle, or a swizzled layout; got {format(layout)}"
            )
        plain, after = layout.outer, layout
    elif by is None:
        raise PictureError(f"{format(layout)} has no swizzle: give one")
    else:
        plain, after = layout, cute.make_composed_layout(by, 0, layout)
    grids = [
        _granule_grid(title, _stage(shown, 0), element_bits)
        for title, shown in (("plain", plain), (f"swizzled by {format(after.inner)}", after))
    ]
    legend = [("", "number: offset of the first element"), *_GROUPS]
    return arrange(format(after), [grids], legend, f"The banks of {format(plain)} and of {format(after)}.")


def banks(report: BankReport, instruction: int = 0) -> Picture:
    """The words that an instruction of a warp touches, in lines of 32 banks, coloured by phase.

    A bank gives one word at a time: lanes of a phase that want different words of a bank collide, lanes that
    want the same word share it (but for cp.async, see `cutelab.layouts.banks`).
    """
    if not 0 <= instruction < len(report.addresses):
        raise PictureError(f"instruction {instruction} of a report on {len(report.addresses)}")
    phases = report.phases(instruction)
    if not phases:
        raise PictureError(f"no lane takes part in instruction {instruction}")
    words: dict[int, dict[int, list[int]]] = {}  # word → phase → lanes
    for phase, lanes in enumerate(phases):
        for lane in lanes:
            for word in report.words(instruction, lane):
                words.setdefault(word, {}).setdefault(phase, []).append(lane)
    collisions = {(phase, bank) for phase, bank, _ in report.collisions(instruction)}
    lines = sorted({word // BANKS for word in words})
    cells = {}
    for i, bank in product(range(len(lines)), range(BANKS)):
        word = lines[i] * BANKS + bank
        here = words.get(word, {})
        bands = tuple((_lanes(lanes), phase % len(COLOURS)) for phase, lanes in here.items())
        who = "; ".join(f"lanes {lanes} in phase {phase}" for phase, lanes in here.items())
        mark = "collision" if any((phase, bank) in collisions for phase in here) else ""
        tip = f"byte {word * WORD_BYTES}, bank {bank}: {who or 'not touched'}"
        cells[i, bank] = Cell(bands or (("", -1),), tip, mark)
    rows = Axis("line of 128 bytes", (len(lines),), [str(line) for line in lines])
    columns = Axis("bank", (BANKS,), alarms=frozenset(bank for _, bank in collisions))
    taken, ideal = int(report.wavefronts[instruction]), int(report.ideal[instruction])
    grid = Grid(f"wavefronts: {taken}; without collisions: {ideal}", (rows, columns), cells)
    groups = [(f"k{n % len(COLOURS)}", f"phase {n}: lanes {_lanes(lanes)}") for n, lanes in enumerate(phases)]
    legend = [("", "number: lane"), *groups, ("empty", "not touched")]
    if collisions:
        legend.append(("collision", "collision: a phase needs this bank more than once"))
    title = f"{report.access.name}, instruction {instruction}"
    return arrange(title, [[grid]], legend, f"{title}. {grid.title}.", "several phases touch it")


def _lanes(lanes: list[int]) -> str:
    if len(lanes) == lanes[-1] - lanes[0] + 1:
        return _span(lanes[0], len(lanes))
    return f"{lanes[0]},{lanes[1]}" if len(lanes) == 2 else f"{lanes[0]}…{lanes[-1]}"


# Registers


def registers(
    to_shared: cute.TiledCopy,
    shared: Layout,
    to_registers: cute.TiledCopy,
    tiled_mma: cute.TiledMma,
    operand: str = "A",
    threads: int | Sequence[int] = 0,
) -> Picture:
    """What `threads` of one warp hold of a k-block of an operand, followed back to global memory.

    `to_shared` and `to_registers` are as `tile_copy` and `operand_copies` make them. One thread is coloured
    by its 32-bit registers, several by thread. Shown is the part of the tile that their warp holds.
    """
    threads = [threads] if isinstance(threads, int) else list(dict.fromkeys(threads))
    table, bits = _stage(shared, 0), to_registers.value_type.width
    held, loads, points = _check_followed(table, to_registers, tiled_mma, operand, threads)
    per = max(1, 32 // bits)  # values of a register
    values = []
    for n, t in enumerate(threads):
        for value, at in enumerate(held[t]):
            copied = loads[t].index(at)
            colour = n if len(threads) > 1 else copied // per % len(COLOURS)
            values.append(_Value(t, copied, value, at, colour))
    warp = range(threads[0] // 32 * 32, threads[0] // 32 * 32 + 32)
    rows, columns = (sorted({at[mode] for t in warp for at in held[t]}) for mode in range(2))
    region = list(product(rows, columns))
    axes = [
        Axis(name, (len(numbers),), [str(n) for n in numbers])
        for name, numbers in zip(_MODES[operand], (rows, columns), strict=True)
    ]
    followed: dict[tuple[int, ...], list[int]] = {}  # element → colours
    wanted: dict[int, set[int]] = {}  # thread → colours of the row that it points at
    pointing = {at: t for t in warp for at in points[t]}
    for one in values:
        followed.setdefault(one.at, []).append(one.colour)
        wanted.setdefault(pointing[one.at], set()).add(one.colour)
    writer = owners(tv_map(to_shared, "dst"))

    def copied_by(at: tuple[int, ...]) -> Cell:
        in_tile = tuple(i % size for i, size in zip(at, writer.thread.shape, strict=False))
        who = f"T{writer.thread[in_tile][0]}\nV{writer.value[in_tile][0]}"
        bands = tuple((who, colour) for colour in followed.get(at, ()))
        return Cell(bands or (("", -1),), f"{at}: {who}".replace("\n", " "))

    def pointed_at(at: tuple[int, ...]) -> Cell:
        colours = followed.get(at) or sorted(wanted.get(pointing[at], {-1}))
        bands = tuple((f"T{pointing[at]}", colour) for colour in colours)
        return Cell(bands, f"{at}: T{pointing[at]} points at it", "followed" if at in followed else "")

    def on_tile(title: str, note: str, cell: Callable[[tuple[int, ...]], Cell]) -> Grid:
        return Grid(title, axes, {divmod(n, len(columns)): cell(at) for n, at in enumerate(region)}, note)

    who = " and ".join(f"thread {t}" for t in threads)
    steps = [
        on_tile("1 global memory", "thread and value of the copy to shared memory", copied_by),
        _lines_grid("2 shared memory", table, bits, region, followed),
        on_tile("3 the copy to registers: who points where", f"outlined: what arrives in {who}", pointed_at),
        _register_grid("4 registers", values, per, operand),
    ]
    legend = [("empty", "not followed"), ("followed", "received")]
    if len(threads) > 1:
        legend += [(f"k{n}", f"thread {t}") for n, t in enumerate(threads)]
    else:
        legend += [(f"k{n}", f"register {n}") for n in sorted({one.colour for one in values})]
    description = f"Where the registers of {who} that hold operand {operand} come from."
    title = f"Operand {operand} on its way to {who}"
    return arrange(title, [steps[:2], steps[2:]], legend, description, "needed by each")


class _Value(NamedTuple):
    """A followed value: which one of the copy, which one of the mma, and which element of the tile."""

    thread: int
    copied: int
    value: int
    at: tuple[int, ...]
    colour: int


def _check_followed(
    table: np.ndarray,
    copy: cute.TiledCopy,
    tiled_mma: cute.TiledMma,
    operand: str,
    threads: list[int],
) -> list[list[list[tuple[int, ...]]]]:
    """By thread: the elements it holds, those it loads, those it points at. Raises if that doesn't fit."""
    if operand not in ("A", "B"):
        raise PictureError(f"an operand is 'A' or 'B'; got {operand!r}")
    maps = tv_map(tiled_mma, operand), tv_map(copy, "dst"), tv_map(copy, "src")
    held, loads, points = ([[tuple(at) for at in thread] for thread in each.tolist()] for each in maps)
    if not 1 <= len(threads) <= len(COLOURS) or len({t // 32 for t in threads}) > 1:
        raise PictureError(f"1 to {len(COLOURS)} threads of one warp can be followed; got {threads}")
    if not 0 <= min(threads) <= max(threads) < len(held):
        raise PictureError(f"the TiledMma has threads 0 to {len(held) - 1}; got {threads}")
    if [sorted(elements) for elements in held] != [sorted(elements) for elements in loads]:
        raise PictureError(f"the copy to registers doesn't load operand {operand} of this TiledMma")
    tile = tuple((maps[0].max(axis=(0, 1)) + 1).tolist())
    if tile[0] > table.shape[0] or tile[1] > table.shape[1]:
        raise PictureError(f"a shared-memory tile of {table.shape} doesn't hold {tile} elements")
    return [held, loads, points]


def _lines_grid(
    title: str,
    table: np.ndarray,
    bits: int,
    region: Sequence[tuple[int, ...]],
    followed: Mapping[tuple[int, ...], list[int]],
) -> Grid:
    """The 128-byte lines that hold a region of a tile, 16 bytes a cell."""
    inside: dict[int, list[tuple[int, ...]]] = {}
    for at in region:
        inside.setdefault(int(table[at]) * bits // 8 // GRANULE_BYTES, []).append(at)
    groups = len(_GROUPS)
    lines = sorted({granule // groups for granule in inside})
    cells = {}
    for i, j in product(range(len(lines)), range(groups)):
        granule = lines[i] * groups + j
        offset = granule * GRANULE_BYTES * 8 // bits
        here = inside.get(granule, [])
        bands = tuple((str(offset), k) for k in sorted({k for at in here for k in followed.get(at, ())}))
        tip = f"offset {offset}: {', '.join(map(str, here)) or 'outside the region'}"
        cells[i, j] = Cell(bands or ((str(offset) if here else "", -1),), tip)
    rows = Axis("line of 128 bytes", (len(lines),), [str(line) for line in lines])
    columns = Axis("banks", (groups,), [text.removeprefix("banks ") for _, text in _GROUPS])
    return Grid(title, (rows, columns), cells, "offset of each 16 bytes that the region lies in")


def _register_grid(title: str, values: list[_Value], per: int, operand: str) -> Grid:
    """A row for each value: where the copy puts it, which value of the mma that is, and its coordinate."""
    cells = {}
    for row, (t, copied, value, at, colour) in enumerate(values):
        register = f"R{copied // per}" + (f".{copied % per}" if per > 1 else "")
        tip = f"thread {t}: {register}, value {copied} of the copy = value {value} of the mma = {operand}{at}"
        for column, text in enumerate((register, f"V{copied}", f"V{value}", f"{operand}{at}")):
            cells[row, column] = Cell(((text, colour),), tip)
    rows = Axis("thread", (len(values),), [f"T{one.thread}" for one in values])
    columns = Axis("", (4,), ("register", "copy", "mma", "element"))
    note = "values before and after retile" + ("; register.half" if per == 2 else "")
    return Grid(title, (rows, columns), cells, note)
