"""Rings of shared-memory stages between a TMA producer and its consumers, kept in order by mbarriers.

Each stage has two mbarriers. `full` completes a phase when the producer has announced the bytes of the stage
and TMA has counted them down; `empty` when all that read the stage have released it. Producer and consumers
go round the ring at their own pace, each with a state: stage and parity of the phase that it waits for. The
ring itself is `cutlass.pipeline.PipelineTmaAsync`; here is what its counts must be (PTX ISA, "mbarrier").
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int64, pipeline

from cutelab.copies.errors import CopyError

MAX_COUNT = 2**20 - 1
"""Of arrivals, and of outstanding bytes, of an mbarrier (PTX ISA, "Contents of the mbarrier object")."""


@dataclass(frozen=True)
class TmaRing:
    """A ring of `stages`, each filled by TMA copies of `copy_bytes`, and read by `readers` warps of a CTA.

    cluster: CTAs along M and N that share tiles: those in one row get the same tile of A, those in one
        column the same tile of B, each CTA loading a slice of it into all. So a stage is empty only when all
        CTAs in this one's row and column have released theirs, and full when the slices of all have come.
    """

    stages: int
    copy_bytes: tuple[int, ...]
    readers: int
    cluster: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        """Raises CopyError with the count that no mbarrier can hold, or that nobody would ever reach."""
        if self.stages < 1:
            raise CopyError(f"a ring has at least 1 stage, got {self.stages}")
        if self.readers < 1:
            raise CopyError(f"a stage that {self.readers} warps read is never released: at least 1 must")
        for size in self.copy_bytes:
            if size % 16 or size <= 0:
                raise CopyError(f"TMA copies multiples of 16 bytes, got a copy of {size} a stage")
        for name, count in (("arrivals", self.releases), ("bytes", self.transaction_bytes)):
            if not 1 <= count <= MAX_COUNT:
                raise CopyError(f"an mbarrier counts 1 to {MAX_COUNT} {name}, got {count} a stage")

    @property
    def releases(self) -> int:
        """Arrivals at `empty`: one from each reading warp of each CTA that this CTA's copies reach."""
        return self.readers * (self.cluster[0] + self.cluster[1] - 1)

    @property
    def transaction_bytes(self) -> int:
        """Bytes that arrive in one CTA for each stage, whoever sent them."""
        return sum(self.copy_bytes)

    @property
    def barrier_bytes(self) -> int:
        """Shared memory of the mbarriers."""
        return 2 * 8 * self.stages

    def create(self, barriers: cute.Pointer) -> pipeline.PipelineTmaAsync:
        """The ring on mbarriers in shared memory. They are ready after `pipeline.pipeline_init_wait`."""
        thread = pipeline.Agent.Thread
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=cute.recast_ptr(barriers, dtype=Int64),
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(thread),
            consumer_group=pipeline.CooperativeGroup(thread, self.releases),
            tx_count=self.transaction_bytes,
            cta_layout_vmnk=cute.make_layout((1, *self.cluster, 1)),
            defer_sync=True,
        )

    def producer_state(self) -> pipeline.PipelineState:
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)

    def consumer_state(self) -> pipeline.PipelineState:
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
