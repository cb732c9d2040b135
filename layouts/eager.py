"""The DSL's own layout objects at a Python prompt, on a CPU.

The DSL builds every object as an operation of an MLIR module, so it refuses to work outside `@cute.jit`.
Importing this module lifts that: the first DSL operation that finds no module under construction enters a
scratch module, which all threads share. Static layouts need nothing more: the DSL folds them as it builds,
and hands shapes, strides and offsets back as Python integers.

Inside `@cute.jit` a module is under construction, so nothing here takes part: what is tried at the prompt is
what the kernel runs. The DSL's entry points (compile, call, launch) leave the scratch module first. An object
belongs to the module it was built in: a kernel calls the same helper again, rather than capture its result.

The scratch module keeps every operation until the process ends, about 0.5 KiB for each evaluated coordinate;
`cutelab.layouts.as_numpy` evaluates a whole layout at once without building any.
"""

import atexit
import functools
import threading
from collections.abc import Callable
from typing import Any

from cutlass._mlir import ir
from cutlass._mlir_helpers import op as dsl_op
from cutlass.base_dsl import dsl
from cutlass.cutlass_dsl import cutlass as cutlass_dsl
from cutlass.cutlass_dsl.cutlass import CutlassBaseDSL


class _Scratch:
    """The module that eager operations go to, and what MLIR needs entered to build there."""

    def __init__(self) -> None:
        self.context = ir.Context()
        self.context.enable_multithreading(False)  # no pool of compiler threads
        self.location = ir.Location.unknown(self.context)
        self.module = ir.Module.create(self.location)
        self.insertion_point = ir.InsertionPoint(self.module.body)
        self.open = True


_scratch = _Scratch()


class _Visit:
    """One thread's stay in the scratch module.

    MLIR keeps what a thread has entered in C++ thread storage, and crashes if that outlives the Python
    thread: a visit ends at the latest when its thread's local variables go.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.entered = [_scratch.context, _scratch.location, _scratch.insertion_point]
        for scope in self.entered:
            scope.__enter__()

    def end(self) -> None:
        while self.entered:
            self.entered.pop().__exit__(None, None, None)

    def __del__(self) -> None:
        if self.thread == threading.get_ident():  # not so for a daemon thread that outlives the interpreter
            self.end()


_thread = threading.local()


def _leave_scratch() -> None:
    visit = _thread.__dict__.pop("visit", None)
    if visit is not None:
        visit.end()


@atexit.register
def _close_scratch() -> None:
    _scratch.open = False
    _leave_scratch()


def _enter_when_idle(apply: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap what every DSL operation calls with its source location before it builds anything."""

    @functools.wraps(apply)
    def apply_loc_transforms(loc: Any) -> Any:
        if ir.Context.current is None and _scratch.open:
            _thread.visit = _Visit()
        return apply(loc)

    return apply_loc_transforms


def _from_outside(active_env_manager: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what every DSL entry point calls first: past it, a current context means being traced."""

    @functools.wraps(active_env_manager)
    def enter_env(*args: Any) -> Any:
        if ir.Context.current is _scratch.context:
            _leave_scratch()
        return active_env_manager(*args)

    return enter_env


def _not_at_a_prompt(prepare_launch: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what a launch calls first: it would go on to build in the module compiled last, and crash."""

    @functools.wraps(prepare_launch)
    def prepare(*args: Any) -> Any:
        if ir.Context.current is _scratch.context:
            raise RuntimeError("a kernel is launched by a @cute.jit function; this launch is in plain Python")
        return prepare_launch(*args)

    return prepare


# These are called and left before the DSL looks for the user's line in the stack: its messages stay right.
dsl_op._apply_loc_transforms = _enter_when_idle(dsl_op._apply_loc_transforms)
dsl.active_env_manager = _from_outside(dsl.active_env_manager)
cutlass_dsl.active_env_manager = _from_outside(cutlass_dsl.active_env_manager)
CutlassBaseDSL._preprocess_launch_config_args = _not_at_a_prompt(
    CutlassBaseDSL._preprocess_launch_config_args
)
