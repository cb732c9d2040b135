"""CPU tensors as the DSL sees them while a GPU is simulated, and the memory that a launch may touch."""

import ctypes
import gc
import struct
import sys
import weakref
from collections.abc import Iterator
from typing import Any

from cutlass import Boolean
from cutlass.cute import runtime
from cutlass.cute.typing import SymInt

from cutelab.simulator.standin import Allocation, LaunchError

# --- Tensors handed to the DSL


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("index", ctypes.c_int32))


class _DLTensor(ctypes.Structure):
    """The beginning of what a "dltensor" capsule holds (DLPack, dlpack.h)."""

    _fields_ = (("data", ctypes.c_void_p), ("device", _Device))


_CPU, _CUDA = 1, 2
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.POINTER(_DLTensor)
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)

_tensors: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def place_in_global_memory(tensor: Any) -> None:
    """Let a CPU tensor that the DSL looks at count as one of the GPU, and remember it.

    The DSL would take its memory for generic address space, and compile other kernels for it.
    """
    device = _capsule_pointer(tensor._dlpack_data, b"dltensor").contents.device
    if device.type == _CPU:
        device.type = _CUDA
    _tensors[id(tensor)] = tensor


class TensorLike:
    """A tensor for a function that was compiled with a fake one: address, dynamic sizes, dynamic strides.

    Raises LaunchError where the tensor isn't what the fake one leaves open.
    """

    def __init__(self, fake: Any, given: Any) -> None:
        tensor = given if isinstance(given, runtime._Tensor) else runtime.from_dlpack(given)
        # The stride of a mode of size 1 says nothing, unless the function asks for it.
        steps = [
            promised if size == 1 and isinstance(promised, int) else found
            for promised, found, size in zip(fake.stride, tensor.stride, tensor.shape, strict=False)
        ]
        pairs = list(zip((*fake.shape, *fake.stride), (*tensor.shape, *steps), strict=False))
        if (
            len(fake.shape) != len(tensor.shape)
            or tensor.element_type.width != fake.element_type.width
            or any(promised != found for promised, found in pairs if isinstance(promised, int))
        ):
            raise LaunchError(
                f"given: {tensor.element_type} of shape {tensor.shape} and strides {tensor.stride}; "
                f"compiled for: {fake}"
            )
        dynamic = [(promised, found) for promised, found in pairs if isinstance(promised, SymInt)]
        form = "@P" + "".join("q" if promised.width == 64 else "i" for promised, _ in dynamic)
        content = struct.pack(form, tensor.data_ptr, *(found for _, found in dynamic))
        self.tensor = tensor  # holds the memory
        self.packed = ctypes.create_string_buffer(content)

    def __c_pointers__(self) -> list[int]:
        return [ctypes.addressof(self.packed)]


# --- The memory of a launch


def allocations(parameters: tuple[bytes, ...]) -> tuple[Allocation, ...]:
    """The tensors that the DSL was given, and storages of other torch tensors that parameters point into."""
    found = [_span(tensor) for tensor in list(_tensors.values())]
    words = {word for data in parameters for (word,) in struct.iter_unpack("@Q", data[: len(data) & ~7])}
    # No address lies below 2¹⁶, but most sizes and strides do. To go over all objects takes tens of ms.
    loose = [word for word in words if word >> 16 and not any(_holds(one, word) for one in found)]
    if loose and "torch" in sys.modules:
        found += [one for one in _torch_storages() if any(_holds(one, word) for word in loose)]
    return _without_overlap(found)


def _span(tensor: Any) -> Allocation:
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride, strict=True))
    # In memory a Boolean, of width 1, is a byte.
    bits = 8 if tensor.element_type is Boolean else tensor.element_type.width
    size = 0 if 0 in tensor.shape else -(-elements * bits // 8)
    return Allocation(tensor.data_ptr, size, f"{tensor.element_type} {tuple(tensor.shape)}", tensor)


def _holds(allocation: Allocation, address: int) -> bool:
    return 0 <= address - allocation.address < allocation.size


def _torch_storages() -> Iterator[Allocation]:
    torch = sys.modules["torch"]
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor):
            continue
        if thing.device.type == "cpu" and thing.layout is torch.strided and not thing.is_nested:
            storage = thing.untyped_storage()
            try:
                address = storage.data_ptr()
            except RuntimeError:  # a fake tensor, as torch.compile makes them: it has no memory
                continue
            yield Allocation(address, storage.nbytes(), f"{thing.dtype} {tuple(thing.shape)}", storage)


def _without_overlap(found: list[Allocation]) -> tuple[Allocation, ...]:
    """By address; those that share bytes as one, named as the largest."""
    separate: list[Allocation] = []
    for one in sorted(found, key=lambda one: (one.address, -one.size)):
        last = separate[-1] if separate else None
        if last is None or one.address >= last.address + last.size:
            separate.append(one)
        else:
            end = max(last.address + last.size, one.address + one.size)
            name = max(last, one, key=lambda one: one.size).name
            separate[-1] = Allocation(last.address, end - last.address, name, (last.owner, one.owner))
    return tuple(separate)
