"""Trains a small transformer on handwritten digits with PyTorch, then computes it with cutelab's kernels.

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
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from cutelab import simulator
from cutelab.kernels import Linear, flash_attention

DTYPE = torch.float16
SIMULATED = "sm_80"
EPOCHS = 20
TRAINING_DIGITS = 1437  # the rest of the 1797 tells how well the network learned


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """scikit-learn's 1797 digits: images (1797, 64) in [0, 1] and labels (1797,)."""
    data = sklearn.datasets.load_digits()
    return torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)


def pytorch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """With the dims in the order of `flash_attention`: (B, S, H, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2)


class Transformer(nn.Module):
    """One block; the tokens are the 8 rows of an image."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.attention: Callable[..., torch.Tensor] = pytorch_attention
        self.embed = nn.Linear(8, width)
        self.position = nn.Parameter(torch.zeros(8, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.classify = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(B, 64) to logits (B, 10)."""
        x = self.embed(images.unflatten(1, (8, 8))) + self.position  # (B, 8, width)
        q, k, v = self.qkv(self.norms[0](x)).unflatten(2, (3, self.heads, -1)).unbind(2)  # (B, 8, heads, D)
        x = x + self.project(self.attention(q, k, v).flatten(2))
        x = x + self.mlp(self.norms[1](x))
        return self.classify(x.mean(1))

    def on_cutelab(self) -> Transformer:
        """The same network with the same parameters; attention and linear layers are cutelab's."""
        ours = Transformer()
        ours.attention = flash_attention
        ours.embed, ours.qkv, ours.project, ours.classify = map(
            Linear.of, (self.embed, self.qkv, self.project, self.classify)
        )
        up, _, down = self.mlp
        ours.mlp = nn.Sequential(Linear.of(up, activation="relu"), Linear.of(down))
        ours.norms, ours.position = self.norms, self.position
        return ours


def train(images: torch.Tensor, labels: torch.Tensor) -> Transformer:
    """Trained on the CPU in fp32."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the batches are too small to share
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    for _ in range(EPOCHS):
        for batch in torch.randperm(TRAINING_DIGITS).split(32):
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return model


def agree(ours: torch.Tensor, reference: torch.Tensor) -> bool:
    """Whether all predictions agree; says by how much the logits differ."""
    same = int((ours.argmax(1) == reference.argmax(1)).sum())
    difference = (ours.float() - reference.float()).abs().max().item()
    print(f"Logits differ by at most {difference:.2g}, of at most {reference.abs().max().item():.3g}.")
    print(f"Predictions agree on {same} of {len(ours)} digits.")
    return same == len(ours)


@torch.no_grad()
def run_on_gpu(model: Transformer, images: torch.Tensor) -> bool:
    """Runs the network both ways on the GPU; True if all predictions agree."""
    model, images = model.to("cuda", DTYPE), images.to("cuda", DTYPE)
    ours = model.on_cutelab()
    ways = {"cutelab": lambda: ours(images), "PyTorch": lambda: model(images)}
    same = agree(*(call() for call in ways.values()))
    for name, call in ways.items():
        print(f"{name:8} {graph_microseconds(call):6.1f} µs a forward pass, replayed from a CUDA graph")
    return same


@torch.no_grad()
def run_in_simulator(model: Transformer, images: torch.Tensor) -> bool:
    """Runs the network's compiled kernels on the CPU; True if all predictions are PyTorch's in fp32."""
    reference = model(images)
    ours = model.to(DTYPE).on_cutelab()
    start = time.perf_counter()
    with simulator.gpu(SIMULATED):
        logits = ours(images.to(DTYPE))
    seconds = time.perf_counter() - start
    print(f"Its kernels for {SIMULATED} ran, and were checked, in the simulator: {seconds:.0f} s.")
    return agree(logits, reference)


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
    return run_in_simulator(model, images[TRAINING_DIGITS:])


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
