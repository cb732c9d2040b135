"""Stopping inside kernels: where, what the next step does, and what registers and shared memory hold."""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from ptx_programs import WGMMA
from run_ptx import HEADER, kernel, launch_of

from cutelab import simulator
from cutelab.kernels import gemm
from cutelab.mmas import fragments
from cutelab.simulator.errors import BarrierError, RaceError, SimulationError
from cutelab.simulator.execution import region

LANE = np.arange(32)
GROUP, MEMBER = LANE // 4, LANE % 4


def debug(body, *arrays, threads=32, grid=1, shared=0):
    text = kernel(body, shared=shared, parameters=len(arrays))
    return simulator.Debugger(launch_of(text, *arrays, threads=threads, grid=grid))


def with_lines(tmp_path, *lines):
    """A kernel whose k-th line of PTX comes from line k of a program, which holds that PTX as text."""
    path = tmp_path / "program.py"
    path.write_text("\n".join(lines))
    located = "\n".join(f".loc 1 {number} 0\n{line}" for number, line in enumerate(lines, 1))
    text = f""".visible .entry k() {{ .reg .pred %p<4>; .reg .b32 %r<9>; .shared .align 4 .b8 smem[256];
        {located} }}\n.file 1 "{path}"\n"""
    return HEADER + text


# --- What instructions leave in registers

# 16 rows of 16 elements, 16 row + column each; lanes 0–15 point at the left half, 16–31 at the right.
LDMATRIX = """
    mov.u32 %r1, smem; mad.lo.s32 %r2, %r31, 16, %r1;
    ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd1];
    st.shared.v4.b32 [%r2], {{%r4, %r5, %r6, %r7}};
    bar.sync 0;
    and.b32 %r8, %r31, 15; shr.u32 %r9, %r31, 4; mad.lo.s32 %r3, %r8, 32, %r1; mad.lo.s32 %r3, %r9, 16, %r3;
    ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r3];
"""


