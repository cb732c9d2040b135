import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gemm.py"


def run(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *args], capture_output=True, text=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_says_what_it_needs_without_a_gpu(tmp_path):
    result = run("--output", str(tmp_path))
    assert result.returncode == 1
    assert "NVIDIA GPU" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.parametrize("flags, unit", [([], "TFLOP/s"), (["--host"], "us")])
def test_writes_records_and_prints_a_table(tmp_path, flags, unit):
    shape = ["--shapes", "256,128,64", "--layouts", "nn", "nt", "tn", "tt", "--dtypes", "fp16"]
    result = run(*shape, *flags, "--rounds", "2", "--commit", "abc1234", "--output", str(tmp_path))
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in (tmp_path / "gemm.jsonl").read_text().splitlines()]
    assert [r["config"]["layout"] for r in records] == ["nn", "nt", "tn", "tt"]
    assert all(r["ours"] > 0 and r["peers"]["cublas"] > 0 for r in records)
    assert {(r["unit"], r["commit"]) for r in records} == {(unit, "abc1234")}
    assert len(result.stdout.splitlines()) == 2 + len(records)
