"""Tensor maps: the 128 bytes that tell the TMA unit where a tensor lies and how to copy boxes of it.

Host code packs them itself, in the hardware's form, which is not documented. It was settled in two ways that
agree: by what the DSL packs while one property varies, and by the instructions that ptxas makes of
`tensormap.replace` for each field. By 32-bit words, with all sizes and element strides less one:

    0–1   address
    2     bits 4–6 rank − 1, 7–10 element type, 11–12 interleave, 13–14 swizzle, 15 fill, 16 round to tf32,
          17–18 L2 promotion, 19–20 atom of the swizzle (sm_100); bit 1 is set, 21 too if the tensor is large
    3–6   strides of modes 1 to 4 in units of 16 bytes, their low 32 bits
    7     bits 32–35 of those strides, 4 each
    8–12  sizes
    13    element strides, 3 bits each; bits 24–31 size of the box in mode 0
    14    sizes of the box in modes 1 to 4, 8 bits each

The rest is unused: the DSL leaves there what was on the stack.
"""

import struct
from dataclasses import dataclass

from cutelab.simulator.errors import SimulationError

# By code (PTX ISA, "tensormap.replace", .elemtype): name and bytes.
_ELEMENT_TYPES = (
    *(("u8", 1), ("u16", 2), ("u32", 4), ("s32", 4), ("u64", 8), ("s64", 8)),
    *(("f16", 2), ("f32", 4), ("f32.ftz", 4), ("f64", 8), ("bf16", 2)),
)
_TF32 = {"f32": "tf32", "f32.ftz": "tf32.ftz"}
_SWIZZLES = (0, 32, 64, 128)
_INTERLEAVES = (0, 16, 32)

_ALWAYS = 1 << 1
_ROUND_TO_TF32 = 1 << 16
_PROMOTE_TO_128_BYTES = 1 << 18
_NAN_FILL = 1 << 15
_ATOMICITY = 0b11 << 19
_WORDS = struct.Struct("<16I")


@dataclass(frozen=True)
class TensorMap:
    """What cuTensorMapEncodeTiled is told. Mode 0 is the contiguous one.

    address: of the first element.
    element_type: as PTX spells it: "bf16", "u8" (8-bit floats too), "tf32" for float32 that is rounded to it.
    element_bytes: bytes of an element.
    sizes, strides: elements, and bytes from one to the next, of each mode; strides[0] is element_bytes.
    box: elements, in each mode, of the box that one copy covers.
    element_strides: every how many elements of a mode one is copied.
    swizzle: bytes of the span within which shared memory is swizzled: 0, 32, 64 or 128.
    interleave: 0, or the bytes of a slice of the interleaved layout: 16 or 32.
    nan_fill: whether elements outside of the tensor read as NaN, not 0.
    """

    address: int
    element_type: str
    element_bytes: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: int = 0
    interleave: int = 0
    nan_fill: bool = False

    @property
    def rank(self) -> int:
        return len(self.sizes)


def decode(data: bytes) -> TensorMap:
    """The tensor map in these 128 bytes. Raises SimulationError if they are none, or one for newer GPUs."""
    words = _WORDS.unpack_from(data)
    flags = words[2]
    rank, code, interleave = (flags >> 4 & 7) + 1, flags >> 7 & 15, flags >> 11 & 3
    if flags & 15 != _ALWAYS or rank > 5 or code >= len(_ELEMENT_TYPES) or interleave >= len(_INTERLEAVES):
        raise SimulationError(f"no tensor map of tiles that sm_90 knows: {data[:64].hex()}")
    if flags & _ATOMICITY:
        raise SimulationError("a tensor map whose swizzle has another atom than 16 bytes, which needs sm_100")
    name, size = _ELEMENT_TYPES[code]
    strides = (words[3 + i] << 4 | (words[7] >> 4 * i & 15) << 36 for i in range(rank - 1))
    box = (words[13] >> 24, *struct.pack("<I", words[14]))
    return TensorMap(
        address=words[0] | words[1] << 32,
        element_type=_TF32[name] if flags & _ROUND_TO_TF32 else name,
        element_bytes=size,
        sizes=tuple(words[8 + i] + 1 for i in range(rank)),
        strides=(size, *strides),
        box=tuple(box[i] + 1 for i in range(rank)),
        element_strides=tuple((words[13] >> 3 * i & 7) + 1 for i in range(rank)),
        swizzle=_SWIZZLES[flags >> 13 & 3],
        interleave=_INTERLEAVES[interleave],
        nan_fill=bool(flags & _NAN_FILL),
    )


