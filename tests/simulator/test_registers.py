"""setmaxnreg: the pool of registers that the warps of a CTA share, in step and in the order of 20 seeds."""

import re

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from run_ptx import kernel, run

from cutelab.simulator import ptx
from cutelab.simulator.errors import Deadlock, DivergenceError
from cutelab.simulator.registers import at_launch

SEEDS = [None, *range(20)]


def dec(count):
    return f"setmaxnreg.dec.sync.aligned.u32 {count};"


def inc(count):
    return f"setmaxnreg.inc.sync.aligned.u32 {count};"


GIVE, TAKE = dec(40), inc(232)

# Three warpgroups, of which the first gives registers to the two others.
ROLES = """
    shr.u32 %r1, %r31, 7; setp.ne.u32 %p1, %r1, 0; @%p1 bra CONSUMER;
    {producer} bra DONE;
    CONSUMER: {consumer}
    DONE: {behind}
    add.s64 %rd10, %rd0, %rd9; st.global.b32 [%rd10], %r31;
"""
LATE = "mov.b32 %r2, 0; LOOP: add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 50; @%p2 bra LOOP;"
BOUNDS = ".reqntid 384, 1, 1 .minnctapersm 1"


def roles(seed, producer=GIVE, consumer=TAKE, behind="", bounds=BOUNDS, **options):
    body = ROLES.format(producer=producer, consumer=consumer, behind=behind)
    text = kernel(body, parameters=1).replace(") {", f") {bounds} {{", 1)
    out = np.zeros(384, np.uint32)
    run(text, out, threads=384, seed=seed, **options)
    np.testing.assert_array_equal(out, np.arange(384))


TURNS = f"""setp.eq.u32 %p2, %r1, 1; @%p2 bra FIRST; bar.sync 3, 256; {inc(240)} bra DONE;
            FIRST: {inc(240)} bar.sync 2, 128; {dec(160)} bar.arrive 3, 256;"""


@pytest.mark.parametrize(
    "lines",
    [
        {},
        {"producer": LATE + GIVE},
        {"producer": dec(24), "consumer": inc(240), "behind": "bar.sync 0;"},
        {"consumer": TURNS},  # one after the other, who gives back again
        {"consumer": inc(240), "bounds": ".reqntid 384, 1, 1"},  # ptxas leaves it out
        {"consumer": inc(240), "bounds": ".maxnreg 173"},  # as many as 176
        {"producer": "", "consumer": inc(160)},  # with which they start
    ],
    ids=["232", "given back late", "240", "in turn", "no bounds", "maxnreg", "no more than at the start"],
)
def test_requests_that_fit(lines):
    for seed in SEEDS:
        roles(seed, **lines)


