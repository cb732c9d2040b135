"""The errors that a caller of ``cutelab.kernels`` can meet.

Each is a ``ValueError`` or a ``TypeError``, so code that already handles those needs no change.
A message says what was given, what is required and, where there is one, the nearest legal value.
"""

__all__ = ["ConfigError", "DeviceError", "DtypeError", "LayoutError", "ShapeError"]


class ShapeError(ValueError):
    """The sizes of the operands do not fit together, or exceed what the kernel can index."""


class LayoutError(ValueError):
    """The strides or the memory of a tensor cannot be used: no unit stride, or overlapping elements."""


class DtypeError(TypeError):
    """An operand is not a tensor of a supported dtype, or two dtypes do not go together."""


class DeviceError(ValueError):
    """The tensors are on different devices, or on one that the kernels do not run on."""


class ConfigError(ValueError):
    """A kernel configuration is illegal: for its instructions, the chip, or the installed assembler."""