def encode(tensor_map: TensorMap) -> bytes:
    """The 128 bytes that `decode` takes: for programs that change a tensor map while they run."""
    words = [0] * 16
    words[0], words[1] = tensor_map.address & 0xFFFFFFFF, tensor_map.address >> 32
    words[2] = _ALWAYS | _PROMOTE_TO_128_BYTES | (tensor_map.rank - 1) << 4
    words[2] |= _INTERLEAVES.index(tensor_map.interleave) << 11 | _SWIZZLES.index(tensor_map.swizzle) << 13
    words[2] |= _NAN_FILL if tensor_map.nan_fill else 0
    rounded = {tf32: f32 for f32, tf32 in _TF32.items()}
    name = rounded.get(tensor_map.element_type, tensor_map.element_type)
    words[2] |= _ELEMENT_TYPES.index((name, tensor_map.element_bytes)) << 7
    words[2] |= _ROUND_TO_TF32 if tensor_map.element_type in rounded else 0
    for i, stride in enumerate(tensor_map.strides[1:]):
        words[3 + i] = stride >> 4 & 0xFFFFFFFF
        words[7] |= (stride >> 36) << 4 * i
    for i, (size, step) in enumerate(zip(tensor_map.sizes, tensor_map.element_strides, strict=True)):
        words[8 + i] = size - 1
        words[13] |= (step - 1) << 3 * i
    first, *others = (size - 1 for size in tensor_map.box)
    words[13] |= first << 24
    words[14] = sum(size << 8 * i for i, size in enumerate(others))
    return _WORDS.pack(*words) + bytes(64)


FIELDS: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "global_address": ((0, 0, 32, 0), (1, 0, 32, 32)),
    "rank": ((2, 4, 3, 0),),
    "elemtype": ((2, 7, 4, 0),),
    "interleave_layout": ((2, 11, 2, 0),),
    "swizzle_mode": ((2, 13, 2, 0),),
    "fill_mode": ((2, 15, 1, 0),),
    "global_stride": ((3, 0, 32, 4), (7, 0, 4, 36)),
    "global_dim": ((8, 0, 32, 0),),
    "element_stride": ((13, 0, 3, 0),),
    "box_dim": ((13, 24, 8, 0),),
}
"""tensormap.replace, by field: (word, first bit in it, bits, first bit of the new value) of each part.

For mode 0; `replaced_parts` knows where those of others lie. Sizes and element strides are stored less one.
"""
_LESS_ONE = ("global_dim", "element_stride", "box_dim")


def replaced_parts(field: str, mode: int) -> tuple[tuple[int, int, int, int], ...]:
    """FIELDS for a mode; for global_stride, mode 0 is the second mode of the tensor (PTX ISA)."""
    if field == "element_stride":
        return ((13, 3 * mode, 3, 0),)
    if field == "box_dim" and mode:
        return ((14, 8 * (mode - 1), 8, 0),)
    if field == "global_stride":
        return ((3 + mode, 0, 32, 4), (7, 4 * mode, 4, 36))
    return ((8 + mode, 0, 32, 0),) if field == "global_dim" else FIELDS[field]


def replaced(word: int, part: tuple[int, int, int, int], field: str, value: int) -> int:
    """A word of a tensor map with a part of a field's new value in it."""
    _, first, bits, start = part
    mask = (1 << bits) - 1
    value = (value - (field in _LESS_ONE)) >> start & mask
    return word & ~(mask << first) | value << first
