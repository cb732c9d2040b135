"""Matrix instructions of warps and warpgroups, and their loads and stores of 8 × 8 matrices."""

from typing import Any

import numpy as np

from cutelab.simulator import engines, numbers
from cutelab.simulator.accesses import Accesses
from cutelab.simulator.errors import (
    BarrierError,
    DivergenceError,
    RaceError,
    SimulationError,
    UninitializedRead,
)
from cutelab.simulator.races import WGMMA
from cutelab.simulator.state import WARP, WARPGROUP
from cutelab.simulator.translate import bit_set


class Matrices(Accesses):
    # --- ldmatrix and stmatrix

    def ldmatrix(self, rows: tuple[int, ...], addresses: np.ndarray, transposed: bool, s: Any) -> None:
        """PTX ISA, "ldmatrix": lane 8·j + i points to row i of matrix j; lane l gets words l%4 of row l/4."""
        warps = len(self.whole_warps(s))
        pointers = addresses.reshape(warps, WARP)[:, : 8 * len(rows)].ravel()
        self.count_banks("ldmatrix", 16, pointing(self.ids(s), len(rows)), pointers)
        words = self.shared.load(pointers, np.dtype(np.uint32), 4).reshape(warps, len(rows), 8, 4)
        unwritten = self.shadow.on_read(np.repeat(self.agent[s][::WARP], 8 * len(rows)), pointers, 16)
        if unwritten is not None:  # a matrix with an unwritten row taints the register in the whole warp
            matrices = np.logical_or.reduce(unwritten.reshape(warps, len(rows), 8), axis=2)
            for matrix, row in enumerate(rows):
                self.taint_with(("r", row), np.repeat(matrices[:, matrix], WARP), s)
        if transposed:
            words = transpose(words)
        for matrix, row in enumerate(rows):
            self.r[row, s] = words[:, matrix].reshape(-1)

    def stmatrix(self, rows: tuple[int, ...], addresses: np.ndarray, transposed: bool, s: Any) -> None:
        """PTX ISA, "stmatrix": ldmatrix backwards."""
        warps = len(self.whole_warps(s))
        pointers = addresses.reshape(warps, WARP)[:, : 8 * len(rows)].ravel()
        words = np.stack([self.r[row, s].reshape(warps, 8, 4) for row in rows], axis=1)
        if transposed:
            words = transpose(words)
        self.count_banks("stmatrix", 16, pointing(self.ids(s), len(rows)), pointers)
        self.shared.store(pointers, words.reshape(-1, 4))
        self.shadow.on_write(np.repeat(self.agent[s][::WARP], 8 * len(rows)), pointers, 16)

    def movmatrix(self, to: int, source: int, s: Any) -> None:
        """PTX ISA, "movmatrix": transposes an 8 × 8 matrix of 16-bit elements in registers."""
        warps = len(self.whole_warps(s))
        self.r[to, s] = transpose(self.r[source, s].reshape(warps, 1, 8, 4)).reshape(-1)

    # --- mma.sync

    def mma(
        self,
        k: int,
        a_type: str,
        b_type: str,
        d_type: str,
        clip: bool,
        d: tuple,
        a: tuple,
        b: tuple,
        c: tuple,
        s: Any,
    ) -> None:
        """mma.sync.m16n8k`k` of warps: D = A·B + C (PTX ISA, "Matrix fragments for mma.m16n8k…")."""
        warps = len(self.whole_warps(s))
        A = fragment(self.stacked(a, s, warps), a_type, k)  # (warps, 16, k)
        B = fragment(self.stacked(b, s, warps), b_type, k)  # (warps, 8, k)
        product = np.matmul(A, B.swapaxes(1, 2))  # (warps, 16, 8)
        # Lane l holds (l/4, 2·(l%4)) and the next, and the same eight rows below.
        quarters = product.reshape(warps, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1)
        start = self.accumulators(c, d_type, s)
        self.set_accumulators(d, d_type, quarters + start, s, clip)

    def accumulators(self, rows: tuple[int, ...], kind: str, s: Any) -> np.ndarray:
        """(elements, threads); of f16, a register holds two."""
        if kind == "f32":
            return self.rf[np.array(rows)[:, None], self.ids(s)]
        bits = self.r[np.array(rows)[:, None], self.ids(s)]
        if kind == "s32":
            return bits.view(np.int32).astype(np.float64)
        halves = numbers.unpack(bits, "f16")  # (registers, threads, 2)
        return halves.transpose(0, 2, 1).reshape(-1, halves.shape[1])

    def set_accumulators(
        self, rows: tuple[int, ...], kind: str, values: np.ndarray, s: Any, clip: bool
    ) -> None:
        at = np.array(rows)[:, None], self.ids(s)
        if kind == "f32":
            self.rf[at] = values
        elif kind == "s32":
            whole = np.clip(values, -(2**31), 2**31 - 1) if clip else values
            self.r[at] = (whole.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)
        else:
            bits = numbers.to_bits(values, "f16").astype(np.uint32)
            self.r[at] = bits[0::2] | bits[1::2] << np.uint32(16)

    def stacked(self, rows: tuple[int, ...], s: Any, warps: int) -> np.ndarray:
        """(warps, 32 lanes, registers)."""
        return np.stack([self.r[row, s].reshape(warps, WARP) for row in rows], axis=-1)

    # --- wgmma

    def wgmma(
        self,
        n: int,
        k: int,
        types: tuple[str, str, str],
        d: tuple[int, ...],
        a: Any,
        b: np.ndarray,
        keep: Any,
        options: tuple[int, int, int, int],
        clip: bool,
        s: Any,
    ) -> None:
        """wgmma.mma_async.m64n`n`k`k`: D = A·B + D, or A·B where `keep` is false.

        a: registers or descriptors; b: descriptors; options: (sign of A, sign of B, A and B transposed).
        The result is there at once; `pending` remembers which registers the program may not touch yet.
        """
        ids = self.ids(s)
        self.whole_warps(s)
        if len(ids) % WARPGROUP or (ids[::WARPGROUP] % WARPGROUP).any():
            raise DivergenceError("wgmma is executed by a part of a warpgroup")
        d_type, a_type, b_type = types
        keep = self.lanes(keep, s)
        sign_a, sign_b, transposed_a, transposed_b = options
        for first in range(0, len(ids), WARPGROUP):
            group = ids[first : first + WARPGROUP]
            clock = self.wgmma_clock(group)
            self.check_fragments(group, d, a if isinstance(a, tuple) else (), (n, k))
            B = self.operand(int(b[first]), n, k, bool(transposed_b), b_type, group)
            if isinstance(a, tuple):
                A = fragment(self.stacked(a, group, 4), a_type, k).reshape(64, k)
            else:
                A = self.operand(int(a[first]), 64, k, bool(transposed_a), a_type, group)
            values = engines.wgmma_fragment(sign_a * sign_b * (A @ B.T))
            if keep[first]:
                values = values + self.accumulators(d, d_type, group)
            self.set_accumulators(d, d_type, values, group, clip)
            busy = frozenset((*d, *a) if isinstance(a, tuple) else d)
            self.pending.setdefault(int(self.leader[group[0]]), []).append((clock, busy, frozenset(d)))

    def wgmma_fence(self, s: Any) -> None:
        """wgmma.fence: what its warps have done with registers comes before what their next wgmma do.

        `unfenced` has the fragments' registers that a warp's other instructions have used since, as bits;
        `accumulating` the accumulators of its wgmma since, as bits, and their shapes.
        """
        self.whole_warps(s)
        for warp in self.warps_of(s):
            self.unfenced[warp] = 0
            self.accumulating[warp] = {}

    def use_fragments(self, rows: int, s: Any) -> None:
        """An instruction other than wgmma uses registers that the kernel's wgmma use too."""
        for warp in self.warps_of(s):
            if warp in self.unfenced:
                self.unfenced[warp] |= rows

    def check_fragments(
        self, group: np.ndarray, d: tuple[int, ...], a: tuple[int, ...], shape: tuple[int, int]
    ) -> None:
        """PTX ISA, "wgmma.fence": where a wgmma needs one before it; a has the registers of its A, if any."""
        leader = int(self.leader[group[0]])
        accumulators, inputs = bit_set(d), bit_set(a)
        for warp in self.agent[group][::WARP].tolist():
            if warp not in self.unfenced:
                raise RaceError(f"race: no wgmma.fence before the first wgmma of warp {warp}")
            if used := self.unfenced[warp] & (accumulators | inputs):
                raise RaceError(
                    f"race: wgmma uses {self.register(used)}, which other instructions of warp {warp} "
                    "have used since its last wgmma.fence"
                )
            before = self.accumulating[warp]
            for others, other_shape in before.items():
                if used := others & (inputs if other_shape == shape else accumulators | inputs):
                    raise RaceError(
                        f"race: wgmma of warp {warp} uses {self.register(used)}, where an earlier one "
                        "accumulates, in another shape or as A, with no wgmma.fence between them"
                    )
            before[accumulators] = shape
        for _, _, written in self.pending.get(leader, ()):
            if used := bit_set(written) & inputs:
                raise RaceError(
                    f"race: wgmma of warp {leader} reads {self.register(used)}, which an earlier one is at "
                    "work on, with no wgmma.wait_group between them"
                )

    def register(self, rows: int) -> str:
        """The name of the first of some 32-bit registers."""
        first = (rows & -rows).bit_length() - 1
        kinds = {each.name: each.type for each in self.program.kernel.registers.values()}
        names = [name for name, row in self.program.rows.items() if row == first and kinds[name][1:] == "32"]
        return names[0]

    def wgmma_clock(self, group: np.ndarray) -> int:
        """How many groups the warpgroup has committed: all its warps must agree."""
        clocks = {self.order.clock(WGMMA, warp) for warp in self.agent[group][::WARP].tolist()}
        if len(clocks) > 1:
            raise BarrierError("the warps of a warpgroup have committed different numbers of wgmma groups")
        return clocks.pop()

    def wait_wgmma(self, groups: int, s: Any) -> None:
        """wgmma.wait_group: a warp learns that all but the newest groups of its warpgroup are done."""
        for warp in self.warps_of(s):
            leader = warp - (warp - int(self.agent[0])) % 4
            done = self.order.wait(WGMMA, warp, groups, leader)
            left = [entry for entry in self.pending.get(leader, []) if entry[0] > done]
            if left:
                self.pending[leader] = left
            else:
                self.pending.pop(leader, None)

    def touch_pending(self, rows: frozenset[int], s: Any) -> None:
        """An instruction reads or writes 32-bit registers."""
        for leader, entries in self.pending.items():
            for _, busy, _ in entries:
                if not busy.isdisjoint(rows) and (self.leader[s] == leader).any():
                    raise RaceError(
                        f"race: the warpgroup of warp {leader} uses a register that its wgmma is at work "
                        "on, with no wgmma.wait_group between them"
                    )

    def operand(
        self, descriptor: int, rows: int, k: int, transposed: bool, kind: str, group: np.ndarray
    ) -> np.ndarray:
        """A matrix of wgmma in shared memory, (rows, k)."""
        dtype = np.dtype(f"u{numbers.OPERAND_BYTES[kind]}")
        places = engines.matrix_addresses(descriptor, rows, k, transposed, dtype.itemsize)
        bits = self.shared.load(places.ravel(), dtype, 1)[:, 0].reshape(places.shape)
        cells = np.unique(places.ravel() & ~15)
        leader, warps = int(self.leader[group[0]]), self.agent[group][::WARP]
        if self.shadow.on_group_read(leader, warps, cells, 16, WGMMA):
            raise UninitializedRead(f"wgmma of warp {leader} reads shared memory that nobody has written")
        return numbers.operand(bits, kind)


