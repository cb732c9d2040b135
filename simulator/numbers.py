"""Numbers of fewer than 32 bits, and conversions: IEEE half, bfloat16, tf32, and the two 8-bit formats."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from cutelab.simulator.errors import SimulationError

OPERAND_BYTES = {"tf32": 4, "f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
"""Bytes of an element of a tensor-core operand, by type."""


def operand(bits: np.ndarray, kind: str) -> np.ndarray:
    """Elements of a tensor-core operand as float32, as the tensor core sees them."""
    if kind == "tf32":  # it ignores the 13 low bits
        return (bits & np.uint32(0xFFFFE000)).view(np.float32)
    if kind in ("s8", "u8"):
        return bits.view(np.int8 if kind == "s8" else np.uint8).astype(np.float32)
    return unpacked(bits, kind)


def unpack(registers: np.ndarray, kind: str) -> np.ndarray:
    """The operand's elements in 32-bit registers, on a new last axis, lowest bits first."""
    words = np.ascontiguousarray(registers)[..., None]
    return operand(words.view(f"u{OPERAND_BYTES[kind]}"), kind)


def bf16_to_f32(bits: Any) -> np.ndarray:
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: Any) -> np.ndarray:
    """Rounds to the nearest bfloat16, ties to even; a NaN becomes the canonical one."""
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FFF), rounded).astype(np.uint16)


def f32_to_tf32(values: Any) -> np.ndarray:
    """cvt.rna: rounds to the nearest tf32, ties away from zero; the bits of a float32."""
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(values), rounded, bits)


def f32_to_tf32_even(values: Any) -> np.ndarray:
    """cvt.rn: rounds to the nearest tf32, ties to even."""
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(values), rounded, bits)


