"""Every shipped GEMM, compiled, and run on the CPU with all the simulator's checks, on ragged sizes.

Operands lie among NaNs that must not count, the output starts as NaN, and what lies beside it must stay as it
is. On a GPU, the simulator is held against it.
"""

import functools

import pytest
import torch
from activations import ACTIVATIONS
from config_names import config_name
from torch._subclasses.fake_tensor import FakeTensorMode

from cutelab import simulator
from cutelab.kernels import gemm
from cutelab.kernels.dense_gemm.config import GemmConfig, shipped_configs
from cutelab.kernels.dense_gemm.config_sm90 import Sm90Config, shipped_sm90_configs
from cutelab.kernels.dense_gemm.partial_sums import PartialSums
from cutelab.kernels.dense_gemm.sm80 import GemmSm80
from cutelab.kernels.dense_gemm.sm90 import GemmSm90
from cutelab.kernels.runtime.arch import Arch
from cutelab.kernels.runtime.compile import compile_kernel
from cutelab.kernels.runtime.simulated import compile_simulated

CONFIGS = [(config, "sm_80") for config in shipped_configs(Arch.named("sm_80"))]
CONFIGS += [
    (config, arch)
    for arch in ("sm_86", "sm_90a")
    for config in shipped_configs(Arch.named(arch))
    if (config, "sm_80") not in CONFIGS
]
CONFIGS += [(config, "sm_90a") for config in shipped_sm90_configs()]
SIZES = [(1, 1, 1), (70, 40, 33), (130, 90, 100)]  # M, N, K, each rounded up to whole vectors
WORKERS = 3  # clusters of a Hopper GEMM
READY = 0x123456789ABCDEF
ALPHA, BETA = 1.25, 0.5


