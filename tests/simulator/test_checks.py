"""A compiled GEMM with one of its waits or barriers taken out: found in every order of warps."""

import dataclasses
import re

import pytest
import torch

from cutelab import simulator
from cutelab.kernels import gemm
from cutelab.simulator.errors import RaceError

SEEDS = [None, *range(20)]
ORDERING = re.compile(r"bar\.sync|cp\.async\.(commit_group|wait_group\s+[1-9])")
"""Not the last wait, for no groups in flight: those it waits for hold nothing any more."""


def test_every_wait_and_barrier_of_a_gemm_is_needed():
    tried = []

    def execute(launch):
        lines = launch.ptx.split("\n")
        for at, line in enumerate(lines):
            if not ORDERING.search(line):
                continue
            without = dataclasses.replace(launch, ptx="\n".join([*lines[:at], "", *lines[at + 1 :]]))
            for seed in SEEDS:
                with pytest.raises(RaceError):
                    simulator.execute(without, seed)
            tried.append(line.split()[0])
        for seed in SEEDS:  # last, for those with a fault leave something in the output
            simulator.execute(launch, seed)

    a, b = torch.randn(64, 256).half(), torch.randn(256, 64).half()
    with simulator.gpu("sm_80", execute=execute):
        out = gemm(a, b)
    torch.testing.assert_close(out, a @ b, rtol=1e-2, atol=1e-2)
    assert {"bar.sync", "cp.async.commit_group;", "cp.async.wait_group"} <= set(tried)
