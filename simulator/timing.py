"""Executes a cluster in the order of time, and writes down who did what when: `simulator.trace(launch)`.

Time is one more slot of the clocks of `races.Order`: what a warp publishes carries the time of its arrival,
what a copy completes the time of its end, and whoever waits for several takes the latest, by the same maximum
that orders memory. The warp that can issue first goes next. See `costs` for what takes how long.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from cutelab.simulator.bank_conflicts import BankConflicts
from cutelab.simulator.costs import SUB_CORES, Costs, Work, shape, work_of
from cutelab.simulator.cta import Cta
from cutelab.simulator.errors import SimulationError
from cutelab.simulator.execution import grid_of, program_of
from cutelab.simulator.grid import Grid, Three
from cutelab.simulator.machine import Fragment, Runner
from cutelab.simulator.memory import GlobalMemory
from cutelab.simulator.operands import Operands
from cutelab.simulator.ptx import Instruction, Vector
from cutelab.simulator.races import BULK_LOAD, BULK_STORE, BULK_WRITE, CP_ASYNC, WGMMA, Clock, Order
from cutelab.simulator.standin import Launch
from cutelab.simulator.timeline import Recorder, Timeline
from cutelab.simulator.translate import BARRIER, CLUSTER, NO_RESULT, TRY_WAIT, Segment

SECTOR = 32
"""Bytes that global memory is read and written in."""

TENSOR_CORES = tuple(f"tensor core {n}" for n in range(SUB_CORES))


def trace(launch: Launch, *, cta: Three = (0, 0, 0), costs: Costs | None = None) -> Timeline:
    """Runs the cluster of one CTA of a launch, with all checks, and returns what happened when.

    Each CTA of the cluster has a multiprocessor for itself. costs: by default those of the launch's GPU. The
    other CTAs are not run: only what this cluster writes is written. Raises SimulationError for what the
    kernel does wrong, and for a CTA that the grid doesn't have.
    """
    grid = grid_of(launch, program_of(launch.ptx, launch.kernel, stepwise=True), grid_type=TimedGrid)
    assert isinstance(grid, TimedGrid)
    if len(cta) != 3 or not all(0 <= n < size for n, size in zip(cta, launch.grid, strict=True)):
        last = tuple(size - 1 for size in launch.grid)
        raise SimulationError(f"there is no CTA {cta} to trace: the grid has (0, 0, 0) … {last}")
    x, y, z = (n // size for n, size in zip(cta, launch.cluster, strict=True))
    grid.costs = costs or Costs.of(launch.gpu.arch)
    grid.run([grid.clusters.index((x, y, z))])
    return grid.recorder.timeline(launch.kernel, launch.gpu.arch, grid.costs)


class TimedOrder(Order):
    """With a last slot in each row: cycles. `ends` has when an engine's work so far is done."""

    def __init__(self, warps: int, cluster: int = 1) -> None:
        super().__init__(warps, cluster)
        slot = np.zeros((len(self.seen), 1), np.int32)
        self.seen, self.visible = np.hstack([self.seen, slot]), np.hstack([self.visible, slot])
        self.ends: dict[tuple[int, int], int] = {}  # by kind and warp
        self.groups: dict[tuple[int, int], list[int]] = {}  # when each was done

    def time(self, warp: int) -> int:
        return int(self.seen[warp, -1])

    def complete(self, kind: int, warp: int) -> Clock:
        clock = super().complete(kind, warp)
        clock.seen[-1] = self.ends.get((kind, warp), 0)
        return clock

    def commit(self, kind: int, warp: int) -> None:
        super().commit(kind, warp)
        self.groups.setdefault((kind, warp), []).append(self.ends.get((kind, warp), 0))

    def wait(self, kind: int, warp: int, groups: int, doer: int) -> int:
        committed = self.groups.get((kind, warp), [])
        for end in committed[: len(committed) - groups]:
            self.seen[warp, -1] = max(self.time(warp), end)
        return super().wait(kind, warp, groups, doer)


class Engine:
    """Does one thing at a time: when it is free, and a row of the timeline."""

    def __init__(self, recorder: Recorder, cta: Three, name: str) -> None:
        self.recorder, self.cta, self.name, self.free = recorder, cta, name, 0.0

    def take(self, start: float, cycles: float, kind: str, what: Instruction) -> float:
        """Does something that takes so long, from `start` on or as soon as it is free; the end."""
        start = max(start, self.free)
        self.free = start + cycles
        self.recorder.engine(self.cta, self.name, kind, what, start, self.free)
        return self.free


