"""Launches of compiled host code, received on a CPU: what they carry, and that nothing stays changed."""

import os
import re
import struct
import subprocess
import sys
import threading
from pathlib import Path

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cuda.bindings.driver import CUstream
from cutlass.base_dsl.common import DSLUserCodeError, DSLWarning
from cutlass.base_dsl.compiler import CompileOptions
from cutlass.cute.runtime import from_dlpack, make_fake_stream, make_fake_tensor, make_ptr, nullptr
from cutlass.cutlass_dsl import CuTeDSL
from cutlass.utils import HardwareInfo

from cutelab import simulator
from cutelab.simulator import launch as launch_module
from cutelab.simulator import standin
from cutelab.simulator.gpus import Gpu

GMEM = cute.AddressSpace.gmem


@cute.kernel
def add_kernel(x: cute.Tensor, n: cutlass.Int32):
    i, _, _ = cute.arch.thread_idx()
    x[i] = x[i] + n  # the line that the PTX names


@cute.jit
def add(x: cute.Tensor, n: cutlass.Int32):
    """One block for every 32 elements, in clusters of two blocks, with shared memory."""
    blocks = cute.size(x) // 32
    add_kernel(x, n).launch(grid=(blocks, 3, 1), block=(32, 2, 1), cluster=(2, 1, 1), smem=4096)


@cute.kernel
def scale_kernel(p: cute.Pointer, factor: cutlass.Float64, short: cutlass.Int8, wide: cutlass.Int64):
    cute.make_tensor(p, cute.make_layout(1))[0] = cutlass.Float32(factor + short + wide)


@cute.jit
def scale(
    p: cute.Pointer,
    factor: cutlass.Float64,
    short: cutlass.Int8,
    wide: cutlass.Int64,
    stream: CUstream,
):
    scale_kernel(p, factor, short, wide).launch(grid=(1, 1, 1), block=(1, 1, 1), stream=stream)


@cute.jit
def add_then_scale(x: cute.Tensor, n: cutlass.Int32):
    add_kernel(x, n).launch(grid=(1, 1, 1), block=(32, 1, 1))
    scale_kernel(x.iterator, cutlass.Float64(n), cutlass.Int8(1), cutlass.Int64(n)).launch(
        grid=(2, 1, 1), block=(1, 1, 1), use_pdl=True, cooperative=True
    )


@pytest.fixture
def received():
    """What a simulated sm_90a received."""
    launches = []
    with simulator.gpu("sm_90a", execute=launches.append):
        yield launches


def dynamic(tensor):
    return from_dlpack(tensor).mark_layout_dynamic()


def word(value, form="@Q"):
    return struct.pack(form, value)


# --- What arrives


def test_a_call_arrives_with_its_configuration_and_parameters(received):
    x = torch.zeros(128)
    add(from_dlpack(x), 5)
    (launch,) = received
    assert "add_kernel" in launch.kernel
    assert (launch.grid, launch.block, launch.cluster) == ((4, 3, 1), (32, 2, 1), (2, 1, 1))
    assert launch.dynamic_shared_bytes == 4096
    assert launch.parameters == (word(x.data_ptr()), word(5, "i"))
    assert (launch.stream, launch.gpu) == (0, Gpu.named("sm_90a"))
    assert launch.attributes["ClusterDimension"] == (2, 1, 1)
    assert f".entry {launch.kernel}(" in launch.ptx and ".target sm_90a" in launch.ptx


