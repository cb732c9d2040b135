"""Arithmetic of every type and rounding, against exact fractions, NumPy and torch (PTX ISA, chapter 9.7)."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from run_ptx import kernel, run

from cutelab.simulator.errors import UnsupportedInstruction

INTEGERS = np.array(
    [0, 1, 2, 3, 31, 33, 255, 0x7FFF, 0x8000, 0xFFFF, 0x12345678, 0x7FFFFFFF, 0x80000000,
     0xFFFFFFFE, 0xFFFFFFFF],
    np.uint32,
)  # fmt: skip
TINY = np.float32(2.0**-126)
REALS = np.array(
    [0.0, -0.0, 1.0, -1.5, 3.1415927, 1e-20, -1e20, 65504.0, 65520.0, 6e-8, 0.1, 2.5, 1 + 2**-12, 1 - 2**-24,
     3.4e38, -3.4e38, 2.0**-149, -(2.0**-140), 2.0**-126, np.inf, -np.inf, np.nan, 2.0**-63, 1 + 2**-23],
    np.float32,
)  # fmt: skip


def apply(code, *inputs, out=np.uint32):
    """`code` on each element: inputs in %r1, %r2, … (16 bits: %rs1, 64: %rd11, …), the result in %r0."""
    registers = {2: ("%rs", 0), 4: ("%r", 0), 8: ("%rd", 10)}

    def place(size, n):
        name, first = registers[size]
        return f"{name}{first + n}"

    count = len(inputs[0])
    result = np.zeros(-(-count // 32) * 32, out)
    arrays = [np.concatenate([each, np.zeros(len(result) - count, each.dtype)]) for each in inputs]
    access = "mul.wide.u32 %rd15, %r31, {size}; add.s64 %rd14, %rd{n}, %rd15; "
    body = ""
    for n, each in enumerate(arrays, 1):
        size = each.itemsize
        body += access.format(size=size, n=n) + f"ld.global.b{8 * size} {place(size, n)}, [%rd14];\n"
    size = result.itemsize
    body += f"{code}\n" + access.format(size=size, n=0) + f"st.global.b{8 * size} [%rd14], {place(size, 0)};"
    unsigned = [each.view(f"u{each.itemsize}") for each in (result, *arrays)]
    run(kernel(body, parameters=len(unsigned)), *unsigned, threads=len(result))
    return result[:count]


def pairs(values, others=None):
    a, b = (x.ravel() for x in np.meshgrid(values, values if others is None else others))
    return np.ascontiguousarray(a), np.ascontiguousarray(b)


def same(got, expected):
    """Equal bit by bit, but that all NaNs are equal."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype
    if got.dtype.kind == "f":
        both = np.isnan(got) & np.isnan(expected)
        got, expected = (np.where(both, 0, x).astype(x.dtype).view(f"u{x.itemsize}") for x in (got, expected))
    np.testing.assert_array_equal(got, expected)


# --- An oracle for roundings: exact fractions

FORMATS = {"f16": (10, -14, 65504), "bf16": (7, -126, 2**127 * (2 - Fraction(1, 128))),
           "tf32": (10, -126, None),
           "f32": (23, -126, 2**127 * (2 - Fraction(1, 1 << 23)))}  # fmt: skip


def rounded(exact, kind, mode="rn"):
    """A fraction as the nearest number of a format, or the next in a direction, as a float."""
    bits, lowest, largest = FORMATS[kind]
    if exact == 0:
        return 0.0
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
    exponent -= abs(exact) < Fraction(2) ** exponent
    ulp = Fraction(2) ** (max(exponent, lowest) - bits)
    units = abs(exact) / ulp
    up = {"rp": exact > 0, "rm": exact < 0}.get(mode)
    if mode == "rn":
        whole = round(units)
    elif mode == "rna":
        whole = math.floor(units + Fraction(1, 2))
    else:
        whole = math.ceil(units) if up else math.floor(units)
    magnitude = whole * ulp
    if largest is not None and magnitude > largest:
        magnitude = math.inf if mode == "rn" or up else largest
    return math.copysign(float(magnitude), exact)


def rounded_all(function, kind, mode, *inputs):
    """`function` of finite numbers, exact but for one rounding."""
    exact = (
        Fraction(function(*map(Fraction, each))) for each in zip(*(x.tolist() for x in inputs), strict=True)
    )
    return np.array([rounded(each, kind, mode) for each in exact], np.float32)


