"""What can be chosen for a Hopper GEMM, what is chosen, and how the choice is remembered."""

import json

import pytest
import torch

from cutelab.kernels import DeviceError, gemm, tune
from cutelab.kernels.dense_gemm import launch
from cutelab.kernels.dense_gemm.config_sm90 import Size, Sm90Config, candidates, choose_work, estimate
from cutelab.kernels.dense_gemm.plan import make_plan
from cutelab.kernels.dense_gemm.problem import Arguments
from cutelab.kernels.dense_gemm.tuned import Problem, recall, remember
from cutelab.kernels.runtime.arch import Arch

HOPPER = Arch.named("sm_90a")
SIZES = [
    Size(*size, batch)
    for size in [(1, 1, 1), (16, 8192, 8192), (1111, 3333, 5560), (8192, 8192, 1024), (64, 64, 2**30)]
    for batch in (1, 7)
]
FIELDS = {"ab_dtype": "bfloat16", "out_dtype": "bfloat16", "out_align": 16, "c_align": 0, "activation": None}
PROBLEM = Problem("a GPU", "float16", "float32", "k", "mn", True, Size(300, 400, 500, 2))


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("CUTELAB_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUTELAB_CACHE", "1")
    return tmp_path


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sms", [132, 114, 16, 3])
def test_every_candidate_is_legal(size, out_dtype, sms):
    arch = Arch(HOPPER.name, HOPPER.smem_per_block, sms)
    found = candidates(size, arch)
    assert found and len(set(found)) == len(found)
    for work in found:
        config = Sm90Config("bfloat16", out_dtype, bias="n", **work.options())
        assert config.smem_bytes <= arch.smem_per_block
        tiles = work.tiling.cluster_tiles(size)
        assert 1 <= work.clusters <= max(1, sms // work.tiling.ctas)
        assert estimate(work, size, arch) > 0
        assert 0 <= work.shared <= tiles
        assert work.clusters <= tiles or work.shared
        assert (work.workspace_bytes > 0) == (work.shared > 0)
        assert (work.clusters + 1) * work.shared * -(-size.k // config.tile[2]) < 2**31


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "fields", [{}, {"out_align": 2}, {"c_align": 16}, {"c_align": 2, "activation": "gelu"}]
)
def test_what_is_chosen_is_a_legal_candidate(size, fields):
    fields = FIELDS | fields
    plain = fields["out_align"] == 16 and fields["c_align"] == 0
    work = choose_work(size, HOPPER, plain)
    assert work in candidates(size, HOPPER, plain)
    Sm90Config(**fields, **work.options())


def test_what_was_found_is_remembered():
    first, second, *_ = candidates(PROBLEM.size, HOPPER)
    assert recall(PROBLEM) is None
    remember(PROBLEM, second)
    assert recall(PROBLEM) == second
    assert recall(Problem("another", "float16", "float32", "k", "mn", True, PROBLEM.size)) is None
    remember(PROBLEM, first)
    assert recall(PROBLEM) == first


@pytest.mark.parametrize("content", ["", "[", '{"a": 1}'])
def test_a_broken_file_is_as_good_as_none(empty_cache, content):
    work = candidates(PROBLEM.size, HOPPER)[0]
    remember(PROBLEM, work)
    (path,) = empty_cache.iterdir()
    path.write_text(content)
    assert recall(PROBLEM) is None
    remember(PROBLEM, work)
    assert recall(PROBLEM) == work


def test_what_another_version_found_is_not_used(empty_cache):
    remember(PROBLEM, candidates(PROBLEM.size, HOPPER)[0])
    (path,) = empty_cache.iterdir()
    content = json.loads(path.read_text())
    content[PROBLEM.key]["another_field"] = 1
    path.write_text(json.dumps(content))
    assert recall(PROBLEM) is None


def test_nothing_is_remembered_where_the_cache_is_off(monkeypatch, empty_cache):
    monkeypatch.setenv("CUTELAB_CACHE", "0")
    remember(PROBLEM, candidates(PROBLEM.size, HOPPER)[0])
    assert recall(PROBLEM) is None and not list(empty_cache.iterdir())


@pytest.fixture
def planned(monkeypatch):
    """The kernels that plans would launch, as if the CPU were a Hopper GPU."""
    from cutelab.kernels.dense_gemm import plan

    monkeypatch.setattr(plan, "_arch_of", lambda tensor: HOPPER)
    monkeypatch.setattr(plan, "compile_simulated", lambda kernel, arch: kernel)
    monkeypatch.setattr(launch, "_plans", {})


def arguments(m, n, k, pad=0, dtype=torch.float16, out=None, c=None):
    a, b = torch.empty(m, k + pad, dtype=dtype)[:, :k], torch.empty(n, k + pad, dtype=dtype)[:, :k].mT
    return Arguments(a, b, None, c, out, None, 1.0, 0.0 if c is None else 1.0, None)


def test_a_plan_uses_what_was_tuned(planned):
    args = arguments(300, 200, 512)
    default = make_plan(args)
    for work in candidates(default.problem.size, HOPPER):
        remember(default.problem, work)
        plan = make_plan(args)
        options = work.options()
        assert {name: getattr(plan.function.config, name) for name in options} == options
        assert plan.integers[-2:] == (work.clusters, work.shared)
        assert plan.workspace == work.workspace_bytes


@pytest.mark.parametrize(
    ("args", "kernel"),
    [
        (arguments(64, 64, 64), "GemmSm90"),
        (arguments(64, 64, 65, pad=7), "GemmSm90"),  # TMA asks nothing of the extent
        (arguments(64, 65, 64), "GemmSm90"),  # nor of the output
        (arguments(64, 64, 64, pad=4), "GemmSm80"),
        (arguments(64, 64, 0), "GemmSm80"),
        (arguments(64, 64, 60), "GemmSm80"),
    ],
)
def test_which_kernel_computes_it(planned, args, kernel):
    assert type(make_plan(args).function).__name__ == kernel


def test_only_pitches_that_tma_can_take_are_written_by_tma(planned):
    room = torch.empty(64, 72, dtype=torch.float16)
    for columns, align in ((64, 16), (63, 16), (65, 16)):
        plan = make_plan(arguments(64, columns, 64, out=room[:, :columns]))
        assert plan.function.config.out_align == align
    assert make_plan(arguments(64, 63, 64)).function.config.out_align == 2


def test_there_must_be_something_to_tune():
    with pytest.raises(DeviceError, match="got cpu"):
        tune(torch.empty(8, 8), torch.empty(8, 8))


@pytest.mark.gpu
def test_tune_on_a_gpu():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("measures the Hopper kernel")
    a, b = (torch.randn(512, 512, device="cuda").bfloat16() for _ in range(2))
    before = gemm(a, b)
    work = tune(a, b, progress=False)
    plan = make_plan(Arguments(a, b, None, None, None, None, 1.0, 0.0, None))
    assert recall(plan.problem) == work
    assert plan.integers[-2:] == (work.clusters, work.shared)
    torch.testing.assert_close(gemm(a, b), before, rtol=1e-2, atol=1e-1)
    with pytest.raises(DeviceError, match="multiples of 16 bytes"):
        tune(a[:, :-1], b[:-1])
