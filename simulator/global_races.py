"""Finds races in global memory, between all warps of a grid.

The rule (PTX ISA, "Memory Consistency Model"): two accesses to the same byte, at least one of them a write,
are a race unless barriers, mbarriers and waits, or a release and an acquire in global memory, order the one
before the other. Stores of the same value race too. Strong accesses among themselves do not, as long as the
scope of each takes in the other's thread: atomics, `red`, bulk reductions, and volatile, relaxed, acquire and
release loads and stores. They order other accesses only where they acquire and release, by themselves or with
a fence before the write and behind the read; scopes count here too. Volatile is relaxed.

What is not looked at: lanes of one warp among themselves; other launches; parts of granules that bulk copies
touch at the edges of boxes; and of what happened to a granule all but the last write and three reads: the
last one, the last one by another warp of that cluster, and the last one by another cluster.

Granules have an epoch each for the last write and the last reads: who it was, and that one's clock, in one
number of 64 bits. Reads are only noted down until somebody writes to the tensor.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from cutelab.simulator import engines
from cutelab.simulator.errors import RaceError
from cutelab.simulator.memory import GlobalMemory, Region
from cutelab.simulator.ptx import Instruction
from cutelab.simulator.races import (
    ASYNC_PROXY,
    CLUSTER,
    CTA,
    GPU,
    NAMES,
    NO_FENCE,
    THREAD,
    Known,
    Order,
    joined,
)
from cutelab.simulator.tensormap import TensorMap

CLOCK_BITS, AGENT_BITS, SCOPE_SHIFT = 32, 29, 61
CLOCKS, AGENTS = (1 << CLOCK_BITS) - 1, (1 << AGENT_BITS) - 1
WEAK = -1
LONGEST_LOG = 1 << 14
SCOPE_NAMES = {"cta": CTA, "cluster": CLUSTER, "gpu": GPU, "gl": GPU, "sys": GPU}


class Strength(NamedTuple):
    """Of a strong access."""

    acquires: bool
    releases: bool
    scope: int


@lru_cache(maxsize=1024)
def strength(modifiers: tuple[str, ...]) -> Strength:
    """That of an instruction with these modifiers; without a scope it is that of the GPU."""
    scope = next((SCOPE_NAMES[each] for each in modifiers if each in SCOPE_NAMES), GPU)
    both = "acq_rel" in modifiers
    return Strength(both or "acquire" in modifiers, both or "release" in modifiers, scope)


class Access(NamedTuple):
    """Who accesses global memory: `agents` are the warps of the lanes, as numbered in the cluster."""

    order: Order
    agents: np.ndarray
    kind: int
    scope: int  # of a strong one, else WEAK
    clocks: np.ndarray  # of all agents of the cluster
    site: int


Last = tuple[np.ndarray, np.ndarray]
"""Of each granule, the epoch of an access and its number among `GlobalRaces.sites`."""


class Cells:
    """What is known of the granules of one tensor. Pages that nobody touches take no memory."""

    def __init__(self, region: Region, granule: int) -> None:
        self.region, self.granule = region, granule
        self.bits = granule.bit_length() - 1  # it is a power of two
        self.first = region.base >> self.bits
        count = (region.end - 1 >> self.bits) + 1 - self.first
        self.writer, self.write_site = blank(count)
        self.reader, self.read_site = blank(count)
        # Of reads before the last one, by another warp of its cluster and by another cluster, if any.
        self.near: Last | None = None
        self.far: Last | None = None
        self.written = False
        self.partly: list[np.ndarray] = []  # addresses of bytes written in granules that weren't whole
        self.log: list[tuple[Access, Callable[[], np.ndarray], int]] = []  # (who, where, bytes)

    def at(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """The granules of `size` bytes at each address: (lanes, size / granule)."""
        first = ((addresses >> self.bits) - self.first)[:, None]
        return first if size <= self.granule else first + np.arange(size // self.granule)

    def noted(self, first: int) -> np.ndarray:
        """Which granules the reads that are only noted down were of, by clusters behind number `first`."""
        found = np.zeros(len(self.writer), bool)
        by_size: dict[int, list[np.ndarray]] = {}
        for who, where, size in self.log:
            if who.order.cluster > first:
                by_size.setdefault(size, []).append(where())
        for size, addresses in by_size.items():
            found[self.at(np.concatenate(addresses), size)] = True
        return found


class GlobalRaces:
    """The accesses of one launch to global memory.

    warps: of a CTA. clusters, cluster: the shapes of the grid, in clusters, and of a cluster, in CTAs.
    granule: bytes that are always accessed together: the smallest access of the kernel.
    """

    def __init__(
        self,
        memory: GlobalMemory,
        granule: int,
        warps: int,
        clusters: tuple[int, int, int],
        cluster: tuple[int, int, int],
    ) -> None:
        self.memory, self.granule, self.warps = memory, granule, warps
        self.clusters, self.cluster = clusters, cluster
        agents = len(NAMES) * warps * cluster[0] * cluster[1] * cluster[2]
        self.shift = agents.bit_length()  # an agent's number, in the grid: cluster << shift | number there
        self.cells: dict[int, Cells] = {}  # by the address where a tensor begins
        self.sites: list[Instruction | None] = []
        self.site_numbers: dict[int, int] = {}
        self.released: dict[tuple[int, object], Known] = {}  # by address and who can acquire it

    # --- What happens

    def access(
        self, order: Order, agents: np.ndarray, kind: int, scope: int, at: Instruction | None
    ) -> Access:
        site = self.site_numbers.setdefault(id(at), len(self.sites))
        if site == len(self.sites):
            self.sites.append(at)
        return Access(order, agents, kind, scope, order.clocks(), site)

    def of(self, region: Region) -> Cells:
        found = self.cells.get(region.base)
        if found is None:
            found = self.cells[region.base] = Cells(region, self.granule)
        return found

    def on_read(self, who: Access, addresses: np.ndarray, size: int) -> None:
        """A read of `size` bytes at each address; what doesn't fill a granule doesn't count."""
        size -= size % self.granule
        for region, lanes in self.memory.split(addresses) if size and len(addresses) else ():
            cells, mine, where = self.of(region), who, addresses
            if len(lanes) < len(addresses):
                mine, where = who._replace(agents=who.agents[lanes]), addresses[lanes]
            if cells.written:
                at = cells.at(where, size)
                if (writer := cells.writer[at]).any():
                    self.check(cells, mine, at, writer, cells.write_site, "reads", "wrote")
            self.note(cells, mine, partial(itself, where), size)

    def on_box_read(self, who: Access, tensor: TensorMap, start: tuple[int, ...]) -> None:
        """A bulk load of a box by one thread."""
        region = self.memory.lookup(tensor.address)
        if region is None or self.of(region).written:
            addresses, size, _ = box_places(tensor, start, self.granule)
            self.on_read(self.spread(who, len(addresses)), addresses, size)
        else:
            size = max(tensor.element_bytes, self.granule)
            self.note(self.of(region), who, lambda: box_places(tensor, start, self.granule)[0], size)

    def on_box_write(self, who: Access, tensor: TensorMap, start: tuple[int, ...]) -> None:
        addresses, size, rest = box_places(tensor, start, self.granule)
        self.on_write(self.spread(who, len(addresses)), addresses, size)
        if len(rest) and (region := self.memory.lookup(int(rest[0]))):
            places = rest[:, None] + np.arange(tensor.element_bytes)
            self.of(region).partly.append(places.ravel())

    def on_write(self, who: Access, addresses: np.ndarray, size: int) -> None:
        if who.scope == WEAK or who.kind != THREAD:
            self.memory.changes += 1
        for region, lanes in self.memory.split(addresses) if len(addresses) else ():
            cells = self.of(region)
            self.read_log(cells)
            cells.written = True
            mine = who if len(lanes) == len(addresses) else who._replace(agents=who.agents[lanes])
            self.write(cells, mine, addresses[lanes], size)

    def spread(self, who: Access, count: int) -> Access:
        return who._replace(agents=np.full(count, who.agents[0]))

    # --- Strong accesses

    def strong(
        self,
        order: Order,
        agents: np.ndarray,
        addresses: np.ndarray,
        size: int,
        at: Instruction,
        reads: bool,
        writes: bool,
    ) -> None:
        """Warp by warp: what each acquires, its access, and what it releases."""
        how = strength(at.modifiers)
        for agent in sorted({*agents.tolist()}):
            lanes = agents == agent
            where = addresses[lanes]
            places = {*where.tolist()}
            if reads:
                self.acquire(order, agent, places, how)
            who = self.access(order, agents[lanes], THREAD, how.scope, at)
            if reads:
                self.on_read(who, where, size)
            if writes:
                self.on_write(who, where, size)
                self.release(order, agent, places, how, keeps=reads)

    def audiences(self, order: Order, agent: int) -> tuple[object, object, object]:
        """Who may acquire what the agent releases, by scope."""
        return (order.cluster, agent // self.warps), order.cluster, None

    def acquire(self, order: Order, agent: int, places: set[int], how: Strength) -> None:
        for level, audience in enumerate(self.audiences(order, agent)[: how.scope + 1]):
            for place in places:
                known = self.released.get((place, audience))
                if known and how.acquires:
                    order.acquire_far(agent, known)
                elif known:
                    order.observe(agent, level, known)

    def release(self, order: Order, agent: int, places: set[int], how: Strength, keeps: bool) -> None:
        """keeps: an atomic goes on with the release sequence of those before it."""
        levels = [order.publish_far(agent)] * 3 if how.releases else None
        if levels is None:
            far = order.far.get(agent)
            levels = list(far.fenced) if far else [{}] * 3
        for level, audience in enumerate(self.audiences(order, agent)):
            known = levels[level] if level <= how.scope else {}
            for place in places:
                old = self.released.get((place, audience), {}) if keeps else {}
                self.released[place, audience] = joined(known, old)

    # --- Records

    def epochs(self, who: Access) -> np.ndarray:
        agent = who.order.agent(who.kind, who.agents)
        common = who.scope + 1 << SCOPE_SHIFT | who.order.cluster << self.shift + CLOCK_BITS
        return (agent << CLOCK_BITS | common | who.clocks[agent])[:, None]

    def note(self, cells: Cells, who: Access, where: Callable[[], np.ndarray], size: int) -> None:
        cells.log.append((who, where, size))
        if len(cells.log) > LONGEST_LOG:
            self.read_log(cells)

    def read_log(self, cells: Cells) -> None:
        for who, where, size in cells.log:
            addresses = where()
            if len(addresses) != len(who.agents):
                who = self.spread(who, len(addresses))
            if len(addresses):
                self.record_read(cells, who, cells.at(addresses, size))
        cells.log.clear()

    def record_read(self, cells: Cells, who: Access, at: np.ndarray) -> None:
        last, mine = cells.reader[at], self.epochs(who)
        if last.any():
            another = (last != 0) & differ(last, mine)
            far = another & (self.cluster_of(last) != who.order.cluster)
            if far.any():
                cells.far = cells.far or blank(len(cells.reader))
                put(cells.far, at[far], last[far], cells.read_site[at[far]])
            if (near := another & ~far).any():
                cells.near = cells.near or blank(len(cells.reader))
                put(cells.near, at[near], last[near], cells.read_site[at[near]])
        cells.reader[at], cells.read_site[at] = mine, who.site
        if who.agents[0] != who.agents[-1] and (lost := cells.reader[at] != mine).any():
            cells.near = cells.near or blank(len(cells.reader))  # another warp reads it at the same time
            put(cells.near, at[lost], np.broadcast_to(mine, at.shape)[lost], who.site)

    def write(self, cells: Cells, who: Access, addresses: np.ndarray, size: int) -> None:
        at = cells.at(addresses, size)
        for before, what in (
            ((cells.writer, cells.write_site), "wrote"),
            ((cells.reader, cells.read_site), "read"),
            (cells.near, "read"),
            (cells.far, "read"),
        ):
            if before and (epochs := before[0][at]).any():
                self.check(cells, who, at, epochs, before[1], "writes", what)
        mine = self.epochs(who)
        cells.writer[at], cells.write_site[at] = mine, who.site
        if who.agents[0] != who.agents[-1] and (at_once := cells.writer[at] != mine).any():
            self.report(cells, who, at, cells.writer[at], cells.write_site, at_once, "writes", "wrote")

    # --- Checks

    def cluster_of(self, epochs: np.ndarray) -> np.ndarray:
        return (epochs >> CLOCK_BITS & AGENTS) >> self.shift

    def check(
        self,
        cells: Cells,
        who: Access,
        at: np.ndarray,
        epochs: np.ndarray,
        sites: np.ndarray,
        now: str,
        then: str,
    ) -> None:
        """Raises RaceError unless the accesses of `epochs`, (lanes, granules), all come before this one."""
        late = self.late(who, epochs)
        if late.any():
            number = epochs >> CLOCK_BITS & AGENTS
            near, agent = number >> self.shift == who.order.cluster, number & (1 << self.shift) - 1
            engine = who.order.agent(who.kind, who.agents[:, None])
            # What other lanes of this instruction have given the same engine doesn't count.
            same = near & (agent == engine) & (epochs & CLOCKS == who.clocks[engine])
            same &= sites[at] == who.site
            late &= ~(same | self.morally_strong(who, epochs, near, agent))
            if late.any():
                self.report(cells, who, at, epochs, sites, late, now, then)
        if who.kind in ASYNC_PROXY and now == "reads":
            by_threads = (epochs >> CLOCK_BITS & (1 << self.shift) - 1) < 2 * who.order.warps
            hidden = self.late(who, epochs, visible=True) & by_threads
            if hidden.any():
                self.report(cells, who, at, epochs, sites, hidden, now, then, NO_FENCE)

    def late(self, who: Access, epochs: np.ndarray, visible: bool = False) -> np.ndarray:
        """Which accesses the warps of the lanes don't know to come before, or not to be visible."""
        number, clock = epochs >> CLOCK_BITS & AGENTS, epochs & CLOCKS
        agents, clusters = number & (1 << self.shift) - 1, number >> self.shift
        own = (who.agents - who.agents[0])[:, None]
        lowest, highest = int(clusters.min()), int(clusters.max())
        if lowest == highest:
            return clock > self.known(who, lowest, visible)[own, agents]
        late = np.zeros(epochs.shape, bool)
        for cluster in np.unique(clusters).tolist():
            late |= (clusters == cluster) & (clock > self.known(who, cluster, visible)[own, agents])
        return late

    def known(self, who: Access, cluster: int, visible: bool) -> np.ndarray:
        """Up to which clocks the warps, from the first lane's to the last one's, know a cluster's agents."""
        order, warps = who.order, range(who.agents[0], who.agents[-1] + 1)
        if cluster == order.cluster:
            return (order.visible if visible else order.seen)[warps.start : warps.stop]
        found = np.zeros((len(warps), order.seen.shape[1]), np.int32)
        for row, warp in zip(found, warps, strict=True):
            if (far := order.far.get(warp)) and cluster in far.known:
                row[:] = far.known[cluster].visible if visible else far.known[cluster].seen
        return found

    def morally_strong(
        self, who: Access, epochs: np.ndarray, near: np.ndarray, agent: np.ndarray
    ) -> np.ndarray:
        """Both strong, and the scope of each takes in the other's thread."""
        if who.scope == WEAK:
            return np.zeros(epochs.shape, bool)
        same_cta = agent % who.order.warps // self.warps == (who.agents // self.warps)[:, None]
        needed = np.where(near, np.where(same_cta, CTA, CLUSTER), GPU)
        return ((epochs >> SCOPE_SHIFT) - 1 >= needed) & (who.scope >= needed)

    def report(
        self,
        cells: Cells,
        who: Access,
        at: np.ndarray,
        epochs: np.ndarray,
        sites: np.ndarray,
        where: np.ndarray,
        now: str,
        then: str,
        why: str = "nothing that orders the one before the other",
    ) -> None:
        lane, part = np.argwhere(where)[0]
        mine = (who.order.cluster << self.shift) + int(who.order.agent(who.kind, int(who.agents[lane])))
        other = int(epochs[lane, part]) >> CLOCK_BITS & AGENTS
        byte = max(int(at[lane, part] + cells.first) * cells.granule - cells.region.base, 0)
        same = "; to write the same value is a race too" if (now, then) == ("writes", "wrote") else ""
        place = line_of(self.sites[int(sites[at[lane, part]])])
        raise RaceError(
            f"race: {self.name(mine)} {now} byte {byte} of {cells.region.name}, which {self.name(other)} "
            f"{then} at {place}, with {why}{same}"
        )

    def name(self, number: int) -> str:
        cluster, agent = (number >> self.shift) - 1, number & (1 << self.shift) - 1
        warps = self.warps * self.cluster[0] * self.cluster[1] * self.cluster[2]
        rank, warp = divmod(agent % warps, self.warps)
        index = tuple(
            c * size + inside
            for c, size, inside in zip(
                unravelled(cluster, self.clusters), self.cluster, unravelled(rank, self.cluster), strict=True
            )
        )
        return f"{NAMES[agent // warps].format(warp)} of CTA {index}"