MODES = ("rn", "rz", "rm", "rp")
ARITHMETIC = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ARITHMETIC)
def test_roundings_of_float_arithmetic(name, mode):
    a, b = pairs(REALS[np.isfinite(REALS)])
    a, b = a[b != 0], b[b != 0]
    got = apply(f"{name}.{mode}.f32 %r0, %r1, %r2;", a, b, out=np.float32)
    exact = rounded_all(ARITHMETIC[name], "f32", mode, a, b)
    np.testing.assert_array_equal(got, exact)  # but for the sign of zero


@pytest.mark.parametrize("mode", MODES)
def test_fused_multiply_add_rounds_once(mode):
    rng = np.random.default_rng(0)
    a = np.float32(1 + rng.integers(0, 1 << 12, 250) / (1 << 12))
    b = np.float32(1 + 2.0 ** -rng.integers(1, 13, 250))
    c = np.float32(2.0 ** -rng.integers(40, 120, 250)) * np.float32(rng.choice([-1, 1], 250))
    a[:2], b[:2], c[:2] = 1 + 2**-12, 1 + 2**-12, (2.0**-100, -(2.0**-100))  # half an ulp, and a bit
    got = apply(f"fma.{mode}.f32 %r0, %r1, %r2, %r3;", a, b, c, out=np.float32)
    same(got, rounded_all(lambda a, b, c: a * b + c, "f32", mode, a, b, c))


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
def test_roundings_of_reciprocals_and_roots(mode):
    values = np.float32([3, 0.1, 7.5, 2, 1e10, 4, 1e-10])
    got = apply(f"rcp.{mode}.f32 %r0, %r1;", values, out=np.float32)
    same(got, rounded_all(lambda a: 1 / a, "f32", mode, values))
    root = apply(f"sqrt.{mode}.f32 %r0, %r1;", values, out=np.float32)
    for x, y in zip(values.tolist(), root.tolist(), strict=True):
        below, above = (Fraction(float(np.nextafter(np.float32(y), np.float32(t)))) for t in (0, np.inf))
        square = Fraction(x)
        assert (
            (Fraction(y) ** 2 >= square > below**2)
            if mode == "rp"
            else (Fraction(y) ** 2 <= square < above**2)
        )


def half_bits(values, kind):
    """float32 that are exact in f16 or bf16 → their bits."""
    return (
        values.astype(np.float16).view(np.uint16)
        if kind == "f16"
        else (values.view(np.uint32) >> 16).astype(np.uint16)
    )


def halves(bits, kind):
    return (
        bits.view(np.float16).astype(np.float32)
        if kind == "f16"
        else (bits.astype(np.uint32) << 16).view(np.float32)
    )


CONVERSIONS = [
    *((f"cvt.{mode}.{kind}.f32", kind, mode, np.float32) for kind in ("f16", "bf16")
      for mode in ("rn", "rz")),
    *((f"cvt.{mode}.f16.f32", "f16", mode, np.float32) for mode in ("rm", "rp")),
    *((f"cvt.{mode}.f16.f64", "f16", mode, np.float64) for mode in MODES),
    *((f"cvt.{mode}.f32.f64", "f32", mode, np.float64) for mode in MODES),
    *((f"cvt.{mode}.tf32.f32", "tf32", mode, np.float32) for mode in ("rna", "rn", "rz")),
    *((f"cvt.{mode}.f32.{kind}", "f32", mode, dtype) for mode in MODES
      for kind, dtype in (("s32", np.int32), ("u32", np.uint32), ("s64", np.int64), ("u64", np.uint64))),
    *((f"cvt.{mode}.{to}.s32", to, mode, np.int32) for mode in MODES for to in ("f16", "bf16")),
    ("cvt.rn.bf16.s64", "bf16", "rn", np.int64),
]  # fmt: skip