def f32_toward_zero_to_tf32(values: Any) -> np.ndarray:
    """cvt.rz: cuts off what a tf32 has no room for."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return np.where(np.isfinite(values), bits & np.uint32(0xFFFFE000), bits)


def to_bits(values: Any, kind: str, mode: str = "rn") -> np.ndarray:
    """Floats → the bits of an f16, bf16, e4m3 or e5m2. mode: "rn", or but for 8 bits "rz", "rm" or "rp".

    The 8-bit formats have no room for what is too large: it becomes the largest number (`.satfinite`).
    """
    if kind in ("e4m3", "e5m2"):
        return to_fp8(values, kind)
    if mode != "rn":
        return _directed_half(values, kind, mode)
    if kind == "bf16":
        return f32_to_bf16(_odd_f32(values))
    with np.errstate(over="ignore"):
        return np.asarray(values).astype(np.float16).view(np.uint16)


def _odd_f32(values: Any) -> np.ndarray:
    """As float32, with the last bit set if any was lost, so that rounding again is as rounding once."""
    values = np.asarray(values)
    if values.dtype == np.float32:
        return values
    near = np.ascontiguousarray(values.astype(np.float32))
    truncated = np.where(np.abs(near) > np.abs(values), np.nextafter(near, np.float32(0)), near)
    bits = np.ascontiguousarray(truncated).view(np.uint32)
    odd = np.ascontiguousarray(bits | np.uint32(1)).view(np.float32)
    return np.where((truncated != values) & np.isfinite(values), odd, near)


def _directed_half(values: Any, kind: str, mode: str) -> np.ndarray:
    """Rounded to nearest, then one number back where that went in the wrong direction."""
    values = np.asarray(values)
    nearest = to_bits(values, kind)
    near = from_bits(nearest, kind)
    wrong = {"rz": np.abs(near) > np.abs(values), "rm": near > values, "rp": near < values}[mode]
    # Numbers of one sign are in the order of their bits; away from zero only if not toward it.
    away = (mode == "rm") & np.signbit(values) | (mode == "rp") & ~np.signbit(values)
    return np.where(wrong, nearest + np.where(away, 1, -1).astype(np.uint16), nearest).astype(np.uint16)


def from_bits(bits: Any, kind: str) -> np.ndarray:
    if kind.startswith("bf16"):
        return bf16_to_f32(bits)
    return np.asarray(bits, np.uint16).view(np.float16).astype(np.float32)


def from_fp8(bits: Any, kind: str) -> np.ndarray:
    """e4m3 (no infinities, NaN at 0x7f) and e5m2 (the upper byte of a half) as float32."""
    byte = np.asarray(bits).astype(np.uint16)
    if kind == "e5m2":
        return (byte << np.uint16(8)).view(np.float16).astype(np.float32)
    exponent, mantissa = byte >> 3 & 15, (byte & 7).astype(np.float32)
    value = np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent.astype(np.float32) - 10)
    )
    value = np.where(byte & 0x7F == 0x7F, np.nan, value)
    return np.where(byte & 0x80, -value, value).astype(np.float32)


def to_fp8(values: Any, kind: str) -> np.ndarray:
    """float32 → e4m3 or e5m2, to nearest even; too large becomes the largest number, NaN becomes 0x7f."""
    values = np.asarray(values, np.float32)
    mantissa, lowest, largest = (3, -6, 448.0) if kind == "e4m3" else (2, -14, 57344.0)
    magnitude = np.abs(values).astype(np.float64)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, lowest)
    rounded = np.ldexp(np.rint(np.ldexp(magnitude, mantissa - exponent)), exponent - mantissa)
    clipped = np.minimum(rounded, largest)
    exponent = np.where(clipped == 0, lowest, np.maximum(np.frexp(clipped)[1] - 1, lowest))
    code = np.ldexp(clipped, mantissa - exponent) + ((exponent - lowest).astype(np.float64) * 2**mantissa)
    byte = np.where(np.isnan(values), 0x7F, np.where(np.isnan(code), 0, code)).astype(np.uint8)
    return byte | (np.signbit(values) & ~np.isnan(values)).astype(np.uint8) << np.uint8(7)


REDUCTIONS: dict[str, np.ufunc] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
"""What atomics, bulk reductions and redux do with whole words, and floats of 32 bits and more."""

_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "+": np.add,
    "add": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "sub": np.subtract,
    "neg": np.negative,
    "abs": np.abs,
    "fma": lambda a, b, c: _odd_sum(a * b, c),
    "tanh": np.tanh,
    "ex2": np.exp2,
}


def half(kind: str, how: str, *values: Any) -> np.ndarray:
    """Arithmetic on 16-bit numbers given as bits; exact up to the one rounding. how: "+", "fma.relu", …"""
    operation, *flags = how.split(".")
    wide = [from_bits(value, kind).astype(np.float64) for value in values]
    if "ftz" in flags:
        wide = [flush(value, kind) for value in wide]
    if operation in ("min", "max"):
        result = extreme(operation, "NaN" in flags, "xorsign" in flags, *wide)
    else:
        result = _ARITHMETIC[operation](*wide)
    if "relu" in flags:
        result = np.where(result < 0, 0, result)  # a NaN stays one
    if "ftz" in flags:
        result = flush(result, kind)
    return to_bits(saturate(result) if "sat" in flags else result, kind)


def packed(kind: str, how: str, *values: Any) -> np.ndarray:
    """Arithmetic on pairs of 16-bit numbers in 32-bit registers."""
    halves = [
        np.ascontiguousarray(np.asarray(value, np.uint32)[..., None]).view(np.uint16) for value in values
    ]
    return np.ascontiguousarray(half(kind.removesuffix("x2"), how, *halves)).view(np.uint32)[..., 0]


def combined(operation: str, kind: str, old: np.ndarray, value: np.ndarray, *new: np.ndarray) -> np.ndarray:
    """What an atomic operation leaves in memory (PTX ISA, "atom")."""
    if operation == "cas":
        return np.where(old == value, new[0], old)
    if operation == "exch":
        return value
    if operation == "inc":
        return np.where(old >= value, 0, old + 1).astype(old.dtype)
    if operation == "dec":
        return np.where((old == 0) | (old > value), value, old - 1)
    if kind in ("f16x2", "bf16x2"):
        return packed(kind, operation, old, value)
    if kind in ("f16", "bf16"):
        return half(kind, operation, old, value)
    return REDUCTIONS[operation](old, value)


def saturate(value: Any) -> np.ndarray:
    """Clipped to 0 … 1, NaN being 0."""
    return np.where(np.isnan(value), 0, np.clip(value, 0, 1))


SMALLEST = {"f16": 2.0**-14, "bf16": 2.0**-126, "f32": 2.0**-126, "f64": 2.0**-1022}
"""The least number that isn't subnormal."""


