"""Tensor maps as the DSL packs them, one property varied at a time, against what was asked for."""

import dataclasses

import cutlass
import cutlass.cute as cute
import pytest
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_ptr

from cutelab import simulator
from cutelab.simulator.tensormap import TensorMap, decode, encode

ADDRESS = 0x7F12_3456_7880
F16 = cutlass.Float16
SWIZZLES = {32: (1, 4, 3), 64: (2, 4, 3), 128: (3, 4, 3)}


class Copy:
    """Copies boxes of a tensor that is given by its address; the kernel only prefetches the tensor map."""

    def __init__(self, sizes, strides, box, swizzle=0, rounded=False):
        self.sizes, self.strides, self.box, self.swizzle, self.rounded = sizes, strides, box, swizzle, rounded

    @cute.kernel
    def kernel(self, atom: cute.CopyAtom):
        cpasync.prefetch_descriptor(atom)

    @cute.jit
    def launch(self, address: cute.Pointer):
        tensor = cute.make_tensor(address, cute.make_layout(self.sizes, stride=self.strides))
        layout = cute.make_layout(self.box)
        if cutlass.const_expr(self.swizzle):
            layout = cute.make_composed_layout(cute.make_swizzle(*SWIZZLES[self.swizzle]), 0, layout)
        internal = cutlass.TFloat32 if cutlass.const_expr(self.rounded) else None
        atom, _ = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), tensor, layout, self.box, internal_type=internal
        )
        self.kernel(atom).launch(grid=(1, 1, 1), block=(32, 1, 1))


def packed(sizes, strides, box, dtype=F16, address=ADDRESS, **options):
    """The tensor map that the DSL packs; strides in elements."""
    launches = []
    with simulator.gpu("sm_90a", execute=launches.append):
        pointer = make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)
        Copy(sizes, strides, box, **options).launch(pointer)
    (parameter,) = launches[0].parameters
    assert len(parameter) == 128
    return parameter


def expected(sizes, strides, box, element_type="f16", element_bytes=2, address=ADDRESS, **others):
    in_bytes = tuple(stride * element_bytes for stride in strides)
    return TensorMap(address, element_type, element_bytes, sizes, in_bytes, box, (1,) * len(sizes), **others)


# No mode continues another (the DSL would make them one), and no box has a 1 between others (it goes last).
SHAPES = [
    ((64,), (1,), (16,)),
    ((64, 32), (1, 72), (16, 8)),
    ((65, 32), (1, 72), (16, 8)),
    ((64, 33), (1, 72), (16, 8)),
    ((64, 32), (1, 80), (16, 8)),
    ((64, 32), (1, 72), (32, 8)),
    ((64, 32), (1, 72), (16, 4)),
    ((256, 256), (1, 264), (64, 256)),
    ((64, 32, 5), (1, 72, 4096), (16, 8, 2)),
    ((64, 32, 5), (1, 72, 8192), (16, 8, 3)),
    ((64, 5, 32), (1, 8192, 72), (16, 2, 8)),
    ((64, 32, 5, 7), (1, 72, 4096, 65536), (16, 8, 2, 3)),
    ((64, 32, 5, 7), (1, 72, 4096, 65536), (64, 1, 1, 1)),
    ((64, 32, 5, 7, 9), (1, 72, 4096, 65536, 1 << 20), (16, 8, 2, 3, 4)),
    ((8, 3, 5, 7, 2), (1, 16, 64, 512, 8192), (8, 2, 5, 2, 2)),
    # Strides of more than 36 bits: their upper bits lie elsewhere.
    ((64, 2), (1, 1 << 36), (16, 1)),
    ((64, 2, 3), (1, 3 << 35, 5 << 36), (16, 1, 1)),
    ((64, 2, 2, 2, 2), (1, 1 << 35, 1 << 36, 1 << 37, 1 << 38), (16, 1, 1, 1, 1)),
    ((64, 1 << 31), (1, 64 + 8), (16, 8)),
]


@pytest.mark.parametrize("sizes, strides, box", SHAPES)
def test_shapes_strides_and_boxes(sizes, strides, box):
    assert decode(packed(sizes, strides, box)) == expected(sizes, strides, box)


@pytest.mark.parametrize("address", [0x10, 0xFFFF_FFF0, 0x1_0000_0000, 0x7FFF_FFFF_FFF0])
def test_addresses(address):
    assert decode(packed(*SHAPES[1], address=address)) == expected(*SHAPES[1], address=address)