@pytest.mark.parametrize("name, to, mode, dtype", CONVERSIONS, ids=lambda x: x if "cvt" in str(x) else "")
def test_conversions_round_as_they_say(name, to, mode, dtype):
    rng = np.random.default_rng(1)
    if dtype().dtype.kind == "f":
        values = (rng.standard_normal(200) * 10.0 ** rng.uniform(-9, 6, 200)).astype(dtype)
        corners = [
            1 + 2**-11,
            1 + 3 * 2**-11,
            -1 - 2**-11,
            1 + 2**-8,
            65519.0,
            65520.0,
            -70000.0,
            3e-8,
            -3e-8,
        ]
        values = np.concatenate([values, np.array([*corners, 1e-7], dtype)])
    else:
        info = np.iinfo(dtype)
        values = rng.integers(info.min, info.max, 200, dtype, endpoint=True) >> dtype(rng.integers(0, 24))
        corners = [
            0,
            1,
            257,
            2049,
            2051,
            65519,
            65520,
            (1 << 24) + 1,
            info.max,
            (1 << 30) + (1 << 22),
            (1 << 30) + (1 << 22) + 1,
        ]
        values = np.concatenate([values, np.array(corners, dtype), np.array([info.min, info.min + 1], dtype)])
    source = {4: "%r1", 8: "%rd11"}[values.itemsize]
    wide = to in ("f32", "tf32")
    got = apply(
        f"{name} {'%r0' if wide else '%rs0'}, {source};", values, out=np.uint32 if wide else np.uint16
    )
    got = got.view(np.float32) if wide else halves(got, to)
    expected = [rounded(Fraction(x), to, mode) for x in values.tolist()]
    np.testing.assert_array_equal(got, np.array(expected, np.float32))


def test_conversions_that_clip():
    values = np.float32([1e6, -1e6, 65519, 1.5, -0.25, np.inf, -np.inf, np.nan])
    both = "cvt.rn.{}.f16x2.f32 %r0, %r1, %r1;"
    got = apply(both.format("relu"), values).view(np.float16)[::2].astype(np.float32)
    same(got, np.float32([np.inf, 0, 65504, 1.5, 0, np.inf, 0, np.nan]))
    got = apply(both.format("satfinite"), values).view(np.float16)[::2].astype(np.float32)
    same(got, np.float32([65504, -65504, 65504, 1.5, -0.25, 65504, -65504, np.nan]))
    same(apply("cvt.sat.f32.f32 %r0, %r1;", values, out=np.float32), np.float32([1, 0, 1, 1, 0, 1, 0, 0]))
    got = apply("cvt.rn.satfinite.relu.e4m3x2.f32 %rs0, %r1, %r1;", values, out=np.uint16)
    same(got & 0xFF, np.uint16([0x7E, 0, 0x7E, 0x3C, 0, 0x7E, 0, 0x7F]))


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_all_numbers_of_eight_bits(kind):
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[kind]
    codes = np.arange(256, dtype=np.uint16)
    exact = torch.arange(256).to(torch.uint8).view(dtype).half().numpy()
    got = apply(f"cvt.rn.f16x2.{kind}x2 %r0, %rs1;", codes).view(np.float16)[::2]
    same(got, exact)
    back = apply(
        f"cvt.rn.satfinite.{kind}x2.f16x2 %rs0, %r1;", exact.view(np.uint16).astype(np.uint32), out=np.uint16
    )
    finite = np.isfinite(exact)
    same((back & 255)[finite], codes[finite])


# --- .ftz

FTZ = {
    "add.ftz.f32 %r0, %r1, %r2;": lambda a, b: a + b,
    "sub.rn.ftz.f32 %r0, %r1, %r2;": lambda a, b: a - b,
    "mul.ftz.f32 %r0, %r1, %r2;": lambda a, b: a * b,
    "fma.rn.ftz.f32 %r0, %r1, %r2, 0f80000000;": lambda a, b: a * b + np.float32(-0.0),
    "div.approx.ftz.f32 %r0, %r1, %r2;": lambda a, b: a / b,
    "abs.ftz.f32 %r0, %r1;": lambda a, b: np.abs(a),
    "neg.ftz.f32 %r0, %r1;": lambda a, b: -a,
    "sqrt.rn.ftz.f32 %r0, %r1;": lambda a, b: np.sqrt(a),
    "rcp.rn.ftz.f32 %r0, %r1;": lambda a, b: 1 / a,
    "max.ftz.f32 %r0, %r1, %r2;": lambda a, b: np.where(
        a == b, np.where(np.signbit(a), b, a), np.maximum(a, b)),
    "cvt.ftz.f32.f32 %r0, %r1;": lambda a, b: a,
    "set.gt.ftz.f32.f32 %r0, %r1, 0f00000000;": lambda a, b: (a > 0).astype(np.float32),
    "setp.eq.ftz.f32 %p1, %r1, %r2; selp.f32 %r0, 0f3F800000, 0f00000000, %p1;": lambda a, b: (
        (a == b).astype(np.float32)),
    "slct.ftz.f32.f32 %r0, %r2, %r1, %r1;": lambda a, b: np.where(a >= 0, b, a),
}  # fmt: skip


