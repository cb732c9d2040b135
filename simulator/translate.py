"""Turns a PTX kernel into Python once: straight runs of instructions become functions over arrays of threads.

A segment is a run that is entered at its top and left at its bottom. `run(cta, s)` executes it for the
threads `s` of a CTA, a slice or an array of their numbers: each instruction is one NumPy expression over
rows of the register file, `r[7, s]` for the 32-bit register 7. What is more than an expression is a method
of the CTA (`cutelab.simulator.cta`). The generated source is kept: `Program.source`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from cutelab.simulator import ptx
from cutelab.simulator.arithmetic import Arithmetic
from cutelab.simulator.collective import Collective
from cutelab.simulator.movement import Movement
from cutelab.simulator.operands import VIEWS
from cutelab.simulator.ptx import Instruction

# Where control goes at the end of a segment.
FALL, BRANCH, EXIT, BARRIER, TRY_WAIT, CLUSTER = "fall", "branch", "exit", "barrier", "try_wait", "cluster"


@dataclass(frozen=True)
class Segment:
    """`run` executes it. At its end, `kind` says how control goes on; `last` is the instruction that decides.

    target: segment of the taken branch. join: where threads that part ways here meet again, if anywhere.
    """

    index: int
    instructions: tuple[Instruction, ...]
    run: Callable[[Any, Any], None]
    kind: str
    last: Instruction | None = None
    target: int = -1
    join: int | None = None
    warpgroup: bool = False  # executed by the four warps of a warpgroup at once


@dataclass(frozen=True)
class Program:
    kernel: ptx.Kernel
    segments: tuple[Segment, ...]
    rows: dict[str, int]  # of each register in its bank
    bank_rows: dict[str, int]  # registers in each bank
    shared: dict[str, int]  # offset of each shared variable
    shared_bytes: int  # of those whose size the module fixes
    local_bytes: int  # of a thread's variables in local memory
    granule: int  # bytes of the smallest access that may touch shared memory
    source: str


def translate(kernel: ptx.Kernel) -> Program:
    """Raises UnsupportedInstruction for what the simulator doesn't know."""
    return _Translator(without_guards(kernel)).program()


_EFFECTS = {"st", "stmatrix", "red", "cp", "bar", "barrier", "mbarrier"}
NO_RESULT = _EFFECTS | {"bra", "fence", "membar", "prefetch"}
SINKS = _EFFECTS | {"atom", "ld", "ldmatrix", "mma", "wgmma"}
"""Where a value counts as used: it leaves the thread's registers, or is an address."""

ENDINGS = {"bra": BRANCH, "ret": EXIT, "exit": EXIT}


def is_wgmma(instruction: Instruction) -> bool:
    return instruction.opcode == "wgmma" and instruction.modifiers[0] == "mma_async"


def ending(instruction: Instruction) -> str | None:
    """How an instruction ends a segment, if it does."""
    name = instruction.name
    if name.startswith("barrier.cluster"):
        return CLUSTER
    if instruction.opcode in ("bar", "barrier") and "warp" not in name:
        return BARRIER
    if name.startswith(("mbarrier.try_wait", "mbarrier.test_wait")):
        return TRY_WAIT
    return ENDINGS.get(instruction.opcode)


def without_guards(kernel: ptx.Kernel) -> ptx.Kernel:
    """The kernel with a branch around each barrier and wait that is executed conditionally."""
    instructions: list[Instruction] = []
    places, labels = [], {}
    for instruction in kernel.instructions:
        places.append(len(instructions))
        if instruction.guard and ending(instruction) in (BARRIER, TRY_WAIT, CLUSTER):
            label = f"behind {len(instructions)}"
            negated, target = not instruction.guard_negated, (ptx.Symbol(label),)
            around = replace(instruction, opcode="bra", modifiers=(), operands=target, guard_negated=negated)
            instructions.append(around)
            instructions.append(replace(instruction, guard=None))
            labels[label] = len(instructions)
        else:
            instructions.append(instruction)
    places.append(len(instructions))
    labels |= {name: places[index] for name, index in kernel.labels.items()}
    return replace(kernel, instructions=instructions, labels=labels)


