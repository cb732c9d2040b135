"""Kernels that PyTorch calls.

gemm                matrix product with batch broadcasting and a fused epilogue
"""

from cutelab.kernels.dense_gemm.op import gemm

__all__ = ["gemm"]