def flushed(x):
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x).astype(np.float32)


@pytest.mark.parametrize("instruction", FTZ)
def test_subnormal_floats_are_zero_where_ftz_says_so(instruction):
    values = np.float32([2.0**-149, -(2.0**-130), 2.0**-126, 1.5 * 2.0**-126, -1.5, 1e30, 2.0**-64, 3.0])
    a, b = pairs(values)
    with np.errstate(all="ignore"):
        plain = FTZ[instruction](a, b).astype(np.float32)
        expected = flushed(FTZ[instruction](flushed(a), flushed(b)).astype(np.float32))
    if instruction.startswith("slct"):  # moves its values as they are
        expected = np.where(flushed(a) >= 0, b, a)
    same(apply(instruction, a, b, out=np.float32), expected)
    if not instruction.startswith("slct"):
        same(
            apply(instruction.replace(".approx.ftz", ".rn").replace(".ftz", ""), a, b, out=np.float32), plain
        )


def test_subnormal_numbers_and_exponentials():
    x = np.float32([-126.0, -127.0, -149.0, -130.5, 3.0])
    same(apply("ex2.approx.f32 %r0, %r1;", x, out=np.float32), np.exp2(x))
    same(
        apply("ex2.approx.ftz.f32 %r0, %r1;", x, out=np.float32),
        np.where(x < -126, 0, np.exp2(x)).astype(np.float32),
    )
    tiny = np.float16([2.0**-24, 2.0**-14, 1.0]).view(np.uint16)
    same(apply("add.ftz.f16 %rs0, %rs1, %rs1;", tiny, out=np.float16), np.float16([0, 2.0**-13, 2]))
    same(apply("add.f16 %rs0, %rs1, %rs1;", tiny, out=np.float16), np.float16([2.0**-23, 2.0**-13, 2]))


# --- Numbers of 16 bits

HALF_OPERATIONS = {
    "add{}": lambda a, b: a + b,
    "sub{}": lambda a, b: a - b,
    "mul{}": lambda a, b: a * b,
    "min{}": lambda a, b: torch.fmin(a, b),
    "max{}": lambda a, b: torch.fmax(a, b),
    "max.NaN{}": lambda a, b: torch.maximum(a, b),
    "min.NaN.xorsign.abs{}": lambda a, b: (
        torch.minimum(a.abs(), b.abs()).copysign(a) * torch.ones_like(b).copysign(b)),
    "fma.rn{}": lambda a, b: (a.double() * b.double() + b.double()).to(a.dtype),
    "fma.rn.relu{}": lambda a, b: torch.maximum(
        (a.double() * b.double() + b.double()).to(a.dtype), torch.zeros_like(a)),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["f16", "bf16", "f16x2", "bf16x2"])
