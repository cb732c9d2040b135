"""The least swizzle with which a shared-memory tile has no bank conflicts, for everyone who accesses it.

A swizzle is chosen among all that there are by counting wavefronts: `cutelab.layouts.banks` says what each
access costs, its byte addresses are worked out once, and a candidate is a shift, a mask and an XOR of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np

from cutelab.layouts.arrays import as_numpy
from cutelab.layouts.banks import BANKS, INACTIVE, WORD_BYTES, Access, BankReport
from cutelab.layouts.errors import AccessError, SwizzleError
from cutelab.layouts.notation import format
from cutelab.layouts.swizzle import in_bytes, in_elements
from cutelab.layouts.tiles import GRANULE_BYTES, LINE_BYTES, log2
from cutelab.layouts.traffic import bank_report, contiguous_mode, element_bytes

WITHIN = ("any", "tma", "wgmma")
TMA_BOX = 256
"""The largest extent of a TMA box, in elements."""

Request = str | Access | tuple[Any, ...]
"""An access as `bank_report` takes it, with its operand if it has one: "ldmatrix.x4", (tiled_copy, "dst")."""

Candidate = tuple[int, int, int]  # bits, base and positive shift of a swizzle of byte addresses
IDENTITY: Candidate = (0, 4, 3)


@dataclass(frozen=True, eq=False)
class Solution:
    """The least swizzle of a tile, in elements, and what each access costs with it; `str()` says why.

    layout: the tile with it. plain: the reports without it. fewer: candidates of fewer bits, which don't do.
    """

    swizzle: cute.Swizzle
    layout: cute.ComposedLayout
    reports: tuple[BankReport, ...]
    plain: tuple[BankReport, ...]
    element_bytes: int
    fewer: int

    def __str__(self) -> str:
        why = "no swizzle is needed"
        if self.swizzle.num_bits:
            why = f"in bytes {format(in_bytes(self.swizzle, self.element_bytes))}"
            why += f"; the {self.fewer} candidates of fewer bits leave conflicts" if self.fewer else ""
        lines = [f"{format(self.swizzle)} on elements of {self.element_bytes} bytes: {why}"]
        for report, plain in zip(self.reports, self.plain, strict=True):
            before = "" if plain is report else f", {plain.conflicts.sum()} without a swizzle"
            lines.append(f"  {_costs(report)}{before}")
        return "\n".join(lines)


def _costs(report: BankReport) -> str:
    lost = int(report.conflicts.sum())
    return f"{report.access.name}: {report.wavefronts.sum()} wavefronts, {lost or 'no'} conflicts"


def solve(
    layout: cute.Layout,
    accesses: Sequence[Request],
    dtype: str | type[cutlass.Numeric],
    within: str = "any",
) -> Solution:
    """The least swizzle that frees all of `accesses` of bank conflicts and keeps vectors and words whole.

    layout: the tile without a swizzle, static, offsets in elements of `dtype`.
    accesses: what `bank_report` takes, each a name ("ldmatrix.x4") or a tuple: ("st.shared.b32", "across"),
        (tiled_copy, "dst"), (tiled_mma, "C").
    within: "any" swizzle; one that "tma" can write: S<1,4,3>, S<2,4,3> or S<3,4,3> in bytes for rows of 32,
        64 or 128 bytes, or none; one that "wgmma" can read: the same, but none for rows of 16 bytes only.

    The least has the fewest bits; of equals, the forms of TMA go first, then the shortest period, then the
    largest base, which keeps the longest vectors whole. The identity, of 0 bits, is one. Only swizzles that
    keep the tile within its cosize are taken; none merges two elements.

    Raises SwizzleError, which says what stands in the way and what would help; AccessError as `bank_report`
    does, so for vectors that aren't whole: no swizzle would make them so.
    """
    if within not in WITHIN:
        raise SwizzleError(f"`within` is one of {', '.join(map(repr, WITHIN))}; got {within!r}")
    if not isinstance(layout, cute.Layout):
        raise SwizzleError(
            f"{format(layout)} is swizzled already: pass its `.outer`, the tile without a swizzle"
        )
    size = element_bytes(dtype)
    plain = _plain_reports(layout, accesses, dtype)
    table = as_numpy(layout) * size
    candidates = _candidates(table, size, plain, within)
    best = _first_free(candidates, plain)
    if best is None:
        helps = _what_helps(table, size, plain, within) + _padding(layout, accesses, dtype)
        raise SwizzleError(_failure(layout, size, candidates, plain, helps))
    swizzle = _of_elements(best, size)
    reports = tuple(_swizzled(report, best) for report in plain) if best[0] else tuple(plain)
    fewer = sum(candidate[0] < best[0] for candidate in candidates)
    composed = cute.make_composed_layout(swizzle, 0, layout)
    return Solution(swizzle, composed, reports, tuple(plain), size, fewer)


def _plain_reports(layout: cute.Layout, accesses: Sequence[Request], dtype: Any) -> list[BankReport]:
    requests = (access if isinstance(access, tuple) else (access,) for access in accesses)
    return [bank_report(layout, access, dtype, *operand) for access, *operand in requests]


def _of_elements(candidate: Candidate, size: int) -> cute.Swizzle:
    return in_elements(cute.make_swizzle(*candidate), size)


def _moved(addresses: np.ndarray, bits: Any, base: Any, shift: Any) -> np.ndarray:
    """Byte addresses after a swizzle of positive shift, or after arrays of them that broadcast."""
    moved = addresses ^ ((addresses >> shift) & (((1 << bits) - 1) << base))
    return np.where(addresses == INACTIVE, INACTIVE, moved)


def _swizzled(report: BankReport, candidate: Candidate) -> BankReport:
    return BankReport(report.access, _moved(report.addresses, *candidate))


def _candidates(table: np.ndarray, size: int, plain: Sequence[BankReport], within: str) -> list[Candidate]:
    """The swizzles worth trying on a tile of these byte offsets, the least first.

    To undo a conflict, a swizzle has to change bits of the bank, 2–6, by what it reads in bits above them.
    One that changes higher bits as well has more than it needs, and one that reads only bits of the bank, as
    those of negative shift do, renames the banks. Bits within a word or the longest vector have to stay.
    """
    if within != "any":
        return _hardware_modes(table, size, within)
    whole = max([WORD_BYTES, size, *(report.access.bytes for report in plain)])
    end = int(table.max()) + size
    first, last, top = log2(whole), log2(BANKS * WORD_BYTES), (end - 1).bit_length()
    found = [IDENTITY]
    for base in range(first, last):
        for bits in range(1, last - base + 1):
            for shift in range(max(bits, last - base - bits + 1), top - base - bits + 1):
                inside = end % (1 << (base + bits)) == 0  # then every run of the bits that change is
                if inside or int(_moved(table, bits, base, shift).max()) + size <= end:
                    found.append((bits, base, shift))
    return sorted(found, key=lambda c: (c[0], c[1:] != IDENTITY[1:], c[1] + c[2], -c[1]))


def _hardware_modes(table: np.ndarray, size: int, within: str) -> list[Candidate]:
    """The swizzles of TMA or wgmma for a tile of these byte offsets, which depend on its rows.

    The hardware takes boxes of rows that follow one another, each as long as the swizzle's span: it refuses
    longer rows, and lays shorter ones out as if they were padded to the span. Without a swizzle the rows of
    TMA have up to 256 elements, a multiple of 16 bytes; wgmma's are 16 bytes long.
    """
    matrix = table.reshape(*table.shape[:2], -1)[..., 0] if table.ndim > 1 else table[None]
    mode = contiguous_mode(matrix, size)
    matrix = matrix if mode == 1 else matrix.T
    run = int((matrix[0] == matrix[0, 0] + size * np.arange(matrix.shape[1])).cumprod().sum()) * size
    dense = bool((matrix[:8, 0] == matrix[0, 0] + run * np.arange(len(matrix[:8]))).all())
    modes: dict[int, Candidate] = {32 << i: (i + 1, *IDENTITY[1:]) for i in range(3) if dense}
    if within == "tma":
        found = [IDENTITY] if run % GRANULE_BYTES == 0 and run <= TMA_BOX * size else []
        found += [modes[run]] if run in modes else []
    elif mode == 0 and size != 2:
        raise SwizzleError(f"wgmma reads 16-bit operands contiguous along M or N, none of {size * 8} bits")
    else:
        modes[GRANULE_BYTES] = IDENTITY
        found = [modes[run]] if run in modes and dense and len(matrix) % 8 == 0 else []
    if not found:
        raise SwizzleError(
            f"no mode of {within} has rows of {run} bytes{'' if dense else ' with gaps between them'}: pave "
            "the tile with atoms of 8 rows of 32, 64 or 128 bytes"
        )
    return found


def _first_free(candidates: list[Candidate], plain: Sequence[BankReport]) -> Candidate | None:
    """The first without conflicts in any access. Most fail in what is the worst instruction without one."""
    left = np.array(candidates)
    for report in plain:
        tried = _moved(report.addresses[report.worst], *left.T[..., None])
        left = left[BankReport(report.access, tried).conflicts == 0]
    for candidate in map(tuple, left.tolist()):
        if not any(_swizzled(report, candidate).conflicts.any() for report in plain):
            return candidate
    return None


def _failure(
    layout: cute.Layout, size: int, candidates: list[Candidate], plain: Sequence[BankReport], helps: list[str]
) -> str:
    lost = [sum(int(_swizzled(report, c).conflicts.sum()) for report in plain) for c in candidates]
    best = candidates[int(np.argmin(lost))]
    lines = [
        f"none of {len(candidates)} swizzles frees every access to {format(layout)}, of {size}-byte "
        f"elements, of bank conflicts; the best, {format(_of_elements(best, size))}, leaves"
    ]
    lines += [f"  access {i}, {_costs(_swizzled(report, best))}" for i, report in enumerate(plain)]
    if not helps:
        return "\n".join([*lines, "neither would one access less, nor shorter vectors, nor padding"])
    return "\n".join([*lines, "this would help:", *helps])


def _what_helps(table: np.ndarray, size: int, plain: list[BankReport], within: str) -> list[str]:
    """Any swizzle, room at the end, one access less or vectors of half the length, each with its swizzle."""
    room = -(-(int(table.max()) + size) // LINE_BYTES) * LINE_BYTES  # the last line in full
    if within == "any":
        tries = [(f"room for {room // size} elements", np.append(table, room - size), plain, within)]
    else:
        tries = [("any swizzle", table, plain, "any")]
    for i, report in enumerate(plain):
        before, after = plain[:i], plain[i + 1 :]
        if before or after:
            tries.append((f"without access {i}", table, before + after, within))
        half = report.access.bytes // 2
        if not report.access.matrices and half >= max(size, WORD_BYTES):
            further = np.where(report.addresses == INACTIVE, INACTIVE, report.addresses + half)
            halves = BankReport(Access(report.access.kind, half), np.concatenate([report.addresses, further]))
            tries.append((f"access {i} by {halves.access.name}", table, [*before, halves, *after], within))
    found = [(what, _first_free(_candidates(t, size, r, limit), r)) for what, t, r, limit in tries]
    return [f"  {what}: {format(_of_elements(best, size))}" for what, best in found if best is not None]


def _padding(layout: cute.Layout, accesses: Sequence[Request], dtype: Any) -> list[str]:
    """The shortest padding of the rows of a plain matrix that does without a swizzle."""
    if cute.depth(layout) > 1 or cute.rank(layout) != 2:
        return []
    pitch = max(layout.stride)
    for pad in (1 << e for e in range(log2(LINE_BYTES // element_bytes(dtype)))):
        stride = tuple(step + pad if step == pitch else step for step in layout.stride)
        padded = cute.make_layout(layout.shape, stride=stride)
        try:
            reports = _plain_reports(padded, accesses, dtype)
        except AccessError:  # vectors are no longer aligned
            continue
        if not any(report.conflicts.any() for report in reports):
            return [f"  rows padded by {pad} elements, without a swizzle: {format(padded)}"]
    return []