@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix_lands_where_the_isa_says(trans):
    tile = torch.arange(256).reshape(16, 16).bfloat16()
    data = tile.view(torch.int32).numpy().view(np.uint32)
    body = "mul.wide.u32 %rd2, %r31, 16; add.s64 %rd1, %rd0, %rd2;" + LDMATRIX.format(
        trans=".trans" if trans else ""
    )
    debugger = debug(body, data, shared=512)
    assert debugger.run_until("ldmatrix").instruction.opcode == "ldmatrix"
    np.testing.assert_array_equal(debugger.shared("bf16", shape=(16, 16)), tile.float())
    debugger.step()
    written, address = debugger.operands()
    assert written.text == "{%r10, %r11, %r12, %r13}" and (written.written, address.written) == (True, False)
    landed = written.view("bf16")  # (registers, lanes, halves)
    for matrix, (row, column) in enumerate([(0, 0), (8, 0), (0, 8), (8, 8)]):
        # PTX ISA, ldmatrix: lane i has elements 2 (i % 4) and the next of row i / 4, of the transposed matrix
        # with .trans.
        square = tile[row : row + 8, column : column + 8].float().numpy()
        square = square.T if trans else square
        np.testing.assert_array_equal(landed[matrix, :, 0], square[GROUP, 2 * MEMBER])
        np.testing.assert_array_equal(landed[matrix, :, 1], square[GROUP, 2 * MEMBER + 1])
    assert (debugger.registers()["%r11"] == written.bits[1]).all()
    np.testing.assert_array_equal(address.values[0] - address.values[0, 0], LANE % 16 * 32 + LANE // 16 * 16)


MMA = """
    mov.b32 %r4, 0x3F803F80; cvt.rn.f32.u32 %f4, %r31; mov.b32 %r9, %f4;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
        {%f0, %f1, %f2, %f3}, {%r4, %r4, %r4, %r4}, {%r4, %r4}, {%f4, %f4, %f4, %f4};
"""


def test_operands_are_what_their_instruction_takes_them_for():
    text = kernel(MMA).replace(".reg .pred", ".reg .f32 %f<9>; .reg .pred")
    debugger = simulator.Debugger(launch_of(text, *[np.zeros(1)] * 2))
    debugger.run_until("mma.sync")
    assert str(debugger.next).endswith("{%r4, %r4}, {%f4, %f4, %f4, %f4};")
    debugger.step()
    d, a, b, c = debugger.operands()
    assert [each.type for each in (d, a, b, c)] == ["f32", "bf16", "bf16", "f32"]
    assert [each.values.shape for each in (d, a, b, c)] == [(4, 32), (4, 32, 2), (2, 32, 2), (4, 32)]
    assert (a.values == 1).all() and (c.values == LANE).all() and (d.values == 16 + LANE).all()
    assert d.bits.dtype == np.uint32 and debugger.registers()["%f0"].dtype == np.float32
    np.testing.assert_array_equal(d.view("u16")[0, 1], [0, 0x4188])  # 17.0 is 0x41880000
    with pytest.raises(SimulationError, match=r"32 bits, which are no 'f64'; a type is one of .*bf16"):
        d.view("f64")


def test_a_wgmma_is_executed_by_four_warps_at_once():
    out, data = np.zeros((4, 128), np.uint32), np.ones(64 * 16 + 8 * 16, np.float16)
    debugger = simulator.Debugger(
        launch_of(kernel(WGMMA, shared=2304), out, data.view(np.uint32), threads=128)
    )
    place = debugger.run_until("wgmma.mma_async")
    assert place.warps == (0, 1, 2, 3) and len(place.threads) == 128
    debugger.run_until("wgmma.wait_group", warp=2)
    debugger.step()
    accumulators = debugger.operands(place)[0]
    assert accumulators.type == "f32" and accumulators.values.shape == (4, 128)
    assert (accumulators.values == 16).all()


# --- Steps

STRAIGHT = "add.s32 %r1, %r31, 1; add.s32 %r2, %r1, 1; add.s32 %r3, %r2, 1; bar.sync 0; add.s32 %r4, %r3, 1;"


def test_a_step_is_an_instruction_of_one_warp():
    debugger = debug(STRAIGHT, np.zeros(1), threads=64)
    debugger.run_until("add.s32", warp=1)
    seen = [debugger.next]
    for _ in range(3):
        seen.append(debugger.step())
        assert debugger.last is seen[-2]
    assert [place.warps for place in seen] == [(1,)] * 4
    assert [place.instruction.name for place in seen] == ["add.s32"] * 3 + ["bar.sync"]
    assert (debugger.registers()["%r3"] == LANE + 32 + 3).all()
    assert debugger.step().warps == (0,)  # warp 1 waits
    waiting = debugger.warps()[1]
    assert (waiting.warps, waiting.waits_for) == ((1,), "barrier 0") and "waits for barrier 0" in str(waiting)


def test_all_instructions_take_as_many_steps():
    debugger, steps = debug(STRAIGHT, np.zeros(1), threads=64), 0
    while debugger.next:
        debugger.step()
        steps += 1
    # ld.param, mov, 2 mul and ret come with those.
    assert steps == 2 * (5 + 5)
    assert debugger.last.instruction.name == "ret"
    assert debugger.step() is None and debugger.run_until("add.s32") is None and debugger.warps() == []


def test_lanes_that_part_are_told_apart():
    body = """setp.lt.u32 %p1, %r31, 5; @%p1 bra FEW; add.s32 %r1, %r31, 1; bra END;
        FEW: add.s32 %r1, %r31, 2; END:"""
    debugger = debug(body, np.zeros(1))
    places = [debugger.run_until("add.s32"), debugger.run_until("add.s32")]
    assert sorted(place.threads.tolist() for place in places) == [[*range(5)], [*range(5, 32)]]
    assert "5 lanes" in "".join(map(str, places))
    debugger.finish()
    debugger = debug(body, np.zeros(1))
    debugger.run_until("ret")
    assert debugger.registers()["%r1"].tolist() == [n + 2 for n in range(5)] + [n + 1 for n in range(5, 32)]
    assert debugger.registers()["%p1"].tolist() == [True] * 5 + [False] * 27


def test_only_one_cta_runs_at_a_time():
    debugger = debug("mov.u32 %r1, %ctaid.x; add.s32 %r2, %r1, 1;", np.zeros(1), grid=3)
    assert debugger.run_until("add", cta=(2, 0, 0)).cta == (2, 0, 0)
    assert (debugger.registers()["%r1"] == 2).all()
    with pytest.raises(SimulationError, match=r"CTA \(1, 0, 0\) isn't running: only \(2, 0, 0\)"):
        debugger.shared(cta=(1, 0, 0))
    with pytest.raises(SimulationError, match=r"no CTA \(3, 0, 0\): the grid has .*\(2, 0, 0\)"):
        debugger.run_until("add", cta=(3, 0, 0))
    with pytest.raises(SimulationError, match="no warp 1: a CTA has warps 0 … 0"):
        debugger.run_until("add", warp=1)


# --- Places


def test_a_line_is_reached_once_however_many_instructions_it_has(tmp_path):
    text = with_lines(
        tmp_path,
        "mov.u32 %r1, 0;",
        "AGAIN:",
        "add.s32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 3;",
        "@%p1 bra AGAIN;",
        "",
        "",
        "ret;",
    )
    debugger = simulator.Debugger(launch_of(text))
    counted = []
    while place := debugger.run_until("program.py:3"):
        counted.append(int(debugger.registers()["%r1"][0]))
        assert (place.line, place.file) == (3, str(tmp_path / "program.py"))
        assert place.source == "add.s32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 3;"
        assert f"program.py:3: {place.source}" in str(place)
    assert counted == [0, 1, 2]
    assert simulator.Debugger(launch_of(text)).run_until(f"{tmp_path}/program.py:7").instruction.name == "ret"


def test_places_that_there_are_not(tmp_path):
    text = with_lines(tmp_path, "mov.u32 %r1, 0;", "", "", "add.s32 %r1, %r1, 1;", "", "ret;")
    debugger = simulator.Debugger(launch_of(text))
    with pytest.raises(SimulationError, match=r"line 3 of program.py; the nearest lines .* some: 1, 4, 6"):
        debugger.run_until("program.py:3")
    with pytest.raises(SimulationError, match=r"comes from 'other.py'; its files: program.py"):
        debugger.run_until("other.py:3")
    with pytest.raises(SimulationError, match=r"no instruction 'adds'; similar ones that it has: add"):
        debugger.run_until("adds")
    with pytest.raises(SimulationError, match="'ad'"):  # no beginning of a word
        debugger.run_until("ad")
    assert debugger.run_until("program.py:4").instruction.name == "add.s32"


# --- Shared memory


def test_shared_memory_shows_what_nobody_has_written():
    body = """mov.u32 %r1, smem; shl.b32 %r2, %r31, 2; add.s32 %r2, %r1, %r2;
        st.shared.b32 [%r2+8], %r31; bar.sync 0;"""
    debugger = debug(body, np.zeros(1), shared=160)
    debugger.run_until("bar.sync")
    words = debugger.shared("u32")
    assert words.shape == (40,) and words.mask.tolist() == [True] * 2 + [False] * 32 + [True] * 6
    assert words.compressed().tolist() == LANE.tolist()
    assert debugger.shared("u16", 8, (2, 4)).tolist() == [[0, 0, 1, 0], [2, 0, 3, 0]]
    assert debugger.shared("f32", 12, 1).item() == np.float32(1e-45)
    with pytest.raises(SimulationError, match=r"4 numbers of 4 bytes from byte 152 .* 160 bytes; .* 2 fit"):
        debugger.shared("f32", 152, 4)
    with pytest.raises(SimulationError, match=r"no type 'float'; a type is one of .*bf16"):
        debugger.shared("float")


# --- Errors of the kernel

RACE = "mov.u32 %r1, smem; st.shared.b32 [%r1], 7; ret;"


def test_an_error_leaves_everything_as_it_was():
    debugger = debug(RACE, np.zeros(1), threads=64, shared=16)
    with pytest.raises(RaceError, match=r"st\.shared"):
        debugger.finish()
    assert (debugger.next.warps, debugger.next.instruction.name) == ((1,), "st.shared.b32")
    assert debugger.shared("u32", 0, 1).item() == 7 and "%r1" in debugger.registers()
    for go_on in (debugger.step, debugger.finish, lambda: debugger.run_until("ret")):
        with pytest.raises(SimulationError, match="has failed: nothing goes on"):
            go_on()


def test_an_error_at_the_first_instruction():
    text = HEADER + ".visible .entry k() { bar.sync 99; ret; }"
    debugger = simulator.Debugger(launch_of(text))
    with pytest.raises(BarrierError, match="no barrier 99"):
        debugger.step()


# --- A kernel of the library


def test_a_gemm_is_stopped_by_the_line_of_its_source():
    a, b, launches = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16(), []
    with simulator.gpu("sm_80", execute=launches.append):
        out = gemm(a, b)
    debugger = simulator.Debugger(launches[0])
    source = Path(fragments.__file__).read_text().splitlines()
    line = next(n for n, text in enumerate(source, 1) if "cute.gemm(self.tiled_mma, acc" in text)
    place = debugger.run_until(f"mmas/fragments.py:{line}", warp=3)
    assert place.instruction.name.startswith("mma.sync") and place.source.startswith("cute.gemm(")
    debugger.step()
    d, a_operand, _, c = debugger.operands()
    assert d.values.any() and (c.values == 0).all()
    # Warp 3 of 2 × 2 has rows 16 and up of each 32; the first k-block.
    np.testing.assert_array_equal(
        a_operand.values[0], a.float().numpy()[16 + GROUP[:, None], 2 * MEMBER[:, None] + [0, 1]]
    )
    debugger.finish()
    assert (out - (a.float() @ b.float())).abs().max() <= 2**-8 * (a.float() @ b.float()).abs().max()


def test_a_launch_keeps_its_tensors():
    launches = []
    with simulator.gpu("sm_80", execute=launches.append):
        gemm(torch.ones(64, 32).bfloat16(), torch.ones(32, 64).bfloat16())
    gc.collect()
    simulator.Debugger(launches[0]).finish()
    values = {int(np.bincount(region(each).data.view(np.uint16)).argmax()) for each in launches[0].tensors}
    assert values == {0x3F80, 0x4200}  # 1.0, and 32.0 in bf16