@pytest.mark.parametrize("name", HALF_OPERATIONS)
def test_arithmetic_on_sixteen_bits(name, kind):
    scalar = kind.removesuffix("x2")
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[scalar]
    rng = np.random.default_rng(0)
    corners = torch.tensor([0.0, 1.5, -2.0, 1e-3, 300.0, math.inf, math.nan, -7.25], dtype=dtype)
    a, b = (x.ravel() for x in torch.meshgrid(corners, corners, indexing="ij"))
    noise = torch.tensor(rng.standard_normal((2, 192)), dtype=dtype)
    a, b = torch.cat([a, noise[0]]), torch.cat([b, noise[1]])
    fma = name.startswith("fma")
    template = f"{name.format('.' + kind)} {{0}}0, {{0}}1, {{0}}2{', {0}2' if fma else ''};"
    bits = [x.view(torch.int16).numpy().view(np.uint16) for x in (a, b)]
    if kind.endswith("x2"):
        words = [np.ascontiguousarray(x).view(np.uint32) for x in bits]
        got = apply(template.format("%r"), *words).view(np.uint16)
    else:
        got = apply(template.format("%rs"), *bits, out=np.uint16)
    result = torch.from_numpy(got.view(np.int16)).view(dtype)
    expected = HALF_OPERATIONS[name](a, b)
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name, function", [("ex2.approx{}", torch.exp2), ("tanh.approx", torch.tanh)])
def test_approximate_functions_on_sixteen_bits(name, function, kind):
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[kind]
    values = torch.linspace(-8, 8, 256).to(dtype)
    flush = name.format(".ftz" if kind == "bf16" else "")
    expected = function(values.double()).to(dtype)
    bits = values.view(torch.int16).numpy().view(np.uint16)
    got = apply(f"{flush}.{kind} %rs0, %rs1;", bits, out=np.uint16)
    torch.testing.assert_close(torch.from_numpy(got.view(np.int16)).view(dtype), expected, rtol=0, atol=0)
    pair = apply(f"{flush}.{kind}x2 %r0, %r1;", bits.view(np.uint32)).view(np.uint16)
    same(pair, got)


def test_comparisons_on_sixteen_bits():
    a, b = pairs(np.float16([0, -0.0, 1, -1, np.nan, np.inf, 6e-8]))
    for compare, function in (("lt", np.less), ("ge", np.greater_equal), ("eq", np.equal)):
        code = f"setp.{compare}.f16 %p1, %rs1, %rs2; selp.b32 %r0, 1, 0, %p1;"
        same(apply(code, a, b).astype(bool), function(a, b))
    words = [np.ascontiguousarray(x[:48]).view(np.uint32) for x in (a, b)]
    code = """setp.ltu.f16x2 %p1|%p2, %r1, %r2; selp.b32 %r0, 1, 0, %p1; selp.b32 %r3, 2, 0, %p2;
              or.b32 %r0, %r0, %r3;"""
    low, high = (~np.greater_equal(a[:48], b[:48])).reshape(-1, 2).T
    same(apply(code, *words), (low + 2 * high).astype(np.uint32))
    got = apply("set.gt.f16.f16 %rs0, %rs1, %rs2;", a, b, out=np.float16)
    same(got, (a > b).astype(np.float16))


# --- Minimum and maximum


def numbers_first(function):
    return lambda a, b: np.where(np.isnan(a), b, np.where(np.isnan(b), a, function(a, b)))


def with_signed_zeros(function):
    """min or max of a and b that knows -0 < +0."""

    def ordered(a, b):
        swap = (np.signbit(a) > np.signbit(b)) & (a == b)  # a is -0 and b is +0
        low, high = np.where(swap, a, b), np.where(swap, b, a)
        return np.where(a == b, low if function is np.minimum else high, function(a, b))

    return ordered


@pytest.mark.parametrize("kind, dtype", [("f32", np.float32), ("f64", np.float64)])
def test_extremes_of_floats(kind, dtype):
    a, b = pairs(REALS.astype(dtype))
    register = "%r" if kind == "f32" else "%rd1"
    for name, function in (("min", np.minimum), ("max", np.maximum)):
        ordered = with_signed_zeros(function)
        code = f"{name}.{kind} {register}0, {register}1, {register}2;"
        same(apply(code, a, b, out=dtype), numbers_first(ordered)(a, b).astype(dtype))
        if kind == "f32":
            same(
                apply(code.replace(".f32", ".NaN.f32"), a, b, out=dtype),
                np.where(np.isnan(a) | np.isnan(b), np.nan, ordered(a, b)).astype(dtype),
            )
            got = apply(code.replace(".f32", ".xorsign.abs.f32"), a, b, out=dtype)
            magnitude = numbers_first(function)(np.abs(a), np.abs(b))
            same(got, np.copysign(magnitude, np.where(np.signbit(a) ^ np.signbit(b), -1, 1)).astype(dtype))


