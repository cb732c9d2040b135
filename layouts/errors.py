"""Errors of the layouts room."""

from typing import Any


class TileError(ValueError):
    """A tile that can't be laid out or shared among threads as asked; the message says what would fit."""


class LayoutError(ValueError):
    """A layout that an operation can't give as promised: the message shows where, and what would work.

    `operation` is the operation's name, `coordinate` the witness (or None), `got` and `required` the values
    there, `nearest` the nearest thing that would work.
    """

    def __init__(
        self,
        operation: str,
        problem: str,
        *,
        coordinate: Any = None,
        got: Any = None,
        required: Any = None,
        nearest: str,
    ) -> None:
        witness = "" if coordinate is None else f" at {coordinate}: got {got}, required {required}"
        super().__init__(f"{operation}: {problem}{witness}; {nearest}")
        self.operation = operation
        self.coordinate = coordinate
        self.got = got
        self.required = required
        self.nearest = nearest


class AccessError(ValueError):
    """An access to shared memory that no instruction can make, or not with these addresses."""


class SwizzleError(ValueError):
    """A swizzle that does not exist; the message says what stands in the way and what would help."""
