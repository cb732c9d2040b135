"""wgmma of every type, layout and option, movmatrix, and exchange within a warp, against NumPy."""

import numpy as np
import pytest
import torch
from run_ptx import kernel, run

K = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32}
SWIZZLES = {0: 0, 32: 3, 64: 2, 128: 1}  # by width in bytes, as descriptors have them
TORCH = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def stored(values, kind):
    """Small whole numbers as elements of a type: their bits."""
    if kind in TORCH:
        found = torch.from_numpy(values).to(TORCH[kind])
        return found.view(torch.int16 if kind == "bf16" else torch.uint8).numpy()
    return values.astype({"f16": np.float16, "tf32": np.float32, "s8": np.int8, "u8": np.uint8}[kind])


def numbers(shape, kind, seed):
    low = 0 if kind == "u8" else -4
    return np.random.default_rng(seed).integers(low, 5, shape).astype(np.float32)


def laid_out(bits, major, width):
    """(rows, k) → (bytes in shared memory, descriptor without address): PTX ISA, "Strides", "Swizzling".

    Atoms of eight lines of `width` bytes, or without a swizzle core matrices of eight lines of 16 bytes, one
    behind the other: those along the contiguous mode first. Addresses come from loops over elements, to be
    independent of the simulator.
    """
    matrix = bits if major == "k" else bits.T  # lines of the contiguous mode
    lines, length = matrix.shape
    line_bytes = length * bits.itemsize
    unit = width or 16
    across = -(-line_bytes // unit)  # atoms along the contiguous mode
    memory = np.zeros(max(lines, 8) * across * unit, np.uint8)
    raw = np.ascontiguousarray(matrix).view(np.uint8).reshape(lines, line_bytes)
    for line in range(lines):
        for byte in range(line_bytes):
            atom = line // 8 * across + byte // unit
            place = atom * 8 * unit + line % 8 * unit + byte % unit
            if width:
                place ^= (place // 128 % (width // 16)) * 16
            memory[place] = raw[line, byte]
    next_across, next_down = 8 * unit, 8 * unit * across
    if width or major == "k":
        leading, stride = next_across, next_down
    else:
        leading, stride = next_down, next_across
    return memory, (leading >> 4) << 16 | (stride >> 4) << 32 | SWIZZLES[width] << 62


def wgmma(a_bits, b_bits, kinds, n, signs=(1, 1), majors=("k", "k"), widths=(0, 0), keep=None, options=""):
    """D of one wgmma; keep: what the accumulators hold before, (64, n)."""
    d_kind, a_kind, _ = kinds
    memories, descriptors = [], []
    for bits, major, width in zip((a_bits, b_bits), majors, widths, strict=True):
        memory, descriptor = laid_out(bits, major, width)
        memories.append(np.pad(memory, (0, -memory.size % 1024)))
        descriptors.append(descriptor)
    data = np.concatenate(memories)
    each = n // 2 if d_kind != "f16" else n // 4
    d = [f"%d{i}" for i in range(each)]
    out = np.zeros((each, 128), np.uint32)
    if keep is not None:
        out[...] = fragment(keep, d_kind)
    trailing = f"{signs[0]}, {signs[1]}" if d_kind != "s32" else ""
    if a_kind in ("f16", "bf16"):
        trailing += f", {int(majors[0] != 'k')}, {int(majors[1] != 'k')}"
    at = "add.s64 %rd10, %rd0, %rd9; "
    body = f""".reg .b32 %d<{each}>; mov.b32 %r1, smem; mov.b32 %r2, %r31;
        FILL: setp.ge.u32 %p1, %r2, {data.size // 16}; @%p1 bra FILLED; shl.b32 %r3, %r2, 4;
        add.u32 %r3, %r1, %r3;
        mul.wide.u32 %rd10, %r2, 16; add.s64 %rd10, %rd1, %rd10; ld.global.v2.b64 {{%rd11, %rd12}}, [%rd10];
        st.shared.v2.b64 [%r3], {{%rd11, %rd12}}; add.u32 %r2, %r2, 128; bra FILL;
        FILLED: fence.proxy.async.shared::cta; bar.sync 0; shr.u32 %r4, %r1, 4; cvt.u64.u32 %rd11, %r4;
        or.b64 %rd12, %rd11, {descriptors[0]}; add.u64 %rd11, %rd11, {memories[0].size // 16};
        or.b64 %rd13, %rd11, {descriptors[1]}; {at}
        {"".join(f"ld.global.b32 {x}, [%rd10+{512 * i}];" for i, x in enumerate(d))}
        setp.eq.u32 %p2, %r31, {"%r31" if keep is not None else 5000};
        wgmma.fence.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n{n}k{K[a_kind]}.{".".join(kinds[:1])}{options}.{kinds[1]}.{kinds[2]}
        {{{", ".join(d)}}}, %rd12, %rd13, %p2{", " + trailing if trailing else ""};
        wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
        {"".join(f"st.global.b32 [%rd10+{512 * i}], {x};" for i, x in enumerate(d))}"""
    if options:
        body = body.replace(f"{kinds[0]}{options}.{kinds[1]}.{kinds[2]}", f"{'.'.join(kinds)}{options}")
    text = kernel(body, shared=data.size).replace(".align 16 .b8 smem", ".align 1024 .b8 smem")
    run(text, out, data, threads=128)
    return matrix(out, d_kind, n)


def places(n):
    """(warp-wide thread, element of its accumulator) of each (row, column) of D (PTX ISA, "wgmma", D)."""
    row, column = np.mgrid[:64, :n]
    thread = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
    return thread, column // 8 * 4 + row % 16 // 8 * 2 + column % 2


def matrix(registers, kind, n):
    thread, element = places(n)
    if kind == "f16":
        halves = registers.T.copy().view(np.float16)
        return halves[thread, element].astype(np.float32)
    return registers.view(np.int32 if kind == "s32" else np.float32)[element, thread]


def fragment(values, kind):
    thread, element = places(values.shape[1])
    count = values.size // 128
    if kind == "f16":
        halves = np.zeros((128, count), np.float16)
        halves[thread, element] = values
        return halves.view(np.uint32).T
    registers = np.zeros((count, 128), np.int32 if kind == "s32" else np.float32)
    registers[element, thread] = values
    return registers.view(np.uint32)


TYPES = [("f32", "f16", "f16"), ("f16", "f16", "f16"), ("f32", "bf16", "bf16"), ("f32", "tf32", "tf32"),
         ("f32", "e4m3", "e5m2"), ("f16", "e5m2", "e4m3"), ("s32", "s8", "s8"),
         ("s32", "u8", "s8")]  # fmt: skip


@pytest.mark.parametrize("width", SWIZZLES)
@pytest.mark.parametrize("kinds", TYPES, ids=".".join)
def test_wgmma_of_every_type_and_swizzle(kinds, width):
    """One k-step out of tiles that are as wide as the swizzle."""
    k = K[kinds[1]]
    a, b = numbers((64, k), kinds[1], 0), numbers((16, k), kinds[2], 1)
    size = stored(a[:1, :1], kinds[1]).itemsize
    padded = [np.pad(x, ((0, 0), (0, max(0, width // size - k)))) for x in (a, b)]
    bits = [stored(x, kind) for x, kind in zip(padded, kinds[1:], strict=True)]
    np.testing.assert_array_equal(wgmma(*bits, kinds, 16, widths=(width, width)), a @ b.T)


@pytest.mark.parametrize("width", SWIZZLES)
@pytest.mark.parametrize("majors", [("k", "n"), ("m", "k"), ("m", "n")])
def test_wgmma_of_transposed_operands(majors, width):
    a, b = numbers((64, 16), "bf16", 0), numbers((64, 16), "bf16", 1)
    per_line = width // 2
    padded = [np.pad(x, ((0, 0), (0, max(0, per_line - 16) if major == "k" else 0)))
              for x, major in zip((a, b), majors, strict=True)]  # fmt: skip
    bits = [stored(x, "bf16") for x in padded]
    got = wgmma(*bits, ("f32", "bf16", "bf16"), 64, majors=majors, widths=(width, width))
    np.testing.assert_array_equal(got, a @ b.T)


@pytest.mark.parametrize("kinds", [TYPES[0], TYPES[1], TYPES[6]], ids=".".join)
def test_wgmma_adds_to_what_there_was(kinds):
    k = K[kinds[1]]
    a, b, c = numbers((64, k), kinds[1], 0), numbers((8, k), kinds[2], 1), numbers((64, 8), "s8", 2) * 10
    bits = [stored(x, kind) for x, kind in zip((a, b), kinds[1:], strict=True)]
    np.testing.assert_array_equal(wgmma(*bits, kinds, 8, keep=c), a @ b.T + c)
    if kinds[0] != "s32":
        np.testing.assert_array_equal(wgmma(*bits, kinds, 8, signs=(-1, 1), keep=c), c - a @ b.T)
        np.testing.assert_array_equal(wgmma(*bits, kinds, 8, signs=(1, -1)), -(a @ b.T))
        np.testing.assert_array_equal(wgmma(*bits, kinds, 8, signs=(-1, -1)), a @ b.T)
    else:
        high = np.full((64, 8), 2**31 - 2, np.float64).astype(np.int32)
        expected = np.clip(high.astype(np.int64) + (a @ b.T).astype(np.int64), -(2**31), 2**31 - 1)
        np.testing.assert_array_equal(wgmma(*bits, kinds, 8, keep=high, options=".satfinite"), expected)


def test_wgmma_ignores_the_low_bits_of_tf32():
    a = np.zeros((64, 8), np.float32)
    a[:, 0] = np.float32(1 + 2**-10 + 2**-11)
    b = np.eye(8, dtype=np.float32)
    got = wgmma(a, b, ("f32", "tf32", "tf32"), 8)
    np.testing.assert_array_equal(got[:, 0], np.float32(1 + 2**-10))


def test_movmatrix():
    values = np.arange(64, dtype=np.uint16).reshape(8, 8)
    out = np.zeros(32, np.uint32)
    body = """add.s64 %rd10, %rd1, %rd9; ld.global.b32 %r1, [%rd10];
               movmatrix.sync.aligned.m8n8.trans.b16 %r2, %r1;
              add.s64 %rd10, %rd0, %rd9; st.global.b32 [%rd10], %r2;"""
    run(kernel(body), out, values.view(np.uint32).ravel().copy())
    np.testing.assert_array_equal(out.view(np.uint16).reshape(8, 8), values.T)


LANES = np.arange(32)


@pytest.mark.parametrize("name, function", [
    ("add.s32", lambda x: x.sum()), ("min.s32", lambda x: x.min()), ("max.s32", lambda x: x.max()),
    ("min.u32", lambda x: x.view(np.uint32).min()), ("max.u32", lambda x: x.view(np.uint32).max()),
    ("and.b32", np.bitwise_and.reduce), ("or.b32", np.bitwise_or.reduce), ("xor.b32", np.bitwise_xor.reduce),
])  # fmt: skip
def test_reductions_in_a_warp_and_in_a_part_of_it(name, function):
    values = np.random.default_rng(0).integers(-(2**31), 2**31, 64).astype(np.int32)
    out = np.zeros(64, np.uint32)
    body = f"""add.s64 %rd10, %rd1, %rd9; ld.global.b32 %r1, [%rd10]; and.b32 %r2, %r31, 31;
               setp.lt.u32 %p1, %r2, 20; @%p1 bra LOW; redux.sync.{name} %r3, %r1, 0xfff00000; bra END;
               LOW: redux.sync.{name} %r3, %r1, 0x000fffff;
               END: add.s64 %rd10, %rd0, %rd9; st.global.b32 [%rd10], %r3;"""
    run(kernel(body), out, values.view(np.uint32), threads=64)
    with np.errstate(over="ignore"):
        expected = [
            int(function(part)) & 0xFFFFFFFF
            for warp in values.reshape(2, 32)
            for part in (warp[:20], warp[20:])
        ]
    np.testing.assert_array_equal(out, np.repeat(expected, [20, 12] * 2).astype(np.uint32))


def test_matches_of_64_bits():
    values = (LANES % 3).astype(np.uint64) << np.uint64(40)
    out = np.zeros(32, np.uint32)
    body = """add.s64 %rd10, %rd1, %rd8; ld.global.b64 %rd11, [%rd10]; match.any.sync.b64 %r1, %rd11, -1;
              match.all.sync.b64 %r2|%p1, %rd11, -1; selp.b32 %r1, 0, %r1, %p1; or.b32 %r1, %r1, %r2;
              add.s64 %rd10, %rd0, %rd9; st.global.b32 [%rd10], %r1;"""
    run(kernel(body), out, values)
    np.testing.assert_array_equal(out, [sum(1 << m for m in range(32) if m % 3 == n % 3) for n in range(32)])


def test_a_block_smaller_than_a_warp_names_all_lanes():
    out = np.zeros(5, np.uint32)
    body = """shfl.sync.bfly.b32 %r1, %r31, 1, 31, -1; vote.sync.ballot.b32 %r2, 1, -1; shl.b32 %r2, %r2, 8;
              or.b32 %r1, %r1, %r2; add.s64 %rd10, %rd0, %rd9; st.global.b32 [%rd10], %r1;"""
    body = body.replace("%r2, 1, -1", "%r2, %p1, -1").replace("shfl", "setp.ge.u32 %p1, %r31, 0; shfl", 1)
    run(kernel(body, parameters=1), out, threads=5)
    assert (out >> 8 == 31).all()
    np.testing.assert_array_equal(out[:4] & 255, [1, 0, 3, 2])
