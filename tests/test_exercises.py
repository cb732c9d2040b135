"""The notebooks' exercises: their checks take the right answers, and say what is wrong with others.

A cell tagged `exercise` is the reader's to fill in, the cell tagged `check` after it defines the check. Each
check is here with answers: source that replaces the exercise's cell, and what the check has to say.
"""

import linecache
import re
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"

ANSWERS = {
    ("03_bank_conflicts_and_swizzle", 1): [
        ("def bank_of(row, column): return (column // 8 ^ row % 8) * 4 + column % 8 // 2", "right"),
        ("def bank_of(row, column): return column // 2", r"\(1, 0\) is not in bank 0"),
        ("def bank_of(row, column): return (column // 8 ^ row) * 4 + column % 8 // 2", r"\(8, 0\) is not"),
    ],
    ("03_bank_conflicts_and_swizzle", 2): [
        ("pitch = 33", "right"),
        ("pitch = 32", "lose 0 wavefronts when writing and 992 when reading"),
        ("pitch = 36", "96 when reading"),
        ("pitch = 35", "a shorter distance would do"),
        ("pitch = 16", "at least 32 apart.*got 16"),
        ("pitch = 32.5", "whole number"),
    ],
    ("03_bank_conflicts_and_swizzle", 3): [
        ('swizzle = "S<2,2,3>"', "right"),
        ('swizzle = "S<2,4,3>"', "ldmatrix.x4 loses 48 wavefronts"),
        ('swizzle = "S<2,3,3>"', "ldmatrix.x4 loses 16 wavefronts"),
        ('swizzle = "S<2,1,3>"', "16 bytes do not stay together: cp.async.16 needs 4 neighbouring"),
        ('swizzle = "S<0,2,3>"', "loses"),
    ],
    ("04_registers_reinterpreted", 1): [
        (
            "def lane_and_value(row, column): return row % 8 * 4 + column // 2, row // 8 * 2 + column % 2",
            "right",
        ),
        ("def lane_and_value(row, column): return row * 2 + column // 4, column % 4", r"C\[0, 2\]: value 2"),
        (
            "def lane_and_value(row, column): return row * 4 + column // 2, column % 2",
            r"C\[8, 0\]: lanes are",
        ),
        (
            "def lane_and_value(row, column): return row / 2, 0",
            r"C\[0, 1\]: value 0 of lane 0.0 is C\[0, 0\]",
        ),
    ],
    ("04_registers_reinterpreted", 2): [
        ('retiled_view = "((4,2),2,2):((1,8),4,16)"', "right"),
        ('retiled_view = "(((4,2),1),2,2):(((1,8),0),4,16)"', "right"),
        (
            'retiled_view = "(8,2,2):(1,8,16)"',
            "16 of 32 values would be in the wrong register; the first is value 4",
        ),
        ('retiled_view = "((4,2),4):((1,8),4)"', r"the modes have sizes \[8, 2, 2\]"),
        ('retiled_view = "32:1"', r"the modes have sizes \[8, 2, 2\]"),
    ],
    ("04_registers_reinterpreted", 3): [
        ('key = "(4,2):(2,1)"', "right"),
        ('key = "8:1"', r"lane 0 would need S\(0, 4\), but holds S\(0, 0\), S\(0, 1\)"),
        ('key = "(2,4):(4,1)"', "would need"),
        ('key = "8:2"', "no permutation of 0–7"),
    ],
    ("05_inside_a_running_kernel", 1): [
        ('barriers = {"after writing"}', "right"),
        ('barriers = {"after reading"}', r"RaceError.*reads byte(.|\n)*`value \+= shared"),
        ("barriers = set()", "RaceError"),
        ('barriers = {"after writing", "after reading"}', "one of the two would do"),
        ('barriers = "after writing"', "a set of some of"),
    ],
    ("05_inside_a_running_kernel", 2): [
        ("counts = 1, 96", "right"),
        ("counts = 32, 96", "Deadlock(.|\n)*phase 0, 1 of 32 arrivals"),
        ("counts = 1, 128", "Deadlock(.|\n)*phase 0, 96 of 128 arrivals"),
        ("counts = 1, 32", "RaceError(.|\n)*`row"),
        ("counts = 1, 0", "counts are integers"),
    ],
    ("05_inside_a_running_kernel", 3): [
        ("stages_needed = 7", "right"),
        ("stages_needed = 4", "4.. cycles a turn, but 3.. with one stage more"),
        ("stages_needed = 8", "one stage less does it in"),
        ("stages_needed = 1", "from 2 stages"),
    ],
    ("06_tma_and_mbarrier", 1): [
        ("announced_bytes, arrivals = 16384, 16", "right"),
        ("announced_bytes, arrivals = 12288, 16", "RaceError"),
        ("announced_bytes, arrivals = 32768, 16", r"Deadlock.*\n(.*\n)*.*16384 bytes still to come"),
        ("announced_bytes, arrivals = 16384, 24", r"Deadlock.*\n(.*\n)*.*16 of 24 arrivals"),
        ("announced_bytes, arrivals = 16384, 8", "RaceError|Deadlock"),
        ("announced_bytes, arrivals = 16384.0, 16", "two positive integers"),
    ],
    ("06_tma_and_mbarrier", 2): [
        ("def turn(k, stages): return k % stages, k // stages % 2, 1 - k // stages % 2", "right"),
        (
            "def turn(k, stages): return k % stages, k // stages % 2, k // stages % 2",
            "the producer waits forever",
        ),
        (
            "def turn(k, stages): return k % stages, 1 - k // stages % 2, 1 - k // stages % 2",
            "before its time",
        ),
        (
            "def turn(k, stages): return k % stages, k % 2, 1 - k // stages % 2",
            "k-tile 1 of 2 stages: a parity",
        ),
        ("def turn(k, stages): return k, 0, 1", "k-tile 1 of 1 stages: stage 1 is not its turn"),
    ],
    ("06_tma_and_mbarrier", 3): [
        (
            "def masks(m, n, M, N): return sum(1 << m + i * M for i in range(N)), ((1 << M) - 1) << n * M",
            "right",
        ),
        (
            "def masks(m, n, M, N): return ((1 << N) - 1) << m * N, ((1 << M) - 1) << n * M",
            r"its A would go to",
        ),
        (
            "def masks(m, n, M, N): return sum(1 << m + i * M for i in range(N)), (1 << M) - 1",
            r"its B would go to",
        ),
        ("def masks(m, n, M, N): return 1, 1", r"CTA \(0, 0\) of 2 × 1: its B would go to \[\(0, 0\)\], not"),
    ],
    ("07_wgmma_and_a_hopper_gemm", 1): [
        ("def descriptor(address, k): return address // 16 + 2 * k | 512 // 16 << 32 | 2 << 62", "right"),
        (
            "def descriptor(address, k): return address // 16 + 2 * k | 1 << 16 | 512 // 16 << 32 | 2 << 62",
            "right",
        ),
        (
            "def descriptor(address, k): return address // 16 + 2 * k | 1024 // 16 << 32 | 2 << 62",
            "A, k = 0: stride is 1024, but in the run 512",
        ),
        (
            "def descriptor(address, k): return address // 16 | 512 // 16 << 32 | 2 << 62",
            r"A, k = 1: address is 1024, but in the run 1056",
        ),
        (
            "def descriptor(address, k): return address // 16 + 2 * k | 512 // 16 << 32 | 1 << 62",
            "row is 128, but in the run 64",
        ),
        ("def descriptor(address, k): return address + 32 * k | 512 << 32 | 2 << 62", "address is 16384"),
        ("def descriptor(address, k): return 1 << 15", "bits 0x8000 belong to no field"),
        ("def descriptor(address, k): return address / 16", "an integer of 64 bits; got 64.0"),
    ],
    ("07_wgmma_and_a_hopper_gemm", 2): [
        (
            "def owner(row, column): return row // 16 * 32 + row % 8 * 4 + column % 8 // 2, "
            "column // 8 * 4 + row % 16 // 8 * 2 + column % 2",
            "right",
        ),
        (
            "def owner(row, column): return row // 16 * 32 + row % 8 * 4 + column % 8 // 2, "
            "column // 8 * 4 + column % 2",
            r"\(8, 0\) is in register 2 of thread 0, not in 0 of 0",
        ),
        (
            "def owner(row, column): return row // 16 * 32 + row % 8 * 4 + column // 2, column % 2",
            r"\(0, 8\) is in register 4 of thread 0",
        ),
    ],
    ("07_wgmma_and_a_hopper_gemm", 3): [
        ("registers, columns_at_most = 232, 192", "right"),
        ("registers, columns_at_most = 240, 192", "are 66560, more than 65536"),
        ("registers, columns_at_most = 224, 192", "8 more for each thread would be 64512"),
        ("registers, columns_at_most = 236, 192", "a multiple of 8; got 236"),
        ("registers, columns_at_most = 232, 256", "would keep 256 accumulators, and has 232 registers"),
        ("registers, columns_at_most = 232, 128", "columns: 192 would do"),
        ("registers, columns_at_most = 232, 200", "a multiple of 64; got 200"),
    ],
}


