"""mbarriers, bulk copies, wgmma and clusters: kernels that pass, and with one fault each, which is found.

All of them run in step and in the order of each of 20 seeds.
"""

import numpy as np
import pytest
from ptx_programs import PLACES, RING, WAIT_EMPTY, WAIT_FULL, WGMMA
from run_ptx import kernel, run

from cutelab.simulator.errors import (
    BarrierError,
    Deadlock,
    DivergenceError,
    MemoryFault,
    RaceError,
    SimulationError,
    UninitializedRead,
)

SEEDS = [None, *range(20)]


def assert_found(fault, program, run):
    """fault: (what is replaced in `program`, by what, the error, a part of its message), on every seed."""
    old, new, error, message = fault
    assert old in program
    for seed in SEEDS:
        with pytest.raises(error, match=message):
            run(seed, program.replace(old, new))


# --- A ring of two stages of 128 bytes: warp 0 loads four tiles, warp 1 adds them up.


def ring(seed, body=RING):
    tiles = np.arange(128, dtype=np.uint32)
    out = np.zeros(32, np.uint32)
    run(kernel(body, shared=288), out, tiles, threads=64, seed=seed)
    np.testing.assert_array_equal(out, tiles.reshape(4, 32).sum(axis=0))


RELEASE = "mbarrier.arrive.shared.b64 _, [%r5+272];"
READ = "ld.shared.b32 %r8, [%r10];"
EXPECT = "mbarrier.arrive.expect_tx.shared.b64 _, [%r5+256], 128;"
COPY = "[%r6], [%rd10], 128, [%r5+256];"
INIT = "mbarrier.init.shared.b64 [%r1+264], 1;"
RING_FAULTS = {
    "released before it is read": (f"{READ}\n    {RELEASE}", RELEASE + READ, RaceError, "a bulk load"),
    "refilled without waiting": (WAIT_EMPTY, "", RaceError, "a bulk load of warp 0 writes"),
    "read without waiting": (WAIT_FULL, "", (RaceError, UninitializedRead), None),
    "wrong parity": (
        f"CONSUMER: {PLACES}",
        f"CONSUMER: {PLACES} xor.b32 %r4, %r4, 1;",
        (RaceError, UninitializedRead, Deadlock),
        None,
    ),
    "too many bytes expected": (
        *(EXPECT, EXPECT.replace("128", "144"), Deadlock),
        r"(?s)waits at the mbarrier at byte 256.*phase of parity 0.*phase 0, 1 of 1 arrivals, 16 bytes still",
    ),
    "too few bytes expected": (EXPECT, EXPECT.replace("128", "112"), Deadlock, "16 bytes more than expected"),
    "no bytes expected": (EXPECT, RELEASE.replace("272", "256"), SimulationError, None),
    "never released": (RELEASE, "", Deadlock, "byte 272 .*phase 0, 0 of 32 arrivals"),
    "released twice": (RELEASE, RELEASE * 2, (RaceError, Deadlock), None),
    "too many arrivals": (RELEASE, RELEASE.replace(";", ", 33;"), BarrierError, "all 32 arrivals of phase 0"),
    "initialised unseen": ("bar.sync 0;", "", (RaceError, BarrierError), "initialis"),
    "beyond the allocation": (COPY, COPY.replace("[%r6]", "[%r6+256]"), MemoryFault, "of the shared memory"),
    "beyond the tensor": (COPY, COPY.replace("%rd10", "%rd10+4096"), MemoryFault, "the global address"),
    "misaligned destination": (COPY, COPY.replace("[%r6]", "[%r6+8]"), MemoryFault, "misaligned"),
    "misaligned size": (COPY, COPY.replace("128", "120"), MemoryFault, "misaligned"),
    "misaligned mbarrier": (INIT, INIT.replace("264", "268"), MemoryFault, "misaligned"),
}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_ring_of_bulk_loads(seed):
    ring(seed)


@pytest.mark.parametrize("fault", RING_FAULTS)
def test_faults_in_a_ring_of_bulk_loads(fault):
    assert_found(RING_FAULTS[fault], RING, ring)


# --- Shared memory that threads wrote, stored to global memory by a bulk copy, and written again.

STORE = """
    mov.b32 %r1, smem; shl.b32 %r2, %r31, 2; add.s32 %r2, %r1, %r2;
    st.shared.b32 [%r2], %r31;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    setp.ne.u32 %p1, %r31, 0; @%p1 bra STORED;
    cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r1], 256;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
    STORED: bar.sync 1;
    st.shared.b32 [%r2], 7;
"""


