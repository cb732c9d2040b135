"""What registers and memory hold, as numbers of PTX types, and operands as PTX writes them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cutelab.simulator import numbers, ptx
from cutelab.simulator.errors import SimulationError
from cutelab.simulator.ptx import Address, Immediate, Instruction, Negated, Pair, Register, Vector

_AS_FLOAT32 = {"bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8}  # formats that NumPy doesn't have
WIDTHS = {
    **{kind: bits for kind, bits in ptx.BITS.items() if kind not in ("pred", "f8") and bits <= 64},
    **_AS_FLOAT32,
}
"""Bits of the types that numbers are shown in."""

_PACKED = {"mma", "wgmma", "ldmatrix", "stmatrix", "movmatrix"}
"""Instructions that take a register for several numbers; others say so by ".bf16x2" and the like."""


def as_numbers(bits: np.ndarray, kind: str) -> np.ndarray:
    """Unsigned integers, as wide as a PTX type, as numbers of it; of what NumPy doesn't have, float32."""
    if kind in _AS_FLOAT32:
        return np.asarray(numbers.unpacked(bits, kind)).astype(np.float32)
    letter = {"b": "u", "u": "u", "s": "i", "f": "f"}[kind[0]]
    return bits.view(f"{letter}{bits.dtype.itemsize}")


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
        if self.bits.dtype == bool or self.type not in WIDTHS:
            return self.bits
        width, bits = 8 * self.bits.dtype.itemsize, WIDTHS.get(kind, 0)
        if not 8 <= bits <= width:
            legal = ", ".join(name for name, size in WIDTHS.items() if size <= width)
            raise SimulationError(
                f"{self.text} has registers of {width} bits, which are no {kind!r}; a type is one of {legal}"
            )
        parts = np.ascontiguousarray(self.bits)[..., None].view(f"u{bits // 8}")
        return as_numbers(parts[..., 0] if bits == width else parts, kind)


def registers_in(operand: Any) -> Iterator[Register]:
    """The registers of an operand, in the order in which it names them."""
    parts: tuple[Any, ...] = ()
    if isinstance(operand, Register):
        yield operand
    elif isinstance(operand, Vector):
        parts = operand.items
    elif isinstance(operand, Pair):
        parts = operand.first, operand.second
    elif isinstance(operand, Negated):
        parts = (operand.register,)
    elif isinstance(operand, Address):
        parts = operand.base, operand.coordinates
    for part in parts:
        yield from registers_in(part)


def text_of(operand: Any) -> str:
    """As PTX writes it."""
    if isinstance(operand, Vector):
        return "{" + ", ".join(map(text_of, operand.items)) + "}"
    if isinstance(operand, Pair):
        return f"{text_of(operand.first)}|{text_of(operand.second)}"
    if isinstance(operand, Negated):
        return f"!{operand.register.name}"
    if isinstance(operand, Address):
        offset = f"+{operand.offset}" if operand.offset else ""
        more = f", {text_of(operand.coordinates)}" if operand.coordinates else ""
        return f"[{text_of(operand.base)}{offset}{more}]"
    return str(operand.value) if isinstance(operand, Immediate) else operand.name


def line_of(instruction: Instruction) -> str:
    """Its line of PTX, put together again where it takes several."""
    if instruction.text.endswith(";"):
        return " ".join(instruction.text.split())
    return f"{instruction.name} {', '.join(map(text_of, instruction.operands))};"


def type_of(instruction: Instruction, number: int, register: Register) -> str:
    """What an instruction takes the registers of an operand for, of which `register` is the first.

    That is what its name says, if it fits; else how they are declared.
    """
    modifiers = instruction.modifiers
    types = [m.removesuffix("x2").removesuffix("x4") for m in modifiers]
    types = [kind for kind in types if kind in WIDTHS]
    declared = register.type
    if not types or declared == "pred" or isinstance(instruction.operands[number], Address):
        return declared
    if instruction.opcode == "mma" and len(types) == 4:  # D, A, B and C
        kind = types[number]
    else:  # wgmma and cvt: first that of the result
        kind = types[0] if number == 0 else types[-1]
    packed = instruction.opcode in _PACKED or any(m.endswith(("x2", "x4")) for m in modifiers)
    fits = WIDTHS[kind] <= ptx.BITS[declared] if packed else WIDTHS[kind] == ptx.BITS[declared]
    return kind if fits else declared
