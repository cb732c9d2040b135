"""ldmatrix delivers to every thread the elements that mma.sync expects of it."""

from itertools import product

import cutlass
import numpy as np
import pytest

from cutelab.copies import CopyError, operand_atom, operand_copies
from cutelab.layouts import tv_map
from cutelab.mmas import tiled_mma

DTYPES = (cutlass.Float16, cutlass.BFloat16, cutlass.TFloat32)


def elements(coordinates):
    """For each thread the set of elements it holds, as sorted rows."""
    flat = coordinates[..., 0] * 1000 + coordinates[..., 1]
    return np.sort(flat, axis=1)


@pytest.mark.parametrize("warps", [(1, 1), (2, 2), (2, 4)])
@pytest.mark.parametrize(("dtype", "majors"), list(product(DTYPES, product(("k", "mn"), repeat=2))))
def test_registers_hold_what_the_mma_reads(dtype, majors, warps):
    mma = tiled_mma(dtype, warps)
    for copy, operand in zip(operand_copies(mma, dtype, *majors), "AB", strict=True):
        assert np.array_equal(elements(tv_map(copy, "dst")), elements(tv_map(mma, operand)))


@pytest.mark.parametrize("matrices", [1, 2, 4])
@pytest.mark.parametrize("major", ["k", "mn"])
def test_ldmatrix_forms(matrices, major):
    atom = operand_atom(cutlass.BFloat16, major, matrices)
    assert (atom.op.num_matrices, atom.op.transpose) == (matrices, major == "mn")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((cutlass.BFloat16, "k", 3), "1, 2 or 4 matrices, got 3"),
        ((cutlass.BFloat16, "n"), "along 'k' or 'mn', got 'n'"),
        ((cutlass.Float8E4M3FN, "mn"), "16 or 32 bits, got .* of 8"),
    ],
)
def test_other_forms_are_refused(arguments, message):
    with pytest.raises(CopyError, match=message):
        operand_atom(*arguments)
