"""Loads, stores, atomics and copies of every kind and type, and the variables of a module."""

import dataclasses

import numpy as np
import pytest
import torch
from run_ptx import HEADER, kernel, run

from cutelab.simulator.errors import MemoryFault, SimulationError, UnsupportedInstruction
from cutelab.simulator.tensormap import TensorMap, decode, encode

LANES = np.arange(32)


def aligned(array, boundary=64):
    """A copy whose address is a multiple of `boundary`."""
    space = np.zeros(array.nbytes + boundary, np.uint8)
    start = -space.ctypes.data % boundary
    found = space[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


def results(body, *arrays, threads=32, shared=0, **options):
    """%r0 of each thread at the end; %rd1 … point to `arrays`."""
    out = np.full(threads, 0xDEADBEEF, np.uint32)
    store = "add.s64 %rd15, %rd0, %rd9; st.global.b32 [%rd15], %r0;"
    run(kernel(body + store, shared, 1 + len(arrays)), out, *arrays, threads=threads, **options)
    return out


# --- Atomics

SIGNED = np.array([-5, 3, -(2**31), 2**31 - 1, 0], np.int64)


def wrapping(function, dtype):
    return lambda old, value: np.array([function(int(old), int(value))]).astype(dtype)[0]


ATOMICS = {
    **{f"add.{kind}": (dtype, lambda a, b: a + b)
       for kind, dtype in (("u32", "u4"), ("s32", "i4"), ("u64", "u8"), ("f32", "f4"), ("f64", "f8"))},
    **{f"{name}.{kind}": (dtype, function) for name, function in (("min", min), ("max", max))
       for kind, dtype in (("u32", "u4"), ("s32", "i4"), ("u64", "u8"), ("s64", "i8"))},
    **{f"{name}.{kind}": (dtype, function) for kind, dtype in (("b32", "u4"), ("b64", "u8"))
       for name, function in (("and", lambda a, b: a & b), ("or", lambda a, b: a | b),
                              ("xor", lambda a, b: a ^ b),
                              ("exch", lambda a, b: b))},
    "inc.u32": ("u4", lambda a, b: 0 if a >= b else a + 1),
    "dec.u32": ("u4", lambda a, b: b if a == 0 or a > b else a - 1),
    "add.noftz.f16": ("f2", lambda a, b: np.float16(np.float32(a) + np.float32(b))),
}  # fmt: skip


def operands(dtype, seed=0):
    rng = np.random.default_rng(seed)
    if dtype[0] == "f":
        return rng.integers(-50, 50, 33).astype(dtype)
    bits = rng.integers(0, 1 << 63, 33, np.uint64) * np.uint64(2) + rng.integers(0, 2, 33, np.uint64)
    small = np.where(rng.random(33) < 0.4, bits & np.uint64(7), bits)
    return small.astype(f"u{dtype[1]}").view(dtype)


@pytest.mark.parametrize("space", ["global", "shared", "generic"])
@pytest.mark.parametrize("name", ATOMICS)
def test_atomics_of_every_type(name, space):
    """All lanes on one element: what each of them finds, and what is left."""
    dtype, function = ATOMICS[name]
    size = np.dtype(dtype).itemsize
    values = operands(dtype)
    start, values = values[:1].copy(), values[1:].copy()
    expected, old = [], start[0]
    with np.errstate(over="ignore"):
        for value in values:
            expected.append(old)
            old = np.array(
                [function(old.item() if dtype[0] != "f" else old, value.item() if dtype[0] != "f" else value)]
            )
            mask = (1 << 8 * size) - 1
            old = (
                old.astype(dtype)
                if dtype[0] == "f"
                else np.array([int(old[0]) & mask], f"u{size}").view(dtype)
            )[0]
    found = np.zeros(32, dtype)
    kind, register = f"b{8 * size}", {2: "%rs", 4: "%r", 8: "%rd1"}[size]
    place, prepare, finish = "[%rd1]", "", ""
    if space == "shared":
        place = "[%r9]"
        prepare = (
            f"mov.b32 %r9, smem; ld.global.{kind} {register}3, [%rd1]; st.shared.{kind} [%r9], {register}3;"
        )
        finish = f"ld.shared.{kind} {register}3, [%r9]; st.global.{kind} [%rd1], {register}3;"
    spaced = f"atom{'' if space == 'generic' else '.' + space}.{name}"
    body = f"""mul.wide.u32 %rd15, %r31, {size}; add.s64 %rd14, %rd2, %rd15; add.s64 %rd15, %rd0, %rd15;
               ld.global.{kind} {register}1, [%rd14]; {prepare}
               {spaced} {register}2, {place}, {register}1; st.global.{kind} [%rd15], {register}2; {finish}"""
    bits = [x.view(f"u{size}") for x in (found, start, values)]
    run(kernel(body, shared=16, parameters=3), *bits)
    np.testing.assert_array_equal(found, np.array(expected, dtype))
    assert start[0] == old


@pytest.mark.parametrize("kind", ["f16x2", "bf16x2", "bf16"])
def test_atomic_sums_of_halves(kind):
    dtype = torch.bfloat16 if kind.startswith("bf16") else torch.float16
    start = torch.tensor([1.0, -300.0], dtype=dtype)
    bits = start.view(torch.int16).numpy().view(np.uint16)
    memory = aligned(bits if kind.endswith("x2") else bits[:1])
    step = 0x3F803F80 if kind.startswith("bf16") else 0x3C003C00  # 1 and 1
    word = f"mov.b32 %r1, {step};" if kind.endswith("x2") else "mov.b16 %rs1, 0x3F80;"
    value = "%r1" if kind.endswith("x2") else "%rs1"
    results(f"{word} red.global.add.noftz.{kind} [%rd1], {value}; mov.b32 %r0, 0;",
            memory.view(np.uint32) if kind.endswith("x2") else memory)  # fmt: skip
    expected = start.clone()
    for _ in LANES:
        expected = expected + 1
    np.testing.assert_array_equal(memory, expected.view(torch.int16).numpy().view(np.uint16)[: len(memory)])


def test_atomic_float_sums_flush_subnormal_numbers_only_in_global_memory():
    tiny = 2.0**-127
    for space, expected in (("global", 0.0), ("shared", 33 * tiny)):
        memory = np.array([tiny], np.float32)
        body = "mov.b32 %r9, smem; ld.global.b32 %r1, [%rd1]; st.shared.b32 [%r9], %r1; bar.warp.sync -1;"
        place = "[%rd1]" if space == "global" else "[%r9]"
        body += f"mov.b32 %r0, 0; red.{space}.add.f32 {place}, %r1;"
        body += "" if space == "global" else "ld.shared.b32 %r1, [%r9]; st.global.b32 [%rd1], %r1;"
        results(body, memory.view(np.uint32), shared=16)
        assert memory[0] == np.float32(expected)


@pytest.mark.parametrize("bits", [16, 32, 64, 128])
def test_compare_and_swap_of_every_width(bits):
    """Lane n swaps if it finds n: the last one leaves 32."""
    memory = aligned(np.zeros(2, np.uint64))
    declared = """.reg .b128 %q<3>; .reg .b16 %h<3>; mov.b64 %rd10, 0; cvt.u64.u32 %rd11, %r31;
                  add.s64 %rd12, %rd11, 1;"""
    narrow = {
        16: """cvt.u16.u32 %h1, %r31; add.u16 %h2, %h1, 1; atom.global.cas.b16 %h0, [%rd1], %h1, %h2;
               cvt.u32.u16 %r0, %h0;""",
        32: "add.u32 %r1, %r31, 1; atom.global.cas.b32 %r0, [%rd1], %r31, %r1;",
        64: "atom.global.cas.b64 %rd13, [%rd1], %rd11, %rd12; cvt.u32.u64 %r0, %rd13;",
        128: """mov.b128 %q1, {%rd10, %rd11}; mov.b128 %q2, {%rd10, %rd12};
                atom.global.cas.b128 %q0, [%rd1], %q1, %q2; mov.b128 {%rd13, %rd14}, %q0;
                cvt.u32.u64 %r0, %rd14;""",
    }
    got = results(declared + narrow[bits], memory)
    np.testing.assert_array_equal(got, LANES)
    assert memory.tolist() == ([0, 32] if bits == 128 else [32, 0])


def test_exchange_of_128_bits():
    memory = aligned(np.array([5, 6], np.uint64))
    body = """.reg .b128 %q<3>; cvt.u64.u32 %rd10, %r31; mov.b128 %q1, {%rd10, %rd10};
              atom.global.exch.b128 %q0, [%rd1], %q1; mov.b128 {%rd13, %rd14}, %q0; cvt.u32.u64 %r0, %rd14;"""
    np.testing.assert_array_equal(results(body, memory), [6, *range(31)])
    assert memory.tolist() == [31, 31]


def test_vector_reductions():
    memory = aligned(np.arange(4, dtype=np.float32))
    body = """mov.b32 %r0, 0; mov.b32 %r1, 0f3F800000; mov.b32 %r2, 0f40000000;
              red.global.add.v2.f32 [%rd1], {%r1, %r2};
              setp.eq.u32 %p1, %r31, 0;
              @%p1 atom.global.add.v4.f32 {%r3, %r4, %r5, %r6}, [%rd1], {%r1, %r1, %r1, %r2};
              @%p1 mov.b32 %r0, %r4;"""
    with pytest.raises(UnsupportedInstruction):
        results(body.replace("red.global.add", "red.global.sub"), memory.view(np.uint32))
    got = results(body, memory.view(np.uint32))
    assert got.view(np.float32)[0] == 65
    np.testing.assert_array_equal(memory, [33, 66, 3, 5])
    with pytest.raises(MemoryFault, match="misaligned: lane 0 accesses 8 bytes"):
        results(body.replace("v2.f32 [%rd1]", "v2.f32 [%rd1+4]"), memory.view(np.uint32))


# --- Loads and stores of every width


@pytest.mark.parametrize("space", ["global", "shared", "local"])
@pytest.mark.parametrize(
    "form, size",
    [
        *(("b8", 1), ("b16", 2), ("b32", 4), ("b64", 8), ("b128", 16), ("v4.b8", 4), ("v4.b16", 8)),
        *(("v2.b32", 8), ("v4.b32", 16), ("v2.b64", 16)),
    ],
)
def test_widths_of_loads_and_stores(form, size, space):
    """Each thread's bytes, backwards through another memory and to the end of the output."""
    source = aligned(np.random.default_rng(0).integers(0, 256, 32 * size).astype(np.uint8))
    out = aligned(np.zeros(32 * size, np.uint8))
    count = int(form[1]) if form[0] == "v" else 1
    each = 8 * size // count
    names = [f"%x{n}" for n in range(count)]
    what = names[0] if count == 1 else "{" + ", ".join(names) + "}"
    prepare, place = {
        "global": ("add.s64 %rd11, %rd2, %rd15;", "[%rd11]"),
        "shared": ("cvt.u32.u64 %r9, %rd15; mov.b32 %r8, smem; add.u32 %r9, %r8, %r9;", "[%r9]"),
        "local": (".local .align 16 .b8 depot[32]; mov.b64 %rd11, depot;", "[%rd11+16]"),
    }[space]
    clear = "".join(f"mov.b{max(each, 16)} {name}, 0;" for name in names)
    if each == 128:
        clear = "mov.b128 %x0, {%rd0, %rd0};"
    body = f""".reg .b{max(each, 16)} %x<4>; mul.wide.u32 %rd15, %r31, {size};
               add.s64 %rd10, %rd1, %rd15; add.s64 %rd13, %rd0, %rd15; {prepare}
               ld.global.{form} {what}, [%rd10]; st.{space}.{form} {place}, {what};
               {clear}
               ld.{space}.{form} {what}, {place}; st.global.{form} [%rd13], {what};"""
    run(kernel(body, shared=512, parameters=3), out, source, aligned(np.zeros(512, np.uint8)))
    np.testing.assert_array_equal(out, source)
    if size > 1 and space == "global":
        with pytest.raises(MemoryFault, match="misaligned"):
            run(
                kernel(body.replace("[%rd10]", "[%rd10+1]"), shared=512, parameters=3),
                out,
                source,
                aligned(np.zeros(512, np.uint8)),
            )


def test_narrow_loads_extend_their_sign():
    source = np.array([0x80, 0x7F, 0xFF, 1] * 8, np.uint8)
    body = "cvt.u64.u32 %rd10, %r31; add.s64 %rd10, %rd1, %rd10; {} %r0, [%rd10];"
    np.testing.assert_array_equal(
        results(body.format("ld.global.s8"), source).view(np.int32), source.view(np.int8)
    )
    np.testing.assert_array_equal(results(body.format("ldu.global.u8"), source), source)
    np.testing.assert_array_equal(results(body.format("ld.global.nc.L1::no_allocate.u8"), source), source)


# --- Variables of the module, branches by table, calls

VARIABLES = """
.const .align 4 .f32 third = 0f3EAAAAAB;
.global .align 2 .b16 halves[2][3] = {{1, 2, 3}, {4, 5, 65535}};
.visible .global .align 8 .u64 where = halves;
.global .u64 inside[2] = {generic(halves)+4, 7};
.global .align 4 .u32 counter;
.const .b8 text[] = {104, 105, 0};
.global .f64 ratio = 2.5;
"""


def with_variables(body, parameters=1):
    return kernel(
        body + "add.s64 %rd15, %rd0, %rd9; st.global.b32 [%rd15], %r0;", parameters=parameters
    ).replace(".visible .entry", VARIABLES + ".visible .entry")


@pytest.mark.parametrize(
    "body, expected",
    [
        ("ld.const.b32 %r0, [third];", 0x3EAAAAAB),
        ("ld.global.u16 %r0, [halves+10];", 65535),
        ("ld.global.u64 %rd1, [where]; ld.global.u16 %r0, [%rd1+2];", 2),
        ("ld.global.u64 %rd1, [inside]; ld.global.u16 %r0, [%rd1];", 3),
        ("ld.global.u32 %r0, [inside+8];", 7),
        ("mov.u64 %rd1, text; cvta.const.u64 %rd2, %rd1; ld.u8 %r0, [%rd2+1];", 105),
        ("ld.global.b64 %rd1, [ratio]; cvt.rni.s32.f64 %r0, %rd1;", 2),
        ("atom.global.add.u32 %r0, [counter], 0;", 0),
        ("mov.u64 %rd1, halves; cvta.to.global.u64 %rd2, %rd1; ld.global.u16 %r0, [%rd2+6];", 4),
    ],
)
def test_variables_and_their_first_values(body, expected):
    out = np.zeros(32, np.uint32)
    run(with_variables(body), out)
    assert (out == expected).all()


def test_beyond_a_variable():
    with pytest.raises(MemoryFault, match="out of bounds"):
        run(with_variables("ld.global.u16 %r0, [halves+4096];"), np.zeros(32, np.uint32))


TABLE = """mov.b32 %r0, 9; and.b32 %r1, %r31, 3; setp.lt.u32 %p1, %r31, 28;
    targets: .branchtargets ONE, TWO, THREE;
    @%p1 brx.idx %r1, targets;
    mov.b32 %r0, 77; bra END;
    ONE: mov.b32 %r0, 10; bra END;
    TWO: mov.b32 %r0, 20; bra END;
    THREE: mov.b32 %r0, 30;
    END: activemask.b32 %r2; setp.ne.b32 %p2, %r2, -1; @%p2 mov.b32 %r0, 1;"""


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_branches_by_table(seed):
    got = results(TABLE.replace("%r31, 3;", "%r31, 3; min.u32 %r1, %r1, 2;"), seed=seed)
    np.testing.assert_array_equal(got, np.where(LANES < 28, np.minimum(LANES % 4, 2) * 10 + 10, 77))
    with pytest.raises(SimulationError, match=r"brx\.idx"):
        results(TABLE, seed=seed)


def test_printf(capsys):
    text = HEADER + """.extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);
        .global .align 1 .b8 form[64] = {%s};
        .global .align 1 .b8 word[4] = {97, 98, 99, 0};
        .visible .entry k(.param .b64 p0) {
        .reg .b32 %%r<4>; .reg .b64 %%rd<9>; .reg .pred %%p1; .local .align 8 .b8 depot[48];
        ld.param.b64 %%rd8, [p0]; mov.u32 %%r1, %%tid.x; setp.ge.u32 %%p1, %%r1, 2; @%%p1 bra END;
        mov.b64 %%rd1, depot; cvta.local.u64 %%rd2, %%rd1;
        sub.s32 %%r2, 0, %%r1; st.local.b32 [%%rd1], %%r2; st.local.b32 [%%rd1+4], 255;
        st.local.b64 [%%rd1+8], 0d3FF8000000000000; mov.b64 %%rd3, word; cvta.global.u64 %%rd3, %%rd3;
        st.local.b64 [%%rd1+16], %%rd3; st.local.b64 [%%rd1+24], -1; st.local.b32 [%%rd1+32], 65;
        { .param .b64 x; .param .b64 y; .param .b32 z;
        mov.b64 %%rd4, form; cvta.global.u64 %%rd4, %%rd4; st.param.b64 [x], %%rd4; st.param.b64 [y], %%rd2;
        call.uni (z), vprintf, (x, y); ld.param.b32 %%r3, [z]; st.global.b32 [%%rd8], %%r3; }
        END: ret; }"""  # fmt: skip
    form = b"%d %#06x %.2f %-5s| %llu%% %c\n\0"
    count = np.zeros(1, np.uint32)
    run(text % ", ".join(map(str, form)), count)
    rest = f" 0x00ff 1.50 abc  | {2**64 - 1}% A\n"
    assert capsys.readouterr().out == "0" + rest + "-1" + rest
    assert count[0] == 6


def test_other_calls_are_refused_by_name():
    text = kernel("call.uni helper;", parameters=1).replace(
        ".visible .entry", ".func helper() { .reg .b32 %r1; { mov.b32 %r1, 0; } ret; }\n.visible .entry"
    )
    with pytest.raises(
        UnsupportedInstruction, match=r"PTX line \d+: call\.uni helper;: device function helper"
    ):
        run(text, np.zeros(1, np.uint32))


# --- Bulk copies and reductions

SETUP = """mov.b32 %r1, smem; setp.ne.u32 %p1, %r31, 0; @%p1 bra READY;
    mbarrier.init.shared.b64 [%r1+2048], 1; READY: bar.sync 0;"""
WAIT = "WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [%r1+2048], 0; @!%p3 bra WAIT;"

REDUCTIONS = {
    **{f"add.{kind}": (dtype, np.add) for kind, dtype in
       (("u32", "u4"), ("s32", "i4"), ("u64", "u8"), ("f32", "f4"), ("f64", "f8"), ("noftz.f16", "f2"))},
    **{f"{name}.{kind}": (dtype, function) for name, function in (("min", np.minimum), ("max", np.maximum))
       for kind, dtype in (("u32", "u4"), ("s32", "i4"), ("u64", "u8"), ("s64", "i8"), ("f16", "f2"))},
    **{f"{name}.{kind}": (dtype, function) for kind, dtype in (("b32", "u4"), ("b64", "u8"))
       for name, function in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor))},
    "inc.u32": ("u4", lambda a, b: np.where(a >= b, 0, a + 1)),
    "dec.u32": ("u4", lambda a, b: np.where((a == 0) | (a > b), b, a - 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", REDUCTIONS)
def test_bulk_reductions_into_global_memory(name):
    dtype, function = REDUCTIONS[name]
    old, new = (aligned(operands(dtype, seed)[:32]) for seed in (1, 2))
    count = old.nbytes // 8
    body = f"""{SETUP} setp.lt.u32 %p2, %r31, {count}; shl.b32 %r2, %r31, 3; add.s32 %r2, %r1, %r2;
               add.s64 %rd10, %rd1, %rd8; @%p2 ld.global.b64 %rd11, [%rd10]; @%p2 st.shared.b64 [%r2], %rd11;
               fence.proxy.async.shared::cta; bar.sync 0; @%p1 bra END;
               cp.reduce.async.bulk.global.shared::cta.bulk_group.{name} [%rd0], [%r1], {old.nbytes};
               cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:"""
    with np.errstate(over="ignore"):
        expected = function(old, new).astype(dtype)
    run(kernel(body, shared=2056), old.view(np.uint64), new.view(np.uint64))
    np.testing.assert_array_equal(old, expected)


def test_bulk_reduction_of_bfloat16():
    values = torch.tensor(np.random.default_rng(0).standard_normal((2, 32)), dtype=torch.bfloat16)
    old, new = (aligned(x.view(torch.int16).numpy()) for x in values)
    body = f"""{SETUP} @%p1 bra END; ld.global.v2.b64 {{%rd10, %rd11}}, [%rd1];
               st.shared.v2.b64 [%r1], {{%rd10, %rd11}};
               fence.proxy.async.shared::cta;
               cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%rd0], [%r1], 16;
               cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:"""
    run(kernel(body, shared=2056), old.view(np.uint64), new.view(np.uint64))
    expected = torch.cat([values[0, :8] + values[1, :8], values[0, 8:]])
    assert torch.equal(torch.from_numpy(old).view(torch.bfloat16), expected)


ASYNC = {"add.u32": np.add, "min.s32": np.minimum, "max.u32": np.maximum, "inc.u32": REDUCTIONS["inc.u32"][1],
         "and.b32": np.bitwise_and, "xor.b32": np.bitwise_xor, "add.u64": np.add}  # fmt: skip


@pytest.mark.parametrize("name", ASYNC)
def test_reductions_into_another_ctas_shared_memory(name):
    """By a bulk copy of 16 bytes, and by red.async: CTA 0 adds to what CTA 1 has."""
    bits = int(name[-2:])
    dtype = {"s": "i", "u": "u", "b": "u"}[name[-3]] + str(bits // 8)
    old = np.arange(100, 100 + 128 // bits).astype(dtype)
    new = np.array([7, 2**31, 103, 99][: 128 // bits]).astype(dtype)
    words = [int(x) for x in new.view(np.uint32)]
    start = [int(x) for x in old.view(np.uint32)]
    load = "".join(f"st.shared.b32 [%r1+{4 * n}], %r{10 + n};" for n in range(4))
    first = "".join(f"selp.b32 %r{10 + n}, {start[n]}, {words[n]}, %p4;" for n in range(4))
    sync = "barrier.cluster.arrive; barrier.cluster.wait;"
    register = "%r6" if bits == 32 else "%rd6"
    bulk = f"""cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{name}
               [%r3], [%r1], 16, [%r4];"""
    single = "".join(
        f"""ld.shared.b{bits} {register}, [%r1+{n * bits // 8}];
            red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{name}
            [%r3+{n * bits // 8}], {register}, [%r4];""" for n in range(128 // bits))  # fmt: skip
    for send in (bulk, single):
        body = f"""{SETUP} mov.u32 %r2, %cluster_ctarank; setp.eq.u32 %p4, %r2, 1; {first} @%p1 bra SYNC;
                   {load}
                   mbarrier.arrive.expect_tx.shared.b64 _, [%r1+2048], 16;
                   fence.proxy.async.shared::cta; SYNC: {sync} mov.b32 %r0, 0; @%p1 bra DONE;
                   @%p4 bra RECEIVE;
                   mapa.shared::cluster.u32 %r3, %r1, 1; add.u32 %r4, %r3, 2048; {send} bra DONE;
                   RECEIVE: {WAIT} ld.shared.v2.b64 {{%rd10, %rd11}}, [%r1];
                   st.global.v2.b64 [%rd0], {{%rd10, %rd11}};
                   DONE: {sync}"""
        out = aligned(np.zeros(128 // bits, dtype))
        run(kernel(body, shared=2056, parameters=1), out.view(np.uint64), threads=32, grid=2, cluster=2)
        np.testing.assert_array_equal(out, ASYNC[name](old, new))


def test_a_bulk_copy_to_several_ctas():
    """cp.async.bulk, multicast to CTAs 0 and 2 of three, and a copy of shared memory by st.async."""
    source = aligned(np.arange(8, dtype=np.uint32))
    body = f"""{SETUP} mov.u32 %r2, %cluster_ctarank; @%p1 bra SYNC; mov.b16 %rs1, 5;
               setp.ne.u32 %p4, %r2, 1; @%p4 mbarrier.arrive.expect_tx.shared.b64 _, [%r1+2048], 32;
               SYNC: barrier.cluster.arrive; barrier.cluster.wait; @%p1 bra DONE;
               setp.eq.u32 %p5, %r2, 1;
               @%p5 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
               [%r1], [%rd1], 32, [%r1+2048], %rs1;
               @%p5 bra DONE; {WAIT} ld.shared.b32 %r5, [%r1+28]; mul.wide.u32 %rd10, %r2, 4;
               add.s64 %rd10, %rd0, %rd10;
               st.global.b32 [%rd10], %r5; DONE: barrier.cluster.arrive; barrier.cluster.wait;"""
    out = np.zeros(3, np.uint32)
    run(kernel(body, shared=2056), out, source, grid=3, cluster=3)
    np.testing.assert_array_equal(out, [7, 0, 7])


def test_asynchronous_stores_of_vectors():
    body = f"""{SETUP} @%p1 bra END; mbarrier.arrive.expect_tx.shared.b64 _, [%r1+2048], 24;
               mapa.shared::cluster.u32 %r3, %r1, 0; add.u32 %r4, %r3, 2048; mov.b32 %r5, 5;
               mov.b64 %rd10, 77;
               st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32
               [%r3], {{%r5, %r5, %r4, %r5}}, [%r4];
               st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%r3+16], %rd10, [%r4];
               {WAIT} ld.shared.b32 %r6, [%r1+12]; ld.shared.b32 %r7, [%r1+16]; add.u32 %r6, %r6, %r7;
               st.global.b32 [%rd0], %r6; END:"""
    out = np.zeros(1, np.uint32)
    run(kernel(body, shared=2056, parameters=1), out, cluster=1)
    assert out[0] == 82


# --- mbarriers


def test_arrivals_that_drop_out():
    """Two arrivals in the first phase, one of which is the last of its thread; then one ends a phase."""
    body = """mov.b32 %r1, smem; mov.b32 %r0, 0; setp.ne.u32 %p1, %r31, 0; @%p1 bra END;
        mbarrier.init.shared.b64 [%r1], 2; mbarrier.arrive_drop.shared.b64 %rd10, [%r1];
        mbarrier.pending_count.b64 %r2, %rd10; mbarrier.arrive.shared.b64 %rd11, [%r1];
        mbarrier.pending_count.b64 %r3, %rd11; mbarrier.arrive.shared.b64 %rd12, [%r1];
        mbarrier.pending_count.b64 %r4, %rd12; mbarrier.test_wait.shared.b64 %p2, [%r1], %rd12;
        mad.lo.u32 %r0, %r2, 100, %r3; mad.lo.u32 %r0, %r0, 10, %r4; @!%p2 mov.b32 %r0, 0; END:"""
    assert results(body, shared=16)[0] == 2011


def test_bytes_counted_by_hand():
    body = """mov.b32 %r1, smem; mov.b32 %r0, 0; setp.ne.u32 %p1, %r31, 0; @%p1 bra END;
        mbarrier.init.shared.b64 [%r1], 1; mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], 24;
        mbarrier.arrive.shared.b64 _, [%r1];
        mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%r1], 16;
        mbarrier.test_wait.parity.shared.b64 %p2, [%r1], 0; @%p2 bra END;
        mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%r1], 8;
        mbarrier.test_wait.parity.shared.b64 %p2, [%r1], 0; selp.b32 %r0, 1, 0, %p2;
        mbarrier.inval.shared.b64 [%r1]; END:"""
    assert results(body, shared=16)[0] == 1


# --- Addresses


def test_ranks_and_spaces_of_addresses():
    body = """mov.b32 %r1, smem; cvt.u64.u32 %rd10, %r1; cvta.shared.u64 %rd11, %rd10;
               mov.u32 %r2, %cluster_ctarank;
        xor.b32 %r3, %r2, 1; mapa.u64 %rd12, %rd11, %r3; getctarank.u64 %r4, %rd12;
        mapa.shared::cluster.u32 %r5, smem, %r3; getctarank.shared::cluster.u32 %r6, %r5;
        isspacep.shared::cluster %p1, %rd12; isspacep.global %p2, %rd12; isspacep.local %p3, %rd12;
        mad.lo.u32 %r0, %r4, 10, %r6; @!%p1 mov.b32 %r0, 99; @%p2 mov.b32 %r0, 98; @%p3 mov.b32 %r0, 97;
        st.shared.b32 [%r1], %r2; barrier.cluster.arrive; barrier.cluster.wait; ld.b32 %r7, [%rd12];
        mad.lo.u32 %r0, %r0, 10, %r7; barrier.cluster.arrive; barrier.cluster.wait;
        mul.wide.u32 %rd13, %r2, 128; add.s64 %rd9, %rd9, %rd13;"""
    out = np.zeros(64, np.uint32)
    store = "add.s64 %rd15, %rd0, %rd9; st.global.b32 [%rd15], %r0;"
    run(kernel(body + store, shared=16, parameters=1), out, grid=2, cluster=2)
    assert out[::32].tolist() == [111, 0]


# --- Tensor copies of every rank


def tensor_map(array, box, **others):
    sizes, strides = array.shape[::-1], array.strides[::-1]
    name = {"f2": "f16", "f4": "f32", "u1": "u8", "i4": "s32"}[array.dtype.str[1:]]
    steps = others.pop("element_strides", (1,) * array.ndim)
    return TensorMap(array.ctypes.data, name, array.itemsize, sizes, strides, box, steps, **others)


def copied(array, box, start, load=True, name="", **others):
    """A box through shared memory: what a load leaves there, or what is stored: 1, 2, 3, …."""
    described = tensor_map(array, box, **others)
    packed = aligned(np.frombuffer(encode(described), np.uint8))
    steps = (1, *described.element_strides[1:])
    extents = [-(-extent // step) for extent, step in zip(box, steps, strict=True)][::-1]
    tile = aligned(np.arange(1, 1 + np.prod(extents)).astype(array.dtype))
    at = ", ".join(str(x) for x in start)
    count = tile.nbytes // 4
    where = f"[%rd1, {{{at}}}]"
    moves = f"""mov.b32 %r2, %r31; LOOP: setp.ge.u32 %p2, %r2, {count}; @%p2 bra MOVED;
        shl.b32 %r3, %r2, 2; add.s32 %r4, %r1, %r3; cvt.u64.u32 %rd10, %r3; add.s64 %rd10, %rd0, %rd10;
        {{}} add.u32 %r2, %r2, 32; bra LOOP; MOVED:"""
    if load:
        body = f"""{SETUP} @%p1 bra {"WAIT"};
                   mbarrier.arrive.expect_tx.shared.b64 _, [%r1+2048], {tile.nbytes};
            cp.async.bulk.prefetch.tensor.{array.ndim}d.L2.global.tile {where};
            cp.async.bulk.tensor.{array.ndim}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
            [%r1], {where}, [%r1+2048]; {WAIT}
            {moves.format("ld.shared.b32 %r5, [%r4]; st.global.b32 [%rd10], %r5;")}"""
    else:
        instruction = f"cp.async.bulk.tensor.{array.ndim}d.global.shared::cta.tile.bulk_group"
        if name:
            instruction = (
                f"cp.reduce.async.bulk.tensor.{array.ndim}d.global.shared::cta.{name}.tile.bulk_group"
            )
        body = f"""{SETUP} {moves.format("ld.global.b32 %r5, [%rd10]; st.shared.b32 [%r4], %r5;")}
            fence.proxy.async.shared::cta; bar.sync 0; @%p1 bra END; {instruction} {where}, [%r1];
            cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:"""
    text = kernel(body, shared=2056, parameters=2).replace(".align 16 .b8 smem", ".align 128 .b8 smem")
    run(text, tile.view(np.uint32), packed, array)
    return tile.reshape(extents)


def expected_box(array, box, start, steps=None, fill=0):
    """By NumPy: the tensor padded on all sides, then sliced."""
    margin = 16
    padded = np.pad(array, margin, constant_values=fill)
    steps = steps or (1,) * array.ndim
    modes = zip(start[::-1], box[::-1], steps[::-1], strict=True)
    return padded[tuple(slice(margin + at, margin + at + extent, step) for at, extent, step in modes)]


BOXES = [  # sizes, box, start, as tensor maps have them: the contiguous mode first
    ((64,), (16,), (4,)),
    ((64,), (16,), (56,)),
    ((16, 9), (8, 4), (-2, 7)),
    ((16, 9), (16, 9), (0, 0)),
    ((8, 5, 3), (4, 3, 2), (6, -1, 1)),
    ((8, 3, 4, 3), (8, 2, 2, 2), (0, 2, -1, 1)),
    ((8, 3, 2, 3, 2), (4, 2, 2, 2, 2), (-1, 0, 1, 2, -1)),
]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int32])
@pytest.mark.parametrize("sizes, box, start", BOXES)
def test_tensor_copies_of_every_rank(sizes, box, start, dtype):
    array = aligned(np.random.default_rng(0).integers(-99, 99, sizes[::-1]).astype(dtype))
    np.testing.assert_array_equal(copied(array, box, start), expected_box(array, box, start))
    before = array.copy()
    tile = copied(array, box, start, load=False)
    inside = expected_box(np.arange(1, array.size + 1).reshape(array.shape), box, start)
    after = before.ravel()
    after[inside[inside > 0] - 1] = tile[inside > 0]
    np.testing.assert_array_equal(array.ravel(), after)


@pytest.mark.parametrize("sizes, box, start", BOXES[1:])
def test_what_sticks_out_is_zero_or_nan(sizes, box, start):
    array = aligned(np.ones(sizes[::-1], np.float32))
    outside = expected_box(array, box, start) == 0
    assert (copied(array, box, start)[outside] == 0).all()
    filled = copied(array, box, start, nan_fill=True)
    assert np.isnan(filled[outside]).all()
    assert (filled[~outside] == 1).all()


def test_tensor_copies_that_skip_elements():
    array = aligned(np.arange(8 * 9 * 5, dtype=np.int32).reshape(5, 9, 8))
    steps = (1, 2, 3)
    got = copied(array, (8, 5, 4), (0, 1, 1), element_strides=steps)
    np.testing.assert_array_equal(got, expected_box(array, (8, 5, 4), (0, 1, 1), steps))
    got = copied(array, (8, 5, 4), (4, 6, 3), element_strides=(2, 2, 3))  # that of mode 0 doesn't count
    np.testing.assert_array_equal(got, expected_box(array, (8, 5, 4), (4, 6, 3), steps))


@pytest.mark.parametrize("name, function", [("add", np.add), ("min", np.minimum), ("max", np.maximum),
                                            ("xor", np.bitwise_xor), ("and", np.bitwise_and)])  # fmt: skip
def test_tensor_reductions(name, function):
    array = aligned(np.random.default_rng(0).integers(-20, 20, (6, 8)).astype(np.int32))
    before = array.copy()
    tile = copied(array, (4, 2), (2, 3), load=False, name=name)
    expected = before.copy()
    expected[3:5, 2:6] = function(before[3:5, 2:6], tile)
    np.testing.assert_array_equal(array, expected)


def test_what_tensor_copies_do_not_do():
    array = aligned(np.zeros((8, 8), np.float32))
    with pytest.raises(SimulationError, match="interleaved"):
        copied(array, (8, 8), (0, 0), interleave=16)
    body = """mov.b32 %r1, smem; mov.b16 %rs1, 0;
               cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes
              [%r1], [%rd0, {%r1, %r1, %r1}], [%r1], {%rs1};"""
    with pytest.raises(UnsupportedInstruction, match="im2col"):
        run(kernel(body, shared=2056, parameters=1), array)


@pytest.mark.parametrize(
    "field, mode, kind, value, change",
    [
        ("global_address", "", "b64", 0x7F1234567880, {"address": 0x7F1234567880}),
        ("global_dim", "1, ", "b32", 31, {"sizes": (64, 31, 5)}),
        ("global_stride", "0, ", "b64", 1 << 38, {"strides": (2, 1 << 38, 4096)}),
        ("global_stride", "1, ", "b64", 8192, {"strides": (2, 144, 8192)}),
        ("box_dim", "0, ", "b32", 32, {"box": (32, 8, 2)}),
        ("box_dim", "2, ", "b32", 4, {"box": (16, 8, 4)}),
        ("element_stride", "1, ", "b32", 3, {"element_strides": (1, 3, 1)}),
        ("elemtype", "", "b32", 10, {"element_type": "bf16"}),
        ("swizzle_mode", "", "b32", 3, {"swizzle": 128}),
        ("fill_mode", "", "b32", 1, {"nan_fill": True}),
    ],
)
def test_tensor_maps_that_a_kernel_changes(field, mode, kind, value, change):
    before = TensorMap(0x1000, "f16", 2, (64, 32, 5), (2, 144, 4096), (16, 8, 2), (1, 1, 1))
    packed = aligned(np.frombuffer(encode(before), np.uint8), 128)
    constant = field in ("elemtype", "swizzle_mode", "fill_mode")
    operand = value if constant else {"b32": "%r1", "b64": "%rd1"}[kind]
    body = f"""mov.b32 %r1, {value & 0xFFFFFFFF}; mov.b64 %rd1, {value}; setp.ne.u32 %p1, %r31, 0;
               @%p1 bra END; tensormap.replace.tile.{field}.global.b1024.{kind}
               [%rd0], {mode}{operand}; END:"""
    run(kernel(body, parameters=1), packed)
    assert decode(packed.tobytes()) == dataclasses.replace(before, **change)


def test_a_tensor_map_is_copied_to_global_memory():
    source = aligned(np.arange(128, dtype=np.uint8), 128)
    out = aligned(np.zeros(128, np.uint8), 128)
    body = """mov.b32 %r1, smem; add.s64 %rd10, %rd1, %rd9; ld.global.b32 %r2, [%rd10]; shl.b32 %r3, %r31, 2;
              add.u32 %r3, %r1, %r3; st.shared.b32 [%r3], %r2; bar.warp.sync -1;
              tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
              [%rd0], [%r1], 128;"""
    text = kernel(body, shared=128).replace(".align 16 .b8 smem", ".align 128 .b8 smem")
    run(text, out, source)
    np.testing.assert_array_equal(out, source)