def blank(count: int) -> Last:
    return np.zeros(count, np.int64), np.zeros(count, np.int32)


def put(last: Last, at: np.ndarray, epochs: np.ndarray, sites: np.ndarray | int) -> None:
    last[0][at], last[1][at] = epochs, sites


def differ(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Where epochs are of different agents."""
    return (some ^ others) >> CLOCK_BITS & AGENTS != 0


def itself(addresses: np.ndarray) -> np.ndarray:
    return addresses


def line_of(instruction: Instruction | None) -> str:
    if instruction is None:
        return "an unknown line"
    source = f"{instruction.source[0]}:{instruction.source[1]}, " if instruction.source else ""
    return f"{source}PTX line {instruction.line}: {' '.join(instruction.text.rstrip(';').split())}"


def unravelled(number: int, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """(x, y, z) of a number, x fastest."""
    return number % shape[0], number // shape[0] % shape[1], number // (shape[0] * shape[1])


def box_places(tensor: TensorMap, start: tuple[int, ...], granule: int) -> tuple[np.ndarray, int, np.ndarray]:
    """Where the box from `start` on lies in the tensor, as (addresses, bytes at each, addresses of the rest).

    The rest are elements in granules that the box doesn't fill.
    """
    addresses, inside = engines.box_elements(tensor, start)
    size = tensor.element_bytes
    if size >= granule:
        return addresses[inside], size, addresses[:0]
    each = granule // size
    if addresses.size % each == 0:
        parts, present = addresses.reshape(-1, each), inside.reshape(-1, each)
        if not (parts[:, 0] % granule).any() and (parts[:, -1] - parts[:, 0] == granule - size).all():
            whole = np.logical_and.reduce(present, axis=1, keepdims=True)
            return parts[whole[:, 0], 0], granule, parts[present & ~whole]
    there = addresses[inside]
    found, which, elements = np.unique(there // granule, return_inverse=True, return_counts=True)
    return found[elements == each] * granule, granule, there[elements[which] < each]
