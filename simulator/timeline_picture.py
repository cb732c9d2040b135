"""Draws timelines as SVG."""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

import numpy as np

from cutelab.simulator.costs import KINDS
from cutelab.simulator.grid import Three

if TYPE_CHECKING:
    from cutelab.simulator.timeline import Span, Timeline

FLIGHT = "in flight"
"""Tracks of copies begin so: as many as there are at a time."""

BUSY = ("tensor core", "MUFU", "shared memory", "global loads", "global stores")
"""Engines that have a row in pictures; those of the four sub-cores share one."""

_COLOURS = {
    "mma": "#77AADD", "mufu": "#FFAABB", "math": "#BBCC33", "shared": "#44BB99", "global": "#EEDD88",
    "copy": "#EE8866", "sync": "#AAAA00", "other": "#BBBBBB", "stall": "#9AA3AD", "wait": "#CC6677",
}  # fmt: skip
_MEANING = {
    "mma": "mma", "mufu": "MUFU", "math": "other arithmetic", "shared": "shared memory",
    "global": "global memory", "copy": "copies", "sync": "barriers, fences", "other": "rest",
    "stall": "needs a result", "wait": "waits for others",
}  # fmt: skip
_THIN = ("stall", "wait")
THEMES = {
    "light": {"panel": "#FFFFFF", "ink": "#1F2328", "line": "#D5DAE0"},
    "dark": {"panel": "#16191D", "ink": "#E8EAED", "line": "#343A41"},
}
_LABEL, _ROW, _GAP, _PAD, _TEXT = 118, 15, 5, 14, 14
_CHARACTER = 6.7


