"""`Linear` does what torch.nn.Linear does, on the CPU in the simulator."""

import pytest
import torch

from cutelab import simulator
from cutelab.kernels import DtypeError, Linear, ShapeError


def layer(bias=True):
    torch.manual_seed(0)
    return torch.nn.Linear(40, 24, bias=bias, dtype=torch.bfloat16)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(40,), (1, 40), (3, 5, 40), (0, 40)])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_results_are_torchs(shape, bias, activation):
    theirs = layer(bias)
    x = torch.randn(shape).bfloat16()
    with simulator.gpu("sm_90a"):
        ours = Linear.of(theirs, activation)(x)
    expected = theirs.double()(x.double())
    expected = expected.relu() if activation else expected
    assert ours.shape == expected.shape and ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), expected, rtol=2**-8, atol=1e-6)


def test_parameters_are_shared_and_state_dicts_go_both_ways():
    theirs = layer()
    ours = Linear.of(theirs, "gelu").eval()
    assert ours.weight is theirs.weight and ours.bias is theirs.bias
    fresh = Linear(40, 24, activation="gelu", dtype=torch.bfloat16)
    fresh.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(fresh.state_dict())
    assert torch.equal(fresh.weight, theirs.weight)
    assert "activation=gelu" in repr(fresh) and "in_features=40" in repr(fresh)
    assert Linear.of(layer(bias=False)).bias is None
    assert not Linear.of(theirs.eval()).training


def test_gradients_are_torchs():
    theirs = layer()
    x = torch.randn(6, 40).bfloat16()
    with simulator.gpu("sm_90a"):
        Linear.of(theirs)(x).float().square().sum().backward()
    ours = theirs.weight.grad.float(), theirs.bias.grad.float()
    exact = theirs.double()
    exact.zero_grad()
    exact(x.double()).square().sum().backward()
    for grad, parameter in zip(ours, (exact.weight, exact.bias), strict=True):
        torch.testing.assert_close(grad.double(), parameter.grad, rtol=2e-2, atol=2e-2)


def test_bad_inputs():
    with simulator.gpu("sm_90a"):
        with pytest.raises(ShapeError, match="K is 39 in a and 40 in b"):
            Linear.of(layer())(torch.randn(2, 39).bfloat16())
        with pytest.raises(DtypeError):
            Linear.of(layer())(torch.randn(2, 40))
