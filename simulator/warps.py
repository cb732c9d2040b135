"""Exchange between the lanes of a warp: shuffles, votes, reductions, elections."""

from typing import Any

import numpy as np

from cutelab.simulator import numbers
from cutelab.simulator.accesses import Accesses


class Warps(Accesses):
    def shuffle_source(self, mode: str, lane: Any, clamp: Any, s: Any) -> tuple[np.ndarray, np.ndarray]:
        """(thread to read from, whether it is in range) of shfl.sync, PTX ISA.

        What a lane gets from one that the block doesn't have is undefined there; here it is its own value.
        """
        ids = self.ids(s)
        own = self.lane[ids]
        lane = np.asarray(lane).astype(np.int64) & 31
        clamp = np.asarray(clamp).astype(np.int64)
        segment, limit = clamp >> 8 & 31, clamp & 31
        lowest = own & segment
        highest = lowest | (limit & ~segment)
        source = {
            "up": own - lane,
            "down": own + lane,
            "bfly": own ^ lane,
            "idx": lowest | (lane & ~segment),
        }[mode]
        valid = source >= highest if mode == "up" else source <= highest
        there = valid & (ids - own + source < self.threads)
        return ids - own + np.where(there, source, own), valid

    def first_of_warps(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The executing warps: (position of each one's first thread, each thread's warp, how many warps)."""
        _, first, inverse = np.unique(self.warp[ids], return_index=True, return_inverse=True)
        return first, inverse, np.arange(len(first))

    def elect(self, s: Any) -> tuple[np.ndarray, np.ndarray]:
        """elect.sync: (the lane of the leader, whether it is oneself); the leader is the lowest lane."""
        ids = self.ids(s)
        first, inverse, _ = self.first_of_warps(ids)
        leader = ids[first][inverse]
        return self.lane[leader].astype(np.uint32), ids == leader

    def ballot(self, test: Any, s: Any) -> np.ndarray:
        """For each thread, the bits of the lanes of its warp for which `test` holds."""
        ids = self.ids(s)
        _, inverse, warps = self.first_of_warps(ids)
        mine = np.uint32(1) << self.lane[ids].astype(np.uint32)
        bits = np.zeros(len(warps), np.uint32)
        np.bitwise_or.at(bits, inverse, np.where(test, mine, np.uint32(0)))
        return bits[inverse]

    def vote(self, mode: str, test: np.ndarray, s: Any) -> np.ndarray:
        votes, active = self.ballot(test, s), self.active_lanes(s)
        if mode == "ballot":
            return votes
        if mode == "any":
            return votes != 0
        if mode == "all":
            return votes == active
        return (votes == 0) | (votes == active)  # uni

    def match(self, all_equal: bool, values: np.ndarray, s: Any) -> tuple[np.ndarray, np.ndarray]:
        """match.sync: (lanes with the same value, true), with .all (all or no lanes, whether they agree)."""
        ids = self.ids(s)
        bits = np.uint32(1) << self.lane[ids].astype(np.uint32)
        same = (values[:, None] == values[None, :]) & (self.warp[ids][:, None] == self.warp[ids][None, :])
        mask = np.bitwise_or.reduce(np.where(same, bits[None, :], np.uint32(0)), axis=1)
        if not all_equal:
            return mask, np.ones(len(ids), bool)
        agreed = mask == self.active_lanes(s)
        return np.where(agreed, mask, np.uint32(0)), agreed

    def redux(self, operation: str, value: np.ndarray, s: Any, nan: bool = False) -> np.ndarray:
        """redux.sync; of floats and NaNs the floats count, unless `nan`."""
        _, inverse, warps = self.first_of_warps(self.ids(s))
        function = numbers.REDUCTIONS[operation]
        if value.dtype.kind == "f" and not nan:
            function = {"min": np.fmin, "max": np.fmax}[operation]
        result = np.empty(len(warps), value.dtype)
        for warp in warps:
            result[warp] = function.reduce(value[inverse == warp]).astype(value.dtype)  # sums wrap
        return result[inverse]