def bulk_store(seed, body=STORE):
    out = np.zeros(64, np.uint32)
    run(kernel(body, shared=256, parameters=1), out, threads=64, seed=seed)
    np.testing.assert_array_equal(out, np.arange(64))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bulk_store(seed):
    bulk_store(seed)


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("fence.proxy.async.shared::cta;", RaceError, "no fence.proxy.async"),
        ("bar.sync 0;", (RaceError, UninitializedRead), None),
        ("cp.async.bulk.commit_group;", RaceError, "a bulk store of warp 0 read"),
        ("cp.async.bulk.wait_group.read 0;", RaceError, "a bulk store of warp 0 read"),
        ("STORED: bar.sync 1;", RaceError, None),
    ],
)
def test_faults_in_a_bulk_store(line, error, message):
    assert line in STORE
    body = STORE.replace(line, "STORED:" if line.startswith("STORED") else "")
    for seed in SEEDS:
        with pytest.raises(error, match=message):
            bulk_store(seed, body)


# --- wgmma of a 64 × 16 and an 8 × 16 matrix, laid out in core matrices of 8 × 8.


def core_matrices(matrix):
    rows, k = matrix.shape
    return matrix.reshape(rows // 8, 8, k // 8, 8).transpose(0, 2, 1, 3).ravel()


def wgmma(seed, body=WGMMA):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, shape).astype(np.float16) for shape in ((64, 16), (8, 16)))
    out = np.zeros((4, 128), np.float32)
    operands = np.concatenate([core_matrices(a), core_matrices(b)])
    run(kernel(body, shared=2304), out.view(np.uint32), operands, threads=128, seed=seed)
    d = out.reshape(2, 2, 4, 8, 4).transpose(2, 0, 3, 4, 1).reshape(64, 8)  # half, pair, warp, row, column
    np.testing.assert_array_equal(d, a.astype(np.float32) @ b.astype(np.float32).T)


WAIT = "wgmma.wait_group.sync.aligned 0;"
FENCE = "wgmma.fence.sync.aligned;"
FENCED = "which other instructions of warp 0 have used since its last wgmma.fence"
PRODUCT = """wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16
    {%r8, %r9, %r10, %r11}, %rd11, %rd12, %p2, 1, 1, 0, 0; wgmma.commit_group.sync.aligned;"""
SMALLER = """wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32
    {%r8, %r9, %r10, %r11}, %rd11, %rd12, %p2, 1, 1; wgmma.commit_group.sync.aligned;"""
AS_A = """wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16
    {%r12, %r13, %r14, %r15}, {%r8, %r9, %r10, %r11}, %rd12, %p2, 1, 1, 0; wgmma.commit_group.sync.aligned;"""
