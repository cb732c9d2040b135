"""Trains a small network on handwritten digits with PyTorch, then computes it with cutelab's GEMM.

On a GPU: compares logits and predictions with PyTorch's in the same dtype, and times both. Without one:
compiles the same kernels and shows what they consist of. Exits with 1 if a prediction differs.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable

import sklearn.datasets
import torch
from torch import nn

from cutelab.kernels import gemm
from cutelab.kernels.dense_gemm.config import GemmConfig, choose_tile
from cutelab.kernels.dense_gemm.sm80 import GemmSm80
from cutelab.kernels.runtime.arch import Arch
from cutelab.kernels.runtime.compile import compile_to_artifacts
from cutelab.kernels.runtime.disassembly import count, summarize

DTYPE = torch.float16
ARCHS = ("sm_80", "sm_90a")
TRAINING_DIGITS = 1437  # the rest of the 1797 tells how well the network learned


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """scikit-learn's 1797 digits: images (1797, 64) in [0, 1] and labels (1797,)."""
    data = sklearn.datasets.load_digits()
    return torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)


def train(images: torch.Tensor, labels: torch.Tensor) -> nn.Sequential:
    """A multilayer perceptron, trained on the CPU in fp32."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the batches are too small to share
    model = nn.Sequential(
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(20):
        for batch in torch.randperm(TRAINING_DIGITS).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return model


def forward(layers: list[nn.Linear], x: torch.Tensor) -> torch.Tensor:
    """The network with one kernel a layer: bias and ReLU are computed by the GEMM."""
    *hidden, last = layers
    for layer in hidden:
        x = gemm(x, layer.weight.T, bias=layer.bias, activation="relu")
    return gemm(x, last.weight.T, bias=last.bias)


def linear_layers(model: nn.Sequential) -> list[nn.Linear]:
    return [layer for layer in model if isinstance(layer, nn.Linear)]


@torch.no_grad()
def compare(model: nn.Sequential, images: torch.Tensor) -> bool:
    """Runs the network both ways on the GPU; True if all predictions agree."""
    model, images = model.to("cuda", DTYPE), images.to("cuda", DTYPE)
    layers = linear_layers(model)
    ways = {"cutelab": lambda: forward(layers, images), "PyTorch": lambda: model(images)}
    ours, reference = (call() for call in ways.values())
    agree = int((ours.argmax(1) == reference.argmax(1)).sum())
    difference = (ours.float() - reference.float()).abs().max().item()
    print(f"Logits differ by at most {difference:.2g}, of at most {reference.abs().max().item():.3g}.")
    print(f"Predictions agree on {agree} of {len(images)} digits.")
    for name, call in ways.items():
        print(f"{name:8} {graph_microseconds(call):6.1f} µs a forward pass, replayed from a CUDA graph")
    return agree == len(images)


def graph_microseconds(call: Callable[[], object], repeats: int = 50, rounds: int = 20) -> float:
    """Median time of a call over rounds that each replay a CUDA graph of `repeats` calls."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    times = []
    for _ in range(rounds + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / repeats)
    return statistics.median(times[1:])  # the first replay raises the clocks


def configuration(layer: nn.Linear, activation: str | None, rows: int, arch: Arch) -> GemmConfig:
    """What `gemm` compiles for a layer: x (rows, in) times weight.T, whose unit strides are both along K."""
    n, k = layer.weight.shape
    dtype = str(DTYPE).removeprefix("torch.")

    def alignment(columns: int) -> int:
        return math.gcd(16, columns * DTYPE.itemsize)

    align = alignment(k)
    return GemmConfig(
        ab_dtype=dtype,
        out_dtype=dtype,
        a_major="k",
        b_major="k",
        a_align=align,
        b_align=align,
        out_align=alignment(n),
        bias="n",
        activation=activation,
        **choose_tile(dtype, dtype, rows, n, 1, arch, align),
    )


def show_kernels(layers: list[nn.Linear], rows: int) -> None:
    """Compiles the kernel of every layer for each architecture and prints what it consists of."""
    print("arch    layer            tile         HMMA  LDSM  LDGSTS  registers  shared KiB  spills")
    for arch in map(Arch.named, ARCHS):
        for layer in layers:
            config = configuration(layer, None if layer is layers[-1] else "relu", rows, arch)
            (kernel,) = summarize(compile_to_artifacts(GemmSm80(config), arch).cubin)
            counts = [count(kernel.instructions, opcode) for opcode in ("HMMA", "LDSM", "LDGSTS")]
            shape = f"{rows} x {layer.out_features} x {layer.in_features}"
            tile = "x".join(map(str, config.tile))
            print(
                f"{arch.name:7} {shape:16} {tile:12} {counts[0]:4} {counts[1]:5} {counts[2]:7} "
                f"{kernel.registers:10} {config.smem_bytes / 1024:11.1f} {kernel.spills:7}"
            )


def missing() -> str | None:
    """What keeps the kernels from running here, or None if nothing does."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU (does nvidia-smi?)"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"{torch.cuda.get_device_name()} is older than that"
    return None


def main() -> bool:
    images, labels = digits()
    model = train(images, labels)
    correct = (model(images).argmax(1) == labels)[TRAINING_DIGITS:].float().mean().item()
    print(f"Trained on {TRAINING_DIGITS} digits: right on {correct:.1%} of the others.")
    obstacle = missing()
    if obstacle is None:
        return compare(model, images)
    show_kernels(linear_layers(model), len(images))
    print("To run, they need an NVIDIA GPU of compute capability 8.0 or higher and a torch built with CUDA.")
    print(f"Here, {obstacle}.")
    return True


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
