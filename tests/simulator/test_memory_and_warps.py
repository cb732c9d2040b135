"""Atomics, local memory, exchange in a warp, and the tensor cores' other types."""

import numpy as np
import pytest
from run_ptx import kernel, run

from cutelab.simulator.errors import DivergenceError, MemoryFault, RaceError

LANES = np.arange(32, dtype=np.uint32)


def results(body, *arrays, threads=32, shared=256, seed=None):
    """%r0 of each thread at the end; %rd1 … point to `arrays`."""
    out = np.full(threads, 0xDEADBEEF, np.uint32)
    store = "add.s64 %rd15, %rd0, %rd9; st.global.b32 [%rd15], %r0;"
    text = kernel(body + store, shared=shared, parameters=1 + len(arrays))
    run(text, out, *arrays, threads=threads, seed=seed)
    return out


@pytest.mark.parametrize(
    ("operation", "start", "after", "before"),
    [
        ("add.u32", 5, 5 + 496, 5 + np.cumsum(LANES) - LANES),
        ("max.s32", 7, 31, np.maximum.accumulate(np.maximum(LANES.astype(int) - 1, 7))),
        ("min.u32", 3, 0, np.where(LANES == 0, 3, 0)),
        ("or.b32", 0, 31, np.bitwise_or.accumulate(np.r_[0, LANES[:-1]])),
        ("xor.b32", 1, 1, 1 ^ np.bitwise_xor.accumulate(np.r_[0, LANES[:-1]])),
        ("and.b32", 255, 0, np.where(LANES == 0, 255, 0)),
        ("exch.b32", 9, 31, np.r_[9, LANES[:-1]]),
    ],
)
def test_atomics_go_lane_by_lane(operation, start, after, before):
    memory = np.array([start], np.uint32)
    old = results(f"atom.global.{operation} %r0, [%rd1], %r31;", memory)
    np.testing.assert_array_equal(old, before)
    assert memory[0] == after
    if operation != "exch.b32":
        memory[0] = start
        results(f"mov.b32 %r0, 0; red.relaxed.gpu.global.{operation} [%rd1], %r31;", memory)
        assert memory[0] == after


def test_a_counter_that_wraps():
    memory = np.array([0], np.uint32)
    np.testing.assert_array_equal(results("atom.global.inc.u32 %r0, [%rd1], 4;", memory), LANES % 5)
    np.testing.assert_array_equal(results("atom.global.dec.u32 %r0, [%rd1], 9;", memory)[:4], [2, 1, 0, 9])


def test_atomics_on_floats_and_pairs_of_halves():
    memory = np.zeros(2, np.float32)
    body = """cvt.rn.f32.u32 %r1, %r31; red.global.add.f32 [%rd1], %r1;
              cvt.rn.f16x2.f32 %r2, %r1, %r1; red.global.add.noftz.f16x2 [%rd1+4], %r2; mov.b32 %r0, 0;"""
    results(body, memory.view(np.uint32))
    assert memory[0] == 496
    np.testing.assert_array_equal(memory[1:].view(np.float16), [496, 496])


def test_compare_and_swap():
    memory = np.array([3], np.uint32)
    old = results("add.s32 %r1, %r31, 1; atom.global.cas.b32 %r0, [%rd1], %r31, %r1;", memory)
    np.testing.assert_array_equal(old, np.maximum(LANES, 3))
    assert memory[0] == 32


@pytest.mark.parametrize("seed", [None, *range(20)])
def test_shared_atomics_do_not_race_and_order_what_they_guard(seed):
    body = """mov.b32 %r1, smem; setp.ne.u32 %p1, %r31, 0; @%p1 bra READY; st.shared.b32 [%r1], 0;
              READY: bar.sync 0; atom.shared.add.u32 %r2, [%r1], 1; bar.sync 0; ld.shared.b32 %r0, [%r1];"""
    assert (results(body, threads=128, seed=seed) == 128).all()


def test_an_atomic_races_with_an_ordinary_store():
    body = """mov.b32 %r1, smem; mov.b32 %r0, 0; setp.ge.u32 %p1, %r31, 32; @%p1 bra OTHER;
              st.shared.b32 [%r1], 0; bra END; OTHER: atom.shared.add.u32 %r2, [%r1], 1; END:"""
    with pytest.raises(RaceError):
        results(body, threads=64, seed=3)


