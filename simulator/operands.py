"""The register file, and operands of instructions as Python expressions over it.

Registers of one width make up a bank, an array (registers, threads); views give a bank another type.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from cutelab.simulator import integers, numbers, ptx
from cutelab.simulator.errors import UnsupportedInstruction
from cutelab.simulator.memory import SHARED_BASE
from cutelab.simulator.ptx import Immediate, Instruction, Negated, Pair, Register, Special, Symbol, Vector

BANKS = {"pred": "p", 8: "h", 16: "h", 32: "r", 64: "d", 128: "q"}
"""The bank of a register, by its width. q is for 128 bits: two rows of d."""

VIEWS = ("p", "h", "hs", "hf", "r", "rs", "rf", "d", "ds", "df")
"""Banks, and banks as signed integers and as floats: "rf" for f32."""

SPECIALS = {
    "%tid.x": "c.tid[0][s]", "%tid.y": "c.tid[1][s]", "%tid.z": "c.tid[2][s]",
    "%ntid.x": "c.block[0]", "%ntid.y": "c.block[1]", "%ntid.z": "c.block[2]",
    "%ctaid.x": "c.index[0]", "%ctaid.y": "c.index[1]", "%ctaid.z": "c.index[2]",
    "%nctaid.x": "c.grid[0]", "%nctaid.y": "c.grid[1]", "%nctaid.z": "c.grid[2]",
    "%clusterid.x": "c.index[0] // c.cluster[0]", "%clusterid.y": "c.index[1] // c.cluster[1]",
    "%clusterid.z": "c.index[2] // c.cluster[2]",
    "%nclusterid.x": "c.grid[0] // c.cluster[0]", "%nclusterid.y": "c.grid[1] // c.cluster[1]",
    "%nclusterid.z": "c.grid[2] // c.cluster[2]",
    "%cluster_ctaid.x": "c.index[0] % c.cluster[0]", "%cluster_ctaid.y": "c.index[1] % c.cluster[1]",
    "%cluster_ctaid.z": "c.index[2] % c.cluster[2]",
    "%cluster_nctaid.x": "c.cluster[0]", "%cluster_nctaid.y": "c.cluster[1]",
    "%cluster_nctaid.z": "c.cluster[2]", "%is_explicit_cluster": "len(c.peers) > 1",
    "%cluster_ctarank": "c.rank", "%cluster_nctarank": "len(c.peers)",
    "%laneid": "c.lane[s]", "%warpid": "c.warp[s]", "%nwarpid": "c.warp[-1] + 1",
    "%lanemask_eq": "1 << c.lane[s]", "%lanemask_lt": "(1 << c.lane[s]) - 1",
    "%lanemask_le": "(2 << c.lane[s]) - 1", "%lanemask_gt": "-(2 << c.lane[s])",
    "%lanemask_ge": "-(1 << c.lane[s])",
    "%smid": "c.multiprocessor", "%nsmid": "c.multiprocessors", "%gridid": "0",
    "%dynamic_smem_size": "c.dynamic_shared", "%total_smem_size": "c.shared.data.size",
    "%clock": "c.clock()", "%clock64": "c.clock()", "%globaltimer": "c.clock()",
    "%globaltimer_lo": "c.clock()", "%clock_hi": "0", "%globaltimer_hi": "0",
}  # fmt: skip


class Operands:
    """Expressions for the operands of a kernel's instructions: `c` is the CTA, `s` the threads."""

    def __init__(self, kernel: ptx.Kernel) -> None:
        self.kernel = kernel
        self.rows: dict[str, int] = {}
        self.bank_rows = dict.fromkeys("phrd", 0)
        for register in kernel.registers.values():
            bank = BANKS["pred" if register.type == "pred" else ptx.BITS[register.type]]
            bank, step = ("d", 2) if bank == "q" else (bank, 1)
            self.rows[register.name] = self.bank_rows[bank]
            self.bank_rows[bank] += step
        self.shared, self.shared_bytes = placed(sorted(kernel.shared, key=lambda v: v.size == 0))
        self.local, self.local_bytes = placed(kernel.local)
        self.local_bytes = -(-self.local_bytes // 16) * 16  # threads lie side by side: all are aligned alike
        self.parameters = {p.name: p.offset for p in kernel.parameters}
        self.variables = {v.name: v for v in kernel.module}
        self.constants: dict[str, Any] = {"np": np, "numbers": numbers, "integers": integers}
        self.carry: int | None = None  # the row of the predicates that is the carry, if there is one
        self.instruction: Instruction

    def unsupported(self, why: str = "") -> UnsupportedInstruction:
        i = self.instruction
        source = f" ({i.source[0]}:{i.source[1]})" if i.source else ""
        return UnsupportedInstruction(f"the simulator doesn't know PTX line {i.line}{source}: {i.text}{why}")

    def constant(self, value: Any) -> str:
        """A name for a value in the generated source."""
        name = f"k{len(self.constants)}"
        self.constants[name] = value
        return name

    # --- Reading and writing

    def read(self, operand: Any, kind: str) -> str:
        """The values of an operand, of PTX type `kind`: an array over the threads, or one for all."""
        if isinstance(operand, Register):
            return f"{self.view(operand, kind)}[{self.rows[operand.name]}, s]"
        if isinstance(operand, Immediate):
            return self.constant(immediate(operand, kind))
        if isinstance(operand, Special):
            if operand.name not in SPECIALS:
                raise self.unsupported(f": {operand.name}")
            return f"np.asarray({SPECIALS[operand.name]}).astype({self.dtype(kind)})"
        if isinstance(operand, Negated):
            return f"~{self.read(operand.register, 'pred')}"
        if isinstance(operand, Symbol):
            return self.constant(immediate(Immediate(self.symbol(operand.name)), kind))
        if isinstance(operand, ptx.Address) and isinstance(operand.base, Symbol):
            return self.constant(immediate(Immediate(self.symbol(operand.base.name) + operand.offset), kind))
        raise self.unsupported()

    def array(self, operand: Any, kind: str) -> str:
        """`read`, where an array is needed even if it is one for all."""
        return f"np.asarray({self.read(operand, kind)})"

    def arguments(self, operands: Iterable[Any], kind: str) -> str:
        return ", ".join(self.read(operand, kind) for operand in operands)

    def write(self, operand: Any, kind: str, value: str) -> str:
        if isinstance(operand, Symbol) and operand.name == "_":
            return value
        if not isinstance(operand, Register):
            raise self.unsupported()
        return f"{self.view(operand, kind)}[{self.rows[operand.name]}, s] = {value}"

    def view(self, register: Register, kind: str) -> str:
        """The view of a register for values of type `kind`, by the register's own width."""
        if register.type == "pred":
            return "p"
        bank = BANKS[ptx.BITS[register.type]]
        if bank == "q":
            raise self.unsupported(": registers of 128 bits can only be packed and unpacked")
        flavour = kind[0] if kind[0] in "sf" and ptx.BITS.get(kind) == ptx.BITS[register.type] else ""
        return bank + flavour

    def dtype(self, kind: str) -> str:
        return f"np.{numpy_type(kind).__name__}"

    def symbol(self, name: str) -> int:
        """The address of a variable or parameter."""
        for places, base in ((self.shared, SHARED_BASE), (self.local, 0), (self.parameters, 0)):
            if name in places:
                return base + places[name]
        if name in self.variables:
            return self.variables[name].address
        raise self.unsupported(f": {name} is not a variable")

    def address(self, operand: Any) -> str:
        """Addresses as an int64 array (lanes,)."""
        if not isinstance(operand, ptx.Address):
            raise self.unsupported()
        if isinstance(operand.base, Register):
            value = f"{self.read(operand.base, operand.base.type)}.astype(np.int64)"
            return f"{value} + {operand.offset}" if operand.offset else value
        base = operand.base.value if isinstance(operand.base, Immediate) else self.symbol(operand.base.name)
        return f"c.everywhere({base + operand.offset}, s)"

    # --- Rows of registers

    def row(self, operand: Any) -> int:
        if not isinstance(operand, Register):
            raise self.unsupported()
        return self.rows[operand.name]

    def row_list(self, operand: Any) -> tuple[int, ...]:
        items = operand.items if isinstance(operand, Vector) else (operand,)
        return tuple(self.row(item) for item in items)

    def registers_in(self, operands: Iterable[Any]) -> Iterator[tuple[str, int]]:
        """(bank, row) of each register that the operands name."""
        for operand in operands:
            if isinstance(operand, Register):
                bank = BANKS["pred" if operand.type == "pred" else ptx.BITS[operand.type]]
                yield bank.replace("q", "d"), self.rows[operand.name]
            elif isinstance(operand, Vector):
                yield from self.registers_in(operand.items)
            elif isinstance(operand, Pair):
                yield from self.registers_in((operand.first, operand.second))
            elif isinstance(operand, Negated):
                yield from self.registers_in((operand.register,))
            elif isinstance(operand, ptx.Address):
                yield from self.registers_in((operand.base, operand.coordinates))


def placed(variables: Iterable[ptx.Variable]) -> tuple[dict[str, int], int]:
    """Offsets of variables, one behind the other, and where they end."""
    offsets, end = {}, 0
    for variable in variables:
        end = -(-end // variable.align) * variable.align
        offsets[variable.name] = end
        end += variable.size
    return offsets, end


def immediate(operand: Immediate, kind: str) -> Any:
    """A NumPy scalar of PTX type `kind`."""
    dtype = numpy_type(kind)
    if kind == "pred":
        return np.bool_(operand.value)
    if operand.float_bits and kind[0] == "f":
        bits = np.uint32(operand.value) if operand.float_bits == 32 else np.uint64(operand.value)
        return dtype(bits.view(np.float32 if operand.float_bits == 32 else np.float64))
    width = np.dtype(dtype).itemsize * 8
    unsigned = np.dtype(f"u{width // 8}").type(operand.value & ((1 << width) - 1))
    return unsigned.view(dtype)


def numpy_type(kind: str) -> type[np.generic]:
    if kind == "pred":
        return np.bool_
    letter = {"b": "u", "u": "u", "s": "i", "f": "f"}[kind[0]]
    return np.dtype(f"{letter}{ptx.BITS[kind] // 8}").type


def part(modifiers: Iterable[str], choices: Iterable[str], default: str = "") -> str:
    """The first of an instruction's modifiers that is one of `choices`."""
    choices = set(choices)
    return next((m for m in modifiers if m in choices), default)
