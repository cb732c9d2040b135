"""Errors of the layouts room."""


class TileError(ValueError):
    """A tile that can't be laid out or shared among threads as asked; the message says what would fit."""
