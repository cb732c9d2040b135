"""Data movement on top of layouts: vectorised copies, cp.async, ldmatrix."""

from cutelab.copies.cp_async import CpAsyncRing, cp_async
from cutelab.copies.errors import CopyError
from cutelab.copies.matrix import operand_atom, operand_copies
from cutelab.copies.vectorized import TileLoader, copy_atom, copy_or_zero, tile_copy

__all__ = [
    "CopyError",
    "CpAsyncRing",
    "TileLoader",
    "copy_atom",
    "copy_or_zero",
    "cp_async",
    "operand_atom",
    "operand_copies",
    "tile_copy",
]
