"""An accumulator as the next product's operand: every lane already holds what the tensor core asks of it."""

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.cutlass_dsl import CuTeDSL

from cutelab.layouts import accumulator_as_operand, accumulator_slices, as_numpy, parse_layout
from cutelab.layouts.errors import LayoutError


def mma_sync(warps=1, permutation=None):
    op = warp.MmaF16BF16Op(cutlass.BFloat16, cutlass.Float32, (16, 8, 16))
    return cute.make_tiled_mma(op, (warps, 1, 1), permutation_mnk=permutation)


def wgmma(columns, warpgroups=1):
    k = OperandMajorMode.K
    op = warpgroup.MmaF16BF16Op(
        cutlass.BFloat16, cutlass.Float32, (64, columns, 16), warpgroup.OperandSource.RMEM, k, k
    )
    return cute.make_tiled_mma(op, (warpgroups, 1, 1))


MMAS = {
    "one warp": (mma_sync, (16, 32)),
    "four warps": (lambda: mma_sync(4), (64, 64)),
    "four warps, twice along M": (lambda: mma_sync(4), (128, 48)),
    "two atoms along N": (lambda: mma_sync(2, (32, 16, 16)), (64, 64)),
    "wgmma": (lambda: wgmma(64), (64, 64)),
    "two warpgroups, 96 columns, twice": (lambda: wgmma(96, 2), (128, 192)),
    "wgmma of one k-block": (lambda: wgmma(16), (64, 16)),
}


def elements(partition):
    return [partition[i] for i in range(cute.size(partition))]


def by_register(layout, values):
    """`values`, in the order of the linear index of `layout`, in that of the registers."""
    registers = as_numpy(layout).ravel(order="F")
    assert sorted(registers) == list(range(len(values)))
    return [values[i] for i in np.argsort(registers)]


@pytest.mark.parametrize("name", MMAS)
def test_each_register_holds_the_element_that_a_asks_for(name, monkeypatch):
    monkeypatch.setattr(CuTeDSL._get_dsl().envar, "arch", "sm_90a")  # which the operations of wgmma ask for
    make, tile = MMAS[name]
    mma, coordinates = make(), cute.make_identity_tensor(tile)
    accumulator = cute.make_layout(mma.partition_shape_C(tile))
    operand = accumulator_as_operand(accumulator)
    for thread in (*range(0, mma.size, 13), mma.size - 1):
        share = mma.get_slice(thread)
        as_a, as_c = share.partition_A(coordinates), share.partition_C(coordinates)
        assert [cute.size(operand, mode=[n]) for n in range(3)] == [
            cute.size(as_a, mode=[n]) for n in range(3)
        ]
        assert operand.shape[0] == as_a.shape[0] == (2, 2, 2)
        assert by_register(operand, elements(as_a)) == by_register(accumulator, elements(as_c))


@pytest.mark.parametrize(
    ("accumulator", "operand"),
    [
        ("((2,2),1,4):((1,2),4,4)", "((2,2,2),1,2):((1,2,4),4,8)"),
        ("((2,2),3,4):((1,2),4,12)", "((2,2,2),3,2):((1,2,12),4,24)"),
        ("((2,2),3,(2,2)):((1,2),4,(12,24))", "((2,2,2),3,2):((1,2,12),4,24)"),
        ("((2,2),4,2):((1,2),8,4)", "((2,2,2),4,1):((1,2,4),8,0)"),
        ("((2,2,8),2,3):((1,2,4),32,64)", "((2,2,2),2,(4,3)):((1,2,4),32,(8,64))"),
    ],
)
def test_layouts(accumulator, operand):
    assert accumulator_as_operand(parse_layout(accumulator)) == parse_layout(operand)


def test_inside_a_traced_function():
    seen = []

    @cute.jit
    def traced():
        accumulator = cute.make_rmem_tensor(mma_sync().partition_shape_C((32, 64)), cutlass.Float32)
        seen.append(str(accumulator_as_operand(accumulator.layout)))

    traced()
    assert seen == ["((2,2,2),2,4):((1,2,8),4,16)"]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("((2,2),1,3):((1,2),4,4)", "has 24 columns.*16 in a k-block; 32 columns would do"),
        ("((2,2,1),1,2):((1,2,4),4,4)", "has 8 columns.*16 columns would do"),
        ("(4,1,2):(1,4,4)", "no fragment of C"),
        ("((2,2),4):((1,2),4)", "no fragment of C"),
        ("((2,4),1,2):((1,2),8,8)", "no fragment of C"),
        ("16:1", "no fragment of C"),
    ],
)
def test_refuses(layout, message):
    with pytest.raises(LayoutError, match=message):
        accumulator_as_operand(parse_layout(layout))


# --- Slices


@pytest.mark.parametrize(("columns", "slice_columns"), [(64, 64), (64, 16), (192, 64), (256, 32), (24, 8)])
@pytest.mark.parametrize("rows", [64, 128])
def test_each_slice_is_what_a_narrower_wgmma_leaves(rows, columns, slice_columns, monkeypatch):
    monkeypatch.setattr(CuTeDSL._get_dsl().envar, "arch", "sm_90a")
    mma, narrow = wgmma(columns), wgmma(slice_columns)
    whole, part = cute.make_identity_tensor((rows, columns)), cute.make_identity_tensor((64, slice_columns))
    accumulator = cute.make_layout(mma.partition_shape_C((rows, columns)))
    slices = accumulator_slices(accumulator, slice_columns)
    assert slices.shape[:3] == narrow.partition_shape_C((64, slice_columns))
    assert slices.shape[3:] == (columns // slice_columns, rows // 64)
    registers = as_numpy(slices).reshape(-1, *slices.shape[3:], order="F")
    for thread in (0, 5, 77, 127):
        held = elements(mma.get_slice(thread).partition_C(whole))
        order = np.argsort(as_numpy(accumulator).ravel(order="F"))
        wanted = elements(narrow.get_slice(thread).partition_C(part))
        for across, down in np.ndindex(*slices.shape[3:]):
            got = [held[order[register]] for register in registers[:, across, down]]
            assert got == [(row + 64 * down, column + slice_columns * across) for row, column in wanted]


@pytest.mark.parametrize(
    ("layout", "columns", "message"),
    [
        ("((2,2,8),1,1):((1,2,4),0,0)", 12, "64 columns can't be cut into slices of 12; 8 columns would do"),
        ("((2,2,8),1,1):((1,2,4),0,0)", 24, "slices of 24; 16 columns would do"),
        ("((2,2,8),1,1):((1,2,4),0,0)", 128, "slices of 128; 64 columns would do"),
        ("((2,2,8),1,1):((1,2,4),0,0)", 0, "slices of 0; 8 columns would do"),
        ("((2,2,8),1,1):((1,2,4),0,0)", -8, "slices of -8; 8 columns would do"),
        ("((2,2,12),1,1):((1,2,4),0,0)", 64, "slices of 64; 48 columns would do"),
        ("((2,2,8),1,2):((1,2,4),0,32)", 8, "no fragment of C"),
        ("((2,2),1,4):((1,2),4,4)", 8, "no fragment of C"),
        ("16:1", 8, "no fragment of C"),
    ],
)
def test_slices_that_cannot_be_are_refused(layout, columns, message):
    with pytest.raises(LayoutError, match=message):
        accumulator_slices(parse_layout(layout), columns)
