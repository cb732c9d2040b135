import re
from pathlib import Path

import pytest
import torch

import protocol

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.gpu
@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippet_runs(snippet, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(snippet, {})
    torch.cuda.synchronize()


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippet_is_right_in_shapes_and_dtypes(snippet, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # one writes a picture
    exec(snippet.replace('"cuda"', '"meta"'), {})


def test_every_file_that_is_named_exists():
    named = set(re.findall(r"`([\w./]+/[\w./]+)`", README + (ROOT / "CONTRIBUTING.md").read_text()))
    assert named
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_figures_are_the_newest_results():
    """Each row of the table of GEMMs, as measured."""
    newest = {}
    for result in protocol.newest(protocol.load(protocol.RESULTS / "gemm.jsonl")):
        config = result["config"]
        if result["op"] == "gemm" and config["layout"] == "nt":
            newest[config["m"], config["n"], config["k"], result["dtype"]] = result
    rows = re.findall(
        r"^\| (\d+) × (\d+) × (\d+) \| (\w+) \| (\d+) \| (\d+) \| ([\d.]+) \|$", README, re.MULTILINE
    )
    assert len(rows) == len(newest)
    for m, n, k, dtype, ours, cublas, ratio in rows:
        result = newest[int(m), int(n), int(k), dtype]
        values = result["ours"], result["peers"]["cublas"]
        assert (ours, cublas) == tuple(f"{value:.0f}" for value in values)
        assert ratio == f"{values[0] / values[1]:.2f}"
