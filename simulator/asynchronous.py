"""What goes on beside the threads: cp.async, bulk copies, mbarriers, and waiting for them.

Copies are done when they are issued; when the program may rely on them is what `races.Order` keeps track of.
"""

from typing import Any

import numpy as np

from cutelab.simulator import engines
from cutelab.simulator.accesses import OFFSET, RANK_SHIFT
from cutelab.simulator.barriers import MBarrier
from cutelab.simulator.errors import BarrierError, MemoryFault, RaceError, UninitializedRead
from cutelab.simulator.global_races import WEAK, Access
from cutelab.simulator.memory import SHARED_BASE
from cutelab.simulator.races import BULK_LOAD, BULK_STORE, BULK_WRITE, CP_ASYNC, GPU
from cutelab.simulator.tensormap import TensorMap, decode, replaced, replaced_parts
from cutelab.simulator.warps import Warps

BULK_ALIGNMENT = 16


class Asynchronous(Warps):
    # --- Groups

    def commit(self, kind: int, s: Any) -> None:
        """What the executing warps gave an engine so far makes up a group."""
        for warp in self.warps_of(s):
            self.order.commit(kind, warp)
            if kind == BULK_STORE:
                self.order.commit(BULK_WRITE, warp)

    def wait(self, kind: int, groups: int, s: Any) -> None:
        """All but the newest groups of an engine are done, as the executing warps know from here on."""
        for warp in self.warps_of(s):
            self.order.wait(kind, warp, groups, warp)
            if kind == BULK_WRITE:  # what is written has been read
                self.order.wait(BULK_STORE, warp, groups, warp)

    def fence(self, scope: int, s: Any) -> None:
        for warp in self.warps_of(s):
            self.order.fence(warp, scope)

    def fence_async_proxy(self, s: Any) -> None:
        for warp in self.warps_of(s):
            self.order.fence_async_proxy(warp)

    # --- cp.async

    def cp_async(self, to: np.ndarray, source: np.ndarray, size: int, present: Any, s: Any) -> None:
        """Copies `size` bytes for each thread, of which only `present` are read and the others zero."""
        present = self.lanes(size if present is None else np.minimum(present, size), s)
        words = np.zeros((len(to), size // 4), np.uint32)
        whole, races = present == size, self.memory.races
        if whole.any():
            there = source[whole]
            words[whole] = self.memory.load(there, np.dtype(np.uint32), size // 4)
            races.on_read(self.access(self.agent[s][whole], CP_ASYNC), there, size)
        for lane in np.flatnonzero(~whole & (present > 0)):
            few = self.memory.load(source[lane : lane + 1] + np.arange(present[lane]), np.dtype(np.uint8), 1)
            who = self.access(self.agent[s][lane : lane + 1], CP_ASYNC)
            races.on_read(who, source[lane : lane + 1], int(present[lane]))
            words[lane] = np.pad(few.ravel(), (0, size - int(present[lane]))).view(np.uint32)
        region, to = self.region("shared", to, s)
        region.store(to, words)
        self.count_banks("cp.async", size, self.ids(s), to)
        self.shadow.on_write(self.agent[s], to, size, CP_ASYNC)

    def arrive_after_cp_async(self, addresses: np.ndarray, counted: bool, s: Any) -> None:
        """cp.async.mbarrier.arrive: so do the thread's copies so far, as one that counts or as one more."""
        clocks = {warp: self.order.complete(CP_ASYNC, warp) for warp in self.warps_of(s)}
        for thread, address in zip(self.ids(s), addresses.tolist(), strict=True):
            barrier, clock = self.mbarrier(address, thread), clocks[int(self.agent[thread])]
            if counted:
                barrier.arrive(1, clock, f"warp {int(self.warp[thread])}")
            else:
                barrier.learn(clock)
        self.progress()

    # --- mbarriers

    def own_mbarrier(self, place: int) -> MBarrier:
        """The mbarrier at a place in this CTA's shared memory."""
        if place not in self.mbarriers:
            raise BarrierError(f"nobody has initialised an mbarrier at {self.place(place)}")
        return self.mbarriers[place]

    def mbarrier(self, address: int, thread: int) -> MBarrier:
        """The mbarrier at a shared-memory address, whose initialisation the thread must have seen."""
        owner: Any = self
        if address >> RANK_SHIFT:
            owner, _ = self.owner(np.array([address]))
        found = owner.own_mbarrier(address & OFFSET)
        agent = int(self.agent[thread])
        initialiser, clock = found.born
        if clock > self.order.seen[agent, initialiser] and initialiser != agent:
            raise RaceError(
                f"race: warp {int(self.warp[thread])} uses {found.name} with nothing that orders it after "
                "its initialisation"
            )
        return found

    def mbarrier_init(self, addresses: np.ndarray, count: Any, s: Any) -> None:
        counts = self.lanes(count, s).tolist()
        for thread, address, arrivals in zip(self.ids(s), addresses.tolist(), counts, strict=True):
            if address % 8 or not 0 <= address - SHARED_BASE <= self.shared.data.size - 8:
                raise MemoryFault(f"no mbarrier fits at {self.place(address)}: misaligned or out of bounds")
            warp = int(self.agent[thread])
            born = warp, self.order.clock_of_warp(warp)
            self.order.publish(warp)
            self.mbarriers[address] = MBarrier(f"the mbarrier at {self.place(address)}", int(arrivals), born)

    def mbarrier_inval(self, addresses: np.ndarray, s: Any) -> None:
        for thread, address in zip(self.ids(s), addresses.tolist(), strict=True):
            self.mbarrier(address, thread)
            del self.mbarriers[address]

    def mbarrier_arrive(
        self, addresses: np.ndarray, count: Any, expected: Any, s: Any, drop: bool = False
    ) -> None:
        """expected: bytes that the arriving thread announces, or None. drop: it won't take part any more."""
        announced = None if expected is None else self.lanes(expected, s).tolist()
        counts = self.lanes(count, s).tolist()
        clocks = {warp: self.order.publish(warp) for warp in self.warps_of(s)}
        for lane, (thread, address) in enumerate(zip(self.ids(s), addresses.tolist(), strict=True)):
            barrier = self.mbarrier(address, thread)
            if announced is not None:
                barrier.expect(announced[lane])
            if drop:
                barrier.count -= int(counts[lane])
            clock = clocks[int(self.agent[thread])]
            barrier.arrive(int(counts[lane]), clock, f"warp {int(self.warp[thread])}")
        self.progress()

    def mbarrier_expect(self, addresses: np.ndarray, size: Any, s: Any) -> None:
        for thread, address, announced in zip(
            self.ids(s), addresses.tolist(), self.lanes(size, s).tolist(), strict=True
        ):
            self.mbarrier(address, thread).expect(announced)

    def mbarrier_complete(self, addresses: np.ndarray, size: Any, s: Any) -> None:
        for thread, address, done in zip(
            self.ids(s), addresses.tolist(), self.lanes(size, s).tolist(), strict=True
        ):
            self.mbarrier(address, thread).complete(done, self.order.publish(int(self.agent[thread])))
        self.progress()

    def mbarrier_state(self, addresses: np.ndarray, s: Any) -> np.ndarray:
        barriers = [self.mbarrier(a, t) for a, t in zip(addresses.tolist(), self.ids(s), strict=True)]
        return np.array([each.phase & 1 | each.pending << 1 for each in barriers], np.uint64)

    def mbarrier_pending_count(self, state: Any) -> Any:
        return (np.asarray(state) >> np.uint64(1)).astype(np.uint32)

    def mbarrier_test(self, addresses: np.ndarray, parity: Any, s: Any) -> np.ndarray:
        """Which threads find the phase of `parity` over; those learn what it covers."""
        over = np.zeros(len(addresses), bool)
        bits = self.lanes(parity, s).tolist()
        for lane, (thread, address) in enumerate(zip(self.ids(s), addresses.tolist(), strict=True)):
            barrier = self.mbarrier(address, thread)
            over[lane] = barrier.passed(int(bits[lane]))
            if over[lane] and barrier.released is not None:
                self.order.acquire(int(self.agent[thread]), barrier.released)
        return over

    # --- Bulk copies

    def tensor_map(self, address: int, s: Any) -> TensorMap:
        region, place = self.region("generic", np.array([address]), s)
        return decode(region.load(place[0] + np.arange(128), np.dtype(np.uint8), 1).tobytes())

    def replace_tensor_map(
        self, field: str, mode: int, space: str, addresses: np.ndarray, value: Any, s: Any
    ) -> None:
        """tensormap.replace, thread by thread."""
        values = self.lanes(value, s)
        for lane in range(len(addresses)):
            one = self.ids(s)[lane : lane + 1]
            for part in replaced_parts(field, mode):
                place = addresses[lane : lane + 1] + 4 * part[0]
                word = int(self.load(space, place, np.uint32, 1, one)[0, 0])
                new = replaced(word, part, field, int(values[lane]))
                self.store(space, place, np.array([[new]], np.uint32), one)

    def copy_tensor_map(self, to: np.ndarray, source: np.ndarray, s: Any) -> None:
        """tensormap.cp_fenceproxy: 128 bytes of shared memory to global memory, once for each warp."""
        self.whole_warps(s)
        first, _, _ = self.first_of_warps(self.ids(s))
        for lane in first.tolist():
            one = self.ids(s)[lane : lane + 1]
            parts = 16 * np.arange(8)
            threads = one.repeat(len(parts))
            words = self.load("shared", source[lane] + parts, np.uint64, 2, threads)
            self.store("global", to[lane] + parts, words, threads)

    def bulk_load(
        self, to: np.ndarray, maps: np.ndarray, start: list[Any], barriers: np.ndarray, mask: Any, s: Any
    ) -> None:
        """cp.async.bulk.tensor into shared memory, by each executing thread."""
        coordinates = [self.lanes(c, s) for c in start]
        for lane, thread in enumerate(self.ids(s)):
            tensor = self.tensor_map(int(maps[lane]), s)
            at = tuple(int(c[lane]) for c in coordinates)
            values = engines.load_box(self.memory, tensor, at)
            self.memory.races.on_box_read(self.by_engine(BULK_LOAD, int(thread)), tensor, at)
            for peer, place, barrier in self.destinations(int(to[lane]), int(barriers[lane]), mask, lane, s):
                places = engines.put_box(peer.shared, tensor, place, values)
                self.arrived(peer, barrier, places, values.nbytes, int(thread))
        self.progress()

    def bulk_copy_in(
        self,
        to: np.ndarray,
        source: np.ndarray,
        size: Any,
        barriers: np.ndarray,
        from_global: bool,
        mask: Any,
        reduction: str,
        kind: str,
        s: Any,
    ) -> None:
        """cp.async.bulk, or cp.reduce.async.bulk, into shared memory, from global memory or the CTA's own."""
        sizes = self.lanes(size, s)
        for lane, thread in enumerate(self.ids(s)):
            places = self.bulk_places(int(source[lane]), int(sizes[lane]))
            memory, places = (self.memory, places) if from_global else self.region("shared", places, s)
            values = memory.load(places, np.dtype(np.uint64), 2)
            if from_global:
                who = self.by_engine(BULK_LOAD, int(thread), len(places))
                self.memory.races.on_read(who, places, BULK_ALIGNMENT)
            else:
                self.engine_reads(places, int(thread), BULK_LOAD)
            for peer, place, barrier in self.destinations(int(to[lane]), int(barriers[lane]), mask, lane, s):
                targets = self.bulk_places(place, int(sizes[lane]))
                new = values
                if reduction:
                    old = peer.shared.load(targets, np.dtype(np.uint64), 2)
                    new = engines.reduced(reduction, kind, old, values)
                peer.shared.store(targets, new)
                self.arrived(peer, barrier, targets, values.nbytes, int(thread))
        self.progress()

    def destinations(self, to: int, barrier: int, mask: Any, lane: int, s: Any) -> list[tuple[Any, int, int]]:
        """(CTA, place, mbarrier) for each CTA that a bulk load writes to."""
        if mask is None:
            peer, (place,) = self.owner(np.array([to]))
            return [(peer, int(place), barrier & OFFSET)]
        ranks = engines.multicast(self.lanes(mask, s)[lane], self.rank)
        if ranks[-1] >= len(self.peers):
            raise MemoryFault(f"a multicast to CTA {ranks[-1]} of a cluster of {len(self.peers)}")
        return [(self.peers[rank], to & OFFSET, barrier & OFFSET) for rank in ranks]

    def arrived(self, peer: Any, barrier: int, places: np.ndarray, size: int, thread: int) -> None:
        """A bulk load has written 16 bytes at each of `places` in a CTA: its mbarrier counts them."""
        warp = int(self.agent[thread])
        peer.shadow.on_write(np.full(len(places), warp), places, 16, BULK_LOAD)
        found = self.mbarrier(barrier, thread) if peer is self else peer.own_mbarrier(barrier)
        found.complete(size, self.order.complete(BULK_LOAD, warp))

    def bulk_places(self, start: int, size: int) -> np.ndarray:
        if start % BULK_ALIGNMENT or size % BULK_ALIGNMENT or not size:
            raise MemoryFault(f"misaligned: a bulk copy of {size} bytes at {start:#x}, where 16 divides both")
        return start + np.arange(0, size, BULK_ALIGNMENT)

    def store_async(
        self, to: np.ndarray, values: np.ndarray, barriers: np.ndarray, reduction: str, kind: str, s: Any
    ) -> None:
        """st.async and red.async, thread by thread."""
        for lane, thread in enumerate(self.ids(s)):
            peer, place = self.owner(to[lane : lane + 1])
            new = values[lane : lane + 1]
            if reduction:
                new = engines.reduced(reduction, kind, peer.shared.load(place, new.dtype, 1), new)
            peer.shared.store(place, new)
            warp, barrier = int(self.agent[thread]), int(barriers[lane]) & OFFSET
            peer.shadow.on_write(np.array([warp]), place, values[lane].nbytes, BULK_LOAD)
            peer.own_mbarrier(barrier).complete(values[lane].nbytes, self.order.complete(BULK_LOAD, warp))
        self.progress()

    def bulk_store(
        self, maps: np.ndarray, start: list[Any], source: np.ndarray, reduction: str, s: Any
    ) -> None:
        """cp.async.bulk.tensor, or cp.reduce.async.bulk.tensor, from shared memory.

        Lanes of a warp that store the same box do it once, as they do on the hardware.
        """
        coordinates = [self.lanes(c, s) for c in start]
        done: set[tuple[int, ...]] = set()
        for lane, thread in enumerate(self.ids(s)):
            at = tuple(int(c[lane]) for c in coordinates)
            what = int(self.agent[thread]), int(maps[lane]), int(source[lane]), *at
            if what in done and not reduction:
                continue
            done.add(what)
            tensor = self.tensor_map(int(maps[lane]), s)
            places = engines.store_box(self.memory, self.shared, tensor, int(source[lane]), at, reduction)
            self.engine_reads(places, int(thread), BULK_STORE)
            who = self.by_engine(BULK_WRITE, int(thread), scope=GPU if reduction else WEAK)
            self.memory.races.on_box_write(who, tensor, at)
        self.progress()

    def bulk_copy_out(
        self, to: np.ndarray, source: np.ndarray, size: Any, reduction: str, kind: str, s: Any
    ) -> None:
        """cp.async.bulk, or cp.reduce.async.bulk, from shared to global memory."""
        sizes = self.lanes(size, s)
        for lane, thread in enumerate(self.ids(s)):
            region, places = self.region("shared", self.bulk_places(int(source[lane]), int(sizes[lane])), s)
            self.engine_reads(places, int(thread), BULK_STORE)
            values = region.load(places, np.dtype(np.uint64), 2)
            targets = self.bulk_places(int(to[lane]), int(sizes[lane]))
            if reduction:
                old = self.memory.load(targets, np.dtype(np.uint64), 2)
                values = engines.reduced(reduction, kind, old, values)
            self.memory.store(targets, values)
            scope = GPU if reduction else WEAK
            who = self.by_engine(BULK_WRITE, int(thread), len(targets), scope)
            self.memory.races.on_write(who, targets, BULK_ALIGNMENT)
        self.progress()

    def by_engine(self, kind: int, thread: int, lanes: int = 1, scope: int = WEAK) -> Access:
        """An access to global memory that a thread has an engine do."""
        return self.access(np.full(lanes, self.agent[thread]), kind, scope)

    def engine_reads(self, places: np.ndarray, thread: int, kind: int) -> None:
        """A bulk copy reads 16 bytes of shared memory at each of `places`."""
        warp = int(self.agent[thread])
        if self.shadow.on_read(np.full(len(places), warp), places, 16, kind) is not None:
            raise UninitializedRead(f"a bulk copy of warp {warp} reads shared memory that nobody has written")