TYPES = {
    "Int8": ("u8", 1),
    "Uint8": ("u8", 1),
    "Float8E4M3FN": ("u8", 1),
    "Float8E5M2": ("u8", 1),
    "Int16": ("u16", 2),
    "Uint16": ("u16", 2),
    "Int32": ("u32", 4),
    "Uint32": ("u32", 4),
    "Int64": ("u64", 8),
    "Uint64": ("u64", 8),
    "Float16": ("f16", 2),
    "BFloat16": ("bf16", 2),
    "Float32": ("f32", 4),
    "Float64": ("f64", 8),
}


@pytest.mark.parametrize("dtype", TYPES)
def test_element_types(dtype):
    shape = (64, 32), (1, 80), (16, 8)
    assert decode(packed(*shape, dtype=getattr(cutlass, dtype))) == expected(*shape, *TYPES[dtype])


def test_float32_rounded_to_tf32():
    shape = (64, 32), (1, 80), (16, 8)
    assert decode(packed(*shape, dtype=cutlass.Float32, rounded=True)) == expected(*shape, "tf32", 4)


@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_swizzles(swizzle):
    shape = (64, 32), (1, 80), (swizzle // 2, 8)
    assert decode(packed(*shape, swizzle=swizzle)) == expected(*shape, swizzle=swizzle)


def test_bytes_equal_those_of_the_dsl():
    """All 64 that mean something, but for the flag of tensors of 128 KiB and more."""
    for sizes, strides, box in SHAPES[1], SHAPES[8], SHAPES[16]:
        from_dsl = packed(sizes, strides, box, swizzle=32)
        ours = encode(expected(sizes, strides, box, swizzle=32))
        differing = int.from_bytes(from_dsl[:64], "little") ^ int.from_bytes(ours[:64], "little")
        assert differing in (0, 1 << 2 * 32 + 21)


@pytest.mark.parametrize(
    "change",
    [
        {"element_strides": (1, 2, 3, 4, 8)},
        {"element_strides": (8, 1, 1, 5, 1)},
        {"interleave": 16},
        {"interleave": 32, "swizzle": 32},
        {"nan_fill": True},
        {"element_type": "f32.ftz", "element_bytes": 4, "strides": (4, 16, 1 << 39, (1 << 40) - 16, 32)},
        {"element_type": "tf32.ftz", "element_bytes": 4, "strides": (4, 16, 32, 48, 64)},
        {"element_type": "s64", "element_bytes": 8, "strides": (8, 16, 32, 48, 64)},
        {"sizes": (1, 1 << 32, 1, 7, 1 << 31), "box": (256, 1, 255, 2, 256)},
    ],
)
def test_what_the_dsl_cannot_ask_for_survives_a_round_trip(change):
    sizes = (64, 32, 5, 7, 9)
    base = expected(sizes, (1, 72, 4096, 65536, 1 << 20), (16, 8, 2, 3, 4))
    tensor_map = dataclasses.replace(base, **change)
    assert decode(encode(tensor_map)) == tensor_map
    assert decode(encode(base)) != tensor_map


@pytest.mark.parametrize(
    "bit, field, value",
    [
        # What ptxas (sm_90a) makes of tensormap.replace: the word and bit that each field's value is put at.
        (2 * 32 + 12, "interleave", 32),
        (2 * 32 + 15, "nan_fill", True),
        (13 * 32 + 9, "element_strides", (1, 1, 1, 2, 1)),
        (13 * 32 + 12, "element_strides", (1, 1, 1, 1, 2)),
    ],
)
def test_bits_as_ptxas_places_them(bit, field, value):
    data = bytearray(encode(expected((64, 32, 5, 7, 9), (1, 72, 4096, 65536, 1 << 20), (16, 8, 2, 3, 4))))
    data[bit // 8] |= 1 << bit % 8
    assert getattr(decode(bytes(data)), field) == value


@pytest.mark.parametrize("data", [bytes(128), b"\xff" * 128])
def test_other_bytes_are_refused(data):
    with pytest.raises(simulator.SimulationError, match="no tensor map"):
        decode(data)


def test_the_swizzles_of_newer_gpus_are_refused():
    data = bytearray(packed(*SHAPES[1]))
    data[10] |= 1 << 3
    with pytest.raises(simulator.SimulationError, match="sm_100"):
        decode(bytes(data))
