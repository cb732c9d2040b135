"""How long instructions take on a multiprocessor: the numbers that timelines are drawn from.

A deliberately simple model. Its purpose is to show what overlaps with what and who waits for whom, not to
predict the time of a kernel to the percent. What it knows:

- A multiprocessor has four sub-cores; warp w is at home in sub-core w mod 4. Each issues one instruction a
  cycle, and an instruction issues when its turn has come, its sources are ready and its unit is free.
- Units of a sub-core (integer, FMA, MUFU, FP64, tensor core) and of the multiprocessor (shared memory, loads
  and stores of global memory) are busy for a time that the kind and size of the work decide.
- A result is ready after a latency. Copies and wgmma go on beside the warps, who wait for them as the program
  says: groups, mbarriers, barriers.

What it leaves out: that ptxas reorders PTX and rewrites it (here every PTX instruction stands for one of the
machine, but moves between registers, which ptxas removes, are free), instruction caches, register banks,
hits in L1, other CTAs on the multiprocessor, and what other multiprocessors do to L2 and DRAM.
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from cutelab.simulator.errors import SimulationError
from cutelab.simulator.ptx import Instruction, Vector

SUB_CORES = 4


@dataclass(frozen=True)
class Costs:
    """Of one multiprocessor, in cycles where nothing else is said. `Costs.of("sm_90a")` has them by chip.

    Rates. int_lanes, fma_lanes, mufu_lanes, fp64_lanes: lanes of a sub-core that get a result each cycle; a
        warp has 32 (CUDA Programming Guide, "Arithmetic Instructions", a quarter of a multiprocessor's).
    mma: FMA of 16-bit numbers by the tensor core of a sub-core, each cycle, with mma.sync; wgmma: the same
        with wgmma. 8-bit numbers take half the time, tf32 twice. From the peak rates in the white papers of
        A100, H100, GA102 and Ada; H100's mma.sync reaches 62 % of wgmma's (Luo et al.).
    shared_bytes: of shared memory, each cycle (CUDA Best Practices Guide: 32 banks of 4 bytes).
    global_bytes: between a multiprocessor and L2, each cycle: the width of its port, an estimate of what one
        alone can get. If all multiprocessors stream from DRAM at once, an H100 has 14 for each (3.35 TB/s).

    Latencies, from issue to a result that the next instruction can use. Measured: int_latency, fma_latency,
        shared_latency, global_latency (of a load from DRAM) and mma_latency of m16n8k16 (Luo et al.,
        arXiv:2402.13499; Sun et al., arXiv:2206.02874; rounded). Estimates: all others. tma_latency is from
        the issue of a bulk load until its first bytes are there; wgmma_latency, barrier, mbarrier and
        cluster_barrier are from the end of the work, or the last arrival, until those who wait go on.
    division: instructions that an integer or exact division, or a remainder, expands to; an estimate.
    """

    int_lanes: int = 16
    fma_lanes: int = 32
    mufu_lanes: int = 4
    fp64_lanes: float = 16
    mma: int = 320
    wgmma: int = 512
    shared_bytes: int = 128
    global_bytes: float = 64
    int_latency: int = 4
    fma_latency: int = 4
    mufu_latency: int = 18
    fp64_latency: int = 16
    shuffle_latency: int = 23
    shared_latency: int = 29
    global_latency: int = 479
    mma_latency: int = 33
    wgmma_latency: int = 20
    cp_async_latency: int = 479
    tma_latency: int = 650
    barrier: int = 20
    mbarrier: int = 20
    cluster_barrier: int = 190
    division: int = 20

    @classmethod
    def of(cls, arch: str, **changes: Any) -> "Costs":
        """Those of a chip, such as "sm_90a", with some of them changed. Raises SimulationError."""
        if arch not in _CHIPS:
            raise SimulationError(f"there are no costs for {arch!r}; known: {', '.join(_CHIPS)}")
        return replace(_CHIPS[arch], **changes)

    def cycles(self, lanes: float) -> int:
        """Of a warp's instruction, in a unit with so many lanes."""
        return ceil(32 / lanes)

    def mma_cycles(self, m: int, n: int, k: int, kind: str) -> float:
        """Of one mma.sync, in the tensor core of its sub-core."""
        return m * n * k * _RELATIVE.get(kind, 1) / self.mma

    def wgmma_cycles(self, n: int, k: int, kind: str, a_in_registers: bool) -> int:
        """Of one wgmma, in all four tensor cores: those of computing, or of reading A and B, if longer."""
        computing = 64 * n * k * _RELATIVE.get(kind, 1) / (SUB_CORES * self.wgmma)
        element = {"tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}.get(kind, 2)
        reading = (n + (0 if a_in_registers else 64)) * k * element / self.shared_bytes
        return ceil(max(computing, reading))


_RELATIVE = {"tf32": 2.0, "e4m3": 0.5, "e5m2": 0.5, "s8": 0.5, "u8": 0.5}
_H100 = Costs()
_A100 = Costs(fma_lanes=16, fp64_lanes=8, mma=256, wgmma=0, global_latency=466, cp_async_latency=466,
              mma_latency=25)  # fmt: skip
_GA102 = Costs(fp64_lanes=0.5, mma=64, wgmma=0, global_latency=500, cp_async_latency=500)
_AD102 = Costs(fp64_lanes=0.5, mma=64, wgmma=0, global_latency=541, cp_async_latency=541)
_CHIPS = {"sm_80": _A100, "sm_86": _GA102, "sm_89": _AD102, "sm_90": _H100, "sm_90a": _H100}


@dataclass(frozen=True)
class Work:
    """What an instruction does, as far as its name says.

    kind: one of KINDS. unit: that of the sub-core which it keeps busy for `cycles`; "" if it has none of its
    own. latency: until its result is ready, without the time of memories. free: takes no issue slot.
    """

    kind: str
    unit: str = ""
    cycles: float = 1
    latency: int = 1
    free: bool = False


KINDS = ("mma", "mufu", "math", "shared", "global", "copy", "sync", "other", "stall", "wait")
"""Of spans. stall: for the result of an earlier instruction. wait: for other warps, copies or wgmma."""

_MUFU = {"ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh"}
_SYNC = {"bar", "barrier", "mbarrier", "fence", "membar", "griddepcontrol", "setmaxnreg", "nanosleep"}
_CONTROL = {"bra", "ret", "exit", "call", "trap", "activemask", "prefetch", "prefetchu", "createpolicy"}
_EXCHANGE = {"shfl", "vote", "match", "redux", "elect", "movmatrix"}
_COPIES = {"cvta", "mapa", "getctarank"}


def work_of(instruction: Instruction, costs: Costs) -> Work:
    """How an instruction is charged for."""
    i, opcode, modifiers = instruction, instruction.opcode, instruction.modifiers
    if opcode in _COPIES or "param" in modifiers or (opcode == "mov" and not _packs(i)):
        return Work("other", cycles=0, latency=0, free=True)
    if opcode == "mma":
        return Work("mma", "tensor", costs.mma_cycles(*shape(i), modifiers[-3]), costs.mma_latency)
    if opcode in ("ldmatrix", "stmatrix") or (opcode in ("ld", "st", "atom", "red") and _is_shared(i)):
        return Work("shared")
    if opcode in ("ld", "st", "atom", "red"):
        return Work("global")
    if opcode == "wgmma":
        return Work("mma" if modifiers[0] == "mma_async" else "sync")
    if opcode == "cp":
        return Work(
            "sync" if {"commit_group", "wait_group", "wait_all", "mbarrier"} & {*modifiers} else "copy"
        )
    if opcode in _SYNC:
        return Work("sync")
    if opcode in _EXCHANGE:
        return Work("other", latency=costs.shuffle_latency)
    if opcode in _CONTROL:
        return Work("other")
    kind = modifiers[-1] if modifiers else ""
    if opcode in _MUFU or (opcode == "div" and kind == "f32" and {"approx", "full"} & {*modifiers}):
        times = 2 if kind.endswith("x2") else 1
        return Work("mufu", "mufu", times * costs.cycles(costs.mufu_lanes), costs.mufu_latency)
    if opcode in ("div", "rem"):
        cycles = costs.division * costs.cycles(costs.int_lanes)
        return Work("math", "int", cycles, cycles + costs.int_latency)
    if kind == "f64":
        return Work("math", "fp64", costs.cycles(costs.fp64_lanes), costs.fp64_latency)
    if kind[:1] == "f" or kind.startswith("bf16"):
        return Work("math", "fma", costs.cycles(costs.fma_lanes), costs.fma_latency)
    return Work("math", "int", costs.cycles(costs.int_lanes), costs.int_latency)


def shape(instruction: Instruction) -> tuple[int, int, int]:
    """(m, n, k) of an mma.sync or a wgmma."""
    text = next(m for m in instruction.modifiers if m[0] == "m" and m[1:2].isdigit())
    m, rest = text[1:].split("n")
    n, k = rest.split("k")
    return int(m), int(n), int(k)


def _is_shared(instruction: Instruction) -> bool:
    return any(m.split("::")[0] == "shared" for m in instruction.modifiers)


def _packs(instruction: Instruction) -> bool:
    return any(isinstance(each, Vector) for each in instruction.operands)
