"""CTAs that wait for each other, that can't all be resident, and that run in several processes."""

import dataclasses
import os
import re
import threading
from functools import partial

import numpy as np
import pytest
import torch
from run_ptx import kernel, launch_of, run

from cutelab import simulator
from cutelab.kernels import gemm
from cutelab.simulator import grid, workers
from cutelab.simulator.bank_conflicts import BankConflicts
from cutelab.simulator.errors import Deadlock, MemoryFault, RaceError
from cutelab.simulator.gpus import Gpu
from cutelab.simulator.tensormap import TensorMap, encode

SEEDS = [None, *range(20)]

# --- CTA 0 waits for a flag that the last CTA sets, and hands its value on.

FLAG = """
    mov.u32 %r1, %ctaid.x; setp.ne.u32 %p1, %r31, 0; @%p1 bra END;
    mov.u32 %r2, %nctaid.x; sub.u32 %r2, %r2, 1;
    setp.eq.u32 %p2, %r1, %r2; @%p2 bra SET; setp.ne.u32 %p3, %r1, 0; @%p3 bra END;
    WAIT: {wait} setp.eq.u32 %p4, %r3, 0; @%p4 bra WAIT;
    {behind} ld.global.b32 %r4, [%rd1+4]; st.global.b32 [%rd0], %r4; bra END;
    SET: st.global.b32 [%rd1+4], 42; {before} {set}
    END:
"""
RELEASES = {
    "acquire and release": {
        "wait": "ld.acquire.gpu.global.b32 %r3, [%rd1];",
        "set": "st.release.gpu.global.b32 [%rd1], 1;",
    },
    "an atomic as a look": {
        "wait": "atom.acquire.gpu.global.add.u32 %r3, [%rd1], 0;",
        "set": "red.release.gpu.global.add.u32 [%rd1], 1;",
    },
    "relaxed with fences": {
        "wait": "ld.relaxed.gpu.global.b32 %r3, [%rd1];",
        "behind": "fence.acq_rel.gpu;",
        "before": "fence.acq_rel.gpu;",
        "set": "st.relaxed.gpu.global.b32 [%rd1], 1;",
    },
    "volatile with membar": {
        "wait": "ld.volatile.global.b32 %r3, [%rd1];",
        "behind": "membar.gl;",
        "before": "membar.gl;",
        "set": "st.volatile.global.b32 [%rd1], 1;",
    },
}


def flag(seed, grid=3, gpu=None, **lines):
    out, place = np.zeros(1, np.uint32), np.zeros(2, np.uint32)
    body = FLAG.format(**{"behind": "", "before": ""} | lines)
    run(kernel(body), out, place, grid=grid, seed=seed, gpu=gpu)
    assert out[0] == 42


@pytest.mark.parametrize("how", RELEASES)
def test_a_cta_waits_for_a_later_one(how):
    for seed in SEEDS:
        flag(seed, **RELEASES[how])


def test_waiting_for_a_cta_that_never_fits():
    gpu = Gpu.named("sm_90a", multiprocessors=1)
    how = RELEASES["acquire and release"]
    flag(None, grid=gpu.resident_ctas(32, 0), gpu=gpu, **how)
    message = (
        r"(?s)no CTA can go on.*warp 0 of CTA \(0, 0, 0\) looks again and again at PTX line \d+: "
        r"WAIT: ld\.acquire.*31 CTAs have not started: there is room for 1 at a time on 1 multiprocessors"
    )
    for seed in SEEDS[:5]:
        with pytest.raises(Deadlock, match=message):
            out, place = np.zeros(1, np.uint32), np.zeros(2, np.uint32)
            body = FLAG.format(behind="", before="", **how)
            run(kernel(body), out, place, grid=32, seed=seed, gpu=gpu, shared=200 * 1024)


def test_waiting_for_a_flag_that_nobody_sets():
    how = RELEASES["acquire and release"] | {"set": ""}
    for seed in SEEDS[:5]:
        with pytest.raises(
            Deadlock, match=r"CTA \(0, 0, 0\) looks again and again at PTX line \d+: WAIT: ld"
        ):
            flag(seed, **how)


