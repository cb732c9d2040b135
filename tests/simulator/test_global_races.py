"""Races in global memory: kernels that pass, and with one fault each, which is found in every order."""

import dataclasses

import numpy as np
import pytest
import torch
from run_ptx import kernel, run

from cutelab import simulator
from cutelab.kernels import gemm
from cutelab.simulator.errors import RaceError
from cutelab.simulator.tensormap import TensorMap, encode

SEEDS = [None, *range(20)]


def arrays():
    """What %rd0 and %rd1 point to."""
    return np.zeros(512, np.uint32), np.arange(512, dtype=np.uint32)


def passes(body, expected=(), **options):
    for seed in SEEDS:
        out, given = arrays()
        run(kernel(body, shared=512), out, given, seed=seed, **options)
        np.testing.assert_array_equal(out[: len(expected)], expected)


def races(body, message, **options):
    for seed in SEEDS:
        with pytest.raises(RaceError, match=message):
            run(kernel(body, shared=512), *arrays(), seed=seed, **options)


# --- Warps of a CTA: each reads what another one has written.

EXCHANGE = """
    add.s64 %rd10, %rd0, %rd9; st.global.b32 [%rd10], %r31; {}
    xor.b32 %r1, %r31, 32; mul.wide.u32 %rd11, %r1, 4; add.s64 %rd11, %rd0, %rd11;
    ld.global.b32 %r2, [%rd11]; {} st.global.b32 [%rd10], %r2;
"""


def test_warps_that_barriers_order():
    passes(EXCHANGE.format("bar.sync 0;", "bar.sync 0;"), np.arange(64) ^ 32, threads=64)


def test_warps_that_nothing_orders():
    places = r"array 0, which warp \d of CTA \(0, 0, 0\) (wrote|read) at PTX line \d+: "
    races(EXCHANGE.format("bar.sync 0;", ""), places + "ld.*with nothing that orders", threads=64)
    races(EXCHANGE.format("", "bar.sync 0;"), places, threads=64)


# All warps read a word, which one of them writes.
SHARED_WORD = """
    mov.u32 %r2, {number}; ld.global.b32 %r1, [%rd0]; {between}
    setp.ne.u32 %p1, %r2, {writer}; @%p1 bra END; st.global.b32 [%rd0], 7; END:
"""


@pytest.mark.parametrize(("threads", "writer"), [(64, 0), (64, 1), (128, 3)])
def test_a_word_that_other_warps_read_too(threads, writer):
    body = SHARED_WORD.format(number="%r31", writer=32 * writer, between="{}")
    passes(body.format("bar.sync 0;"), [7], threads=threads)
    one, other = f"warp {writer} of", f"warp [^{writer}] of"
    message = f"{one} .* writes byte 0 .*{other} .* read at|{other} .* reads byte 0 .*{one} .* wrote"
    races(body.format(""), message, threads=threads)


@pytest.mark.parametrize("writer", [0, 1])
def test_a_word_that_other_ctas_read_too(writer):
    body = SHARED_WORD.format(number="%ctaid.x", writer=writer, between="")
    races(body, "byte 0 of array 0", grid=2)


# --- CTAs

OWN = """mov.u32 %r1, %ctaid.x; mad.lo.u32 %r2, %r1, 32, %r31; mul.wide.u32 %rd10, %r2, 4;
         add.s64 %rd10, %rd0, %rd10; ld.global.b32 %r3, [%rd10]; add.u32 %r3, %r3, %r2; {}
         st.global.b32 [%rd10], %r3;"""


def test_ctas_in_place():
    passes(OWN.format(""), np.arange(128), grid=4)


def test_ctas_that_write_the_same():
    body = OWN.format("setp.eq.u32 %p1, %r1, 2; @%p1 sub.s64 %rd10, %rd10, 256;")
    message = r"CTA \([02], 0, 0\) writes byte 0 of array 0, which warp 0 of CTA \([02], 0, 0\) (wrote|read)"
    races(body, message, grid=4)
    same = r"warp 0 of CTA .* writes byte 8 of array 0, .* wrote .*to write the same value is a race too"
    races("st.global.b32 [%rd0+8], 7;", same, grid=2)


def test_warps_that_write_the_same_at_once():
    races("st.global.b32 [%rd0+8], 7;", "to write the same value is a race too", threads=64)