def pointing(threads: np.ndarray, matrices: int) -> np.ndarray:
    """The threads of whole warps that give the addresses of rows of matrices."""
    return threads.reshape(-1, WARP)[:, : 8 * matrices].ravel()


def transpose(words: np.ndarray) -> np.ndarray:
    """(…, 8, 4) words as matrices of 8 × 8 halves, transposed."""
    halves = np.ascontiguousarray(words).view(np.uint16)
    return np.ascontiguousarray(halves.swapaxes(-2, -1)).view(np.uint32)


def fragment(registers: np.ndarray, kind: str, k: int) -> np.ndarray:
    """An A or B fragment as a matrix: (warps, 32, registers) → (warps, rows, k).

    Lane l holds row l/4 of each eight rows; its registers go over the rows, then over the columns: elements
    from column l%4 · (32 bits' worth) on of each 128 bits of a row.
    """
    warps, _, count = registers.shape
    per_register = 4 // numbers.OPERAND_BYTES[kind]
    columns = k // (4 * per_register)  # registers along k
    if not columns or count % columns:
        raise SimulationError(f"{count} registers don't make a fragment of {kind} with k = {k}")
    values = numbers.unpack(registers, kind)  # (warps, 32, registers, per register)
    values = values.reshape(warps, 8, 4, columns, count // columns, per_register)
    return values.transpose(0, 4, 1, 3, 2, 5).reshape(warps, 8 * (count // columns), k)
