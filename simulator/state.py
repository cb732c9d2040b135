"""The state of one CTA: registers, memories, barriers, and which of its threads execute.

Values are arrays over the threads that execute: `s` is a slice or an array of thread numbers, in order.
"""

from typing import Any

import numpy as np

from cutelab.simulator.bank_conflicts import BankConflicts
from cutelab.simulator.barriers import MBarrier
from cutelab.simulator.errors import DivergenceError, SimulationError
from cutelab.simulator.memory import SHARED_BASE, GlobalMemory, Region
from cutelab.simulator.races import Order, Shadow
from cutelab.simulator.translate import Program

WARP = 32
WARPGROUP = 128


class State:
    """index, grid, block and cluster are (x, y, z); rank is that in the cluster."""

    def __init__(
        self,
        program: Program,
        index: tuple[int, int, int],
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        parameters: bytes,
        memory: GlobalMemory,
        cluster: tuple[int, int, int],
        order: Order,
        rank: int,
    ) -> None:
        threads = block[0] * block[1] * block[2]
        self.program, self.memory = program, memory
        self.index, self.grid, self.block, self.threads = index, grid, block, threads
        number = np.arange(threads)
        self.tid = (number % block[0], number // block[0] % block[1], number // (block[0] * block[1]))
        self.lane, self.warp = number % WARP, number // WARP
        rows = program.bank_rows
        self.p = np.zeros((rows["p"], threads), np.bool_)
        self.h = np.zeros((rows["h"], threads), np.uint16)
        self.r = np.zeros((rows["r"], threads), np.uint32)
        self.d = np.zeros((rows["d"], threads), np.uint64)
        self.hs, self.hf = self.h.view(np.int16), self.h.view(np.float16)
        self.rs, self.rf = self.r.view(np.int32), self.r.view(np.float32)
        self.ds, self.df = self.d.view(np.int64), self.d.view(np.float64)
        self.dynamic_shared = shared_bytes
        where = f"the shared memory of CTA {index}"
        self.shared = Region(np.zeros(program.shared_bytes + shared_bytes, np.uint8), SHARED_BASE, where)
        self.parameters = Region(np.frombuffer(parameters, np.uint8), 0, "the kernel's parameters")
        self.local = Region(np.zeros(program.local_bytes * threads, np.uint8), 0, "local memory")
        self.order, self.rank, self.cluster = order, rank, cluster
        self.peers: list[Any] = [self]  # the CTAs of the cluster, by rank
        first_warp = rank * -(-threads // WARP)
        self.agent = self.warp + first_warp  # number of each thread's warp in the cluster
        self.leader = self.warp // 4 * 4 + first_warp  # ... of the first warp of its warpgroup
        self.shadow = Shadow(order, self.shared.data.size, SHARED_BASE, program.granule)
        self.mbarriers: dict[int, MBarrier] = {}
        self.taint: dict[tuple[str, int], np.ndarray] = {}  # registers with values from unwritten memory
        self.unwritten: np.ndarray | None = None  # of the load just executed: which threads got such values
        self.pending: dict[int, list[tuple[int, frozenset[int], frozenset[int]]]] = {}  # see Matrices.wgmma
        self.unfenced: dict[int, int] = {}  # see Matrices.wgmma_fence
        self.accumulating: dict[int, dict[int, tuple[int, int]]] = {}
        self.ended = np.zeros(threads, bool)
        self.events = 0  # counts what may let others go on, in the first CTA of a cluster
        self.polls = 0  # ... and how often its warps have looked for what others may do
        self.polling: dict[int, Any] = {}  # ... with which instruction each warp did last
        self.at: Any = None  # the instruction being executed, for reports
        self.banks: BankConflicts | None = None  # counts them, if asked for
        self.multiprocessor, self.multiprocessors = 0, 1
        self.ticks = 0

    # --- Threads

    def ids(self, s: Any) -> np.ndarray:
        return np.arange(s.start, s.stop) if isinstance(s, slice) else s

    def select(self, s: Any, test: np.ndarray) -> Any:
        """The threads of `s` for which `test` holds, or None."""
        if test.all():
            return s
        return self.ids(s)[test] if test.any() else None

    def lanes(self, value: Any, s: Any) -> np.ndarray:
        """`value`, one for each thread or one for all, as an array over the threads."""
        count = s.stop - s.start if isinstance(s, slice) else len(s)
        return np.broadcast_to(value, (count,))

    def everywhere(self, address: int, s: Any) -> np.ndarray:
        return self.lanes(np.int64(address), s)

    def warps_of(self, s: Any) -> list[int]:
        """The executing warps, as numbered in the cluster."""
        return np.unique(self.agent[s]).tolist()

    def whole_warps(self, s: Any) -> np.ndarray:
        """The warps of `s`, all lanes of which must be there."""
        ids = self.ids(s)
        if len(ids) % WARP == 0:
            warps = ids.reshape(-1, WARP)
            if not (warps[:, 0] % WARP).any() and (warps[:, -1] - warps[:, 0] == WARP - 1).all():
                return ids[::WARP] // WARP
        warp, missing = self.first_incomplete(ids, np.uint32(0xFFFFFFFF))
        raise DivergenceError(
            f"executed without lanes {missing} of warp {warp}, by which all must execute it"
        )

    def check_members(self, mask: Any, s: Any) -> None:
        """`mask` names the lanes that execute a `.sync` instruction: none of them may be elsewhere."""
        here = self.active_lanes(s)
        gone = self.ended_lanes(s) if self.threads % WARP or self.ended.any() else np.uint32(0)
        named = np.asarray(mask).astype(np.uint32)
        if (named & ~here & ~gone).any():
            warp, missing = self.first_incomplete(self.ids(s), named)
            raise DivergenceError(f"executed without lanes {missing} of warp {warp}, which its mask names")
        if (here & ~named).any():
            raise DivergenceError("executed by lanes that its mask doesn't name")

    def first_incomplete(self, ids: np.ndarray, mask: Any) -> tuple[int, list[int]]:
        """The first warp without some of the lanes in `mask`, and those."""
        masks = np.broadcast_to(mask, ids.shape)
        for warp in np.unique(self.warp[ids]).tolist():
            of_warp = self.warp[ids] == warp
            wanted = {lane for lane in range(WARP) if int(masks[of_warp][0]) >> lane & 1}
            if missing := sorted(wanted - set(self.lane[ids[of_warp]].tolist())):
                return warp, missing
        return int(self.warp[ids[0]]), []

    def active_lanes(self, s: Any) -> np.ndarray:
        """For each thread, the executing lanes of its warp as bits."""
        ids = self.ids(s)
        bits = np.zeros(int(self.warp[-1]) + 1, np.uint32)
        if len(ids) == self.threads:
            bits[:] = 0xFFFFFFFF
            bits[-1] >>= np.uint32(-self.threads % WARP)
        else:
            np.bitwise_or.at(bits, self.warp[ids], np.uint32(1) << self.lane[ids].astype(np.uint32))
        return bits[self.warp[ids]]

    def ended_lanes(self, s: Any) -> np.ndarray:
        bits = np.zeros(int(self.warp[-1]) + 1, np.uint32)
        over = np.flatnonzero(self.ended)
        np.bitwise_or.at(bits, self.warp[over], np.uint32(1) << self.lane[over].astype(np.uint32))
        bits[-1] |= ~(np.uint32(0xFFFFFFFF) >> np.uint32(-self.threads % WARP))  # those there never were
        return bits[self.warp[s]]

    # --- Other

    def progress(self) -> None:
        """Something happened that others may wait for."""
        self.peers[0].events += 1

    def clock(self) -> int:
        """A clock that goes on whenever it is read: nothing here takes time."""
        self.ticks += 1
        return self.ticks

    def count_banks(self, kind: str, size: int, threads: np.ndarray, addresses: np.ndarray) -> None:
        if self.banks is not None:
            self.banks.count(self.at, kind, size, threads, addresses)

    def trap(self, s: Any) -> None:
        raise SimulationError(f"warp {int(self.warp[self.ids(s)[0]])} executes a trap")

    def describe(self) -> str:
        """Where the CTA is, for reports."""
        if self.at is None:
            return f"CTA {self.index}"
        source = f"{self.at.source[0]}:{self.at.source[1]}, " if self.at.source else ""
        return f"CTA {self.index}, {source}PTX line {self.at.line}: {self.at.text}"
