"""When things happen: small kernels to the cycle, and what must hold of a GEMM whatever the costs are."""

import json
import re
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import ceil, prod
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from ptx_programs import RING, WGMMA
from run_ptx import HEADER, kernel, launch_of

from cutelab import simulator
from cutelab.kernels.dense_gemm.config import GemmConfig
from cutelab.kernels.dense_gemm.sm80 import GemmSm80
from cutelab.kernels.runtime.arch import Arch
from cutelab.kernels.runtime.simulated import compile_simulated
from cutelab.simulator.costs import KINDS, SUB_CORES
from cutelab.simulator.errors import Deadlock, RaceError, SimulationError

H100, A100 = simulator.Costs.of("sm_90a"), simulator.Costs.of("sm_80")


def traced(body, threads=32, costs=None, shared=""):
    """A kernel without parameters; every instruction that `ret` ends it."""
    text = f""".visible .entry k() {{ .reg .pred %p<4>; .reg .f32 %f<9>; .reg .b32 %r<9>; .reg .f64 %fd<4>;
        {shared} {body} ret; }}"""
    return simulator.trace(launch_of(HEADER + text, threads=threads), costs=costs)


def issued(timeline, name, track="warp 0"):
    """In which cycles instructions of that name issued."""
    return [span.end - 1 for span in timeline.of(track) if span.name == name]


# --- Small kernels, by hand

TWO_FMA = "mov.f32 %f1, 0f3F800000; fma.rn.f32 %f2, %f1, %f1, %f1; fma.rn.f32 %f3, {source}, %f1, %f1;"


def test_an_instruction_waits_for_its_sources():
    dependent = traced(TWO_FMA.format(source="%f2"))
    # The move is free; the first FMA issues in cycle 0, the second when its source is ready, then ret.
    assert issued(dependent, "ret") == [H100.fma_latency + 1]
    (stall,) = dependent.of("warp 0", "stall")
    assert (stall.start, stall.end, stall.name) == (1, H100.fma_latency, "for math")
    assert dependent.cycles == H100.fma_latency + 2 == 6
    assert traced(TWO_FMA.format(source="%f1")).cycles == 3


@pytest.mark.parametrize(("warps", "cycles"), [(1, 8), (4, 8), (5, 16), (8, 16), (9, 24)])
def test_four_sub_cores_have_a_mufu_each(warps, cycles):
    timeline = traced("mov.f32 %f1, 0f3F800000; ex2.approx.ftz.f32 %f2, %f1;", threads=32 * warps)
    assert timeline.busy("MUFU") == warps * 32 / 4
    assert max(span.end for span in timeline.of("MUFU")) == cycles
    assert len({span.track for span in timeline.of("MUFU")}) == min(warps, 4)


LATE = """
    mov.u32 %r1, %tid.x; mov.f32 %f1, 0f3F800000; setp.lt.u32 %p1, %r1, 32; @%p1 bra BAR;
    fma.rn.f32 %f2, %f1, %f1, %f1; fma.rn.f32 %f3, %f2, %f1, %f1; fma.rn.f32 %f4, %f3, %f1, %f1;
    BAR: bar.sync 0;
"""


def test_a_barrier_opens_when_the_last_warp_has_come():
    timeline = traced(LATE, threads=64)
    # setp in cycle 0, bra when the predicate is ready, in 4; three dependent FMAs from 5 on, 4 apart.
    arrival = H100.int_latency + 1 + 2 * H100.fma_latency + 1
    assert issued(timeline, "bar.sync", "warp 0") == [5]
    assert issued(timeline, "bar.sync", "warp 1") == [arrival] == [14]
    for warp in ("warp 0", "warp 1"):
        (wait,) = timeline.of(warp, "wait")
        assert (wait.name, wait.end) == ("barrier 0", arrival + H100.barrier)
        assert issued(timeline, "ret", warp) == [arrival + H100.barrier]
    assert timeline.cycles == 14 + 20 + 1