def test_pairs_of_integers():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 1 << 32, (2, 128), np.uint32)
    for kind, dtype in (("s16x2", np.int16), ("u16x2", np.uint16)):
        x, y = (v.view(dtype) for v in (a, b))
        for name, function in (("add", np.add), ("min", np.minimum), ("max", np.maximum)):
            same(apply(f"{name}.{kind} %r0, %r1, %r2;", a, b).view(dtype), function(x, y))
    same(
        apply("max.relu.s16x2 %r0, %r1, %r2;", a, b).view(np.int16),
        np.maximum(np.maximum(a.view(np.int16), b.view(np.int16)), 0),
    )
    same(
        apply("min.relu.s32 %r0, %r1, %r2;", a, b, out=np.int32),
        np.maximum(np.minimum(a.view(np.int32), b.view(np.int32)), 0),
    )


# --- Integers: carries, dot products, fields


def as_int(words, bits):
    return [int(x) - ((int(x) >> bits - 1) << bits) for x in words]


@pytest.mark.parametrize("bits", [32, 64])
def test_carries_between_words(bits):
    """Two words each, added and subtracted, and a product added to two words, as Python's integers."""
    dtype = np.dtype(f"u{bits // 8}").type
    values = np.array([0, 1, (1 << bits) - 1, 1 << bits - 1, (1 << bits - 1) - 1, 12345], dtype)
    a, b = pairs(values)
    c = np.roll(a, 5)
    r = (lambda n: f"%r{n}") if bits == 32 else (lambda n: f"%rd{10 + n}")
    mask, t = (1 << bits) - 1, f"u{bits}"
    low, high = r(4 if bits == 32 else 0), r(0)  # the low words' result is not needed
    whole = [(int(x), int(y), int(z)) for x, y, z in zip(a, b, c, strict=True)]
    got = apply(f"add.cc.{t} {low}, {r(1)}, {r(2)}; addc.{t} {high}, {r(3)}, {r(2)};", a, b, c, out=dtype)
    same(got, np.array([(z + y + (x + y >> bits)) & mask for x, y, z in whole], dtype))
    got = apply(f"sub.cc.{t} {low}, {r(1)}, {r(2)}; subc.{t} {high}, {r(3)}, {r(2)};", a, b, c, out=dtype)
    same(got, np.array([(z - y - (x < y)) & mask for x, y, z in whole], dtype))
    code = f"mad.lo.cc.{t} {low}, {r(1)}, {r(2)}, {r(3)}; madc.hi.{t} {high}, {r(1)}, {r(2)}, {r(3)};"
    got = apply(code, a, b, c, out=dtype)
    same(
        got, np.array([(x * y >> bits) + z + ((x * y & mask) + z >> bits) & mask for x, y, z in whole], dtype)
    )
    code = f"add.cc.{t} {low}, {r(1)}, {r(2)}; addc.cc.{t} {low}, {r(3)}, {r(3)}; addc.{t} {high}, {r(1)}, 0;"
    got = apply(code, a, b, c, out=dtype)
    same(got, np.array([x + (z + z + (x + y >> bits) >> bits) & mask for x, y, z in whole], dtype))


def test_dot_products():
    rng = np.random.default_rng(0)
    a, b, c = rng.integers(0, 1 << 32, (3, 96), np.uint32)
    for a_kind, b_kind in (("s32", "s32"), ("u32", "s32"), ("u32", "u32"), ("s32", "u32")):
        types = [{"s32": "i", "u32": "u"}[kind] for kind in (a_kind, b_kind)]
        x, y = a.view(f"{types[0]}1").reshape(-1, 4), b.view(f"{types[1]}1").reshape(-1, 4)
        expected = c + (x.astype(np.int64) * y).sum(axis=1)
        same(apply(f"dp4a.{a_kind}.{b_kind} %r0, %r1, %r2, %r3;", a, b, c), expected.astype(np.uint32))
        pair = a.view(f"{types[0]}2").reshape(-1, 2).astype(np.int64)
        for half, part in (("lo", y[:, :2]), ("hi", y[:, 2:])):
            expected = c + (pair * part).sum(axis=1)
            got = apply(f"dp2a.{half}.{a_kind}.{b_kind} %r0, %r1, %r2, %r3;", a, b, c)
            same(got, expected.astype(np.uint32))


def nth_set(mask, base, offset):
    """The PTX ISA's program for fns."""
    if offset == 0:
        return base if mask >> base & 1 else 0xFFFFFFFF
    place, count = base, abs(offset) - 1
    while 0 <= place < 32:
        if mask >> place & 1:
            if count == 0:
                return place
            count -= 1
        place += 1 if offset > 0 else -1
    return 0xFFFFFFFF


