"""Tables of cells as SVG text: what pictures are made of. Nothing here knows what a layout is.

A cell says in writing what it is; its colour says which group it belongs to, and the legend names the groups.
Pointing at a cell shows more, where a picture is part of a page rather than an <img>. The eight colours are
the same everywhere and under black text; colour-blind readers can tell them apart (Paul Tol's "light"
scheme). Only the panel behind them is light or dark.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from xml.sax.saxutils import escape

MAX_CELLS = 4096
"""Cells of a picture: beyond that nobody reads the numbers, and a browser takes seconds to show them."""

COLOURS = ("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#99DDFF", "#44BB99", "#BBCC33", "#AAAA00")
CELL_INK = "#111111"
THEMES = {
    "light": {"panel": "#FFFFFF", "ink": "#1F2328", "empty": "#ECEFF3", "alarm": "#8B0000"},
    "dark": {"panel": "#16191D", "ink": "#E8EAED", "empty": "#2B3036", "alarm": "#FF9C9C"},
}

LINE, PAD, GAP = 14, 16, 8
CHARACTER = 6.7  # width of one at 11 px: every monospaced font is close to 0.6 em


class PictureError(ValueError):
    """What has no picture: too many cells or modes, or objects that don't belong together."""


@dataclass(frozen=True, repr=False)
class Picture:
    """SVG; `str(picture)` is its text. The theme "auto" is light or dark as the reader's system prefers."""

    title: str
    description: str
    width: float
    height: float
    body: str
    theme: str = "auto"

    def __post_init__(self) -> None:
        if self.theme not in ("auto", *THEMES):
            raise PictureError(f"a theme is 'auto', 'light' or 'dark'; got {self.theme!r}")

    def themed(self, theme: str) -> "Picture":
        return replace(self, theme=theme)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(str(self), encoding="utf-8")

    def __repr__(self) -> str:
        return f"Picture({self.title!r})"  # notebooks store this too: not the SVG once more

    def _repr_svg_(self) -> str:
        return str(self)

    def __str__(self) -> str:
        size = f"{self.width:.0f} {self.height:.0f}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="cutelab {self.theme}" role="img" '
            f'aria-label="{escape(self.title, {chr(34): "&quot;"})}" viewBox="0 0 {size}" '
            f'width="{self.width:.0f}" style="max-width:100%;height:auto">'
            f"<title>{escape(self.title)}</title><desc>{escape(self.description)}</desc>"
            f'<style>{_style(self.theme)}</style><rect class="panel" width="100%" height="100%" rx="8"/>'
            f"{self.body}</svg>\n"
        )


def _style(theme: str) -> str:
    """Rules that name the theme, because a notebook applies each picture's rules to the whole page."""

    def rules(colours: Mapping[str, str]) -> str:
        root = f"svg.cutelab.{theme}"
        return (
            f"{root} .panel{{fill:{colours['panel']}}}{root} .empty{{fill:{colours['empty']}}}"
            f"{root} text{{fill:{colours['ink']}}}"
            f"{root} text.alarm{{fill:{colours['alarm']};font-weight:bold}}"
            f"{root} text.on{{fill:{CELL_INK}}}{root} .frame{{stroke:{colours['ink']}}}"
        )

    shared = (
        "svg.cutelab text{font:11px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace}"
        "svg.cutelab text.title{font-weight:bold}svg.cutelab .mid{text-anchor:middle}"
        "svg.cutelab .frame{fill:none;stroke-opacity:.55}"
        f"svg.cutelab .followed{{fill:none;stroke:{CELL_INK};stroke-width:2.5}}"
        f"svg.cutelab .collision{{fill:none;stroke:{THEMES['light']['alarm']};stroke-width:3}}"
        "svg.cutelab .swatch.followed,svg.cutelab .swatch.collision{fill:#FFFFFF}"
        + "".join(f"svg.cutelab .k{i}{{fill:{colour}}}" for i, colour in enumerate(COLOURS))
    )
    if theme != "auto":
        return shared + rules(THEMES[theme])
    return f"{shared}{rules(THEMES['light'])}@media (prefers-color-scheme:dark){{{rules(THEMES['dark'])}}}"