HALF = "and.b32 %r3, %r31, 31; setp.ge.u32 %p3, %r3, 16; @%p3 bra OUT;"
EARLY = "no wgmma.wait_group"
WGMMA_FAULTS = {
    "no proxy fence": ("fence.proxy.async.shared::cta;", "", RaceError, "no fence.proxy.async"),
    "no barrier": ("bar.sync 0;", "", (RaceError, UninitializedRead), None),
    "result read before the wait": (WAIT, "", RaceError, EARLY),
    "result written before the wait": (WAIT, "mov.b32 %r9, 0;" + WAIT, RaceError, EARLY),
    "no commit": ("wgmma.commit_group.sync.aligned;", "", RaceError, EARLY),
    "operands overwritten": (WAIT, "st.shared.b32 [%r2], 0;" + WAIT, RaceError, "a wgmma of"),
    "operands nobody wrote": (
        "st.shared.v4.b32 [%r2+2048]",
        "st.global.v4.b32 [%rd0]",
        UninitializedRead,
        None,
    ),
    "half a warp": ("wgmma.fence.sync.aligned;", HALF, SimulationError, None),
    "no fence": (FENCE, "", RaceError, "no wgmma.fence before the first wgmma of warp 0"),
    "accumulator read behind the fence": (FENCE, FENCE + "add.s32 %r3, %r9, 1;", RaceError, r"uses %r9,"),
    "accumulator written behind the fence": (
        FENCE,
        FENCE + "ld.global.b32 %r11, [%rd10];",
        RaceError,
        FENCED,
    ),
    "... where a guard holds": (FENCE, FENCE + "@!%p2 add.s32 %r10, %r10, 1;", RaceError, FENCED),
    "A written behind the fence": (
        WAIT,
        f"{WAIT} {FENCE} add.s32 %r9, %r9, 0; {AS_A} {WAIT}",
        *(RaceError, "wgmma uses %r9, " + FENCED),
    ),
    "A written before the wait": (WAIT, f"{WAIT} {FENCE} {AS_A} mov.b32 %r9, 0; {WAIT}", RaceError, EARLY),
    "written between wgmmas": (
        WAIT,
        f"{WAIT} ld.global.b32 %r10, [%rd10]; {PRODUCT} {WAIT}",
        *(RaceError, "wgmma uses %r10, " + FENCED),
    ),
    "read between wgmmas": (
        WAIT,
        f"{WAIT} add.s32 %r3, %r8, 1; {PRODUCT}",
        RaceError,
        r"uses %r8, which other",
    ),
    "another shape": (WAIT, f"{SMALLER} {WAIT}", RaceError, "in another shape or as A, with no wgmma.fence"),
    "accumulator as A": (WAIT, f"{AS_A} {WAIT}", RaceError, "in another shape or as A, with no wgmma.fence"),
    "accumulator in flight as A": (
        WAIT,
        f"{FENCE} {AS_A} {WAIT}",
        RaceError,
        "reads %r8, .*no wgmma.wait_group",
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_wgmma(seed):
    wgmma(seed)


@pytest.mark.parametrize(
    ("where", "more"),
    [
        (WAIT, f"{PRODUCT} {WAIT}"),  # the same accumulators in the same shape: ordered without a fence
        (WAIT, f"{WAIT} add.s32 %r3, %r8, 1; {FENCE} {PRODUCT} {WAIT}"),
        (WAIT, f"{WAIT} {FENCE} {AS_A} {WAIT}"),
        (FENCE, f"{FENCE} mov.b32 %r8, 0; mov.b32 %r9, %r8;"),  # as compilers do
        (FENCE, f"{FENCE} @%p2 add.s32 %r10, %r10, 1;"),  # for no thread
    ],
)
def test_wgmma_that_need_no_other_fence(where, more):
    for seed in SEEDS:
        wgmma(seed, WGMMA.replace(where, more))


@pytest.mark.parametrize("fault", WGMMA_FAULTS)
def test_faults_around_a_wgmma(fault):
    assert_found(WGMMA_FAULTS[fault], WGMMA, lambda seed, body: wgmma(seed, body + "OUT:"))


# --- Clusters of two CTAs: each reads what the other has written.

CLUSTER = """
    mov.b32 %r1, smem; mov.u32 %r2, %cluster_ctarank; shl.b32 %r3, %r31, 2; add.s32 %r3, %r1, %r3;
    mad.lo.s32 %r4, %r2, 100, %r31; st.shared.b32 [%r3], %r4;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    xor.b32 %r5, %r2, 1; mapa.shared::cluster.u32 %r6, %r3, %r5;
    ld.shared::cluster.b32 %r7, [%r6];
    shl.b32 %r8, %r2, 7; cvt.u64.u32 %rd10, %r8; add.s64 %rd10, %rd10, %rd9; add.s64 %rd10, %rd0, %rd10;
    st.global.b32 [%rd10], %r7;
    {last}
"""


def cluster(seed, body):
    out = np.zeros((2, 32), np.uint32)
    run(kernel(body, shared=128, parameters=1), out, threads=32, grid=2, cluster=2, seed=seed)
    np.testing.assert_array_equal(out, np.stack([np.arange(100, 132), np.arange(32)]))


def test_distributed_shared_memory():
    for seed in SEEDS:
        cluster(seed, CLUSTER.format(last="barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"))


def test_a_missing_cluster_barrier():
    for seed in SEEDS:
        body = CLUSTER.replace("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;", "")
        with pytest.raises((RaceError, UninitializedRead)):
            cluster(seed, body.format(last=""))


def test_a_deadlock_of_a_cluster_barrier():
    stuck = "setp.eq.u32 %p1, %r2, 1; @%p1 bar.sync 3, 64; barrier.cluster.arrive; barrier.cluster.wait;"
    message = (
        r"(?s)warp 0 of CTA \(0, 0, 0\).*the cluster's barrier.*CTA \(1, 0, 0\).*barrier 3.*1 of 2 warps"
    )
    for seed in SEEDS:
        with pytest.raises(Deadlock, match=message):
            cluster(seed, CLUSTER.format(last=stuck))


def test_threads_that_have_ended_are_not_waited_for_by_a_cluster():
    leave = "setp.eq.u32 %p1, %r2, 1; @%p1 bra GONE; barrier.cluster.arrive; barrier.cluster.wait; GONE:"
    for seed in SEEDS:
        cluster(seed, CLUSTER.format(last=leave))


def test_an_aligned_barrier_is_for_whole_warps():
    body = "and.b32 %r3, %r31, 31; setp.lt.u32 %p1, %r3, 16; @%p1 {};"
    for barrier in ("bar.sync 0", "barrier.cta.sync.aligned 1", "barrier.cluster.arrive.aligned"):
        with pytest.raises(DivergenceError, match=r"without lanes \[16, .*31\] of warp 0"):
            run(kernel(body.format(barrier), parameters=1), np.zeros(1, np.uint32))
