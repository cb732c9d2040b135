"""What the warps and engines of a cluster did when: `Timeline`, as numbers, as a picture and for Perfetto."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

from cutelab.simulator.costs import KINDS, Costs
from cutelab.simulator.errors import SimulationError
from cutelab.simulator.ptx import Instruction

Three = tuple[int, int, int]

FLIGHT = "in flight"
BUSY = ("tensor core", "MUFU", "shared memory", "global loads", "global stores")
"""Engines that have a row in pictures; those of the four sub-cores share one."""


@dataclass(frozen=True)
class Span:
    """Something that took from cycle `start` to cycle `end`.

    track: who did it, "warp 3" or an engine. warp: its number in the CTA; None for engines. kind: one of
    `costs.KINDS`. name: the PTX instruction, or what was waited for. source: file and line, if known.
    """

    cta: Three
    track: str
    warp: int | None
    kind: str
    name: str
    start: float
    end: float
    source: tuple[str, int] | None

    @property
    def cycles(self) -> float:
        return self.end - self.start


@dataclass(eq=False)
class Recorder:
    """Collects spans; of a track, neighbours of one kind and name become one."""

    tracks: dict[tuple[Three, str, int | None], list[list[Any]]] = field(default_factory=dict)
    flights: dict[tuple[Three, Any], tuple[str, float, float]] = field(default_factory=dict)

    def warp(
        self, cta: Three, warp: int, kind: str, what: Instruction, start: float, end: float, name: str = ""
    ) -> None:
        self.add((cta, f"warp {warp}", warp), kind, name or short_name(what), what, start, end)

    def engine(self, cta: Three, track: str, kind: str, what: Instruction, start: float, end: float) -> None:
        self.add((cta, track, None), kind, short_name(what), what, start, end)

    def add(
        self,
        track: tuple[Three, str, int | None],
        kind: str,
        name: str,
        what: Instruction,
        start: float,
        end: float,
    ) -> None:
        if end <= start:
            return
        spans = self.tracks.setdefault(track, [])
        if spans and spans[-1][:2] == [kind, name] and spans[-1][3] == start:
            spans[-1][3] = end
        else:
            spans.append([kind, name, start, end, what.source])

    def flight(self, cta: Three, key: Any, name: str, start: float, end: float) -> None:
        """A part of a copy; those with one key are drawn as one."""
        _, first, last = self.flights.get((cta, key), (name, start, end))
        self.flights[cta, key] = name, min(first, start), max(last, end)

    def timeline(self, kernel: str, arch: str, costs: Costs) -> "Timeline":
        spans = [
            Span(cta, track, warp, kind, name, start, end, source)
            for (cta, track, warp), entries in self.tracks.items()
            for kind, name, start, end, source in entries
        ]
        lanes: dict[Three, list[float]] = {}  # when each lane is free
        for (cta, _), (name, start, end) in sorted(self.flights.items(), key=lambda item: item[1][1:]):
            free = lanes.setdefault(cta, [])
            lane = next((n for n, until in enumerate(free) if until <= start), len(free))
            free[lane:] = [end, *free[lane + 1 :]]
            spans.append(Span(cta, f"{FLIGHT} {lane}", None, "copy", name, start, end, None))
        return Timeline(kernel, arch, costs, tuple(sorted(spans, key=_order)))


def short_name(instruction: Instruction) -> str:
    """The part of an instruction's name that says what it does: "mma.sync", "cp.async", "ld.global"."""
    count = {"cp": 3 if "bulk" in instruction.modifiers else 2, "add": 1}.get(instruction.opcode, 2)
    if "wait_group" in instruction.modifiers or "commit_group" in instruction.modifiers:
        count = 3
    return ".".join(instruction.name.split(".")[:count])


def _order(span: Span) -> tuple[Any, ...]:
    """CTA by CTA, warps before engines, each in the order of time."""
    kind = 0 if span.warp is not None else 1 if span.track.startswith(FLIGHT) else 2
    return *reversed(span.cta), kind, span.warp or 0, span.track, span.start


