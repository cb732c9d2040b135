"""Loads, stores and atomics of threads, and what becomes of values that nobody has written."""

from typing import Any

import numpy as np

from cutelab.simulator import numbers
from cutelab.simulator.errors import MemoryFault, UninitializedRead
from cutelab.simulator.global_races import WEAK, Access
from cutelab.simulator.memory import LOCAL_WINDOW, PARAM_WINDOW, SHARED_BASE, SHARED_WINDOW
from cutelab.simulator.operands import numpy_type
from cutelab.simulator.races import THREAD, Shadow
from cutelab.simulator.state import State

RANK_SHIFT = 24
"""An address of shared::cluster has the CTA's rank + 1 from this bit on, or 0 for one's own."""
OFFSET = (1 << RANK_SHIFT) - 1

WORDS_128 = np.dtype([("low", "u8"), ("high", "u8")])
ATOMIC: dict[str, np.dtype] = {
    **{kind: np.dtype(np.uint16) for kind in ("f16", "bf16")},
    **{kind: np.dtype(np.uint32) for kind in ("f16x2", "bf16x2")},
    "b128": WORDS_128,
}
"""What atomic operations see in memory, of types that NumPy doesn't have."""


class Accesses(State):
    # --- Addresses

    def region(self, space: str, addresses: np.ndarray, s: Any) -> tuple[Any, np.ndarray]:
        """The memory of some addresses, and the addresses in it."""
        if space == "shared":
            owner, addresses = self.owner(addresses)
            return owner.shared, addresses
        if space == "local":
            return self.local, self.local_places(addresses, s)
        if space == "param":
            return self.parameters, addresses
        if space == "global":
            return self.memory, addresses
        return self.generic(addresses, s)

    def generic(self, addresses: np.ndarray, s: Any) -> tuple[Any, np.ndarray]:
        for start, memory in ((LOCAL_WINDOW, "local"), (PARAM_WINDOW, "param"), (SHARED_WINDOW, "shared")):
            inside = addresses >= start
            if inside.all():
                return self.region(memory, addresses - start, s)
            if inside.any():
                raise MemoryFault(
                    "generic addresses of several memories in one instruction are not supported"
                )
        return self.memory, addresses

    def local_places(self, addresses: np.ndarray, s: Any) -> np.ndarray:
        """Each thread has its own local memory: they lie side by side here."""
        size = self.program.local_bytes
        if (addresses < 0).any() or (addresses >= size).any():
            bad = int(np.flatnonzero((addresses < 0) | (addresses >= size))[0])
            raise MemoryFault(
                f"out of bounds: lane {bad} accesses byte {int(addresses[bad])} of local memory, which has "
                f"{size}"
            )
        return addresses + self.ids(s) * size

    def owner(self, addresses: np.ndarray) -> tuple[Any, np.ndarray]:
        """The CTA whose shared memory the addresses name, and the addresses in it: see `map_shared`."""
        ranks = addresses >> RANK_SHIFT
        rank = int(ranks[0]) if len(ranks) else 0
        if (ranks != rank).any():
            raise MemoryFault("shared memory of several CTAs in one instruction is not supported")
        if not 0 <= rank <= len(self.peers):
            raise MemoryFault(
                f"out of bounds: {int(addresses[0]):#x} lies in no shared memory of the cluster"
            )
        return (self.peers[rank - 1] if rank else self), addresses & OFFSET

    def shadow_of(self, region: Any) -> Shadow | None:
        """What is known of who wrote a memory, if it is a shared one of the cluster."""
        return next((peer.shadow for peer in self.peers if peer.shared is region), None)

    def map_shared(self, addresses: Any, rank: Any, generic: bool) -> Any:
        """mapa: the same place in the shared memory of the CTA `rank` of the cluster."""
        addresses = np.asarray(addresses)
        window = np.uint64(SHARED_WINDOW if generic else 0)
        low = addresses.astype(np.uint64) - window & np.uint64(OFFSET)
        mapped = low | (np.asarray(rank).astype(np.uint64) + np.uint64(1)) << np.uint64(RANK_SHIFT)
        return (mapped + window).astype(addresses.dtype)

    def rank_of(self, addresses: Any) -> Any:
        ranks = (np.asarray(addresses).astype(np.uint64) >> np.uint64(RANK_SHIFT) & np.uint64(31)).astype(
            np.int64
        )
        return np.where(ranks == 0, self.rank, ranks - 1)

    def lies_in(self, space: str, addresses: Any) -> Any:
        """isspacep, for generic addresses."""
        starts = (("shared", SHARED_WINDOW), ("param", PARAM_WINDOW), ("local", LOCAL_WINDOW))
        number = sum((addresses >= np.uint64(start)).astype(np.int64) for _, start in starts)
        names = ["global", *(name for name, _ in starts)]
        return number == names.index(space) if space in names else number < 0

    # --- Loads and stores

    def load(
        self, space: str, addresses: np.ndarray, dtype: type[np.generic], count: int, s: Any
    ) -> np.ndarray:
        """(threads, count) elements."""
        region, addresses = self.region(space, addresses, s)
        loaded = region.load(addresses, np.dtype(dtype), count)
        self.unwritten = None
        if shadow := self.shadow_of(region):
            self.count_banks("ld", loaded[0].nbytes, self.ids(s), addresses)
            self.unwritten = shadow.on_read(self.agent[s], addresses, loaded[0].nbytes)
        elif region is self.memory:
            self.memory.races.on_read(self.access(self.agent[s]), addresses, loaded[0].nbytes)
        return loaded

    def access(self, warps: np.ndarray, kind: int = THREAD, scope: int = WEAK) -> Access:
        """The instruction being executed as an access to global memory by these warps, or their engines."""
        return self.memory.races.access(self.order, warps, kind, scope, self.at)

    def store(self, space: str, addresses: np.ndarray, values: np.ndarray, s: Any) -> None:
        region, addresses = self.region(space, addresses, s)
        region.store(addresses, values)
        if shadow := self.shadow_of(region):
            self.count_banks("st", values[0].nbytes, self.ids(s), addresses)
            shadow.on_write(self.agent[s], addresses, values[0].nbytes)
        elif region is self.memory:
            self.memory.races.on_write(self.access(self.agent[s]), addresses, values[0].nbytes)

    def atomic(
        self, operation: str, kind: str, space: str, addresses: np.ndarray, s: Any, *values: np.ndarray
    ) -> np.ndarray:
        """Lane after lane; what was there before each."""
        region, addresses = self.region(space, addresses, s)
        dtype = ATOMIC.get(kind) or np.dtype(numpy_type(kind))
        if shadow := self.shadow_of(region):
            self.order_atomic(shadow, addresses, dtype.itemsize, s)
        elif region is self.memory:
            self.strong(addresses, dtype.itemsize, s, writes=True)
        values = tuple(value.astype(dtype, copy=False) for value in values)
        together = len(np.unique(addresses)) == len(addresses)
        old = np.empty(len(addresses), dtype)
        changed = False
        for part in [slice(None)] if together else [slice(n, n + 1) for n in range(len(addresses))]:
            old[part] = region.load(addresses[part], dtype, 1)[:, 0]
            new = numbers.combined(operation, kind, old[part], *(value[part] for value in values))
            if kind == "f32" and region is self.memory:  # in shared memory, subnormal numbers count
                new = numbers.flush(numbers.flush(old[part]) + numbers.flush(values[0][part]))
            new = new.astype(dtype, copy=False)
            region.store(addresses[part], new[:, None])
            changed |= new.tobytes() != old[part].tobytes()
        self.polled(s)
        if changed:
            self.memory.changes += 1
            self.progress()
        return old

    def atomic_128(
        self, operation: str, space: str, addresses: np.ndarray, s: Any, *halves: np.ndarray
    ) -> np.ndarray:
        """`atomic` of 16 bytes; halves: low and high ones of each value. Returns those, (2, threads)."""
        values = []
        for low, high in zip(halves[::2], halves[1::2], strict=True):
            values.append(np.empty(len(addresses), WORDS_128))
            values[-1]["low"], values[-1]["high"] = low, high
        old = self.atomic(operation, "b128", space, addresses, s, *values)
        return np.stack([old["low"], old["high"]])

    def strong(
        self, addresses: np.ndarray, size: int, s: Any, reads: bool = True, writes: bool = False
    ) -> None:
        """The instruction being executed is a strong access to global memory."""
        self.memory.races.strong(self.order, self.agent[s], addresses, size, self.at, reads, writes)

    def polled(self, s: Any) -> None:
        """The executing warps have looked for something that others may do."""
        self.peers[0].polls += 1
        for warp in self.warps_of(s):
            self.peers[0].polling[warp] = self.at

    def order_atomic(self, shadow: Shadow, addresses: np.ndarray, size: int, s: Any) -> None:
        warp = self.agent[s]

        def access(lanes: np.ndarray) -> None:
            if shadow.on_read(warp[lanes], addresses[lanes], size) is not None:
                raise UninitializedRead("an atomic operation on shared memory that nobody has written")
            shadow.on_write(warp[lanes], addresses[lanes], size)

        shadow.one_by_one(warp, addresses, access)

    def load_ordered(
        self, space: str, addresses: np.ndarray, dtype: type[np.generic], count: int, s: Any
    ) -> np.ndarray:
        """`load`, by which threads may wait for each other."""
        region, addresses = self.region(space, addresses, s)
        loaded = region.load(addresses, np.dtype(dtype), count)
        warp, self.unwritten = self.agent[s], None
        unwritten = np.zeros(len(addresses), bool)
        if shadow := self.shadow_of(region):

            def access(lanes: np.ndarray, shadow: Shadow = shadow) -> None:
                found = shadow.on_read(warp[lanes], addresses[lanes], loaded[0].nbytes)
                unwritten[lanes] = False if found is None else found

            shadow.one_by_one(warp, addresses, access)
        elif region is self.memory:
            self.strong(addresses, loaded[0].nbytes, s)
        self.polled(s)
        self.unwritten = unwritten if unwritten.any() else None
        return loaded

    def store_ordered(self, space: str, addresses: np.ndarray, values: np.ndarray, s: Any) -> None:
        """`store`, by which threads may let others go on."""
        region, addresses = self.region(space, addresses, s)
        before = region.load(addresses, values.dtype, values.shape[1])
        region.store(addresses, values)
        warp, size = self.agent[s], values[0].nbytes
        if shadow := self.shadow_of(region):

            def access(lanes: np.ndarray, shadow: Shadow = shadow) -> None:
                shadow.on_write(warp[lanes], addresses[lanes], size)

            shadow.one_by_one(warp, addresses, access)
        elif region is self.memory:
            self.strong(addresses, size, s, reads=False, writes=True)
        if before.tobytes() != values.tobytes():
            self.memory.changes += 1
            self.progress()

    # --- Values that nobody has written: they may be moved and computed with, but not used

    def taint_with(self, register: tuple[str, int], which: np.ndarray, s: Any) -> None:
        if which.any():
            self.taint.setdefault(register, np.zeros(self.threads, bool))[s] = which

    def taint_loaded(self, registers: tuple[tuple[str, int], ...], s: Any) -> None:
        """The registers that the load just executed has filled."""
        if self.unwritten is not None:
            for register in registers:
                self.taint_with(register, self.unwritten, s)

    def touch(
        self, uses: tuple[tuple[str, int], ...], defines: tuple[tuple[str, int], ...], sink: bool, s: Any
    ) -> None:
        """Passes taint on from what an instruction reads to what it writes; in a sink it is an error."""
        tainted = [self.taint[register][s] for register in uses if register in self.taint]
        which = np.logical_or.reduce(tainted) if tainted else None
        if which is not None and which.any() and sink:
            warp = int(self.warp[self.ids(s)[which]][0])
            raise UninitializedRead(
                f"warp {warp} uses a value read from shared memory that nobody has written"
            )
        for register in defines:
            if which is not None and which.any():
                self.taint_with(register, which, s)
            elif register in self.taint:
                self.taint[register][s] = False
                if not self.taint[register].any():
                    del self.taint[register]

    def check_vector(self, addresses: np.ndarray, size: int) -> None:
        if (addresses % size).any():
            bad = int(np.flatnonzero(addresses % size)[0])
            raise MemoryFault(f"misaligned: lane {bad} accesses {size} bytes at {int(addresses[bad]):#x}")

    def place(self, address: int) -> str:
        return f"byte {address - SHARED_BASE} of {self.shared.name}"
