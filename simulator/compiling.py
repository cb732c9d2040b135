"""How the DSL compiles, and calls, a `@cute.jit` function whose launches are simulated.

The DSL has a place for each: its compiler backend is an object, the function that it returns another.
"""

import copy
import functools
import os
import tempfile
from contextlib import AbstractContextManager
from typing import Any

from cuda.bindings import driver
from cutlass._mlir.execution_engine import ExecutionEngine
from cutlass.base_dsl import compiler
from cutlass.base_dsl.common import DSLUserCodeError
from cutlass.base_dsl.compile_backend import CompileContext, LegacyCompilerBackend
from cutlass.base_dsl.jit_executor import JitExecutor
from cutlass.cute import runtime
from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction

from cutelab.simulator import standin
from cutelab.simulator.errors import SimulationError
from cutelab.simulator.standin import LaunchError
from cutelab.simulator.tensors import TensorLike, allocations


class Options(compiler.CompileOptions):
    """The user's options, with PTX that carries Python lines, and the entry that takes CPU tensors."""

    enable_tvm_ffi = False

    def __init__(self, given: compiler.CompileOptions, environment: Any) -> None:
        self.__dict__.update(copy.deepcopy(vars(given)))
        kept = (compiler.KeepPTX, compiler.KeepCUBIN, compiler.KeepSASS)
        user_keeps = environment.keep_ptx or environment.keep_cubin or environment.keep_sass
        if not user_keeps and not any(self.options[option].value for option in kept):
            self.options[compiler.DumpDir].value = _scratch_directory()
        self.options[compiler.KeepPTX].value = True
        self.options[compiler.GenerateLineInfo].value = True


def _scratch_directory() -> str:
    """Where the DSL puts PTX until it has read it back; one for the process, for it is in the DSL's keys."""
    path = _scratch().name
    os.makedirs(path, exist_ok=True)  # a forked process that ended may have removed it
    return path


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="cutelab-simulator-")


class Backend(LegacyCompilerBackend):
    """Compiles as ever, then lets the host code call the stand-ins. Keeps nothing on disk."""

    def compile(self, ctx: CompileContext) -> Any:
        arch = self._resolve_compile_gpu_arch()
        pipeline = self._dsl.preprocess_pipeline(self._dsl._get_pipeline(ctx.pipeline), arch)
        _, module = self._dsl._compile_or_jit_module(ctx.module, pipeline, ctx.function_name, [], False)
        # No libraries: what has no stand-in must not reach the real CUDA runtime.
        engine = ExecutionEngine(module, opt_level=2, shared_libs=[])
        standin.register(engine)
        try:
            entry = self._dsl._lookup_jit_entry(engine, ctx.function_name)
        except DSLUserCodeError as error:
            raise LaunchError(
                f"the host code calls what has no stand-in in the simulator: {error}"
            ) from error
        function = self._dsl._build_jit_function(
            functools.partial(_kind_of_function(ctx), arch),
            *(module, engine, entry, ctx.sig, ctx.function_name, ctx.dynamic_args, ctx.dynamic_kwargs),
        )
        if ctx.cache_enabled:
            self._dsl.jit_cache.set(ctx.module_hash, function, funcBody=ctx.funcBody)
        return function


def _kind_of_function(ctx: CompileContext) -> "type[Function]":
    fake = any(isinstance(example, runtime._FakeTensor) for example in ctx.dynamic_args or ())
    return _FunctionOfFakes if fake else Function


class Function(CudaDialectJitCompiledFunction):
    """A compiled function whose launches are simulated.

    It takes what the DSL's own compiled functions take, those with tvm-ffi included: addresses and streams as
    integers, tensors where it was compiled with fake ones, no stream where the environment was to give it.
    """

    __call__ = CudaDialectJitCompiledFunction.__call__  # while a GPU is simulated, that refuses
    num_devices = 1

    def __init__(self, arch: str, *args: Any, dynamic_args: Any = (), **kwargs: Any) -> None:
        super().__init__(*args, dynamic_args=dynamic_args, **kwargs)
        self.arch = arch
        self.device_code = standin.Library(self.__ptx__ or "")
        for at, example in enumerate(dynamic_args or ()):
            if isinstance(example, (runtime._Pointer, runtime._FakeStream, driver.CUstream)):
                self.execution_args._pointer_address_arg_specs[at] = True
            if getattr(example, "use_tvm_ffi_env_stream", False):
                self.execution_args._meta.pos_defaults[at] = driver.CUstream(0)

    def host_call(self) -> AbstractContextManager[None]:
        """Where its host code may run. Raises SimulationError if no GPU of its architecture is simulated."""
        scope = standin.scopes[-1] if standin.scopes else None
        if scope is None or scope.gpu.arch != self.arch:
            raise SimulationError(
                f"{self.function_name} was compiled for a simulated {self.arch}: call it inside "
                f'simulator.gpu("{self.arch}")' + (f", not {scope.gpu.arch}" if scope else "")
            )
        return standin.host_call(scope, self.device_code, allocations)

    def to(self, device: Any = None) -> JitExecutor:
        super().to(device)  # loads the library
        return _Executor(self)

    def _load_cuda_library(self) -> list[Any]:
        with self.host_call():
            super()._load_cuda_library()
        return []  # nothing that the driver could unload


class _FunctionOfFakes(Function):
    """One that was compiled with fake tensors."""

    def __init__(self, *args: Any, dynamic_args: Any, **kwargs: Any) -> None:
        super().__init__(*args, dynamic_args=dynamic_args, **kwargs)
        self.fakes = [
            (at, one) for at, one in enumerate(dynamic_args) if isinstance(one, runtime._FakeTensor)
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        handed = list(args)
        for at, fake in self.fakes:
            if at < len(args):
                handed[at] = TensorLike(fake, args[at])
        return Function.__call__(self, *handed, **kwargs)


class _Executor(JitExecutor):
    """The DSL's, but exceptions come out as themselves."""

    def __init__(self, function: Function) -> None:
        super().__init__(function.jit_module, None, False, spec=function._pyir_spec)
        self.function = function

    def run_compiled_program(self, exe_args: list[Any]) -> int:
        with self.function.host_call():
            self.capi_func(self._get_invoke_packed_args(exe_args))
        if self.cuda_result.value:
            raise LaunchError(f"{self.function.function_name}: CUDA error {self.cuda_result.value}")
        return 0