TOO_MANY = (
    r"(?s)warp \d+ of CTA \(0, 0, 0\) \(32 lanes\) waits at PTX line \d+: "
    r".*setmaxnreg.inc.sync.aligned.u32 240\n.*the register pool of CTA \(0, 0, 0\) has 256 left; "
    r"setmaxnreg.inc to 240 needs 2304 more for each of warps \[\d+\], and the most that fits is 232 for "
    r"warps \[4, 5, 6, 7, 8, 9, 10, 11\]: threads start with 168, other warps keep 5120 in all"
)
FAULTS = {
    "too many": ({"consumer": inc(240)}, TOO_MANY),
    "too many, as all meet": ({"consumer": inc(240), "behind": "bar.sync 0;"}, "fits is 232"),
    "too few given back": ({"producer": dec(48)}, "fits is 224"),
    "nothing given back": ({"producer": ""}, "has 0 left.* needs 2048 more.* fits is 168"),
    "given back behind a barrier": (
        {"producer": "bar.sync 0; " + GIVE, "consumer": TAKE + "bar.sync 0;"},
        "(?s)waits at barrier 0.*has 0 left",
    ),
    "too low a limit": ({"bounds": BOUNDS + " .maxnreg 160"}, "fits is 216 .*start with 160"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_requests_that_never_fit(fault):
    lines, message = FAULTS[fault]
    for seed in SEEDS:
        with pytest.raises(Deadlock, match=message):
            roles(seed, **lines)


def test_warps_that_have_ended_keep_theirs():
    for seed in SEEDS:
        with pytest.raises(Deadlock, match="has 0 left"):
            roles(seed, producer="add.s64 %rd10, %rd0, %rd9; st.global.b32 [%rd10], %r31; ret;")


def test_the_whole_warpgroup_executes_it():
    part = "setp.lt.u32 %p2, %r31, {}; @%p2 " + GIVE
    for seed in SEEDS:
        with pytest.raises(
            DivergenceError, match=r"warps from 0 on .* same setmaxnreg: \[\[40\], \[40\], \[\]"
        ):
            roles(seed, producer=part.format(64), consumer=inc(176))
        with pytest.raises(DivergenceError, match=r"without lanes \[16, .* of warp 0"):
            roles(seed, producer=part.format(16))


def test_who_waits_while_others_look_at_global_memory():
    """CTA 1 looks for what the stuck warps of CTA 0 would write: both are named."""
    look = """mov.u32 %r3, %ctaid.x; setp.eq.u32 %p3, %r3, 0; @%p3 bra GO;
              LOOK: ld.acquire.gpu.global.b32 %r4, [%rd0]; setp.ne.u32 %p3, %r4, 7; @%p3 bra LOOK; GO:"""
    for seed in (None, 0, 1):
        with pytest.raises(Deadlock, match=r"CTA \(0, 0, 0\).*setmaxnreg"):
            roles(seed, producer=GIVE, consumer=look + inc(240), grid=2)


# Registers at launch, as ptxas 13.5 has them for these directives.
PTXAS = [
    (".maxntid 384 .minnctapersm 1", (40, 240), 168),
    (".reqntid 128, 1, 3 .minnctapersm 2", (40, 240), 80),
    (".reqntid 128, 1, 1 .minnctapersm 3", (40, 240), 168),
    (".reqntid 400, 1, 1 .minnctapersm 1", (40, 240), 128),
    (".reqntid 100, 1, 1 .minnctapersm 6", (40, 240), 80),
    (".reqntid 400, 1, 1 .minnctapersm 2", (40, 240), 72),
    (".reqntid 160, 1, 1 .minnctapersm 3", (40, 240), 128),
    (".reqntid 32, 1, 1 .minnctapersm 10", (40, 240), 168),
    (".reqntid 256, 1, 1 .minnctapersm 1", (40, 200), 200),
    (".reqntid 256, 1, 1 .minnctapersm 1", (40, 256), 256),  # 255, in units of eight
    (".reqntid 384, 1, 1 .minnctapersm 1", (56, 120), 120),
    (".maxnreg 101 .reqntid 1024, 1, 1", (40, 240), 104),
    (".maxnreg 100", (40, 0), 104),
    (".maxnreg 255", (40, 240), 240),
    (".maxntid 384", (40, 240), None),
    (".minnctapersm 1", (40, 240), None),
    ("", (40, 240), None),
]


@pytest.mark.parametrize(("directives", "numbers", "registers"), PTXAS)
def test_registers_at_launch(directives, numbers, registers):
    body = dec(numbers[0]) + (inc(numbers[1]) if numbers[1] else "")
    text = kernel(body).replace(") {", f") {directives} {{", 1)
    assert at_launch(ptx.parse(text).kernels["k"]) == registers


@cute.kernel
def specialised(out: cute.Tensor, most: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    if cute.arch.make_warp_uniform(thread // 128) == 0:
        cute.arch.setmaxregister_decrease(40)
    else:
        cute.arch.setmaxregister_increase(most)
        out[thread] = 1.0


@cute.jit
def launch(out: cute.Tensor, threads: cutlass.Constexpr, most: cutlass.Constexpr, stream):
    specialised(out, most).launch(grid=(1, 1, 1), block=(threads, 1, 1), min_blocks_per_mp=1, stream=stream)


@pytest.mark.parametrize(("threads", "most"), [(256, 200), (384, 240), (512, 160)])
def test_registers_at_launch_are_those_of_ptxas(threads, most, monkeypatch):
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    out = make_fake_compact_tensor(cutlass.Float32, (1024,))
    compile_ = cute.compile[cute.KeepPTX(), cute.KeepCUBIN()]
    compiled = compile_(launch, out, threads, most, make_fake_stream())
    (found,) = ptx.parse(compiled.__ptx__).kernels.values()
    attribute = re.search(
        rb"\x04\x2f\x08\x00.{4}(.{4})", bytes(compiled.__cubin__), re.DOTALL
    )  # EIATTR_REGCOUNT
    assert at_launch(found) == int.from_bytes(attribute[1], "little")