def test_a_cta_reads_what_another_one_writes():
    body = OWN.format("setp.eq.u32 %p1, %r1, 2; @%p1 ld.global.b32 %r4, [%rd0+12];")
    races(body, r"byte \d+ of array 0, which warp 0 of CTA", grid=4)


def test_the_python_lines_of_both():
    """In a GEMM, all of whose CTAs compute the same tile."""

    def execute(launch):
        simulator.execute(dataclasses.replace(launch, ptx=launch.ptx.replace("%ctaid.x", "%ctaid.y")))

    with simulator.gpu("sm_80", execute=execute), pytest.raises(RaceError) as found:
        gemm(torch.zeros(256, 64).half(), torch.zeros(64, 256).half())
    assert str(found.value).count("epilogue.py:") == 2


def test_a_gemm_in_place():
    torch.manual_seed(0)
    a, b, c = torch.randn(130, 40).half(), torch.randn(40, 200).half(), torch.randn(130, 200).half()
    with simulator.gpu("sm_90a"):
        expected = gemm(a, b, c=c, beta=0.5)
        gemm(a, b, c=c, beta=0.5, out=c)
    assert torch.equal(c, expected)


# --- Strong accesses and fences

MESSAGE = """
    mov.u32 %r1, %ctaid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra READER;
    add.s64 %rd10, %rd1, %rd9; st.global.b32 [%rd10+64], %r31;
    {before} bar.sync 0; setp.ne.u32 %p2, %r31, 0; @%p2 bra END; {write} bra END;
    READER: setp.ne.u32 %p2, %r31, 0; @%p2 bra GO;
    WAIT: {read} setp.eq.u32 %p3, %r3, 0; @%p3 bra WAIT;
    GO: bar.sync 0; {behind}
    add.s64 %rd10, %rd1, %rd9; ld.global.b32 %r4, [%rd10+64];
    add.s64 %rd11, %rd0, %rd9; st.global.b32 [%rd11], %r4;
    END:
"""
FENCED = {
    "before": "fence.acq_rel.gpu;",
    "write": "red.relaxed.gpu.global.add.u32 [%rd0+1024], 1;",
    "read": "ld.relaxed.gpu.global.b32 %r3, [%rd0+1024];",
    "behind": "fence.acq_rel.gpu;",
}
ORDERED = {
    "before": "",
    "write": "red.release.gpu.global.add.u32 [%rd0+1024], 1;",
    "read": "ld.acquire.gpu.global.b32 %r3, [%rd0+1024];",
    "behind": "",
}


@pytest.mark.parametrize("how", [FENCED, ORDERED], ids=["fences", "acquire and release"])
def test_a_message_between_ctas(how):
    passes(MESSAGE.format(**how), np.arange(64), threads=64, grid=2)


MESSAGE_FAULTS = {
    "no fence before": FENCED | {"before": ""},
    "no fence behind": FENCED | {"behind": ""},
    "fence of the CTA before": FENCED | {"before": "fence.acq_rel.cta;"},
    "fence of the CTA behind": FENCED | {"behind": "membar.cta;"},
    "relaxed write": ORDERED | {"write": FENCED["write"]},
    "relaxed read": ORDERED | {"read": FENCED["read"]},
    "release to the CTA": ORDERED | {"write": "red.release.cta.global.add.u32 [%rd0+1024], 1;"},
    "acquire from the CTA": ORDERED | {"read": "ld.acquire.cta.global.b32 %r3, [%rd0+1024];"},
    "weak write": ORDERED | {"write": "st.global.b32 [%rd0+1024], 1;"},
    "weak read": ORDERED | {"read": "ld.global.b32 %r3, [%rd0+1024];"},
    "weak both": {
        "before": "membar.gl;",
        "write": "st.global.b32 [%rd0+1024], 1;",
        "read": "ld.global.b32 %r3, [%rd0+1024];",
        "behind": "membar.gl;",
    },
    "written behind": ORDERED | {"write": ORDERED["write"] + "st.global.b32 [%rd1+64], 9;"},
}


@pytest.mark.parametrize("fault", MESSAGE_FAULTS)
def test_faults_in_a_message_between_ctas(fault):
    races(MESSAGE.format(**MESSAGE_FAULTS[fault]), "race", threads=64, grid=2)


