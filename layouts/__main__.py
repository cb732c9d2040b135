"""What a layout does to the banks of shared memory, from the command line.

    python -m cutelab.layouts '(8,32):(32,1)' --access ldmatrix.x4 --dtype bf16

prints what the access costs, where its worst instruction collides and the least swizzle that avoids it, and
draws that instruction. Without --access it prints and draws the offsets. Bad input gives one line and exit
code 2.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import NoReturn

import cutlass.cute as cute

from cutelab.layouts import draw
from cutelab.layouts.arrays import as_numpy
from cutelab.layouts.banks import BankReport
from cutelab.layouts.errors import AccessError, SwizzleError
from cutelab.layouts.notation import NotationError, format, parse_layout
from cutelab.layouts.solver import Solution, solve
from cutelab.layouts.svg import PictureError
from cutelab.layouts.swizzle import in_elements
from cutelab.layouts.testing import draw_conflicts, unswizzled
from cutelab.layouts.traffic import DTYPES, Layout, bank_report, element_bytes

MAX_SIZE = 1 << 20
"""Elements of a layout: four times the bytes of shared memory that a block has."""
MAX_ROWS, MAX_COLUMNS = 16, 16
"""Of the printed table of offsets."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="cutelab.layouts", description="Offsets and bank conflicts of a shared-memory tile."
    )
    parser.add_argument(
        "layout", help="in CuTe's notation, offsets in elements: 'S<2,3,3> o 0 o (8,32):(32,1)'"
    )
    parser.add_argument(
        "--access",
        action="append",
        default=[],
        metavar="NAME",
        help="ld.shared.b128, st.shared.b32, ldmatrix.x4, cp.async.16, …; may be given several times",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the elements (default: bf16)")
    parser.add_argument(
        "--order", choices=("along", "across"), default="along", help="of the lanes, to the contiguous mode"
    )
    parser.add_argument(
        "--output", metavar="FILE.svg", help="the picture (default: banks.svg or offsets.svg)"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns 0; bad input ends in SystemExit(2), after one line on stderr."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        layout = parse_layout(args.layout)
        if cute.size(layout) > MAX_SIZE:
            parser.error(f"the layout has {cute.size(layout)} elements, more than {MAX_SIZE}")
        reports = [bank_report(layout, access, args.dtype, args.order) for access in args.access]
        text = _banks_text(layout, reports, args) if reports else _offsets_text(layout)
        written = _draw(layout, reports, args.output)
    except NotationError as error:
        message = str(error).splitlines()[0]
        parser.error(f"{message} at character {error.position} of {error.text!r}")
    except (AccessError, PictureError, TypeError, OSError) as error:
        parser.error(" ".join(str(error).split()))
    print(f"{text}\n{written}")
    return 0


def _draw(layout: Layout, reports: list[BankReport], output: str | None) -> str:
    """Writes the picture, and says where it is; one that is too large is an error only if asked for."""
    path = Path(output or ("banks.svg" if reports else "offsets.svg"))
    try:
        if reports:
            worst = max(reports, key=lambda report: int(report.conflicts.max()))
            picture = draw.banks(worst, worst.worst)
        else:
            picture = draw.offsets(layout)
    except PictureError as error:
        if output:
            raise
        return f"no picture: {error}"
    picture.save(path)
    return f"the picture is in {path}"


def _banks_text(layout: Layout, reports: list[BankReport], args: argparse.Namespace) -> str:
    lines = [f"{format(layout)}, elements of {element_bytes(args.dtype)} bytes", ""]
    lines.append(f"{'access':20}{'instructions':>13}{'wavefronts of each':>20}{'ideal':>7}{'conflicts':>11}")
    for report in reports:
        kinds = Counter(zip(report.wavefronts.tolist(), report.ideal.tolist(), strict=True))
        for (wavefronts, ideal), count in sorted(kinds.items(), reverse=True):
            lost = wavefronts - ideal
            lines.append(f"{report.access.name:20}{count:13}{wavefronts:20}{ideal:7}{lost:11}")
    for report in reports:
        if report.conflicts.any():
            lines += ["", f"{report.access.name}, {draw_conflicts(report)}"]
    return "\n".join([*lines, "", *_proposal(layout, args)])


def _proposal(layout: Layout, args: argparse.Namespace) -> list[str]:
    """What `solve` proposes for the layout without its swizzle."""
    plain = unswizzled(layout)
    if plain is None:
        return ["no proposal: the layout is not a swizzled one"]
    try:
        solution = solve(plain, [(access, args.order) for access in args.access], args.dtype)
    except (AccessError, SwizzleError) as error:
        return [str(error)]
    return [f"least swizzle: {solution}", *_mistaken_units(layout, solution)]


def _mistaken_units(layout: Layout, solution: Solution) -> list[str]:
    """A hint, if the layout's swizzle would be the solution, had it been meant in bytes."""
    if isinstance(layout, cute.Layout) or layout.inner == solution.swizzle:
        return []
    try:
        meant = in_elements(layout.inner, solution.element_bytes)
    except SwizzleError:
        return []
    hint = f"{format(layout.inner)} is that in bytes; a layout's swizzle counts elements"
    return [hint] if meant == solution.swizzle else []


def _offsets_text(layout: Layout) -> str:
    table = as_numpy(layout)
    size, end = table.size, int(table.max()) + 1
    distinct = len(set(table.ravel().tolist()))
    unused = end - int(table.min()) - distinct
    if distinct < size:
        kind = f"{size - distinct} coordinates share their offset with another"
    elif unused:
        kind = f"not contiguous: {unused} offsets between the first and the last are unused"
    else:
        kind = "contiguous: every offset from the first to the last once"
    matrix = table.reshape(table.shape[0], -1)  # further modes side by side
    width = len(str(end)) + 1
    rows = [
        "".join(f"{offset:{width}}" for offset in row[:MAX_COLUMNS]) + " …" * (matrix.shape[1] > MAX_COLUMNS)
        for row in matrix[:MAX_ROWS].tolist()
    ]
    facts = f"{format(layout)}: size {size}, cosize {end}; {kind}"
    return "\n".join([facts, "", *rows, *(["…"] if matrix.shape[0] > MAX_ROWS else [])])


if __name__ == "__main__":
    sys.exit(main())