class _Translator(Arithmetic, Movement, Collective):
    def program(self) -> Program:
        starts = self.segment_starts()
        number = {start: index for index, start in enumerate(starts)}
        bounds = [*starts, len(self.kernel.instructions)]
        sources, runs = [], []
        for index, (start, stop) in enumerate(pairwise(bounds)):
            instructions = tuple(self.kernel.instructions[start:stop])
            kind = (ending(instructions[-1]) if instructions else EXIT) or FALL
            last = instructions[-1] if instructions and kind != FALL else None
            target = number[self.label(last)] if last and kind == BRANCH else -1
            sources.append(self.function(index, instructions[:-1] if last else instructions))
            runs.append((instructions, kind, last, target))
        source = "\n".join(sources)
        exec(compile(source, f"<{self.kernel.name}>", "exec"), self.constants)
        joins = immediate_post_dominators([(kind, last, target) for _, kind, last, target in runs])
        segments = tuple(
            Segment(
                index,
                instructions,
                self.constants[f"segment_{index}"],
                *(kind, last, target, joins[index]),
                warpgroup=any(map(is_wgmma, instructions)),
            )
            for index, (instructions, kind, last, target) in enumerate(runs)
        )
        return Program(
            *(self.kernel, segments, self.rows, self.bank_rows, self.shared, self.shared_bytes),
            *(self.local_bytes, self.granule(), source),
        )

    def label(self, branch: Instruction) -> int:
        self.instruction = branch
        name = getattr(branch.operands[0], "name", "")
        if name not in self.kernel.labels:
            raise self.unsupported()
        return self.kernel.labels[name]

    def granule(self) -> int:
        accesses = [i for i in self.kernel.instructions if i.opcode in ("ld", "st", "atom", "red")]
        elsewhere = {"global", "param", "local"}
        kinds = [i.modifiers[-1] for i in accesses if not elsewhere & set(i.modifiers)]
        sizes = [ptx.BITS.get(kind, {"f16x2": 32, "bf16x2": 32}.get(kind, 16)) // 8 for kind in kinds]
        return min([4, *sizes])

    def segment_starts(self) -> list[int]:
        """Behind what ends a segment, at every label, and at the first wgmma after one of these."""
        instructions = self.kernel.instructions
        starts = {0, *self.kernel.labels.values()}
        starts |= {index + 1 for index, each in enumerate(instructions) if ending(each)}
        in_wgmma = False
        for index, instruction in enumerate(instructions):
            in_wgmma &= index not in starts
            if is_wgmma(instruction) and not in_wgmma:
                starts.add(index)
                in_wgmma = True
        return sorted(start for start in starts if start < len(instructions) or start == 0)

    # --- The source of a segment

    def function(self, index: int, instructions: tuple[Instruction, ...]) -> str:
        lines = [line for instruction in instructions for line in self.emit(instruction)]
        views = "; ".join(f"{v} = c.{v}" for v in (*VIEWS, "taint", "pending"))
        return "\n    ".join([f"def segment_{index}(c, s):", views, *lines, "c.at = None"])

    def emit(self, instruction: Instruction) -> list[str]:
        self.instruction = instruction
        where = self.constant(instruction)
        body = [*self.watch(instruction), *self.statements(instruction)]
        if instruction.guard is None:
            return [f"c.at = {where}", *body]
        test = ("~" if instruction.guard_negated else "") + self.read(instruction.guard, "pred")
        return [
            f"c.at = {where}; s_all = s; s = c.select(s, {test})",
            "if s is not None:",
            *("    " + line for line in body),
            "s = s_all",
        ]

    def watch(self, instruction: Instruction) -> list[str]:
        """Follows values from unwritten memory, and registers that a wgmma is still at work on.

        Most of the time there are none: one test.
        """
        first = () if instruction.opcode in NO_RESULT else instruction.operands[:1]
        defines = tuple(self.registers_in(first))
        uses = tuple(self.registers_in(instruction.operands[len(first) :]))
        sink = instruction.opcode in SINKS
        lines = [f"if taint: c.touch({self.constant(uses)}, {self.constant(defines)}, {sink}, s)"]
        if instruction.opcode != "wgmma":
            rows = frozenset(row for bank, row in (*uses, *defines) if bank == "r")
            if rows:
                lines.append(f"if pending: c.touch_pending({self.constant(rows)}, s)")
        return lines

    def statements(self, instruction: Instruction) -> list[str]:
        handler = getattr(self, f"op_{instruction.opcode}", None)
        if handler is None:
            raise self.unsupported()
        try:
            result = handler(instruction)
        except (IndexError, KeyError, ValueError, AttributeError, StopIteration) as error:
            raise self.unsupported() from error  # a form that the handler doesn't expect
        return [result] if isinstance(result, str) else list(result)


def immediate_post_dominators(parts: list[tuple[str, Instruction | None, int]]) -> list[int | None]:
    """For each segment, the first one that all ways from it to the end lead through; None if there is none.

    parts: (kind, last instruction, target) of each segment.
    """
    count = len(parts)
    end = count
    successors: list[list[int]] = []
    for index, (kind, last, target) in enumerate(parts):
        after = index + 1 if index + 1 < count else end
        if kind == EXIT:
            successors.append([end] if last is None or last.guard is None else [end, after])
        elif kind == BRANCH:
            successors.append([target] if last is None or last.guard is None else [target, after])
        else:
            successors.append([after])
    everything = (1 << (count + 1)) - 1
    dominators = [everything] * count + [1 << end]  # sets as bits
    changed = True
    while changed:
        changed = False
        for index in reversed(range(count)):
            new = everything
            for successor in successors[index]:
                new &= dominators[successor]
            new |= 1 << index
            if new != dominators[index]:
                dominators[index], changed = new, True
    joins: list[int | None] = []
    for index in range(count):
        strict = dominators[index] & ~(1 << index)
        # The nearest of them is the one that all the others post-dominate too: it has the most dominators.
        best = max(
            (each for each in range(count) if strict >> each & 1),
            key=lambda each: dominators[each].bit_count(),
            default=None,
        )
        joins.append(best)
    return joins
