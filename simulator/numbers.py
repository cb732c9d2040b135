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


def to_bits(values: Any, kind: str, toward_zero: bool = False) -> np.ndarray:
    """float32 or float64 → the bits of an f16, bf16, e4m3 or e5m2, rounded to nearest even or toward zero.

    The 8-bit formats have no room for what is too large: it becomes the largest number (`.satfinite`).
    """
    if kind in ("e4m3", "e5m2"):
        return to_fp8(values, kind)
    if toward_zero:
        return _toward_zero(values, kind)
    if kind == "bf16":
        return f32_to_bf16(_odd_f32(values))
    with np.errstate(over="ignore"):
        return np.asarray(values).astype(np.float16).view(np.uint16)


def _odd_f32(values: Any) -> np.ndarray:
    """As float32, with the last bit set if any was lost, so that rounding again is as rounding once."""
    values = np.asarray(values)
    if values.dtype != np.float64:
        return values.astype(np.float32)
    near = np.ascontiguousarray(values.astype(np.float32))
    truncated = np.where(np.abs(near) > np.abs(values), np.nextafter(near, np.float32(0)), near)
    bits = np.ascontiguousarray(truncated).view(np.uint32)
    odd = np.ascontiguousarray(bits | np.uint32(1)).view(np.float32)
    return np.where((truncated != values) & np.isfinite(values), odd, near)


def _toward_zero(values: Any, kind: str) -> np.ndarray:
    values = np.ascontiguousarray(values, np.float32)
    if kind == "bf16":
        return np.where(np.isnan(values), 0x7FFF, values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    near = values.astype(np.float16)
    return np.where(np.abs(near) > np.abs(values), np.nextafter(near, np.float16(0)), near).view(np.uint16)


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
    "min": np.fmin,
    "max": np.fmax,
    "min.NaN": np.minimum,
    "max.NaN": np.maximum,
    "neg": np.negative,
    "abs": np.abs,
    "fma": lambda a, b, c: a * b + c,
    "tanh": np.tanh,
    "ex2": np.exp2,
}


def half(kind: str, how: str, *values: Any) -> np.ndarray:
    """Arithmetic on 16-bit numbers given as bits; exact up to the one rounding. how: "+", "fma.relu", …"""
    operation = how.removesuffix(".sat").removesuffix(".relu")
    wide = [from_bits(value, kind).astype(np.float64) for value in values]
    result = _ARITHMETIC[operation](*wide)
    if how.endswith(".relu"):
        result = np.maximum(result, 0)
    return to_bits(saturate(result) if how.endswith(".sat") else result, kind)


def packed(kind: str, how: str, *values: Any) -> np.ndarray:
    """Arithmetic on pairs of 16-bit numbers in 32-bit registers."""
    halves = [
        np.ascontiguousarray(np.asarray(value, np.uint32)[..., None]).view(np.uint16) for value in values
    ]
    return np.ascontiguousarray(half(kind, how, *halves)).view(np.uint32)[..., 0]


def saturate(value: Any) -> np.ndarray:
    """Clipped to 0 … 1, NaN being 0."""
    return np.where(np.isnan(value), 0, np.clip(value, 0, 1))


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
    if to in _INTEGERS:
        return _to_integer(value, how, _INTEGERS[to])
    integral = next((_INTEGRAL[m] for m in how if m in _INTEGRAL), None)
    if integral is not None:
        value = integral(value)
    if "sat" in how:
        value = saturate(value)
    if "relu" in how:
        value = np.where(np.isnan(value), value, np.maximum(value, 0))
    if to == "tf32":
        return f32_to_tf32(value) if "rna" in how else f32_to_tf32_even(value)
    if to in _FLOATS:
        return _rounded(value, _FLOATS[to], how)
    return to_bits(value, to, "rz" in how)


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
    bits = np.ascontiguousarray(to_bits(both, kind, "rz" in how))
    return bits.view(f"u{2 * bits.itemsize}")[..., 0]


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
