"""A branch that stays one."""

import cutlass
from cutlass import Boolean, Int32

from cutelab.copies import opaque


def turns(condition: Boolean) -> Int32:
    """1 or 0, for a loop instead of an `if`: `for _ in cutlass.range(turns(condition), unroll=1)`.

    ptxas turns even a hundred instructions behind an `if` into predicated ones, and those take their place in
    the issue slots whether or not the predicate holds. A loop it leaves alone, as nobody can tell that one
    turn is the most.
    """
    return opaque(cutlass.select_(condition, Int32(1), Int32(0)))
