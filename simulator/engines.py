"""The engines of the async proxy: bulk tensor copies (TMA) and wgmma, each done at once when it is issued.

That they are done later, as far as the program may know, is what `races.Order` keeps track of.
"""

from itertools import product
from typing import Any

import numpy as np

from cutelab.simulator import numbers
from cutelab.simulator.errors import MemoryFault, SimulationError
from cutelab.simulator.memory import GlobalMemory, Region
from cutelab.simulator.tensormap import TensorMap

SWIZZLE_MASKS = {0: 0, 32: 1, 64: 3, 128: 7}
"""How many bits of the number of a 128-byte line are XORed into that of the 16 bytes, by swizzle width."""


OUTSIDE_NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "tf32": 0x7FFFFFFF, "f64": (1 << 63) - 1}
"""What elements outside of a tensor read as that fills with NaN; which NaN it is isn't documented."""


def swizzled(addresses: np.ndarray, width: int) -> np.ndarray:
    return addresses ^ ((addresses >> 7 & SWIZZLE_MASKS[width]) << 4)


def box_elements(tensor: TensorMap, start: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The global address of each element of the box from `start` on, mode 0 fastest, and which exist.

    Of a mode with an element stride, ⌈box / stride⌉ elements are copied; mode 0 has none (CUDA driver API,
    cuTensorMapEncodeTiled).
    """
    if tensor.interleave:
        raise SimulationError("bulk tensor copies of interleaved tensors are not supported")
    addresses = np.full(1, tensor.address, np.int64)
    inside = np.ones(1, bool)
    steps = (1, *tensor.element_strides[1:])
    for first, extent, step, size, stride in zip(
        start, tensor.box, steps, tensor.sizes, tensor.strides, strict=True
    ):
        index = first + np.arange(0, extent, step)
        addresses = (addresses + index[:, None] * stride).ravel()
        inside = (inside & ((index >= 0) & (index < size))[:, None]).ravel()
    return addresses, inside


def shared_bytes(tensor: TensorMap, destination: int, count: int) -> np.ndarray:
    """The shared-memory address of each element of a box, in its order."""
    return swizzled(destination + np.arange(count) * tensor.element_bytes, tensor.swizzle)


def load_box(memory: GlobalMemory, tensor: TensorMap, start: tuple[int, ...]) -> np.ndarray:
    """The elements of a box, as unsigned integers; zeros, or NaNs, where it sticks out."""
    addresses, inside = box_elements(tensor, start)
    fill = OUTSIDE_NAN.get(tensor.element_type.split(".")[0], 0) if tensor.nan_fill else 0
    values = np.full(addresses.shape, fill, f"u{tensor.element_bytes}")
    if inside.any():
        values[inside] = memory.load(addresses[inside], values.dtype, 1)[:, 0]
    return numbers.f32_to_tf32(values.view(np.float32)) if tensor.element_type.startswith("tf32") else values


def put_box(shared: Region, tensor: TensorMap, destination: int, values: np.ndarray) -> np.ndarray:
    """Lays a box out in shared memory; the addresses it covers, in 16 bytes each."""
    if destination % 128:
        raise MemoryFault(f"misaligned: a bulk tensor copy to {destination:#x}, which 128 has to divide")
    addresses = shared_bytes(tensor, destination, values.size)
    shared.store(addresses, values[:, None])
    return swizzled(destination + np.arange(0, values.nbytes, 16), tensor.swizzle)


def store_box(
    memory: GlobalMemory,
    shared: Region,
    tensor: TensorMap,
    source: int,
    start: tuple[int, ...],
    reduction: str,
) -> np.ndarray:
    """Writes a box of shared memory to global memory, or adds it; what sticks out is left out."""
    addresses, inside = box_elements(tensor, start)
    dtype = np.dtype(f"u{tensor.element_bytes}")
    values = shared.load(shared_bytes(tensor, source, addresses.size), dtype, 1)[:, 0]
    if inside.any():
        kept, where = values[inside], addresses[inside]
        if reduction:
            kept = reduced(reduction, tensor.element_type, memory.load(where, dtype, 1)[:, 0], kept)
        memory.store(where, kept[:, None])
    return swizzled(source + np.arange(0, values.nbytes, 16), tensor.swizzle)


def reduced(operation: str, kind: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """What a bulk reduction of elements of type `kind` leaves in memory, in the words that it is given."""
    name = kind.removesuffix(".ftz").replace("tf32", "f32")
    letter = {"b": "u", "u": "u", "s": "i", "f": "f"}[name[0]]
    dtype = np.dtype(np.uint16) if name in ("f16", "bf16") else np.dtype(f"{letter}{int(name[1:]) // 8}")
    elements = [np.ascontiguousarray(x).view(dtype) for x in (old, new)]
    if kind.endswith(".ftz"):
        elements = [numbers.flush(x) for x in elements]
    result = numbers.combined(operation, name, *elements)
    return np.ascontiguousarray(numbers.flush(result) if kind.endswith(".ftz") else result).view(old.dtype)


# --- wgmma


def matrix_addresses(descriptor: int, rows: int, columns: int, transposed: bool, size: int) -> np.ndarray:
    """The address of each element of a wgmma operand of (rows, columns of K), `size` bytes each.

    descriptor: the 64-bit matrix descriptor; transposed: stored contiguous along rows (MN-major). The units
    are core matrices of eight rows of 16 bytes (PTX ISA, "Asynchronous warpgroup level matrix shared memory
    layout").
    """
    start = (descriptor & 0x3FFF) << 4
    leading = (descriptor >> 16 & 0x3FFF) << 4
    stride = (descriptor >> 32 & 0x3FFF) << 4
    width = {0: 0, 1: 128, 2: 64, 3: 32}[descriptor >> 62 & 3]
    row, column = np.arange(rows)[:, None], np.arange(columns)[None, :]
    if not transposed:
        byte = column * size
        if width:
            offset = row // 8 * stride + row % 8 * width + byte
        else:
            offset = row // 8 * stride + row % 8 * 16 + byte // 16 * leading + byte % 16
    else:
        byte = row * size
        if width:
            offset = byte // width * leading + byte % width + column // 8 * stride + column % 8 * width
        else:
            offset = byte // 16 * stride + byte % 16 + column // 8 * leading + column % 8 * 16
    return swizzled(start + offset, width)


def wgmma_fragment(product_: np.ndarray) -> np.ndarray:
    """An accumulator (64, N) as registers (N / 2, 128 threads) (PTX ISA, "wgmma .m64nNk…", matrix D)."""
    columns = product_.shape[1]
    split = product_.reshape(4, 2, 8, columns // 8, 4, 2)  # warp, half, row, column block, pair, element
    return split.transpose(3, 1, 5, 0, 2, 4).reshape(columns // 2, 128)


def multicast(mask: Any, own: int) -> list[int]:
    """The ranks that a multicast writes to."""
    return [own] if mask is None else [rank for rank in range(16) if int(mask) >> rank & 1]


def grid_points(shape: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """All (x, y, z), x fastest."""
    return [(x, y, z) for z, y, x in product(range(shape[2]), range(shape[1]), range(shape[0]))]