class TimedCta(Cta):
    """Notes what the instruction being executed asks of memories and engines."""

    order: TimedOrder

    def begin_at(self, recorder: Recorder, costs: Costs) -> None:
        """Before anything is executed."""
        self.costs, self.recorder, self.now = costs, recorder, 0
        self.engines: dict[str, Engine] = {}
        self.schedulers = [0] * SUB_CORES  # when each can issue again
        self.counter = BankConflicts()
        self.wavefronts = self.loaded = self.stored = 0
        self.instruction: Any = None
        self.group: dict[int, int] = {}  # groups of cp.async that each warp has committed

    def engine(self, name: str) -> Engine:
        if name not in self.engines:
            self.engines[name] = Engine(self.recorder, self.index, name)
        return self.engines[name]

    def start_instruction(self, instruction: Instruction, now: int) -> None:
        self.instruction, self.now = instruction, now
        self.wavefronts = self.loaded = self.stored = 0

    def clock(self) -> int:
        return self.now

    # --- Shared memory

    def count_banks(self, kind: str, size: int, threads: np.ndarray, addresses: np.ndarray) -> None:
        super().count_banks(kind, size, threads, addresses)
        if kind == "cp.async":
            return  # its writes come later, when there is room for them
        row = np.full(32, -1, np.int64)
        row[threads % 32] = addresses
        self.wavefronts += self.counter.of_warp(kind, size, row)[0]

    # --- Global memory

    def load(self, space: str, addresses: np.ndarray, dtype: Any, count: int, s: Any) -> np.ndarray:
        loaded = super().load(space, addresses, dtype, count, s)
        self.loaded += self.sectors(space, addresses, loaded[0].nbytes, s)
        return loaded

    def load_ordered(self, space: str, addresses: np.ndarray, dtype: Any, count: int, s: Any) -> np.ndarray:
        loaded = super().load_ordered(space, addresses, dtype, count, s)
        self.loaded += self.sectors(space, addresses, loaded[0].nbytes, s)
        return loaded

    def store(self, space: str, addresses: np.ndarray, values: np.ndarray, s: Any) -> None:
        super().store(space, addresses, values, s)
        self.stored += self.sectors(space, addresses, values[0].nbytes, s)

    def store_ordered(self, space: str, addresses: np.ndarray, values: np.ndarray, s: Any) -> None:
        super().store_ordered(space, addresses, values, s)
        self.stored += self.sectors(space, addresses, values[0].nbytes, s)

    def atomic(
        self, operation: str, kind: str, space: str, addresses: np.ndarray, s: Any, *values: np.ndarray
    ) -> np.ndarray:
        old = super().atomic(operation, kind, space, addresses, s, *values)
        if size := self.sectors(space, addresses, old.itemsize, s):
            self.loaded += size
            self.stored += size
        else:  # lane after lane
            self.wavefronts += len(addresses)
        return old

    def sectors(self, space: str, addresses: np.ndarray, size: int, s: Any) -> int:
        """Bytes of the sectors of global memory that an access touches; 0 of another memory."""
        region, places = self.region(space, addresses, s)
        if not isinstance(region, GlobalMemory):
            return 0
        first, last = places // SECTOR, (places + size - 1) // SECTOR
        return SECTOR * len(np.unique(np.concatenate([first, last])))

    def fetch(self, size: int, latency: int, kind: str) -> int:
        """When bytes of global memory that the current instruction asks for are there."""
        cycles = size / self.costs.global_bytes
        return ceil(self.engine("global loads").take(self.now + latency, cycles, kind, self.instruction))

    def send(self, size: int, start: int, kind: str) -> int:
        cycles = size / self.costs.global_bytes
        return ceil(self.engine("global stores").take(start, cycles, kind, self.instruction))

    # --- Copies

    def cp_async(self, to: np.ndarray, source: np.ndarray, size: int, present: Any, s: Any) -> None:
        super().cp_async(to, source, size, present, s)
        there = np.broadcast_to(size if present is None else present, to.shape) > 0
        asked = self.sectors("global", source[there], size, s) if there.any() else 0
        end = self.fetch(asked, self.costs.cp_async_latency, "copy")
        for warp in self.warps_of(s):
            self.order.ends[CP_ASYNC, warp] = end
            number = self.group.get(warp, 0)
            key = ("cp.async", number)
            self.recorder.flight(self.index, key, f"cp.async, group {number}", self.now, end)

    def commit(self, kind: int, s: Any) -> None:
        super().commit(kind, s)
        if kind == CP_ASYNC:
            for warp in self.warps_of(s):
                self.group[warp] = self.group.get(warp, 0) + 1

    def arrived(self, peer: Any, barrier: int, places: np.ndarray, size: int, thread: int) -> None:
        cycles = size / self.costs.global_bytes
        port = peer.engine("global loads")
        end = ceil(port.take(self.now + self.costs.tma_latency, cycles, "copy", self.instruction))
        self.order.ends[BULK_LOAD, int(self.agent[thread])] = end
        phase = peer.own_mbarrier(barrier).phase
        name = f"bulk loads, mbarrier at byte {self.place(barrier).split()[1]}, phase {phase}"
        self.recorder.flight(peer.index, ("bulk", barrier, phase), name, self.now, end)
        super().arrived(peer, barrier, places, size, thread)

    def engine_reads(self, places: np.ndarray, thread: int, kind: int) -> None:
        super().engine_reads(places, thread, kind)
        if kind != BULK_STORE:
            return
        warp, size = int(self.agent[thread]), 16 * len(places)
        read = self.now + ceil(size / self.costs.shared_bytes) + self.costs.shared_latency
        written = self.send(size, read, "copy") + self.costs.global_latency
        self.order.ends[BULK_STORE, warp] = max(read, self.order.ends.get((BULK_STORE, warp), 0))
        self.order.ends[BULK_WRITE, warp] = written
        self.recorder.flight(self.index, ("bulk store", self.now), "bulk store", self.now, written)


