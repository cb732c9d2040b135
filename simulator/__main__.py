"""Runs a CuTe DSL script whose tensors are on the CPU: `python -m cutelab.simulator [options] script.py …`"""

import argparse
import runpy
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

from cutelab.simulator import SimulationError, execute, gpu
from cutelab.simulator.bank_conflicts import BankConflicts


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: the script's own, or 1 where it or the simulated GPU has raised an error."""
    parser = argparse.ArgumentParser(
        "python -m cutelab.simulator",
        description="Run a CuTe DSL script on a simulated GPU.",
        allow_abbrev=False,
    )
    parser.add_argument("--gpu", default="sm_90a", help="architecture[:multiprocessors], by default sm_90a")
    parser.add_argument("--seed", type=int, help="let chance pick which warp goes on")
    parser.add_argument("--banks", action="store_true", help="print bank conflicts by source line at the end")
    parser.add_argument("script", help="a Python file; what follows is its command line")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    arch, _, count = options.gpu.partition(":")
    if not Path(options.script).is_file():
        parser.error(f"there is no file {options.script}")
    if count and not (count.isdecimal() and int(count)):
        parser.error(f"--gpu {options.gpu}: {count!r} is no number of multiprocessors; write {arch}:4")
    banks = BankConflicts() if options.banks else None
    try:
        with gpu(
            arch,
            multiprocessors=int(count) if count else None,
            execute=partial(execute, seed=options.seed, banks=banks),
        ):
            status = run(options.script, options.arguments)
    except SimulationError as error:
        print(f"{place(error.__traceback__, options.script)}{type(error).__name__}: {error}", file=sys.stderr)
        status = 1
    if banks is not None:
        print(banks.by_line())
    return status


def run(script: str, arguments: Sequence[str]) -> int:
    """Runs a script as Python does; prints the traceback of its errors, but SimulationErrors come out."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SimulationError:
        raise
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        own = error.__traceback__
        while own and own.tb_next and own.tb_frame.f_code.co_filename != script:
            own = own.tb_next
        traceback.print_exception(type(error), error, own)
        return 1
    return 0


def place(trace: TracebackType | None, script: str) -> str:
    """The last line of the script that a traceback leads through, as "script.py:12: "."""
    lines = [line for frame, line in traceback.walk_tb(trace) if frame.f_code.co_filename == script]
    return f"{script}:{lines[-1]}: " if lines else ""


if __name__ == "__main__":
    sys.exit(main())
