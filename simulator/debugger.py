"""Stops inside a running kernel and looks around: `simulator.Debugger(launch)`.

The launch is executed instruction by instruction, on one warp at a time (a wgmma on the four warps of a
warpgroup). The warps go on in turn, until the debugger stops at one of them; from there `step` follows that
warp as long as it can go on.
"""

import linecache
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from cutelab.simulator import numbers, ptx
from cutelab.simulator.cta import WARP, Cta
from cutelab.simulator.errors import SimulationError
from cutelab.simulator.execution import grid_of, program_of
from cutelab.simulator.grid import Grid, Three
from cutelab.simulator.machine import Fragment, Runner
from cutelab.simulator.operands import BANKS
from cutelab.simulator.ptx import Address, Immediate, Instruction, Negated, Pair, Register, Vector
from cutelab.simulator.races import NOBODY
from cutelab.simulator.standin import Launch
from cutelab.simulator.translate import NO_RESULT

Where = str | tuple[str, int]

_PACKED = ("f16", "bf16", "e4m3", "e5m2")
_NUMPY = {"b": "u", "u": "u", "s": "i", "f": "f"}
NEAREST = 4
"""So many lines or names are offered in place of one that isn't there."""


@dataclass(frozen=True, eq=False, repr=False)
class Place:
    """Where some warps of a CTA are: at an instruction that they execute next, or have executed last.

    cta: its (x, y, z). warps: their numbers in the CTA; more than one only at a wgmma. threads: those of
    their threads that execute it. instruction, ptx_line: in the PTX. file, line, source: of the program, as
    far as the compiler says; source is the line's text. waits_for: what holds the warps back here, if anything.
    """

    cta: Three
    warps: tuple[int, ...]
    threads: np.ndarray
    instruction: str
    ptx_line: int
    file: str
    line: int
    waits_for: str = ""
    _instruction: Instruction | None = field(default=None)

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        name = "warp" if len(self.warps) == 1 else "warps"
        lanes = "" if len(self.threads) == WARP * len(self.warps) else f", {len(self.threads)} lanes"
        who = f"CTA {self.cta}, {name} {', '.join(map(str, self.warps))}{lanes}"
        waits = f"\n  waits for {self.waits_for}" if self.waits_for else ""
        source = f"\n  {Path(self.file).name}:{self.line}: {self.source}" if self.file else ""
        return f"{who}{waits}{source}\n  PTX line {self.ptx_line}: {self.instruction}"

    __repr__ = __str__


@dataclass(frozen=True, eq=False)
class Operand:
    """An operand of an instruction and what its registers hold, for each thread that executes it.

    bits: (registers, threads), unsigned (predicates: bool). type: what the instruction takes them for, a PTX
    type such as "f32" or "bf16". written: whether the instruction writes them.
    """

    text: str
    registers: tuple[str, ...]
    bits: np.ndarray
    type: str
    written: bool

    @property
    def values(self) -> np.ndarray:
        return self.view(self.type)

    def view(self, kind: str) -> np.ndarray:
        """The registers as numbers of a PTX type.

        (registers, threads) for a type as wide as they are; for a narrower one, such as the two "bf16" of 32
        bits, (registers, threads, numbers), lowest bits first. Formats that NumPy doesn't have come as
        float32. Raises SimulationError for a type that doesn't fit.
        """
        if self.bits.dtype == bool:
            return self.bits
        width = self.bits.dtype.itemsize * 8
        kind = kind.removesuffix("x2").removesuffix("x4")
        bits = {"bf16": 16, "e4m3": 8, "e5m2": 8, "tf32": 32}.get(kind) or ptx.BITS.get(kind, 0)
        if not 8 <= bits <= width or (kind[0] == "f" and bits < 16):
            legal = [*(name for name, size in ptx.BITS.items() if 8 <= size <= width), *_PACKED]
            raise SimulationError(
                f"{self.text} has registers of {width} bits, which are no {kind!r}; a type is one of "
                f"{', '.join(name for name in legal if name != 'f8')}"
            )
        parts = np.ascontiguousarray(self.bits)[..., None].view(f"u{bits // 8}")
        numbered = as_numbers(parts, kind)
        return numbered[..., 0] if bits == width else numbered


