"""The DSL's objects outside a kernel, and that the DSL still works as before around them."""

import subprocess
import sys
import textwrap
import threading

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
from cutlass._mlir import ir
from cutlass.base_dsl.common import DSLUserCodeError, DSLUserCodeRuntimeError
from cutlass.cute.nvgpu import warp

from cutelab.layouts import as_numpy, smem_tile


def transposed(rows, columns):
    """A helper as a kernel would use it: some algebra on the DSL's layouts."""
    layout = cute.make_layout((rows, columns), stride=(columns, 1))
    return cute.composition(layout, cute.make_layout((columns, rows), stride=(rows, 1)))


@cute.jit
def twice(value: cutlass.Int32):
    cute.printf("twice: {}", value * cute.size(transposed(1, 2)))


@cute.jit
def forgets(value: cutlass.Int32):
    raise KeyError("raised while tracing")


@cute.kernel
def empty_kernel(value: cutlass.Int32):
    pass


@cute.jit
def launches(value: cutlass.Int32):
    empty_kernel(value).launch(grid=(1, 1, 1), block=(32, 1, 1))


def assert_eager_works():
    assert str(transposed(4, 8)) == "(8,4):(1,8)"
    assert transposed(4, 8)((3, 2)) == 19


def test_shapes_and_offsets_are_python_integers():
    layout = cute.make_layout((4, (2, 4)), stride=(8, (4, 1)))
    assert layout.shape == (4, (2, 4)) and layout.stride == (8, (4, 1))
    assert type(layout((3, (1, 2)))) is int and layout((3, (1, 2))) == 30
    assert cute.size(layout) == 32 and cute.cosize(layout) == 32 and cute.depth(layout) == 2
    assert layout == cute.make_layout((4, (2, 4)), stride=(8, (4, 1)))
    assert layout != cute.make_layout((4, 8))


def test_swizzled_layouts_and_tensors_print():
    layout = smem_tile((16, 64), 1, 16)
    assert str(layout) == "S<3,3,3> o 0 o ((8,2),(64,1)):((64,512),(1,0))"
    pointer = cute.make_ptr(cutlass.Float16, 0, cute.AddressSpace.smem, assumed_align=128)
    tensor = cute.make_tensor(pointer, layout)
    assert str(layout) in str(tensor)


def test_tensor_core_atoms_need_no_gpu_and_no_environment(monkeypatch):
    monkeypatch.delenv("CUTE_DSL_ARCH", raising=False)
    op = warp.MmaF16BF16Op(cutlass.Float16, cutlass.Float32, (16, 8, 16))
    tiled_mma = cute.make_tiled_mma(op, (2, 2, 1), permutation_mnk=(32, 32, 16))
    assert tiled_mma.size == 128
    assert str(tiled_mma.tv_layout_A) == "((4,8),(2,2,2)):((32,1),(16,8,128))"


def test_a_helper_gives_the_same_inside_a_kernel():
    seen = []

    @cute.jit
    def traced():
        tile = smem_tile((64, 64), 0, 16)
        seen.extend([str(transposed(4, 8)), str(tile), as_numpy(tile)])

    traced()
    layout, tile, table = seen
    assert layout == str(transposed(4, 8))
    assert tile == str(smem_tile((64, 64), 0, 16))
    assert np.array_equal(table, as_numpy(smem_tile((64, 64), 0, 16)))


def test_compiling_and_calling_between_eager_operations(capfd):
    assert_eager_works()
    twice(3)
    assert_eager_works()
    compiled = cute.compile(twice, cutlass.Int32(1))
    assert_eager_works()
    compiled(cutlass.Int32(4))
    compiled(5)
    assert_eager_works()
    assert capfd.readouterr().out.split("\n")[:3] == ["twice: 6", "twice: 8", "twice: 10"]


def test_kernels_compile_between_eager_operations():
    assert_eager_works()
    assert cute.compile(launches, 1) is not None
    assert_eager_works()


@pytest.mark.parametrize("run", [lambda: forgets(1), lambda: cute.compile(forgets, 1)])
def test_an_error_while_tracing_leaves_both_worlds_usable(run):
    assert_eager_works()
    with pytest.raises(KeyError, match="raised while tracing"):
        run()
    assert_eager_works()
    twice(1)


def test_a_launch_outside_jit_is_still_refused():
    assert_eager_works()
    with pytest.raises(DSLUserCodeRuntimeError, match="launched from plain Python") as refused:
        empty_kernel(1).launch(grid=(1, 1, 1), block=(32, 1, 1))
    assert "test_eager.py" in str(refused.value)  # the line that is to blame
    assert_eager_works()