def flush(value: Any, kind: str = "f32") -> Any:
    """`.ftz`: zero of the same sign in place of a subnormal number."""
    return value * (np.abs(value) >= SMALLEST[kind])


def is_normal(value: Any) -> Any:
    return np.isfinite(value) & (np.abs(value) >= np.finfo(np.asarray(value).dtype).tiny)


def is_subnormal(value: Any) -> Any:
    return (value != 0) & (np.abs(value) < np.finfo(np.asarray(value).dtype).tiny)


def extreme(operation: str, nan: bool, xorsign: bool, *values: Any) -> Any:
    """min or max: NaN only if all are, or with `nan` if any is; -0 is less than +0.

    xorsign: of the magnitudes, with the product of the signs (`.xorsign.abs`).
    """
    function = {"min": np.minimum, "max": np.maximum} if nan else {"min": np.fmin, "max": np.fmax}
    magnitudes = [np.abs(value) for value in values] if xorsign else values
    result = magnitudes[0]
    for other in magnitudes[1:]:
        before, result = result, function[operation](result, other)
        zero = result == 0
        if zero.any() and not xorsign:
            negative = np.signbit(before), np.signbit(other)
            sign = (negative[0] | negative[1]) if operation == "min" else (negative[0] & negative[1])
            # Where the other one isn't zero, the result has the sign that it has.
            both = zero & (before == other)
            result = np.where(both, np.where(sign, -result.dtype.type(0), result.dtype.type(0)), result)
    if xorsign:
        negative_ones = np.logical_xor.reduce(np.broadcast_arrays(*(np.signbit(value) for value in values)))
        result = np.where(np.isnan(result), result, np.copysign(result, np.where(negative_ones, -1.0, 1.0)))
    return result


def compare_pairs(kind: str, compare: str, flushes: bool, a: Any, b: Any) -> tuple[np.ndarray, np.ndarray]:
    """setp of pairs of 16-bit floats: (of the lower, of the upper halves)."""
    words = (np.ascontiguousarray(np.asarray(x, np.uint32)[..., None]).view(np.uint16) for x in (a, b))
    left, right = (from_bits(word, kind.removesuffix("x2")) for word in words)
    if flushes:
        left, right = (flush(value, kind.removesuffix("x2")) for value in (left, right))
    unordered = np.isnan(left) | np.isnan(right)
    functions = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
                 "gt": np.greater, "ge": np.greater_equal}  # fmt: skip
    if compare in ("num", "nan"):
        test = unordered if compare == "nan" else ~unordered
    elif compare in functions:
        test = functions[compare](left, right) & ~unordered
    else:
        test = functions[compare[:-1]](left, right) | unordered
    return test[..., 0], test[..., 1]


def fma_f32(a: Any, b: Any, c: Any) -> np.ndarray:
    """a·b + c of float32 with one rounding, but for results that are subnormal.

    The product is exact as a float64. Only where their sum lies half-way between two float32 does it matter
    that it has been rounded: there, what was lost decides.
    """
    product = a.astype(np.float64) * b
    total = product + c
    halfway = total.view(np.int64) & _BELOW_F32 == _HALF_BELOW_F32
    if halfway.any():
        total = np.where(halfway, _odd_sum(product, c.astype(np.float64)), total)
    return total.astype(np.float32)


