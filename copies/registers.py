"""How long a value lives in a register."""

from cutlass import Int32
from cutlass.cute.arch import inline_ptx


def opaque(value: Int32) -> Int32:
    """The same value, where it is used: the compiler doesn't look into the instruction that makes it.

    What is computed from it inside a loop stays there. Else all that doesn't change from turn to turn, such
    as the coordinates of a thread's vectors, moves out of the loop and occupies registers throughout.
    """
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])
