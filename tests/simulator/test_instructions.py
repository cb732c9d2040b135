"""Single instructions, on values that include the corners, against NumPy and Python integers."""

from fractions import Fraction

import numpy as np
import pytest
from run_ptx import kernel, run

from cutelab.simulator.errors import SimulationError, UnsupportedInstruction

INT32 = np.array(
    [0, 1, 2, 3, 7, 31, 32, 33, 255, 65535, 65536, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFE, 12345],
    np.uint32,
)
FLOAT = np.array(
    [
        0.0,
        -0.0,
        1.0,
        -1.5,
        3.14159,
        1e-20,
        -1e20,
        65504.0,
        65520.0,
        1e-7,
        np.inf,
        -np.inf,
        np.nan,
        0.1,
        2.5,
        100.0,
    ],
    np.float32,
)


def pairs(values):
    """Every pair of `values`, padded to whole warps."""
    a, b = (x.ravel() for x in np.meshgrid(values, values))
    return np.ascontiguousarray(a), np.ascontiguousarray(b)


def apply(instruction, a, b, out=np.uint32):
    """`instruction` with %r1, %r2 as operands and %r0 as result, for each pair."""
    result = np.full(len(a), 0xDEADBEEF, np.uint32)
    body = f"""add.s64 %rd10, %rd0, %rd9; ld.global.b32 %r1, [%rd10];
               add.s64 %rd11, %rd1, %rd9; ld.global.b32 %r2, [%rd11];
               {instruction}
               add.s64 %rd12, %rd2, %rd9; st.global.b32 [%rd12], %r0;"""
    run(kernel(body, parameters=3), a, b, result, threads=len(a))
    return result.view(out)


def signed(x):
    return x.astype(np.int64) - (x.astype(np.int64) >> 31 << 32)


def wrap(x):
    return (np.asarray(x) & 0xFFFFFFFF).astype(np.uint32)


def toward_zero(a, b):
    return np.where(b == 0, -1, np.trunc(a / np.where(b == 0, 1, b))).astype(np.int64)


INTEGER = {
    "add.s32": lambda a, b: wrap(a.astype(np.int64) + b),
    "sub.s32": lambda a, b: wrap(a.astype(np.int64) - b),
    "mul.lo.s32": lambda a, b: wrap(signed(a) * signed(b)),
    "mul.hi.u32": lambda a, b: wrap(a.astype(np.uint64) * b >> np.uint64(32)),
    "mul.hi.s32": lambda a, b: wrap(signed(a) * signed(b) >> 32),
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "min.s32": lambda a, b: wrap(np.minimum(signed(a), signed(b))),
    "max.u32": np.maximum,
    "div.s32": lambda a, b: wrap(toward_zero(signed(a), signed(b))),
    "rem.u32": lambda a, b: np.where(b == 0, a, a % np.where(b == 0, 1, b)),
    "shl.b32": lambda a, b: wrap(
        np.where(b < 32, a.astype(np.uint64) << np.minimum(b, 31).astype(np.uint64), 0)
    ),
    "shr.u32": lambda a, b: np.where(b < 32, a >> np.minimum(b, 31), 0).astype(np.uint32),
    "shr.s32": lambda a, b: wrap(signed(a) >> np.minimum(b, 31)),
}


@pytest.mark.parametrize("name", INTEGER)
def test_integers(name):
    a, b = pairs(INT32)
    np.testing.assert_array_equal(apply(f"{name} %r0, %r1, %r2;", a, b), INTEGER[name](a, b))


REAL = {
    "add.rn.f32": np.add,
    "sub.f32": np.subtract,
    "mul.f32": np.multiply,
    "div.rn.f32": np.divide,
    "min.f32": np.fmin,
    "max.f32": np.fmax,
    "max.NaN.f32": np.maximum,
    "copysign.f32": lambda a, b: np.copysign(b, a),
}


