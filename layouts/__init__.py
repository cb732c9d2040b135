"""The algebra: layouts as functions, eager at a Python prompt and unchanged inside kernels.

Importing this package lets the DSL's own objects (`cute.make_layout`, `cute.make_tiled_mma`, ...) be built,
printed and evaluated outside `@cute.jit`: see `cutelab.layouts.eager`.
"""

from cutelab.layouts import eager
from cutelab.layouts.arrays import CoordinateError, as_numpy, evaluate, same_function
from cutelab.layouts.banks import Access, BankReport
from cutelab.layouts.errors import AccessError, TileError
from cutelab.layouts.notation import NotationError, format, parse, parse_layout
from cutelab.layouts.tiles import copy_threads, line_swizzle, operand_tile, smem_tile
from cutelab.layouts.traffic import bank_report
from cutelab.layouts.tv import Owners, owners, tv_map

__all__ = [
    "Access",
    "AccessError",
    "BankReport",
    "CoordinateError",
    "NotationError",
    "Owners",
    "TileError",
    "as_numpy",
    "bank_report",
    "copy_threads",
    "eager",
    "evaluate",
    "format",
    "line_swizzle",
    "operand_tile",
    "owners",
    "parse",
    "parse_layout",
    "same_function",
    "smem_tile",
    "tv_map",
]