def test_a_compiled_function_is_called_again_with_other_tensors_and_sizes(received):
    compiled = cute.compile(add, dynamic(torch.zeros(64)), 0)
    for size, n in (64, 1), (640, -2), (64, 3):
        x = np.zeros(size, np.float32)
        compiled(dynamic(x), n)
        launch = received.pop()
        assert launch.grid == (size // 32, 3, 1)
        pointer, scalar = launch.parameters
        assert pointer[:12] == word(x.ctypes.data) + word(size, "i")
        assert scalar == word(n, "i")
    assert not received


def test_pointers_scalars_of_every_width_and_a_stream(received):
    x = torch.zeros(4)
    pointer = make_ptr(cutlass.Float32, x.data_ptr(), GMEM)
    scale(pointer, 0.1, -3, 1 << 40, CUstream(0x1234))
    (launch,) = received
    assert launch.parameters == (word(x.data_ptr()), word(0.1, "d"), word(-3, "b"), word(1 << 40, "q"))
    assert launch.stream == 0x1234


def test_the_same_with_tvm_ffi_which_takes_integers(received):
    x = torch.zeros(4)
    example = (nullptr(cutlass.Float32, GMEM), 1.0, 1, 1, make_fake_stream())
    compiled = cute.compile(scale, *example, options="--enable-tvm-ffi")
    compiled(x.data_ptr(), 0.5, 7, 8, 0x7F00_0000_1000)
    (launch,) = received
    assert launch.parameters == (word(x.data_ptr()), word(0.5, "d"), word(7, "b"), word(8, "q"))
    assert launch.stream == 0x7F00_0000_1000


@cute.kernel
def shape_kernel(x: cute.Tensor):
    i, _, _ = cute.arch.thread_idx()
    x[i, 0, 0] = x[0, 0, i]


@cute.jit
def shape(x: cute.Tensor, stream: CUstream):
    shape_kernel(x).launch(grid=x.shape, block=(32, 1, 1), stream=stream)


def test_tensors_where_the_function_was_compiled_with_a_fake_one(received):
    m, n, stride = cute.sym_int(), cute.sym_int(), cute.sym_int64()
    fake = make_fake_tensor(cutlass.Float32, (m, 4, n), stride=(stride, cute.sym_int64(), 1))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    compiled = cute.compile(shape, fake, stream, options="--enable-tvm-ffi")
    one = torch.zeros(3, 4, 5)[:, :, ::2][:, :, :1]  # its stride of 2 is that of a mode of size 1
    for tensor in torch.zeros(3, 4, 5), torch.zeros(7, 4, 9)[:, :, :6], np.zeros((2, 4, 3), np.float32), one:
        compiled(tensor)
        assert received.pop().grid == tensor.shape
    for unfit in (
        torch.zeros(3, 5, 4),
        torch.zeros(3, 4, 5).half(),
        torch.zeros(3, 4),
        torch.zeros(5, 4, 3).mT,
    ):
        with pytest.raises(simulator.LaunchError, match="compiled for: FakeTensor"):
            compiled(unfit)


def test_two_kernels_of_one_function_arrive_in_order(received):
    x = torch.zeros(32)
    add_then_scale(from_dlpack(x), 6)
    first, second = received
    assert "add_kernel" in first.kernel and "scale_kernel" in second.kernel
    assert first.ptx is second.ptx
    assert first.cluster == second.cluster == (1, 1, 1)
    assert second.parameters == (word(x.data_ptr()), word(6.0, "d"), word(1, "b"), word(6, "q"))
    switches = "Cooperative", "ProgrammaticStreamSerialization"
    assert [first.attributes[name] for name in switches] == [0, 0]
    assert [second.attributes[name] for name in switches] == [1, 1]


def test_the_kernel_is_the_one_that_a_gpu_gets_with_lines(received, tmp_path):
    add(from_dlpack(torch.zeros(128)), 5)
    kernel, ptx = received[0].kernel, received[0].ptx
    command = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import cutlass, cutlass.cute as cute, test_launch
x = cute.runtime.make_fake_tensor(cutlass.Float32, (128,), stride=(1,), assumed_align=4)
options = "--gpu-arch=sm_90a --keep-ptx --dump-dir={tmp_path}"
print(cute.compile(test_launch.add, x, cutlass.Int32(5), options=options).__ptx__)
"""
    result = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)

    def instructions(text):
        body = text[text.index("{") :].replace(kernel, "").splitlines()
        return [line for line in map(str.strip, body) if line and not line.startswith((".loc", ".file", "/"))]

    body = re.sub(r"kernel_cutlass_\w+?(?=_param|\()", "", result.stdout)
    assert instructions(ptx) == instructions(body)
    assert "ld.global" in ptx

    lines = Path(__file__).read_text().splitlines()
    line = 1 + next(n for n, text in enumerate(lines) if "# the line that the PTX names" in text)
    (file,) = re.findall(r'\.file\s+(\d+) "[^"]*test_launch\.py"', ptx)
    assert re.search(rf"\.loc\s+{file} {line} ", ptx)


# --- The memory of a launch


def test_tensors_are_known_by_their_extent(received):
    x, y = torch.zeros(10, 64), np.zeros(64, np.float32)
    view = x[2:5, :32]
    kept = [from_dlpack(view), from_dlpack(view[0]), from_dlpack(y)]
    for tensor in kept:
        tensor.load_dltensor()
    add(from_dlpack(y), 1)
    spans = {(one.address, one.size, one.name) for one in received[0].tensors}
    assert (view.data_ptr(), (2 * 64 + 32) * 4, "Float32 (3, 32)") in spans
    assert (y.ctypes.data, 256, "Float32 (64,)") in spans
    assert len({one.address for one in received[0].tensors}) == len(received[0].tensors)


def test_tensors_of_before_are_global_memory_too():
    x = from_dlpack(torch.zeros(64)).mark_layout_dynamic()
    assert x.memspace == cute.AddressSpace.generic
    launches = []
    with simulator.gpu("sm_90a", execute=launches.append):
        add(x, 1)
    assert "ld.global" in launches[0].ptx
    assert x.data_ptr in {one.address for one in launches[0].tensors}


def test_the_storage_behind_a_bare_address_is_known_and_tensors_that_are_gone_are_not(received):
    x, other = torch.zeros(128), torch.zeros(128)
    scale(make_ptr(cutlass.Float32, x.data_ptr() + 40, GMEM), 1.0, 1, 1, CUstream(0))
    addresses = {one.address: one.size for one in received[0].tensors}
    assert addresses[x.data_ptr()] == 512
    assert other.data_ptr() not in addresses
    gone = from_dlpack(other)
    add(gone, 1)
    assert other.data_ptr() in {one.address for one in received[1].tensors}
    del gone
    received.clear()  # launches keep their tensors
    add(from_dlpack(x), 1)
    assert other.data_ptr() not in {one.address for one in received[0].tensors}


# --- Errors


class Stop(Exception):
    pass


@pytest.mark.parametrize("kind", [Stop, KeyboardInterrupt])
def test_an_exception_comes_out_as_itself_and_ends_the_call(kind):
    seen = []

    def execute(launch):
        seen.append(launch.kernel)
        if len(seen) == 1:
            raise kind("here")

    x = torch.zeros(32)
    with simulator.gpu("sm_90a", execute=execute):
        with pytest.raises(kind, match="here"):
            add_then_scale(from_dlpack(x), 1)
        assert len(seen) == 1
        compiled = cute.compile(add_then_scale, from_dlpack(x), 1)
        seen.clear()
        with pytest.raises(kind, match="here"):
            compiled(from_dlpack(x), 1)
        assert len(seen) == 1
        compiled(from_dlpack(x), 1)
        assert len(seen) == 3


def test_a_launch_from_within_execute(received):
    x = torch.zeros(128)

    def execute(launch):
        if "add_kernel" in launch.kernel:
            scale(make_ptr(cutlass.Float32, x.data_ptr(), GMEM), 1.0, 1, 1, CUstream(0))
        received.append(launch)

    with simulator.gpu("sm_90a", execute=execute):
        add(from_dlpack(x), 5)
    assert [launch.dynamic_shared_bytes for launch in received] == [0, 4096]


@cute.kernel
def empty_kernel():
    pass


@cute.jit
def configured(
    grid: cutlass.Constexpr, block: cutlass.Constexpr, cluster: cutlass.Constexpr, smem: cutlass.Constexpr
):
    empty_kernel().launch(grid=grid, block=block, cluster=cluster, smem=smem)


ONE = (1, 1, 1)


@pytest.mark.parametrize(
    "arch, configuration, message",
    [
        ("sm_90a", ((0, 1, 1), ONE, ONE, 0), "grid"),
        ("sm_90a", ((1, 65536, 1), ONE, ONE, 0), "grid"),
        ("sm_90a", (ONE, (1024, 2, 1), ONE, 0), "block"),
        ("sm_90a", ((3, 1, 1), ONE, (2, 1, 1), 0), "no multiple of the cluster"),
        ("sm_90a", ((32, 1, 1), ONE, (32, 1, 1), 0), "up to 16"),
        ("sm_80", ((2, 1, 1), ONE, (2, 1, 1), 0), "up to 1"),
        ("sm_80", (ONE, ONE, ONE, 163 * 1024 + 1), "166912"),
        ("sm_86", (ONE, ONE, ONE, 99 * 1024 + 1), "101376"),
    ],
)
def test_what_a_gpu_refuses_is_refused(arch, configuration, message):
    launches = []
    with simulator.gpu(arch, execute=launches.append):
        with pytest.raises(simulator.LaunchError, match=message):
            configured(*configuration)
        assert not launches
        configured((4, 1, 1), (1024, 1, 1), ONE, 99 * 1024)
        assert len(launches) == 1


def test_a_real_function_inside_and_a_simulated_one_outside_are_refused():
    x = from_dlpack(torch.zeros(32))
    real = cute.compile(empty, options="--gpu-arch=sm_90a")
    with simulator.gpu("sm_90a", execute=print):
        simulated = cute.compile(add, x, 1)
        with pytest.raises(simulator.SimulationError, match="compiled outside"):
            real()
    with pytest.raises(simulator.SimulationError, match="call it inside"):
        simulated(x, 1)
    with simulator.gpu("sm_80", execute=print), pytest.raises(simulator.SimulationError, match="not sm_80"):
        simulated(x, 1)


@cute.jit
def empty():
    empty_kernel().launch(grid=(1, 1, 1), block=(1, 1, 1))


def test_unknown_gpus_are_refused():
    with pytest.raises(simulator.SimulationError, match=r"sm_75.*known: sm_80"), simulator.gpu("sm_75"):
        pass
    with (
        pytest.raises(simulator.SimulationError, match="at least one"),
        simulator.gpu("sm_80", multiprocessors=0),
    ):
        pass


# --- Scopes


def state():
    return [vars(owner)[name] for owner, name, _ in launch_module._replacements()]


def test_nothing_is_changed_outside():
    before = state()
    with simulator.gpu("sm_90a"):
        inside = state()
        with simulator.gpu("sm_80"):
            assert state() == inside
        assert state() == inside
    assert all(now is not then for now, then in zip(inside, before, strict=True))
    assert state() == before
    with pytest.raises(Stop), simulator.gpu("sm_90a"):
        raise Stop
    assert state() == before
    assert simulator.current_gpu() is None


def test_the_dsl_keeps_no_options():
    x = from_dlpack(torch.zeros(64))
    with simulator.gpu("sm_90a", execute=lambda launch: None):
        add(x, 1)
        cute.compile(add, x, 1, options="--enable-tvm-ffi --opt-level 2")
        with pytest.raises(DSLUserCodeError, match=r"(?s)`n` is missing.*test_launch"):
            add(x)
    fresh = CompileOptions().to_str()
    assert CuTeDSL._get_dsl().compile_options.to_str() == fresh
    assert cute.compile._compile_options.to_str() == fresh


def test_messages_of_the_dsl_name_the_users_line(received):
    with pytest.warns(DSLWarning, match=r"(?s)does not fit in Int32.*test_launch"):
        add(from_dlpack(torch.zeros(64)), 1 << 40)
    compiled = cute.compile(add, from_dlpack(torch.zeros(64)), 1)
    with pytest.warns(DSLWarning, match=r"(?s)does not fit in Int32.*test_launch"):
        compiled(from_dlpack(torch.zeros(64)), 1 << 40)


def test_inner_scopes_count_and_leave_the_outer_ones():
    x = torch.zeros(64)
    outer, inner = [], []
    with simulator.gpu("sm_90a", execute=outer.append):
        add(from_dlpack(x), 1)
        with simulator.gpu("sm_90", multiprocessors=3, execute=inner.append) as gpu:
            assert simulator.current_gpu() is gpu and gpu.multiprocessors == 3
            add(from_dlpack(x), 1)
        add(from_dlpack(x), 1)
    assert [".target sm_90a" in launch.ptx for launch in outer] == [True, True]
    assert [".target sm_90\n" in launch.ptx for launch in inner] == [True]


def test_threads_see_the_gpu_and_cannot_have_another(received):
    x = torch.zeros(64)
    compiled = cute.compile(add, from_dlpack(x), 1)
    problems = []

    def work():
        try:
            compiled(from_dlpack(x), 2)
            with simulator.gpu("sm_80"):
                pass
        except simulator.SimulationError as error:
            problems.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(received) == 4
    assert len(problems) == 4 and all("one GPU at a time" in problem for problem in problems)


def test_the_default_executor_is_that_of_the_package(monkeypatch):
    launches = []
    monkeypatch.setattr(simulator, "execute", launches.append)
    with simulator.gpu("sm_90a"):
        add(from_dlpack(torch.zeros(64)), 1)
    assert len(launches) == 1


def run(program, **environment):
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("CUTELAB_", "CUTE_DSL_"))
    }
    return subprocess.run(
        [sys.executable, "-c", program], env=clean | environment, capture_output=True, text=True, check=True
    ).stdout


PROGRAM = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
from cutlass.cute.runtime import from_dlpack
from cutlass.utils import HardwareInfo
from cutelab import simulator
import test_launch
count = HardwareInfo.get_device_multiprocessor_count
simulator.execute = lambda launch: print(launch.gpu.arch, launch.grid, count(HardwareInfo()))
test_launch.add(from_dlpack(torch.zeros(64)), 1)
"""


def test_the_environment_switch_holds_for_the_whole_program():
    assert run(PROGRAM, CUTELAB_SIMULATE="sm_90a") == "sm_90a (2, 3, 1) 132\n"
    assert run(PROGRAM, CUTELAB_SIMULATE="sm_90:4") == "sm_90 (2, 3, 1) 4\n"


def test_importing_the_package_switches_nothing_on():
    assert run("from cutelab import simulator; print(simulator.current_gpu())") == "None\n"


# --- Queries


@pytest.mark.parametrize("arch, multiprocessors", [("sm_80", 108), ("sm_86", 82), ("sm_90a", 132)])
def test_hardware_info_answers_for_the_gpu(arch, multiprocessors):
    with simulator.gpu(arch):
        info = HardwareInfo()
        assert info.get_device_multiprocessor_count() == multiprocessors
        assert info.get_max_active_clusters(1) == multiprocessors
        assert info.get_max_active_clusters(2) == multiprocessors // 2
        assert info.get_l2_cache_size_in_bytes() > 1 << 20
    with simulator.gpu(arch, multiprocessors=4):
        assert HardwareInfo().get_max_active_clusters(2) == 2


def test_attributes_that_are_not_known_are_named():
    gpu = Gpu.named("sm_90a")
    assert (gpu.attribute(97), gpu.attribute(75), gpu.attribute(16)) == (232448, 9, 132)
    with pytest.raises(simulator.SimulationError, match="attribute 12345"):
        gpu.attribute(12345)


def test_sizes_of_parameters_and_static_shared_memory_come_from_the_ptx():
    ptx = """
.extern .shared .align 1024 .b8 dynamic[];
.shared .align 4 .b8 one[5];
.shared .align 16 .b64 two[2];
.visible .entry none()
{ ret; }
.visible .entry some(
	.param .u64 .ptr .global .align 16 some_param_0,
	.param .align 64 .b8 some_param_1[128],
	.param .f32 some_param_2, .param .u8 some_param_3
)
{ ret; }
"""
    assert standin.parameter_sizes(ptx) == {"none": (), "some": (8, 128, 4, 1)}
    assert standin.static_shared_bytes(ptx) == 32
