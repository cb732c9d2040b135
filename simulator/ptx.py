"""PTX text as Python objects: kernels, registers, instructions and the source lines they came from.

Covers what compilers of kernels emit: one module with entry functions, inline assembly with its own scopes,
`.loc` line information. Debug sections behind the functions are ignored (PTX ISA, "Syntax").
"""

import re
import struct
from dataclasses import dataclass, field

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
    """A variable in shared or local memory; size 0 is shared memory that the launch adds."""

    name: str
    size: int
    align: int


@dataclass
class Kernel:
    name: str
    parameters: list[Parameter]
    registers: dict[str, Register] = field(default_factory=dict)
    shared: list[Variable] = field(default_factory=list)
    local: list[Variable] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # index of the instruction behind the label


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
        self.scopes: list[tuple[int, dict[str, Register]]] = []
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
                kernels[kernel.name] = kernel
            elif self.token == ".shared":
                shared.append(self.variable())
            elif self.token in (".global", ".const"):
                raise self.fail("variables outside of shared memory are not supported")
            else:
                raise self.fail(f"unexpected {self.token!r}")
        return kernels

    def entry(self) -> Kernel:
        self.expect(".entry")
        name = self.next()
        kernel = Kernel(name, self.parameters() if self.token == "(" else [])
        while self.token != "{":  # .reqntid and the like
            self.at += 1
        self.scopes = []
        self.body(kernel)
        return kernel

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
        align = size = 1
        while self.token.startswith("."):
            directive = self.next()[1:]
            if directive == "align":
                align = int(self.next())
            elif directive in BITS:
                size = BITS[directive] // 8
        name = self.next()
        if self.token == "[":
            self.at += 1
            size *= int(self.next()) if self.token != "]" else 0
            self.expect("]")
        self.expect(";")
        return Variable(name, size, align)

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
                kernel.shared.append(self.variable())
            elif self.token == ".local":
                kernel.local.append(self.variable())
            elif self.token in (".pragma", ".branchtargets"):
                self.skip_past(";")
            elif self.tokens[self.at + 1][0] == ":":
                kernel.labels[self.scoped(self.next())] = len(kernel.instructions)
                self.expect(":")
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

    def with_labels(self, kernel: Kernel, instruction: Instruction) -> Instruction:
        """Names the block that a branch's label belongs to, if it is the current one."""
        if instruction.opcode != "bra" or not isinstance(instruction.operands[0], Symbol):
            return instruction
        name = self.scoped(instruction.operands[0].name)
        if name not in kernel.labels:
            return instruction
        return Instruction(**{**vars(instruction), "operands": (Symbol(name),)})

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
            return self.vector()
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

    def vector(self) -> Vector:
        self.expect("{")
        items = []
        while self.token != "}":
            items.append(self.operand())
            if self.token == ",":
                self.at += 1
        self.expect("}")
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
