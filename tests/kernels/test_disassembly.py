from collections import Counter

import cutlass
import cutlass.cute as cute
import pytest
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream, nullptr

from cutelab.kernels.runtime import disassembly
from cutelab.kernels.runtime.disassembly import DisassemblerError, count, ptx_instructions, sass, summarize

PTX = """
.visible .entry kernel(.param .b64 p)
{
\t.reg .b32 \t%r<9>;
\tmov.u32 \t%r1, %tid.x;
$L__BB0_1:
\t// begin inline asm
\tcp.async.cg.shared.global [%r2], [%rd3], 16, %r4;
\t@%p1 cp.async.ca.shared.global.L2::128B [%r2], [%rd3], 4, %r4;
\t@!%p1 bra $L__BB0_1;
\tmma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
\t\t{%f1, %f2, %f3, %f4}, {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%f1, %f2, %f3, %f4};
\tret;
}
"""


def test_ptx_instructions_are_counted_and_directives_are_not():
    assert ptx_instructions(PTX) == Counter(
        [
            "mov.u32",
            "cp.async.cg.shared.global",
            "cp.async.ca.shared.global.L2::128B",
            "bra",
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
            "ret",
        ]
    )


def test_count_goes_by_whole_parts():
    instructions = Counter({"LDS": 1, "LDS.128": 2, "LDS.U.128": 4, "LDS.64": 8, "LDSM.16.M88.4": 16})
    assert count(instructions, "LDS") == 15
    assert count(instructions, "LDS", "128") == 6
    assert count(instructions, "LD") == 0


THREADS = 96
FLOATS = 256  # of a thread, indexed at run time: more than registers can hold


@cute.kernel
def look_up_kernel(out: cute.Tensor, index: Int32):
    thread, _, _ = cute.arch.thread_idx()
    values = cute.make_rmem_tensor(FLOATS, Float32)
    for i in cutlass.range(FLOATS, unroll_full=True):
        values[i] = Float32(thread * i)
    out[thread] = values[index]


@cute.jit
def look_up(out: cute.Pointer, index: Int32, stream):
    tensor = cute.make_tensor(out, cute.make_layout(THREADS))
    look_up_kernel(tensor, index).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_summary_of_a_kernel_that_spills(arch, tmp_path):
    arguments = (nullptr(Float32, cute.AddressSpace.gmem), 1, make_fake_stream())
    options = f"--gpu-arch={arch} --keep-cubin --dump-dir={tmp_path}"
    (kernel,) = summarize(cute.compile(look_up, *arguments, options=options).__cubin__)
    assert "look_up" in kernel.name
    assert kernel.threads == THREADS
    assert 4 <= kernel.registers <= 255
    assert kernel.stack >= FLOATS * 4
    assert kernel.spills == FLOATS / 4 + 1  # 128-bit stores and one load
    assert count(kernel.instructions, "STG") == 1


def test_a_broken_cubin_is_an_error():
    with pytest.raises(DisassemblerError, match="7 bytes"):
        sass(b"\x7fELFabc")


def test_a_missing_disassembler_says_what_to_install(monkeypatch):
    disassembly._nvdisasm.cache_clear()
    monkeypatch.setattr(disassembly.metadata, "files", lambda name: None)
    with pytest.raises(DisassemblerError, match="pip install nvidia-cuda-nvdisasm"):
        summarize(b"")
    disassembly._nvdisasm.cache_clear()
