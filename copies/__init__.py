"""Data movement on top of layouts: vectorised copies, cp.async, ldmatrix, TMA."""

from cutelab.copies.cp_async import CpAsyncRing, cp_async
from cutelab.copies.errors import CopyError
from cutelab.copies.matrix import operand_atom, operand_copies, stmatrix_copy
from cutelab.copies.pipeline import TmaRing
from cutelab.copies.registers import opaque
from cutelab.copies.rows import RowLoader
from cutelab.copies.tma import TMA_ALIGNMENT, TmaLoader, load_atom, store_atom, store_tile
from cutelab.copies.vectorized import TileLoader, copy_atom, copy_or_zero, tile_copy

__all__ = [
    "TMA_ALIGNMENT",
    "CopyError",
    "CpAsyncRing",
    "RowLoader",
    "TileLoader",
    "TmaLoader",
    "TmaRing",
    "copy_atom",
    "copy_or_zero",
    "cp_async",
    "load_atom",
    "opaque",
    "operand_atom",
    "operand_copies",
    "stmatrix_copy",
    "store_atom",
    "store_tile",
    "tile_copy",
]
