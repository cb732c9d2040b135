"""cp.async in all its forms, in generated code and, on a GPU, in what arrives in shared memory."""

import itertools

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cutlass import Int32, Int64
from cutlass.cute.arch import inline_ptx
from cutlass.cute.runtime import from_dlpack, make_fake_stream, nullptr

from cutelab.copies import CopyError, CpAsyncRing, cp_async

THREADS = 32
WORDS = 4  # 32-bit words of shared memory for each thread: room for the longest copy
POISON = -1

FORMS = [
    {"size": size, "cache": cache, "l2_prefetch": prefetch}
    for size, cache, prefetch in itertools.product((4, 8, 16), ("ca", "cg"), (None, 64, 128, 256))
    if cache == "ca" or size == 16
]
OPERANDS = list(itertools.product((False, True), repeat=2))  # with source_bytes, with cache_policy


class Forms:
    """A kernel in which each of 32 threads copies `size` bytes; shared memory goes back as it is then."""

    def __init__(self, form, with_source_bytes, with_policy):
        self.form, self.with_source_bytes, self.with_policy = form, with_source_bytes, with_policy

    @cute.jit
    def launch(self, x: cute.Pointer, y: cute.Pointer, source_bytes: Int32, stream):
        layout = cute.make_layout((THREADS, WORDS), stride=(WORDS, 1))
        self.kernel(cute.make_tensor(x, layout), cute.make_tensor(y, layout), source_bytes).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, source_bytes: Int32):
        thread, _, _ = cute.arch.thread_idx()
        shared = cutlass.memory.SmemAllocator().allocate_tensor(Int32, x.layout, byte_alignment=16)
        for word in cutlass.range_constexpr(WORDS):
            shared[thread, word] = Int32(POISON)
        options = {}
        if cutlass.const_expr(self.with_source_bytes):
            options["source_bytes"] = source_bytes
        if cutlass.const_expr(self.with_policy):
            options["cache_policy"] = inline_ptx(
                "createpolicy.fractional.L2::evict_last.b64 {$w0}, 1.0;", write_only_types=[Int64]
            )
        dst = shared[thread, None].iterator.align(16)
        cp_async(dst, x[thread, None].iterator.align(16), **self.form, **options)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        for word in cutlass.range_constexpr(WORDS):
            y[thread, word] = shared[thread, word]


def compiled(kernel, arch="sm_80", options=""):
    pointer = nullptr(Int32, cute.AddressSpace.gmem, assumed_align=16)
    return cute.compile(
        kernel.launch, pointer, pointer, 1, make_fake_stream(), options=f"--gpu-arch {arch} {options}"
    )


@pytest.mark.parametrize(("with_source_bytes", "with_policy"), OPERANDS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_generated_instruction(form, with_source_bytes, with_policy, tmp_path):
    kernel = Forms(form, with_source_bytes, with_policy)
    ptx = compiled(kernel, options=f"--keep-ptx --dump-dir={tmp_path}").__ptx__
    (line,) = [line.strip() for line in ptx.splitlines() if "cp.async.c" in line and "shared" in line]
    hint = ".L2::cache_hint" if with_policy else ""
    prefetch = f".L2::{form['l2_prefetch']}B" if form["l2_prefetch"] else ""
    opcode, _, rest = line.partition(" ")
    assert opcode == f"cp.async.{form['cache']}.shared.global{hint}{prefetch}"
    assert rest.rstrip(";").split(", ")[2] == str(form["size"])
    assert rest.count(",") == 2 + with_source_bytes + with_policy


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"size": 2}, r"copies \(4, 8, 16\) bytes, got 2"),
        ({"size": 8, "cache": "cg"}, "cg copies 16 bytes"),
        ({"size": 16, "cache": "cs"}, "got cache='cs'"),
        ({"size": 16, "l2_prefetch": 32}, r"prefetches \(64, 128, 256\) bytes into L2, got 32"),
    ],
)
def test_forms_that_do_not_exist_are_refused(form, message):
    with pytest.raises(CopyError, match=message):
        compiled(Forms(form, False, False))


def test_a_ring_of_one_stage_is_refused():
    with pytest.raises(CopyError, match="at least 2 stages"):
        CpAsyncRing(1)


@cute.jit
def record_turns(stages: cutlass.Constexpr, turns: cute.Tensor):
    ring = CpAsyncRing(stages)
    for turn in range(turns.shape[0]):
        turns[turn, 0], turns[turn, 1], turns[turn, 2] = ring.read, ring.write, ring.next
        ring.advance()


@pytest.mark.parametrize("stages", [2, 3, 4, 7])
def test_the_ring_turns(stages):
    """In host code: `read` walks round, `write` follows one behind, `next` goes one ahead."""
    turns = np.full((2 * stages + 1, 3), POISON, dtype=np.int32)
    record_turns(stages, from_dlpack(turns))
    expected = np.arange(len(turns))[:, None] + [0, -1, 1]
    assert np.array_equal(turns, expected % stages)


@pytest.mark.gpu
@pytest.mark.parametrize(("with_source_bytes", "with_policy"), OPERANDS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_arrives(form, with_source_bytes, with_policy):
    """`source_bytes` of each vector, zeros up to its size, and nothing beyond."""
    from cutelab.kernels.runtime.arch import Arch

    arch = Arch.of(torch.device("cuda"))
    function = compiled(Forms(form, with_source_bytes, with_policy), arch.name, "--enable-tvm-ffi")
    x = torch.arange(1, THREADS * WORDS + 1, dtype=torch.int32, device="cuda").view(THREADS, WORDS)
    for source_bytes in range(0, form["size"] + 1, 4):
        y = torch.empty_like(x)
        stream = torch.cuda.current_stream().cuda_stream
        function(x.data_ptr(), y.data_ptr(), source_bytes, stream)
        read = (source_bytes if with_source_bytes else form["size"]) // 4
        expected = torch.full_like(x, POISON)
        expected[:, : form["size"] // 4] = 0
        expected[:, :read] = x[:, :read]
        assert torch.equal(y, expected)