class Picture:
    """Draws pixel by pixel: each pixel of a row has the kind that most of its cycles went to."""

    def __init__(
        self, timeline: "Timeline", start: float, end: float, width: int, theme: str, title: str
    ) -> None:
        self.timeline, self.start, self.end, self.theme, self.title = timeline, start, end, theme, title
        self.width = max(width, 400)
        self.pixels = self.width - _LABEL - 2 * _PAD
        self.scale = self.pixels / (end - start)
        self.kinds: set[str] = set()
        self.parts: list[str] = []
        self.y = _PAD + _TEXT + _GAP

    def text(self) -> str:
        self.put(_PAD, _PAD + 10, self.title, "title")
        self.axis_top = self.y
        many = len(self.timeline.ctas) > 1
        for cta in self.timeline.ctas:
            if many:
                self.y += _TEXT
                self.put(_PAD, self.y - 3, f"CTA {cta}", "title")
            self.cta(cta)
        self.axis()
        self.legend()
        size = f"{self.width} {self.y + _PAD}"
        name = escape(self.title, {'"': "&quot;"})
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="cutelab-timeline {self.theme}" role="img" '
            f'aria-label="{name}" viewBox="0 0 {size}" width="{self.width}" '
            f'style="max-width:100%;height:auto"><title>{escape(self.title)}</title>'
            f'<style>{_style(self.theme)}</style><rect class="panel" width="100%" height="100%" rx="8"/>'
            f"{''.join(self.parts)}</svg>\n"
        )

    def cta(self, cta: Three) -> None:
        for label, track in self.warp_rows(cta):
            self.kind_row(label, self.timeline.of(track, cta=cta))
        tracks = [track for where, track in self.timeline.tracks() if where == cta]
        self.y += _GAP
        lanes = [track for track in tracks if track.startswith(FLIGHT)]
        for number, lane in enumerate(lanes):
            self.flight_row("copies in flight" if number == 0 else "", self.timeline.of(lane, cta=cta))
        self.y += _GAP
        for engine in BUSY:
            rows = [track for track in tracks if track.startswith(engine)]
            if rows:
                parts = 4 if engine in ("tensor core", "MUFU") else 1
                label = engine + "s" * (engine == "tensor core")
                self.busy_row(label, self.timeline.of(engine, cta=cta), parts)

    def warp_rows(self, cta: Three) -> list[tuple[str, str]]:
        """(label, track) of each row for warps."""
        warps = sorted(
            {span.warp for span in self.timeline.spans if span.cta == cta and span.warp is not None}
        )
        wgmma = any(span.name.startswith("wgmma.mma") for span in self.timeline.spans)
        if not wgmma:
            return [(f"warp {warp}", f"warp {warp}") for warp in warps]
        rows = []
        for first in range(0, max(warps) + 1, 4):
            group = [warp for warp in warps if first <= warp < first + 4]
            if group:
                busiest = max(group, key=lambda warp: (self.work(cta, warp), -warp))
                rows.append((f"warpgroup {first // 4}", f"warp {busiest}"))
        return rows

    def work(self, cta: Three, warp: int) -> float:
        spans = self.timeline.of(f"warp {warp}", cta=cta)
        return sum(span.cycles for span in spans if span.kind not in _THIN)

    # --- Rows

    def shares(self, spans: Iterable["Span"]) -> dict[str, np.ndarray]:
        """For each kind, the share of each pixel."""
        shares: dict[str, np.ndarray] = {}
        for span in spans:
            first = max((span.start - self.start) * self.scale, 0.0)
            last = min((span.end - self.start) * self.scale, float(self.pixels))
            if first >= last:
                continue
            row = shares.setdefault(span.kind, np.zeros(self.pixels + 1))
            left, right = int(first), int(last)
            if left == right:
                row[left] += last - first
            else:
                row[left] += left + 1 - first
                row[left + 1 : right] += 1
                row[right] += last - right
        return {kind: row[: self.pixels] for kind, row in shares.items()}

    def kind_row(self, label: str, spans: Sequence["Span"]) -> None:
        self.put(_PAD, self.y + 11, label)
        shares = self.shares(spans)
        if shares:
            names, table = list(shares), np.stack(list(shares.values()))
            winner = np.where(table.sum(axis=0) > 0.3, table.argmax(axis=0), -1)
            for number, kind in enumerate(names):
                thin = kind in _THIN
                boxes = [
                    self.box(first, last, self.y + (6 if thin else 1), 3 if thin else _ROW - 2)
                    for first, last in runs(winner == number)
                ]
                total = sum(span.cycles for span in spans if span.kind == kind)
                self.shape(kind, boxes, f"{label}: {_MEANING[kind]}, {total:.0f} cycles in all")
        self.y += _ROW

    def flight_row(self, label: str, spans: Sequence["Span"]) -> None:
        if label:
            self.put(_PAD, self.y + 11, label)
        for span in spans:
            first = (max(span.start, self.start) - self.start) * self.scale
            last = (min(span.end, self.end) - self.start) * self.scale
            if first < last:
                box = self.box(round(first, 1), round(max(last - 1, first + 1), 1), self.y + 2, _ROW - 4)
                self.shape("copy", [box], f"{span.name}: cycles {span.start:.0f} to {span.end:.0f}")
        self.y += _ROW

    def busy_row(self, label: str, spans: Sequence["Span"], parts: int) -> None:
        height = _ROW + 7
        share = sum(self.shares(spans).values(), np.zeros(self.pixels)) / parts
        kind = max(
            {span.kind for span in spans}, key=lambda each: sum(s.cycles for s in spans if s.kind == each)
        )
        visible = [max(min(s.end, self.end) - max(s.start, self.start), 0) for s in spans]
        mean = sum(visible) / parts / (min(self.end, self.timeline.cycles) - self.start)
        self.put(_PAD, self.y + 11, f"{label} {mean:.0%}")
        base = self.y + height - 2
        self.parts.append(f'<path class="axis" d="M{_LABEL + _PAD} {base}h{self.pixels}"/>')
        levels = np.round(np.minimum(share, 1) * (height - 6)).astype(int)
        boxes = []
        for level in np.unique(levels[levels > 0]).tolist():
            boxes += [self.box(a, b, base - level, level) for a, b in runs(levels == level)]
        self.shape(kind, boxes, f"{label}: {mean:.1%} busy")
        self.y += height

    def box(self, first: float, last: float, y: float, height: float) -> str:
        return f"M{_LABEL + _PAD + first:g} {y:g}h{last - first:g}v{height:g}h{first - last:g}z"

    def shape(self, kind: str, boxes: Sequence[str], tip: str) -> None:
        if boxes:
            self.kinds.add(kind)
            self.parts.append(
                f'<path class="{kind}" d="{"".join(boxes)}"><title>{escape(tip)}</title></path>'
            )

    # --- Around them

    def axis(self) -> None:
        step = next(
            size * 10**power
            for power in range(9)
            for size in (1, 2, 5)
            if size * 10**power * self.scale >= 70
        )
        top, bottom = self.axis_top - 2, self.y + 3
        first = ceil(self.start / step) * step
        for cycle in range(first, int(self.end) + 1, step):
            x = _LABEL + _PAD + (cycle - self.start) * self.scale
            self.parts.insert(0, f'<path class="axis" d="M{x:.1f} {top}V{bottom}"/>')
            if x < self.width - _PAD - 20:
                self.put(x, bottom + 12, f"{cycle}", "mid")
        self.put(_PAD, bottom + 12, "cycles")
        self.y = bottom + 12 + _GAP

    def legend(self) -> None:
        self.y += 4
        x: float = _PAD
        for kind in KINDS:
            if kind not in self.kinds:
                continue
            size = 22 + len(_MEANING[kind]) * _CHARACTER + 16
            if x + size > self.width - _PAD:
                x, self.y = _PAD, self.y + _TEXT + 4
            y, height = (self.y + 5, 3) if kind in _THIN else (self.y + 1, 11)
            self.parts.append(f'<path class="{kind}" d="M{x:g} {y:g}h16v{height}h-16z"/>')
            self.put(x + 21, self.y + 10, _MEANING[kind])
            x += size
        self.y += _TEXT

    def put(self, x: float, y: float, text: str, kind: str = "") -> None:
        of_kind = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text{of_kind} x="{x:.5g}" y="{y:.5g}">{escape(text)}</text>')


def runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """(first, one behind the last) of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _style(theme: str) -> str:
    """Rules that name the theme, because a notebook applies each picture's rules to the whole page."""

    def rules(colours: Mapping[str, str]) -> str:
        root = f"svg.cutelab-timeline.{theme}"
        return (
            f"{root} .panel{{fill:{colours['panel']}}}{root} text{{fill:{colours['ink']}}}"
            f"{root} .axis{{stroke:{colours['line']};fill:none}}"
        )

    shared = (
        "svg.cutelab-timeline text{font:11px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace}"
        "svg.cutelab-timeline text.title{font-weight:bold}svg.cutelab-timeline text.mid{text-anchor:middle}"
        + "".join(f"svg.cutelab-timeline .{kind}{{fill:{colour}}}" for kind, colour in _COLOURS.items())
    )
    if theme != "auto":
        return shared + rules(THEMES[theme])
    return f"{shared}{rules(THEMES['light'])}@media (prefers-color-scheme:dark){{{rules(THEMES['dark'])}}}"