@pytest.mark.parametrize("name", REAL)
def test_floats(name):
    a, b = pairs(FLOAT)
    with np.errstate(all="ignore"):
        expected = REAL[name](a, b).astype(np.float32)
    got = apply(f"{name} %r0, %r1, %r2;", a.view(np.uint32), b.view(np.uint32), np.float32)
    np.testing.assert_array_equal(got, expected)


COMPARISONS = {
    "eq.f32": lambda a, b: a == b,
    "ne.f32": lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b),
    "neu.f32": lambda a, b: a != b,
    "lt.f32": lambda a, b: a < b,
    "ltu.f32": lambda a, b: ~(a >= b),
    "nan.f32": lambda a, b: np.isnan(a) | np.isnan(b),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_float_comparisons(name):
    a, b = pairs(FLOAT)
    got = apply(f"setp.{name} %p1, %r1, %r2; selp.b32 %r0, 1, 0, %p1;", a.view(np.uint32), b.view(np.uint32))
    np.testing.assert_array_equal(got.astype(bool), COMPARISONS[name](a, b))


def test_integer_comparisons_know_their_sign():
    a, b = pairs(INT32)
    got = apply("setp.lt.s32 %p1, %r1, %r2; selp.b32 %r0, 1, 0, %p1;", a, b)
    np.testing.assert_array_equal(got.astype(bool), signed(a) < signed(b))
    got = apply("setp.lt.u32 %p1|%p2, %r1, %r2; selp.b32 %r0, 1, 2, %p2;", a, b)
    np.testing.assert_array_equal(got == 2, a < b)


def test_conversions_to_halves_round_to_nearest_even():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    values = np.concatenate([FLOAT, rng.standard_normal(240).astype(np.float32) * 1e3])
    for kind, dtype in (("f16x2", torch.float16), ("bf16x2", torch.bfloat16)):
        got = apply(
            f"cvt.rn.{kind}.f32 %r0, %r1, %r2;", values.view(np.uint32), values[::-1].copy().view(np.uint32)
        )
        expected = torch.tensor(values).to(dtype).view(torch.int16).numpy().view(np.uint16)
        number = ~np.isnan(values)
        np.testing.assert_array_equal((got >> 16).astype(np.uint16)[number], expected[number])
        np.testing.assert_array_equal(
            (got & 0xFFFF).astype(np.uint16)[number[::-1]], expected[::-1][number[::-1]]
        )


def test_conversion_to_tf32_rounds_ties_away_from_zero():
    values = np.array([1 + 2**-11, -(1 + 2**-11), 1 + 2**-12, 1.0, np.inf] + [0.0] * 27, np.float32)
    got = apply("cvt.rna.tf32.f32 %r0, %r1;", values.view(np.uint32), INT32[:1].repeat(32), np.float32)
    np.testing.assert_array_equal(got[:5], np.float32([1 + 2**-10, -(1 + 2**-10), 1, 1, np.inf]))


def test_predicated_instructions_leave_the_others_alone():
    a = np.arange(64, dtype=np.uint32)
    got = apply(
        "mov.b32 %r0, 7; setp.lt.u32 %p1, %r1, 20; @%p1 mov.b32 %r0, %r1; @!%p1 add.s32 %r0, %r0, 1;", a, a
    )
    np.testing.assert_array_equal(got, np.where(a < 20, a, 8))