def test_a_lock_that_is_never_given_back():
    body = """setp.ne.u32 %p1, %r31, 0; @%p1 bra END;
              TAKE: atom.acquire.gpu.global.cas.b32 %r1, [%rd0], 0, 1; setp.ne.u32 %p2, %r1, 0; @%p2 bra TAKE;
              END:"""
    for seed in SEEDS[:3]:
        with pytest.raises(
            Deadlock, match=r"CTA \(\d, 0, 0\) looks again and again at PTX line \d+: TAKE: atom"
        ):
            run(kernel(body, parameters=1), np.zeros(1, np.uint32), grid=3, seed=seed)


LOCK = """
    setp.ne.u32 %p1, %r31, 0; @%p1 bra END;
    TAKE: atom.acquire.gpu.global.cas.b32 %r1, [%rd1], 0, 1; setp.ne.u32 %p2, %r1, 0; @%p2 bra TAKE;
    ld.global.b32 %r2, [%rd0]; add.u32 %r2, %r2, 1; st.global.b32 [%rd0], %r2;
    st.release.gpu.global.b32 [%rd1], 0;
    END:
"""


def test_a_lock():
    for seed in SEEDS:
        out = np.zeros(1, np.uint32)
        run(kernel(LOCK), out, np.zeros(1, np.uint32), grid=5, seed=seed)
        assert out[0] == 5


# --- Split-K: each CTA adds its part in turn, and the last one has the sum.

SPLIT_K = """
    mov.u32 %r1, %ctaid.x; add.s64 %rd10, %rd0, %rd9;
    mad.lo.u32 %r2, %r1, 64, %r31;
    {wait} bar.sync 0;
    ld.global.b32 %r4, [%rd10]; add.u32 %r4, %r4, %r2; st.global.b32 [%rd10], %r4;
    bar.sync 0; {release}
"""
TURN = """setp.ne.u32 %p1, %r31, 0; @%p1 bra TURN;
          WAIT: ld.acquire.gpu.global.b32 %r3, [%rd1]; setp.ne.u32 %p2, %r3, %r1; @%p2 bra WAIT;
          TURN:"""
NEXT = """@%p1 bra END; add.u32 %r5, %r1, 1; st.release.gpu.global.b32 [%rd1], %r5; END:"""


def split_k(seed, wait=TURN, release=NEXT, grid=4):
    out = np.zeros(64, np.uint32)
    body = SPLIT_K.format(wait=wait, release=release)
    run(kernel(body), out, np.zeros(1, np.uint32), threads=64, grid=grid, seed=seed)
    np.testing.assert_array_equal(out, sum(64 * cta + np.arange(64) for cta in range(grid)))


def test_a_split_k_semaphore():
    for seed in SEEDS:
        split_k(seed)


@pytest.mark.parametrize(
    "fault",
    [
        {"wait": ""},
        {"wait": TURN.replace("ld.acquire", "ld.relaxed")},
        {"release": NEXT.replace("st.release", "st.relaxed")},
        {"release": NEXT.replace("st.release.gpu", "st.release.cta")},
    ],
    ids=["nobody waits", "relaxed wait", "relaxed release", "scope too small"],
)
def test_faults_in_a_split_k_semaphore(fault):
    for seed in SEEDS:
        with pytest.raises((RaceError, Deadlock)):
            split_k(seed, **{"release": NEXT if "wait" not in fault or fault["wait"] else ""} | fault)


def test_clusters_wait_for_clusters():
    body = """mov.u32 %r1, %clusterid.x; setp.ne.u32 %p1, %r31, 0; @%p1 bra MEET;
              setp.eq.u32 %p2, %r1, 1; @%p2 bra SET;
              WAIT: ld.acquire.gpu.global.b32 %r3, [%rd1]; setp.lt.u32 %p3, %r3, 2; @%p3 bra WAIT;
              bra MEET; SET: red.release.gpu.global.add.u32 [%rd1], 1;
              MEET: barrier.cluster.arrive; barrier.cluster.wait;
              mov.u32 %r4, %ctaid.x; mul.wide.u32 %rd10, %r4, 128; add.s64 %rd10, %rd10, %rd9;
              add.s64 %rd10, %rd10, %rd0; st.global.b32 [%rd10], %r4;"""
    for seed in SEEDS:
        out = np.zeros((4, 32), np.uint32)
        run(kernel(body), out, np.zeros(1, np.uint32), grid=4, cluster=2, seed=seed)
        np.testing.assert_array_equal(out, np.arange(4)[:, None].repeat(32, 1))


