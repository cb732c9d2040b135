"""Turns a PTX kernel into Python once: straight runs of instructions become functions over arrays of threads.

A segment is a run that is entered at its top and left at its bottom. `run(cta, s)` executes it for the
threads `s` of a CTA, a slice or an array of their numbers: each instruction is one NumPy expression over
rows of the register file, `r[7, s]` for the 32-bit register 7. What is more than an expression is a method
of the CTA (`cutelab.simulator.cta`). The generated source is kept: `Program.source`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from cutelab.simulator import ptx, registers
from cutelab.simulator.arithmetic import Arithmetic
from cutelab.simulator.collective import Collective
from cutelab.simulator.movement import Movement, communicates, smallest_access
from cutelab.simulator.operands import VIEWS
from cutelab.simulator.ptx import Instruction, Vector

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

    @cached_property
    def global_granule(self) -> int:
        """Bytes of the smallest access that may touch global memory, up to 16."""
        return smallest_access(self.kernel.instructions)

    @cached_property
    def launch_registers(self) -> int | None:
        """Of a thread as it starts, or None where setmaxnreg has no effect."""
        return registers.at_launch(self.kernel)

    @cached_property
    def prints(self) -> bool:
        return any(each.opcode == "call" for each in self.kernel.instructions)

    @cached_property
    def communicates(self) -> bool:
        """Whether its CTAs may wait for each other: it has atomics or strong accesses to global memory."""
        return communicates(self.kernel.instructions)


def translate(kernel: ptx.Kernel, stepwise: bool = False) -> Program:
    """stepwise: every instruction is a segment. Raises UnsupportedInstruction for what isn't known here."""
    return _Translator(without_guards(without_tables(kernel))).program(stepwise)


_EFFECTS = {"tensormap", "st", "stmatrix", "red", "cp", "bar", "barrier", "mbarrier"}
NO_RESULT = _EFFECTS | {"bra", "brx", "call", "fence", "membar", "prefetch"}
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
    if instruction.opcode in ("bar", "barrier", "setmaxnreg") and "warp" not in name:
        return BARRIER
    if name.startswith(("mbarrier.try_wait", "mbarrier.test_wait")):
        return TRY_WAIT
    return ENDINGS.get(instruction.opcode)


def without_tables(kernel: ptx.Kernel) -> ptx.Kernel:
    """The kernel with comparisons and branches, one behind the other, in place of each brx.idx."""
    if not any(each.opcode == "brx" for each in kernel.instructions):
        return kernel
    test = ptx.Register("%is target", "pred")
    instructions: list[Instruction] = []
    places, labels = [], {}
    for instruction in kernel.instructions:
        places.append(len(instructions))
        if instruction.opcode != "brx" or not isinstance(instruction.operands[-1], Vector):
            instructions.append(instruction)
            continue
        index, targets = instruction.operands
        behind = f"behind table {len(instructions)}"
        simple = replace(instruction, guard=None, guard_negated=False)
        if instruction.guard:
            around = replace(instruction, opcode="bra", modifiers=(), operands=(ptx.Symbol(behind),))
            instructions.append(replace(around, guard_negated=not instruction.guard_negated))
        for number, target in enumerate(targets.items):
            operands = test, index, ptx.Immediate(number)
            instructions.append(replace(simple, opcode="setp", modifiers=("eq", "u32"), operands=operands))
            instructions.append(replace(simple, opcode="bra", modifiers=(), operands=(target,), guard=test))
        instructions.append(replace(simple, opcode="trap", modifiers=(), operands=()))
        labels[behind] = len(instructions)
    places.append(len(instructions))
    labels |= {name: places[index] for name, index in kernel.labels.items()}
    registers = kernel.registers | {test.name: test}
    return replace(kernel, instructions=instructions, labels=labels, registers=registers)


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
    def program(self, stepwise: bool) -> Program:
        starts = [*range(len(self.kernel.instructions))] or [0] if stepwise else self.segment_starts()
        number = {start: index for index, start in enumerate(starts)}
        bounds = [*starts, len(self.kernel.instructions)]
        sources, runs = [], []
        for index, (start, stop) in enumerate(pairwise(bounds)):
            instructions = tuple(self.kernel.instructions[start:stop])
            kind = (ending(instructions[-1]) if instructions else EXIT) or FALL
            last = instructions[-1] if instructions and kind != FALL else None
            target = number[self.label(last)] if last and kind == BRANCH else -1
            plain = not last or last.opcode == "setmaxnreg"  # of which the operand is checked there
            sources.append(self.function(index, instructions if plain else instructions[:-1]))
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
        lines, used = [], 0
        for instruction in instructions:
            if instruction.opcode == "wgmma":  # before it counts what others have used
                lines += self.use_fragments(used)
                used = 0
            elif instruction.guard is None:
                used |= self.fragments_in(instruction)
            lines += self.emit(instruction)
        lines += self.use_fragments(used)
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
            if instruction.guard is not None:
                lines += self.use_fragments(self.fragments_in(instruction))
        return lines

    @cached_property
    def fragments(self) -> int:
        """The 32-bit registers that wgmma use: accumulators, and A where it is in registers; as bits."""
        uses = [i for i in self.kernel.instructions if is_wgmma(i)]
        return bit_set(row for i in uses for bank, row in self.registers_in(i.operands[:2]) if bank == "r")

    def fragments_in(self, instruction: Instruction) -> int:
        """Those that another instruction uses. Copies don't count: compilers put them behind the fence."""
        operands = instruction.operands
        copies = instruction.opcode == "mov" and not any(isinstance(each, Vector) for each in operands)
        if copies or not self.fragments:
            return 0
        return bit_set(row for bank, row in self.registers_in(operands) if bank == "r") & self.fragments

    def use_fragments(self, rows: int) -> list[str]:
        return [f"c.use_fragments({self.constant(rows)}, s)"] if rows else []

    def statements(self, instruction: Instruction) -> list[str]:
        handler = getattr(self, f"op_{instruction.opcode}", None)
        if handler is None:
            raise self.unsupported()
        try:
            result = handler(instruction)
        except (IndexError, KeyError, ValueError, AttributeError, StopIteration) as error:
            raise self.unsupported() from error  # a form that the handler doesn't expect
        return [result] if isinstance(result, str) else list(result)


def bit_set(numbers: Iterable[int]) -> int:
    """A set of numbers as one."""
    found = 0
    for number in numbers:
        found |= 1 << number
    return found


def immediate_post_dominators(parts: list[tuple[str, Instruction | None, int]]) -> list[int | None]:
    """For each branch, the first segment that all ways from it to the end lead through; else None.

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
        if parts[index][0] != BRANCH:
            joins.append(None)
            continue
        strict = dominators[index] & ~(1 << index)
        # The nearest of them is the one that all the others post-dominate too: it has the most dominators.
        best = max(
            (each for each in range(count) if strict >> each & 1),
            key=lambda each: dominators[each].bit_count(),
            default=None,
        )
        joins.append(best)
    return joins
