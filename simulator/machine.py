"""Runs the warps of a cluster: which go on, where lanes part and meet again, what they wait for."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np

from cutelab.simulator.barriers import Barrier, ClusterBarrier
from cutelab.simulator.cta import WARP, WARPGROUP, Cta
from cutelab.simulator.errors import BarrierError, Deadlock, DivergenceError, SimulationError
from cutelab.simulator.global_races import line_of
from cutelab.simulator.memory import SHARED_BASE
from cutelab.simulator.ptx import Immediate, Instruction, Negated, Symbol
from cutelab.simulator.registers import RegisterPool
from cutelab.simulator.translate import BARRIER, BRANCH, CLUSTER, EXIT, TRY_WAIT, Segment


@dataclass(eq=False)
class Join:
    """Where lanes of a warp that parted ways meet again: `pending` fragments are still on their way."""

    segment: int
    outer: "tuple[Join, ...]"
    pending: int
    lanes: list[np.ndarray] = field(default_factory=list)


@dataclass(eq=False)
class Fragment:
    """Lanes of one warp that execute together, at the top of a segment."""

    cta: Cta
    warp: int
    threads: np.ndarray
    segment: int
    joins: tuple[Join, ...] = ()
    steps: int = 0  # segments executed: those with fewest go first, so that warps catch up with each other
    waiting: "Callable[[], bool] | None" = None
    on_release: "Callable[[], None] | None" = None  # what it learns as it goes on
    reason: str = ""  # what it waits for
    give_up: "Callable[[], None] | None" = None  # how a wait with a time limit ends if that is over

    @property
    def ready(self) -> bool:
        return self.waiting is None or self.waiting()

    @property
    def number(self) -> int:
        """Of the warp in the cluster."""
        return int(self.cta.agent[self.threads[0]])


class Runner:
    """Executes a cluster to its end. seed: None runs warps in step; a number picks at random who goes on."""

    def __init__(self, ctas: list[Cta], seed: int | None = None) -> None:
        self.ctas, self.program = ctas, ctas[0].program
        self.random = None if seed is None else np.random.default_rng(seed)
        self.barriers: dict[tuple[int, int], Barrier] = {}  # by CTA and number
        self.cluster_generation: dict[int, int] = {}  # of each warp's last arrival there
        self.gave_up: dict[tuple[int, int], int] = {}  # at which event, by warp and segment
        threads = np.arange(ctas[0].threads)
        self.fragments = [
            Fragment(cta, first // WARP, threads[first : first + WARP], 0)
            for cta in ctas
            for first in range(0, len(threads), WARP)
        ]
        self.cluster_barrier = ClusterBarrier({fragment.number for fragment in self.fragments})
        self.steps = 0  # segments executed
        launched, warps = self.program.launch_registers, -(-len(threads) // WARP)
        self.pools = [RegisterPool(cta.index, launched, warps) for cta in ctas] if launched else []

    def run(self, steps: float = inf, polls: float = inf) -> bool:
        """To the end, or until it has executed so many segments or looked so often for what others may do.

        Returns whether it has ended.
        """
        with np.errstate(all="ignore"):
            for _ in self.batches(steps, polls):
                pass
        return not self.fragments

    def batches(self, steps: float = inf, polls: float = inf) -> Iterator[list[Fragment]]:
        """What `run` does: each batch of fragments is shown, and executed as the next one is asked for."""
        segments = self.program.segments
        last_step, last_poll = self.steps + steps, self.ctas[0].polls + polls
        while self.fragments and self.steps < last_step and self.ctas[0].polls < last_poll:
            self.steps += 1
            batch = self.pick()
            yield batch
            try:
                self.step(segments[batch[0].segment], batch)
            except SimulationError as error:
                raise type(error)(f"{error}\n  in {batch[0].cta.describe()}") from None
        if not self.fragments:
            for pool in self.pools:
                pool.check()

    def pick(self) -> list[Fragment]:
        """Ready fragments at one segment of one CTA, to be executed at once."""
        ready = [fragment for fragment in self.fragments if fragment.ready]
        together = self.whole_warpgroups(ready)
        ready = [fragment for fragment in ready if not self.needs_warpgroup(fragment) or fragment in together]
        if not ready:
            self.let_one_give_up()
            return self.pick()
        batch = self.choose(ready, together)
        for fragment in batch:
            self.release(fragment)
            fragment.steps += 1
        return batch

    def choose(self, ready: list[Fragment], together: set[Fragment]) -> list[Fragment]:
        """together: those before a wgmma, which each warpgroup executes as one."""
        if self.random is None:
            leader = min(ready, key=lambda fragment: (fragment.steps, fragment.segment))
        else:
            leader = ready[self.random.integers(len(ready))]
        return [
            fragment
            for fragment in ready
            if fragment is leader
            or (
                (fragment.segment, fragment.cta) == (leader.segment, leader.cta)
                and (self.random is None or fragment in together or self.random.random() < 0.5)
            )
        ]

    def release(self, fragment: Fragment) -> None:
        """Nothing holds it back any more."""
        if fragment.on_release:
            fragment.on_release()
        fragment.waiting, fragment.on_release, fragment.give_up, fragment.reason = None, None, None, ""

    def needs_warpgroup(self, fragment: Fragment) -> bool:
        return self.program.segments[fragment.segment].warpgroup

    def whole_warpgroups(self, ready: list[Fragment]) -> set[Fragment]:
        """Ready fragments before a wgmma whose warpgroup has come there whole."""
        groups: dict[tuple[Cta, int, int], list[Fragment]] = {}
        for fragment in ready:
            if self.needs_warpgroup(fragment):
                groups.setdefault((fragment.cta, fragment.warp // 4, fragment.segment), []).append(fragment)
        return {
            fragment
            for group in groups.values()
            if sum(len(each.threads) for each in group) == WARPGROUP
            for fragment in group
        }

    def let_one_give_up(self) -> None:
        """Nobody can go on: a wait with a time limit ends, unless all have since anything last happened."""
        events = self.ctas[0].events
        for fragment in self.fragments:
            place = fragment.number, fragment.segment
            if fragment.give_up and self.gave_up.get(place) != events:
                fragment.give_up()
                self.gave_up[place] = events
                fragment.waiting, fragment.on_release = None, None
                return
        raise Deadlock(self.explain_deadlock())

    def step(self, segment: Segment, batch: list[Fragment]) -> None:
        """Executes a segment for some fragments, and sends each on its way."""
        cta = batch[0].cta
        segment.run(cta, threads_of(batch))
        cta.at = segment.last
        if segment.kind == BRANCH:
            for fragment in batch:
                self.branch(segment, fragment)
        elif segment.kind == EXIT:
            for fragment in batch:
                self.leave(segment, fragment)
        elif segment.last is not None:
            wait = {BARRIER: self.barrier, CLUSTER: self.cluster, TRY_WAIT: self.try_wait}[segment.kind]
            for fragment in batch:
                self.go(fragment, segment.index + 1)
                wait(segment.last, fragment)
        else:
            for fragment in batch:
                self.go(fragment, segment.index + 1)

    def taken(self, segment: Segment, fragment: Fragment) -> np.ndarray:
        """For which threads of a fragment the last instruction's guard holds."""
        last = segment.last
        if last is None or last.guard is None:
            return np.ones(len(fragment.threads), bool)
        row = self.program.rows[last.guard.name]
        fragment.cta.touch((("p", row),), (), True, fragment.threads)
        return fragment.cta.p[row, fragment.threads] != last.guard_negated

    def branch(self, segment: Segment, fragment: Fragment) -> None:
        taken = self.taken(segment, fragment)
        if taken.all():
            return self.go(fragment, segment.target)
        if not taken.any():
            return self.go(fragment, segment.index + 1)
        joins = fragment.joins
        if segment.join is not None:
            joins = (*joins, Join(segment.join, joins, 2))
        self.fragments.remove(fragment)
        for threads, target in (
            (fragment.threads[~taken], segment.index + 1),
            (fragment.threads[taken], segment.target),
        ):
            part = Fragment(fragment.cta, fragment.warp, threads, target, joins, fragment.steps)
            self.fragments.append(part)
            self.go(part, target)
        return None

    def go(self, fragment: Fragment, target: int) -> None:
        """Sends a fragment to a segment; where it has to meet others, it waits in their Join."""
        fragment.segment = target
        if fragment.joins and fragment.joins[-1].segment == target:
            self.fragments.remove(fragment)
            self.arrive(fragment.joins[-1], fragment)

    def arrive(self, join: Join, fragment: Fragment) -> None:
        """One of a Join's fragments is there, or will never come because its threads have ended."""
        if fragment.segment == join.segment:
            join.lanes.append(fragment.threads)
        join.pending -= 1
        if join.pending:
            return
        if join.lanes:
            threads = np.sort(np.concatenate(join.lanes))
            whole = Fragment(fragment.cta, fragment.warp, threads, join.segment, join.outer, fragment.steps)
            self.fragments.append(whole)
            self.go(whole, join.segment)
        elif join.outer:
            self.arrive(join.outer[-1], fragment)

    def leave(self, segment: Segment, fragment: Fragment) -> None:
        taken = self.taken(segment, fragment)
        if not taken.all():
            if taken.any():
                fragment.cta.ended[fragment.threads[taken]] = True
                fragment.threads = fragment.threads[~taken]
            return self.go(fragment, segment.index + 1)
        self.fragments.remove(fragment)
        fragment.cta.ended[fragment.threads] = True
        if fragment.cta.ended[fragment.warp * WARP : (fragment.warp + 1) * WARP].all():
            self.cluster_barrier.leave(fragment.number)
        fragment.segment = -1
        if fragment.joins:
            self.arrive(fragment.joins[-1], fragment)
        return None

    # --- Waiting. A fragment has already been sent to the segment behind; these hold it back there.

    def barrier(self, last: Instruction, fragment: Fragment) -> None:
        """bar and barrier{.cta}: .sync, .arrive and .red; setmaxnreg, which may have to wait too."""
        if last.opcode == "setmaxnreg":
            return self.set_registers(last, fragment)
        operands = list(last.operands)
        reduces = "red" in last.modifiers
        target, vote = (operands.pop(0), operands.pop()) if reduces else (None, None)
        number, *count = (self.uniform(operand, fragment) for operand in operands)
        threads = fragment.cta.threads
        expected = count[0] if count else -(-threads // WARP) * WARP
        if not 0 <= number < 16 or expected % WARP or not 0 < expected <= 1024:
            raise BarrierError(
                f"no barrier {number} for {expected} threads: 16 barriers, multiples of {WARP} threads"
            )
        barrier = self.barriers.setdefault((fragment.cta.rank, number), Barrier(f"barrier {number}"))
        # A barrier counts whole warps, whichever lanes arrive (PTX ISA, "barrier").
        self.whole(fragment, last)
        order = fragment.cta.order
        votes = self.votes(vote, fragment) if reduces else ()
        clock = order.publish(fragment.number)
        generation = barrier.arrive(WARP, expected, clock, f"warp {fragment.warp}", votes)
        fragment.cta.progress()
        if "arrive" not in last.modifiers:
            self.wait_for(fragment, barrier, generation)
        if reduces:
            self.learn_votes(fragment, barrier, last, target)
        return None

    def set_registers(self, last: Instruction, fragment: Fragment) -> None:
        self.whole(fragment, last)
        if not self.pools:
            return
        pool, warp = self.pools[fragment.cta.rank], fragment.warp
        pool.ask(warp, last.operands[0].value, "inc" in last.modifiers)
        fragment.cta.progress()
        if warp in pool.waiting:
            fragment.waiting = lambda: warp not in pool.waiting
            fragment.reason = line_of(last)

    def whole(self, fragment: Fragment, last: Instruction) -> None:
        """All lanes of a warp that haven't ended must be there, unless the barrier isn't `.aligned`."""
        if last.opcode == "barrier" and "aligned" not in last.modifiers:
            return
        cta = fragment.cta
        there = set(fragment.threads.tolist())
        of_warp = range(fragment.warp * WARP, min((fragment.warp + 1) * WARP, cta.threads))
        missing = [thread % WARP for thread in of_warp if thread not in there and not cta.ended[thread]]
        if missing:
            raise DivergenceError(
                f"executed without lanes {missing} of warp {fragment.warp}, by which all must execute it"
            )

    def votes(self, operand: Any, fragment: Fragment) -> list[bool]:
        negated = isinstance(operand, Negated)
        row = self.program.rows[(operand.register if negated else operand).name]
        return (fragment.cta.p[row, fragment.threads] != negated).tolist()

    def learn_votes(self, fragment: Fragment, barrier: Barrier, last: Instruction, target: Any) -> None:
        """The result of barrier.red comes as it is released."""
        acquire, cta, row = fragment.on_release, fragment.cta, self.program.rows[target.name]

        def learn() -> None:
            if acquire:
                acquire()
            votes = barrier.votes_released
            if "popc" in last.modifiers:
                cta.r[row, fragment.threads] = sum(votes)
            else:
                cta.p[row, fragment.threads] = all(votes) if "and" in last.modifiers else any(votes)

        fragment.on_release = learn

    def cluster(self, last: Instruction, fragment: Fragment) -> None:
        barrier, order = self.cluster_barrier, fragment.cta.order
        self.whole(fragment, last)
        if "arrive" in last.modifiers:
            clock = order.publish(fragment.number)
            who = f"warp {fragment.warp} of CTA {fragment.cta.index}"
            self.cluster_generation[fragment.number] = barrier.arrive(fragment.number, clock, who)
            fragment.cta.progress()
        else:
            self.wait_for(fragment, barrier, self.cluster_generation.get(fragment.number, 0))

    def wait_for(self, fragment: Fragment, barrier: Barrier | ClusterBarrier, generation: int) -> None:
        def acquire() -> None:
            if barrier.released is not None:
                fragment.cta.order.acquire(fragment.number, barrier.released)

        fragment.waiting = lambda: barrier.generation > generation
        fragment.on_release = acquire
        fragment.reason = barrier.name

    def try_wait(self, last: Instruction, fragment: Fragment) -> None:
        """mbarrier.try_wait and test_wait: hold back until the phase is over, or nothing else can happen."""
        cta = fragment.cta
        target, address, phase = last.operands[:3]
        places = self.values(address.base, fragment).astype(np.int64) + address.offset
        bits = self.values(phase, fragment).astype(np.int64) & 1
        row = self.program.rows[target.name]
        barriers = [cta.mbarrier(int(p), int(t)) for p, t in zip(places, fragment.threads, strict=True)]

        def over() -> bool:
            return all(barrier.passed(int(bit)) for barrier, bit in zip(barriers, bits, strict=True))

        def learn() -> None:
            cta.p[row, fragment.threads] = cta.mbarrier_test(places, bits, fragment.threads)

        if over() or self.fails_early():
            learn()
        else:
            fragment.waiting, fragment.on_release, fragment.give_up = over, learn, learn
            fragment.reason = f"{barriers[0].name}, for the end of a phase of parity {int(bits[0])}"

    def fails_early(self) -> bool:
        """A wait may end before the phase does: programs have to look. Only where chance decides."""
        return self.random is not None and self.random.random() < 0.2

    def values(self, operand: Any, fragment: Fragment) -> np.ndarray:
        """An integer operand, for each thread."""
        if isinstance(operand, Immediate):
            return np.full(len(fragment.threads), operand.value)
        if isinstance(operand, Symbol):
            return np.full(len(fragment.threads), SHARED_BASE + self.program.shared[operand.name])
        bank = fragment.cta.d if operand.type[1:] == "64" else fragment.cta.r
        return bank[self.program.rows[operand.name], fragment.threads]

    def uniform(self, operand: Any, fragment: Fragment) -> int:
        values = self.values(operand, fragment)
        if (values != values[0]).any():
            raise SimulationError(f"the lanes of warp {fragment.warp} name different barriers")
        return int(values[0])

    def explain_deadlock(self) -> str:
        lines = ["no warp can go on:"]
        for fragment in self.fragments:
            who = f"  warp {fragment.warp} of CTA {fragment.cta.index} ({len(fragment.threads)} lanes)"
            lines.append(f"{who} waits at {fragment.reason or 'a wgmma, for the rest of its warpgroup'}")
        lines += [f"  {line}" for pool in self.pools for line in pool.shortages()]
        lines += [f"  {barrier.state()}" for barrier in self.barriers.values() if barrier.arrived]
        lines += [f"  {self.cluster_barrier.state()}"] if self.cluster_barrier.arrived else []
        lines += [f"  {barrier.state()}" for cta in self.ctas for barrier in cta.mbarriers.values()]
        return "\n".join(lines)


def threads_of(batch: list[Fragment]) -> Any:
    """The threads of some fragments, as a slice where they are neighbours."""
    threads = np.sort(np.concatenate([fragment.threads for fragment in batch]))
    first, last = int(threads[0]), int(threads[-1])
    return slice(first, last + 1) if last - first + 1 == len(threads) else threads
