"""Finds races and reads of unwritten bytes in shared memory, by vector clocks.

Every warp of a cluster is an agent, and so are its engines, which work while it goes on: those that do its
cp.async, its bulk loads, its bulk stores (one that reads shared memory, one that writes global memory), and
its wgmma. An agent's clock counts what it has done since others last could have seen it. `Order.seen[a, b]`
is the clock up to which what agent b did comes before what a does next; barriers and waits raise it. Two
accesses to the same byte, one of them a write, are a race unless one comes before the other (Lamport 1978;
FastTrack, PLDI 2009).

The engines of bulk copies and wgmma belong to the async proxy: what threads wrote with ordinary stores
reaches it only by fence.proxy.async. `Order.visible[a, b]` is the clock up to which writes of b are known, to
a, to be visible to the async proxy (PTX ISA, "Async proxy").

What goes through global memory, and between clusters, is ordered by `Far`: see `global_races`.

Lanes of one warp count as one agent: what they exchange without bar.warp.sync is not looked at.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from cutelab.simulator.errors import RaceError

NOBODY = -1
THREAD, CP_ASYNC, BULK_LOAD, BULK_STORE, WGMMA, BULK_WRITE = KINDS = range(6)
NAMES = (
    "warp {}",
    "a cp.async of warp {}",
    "a bulk load of warp {}",
    "a bulk store of warp {}",
    "a wgmma of warp {}",
    "a bulk store of warp {}",
)
NO_FENCE = "no fence.proxy.async between them"
ASYNC_PROXY = (BULK_LOAD, BULK_STORE, WGMMA, BULK_WRITE)
CTA, CLUSTER, GPU = SCOPES = range(3)
"""Of strong accesses and fences (PTX ISA, "Scope"); `.sys` counts as `.gpu`."""


class Clock(NamedTuple):
    """What somebody has done and seen, to be handed on: two rows of `Order`, and what goes beyond them."""

    seen: np.ndarray
    visible: np.ndarray
    far: "Far | None" = None

    def merged(self, other: "Clock | None") -> "Clock":
        if other is None:
            return self
        far = self.far.merged(other.far) if self.far else other.far
        return Clock(np.maximum(self.seen, other.seen), np.maximum(self.visible, other.visible), far)


Known = Mapping[int, Clock]
"""What is known of clusters, by their number; never changed."""
NOTHING: Known = MappingProxyType({})


def joined(one: Known, other: Known) -> Known:
    if one is other or not other:
        return one
    return {**other, **{number: clock.merged(other.get(number)) for number, clock in one.items()}}


class Far(NamedTuple):
    """What a warp knows through global memory.

    known: of other clusters. fenced: by scope, what its fences so far let a relaxed write hand on. observed:
    by scope, what its relaxed reads have met, and the next fence makes known (PTX ISA, "Release and acquire
    patterns").
    """

    known: Known = NOTHING
    fenced: tuple[Known, ...] = (NOTHING, NOTHING, NOTHING)
    observed: tuple[Known, ...] = (NOTHING, NOTHING, NOTHING)

    def merged(self, other: "Far | None") -> "Far":
        if other is None or other is self:
            return self
        fenced = tuple(map(joined, self.fenced, other.fenced))
        return Far(joined(self.known, other.known), fenced, tuple(map(joined, self.observed, other.observed)))


class Order:
    """The clocks of all agents of a cluster. Warps are numbered through its CTAs, clusters from 1."""

    def __init__(self, warps: int, cluster: int = 1) -> None:
        self.warps, self.cluster = warps, cluster
        self.far: dict[int, Far] = {}  # by warp
        agents = len(KINDS) * warps
        self.seen = np.zeros((agents, agents), np.int32)
        self.visible = np.zeros((agents, agents), np.int32)
        self.seen[np.arange(agents), np.arange(agents)] = 1

    def agent(self, kind: int, warp: int | np.ndarray):
        return kind * self.warps + warp

    def publish(self, warp: int) -> Clock:
        """What a warp has done and seen so far; what it does from now on comes later."""
        clock = Clock(self.seen[warp].copy(), self.visible[warp].copy(), self.far.get(warp))
        self.seen[warp, warp] += 1
        return clock

    def acquire(self, warp: int, clock: Clock) -> None:
        """The warp has seen all that `clock` covers."""
        np.maximum(self.seen[warp], clock.seen, out=self.seen[warp])
        np.maximum(self.visible[warp], clock.visible, out=self.visible[warp])
        if clock.far:
            self.far[warp] = clock.far.merged(self.far.get(warp))

    def publish_far(self, warp: int) -> Known:
        """`publish`, for all that may read it in global memory."""
        seen, visible, far = self.publish(warp)
        return {**(far.known if far else {}), self.cluster: Clock(seen, visible)}

    def acquire_far(self, warp: int, known: Known) -> None:
        others = {number: clock for number, clock in known.items() if number != self.cluster}
        if others:
            far = self.far.get(warp, Far())
            self.far[warp] = far._replace(known=joined(far.known, others))
        if self.cluster in known:
            self.acquire(warp, known[self.cluster])

    def observe(self, warp: int, scope: int, known: Known) -> None:
        """A relaxed read has met what `known` covers."""
        far = self.far.get(warp, Far())
        levels = (joined(old, known) if level == scope else old for level, old in enumerate(far.observed))
        self.far[warp] = far._replace(observed=tuple(levels))

    def fence(self, warp: int, scope: int) -> None:
        """fence.acq_rel or fence.sc."""
        for level in range(scope + 1):
            self.acquire_far(warp, self.far.get(warp, Far()).observed[level])
        known, far = self.publish_far(warp), self.far.get(warp, Far())
        fenced = tuple(known if level <= scope else far.fenced[level] for level in SCOPES)
        observed = tuple(NOTHING if level <= scope else far.observed[level] for level in SCOPES)
        self.far[warp] = Far(far.known, fenced, observed)

    def fence_async_proxy(self, warp: int) -> None:
        """What the warp has done and seen is visible to the async proxy."""
        np.maximum(self.visible[warp], self.seen[warp], out=self.visible[warp])
        self.seen[warp, warp] += 1
        if far := self.far.get(warp):
            known = {number: Clock(clock.seen, clock.seen) for number, clock in far.known.items()}
            self.far[warp] = far._replace(known=known)

    def complete(self, kind: int, warp: int) -> Clock:
        """An engine has done what it was given; the clock tells those who hear of it."""
        engine = self.agent(kind, warp)
        clock = np.zeros_like(self.seen[warp])
        clock[engine] = self.seen[engine, engine]
        self.seen[engine, engine] += 1
        return Clock(clock, clock)

    def commit(self, kind: int, warp: int) -> None:
        """What an engine was given so far makes up a group."""
        engine = self.agent(kind, warp)
        self.seen[engine, engine] += 1

    def wait(self, kind: int, warp: int, groups: int, doer: int) -> int:
        """All but the newest `groups` groups that a warp committed are done; up to which clock.

        doer: the warp whose engine did them: that of a wgmma is the first one's of its warpgroup.
        """
        engine, at_work = self.agent(kind, warp), self.agent(kind, doer)
        done = int(self.seen[engine, engine]) - 1 - groups
        self.seen[warp, at_work] = max(int(self.seen[warp, at_work]), done)
        return done

    def clock(self, kind: int, warp: int) -> int:
        engine = self.agent(kind, warp)
        return int(self.seen[engine, engine])

    def clocks(self) -> np.ndarray:
        """Of all agents."""
        return self.seen.diagonal().copy()

    def clock_of_warp(self, warp: int) -> int:
        return int(self.seen[warp, warp])

    def name(self, agent: int) -> str:
        return NAMES[agent // self.warps].format(agent % self.warps)


class Shadow:
    """What is known of each granule of a shared memory: who wrote it last and when, who read it when.

    granule: bytes that are always accessed together: the smallest access of the kernel.
    """

    def __init__(self, order: Order, size: int, base: int, granule: int) -> None:
        self.order, self.base, self.granule = order, base, granule
        cells = -(-size // granule)
        self.writer = np.full(cells, NOBODY, np.int16)
        self.written = np.zeros(cells, np.int32)
        self.handed_on: dict[int, Clock] = {}  # by address
        self.readers: dict[int, np.ndarray] = {}  # agent → clock of its last read of each granule

    def cells(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """The granules of `size` bytes at each address: (lanes, size / granule)."""
        first = (addresses.astype(np.int64) - self.base) // self.granule
        return first[:, None] + np.arange(max(size // self.granule, 1))

    def on_read(
        self, warp: np.ndarray, addresses: np.ndarray, size: int, kind: int = THREAD
    ) -> np.ndarray | None:
        """A read by the warp of each lane, or by its engine. Which lanes read what nobody wrote, if any."""
        cells, order = self.cells(addresses, size), self.order
        owner = warp[:, None]
        writer = self.writer[cells]
        unwritten = writer == NOBODY
        known = order.seen[owner, writer]
        early = (self.written[cells] > known) & ~unwritten
        if early.any():
            self.report("reads", "wrote", kind, warp, cells, early, writer)
        if kind in ASYNC_PROXY:
            hidden = (
                (self.written[cells] > order.visible[owner, writer]) & ~unwritten & (writer < 2 * order.warps)
            )
            if hidden.any():
                self.report("reads", "wrote", kind, warp, cells, hidden, writer, NO_FENCE)
        for agent in np.unique(order.agent(kind, warp)).tolist():
            clocks = self.readers.setdefault(agent, np.zeros(len(self.writer), np.int32))
            clocks[cells[order.agent(kind, warp) == agent]] = order.seen[agent, agent]
        return unwritten.any(axis=1) if unwritten.any() else None

    def on_group_read(
        self, leader: int, warps: np.ndarray, addresses: np.ndarray, size: int, kind: int
    ) -> bool:
        """A read by the engine of a warpgroup, before which all its warps must know what they need to.

        Whether it reads what nobody has written.
        """
        cells, order = self.cells(addresses, size), self.order
        writer, written = self.writer[cells], self.written[cells]
        unwritten = writer == NOBODY
        owner = np.full(len(addresses), leader)
        early = (written > order.seen[warps].min(axis=0)[writer]) & ~unwritten
        if early.any():
            self.report("reads", "wrote", kind, owner, cells, early, writer)
        hidden = (
            (written > order.visible[warps].min(axis=0)[writer]) & ~unwritten & (writer < 2 * order.warps)
        )
        if hidden.any():
            self.report("reads", "wrote", kind, owner, cells, hidden, writer, NO_FENCE)
        agent = order.agent(kind, leader)
        clocks = self.readers.setdefault(agent, np.zeros(len(self.writer), np.int32))
        clocks[cells] = order.seen[agent, agent]
        return bool(unwritten.any())

    def on_write(self, warp: np.ndarray, addresses: np.ndarray, size: int, kind: int = THREAD) -> None:
        """A write by the warp of each lane, or by its engine."""
        cells, order = self.cells(addresses, size), self.order
        owner = warp[:, None]
        agent = order.agent(kind, owner)
        writer = self.writer[cells]
        early = (writer != NOBODY) & (self.written[cells] > order.seen[owner, writer])
        if kind != BULK_LOAD:  # bulk loads keep no order among themselves
            early &= writer != agent
        if early.any():
            self.report("writes", "wrote", kind, warp, cells, early, writer)
        for reader, clocks in self.readers.items():
            unordered = (clocks[cells] > order.seen[owner, reader]) & (owner != reader)
            if unordered.any():
                self.report("writes", "read", kind, warp, cells, unordered, np.full(cells.shape, reader))
        self.writer[cells] = agent
        self.written[cells] = order.seen[agent, agent]

    def one_by_one(
        self, warp: np.ndarray, addresses: np.ndarray, access: Callable[[np.ndarray], None]
    ) -> None:
        """Accesses that order what comes before them in one thread and behind them in another.

        Taken for such: atomics, and volatile, relaxed, acquire and release accesses, whatever their fences.
        access: records the access of some lanes, given by a mask.
        """
        for agent in np.unique(warp).tolist():
            lanes = warp == agent
            places = set(addresses[lanes].tolist())
            for place in places & self.handed_on.keys():
                self.order.acquire(agent, self.handed_on[place])
            access(lanes)
            clock = self.order.publish(agent)
            self.handed_on.update((place, clock.merged(self.handed_on.get(place))) for place in places)

    def report(
        self,
        now: str,
        then: str,
        kind: int,
        warp: np.ndarray,
        cells: np.ndarray,
        where: np.ndarray,
        other: np.ndarray,
        why: str = "nothing that orders the one before the other",
    ) -> None:
        lane, part = np.argwhere(where)[0]
        first = self.order.name(int(self.order.agent(kind, int(warp[lane]))))
        second = self.order.name(int(other[lane, part]))
        byte = int(cells[lane, part]) * self.granule
        raise RaceError(f"race: {first} {now} byte {byte} of shared memory, which {second} {then} with {why}")
