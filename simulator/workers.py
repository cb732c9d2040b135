"""Runs the clusters of a grid in several processes, where they have nothing to say to each other.

A worker is a fork of this process: it sees global memory as it is, writes to a copy, and sends back what it
has written. That counts only if every worker has come to its end and none has touched what another one wrote;
else the clusters run again here, one after the other, which raises the same errors as ever.

Workers execute nothing but the simulator, on NumPy arrays, so that locks of other threads don't matter to
them.
"""

import gc
import os
import pickle
import selectors
import signal
import struct
import time
import warnings
from dataclasses import astuple, dataclass

import numpy as np

from cutelab.simulator.bank_conflicts import BankConflicts, Cost
from cutelab.simulator.errors import Deadlock
from cutelab.simulator.global_races import Cells
from cutelab.simulator.grid import Grid

FEWEST_CLUSTERS = 4
SHORTEST = 0.3
"""Seconds that a grid must seem to take, for processes to pay."""

_NUMBER = struct.Struct("<ii")
_PIPE_BYTES = 1 << 15  # a pipe takes as much before anybody reads

VARIABLE = "CUTELAB_PROCESSES"


def available(processes: int | None) -> int:
    """How many processes to use: `processes`, or $CUTELAB_PROCESSES, or one for each core that may be used.

    Raises ValueError for fewer than one.
    """
    asked = os.environ.get(VARIABLE, "") if processes is None else processes
    if asked == "":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    try:
        count = int(asked)
    except ValueError:
        count = 0
    if count < 1:
        name = "processes" if processes is not None else VARIABLE
        raise ValueError(f"{name} is {asked!r}; it must be a whole number of at least 1, such as 1")
    return count if hasattr(os, "fork") else 1


def run(grid: Grid, processes: int) -> None:
    """Runs all clusters of a grid, in up to so many processes. Raises SimulationError."""
    count = len(grid.clusters)
    if processes == 1 or count < FEWEST_CLUSTERS or grid.program.communicates or grid.program.prints:
        return grid.run(range(count))
    rest, start = range(1, count), time.perf_counter()
    try:
        grid.run([0])
    except Deadlock:
        if not grid.resident:
            raise
        return grid.run(rest)  # what it waits for may come from a later cluster, which is a race
    if (time.perf_counter() - start) * len(rest) < SHORTEST or not in_parallel(grid, rest, processes):
        grid.run(rest)
    return None


@dataclass
class Touched:
    """What a worker did to a tensor. Granules are packed bits; `written` includes the bytes of `partly`."""

    base: int
    reads: bytes
    writes: bytes
    partly: np.ndarray  # addresses of bytes written in granules that are not written whole
    written: bytes


@dataclass
class Result:
    touched: list[Touched]
    costs: dict[int, tuple[int, int, int]]  # of bank conflicts, by the number of the instruction


def in_parallel(grid: Grid, numbers: range, processes: int) -> bool:
    """Whether it could be done; if not, nothing has changed."""
    queue, workers = work(numbers), []
    try:
        for _ in range(min(processes, len(numbers))):
            workers.append(Worker(grid, queue, numbers[0]))
        results = collect(workers)
    except OSError:  # no more processes or files
        return False
    finally:
        os.close(queue)
        for worker in workers:
            worker.end()
    if results is None or conflict(results):
        return False
    for result in results:
        apply(grid, result)
    return True


