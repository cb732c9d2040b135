"""What `gemm` refuses, and that the message names what was given and what to do."""

import re

import pytest
import torch

from cutelab.kernels import gemm
from cutelab.kernels.dense_gemm import plan
from cutelab.kernels.dense_gemm.problem import Arguments, require_tf32
from cutelab.kernels.runtime.arch import Arch
from cutelab.kernels.runtime.errors import ConfigError, DeviceError, DtypeError, LayoutError, ShapeError


def zeros(*shape, dtype=torch.float16, **options):
    return torch.zeros(shape, dtype=dtype, **options)


A, B = zeros(4, 8), zeros(8, 16)
OVERLAPPING = zeros(64).as_strided((4, 16), (8, 1))


def test_errors_are_the_builtin_kinds():
    assert all(issubclass(error, ValueError) for error in (ShapeError, LayoutError, DeviceError, ConfigError))
    assert issubclass(DtypeError, TypeError)


@pytest.mark.parametrize(
    "a, b, message",
    [
        (zeros(8), B, "a has shape (8,), not (…, M, K); a.unsqueeze(0)"),
        (A, zeros(8), "b has shape (8,), not (…, K, N); b.unsqueeze(1)"),
        (zeros(), B, "a has shape ()"),
        (A, zeros(7, 16), "K is 8 in a and 7 in b"),
        (zeros(2, 4, 8), zeros(3, 8, 16), "the batch dims do not broadcast"),
    ],
)
def test_shapes_of_a_and_b(a, b, message):
    with pytest.raises(ShapeError, match=re.escape(message)):
        gemm(a, b)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"bias": zeros(4)}, "bias has shape (4,); it must be (N,) = (16,)"),
        ({"bias": zeros(1, 16)}, "bias has shape (1, 16)"),
        ({"c": zeros(5, 16), "beta": 1.0}, "c has shape (5, 16), which does not broadcast to (4, 16)"),
        ({"c": zeros(2, 4, 16), "beta": 1.0}, "c has shape (2, 4, 16)"),
        ({"out": zeros(16, 4)}, "out has shape (16, 4); the result has (4, 16)"),
        ({"out": zeros(1, 4, 16)}, "out has shape (1, 4, 16)"),
    ],
)
def test_shapes_of_the_other_operands(options, message):
    with pytest.raises(ShapeError, match=re.escape(message)):
        gemm(A, B, **options)