def test_warps_of_a_sub_core_issue_in_turn():
    timeline = traced("mov.f32 %f1, 0f3F800000;" + "add.f32 %f2, %f1, %f1;" * 10, threads=32 * 5)
    assert [timeline.busy(f"FMA {core}") for core in range(SUB_CORES)] == [20, 10, 10, 10]
    assert timeline.cycles == 2 * (10 + 1)  # a ret each
    assert [issued(timeline, "ret", f"warp {warp}")[0] for warp in range(1, 4)] == [10, 10, 10]


@pytest.mark.parametrize(("stride", "wavefronts"), [(4, 1), (8, 2), (128, 32), (0, 1)])
def test_bank_conflicts_cost_a_cycle_each(stride, wavefronts):
    body = f"""mov.u32 %r1, %tid.x; mov.u32 %r2, smem; mad.lo.s32 %r3, %r1, {stride}, %r2;
        st.shared.b32 [%r3], 1; ld.shared.b32 %r4, [%r3]; add.s32 %r5, %r4, 1;"""
    timeline = traced(body, shared=".shared .align 16 .b8 smem[4096];")
    stored = H100.int_latency + wavefronts
    assert timeline.busy("shared memory") == 2 * wavefronts
    (add,) = issued(timeline, "add")
    assert add == stored + wavefronts - 1 + H100.shared_latency


