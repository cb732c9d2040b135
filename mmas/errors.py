"""Errors of the mmas room."""


class MmaError(ValueError):
    """A tensor-core operation that doesn't exist; the message lists those that do."""