@pytest.mark.parametrize(
    "a, b, options, message",
    [
        ([[1.0]], B, {}, "a must be a torch.Tensor; got list"),
        (A, None, {}, "b must be a torch.Tensor; got NoneType"),
        (A, B, {"bias": 1.0}, "bias must be a torch.Tensor; got float"),
        (A.double(), B.double(), {}, "a is torch.float64; gemm takes torch.float16, torch.bfloat16"),
        (A.long(), B.long(), {}, "a is torch.int64"),
        (A, B.bfloat16(), {}, "b.to(torch.float16)"),
        (A, B, {"out_dtype": torch.float64}, "the output would be torch.float64"),
        (A, B, {"bias": zeros(16).float()}, "bias.to(torch.float16)"),
        (A, B, {"bias": zeros(16), "out_dtype": torch.float32}, "bias.to(torch.float32)"),
        (A, B, {"c": zeros(4, 16).bfloat16(), "beta": 1.0}, "c.to(torch.float16)"),
        (A, B, {"out": zeros(4, 16), "out_dtype": torch.float32}, "out is torch.float16 and out_dtype"),
    ],
)
def test_dtypes(a, b, options, message):
    with pytest.raises(DtypeError, match=re.escape(message)):
        gemm(a, b, **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"activation": "tanh"}, "activation='tanh' is not one of None, relu, gelu, gelu_tanh, silu"),
        ({"activation": ["relu"]}, "activation=['relu'] is not one of None, relu"),
        ({"beta": 1.0}, "beta=1.0 scales c, but there is no c"),
    ],
)
def test_options(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        gemm(A, B, **options)


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_factors_are_python_numbers(name):
    with pytest.raises(DtypeError, match=re.escape(f"got Tensor: pass float({name})")):
        gemm(A, B, **({"c": zeros(4, 16), name: torch.tensor(2.0)}))


def test_more_tiles_than_a_grid_holds(monkeypatch):
    monkeypatch.setattr(plan, "_arch_of", lambda tensor: Arch.named("sm_80"))
    a, b = (torch.empty(2**30, 1, n, dtype=torch.float16, device="meta") for n in (1, 65))
    with pytest.raises(ShapeError, match=r"2147483648 tiles of 64 x 64; .* split the batch"):
        plan.make_plan(Arguments(a, b, None, None, None, None, 1.0, 0.0, None))


def test_meta_tensors_give_meta_tensors():
    assert gemm(A.to("meta"), B.to("meta")).shape == (4, 16)


def test_cpu_tensors_are_refused():
    with pytest.raises(DeviceError, match=r"compute capability 8\.0 or newer; got cpu: .* torch\.matmul"):
        gemm(A, B)


@pytest.mark.parametrize("name", ["b", "bias", "c", "out"])
def test_mixed_devices_are_refused(name):
    elsewhere = {"b": B, "bias": zeros(16), "c": zeros(4, 16), "out": zeros(4, 16)}[name].to("meta")
    with pytest.raises(DeviceError, match=re.escape(f"a is on cpu and {name} on meta: {name}.to(cpu)")):
        gemm(A, **({"b": B, "beta": float(name == "c")} | {name: elsewhere}))


@pytest.mark.parametrize("capability", [(7, 5), (9, 9)])
def test_other_chips_are_refused(monkeypatch, capability):
    class Properties:
        name, (major, minor), multi_processor_count = "Some GPU", capability, 1

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    with pytest.raises(DeviceError, match=r"Some GPU has compute capability \d\.\d; .*8\.0, .*9\.0"):
        Arch.of(torch.device("cuda", 63))


def test_unknown_arch_name_is_refused():
    with pytest.raises(ConfigError, match=r"'sm_70'; known: sm_80, .*sm_90a"):
        Arch.named("sm_70")


@pytest.mark.parametrize("name", ["a", "b"])
def test_no_unit_stride_is_refused(reference_gemm, name):
    scattered = {"a": zeros(8, 16)[::2, ::2], "b": zeros(16, 32)[::2, ::2]}[name]
    with pytest.raises(LayoutError, match=rf"{name} of shape .* has strides .*: pass {name}\.contiguous\(\)"):
        gemm(**({"a": A, "b": B} | {name: scattered}))


@pytest.mark.parametrize(
    "out, message",
    [
        (zeros(8, 32)[::2, ::2], "out of shape (4, 16) has strides (64, 2); one of its last two must be 1"),
        (zeros(1, 16).expand(4, 16), "out of shape (4, 16) has strides (0, 1): elements share memory"),
        (OVERLAPPING, "out of shape (4, 16) has strides (8, 1): elements share memory"),
    ],
)
def test_layout_of_out(reference_gemm, out, message):
    with pytest.raises(LayoutError, match=re.escape(message)):
        gemm(A, B, out=out)


def test_out_that_overlaps_an_input_is_refused(reference_gemm):
    buffer, square = zeros(1024), zeros(8, 8)
    part, shifted = buffer[:64].view(8, 8), buffer[8:72].view(8, 8)
    for _ in range(2):  # the signature is known the second time, the addresses are not
        with pytest.raises(LayoutError, match=r"out shares memory with a: .*a\.clone\(\)"):
            gemm(part, square, out=part)
        with pytest.raises(LayoutError, match="out shares memory with b"):
            gemm(square, part, out=shifted)
        with pytest.raises(LayoutError, match="out shares memory with bias"):
            gemm(square, square, bias=buffer[64:72], out=shifted)
        with pytest.raises(LayoutError, match="out shares memory with c"):
            gemm(square, square, c=part, beta=1.0, out=shifted)
        with pytest.raises(LayoutError, match="out shares memory with c"):
            gemm(square, square, c=part.mT, beta=1.0, out=part)
    for gapped in (buffer[8:136].view(8, 16)[:, :8], buffer[:256].view(8, 32)[:, 16:24]):
        with pytest.raises(LayoutError, match="out shares memory with a"):
            gemm(gapped, square, out=part)
        with pytest.raises(LayoutError, match="out shares memory with a"):
            gemm(part, square, out=gapped)
    gemm(square, square, c=part, beta=0.0, out=shifted)  # c is not read


@pytest.mark.parametrize("convert", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_that_are_not_dense_are_refused(convert):
    other = convert(torch.eye(8))
    with pytest.raises(LayoutError, match=r"b is torch\..*; gemm takes dense tensors: pass b\.to_dense\(\)"):
        gemm(torch.eye(8), other)
    with pytest.raises(LayoutError, match=r"a is torch\."):
        gemm(other, torch.eye(8).requires_grad_())


@pytest.mark.parametrize("m, n, k", [(2**31, 1, 1), (1, 2**31, 1), (1, 1, 2**31)])
def test_extents_beyond_32_bits_are_refused(reference_gemm, m, n, k):
    a, b = zeros(1, 1).expand(m, k), zeros(1, 1).expand(k, n)
    with pytest.raises(ShapeError, match=r"[MNK] is 2147483648; at most 2147482624 is supported"):
        gemm(a, b, out=zeros(1, 1).expand(m, n))


SWITCHES = {
    "default": lambda: None,
    "allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "fp32_precision": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "forbidden again": lambda: [
        setattr(torch.backends.cuda.matmul, "fp32_precision", precision) for precision in ("tf32", "ieee")
    ],
}


@pytest.fixture
def precision_restored():
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("switch", SWITCHES)
def test_float32_needs_the_tf32_switch(reference_gemm, precision_restored, switch):
    eye, numbers = torch.eye(64), torch.arange(4096.0).view(64, 64)
    gemm(eye.half(), eye.half())
    SWITCHES[switch]()
    if switch in ("default", "forbidden again"):
        with pytest.raises(DtypeError, match=r"float32 as tf32 .*allow_tf32 = True"):
            gemm(eye, numbers)
    else:
        assert torch.equal(gemm(eye, numbers), numbers)
        torch.set_float32_matmul_precision("highest")
        with pytest.raises(DtypeError, match="tf32"):  # the plan is known, the switch is read again
            gemm(eye, numbers)


def test_older_torch_has_one_switch(monkeypatch):
    class Matmul:
        allow_tf32 = False

    monkeypatch.setattr(torch.backends.cuda, "matmul", Matmul)
    with pytest.raises(DtypeError, match="tf32"):
        require_tf32()
    monkeypatch.setattr(Matmul, "allow_tf32", True)
    require_tf32()


def test_out_has_no_gradient(reference_gemm):
    with pytest.raises(NotImplementedError, match=r"out= is not differentiable; .*no_grad"):
        gemm(A.clone().requires_grad_(), B, out=zeros(4, 16))
    with pytest.raises(NotImplementedError, match=r"out= is not differentiable"):
        gemm(A, B, out=zeros(4, 16).requires_grad_())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own forward mode
def test_forward_mode_is_refused(reference_gemm):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(A.float(), torch.ones(4, 8))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            gemm(dual, B.float())
        assert gemm(A, B).shape == (4, 16)


def test_operator_refuses_the_gradient_of_a_fused_gelu(reference_gemm):
    with pytest.raises(NotImplementedError, match=r"no gradient of gelu; cutelab\.kernels\.gemm"):
        torch.ops.cutelab.gemm(A.clone().requires_grad_(), B, None, None, "gelu", 1.0, 0.0, None)


def test_fake_implementation_checks_as_the_real_one():
    mode = torch._subclasses.FakeTensorMode()
    with mode, pytest.raises(ShapeError, match="K is 8 in a and 4 in b"):
        gemm(mode.from_tensor(A), mode.from_tensor(A))


def test_checks_precede_the_plan(monkeypatch):
    monkeypatch.setattr(plan, "compile_kernel", None)
    with pytest.raises(ShapeError):
        gemm(A, A)
