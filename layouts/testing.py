"""Bank conflicts as failed tests: an assertion whose message draws the conflict and proposes a swizzle.

In pytest the assertion is also a fixture of the same name, from the plugin `pytest_cutelab`.
"""

from itertools import groupby

import cutlass
import cutlass.cute as cute

from cutelab.layouts.banks import BANKS, Access, BankReport
from cutelab.layouts.errors import AccessError, SwizzleError
from cutelab.layouts.notation import format
from cutelab.layouts.solver import solve
from cutelab.layouts.traffic import Layout, bank_report, element_bytes

MAX_COLLISIONS = 16
"""Collisions that a drawing lists."""
MAX_LANES = 8
"""Lanes that it names for one of them."""


def assert_conflict_free(
    layout: Layout,
    access: str | Access | cute.TiledCopy | cute.TiledMma,
    dtype: str | type[cutlass.Numeric],
    operand: str | None = None,
    *,
    allow: int = 0,
) -> None:
    """Fails if accessing all of the tile once loses more than `allow` wavefronts to bank conflicts.

    The other arguments are those of `bank_report`. The AssertionError shows, for the worst instruction, which
    lanes of which phase meet in which bank, and the least swizzle that avoids it, or why there is none.
    """
    __tracebackhide__ = True
    report = bank_report(layout, access, dtype, operand)
    lost = int(report.conflicts.sum())
    if lost <= allow:
        return
    request = (access,) if operand is None else (access, operand)
    raise AssertionError(
        f"{report.access.name} of {format(layout)}, elements of {element_bytes(dtype)} bytes: {lost} of "
        f"{report.wavefronts.sum()} wavefronts are bank conflicts, {allow} allowed\n"
        f"{draw_conflicts(report)}\n{_proposal(layout, request, dtype)}"
    )


def _proposal(layout: Layout, request: tuple, dtype: str | type) -> str:
    plain = unswizzled(layout)
    if plain is None:
        return "without its swizzle the tile is not a plain layout, so none is proposed"
    try:
        return f"without conflicts: {format(solve(plain, [request], dtype).layout)}"
    except (AccessError, SwizzleError) as error:
        return str(error)


def unswizzled(layout: Layout) -> cute.Layout | None:
    """The layout that a swizzle is applied to; None for another composition."""
    if isinstance(layout, cute.Layout):
        return layout
    return layout.outer if isinstance(layout.inner, cute.Swizzle) and layout.offset == 0 else None


def draw_conflicts(report: BankReport, instruction: int | None = None) -> str:
    """The banks that an instruction needs, in text: the one with the most conflicts, if not given.

    A line for each phase and a column for each bank: how often the phase needs it, "+" for ten times or more.
    Below, the lanes that meet and their byte addresses.
    """
    number = report.worst if instruction is None else instruction
    collisions = report.collisions(number)
    wavefronts, ideal = int(report.wavefronts[number]), int(report.ideal[number])
    lines = [
        f"instruction {number}: {wavefronts} wavefronts, {ideal} without conflicts; needed of each bank",
        "  bank     " + "".join(f"{bank:<8}" for bank in range(0, BANKS, 8)).rstrip(),
    ]
    for phase, lanes in enumerate(report.phases(number)):
        needed = _needed(report, number, lanes)
        marks = "".join("." if n == 0 else str(n) if n < 10 else "+" for n in needed)
        lines.append(f"  phase {phase}  {marks}  {_spans(lanes, 'lane')}")
    met = [(phase, lanes, bank) for phase, bank, lanes in collisions]
    groups = [(key, [bank for *_, bank in found]) for key, found in groupby(met, key=lambda x: x[:2])]
    for (phase, lanes), banks in groups[:MAX_COLLISIONS]:
        at = _first([str(report.addresses[number, lane]) for lane in lanes])
        lines.append(f"  phase {phase}, {_spans(banks, 'bank')}: {_spans(lanes, 'lane')} at bytes {at}")
    if len(groups) > MAX_COLLISIONS:
        lines.append(f"  and {len(groups) - MAX_COLLISIONS} more")
    return "\n".join(lines)


def _needed(report: BankReport, instruction: int, lanes: list[int]) -> list[int]:
    """How many words a phase needs of each bank. Only cp.async counts a word again for each lane."""
    words = [word for lane in lanes for word in report.words(instruction, lane)]
    counted = words if report.access.kind == "cp.async" else set(words)
    banks = [word % BANKS for word in counted]
    return [banks.count(bank) for bank in range(BANKS)]


def _spans(numbers: list[int], what: str) -> str:
    """Ascending numbers, runs of them as ranges: "banks 0–3, 8"."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda x: x[1] - x[0])]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    return f"{what}{'s' if len(numbers) > 1 else ''} {_first(texts)}"


def _first(texts: list[str]) -> str:
    return ", ".join(texts[:MAX_LANES]) + (", …" if len(texts) > MAX_LANES else "")
