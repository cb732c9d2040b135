"""Stops inside a running kernel and looks around: `simulator.Debugger(launch)`.

The launch is executed instruction by instruction, on one warp at a time (a wgmma on the four warps of a
warpgroup). The warps go on in turn, until the debugger stops at one of them; from there `step` follows that
warp as long as it can go on.
"""

import linecache
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from cutelab.simulator import ptx
from cutelab.simulator.cta import WARP, Cta
from cutelab.simulator.errors import SimulationError
from cutelab.simulator.execution import grid_of, program_of
from cutelab.simulator.grid import Grid, Three
from cutelab.simulator.machine import Fragment, Runner
from cutelab.simulator.operands import BANKS
from cutelab.simulator.ptx import Instruction, Register
from cutelab.simulator.races import NOBODY
from cutelab.simulator.standin import Launch
from cutelab.simulator.translate import NO_RESULT
from cutelab.simulator.values import WIDTHS, Operand, as_numbers, line_of, registers_in, text_of, type_of

NEAREST = 4
"""So many lines or names are offered in place of one that isn't there."""


@dataclass(frozen=True, eq=False, repr=False)
class Place:
    """Where some warps of a CTA are: at an instruction that they execute next, or have executed last.

    cta: its (x, y, z). warps: their numbers in the CTA; more than one only at a wgmma. threads: those of
    their threads that execute it. waits_for: what holds the warps back here, if anything.
    """

    cta: Three
    warps: tuple[int, ...]
    threads: np.ndarray
    instruction: Instruction
    waits_for: str = ""

    @property
    def file(self) -> str:
        """That of the program, as far as the compiler says, else ""."""
        return self.instruction.source[0] if self.instruction.source else ""

    @property
    def line(self) -> int:
        return self.instruction.source[1] if self.instruction.source else 0

    @property
    def source(self) -> str:
        """The text of the program's line."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        name = "warp" if len(self.warps) == 1 else "warps"
        lanes = "" if len(self.threads) == WARP * len(self.warps) else f", {len(self.threads)} lanes"
        who = f"CTA {self.cta}, {name} {', '.join(map(str, self.warps))}{lanes}"
        waits = f"\n  waits for {self.waits_for}" if self.waits_for else ""
        source = f"\n  {Path(self.file).name}:{self.line}: {self.source}" if self.file else ""
        return f"{who}{waits}{source}\n  PTX line {self.instruction.line}: {line_of(self.instruction)}"

    __repr__ = __str__


class OneWarp(Runner):
    """Executes one warp at a time: `followed` if that can go on, else who has executed least."""

    followed: int | None = None

    def choose(self, ready: list[Fragment], together: set[Fragment]) -> list[Fragment]:
        leader = min(ready, key=lambda each: (each.number != self.followed, each.steps, each.number))
        if leader not in together:
            return [leader]
        place = leader.cta, leader.warp // 4, leader.segment
        return [each for each in together if (each.cta, each.warp // 4, each.segment) == place]


class Stepwise(Grid):
    runner_type = OneWarp


class Debugger:
    """Executes a launch under control.

        launches = []
        with simulator.gpu("sm_90a", execute=launches.append):
            program(...)
        debugger = simulator.Debugger(launches[0])
        print(debugger.run_until("ldmatrix", warp=0))
        debugger.step()
        print(debugger.operands()[0].view("bf16"))

    next: the `Place` that is executed next, None when all has ended. last: what was executed last. An error
    of the kernel comes out of the method that ran into it; then `next` is where that was, registers and
    memory are as they were then, and nothing goes on.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch  # and with it the tensors
        self._program = program_of(launch.ptx, launch.kernel, stepwise=True)
        self._grid = grid_of(launch, self._program, grid_type=Stepwise)
        self._batches = self._executed()
        self._runner: Runner | None = None
        self._batch: list[Fragment] = []
        self._before: dict[tuple[Three, int], int] = {}  # the segment that each warp executed last
        self._passed = False  # whether `next` is where the last call has stopped
        self.failed = False
        self.next: Place | None = None
        self.last: Place | None = None
        self._advance()

    # --- Going on

    def run_until(self, where: str, *, cta: Three | None = None, warp: int | None = None) -> Place | None:
        """Goes on until a warp comes to a line or an instruction, which it executes next.

        where: a line of the program, "file.py:12", or a PTX instruction by the beginning of its name, such
        as "ldmatrix" or "mma.sync". A warp comes to a line once, however many instructions the line has.
        cta, warp: stop only there. Returns None if all has ended before. Raises SimulationError for a place
        that the kernel doesn't have.
        """
        line = re.fullmatch(r"(.+):(\d+)", where)
        wanted = self._at_line(line[1], int(line[2])) if line else self._named(where)
        self._check(cta, warp)
        self._follow(None)
        while self.next is not None:
            if self._passed:
                self._advance()
            self._passed = True
            if self.next and self._stops(wanted, bool(line), cta, warp):
                return self.next
        return None

    def _stops(self, wanted: set[int], once: bool, cta: Three | None, warp: int | None) -> bool:
        first = self._batch[0]
        if first.segment not in wanted or cta not in (None, first.cta.index):
            return False
        if once and self._before.get((first.cta.index, first.warp)) in wanted:
            return False
        return warp is None or warp in [each.warp for each in self._batch]

    def step(self) -> Place | None:
        """Executes one instruction of the warp where it has stopped; returns `next`.

        That is the same warp's next instruction, if it can go on.
        """
        self._follow(self._batch[0].number if self._batch else None)
        self._passed = True
        self._advance()
        return self.next

    def finish(self) -> None:
        """Executes the launch to its end."""
        self._follow(None)
        while self.next is not None:
            self._advance()

    def _follow(self, warp: int | None) -> None:
        if self.failed:
            raise SimulationError("the kernel has failed: nothing goes on; a new Debugger starts again")
        if isinstance(self._runner, OneWarp):
            self._runner.followed = warp

    def _executed(self) -> Iterator[tuple[Runner, list[Fragment]]]:
        for runner, steps, polls in self._grid.turns(range(len(self._grid.clusters))):
            for batch in runner.batches(steps, polls):
                yield runner, batch

    def _advance(self) -> None:
        """Executes `next`, and finds out what follows."""
        for fragment in self._batch:
            self._before[fragment.cta.index, fragment.warp] = fragment.segment
        try:
            with np.errstate(all="ignore"):
                following = next(self._batches, None)
        except BaseException:
            self.failed = True
            raise
        self.last = self.next
        if following is None:
            self.next, self._batch = None, []
        else:
            self._runner, self._batch = following
            self.next = self._place(self._batch)

    def _place(self, batch: list[Fragment]) -> Place:
        first = batch[0]
        warps = tuple(sorted(fragment.warp for fragment in batch))
        threads = np.sort(np.concatenate([fragment.threads for fragment in batch]))
        instruction = self._program.kernel.instructions[first.segment]
        return Place(first.cta.index, warps, threads, instruction, first.reason)

    # --- Where to stop

    def _named(self, name: str) -> set[int]:
        """The segments of the instructions whose name begins so."""
        instructions = self._program.kernel.instructions
        begins = re.compile(re.escape(name) + r"(?!\w)")
        found = {index for index, each in enumerate(instructions) if begins.match(each.name)}
        if not found:
            names = sorted({each.opcode for each in instructions})
            near = get_close_matches(name.split(".")[0], names, NEAREST, 0.3) or names
            raise SimulationError(
                f"the kernel has no instruction {name!r}; similar ones that it has: {', '.join(near)}"
            )
        return found

    def _at_line(self, file: str, line: int) -> set[int]:
        """The segments that a line stands for."""
        files = [each for each in self._lines if Path(each).match(file)]
        if not files:
            known = ", ".join(sorted({Path(each).name for each in self._lines})) or "no line information"
            raise SimulationError(f"no instruction of the kernel comes from {file!r}; its files: {known}")
        found = set().union(*(self._lines[each].get(line, set()) for each in files))
        if not found:
            lines = {each for name in files for each in self._lines[name] if each}
            near = sorted(sorted(lines, key=lambda each: abs(each - line))[:NEAREST])
            raise SimulationError(
                f"no instruction comes from line {line} of {Path(file).name}; the nearest lines that have "
                f"some: {', '.join(map(str, near))}"
            )
        return found

    @cached_property
    def _lines(self) -> dict[str, dict[int, set[int]]]:
        """The segments of each line of each file."""
        lines: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        for index, instruction in enumerate(self._program.kernel.instructions):
            if instruction.source:
                file, line = instruction.source
                lines[file][line].add(index)
        return lines

    def _check(self, cta: Three | None, warp: int | None) -> None:
        grid, warps = self.launch.grid, -(-prod(self.launch.block) // WARP)
        if cta is not None and not (
            len(cta) == 3 and all(0 <= n < size for n, size in zip(cta, grid, strict=True))
        ):
            last = tuple(size - 1 for size in grid)
            raise SimulationError(f"there is no CTA {cta}: the grid has (0, 0, 0) … {last}")
        if warp is not None and not 0 <= warp < warps:
            raise SimulationError(f"there is no warp {warp}: a CTA has warps 0 … {warps - 1}")

    # --- Looking around

    def warps(self) -> list[Place]:
        """Where the warps of the running cluster are, and what they wait for."""
        if self._runner is None:
            return []
        in_order = sorted(self._runner.fragments, key=lambda each: (each.number, int(each.threads[0])))
        return [self._place([fragment]) for fragment in in_order]

    def registers(self, *, cta: Three | None = None, warp: int | None = None) -> dict[str, np.ndarray]:
        """What each PTX register holds in the lanes of a warp, by name; by default where it has stopped.

        As it is declared: integers are unsigned where its type is "b32" and the like, predicates are bool.
        """
        state = self._cta(cta)
        place = self.next or self.last
        if warp is None:
            warp = place.warps[0] if place else 0
        self._check(None, warp)
        lanes = slice(warp * WARP, min((warp + 1) * WARP, state.threads))
        found = {}
        for each in self._program.kernel.registers.values():
            bits = self._bits(state, each, lanes)
            found[each.name] = as_numbers(bits, each.type) if each.type in WIDTHS else bits
        return found

    def operands(self, place: Place | None = None) -> list[Operand]:
        """The operands of an instruction that are in registers, with their values now.

        place: by default `last`, so that after a `step` its results can be seen, or `next` at the beginning.
        Threads are those of `place`.
        """
        place = place or self.last or self.next
        if place is None:
            raise SimulationError("nothing has been executed, so there are no operands")
        state, instruction = self._cta(place.cta), place.instruction
        found = []
        for number, operand in enumerate(instruction.operands):
            registers = list(registers_in(operand))
            if registers:
                bits = np.stack([self._bits(state, each, place.threads) for each in registers])
                kind = type_of(instruction, number, registers[0])
                written = number == 0 and instruction.opcode not in NO_RESULT
                names = tuple(each.name for each in registers)
                found.append(Operand(text_of(operand), names, bits, kind, written))
        return found

    def shared(
        self,
        dtype: str = "u8",
        offset: int = 0,
        shape: int | tuple[int, ...] | None = None,
        *,
        cta: Three | None = None,
    ) -> np.ma.MaskedArray:
        """A copy of a CTA's shared memory as numbers of a PTX type, such as "bf16" or "f32".

        Numbers with bytes that nobody has written are masked: `.filled(np.nan)` of floats shows them. Formats
        that NumPy doesn't have come as float32. A table of offsets, such as a layout, picks elements of it.

        offset: in bytes. shape: by default all that follows. Raises SimulationError beyond its end.
        """
        state = self._cta(cta)
        if dtype not in WIDTHS:
            raise SimulationError(f"there is no type {dtype!r}; a type is one of {', '.join(WIDTHS)}")
        size, total = WIDTHS[dtype] // 8, state.shared.data.size
        room = max(total - offset, 0) // size
        shape = room if shape is None else shape
        count = prod(shape) if isinstance(shape, tuple) else shape
        if offset % size or offset < 0 or count > room:
            raise SimulationError(
                f"{count} numbers of {size} bytes from byte {offset} on are not in shared memory, which has "
                f"{total} bytes; offsets are multiples of {size}, from there {room} fit"
            )
        data = state.shared.data[offset : offset + count * size].copy().view(f"u{size}")
        cells = np.arange(offset, offset + count * size) // state.shadow.granule
        unwritten = (state.shadow.writer[cells] == NOBODY).reshape(count, size).any(axis=1)
        return np.ma.MaskedArray(as_numbers(data, dtype), unwritten).reshape(shape)

    def _cta(self, index: Three | None) -> Cta:
        """The state of a CTA that is running, by default where it has stopped."""
        self._check(index, None)
        running = {} if self._runner is None else {each.index: each for each in self._runner.ctas}
        place = self.next or self.last
        wanted = index or (place.cta if place else None)
        if wanted is None or wanted not in running:
            names = ", ".join(map(str, running))
            raise SimulationError(f"CTA {wanted} isn't running: only {names} can be looked at")
        return running[wanted]

    def _bits(self, state: Cta, register: Register, threads: Any) -> np.ndarray:
        """A register in some threads: unsigned, or bool; of 128 bits, (threads, 2)."""
        row = self._program.rows[register.name]
        bank = BANKS["pred" if register.type == "pred" else ptx.BITS[register.type]]
        if bank == "q":
            return np.stack([state.d[row, threads], state.d[row + 1, threads]], axis=-1)
        return getattr(state, bank)[row, threads].copy()
