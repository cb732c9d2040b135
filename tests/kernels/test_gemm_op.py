"""All of `gemm` but its kernel, on the CPU: `reference_gemm` (conftest.py) stands in for the compiled kernel.

Operands hold small integers, whose products and sums float16 and float32 represent, so results are compared
for equality.
"""

from itertools import product as combinations

import pytest
import torch
from activations import ACTIVATIONS
from torch.utils._python_dispatch import TorchDispatchMode

from cutelab.kernels import gemm
from cutelab.kernels.dense_gemm import launch


def integers(*shape, dtype=torch.float16, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def transposed(matrix):
    """The same values, column-major."""
    return matrix.mT.contiguous().mT


def padded(matrix, pad):
    """The same values as a view whose rows are followed by `pad` NaNs, behind an offset of `pad` elements."""
    *batch, rows, columns = matrix.shape
    buffer = torch.full((*batch, rows, columns + 2 * pad), torch.nan, dtype=matrix.dtype)
    window = buffer[..., pad : pad + columns]
    return window.copy_(matrix)


def product(a, b):
    return (a.double() @ b.double()).to(a.dtype)


@pytest.mark.parametrize("m, n, k", [*combinations((1, 7, 16), repeat=3), (0, 7, 5), (7, 0, 5), (0, 0, 0)])
@pytest.mark.parametrize("lay_b", [torch.Tensor.contiguous, transposed])
@pytest.mark.parametrize("lay_a", [torch.Tensor.contiguous, transposed])
def test_sizes_and_transposes(reference_gemm, m, n, k, lay_a, lay_b):
    a, b = integers(m, k), integers(k, n, seed=1)
    result = gemm(lay_a(a), lay_b(b))
    assert result.is_contiguous()
    assert torch.equal(result, product(a, b))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (2, 0, 5)])
def test_empty_output_launches_nothing(reference_gemm, shape):
    a, b = integers(*shape[:-1], 8), integers(8, shape[-1])
    assert gemm(a, b).shape == shape
    assert reference_gemm.calls == []


def test_empty_k_leaves_the_epilogue(reference_gemm):
    bias, c = integers(4), integers(3, 4)
    result = gemm(integers(3, 0), integers(0, 4), bias=bias, c=c, beta=2.0, activation="relu")
    assert torch.equal(result, torch.relu(2 * c + bias))


@pytest.mark.parametrize("pad", [1, 2, 4, 8])
@pytest.mark.parametrize("lay_b", [torch.Tensor.contiguous, transposed])
@pytest.mark.parametrize("lay_a", [torch.Tensor.contiguous, transposed])
def test_padded_and_offset_views(reference_gemm, pad, lay_a, lay_b):
    a, b = integers(2, 16, 24), integers(2, 24, 8, seed=1)
    view_a = padded(a, pad) if lay_a is not transposed else padded(a.mT, pad).mT
    view_b = padded(b, pad) if lay_b is not transposed else padded(b.mT, pad).mT
    out = padded(torch.zeros(2, 16, 8, dtype=torch.float16), pad)
    assert torch.equal(gemm(view_a, view_b, out=out), product(a, b))
    config, _ = reference_gemm.calls[-1]
    assert config.a_align == config.b_align == config.out_align == 2 * pad


@pytest.mark.parametrize(
    "shape, strides",
    [((32, 1), (1, 1)), ((32, 1), (5, 9)), ((1, 32), (1, 1)), ((1, 32), (3, 1)), ((1, 1), (7, 9))],
)
def test_size_one_modes_have_any_stride(reference_gemm, shape, strides):
    a = integers(600).as_strided(shape, strides)
    b = integers(shape[1], 8)
    assert torch.equal(gemm(a, b), product(a, b))
    assert torch.equal(gemm(b.mT, a.mT), product(b.mT, a.mT))


