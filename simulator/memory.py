"""Memories as arrays of bytes: host allocations as global memory, shared memory and parameters of a CTA.

An access is vectorised: addresses (lanes,) in bytes, `count` neighbouring elements of one dtype at each.
"""

from bisect import bisect_right
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from cutelab.simulator.errors import MemoryFault
from cutelab.simulator.ptx import Variable

if TYPE_CHECKING:
    from cutelab.simulator.global_races import GlobalRaces

SHARED_BASE = 1024
"""Shared memory starts here; what lies below belongs to the system, as on Hopper."""

SHARED_WINDOW, PARAM_WINDOW, LOCAL_WINDOW = 1 << 60, 1 << 61, 1 << 62
WINDOWS = {"global": 0, "const": 0, "shared": SHARED_WINDOW, "param": PARAM_WINDOW, "local": LOCAL_WINDOW}
"""Where each memory begins in generic addresses."""


Parts = list[tuple["Region", np.ndarray]]
"""Regions, and which lanes access each."""


class Region:
    """Bytes with an address. `name` is what reports call them."""

    def __init__(self, data: np.ndarray, base: int, name: str) -> None:
        self.data, self.base, self.end, self.name = data, base, base + data.size, name
        self.views: dict[np.dtype, np.ndarray] = {}

    def view(self, dtype: np.dtype) -> np.ndarray:
        if dtype not in self.views:
            whole = self.data.size // dtype.itemsize * dtype.itemsize
            self.views[dtype] = self.data[:whole].view(dtype)
        return self.views[dtype]

    def load(self, addresses: np.ndarray, dtype: np.dtype, count: int) -> np.ndarray:
        """(lanes, count) elements."""
        return self.view(dtype)[self.index(addresses, dtype, count)]

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Stores values (lanes, count); where lanes meet, the last one stays."""
        self.view(values.dtype)[self.index(addresses, values.dtype, values.shape[1])] = values

    def index(self, addresses: np.ndarray, dtype: np.dtype, count: int) -> np.ndarray:
        size = dtype.itemsize
        offsets = addresses.astype(np.int64) - self.base
        if self.base % size:
            raise MemoryFault(f"{self.name} starts at {self.base:#x}, which is no multiple of {size}")
        if (offsets % (size * count)).any():
            bad = int(np.flatnonzero(offsets % (size * count))[0])
            raise MemoryFault(
                f"misaligned: lane {bad} accesses {size * count} bytes at {int(addresses[bad]):#x} in "
                f"{self.name}"
            )
        if offsets.min() < 0 or offsets.max() + size * count > self.data.size:
            bad = int(np.flatnonzero((offsets < 0) | (offsets + size * count > self.data.size))[0])
            raise MemoryFault(
                f"out of bounds: lane {bad} accesses {size * count} bytes at byte {int(offsets[bad])} of "
                f"{self.name}, which has {self.data.size}"
            )
        first = offsets // size
        return first[:, None] + np.arange(count) if count > 1 else first[:, None]


def variables(module: Iterable[Variable]) -> list[Region]:
    """A module's own variables."""
    return [Region(each.storage, each.address, f"the variable {each.name}") for each in module if each.size]


class GlobalMemory:
    """The host allocations that kernels may touch, found by address.

    races: who accessed what in the launch that is running. changes: counts what may let waiting CTAs go on.
    """

    races: "GlobalRaces"

    def __init__(self, regions: Iterable[Region]) -> None:
        self.regions = sorted(regions, key=lambda region: region.base)
        self.bases = [region.base for region in self.regions]
        self.changes = 0
        self.newest: tuple[np.ndarray | None, Parts] = None, []  # what `split` has found last

    def split(self, addresses: np.ndarray) -> Parts:
        """The region of each address, as (region, lanes) for all regions met."""
        if addresses is self.newest[0]:  # who accesses memory is asked about the same addresses again
            return self.newest[1]
        lanes = np.arange(len(addresses))
        region = self.find(int(addresses[0]))
        if region.base <= addresses.min() and addresses.max() < region.end:
            self.newest = addresses, [(region, lanes)]
            return self.newest[1]
        found = []
        while len(lanes):
            region = self.find(int(addresses[lanes[0]]))
            inside = (addresses[lanes] >= region.base) & (addresses[lanes] < region.end)
            found.append((region, lanes[inside]))
            lanes = lanes[~inside]
        return found

    def lookup(self, address: int) -> Region | None:
        at = bisect_right(self.bases, address) - 1
        return self.regions[at] if at >= 0 and address < self.regions[at].end else None

    def find(self, address: int) -> Region:
        if found := self.lookup(address):
            return found
        nearest = min(
            self.regions,
            key=lambda r: r.base - address if address < r.base else address - r.end,
            default=None,
        )
        where = "no tensor is known"
        if nearest is not None:
            before = address < nearest.base
            distance = nearest.base - address if before else address - nearest.end
            side = "behind" if before else "before"
            where = f"the nearest tensor is {nearest.name}, {distance} bytes {side} it"
        raise MemoryFault(f"out of bounds: nothing lies at the global address {address:#x}; {where}")

    def load(self, addresses: np.ndarray, dtype: np.dtype, count: int) -> np.ndarray:
        parts = self.split(addresses)
        if len(parts) == 1:
            return parts[0][0].load(addresses, dtype, count)
        result = np.empty((len(addresses), count), dtype)
        for region, lanes in parts:
            result[lanes] = region.load(addresses[lanes], dtype, count)
        return result

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        parts = self.split(addresses)
        if len(parts) == 1:
            return parts[0][0].store(addresses, values)
        for region, lanes in parts:
            region.store(addresses[lanes], values[lanes])
        return None