def test_how_many_ctas_are_resident():
    gpu = Gpu.named("sm_90a", multiprocessors=2)
    for threads, shared, each in ((32, 0, 32), (33, 0, 32), (1024, 0, 2), (384, 0, 5), (128, 227 << 10, 1)):
        assert gpu.resident_ctas(threads, shared) == 2 * each
    assert gpu.resident_ctas(128, 113 << 10) == 4
    assert gpu.resident_ctas(128, (113 << 10) + 1) == 2


# --- Processes

SQUARES = """
    mov.u32 %r1, %ctaid.x; mad.lo.u32 %r2, %r1, 32, %r31; mul.lo.u32 %r3, %r2, %r2;
    mul.wide.u32 %rd10, %r2, 4; add.s64 %rd10, %rd0, %rd10; {}
    st.global.b32 [%rd10], %r3;
"""


def squares(line, out, processes, seed=None):
    launch = launch_of(kernel(SQUARES.format(line), parameters=1), out, grid=out.size // 32)
    simulator.execute(launch, seed, processes=processes)


@pytest.fixture
def always(monkeypatch):
    """Processes are used however short the launch is; afterwards none is left."""
    forks, fork = [], os.fork

    def counted():
        pid = fork()
        if pid:
            forks.append(pid)
        return pid

    monkeypatch.setattr(workers, "SHORTEST", 0.0)
    monkeypatch.setattr(os, "fork", counted)
    yield forks
    for pid in forks:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, 0)


def test_processes_give_the_same_result(always):
    for seed in (None, 3):
        out = np.zeros(640, np.uint32)
        squares("", out, 3, seed)
        np.testing.assert_array_equal(out, np.arange(640, dtype=np.uint32) ** 2)
    assert len(always) == 6


def test_processes_from_a_thread(always):
    out = np.zeros(640, np.uint32)
    thread = threading.Thread(target=squares, args=("", out, 2))
    thread.start()
    thread.join()
    np.testing.assert_array_equal(out, np.arange(640, dtype=np.uint32) ** 2)
    assert always


def outcome(fault, processes):
    out = np.zeros(640, np.uint32)
    with pytest.raises(simulator.SimulationError) as failure:
        squares(fault, out, processes)
    return type(failure.value), re.sub("0x[0-9a-f]+", "", str(failure.value)), out.tolist()


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("setp.eq.u32 %p1, %r1, 11; @%p1 add.s64 %rd10, %rd10, 2;", MemoryFault),
        ("setp.ge.u32 %p1, %r1, 9; @%p1 add.s64 %rd10, %rd10, 65536;", MemoryFault),
        ("setp.eq.u32 %p1, %r1, 13; @%p1 sub.s64 %rd10, %rd10, 256;", RaceError),
        ("setp.eq.u32 %p1, %r1, 13; @%p1 mov.b64 %rd10, %rd0;", RaceError),
        (
            "setp.eq.u32 %p1, %r1, 5; @%p1 bra ELSE; bra ON; ELSE: ld.global.b32 %r4, [%rd0+2400]; ON:",
            RaceError,
        ),
        ("mov.b64 %rd10, %rd0;", RaceError),
        ("setp.eq.u32 %p1, %r1, 7; @%p1 bar.sync 1, 64;", Deadlock),
    ],
    ids=[
        "misaligned",
        "out of bounds",
        "another's place",
        "that of the first",
        "read by another",
        "all the same place",
        "stuck at a barrier",
    ],
)
def test_processes_report_what_one_process_does(fault, error, always):
    one, many = (outcome(fault, processes) for processes in (1, 3))
    assert one[0] is error
    assert one == many
    assert always


def test_the_first_cta_is_stuck():
    one, many = (outcome("bar.sync 1, 64;", processes) for processes in (1, 3))
    assert one[0] is Deadlock
    assert one == many


