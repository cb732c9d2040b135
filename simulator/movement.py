"""Instructions that move data, and those that order such moves, as calls of methods of the CTA.

Each method `op_<opcode>` takes an instruction and returns the statements that execute it.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from cutelab.simulator import ptx
from cutelab.simulator.global_races import strength
from cutelab.simulator.operands import Operands, part
from cutelab.simulator.ptx import Address, Instruction, Register, Symbol, Vector
from cutelab.simulator.races import BULK_STORE, BULK_WRITE, CP_ASYNC
from cutelab.simulator.tensormap import FIELDS

SPACES = ("global", "shared", "param", "local", "const")
ORDERING = ("volatile", "relaxed", "acquire", "release")
REDUCTIONS = ("add", "min", "max", "and", "or", "xor", "inc", "dec")

FENCES = ("sc", "acq_rel", "acquire", "release", "cta", "cluster", "gl", "sys")
"""First modifiers of `fence` and `membar` that order accesses to memory."""

Statements = str | list[str]


def is_strong(i: Instruction) -> bool:
    """Loads and stores that threads of a grid may wait for each other with (PTX ISA, "ld", "st")."""
    spaces = {m.split("::")[0] for m in i.modifiers}
    return i.opcode in ("ld", "st") and not spaces & {"param", "local"} and bool(part(spaces, ORDERING))


def communicates(instructions: Iterable[Instruction]) -> bool:
    """Whether a kernel has atomics or strong accesses that may be to global memory."""
    return any(
        (i.opcode in ("atom", "red") or is_strong(i) or i.name.startswith("cp.reduce"))
        and part((m.split("::")[0] for m in i.modifiers), SPACES) in ("global", "")
        for i in instructions
    )


def smallest_access(instructions: Iterable[Instruction]) -> int:
    """Bytes of the smallest access that may be to global memory, up to 16."""
    sizes = [16]
    for i in instructions:
        spaces = {m.split("::")[0] for m in i.modifiers}
        if i.opcode in ("ld", "ldu", "st", "atom", "red") and not spaces & {*SPACES} - {"global"}:
            kind = i.modifiers[-1]
            sizes.append(ptx.BITS.get(kind, 32 if kind.endswith("x2") else 16) // 8)
            if i.opcode not in ("atom", "red"):  # those access the elements of a vector one by one
                sizes[-1] *= max((int(m[1:]) for m in spaces if m in ("v2", "v4", "v8")), default=1)
        elif i.name.startswith(("cp.async.ca", "cp.async.cg")):
            sizes.append(i.operands[2].value)
    return min(sizes)


class Movement(Operands):
    # --- Loads and stores

    def space(self, i: Instruction) -> str:
        found = part((m.split("::")[0] for m in i.modifiers), SPACES, "generic")
        if found == "param" and any(
            isinstance(each, Address) and getattr(each.base, "name", "") in self.local for each in i.operands
        ):
            return "local"  # the arguments of a call
        return "global" if found == "const" else found

    def op_ld(self, i: Instruction) -> Statements:
        kind = i.modifiers[-1]
        if kind not in ptx.BITS:
            raise self.unsupported()
        target = i.operands[0]
        if kind == "b128":
            row = self.row(target)
            access = f"{self.space(i)!r}, {self.address(i.operands[1])}, np.uint64, 2, s"
            lines = [
                f"loaded = c.load{self.ordered(i)}({access})",
                f"d[{row}, s] = loaded[:, 0]",
                f"d[{row + 1}, s] = loaded[:, 1]",
            ]
            filled = self.constant((("d", row), ("d", row + 1)))
            return [*lines, f"if c.unwritten is not None: c.taint_loaded({filled}, s)"]
        targets = target.items if isinstance(target, Vector) else (target,)
        space = self.space(i)
        access = f"{self.address(i.operands[1])}, {self.dtype(kind)}, {len(targets)}"
        lines = [f"loaded = c.load{self.ordered(i)}({space!r}, {access}, s)"]
        for n, each in enumerate(targets):
            lines.append(self.write(each, kind, self.widened(f"loaded[:, {n}]", kind, each)))
        if space in ("shared", "generic"):
            filled = self.constant(tuple(self.registers_in(targets)))
            lines.append(f"if c.unwritten is not None: c.taint_loaded({filled}, s)")
        return lines

    op_ldu = op_ld

    def widened(self, value: str, kind: str, target: Any) -> str:
        """A loaded value in a register that may be wider: signed types extend their sign."""
        if not isinstance(target, Register) or ptx.BITS[target.type] == ptx.BITS[kind]:
            return value
        wide = kind[0].replace("f", "b") + str(max(ptx.BITS[target.type], 16))
        return f"{value}.astype({self.dtype(wide)}).view({self.dtype('b' + wide[1:])})"

    def op_st(self, i: Instruction) -> Statements:
        if "async" in i.modifiers:
            return self.store_async(i)
        kind = i.modifiers[-1]
        if kind not in ptx.BITS:
            raise self.unsupported()
        address, values = self.address(i.operands[0]), self.stacked(i.operands[1], kind)
        return f"c.store{self.ordered(i)}({self.space(i)!r}, {address}, {values}, s)"

    def ordered(self, i: Instruction) -> str:
        """What the methods for accesses are called that threads wait for each other with."""
        return "_ordered" if is_strong(i) else ""

    def stacked(self, operand: Any, kind: str) -> str:
        """Values to be stored: (threads, elements)."""
        values = operand.items if isinstance(operand, Vector) else (operand,)
        if kind == "b128":
            return f"np.stack([{', '.join(self.halves(operand))}], 1)"
        parts = ", ".join(f"c.lanes({self.read(value, kind)}, s)" for value in values)
        return f"np.stack([{parts}], 1).astype({self.dtype(kind)}, copy=False)"

    def store_async(self, i: Instruction) -> Statements:
        """st.async and red.async: into the cluster's shared memory, where an mbarrier counts the bytes."""
        to, value, barrier = i.operands
        kind, how = i.modifiers[-1], part(i.modifiers, REDUCTIONS)
        values = self.stacked(value, kind)
        where = f"{self.address(to)}, {values}, {self.address(barrier)}"
        return f"c.store_async({where}, {how!r}, {kind!r}, s)"

    def atomic(self, i: Instruction) -> Statements:
        """atom and red: lanes one after the other, in their order."""
        operation = part(i.modifiers, (*REDUCTIONS, "exch", "cas"))
        kind, space = i.modifiers[-1], self.space(i)
        returns = i.opcode == "atom"
        address, *values = i.operands[1:] if returns else i.operands
        if not operation:
            raise self.unsupported()
        if kind == "b128":
            halves = ", ".join(half for value in values for half in self.halves(value))
            call = f"c.atomic_128({operation!r}, {space!r}, {self.address(address)}, s, {halves})"
            row = self.row(i.operands[0])
            return f"d[{row} : {row + 2}, s] = {call}"
        stored = {"f16": "b16", "bf16": "b16", "f16x2": "b32", "bf16x2": "b32"}.get(kind, kind)
        if isinstance(values[0], Vector):  # each element is an atomic operation of its own
            each_value = [[value] for value in values[0].items]
            targets = i.operands[0].items if returns else ()
            lines = [f"c.check_vector({self.address(address)}, {ptx.BITS[stored] // 8 * len(each_value)})"]
        else:
            each_value, targets, lines = [values], i.operands[:1], []
        for n, each in enumerate(each_value):
            operands = ", ".join(f"c.lanes({self.read(value, stored)}, s)" for value in each)
            where = self.address(replace(address, offset=address.offset + n * ptx.BITS[stored] // 8))
            call = f"c.atomic({operation!r}, {kind!r}, {space!r}, {where}, s, {operands})"
            lines.append(self.write(targets[n], stored, call) if returns else call)
        return lines

    op_atom = atomic

    def op_red(self, i: Instruction) -> Statements:
        return self.store_async(i) if "async" in i.modifiers else self.atomic(i)

    def halves(self, operand: Any) -> list[str]:
        """The lower and the upper 64 bits of a register of 128."""
        row = self.row(operand)
        return [f"d[{row}, s]", f"d[{row + 1}, s]"]

    # --- cp.async

    def op_cp(self, i: Instruction) -> Statements:
        if "mbarrier" in i.modifiers:
            return f"c.arrive_after_cp_async({self.address(i.operands[0])}, {'noinc' in i.modifiers}, s)"
        if i.name.startswith(("cp.async.ca", "cp.async.cg")):
            return self.copy_async(i)
        if "bulk" in i.modifiers:
            return self.bulk_groups(i) or (self.bulk_tensor(i) if "tensor" in i.modifiers else self.bulk(i))
        if i.name == "cp.async.commit_group":
            return f"c.commit({CP_ASYNC}, s)"
        if i.name in ("cp.async.wait_group", "cp.async.wait_all"):
            return f"c.wait({CP_ASYNC}, {i.operands[0].value if i.operands else 0}, s)"
        raise self.unsupported()

    def copy_async(self, i: Instruction) -> Statements:
        to, source, size, *rest = i.operands
        rest = rest[:-1] if any("cache_hint" in m for m in i.modifiers) else rest
        present = "None"
        if rest and isinstance(rest[0], Register) and rest[0].type == "pred":  # ignore-src
            present = f"np.where({self.read(rest[0], 'pred')}, 0, {size.value})"
        elif rest:
            present = self.read(rest[0], "u32")
        return f"c.cp_async({self.address(to)}, {self.address(source)}, {size.value}, {present}, s)"

    # --- Bulk copies: the async proxy

    def bulk_groups(self, i: Instruction) -> Statements:
        if "commit_group" in i.modifiers:
            return f"c.commit({BULK_STORE}, s)"
        if "wait_group" in i.modifiers:
            # With .read, the groups have read their source, but may still be writing.
            kind = BULK_STORE if "read" in i.modifiers else BULK_WRITE
            return f"c.wait({kind}, {i.operands[0].value}, s)"
        return "pass" if "prefetch" in i.modifiers else ""

    def bulk_tensor(self, i: Instruction) -> Statements:
        """cp.async.bulk.tensor and cp.reduce.async.bulk.tensor."""
        if any(m.startswith(("im2col", "tile::gather", "tile::scatter")) for m in i.modifiers):
            raise self.unsupported()
        loads = "mbarrier::complete_tx::bytes" in i.modifiers
        tensor = i.operands[1 if loads else 0]
        start = ", ".join(self.read(each, "s32") for each in tensor.coordinates.items)
        if loads:
            to, barrier = self.address(i.operands[0]), self.address(i.operands[2])
            return f"c.bulk_load({to}, {self.address(tensor)}, [{start}], {barrier}, {self.mask(i)}, s)"
        source, how = self.address(i.operands[1]), part(i.modifiers, REDUCTIONS)
        return f"c.bulk_store({self.address(tensor)}, [{start}], {source}, {how!r}, s)"

    def mask(self, i: Instruction) -> str:
        """To which CTAs of the cluster a load is multicast."""
        if "multicast::cluster" not in i.modifiers:
            return "None"
        return self.read(i.operands[4 if "tensor" not in i.modifiers else 3], "u16")

    def bulk(self, i: Instruction) -> Statements:
        """cp.async.bulk and cp.reduce.async.bulk, of neighbouring bytes."""
        places = [m for m in i.modifiers if m.split("::")[0] in ("shared", "global")]
        to, source = self.address(i.operands[0]), self.address(i.operands[1])
        size = self.read(i.operands[2], "u32")
        how, kind = part(i.modifiers, REDUCTIONS), i.modifiers[-1]
        if places[0] == "global":
            return f"c.bulk_copy_out({to}, {source}, {size}, {how!r}, {kind!r}, s)"
        from_global, barrier = places[1] == "global", self.address(i.operands[3])
        where = f"{to}, {source}, {size}, {barrier}, {from_global}, {self.mask(i)}"
        return f"c.bulk_copy_in({where}, {how!r}, {kind!r}, s)"

    # --- mbarriers

    def op_mbarrier(self, i: Instruction) -> Statements:
        what = i.modifiers[0]
        if what in ("init", "expect_tx", "complete_tx"):
            method = {"init": "init", "expect_tx": "expect", "complete_tx": "complete"}[what]
            operands = f"{self.address(i.operands[0])}, {self.read(i.operands[1], 'u32')}"
            return f"c.mbarrier_{method}({operands}, s)"
        if what == "inval":
            return f"c.mbarrier_inval({self.address(i.operands[0])}, s)"
        if what in ("arrive", "arrive_drop"):
            return self.mbarrier_arrive(i)
        if what == "pending_count":
            return self.write(
                i.operands[0], "b32", f"c.mbarrier_pending_count({self.read(i.operands[1], 'b64')})"
            )
        raise self.unsupported()

    def mbarrier_arrive(self, i: Instruction) -> Statements:
        """Its result, the state before, has the parity of the phase in bit 0 and what is pending above."""
        with_state = not isinstance(i.operands[0], ptx.Address)
        address, *value = i.operands[1:] if with_state else i.operands
        number = self.read(value[0], "u32") if value else "1"
        count, expected = ("1", number) if "expect_tx" in i.modifiers else (number, "None")
        lines = []
        if with_state and isinstance(i.operands[0], Register):
            lines.append(self.write(i.operands[0], "b64", f"c.mbarrier_state({self.address(address)}, s)"))
        drop = i.modifiers[0] == "arrive_drop"
        arguments = f"{self.address(address)}, {count}, {expected}, s" + (", True" if drop else "")
        return [*lines, f"c.mbarrier_arrive({arguments})"]

    # --- Order and addresses

    def op_fence(self, i: Instruction) -> Statements:
        if i.name.startswith("fence.proxy.async"):
            return "c.fence_async_proxy(s)"
        if i.modifiers[0] not in FENCES or not communicates(self.kernel.instructions):
            return "pass"
        return f"c.fence({strength(i.modifiers).scope}, s)"

    op_membar = op_fence

    def op_mapa(self, i: Instruction) -> Statements:
        kind = i.modifiers[-1]
        address, rank = self.read(i.operands[1], kind), self.read(i.operands[2], "u32")
        generic = "shared::cluster" not in i.modifiers
        return self.write(i.operands[0], kind, f"c.map_shared({address}, {rank}, {generic})")

    def op_getctarank(self, i: Instruction) -> Statements:
        address = self.read(i.operands[1], i.modifiers[-1])
        return self.write(i.operands[0], "u32", f"c.rank_of({address})")

    def op_isspacep(self, i: Instruction) -> Statements:
        target, address = i.operands
        space = i.modifiers[0].split("::")[0]
        if space not in SPACES or (space == "const" and self.variables):
            raise self.unsupported()
        return self.write(target, "pred", f"c.lies_in({space!r}, {self.read(address, 'b64')})")

    def nothing(self, i: Instruction) -> Statements:
        return "pass"

    op_prefetch = op_prefetchu = op_griddepcontrol = op_nanosleep = nothing
    op_discard = op_applypriority = nothing

    def op_setmaxnreg(self, i: Instruction) -> Statements:
        count = i.operands[0].value
        if count % 8 or not 24 <= count <= 256:
            raise self.unsupported(f": {count} registers, where a multiple of 8 from 24 to 256 is needed")
        return "pass"

    def op_call(self, i: Instruction) -> Statements:
        """vprintf, which the DSL's printf calls, is the one function that there is."""
        names = [each.name for each in i.operands if isinstance(each, Symbol)]
        if names[:1] != ["vprintf"]:
            raise self.unsupported(f": device function {(names or ['?'])[0]} can't be called, only vprintf")
        result, _, arguments = i.operands
        text, values = (self.local[each.name] for each in arguments.items)
        return f"c.printf({text}, {values}, {self.local[result.items[0].name]}, s)"

    def op_tensormap(self, i: Instruction) -> Statements:
        if i.modifiers[0] == "cp_fenceproxy":
            return f"c.copy_tensor_map({self.address(i.operands[0])}, {self.address(i.operands[1])}, s)"
        field, (address, *mode, value) = part(i.modifiers, FIELDS), i.operands
        if i.modifiers[0] != "replace" or not field:
            raise self.unsupported()
        where = f"{mode[0].value if mode else 0}, {self.space(i)!r}, {self.address(address)}"
        new = self.read(value, i.modifiers[-1])
        return f"c.replace_tensor_map({field!r}, {where}, {new}, s)"

    def op_createpolicy(self, i: Instruction) -> Statements:
        return self.write(i.operands[0], "b64", "np.uint64(0)")

    def op_trap(self, i: Instruction) -> Statements:
        return "c.trap(s)"