_BELOW_F32, _HALF_BELOW_F32 = np.int64((1 << 29) - 1), np.int64(1 << 28)


def _odd_sum(a: Any, b: Any) -> np.ndarray:
    """a + b of float64, where it isn't exact with the last bit set: rounding it again is as rounding once."""
    total = np.asarray(a + b)
    part = total - a
    lost = (a - (total - part)) + (b - part)
    bits = np.ascontiguousarray(total).view(np.int64)
    even = np.isfinite(lost) & (lost != 0) & (bits & 1 == 0)
    odd = bits + np.where(even, np.where((lost > 0) == (total > 0), 1, -1), 0)
    return odd.view(np.float64)


_DIRECTED: dict[str, Callable[..., Any]] = {
    "add": _odd_sum,
    "sub": lambda a, b: _odd_sum(a, -b),
    "mul": np.multiply,
    "fma": lambda a, b, c: _odd_sum(a * b, c),
    "div": np.divide,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
}


def directed(operation: str, mode: str, *values: Any) -> np.ndarray:
    """float32 arithmetic rounded toward zero, down or up: "rz", "rm", "rp"."""
    wide = [np.asarray(value).astype(np.float64) for value in values]
    return _rounded(_DIRECTED[operation](*wide), _FLOATS["f32"], (mode,))


def fma(a: Any, b: Any, c: Any) -> np.ndarray:
    """a·b + c in double precision with one rounding."""
    return np.vectorize(_fma, otypes=[np.float64])(a, b, c)


def _fma(a: float, b: float, c: float) -> float:
    if not all(map(math.isfinite, (a, b, c))):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c  # for the sign
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


# --- Conversions

_INTEGERS: dict[str, np.dtype] = {f"{letter}{bits}": np.dtype(f"{numpy}{bits // 8}")
             for letter, numpy in (("s", "i"), ("u", "u")) for bits in (8, 16, 32, 64)}  # fmt: skip
_FLOATS: dict[str, np.dtype] = {"f32": np.dtype(np.float32), "f64": np.dtype(np.float64)}
_INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def convert(to: str, source: str, how: tuple[str, ...], *values: Any) -> np.ndarray:
    """cvt.<how>.<to>.<source> (PTX ISA, "cvt"). Floats of less than 32 bits, and pairs, come and go as bits.

    Of two values, the first goes into the upper half.
    """
    if to.endswith("x2"):
        return _pair(to, source, how, values)
    (value,) = values
    if source.endswith("x2"):
        raise SimulationError(f"conversion from {source} to {to} is not supported")
    if source in _INTEGERS and to in _INTEGERS:
        value = value.astype(_INTEGERS[source])
        return _clipped_integer(value, _INTEGERS[to]) if "sat" in how else value.astype(_INTEGERS[to])
    if source not in _INTEGERS and source not in _FLOATS:
        value = unpacked(value, source)
    if "ftz" in how and source == "f32":
        value = flush(value)
    if to in _INTEGERS:
        return _to_integer(value, how, _INTEGERS[to])
    if source in _INTEGERS and to not in _FLOATS:
        value = value.astype(np.longdouble)
    integral = next((_INTEGRAL[m] for m in how if m in _INTEGRAL), None)
    if integral is not None:
        value = integral(value)
    if "sat" in how:
        value = saturate(value)
    if "relu" in how:
        value = np.where(np.isnan(value), value, np.maximum(value, 0))
    if to == "tf32":
        rounds = {"rna": f32_to_tf32, "rz": f32_toward_zero_to_tf32}
        return next((rounds[m] for m in how if m in rounds), f32_to_tf32_even)(value)
    if to in _FLOATS:
        result = _rounded(value, _FLOATS[to], how)
        return flush(result) if "ftz" in how and to == "f32" else result
    return to_bits(_finite(value, to, how), to, _mode(how))


