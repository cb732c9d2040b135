"""Kernels that PyTorch calls.

flash_attention     attention of one or many heads, any sequence lengths, without a matrix of scores
flash_attention_varlen  the same for sequences of different lengths, one after the other
gemm                matrix product with batch broadcasting and a fused epilogue
tune                measures how a product is computed fastest on this GPU; `gemm` then does so
Linear              torch.nn.Linear on `gemm`

What they raise, each a ``ValueError`` or a ``TypeError``:

ShapeError          sizes that do not fit together, or exceed what a kernel can index
LayoutError         strides or memory that cannot be used
DtypeError          dtypes that are not supported, or do not go together
DeviceError         tensors on different devices, or on one that no kernel runs on
ConfigError         a kernel configuration that is illegal, or too large for the chip
"""

from cutelab.kernels.attention.op import flash_attention, flash_attention_varlen
from cutelab.kernels.dense_gemm.op import gemm
from cutelab.kernels.dense_gemm.tuning import tune
from cutelab.kernels.linear import Linear
from cutelab.kernels.runtime.errors import ConfigError, DeviceError, DtypeError, LayoutError, ShapeError

__all__ = [
    "ConfigError",
    "DeviceError",
    "DtypeError",
    "LayoutError",
    "Linear",
    "ShapeError",
    "flash_attention",
    "flash_attention_varlen",
    "gemm",
    "tune",
]
