"""What warps wait for: named barriers, mbarriers and cluster barriers, each handing on a clock."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from cutelab.simulator.errors import BarrierError
from cutelab.simulator.races import Clock


@dataclass(eq=False)
class Barrier:
    """A barrier of a CTA (PTX ISA, "barrier"): `expected` threads arrive, then all may go on."""

    name: str
    arrived: int = 0
    expected: int = 0
    generation: int = 0
    clock: Clock | None = None  # what those who arrived have done before
    released: Clock | None = None  # ... in the last complete generation
    votes: list[bool] = field(default_factory=list)  # of barrier.red
    votes_released: list[bool] = field(default_factory=list)

    def arrive(self, threads: int, expected: int, clock: Clock, who: str, votes: Iterable[bool] = ()) -> int:
        """The generation that the arriving threads belong to."""
        if self.arrived and expected != self.expected:
            raise BarrierError(
                f"{who} expects {expected} threads at {self.name}, where others expect {self.expected}"
            )
        generation, self.expected = self.generation, expected
        self.arrived += threads
        self.clock = clock.merged(self.clock)
        self.votes += votes
        if self.arrived > expected:
            raise BarrierError(
                f"{who} is too many at {self.name}: {self.arrived} threads arrive, {expected} are expected"
            )
        if self.arrived == expected:
            self.arrived, self.generation = 0, self.generation + 1
            self.released, self.clock = self.clock, None
            self.votes_released, self.votes = self.votes, []
        return generation

    def state(self) -> str:
        return f"{self.name}: {self.arrived} of {self.expected} threads have arrived"


@dataclass(eq=False)
class ClusterBarrier:
    """That of a cluster (PTX ISA, "barrier.cluster"): all warps arrive but those that have ended."""

    alive: set[int]  # warps that have not ended
    name: str = "the cluster's barrier"
    arrived: set[int] = field(default_factory=set)
    generation: int = 0
    clock: Clock | None = None
    released: Clock | None = None

    def arrive(self, warp: int, clock: Clock, who: str) -> int:
        """The generation that the arriving warp belongs to."""
        if warp in self.arrived:
            raise BarrierError(f"{who} arrives twice at {self.name}")
        generation = self.generation
        self.arrived.add(warp)
        self.clock = clock.merged(self.clock)
        self.turn()
        return generation

    def leave(self, warp: int) -> None:
        self.alive.discard(warp)
        self.turn()

    def turn(self) -> None:
        if self.arrived and self.alive <= self.arrived:
            self.arrived, self.generation = set(), self.generation + 1
            self.released, self.clock = self.clock, None

    def state(self) -> str:
        return f"{self.name}: {len(self.arrived)} of {len(self.alive | self.arrived)} warps have arrived"


@dataclass(eq=False)
class MBarrier:
    """An mbarrier object (PTX ISA, "mbarrier"): a phase ends with its last arrival and its last byte."""

    name: str
    count: int  # arrivals of each phase
    born: tuple[int, int]  # who initialised it, and when
    pending: int = 0
    bytes: int = 0  # still to come in this phase; negative if they came before they were expected
    phase: int = 0
    clock: Clock | None = None
    released: Clock | None = None

    def __post_init__(self) -> None:
        self.pending = self.count

    def arrive(self, arrivals: int, clock: Clock, who: str) -> None:
        if arrivals > self.pending:
            raise BarrierError(
                f"{who} arrives at {self.name}, where all {self.count} arrivals of phase {self.phase} have "
                "been made"
            )
        self.pending -= arrivals
        self.learn(clock)
        self.turn()

    def learn(self, clock: Clock) -> None:
        """Whoever waits for this phase will know what the clock covers."""
        self.clock = clock.merged(self.clock)

    def expect(self, size: int) -> None:
        self.bytes += size

    def complete(self, size: int, clock: Clock) -> None:
        self.bytes -= size
        self.learn(clock)
        self.turn()

    def turn(self) -> None:
        """Ends the phase if nothing is missing."""
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase + 1
            self.released = self.clock.merged(self.released) if self.clock else self.released
            self.clock = None

    def passed(self, parity: int) -> bool:
        """Whether the phase of that parity is over: the current one has the other."""
        return self.phase & 1 != parity & 1

    def state(self) -> str:
        arrivals = f"{self.count - self.pending} of {self.count} arrivals"
        if not self.bytes:
            return f"{self.name}: phase {self.phase}, {arrivals}"
        what = (
            f"{self.bytes} bytes still to come"
            if self.bytes > 0
            else f"{-self.bytes} bytes more than expected"
        )
        return f"{self.name}: phase {self.phase}, {arrivals}, {what}"
