"""The CUDA runtime that compiled host code calls while it is simulated.

The DSL compiles a `@cute.jit` function to machine code for this processor that calls some ten functions of
the CUDA runtime by name. Here they are Python functions: `register` gives their addresses to the DSL's
execution engine. They answer for the simulated GPU, and hand each kernel launch to `execute` as a `Launch`.

No exception can pass through machine code. One raised here is kept, the host code gets an error code (from
every later call too, until it returns), and `host_call` raises it where the host code was called.
"""

import ctypes
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass, field
from functools import wraps
from math import prod
from types import MappingProxyType
from typing import Any

from cuda.bindings.driver import CUfunction_attribute
from cuda.bindings.runtime import cudaError_t, cudaFuncAttribute, cudaLaunchAttributeID

from cutelab.simulator.errors import SimulationError
from cutelab.simulator.gpus import Gpu

_FAILED = int(cudaError_t.cudaErrorUnknown)
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_THREADS = 1024
_PORTABLE_CLUSTER = 8


class LaunchError(SimulationError):
    """A launch or another call of the CUDA runtime that a GPU would refuse, or that isn't known here."""


@dataclass(frozen=True)
class Allocation:
    """Bytes of host memory that stand for global memory; `name` is what reports call them.

    owner: what keeps them from being freed as long as this is there.
    """

    address: int
    size: int
    name: str
    owner: object = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Launch:
    """One kernel launch, as the program made it.

    kernel: the name of its ``.entry`` in ``ptx``, which is the whole module, with ``.loc`` lines.
    grid, block, cluster: (x, y, z); a kernel without clusters has clusters of (1, 1, 1).
    dynamic_shared_bytes: shared memory added to what the kernel declares.
    parameters: the bytes of each ``.param`` of the entry, in order. Pointers in them are addresses of this
        process; a tensor map is 128 bytes (`cutelab.simulator.tensormap`).
    stream: the handle that the program passed; 0 is the default stream.
    attributes: CUDA's launch attributes by name without "cudaLaunchAttribute": dimensions as tuples, switches
        and priorities as integers, anything else as bytes. "ClusterDimension" is in ``cluster`` too.
    tensors: the memory that the kernel may touch, by address and without overlaps: the tensors that the DSL
        was given and that still exist, and the storages of other torch tensors that a parameter points into.
        It is kept with the launch. Memory of another kind that is given by its bare address isn't among them.
    gpu: what it was launched on.
    """

    kernel: str
    ptx: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_shared_bytes: int
    parameters: tuple[bytes, ...]
    stream: int
    attributes: Mapping[str, int | tuple[int, ...] | bytes]
    tensors: tuple[Allocation, ...]
    gpu: Gpu


Execute = Callable[[Launch], None]
FindTensors = Callable[[tuple[bytes, ...]], tuple[Allocation, ...]]


# --- What is loaded: a handle is the id of an object that the compiled function keeps alive.


class Kernel:
    """A kernel of a library, with what the host code set for it."""

    def __init__(self, library: "Library", name: str, parameter_sizes: tuple[int, ...]) -> None:
        self.library = weakref.ref(library)
        self.name, self.parameter_sizes = name, parameter_sizes
        self.max_dynamic_shared = 48 * 1024
        self.any_cluster_size = False


class Library:
    """The kernels of one PTX module."""

    def __init__(self, ptx: str) -> None:
        self.ptx = ptx
        self.static_shared = static_shared_bytes(ptx)
        self.kernels = {name: Kernel(self, name, sizes) for name, sizes in parameter_sizes(ptx).items()}
        _libraries[id(self)] = self
        _kernels.update((id(kernel), kernel) for kernel in self.kernels.values())


_libraries: "weakref.WeakValueDictionary[int, Library]" = weakref.WeakValueDictionary()
_kernels: "weakref.WeakValueDictionary[int, Kernel]" = weakref.WeakValueDictionary()


def parameter_sizes(ptx: str) -> dict[str, tuple[int, ...]]:
    """Bytes of each parameter of each kernel: 128 of `.param .align 64 .b8 p[128]`, 4 of `.param .u32 p`."""
    entries = re.findall(r"\.entry\s+([\w$.]+)\s*\(([^)]*)\)", ptx)
    return {name: tuple(map(_size, filter(str.strip, text.split(",")))) for name, text in entries}


