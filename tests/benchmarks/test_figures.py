import json
import re
import subprocess
import sys
from pathlib import Path

import figures
import pytest

ROOT = Path(__file__).parents[2]
RECORD = {
    "op": "gemm",
    "kernel": "sm80",
    "dtype": "bf16",
    "config": {"m": 16, "layout": "nt"},
    "ours": 5.0,
    "peers": {"cublas": 8.0},
    "unit": "TFLOP/s",
    "gpu": "chip",
    "torch": "2.13",
}


def test_same_records_draw_the_same_file(tmp_path):
    paths = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for path in paths:
        figures.draw([RECORD, RECORD | {"peers": {}}], path)
    first, second = (path.read_text() for path in paths)
    assert "<svg" in first
    assert first == second


@pytest.fixture
def drawn(monkeypatch) -> list[dict]:
    """The records that `main` draws."""
    records: list[dict] = []
    monkeypatch.setattr(figures, "draw", lambda chosen, path: records.extend(chosen))
    return records


def write(path, *records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def test_a_missing_peer_has_no_bar(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures.plt.Axes, "bar_label", lambda axes, bars, **_: drawn.append(bars.datavalues))
    figures.draw([RECORD, RECORD | {"ours": 6.0, "peers": {}}], tmp_path / "a.svg")
    assert [list(values) for values in drawn] == [[5.0, 6.0], [8.0]]


def test_draws_the_gpu_of_the_newest_record(tmp_path, drawn):
    old, other, new = RECORD, RECORD | {"gpu": "other"}, RECORD | {"ours": 6.0}
    figures.main([str(write(tmp_path / "gemm.jsonl", old, other, new))])
    assert drawn == [new]


def test_draws_the_operation_that_is_asked_for(tmp_path, drawn):
    host = RECORD | {"op": "gemm_host", "unit": "us", "gpu": "other"}
    path = write(tmp_path / "gemm.jsonl", RECORD, host)
    figures.main([str(path)])
    figures.main([str(path), "--op", "gemm_host"])
    assert drawn == [RECORD, host]


@pytest.mark.parametrize(
    "records, present",
    [([RECORD], "gemm"), ([{"op": "conv", "ours": {"LDS": 1}}], "nothing"), ([], "nothing")],
)
def test_nothing_to_draw(tmp_path, capsys, drawn, records, present):
    with pytest.raises(SystemExit):
        figures.main([str(write(tmp_path / "file.jsonl", *records)), "--op", "conv"])
    assert re.search(rf"'conv'; it does in: {present}$", capsys.readouterr().err.strip())
    assert drawn == []


def test_the_command_of_the_docstring(tmp_path):
    (command,) = re.findall(r"python (benchmarks/.*)", figures.__doc__)
    script, results = (ROOT / part for part in command.split())
    output = tmp_path / "a.svg"
    subprocess.run([sys.executable, script, results, "-o", output], check=True)
    assert "<svg" in output.read_text()