def whole_vectors(extent, align, itemsize):
    vector = max(align // itemsize, 1)
    return -(-extent // vector) * vector


def matrix(rows, columns, major, align, dtype, values):
    """(rows, columns) with unit stride along columns ("k") or rows, vectors aligned to `align` bytes and no
    more, in a larger buffer of NaNs; the extent along the unit stride is a whole number of vectors."""
    if major == "mn":
        return matrix(columns, rows, "k", align, dtype, values).mT
    vector = max(align // dtype.itemsize, 1)
    buffer = torch.full((rows, columns + 2 * vector), torch.nan, dtype=dtype)
    return buffer[:, vector : vector + columns].copy_(values(rows, columns))


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def small_integers(*shape):
    """-2 … 2: their products and sums are exact in every precision."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(sum(shape))).float()


class Problem:
    """A product of ragged sizes for a configuration: its operands, and room for the output among sevens."""

    def __init__(self, config, size, values):
        ab, out_dtype = getattr(torch, config.ab_dtype), getattr(torch, config.out_dtype)
        m, n, k = size
        if "k" in (config.a_major, config.b_major):
            k = whole_vectors(k, max(config.a_align, config.b_align), ab.itemsize)
        m = whole_vectors(m, config.a_align, ab.itemsize) if config.a_major == "mn" else m
        n = whole_vectors(n, config.b_align, ab.itemsize) if config.b_major == "mn" else n
        n = whole_vectors(n, max(config.out_align, config.c_align), out_dtype.itemsize)
        self.config, self.size = config, (m, n, k)
        self.a = matrix(m, k, config.a_major, config.a_align, ab, values)
        self.b = matrix(n, k, config.b_major, config.b_align, ab, values)
        self.c = matrix(m, n, "k", config.c_align, out_dtype, values) if config.c_align else None
        self.bias = values(n if config.bias == "n" else m).to(out_dtype) if config.bias else None
        self.room = torch.full((m + 2, n + 32), 7.0, dtype=out_dtype)

    @property
    def tiles(self):
        """Clusters' tiles."""
        m, n, _ = self.size
        rows, columns, _ = self.config.tile
        return -(-m // (rows * self.config.cluster[0])) * -(-n // (columns * self.config.cluster[1]))

    @property
    def out(self):
        return self.room[1:-1, 16:-16]

    def to(self, device):
        """The same, with the same strides and alignments, on another device."""
        there = object.__new__(Problem)
        there.config, there.size = self.config, self.size
        for name in ("a", "b", "c", "bias", "room"):
            setattr(there, name, moved(getattr(self, name), device))
        return there

    def partial_sums(self):
        """The workspace of a Hopper GEMM, with what it holds when the memory was never used for anything."""
        config = self.config
        slots = WORKERS * config.cluster[0] * config.cluster[1] * config.consumers
        size = PartialSums.bytes(config.accumulators, slots)
        return torch.full((size,), 255, dtype=torch.uint8, device=self.room.device)  # as floats, NaN

    def run(self, function, stream=0):
        """The result of a compiled kernel. What lies around it must stay as it was."""
        self.out.fill_(torch.nan)
        m, n, k = self.size
        workspace = self.partial_sums() if isinstance(self.config, Sm90Config) else None
        a_ld = self.a.stride(-2 if self.config.a_major == "k" else -1)
        b_ld = self.b.stride(-2 if self.config.b_major == "k" else -1)
        function(
            *(0 if x is None else x.data_ptr() for x in (self.a, self.b, self.c, self.bias, self.out)),
            *(m, n, k, 1, 1),
            *(a_ld, 0, 0, b_ld, 0, 0),
            *((0, 0, 0, 0) if self.c is None else (*self.c.stride(), 0, 0)),
            *(self.out.stride(0), 0, 0),
            *((WORKERS, self.tiles if self.config.stream_k else 0) if workspace is not None else ()),
            *(ALPHA, BETA),
            *((workspace.data_ptr(), READY) if workspace is not None else ()),
            stream,
        )
        result = self.out.clone()
        self.out.fill_(7.0)
        assert (self.room == 7.0).all()
        return result

    def simulated(self, arch, seed=None):
        with simulator.gpu(arch, execute=functools.partial(simulator.execute, seed=seed)):
            return self.run(compile_simulated(kernel_for(self.config), Arch.named(arch)))

    def exact_and_magnitude(self):
        """The result in float64, and the same sum with all terms positive, before the activation."""
        exact = ALPHA * (self.a.double() @ self.b.double().mT)
        magnitude = ALPHA * (self.a.double().abs() @ self.b.double().abs().mT)
        terms = [] if self.c is None else [BETA * self.c.double()]
        if self.bias is not None:
            terms.append(self.bias.double() if self.config.bias == "n" else self.bias.double()[:, None])
        for term in terms:
            exact, magnitude = exact + term, magnitude + term.abs()
        return ACTIVATIONS[self.config.activation](exact), magnitude

    def bound(self):
        """One rounding of the result, one of each operand to tf32, accumulation in fp32; an activation has
        slopes of at most 1.13."""
        exact, magnitude = self.exact_and_magnitude()
        finfo = torch.finfo(self.room.dtype)
        operands = 2 * 2**-11 if self.config.ab_dtype == "float32" else 0.0
        sums = 1.13 * (operands + (self.size[2] + 4) * 2**-23) * magnitude
        return finfo.eps / 2 * exact.abs() + sums + finfo.tiny


def kernel_for(config):
    return GemmSm90(config) if isinstance(config, Sm90Config) else GemmSm80(config)


def sizes_for(config):
    """Ragged; for a Hopper GEMM, k-tiles around the number of stages, and all CTAs of a cluster busy."""
    if isinstance(config, GemmConfig):
        return SIZES
    m, n, k = config.tile
    around = [(config.stages - 1) * k, config.stages * k - 8, (config.stages + 1) * k - 1]
    return [
        (1, 1, 1),
        (m + 2, 90, around[0]),
        (70, n + 9, around[1]),
        (config.cluster[0] * m - 1, 33, around[2]),
    ]


def moved(tensor, device):
    """A view of a copy of the whole storage, so that strides, alignments and NaNs around it stay."""
    if tensor is None:
        return None
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(device)
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def name(value):
    return value if isinstance(value, str) else config_name(value)


@pytest.mark.parametrize("config, arch", CONFIGS, ids=name)
def test_every_shipped_configuration(config, arch):
    for size in sizes_for(config):
        problem = Problem(config, size, normal)
        exact, _ = problem.exact_and_magnitude()
        assert ((problem.simulated(arch).double() - exact).abs() <= problem.bound()).all()


@pytest.mark.gpu
@pytest.mark.parametrize("config", [config for config, _ in CONFIGS], ids=name)
def test_the_simulator_computes_what_the_gpu_does(config):
    """Bit for bit where sums are exact, and else within what the order of a sum may change."""
    arch = Arch.of(torch.device("cuda", 0))
    if config.smem_bytes > arch.smem_per_block:
        pytest.skip("needs more shared memory than this GPU has")
    if isinstance(config, Sm90Config) and arch.name != "sm_90a":
        pytest.skip("runs on Hopper only")
    function = compile_kernel(kernel_for(config), arch)
    stream = torch.cuda.current_stream().cuda_stream
    for size, values in ((SIZES[1], normal), (SIZES[2], small_integers)):
        problem = Problem(config, size, values)
        ours = problem.simulated(arch.name)
        theirs = problem.to("cuda").run(function, stream).cpu()
        if values is small_integers and config.activation in (None, "relu"):
            assert torch.equal(ours, theirs)
        else:
            assert ((ours.double() - theirs.double()).abs() <= 2 * problem.bound()).all()


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_warps_changes_the_result(seed):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).bfloat16() for shape in ((130, 200), (200, 72)))
    bias = torch.randn(72, generator=generator).bfloat16()
    with simulator.gpu("sm_80"):
        in_step = gemm(a, b, bias=bias, activation="silu")
    with simulator.gpu("sm_80", execute=functools.partial(simulator.execute, seed=seed)):
        assert torch.equal(gemm(a, b, bias=bias, activation="silu"), in_step)


BF16 = ("bfloat16", "bfloat16")
ROLES = {
    "cooperative": Sm90Config(*BF16, tile=(128, 64, 64), stages=3, bias="n", c_align=16),
    "three warpgroups": Sm90Config(*BF16, tile=(192, 64, 64), stages=2, consumers=3, cluster=(1, 2)),
    "ping-pong": Sm90Config(*BF16, tile=(64, 64, 64), stages=3, pingpong=True, cluster=(2, 2)),
    "stream-K": Sm90Config(*BF16, tile=(64, 64, 64), stages=2, consumers=1, stream_k=True),
}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("roles", ROLES)
def test_no_order_of_warps_and_clusters_changes_the_result(roles, seed):
    problem = Problem(ROLES[roles], (200, 136, 330), normal)
    result = problem.simulated("sm_90a", seed)
    exact, _ = problem.exact_and_magnitude()
    assert ((result.double() - exact).abs() <= problem.bound()).all()
    assert torch.equal(result, problem.simulated("sm_90a"))


def test_another_gpu_gets_another_kernel():
    a, b = torch.randn(64, 64).half(), torch.randn(64, 64).half()
    for arch in ("sm_80", "sm_90a", "sm_86"):
        with simulator.gpu(arch):
            torch.testing.assert_close(gemm(a, b).double(), a.double() @ b.double(), rtol=1e-2, atol=1e-2)


def test_fake_tensors_in_the_process_do_not_matter():
    with FakeTensorMode():
        fake = torch.empty(8, 8)
    a, b = torch.ones(16, 16).half(), torch.ones(16, 16).half()
    with simulator.gpu("sm_80"):
        assert (gemm(a, b) == 16).all()
    assert fake.shape == (8, 8)


def test_gradients():
    a, b = torch.randn(3, 20, 40).half().requires_grad_(), torch.randn(40, 24).half().requires_grad_()
    with simulator.gpu("sm_90a"):
        gemm(a, b, activation="gelu").float().sum().backward()
    got = a.grad.clone(), b.grad.clone()
    a.grad = b.grad = None
    torch.nn.functional.gelu(a.float() @ b.float()).sum().backward()
    for ours, exact in zip(got, (a.grad, b.grad), strict=True):
        torch.testing.assert_close(ours.float(), exact.float(), rtol=2e-2, atol=5e-2)