def test_a_message_between_warps_through_global_memory():
    body = """mov.b32 %r4, 5; setp.ge.u32 %p1, %r31, 32; @%p1 bra READER;
              setp.ne.u32 %p2, %r31, 0; @%p2 bra END;
              st.global.b32 [%rd1], 42; {} bra END;
              READER: ld.acquire.cta.global.b32 %r3, [%rd0+1024]; setp.eq.u32 %p3, %r3, 0; @%p3 bra READER;
              ld.global.b32 %r4, [%rd1]; setp.ne.u32 %p2, %r31, 32; @%p2 bra END; st.global.b32 [%rd0], %r4;
              END:"""
    passes(body.format("st.release.cta.global.b32 [%rd0+1024], 1;"), [42], threads=64)
    races(body.format("st.relaxed.cta.global.b32 [%rd0+1024], 1;"), "byte 0 of array 1", threads=64)


def test_strong_accesses_do_not_race_among_themselves():
    passes("red.global.add.u32 [%rd0], 1;", [4 * 64], threads=64, grid=4)
    body = """setp.ne.u32 %p1, %r31, 0; @%p1 bra END; mov.u32 %r1, %ctaid.x;
              st.relaxed.gpu.global.b32 [%rd0], %r1; ld.volatile.global.b32 %r2, [%rd0]; {} END:"""
    passes(body.format(""), grid=4)
    races(body.format("ld.global.b32 %r2, [%rd0];"), "byte 0 of array 0", grid=4)
    races(body.replace("relaxed.gpu", "relaxed.cta").format(""), "byte 0 of array 0", grid=4)


def test_the_last_cta_adds_up():
    """Each CTA leaves a part, and the one that comes last adds them up (the threadFenceReduction pattern)."""
    body = """mov.u32 %r1, %ctaid.x; mov.b32 %r8, smem; mad.lo.u32 %r2, %r1, 64, %r31;
              mul.wide.u32 %rd10, %r2, 4; add.s64 %rd10, %rd0, %rd10; st.global.b32 [%rd10], %r2;
              membar.gl; bar.sync 0; setp.ne.u32 %p1, %r31, 0; @%p1 bra SHARE;
              atom.global.add.u32 %r3, [%rd1], 1; st.shared.b32 [%r8], %r3;
              SHARE: bar.sync 0; ld.shared.b32 %r3, [%r8]; setp.ne.u32 %p2, %r3, 3; @%p2 bra END;
              membar.gl; mov.b32 %r4, 0; mov.b32 %r5, 0; add.s64 %rd11, %rd0, %rd9;
              ADD: ld.global.b32 %r6, [%rd11]; add.u32 %r4, %r4, %r6; add.s64 %rd11, %rd11, 256;
              add.u32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, 4; @%p3 bra ADD;
              add.s64 %rd12, %rd0, %rd9; st.global.b32 [%rd12+1024], %r4; END:"""
    total = np.arange(256).reshape(4, 64).sum(axis=0)
    passes(body, np.r_[np.arange(256), total], threads=64, grid=4)
    races(body.replace("membar.gl; bar.sync", "bar.sync"), "race", threads=64, grid=4)
    races(body.replace("membar.gl; mov", "mov"), "race", threads=64, grid=4)


# --- Engines: bulk copies and cp.async

BULK = """
    mov.b32 %r1, smem; shl.b32 %r2, %r31, 2; add.s32 %r2, %r1, %r2; st.shared.b32 [%r2], %r31;
    fence.proxy.async.shared::cta; bar.sync 0; setp.ne.u32 %p1, %r31, 0; @%p1 bra DONE;
    mov.u32 %r3, %ctaid.x; mul.wide.u32 %rd10, %r3, {step}; add.s64 %rd10, %rd0, %rd10;
    {copy}; cp.async.bulk.commit_group; cp.async.bulk.wait_group{read} 0;
    {behind} DONE:
"""
COPY = "cp.async.bulk.global.shared::cta.bulk_group [%rd10], [%r1], 128"
ADD = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd10], [%r1], 128"
REREAD = "ld.global.b32 %r4, [%rd10];"


def test_bulk_stores():
    passes(BULK.format(step=128, copy=COPY, read="", behind=REREAD), np.tile(np.arange(32), 4), grid=4)
    passes(BULK.format(step=128, copy=COPY, read=".read", behind=""), grid=4)
    passes(BULK.format(step=0, copy=ADD, read="", behind=""), 4 * np.arange(32), grid=4)