def cells(name):
    return [cell for cell in nbformat.read(NOTEBOOKS / f"{name}.ipynb", 4).cells if cell.cell_type == "code"]


def tagged(cell, tag):
    return tag in cell.metadata.get("tags", ())


def execute(source, names, file):
    """As a notebook does it: the source of functions can be found, which the DSL reads."""
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    exec(compile(source, file, "exec"), names)


@pytest.fixture(scope="module", params=sorted({name for name, _ in ANSWERS}))
def notebook(request):
    """Its name and what its code cells leave behind."""
    names = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(NOTEBOOKS)
        for cell in cells(request.param):
            execute(cell.source, names, f"/{request.param}/{cell.id}.py")
    return request.param, names


def test_each_notebook_has_three_exercises_each_with_its_check(notebook):
    name, names = notebook
    order = [tag for cell in cells(name) for tag in ("exercise", "check") if tagged(cell, tag)]
    assert order == ["exercise", "check"] * 3
    assert [names[f"check_{n}"]() for n in (1, 2, 3)] == ["not yet"] * 3


@pytest.mark.parametrize("number", [1, 2, 3])
def test_checks_know_right_from_wrong(notebook, number):
    name, names = notebook
    question = [cell.source for cell in cells(name) if tagged(cell, "exercise")][number - 1]
    for answer, verdict in ANSWERS[name, number]:
        exec(answer, names)
        said = names[f"check_{number}"]()
        assert re.search(verdict, said), (answer, said)
        assert (said == "right") == (verdict == "right"), (answer, said)
    exec(question, names)
