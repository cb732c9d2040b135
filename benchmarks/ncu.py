"""Nsight Compute: profiles a command and lists what it counted."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence


def listing(command: Sequence[str], collect: Sequence[str], page: Sequence[str]) -> list[str]:
    """Profiles the kernels of the DSL that `command` launches; the lines of ncu's listing, as CSV.

    collect: what to count, as options of ncu; page: which page of the report to list. Needs a GPU, `ncu` and
    the right to read its counters.
    """
    with tempfile.TemporaryDirectory() as directory:
        report = f"{directory}/report"
        options = ["--clock-control", "none", "-k", "regex:kernel_cutlass", *collect, "-o", report]
        subprocess.run(["ncu", *options, *command], check=True, stdout=subprocess.DEVNULL)
        listed = ["ncu", "-i", f"{report}.ncu-rep", "--csv", "--page", *page]
        return subprocess.run(listed, check=True, capture_output=True, text=True).stdout.splitlines()
