"""`python -m cutelab.layouts`: what it prints, what it draws, and one line for bad input."""

import subprocess
import sys

import pytest

from cutelab.layouts.__main__ import main


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_access_is_counted_drawn_and_its_swizzle_solved(capsys, folder):
    assert main(["S<2,4,3> o 0 o (8,32):(32,1)", "--access", "ldmatrix.x4", "--dtype", "bf16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "S<2,4,3> o 0 o (8,32):(32,1), elements of 2 bytes"
    assert lines[2].split() == ["access", "instructions", "wavefronts", "of", "each", "ideal", "conflicts"]
    assert lines[3].split() == ["ldmatrix.x4", "1", "8", "4", "4"]
    assert lines[5].startswith("ldmatrix.x4, instruction 0: 8 wavefronts, 4 without conflicts")
    assert "  phase 0, banks 0–3: lanes 0, 2 at bytes 0, 128" in lines
    assert lines[-4:] == [
        "least swizzle: S<2,3,3> on elements of 2 bytes: in bytes S<2,4,3>; "
        "the 7 candidates of fewer bits leave conflicts",
        "  ldmatrix.x4: 4 wavefronts, no conflicts, 12 without a swizzle",
        "S<2,4,3> is that in bytes; a layout's swizzle counts elements",
        "the picture is in banks.svg",
    ]
    assert (folder / "banks.svg").read_text().startswith("<svg")


def test_the_identity_is_no_mistake(capsys):
    assert main(["S<0,4,3> o 0 o (32,8):(8,1)", "--access", "ldmatrix.x4"]) == 0
    out = capsys.readouterr().out
    assert "no swizzle is needed" in out and "is that in bytes" not in out


def test_several_accesses_are_solved_together(capsys, folder):
    access = ["--access", "ld.shared.b32", "--access", "st.shared.b128", "--order", "across"]
    assert main(["(32,32):(32,1)", "--dtype", "fp32", "--output", "both.svg", *access]) == 0
    out = capsys.readouterr().out
    assert "the best, S<3,2,3>, leaves" in out
    assert "  access 0 by" not in out and "  without access 1: S<5,0,5>" in out
    assert [path.name for path in folder.iterdir()] == ["both.svg"]


def test_instructions_that_cost_the_same_share_a_line(capsys):
    assert main(["(32,36):(36,1)", "--access", "ld.shared.b32", "--dtype", "fp32"]) == 0
    table = capsys.readouterr().out.splitlines()[3:]
    assert table[0].split() == ["ld.shared.b32", "36", "1", "1", "0"] and not table[1]


def test_offsets_and_facts(capsys, folder):
    assert main(["(2,(2,3)):(3,(6,1))"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "(2,(2,3)):(3,(6,1)): size 12, cosize 12; contiguous: every offset from the first to the last once",
        "",
        "  0  6  1  7  2  8",
        "  3  9  4 10  5 11",
        "the picture is in offsets.svg",
    ]
    assert (folder / "offsets.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("layout", "fact"),
    [
        (
            "(4,4):(5,1)",
            "size 16, cosize 19; not contiguous: 3 offsets between the first and the last are unused",
        ),
        ("(4,4):(0,1)", "size 16, cosize 4; 12 coordinates share their offset with another"),
        ("(4,4):(2,1)", "size 16, cosize 10; 6 coordinates share their offset with another"),
        ("S<1,1,2> o 0 o (4,4):(4,1)", "size 16, cosize 16; contiguous"),
        ("7", "7:1: size 7, cosize 7; contiguous"),
    ],
)
def test_facts(capsys, layout, fact):
    assert main([layout]) == 0
    assert fact in capsys.readouterr().out


def test_large_tables_are_cut_and_not_drawn(capsys, folder):
    assert main(["(128,64):(64,1)"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[2].split() == [*map(str, range(16)), "…"] and len(out) == 20 and out[18] == "…"
    assert out[19].startswith("no picture: ") and "8192" in out[19]
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["(8,4):(2,1"], r"expected ',' at character 10 of '(8,4):(2,1'"),
        (["S<2,3,3>"], "a swizzle has no shape of its own"),
        (["(8,4):(1@0,1@1)"], "not a static integer"),
        (["(100000,100000)"], "10000000000 elements"),
        (["(8,64):(64,1)", "--access", "ldmatrix.x3"], "'ldmatrix.x3' is no access to shared memory"),
        (["(8,4):(4,1)", "--access", "ldmatrix.x4"], "the tile is not a multiple of that"),
        (["(8,64):(65,1)", "--access", "ldmatrix.x4"], "needs 8 neighbouring elements"),
        (["(8,64):(-64,1)", "--access", "ld.shared.b32"], "an offset before its base"),
        (["(8,64):(64,1)", "--dtype", "fp6"], "invalid choice: 'fp6'"),
        (["(8,64):(64,1)", "--order", "up"], "invalid choice: 'up'"),
        (["(8,64):(64,1)", "--frobnicate"], "--frobnicate"),
        ([], "layout"),
        (["(128,64):(64,1)", "--output", "large.svg"], "8192"),
        (["(8,8):(8,1)", "--output", "missing/x.svg"], "No such file or directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, folder, arguments, message):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("cutelab.layouts: error: ") and message in captured.err
    assert list(folder.iterdir()) == []


def test_as_a_command(folder):
    command = [sys.executable, "-m", "cutelab.layouts"]
    fine = subprocess.run(
        [*command, "(8,8):(8,1)", "--access", "ldmatrix.x1"], capture_output=True, text=True
    )
    assert fine.returncode == 0 and fine.stderr == "" and "no swizzle is needed" in fine.stdout
    bad = subprocess.run([*command, "(8,8):(8,1"], capture_output=True, text=True)
    assert bad.returncode == 2 and bad.stdout == "" and "Traceback" not in bad.stderr
