"""The registers of a CTA, which setmaxnreg moves between its warps through a pool (PTX ISA, "setmaxnreg").

With how many registers a thread starts is up to ptxas. Its rules, as version 13.5 follows them: `.maxnreg`,
or the block's size together with `.minnctapersm`, sets a limit, and no thread gets more than the largest
setmaxnreg.inc asks for. Without those directives ptxas can't tell, and leaves setmaxnreg out (C7508).
"""

from math import prod

from cutelab.simulator.errors import DivergenceError
from cutelab.simulator.ptx import Kernel

REGISTERS = 65536  # of a multiprocessor
UNIT = 8  # a thread gets a multiple of these
MOST = 255  # that an instruction can name
SUB_CORES = 4
WARP, WARPS_OF_GROUP = 32, 4


def at_launch(kernel: Kernel) -> int | None:
    """With how many registers each thread starts, or None where setmaxnreg has no effect."""
    directives = kernel.directives
    limits = [*directives.get("maxnreg", ())]
    threads = directives.get("reqntid") or directives.get("maxntid")
    ctas = directives.get("minnctapersm")
    if threads and ctas:
        warps = -(-prod(threads) // WARP) * ctas[0]
        lanes = -(-warps // SUB_CORES) * WARP  # that share the registers of a sub-core
        limits.append(REGISTERS // SUB_CORES // lanes // UNIT * UNIT)
    if not limits:
        return None
    increases = [i.operands[0].value for i in kernel.instructions if i.name.startswith("setmaxnreg.inc")]
    limit = min(*limits, max(increases, default=MOST), MOST)
    return -(-limit // UNIT) * UNIT


class RegisterPool:
    """Registers that warps of a CTA have given back, and nobody has taken yet. Those that end give none back.

    launched: registers of a thread as it starts.
    """

    def __init__(self, cta: tuple[int, int, int], launched: int, warps: int) -> None:
        self.cta, self.launched, self.free = cta, launched, 0
        self.held = [launched] * warps  # by a thread of each warp
        self.asked: list[list[int]] = [[] for _ in range(warps)]
        self.waiting: dict[int, int] = {}  # warp → how many it waits for, longest wait first

    def ask(self, warp: int, count: int, more: bool) -> None:
        """A warp has so many for each thread as soon as it isn't `waiting`. more: it is an increase."""
        self.asked[warp].append(count)
        if more and count > self.held[warp]:
            self.waiting[warp] = count
        elif not more and count < self.held[warp]:
            self.free += (self.held[warp] - count) * WARP
            self.held[warp] = count
        for each, wanted in [*self.waiting.items()]:
            missing = (wanted - self.held[each]) * WARP
            if missing <= self.free:
                self.free -= missing
                self.held[each] = wanted
                del self.waiting[each]

    def shortages(self) -> list[str]:
        """For each number of registers that warps wait for: what is missing, and what would fit."""
        lines = []
        for wanted in sorted({*self.waiting.values()}):
            waiting = [warp for warp in self.waiting if self.waiting[warp] == wanted]
            alike = [warp for warp, asked in enumerate(self.asked) if asked[-1:] == [wanted]]
            others = sum(held for warp, held in enumerate(self.held) if warp not in alike)
            fits = (self.launched * len(self.held) - others) // len(alike) // UNIT * UNIT
            missing = (wanted - self.held[waiting[0]]) * WARP
            lines.append(
                f"the register pool of CTA {self.cta} has {self.free} left; setmaxnreg.inc to {wanted} needs "
                f"{missing} more for each of warps {sorted(waiting)}, and the most that fits is {fits} for "
                f"warps {alike}: threads start with {self.launched}, other warps keep {others * WARP} in all"
            )
        return lines

    def check(self) -> None:
        """At the end. Raises DivergenceError if the warps of a warpgroup have set different numbers."""
        for first in range(0, len(self.asked), WARPS_OF_GROUP):
            group = self.asked[first : first + WARPS_OF_GROUP]
            if any(asked != group[0] for asked in group):
                raise DivergenceError(
                    f"the warps from {first} on of CTA {self.cta}, which are a warpgroup, have not executed "
                    f"the same setmaxnreg: {group}"
                )