def test_a_launch_outside_jit_is_refused_though_its_arguments_are_eager():
    cute.compile(launches, 1)
    with pytest.raises(RuntimeError, match="this launch is in plain Python"):
        empty_kernel(1).launch(grid=(cute.size(transposed(2, 1)), 1, 1), block=(32, 1, 1))
    assert_eager_works()
    cute.compile(launches, 1)


def test_an_eager_object_inside_a_trace_is_refused_not_fatal():
    layout = cute.make_layout((4, 8))

    @cute.jit
    def captures(index: cutlass.Int32):
        cute.printf("{}", layout(index))

    with pytest.raises(Exception, match=r"different\s+MLIRContext"):
        captures(1)
    assert_eager_works()


def test_a_context_of_ones_own_is_left_alone():
    assert_eager_works()
    with ir.Context() as own, ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            assert_eager_works()
            assert ir.Context.current is own
        assert "cute.make_layout" in str(module)
    assert_eager_works()


def test_threads_share_objects_and_may_come_and_go():
    layout = transposed(4, 8)
    results = []

    def work(index):
        results.append(layout((index, 0)) == index and layout == transposed(4, 8) and layout.shape == (8, 4))

    for _ in range(5):
        threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [True] * 40


def test_a_thread_may_compile():
    errors = []

    def work():
        try:
            assert_eager_works()
            twice(2)
            assert_eager_works()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: cute.make_layout((4, 8), stride=(1,)),
        lambda: cute.make_layout((0, 8)),
        lambda: cute.make_layout("4"),
        lambda: cute.make_layout((4, 8))((1, 2, 3)),
        lambda: cute.make_layout((4, 8))("1"),
        lambda: cute.composition(cute.make_layout(4), None),
        lambda: cute.make_swizzle(1.5, 4, 3),
        lambda: cute.logical_divide(cute.make_layout((4, 8)), (2, 4, 8)),
        lambda: cute.shape_div((3, 6, 2, 8), 5),
        lambda: warp.MmaF16BF16Op(cutlass.Float16, cutlass.Float32, (16, 8, 32)),
    ],
)
def test_wrong_arguments_raise(wrong):
    with pytest.raises((ValueError, TypeError, ir.MLIRError, DSLUserCodeError)):
        wrong()
    assert_eager_works()


def run_python(code):
    command = [sys.executable, "-W", "ignore", "-c", "import cutlass.cute as cute\n" + textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("code", "output"),
    [
        pytest.param(
            """
            import cutelab.layouts
            print(cute.make_layout((4, 8)))
            """,
            "(4,8):(1,4)",
            id="one-liner",
        ),
        pytest.param(
            """
            import cutelab.layouts
            layout = cute.make_layout(4)
            try:
                layout((1, 2))
            except Exception as error:
                kept = error
            print(layout)
            """,
            "4:1",
            id="exception that keeps eager objects alive",
        ),
        pytest.param(
            """
            import cutelab.layouts, threading, time
            done = threading.Event()
            def work():
                print(cute.make_layout(4))
                done.set()
                time.sleep(60)
            threading.Thread(target=work, daemon=True).start()
            done.wait()
            """,
            "4:1",
            id="daemon thread still inside",
        ),
        pytest.param(
            """
            import cutelab.layouts
            before = cute.make_layout(4)
            @cute.jit(preprocess=False)
            def traced():
                print(cute.make_layout(8))
            traced()
            print(before, cute.make_layout(2))
            """,
            "8:1\n4:1 2:1",
            id="eager again after compiling",
        ),
        pytest.param(
            """
            import atexit
            def late():
                try:
                    cute.make_layout(4)
                except TypeError:
                    print("refused")
            atexit.register(late)  # runs after what the import registers
            import cutelab.layouts
            print(cute.make_layout(4))
            """,
            "4:1\nrefused",
            id="eager at exit",
        ),
    ],
)
def test_processes_end_cleanly(code, output):
    process = run_python(code)
    assert (process.returncode, process.stdout.strip(), process.stderr) == (0, output, "")


def test_an_evaluation_keeps_less_than_a_kibibyte():
    code = """
    import cutelab.layouts
    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * 4096
    layout = cute.make_layout((64, 64))
    before = resident()
    for index in range(20000):
        layout(index % 4096)
    print((resident() - before) / 20000)
    """
    process = run_python(code)
    assert process.returncode == 0
    assert float(process.stdout) < 1024