@pytest.mark.parametrize("seed", [None, *range(20)])
def test_a_flag_that_a_warp_polls(seed):
    body = """mov.b32 %r1, smem; mov.b32 %r0, 9; setp.ne.u32 %p1, %r31, 0; @%p1 bra READY;
              st.shared.b32 [%r1], 0; READY: bar.sync 0; setp.ge.u32 %p2, %r31, 32; @%p2 bra POLL;
              @%p1 bra END; st.shared.b32 [%r1+4], 42; {} [%r1], 1; bra END;
              POLL: ld.acquire.cta.shared.b32 %r2, [%r1]; setp.eq.u32 %p3, %r2, 0; @%p3 bra POLL;
              ld.shared.b32 %r0, [%r1+4]; END:"""
    got = results(body.format("st.release.cta.shared.b32"), threads=64, seed=seed)
    np.testing.assert_array_equal(got, [9] * 32 + [42] * 32)
    with pytest.raises(RaceError):
        results(body.format("st.shared.b32"), threads=64, seed=seed)


def test_local_memory_is_each_threads_own():
    body = """.local .align 8 .b8 depot[16]; mov.b64 %rd10, depot; cvta.local.u64 %rd11, %rd10;
              st.local.b32 [%rd10+4], %r31; add.s64 %rd12, %rd11, 4; ld.b32 %r0, [%rd12];"""
    np.testing.assert_array_equal(results(body), LANES)
    with pytest.raises(MemoryFault, match="out of bounds: lane 0 accesses byte 16 of local memory"):
        results(body.replace("+4], %r31", "+16], %r31"))
    with pytest.raises(MemoryFault, match="misaligned"):
        results(body.replace("+4], %r31", "+5], %r31"))


def test_match_and_redux():
    any_match = results("and.b32 %r1, %r31, 3; match.any.sync.b32 %r0, %r1, -1;")
    np.testing.assert_array_equal(any_match, 0x11111111 << (LANES & 3))
    body = "mov.b32 %r1, 5; match.all.sync.b32 %r0|%p1, %r1, -1; @!%p1 mov.b32 %r0, 1;"
    assert (results(body) == 0xFFFFFFFF).all()
    body = body.replace("mov.b32 %r1, 5", "and.b32 %r1, %r31, 1")
    assert (results(body) == 1).all()
    assert (results("redux.sync.add.s32 %r0, %r31, -1;") == 496).all()
    assert (results("redux.sync.xor.b32 %r0, %r31, -1;") == 0).all()
    assert (results("redux.sync.max.u32 %r0, %r31, -1;", threads=64) == np.repeat([31, 63], 32)).all()


@pytest.mark.parametrize(
    ("mode", "threshold", "expected"),
    [("any", 0, 0), ("any", 1, 1), ("all", 32, 1), ("all", 31, 0), ("uni", 0, 1), ("uni", 9, 0)],
)
def test_votes(mode, threshold, expected):
    body = f"setp.lt.u32 %p1, %r31, {threshold}; vote.sync.{mode}.pred %p2, %p1, -1; selp.b32 %r0, 1, 0, %p2;"
    assert (results(body) == expected).all()


@pytest.mark.parametrize(
    "instruction",
    [
        "shfl.sync.bfly.b32 %r0, %r31, 1, 31, -1;",
        "bar.warp.sync -1;",
        "vote.sync.ballot.b32 %r0, %p1, -1;",
        "redux.sync.add.s32 %r0, %r31, -1;",
        "elect.sync %r0|%p2, -1;",
    ],
)
def test_lanes_that_a_mask_names_must_be_there(instruction):
    with pytest.raises(DivergenceError, match=r"without lanes \[16, 17.* which its mask names"):
        results("mov.b32 %r0, 0; setp.ge.u32 %p1, %r31, 16; @%p1 bra END; " + instruction + "END:")
    assert len(results(instruction)) == 32
    body = "setp.ge.u32 %p1, %r31, 16; @%p1 bra END; " + instruction.replace("-1;", "0xffff;") + "END:"
    assert len(results(body)) == 32


def test_reductions_by_a_barrier():
    body = "setp.lt.u32 %p1, %r31, 40; {} mov.b32 %r0, %r1;"
    assert (results(body.format("bar.red.popc.u32 %r1, 0, %p1;"), threads=64) == 40).all()
    anything = "barrier.cta.red.or.pred %p2, 1, 64, !%p1; selp.b32 %r1, 1, 0, %p2;"
    assert (results(body.format(anything), threads=64) == 1).all()
    everything = anything.replace(".or.", ".and.")
    assert (results(body.format(everything), threads=64) == 0).all()


def test_clocks_go_on():
    body = """mov.u64 %rd2, %clock64; mov.u64 %rd3, %clock64;
              setp.gt.u64 %p1, %rd3, %rd2; selp.b32 %r0, 1, 0, %p1;"""
    assert (results(body) == 1).all()


