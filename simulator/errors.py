"""What the simulator reports. Each message names the instruction, its line if known, and who did it."""


class SimulationError(RuntimeError):
    """A kernel did what the hardware forbids or leaves undefined, or what the simulator doesn't know."""


class UnsupportedInstruction(SimulationError):
    """An instruction, or a form of one, that the simulator doesn't know."""


class MemoryFault(SimulationError):
    """An access out of bounds or misaligned."""


class Deadlock(SimulationError):
    """No thread can go on: who waits for what."""


class DivergenceError(SimulationError):
    """An instruction for whole warps, executed by some of their lanes."""


class RaceError(SimulationError):
    """Two accesses to the same bytes, one of them a write, with nothing that orders them."""


class UninitializedRead(SimulationError):
    """A read of memory that nobody has written."""


class BarrierError(SimulationError):
    """More arrivals, or other numbers of threads or bytes, than a barrier was set up for."""
