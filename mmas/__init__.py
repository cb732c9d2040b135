"""Tensor-core tiles on top of layouts: mma.sync and the registers that feed it."""

from cutelab.mmas.errors import MmaError
from cutelab.mmas.fragments import OperandPipeline, round_to_tf32
from cutelab.mmas.mma_sync import WARP, mma_op, tiled_mma

__all__ = ["WARP", "MmaError", "OperandPipeline", "mma_op", "round_to_tf32", "tiled_mma"]