def test_size_one_mode_takes_the_better_aligned_layout(reference_gemm):
    a = integers(32, 1)
    assert a.stride() == (1, 1)
    gemm(a, integers(1, 8))
    config, _ = reference_gemm.calls[-1]
    assert (config.a_major, config.a_align) == ("mn", 16)


@pytest.mark.parametrize(
    "batch_a, batch_b",
    [
        ((), (3,)),
        ((3,), ()),
        ((3,), (3,)),
        ((1,), (3,)),
        ((2, 3), (3,)),
        ((2, 3), (2, 1)),
        ((2, 1), (1, 3)),
        ((2, 1, 3), (5, 1)),
        ((2, 5, 3), (2, 1, 3)),
        ((2, 1, 3, 1), (1, 2, 1, 2)),
        ((0, 3), (1,)),
    ],
)
@pytest.mark.parametrize("lay", [torch.Tensor.contiguous, transposed])
def test_batches_broadcast(reference_gemm, batch_a, batch_b, lay):
    a, b = lay(integers(*batch_a, 4, 8)), lay(integers(*batch_b, 8, 16, seed=1))
    assert torch.equal(gemm(a, b), product(a, b))
    c = integers(3, 1, 16) if batch_a[-1:] == (3,) else integers(16)
    assert torch.equal(gemm(a, b, c=c, beta=1.0), product(a, b) + c)


@pytest.mark.parametrize(
    "a, b",
    [
        (integers(2, 3, 4, 8).transpose(0, 1), integers(3, 2, 8, 4)),
        (integers(4, 8).expand(2, 3, 4, 8), integers(8, 4)),
        (integers(1, 8).expand(4, 8), integers(8, 1).expand(8, 4)),
        (integers(5, 2, 4, 8)[::2], integers(2, 8, 4)),
        (integers(4, 2, 3, 8).permute(1, 2, 0, 3), integers(2, 3, 8, 4)),
    ],
)
def test_strided_batches(reference_gemm, a, b):
    assert torch.equal(gemm(a, b), product(a, b))


@pytest.mark.parametrize(
    "a_shape, b_shape, sizes",
    [
        ((6, 1, 8), (8, 16), (6, 16, 8, 1, 1)),  # decoding: the batch is M
        ((6, 5, 8), (8, 16), (30, 16, 8, 1, 1)),
        ((2, 6, 5, 8), (1, 8, 16), (60, 16, 8, 1, 1)),
        ((2, 6, 5, 8), (2, 1, 8, 16), (30, 16, 8, 1, 2)),
        ((6, 5, 8), (6, 8, 16), (5, 16, 8, 1, 6)),
        ((5, 8), (6, 8, 16), (5, 16, 8, 1, 6)),
    ],
)
def test_batch_that_b_lacks_becomes_rows(reference_gemm, a_shape, b_shape, sizes):
    a, b = integers(*a_shape), integers(*b_shape)
    bias = integers(16)
    assert torch.equal(gemm(a, b, bias=bias), product(a, b) + bias)
    assert reference_gemm.calls[-1][1] == sizes


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("ab_dtype", [torch.float16, torch.bfloat16])
def test_epilogue(reference_gemm, activation, ab_dtype, out_dtype):
    a, b = integers(7, 8, dtype=ab_dtype), integers(8, 16, dtype=ab_dtype)
    bias, c = integers(16, dtype=out_dtype or ab_dtype), integers(7, 16, dtype=out_dtype or ab_dtype)
    options = {
        "bias": bias,
        "c": c,
        "alpha": 0.5,
        "beta": -2,
        "activation": activation,
        "out_dtype": out_dtype,
    }
    result = gemm(a, b, **options)
    expected = ACTIVATIONS[activation](0.5 * (a.double() @ b.double()) - 2 * c.double() + bias.double())
    assert torch.equal(result, expected.to(out_dtype or ab_dtype))


