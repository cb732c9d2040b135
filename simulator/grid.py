"""Runs the clusters of a grid: which are resident at a time, who goes on, and what all of them wait for.

A cluster runs to its end before the next is set up, unless it looks again and again for what others may do:
then the next one starts, as long as there is room on the GPU, and they go on in turn. Where chance decides,
and CTAs may wait for each other, the resident ones go on a few steps each.

What says that nobody will ever go on is a rule of thumb: all resident clusters have looked hundreds of times,
or executed millions of segments, while nothing changed in global memory and at no barrier. A kernel that
gives up waiting after more attempts than that is reported too.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from math import inf, prod

import numpy as np

from cutelab.simulator.bank_conflicts import BankConflicts
from cutelab.simulator.cta import WARP, Cta
from cutelab.simulator.engines import grid_points
from cutelab.simulator.errors import Deadlock
from cutelab.simulator.global_races import GlobalRaces, line_of
from cutelab.simulator.gpus import Gpu
from cutelab.simulator.machine import Runner
from cutelab.simulator.memory import GlobalMemory
from cutelab.simulator.races import Order
from cutelab.simulator.translate import Program

TURN_POLLS, TURN_STEPS = 64, 200_000
"""After these a cluster that is run in order makes room for others."""

FEW_STEPS = 64
"""At most so many segments at a time where chance decides."""

QUIET_POLLS, QUIET_POLLS_IN_ALL, QUIET_STEPS = 128, 4096, 2_000_000
"""Of every resident cluster, or the second of all together if they are few: then nobody will ever go on."""

SHOWN = 8
"""So many waiting warps are named in a report."""

Three = tuple[int, int, int]


class Grid:
    """A launch that is about to run. Clusters have numbers, from 0, x fastest."""

    order_type: type[Order] = Order
    cta_type: type[Cta] = Cta
    runner_type: type[Runner] = Runner

    def __init__(
        self,
        program: Program,
        grid: Three,
        block: Three,
        shared_bytes: int,
        parameters: bytes,
        memory: GlobalMemory,
        seed: int | None,
        cluster: Three,
        banks: BankConflicts | None,
        gpu: Gpu,
    ) -> None:
        self.program, self.shape, self.block, self.shared_bytes = program, grid, block, shared_bytes
        self.parameters, self.memory, self.seed, self.cluster = parameters, memory, seed, cluster
        self.banks, self.gpu = banks, gpu
        clusters = (grid[0] // cluster[0], grid[1] // cluster[1], grid[2] // cluster[2])
        self.clusters = grid_points(clusters)
        self.warps = -(-prod(block) // WARP)  # of a CTA
        self.room = gpu.resident_ctas(prod(block), program.shared_bytes + shared_bytes)
        memory.races = GlobalRaces(memory, program.global_granule, self.warps, clusters, cluster)
        mixed = seed is not None and program.communicates
        self.random = np.random.default_rng(seed) if mixed else None
        self.resident = deque[Runner]()

    def start(self, number: int) -> Runner:
        """Sets up the CTAs of a cluster."""
        x, y, z = self.clusters[number]
        cluster = self.cluster
        order = self.order_type(self.warps * prod(cluster), number + 1)
        ctas = []
        for rank, inside in enumerate(grid_points(cluster)):
            index = x * cluster[0] + inside[0], y * cluster[1] + inside[1], z * cluster[2] + inside[2]
            size = self.shape, self.block, self.shared_bytes
            cta = self.cta_type(
                self.program, index, *size, self.parameters, self.memory, cluster, order, rank
            )
            cta.multiprocessors = self.gpu.multiprocessors
            cta.multiprocessor = (number * prod(cluster) + rank) % cta.multiprocessors
            ctas.append(cta)
        for cta in ctas:
            cta.peers, cta.banks = ctas, self.banks
        return self.runner_type(ctas, self.seed)

    def run(self, numbers: Iterable[int]) -> None:
        """Runs these clusters, and those that are resident already, to their ends. Raises SimulationError."""
        for runner, steps, polls in self.turns(numbers):
            runner.run(steps, polls)

    def turns(self, numbers: Iterable[int]) -> Iterator[tuple[Runner, float, float]]:
        """Whose turn it is, and how long: it has had it when the next one is asked for. Raises Deadlock."""
        waiting, resident = deque(numbers), self.resident
        room = max(self.room // prod(self.cluster), 1)
        quiet = Quiet()
        while waiting or resident:
            startable = bool(waiting) and len(resident) < room
            if startable and (self.random is None or not resident or self.random.random() < 0.5):
                runner = self.start(waiting.popleft())
            elif self.random is None:
                runner = resident.popleft()
            else:
                resident.rotate(int(self.random.integers(len(resident))))
                runner = resident.popleft()
            if self.random is None:
                yield runner, TURN_STEPS, TURN_POLLS
            else:
                yield runner, int(self.random.integers(1, FEW_STEPS)), inf
            if runner.fragments:
                resident.append(runner)
                if quiet.too_long(runner, resident, self.memory) and not (waiting and len(resident) < room):
                    raise Deadlock(self.explain(resident, len(waiting)))

    def explain(self, resident: Iterable[Runner], waiting: int) -> str:
        """What the resident clusters wait for."""
        looking, others, short = [], [], []
        for runner in resident:
            polling = runner.ctas[0].polling
            for fragment in runner.fragments:
                who = f"  warp {fragment.warp} of CTA {fragment.cta.index}"
                if not fragment.ready:
                    others.append(f"{who} waits at {fragment.reason}")
                elif fragment.number in polling:
                    looking.append(f"{who} looks again and again at {line_of(polling[fragment.number])}")
                else:
                    at = self.program.segments[fragment.segment].instructions[0]
                    others.append(f"{who} goes on without an end in sight, now at {line_of(at)}")
            short += [f"  {line}" for pool in runner.pools for line in pool.shortages()]
        found = [*dict.fromkeys(looking + others)]  # lanes of a warp that have parted say the same
        lines = ["no CTA can go on: all those that are resident wait for what nobody does any more:"]
        lines += found[:SHOWN]
        if len(found) > SHOWN:
            lines.append(f"  … and {len(found) - SHOWN} more")
        lines += short[:SHOWN]
        if waiting:
            ctas = waiting * prod(self.cluster)
            lines.append(
                f"  {ctas} CTAs have not started: there is room for {self.room} at a time on "
                f"{self.gpu.multiprocessors} multiprocessors, and those must not wait for the others"
            )
        return "\n".join(lines)


def run_grid(
    program: Program,
    grid: Three,
    block: Three,
    shared_bytes: int,
    parameters: bytes,
    memory: GlobalMemory,
    seed: int | None = None,
    cluster: Three = (1, 1, 1),
    banks: BankConflicts | None = None,
    gpu: Gpu | None = None,
) -> None:
    """Runs all clusters of a grid in this process, on `gpu`, by default an H100. Raises SimulationError."""
    gpu = gpu or Gpu.named("sm_90a")
    launched = Grid(program, grid, block, shared_bytes, parameters, memory, seed, cluster, banks, gpu)
    launched.run(range(len(launched.clusters)))


class Quiet:
    """For how long nothing has changed."""

    def __init__(self) -> None:
        self.state: object = None
        self.since: dict[Runner, tuple[int, int]] = {}  # steps and polls at that time

    def too_long(self, runner: Runner, resident: Iterable[Runner], memory: GlobalMemory) -> bool:
        """Whether so long that no resident cluster will go on; to be asked after the turn of `runner`."""
        resident = list(resident)
        state = memory.changes, {each: each.ctas[0].events for each in resident}
        if state != self.state:
            self.state = state
            self.since = {each: (each.steps, each.ctas[0].polls) for each in resident}
            return False
        polls = max(QUIET_POLLS, QUIET_POLLS_IN_ALL // len(resident))

        def stuck(each: Runner) -> bool:
            since = self.since[each]
            return each.ctas[0].polls - since[1] >= polls or each.steps - since[0] >= QUIET_STEPS

        return stuck(runner) and all(map(stuck, resident))
