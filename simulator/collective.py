"""Instructions that lanes of a warp, or warps of a warpgroup, execute together, as calls of the CTA.

Each method `op_<opcode>` takes an instruction and returns the statements that execute it.
"""

from typing import Any

from cutelab.simulator.operands import Operands, immediate
from cutelab.simulator.ptx import Instruction, Pair, Register, Symbol, Vector
from cutelab.simulator.races import WGMMA

ALL_LANES = 0xFFFFFFFF

Statements = str | list[str]


class Collective(Operands):
    # --- Matrices

    def op_mma(self, i: Instruction) -> Statements:
        """mma.sync.aligned.m…n8k….row.col.D.A.B.C, dense."""
        if any(m.startswith(("sp", "kind", "block_scale")) for m in i.modifiers) or "row" not in i.modifiers:
            raise self.unsupported()
        shape = next(m for m in i.modifiers if m[0] == "m" and m[1:2].isdigit())
        d_type, a_type, b_type, c_type = i.modifiers[-4:]
        if not shape.startswith("m16n8k") or d_type != c_type or d_type not in ("f32", "f16", "s32"):
            raise self.unsupported()
        d, a, b, c = (self.row_list(operand) for operand in i.operands)
        clip = "satfinite" in i.modifiers
        return f"c.mma({shape[6:]}, {a_type!r}, {b_type!r}, {d_type!r}, {clip}, {d}, {a}, {b}, {c}, s)"

    def op_wgmma(self, i: Instruction) -> Statements:
        if i.modifiers[0] == "fence":
            return "c.wgmma_fence(s)"
        if i.modifiers[0] == "commit_group":
            return f"c.commit({WGMMA}, s)"
        if i.modifiers[0] == "wait_group":
            return f"c.wait_wgmma({i.operands[0].value}, s)"
        if "sp" in i.modifiers:
            raise self.unsupported()
        shape = next(m for m in i.modifiers if m.startswith("m64n"))
        types = tuple(m for m in i.modifiers if m != "satfinite")[-3:]
        n, k = shape[4:].split("k")
        d, a, b, keep, *options = i.operands
        source = self.row_list(a) if isinstance(a, Vector) else self.read(a, "b64")
        numbers = [int(immediate(each, "s32")) for each in options]
        signs, transposes = numbers[:2] or [1, 1], numbers[2:]
        transposes = [0, *transposes] if isinstance(a, Vector) else transposes
        chosen = (*signs, *transposes, 0, 0)[:4]
        clip = "satfinite" in i.modifiers
        return (
            f"c.wgmma({n}, {k}, {types}, {self.row_list(d)}, {source}, {self.read(b, 'b64')}, "
            f"{self.read(keep, 'pred')}, {chosen}, {clip}, s)"
        )

    def op_ldmatrix(self, i: Instruction) -> Statements:
        if i.modifiers[-1] != "b16" or "m8n8" not in i.modifiers:
            raise self.unsupported()
        rows = self.row_list(i.operands[0])
        return f"c.ldmatrix({rows}, {self.address(i.operands[1])}, {'trans' in i.modifiers}, s)"

    def op_stmatrix(self, i: Instruction) -> Statements:
        if i.modifiers[-1] != "b16" or "m8n8" not in i.modifiers:
            raise self.unsupported()
        rows = self.row_list(i.operands[1])
        return f"c.stmatrix({rows}, {self.address(i.operands[0])}, {'trans' in i.modifiers}, s)"

    def op_movmatrix(self, i: Instruction) -> Statements:
        return f"c.movmatrix({self.row(i.operands[0])}, {self.row(i.operands[1])}, s)"

    # --- Exchange within a warp. The last operand names the lanes that take part.

    def members(self, operand: Any) -> str:
        return f"c.check_members({self.read(operand, 'b32')}, s)"

    def op_shfl(self, i: Instruction) -> Statements:
        mode = i.modifiers[1]
        target, value, lane, clamp, members = i.operands
        first, second = (target.first, target.second) if isinstance(target, Pair) else (target, None)
        taken = f"r[{self.row(value)}, source]" if isinstance(value, Register) else self.read(value, "b32")
        where = f"{self.read(lane, 'u32')}, {self.read(clamp, 'u32')}"
        lines = [
            self.members(members),
            f"source, valid = c.shuffle_source({mode!r}, {where}, s)",
            self.write(first, "b32", taken),
        ]
        return lines if second is None else [*lines, self.write(second, "pred", "valid")]

    def op_elect(self, i: Instruction) -> Statements:
        target = i.operands[0]
        lines = [self.members(i.operands[1]), "leader, elected = c.elect(s)"]
        lines.append(self.write(target.second, "pred", "elected"))
        if isinstance(target.first, Register):
            lines.append(self.write(target.first, "b32", "leader"))
        return lines

    def op_vote(self, i: Instruction) -> Statements:
        mode, kind = i.modifiers[1], i.modifiers[-1]
        vote = f"c.vote({mode!r}, c.lanes({self.read(i.operands[1], 'pred')}, s), s)"
        return [self.members(i.operands[2]), self.write(i.operands[0], kind, vote)]

    def op_match(self, i: Instruction) -> Statements:
        mode, kind = i.modifiers[0], i.modifiers[-1]
        target, value, members = i.operands
        first, second = (target.first, target.second) if isinstance(target, Pair) else (target, Symbol("_"))
        match = f"mask, agreed = c.match({mode == 'all'}, c.lanes({self.read(value, kind)}, s), s)"
        return [
            self.members(members),
            match,
            self.write(first, "b32", "mask"),
            self.write(second, "pred", "agreed"),
        ]

    def op_redux(self, i: Instruction) -> Statements:
        operation, kind = i.modifiers[1], i.modifiers[-1]
        nan = "NaN" in i.modifiers
        value = self.read(i.operands[1], kind)
        if "abs" in i.modifiers:
            value = f"np.abs({value})"
        reduced = f"c.redux({operation!r}, c.lanes({value}, s), s, {nan})"
        return [self.members(i.operands[2]), self.write(i.operands[0], kind, reduced)]

    def op_activemask(self, i: Instruction) -> Statements:
        return self.write(i.operands[0], "b32", "c.active_lanes(s)")

    def op_bar(self, i: Instruction) -> Statements:
        """bar.warp.sync: lanes that parted ways have met before."""
        return self.members(i.operands[0])

    op_barrier = op_bar
