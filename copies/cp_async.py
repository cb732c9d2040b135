"""cp.async: copies from global to shared memory that don't pass through registers (sm_80 and newer).

The DSL's `CopyG2SOp` covers the everyday forms and is what the tile copies use; `cp_async` issues any form
of the instruction. Copies are collected into groups by `commit`; groups complete in order, and a thread
waits until at most N of its newest ones are outstanding (PTX ISA, "Non-bulk copy").
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.arch import inline_ptx
from cutlass.cutlass_dsl import const_expr

from cutelab.copies.errors import CopyError
from cutelab.copies.vectorized import CP_ASYNC_BYTES

L2_PREFETCH_BYTES = (64, 128, 256)


@cute.jit
def cp_async(
    dst: cute.Pointer,
    src: cute.Pointer,
    size: int,
    *,
    source_bytes: Int32 | None = None,
    cache: str = "ca",
    l2_prefetch: int | None = None,
    cache_policy: Int64 | None = None,
):
    """One cp.async of `size` bytes from global `src` to shared `dst`, both aligned to `size`.

    source_bytes: read only so many bytes (0 … size) and fill the rest of `dst` with zeros; 0 reads nothing.
    cache: "ca" keeps the line in L1, "cg" bypasses it (16 bytes only).
    l2_prefetch: hint that L2 may fetch 64, 128 or 256 bytes around the address.
    cache_policy: a 64-bit policy made by `createpolicy`, for L2 eviction priority.

    PTX ISA, "cp.async". Raises CopyError when there is no such form.
    """
    if const_expr(size not in CP_ASYNC_BYTES):
        raise CopyError(f"cp.async copies {CP_ASYNC_BYTES} bytes, got {size}")
    if const_expr(cache not in ("ca", "cg") or (cache == "cg" and size != 16)):
        raise CopyError(
            f"cp.async.cg copies 16 bytes and .ca 4, 8 or 16; got cache={cache!r} with {size} bytes"
        )
    if const_expr(l2_prefetch is not None and l2_prefetch not in L2_PREFETCH_BYTES):
        raise CopyError(f"cp.async prefetches {L2_PREFETCH_BYTES} bytes into L2, got {l2_prefetch}")

    operands = [dst.toint(), src.toint(), source_bytes, cache_policy]
    hint = ".L2::cache_hint" if const_expr(cache_policy is not None) else ""
    prefetch = f".L2::{l2_prefetch}B" if const_expr(l2_prefetch is not None) else ""
    present = [x for x in operands if const_expr(x is not None)]
    sizes = ", ".join([str(size)] + [f"{{$r{i}}}" for i in range(2, len(present))])
    inline_ptx(
        f"cp.async.{cache}.shared.global{hint}{prefetch} [{{$r0}}], [{{$r1}}], {sizes};",
        read_only_args=present,
    )


class CpAsyncRing:
    """A ring of `stages` shared-memory buffers with `stages - 1` groups of copies in flight.

    `read` is the stage being consumed; `write` the one consumed before it, which takes the next copies.
    After filling the first `stages - 1` and waiting once, one turn of the loop is

        … consume stage ring.read, copy into stage ring.write …
        ring.commit()                # also when nothing was copied: the count of groups must go on
        ring.wait()                  # stage ring.next has landed, for every thread of the CTA
        ring.advance()

    The barrier in `wait` does double duty: it makes what each thread copied visible to all, and it proves
    that all have finished reading the stage that becomes `write`.
    """

    def __init__(self, stages: int, read: Int32 | int = 0, write: Int32 | int | None = None):
        if stages < 2:
            raise CopyError(f"a ring needs at least 2 stages to overlap copies with work, got {stages}")
        self.stages = stages
        self.read = Int32(read)
        self.write = Int32(stages - 1 if write is None else write)

    def commit(self):
        cute.arch.cp_async_commit_group()

    def wait(self):
        """Waits until no more than the newest `stages - 2` groups are in flight, in every thread."""
        cute.arch.cp_async_wait_group(self.stages - 2)
        cute.arch.sync_threads()

    def drain(self):
        """Waits for all copies, so that the buffers can be used for something else."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

    @property
    def next(self) -> Int32:
        """The stage after `read`."""
        after = self.read + 1
        return cutlass.select_(after == self.stages, Int32(0), after)

    def advance(self):
        self.write, self.read = self.read, self.next

    def __extract_mlir_values__(self):
        return [self.read.ir_value(), self.write.ir_value()]

    def __new_from_mlir_values__(self, values):
        return CpAsyncRing(self.stages, Int32(values[0]), Int32(values[1]))