def highest(x, bits):
    """bfind."""
    value = ~x & (1 << bits) - 1 if x >> bits - 1 else x
    return (value.bit_length() - 1) & 0xFFFFFFFF


BITS = {  # of a in %r1 and b in %r2, as Python's integers
    "prmt.b32.f4e %r0, %r1, %r2, 3;": lambda a, b: ((b << 32 | a) >> 24) & 0xFFFFFFFF,
    "prmt.b32.rc8 %r0, %r1, %r2, 2;": lambda a, b: (a >> 16 & 255) * 0x01010101,
    "prmt.b32.ecl %r0, %r1, %r2, 2;": lambda a, b: a & 0xFF000000 | (a >> 16 & 255) * 0x010101,
    "prmt.b32.ecr %r0, %r1, %r2, 1;": lambda a, b: a & 255 | (a >> 8 & 255) * 0x01010100,
    "prmt.b32.rc16 %r0, %r1, %r2, 1;": lambda a, b: (a >> 16) * 0x00010001,
    "prmt.b32 %r0, %r1, %r2, 0xf8b9;": lambda a, b: sum(
        (255 if word >> place & 1 else 0) << 8 * n
        for n, (word, place) in enumerate(((a, 15), (a, 31), (a, 7), (b, 31)))),
    "bfind.s32 %r0, %r1;": lambda a, b: highest(a, 32),
    "bfind.shiftamt.u32 %r0, %r1;": lambda a, b: 32 - a.bit_length() if a else 0xFFFFFFFF,
    "bfe.u32 %r0, %r1, %r2, 12;": lambda a, b: (a >> (b & 255)) & 0xFFF,
    "bfe.s32 %r0, %r1, 3, 5;": lambda a, b: ((a >> 3 & 31) - (a >> 7 & 1) * 32) & 0xFFFFFFFF,
    "bfi.b32 %r0, %r1, 0xAAAAAAAA, 28, %r2;": lambda a, b: (
        (lambda m: 0xAAAAAAAA & ~m | a << 28 & m)(((1 << min(b & 255, 64)) - 1 << 28) & 0xFFFFFFFF)),
    "lop3.or.b32 %r0|%p1, %r1, %r2, 0xF0F0F0F0, 0x80, 0; selp.b32 %r0, %r0, 7, %p1;": lambda a, b: (
        a & b & 0xF0F0F0F0 or 7),
    "fns.b32 %r0, %r1, 5, 2;": lambda a, b: nth_set(a, 5, 2),
    "fns.b32 %r0, %r1, 20, -3;": lambda a, b: nth_set(a, 20, -3),
    "fns.b32 %r0, %r1, 4, 0;": lambda a, b: nth_set(a, 4, 0),
    "bmsk.clamp.b32 %r0, 4, %r2;": lambda a, b: ((1 << min(b, 32)) - 1 << 4) & 0xFFFFFFFF,
    "bmsk.wrap.b32 %r0, %r1, 7;": lambda a, b: (127 << (a & 31)) & 0xFFFFFFFF,
    "szext.wrap.s32 %r0, %r1, 12;": lambda a, b: ((a & 0xFFF) - (a >> 11 & 1) * 0x1000) & 0xFFFFFFFF,
    "szext.clamp.u32 %r0, %r1, 40;": lambda a, b: a,
    "shf.l.clamp.b32 %r0, %r1, %r2, 13;": lambda a, b: ((b << 32 | a) << 13 >> 32) & 0xFFFFFFFF,
    "shf.r.wrap.b32 %r0, %r1, %r2, 45;": lambda a, b: ((b << 32 | a) >> 13) & 0xFFFFFFFF,
    "mul24.hi.u32 %r0, %r1, %r2;": lambda a, b: ((a & 0xFFFFFF) * (b & 0xFFFFFF)) >> 16,
    "mad24.lo.u32 %r0, %r1, %r2, 9;": lambda a, b: ((a & 0xFFFFFF) * (b & 0xFFFFFF) + 9) & 0xFFFFFFFF,
    "mad.hi.sat.s32 %r0, %r1, %r2, 0x7FFFFFF0;": lambda a, b: min(
        (as_int([a], 32)[0] * as_int([b], 32)[0] >> 32) + 0x7FFFFFF0, 0x7FFFFFFF) & 0xFFFFFFFF,
    "sad.s32 %r0, %r1, %r2, 3;": lambda a, b: (abs(as_int([a], 32)[0] - as_int([b], 32)[0]) + 3) & 0xFFFFFFFF,
    "slct.u32.s32 %r0, %r1, 5, %r2;": lambda a, b: a if b < 1 << 31 else 5,
    "set.le.u32.s32 %r0, %r1, %r2;": lambda a, b: 0xFFFFFFFF if as_int([a], 32) <= as_int([b], 32) else 0,
    "cnot.b32 %r0, %r1;": lambda a, b: int(a == 0),
    "isspacep.global %p1, %rd0; isspacep.shared %p2, %rd0; selp.b32 %r0, 1, 0, %p1; @%p2 mov.b32 %r0, 5;":
        lambda a, b: 1,
    """mov.b64 %rd10, {%r1, %r2}; mov.b128 %rq, {%rd10, %rd0}; mov.b128 {%rd11, %rd12}, %rq;
       mov.b64 {%r3, %r0}, %rd11;""": lambda a, b: b,
}  # fmt: skip


