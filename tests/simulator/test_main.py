"""`python -m cutelab.simulator script.py`: what it prints, and what is left of a failure."""

import subprocess
import sys

import pytest

SCRIPT = """\
import sys

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack


@cute.kernel
def transpose(x: cute.Tensor, y: cute.Tensor, steps: cutlass.Constexpr):
    lane, _, _ = cute.arch.thread_idx()
    tile = cutlass.memory.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout((32, 32)))
    for i in cutlass.range_constexpr(steps):
        tile[lane, i] = x[lane, i]
    cute.arch.sync_threads()
    for i in cutlass.range_constexpr(32):
        y[lane, i] = tile[i, lane]
    if lane == 3:
        cute.printf("lane {} has {}", lane, y[lane, 1])


@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor, steps: cutlass.Constexpr):
    transpose(x, y, steps).launch(grid=(1, 1, 1), block=(32, 1, 1))


x, y = torch.arange(1024.0).reshape(32, 32), torch.zeros(32, 32)
launch(from_dlpack(x), from_dlpack(y), int(sys.argv[1]))
assert torch.equal(y, x.T), "not transposed"
print("done", *sys.argv[2:])
if "fail" in sys.argv:
    {}["missing"]
sys.exit(3 if "three" in sys.argv else 0)
"""


def simulate(tmp_path, *arguments):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "cutelab.simulator", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)


def test_a_script_runs_with_its_own_command_line(tmp_path):
    done = simulate(tmp_path, "--seed", "1", "--gpu", "sm_80:4", "script.py", "32", "--banks", "three")
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout == "lane 3 has 35.000000\ndone --banks three\n"


def test_bank_conflicts_by_line(tmp_path):
    done = simulate(tmp_path, "--banks", "script.py", "32")
    assert (done.returncode, done.stderr) == (0, "")
    table = done.stdout.split("done\n")[1].splitlines()
    assert table[0].split() == ["executed", "wavefronts", "conflicts", "line"]
    written, read = (next(n for n, text in enumerate(SCRIPT.splitlines(), 1) if what in text)
                     for what in ("tile[lane, i] =", "= tile[i, lane]"))  # fmt: skip
    rows = [line.split() for line in table[1:]]
    # Eight loads of 16 bytes by lanes 128 bytes apart: one at a time, where eight could be served at once.
    assert [row[:3] for row in rows if row[3].endswith(f"script.py:{read}")] == [["8", "256", "224"]]
    assert [row[:3] for row in rows if row[3].endswith(f"script.py:{written}")] == [["32", "32", "0"]]


def test_what_a_kernel_does_wrong_is_one_report(tmp_path):
    done = simulate(tmp_path, "script.py", "31")
    assert done.returncode == 1
    assert "done" not in done.stdout
    launched = next(n for n, text in enumerate(SCRIPT.splitlines(), 1) if text.startswith("launch("))
    assert done.stderr.startswith(f"script.py:{launched}: UninitializedRead: ")
    assert "script.py:17" in done.stderr  # the line of the kernel
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 3


def test_the_scripts_own_errors_have_their_traceback(tmp_path):
    done = simulate(tmp_path, "script.py", "32", "fail")
    assert done.returncode == 1
    assert done.stdout.endswith("done fail\n")
    assert done.stderr.startswith('Traceback (most recent call last):\n  File "script.py", line ')
    assert done.stderr.endswith("KeyError: 'missing'\n")
    assert "runpy" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing.py",), "there is no file nothing.py"),
        (("--gpu", "sm_90a:x", "script.py"), "'x' is no number of multiprocessors"),
        (("--gpu", "sm_1", "script.py"), "sm_1"),
    ],
)
def test_mistakes_on_the_command_line(tmp_path, arguments, message):
    done = simulate(tmp_path, *arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