@dataclass(frozen=True)
class Cell:
    """Bands of (text, colour) from top to bottom; a colour of -1 is none. `mark` outlines it."""

    bands: tuple[tuple[str, int], ...]
    tip: str
    mark: str = ""  # "followed" or "collision"


@dataclass(frozen=True)
class Axis:
    """A mode. `sizes` are those of its leaves, the innermost first; each gives a row of ticks and a frame."""

    name: str
    sizes: tuple[int, ...]
    labels: Sequence[str] = ()  # instead of numbers, innermost leaf
    alarms: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return prod(self.sizes)

    def start(self, i: int, cell: float) -> float:
        """Where cell i starts: each level leaves a gap after each of its blocks."""
        return i * cell + GAP * sum(i // self.block(level) for level in range(1, len(self.sizes)))

    def extent(self, i: int, count: int, cell: float) -> tuple[float, float]:
        start = self.start(i, cell)
        return start, self.start(i + count - 1, cell) + cell - start

    def block(self, level: int) -> int:
        """Cells in one step of leaf `level`."""
        return prod(self.sizes[:level])

    def ticks(self, level: int) -> Iterable[tuple[int, str]]:
        for i in range(0, len(self), self.block(level)):
            number = str(i // self.block(level) % self.sizes[level])
            yield i, self.labels[i] if self.labels and level == 0 else number

    def depth(self) -> float:
        """Room for the ticks of one level."""
        ticks = (label for level in range(len(self.sizes)) for _, label in self.ticks(level))
        return max(map(len, ticks)) * CHARACTER + 8


@dataclass(frozen=True)
class Grid:
    """A table of cells with ticks along its two axes, rows and columns."""

    title: str
    axes: Sequence[Axis]
    cells: Mapping[tuple[int, int], Cell]
    note: str = ""
    cell: tuple[float, float] | None = None  # size; fitted to the texts if left out

    def fitted(self) -> tuple[float, float]:
        """The size of a cell that holds the longest text of any, and the labels of the columns."""
        texts = [[text.split("\n") for text, _ in cell.bands] for cell in self.cells.values()]
        lines = max(len(bands) * max(map(len, bands)) for bands in texts)
        wide = max(len(line) for bands in texts for band in bands for line in (*band, *self.axes[1].labels))
        return max(26.0, wide * CHARACTER + 8), max(24.0, lines * LINE + 6)

    def draw(self) -> tuple[str, float, float]:
        """SVG with its origin at the top left, width and height."""
        rows, columns = self.axes
        w, h = self.cell or self.fitted()
        named = [f"{axis.name} {arrow}" for axis, arrow in zip(self.axes, "↓→", strict=True) if axis.name]
        parts, head = [], 0
        for text, kind in ((self.title, "title"), (self.note, ""), (" · ".join(named), "")):
            head += LINE if text else 0
            parts.append(_text(0, head - 3, text, kind))
        margin = 4 + GAP / 2 * max(len(axis.sizes) for axis in self.axes)  # of the outermost frame
        left = rows.depth() * len(rows.sizes) + margin
        top = head + LINE * len(columns.sizes) + margin
        for level in range(len(columns.sizes)):
            for i, label in columns.ticks(level):
                x, size = columns.extent(i, columns.block(level), w)
                kind = "mid alarm" if level == 0 and i in columns.alarms else "mid"
                parts.append(_text(left + x + size / 2, top - margin - 2 - LINE * level, label, kind))
        for level in range(len(rows.sizes)):
            for i, label in rows.ticks(level):
                y, size = rows.extent(i, rows.block(level), h)
                x = left - margin - rows.depth() * (level + 0.5)
                parts.append(_text(x, top + y + size / 2 + 4, label, "mid"))
        parts += self.frames(left, top, w, h)
        for (i, j), cell in self.cells.items():
            parts.append(_cell(cell, (i, j), left + columns.start(j, w), top + rows.start(i, h), w, h))
        width = left + columns.extent(0, len(columns), w)[1] + GAP
        height = top + rows.extent(0, len(rows), h)[1] + GAP
        return "".join(parts), max(width, max(len(self.title), len(self.note)) * CHARACTER), height

    def frames(self, left: float, top: float, w: float, h: float) -> list[str]:
        """A frame around each block of each level: the deeper a block is nested, the tighter."""
        parts = []
        rows, columns = self.axes
        for level in range(1, max(len(axis.sizes) for axis in self.axes)):
            blocks = rows.block(level), columns.block(level)
            for i, j in product(range(0, len(rows), blocks[0]), range(0, len(columns), blocks[1])):
                (y, height), (x, width) = rows.extent(i, blocks[0], h), columns.extent(j, blocks[1], w)
                kind, grow = f"frame level{level}", GAP / 2 * level - 1
                parts.append(_rect(left + x, top + y, width, height, kind, grow))
        return parts


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    if not text:
        return ""
    of_kind = f' class="{kind}"' if kind else ""
    return f'<text{of_kind} x="{x:.5g}" y="{y:.5g}">{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, kind: str, grow: float = 0) -> str:
    return (
        f'<rect class="{kind}" x="{x - grow:.5g}" y="{y - grow:.5g}" '
        f'width="{width + 2 * grow:.5g}" height="{height + 2 * grow:.5g}" rx="2"/>'
    )


def _cell(cell: Cell, at: tuple[int, int], x: float, y: float, w: float, h: float) -> str:
    parts = [f'<g class="cell" data-at="{at[0]},{at[1]}"><title>{escape(cell.tip)}</title>']
    margin = 0.5 if len(cell.bands) == 1 else 1.5  # so that the bands of a cell are seen to belong together
    height = (h - 2 * margin) / len(cell.bands)
    for n, (text, colour) in enumerate(cell.bands):
        top = y + margin + n * height
        parts.append(_rect(x + 0.5, top, w - 1, height, f"k{colour}" if colour >= 0 else "empty"))
        lines = text.split("\n") if text else []
        for m, line in enumerate(lines):
            baseline = top + height / 2 + LINE * (m - (len(lines) - 1) / 2) + 4
            parts.append(_text(x + w / 2, baseline, line, "mid on" if colour >= 0 else "mid"))
    if cell.mark:
        parts.append(_rect(x, y, w, h, cell.mark, grow=-2))
    return "".join(parts) + "</g>"


Legend = list[tuple[str, str]]  # (class of the swatch or "" for none, text)


def _legend(entries: Legend, x: float, y: float, width: float) -> tuple[str, float]:
    """What colours, outlines and words mean, in lines of at most `width`, and where the last line ends."""
    parts, left = [], x
    for kind, text in entries:
        size = len(text) * CHARACTER + (42 if kind else 20)
        if left > x and left + size > x + width:
            left, y = x, y + LINE + 6
        parts += [_rect(left, y, 16, LINE, f"swatch {kind}")] if kind else []
        parts.append(_text(left + (22 if kind else 0), y + 11, text))
        left += size
    return f'<g class="legend">{"".join(parts)}</g>', y + LINE


def arrange(
    title: str, grids: Sequence[Sequence[Grid | None]], legend: Legend, description: str, bands: str = ""
) -> Picture:
    """Grids in rows and columns, the legend below; `bands` says what a cell of several bands means."""
    cells = [cell for row in grids for grid in row if grid for cell in grid.cells.values()]
    if len(cells) > MAX_CELLS:
        raise PictureError(
            f"{title}: {len(cells)} cells, but a picture holds {MAX_CELLS} at most; "
            "draw a smaller tile or vectors"
        )
    if any(len(cell.bands) > 1 for cell in cells):
        legend = [("", f"several lines in a cell: {bands}"), *legend]
    drawn = [[grid.draw() if grid else ("", 0.0, 0.0) for grid in row] for row in grids]
    widths = [max(width for _, width, _ in column) for column in zip(*drawn, strict=True)]
    heights = [max(height for _, _, height in row) for row in drawn]
    body, y = _text(PAD, PAD + 8, title, "title"), PAD + 1.5 * LINE
    for row, height in zip(drawn, heights, strict=True):
        x: float = PAD
        for (part, _, _), width in zip(row, widths, strict=True):
            body += f'<g class="grid" transform="translate({x:.1f},{y:.1f})">{part}</g>' if part else ""
            x += width + PAD
        y += height + GAP
    longest = max(len(text) * CHARACTER + 42 for _, text in legend)
    width = max(sum(widths) + PAD * (len(widths) - 1), len(title) * CHARACTER, longest, 360)
    part, bottom = _legend(legend, PAD, y + GAP, width)
    return Picture(title, description, width + 2 * PAD, bottom + PAD, body + part)
