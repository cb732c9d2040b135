"""One CTA: its state, and what instructions do that are more than an expression."""

from cutelab.simulator.asynchronous import Asynchronous
from cutelab.simulator.matrices import Matrices
from cutelab.simulator.printing import Printing
from cutelab.simulator.state import WARP, WARPGROUP

__all__ = ["WARP", "WARPGROUP", "Cta"]


class Cta(Matrices, Asynchronous, Printing):
    """Its methods are what the source that `translate` generates calls, as `c`."""
