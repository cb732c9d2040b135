import figures

RECORD = {
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