def static_shared_bytes(ptx: str) -> int:
    """Shared memory that the module declares, without what a launch adds."""
    end = 0
    for extern, declaration in re.findall(r"(\.extern\s+)?\.shared\s+(\.[^;]*);", ptx):
        align = re.search(r"\.align\s+(\d+)", declaration)
        end = -(-end // int(align[1])) * int(align[1]) if align else end
        end += 0 if extern else _size(declaration)
    return end


def _size(declaration: str) -> int:
    bits = re.search(r"\.[busf](\d+)\b", declaration)
    count = re.search(r"\[(\d+)\]", declaration)
    if bits is None:
        raise LaunchError(f"no size in the PTX declaration {declaration.strip()!r}")
    return int(bits[1]) // 8 * int(count[1] if count else 1)


# --- Calls of host code


@dataclass(frozen=True, eq=False)
class Scope:
    """An open `simulator.gpu`, and the thread that opened it."""

    gpu: Gpu
    execute: Execute
    thread: int


scopes: list[Scope] = []
"""The open ones; the last one counts."""


@dataclass
class _Call:
    """A call of host code."""

    scope: Scope
    library: Library
    tensors: FindTensors
    failure: BaseException | None = None


_thread = threading.local()


@contextmanager
def host_call(scope: Scope, library: Library, tensors: FindTensors) -> Iterator[None]:
    """Compiled host code of ``library`` may run here. What is raised meanwhile comes out as itself.

    tensors: from the parameters of a launch to the memory that it may touch.
    """
    outer = getattr(_thread, "call", None)
    call = _thread.call = _Call(scope, library, tensors)
    try:
        yield
    except Exception:
        if call.failure is None:  # else it only says that the runtime reported an error
            raise
    finally:
        _thread.call = outer
    if call.failure is not None:
        raise call.failure


_symbols: dict[str, Any] = {}


def register(engine: Any) -> None:
    """Let ``engine`` call the functions below. Before its first look-up only: that one binds all names."""
    for name, function in _symbols.items():
        engine.raw_register_runtime(name, ctypes.cast(function, c_void_p))


def _runtime(*argument_types: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function callable by host code under its name. It gets the _Call first, and may raise."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def called(*arguments: Any) -> int:
            call = _thread.call
            if call.failure is None:
                try:
                    function(call, *arguments)
                except BaseException as error:  # also KeyboardInterrupt: a simulation takes long
                    call.failure = error
            return _FAILED if call.failure else 0

        _symbols[function.__name__] = CFUNCTYPE(c_int, *argument_types)(called)
        return function

    return decorate


# --- The functions. Their arguments are those of the CUDA function of that name without the underscore.


@_runtime(POINTER(c_void_p), c_void_p, c_void_p, c_void_p, c_uint, c_void_p, c_void_p, c_uint)
def _cudaLibraryLoadData(call: _Call, library: Any, *_: Any) -> None:
    library[0] = id(call.library)


@_runtime(POINTER(c_void_p), c_void_p, c_char_p)
def _cudaLibraryGetKernel(call: _Call, kernel: Any, library: int, name: bytes) -> None:
    found = _libraries[library].kernels.get(name.decode())
    if found is None:
        raise LaunchError(f"the compiled PTX has no kernel {name.decode()!r}")
    kernel[0] = id(found)


@_runtime(POINTER(c_int), c_int, c_int)
def _cudaDeviceGetAttribute(call: _Call, value: Any, attribute: int, device: int) -> None:
    value[0] = call.scope.gpu.attribute(attribute)


@_runtime(POINTER(c_int))
def _cudaGetDevice(call: _Call, device: Any) -> None:
    device[0] = 0


@_runtime(POINTER(c_int))
def _cudaGetDeviceCount(call: _Call, count: Any) -> None:
    count[0] = 1


@_runtime(POINTER(c_int), c_int, c_void_p, c_int)
def _cuKernelGetAttribute(call: _Call, value: Any, attribute: int, kernel: int, device: int) -> None:
    answers = {
        int(CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK): _MAX_THREADS,
        int(CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES): _library_of(
            _kernels[kernel]
        ).static_shared,
    }
    if attribute not in answers:
        raise LaunchError(
            f"the program asks for kernel attribute {attribute}, which the simulator doesn't know"
        )
    value[0] = answers[attribute]


@_runtime(c_void_p, c_int, c_int, c_int)
def _cudaKernelSetAttributeForDevice(
    call: _Call, kernel: int, attribute: int, value: int, device: int
) -> None:
    _set_attribute(_kernels[kernel], attribute, value)


@_runtime(c_void_p, c_int, c_int)
def _cudaFuncSetAttribute(call: _Call, kernel: int, attribute: int, value: int) -> None:
    _set_attribute(_kernels[kernel], attribute, value)


def _set_attribute(kernel: Kernel, attribute: int, value: int) -> None:
    if attribute == cudaFuncAttribute.cudaFuncAttributeMaxDynamicSharedMemorySize:
        kernel.max_dynamic_shared = value
    elif attribute == cudaFuncAttribute.cudaFuncAttributeNonPortableClusterSizeAllowed:
        kernel.any_cluster_size = bool(value)
    # The others, such as the preferred carve-out, don't change what a kernel computes.


# --- The launch


class _Dim3(ctypes.Structure):
    _fields_ = (("x", c_uint), ("y", c_uint), ("z", c_uint))

    def values(self) -> tuple[int, int, int]:
        return self.x, self.y, self.z


class _Attribute(ctypes.Structure):
    """cudaLaunchAttribute: an id, and 64 bytes for any value."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", ctypes.c_ubyte * 64))


class _LaunchConfig(ctypes.Structure):
    """cudaLaunchConfig_t."""

    _fields_ = (
        ("grid", _Dim3),
        ("block", _Dim3),
        ("dynamic_shared_bytes", c_size_t),
        ("stream", c_void_p),
        ("attributes", POINTER(_Attribute)),
        ("attribute_count", c_uint),
    )


_ID = cudaLaunchAttributeID
_DIMENSIONS = {
    int(_ID.cudaLaunchAttributeClusterDimension),
    int(_ID.cudaLaunchAttributePreferredClusterDimension),
}
_INTEGERS = {
    int(_ID.cudaLaunchAttributeCooperative),
    int(_ID.cudaLaunchAttributeProgrammaticStreamSerialization),
    int(_ID.cudaLaunchAttributeClusterSchedulingPolicyPreference),
    int(_ID.cudaLaunchAttributePriority),
    int(_ID.cudaLaunchAttributePreferredSharedMemoryCarveout),
}


@_runtime(POINTER(_LaunchConfig), c_void_p, POINTER(c_void_p))
def _cudaLaunchKernelEx(call: _Call, config: Any, kernel: int, arguments: Any) -> None:
    config, loaded = config[0], _kernels[kernel]
    attributes = dict(_decode_attribute(config.attributes[i]) for i in range(config.attribute_count))
    parameters = tuple(ctypes.string_at(arguments[i], size) for i, size in enumerate(loaded.parameter_sizes))
    launch = Launch(
        kernel=loaded.name,
        ptx=_library_of(loaded).ptx,
        grid=config.grid.values(),
        block=config.block.values(),
        cluster=attributes.get("ClusterDimension", (1, 1, 1)),
        dynamic_shared_bytes=config.dynamic_shared_bytes,
        parameters=parameters,
        stream=config.stream or 0,
        attributes=MappingProxyType(attributes),
        tensors=call.tensors(parameters),
        gpu=call.scope.gpu,
    )
    _check(launch, loaded)
    call.scope.execute(launch)


def _library_of(kernel: Kernel) -> Library:
    library = kernel.library()
    assert library is not None  # it keeps its kernels, and the compiled function that is running keeps it
    return library


def _decode_attribute(attribute: Any) -> tuple[str, Any]:
    name = cudaLaunchAttributeID(attribute.id).name.removeprefix("cudaLaunchAttribute")
    value = bytes(attribute.value)
    if attribute.id in _DIMENSIONS:
        return name, tuple(_Dim3.from_buffer_copy(value).values())
    return name, c_int.from_buffer_copy(value).value if attribute.id in _INTEGERS else value


def _check(launch: Launch, kernel: Kernel) -> None:
    """Raises LaunchError for what the GPU would refuse."""
    if not all(1 <= blocks <= most for blocks, most in zip(launch.grid, _MAX_GRID, strict=True)):
        raise LaunchError(f"{launch.kernel}: grid {launch.grid}; it must be within (1, 1, 1) … {_MAX_GRID}")
    if min(launch.block) < 1 or prod(launch.block) > _MAX_THREADS or launch.block[2] > 64:
        raise LaunchError(
            f"{launch.kernel}: block {launch.block}; 1 to {_MAX_THREADS} threads are possible, 64 along z"
        )
    largest = launch.gpu.max_cluster_size
    if not kernel.any_cluster_size:
        largest = min(largest, _PORTABLE_CLUSTER)
    if not 1 <= prod(launch.cluster) <= largest:
        raise LaunchError(
            f"{launch.kernel}: clusters of {launch.cluster} blocks; {launch.gpu.arch} runs up to {largest}"
        )
    if any(blocks % size for blocks, size in zip(launch.grid, launch.cluster, strict=True)):
        raise LaunchError(
            f"{launch.kernel}: grid {launch.grid} is no multiple of the cluster {launch.cluster}"
        )
    static, dynamic = _library_of(kernel).static_shared, launch.dynamic_shared_bytes
    if dynamic > kernel.max_dynamic_shared or static + dynamic > launch.gpu.shared_per_block:
        raise LaunchError(
            f"{launch.kernel}: {static} + {dynamic} bytes of shared memory; a block on {launch.gpu.arch} may "
            f"use {launch.gpu.shared_per_block}, the dynamic part was set to {kernel.max_dynamic_shared}"
        )
