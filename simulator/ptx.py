"""PTX text as Python objects: kernels, registers, instructions and the source lines they came from.

Covers what compilers of kernels emit: one module with entry functions, inline assembly with its own scopes,
`.loc` line information. Debug sections behind the functions are ignored (PTX ISA, "Syntax").
"""

import re
import struct
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

_TOKEN = re.compile(
    r'"[^"]*"'  # string of a directive
    r"|0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}"  # float and double as bits
    r"|-?0[xX][0-9a-fA-F]+U?|-?[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?|-?[0-9]+U?"
    r"|[%$.A-Za-z_][\w$.%]*(?:::[\w.]+)*"
    r"|\S"
)
_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)")
_FILE = re.compile(r'\s*\.file\s+(\d+)\s+"([^"]*)"')

BITS = {"pred": 1} | {f"{kind}{bits}": bits for kind in "bsuf" for bits in (8, 16, 32, 64, 128)}


class PtxError(ValueError):
    """Text that this reader can't take; the message names the line."""


@dataclass(frozen=True)
class Register:
    name: str
    type: str  # as declared: "b32", "pred", ...


@dataclass(frozen=True)
class Immediate:
    """An integer, or a float as `0f…` bits with its width; `value` is always the integer of the bits."""

    value: int
    float_bits: int = 0