def _pair(to: str, source: str, how: tuple[str, ...], values: tuple[Any, ...]) -> np.ndarray:
    """Conversions to two numbers in one register, from two floats or from two numbers in one register."""
    kind = to.removesuffix("x2")
    if source.endswith("x2"):
        word = np.ascontiguousarray(values[0])[..., None]
        both = unpacked(word.view(f"u{word.itemsize // 2}"), source.removesuffix("x2"))
    else:
        both = np.stack(np.broadcast_arrays(values[1], values[0]), axis=-1)
    if "relu" in how:
        both = np.where(np.isnan(both), both, np.maximum(both, 0))
    bits = np.ascontiguousarray(to_bits(_finite(both, kind, how), kind, _mode(how)))
    return bits.view(f"u{2 * bits.itemsize}")[..., 0]


def _mode(how: tuple[str, ...]) -> str:
    return next((m for m in how if m in ("rz", "rm", "rp")), "rn")


def _finite(value: Any, kind: str, how: tuple[str, ...]) -> Any:
    """`.satfinite` to f16 or bf16: the largest number in place of what is larger."""
    if "satfinite" not in how or kind not in ("f16", "bf16"):
        return value
    largest = {"f16": 65504.0, "bf16": float(bf16_to_f32(0x7F7F))}[kind]
    return np.clip(value, -largest, largest)


def unpacked(bits: Any, kind: str) -> np.ndarray:
    """Numbers of 8, 16 or 19 bits as float32."""
    if kind in ("e4m3", "e5m2"):
        return from_fp8(bits, kind)
    return np.asarray(bits).view(np.float32) if kind == "tf32" else from_bits(bits, kind)


def _rounded(value: np.ndarray, dtype: np.dtype, how: tuple[str, ...]) -> np.ndarray:
    """As float32 or float64, rounded to nearest, or with .rz, .rm or .rp in that direction."""
    nearest = value.astype(dtype)
    mode = next((m for m in how if m in ("rz", "rm", "rp")), None)
    if mode is None:
        return nearest
    exact = value.astype(np.longdouble)
    wrong = {"rz": np.abs(nearest) > np.abs(exact), "rm": nearest > exact, "rp": nearest < exact}[mode]
    toward = dtype.type({"rz": 0, "rm": -np.inf, "rp": np.inf}[mode])
    return np.where(wrong, np.nextafter(nearest, toward), nearest)


def _to_integer(value: np.ndarray, how: tuple[str, ...], dtype: np.dtype) -> np.ndarray:
    """Clipped to what the type holds; NaN is 0."""
    rounding = next((_INTEGRAL[m] for m in how if m in _INTEGRAL), np.trunc)
    whole = rounding(value.astype(np.float64))
    bounds = np.iinfo(dtype)
    clipped = np.clip(np.where(np.isnan(whole), 0, whole), float(bounds.min), float(bounds.max))
    top = clipped >= float(bounds.max)
    return np.where(top, dtype.type(bounds.max), np.where(top, 0, clipped).astype(dtype))


def _clipped_integer(value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    bounds = np.iinfo(dtype)
    return np.clip(value.astype(object), bounds.min, bounds.max).astype(dtype)


def convert_pack(to: str, high: Any, low: Any, below: Any) -> np.ndarray:
    """cvt.pack.sat: two s32 as integers of 16 or 8 bits; for those, `below` is shifted up by two of them."""
    bits = int(to[1:])
    mask, result = np.uint32((1 << bits) - 1), np.uint32(0) if below is None else below << np.uint32(2 * bits)
    for value, place in ((high, bits), (low, 0)):
        narrow = _clipped_integer(np.asarray(value), _INTEGERS[to]).astype(np.uint32) & mask
        result = result | narrow << np.uint32(place)
    return result
