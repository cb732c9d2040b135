"""GPU architectures: what to compile for, and the shared memory a thread block may use there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from cutelab.kernels.runtime.errors import ConfigError, DeviceError

if TYPE_CHECKING:
    import torch

__all__ = ["Arch"]

_KIB = 1024

# Compute capability -> (target, KiB of shared memory a block may use, multiprocessors of a typical part).
# Shared memory: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". Parts:
# A100, RTX 3090, Jetson Orin, RTX 4090, H100/H200 SXM, B200, B300, Jetson Thor, RTX 5090, DGX Spark.
_CHIPS = {
    (8, 0): ("sm_80", 163, 108),
    (8, 6): ("sm_86", 99, 82),
    (8, 7): ("sm_87", 163, 16),
    (8, 9): ("sm_89", 99, 128),
    (9, 0): ("sm_90a", 227, 132),
    (10, 0): ("sm_100a", 227, 148),
    (10, 3): ("sm_103a", 227, 148),
    (11, 0): ("sm_110a", 227, 20),
    (12, 0): ("sm_120a", 99, 170),
    (12, 1): ("sm_121a", 99, 48),
}
_BY_NAME = {name: (name, smem, sms) for name, smem, sms in _CHIPS.values()}


@dataclass(frozen=True)
class Arch:
    """One GPU architecture.

    name: the compiler's target, such as ``"sm_80"`` or ``"sm_90a"``.
    smem_per_block: bytes of shared memory that one thread block may use, opt-in included.
    sm_count: number of multiprocessors; of a typical part when the arch was made by name.
    """

    name: str
    smem_per_block: int
    sm_count: int

    @classmethod
    def named(cls, name: str) -> Arch:
        """The architecture of that target name; the suffix may be omitted (``"sm_90"`` is ``"sm_90a"``).

        Raises ConfigError for a name that is not in the table, listing those that are.
        """
        chip = _BY_NAME.get(name) or _BY_NAME.get(name + "a")
        if chip is None:
            raise ConfigError(f"unknown GPU architecture {name!r}; known: {', '.join(_BY_NAME)}")
        target, smem_kib, sm_count = chip
        return cls(target, smem_kib * _KIB, sm_count)

    @classmethod
    def of(cls, device: torch.device | int) -> Arch:
        """The architecture of a CUDA device; raises DeviceError where the kernels cannot run on it."""
        return _arch_of_index(_cuda_index(device))


def _cuda_index(device: torch.device | int) -> int:
    import torch

    if isinstance(device, int):
        return device
    if device.type != "cuda":
        raise DeviceError(f"got a {device.type} device; the kernels run on CUDA devices, sm_80 or newer")
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def _arch_of_index(index: int) -> Arch:
    import torch

    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    if capability not in _CHIPS:
        known = ", ".join(f"{major}.{minor}" for major, minor in _CHIPS)
        raise DeviceError(
            f"{properties.name} has compute capability {capability[0]}.{capability[1]}; "
            f"the kernels are built for {known}"
        )
    name, smem_kib, _ = _CHIPS[capability]
    return Arch(name, smem_kib * _KIB, properties.multi_processor_count)