@dataclass(frozen=True, eq=False, repr=False)
class Timeline:
    """The work of a cluster, in cycles from its start. Notebooks show the picture; `print` a table."""

    kernel: str
    arch: str
    costs: Costs
    spans: tuple[Span, ...]

    @cached_property
    def cycles(self) -> int:
        """Until the last warp has ended, and everything has arrived."""
        return ceil(max((span.end for span in self.spans), default=0))

    @property
    def ctas(self) -> list[Three]:
        return list(dict.fromkeys(span.cta for span in self.spans))

    def of(self, track: str, kind: str | None = None, cta: Three | None = None) -> list[Span]:
        """The spans of tracks whose name begins so, such as "warp 0" or "tensor core".

        Raises SimulationError if there is no such track, or no such kind.
        """
        tracks = {span.track for span in self.spans}
        chosen = {each for each in tracks if each == track} or {
            each for each in tracks if each.startswith(track)
        }
        if not chosen:
            raise SimulationError(f"no track {track!r}; there are: {', '.join(sorted(tracks))}")
        if kind is not None and kind not in KINDS:
            raise SimulationError(f"no kind {kind!r}; there are: {', '.join(KINDS)}")
        return [
            span
            for span in self.spans
            if span.track in chosen and kind in (None, span.kind) and cta in (None, span.cta)
        ]

    def busy(self, track: str, kind: str | None = None, cta: Three | None = None) -> float:
        """Cycles of all these spans together."""
        return sum(span.cycles for span in self.of(track, kind, cta))

    def __str__(self) -> str:
        """A table: for each warp the share of each kind, for each engine how much of the time it works."""
        width = max((len(track) for _, track in self._tracks()), default=5)
        kinds = [kind for kind in KINDS if any(span.kind == kind for span in self.spans)]
        lines = [f"{self.kernel_name} on {self.arch}: {self.cycles} cycles"]
        lines.append(" ".join([" " * width, *(f"{kind:>6}" for kind in kinds)]))
        for cta, track in self._tracks():
            if track.startswith(FLIGHT):
                continue
            shares = (self.busy(track, kind, cta) / self.cycles for kind in kinds)
            row = " ".join(f"{share:6.1%}" if share else " " * 6 for share in shares)
            lines.append(f"{track:{width}} {row}".rstrip())
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Timeline({self.kernel_name!r}, {self.arch!r}, cycles={self.cycles}, spans={len(self.spans)})"

    @property
    def kernel_name(self) -> str:
        """The name of the class or function that the kernel was compiled from, where that can be told."""
        of_method = re.search(r"([A-Z][A-Za-z0-9]*)_object_at_", self.kernel)
        of_function = re.match(r"kernel_cutlass_(.+?)_(?:tensor|ptr|\d+$)", self.kernel)
        found = of_method or of_function
        return found[1] if found else self.kernel

    def _tracks(self) -> list[tuple[Three, str]]:
        return list(dict.fromkeys((span.cta, span.track) for span in self.spans))

    # --- For Perfetto

    def chrome_trace(self) -> dict[str, Any]:
        """In the Trace Event Format, as chrome://tracing and ui.perfetto.dev read it: a cycle is 1 ns."""
        events: list[dict[str, Any]] = []
        processes = {cta: number for number, cta in enumerate(self.ctas)}
        threads: dict[tuple[Three, str], int] = {}
        for cta, number in processes.items():
            name = {"name": f"CTA {cta}"}
            events.append({"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": name})
        for cta, track in self._tracks():
            number = threads[cta, track] = len(threads)
            where = {"pid": processes[cta], "tid": number}
            events.append({"ph": "M", "name": "thread_name", **where, "args": {"name": track}})
            events.append({"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": number}})
        for span in self.spans:
            event = {
                "ph": "X",
                "name": span.name,
                "cat": span.kind,
                "ts": span.start / 1000,
                "dur": span.cycles / 1000,
                "pid": processes[span.cta],
                "tid": threads[span.cta, span.track],
            }
            if span.source:
                event["args"] = {"line": f"{span.source[0]}:{span.source[1]}"}
            events.append(event)
        return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"kernel": self.kernel}}

    def save(self, path: str | Path) -> None:
        """As a picture if the path ends in .svg, else as `chrome_trace` in JSON."""
        path = Path(path)
        text = self.svg() if path.suffix == ".svg" else json.dumps(self.chrome_trace())
        path.write_text(text, encoding="utf-8")

    # --- As a picture

    def _repr_svg_(self) -> str:
        return self.svg()

    def svg(
        self,
        start: float = 0,
        end: float | None = None,
        *,
        title: str | None = None,
        width: int = 960,
        theme: str = "auto",
    ) -> str:
        """A picture of the cycles from start to end, by default all.

        A row for each warp (of kernels with wgmma, for each warpgroup: that of its busiest warp), for copies
        in flight, and for engines, where height is the share of the time that they work. width: in pixels.
        theme: "light", "dark", or "auto" for what the reader's system prefers. Raises SimulationError for an
        empty range or another theme.
        """
        end = self.cycles if end is None else end
        if not 0 <= start < end:
            raise SimulationError(f"cycles {start} to {end}: take some of 0 to {self.cycles}")
        if theme not in ("auto", *_THEMES):
            raise SimulationError(f"a theme is 'auto', 'light' or 'dark', not {theme!r}")
        title = title or f"{self.kernel_name} on {self.arch}: {self.cycles} cycles"
        return _Picture(self, start, end, width, theme, title).text()