def test_shuffles():
    a = np.arange(64, dtype=np.uint32) * 10
    lane = np.arange(64) % 32
    b = np.zeros(64, np.uint32)
    warp = np.arange(64) // 32 * 320
    bfly = apply("shfl.sync.bfly.b32 %r0, %r1, 5, 31, -1;", a, b)
    np.testing.assert_array_equal(bfly, (lane ^ 5) * 10 + warp)
    up = apply("shfl.sync.up.b32 %r0|%p1, %r1, 3, 0, -1;", a, b)
    np.testing.assert_array_equal(up, np.where(lane >= 3, lane - 3, lane) * 10 + warp)
    down = apply("shfl.sync.down.b32 %r0, %r1, 30, 31, -1;", a, b)
    np.testing.assert_array_equal(down, np.where(lane + 30 < 32, lane + 30, lane) * 10 + warp)
    within = apply("shfl.sync.idx.b32 %r0, %r1, 2, 0x181f, -1;", a, b)  # segments of eight lanes
    np.testing.assert_array_equal(within, (lane // 8 * 8 + 2) * 10 + warp)


def test_votes_count_the_lanes_that_take_part():
    a = np.arange(32, dtype=np.uint32)
    got = apply("setp.lt.u32 %p1, %r1, 5; vote.sync.ballot.b32 %r0, %p1, -1;", a, a)
    assert (got == 0b11111).all()
    got = apply(
        """mov.b32 %r0, 0; setp.ge.u32 %p1, %r1, 8; @%p1 bra DONE;
           activemask.b32 %r0; elect.sync %r3|%p2, 0xff; @%p2 mov.b32 %r0, 99;
           DONE:""", a, a)  # fmt: skip
    np.testing.assert_array_equal(got, [99] + [255] * 7 + [0] * 24)


def test_an_unknown_instruction_is_named_with_its_line():
    with pytest.raises(UnsupportedInstruction, match=r"PTX line \d+: frobnicate\.b32 %r0, %r1;"):
        run(kernel("frobnicate.b32 %r0, %r1;"), np.zeros(1, np.uint32), np.zeros(1, np.uint32))


def test_ldmatrix_and_mma_need_whole_warps():
    body = """setp.lt.u32 %p1, %r31, 16; mov.b32 %r2, smem;
              @%p1 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r2];"""
    with pytest.raises(SimulationError, match="without lanes"):
        run(kernel(body, shared=512), np.zeros(1, np.uint32), np.zeros(1, np.uint32))


def bits(x):
    return [format(int(each), "032b") for each in x]


FIELDS = {
    "popc.b32 %r0, %r1;": lambda a, b: [each.count("1") for each in bits(a)],
    "clz.b32 %r0, %r1;": lambda a, b: [len(each) - len(each.lstrip("0")) for each in bits(a)],
    "brev.b32 %r0, %r1;": lambda a, b: [int(each[::-1], 2) for each in bits(a)],
    "bfind.u32 %r0, %r1;": lambda a, b: [(int(x).bit_length() - 1) & 0xFFFFFFFF for x in a],
    "lop3.b32 %r0, %r1, %r2, 0xff00ff, 0x6a;": lambda a, b: (a & b) ^ np.uint32(0xFF00FF),
    "shf.l.wrap.b32 %r0, %r1, %r2, 8;": lambda a, b: wrap(b << np.uint32(8)) | a >> np.uint32(24),
    "shf.r.clamp.b32 %r0, %r1, %r2, 40;": lambda a, b: b,
    "bfe.u32 %r0, %r1, 4, 8;": lambda a, b: a >> np.uint32(4) & np.uint32(255),
    "bfe.s32 %r0, %r1, 28, 8;": lambda a, b: wrap(signed(a) >> 28),
    "bfi.b32 %r0, %r1, %r2, 8, 4;": lambda a, b: b & ~np.uint32(0xF00) | (a & np.uint32(15)) << np.uint32(8),
    "prmt.b32 %r0, %r1, %r2, 0x5410;": lambda a, b: a & np.uint32(0xFFFF) | b << np.uint32(16),
    "prmt.b32.b4e %r0, %r1, %r2, 0;": lambda a, b: wrap(
        a & np.uint32(255) | (b & np.uint32(0xFF000000)) >> np.uint32(16) | b & np.uint32(0xFF0000)
        | (b & np.uint32(0xFF00)) << np.uint32(16)),
    "sub.sat.s32 %r0, %r1, %r2;": lambda a, b: wrap(np.clip(signed(a) - signed(b), -(2**31), 2**31 - 1)),
    "cvt.pack.sat.s8.s32.b32 %r0, %r1, %r2, 0;": lambda a, b: wrap(
        (np.clip(signed(a), -128, 127) & 255) << 8 | np.clip(signed(b), -128, 127) & 255),
    "mad.hi.u32 %r0, %r1, %r2, 1;": lambda a, b: wrap((a.astype(np.uint64) * b >> np.uint64(32)) + 1),
}  # fmt: skip


@pytest.mark.parametrize("instruction", FIELDS)
def test_bits_and_fields(instruction):
    a, b = pairs(INT32)
    np.testing.assert_array_equal(apply(instruction, a, b), FIELDS[instruction](a, b))


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_conversions_to_and_from_eight_bits(kind):
    torch = pytest.importorskip("torch")
    dtype, largest = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}[kind]
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(256) * 10.0 ** rng.uniform(-5, 5, 256)).astype(np.float32)
    pack = f"cvt.rn.satfinite.{kind}x2.f32 %rs1, %r1, %r2; cvt.u32.u16 %r0, %rs1;"
    got = apply(pack, values.view(np.uint32), values[::-1].copy().view(np.uint32))
    clipped = torch.tensor(np.clip(values, -largest, largest))
    expected = clipped.to(dtype).view(torch.uint8).numpy().astype(np.uint32)
    np.testing.assert_array_equal(got, expected << 8 | expected[::-1])
    unpack = f"cvt.u16.u32 %rs1, %r1; cvt.rn.f16x2.{kind}x2 %r0, %rs1;"
    halves = apply(unpack, got, got).view(np.float16).reshape(-1, 2)
    np.testing.assert_array_equal(
        halves[:, 1], torch.tensor(expected.astype(np.uint8)).view(dtype).half().numpy()
    )


