"""A drop-in for torch.nn.Linear."""

from __future__ import annotations

from typing import Any

import torch

from cutelab.kernels.dense_gemm.op import gemm

__all__ = ["Linear"]


class Linear(torch.nn.Linear):
    """torch.nn.Linear whose product is `gemm`, with bias and activation in the same kernel.

    activation: as for `gemm`. The other arguments are those of torch.nn.Linear, and so are the parameters:
    state dicts go both ways. Raises what `gemm` raises; it needs a GPU, or the simulator.
    """

    def __init__(self, *args: Any, activation: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.activation = activation

    @classmethod
    def of(cls, layer: torch.nn.Linear, activation: str | None = None) -> Linear:
        """The same layer with the same parameters, not copies of them."""
        linear = cls(
            layer.in_features, layer.out_features, layer.bias is not None, "meta", activation=activation
        )
        linear.weight, linear.bias = layer.weight, layer.bias
        return linear.train(layer.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, in_features) → (…, out_features)."""
        rows = x if x.dim() > 1 else x[None]
        result = gemm(rows, self.weight.mT, bias=self.bias, activation=self.activation)
        return result if x.dim() > 1 else result[0]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"
