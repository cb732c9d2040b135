import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cutelab.kernels.dense_gemm import plan
from cutelab.kernels.dense_gemm.problem import Arguments
from cutelab.kernels.runtime.arch import Arch

DEMO = Path(__file__).parents[1] / "demo.py"


def run_demo() -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, DEMO], capture_output=True, text=True)


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_shows_the_kernels_and_what_is_missing_without_a_gpu():
    result = run_demo()
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith("sm_")]
    assert [row[0] for row in rows] == ["sm_80"] * 3 + ["sm_90a"] * 3
    for row in rows:
        hmma, ldsm, ldgsts, registers, _, spills = row[7:]
        assert min(int(hmma), int(ldsm), int(ldgsts), int(registers)) > 0
        assert int(spills) == 0
    assert "NVIDIA GPU" in result.stdout
    assert f"torch {torch.__version__}" in result.stdout


@pytest.mark.gpu
def test_predictions_are_pytorchs_on_a_gpu():
    result = run_demo()
    assert result.returncode == 0, result.stdout + result.stderr
    assert "agree on 1797 of 1797 digits" in result.stdout


def test_the_kernels_shown_are_those_that_gemm_asks_for(demo, monkeypatch):
    arch = Arch.named("sm_80")
    asked_for = []

    def plan_only(a, b, *, bias, activation=None):
        plan.make_plan(Arguments(a, b, bias, None, None, activation, 1.0, 0.0, None))
        return a @ b

    monkeypatch.setattr(demo, "gemm", plan_only)
    monkeypatch.setattr(plan, "_arch_of", lambda tensor: arch)
    monkeypatch.setattr(plan, "compile_kernel", lambda kernel, arch: asked_for.append(kernel.config))
    layers = [torch.nn.Linear(*sizes, dtype=demo.DTYPE) for sizes in [(64, 256), (256, 128), (128, 10)]]
    with torch.no_grad():
        demo.forward(layers, torch.zeros(1797, 64, dtype=demo.DTYPE))
    shown = [demo.configuration(layer, "relu", 1797, arch) for layer in layers[:-1]]
    assert asked_for == [*shown, demo.configuration(layers[-1], None, 1797, arch)]
