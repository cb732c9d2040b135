"""The patterns that the model of bank conflicts is held against, and, on a GPU, the counters themselves."""

import shutil
import sys

import bank_counters
import numpy as np
import pytest

import protocol
from cutelab.layouts import BankReport

PATTERNS = bank_counters.patterns()


def test_there_are_enough_patterns_of_each_access():
    assert len(PATTERNS) >= 200
    for name in bank_counters.ACCESSES:
        mine = [pattern for pattern in PATTERNS if pattern.access == name]
        assert len(mine) >= 20
        wavefronts = {int(BankReport(name, pattern.addresses).wavefronts[0]) for pattern in mine}
        assert len(wavefronts) >= 4  # not all alike
        if "matrix" not in name:
            assert any((pattern.addresses == -1).any() for pattern in mine)


@pytest.mark.parametrize("name", bank_counters.ACCESSES)
def test_the_probe_issues_the_access_it_is_named_after(name):
    ptx = bank_counters.compiled(bank_counters.Probe(name), "sm_90a").__ptx__
    issued = [line.split()[0] for line in ptx.splitlines() if "[" in line and ".shared" in line.split()[0]]
    issued = [opcode for opcode in issued if not opcode.startswith(".")]
    assert len(issued) == 1
    kind, *parts = name.replace("cp.async", "cp_async").split(".")
    assert issued[0].startswith(kind.replace("_", ".") + ".")
    if kind in ("ld", "st"):
        bits = int(parts[1][1:])
        assert issued[0].endswith(f"b{min(bits, 32)}") and (f".v{bits // 32}." in issued[0]) == (bits > 32)
    elif kind != "cp_async":
        assert f".{parts[0]}." in issued[0] and (".trans." in issued[0]) == ("trans" in parts)


def test_stored_counts_are_what_the_model_says_today():
    """The table of counters, kept as data: the model still predicts every line of it."""
    stored = protocol.load(protocol.RESULTS / "bank_counters.jsonl")
    assert len(stored) >= 200
    assert {record["config"]["access"] for record in stored} == set(bank_counters.ACCESSES)
    for record in stored:
        report = BankReport(record["config"]["access"], np.array(record["config"]["addresses"]))
        predicted = {"wavefronts": int(report.wavefronts[0]), "conflicts": int(report.conflicts[0])}
        assert predicted == record["ours"] == record["counted"], record["config"]


def test_table_counts_what_agrees():
    results = bank_counters.records(PATTERNS[:2], [{"wavefronts": 1, "conflicts": 0}] * 2, {})
    results[1]["counted"] = {"wavefronts": 2, "conflicts": 1}
    assert "| ld.shared.b8 | 2 | 1 |" in bank_counters.table(results)


@pytest.mark.gpu
def test_prediction_is_what_the_hardware_counts():
    if shutil.which("ncu") is None:
        pytest.skip("needs Nsight Compute's ncu")
    command = [sys.executable, bank_counters.__file__, "--issue"]
    results = bank_counters.records(PATTERNS, bank_counters.count(PATTERNS, command), {})
    assert [(r["config"], r["counted"]) for r in results if r["ours"] != r["counted"]] == []
