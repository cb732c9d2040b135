"""Trains a small network on handwritten digits with PyTorch, then computes it with cutelab's GEMM.

Compares logits and predictions with PyTorch's. On a GPU, in the same dtype, and times both. Without one, the
kernels that an A100 would get run on the CPU, in cutelab's simulator, which checks them as they run; PyTorch
computes in fp32 then. Exits with 1 if a prediction differs.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import sklearn.datasets
import torch
from torch import nn

from cutelab import simulator
from cutelab.kernels import gemm

DTYPE = torch.float16
SIMULATED = "sm_80"
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


def agree(ours: torch.Tensor, reference: torch.Tensor) -> bool:
    """Whether all predictions agree; says by how much the logits differ."""
    same = int((ours.argmax(1) == reference.argmax(1)).sum())
    difference = (ours.float() - reference.float()).abs().max().item()
    print(f"Logits differ by at most {difference:.2g}, of at most {reference.abs().max().item():.3g}.")
    print(f"Predictions agree on {same} of {len(ours)} digits.")
    return same == len(ours)


@torch.no_grad()
def run_on_gpu(model: nn.Sequential, images: torch.Tensor) -> bool:
    """Runs the network both ways on the GPU; True if all predictions agree."""
    model, images = model.to("cuda", DTYPE), images.to("cuda", DTYPE)
    layers = linear_layers(model)
    ways = {"cutelab": lambda: forward(layers, images), "PyTorch": lambda: model(images)}
    same = agree(*(call() for call in ways.values()))
    for name, call in ways.items():
        print(f"{name:8} {graph_microseconds(call):6.1f} µs a forward pass, replayed from a CUDA graph")
    return same


@torch.no_grad()
def run_in_simulator(model: nn.Sequential, images: torch.Tensor) -> bool:
    """Runs the network's compiled kernels on the CPU; True if all predictions are PyTorch's in fp32."""
    reference = model(images)
    layers = linear_layers(model.to(DTYPE))
    start = time.perf_counter()
    with simulator.gpu(SIMULATED):
        ours = forward(layers, images.to(DTYPE))
    seconds = time.perf_counter() - start
    print(f"Three kernels for {SIMULATED} ran, and were checked, in the simulator: {seconds:.0f} s.")
    return agree(ours, reference)


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
        return run_on_gpu(model, images)
    print(f"The kernels can't run on a GPU here: {obstacle}.")
    return run_in_simulator(model, images)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