def as_numbers(bits: np.ndarray, kind: str) -> np.ndarray:
    """Unsigned integers as numbers of a PTX type of that width."""
    if kind in (*_PACKED, "tf32"):
        return np.asarray(numbers.unpacked(bits, kind)).astype(np.float32)
    return bits.view(f"{_NUMPY[kind[0]]}{bits.dtype.itemsize}")


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
    """Executes a launch under control; the tensors that it works on have to be kept alive meanwhile.

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
        self.launch = launch
        self._program = program_of(launch.ptx, launch.kernel, stepwise=True)
        self._grid = grid_of(launch, self._program, grid_type=Stepwise)
        self._batches = self._executed()
        self._runner: Runner | None = None
        self._batch: list[Fragment] = []
        self._before: dict[tuple[Three, int], int] = {}  # the segment that each warp executed last
        self._fresh = True  # nobody has been told of `next` yet, so `run_until` may stop there
        self.failed = False
        self.next: Place | None = None
        self.last: Place | None = None
        self._advance()

    # --- Going on

    def run_until(self, where: Where, *, cta: Three | None = None, warp: int | None = None) -> Place | None:
        """Goes on until a warp comes to a line or an instruction, which it executes next.

        where: a line of the program, "file.py:12" or ("file.py", 12), or a PTX instruction by the beginning
        of its name, such as "ldmatrix" or "mma.sync". A warp comes to a line once, however many instructions
        the line has. cta, warp: stop only there. Returns None if all has ended before. Raises
        SimulationError for a place that the kernel doesn't have.
        """
        wanted, is_line = self._wanted(where), isinstance(where, tuple) or _is_line(where)
        self._check(cta, warp)
        self._follow(None)
        while self.next is not None:
            if not self._fresh:
                self._advance()
            self._fresh = False
            if self.next is None:
                return None
            fragment = self._batch[0]
            if fragment.segment not in wanted:
                continue
            came_from = self._before.get((fragment.cta.index, fragment.warp), -1)
            if is_line and came_from in wanted:
                continue
            if (cta is None or self.next.cta == cta) and (warp is None or warp in self.next.warps):
                return self.next
        return None

    def step(self) -> Place | None:
        """Executes one instruction of the warp where it has stopped; returns `next`.

        That is the same warp's next instruction, if it can go on.
        """
        self._follow(self._batch[0].number if self._batch else None)
        self._fresh = False
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
        done, batch = self.next, self._batch
        for fragment in batch:
            self._before[fragment.cta.index, fragment.warp] = fragment.segment
        try:
            with np.errstate(all="ignore"):
                following = next(self._batches, None)
        except BaseException:
            self.failed = True
            raise
        self.last = done
        if following is None:
            self.next, self._batch = None, []
        else:
            self._runner, self._batch = following
            self.next = self._place(self._batch)

    def _place(self, batch: list[Fragment]) -> Place:
        first = batch[0]
        instruction = self._program.kernel.instructions[first.segment]
        file, line = instruction.source or ("", 0)
        return Place(
            first.cta.index,
            tuple(sorted(fragment.warp for fragment in batch)),
            np.sort(np.concatenate([fragment.threads for fragment in batch])),
            *(_instruction_text(instruction), instruction.line, file, line, first.reason, instruction),
        )

    # --- Where to stop

    @cached_property
    def _lines(self) -> dict[str, dict[int, set[int]]]:
        """The segments of each line of each file."""
        lines: dict[str, dict[int, set[int]]] = {}
        for index, instruction in enumerate(self._program.kernel.instructions):
            if instruction.source:
                file, line = instruction.source
                lines.setdefault(file, {}).setdefault(line, set()).add(index)
        return lines

    def _wanted(self, where: Where) -> set[int]:
        """The segments that a place stands for."""
        if isinstance(where, tuple):
            return self._of_line(*where)
        if _is_line(where):
            file, _, line = where.rpartition(":")
            return self._of_line(file, int(line))
        instructions = self._program.kernel.instructions
        found = {
            index
            for index, each in enumerate(instructions)
            if each.name == where or _begins(each.name, where)
        }
        if not found:
            names = sorted({each.opcode for each in instructions})
            near = get_close_matches(where.split(".")[0], names, NEAREST, 0.3) or names
            raise SimulationError(
                f"the kernel has no instruction {where!r}; similar ones that it has: {', '.join(near)}"
            )
        return found

    def _of_line(self, file: str, line: int) -> set[int]:
        files = [each for each in self._lines if each == file or Path(each).match(file)]
        if not files:
            known = ", ".join(sorted({Path(each).name for each in self._lines})) or "no line information"
            raise SimulationError(f"no instruction of the kernel comes from {file!r}; its files: {known}")
        found: set[int] = set().union(*(self._lines[each].get(line, set()) for each in files))
        if not found:
            lines = {each for name in files for each in self._lines[name] if each}
            near = sorted(sorted(lines, key=lambda each: abs(each - line))[:NEAREST])
            raise SimulationError(
                f"no instruction comes from line {line} of {Path(file).name}; the nearest lines that have "
                f"some: {', '.join(map(str, near))}"
            )
        return found

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

    def registers(
        self, *, cta: Three | None = None, warp: int | None = None, thread: int | None = None
    ) -> dict[str, Any]:
        """What each PTX register holds, by name: in the lanes of a warp, by default where it has stopped.

        Unsigned integers unless the register is declared otherwise, predicates as bool. thread: one value
        each, of that thread of the CTA.
        """
        state = self._cta(cta)
        if thread is not None and not 0 <= thread < state.threads:
            raise SimulationError(f"there is no thread {thread}: a CTA has threads 0 … {state.threads - 1}")
        place = self.next or self.last
        if warp is None:
            warp = place.warps[0] if place else 0
        self._check(None, warp)
        which: Any = slice(warp * WARP, min((warp + 1) * WARP, state.threads)) if thread is None else thread
        registers = self._program.kernel.registers.values()
        return {each.name: self._value(state, each, which) for each in registers}

    def operands(self, place: Place | None = None) -> list[Operand]:
        """The operands of an instruction that are in registers, with their values now.

        place: by default `last`, so that after a `step` its results can be seen, or `next` at the beginning.
        Threads are those of `place`.
        """
        place = place or self.last or self.next
        if place is None or place._instruction is None:
            raise SimulationError("nothing has been executed, so there are no operands")
        state, instruction = self._cta(place.cta), place._instruction
        found = []
        for number, operand in enumerate(instruction.operands):
            registers = tuple(_registers_in(operand))
            if not registers:
                continue
            values = [np.asarray(self._value(state, each, place.threads)) for each in registers]
            kind = _type_of(instruction, number, operand, registers[0])
            written = number == 0 and instruction.opcode not in NO_RESULT
            names = tuple(each.name for each in registers)
            found.append(Operand(_text(operand), names, np.stack(values), kind, written))
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
        that NumPy doesn't have come as float32.

        offset: in bytes. shape: by default all that follows. Raises SimulationError beyond its end.
        """
        state = self._cta(cta)
        size = {"bf16": 2, "e4m3": 1, "e5m2": 1, "tf32": 4}.get(dtype) or ptx.BITS.get(dtype, 0) // 8
        if not size or dtype in ("f8", "f128", "b128", "u128", "s128"):
            raise SimulationError(f"a type is one like 'bf16', 'f16', 'f32', 'u8' or 's32', not {dtype!r}")
        total = state.shared.data.size
        if shape is None:
            shape = max(total - offset, 0) // size
        count = prod(shape) if isinstance(shape, tuple) else shape
        if offset % size or offset < 0 or offset + count * size > total:
            raise SimulationError(
                f"{count} numbers of {size} bytes from byte {offset} on are not in shared memory, which has "
                f"{total} bytes; offsets are multiples of {size}, from there {max(total - offset, 0) // size} fit"
            )
        data = state.shared.data[offset : offset + count * size].copy().view(f"u{size}")
        shadow = state.shadow
        cells = np.arange(offset, offset + count * size) // shadow.granule
        unwritten = (shadow.writer[cells] == NOBODY).reshape(count, size).any(axis=1)
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

    def _value(self, state: Cta, register: Register, which: Any) -> Any:
        row = self._program.rows[register.name]
        bank = BANKS["pred" if register.type == "pred" else ptx.BITS[register.type]]
        if bank == "q":
            return np.stack([state.d[row, which], state.d[row + 1, which]], axis=-1)
        values = getattr(state, bank)[row, which].copy()
        full = register.type[0] in "sf" and ptx.BITS[register.type] == 8 * values.dtype.itemsize
        return values.view(f"{_NUMPY[register.type[0]]}{values.dtype.itemsize}") if full else values


