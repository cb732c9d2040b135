import subprocess
import sys
from pathlib import Path

import pytest
import torch

DEMO = Path(__file__).parents[1] / "demo.py"


def run_demo() -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, DEMO], capture_output=True, text=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_predictions_are_pytorchs_in_the_simulator():
    result = run_demo()
    assert result.returncode == 0, result.stderr
    assert "agree on 360 of 360 digits" in result.stdout
    assert "simulator" in result.stdout
    assert f"torch {torch.__version__}" in result.stdout


@pytest.mark.gpu
def test_predictions_are_pytorchs_on_a_gpu():
    result = run_demo()
    assert result.returncode == 0, result.stdout + result.stderr
    assert "agree on 1797 of 1797 digits" in result.stdout
