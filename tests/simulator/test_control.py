"""Branches, loops, barriers, and what goes wrong with them."""

import numpy as np
import pytest
from run_ptx import kernel, run

from cutelab.simulator.errors import Deadlock, MemoryFault, RaceError, SimulationError, UninitializedRead

SEEDS = [None, *range(20)]


def result_of(body, threads=64, shared=1024, seed=None):
    """%r0 of each thread at the end of `body`."""
    out = np.full(threads, 0xDEADBEEF, np.uint32)
    store = "add.s64 %rd10, %rd0, %rd9; st.global.b32 [%rd10], %r0;"
    run(kernel(body + store, shared=shared, parameters=1), out, threads=threads, seed=seed)
    return out


COLLATZ = """
    mov.b32 %r0, 0; add.s32 %r1, %r31, 1;
    LOOP: setp.le.u32 %p1, %r1, 1; @%p1 bra END;
    add.s32 %r0, %r0, 1;
    and.b32 %r2, %r1, 1; setp.eq.b32 %p2, %r2, 0; @%p2 bra EVEN;
    mul.lo.s32 %r1, %r1, 3; add.s32 %r1, %r1, 1; bra LOOP;
    EVEN: shr.u32 %r1, %r1, 1; bra LOOP;
    END: activemask.b32 %r3; setp.eq.b32 %p3, %r3, -1; @%p3 bra GOOD; mov.b32 %r0, 777;
    GOOD:
"""


def collatz(n):
    steps = 0
    while n > 1:
        n, steps = (n // 2 if n % 2 == 0 else 3 * n + 1), steps + 1
    return steps


@pytest.mark.parametrize("seed", SEEDS)
def test_diverging_loops_end_and_the_warp_meets_again(seed):
    np.testing.assert_array_equal(result_of(COLLATZ, seed=seed), [collatz(n + 1) for n in range(64)])


def test_threads_that_end_early_are_not_waited_for():
    body = "mov.b32 %r0, 5; setp.lt.u32 %p1, %r31, 40; @%p1 bra ON; ret; ON:"
    np.testing.assert_array_equal(result_of(body), [5] * 40 + [0xDEADBEEF] * 24)


EXCHANGE = """
    shl.b32 %r1, %r31, 2; mov.b32 %r2, smem; add.s32 %r3, %r2, %r1;
    st.shared.b32 [%r3], %r31;
    {barrier}
    xor.b32 %r4, %r1, 128; add.s32 %r4, %r2, %r4;
    ld.shared.b32 %r0, [%r4];
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_barrier_orders_what_warps_exchange(seed):
    got = result_of(EXCHANGE.format(barrier="bar.sync 0;"), seed=seed)
    np.testing.assert_array_equal(got, np.arange(64) ^ 32)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missing_barrier_is_a_race_or_a_read_of_nothing(seed):
    with pytest.raises((RaceError, UninitializedRead), match=r"warp [01]"):
        result_of(EXCHANGE.format(barrier=""), seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_overwriting_what_others_still_read_is_a_race(seed):
    body = EXCHANGE.format(barrier="bar.sync 0;") + "st.shared.b32 [%r3], %r0;"
    with pytest.raises(RaceError, match="read"):
        result_of(body, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_deadlock_says_who_waits_where(seed):
    body = "mov.b32 %r0, 1; setp.lt.u32 %p1, %r31, 32; @%p1 bra SKIP; bar.sync 3, 64; SKIP:"
    with pytest.raises(
        Deadlock, match=r"warp 1 of CTA \(0, 0, 0\) \(32 lanes\) waits at barrier 3(.|\n)*32 of 64 threads"
    ):
        result_of(body, seed=seed)


def test_named_barriers_arrive_and_sync():
    body = """
        mov.b32 %r2, smem; setp.ge.u32 %p1, %r31, 32; @%p1 bra CONSUMER;
        st.shared.b32 [%r2], 42; bar.arrive 1, 64; mov.b32 %r0, 0; bra END;
        CONSUMER: bar.sync 1, 64; ld.shared.b32 %r0, [%r2];
        END:"""
    for seed in SEEDS:
        np.testing.assert_array_equal(
            result_of(body.replace("st.shared", "setp.eq.b32 %p2, %r31, 0; @%p2 st.shared"), seed=seed),
            [0] * 32 + [42] * 32,
        )


def test_a_barrier_with_two_counts_is_refused():
    body = (
        "mov.b32 %r0, 1; setp.lt.u32 %p1, %r31, 32; @%p1 bra A; bar.sync 1, 64; bra B; A: bar.sync 1, 96; B:"
    )
    with pytest.raises(SimulationError, match="expects"):
        result_of(body)


def test_unwritten_values_may_be_moved_but_not_used():
    load = (
        "mov.b32 %r2, smem; ld.shared.b32 %r1, [%r2]; add.s32 %r3, %r1, 1; mov.b32 %r4, %r3; mov.b32 %r0, 8;"
    )
    assert (result_of(load) == 8).all()
    with pytest.raises(UninitializedRead, match="warp 0 uses a value read from shared memory that nobody"):
        result_of(load + "mov.b32 %r0, %r4;")
    with pytest.raises(UninitializedRead):
        result_of(load + "setp.eq.b32 %p1, %r4, 3; @%p1 bra X; mov.b32 %r0, 1; X:")


@pytest.mark.parametrize(
    ("access", "message"),
    [
        (
            "ld.shared.b32 %r0, [%r2+1024];",
            "out of bounds: lane 0 accesses 4 bytes at byte 1024 of the shared memory",
        ),
        ("ld.shared.b32 %r0, [%r2+2];", "misaligned: lane 0 accesses 4 bytes"),
        ("ld.shared.v4.b32 {%r0, %r1, %r3, %r4}, [%r2+8];", "misaligned: lane 0 accesses 16 bytes"),
        ("ld.global.b32 %r0, [%rd0+256];", "out of bounds: nothing lies at the global address"),
        ("ld.global.b32 %r0, [%rd0+1];", "misaligned"),
        ("st.global.b32 [%rd0+-4], %r2;", "out of bounds"),
    ],
)
def test_accesses_out_of_bounds_and_misaligned(access, message):
    with pytest.raises(MemoryFault, match=message):
        result_of("mov.b32 %r0, 0; mov.b32 %r2, smem; " + access)


def test_a_report_names_the_instruction():
    with pytest.raises(
        MemoryFault, match=r"in CTA \(0, 0, 0\), PTX line \d+: .*ld\.shared\.b32 %r0, \[%r2\+1024\]"
    ):
        result_of("mov.b32 %r2, smem;\n ld.shared.b32 %r0, [%r2+1024];\n")