def test_cp_async_arrives_at_an_mbarrier():
    source = np.arange(32, dtype=np.uint32)
    body = """mov.b32 %r1, smem; setp.ne.u32 %p1, %r31, 0; @%p1 bra READY;
              mbarrier.init.shared.b64 [%r1+128], 32; READY: bar.sync 0;
              shl.b32 %r2, %r31, 2; add.s32 %r2, %r1, %r2; add.s64 %rd10, %rd1, %rd9;
              setp.ge.u32 %p2, %r31, 32; @%p2 bra WAIT;
              cp.async.ca.shared.global [%r2], [%rd10], 4;
              cp.async.mbarrier.arrive.noinc.shared.b64 [%r1+128];
              WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [%r1+128], 0; @!%p3 bra WAIT;
              and.b32 %r3, %r31, 31; xor.b32 %r3, %r3, 1; shl.b32 %r3, %r3, 2; add.s32 %r3, %r1, %r3;
              ld.shared.b32 %r0, [%r3];"""
    for seed in [None, *range(20)]:
        np.testing.assert_array_equal(results(body, source, threads=64, seed=seed), np.tile(LANES ^ 1, 2))
    with pytest.raises(RaceError, match=r"a cp\.async of warp 0"):
        results(body.replace("WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [%r1+128], 0; @!%p3 bra WAIT;",
                             "WAIT: bar.sync 1;"), source, threads=64)  # fmt: skip


def test_an_mbarriers_state_is_waited_for():
    body = """mov.b32 %r1, smem; setp.ne.u32 %p1, %r31, 0; @%p1 bra READY;
              mbarrier.init.shared.b64 [%r1], 64; READY: bar.sync 0;
              mbarrier.arrive.shared.b64 %rd10, [%r1];
              WAIT: mbarrier.try_wait.shared.b64 %p3, [%r1], %rd10; @!%p3 bra WAIT; mov.b32 %r0, 1;"""
    for seed in [None, *range(20)]:
        assert (results(body, threads=64, seed=seed) == 1).all()


def mma(shape, types, a, b, c):
    """Registers (count, 32) of A, B and C → those of D."""
    names = iter(f"%r{n}" for n in range(20))
    groups = [[next(names) for _ in each] for each in (c, a, b)]
    loads, offset = "", 0
    for group in groups:
        for name in group:
            loads += f"ld.global.b32 {name}, [%rd10+{offset}];"
            offset += 128
    d, a_names, b_names = ("{" + ", ".join(group) + "}" for group in groups)
    stores = "".join(f"st.global.b32 [%rd11+{128 * n}], {name};" for n, name in enumerate(groups[0]))
    body = f"""add.s64 %rd10, %rd1, %rd9; add.s64 %rd11, %rd0, %rd9; {loads}
               mma.sync.aligned.{shape}.row.col.{types} {d}, {a_names}, {b_names}, {d}; {stores}"""
    out = np.zeros(c.shape, np.uint32)
    run(kernel(body), out, np.concatenate([c, a, b]))
    return out


def words(matrix, columns_per_lane, blocks):
    """A matrix as the registers of a fragment: blocks of eight rows inside blocks of columns."""
    rows = matrix.reshape(
        matrix.shape[0] // 8, 8, blocks, 4, columns_per_lane
    )  # half, row, block, lane, value
    return np.ascontiguousarray(rows.transpose(2, 0, 1, 3, 4)).view(np.uint32).reshape(-1, 32)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_integer_mma(dtype):
    rng = np.random.default_rng(0)
    info = np.iinfo(dtype)
    a, b = (rng.integers(info.min, info.max + 1, (rows, 32)).astype(dtype) for rows in (16, 8))
    c = rng.integers(-1000, 1000, (16, 8)).astype(np.int32)
    kind = "s8" if dtype is np.int8 else "u8"
    c_words = c.reshape(2, 8, 4, 2).transpose(0, 3, 1, 2).reshape(4, 32).view(np.uint32)
    d = mma(
        "m16n8k32", f"s32.{kind}.{kind}.s32", words(a, 4, 2), words(b, 4, 2), np.ascontiguousarray(c_words)
    )
    expected = a.astype(np.int64) @ b.astype(np.int64).T + c
    got = d.view(np.int32).reshape(2, 2, 8, 4).transpose(0, 2, 3, 1).reshape(16, 8)
    np.testing.assert_array_equal(got, expected)


def test_half_precision_accumulators():
    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(-3, 4, shape).astype(np.float16) for shape in ((16, 16), (8, 16), (16, 8)))
    c_words = np.ascontiguousarray(c.reshape(2, 8, 4, 2)).view(np.uint32).reshape(2, 32)
    d = mma("m16n8k16", "f16.f16.f16.f16", words(a, 2, 2), words(b, 2, 2), c_words)
    got = d.view(np.float16).reshape(2, 8, 4, 2).reshape(16, 8)
    np.testing.assert_array_equal(got, a @ b.T + c)
