"""Errors of the copies room."""


class CopyError(ValueError):
    """A copy that the hardware has no instruction for; the message lists those it has."""
