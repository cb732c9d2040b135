"""What each shipped GEMM compiles to, read from its PTX and SASS. Needs no GPU."""

import itertools

import pytest
from config_names import config_name

from cutelab.kernels.dense_gemm.config import RESERVED_BYTES, GemmConfig, choose_tile, shipped_configs
from cutelab.kernels.dense_gemm.config_sm90 import shipped_sm90_configs
from cutelab.kernels.dense_gemm.sm80 import GemmSm80
from cutelab.kernels.dense_gemm.sm90 import GemmSm90
from cutelab.kernels.runtime.arch import Arch
from cutelab.kernels.runtime.compile import compile_to_artifacts
from cutelab.kernels.runtime.disassembly import KernelSummary, count, ptx_instructions, summarize

REGISTERS_PER_SM = 65536  # on every architecture from sm_80 on
REGISTERS_PER_THREAD = 255

# PTX ISA, "mma.sync": the shape and the types of the instruction for each input type.
MMA = {
    "float16": ("m16n8k16", "f32", "f16"),
    "bfloat16": ("m16n8k16", "f32", "bf16"),
    "float32": ("m16n8k8", "f32", "tf32"),
}
CP_ASYNC = {16: ("128",), 8: ("64",), 4: ()}

ALL_ARCHS = [Arch.named(f"sm_{chip}") for chip in ("80", "86", "87", "89", "90a", "120a")]
COMPILED_ARCHS = [Arch.named(name) for name in ("sm_80", "sm_86", "sm_90a")]
# sm_86 runs the code of sm_80 but has less shared memory: what differs are some tilings.
SHARED_WITH_SM_80 = set(shipped_configs(Arch.named("sm_80")))


def short_name(x: GemmConfig | Arch) -> str:
    return x.name if isinstance(x, Arch) else config_name(x)


@pytest.mark.parametrize(
    "config, arch",
    [
        (config, arch)
        for arch in COMPILED_ARCHS
        for config in shipped_configs(arch)
        if arch.name != "sm_86" or config not in SHARED_WITH_SM_80
    ],
    ids=short_name,
)
def test_generated_code(config, arch):
    artifacts = compile_to_artifacts(GemmSm80(config), arch)
    (kernel,) = summarize(artifacts.cubin)
    ptx = ptx_instructions(artifacts.ptx)

    assert kernel.threads == config.threads
    assert kernel.registers <= REGISTERS_PER_THREAD
    assert kernel.registers * kernel.threads <= REGISTERS_PER_SM
    assert kernel.static_shared + config.smem_bytes <= arch.smem_per_block
    assert (kernel.stack, kernel.spills) == (0, 0)

    assert count(ptx, "mma", *MMA[config.ab_dtype]) == count(ptx, "mma") > 0
    assert count(kernel.instructions, "HMMA") > 0
    if config.ab_dtype == "float32":  # without it, the tensor cores truncate
        assert count(ptx, "cvt", "rna", "tf32") > 0
    assert_operands_arrive_in_vectors(config, kernel)
    if config.out_align == 16:
        assert count(kernel.instructions, "LDS", "128") > 0
        assert count(kernel.instructions, "STG", "128") > 0


def assert_operands_arrive_in_vectors(config: GemmConfig, kernel: KernelSummary) -> None:
    """cp.async as wide as the alignment allows, then ldmatrix; both only where the elements permit it."""
    for align in {config.a_align, config.b_align} & CP_ASYNC.keys():
        assert count(kernel.instructions, "LDGSTS", *CP_ASYNC[align]) > 0
    if config.ab_dtype != "float32" or "k" in (config.a_major, config.b_major):
        assert count(kernel.instructions, "LDSM", "4") > 0


@pytest.mark.parametrize("config", shipped_sm90_configs(), ids=config_name)
def test_generated_code_for_hopper(config):
    arch = Arch.named("sm_90a")
    artifacts = compile_to_artifacts(GemmSm90(config), arch)
    (kernel,) = summarize(artifacts.cubin)

    assert kernel.threads == config.threads
    assert kernel.registers * kernel.threads <= REGISTERS_PER_SM
    assert kernel.static_shared <= RESERVED_BYTES  # the system's
    assert config.smem_bytes <= arch.smem_per_block
    assert (kernel.stack, kernel.spills) == (0, 0)

    # As many as the products of a k-tile, twice: the first k-tile begins a sum, the others add to it.
    products = 2 * config.rows // 64 * config.tile[2] // 16
    assert artifacts.ptx.count(f"wgmma.mma_async.sync.aligned.m64n{config.tile[1]}k16") == products
    assert artifacts.ptx.count("wgmma.mma_async") == products
    assert count(kernel.instructions, "HGMMA") == products
    assert (
        count(kernel.instructions, "WARPGROUP", "DEPBAR") == 2
    )  # more, if the compiler had to serialise them
    multicast, all_loads = (count(kernel.instructions, "UTMALDG", *how) for how in (("MULTICAST",), ()))
    assert all_loads > multicast and (multicast > 0) == (config.cluster != (1, 1))
    assert (count(kernel.instructions, "UTMASTG") > 0) == (config.out_align == 16)
    assert (count(kernel.instructions, "STSM") > 0) == (config.out_dtype != "float32")
    assert count(kernel.instructions, "USETMAXREG") == (2 if config.consumers > 1 else 0)


@pytest.mark.parametrize("arch", ALL_ARCHS, ids=short_name)
@pytest.mark.parametrize("align", [16, 8, 4, 2])
@pytest.mark.parametrize("ab_dtype", MMA)
def test_chosen_tiles_fit_in_shared_memory(ab_dtype, align, arch):
    sizes = itertools.product((1, 128, 1000, 8192), repeat=2)
    for (m, n), batch, out_dtype in itertools.product(sizes, (1, 7), MMA):
        tiling = choose_tile(ab_dtype, out_dtype, m, n, batch, arch, align)
        assert GemmConfig(ab_dtype, out_dtype, bias="n", **tiling).smem_bytes <= arch.smem_per_block
