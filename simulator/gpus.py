"""The GPUs that can be simulated, and what programs ask about them."""

from dataclasses import dataclass

from cuda.bindings.runtime import cudaDeviceAttr

from cutelab.simulator.errors import SimulationError

_KIB = 1024

# Target -> (multiprocessors, KiB of shared memory of a block and of a multiprocessor, threads of a
# multiprocessor, KiB of L2) of A100, RTX 3090, RTX 4090 and H100 SXM: CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability", and the white papers of these architectures.
_CHIPS = {
    "sm_80": (108, 163, 164, 2048, 40 * _KIB),
    "sm_86": (82, 99, 100, 1536, 6 * _KIB),
    "sm_89": (128, 99, 100, 1536, 72 * _KIB),
    "sm_90": (132, 227, 228, 2048, 50 * _KIB),
    "sm_90a": (132, 227, 228, 2048, 50 * _KIB),
}

_MOST_CTAS = {"sm_86": 16, "sm_89": 24}
"""CTAs of a multiprocessor, where they are not 32."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as programs see it. Sizes are in bytes; a block's shared memory is what it may opt in to."""

    arch: str
    multiprocessors: int
    shared_per_block: int
    shared_per_multiprocessor: int
    threads_per_multiprocessor: int
    l2_bytes: int

    @classmethod
    def named(cls, arch: str, multiprocessors: int | None = None) -> "Gpu":
        """The GPU of that target, such as "sm_90a". Raises SimulationError for one that isn't known here."""
        if arch not in _CHIPS:
            raise SimulationError(f"cannot simulate {arch!r}; known: {', '.join(_CHIPS)}")
        count, shared_block, shared_all, threads, l2 = _CHIPS[arch]
        if multiprocessors is not None and multiprocessors < 1:
            raise SimulationError(f"a GPU has at least one multiprocessor, not {multiprocessors}")
        return cls(arch, multiprocessors or count, shared_block * _KIB, shared_all * _KIB, threads, l2 * _KIB)

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability: (9, 0) of "sm_90a"."""
        return divmod(int(self.arch.removeprefix("sm_").rstrip("a")), 10)

    @property
    def max_cluster_size(self) -> int:
        """Blocks of the largest cluster, non-portable sizes included; 1 where there are no clusters."""
        return 16 if self.capability >= (9, 0) else 1

    def max_active_clusters(self, cluster_size: int) -> int:
        """How many clusters of blocks that fill a multiprocessor each run at a time."""
        return self.multiprocessors // cluster_size

    def resident_ctas(self, threads: int, shared_bytes: int) -> int:
        """How many CTAs run at a time, by their threads, and the bytes of shared memory that each declares.

        A multiprocessor keeps 1 KiB of shared memory of each for itself. Registers are not looked at, for PTX
        doesn't say how many a thread has.
        """
        each = min(
            self.threads_per_multiprocessor // (-(-threads // 32) * 32),
            self.shared_per_multiprocessor // (shared_bytes + _KIB),
            _MOST_CTAS.get(self.arch, 32),
        )
        return max(each, 1) * self.multiprocessors

    def attribute(self, number: int) -> int:
        """What cudaDeviceGetAttribute says. Raises SimulationError for what isn't known here."""
        attr = cudaDeviceAttr
        major, minor = self.capability
        values = {
            attr.cudaDevAttrMaxThreadsPerBlock: 1024,
            attr.cudaDevAttrMaxBlockDimX: 1024,
            attr.cudaDevAttrMaxBlockDimY: 1024,
            attr.cudaDevAttrMaxBlockDimZ: 64,
            attr.cudaDevAttrMaxGridDimX: 2**31 - 1,
            attr.cudaDevAttrMaxGridDimY: 65535,
            attr.cudaDevAttrMaxGridDimZ: 65535,
            attr.cudaDevAttrMaxSharedMemoryPerBlock: 48 * _KIB,
            attr.cudaDevAttrWarpSize: 32,
            attr.cudaDevAttrMaxRegistersPerBlock: 65536,
            attr.cudaDevAttrMultiProcessorCount: self.multiprocessors,
            attr.cudaDevAttrL2CacheSize: self.l2_bytes,
            attr.cudaDevAttrMaxThreadsPerMultiProcessor: self.threads_per_multiprocessor,
            attr.cudaDevAttrComputeCapabilityMajor: major,
            attr.cudaDevAttrComputeCapabilityMinor: minor,
            attr.cudaDevAttrMaxSharedMemoryPerMultiprocessor: self.shared_per_multiprocessor,
            attr.cudaDevAttrMaxRegistersPerMultiprocessor: 65536,
            attr.cudaDevAttrCooperativeLaunch: 1,
            attr.cudaDevAttrMaxSharedMemoryPerBlockOptin: self.shared_per_block,
            attr.cudaDevAttrReservedSharedMemoryPerBlock: _KIB,
        }
        known = {int(name): value for name, value in values.items()}
        if number not in known:
            raise SimulationError(
                f"the program asks for device attribute {number}, which the simulator doesn't know"
            )
        return known[number]
