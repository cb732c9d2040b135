"""The algebra: layouts as functions, eager at a Python prompt and unchanged inside kernels.

Importing this package lets the DSL's own objects (`cute.make_layout`, `cute.make_tiled_mma`, ...) be built,
printed and evaluated outside `@cute.jit`: see `cutelab.layouts.eager`.
"""

from cutelab.layouts import checked, draw, eager
from cutelab.layouts.arrays import CoordinateError, as_numpy, evaluate, same_function
from cutelab.layouts.banks import Access, BankReport
from cutelab.layouts.errors import AccessError, LayoutError, SwizzleError, TileError
from cutelab.layouts.explaining import explain
from cutelab.layouts.fragments import accumulator_as_operand, accumulator_rows, accumulator_slices
from cutelab.layouts.notation import NotationError, format, parse, parse_layout
from cutelab.layouts.solver import Solution, solve
from cutelab.layouts.svg import Picture, PictureError
from cutelab.layouts.swizzle import in_bytes, in_elements
from cutelab.layouts.tiles import (
    copy_threads,
    line_swizzle,
    operand_tile,
    smem_tile,
    swizzled_tensor,
    tma_tile,
)
from cutelab.layouts.traffic import bank_report
from cutelab.layouts.tv import Owners, owners, tv_map

__all__ = [
    "Access",
    "AccessError",
    "BankReport",
    "CoordinateError",
    "LayoutError",
    "NotationError",
    "Owners",
    "Picture",
    "PictureError",
    "Solution",
    "SwizzleError",
    "TileError",
    "accumulator_as_operand",
    "accumulator_rows",
    "accumulator_slices",
    "as_numpy",
    "bank_report",
    "checked",
    "copy_threads",
    "draw",
    "eager",
    "evaluate",
    "explain",
    "format",
    "in_bytes",
    "in_elements",
    "line_swizzle",
    "operand_tile",
    "owners",
    "parse",
    "parse_layout",
    "same_function",
    "smem_tile",
    "solve",
    "swizzled_tensor",
    "tma_tile",
    "tv_map",
]