def test_faults_around_bulk_stores():
    races(
        BULK.format(step=128, copy=COPY, read=".read", behind=REREAD),
        r"warp 0 of CTA .* reads byte \d+ of array 0, which a bulk store of warp 0 of CTA",
        grid=4,
    )
    overlap = r"a bulk store of warp 0 of CTA \(\d, 0, 0\) writes byte \d+ of array 0, which a bulk store of"
    races(BULK.format(step=64, copy=COPY, read="", behind=""), overlap, grid=4)
    mixed = f"setp.eq.u32 %p2, %r3, 1; @%p2 bra ADD; {COPY}; bra ON; ADD: {ADD}; ON: mov.b32 %r5, 0"
    races(BULK.format(step=0, copy=mixed, read="", behind=""), "a bulk store", grid=2)


LOAD = """
    mov.b32 %r1, smem; add.s64 %rd10, %rd1, %rd9; setp.ne.u32 %p1, %r31, 0;
    @%p1 bra READY; mbarrier.init.shared.b64 [%r1+256], 1; READY:
    st.global.b32 [%rd10], 7; {fence} bar.sync 0; @%p1 bra DONE;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1+256], 128;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 128, [%r1+256];
    WAIT: {wait}
    DONE: bar.sync 1; st.global.b32 [%rd10], 8;
"""
TRY = "mbarrier.try_wait.parity.shared.b64 %p3, [%r1+256], 0; @!%p3 bra WAIT;"


def test_a_bulk_load_of_what_threads_wrote():
    passes(LOAD.format(fence="fence.proxy.async;", wait=TRY), threads=64)
    races(
        LOAD.format(fence="", wait=TRY),
        "a bulk load of warp 0 .*no fence.proxy.async between them",
        threads=64,
    )
    read = r"writes byte \d+ of array 1, which a bulk load of warp 0 of CTA \(0, 0, 0\) read"
    races(LOAD.format(fence="fence.proxy.async;", wait=""), read, threads=64)


def test_a_box_beyond_the_tensor_reads_nothing():
    space = np.zeros(64, np.uint32)
    out = space[-space.ctypes.data // 4 % 4 :][:32]
    packed = np.zeros(192, np.uint8)
    packed = packed[-packed.ctypes.data % 64 :][:128]
    described = TensorMap(out.ctypes.data, "s32", 4, (32,), (4,), (8,), (1,))
    packed[:] = np.frombuffer(encode(described), np.uint8)
    body = """mov.b32 %r1, smem; setp.ne.u32 %p1, %r31, 0; @%p1 bra END;
              mbarrier.init.shared.b64 [%r1+256], 1;
              mbarrier.arrive.expect_tx.shared.b64 _, [%r1+256], 32;
              cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
              [%r1], [%rd1, {START}], [%r1+256]; st.global.b32 [%rd0], 7; END:"""
    text = kernel(body, shared=264).replace(".align 16 .b8 smem", ".align 128 .b8 smem")
    for start in (-8, 32):
        run(text.replace("START", str(start)), out, packed)
        assert out[0] == 7
    with pytest.raises(RaceError, match=r"which a bulk load of warp 0 .* read"):
        run(text.replace("START", "0"), out, packed)


def test_cp_async_reads_until_it_is_waited_for():
    body = """mov.b32 %r1, smem; shl.b32 %r2, %r31, 2; add.s32 %r2, %r1, %r2; add.s64 %rd10, %rd1, %rd9;
              cp.async.ca.shared.global [%r2], [%rd10], 4; cp.async.commit_group; {}
              st.global.b32 [%rd10], 8;"""
    passes(body.format("cp.async.wait_group 0;"))
    races(body.format(""), r"which a cp\.async of warp 0 of CTA \(0, 0, 0\) read")


def test_accesses_of_other_sizes():
    """Halves of a word that different warps write are no race; a whole word over another's half is."""
    body = """add.s64 %rd10, %rd0, %rd9; and.b32 %r1, %r31, 31; mul.wide.u32 %rd11, %r1, 4;
              add.s64 %rd11, %rd0, %rd11; shr.u32 %r2, %r31, 5; mul.wide.u32 %rd12, %r2, 2;
              add.s64 %rd11, %rd11, %rd12; st.global.b16 [%rd11], %rs0; {}"""
    passes(body.format(""), threads=64)
    races(body.format("setp.lt.u32 %p1, %r31, 32; @%p1 st.global.b32 [%rd10], %r31;"), "byte", threads=64)
