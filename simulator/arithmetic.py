"""Instructions that compute a thread's registers from its registers, as Python expressions.

Each method `op_<opcode>` takes an instruction and returns the statements that execute it.
"""

from typing import Any

from cutelab.simulator import ptx
from cutelab.simulator.memory import WINDOWS
from cutelab.simulator.operands import Operands, immediate, part
from cutelab.simulator.ptx import Immediate, Instruction, Pair, Vector

COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
           "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}  # fmt: skip
INFIX = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^"}
HALVES = {"f16": "b16", "bf16": "b16"}
BYTES = {"e4m3": "b8", "e5m2": "b8"}
INTEGER_PAIRS = ("s16x2", "u16x2")
DIRECTED = ("rz", "rm", "rp")
PAIRS = {"f16x2": "b32", "bf16x2": "b32", "e4m3x2": "b16", "e5m2x2": "b16"}
STORED = HALVES | BYTES | PAIRS | {"tf32": "b32"}
"""The bits in which numbers of formats that NumPy doesn't have are kept."""

Statements = str | list[str]


class Arithmetic(Operands):
    # --- Moves

    def op_mov(self, i: Instruction) -> Statements:
        kind = i.modifiers[-1]
        target, value = i.operands
        if kind == "b128":
            return self.move_128(target, value)
        if isinstance(value, Vector):  # pack
            width = ptx.BITS[kind] // len(value.items)
            parts = [f"{self.array(item, f'b{width}')}.astype({self.dtype(kind)})" for item in value.items]
            shifted = [f"({part} << {self.dtype(kind)}({n * width}))" for n, part in enumerate(parts)]
            return self.write(target, kind, " | ".join(shifted))
        if isinstance(target, Vector):  # unpack
            width = ptx.BITS[kind] // len(target.items)
            narrow, whole = f"b{width}", self.array(value, kind)
            pieces = [f"({whole} >> {self.dtype(kind)}({n * width}))" for n in range(len(target.items))]
            return [
                self.write(item, narrow, f"{piece}.astype({self.dtype(narrow)})")
                for item, piece in zip(target.items, pieces, strict=True)
            ]
        return self.write(target, kind, self.read(value, kind))

    def move_128(self, target: Any, value: Any) -> Statements:
        """A register of 128 bits is two rows of the bank d."""
        if isinstance(value, Vector):
            row = self.row(target)
            return [f"d[{row + n}, s] = {self.read(each, 'b64')}" for n, each in enumerate(value.items)]
        row = self.row(value)
        if isinstance(target, Vector):
            return [self.write(each, "b64", f"d[{row + n}, s]") for n, each in enumerate(target.items)]
        return [f"d[{self.row(target) + n}, s] = d[{row + n}, s]" for n in range(2)]

    def op_selp(self, i: Instruction) -> Statements:
        kind = i.modifiers[-1]
        target, a, b, p = i.operands
        chosen = f"np.where({self.read(p, 'pred')}, {self.read(a, kind)}, {self.read(b, kind)})"
        return self.write(target, kind, chosen)

    def op_slct(self, i: Instruction) -> Statements:
        kind, tested = i.modifiers[-2:]
        target, a, b, c = i.operands
        chosen = f"np.where({self.number(i, c, tested)} >= 0, {self.read(a, kind)}, {self.read(b, kind)})"
        return self.write(target, kind, chosen)

    # --- Sums and products, of integers, floats, and numbers of 16 bits

    def number(self, i: Instruction, operand: Any, kind: str) -> str:
        """`read`; with `.ftz`, a subnormal float32 is zero."""
        value = self.read(operand, kind)
        return f"numbers.flush({value})" if "ftz" in i.modifiers and kind == "f32" else value

    def result(self, i: Instruction, kind: str, value: str) -> Statements:
        """`write` to the first operand. `.sat`: clipped to 0 … 1, NaN being 0; `.ftz`: zero if subnormal."""
        if "sat" in i.modifiers:
            value = f"numbers.saturate({value})"
        if "ftz" in i.modifiers and kind == "f32":
            value = f"numbers.flush(np.asarray({value}, np.float32))"
        return self.write(i.operands[0], kind, value)

    def directed(self, i: Instruction, kind: str, operation: str) -> str | None:
        """A float result that is rounded in one direction; None where that isn't asked for."""
        mode = part(i.modifiers, DIRECTED)
        if not mode or kind[0] != "f":
            return None
        if kind != "f32":
            raise self.unsupported()
        values = ", ".join(self.number(i, x, kind) for x in i.operands[1:])
        return f"numbers.directed({operation!r}, {mode!r}, {values})"

    def small(self, i: Instruction, how: str) -> Statements | None:
        """The statement for numbers of 16 bits, alone or in pairs; None for other types."""
        kind = i.modifiers[-1]
        if kind not in HALVES and kind not in ("f16x2", "bf16x2"):
            return None
        function = "packed" if kind.endswith("x2") else "half"
        how = ".".join((how, *(m for m in i.modifiers if m in ("sat", "relu", "NaN", "ftz", "xorsign"))))
        result = f"numbers.{function}({kind!r}, {how!r}, {self.arguments(i.operands[1:], STORED[kind])})"
        return self.write(i.operands[0], STORED[kind], result)

    def integer_pair(self, i: Instruction) -> Statements | None:
        """The statement for pairs of 16-bit integers; None for other types."""
        kind = i.modifiers[-1]
        if kind not in INTEGER_PAIRS:
            return None
        values = self.arguments(i.operands[1:], "b32")
        how = f"{i.opcode!r}, {kind[0] == 's'}, {'relu' in i.modifiers}"
        return self.write(i.operands[0], "b32", f"integers.pairwise({how}, {values})")

    def binary(self, i: Instruction) -> Statements:
        kind = i.modifiers[-1]
        target, a, b = i.operands
        if kind == "s32" and "sat" in i.modifiers:
            values = self.arguments((a, b), kind)
            return self.write(target, kind, f"integers.saturated({values}, {i.opcode == 'sub'})")
        if "cc" in i.modifiers:
            return self.with_carry(i, False)
        if small := self.small(i, INFIX[i.opcode]) or self.integer_pair(i):
            return small
        value = f"{self.number(i, a, kind)} {INFIX[i.opcode]} {self.number(i, b, kind)}"
        return self.result(i, kind, self.directed(i, kind, i.opcode) or value)

    op_add = op_sub = op_and = op_or = op_xor = binary

    # --- Integers of more words than one, with a carry between instructions

    def with_carry(self, i: Instruction, takes: bool) -> Statements:
        """{add,sub,mad}{c}.cc: the carry, or borrow, of each thread is a row of the predicates."""
        if self.carry is None:
            self.carry = self.bank_rows["p"]
            self.bank_rows["p"] += 1
        kind = i.modifiers[-1].replace("s", "u")
        a, b, *c = (self.read(x, kind) for x in i.operands[1:])
        if c:
            product = f"{a} * {b}"
            if "hi" in i.modifiers:
                signed_half = self.upper_half(i.operands[1], i.operands[2], i.modifiers[-1])
                product = f"{signed_half}.view({self.dtype(kind)})"
            a, b = product, c[0]
        carry = f"p[{self.carry}, s]" if takes else "False"
        subtract = i.opcode.startswith("sub")
        lines = [
            f"total, carry = integers.add_with_carry({a}, {b}, {carry}, {subtract})",
            self.write(i.operands[0], kind, "total"),
        ]
        return [*lines, f"p[{self.carry}, s] = carry"] if "cc" in i.modifiers else lines

    def op_addc(self, i: Instruction) -> Statements:
        return self.with_carry(i, True)

    op_subc = op_madc = op_addc

    def op_not(self, i: Instruction) -> Statements:
        kind = i.modifiers[-1]
        return self.write(i.operands[0], kind, f"~{self.read(i.operands[1], kind)}")

    def op_cnot(self, i: Instruction) -> Statements:
        kind = i.modifiers[-1]
        return self.write(i.operands[0], kind, f"{self.read(i.operands[1], kind)} == 0")

    def op_neg(self, i: Instruction) -> Statements:
        kind = i.modifiers[-1]
        return self.small(i, "neg") or self.result(i, kind, f"-{self.read(i.operands[1], kind)}")

    def op_abs(self, i: Instruction) -> Statements:
        kind = i.modifiers[-1]
        value = i.operands[1]
        return self.small(i, "abs") or self.result(i, kind, f"np.abs({self.read(value, kind)})")

    def op_copysign(self, i: Instruction) -> Statements:
        kind = i.modifiers[-1]
        sign, magnitude = (self.read(x, kind) for x in i.operands[1:])
        return self.write(i.operands[0], kind, f"np.copysign({magnitude}, {sign})")

    def extreme(self, i: Instruction) -> Statements:
        """min and max. Of a number and a NaN, PTX takes the number, unless `.NaN`; +0 is greater than -0."""
        kind = i.modifiers[-1]
        if small := self.small(i, i.opcode) or self.integer_pair(i):
            return small
        values = [self.number(i, operand, kind) for operand in i.operands[1:]]
        if kind[0] == "f":
            how = f"{i.opcode!r}, {'NaN' in i.modifiers}, {'xorsign' in i.modifiers}"
            return self.result(i, kind, f"numbers.extreme({how}, {', '.join(values)})")
        first, *others = values
        for other in others:
            first = f"np.{i.opcode}imum({first}, {other})"
        return self.write(i.operands[0], kind, f"np.maximum({first}, 0)" if "relu" in i.modifiers else first)

    op_min = op_max = extreme

    def product(self, a: Any, b: Any, kind: str, wide: str) -> str:
        left, right = (f"{self.array(x, kind)}.astype({self.dtype(wide)})" for x in (a, b))
        return f"{left} * {right}"

    def upper_half(self, a: Any, b: Any, kind: str) -> str:
        bits = ptx.BITS[kind]
        if bits == 64:
            return f"integers.mul_hi({self.read(a, kind)}, {self.read(b, kind)})"
        wide = f"{kind[0]}{2 * bits}"
        return f"({self.product(a, b, kind, wide)} >> {self.dtype(wide)}({bits})).astype({self.dtype(kind)})"

    def op_mul(self, i: Instruction) -> Statements:
        kind = i.modifiers[-1]
        target, a, b = i.operands
        if "wide" in i.modifiers:
            wide = kind[0] + str(ptx.BITS[kind] * 2)
            return self.write(target, wide, self.product(a, b, kind, wide))
        if "hi" in i.modifiers:
            return self.write(target, kind, self.upper_half(a, b, kind))
        if small := self.small(i, "*"):
            return small
        value = f"{self.number(i, a, kind)} * {self.number(i, b, kind)}"
        return self.result(i, kind, self.directed(i, kind, "mul") or value)

    def op_mad(self, i: Instruction) -> Statements:
        kind = i.modifiers[-1]
        target, a, b, c = i.operands
        if kind[0] == "f":
            return self.op_fma(i)
        if "cc" in i.modifiers:
            return self.with_carry(i, False)
        if "wide" in i.modifiers:
            wide = kind[0] + str(ptx.BITS[kind] * 2)
            return self.write(target, wide, f"{self.product(a, b, kind, wide)} + {self.read(c, wide)}")
        product = f"{self.read(a, kind)} * {self.read(b, kind)}"
        if "hi" in i.modifiers:
            product = self.upper_half(a, b, kind)
        return self.write(target, kind, self.sum(i, product, c))

    def sum(self, i: Instruction, product: str, c: Any) -> str:
        """The sum of a multiply-add of integers; `.sat` is there for s32."""
        kind = i.modifiers[-1]
        addend = self.read(c, kind)
        return f"integers.saturated({product}, {addend})" if "sat" in i.modifiers else f"{product} + {addend}"

    def op_mul24(self, i: Instruction) -> Statements:
        kind = i.modifiers[-1]
        values = self.arguments(i.operands[1:3], kind)
        product = f"integers.mul24({values}, {'hi' in i.modifiers})"
        return self.write(
            i.operands[0], kind, product if i.opcode == "mul24" else self.sum(i, product, i.operands[3])
        )

    op_mad24 = op_mul24

    def op_fma(self, i: Instruction) -> Statements:
        kind = i.modifiers[-1]
        if kind == "f64":
            return self.write(i.operands[0], kind, f"numbers.fma({self.arguments(i.operands[1:], kind)})")
        if kind != "f32":
            return self.small(i, "fma") or []
        a, b, c = (f"np.asarray({self.number(i, x, kind)})" for x in i.operands[1:])
        return self.result(i, kind, self.directed(i, kind, "fma") or f"numbers.fma_f32({a}, {b}, {c})")

    def op_div(self, i: Instruction) -> Statements:
        kind = i.modifiers[-1]
        target, a, b = i.operands
        if kind[0] == "f":
            value = f"{self.number(i, a, kind)} / {self.number(i, b, kind)}"
            return self.result(i, kind, self.directed(i, kind, "div") or value)
        return self.write(target, kind, f"integers.divide({self.read(a, kind)}, {self.read(b, kind)})[0]")

    def op_rem(self, i: Instruction) -> Statements:
        kind = i.modifiers[-1]
        target, a, b = i.operands
        return self.write(target, kind, f"integers.divide({self.read(a, kind)}, {self.read(b, kind)})[1]")

    def op_dp4a(self, i: Instruction) -> Statements:
        a_type, b_type = i.modifiers[-2:]
        target, a, b, c = i.operands
        kind = "s32" if "s32" in (a_type, b_type) else "u32"
        values = f"{self.arguments((a, b), 'b32')}, {self.read(c, kind)}"
        half = part(i.modifiers, ("lo", "hi"))
        return self.write(target, kind, f"integers.dot({values}, {a_type!r}, {b_type!r}, {half!r})")

    op_dp2a = op_dp4a

    def op_sad(self, i: Instruction) -> Statements:
        kind = i.modifiers[-1]
        a, b, c = (self.read(x, kind) for x in i.operands[1:])
        return self.write(i.operands[0], kind, f"np.maximum({a}, {b}) - np.minimum({a}, {b}) + {c}")

    # --- Bits

    def shift(self, i: Instruction) -> Statements:
        kind = i.modifiers[-1]
        function = {"shl": "shift_left", "shr": "shift_right"}[i.opcode]
        value, count = self.read(i.operands[1], kind), self.read(i.operands[2], "u32")
        width = ptx.BITS[kind]
        if isinstance(i.operands[2], Immediate) and 0 <= i.operands[2].value < width:
            constant = self.constant(immediate(i.operands[2], kind.replace("b", "u")))
            return self.write(
                i.operands[0], kind, f"{value} {'<<' if i.opcode == 'shl' else '>>'} {constant}"
            )
        return self.write(i.operands[0], kind, f"integers.{function}({value}, {count})")

    op_shl = op_shr = shift

    def op_shf(self, i: Instruction) -> Statements:
        low, high, count = (self.read(x, "b32") for x in i.operands[1:])
        left, wrap = i.modifiers[0] == "l", "wrap" in i.modifiers
        return self.write(
            i.operands[0], "b32", f"integers.funnel_shift({low}, {high}, {count}, {left}, {wrap})"
        )

    def op_bfe(self, i: Instruction) -> Statements:
        kind = i.modifiers[-1]
        target, value, *where = i.operands
        field = f"{self.read(value, kind)}, {self.arguments(where, 'u32')}"
        return self.write(target, kind, f"integers.bit_field({field})")

    def op_bfi(self, i: Instruction) -> Statements:
        kind = i.modifiers[-1]
        target, new, old, *where = i.operands
        field = f"{self.arguments((new, old), kind)}, {self.arguments(where, 'u32')}"
        return self.write(target, kind, f"integers.insert_field({field})")

    def op_lop3(self, i: Instruction) -> Statements:
        target, *values, table = i.operands[:5]
        if i.modifiers[-1] != "b32" or len(values) != 3:
            raise self.unsupported()
        logic = f"integers.logic({self.arguments(values, 'b32')}, {table.value})"
        if not isinstance(target, Pair):
            return self.write(target, "b32", logic)
        test = f"(bits != 0) {INFIX[i.modifiers[0]]} {self.read(i.operands[5], 'pred')}"
        lines = [f"bits = {logic}", f"test = {test}", self.write(target.second, "pred", "test")]
        return [*lines, self.write(target.first, "b32", "bits")]

    def op_popc(self, i: Instruction) -> Statements:
        return self.write(
            i.operands[0], "u32", f"integers.count_ones({self.array(i.operands[1], i.modifiers[-1])})"
        )

    def op_clz(self, i: Instruction) -> Statements:
        value = self.array(i.operands[1], i.modifiers[-1])
        return self.write(i.operands[0], "u32", f"integers.leading_zeros({value})")

    def op_brev(self, i: Instruction) -> Statements:
        kind = i.modifiers[-1]
        return self.write(i.operands[0], kind, f"integers.reverse_bits({self.array(i.operands[1], kind)})")

    def op_bfind(self, i: Instruction) -> Statements:
        value = self.array(i.operands[1], i.modifiers[-1])
        return self.write(i.operands[0], "u32", f"integers.highest_one({value}, {'shiftamt' in i.modifiers})")

    def op_prmt(self, i: Instruction) -> Statements:
        mode = "" if i.modifiers[-1] == "b32" else i.modifiers[-1]
        values = self.arguments(i.operands[1:], "b32")
        return self.write(i.operands[0], "b32", f"integers.permute_bytes({values}, {mode!r})")

    def op_fns(self, i: Instruction) -> Statements:
        mask, base, offset = i.operands[1:]
        values = f"{self.arguments((mask, base), 'b32')}, {self.read(offset, 's32')}"
        return self.write(i.operands[0], "b32", f"integers.find_nth_set({values})")

    def op_bmsk(self, i: Instruction) -> Statements:
        values = self.arguments(i.operands[1:], "b32")
        return self.write(i.operands[0], "b32", f"integers.bit_mask({values}, {'wrap' in i.modifiers})")

    def op_szext(self, i: Instruction) -> Statements:
        kind = i.modifiers[-1]
        value, width = self.read(i.operands[1], kind), self.read(i.operands[2], "u32")
        return self.write(i.operands[0], kind, f"integers.extend({value}, {width}, {'wrap' in i.modifiers})")

    # --- Functions

    def unary(self, i: Instruction) -> Statements:
        """Functions that the hardware approximates are exact here, up to one rounding."""
        kind = i.modifiers[-1]
        if kind not in ("f32", "f64"):
            return self.small(i, i.opcode) or []
        function = {
            "rcp": "1 / ({})", "sqrt": "np.sqrt({})", "rsqrt": "1 / np.sqrt({})", "ex2": "np.exp2({})",
            "lg2": "np.log2({})", "tanh": "np.tanh({})", "sin": "np.sin({})", "cos": "np.cos({})",
        }[i.opcode]  # fmt: skip
        value = function.format(self.number(i, i.operands[1], kind))
        return self.result(i, kind, self.directed(i, kind, i.opcode) or value)

    op_rcp = op_sqrt = op_rsqrt = op_ex2 = op_lg2 = op_tanh = op_sin = op_cos = unary

    # --- Comparisons

    def comparison(self, i: Instruction, compare: str, kind: str) -> str:
        """An expression that is true where a compares to b; half-precision numbers compare as floats."""
        left, right = (self.number(i, x, STORED.get(kind, kind)) for x in i.operands[1:3])
        if kind in HALVES:
            left, right = (f"numbers.from_bits({value}, {kind!r})" for value in (left, right))
            if "ftz" in i.modifiers:
                left, right = (f"numbers.flush({value}, {kind!r})" for value in (left, right))
        if kind[0] not in "fb" or kind in ("b16", "b32", "b64"):
            return f"({left} {COMPARE[compare]} {right})"
        unordered = f"np.isnan({left}) | np.isnan({right})"
        if compare in ("nan", "num"):
            return f"({unordered})" if compare == "nan" else f"~({unordered})"
        if compare not in COMPARE:  # also true for NaN
            return f"(({left} {COMPARE[compare[:-1]]} {right}) | {unordered})"
        if compare == "ne":
            return f"(({left} != {right}) & ~({unordered}))"
        return f"({left} {COMPARE[compare]} {right})"

    def op_setp(self, i: Instruction) -> Statements:
        kind, compare = i.modifiers[-1], i.modifiers[0]
        combine = part(i.modifiers[1:-1], ("and", "or", "xor"))
        target, _, _, *third = i.operands
        if kind in ("f16x2", "bf16x2"):
            return self.compare_pair(i, kind, compare, extra=third)
        if kind not in ptx.BITS and kind not in HALVES:
            raise self.unsupported()
        first, second = (target.first, target.second) if isinstance(target, Pair) else (target, None)
        extra = f" {INFIX[combine]} {self.read(third[0], 'pred')}" if combine else ""
        lines = [f"test = {self.comparison(i, compare, kind)}", self.write(first, "pred", "test" + extra)]
        return lines if second is None else [*lines, self.write(second, "pred", "~test" + extra)]

    def compare_pair(self, i: Instruction, kind: str, compare: str, extra: list[Any]) -> Statements:
        """setp of two pairs of 16-bit floats: p is for their lower halves, q for the upper ones."""
        combine = part(i.modifiers[1:-1], ("and", "or", "xor"))
        also = f" {INFIX[combine]} {self.read(extra[0], 'pred')}" if combine else ""
        values, flush = self.arguments(i.operands[1:3], "b32"), "ftz" in i.modifiers
        target = i.operands[0]
        return [
            f"low, high = numbers.compare_pairs({kind!r}, {compare!r}, {flush}, {values})",
            self.write(target.first, "pred", "low" + also),
            self.write(target.second, "pred", "high" + also),
        ]

    def op_set(self, i: Instruction) -> Statements:
        to, kind = i.modifiers[-2:]
        combine = part(i.modifiers[1:-2], ("and", "or", "xor"))
        target, _, _, *third = i.operands
        if kind not in ptx.BITS and kind not in HALVES:
            raise self.unsupported()
        test = self.comparison(i, i.modifiers[0], kind)
        test += f" {INFIX[combine]} {self.read(third[0], 'pred')}" if combine else ""
        if to in HALVES:
            one = {"f16": 0x3C00, "bf16": 0x3F80}[to]
            return self.write(target, "b16", f"np.where({test}, np.uint16({one}), np.uint16(0))")
        if to not in ptx.BITS:
            raise self.unsupported()
        true = "np.float32(1)" if to == "f32" else f"~{self.dtype(to)}(0)"
        return self.write(target, to, f"np.where({test}, {true}, {self.dtype(to)}(0))")

    def op_testp(self, i: Instruction) -> Statements:
        what, kind = i.modifiers
        value = self.read(i.operands[1], kind)
        test = {"finite": "np.isfinite({})", "infinite": "np.isinf({})", "notanumber": "np.isnan({})",
                "number": "~np.isnan({})", "normal": "numbers.is_normal({})",
                "subnormal": "numbers.is_subnormal({})"}.get(what)  # fmt: skip
        if test is None:
            raise self.unsupported()
        return self.write(i.operands[0], "pred", test.format(value))

    # --- Conversions

    def op_cvt(self, i: Instruction) -> Statements:
        if i.modifiers[0] == "pack":
            return self.convert_pack(i)
        to, source = i.modifiers[-2:]
        if "rs" in i.modifiers or any(kind not in STORED and kind not in ptx.BITS for kind in (to, source)):
            raise self.unsupported()
        values = ", ".join(self.array(x, STORED.get(source, source)) for x in i.operands[1:])
        converted = f"numbers.convert({to!r}, {source!r}, {i.modifiers[:-2]!r}, {values})"
        target = i.operands[0]
        if to not in STORED and ptx.BITS[to] < ptx.BITS[getattr(target, "type", to)]:
            to = to[0] + str(ptx.BITS[target.type])  # a narrow integer in a wider register
            converted = f"{converted}.astype({self.dtype(to)})"
        return self.write(target, STORED.get(to, to), converted)

    def convert_pack(self, i: Instruction) -> Statements:
        """cvt.pack: two integers, saturated to 16 or 8 bits, in the lower bits of the result."""
        to, source = i.modifiers[-3:-1] if len(i.operands) == 4 else i.modifiers[-2:]
        target, high, low, *below = i.operands
        values = f"{self.arguments((high, low), source)}, {self.read(below[0], 'b32') if below else 'None'}"
        return self.write(target, "b32", f"numbers.convert_pack({to!r}, {values})")

    def op_cvta(self, i: Instruction) -> Statements:
        kind = i.modifiers[-1]
        target, value = i.operands
        space = part((m.split("::")[0] for m in i.modifiers), ("shared", "param", "global", "local", "const"))
        sign = "-" if "to" in i.modifiers else "+"
        window = self.constant(self.window(space))
        return self.write(target, kind, f"{self.read(value, kind)} {sign} {window}")

    def window(self, space: str) -> Any:
        if space not in WINDOWS:
            raise self.unsupported()
        return immediate(Immediate(WINDOWS[space]), "u64")