@dataclass(frozen=True)
class Special:
    """A special register: "%tid.x"."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """The address of a variable or parameter, or a label."""

    name: str


@dataclass(frozen=True)
class Address:
    """[base + offset]; base is a Register, Symbol or Immediate; `coordinates` follow in tensor copies."""

    base: "Register | Symbol | Immediate"
    offset: int = 0
    coordinates: "Vector | None" = None


@dataclass(frozen=True)
class Vector:
    items: tuple


@dataclass(frozen=True)
class Pair:
    """`d|p`: two results."""

    first: "Register | Symbol"
    second: "Register | Symbol"


@dataclass(frozen=True)
class Negated:
    """`!p`."""

    register: Register


@dataclass(frozen=True)
class Instruction:
    opcode: str  # "ld"
    modifiers: tuple[str, ...]  # ("shared", "v4", "b32")
    operands: tuple
    guard: Register | None  # executes where it is true
    guard_negated: bool  # ... false
    line: int  # in the PTX text, from 1
    source: tuple[str, int] | None  # file and line of the program, if the compiler says
    text: str

    @property
    def name(self) -> str:
        return ".".join((self.opcode, *self.modifiers))


@dataclass(frozen=True)
class Parameter:
    name: str
    size: int
    offset: int  # in the block of all parameters


@dataclass(frozen=True)
class Variable:
    """A variable. Of size 0, it is shared memory that the launch adds.

    initial: (bytes, variable or None, number) of each element that the module gives a value to: the number,
    or the address of the variable plus the number.
    """

    name: str
    size: int
    align: int
    initial: "tuple[tuple[int, Variable | None, int], ...]" = ()

    @cached_property
    def storage(self) -> np.ndarray:
        """Its bytes in global or constant memory: all kernels of the module share them, in all launches."""
        whole = np.zeros(self.size + self.align, np.uint8)
        start = -whole.ctypes.data % self.align
        values = (
            (number + (variable.address if variable else 0) & (1 << 8 * size) - 1).to_bytes(size, "little")
            for size, variable, number in self.initial
        )
        data = b"".join(values)
        whole[start : start + len(data)] = np.frombuffer(data, np.uint8)
        return whole[start : start + self.size]

    @property
    def address(self) -> int:
        """In global memory."""
        return self.storage.ctypes.data


@dataclass
class Kernel:
    name: str
    parameters: list[Parameter]
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)  # {"reqntid": (128, 1, 1)}
    registers: dict[str, Register] = field(default_factory=dict)
    shared: list[Variable] = field(default_factory=list)
    local: list[Variable] = field(default_factory=list)  # those for the arguments of calls too
    module: list[Variable] = field(default_factory=list)  # in global and constant memory
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # index of the instruction behind the label
    targets: dict[str, Vector] = field(default_factory=dict)  # lists of labels, for brx.idx


@dataclass(frozen=True)
class Module:
    kernels: dict[str, Kernel]
    text: str


def parse(text: str) -> Module:
    """The kernels of a PTX module. Raises PtxError."""
    return Module(_Parser(text).module(), text)


class _Parser:
    def __init__(self, text: str) -> None:
        self.lines = re.sub(
            r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.DOTALL
        ).split("\n")
        self.tokens: list[tuple[str, int]] = []
        self.sources: dict[int, tuple[str, int]] = {}
        files: dict[int, str] = {}
        source = None
        for found in filter(None, map(_FILE.match, self.lines)):
            files[int(found[1])] = found[2]
        for number, line in enumerate(self.lines, 1):
            line = line.split("//")[0]
            if match := _LOC.match(line):
                source = (files.get(int(match[1]), "?"), int(match[2]))
                continue
            if line.split()[:1] in ([".file"], [".loc"]):
                continue
            if source:
                self.sources[number] = source
            self.tokens += [(token, number) for token in _TOKEN.findall(line)]
        self.at = 0
        self.scopes: list[tuple[int, dict[str, Register | Symbol]]] = []
        self.next_scope = 0

    # --- Tokens

    @property
    def token(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def next(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1][0]

    def fail(self, message: str) -> PtxError:
        line = self.tokens[min(self.at, len(self.tokens) - 1)][1]
        return PtxError(f"line {line}: {message}: {self.lines[line - 1].strip()}")

    def expect(self, token: str) -> None:
        if self.token != token:
            raise self.fail(f"expected {token!r}, found {self.token!r}")
        self.at += 1

    def skip_past(self, token: str) -> None:
        while self.token and self.next() != token:
            pass

    # --- Module and functions

    def module(self) -> dict[str, Kernel]:
        kernels: dict[str, Kernel] = {}
        shared: list[Variable] = []
        self.variables: list[Variable] = []
        while self.token:
            if self.token in (".version", ".target", ".address_size"):
                line = self.tokens[self.at][1]
                while self.token and self.tokens[self.at][1] == line:
                    self.at += 1
            elif self.token == ".section":
                break
            elif self.token in (".visible", ".extern", ".weak"):
                self.at += 1
            elif self.token == ".entry":
                kernel = self.entry()
                kernel.shared[:0] = shared
                kernel.module = self.variables
                kernels[kernel.name] = kernel
            elif self.token == ".shared":
                shared.append(self.variable())
            elif self.token in (".global", ".const"):
                self.variables.append(self.variable())
            elif self.token == ".func":
                self.skip_function()
            else:
                raise self.fail(f"unexpected {self.token!r}")
        return kernels

    def skip_function(self) -> None:
        """A device function: what calls it can't be translated."""
        while self.token not in (";", "{", ""):
            self.at += 1
        depth = 0
        while self.token:
            token = self.next()
            depth += (token == "{") - (token == "}")
            if not depth:
                return

    def entry(self) -> Kernel:
        self.expect(".entry")
        name = self.next()
        kernel = Kernel(name, self.parameters() if self.token == "(" else [])
        while self.token != "{":
            directive = self.next()
            if directive.startswith("."):
                kernel.directives[directive[1:]] = self.numbers()
        self.scopes = []
        self.body(kernel)
        return kernel

    def numbers(self) -> tuple[int, ...]:
        """Those that come next, with commas between them."""
        found = []
        while self.token.isdecimal() or self.token == ",":
            if (token := self.next()) != ",":
                found.append(int(token))
        return tuple(found)

    def parameters(self) -> list[Parameter]:
        self.expect("(")
        parameters: list[Parameter] = []
        end = 0
        while self.token != ")":
            self.expect(".param")
            align, size = 0, 0
            while self.token.startswith("."):
                directive = self.next()[1:]
                if directive == "align":
                    align = int(self.next())
                elif directive in BITS:
                    size = BITS[directive] // 8
            name = self.next()
            element = size
            if self.token == "[":
                self.at += 1
                size *= int(self.next())
                self.expect("]")
            align = align or element
            end = -(-end // align) * align
            parameters.append(Parameter(name, size, end))
            end += size
            if self.token == ",":
                self.at += 1
        self.expect(")")
        return parameters

    def variable(self) -> Variable:
        self.at += 1  # its memory
        align, size, count, kind = 0, 1, 1, "b8"
        while self.token.startswith("."):
            directive = self.next()[1:]
            if directive == "align":
                align = int(self.next())
            elif directive in BITS:
                kind, size = directive, BITS[directive] // 8
            elif re.fullmatch("v[248]", directive):
                count = int(directive[1:])
        align = align or size * count
        name, sizes = self.next(), []
        while self.token == "[":
            self.at += 1
            sizes.append(int(self.next(), 0) if self.token != "]" else 0)
            self.expect("]")
        initial: list[tuple[int, Variable | None, int]] = []
        if self.token == "=":
            self.at += 1
            self.initialiser(kind, size, initial)
        self.expect(";")
        for each in sizes:
            count *= each
        return Variable(name, size * count or size * len(initial), align, tuple(initial))

    def initialiser(self, kind: str, size: int, values: list[tuple[int, "Variable | None", int]]) -> None:
        """A number, an address, or `{ … }` of them, for a variable whose elements have `size` bytes."""
        if self.token == "{":
            self.at += 1
            while self.token != "}":
                self.initialiser(kind, size, values)
                if self.token == ",":
                    self.at += 1
            self.expect("}")
            return
        generic = self.token == "generic"
        if generic:
            self.at += 1
            self.expect("(")
        value = self.named(self.next())
        if generic:
            self.expect(")")
        if isinstance(value, Immediate):
            number = value.value
            if value.float_bits == 64 and kind == "f32":
                double = struct.pack("<Q", value.value)
                number = struct.unpack("<I", struct.pack("<f", *struct.unpack("<d", double)))[0]
            values.append((size, None, number))
            return
        found = [each for each in self.variables if isinstance(value, Symbol) and each.name == value.name]
        if not found:
            raise self.fail("no number or known variable to initialise with")
        offset = 0
        if self.token == "+":
            self.at += 1
            offset = int(self.next(), 0)
        values.append((size, found[0], offset))

    def body(self, kernel: Kernel) -> None:
        """A `{ … }` block, at the top or within inline assembly, whose names are its own."""
        self.expect("{")
        self.next_scope += 1
        self.scopes.append((self.next_scope, {}))
        first = len(kernel.instructions)
        while self.token != "}":
            if not self.token:
                raise self.fail("the text ends within a function")
            if self.token == "{":
                self.body(kernel)
            elif self.token == ".reg":
                self.declare_registers(kernel)
            elif self.token == ".shared":
                kernel.shared.append(self.scoped_variable())
            elif self.token in (".local", ".param"):
                kernel.local.append(self.scoped_variable())
            elif self.token == ".pragma":
                self.skip_past(";")
            elif self.tokens[self.at + 1][0] == ":":
                label = self.scoped(self.next())
                self.expect(":")
                if self.token == ".branchtargets":
                    kernel.targets[label] = self.branch_targets()
                else:
                    kernel.labels[label] = len(kernel.instructions)
            elif self.token == ";":
                self.at += 1
            else:
                kernel.instructions.append(self.instruction())
        self.expect("}")
        for index in range(first, len(kernel.instructions)):
            kernel.instructions[index] = self.with_labels(kernel, kernel.instructions[index])
        self.scopes.pop()

    def scoped(self, name: str) -> str:
        return name if len(self.scopes) == 1 else f"{name}@{self.scopes[-1][0]}"

    def scoped_variable(self) -> Variable:
        """A variable of the current block, which may hide one of the same name."""
        variable = self.variable()
        name = self.scoped(variable.name)
        self.scopes[-1][1][variable.name] = Symbol(name)
        return replace(variable, name=name)

    def branch_targets(self) -> Vector:
        """The labels behind `.branchtargets`."""
        self.at += 1
        labels = []
        while self.token != ";":
            labels.append(Symbol(self.next()))
            if self.token == ",":
                self.at += 1
        self.expect(";")
        return Vector(tuple(labels))

    def with_labels(self, kernel: Kernel, instruction: Instruction) -> Instruction:
        """Names the block that a branch's labels belong to, if it is the current one."""

        def named(label: Symbol) -> Symbol:
            name = self.scoped(label.name)
            return Symbol(name) if name in kernel.labels else label

        operands = instruction.operands
        if instruction.opcode == "bra" and isinstance(operands[0], Symbol):
            return replace(instruction, operands=(named(operands[0]),))
        if instruction.opcode == "brx" and isinstance(operands[1], Symbol):
            found = kernel.targets.get(self.scoped(operands[1].name))
            operands = (operands[0], found or operands[1])
        if instruction.opcode == "brx" and isinstance(operands[1], Vector):
            return replace(instruction, operands=(operands[0], Vector(tuple(map(named, operands[1].items)))))
        return instruction

    def declare_registers(self, kernel: Kernel) -> None:
        self.expect(".reg")
        kind = self.next()[1:]
        while True:
            name = self.next()
            if self.token == "<":
                self.at += 1
                names = [f"{name}{i}" for i in range(int(self.next()))]
                self.expect(">")
            else:
                names = [name]
            for each in names:
                scoped = self.scoped(each)
                kernel.registers[scoped] = self.scopes[-1][1][each] = Register(scoped, kind)
            if self.next() == ";":
                return

    # --- Instructions

    def instruction(self) -> Instruction:
        line = self.tokens[self.at][1]
        guard, negated = None, False
        if self.token.startswith("@"):
            self.at += 1
            if self.token == "!":
                negated = True
                self.at += 1
            guard = self.named(self.next())
        opcode, *modifiers = self.next().split(".")
        while self.token == "::":
            self.at += 1
        operands = []
        while self.token != ";":
            operands.append(self.operand())
            if self.token == ",":
                self.at += 1
        self.expect(";")
        source = self.sources.get(line)
        text = self.lines[line - 1].split("//")[0].strip()
        return Instruction(opcode, tuple(modifiers), tuple(operands), guard, negated, line, source, text)

    def operand(self):
        if self.token == "{":
            return self.vector("}")
        if self.token == "(":  # of a call
            return self.vector(")")
        if self.token == "[":
            return self.address()
        if self.token == "!":
            self.at += 1
            return Negated(self.named(self.next()))
        value = self.named(self.next())
        if self.token == "|":
            self.at += 1
            return Pair(value, self.named(self.next()))
        if self.token == "+" and isinstance(value, Symbol):
            self.at += 1
            return Address(value, int(self.next(), 0))
        return value

    def vector(self, end: str) -> Vector:
        self.at += 1
        items = []
        while self.token != end:
            items.append(self.operand())
            if self.token == ",":
                self.at += 1
        self.expect(end)
        return Vector(tuple(items))

    def address(self) -> Address:
        self.expect("[")
        base, offset, coordinates = self.named(self.next()), 0, None
        if self.token == "+":
            self.at += 1
            offset = int(self.next(), 0)
        elif re.fullmatch(r"-\d+", self.token):
            offset = int(self.next())
        if self.token == ",":
            self.at += 1
            coordinates = self.operand()
        self.expect("]")
        return Address(base, offset, coordinates)

    def named(self, token: str):
        for _, registers in reversed(self.scopes):
            if token in registers:
                return registers[token]
        if token[:2] in ("0f", "0F"):
            return Immediate(int(token[2:], 16), 32)
        if token[:2] in ("0d", "0D"):
            return Immediate(int(token[2:], 16), 64)
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|[0-9]+)U?", token):
            return Immediate(int(token.rstrip("U"), 0))
        if re.fullmatch(r"-?[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?", token):
            return Immediate(struct.unpack("<Q", struct.pack("<d", float(token)))[0], 64)
        if token.startswith("%"):
            return Special(token)
        return Symbol(token)