def work(numbers: range) -> int:
    """A pipe that workers take ranges of clusters from."""
    size = -(-len(numbers) * _NUMBER.size // _PIPE_BYTES)
    parts = (numbers[first : first + size] for first in range(0, len(numbers), size))
    reader, writer = os.pipe()
    os.write(writer, b"".join(_NUMBER.pack(part[0], part[-1] + 1) for part in parts))
    os.close(writer)
    return reader


class Worker:
    """A forked process; `reader` is where its result comes from, nothing if it failed."""

    def __init__(self, grid: Grid, queue: int, first: int) -> None:
        self.reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about other threads: see above
            self.process = os.fork()
        if self.process == 0:
            os.close(self.reader)
            labour(grid, queue, writer, first)
        os.close(writer)
        self.data = bytearray()
        self.result: Result | None = None

    def end(self) -> None:
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        os.close(self.reader)


def labour(grid: Grid, queue: int, writer: int, first: int) -> None:
    """What a worker does, to clusters from `first` on. Doesn't return."""
    code = 1
    try:
        gc.freeze()  # objects of the parent are none of its business
        grid.banks = BankConflicts() if grid.banks is not None else None
        for cells in grid.memory.races.cells.values():
            cells.partly.clear()
        while number := os.read(queue, _NUMBER.size):
            grid.run(range(*_NUMBER.unpack(number)))
        data = memoryview(pickle.dumps(result(grid, first)))
        while data:
            data = data[os.write(writer, data) :]
        code = 0
    finally:
        os._exit(code)


def collect(workers: list[Worker]) -> list[Result] | None:
    """All results, or None as soon as one worker fails."""
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.reader, selectors.EVENT_READ, worker)
        while selector.get_map():
            for key, _ in selector.select():
                worker = key.data
                if data := os.read(worker.reader, 1 << 20):
                    worker.data += data
                    continue
                selector.unregister(worker.reader)
                try:
                    worker.result = pickle.loads(worker.data)
                except (EOFError, pickle.UnpicklingError):
                    return None
    return [worker.result for worker in workers if worker.result is not None]


def result(grid: Grid, first: int) -> Result:
    """What clusters from `first` on have done, as a worker sends it."""
    order = {instruction: number for number, instruction in enumerate(grid.program.kernel.instructions)}
    costs = grid.banks.costs if grid.banks else {}
    touched = [touched_in(grid, cells, first) for cells in grid.memory.races.cells.values()]
    return Result(touched, {order[each]: astuple(cost) for each, cost in costs.items()})


def touched_in(grid: Grid, cells: Cells, first: int) -> Touched:
    races = grid.memory.races
    reads = (races.cluster_of(cells.reader) > first) | cells.noted(first)
    writes = races.cluster_of(cells.writer) > first
    partly = np.concatenate(cells.partly) if cells.partly else np.empty(0, np.int64)
    data, base = cells.region.data, cells.region.base
    written = data[whole_bytes(cells, writes)].tobytes() + data[partly - base].tobytes()
    return Touched(base, np.packbits(reads).tobytes(), np.packbits(writes).tobytes(), partly, written)


def whole_bytes(cells: Cells, granules: np.ndarray) -> np.ndarray:
    """A mask of the bytes of a tensor from one of its granules."""
    before = cells.region.base - cells.first * cells.granule
    return np.repeat(granules, cells.granule)[before : before + cells.region.data.size]


def conflict(results: list[Result]) -> bool:
    """Whether a worker has written what another one has read or written."""
    reads: dict[int, np.ndarray] = {}
    writes: dict[int, np.ndarray] = {}
    for one in results:
        for each in one.touched:
            none = np.zeros(len(each.reads), np.uint8)
            read, write = (np.frombuffer(bits, np.uint8) for bits in (each.reads, each.writes))
            others_read, others_wrote = reads.get(each.base, none), writes.get(each.base, none)
            if (write & (others_read | others_wrote)).any() or (read & others_wrote).any():
                return True
            reads[each.base], writes[each.base] = others_read | read, others_wrote | write
    return False


def apply(grid: Grid, worker: Result) -> None:
    """Does here what a worker has done."""
    for each in worker.touched:
        region = grid.memory.find(each.base)
        cells = grid.memory.races.of(region)
        bits = np.unpackbits(np.frombuffer(each.writes, np.uint8), count=len(cells.writer)).astype(bool)
        values = np.frombuffer(each.written, np.uint8)
        mask = whole_bytes(cells, bits)
        whole = len(values) - len(each.partly)
        region.data[mask] = values[:whole]
        region.data[each.partly - each.base] = values[whole:]
    for number, cost in worker.costs.items():
        assert grid.banks is not None  # the worker wouldn't have counted
        sum_ = grid.banks.costs.setdefault(grid.program.kernel.instructions[number], Cost())
        sum_.executed += cost[0]
        sum_.wavefronts += cost[1]
        sum_.ideal += cost[2]
