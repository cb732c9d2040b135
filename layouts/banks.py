"""Shared memory's banks: how many wavefronts an instruction takes, and which lanes collide.

Shared memory has 32 banks, each 4 bytes wide; neighbouring words lie in neighbouring banks. In one wavefront
each bank delivers one word. The lanes of a warp are served in phases of 128 bytes: all 32 for accesses of up
to 4 bytes each, 16 for 8 bytes, 8 for 16 bytes or the rows of a matrix of ldmatrix and stmatrix. A phase
takes as many wavefronts as the busiest bank has different words to deliver: lanes that ask for the same word
share it. Anything above one wavefront a phase is a bank conflict.

What the PTX ISA does not say was read off an H200's counters (`benchmarks/bank_counters.py`):

- Loads of 8 and 16 bytes are served in phases twice as large if every lane i has the same address as lane
  i ^ 1, or every one the same as lane i ^ 2, where inactive lanes agree with any. This is asked of the whole
  warp. Stores, ldmatrix and stmatrix never are.
- cp.async through L1 (.ca) writes what comes from one 128-byte line of global memory in one phase, and two
  lanes that write to the same word collide. This holds where lanes read consecutive vectors, as tile copies
  do, and is what is computed here.
- cp.async past L1 (.cg) shows no conflicts in the counters, whatever its addresses. Its time does: see
  `benchmarks/NOTES.md`. So it is counted as .ca is.
"""

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cutelab.layouts.errors import AccessError

WARP = 32
BANKS = 32
WORD_BYTES = 4
ROWS = 8
"""Rows of a matrix of ldmatrix and stmatrix, each 16 bytes long."""

INACTIVE = -1
"""The address of a lane that takes no part."""

_NAME = re.compile(
    r"(?P<scalar>ld|st)\.shared\.b(?P<bits>8|16|32|64|128)"
    r"|(?P<matrix>ldmatrix|stmatrix)\.x(?P<matrices>[124])(?P<trans>\.trans)?"
    r"|(?P<copy>cp\.async)\.(?P<bytes>4|8|16)"
)


