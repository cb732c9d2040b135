"""Rings of stages: their counts against who arrives, and runs, some of them with wrong counts."""

from dataclasses import dataclass, replace
from itertools import product

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cutlass import Int32, pipeline
from cutlass.cute.runtime import from_dlpack
from run_hopper import WHERE, launch_of, run

from cutelab.copies import CopyError, TmaLoader, TmaRing, load_atom
from cutelab.layouts import swizzled_tensor, tma_tile
from cutelab.simulator import Debugger
from cutelab.simulator.errors import Deadlock, RaceError

WARP, WARPGROUP = 32, 128
CLUSTERS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (2, 4)]


# --- Counts


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("readers", [1, 4, 12])
def test_counts_are_those_of_who_arrives(cluster, readers):
    """Each CTA loads its slices of A and B into all CTAs of its row and column; each that reads a stage says
    so, warp by warp, to all who have written a part of it."""
    ctas = list(product(range(cluster[0]), range(cluster[1])))
    bytes_a, bytes_b = 4096, 2048
    ring = TmaRing(2, (bytes_a, bytes_b), readers, cluster)
    arriving = dict.fromkeys(ctas, 0)
    writers = {cta: set() for cta in ctas}
    for loading in ctas:
        for other in ctas:
            if other[0] == loading[0]:  # they share a tile of A, in a slice for each
                arriving[other] += bytes_a // cluster[1]
                writers[other].add(loading)
            if other[1] == loading[1]:
                arriving[other] += bytes_b // cluster[0]
                writers[other].add(loading)
    releases = dict.fromkeys(ctas, 0)
    for reading in ctas:
        for writer in writers[reading]:
            releases[writer] += readers
    assert set(arriving.values()) == {ring.transaction_bytes}
    assert set(releases.values()) == {ring.releases}
    assert ring.barrier_bytes == 2 * 2 * 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, (1024,), 4), "at least 1 stage, got 0"),
        ((-1, (1024,), 4), "at least 1 stage, got -1"),
        ((2, (1024,), 0), "that 0 warps read is never released: at least 1"),
        ((2, (1024, 24), 4), "multiples of 16 bytes, got a copy of 24"),
        ((2, (0,), 4), "multiples of 16 bytes, got a copy of 0"),
        ((2, (1024, -16), 4), "multiples of 16 bytes, got a copy of -16"),
        ((2, (), 4), "1 to 1048575 bytes, got 0 a stage"),
        ((2, (1 << 19, 1 << 19), 4), "1 to 1048575 bytes, got 1048576 a stage"),
        ((2, (1024,), 1 << 20), "1 to 1048575 arrivals, got 1048576 a stage"),
        ((2, (1024,), 1 << 18, (4, 1)), "1 to 1048575 arrivals, got 1048576 a stage"),
    ],
)
def test_counts_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(CopyError, match=message):
        TmaRing(*arguments)


# --- States


@cute.jit
def record_turns(ring: cutlass.Constexpr, turns: cute.Tensor, step: cutlass.Constexpr):
    producer, consumer = ring.producer_state(), ring.consumer_state()
    for turn in range(turns.shape[0]):
        turns[turn, 0], turns[turn, 1] = producer.index, producer.phase
        turns[turn, 2], turns[turn, 3] = consumer.index, consumer.phase
        for _ in cutlass.range_constexpr(step):
            producer.advance()
        consumer.advance(step)


@pytest.mark.parametrize("step", [1, 5])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
def test_states_go_round_the_ring(stages, step):
    """The consumer waits for phase 0 of each stage, then 1, then 0; the producer for the one before, which at
    first is none. Several steps at once are the same."""
    turns = np.full((4 * stages + 1, 4), -1, dtype=np.int32)
    record_turns(TmaRing(stages, (1024,), 1), from_dlpack(turns), step)
    passed = step * np.arange(len(turns))
    index, round_ = passed % stages, passed // stages
    np.testing.assert_array_equal(turns, np.stack([index, 1 - round_ % 2, index, round_ % 2], axis=1))


# --- Runs


@dataclass(frozen=True)
class Wrong(TmaRing):
    """A ring with wrong counts."""

    more_releases: int = 0
    more_bytes: int = 0

    @property
    def releases(self):
        return super().releases + self.more_releases

    @property
    def transaction_bytes(self):
        return super().transaction_bytes + self.more_bytes