@pytest.mark.parametrize("shape", [(), (1,), (16,), (7, 1), (1, 16), (7, 16), (3, 1, 1), (3, 7, 16)])
def test_c_broadcasts(reference_gemm, shape):
    a, b, c = integers(3, 7, 8), integers(8, 16), integers(*shape)
    assert torch.equal(gemm(a, b, c=c, beta=2.0), product(a, b) + 2 * c)


def test_c_of_any_strides(reference_gemm):
    a, b, c = integers(7, 8), integers(8, 16), integers(7, 16)
    for view in (transposed(c), padded(c, 3), padded(c, 8), padded(c.mT, 1).mT):
        assert torch.equal(gemm(a, b, c=view, beta=1.0), product(a, b) + c)


def test_beta_zero_does_not_read_c(reference_gemm):
    a, b = integers(7, 8), integers(8, 16)
    c = torch.full((7, 16), torch.nan, dtype=torch.float16)
    assert torch.equal(gemm(a, b, c=c, beta=0.0), product(a, b))
    assert reference_gemm.calls[-1][0].c_align == 0


def test_bias_of_any_stride(reference_gemm):
    a, b, bias = integers(7, 8), integers(8, 16), integers(16)
    strided = torch.stack([bias, torch.full_like(bias, torch.nan)], dim=1)[:, 0]
    assert torch.equal(gemm(a, b, bias=strided), product(a, b) + bias)
    assert torch.equal(gemm(a, b, bias=bias[:1].expand(16)), product(a, b) + bias[0])


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize(
    "lay", [torch.Tensor.contiguous, transposed, lambda x: padded(x, 1), lambda x: padded(x.mT, 4).mT]
)
def test_out_of_any_layout(reference_gemm, batch, lay):
    a, b, bias, c = integers(*batch, 7, 8), integers(8, 16), integers(16), integers(*batch, 7, 16)
    out = lay(torch.full((*batch, 7, 16), torch.nan, dtype=torch.float16))
    version = out._version
    result = gemm(a, b, bias=bias, c=c, beta=1.0, out=out)
    assert result is out
    assert out._version > version
    assert torch.equal(out, product(a, b) + bias + c)


def test_scattered_out(reference_gemm):
    """Batch strides that two batch modes cannot describe, in the output."""
    a, b = integers(2, 3, 4, 4, 8), integers(2, 3, 4, 8, 8)
    out = torch.zeros(5, 4, 3, 4, 8, dtype=torch.float16).permute(1, 2, 0, 3, 4)[:2, :, :4]
    assert torch.equal(gemm(a, b, out=out), product(a, b))


def test_out_decides_the_dtype(reference_gemm):
    a, b = integers(7, 8), integers(8, 16)
    out = torch.empty(7, 16, dtype=torch.float32)
    assert torch.equal(gemm(a, b, out=out), product(a, b).float())


def test_out_may_be_c(reference_gemm):
    a, b, c = integers(7, 8), integers(8, 16), integers(7, 16)
    expected = product(a, b) + 3 * c
    assert torch.equal(gemm(a, b, c=c, beta=3.0, out=c), expected)


def test_out_may_interleave_with_an_input(reference_gemm):
    buffer = integers(8, 16)
    a, out = buffer[:, :8], buffer[:, 8:]
    expected = product(a, a)
    assert torch.equal(gemm(a, a, out=out), expected)


def test_lazy_negation(reference_gemm):
    a = torch._neg_view(integers(7, 8))
    assert a.is_neg()
    assert torch.equal(gemm(a, integers(8, 16)), product(a.resolve_neg(), integers(8, 16)))


def test_tf32_follows_the_switch(reference_gemm, monkeypatch):
    monkeypatch.setattr(launch, "require_tf32", lambda: switched.append(True))
    monkeypatch.setattr("cutelab.kernels.dense_gemm.plan.require_tf32", lambda: None)
    switched = []
    a, b = integers(7, 8, dtype=torch.float32), integers(8, 16, dtype=torch.float32)
    for _ in range(3):
        assert torch.equal(gemm(a, b), product(a, b))
    gemm(a.half(), b.half())
    assert switched == [True] * 3