@dataclass(frozen=True)
class Access:
    """A warp-wide instruction on shared memory.

    kind: "ld", "st", "ldmatrix", "stmatrix" or "cp.async" (which writes to shared memory).
    bytes: at each address; a row of 16 for ldmatrix and stmatrix.
    matrices: 1, 2 or 4 for ldmatrix and stmatrix, whose lanes 8·matrices … 31 supply no address; else 0.
    transposed: the instruction has .trans, which changes registers, not addresses.
    """

    kind: str
    bytes: int
    matrices: int = 0
    transposed: bool = False

    @classmethod
    def parse(cls, name: "str | Access") -> "Access":
        """The access of a name: "ld.shared.b128", "st.shared.b32", "ldmatrix.x4.trans", "cp.async.16", …

        Raises AccessError for any other.
        """
        if isinstance(name, Access):
            return name
        match = _NAME.fullmatch(name)
        if match is None:
            raise AccessError(
                f"{name!r} is no access to shared memory: expected ld.shared.bN or st.shared.bN (N = 8, 16, "
                "32, 64, 128), ldmatrix.xN or stmatrix.xN (N = 1, 2, 4) with or without .trans, or "
                "cp.async.N (N = 4, 8, 16)"
            )
        if match["scalar"]:
            return cls(match["scalar"], int(match["bits"]) // 8)
        if match["copy"]:
            return cls("cp.async", int(match["bytes"]))
        return cls(match["matrix"], 16, int(match["matrices"]), match["trans"] is not None)

    @property
    def name(self) -> str:
        if self.matrices:
            return f"{self.kind}.x{self.matrices}{'.trans' if self.transposed else ''}"
        return (
            f"cp.async.{self.bytes}" if self.kind == "cp.async" else f"{self.kind}.shared.b{self.bytes * 8}"
        )

    @property
    def lanes(self) -> int:
        """Lanes that supply an address: the first so many."""
        return ROWS * self.matrices or WARP

    @property
    def phase_lanes(self) -> int:
        """Lanes of one phase: those that ask for 128 bytes together."""
        return min(WARP, BANKS * WORD_BYTES // self.bytes)


@dataclass(frozen=True, eq=False)
class BankReport:
    """What some instructions of one kind cost: `access` with the byte address of each lane of each of them.

    addresses: int64 (instructions, 32), multiples of `access.bytes`, relative to a 128-byte aligned base;
        INACTIVE for lanes that take no part. The constructor takes any array of integers of that shape, or
        of (32,) for one instruction. Raises AccessError.
    """

    access: Access
    addresses: np.ndarray

    def __post_init__(self) -> None:
        access = Access.parse(self.access)
        addresses = np.atleast_2d(np.asarray(self.addresses))
        if addresses.ndim != 2 or addresses.shape[1] != WARP or addresses.dtype.kind not in "iu":
            raise AccessError(
                f"addresses are integers of shape (instructions, {WARP}) or ({WARP},), got {addresses.dtype} "
                f"of shape {np.shape(self.addresses)}"
            )
        addresses = np.where(np.arange(WARP) < access.lanes, addresses, INACTIVE).astype(np.int64)
        wrong = (addresses < INACTIVE) | ((addresses >= 0) & (addresses % access.bytes != 0))
        if wrong.any():
            instruction, lane = np.argwhere(wrong)[0]
            raise AccessError(
                f"{access.name} takes addresses that are multiples of {access.bytes}, or {INACTIVE} for an "
                f"inactive lane; lane {lane} of instruction {instruction} has {addresses[instruction, lane]}"
            )
        object.__setattr__(self, "access", access)
        object.__setattr__(self, "addresses", addresses)

    @cached_property
    def phase_lanes(self) -> np.ndarray:
        """Lanes of a phase, for each instruction: twice as many as usual where two phases are merged."""
        usual = self.access.phase_lanes
        if self.access.kind != "ld" or usual == WARP:
            return np.full(len(self.addresses), usual)
        merged = np.zeros(len(self.addresses), bool)
        for distance in (1, 2):
            other = self.addresses[:, np.arange(WARP) ^ distance]
            equal = (self.addresses == other) | (self.addresses == INACTIVE) | (other == INACTIVE)
            merged |= equal.all(axis=1)
        return np.where(merged, 2 * usual, usual)

    @cached_property
    def _degrees(self) -> np.ndarray:
        """Wavefronts of each phase: (instructions, 32 / lanes of a usual phase), 0 past the last one."""
        count, usual = len(self.addresses), self.access.phase_lanes
        degrees = np.zeros((count, WARP // usual), np.int64)
        for lanes in np.unique(self.phase_lanes):
            chosen = np.flatnonzero(self.phase_lanes == lanes)
            phases = self.addresses[chosen].reshape(len(chosen), WARP // lanes, lanes)
            degrees[chosen, : WARP // lanes] = _busiest_bank(phases, self.access)
        return degrees

    @property
    def wavefronts(self) -> np.ndarray:
        """Wavefronts of each instruction."""
        return self._degrees.sum(axis=1)

    @property
    def ideal(self) -> np.ndarray:
        """Wavefronts of each instruction without conflicts: one for each phase with an active lane."""
        return (self._degrees > 0).sum(axis=1)

    @property
    def conflicts(self) -> np.ndarray:
        """Wavefronts lost to bank conflicts, for each instruction."""
        return self.wavefronts - self.ideal

    @property
    def worst(self) -> int:
        """The instruction with the most conflicts, the first of equals."""
        return int(self.conflicts.argmax()) if len(self.addresses) else 0

    def phases(self, instruction: int) -> list[list[int]]:
        """The active lanes of each phase of an instruction, phases without any left out."""
        size = int(self.phase_lanes[instruction])
        active = self.addresses[instruction] != INACTIVE
        phases = [[lane for lane in range(s, s + size) if active[lane]] for s in range(0, WARP, size)]
        return [phase for phase in phases if phase]

    def collisions(self, instruction: int) -> list[tuple[int, int, list[int]]]:
        """(phase, bank, lanes) of each bank that a phase of the instruction needs more than once."""
        found = []
        for number, phase in enumerate(self.phases(instruction)):
            for bank in range(BANKS):
                lanes, words = [], []
                for lane in phase:
                    for word in self.words(instruction, lane):
                        if word % BANKS == bank:
                            lanes.append(lane)
                            words.append(word)
                needed = len(words) if self.access.kind == "cp.async" else len(set(words))
                if needed > 1:
                    found.append((number, bank, lanes))
        return found

    def words(self, instruction: int, lane: int) -> range:
        """The 4-byte words that an active lane touches: word w lies in bank w % 32."""
        address = int(self.addresses[instruction, lane])
        return range(address // WORD_BYTES, (address + self.access.bytes - 1) // WORD_BYTES + 1)

    def __str__(self) -> str:
        """A summary, and what collides in the worst instruction."""
        count, total, lost = len(self.addresses), int(self.wavefronts.sum()), int(self.conflicts.sum())
        lines = [f"{self.access.name}: {count} instructions, {total} wavefronts, {lost} of them conflicts"]
        collisions = self.collisions(self.worst) if lost else []
        if collisions:
            degree, (phase, bank, lanes) = max(((len(c[2]), c) for c in collisions), key=lambda x: x[0])
            same = f"{degree} lanes of phase {phase} meet in bank {bank}"
            where = ", ".join(f"lane {lane} at byte {self.addresses[self.worst, lane]}" for lane in lanes)
            lines.append(
                f"instruction {self.worst}: {self.wavefronts[self.worst]} wavefronts instead of "
                f"{self.ideal[self.worst]}; {same}: {where}"
            )
        return "\n".join(lines)


def _busiest_bank(phases: np.ndarray, access: Access) -> np.ndarray:
    """The most words that one bank serves: phases (instructions, phases, lanes) → (instructions, phases)."""
    per_lane = -(-access.bytes // WORD_BYTES)
    count = phases.shape[0] * phases.shape[1]
    words = (phases[..., None] // WORD_BYTES + np.arange(per_lane)).reshape(count, -1)
    active = np.repeat(phases.reshape(count, -1) != INACTIVE, per_lane, axis=1)
    if access.kind != "cp.async":  # lanes share a word: count it once
        words = np.sort(np.where(active, words, INACTIVE), axis=1)
        active = words != INACTIVE
        active[:, 1:] &= words[:, 1:] != words[:, :-1]
    bank = np.arange(count)[:, None] * BANKS + words % BANKS
    served = np.bincount(bank[active], minlength=count * BANKS).reshape(count, BANKS)
    return served.max(axis=1).reshape(phases.shape[:2])
