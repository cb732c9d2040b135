"""What is fixed about a Hopper GEMM before it is traced."""

from dataclasses import dataclass
from math import gcd

from cutelab.copies import TmaRing
from cutelab.kernels.dense_gemm.config import AB_DTYPES, OUT_DTYPES
from cutelab.kernels.dense_gemm.epilogue import Epilogue
from cutelab.kernels.dense_gemm.epilogue_sm90 import WarpgroupEpilogue
from cutelab.mmas import MMA_ROWS, WARP, WARPGROUP


@dataclass(frozen=True)
class Sm90Config:
    ab_dtype: str
    out_dtype: str
    a_major: str = "k"
    b_major: str = "k"
    out_major: str = "k"
    out_align: int = 16
    c_align: int = 0
    bias: str | None = None
    activation: str | None = None
    tile: tuple[int, int, int] = (128, 256, 64)
    stages: int = 4
    consumers: int = 2
    pingpong: bool = False
    cluster: tuple[int, int] = (2, 1)
    group: int = 8
    buffers: int = 2
    stream_k: bool = False
    early_launch: bool = False

    @property
    def threads(self) -> int:
        """One warpgroup to copy, the others to multiply."""
        return (1 + self.consumers) * WARPGROUP

    @property
    def rows(self) -> int:
        """Rows of a tile that one warpgroup computes."""
        return self.tile[0] if self.pingpong else self.tile[0] // self.consumers

    @property
    def ring(self) -> TmaRing:
        m, n, k = self.tile
        element = AB_DTYPES[self.ab_dtype].width // 8
        warps = WARPGROUP // WARP * (1 if self.pingpong else self.consumers)
        return TmaRing(self.stages, (m * k * element, n * k * element), warps, self.cluster)

    @property
    def ring_bytes(self) -> int:
        """Shared memory of the stages of A and B."""
        return self.stages * self.ring.transaction_bytes

    @property
    def epilogue(self) -> WarpgroupEpilogue:
        dtype = OUT_DTYPES[self.out_dtype]
        columns = gcd(self.tile[1], 1024 // dtype.width)
        contiguous = 1 if self.out_major == "k" else 0
        slices = Epilogue(
            (MMA_ROWS, columns),
            dtype,
            WARPGROUP,
            self.out_align,
            self.c_align,
            self.bias,
            self.activation,
            contiguous,
        )
        # As many slices as fill the buffers a whole number of times: each tile begins with the first buffer.
        buffers = gcd(self.rows // MMA_ROWS * (self.tile[1] // columns), self.buffers)
        return WarpgroupEpilogue(slices, AB_DTYPES[self.ab_dtype], self.rows, self.tile[1], buffers)

    @property
    def accumulators(self) -> int:
        """Of a thread."""
        return self.rows * self.tile[1] // WARPGROUP

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block: [ A | B | the warpgroups' epilogues | mbarriers ]."""
        return self.ring_bytes + self.consumers * self.epilogue.smem_bytes + self.ring.barrier_bytes