@pytest.mark.parametrize("instruction", BITS, ids=lambda text: text.split()[0])
def test_bits_as_python_has_them(instruction):
    a, b = pairs(INTEGERS)
    code = ".reg .b128 %rq; " + instruction if "%rq" in instruction else instruction
    expected = [BITS[instruction](int(x), int(y)) for x, y in zip(a, b, strict=True)]
    same(apply(code, a, b), np.array(expected, np.uint32))


CLASSES = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda x: ~np.isnan(x),
    "notanumber": np.isnan,
    "normal": lambda x: np.isfinite(x) & (np.abs(x) >= TINY),
    "subnormal": lambda x: (x != 0) & (np.abs(x) < TINY),
}


@pytest.mark.parametrize("name", CLASSES)
def test_classes_of_floats(name):
    got = apply(f"testp.{name}.f32 %p1, %r1; selp.b32 %r0, 1, 0, %p1;", REALS)
    same(got.astype(bool), CLASSES[name](REALS))


def test_products_of_64_bits():
    a, b = pairs(np.array([0, 1, 3, (1 << 63) - 1, 1 << 63, (1 << 64) - 1], np.uint64))
    exact = [(int(x), int(y)) for x, y in zip(a, b, strict=True)]
    same(
        apply("mul.hi.u64 %rd10, %rd11, %rd12;", a, b, out=np.uint64),
        np.array([x * y >> 64 for x, y in exact], np.uint64),
    )
    signed = zip(as_int(a, 64), as_int(b, 64), strict=True)
    same(
        apply("mul.hi.s64 %rd10, %rd11, %rd12;", a, b, out=np.uint64),
        np.array([(x * y >> 64) & (1 << 64) - 1 for x, y in signed], np.uint64),
    )


@pytest.mark.parametrize("sign", "us")
def test_upper_halves_of_products_of_16_bits(sign):
    """Compilers divide small numbers so."""
    a, b = pairs(np.array([0, 1, 3, 48, 0x7FFF, 0x8000, 0xAAAB, 0xFFFF], np.uint16))
    wide = [x.view(np.int16).astype(np.int64) if sign == "s" else x.astype(np.int64) for x in (a, b)]
    upper = (wide[0] * wide[1] >> 16).astype(np.uint16)
    same(apply(f"mul.hi.{sign}16 %rs0, %rs1, %rs2;", a, b, out=np.uint16), upper)
    added = apply(f"mad.hi.{sign}16 %rs0, %rs1, %rs2, %rs1;", a, b, out=np.uint16)
    same(added, upper + a)


@pytest.mark.parametrize(
    "instruction",
    [
        "setmaxnreg.inc.sync.aligned.u32 20;",
        "setmaxnreg.dec.sync.aligned.u32 100;",
        "add.rz.f64 %rd10, %rd11, %rd11;",
    ],
)
def test_what_is_refused(instruction):
    with pytest.raises(UnsupportedInstruction, match=instruction.split()[0].replace(".", r"\.")):
        apply(instruction, INTEGERS)
    apply(
        "setmaxnreg.inc.sync.aligned.u32 240; nanosleep.u32 20; griddepcontrol.wait; mov.b32 %r0, 0;",
        INTEGERS,
    )