@dataclass(frozen=True)
class Ring:
    """A producer warp brings k-tiles of A and B; consumer warpgroups read their rows of A and all of B.

    wrong: more releases, and more bytes, than the ring should count.
    """

    stages: int
    consumers: int
    cluster: tuple[int, int] = (1, 1)
    wrong: tuple[int, int] | None = None

    columns = 16
    rows_B = 32

    @property
    def rows_A(self):
        return 16 * self.consumers

    @property
    def ring(self):
        tiles = (2 * self.rows_A * self.columns, 2 * self.rows_B * self.columns)
        arguments = self.stages, tiles, self.consumers * WARPGROUP // WARP, self.cluster
        return Wrong(*arguments, *self.wrong) if self.wrong else TmaRing(*arguments)

    @cute.jit
    def launch(
        self, a: cute.Pointer, b: cute.Pointer, got_a: cute.Pointer, got_b: cute.Pointer, k: Int32, stream
    ):
        cluster_m, cluster_n = self.cluster
        size = cluster_m * cluster_n
        operands, results = [], []
        for x, got, rows, blocks, sharers in (
            (a, got_a, self.rows_A, cluster_m, cluster_n),
            (b, got_b, self.rows_B, cluster_n, cluster_m),
        ):
            ld = k * self.columns
            shape = (rows * blocks, ld, 1, 1)
            mX = cute.make_tensor(x, cute.make_layout(shape, stride=(cute.assume(ld, divby=16), 1, 0, 0)))
            operands += load_atom(mX, tma_tile((rows, self.columns), 1, 16), sharers)
            results.append(cute.make_tensor(got, cute.make_layout((rows, self.columns, k, size))))
        self.kernel(*operands, *results, k).launch(
            grid=(size, 1, 1),
            block=((1 + self.consumers) * WARPGROUP, 1, 1),
            cluster=(size, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        load_A: cute.CopyAtom,
        tmaA: cute.Tensor,
        load_B: cute.CopyAtom,
        tmaB: cute.Tensor,
        got_A: cute.Tensor,
        got_B: cute.Tensor,
        k: Int32,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARP)
        cta = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        cluster_m, cluster_n = self.cluster
        rank_m, rank_n = cta % cluster_m, cta // cluster_m
        layouts = [tma_tile((rows, self.columns, self.stages), 1, 16) for rows in (self.rows_A, self.rows_B)]
        bytes_A, bytes_B = (2 * cute.size(layout) for layout in layouts)
        size = bytes_A + bytes_B
        smem = cutlass.memory.SmemAllocator().allocate(size + self.ring.barrier_bytes, byte_alignment=1024)
        sA = swizzled_tensor(smem, layouts[0], cutlass.Float16)
        sB = swizzled_tensor(smem + bytes_A, layouts[1], cutlass.Float16)
        ring = self.ring.create(smem + size)
        pipeline.pipeline_init_arrive(cluster_shape_mn=self.cluster, is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=self.cluster)
        if warp == 0:
            row = sum(1 << (i * cluster_m) for i in range(cluster_n)) << rank_m
            column = ((1 << cluster_m) - 1) << (rank_n * cluster_m)
            A = TmaLoader.partition(load_A, tmaA, sA, cluster_n, rank_n, row if cluster_n > 1 else None)
            B = TmaLoader.partition(load_B, tmaB, sB, cluster_m, rank_m, column if cluster_m > 1 else None)
            self.produce(ring, A, B, (rank_m, rank_n), k)
        elif warp >= WARPGROUP // WARP:
            self.consume(ring, sA, sB, got_A[None, None, None, cta], got_B[None, None, None, cta], k)

    @cute.jit
    def produce(self, ring: pipeline.PipelineTmaAsync, A: TmaLoader, B: TmaLoader, rank: tuple, k: Int32):
        state = self.ring.producer_state()
        for k_tile in cutlass.range(k):
            ring.producer_acquire(state)
            full = ring.producer_get_barrier(state)
            A.load((rank[0], k_tile, 0, 0), state.index, full)
            B.load((rank[1], k_tile, 0, 0), state.index, full)
            state.advance()
        ring.producer_tail(state)

    @cute.jit
    def consume(
        self,
        ring: pipeline.PipelineTmaAsync,
        sA: cute.Tensor,
        sB: cute.Tensor,
        got_A: cute.Tensor,
        got_B: cute.Tensor,
        k: Int32,
    ):
        state = self.ring.consumer_state()
        thread = cute.arch.thread_idx()[0] - WARPGROUP
        for k_tile in cutlass.range(k):
            ring.consumer_wait(state)
            for i in cutlass.range_constexpr(2):  # of a warpgroup's 16 rows of 16 columns
                row, column = thread // 16 + i * 8 + thread // WARPGROUP * 8, thread % 16
                got_A[row, column, k_tile] = sA[row, column, state.index]
            for i in cutlass.range_constexpr(4):
                row, column = thread % WARPGROUP // 16 + i * 8, thread % 16
                value = sB[row, column, state.index]
                if thread < WARPGROUP:
                    got_B[row, column, k_tile] = value
            cute.arch.sync_warp()
            ring.consumer_release(state)
            state.advance()


def operands(case, k):
    """A and B, and the k-tiles that each CTA should get: (CTAs, k, columns, rows)."""
    cluster_m, cluster_n = case.cluster
    given, expected = [], []
    for rows, blocks, which in (
        (case.rows_A, cluster_m, lambda cta: cta % cluster_m),
        (case.rows_B, cluster_n, lambda cta: cta // cluster_m),
    ):
        shape = blocks, rows, k, case.columns
        x = torch.arange(blocks * rows * k * case.columns).remainder(2039).half().reshape(shape)
        given.append(x.reshape(blocks * rows, k * case.columns))
        chosen = [x[which(cta)].permute(1, 2, 0) for cta in range(cluster_m * cluster_n)]
        expected.append(torch.stack(chosen).contiguous())
    return given, expected


def run_ring(case, k, seed=None, device="cpu"):
    given, expected = operands(case, k)
    poison = [torch.full_like(x, torch.nan) for x in expected]
    _, _, *got = run(case, *given, *poison, k, device=device, seed=seed)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


RINGS = [Ring(3, 1), Ring(1, 2), Ring(2, 3)]
SHARED = [Ring(2, 2, (2, 1)), Ring(3, 1, (1, 2)), Ring(2, 1, (2, 2))]


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("case", [*RINGS, *SHARED], ids=str)
def test_what_the_producer_brings_the_consumers_get(case, device):
    for k in (0, 1, case.stages - 1, case.stages, case.stages + 1, 2 * case.stages + 1):
        run_ring(case, k, device=device)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", [RINGS[0], RINGS[2], SHARED[2]], ids=str)
def test_in_every_order_of_warps(case, seed):
    run_ring(case, 2 * case.stages + 1, seed)


def executed(debugger, name):
    """The last operand of each instruction of that name that one thread executes, CTA by CTA."""
    found = {}
    while place := debugger.run_until(name):
        if len(place.threads) == 1:
            found.setdefault(place.cta, []).append(int(debugger.operands(place)[-1].values.item()))
    return found


@pytest.mark.parametrize("case", [RINGS[2], SHARED[2]], ids=str)
def test_mbarriers_get_the_counts(case):
    given, expected = operands(case, 5)
    launch = launch_of(case, *given, *expected, 5)
    counts = executed(Debugger(launch), "mbarrier.init")
    assert len(counts) == case.cluster[0] * case.cluster[1]
    for of_cta in counts.values():
        assert sorted(of_cta) == sorted([1, case.ring.releases] * case.stages)
    announced = executed(Debugger(launch), "mbarrier.arrive.expect_tx")
    assert len(announced) == case.cluster[0] * case.cluster[1]
    assert all(of_cta == [case.ring.transaction_bytes] * 5 for of_cta in announced.values())


FAULTS = {
    "a release that never comes": (RINGS[0], (1, 0), Deadlock, "4 of 5 arrivals"),
    "a release too few": (RINGS[0], (-1, 0), RaceError, "a bulk load .* which warp .* read"),
    "bytes that never come": (RINGS[0], (0, 16), Deadlock, "16 bytes still to come"),
    "bytes too few": (RINGS[0], (0, -16), Deadlock, "16 bytes more than expected"),
    "a release that never comes, in a cluster": (SHARED[2], (1, 0), Deadlock, "12 of 13 arrivals"),
    "a release too few, in a cluster": (SHARED[2], (-1, 0), RaceError, "a bulk load .* which warp .* read"),
    "bytes that never come, in a cluster": (SHARED[2], (0, 16), Deadlock, "16 bytes still to come"),
    "releases for a CTA alone, in a cluster": (SHARED[0], (-8, 0), (RaceError, Deadlock), None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_counts_are_found(fault):
    case, wrong, error, message = FAULTS[fault]
    faulty = replace(case, wrong=wrong)
    for seed in (None, 0, 1):
        with pytest.raises(error, match=message):
            run_ring(faulty, 2 * case.stages + 1, seed)
