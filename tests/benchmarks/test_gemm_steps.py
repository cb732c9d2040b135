"""Each step towards the Hopper GEMM computes the product, whoever goes on when; and the script runs."""

import functools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gemm_steps
import pytest
import torch
from plain_gemm import PlainConfig, PlainGemm

from cutelab import simulator
from cutelab.kernels.runtime.arch import Arch
from cutelab.kernels.runtime.compile import compile_to_artifacts
from cutelab.kernels.runtime.disassembly import count, summarize
from cutelab.kernels.runtime.simulated import compile_simulated

SCRIPT = Path(gemm_steps.__file__)
STEPS = {step.name: step for step in gemm_steps.steps()}
GPU = replace(Arch.named("sm_90a"), sm_count=4)
SMALL = {step.name: step for step in gemm_steps.steps((128, 64, 64), (64, 64, 64))}
SIZES = [(1, 8, 8), (300, 136, 200), (130, 72, 328)]  # M, N, K


def among_nans(rows, columns):
    """Normal numbers, with NaNs around them that must not count."""
    buffer = torch.full((rows + 1, columns + 16), torch.nan, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(rows + columns)
    return buffer[:rows, 8:-8].copy_(torch.randn(rows, columns, generator=generator))


def simulated(step, size, seed=None, launches=1):
    m, n, k = size
    a, b = among_nans(m, k), among_nans(n, k)
    execute = functools.partial(simulator.execute, seed=seed)
    with simulator.gpu(GPU.name, multiprocessors=GPU.sm_count, execute=execute):
        call = step.call(a, b, GPU, compile_simulated)
        for _ in range(launches - 1):
            call().fill_(torch.nan)
        result = call()
    exact = a.double() @ b.double().mT
    sums = (k + 4) * 2**-23 * (a.double().abs() @ b.double().abs().mT)
    assert ((result.double() - exact).abs() <= 2**-8 * exact.abs() + sums + 1e-30).all()
    return result


@pytest.mark.parametrize("name", STEPS)
def test_every_step_computes_the_product(name):
    simulated(STEPS[name], (300, 520, 200), launches=2)  # what the first leaves behind must not matter


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("name", SMALL)
def test_small_tiles_of_ragged_sizes_whoever_goes_on_when(name, seed):
    for size in SIZES:
        simulated(SMALL[name], size, seed)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("k_tiles", [1, 3, 4, 9])
def test_plain_gemm_with_any_number_of_stages_and_k_tiles(stages, k_tiles):
    step = gemm_steps.Step("plain", PlainGemm(PlainConfig((128, 64, 64), stages)))
    results = [simulated(step, (130, 72, 64 * k_tiles - 8), seed) for seed in (None, 3)]
    assert torch.equal(*results)


def test_each_step_has_one_idea_more():
    tiles, size = 6 * 5, (6 * 128, 5 * 256, 64)
    arch = replace(GPU, sm_count=8)
    roles = {name: step for name, step in STEPS.items() if not isinstance(step.kernel, PlainGemm)}
    work = {name: step.work(*size, arch) for name, step in roles.items()}
    assert work == {
        "warp-specialised": (tiles, 0),
        "persistent": (8, 0),
        "cluster": (4, 0),
        "ping-pong": (4, 0),
        "stream-K": (4, 3 + 4),
        "early launch": (4, 0),
    }
    assert STEPS["stream-K"].work(512, 256 * 8, 64, arch) == (4, 0)  # whole waves: nothing to share
    configs = {name: step.kernel.config for name, step in STEPS.items()}
    assert {config.tile for name, config in configs.items() if name != "ping-pong"} == {(128, 256, 64)}
    assert replace(configs["stream-K"], stream_k=False) == configs["cluster"]
    assert replace(configs["early launch"], early_launch=False) == configs["cluster"]
    assert replace(configs["cluster"], cluster=(1, 1)) == configs["persistent"] == configs["warp-specialised"]


@pytest.mark.parametrize("stages", [1, 4])
def test_plain_gemm_is_compiled_as_meant(stages):
    artifacts = compile_to_artifacts(PlainGemm(PlainConfig(stages=stages)), Arch.named("sm_90a"))
    (kernel,) = summarize(artifacts.cubin)
    assert (kernel.stack, kernel.spills, kernel.threads) == (0, 0, 256)
    assert count(kernel.instructions, "HGMMA") == artifacts.ptx.count("wgmma.mma_async") == 4
    assert count(kernel.instructions, "WARPGROUP", "DEPBAR") == 2  # more, if they had to be serialised
    ahead = max(stages - 1, 1)
    assert count(kernel.instructions, "UTMALDG") == 2 * (ahead + 1)


def test_a_hanging_kernel_ends_the_process():
    program = f"""
import sys, types
sys.path.insert(0, {str(SCRIPT.parent)!r})
import gemm_steps
gemm_steps.PATIENCE = 0.01
gemm_steps.torch.cuda.Event = lambda: types.SimpleNamespace(record=lambda: None, query=lambda: False)
gemm_steps.wait_or_abort("step")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (1, "step is not done after 0.01 s: it hangs\n")


def run(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *args], capture_output=True, text=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_says_what_it_needs_without_a_gpu(tmp_path):
    result = run("--output", str(tmp_path))
    assert result.returncode == 1
    assert "Hopper" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_writes_records_and_prints_a_table(tmp_path):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("runs on Hopper only")
    result = run(
        "--shapes", "1024,768,256", "--rounds", "2", "--commit", "abc1234", "--output", str(tmp_path)
    )
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in (tmp_path / "gemm_steps.jsonl").read_text().splitlines()]
    assert [r["config"]["step"] for r in records] == list(STEPS)
    assert all(r["ours"] > 0 and r["peers"]["cublas"] > 0 and r["unit"] == "TFLOP/s" for r in records)
    assert len(result.stdout.splitlines()) == 2 + len(records)