@dataclass(frozen=True)
class Plan:
    """An instruction of the program, its work and its registers."""

    instruction: Instruction
    work: Work
    uses: tuple[tuple[str, int], ...]
    defines: tuple[tuple[str, int], ...]


class TimedRunner(Runner):
    """The warp that can issue first goes next."""

    ctas: list[TimedCta]  # type: ignore[assignment]

    def begin(self, costs: Costs, recorder: Recorder) -> None:
        self.costs, self.recorder = costs, recorder
        self.order = self.ctas[0].order
        operands = Operands(self.program.kernel)
        self.plans = [self.plan(operands, each, costs) for each in self.program.kernel.instructions]
        # When each register of a warp is ready, and the work that it comes from.
        self.ready: list[dict[tuple[str, int], tuple[int, str]]] = [
            {} for _ in range(len(self.ctas) * -(-self.ctas[0].threads // 32))
        ]
        self.delay = {BARRIER: costs.barrier, CLUSTER: costs.cluster_barrier, TRY_WAIT: costs.mbarrier}
        self.held: dict[Fragment, int] = {}  # what each waits for takes so long to reach it
        self.newest: dict[int, int] = {}  # when each warp issued last

    def plan(self, operands: Operands, instruction: Instruction, costs: Costs) -> Plan:
        tests = instruction.opcode == "mbarrier" and instruction.modifiers[0] in ("try_wait", "test_wait")
        first = instruction.operands[:1] if tests or instruction.opcode not in NO_RESULT else ()
        used: Iterable[Any] = instruction.operands[len(first) :]
        if instruction.guard:
            used = (*used, instruction.guard)
        return Plan(
            instruction,
            work_of(instruction, costs),
            tuple(operands.registers_in(used)),
            tuple(operands.registers_in(first)),
        )

    # --- Who goes next

    def choose(self, ready: list[Fragment], together: set[Fragment]) -> list[Fragment]:
        for fragment in ready:
            self.release(fragment)
        groups: dict[tuple[Cta, int], list[Fragment]] = {}
        for fragment in ready:
            if fragment in together:
                groups.setdefault((fragment.cta, fragment.warp // 4), []).append(fragment)
        batches = [*groups.values(), *([each] for each in ready if each not in together)]
        return min(batches, key=self.priority)

    def priority(self, batch: list[Fragment]) -> tuple[int, int, int]:
        """Who can issue earlier, else who has waited longer for its turn."""
        issue = max(self.issue(each) for each in batch)
        return issue, min(self.newest.get(each.number, -1) for each in batch), batch[0].number

    def sources(self, fragment: Fragment) -> tuple[int, str]:
        """When the sources of its next instruction are ready, and the work that the last one comes from."""
        ready = self.ready[fragment.number]
        found = [ready[row] for row in self.plans[fragment.segment].uses if row in ready]
        return max(found, default=(0, ""))

    def issue(self, fragment: Fragment) -> int:
        cta, work, core = fragment.cta, self.plans[fragment.segment].work, fragment.warp % SUB_CORES
        assert isinstance(cta, TimedCta)
        start = max(self.order.time(fragment.number), self.sources(fragment)[0])
        if work.free:
            return start
        busy = cta.engine(unit_name(work.unit, core)).free if work.unit else 0
        return max(start, cta.schedulers[core], int(busy))  # the rest of that cycle it waits in the unit

    def release(self, fragment: Fragment) -> None:
        reason, held = fragment.reason, self.held.pop(fragment, None)
        if held is None:
            super().release(fragment)
            return
        before = self.order.time(fragment.number)
        self.order.seen[fragment.number, -1] = 0  # so that it can be seen what comes with the release
        super().release(fragment)
        after = max(before, self.order.time(fragment.number) + held)
        self.order.seen[fragment.number, -1] = after
        if after > before:
            what = self.plans[fragment.segment - 1].instruction
            self.recorder.warp(fragment.cta.index, fragment.warp, "wait", what, before, after, reason)

    # --- What it does

    def step(self, segment: Segment, batch: list[Fragment]) -> None:
        plan, cta = self.plans[segment.index], batch[0].cta
        assert isinstance(cta, TimedCta)
        now = max(self.issue(each) for each in batch)
        for fragment in batch:
            self.note_issue(fragment, plan, now)
        warps = [(fragment.number, fragment.warp) for fragment in batch]
        cta.start_instruction(plan.instruction, now)
        super().step(segment, batch)
        end = self.result(cta, plan, now, warps)
        after = now if plan.work.free else now + 1
        for number, warp in warps:
            learned = self.order.time(number)
            if learned > after:
                self.recorder.warp(cta.index, warp, "wait", plan.instruction, after, learned)
            self.order.seen[number, -1] = max(after, learned)
            if segment.kind == TRY_WAIT:
                end = max(now, learned) + self.costs.mbarrier
            for row in plan.defines:
                self.ready[number][row] = end, plan.work.kind
        for fragment in batch:
            if fragment.waiting is not None:
                self.held[fragment] = self.delay[segment.kind]

    def note_issue(self, fragment: Fragment, plan: Plan, now: int) -> None:
        """That a warp issues, and what it has waited for so far."""
        cta, number, warp = fragment.cta, fragment.number, fragment.warp
        assert isinstance(cta, TimedCta)
        before, (needed, source) = self.order.time(number), self.sources(fragment)
        if needed > before:
            self.recorder.warp(cta.index, warp, "stall", plan.instruction, before, needed, f"for {source}")
        self.order.seen[number, -1] = now
        self.newest[number] = now
        if plan.work.free:
            return
        cta.schedulers[warp % SUB_CORES] = now + 1
        start = max(before, needed)
        self.recorder.warp(cta.index, warp, plan.work.kind, plan.instruction, start, now + 1)
        if plan.work.unit:
            name = unit_name(plan.work.unit, warp % SUB_CORES)
            cta.engine(name).take(now, plan.work.cycles, plan.work.kind, plan.instruction)

    def result(self, cta: TimedCta, plan: Plan, now: int, warps: list[tuple[int, int]]) -> int:
        """When the result of an instruction is ready; what memories and engines have to do for it."""
        costs, instruction = self.costs, plan.instruction
        end = now + plan.work.latency
        if cta.wavefronts:
            pipe = cta.engine("shared memory").take(now, cta.wavefronts, "shared", instruction)
            end = max(end, ceil(pipe) - 1 + costs.shared_latency)
        if cta.loaded:
            end = max(end, cta.fetch(cta.loaded, costs.global_latency, "global"))
        if cta.stored:
            cta.send(cta.stored, now, "global")
        if instruction.opcode == "wgmma" and plan.work.kind == "mma":
            self.wgmma(cta, instruction, now, warps)
        return end

    def wgmma(self, cta: TimedCta, instruction: Instruction, now: int, warps: list[tuple[int, int]]) -> None:
        _, n, k = shape(instruction)
        kind = [m for m in instruction.modifiers if m != "satfinite"][-1]
        cycles = self.costs.wgmma_cycles(n, k, kind, isinstance(instruction.operands[1], Vector))
        done = max(cta.engine(name).take(now, cycles, "mma", instruction) for name in TENSOR_CORES)
        for number, _ in warps:
            self.order.ends[WGMMA, number] = ceil(done) + self.costs.wgmma_latency


def unit_name(unit: str, core: int) -> str:
    names = {"tensor": "tensor core", "mufu": "MUFU", "int": "integer", "fma": "FMA", "fp64": "FP64"}
    return f"{names[unit]} {core}"


class TimedGrid(Grid):
    order_type, cta_type, runner_type = TimedOrder, TimedCta, TimedRunner
    costs: Costs

    def start(self, number: int) -> Runner:
        runner = super().start(number)
        assert isinstance(runner, TimedRunner)
        self.recorder = Recorder()
        for cta in runner.ctas:
            cta.begin_at(self.recorder, self.costs)
        runner.begin(self.costs, self.recorder)
        return runner