@pytest.mark.parametrize("processes", [1, 3])
def test_a_plain_flag_of_a_later_cta(processes, monkeypatch):
    """A race, though the CTA that waits gets nowhere before the other one starts."""
    monkeypatch.setattr(grid, "TURN_STEPS", 500)
    monkeypatch.setattr(grid, "QUIET_STEPS", 2000)
    body = """mov.u32 %r1, %ctaid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra SET;
              WAIT: ld.global.b32 %r2, [%rd0]; setp.eq.u32 %p2, %r2, 0; @%p2 bra WAIT; bra END;
              SET: setp.ne.u32 %p1, %r1, 3; @%p1 bra END; st.global.b32 [%rd0], 1; END:"""
    with pytest.raises(
        RaceError, match=r"CTA \(3, 0, 0\) writes byte 0 of array 0, which warp 0 of CTA \(0, 0, 0\)"
    ):
        launch = launch_of(kernel(body, parameters=1), np.zeros(1, np.uint32), grid=4)
        simulator.execute(launch, processes=processes)


def test_what_may_wait_for_others_stays_in_one_process(always):
    out = np.zeros(640, np.uint32)
    squares("red.global.add.u32 [%rd10], 0;", out, 3)
    assert not always


BOX = """
    mov.b32 %r1, smem; mov.u32 %r2, %ctaid.x; mul.wide.u32 %rd10, %r2, 32; add.s64 %rd10, %rd10, %rd9;
    add.s64 %rd10, %rd2, %rd10; shl.b32 %r3, %r31, 2; add.s32 %r3, %r1, %r3;
    ld.global.b32 %r4, [%rd10]; st.shared.b32 [%r3], %r4; fence.proxy.async.shared::cta; bar.sync 0;
    setp.ne.u32 %p1, %r31, 0; @%p1 bra END;
    cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {0, %r2}], [%r1];
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:
"""


def test_boxes_from_several_processes(always):
    """Of 13 halves a row, so that words are written by halves; what lies between the rows stays as it is."""
    space, values = np.full(128, -1, np.float16), np.arange(96, dtype=np.float16).reshape(6, 16)
    out = space[-space.ctypes.data // 2 % 8 :][:96].reshape(6, 16)
    described = encode(TensorMap(out.ctypes.data, "f16", 2, (13, 6), (2, 32), (16, 1), (1, 1)))
    packed = np.zeros(192, np.uint8)
    packed = packed[-packed.ctypes.data % 64 :][:128]
    packed[:] = np.frombuffer(described, np.uint8)
    text = kernel(BOX, shared=128, parameters=3).replace(".align 16 .b8 smem", ".align 128 .b8 smem")
    launch = launch_of(text, out, packed, values, threads=8, grid=6)
    simulator.execute(launch, processes=3)
    np.testing.assert_array_equal(out, np.where(np.arange(16) < 13, values, -1))
    assert always


def test_a_gemm_in_processes(always):
    a, b = torch.randn(200, 96).bfloat16(), torch.randn(96, 232).bfloat16()
    results, counts = [], []
    for processes in (1, 2, 3):
        banks = BankConflicts()
        with simulator.gpu("sm_80", execute=partial(simulator.execute, banks=banks, processes=processes)):
            results.append(gemm(a, b))
        counts.append({each.line: dataclasses.astuple(cost) for each, cost in banks.costs.items()})
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert counts[0] == counts[1] == counts[2]
    assert len(always) == 5


def test_the_number_of_processes(monkeypatch):
    monkeypatch.setenv("CUTELAB_PROCESSES", "3")
    assert workers.available(None) == 3
    assert workers.available(2) == 2
    monkeypatch.setenv("CUTELAB_PROCESSES", "many")
    with pytest.raises(
        ValueError, match="CUTELAB_PROCESSES is 'many'; it must be a whole number of at least 1"
    ):
        workers.available(None)
    with pytest.raises(ValueError, match="processes is 0"):
        workers.available(0)
    monkeypatch.delenv("CUTELAB_PROCESSES")
    assert workers.available(None) == len(os.sched_getaffinity(0))
