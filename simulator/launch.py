"""Receives the kernel launches of CuTe DSL programs: `with simulator.gpu("sm_90a"):`.

Inside, the DSL compiles for the named architecture whatever this machine has, CPU tensors count as global
memory (so the kernels are those that a GPU gets), and the compiled host code calls
`cutelab.simulator.standin` in place of the CUDA runtime. Each launch goes to `execute`. Outside, nothing of
the DSL is changed.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cutlass.cuda
from cutlass.base_dsl import dsl
from cutlass.base_dsl.compiler import CompileOptions
from cutlass.base_dsl.env_manager import EnvironmentVarManager
from cutlass.cute import runtime
from cutlass.cutlass_dsl import CuTeDSL
from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction
from cutlass.utils.hardware_info import HardwareInfo

from cutelab.simulator import standin
from cutelab.simulator.compiling import Backend, Options
from cutelab.simulator.errors import SimulationError
from cutelab.simulator.gpus import Gpu
from cutelab.simulator.standin import Allocation, Execute, Launch, LaunchError
from cutelab.simulator.tensors import place_in_global_memory

__all__ = ["Allocation", "Execute", "Gpu", "Launch", "LaunchError", "current_gpu", "gpu"]

_lock = threading.Lock()  # of the open scopes, and of what is replaced while there are any


@contextmanager
def gpu(arch: str, *, multiprocessors: int | None = None, execute: Execute | None = None) -> Iterator[Gpu]:
    """Kernels are compiled for ``arch``, such as "sm_90a", and every launch goes to ``execute``.

    execute: gets a `Launch` and returns when the kernel has run; what it raises comes out of the call that
        launched. By default `cutelab.simulator.execute`.
    multiprocessors: how many the GPU has, on which the grids of persistent kernels depend. By default as many
        as a real one.

    All threads of the process see the GPU. Inside another ``gpu`` the inner one counts. A function compiled
    inside runs inside any ``gpu`` of its architecture, and elsewhere raises SimulationError; one compiled
    outside does so inside. Raises SimulationError for an unknown architecture, and where another thread has
    another GPU open.
    """
    scope = standin.Scope(Gpu.named(arch, multiprocessors), execute or _execute, threading.get_ident())
    with _lock:
        for other in standin.scopes:
            if other.thread != scope.thread and other.gpu != scope.gpu:
                raise SimulationError(f"another thread simulates {other.gpu}: one GPU at a time")
        if not standin.scopes:
            _install()
        standin.scopes.append(scope)
    try:
        yield scope.gpu
    finally:
        with _lock:
            standin.scopes.remove(scope)
            if not standin.scopes:
                _uninstall()


def current_gpu() -> Gpu | None:
    """The GPU that is being simulated, if any."""
    return standin.scopes[-1].gpu if standin.scopes else None


def _execute(launch: Launch) -> None:
    import cutelab.simulator  # which imports this module

    cutelab.simulator.execute(launch)


# --- What is replaced while a GPU is simulated


def _replacements() -> list[tuple[Any, str, Any]]:
    """(owner, name, what stands there meanwhile).

    The DSL's messages name the last line of the stack that isn't its own. So what stands for a method of its
    compiler has returned before the DSL goes on.
    """
    get_name_options = dsl.BaseDSL._get_name_options
    load_dltensor = runtime._Tensor.load_dltensor

    def with_options(self: Any, function: Any) -> Any:
        # The options of this compilation, which the DSL is about to read, and drops at its end.
        if not isinstance(self.compile_options, Options):
            self.compile_options = Options(self.compile_options, self.envar)
        return get_name_options(function)

    def load_as_global(self: Any) -> None:
        place_in_global_memory(self)
        load_dltensor(self)

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise SimulationError(
            f"{self.function_name} was compiled outside of simulator.gpu: compile it inside"
        )

    def without_driver(self: HardwareInfo, device_id: int = 0) -> None:
        self.device_id = device_id

    def max_active_clusters(self: HardwareInfo, cluster_size: int, stream: Any = None) -> int:
        return _gpu().max_active_clusters(cluster_size)

    return [
        (EnvironmentVarManager, "arch", EnvironmentVarManager.arch.getter(lambda self: _gpu().arch)),
        (dsl, "get_compiler_backend", Backend),
        (dsl.BaseDSL, "_get_name_options", with_options),
        (runtime._Tensor, "load_dltensor", load_as_global),
        (CudaDialectJitCompiledFunction, "__call__", refuse),
        (cutlass.cuda, "initialize_cuda_context", lambda device_id=0, flags=0: None),
        (cutlass.cuda, "stream_sync", lambda stream: None),
        (HardwareInfo, "__init__", without_driver),
        (HardwareInfo, "get_max_active_clusters", max_active_clusters),
        (HardwareInfo, "get_l2_cache_size_in_bytes", lambda self: _gpu().l2_bytes),
        (HardwareInfo, "get_device_multiprocessor_count", lambda self: _gpu().multiprocessors),
    ]


def _gpu() -> Gpu:
    return standin.scopes[-1].gpu


_replaced: list[tuple[Any, str, Any]] = []


def _install() -> None:
    for owner, name, replacement in _replacements():
        _replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, replacement)


def _uninstall() -> None:
    while _replaced:
        setattr(*_replaced.pop())
    language = CuTeDSL._get_dsl()
    if isinstance(language.compile_options, Options):  # a compilation failed early
        language.compile_options = CompileOptions()