def _is_line(where: str) -> bool:
    file, colon, line = where.rpartition(":")
    return bool(colon) and line.isdecimal() and not file.endswith(":")


def _begins(name: str, start: str) -> bool:
    return name.startswith(start) and name[len(start)] in ".:"


def _registers_in(operand: Any) -> Iterable[Register]:
    parts = {
        Vector: lambda: operand.items,
        Pair: lambda: (operand.first, operand.second),
        Negated: lambda: (operand.register,),
        Address: lambda: (operand.base, *(operand.coordinates.items if operand.coordinates else ())),
    }
    if isinstance(operand, Register):
        yield operand
    for part in parts.get(type(operand), tuple)():
        yield from _registers_in(part)


def _text(operand: Any) -> str:
    """As PTX writes it."""
    if isinstance(operand, Vector):
        return "{" + ", ".join(map(_text, operand.items)) + "}"
    if isinstance(operand, Pair):
        return f"{_text(operand.first)}|{_text(operand.second)}"
    if isinstance(operand, Negated):
        return f"!{operand.register.name}"
    if isinstance(operand, Address):
        offset = f"+{operand.offset}" if operand.offset else ""
        more = f", {_text(operand.coordinates)}" if operand.coordinates else ""
        return f"[{_text(operand.base)}{offset}{more}]"
    return str(operand.value) if isinstance(operand, Immediate) else operand.name


def _instruction_text(instruction: Instruction) -> str:
    """Its line of PTX, put together again where it takes several."""
    if instruction.text.endswith(";"):
        return " ".join(instruction.text.split())
    return f"{instruction.name} {', '.join(map(_text, instruction.operands))};"


def _type_of(instruction: Instruction, number: int, operand: Any, register: Register) -> str:
    """What an instruction takes an operand for; where its name doesn't say, the register's own type."""
    if register.type == "pred":
        return "pred"
    width = ptx.BITS[register.type]
    types = [m for m in instruction.modifiers if m in ptx.BITS or m in (*_PACKED, "tf32", "f16x2", "bf16x2")]
    if instruction.opcode == "mma" and len(types) == 4:
        kind = types[number]
    elif isinstance(operand, Address) or not types:
        return register.type
    else:
        kind = types[0] if instruction.opcode == "cvt" and number == 0 else types[-1]
    size = ptx.BITS.get(kind.removesuffix("x2"), {"bf16": 16, "tf32": 32}.get(kind.removesuffix("x2"), 8))
    return kind if size <= width and kind != "pred" else register.type
