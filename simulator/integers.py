"""Integer operations that NumPy has no operator for (PTX ISA, "Integer Arithmetic Instructions")."""

from typing import Any

import numpy as np

Values = Any
"""An array over the threads, or a NumPy scalar for all."""


def divide(a: Values, b: Values) -> tuple[Values, Values]:
    """Quotient and remainder, towards zero; of a division by zero, all bits one and the dividend."""
    a, b = np.broadcast_arrays(a, b)
    if a.dtype.kind == "u":
        safe = np.where(b == 0, 1, b).astype(a.dtype)
        return np.where(b == 0, np.iinfo(a.dtype).max, a // safe), np.where(b == 0, a, a % safe)
    wide_a, wide_b = a.astype(np.int64), b.astype(np.int64)
    safe = np.where(wide_b == 0, 1, wide_b)
    quotient = np.abs(wide_a) // np.abs(safe) * np.sign(wide_a) * np.sign(safe)
    remainder = wide_a - quotient * safe
    quotient = np.where(wide_b == 0, -1, quotient)
    return quotient.astype(a.dtype), np.where(wide_b == 0, wide_a, remainder).astype(a.dtype)


def shift_left(a: Values, count: Values) -> Values:
    """Zero where `count` is the width or more."""
    dtype = np.asarray(a).dtype
    width = dtype.itemsize * 8
    shifted = a << np.minimum(count, width - 1).astype(dtype)
    return np.where(np.asarray(count) < width, shifted, dtype.type(0))


def shift_right(a: Values, count: Values) -> Values:
    """Zero, or for signed types all sign, where `count` is the width or more."""
    dtype = np.asarray(a).dtype
    width = dtype.itemsize * 8
    shifted = a >> np.minimum(count, width - 1).astype(dtype)
    return shifted if dtype.kind == "i" else np.where(np.asarray(count) < width, shifted, dtype.type(0))


def funnel_shift(low: Values, high: Values, count: Values, left: bool, wrap: bool) -> Values:
    """shf: 32 bits of the 64 in high:low."""
    count = np.asarray(count).astype(np.uint64)
    count = count & np.uint64(31) if wrap else np.minimum(count, np.uint64(32))
    both = np.asarray(high).astype(np.uint64) << np.uint64(32) | np.asarray(low).astype(np.uint64)
    return ((both << count >> np.uint64(32)) if left else (both >> count)).astype(np.uint32)


def mul_hi(a: Values, b: Values) -> Values:
    """The upper half of a product of 64-bit numbers."""
    wide = [np.asarray(x).astype(object) for x in (a, b)]
    return (wide[0] * wide[1] >> 64).astype(np.asarray(a).dtype)


def mul24(a: Values, b: Values, upper: bool) -> Values:
    """The lower, or the upper, 32 bits of a product of 48 bits of numbers of 24."""
    dtype = np.asarray(a).dtype
    shift = dtype.type(8)
    wide = [(np.asarray(x) << shift >> shift).astype(f"{dtype.kind}8") for x in (a, b)]
    product = wide[0] * wide[1]
    return (product >> product.dtype.type(16) if upper else product).astype(dtype)


def add_with_carry(a: Values, b: Values, carry: Values, subtract: bool) -> tuple[Values, Values]:
    """Unsigned a + b + carry, or a - b - carry, and the carry, or borrow, out of it."""
    a, b = np.broadcast_arrays(a, b)
    one = np.asarray(carry).astype(a.dtype)
    if subtract:
        return a - b - one, (a < b) | ((a == b) & (one != 0))
    total = a + b + one
    return total, (total < a) | ((total == a) & (one != 0))


def pairwise(operation: str, is_signed: bool, relu: bool, *values: Values) -> Values:
    """add, sub, min or max of pairs of 16-bit integers in 32-bit registers."""
    kind = np.int16 if is_signed else np.uint16
    halves = [np.ascontiguousarray(np.asarray(x, np.uint32)[..., None]).view(kind) for x in values]
    function = {"add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum}[operation]
    result = halves[0]
    for other in halves[1:]:
        result = function(result, other)
    result = np.maximum(result, 0) if relu else result
    return np.ascontiguousarray(result).view(np.uint32)[..., 0]


def saturated(a: Values, b: Values, subtract: bool = False) -> Values:
    """add.sat.s32 and sub.sat.s32."""
    wide = np.asarray(a).astype(np.int64) + (-1 if subtract else 1) * np.asarray(b).astype(np.int64)
    return np.clip(wide, -(1 << 31), (1 << 31) - 1).astype(np.int32)


def bit_field(value: Values, start: Values, length: Values) -> Values:
    """bfe: `length` bits from `start` on; of signed types with the sign of the last of them."""
    dtype = np.asarray(value).dtype
    width = dtype.itemsize * 8
    wide, start, length = np.asarray(value).astype(object), byte_of(start), byte_of(length)
    field = (wide >> start) & ((1 << np.minimum(length, width)) - 1)
    if dtype.kind == "i":
        last = np.clip(start + length - 1, 0, width - 1)
        sign = np.where(length == 0, 0, wide >> last & 1)
        above = np.maximum(last - start + 1, 0)
        field = field & ((1 << above) - 1)
        field = np.where(sign, field - (1 << above), field)
    return np.asarray(field & ((1 << width) - 1)).astype(f"u{width // 8}").view(dtype)


def insert_field(new: Values, old: Values, start: Values, length: Values) -> Values:
    """bfi: `old` with the lowest `length` bits of `new` in place of those from `start` on."""
    dtype = np.asarray(old).dtype
    width = dtype.itemsize * 8
    start, length = byte_of(start), byte_of(length)
    mask = ((1 << length) - 1 << start) & ((1 << width) - 1)
    shifted = np.asarray(new).astype(object) << start
    return np.asarray((np.asarray(old).astype(object) & ~mask) | (shifted & mask)).astype(dtype)


def byte_of(value: Values) -> Values:
    """The lowest byte, as Python integers."""
    return (np.asarray(value).astype(np.int64) & 255).astype(object)


def logic(a: Values, b: Values, c: Values, table: int) -> Values:
    """lop3: bit 4·a + 2·b + c of the table, for each bit."""
    result = np.zeros(np.broadcast(a, b, c).shape, np.uint32)
    for index in range(8):
        if table >> index & 1:
            terms = [x if index >> place & 1 else ~np.asarray(x) for x, place in ((a, 2), (b, 1), (c, 0))]
            result |= terms[0] & terms[1] & terms[2]
    return result


def count_ones(value: Values) -> Values:
    return bits_of(value).sum(axis=-1).astype(np.uint32)


def leading_zeros(value: Values) -> Values:
    bits = bits_of(value)
    return np.where(bits.any(axis=-1), bits[..., ::-1].argmax(axis=-1), bits.shape[-1]).astype(np.uint32)


def highest_one(value: Values, shift: bool) -> Values:
    """bfind: position of the highest bit that differs from the sign, with `.shiftamt` from the top."""
    value = np.asarray(value)
    width = value.dtype.itemsize * 8
    if value.dtype.kind == "i":
        value = np.where(value < 0, ~value, value).astype(value.dtype)
    zeros = leading_zeros(value.view(f"u{width // 8}")).astype(np.int64)
    found = zeros if shift else width - 1 - zeros
    return np.where(zeros == width, 0xFFFFFFFF, found).astype(np.uint32)


def reverse_bits(value: Values) -> Values:
    dtype = np.asarray(value).dtype
    packed = np.packbits(bits_of(value)[..., ::-1], axis=-1, bitorder="little")
    return np.ascontiguousarray(packed).view(dtype)[..., 0]


def bits_of(value: Values) -> np.ndarray:
    """Each bit as a number, on a new last axis, lowest first."""
    return np.unpackbits(np.ascontiguousarray(value)[..., None].view(np.uint8), axis=-1, bitorder="little")


_PERMUTATIONS = {
    "f4e": ((0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)),
    "b4e": ((0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)),
    "rc8": ((0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)),
    "ecl": ((0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)),
    "rc16": ((0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)),
}
"""prmt with a mode: which byte of b:a goes to each byte of the result, lowest first, by the selector."""


def permute_bytes(a: Values, b: Values, selector: Values, mode: str = "") -> Values:
    """prmt: four of the eight bytes of b:a, each as it is or, in the nameless mode, its sign repeated."""
    selector = np.asarray(selector).astype(np.uint32)
    if mode:
        choices = np.array(_PERMUTATIONS[mode])[selector & 3]
        selector = (choices << np.arange(0, 16, 4)).sum(axis=-1).astype(np.uint32)
    both = np.asarray(b).astype(np.uint64) << np.uint64(32) | np.asarray(a).astype(np.uint64)
    result = np.zeros(np.broadcast(a, b, selector).shape, np.uint32)
    for position in range(4):
        choice = selector >> np.uint32(4 * position) & np.uint32(15)
        byte = both >> ((choice & np.uint32(7)).astype(np.uint64) * np.uint64(8)) & np.uint64(255)
        byte = np.where(choice & np.uint32(8), np.where(byte >> np.uint64(7), 255, 0), byte)
        result |= byte.astype(np.uint32) << np.uint32(8 * position)
    return result


def find_nth_set(mask: Values, base: Values, offset: Values) -> Values:
    """fns: where the |offset|-th bit is that is set, from `base` on, up or down; all ones if nowhere."""
    return np.vectorize(_find_nth_set, otypes=[np.uint32])(mask, base, offset)


def _find_nth_set(mask: int, base: int, offset: int) -> int:
    towards = range(int(base), 32) if offset >= 0 else range(int(base), -1, -1)
    found = [place for place in towards if int(mask) >> place & 1]
    if offset == 0:
        return int(base) if found[:1] == [int(base)] else 0xFFFFFFFF
    number = abs(int(offset))
    return found[number - 1] if number <= len(found) else 0xFFFFFFFF


def bit_mask(start: Values, length: Values, wrap: bool) -> Values:
    """bmsk: `length` ones from bit `start` on; both are taken modulo 32, or at most 32."""
    start, length = (np.asarray(x).astype(np.uint64) for x in (start, length))
    start, length = ((x & np.uint64(31)) if wrap else np.minimum(x, np.uint64(32)) for x in (start, length))
    return ((np.uint64(1) << length) - np.uint64(1) << start).astype(np.uint32)


def extend(value: Values, width: Values, wrap: bool) -> Values:
    """szext: the lowest `width` bits, taken modulo 32 or at most 32, with the sign or zeros above."""
    dtype = np.asarray(value).dtype
    width = np.asarray(width).astype(np.int64)
    width = width & 31 if wrap else np.minimum(width, 32)
    shifted = shift_left(np.asarray(value).astype(f"{dtype.kind}8"), 64 - width)
    return shift_right(shifted, 64 - width).astype(dtype)


def dot(a: Values, b: Values, c: Values, a_type: str, b_type: str, half: str = "") -> Values:
    """dp4a: c plus the dot product of four bytes each. dp2a: of 16-bit numbers and half of b's bytes."""
    size = 2 if half else 1
    wide = [
        np.ascontiguousarray(x)[..., None].view(f"{'i' if kind == 's32' else 'u'}{width}").astype(np.int64)
        for x, kind, width in ((a, a_type, size), (b, b_type, 1))
    ]
    if half:
        wide[1] = wide[1][..., :2] if half == "lo" else wide[1][..., 2:]
    total = (wide[0] * wide[1]).sum(axis=-1) + np.asarray(c).astype(np.int64)
    return (total & 0xFFFFFFFF).astype(np.uint32).view(np.asarray(c).dtype)
