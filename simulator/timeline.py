"""What the warps and engines of a cluster did when: `Timeline`, as numbers, as a picture and for Perfetto."""

import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any

from cutelab.simulator.costs import KINDS, Costs
from cutelab.simulator.errors import SimulationError
from cutelab.simulator.grid import Three
from cutelab.simulator.ptx import Instruction
from cutelab.simulator.timeline_picture import FLIGHT, THEMES, Picture


@dataclass(frozen=True)
class Span:
    """Something that took from cycle `start` to cycle `end`.

    track: who did it, "warp 3" or an engine. warp: its number in the CTA; None for engines. kind: one of
    `costs.KINDS`. name: the PTX instruction, or what was waited for. source: file and line, if known.
    An instruction of a warp takes from when its sources are ready until it has issued: that it waits for its
    turn, or for its unit, counts as its work.
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
        width = max((len(track) for _, track in self.tracks()), default=5)
        kinds = [kind for kind in KINDS if any(span.kind == kind for span in self.spans)]
        lines = [f"{self.kernel_name} on {self.arch}: {self.cycles} cycles"]
        lines.append(" ".join([" " * width, *(f"{kind:>6}" for kind in kinds)]))
        for cta, track in self.tracks():
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

    def tracks(self) -> list[tuple[Three, str]]:
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
        for cta, track in self.tracks():
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
        """A picture of the cycles from start to end, by default all; they may be more than there are.

        A row for each warp (of kernels with wgmma, for each warpgroup: that of its busiest warp), for copies
        in flight, and for engines, where height is the share of the time that they work. width: in pixels.
        theme: "light", "dark", or "auto" for what the reader's system prefers. Raises SimulationError for an
        empty range or another theme.
        """
        end = self.cycles if end is None else end
        if not 0 <= start < min(end, self.cycles):
            raise SimulationError(f"cycles {start} to {end}: take some of 0 to {self.cycles}")
        if theme not in ("auto", *THEMES):
            raise SimulationError(f"a theme is 'auto', 'light' or 'dark', not {theme!r}")
        title = title or f"{self.kernel_name} on {self.arch}: {self.cycles} cycles"
        return Picture(self, start, end, width, theme, title).text()
