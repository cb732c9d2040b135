import json

import pytest

import protocol

WHERE = {
    "gpu": "chip",
    "driver": "580",
    "torch": "2.13",
    "dsl": "4.8.1",
    "date": "2026-01-31",
    "commit": "abc1234",
}


def example(ours: float, m: int = 4096, **peers: float) -> dict:
    config = {"m": m, "n": 4096, "k": 4096, "layout": "nt"}
    return protocol.record("gemm", "sm80", "bf16", config, {"ours": ours, **peers}, "TFLOP/s", WHERE)


def test_rounds_are_interleaved_and_summed_up_by_their_median():
    figures = {"ours": iter([3.0, 1.0, 100.0]), "cublas": iter([7.0, 5.0, 6.0])}
    order = []

    def measure(name: str) -> float:
        order.append(name)
        return next(figures[name])

    assert protocol.interleave(figures, measure, rounds=3, pause=0) == {"ours": 3.0, "cublas": 6.0}
    assert order == ["ours", "cublas"] * 3


def test_record_has_the_agreed_fields():
    assert example(500.12345, cublas=700.0) == {
        "op": "gemm",
        "kernel": "sm80",
        "dtype": "bf16",
        "config": {"m": 4096, "n": 4096, "k": 4096, "layout": "nt"},
        "ours": 500.123,
        "peers": {"cublas": 700.0},
        "unit": "TFLOP/s",
        **WHERE,
    }


def test_results_are_lines_of_json_and_the_newest_of_a_config_counts(tmp_path):
    path = tmp_path / "new" / "gemm.jsonl"
    protocol.append([example(1.0), example(2.0, m=128)], path)
    protocol.append([example(3.0)], path)
    assert [json.loads(line)["ours"] for line in path.read_text().splitlines()] == [1.0, 2.0, 3.0]
    assert [r["ours"] for r in protocol.newest(protocol.load(path))] == [3.0, 2.0]


def test_table_gives_ratios_and_leaves_missing_peers_empty():
    text = protocol.table([example(500.0, cublas=625.0, quack=1000.0), example(10.0, m=16, cublas=20.0)])
    assert text.splitlines() == [
        "| dtype | config | ours (TFLOP/s) | cublas | quack |",
        "| --- | --- | --- | --- | --- |",
        "| bf16 | 4096 4096 4096 nt | 500 | 625 (0.80×) | 1000 (0.50×) |",
        "| bf16 | 16 4096 4096 nt | 10 | 20 (0.50×) |  |",
    ]


@pytest.mark.parametrize("command", [["no-such-program"], ["false"]])
def test_what_cannot_be_asked_is_unknown(command):
    assert protocol.output_of(command) == "unknown"