def test_loads_of_global_memory_have_a_latency_and_a_rate():
    out = np.zeros(1024, np.uint32)
    out = out[-out.ctypes.data % 32 // 4 :]  # from the beginning of a sector on
    body = "add.s64 %rd2, %rd0, %rd9;" + "ld.global.b32 %r0, [%rd2]; ld.global.b32 %r1, [%rd2+1024];"
    timeline = simulator.trace(launch_of(kernel(body + "add.s32 %r2, %r1, %r0;", parameters=1), out))
    second = issued(timeline, "ld.global")[0]
    first = second - 1
    (loads,) = timeline.of("global loads")
    assert loads.start == first + H100.global_latency
    assert loads.cycles == 2 * 128 / H100.global_bytes  # what the second one asks for comes behind the first
    assert issued(timeline, "add")[-1] == first + H100.global_latency + 4


def test_other_costs_make_other_times():
    slow = replace(H100, fma_latency=100)
    assert traced(TWO_FMA.format(source="%f2"), costs=slow).cycles == 102
    assert simulator.Costs.of("sm_80", barrier=7).barrier == 7
    with pytest.raises(SimulationError, match="known: sm_80"):
        simulator.Costs.of("sm_70")


def test_the_clock_that_a_kernel_reads_is_the_time():
    out = np.zeros(2, np.uint32)
    body = "mov.u32 %r0, %clock; bar.sync 0; mov.u32 %r1, %clock; st.global.v2.b32 [%rd0], {%r0, %r1};"
    simulator.trace(launch_of(kernel(body, parameters=1), out))
    assert out[1] - out[0] == H100.barrier


# --- Bulk copies and wgmma


def ring():
    data = np.arange(128, dtype=np.uint32)
    out = np.zeros(32, np.uint32)
    timeline = simulator.trace(launch_of(kernel(RING, shared=512), out, data, threads=64))
    np.testing.assert_array_equal(out, data.reshape(4, 32).sum(axis=0))
    return timeline


def test_a_ring_of_two_stages_has_two_bulk_copies_in_flight():
    timeline = ring()
    flights = timeline.of("in flight")
    assert len(flights) == 4
    assert all(span.cycles >= H100.tma_latency + 128 / H100.global_bytes for span in flights)
    assert {span.track for span in flights} == {"in flight 0", "in flight 1"}
    starts = [span.start for span in sorted(flights, key=lambda span: span.start)]
    # The third starts when the first stage has been read, so not before the first copy is there.
    assert starts[1] < flights[0].end <= starts[2]
    waits = [
        span for span in timeline.of("warp 1", "wait") if span.name.startswith(("the mbarrier", "mbarrier"))
    ]
    assert sum(span.cycles for span in waits) > H100.tma_latency


def wgmma_timeline(body=WGMMA, costs=None):
    out, operands = np.zeros((4, 128), np.uint32), np.ones(64 * 16 + 8 * 16, np.float16)
    launch = launch_of(kernel(body, shared=2304), out, operands, threads=128)
    timeline = simulator.trace(launch, costs=costs)
    assert (out.view(np.float32) == 16).all()
    return timeline


def test_wgmma_keeps_four_tensor_cores_busy_and_its_warps_wait():
    timeline = wgmma_timeline()
    cycles = H100.wgmma_cycles(8, 16, "f16", a_in_registers=False)
    assert cycles == ceil((64 + 8) * 16 * 2 / 128)  # so small a product takes as long as its operands
    spans = timeline.of("tensor core")
    assert [span.cycles for span in spans] == [cycles] * SUB_CORES
    (start,) = {span.start for span in spans}
    for warp in range(4):
        (wait,) = (each for each in timeline.of(f"warp {warp}", "wait") if each.name.startswith("wgmma"))
        assert wait.end == start + cycles + H100.wgmma_latency


def test_independent_wgmmas_follow_each_other_in_the_tensor_cores():
    (product,) = re.findall(r"wgmma\.mma_async.*", WGMMA)
    other = re.sub(r"{.*?}", "{%r16, %r17, %r18, %r19}", product)
    timeline = wgmma_timeline(WGMMA.replace(product, f"{product}\n{other}"))
    cycles = H100.wgmma_cycles(8, 16, "f16", a_in_registers=False)
    assert all(timeline.busy(f"tensor core {core}") == 2 * cycles for core in range(SUB_CORES))
    (span,) = timeline.of("tensor core 0")  # no gap, though the second issues one cycle after the first
    waits = [each for each in timeline.of("warp 0", "wait") if each.name.startswith("wgmma")]
    assert [each.end for each in waits] == [span.start + 2 * cycles + H100.wgmma_latency]


@pytest.mark.parametrize(("costs", "share"), [(H100, 0.62), (A100, 1)])
def test_the_rate_of_mma_sync(costs, share):
    product = """mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
        {%f1, %f2, %f3, %f4}, {%r1, %r1, %r1, %r1}, {%r1, %r1}, {%f5, %f6, %f7, %f8};"""
    timeline = traced(product * 100, threads=128, costs=costs)
    flops = 4 * 100 * 2 * 16 * 8 * 16
    peak = 4096 if costs is H100 else 2048  # of a multiprocessor, each cycle
    (span,) = timeline.of("tensor core 0")
    assert flops / span.cycles == pytest.approx(share * peak, rel=0.01)
    assert span.cycles <= timeline.cycles <= span.cycles + 10


def test_the_rate_of_wgmma_is_the_peak_of_the_chip():
    assert H100.wgmma_cycles(256, 16, "bf16", False) == 128
    assert H100.wgmma_cycles(256, 32, "e4m3", False) == 128
    assert H100.wgmma_cycles(64, 16, "bf16", True) == 32
    flops = 2 * 64 * 256 * 16 / 128 * 132 * 1.83e9
    assert flops == pytest.approx(989e12, rel=0.01)  # NVIDIA H100 data sheet, SXM, dense
    assert 2 * A100.mma * SUB_CORES * 108 * 1.41e9 == pytest.approx(312e12, rel=0.01)


# --- A GEMM

TILE, WARPS, K = (64, 64, 32), (2, 2), 384
STAGES = (2, 3, 4)


def gemm_launch(stages, arch="sm_80", tile=TILE):
    config = GemmConfig("bfloat16", "bfloat16", tile=tile, warps=WARPS, stages=stages)
    m, n, _ = tile
    a, b = torch.ones(m, K).bfloat16(), torch.ones(n, K).bfloat16()
    out, launches = torch.zeros(m, n).bfloat16(), []
    with simulator.gpu(arch, execute=launches.append):
        function = compile_simulated(GemmSm80(config), Arch.named(arch))
        addresses = a.data_ptr(), b.data_ptr(), 0, 0, out.data_ptr()
        strides = (K, 0, 0, K, 0, 0, 0, 0, 0, 0, n, 0, 0)
        function(*addresses, m, n, K, 1, 1, *strides, 1.0, 0.0, 0)
    return launches[0], out


@cache
def gemm_timeline(stages):
    launch, out = gemm_launch(stages)
    timeline = simulator.trace(launch)
    assert (out == K).all()
    return timeline


def test_more_stages_hide_more_of_the_copies():
    timelines = [gemm_timeline(stages) for stages in STAGES]
    for few, more in pairwise(timelines):
        assert more.cycles < 0.8 * few.cycles
        assert more.busy("warp 0", "wait") < 0.6 * few.busy("warp 0", "wait")
        assert more.busy("tensor core") == few.busy("tensor core")
    lanes = [len({span.track for span in each.of("in flight")}) for each in timelines]
    assert lanes == [stages - 1 for stages in STAGES]


@pytest.mark.parametrize("stages", STAGES)
def test_nothing_is_faster_than_the_hardware(stages):
    timeline = gemm_timeline(stages)
    m, n, _ = TILE
    products = m * n * K // (16 * 8 * 16)
    assert timeline.busy("tensor core") == products * A100.mma_cycles(16, 8, 16, "bf16") == products * 8
    assert timeline.cycles >= m * n * K / (SUB_CORES * A100.mma)
    loaded, stored = 2 * (m + n) * K, 2 * m * n
    assert timeline.busy("global loads") == pytest.approx(loaded / A100.global_bytes)
    assert timeline.busy("global stores") == pytest.approx(stored / A100.global_bytes)
    assert timeline.cycles >= A100.global_latency + loaded / A100.global_bytes


@pytest.mark.parametrize("make", [*(lambda s=s: gemm_timeline(s) for s in STAGES), ring, wgmma_timeline])
def test_nobody_does_two_things_at_a_time(make):
    timeline = make()
    tracks = {(span.cta, span.track) for span in timeline.spans}
    assert len(tracks) > 5
    for cta, track in tracks:
        spans = sorted(timeline.of(track, cta=cta), key=lambda span: span.start)
        assert all(before.end <= after.start for before, after in pairwise(spans)), track
        assert all(span.cycles > 0 and span.kind in KINDS for span in spans)
        assert spans[-1].end <= timeline.cycles


def test_a_trace_is_the_same_again():
    assert simulator.trace(gemm_launch(3)[0]).spans == gemm_timeline(3).spans


def test_spans_name_the_line():
    lines = {span.source[0].split("/")[-1] for span in gemm_timeline(3).of("warp 0", "mma")}
    assert lines == {"fragments.py"}


# --- What it is shown as


def test_the_trace_of_chrome():
    timeline = gemm_timeline(3)
    document = json.loads(json.dumps(timeline.chrome_trace()))
    events = document["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert set(names.values()) == {span.track for span in timeline.spans}
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(timeline.spans) and len(spans) + 2 * len(names) + 1 == len(events)
    for event, span in zip(spans, timeline.spans, strict=True):
        assert (names[event["tid"]], event["pid"], event["cat"]) == (span.track, 0, span.kind)
        assert event["ts"] * 1000 == pytest.approx(span.start) and event["dur"] > 0


@pytest.mark.parametrize("theme", ["auto", "light", "dark"])
def test_the_picture_is_small_and_has_a_row_for_each_warp(theme):
    timeline = gemm_timeline(2)
    picture = timeline.svg(theme=theme)
    assert len(picture) < 100_000
    root = ElementTree.fromstring(picture)
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"warp 0", "warp 3", "copies in flight", "cycles"} <= set(texts)
    assert f"GemmSm80 on sm_80: {timeline.cycles} cycles" in texts
    assert timeline._repr_svg_() == timeline.svg()


def test_a_picture_of_a_few_cycles_shows_those_only():
    timeline = gemm_timeline(2)
    first = min(span.start for span in timeline.of("tensor core"))
    assert 'class="mma"' not in timeline.svg(0, first) and 'class="mma"' in timeline.svg(0, first + 100)
    busy = re.findall(r"tensor cores \d+%", timeline.svg())
    assert busy and busy == re.findall(r"tensor cores \d+%", timeline.svg(end=2 * timeline.cycles))
    for bad in ((-1, 5), (5, 5), (timeline.cycles, timeline.cycles + 9)):
        with pytest.raises(SimulationError, match="take some of 0 to"):
            timeline.svg(*bad)
    with pytest.raises(SimulationError, match="'light' or 'dark'"):
        timeline.svg(theme="blue")


def test_saving(tmp_path):
    timeline = gemm_timeline(3)
    timeline.save(tmp_path / "a.svg")
    timeline.save(tmp_path / "a.json")
    assert (tmp_path / "a.svg").read_text() == timeline.svg()
    assert json.loads((tmp_path / "a.json").read_text()) == timeline.chrome_trace()


def test_the_table_and_names_of_tracks():
    timeline = gemm_timeline(3)
    table = str(timeline)
    assert f"{timeline.busy('tensor core 0') / timeline.cycles:.1%}" in table and "warp 3" in table
    with pytest.raises(SimulationError, match=r"no track 'warp 9'; there are: .*warp 3"):
        timeline.of("warp 9")
    with pytest.raises(SimulationError, match="no kind 'work'; there are: mma"):
        timeline.of("warp 0", "work")


# --- Clusters, and kernels with faults


def test_each_cta_of_a_cluster_has_a_multiprocessor():
    out = np.zeros(8 * 4, np.uint32)
    body = """mov.f32 %f1, 0f3F800000; ex2.approx.ftz.f32 %f2, %f1;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""
    text = kernel(body, parameters=1).replace(".reg .pred", ".reg .f32 %f<4>; .reg .pred")
    launch = launch_of(text, out, grid=8, cluster=4, threads=128)
    timeline = simulator.trace(launch, cta=(5, 0, 0))
    assert timeline.ctas == [(4, 0, 0), (5, 0, 0), (6, 0, 0), (7, 0, 0)]
    assert {span.end for span in timeline.of("MUFU")} == {8 + min(s.start for s in timeline.of("MUFU"))}
    assert all(span.name == "the cluster's barrier" for span in timeline.of("warp", "wait"))
    with pytest.raises(SimulationError, match=r"no CTA \(8, 0, 0\) to trace: .*\(7, 0, 0\)"):
        simulator.trace(launch, cta=(8, 0, 0))


def test_only_the_traced_cluster_is_run():
    out = np.zeros(4, np.uint32)
    body = (
        "mov.u32 %r1, %ctaid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd2, %rd0, %rd2; st.global.b32 [%rd2], 1;"
    )
    simulator.trace(launch_of(kernel(body, parameters=1), out, grid=4), cta=(2, 0, 0))
    assert out.tolist() == [0, 0, 1, 0]


def test_faults_are_found_as_ever():
    data, out = np.arange(128, dtype=np.uint32), np.zeros(32, np.uint32)
    never_full = kernel(RING.replace("_, [%r5+256], 128;", "_, [%r5+256], 144;"), shared=512)
    with pytest.raises(Deadlock, match="16 bytes still to come"):
        simulator.trace(launch_of(never_full, out, data, threads=64))
    with pytest.raises(RaceError, match=r"no wgmma.wait_group"):
        wgmma_timeline(WGMMA.replace("wgmma.wait_group.sync.aligned 0;", ""))


@pytest.mark.parametrize("arch", ["sm_86", "sm_89", "sm_90a"])
def test_every_chip_has_costs(arch):
    launch, out = gemm_launch(2, arch)
    timeline = simulator.trace(launch)
    assert (out == K).all()
    assert timeline.busy("tensor core") == pytest.approx(prod(TILE[:2]) * K / timeline.costs.mma)
