"""Errors of the layouts room."""


class TileError(ValueError):
    """A tile that can't be laid out or shared among threads as asked; the message says what would fit."""


class AccessError(ValueError):
    """An access to shared memory that no instruction can make, or not with these addresses."""


class SwizzleError(ValueError):
    """A swizzle that does not exist; the message says what stands in the way and what would help."""
