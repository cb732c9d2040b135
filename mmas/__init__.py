"""Tensor-core tiles on top of layouts: mma.sync, the registers that feed it, and wgmma."""

from cutelab.mmas.errors import MmaError
from cutelab.mmas.fragments import OperandPipeline, StagedOperand, multiply, round_to_tf32
from cutelab.mmas.mma_sync import WARP, mma_op, tiled_mma
from cutelab.mmas.wgmma import MMA_ROWS, WARPGROUP, StagedProduct, warpgroup_mma

__all__ = [
    "MMA_ROWS",
    "WARP",
    "WARPGROUP",
    "MmaError",
    "OperandPipeline",
    "StagedOperand",
    "StagedProduct",
    "mma_op",
    "multiply",
    "round_to_tf32",
    "tiled_mma",
    "warpgroup_mma",
]