_COLOURS = {
    "mma": "#77AADD", "mufu": "#FFAABB", "math": "#BBCC33", "shared": "#44BB99", "global": "#EEDD88",
    "copy": "#EE8866", "sync": "#AAAA00", "other": "#BBBBBB", "stall": "#9AA3AD", "wait": "#CC6677",
}  # fmt: skip
_MEANING = {
    "mma": "mma", "mufu": "MUFU", "math": "other arithmetic", "shared": "shared memory", "global": "global memory",
    "copy": "copies", "sync": "barriers, fences", "other": "rest", "stall": "needs a result",
    "wait": "waits for others",
}  # fmt: skip
_THIN = ("stall", "wait")
_THEMES = {
    "light": {"panel": "#FFFFFF", "ink": "#1F2328", "line": "#D5DAE0"},
    "dark": {"panel": "#16191D", "ink": "#E8EAED", "line": "#343A41"},
}
_LABEL, _ROW, _GAP, _PAD, _TEXT = 118, 15, 5, 14, 14
_CHARACTER = 6.7


class _Picture:
    """Draws pixel by pixel: each pixel of a row has the kind that most of its cycles went to."""

    def __init__(
        self, timeline: Timeline, start: float, end: float, width: int, theme: str, title: str
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
        tracks = [track for where, track in self.timeline._tracks() if where == cta]
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

    def shares(self, spans: Iterable[Span]) -> dict[str, np.ndarray]:
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

    def kind_row(self, label: str, spans: Sequence[Span]) -> None:
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

    def flight_row(self, label: str, spans: Sequence[Span]) -> None:
        if label:
            self.put(_PAD, self.y + 11, label)
        for span in spans:
            first = (max(span.start, self.start) - self.start) * self.scale
            last = (min(span.end, self.end) - self.start) * self.scale
            if first < last:
                box = self.box(round(first, 1), round(max(last - 1, first + 1), 1), self.y + 2, _ROW - 4)
                self.shape("copy", [box], f"{span.name}: cycles {span.start:.0f} to {span.end:.0f}")
        self.y += _ROW

    def busy_row(self, label: str, spans: Sequence[Span], parts: int) -> None:
        height = _ROW + 7
        share = sum(self.shares(spans).values(), np.zeros(self.pixels)) / parts
        kind = max(
            {span.kind for span in spans}, key=lambda each: sum(s.cycles for s in spans if s.kind == each)
        )
        visible = [max(min(s.end, self.end) - max(s.start, self.start), 0) for s in spans]
        mean = sum(visible) / parts / (self.end - self.start)
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
        return shared + rules(_THEMES[theme])
    return f"{shared}{rules(_THEMES['light'])}@media (prefers-color-scheme:dark){{{rules(_THEMES['dark'])}}}"
