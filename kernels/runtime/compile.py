"""From a kernel object to a function that can be called: compile once, keep it, load it.

A kernel is any object with ``config`` (frozen, its ``repr`` says all that the code depends on; with
``smem_bytes``, the shared memory of a block), ``launch`` (a ``@cute.jit`` method) and ``example_args()``
(arguments that carry the types, without data).
"""

from __future__ import annotations

import shlex
import tempfile
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import cutlass.cute as cute
import tvm_ffi  # noqa: F401  (loading a kernel imports it: 30 ms that belong to import, not to the first call)

from cutelab.kernels.runtime.arch import Arch
from cutelab.kernels.runtime.cache import cache_key, load_entry, store_entry
from cutelab.kernels.runtime.errors import ConfigError

__all__ = ["Artifacts", "Kernel", "compile_kernel", "compile_to_artifacts", "compiled_once"]

# The name of the function inside every object; each object is loaded on its own, so one name will do.
_SYMBOL = "launch"


class KernelConfig(Hashable, Protocol):
    """What a kernel is compiled for."""

    @property
    def smem_bytes(self) -> int: ...


class Kernel(Protocol):
    """What `compile_kernel` takes."""

    @property
    def config(self) -> KernelConfig: ...

    @property
    def launch(self) -> Any: ...

    def example_args(self) -> tuple[Any, ...]: ...


@dataclass(frozen=True)
class Artifacts:
    """The device code of a kernel: PTX text and the cubin that ptxas made of it."""

    ptx: str
    cubin: bytes


_loaded: dict[Hashable, Callable[..., Any]] = {}
# The DSL keeps the options of the compilation under way in a global: one compilation at a time.
_compiling = threading.Lock()


def compile_kernel(kernel: Kernel, arch: Arch) -> Callable[..., Any]:
    """The compiled ``kernel.launch`` for ``arch``; from memory, from disk, or compiled now (about a second).

    The function takes the arguments of ``launch`` by position, as Python ints (addresses, sizes, strides,
    the stream handle) and floats, and returns when the kernel is queued.

    Raises ConfigError if the kernel needs more shared memory than a block may use on ``arch``, or if the
    installed DSL libraries cannot assemble for it.
    """
    key = (type(kernel), kernel.config, arch.name)
    return compiled_once(key, lambda: _load_or_compile(kernel, arch))


def compiled_once(key: Hashable, build: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """What `build` returned the first time that it was asked for `key`; one compilation at a time."""
    function = _loaded.get(key)
    if function is None:
        with _compiling:
            function = _loaded.get(key)
            if function is None:
                function = _loaded[key] = build()
    return function


def compile_to_artifacts(kernel: Kernel, arch: Arch) -> Artifacts:
    """PTX and cubin of a kernel for ``arch``; needs no GPU, reads and writes no cache.

    Raises ConfigError as `compile_kernel` does.
    """
    with tempfile.TemporaryDirectory() as directory, _compiling:
        compiled = _compile(kernel, arch, directory)
    return Artifacts(compiled.__ptx__, compiled.__cubin__)


def _load_or_compile(kernel: Kernel, arch: Arch) -> Callable[..., Any]:
    key = cache_key(type(kernel).__module__, type(kernel).__qualname__, kernel.config, arch.name)
    path = load_entry(key)
    if path is not None:
        return _load(path)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "kernel.o")
        _compile(kernel, arch, directory).export_to_c(object_file_path=str(path), function_name=_SYMBOL)
        store_entry(key, path.read_bytes())
        return _load(path)


def _compile(kernel: Kernel, arch: Arch, directory: str) -> Any:
    """The DSL's compiled function, with its PTX and cubin, which the DSL first puts in ``directory``."""
    smem_bytes = kernel.config.smem_bytes
    if smem_bytes > arch.smem_per_block:
        raise ConfigError(
            f"{kernel.config} needs {smem_bytes} bytes of shared memory; "
            f"a block on {arch.name} may use at most {arch.smem_per_block}"
        )
    options = (
        f"--enable-tvm-ffi --gpu-arch={arch.name} --keep-ptx --keep-cubin --dump-dir={shlex.quote(directory)}"
    )
    compiled = cute.compile(kernel.launch, *kernel.example_args(), options=options)
    # CUDA 12 knows some chips under another name: the DSL then assembles for that one, and where the bytes
    # of the cubin belong it leaves the path at which it looked for them.
    if not isinstance(compiled.__cubin__, bytes):
        raise ConfigError(
            f"the installed DSL libraries do not assemble for {arch.name}; "
            "those for CUDA 13 do: pip install 'cutelab[cu13]'"
        )
    return compiled


def _load(path: Path) -> Callable[..., Any]:
    return getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), _SYMBOL)