def test_signature_is_planned_once(reference_gemm, monkeypatch):
    planned = []
    monkeypatch.setattr(
        launch, "make_plan", lambda args, make=launch.make_plan: planned.append(1) or make(args)
    )
    for seed in range(3):
        gemm(integers(8, 8, seed=seed), integers(8, 8, seed=seed), alpha=seed)
    assert len(planned) == 1
    for seed in range(3):
        gemm(integers(8, 8), integers(8, 8), c=integers(8, 8), beta=seed)
    assert len(planned) == 3  # beta = 0 is another kernel than beta = 1 and 2


def test_plans_do_not_grow_without_bound(reference_gemm, monkeypatch):
    monkeypatch.setattr(launch, "_MAX_PLANS", 8)
    for m in range(1, 30):
        a, b = integers(m, 8), integers(8, 8)
        assert torch.equal(gemm(a, b), product(a, b))
        assert len(launch._plans) <= 8


class Recorder(TorchDispatchMode):
    """Notes which operators the dispatcher sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_see_the_operator(reference_gemm):
    with Recorder() as recorder:
        gemm(integers(8, 8), integers(8, 8))
        gemm(integers(8, 8), integers(8, 8), out=torch.empty(8, 8, dtype=torch.float16))
    assert {"cutelab.gemm.default", "cutelab.gemm_out.default"} <= set(recorder.seen)


def test_vmap(reference_gemm):
    a, b = integers(3, 4, 8), integers(3, 8, 4)
    assert torch.equal(torch.vmap(gemm)(a, b), product(a, b))


def test_parameters_without_gradient_bypass_the_dispatcher(reference_gemm, monkeypatch):
    weight = torch.nn.Parameter(integers(8, 16))
    monkeypatch.setattr("cutelab.kernels.dense_gemm.op._dispatch", None)
    with torch.no_grad():
        assert torch.equal(gemm(integers(7, 8), weight), product(integers(7, 8), weight.data))


GRADIENT_CASES = [
    ((4, 8), (8, 6), (6,), (4, 6)),
    ((3, 4, 8), (8, 6), (6,), (6,)),
    ((3, 4, 8), (1, 8, 6), None, (3, 1, 6)),
    ((4, 8), (3, 8, 6), (6,), None),
    ((2, 1, 4, 8), (3, 8, 6), (6,), (4, 1)),
    ((0, 8), (8, 6), (6,), None),
    ((4, 0), (0, 6), (6,), None),
    ((3, 0, 8), (8, 6), (6,), None),
    ((4, 8), (0, 8, 6), (6,), None),
]


@pytest.fixture
def tf32_allowed():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def leaves(*shapes):
    return [
        None if s is None else integers(*s, dtype=torch.float32, seed=i).requires_grad_()
        for i, s in enumerate(shapes)
    ]


def expected_gemm(a, b, bias, c, activation):
    value = 0.5 * (a @ b)
    value = value if c is None else value + 2 * c
    value = value if bias is None else value + bias
    return ACTIVATIONS[activation](value)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shapes", GRADIENT_CASES)
def test_gradients(reference_gemm, tf32_allowed, shapes, activation):
    a, b, bias, c = leaves(*shapes)
    inputs = [x for x in (a, b, bias, c) if x is not None]
    result = gemm(a, b, bias=bias, c=c, alpha=0.5, beta=0.0 if c is None else 2.0, activation=activation)
    expected = expected_gemm(a, b, bias, c, activation)
    torch.testing.assert_close(result, expected)
    grad = integers(*result.shape, dtype=torch.float32, seed=9)
    for ours, torchs in zip(
        torch.autograd.grad(result, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_second_gradients(reference_gemm, tf32_allowed, activation):
    a, b, bias, c = leaves((3, 4, 8), (8, 6), (6,), (6,))

    def penalty(result):
        grads = torch.autograd.grad(result.square().sum(), (a, b, bias, c), create_graph=True)
        return sum(grad.square().sum() for grad in grads)

    ours = penalty(gemm(a, b, bias=bias, c=c, alpha=0.5, beta=2.0, activation=activation))
    torchs = penalty(expected_gemm(a, b, bias, c, activation))
    for grad, expected in zip(
        torch.autograd.grad(ours, (a, b)), torch.autograd.grad(torchs, (a, b)), strict=True
    ):
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-2)


def test_expanded_gradient(reference_gemm, tf32_allowed):
    """`sum` sends back a gradient whose strides are all 0."""
    a, b = leaves((4, 8), (8, 6))
    gemm(a, b).sum().backward()
    torch.testing.assert_close(a.grad, b.detach().sum(1).expand(4, 8))


def test_only_the_needed_gradients_are_computed(reference_gemm):
    a, b = integers(4, 8).requires_grad_(), integers(8, 6)
    result = gemm(a, b)
    calls = len(reference_gemm.calls)
    result.backward(torch.ones_like(result))
    assert len(reference_gemm.calls) == calls + 1


OPCHECK_CASES = [
    ((7, 8), (8, 16), None, None, None),
    ((3, 7, 8), (8, 16), (16,), (7, 1), "relu"),
    ((2, 1, 7, 8), (3, 8, 16), (16,), (2, 3, 7, 16), None),
    ((7, 0), (0, 16), (16,), None, None),
    ((0, 8), (8, 16), None, None, None),
]


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("a, b, bias, c, activation", OPCHECK_CASES)
def test_opcheck(reference_gemm, a, b, bias, c, activation, requires_grad):
    a, b, bias, c = [
        None if s is None else integers(*s).requires_grad_(requires_grad) for s in (a, b, bias, c)
    ]
    beta = 0.0 if c is None else 1.5
    torch.library.opcheck(torch.ops.cutelab.gemm, (a, b, bias, c, activation, 0.5, beta, None))


@pytest.mark.parametrize("lay", [torch.Tensor.contiguous, transposed])
def test_opcheck_out(reference_gemm, lay):
    out = lay(torch.zeros(7, 16, dtype=torch.float16))
    arguments = (integers(7, 8), integers(8, 16), integers(16), None, "silu", 1.0, 0.0, None, out)
    torch.library.opcheck(torch.ops.cutelab.gemm_out, arguments)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_compile_fullgraph(reference_gemm, tf32_allowed, activation, dynamic):
    def model(x, weight, bias):
        hidden = gemm(x, weight, bias=bias, activation=activation)
        return gemm(hidden, weight.mT, alpha=0.5).square().mean()

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (4, 6):
        inputs = leaves((3, rows, 8), (8, 6), (6,))
        results = [function(*inputs) for function in (model, compiled)]
        assert torch.equal(*results)
        eager, traced = [torch.autograd.grad(result, inputs) for result in results]
        for ours, expected in zip(traced, eager, strict=True):
            torch.testing.assert_close(ours, expected)


def test_compile_with_out(reference_gemm):
    def model(a, b, out):
        gemm(a, b, out=out)
        return out + 1

    out = torch.zeros(7, 16, dtype=torch.float16)
    a, b = integers(7, 8), integers(8, 16)
    result = torch.compile(model, fullgraph=True, backend="aot_eager")(a, b, out)
    assert torch.equal(out, product(a, b))
    assert torch.equal(result, out + 1)


@pytest.mark.parametrize("shape", [(7, 8), (1, 8), (3, 1, 8), (0, 8), (2, 3, 4, 8)])
def test_fake_strides_are_the_real_ones(reference_gemm, shape):
    a, b = integers(*shape), transposed(integers(8, 16))
    real = gemm(a, b)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = gemm(mode.from_tensor(a), mode.from_tensor(b))
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
