"""Bank conflicts of the shared-memory instructions that a launch executes: `execute(launch, banks=…)`.

Shared memory has 32 banks of 4-byte words. A warp's lanes are served in phases of 128 bytes, and a phase
takes as many wavefronts as its busiest bank has different words to deliver. Loads of 8 and 16 bytes whose
lanes pair up on the same addresses are served in phases twice as large; cp.async, which is counted as it
writes, delivers a word that two lanes write twice. Atomics and the async proxy are not counted.
"""

from dataclasses import dataclass

import numpy as np

from cutelab.simulator.ptx import Instruction

LANES = BANKS = 32
WORD = 4
INACTIVE = -1
"""The address of a lane that takes no part."""


@dataclass
class Cost:
    """What one instruction of a kernel cost, over all warps that executed it."""

    executed: int = 0  # times, by a warp
    wavefronts: int = 0
    ideal: int = 0  # wavefronts without conflicts


class BankConflicts:
    """Counts them by instruction: `costs`. Its string is a table, the worst first."""

    def __init__(self) -> None:
        self.costs: dict[Instruction, Cost] = {}

    def count(
        self, instruction: Instruction, kind: str, size: int, threads: np.ndarray, addresses: np.ndarray
    ) -> None:
        """The executing threads access `size` bytes each, or rows of 16 where the first lanes give addresses.

        kind: "ld", "st", "ldmatrix", "stmatrix" or "cp.async".
        """
        cost = self.costs.setdefault(instruction, Cost())
        warp, lane = threads // LANES, threads % LANES
        for each in np.unique(warp).tolist():
            row = np.full(LANES, INACTIVE, np.int64)
            row[lane[warp == each]] = addresses[warp == each]
            wavefronts, ideal = self.of_warp(kind, size, row)
            cost.executed += 1
            cost.wavefronts += wavefronts
            cost.ideal += ideal

    def of_warp(self, kind: str, size: int, addresses: np.ndarray) -> tuple[int, int]:
        """(wavefronts, wavefronts without conflicts) of one warp's access: addresses (32,)."""
        lanes = min(LANES, BANKS * WORD // size)
        if kind == "ld" and lanes < LANES and _pairs_up(addresses):
            lanes *= 2
        phases = [_wavefronts(kind, size, phase) for phase in addresses.reshape(-1, lanes)]
        return sum(phases), sum(wavefronts > 0 for wavefronts in phases)

    def by_line(self) -> str:
        """A table of the program's lines, or of PTX without line information; the worst first."""
        lines: dict[str, Cost] = {}
        for instruction, cost in self.costs.items():
            source = instruction.source
            unknown = f"PTX line {instruction.line}: {instruction.text}"
            where = f"{source[0]}:{source[1]}" if source else unknown
            total = lines.setdefault(where, Cost())
            total.executed += cost.executed
            total.wavefronts += cost.wavefronts
            total.ideal += cost.ideal
        table = ["executed  wavefronts  conflicts  line"]
        for where, cost in sorted(lines.items(), key=lambda item: item[1].ideal - item[1].wavefronts):
            lost = cost.wavefronts - cost.ideal
            table.append(f"{cost.executed:8}  {cost.wavefronts:10}  {lost:9}  {where}")
        return "\n".join(table)

    def __str__(self) -> str:
        worst = sorted(self.costs.items(), key=lambda item: item[1].ideal - item[1].wavefronts)
        lines = ["executed  wavefronts  conflicts  instruction"]
        for instruction, cost in worst:
            where = f"{instruction.source[0]}:{instruction.source[1]}: " if instruction.source else ""
            lost = cost.wavefronts - cost.ideal
            lines.append(f"{cost.executed:8}  {cost.wavefronts:10}  {lost:9}  {where}{instruction.text}")
        return "\n".join(lines)


def _pairs_up(addresses: np.ndarray) -> bool:
    """Whether all lanes i and i ^ 1 have one address, or all i and i ^ 2; inactive ones agree with any."""
    for distance in (1, 2):
        other = addresses[np.arange(LANES) ^ distance]
        if ((addresses == other) | (addresses == INACTIVE) | (other == INACTIVE)).all():
            return True
    return False


def _wavefronts(kind: str, size: int, phase: np.ndarray) -> int:
    active = phase[phase != INACTIVE]
    words = (active[:, None] // WORD + np.arange(-(-size // WORD))).ravel()
    if kind != "cp.async":
        words = np.unique(words)
    return int(np.bincount(words % BANKS).max()) if words.size else 0
