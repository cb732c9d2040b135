"""Errors of the layouts room."""

from typing import Any


class TileError(ValueError):
    """A tile that can't be laid out or shared among threads as asked; the message says what would fit."""


class LayoutError(ValueError):
    """A layout that an operation can't give as promised: the message shows where, and what would work.

    `operation` is the operation that was called, `step` the one inside it that failed (or ""), `coordinate`
    the witness (or None), `got` and `required` the values there, `nearest` what would work.
    """

    def __init__(
        self,
        operation: str,
        problem: str,
        nearest: str,
        coordinate: Any = None,
        got: Any = None,
        required: Any = None,
    ) -> None:
        super().__init__(operation, problem, nearest, coordinate, got, required)
        self.operation = self.step = operation
        self.problem = problem
        self.nearest = nearest
        self.coordinate = coordinate
        self.got = got
        self.required = required

    def __str__(self) -> str:
        step = "" if self.step in ("", self.operation) else f"{self.step}: "
        where = "" if self.coordinate is None else f" at {self.coordinate}"
        witness = "" if self.got is None else f"{where}: got {self.got}, required {self.required}"
        return f"{self.operation}: {step}{self.problem}{witness}; {self.nearest}"


class AccessError(ValueError):
    """An access to shared memory that no instruction can make, or not with these addresses."""


class SwizzleError(ValueError):
    """A swizzle that does not exist; the message says what stands in the way and what would help."""