def test_roundings_of_conversions():
    values = np.array([1.5, -1.5, 2.5, -0.5, 1e10, -1e10, np.nan, 0.999] * 4, np.float32)
    for mode, function in (("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)):
        expected = np.clip(np.nan_to_num(function(values.astype(np.float64))), -(2**31), 2**31 - 1)
        got = apply(f"cvt.{mode}.s32.f32 %r0, %r1;", values.view(np.uint32), INT32[:1].repeat(32), np.int32)
        np.testing.assert_array_equal(got, expected)
    got = apply("cvt.sat.u8.s32 %r0, %r1;", INT32.repeat(2), INT32.repeat(2))
    np.testing.assert_array_equal(got, np.clip(signed(INT32.repeat(2)), 0, 255))
    third = "mov.f64 %rd6, 0d3FE5555555555555; cvt.{}.f32.f64 %r0, %rd6;"
    below, above = (apply(third.format(mode), *[INT32.repeat(2)] * 2, np.float32)[0] for mode in ("rz", "rp"))
    assert float(below) < 2 / 3 < float(above) == np.nextafter(below, np.float32(1))
    ties = np.array([1 + 2**-11, 1 + 3 * 2**-11] * 16, np.float32)
    got = apply("cvt.rn.tf32.f32 %r0, %r1;", ties.view(np.uint32), INT32[:1].repeat(32), np.float32)
    np.testing.assert_array_equal(got[:2], [1, 1 + 2**-9])


def test_fma_in_double_precision_rounds_once():
    a = np.array([1 + 2.0**-52, 1e300, 0.1], np.float64).repeat(16)[:32]
    out = np.zeros(32, np.float64)
    body = """add.s64 %rd10, %rd1, %rd8; ld.global.b64 %rd11, [%rd10];
              mov.f64 %rd12, 0dBFF0000000000000; fma.rn.f64 %rd13, %rd11, %rd11, %rd12;
              add.s64 %rd10, %rd0, %rd8; st.global.b64 [%rd10], %rd13;"""
    run(kernel(body), out.view(np.uint64), a.view(np.uint64))
    exact = [float(Fraction(x) ** 2 - 1) if x < 1e200 else np.inf for x in a.tolist()]
    np.testing.assert_array_equal(out, exact)
