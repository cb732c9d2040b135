"""Pictures, read back from their SVG: the numbers, the frames, the colours and that no text is in the way."""

import re
import xml.etree.ElementTree as ET
from ast import literal_eval
from itertools import pairwise

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
from cutlass.cute.nvgpu import CopyUniversalOp

from cutelab.copies import operand_copies, tile_copy
from cutelab.layouts import (
    Picture,
    PictureError,
    as_numpy,
    draw,
    operand_tile,
    owners,
    parse_layout,
    svg,
    tv_map,
    widget,
)
from cutelab.layouts.banks import BankReport
from cutelab.mmas import tiled_mma

SVG = "{http://www.w3.org/2000/svg}"
OFFSETS = {
    "row-major": "(8,8):(8,1)",
    "rank 1": "16:3",
    "a tuple of one": "(12):(2)",
    "broadcast": "(4,8):(0,1)",
    "negative": "(4,4):(-4,1)",
    "nested": "((1,2),(2,3)):((0,1),(6,2))",
    "nested twice": "((2,2),(2,(2,3))):((1,4),(2,(8,16)))",
    "stages": "(4,4,3):(4,1,16)",
    "rank 4": "(2,2,2,2):(1,2,4,8)",
    "swizzled": "S<3,4,3> o 0 o (8,64):(64,1)",
    "composed": "(4,8):(8,1) o 0 o (8,2):(1,16)",
}


def mma_of(warps=(1, 1), dtype=cutlass.Float16):
    return tiled_mma(dtype, warps)


def ldmatrix(warps=(2, 2), major="k", operand=0):
    return operand_copies(mma_of(warps), cutlass.Float16, major, major)[operand]


def cp_async(major="k"):
    return tile_copy(cutlass.Float16, (64, 32), 1 if major == "k" else 0, 16, 128, True)


def flat_copy():
    atom = cute.make_copy_atom(CopyUniversalOp(), cutlass.Float16, num_bits_per_copy=16)
    return cute.make_tiled_copy_tv(atom, cute.make_layout(32), cute.make_layout(2))


def followed(major="k", operand="A", threads=5, warps=(2, 2)):
    shared = operand_tile((64, 32, 2), major, 16)
    copy = ldmatrix(warps, major, "AB".index(operand))
    return draw.registers(cp_async(major), shared, copy, mma_of(warps), operand, threads)


def two_maps():
    return [(mma_of((2, 2)), operand) for operand in "ABC"] + [(ldmatrix(), "src"), (ldmatrix(), "dst")]


LANE = np.arange(32)
ROWS_OF_64_BYTES = BankReport("ldmatrix.x4", LANE % 16 * 64 + LANE // 16 * 16)
COLUMN = BankReport(
    "st.shared.b32", np.stack([4 * LANE, 128 * LANE, np.where(LANE < 8, 0, -1), 0 * LANE - 1])
)

PICTURES = {
    **{
        f"offsets {name}": lambda text=text: draw.offsets(parse_layout(text))
        for name, text in OFFSETS.items()
    },
    "tiles": lambda: draw.tiles(parse_layout("((1,2),(2,3)):((0,1),(6,2))")),
    "tv": lambda: draw.tv(mma_of((2, 2)), "A"),
    "copy": lambda: draw.copy(ldmatrix((1, 1))),
    "copy of a vector": lambda: draw.copy(flat_copy()),
    "copy of vectors": lambda: draw.copy(cp_async(), vectors=True),
    "mma": lambda: draw.mma(mma_of()),
    "swizzle": lambda: draw.swizzle(operand_tile((32, 32, 2), "k", 16)),
    "swizzle, columns": lambda: draw.swizzle(operand_tile((64, 16, 2), "mn", 16)),
    "granules": lambda: draw.granules(
        operand_tile((64, 32, 2), "k", 16), cp_async(), "dst", thread=3, stage=1
    ),
    "banks": lambda: draw.banks(ROWS_OF_64_BYTES),
    "banks without collisions": lambda: draw.banks(BankReport("ld.shared.b32", 4 * np.arange(32))),
    "banks of one column": lambda: draw.banks(COLUMN, 1),
    "banks of lines that phases share": lambda: draw.banks(BankReport("ld.shared.b128", LANE % 4 * 16)),
    "banks of merged phases": lambda: draw.banks(BankReport("ld.shared.b64", np.arange(32) // 2 * 8)),
    "registers": followed,
    "registers of two threads": lambda: followed(operand="B", threads=(69, 70)),
    "registers, transposed": lambda: followed(major="mn"),
}


class Read:
    """What a reader sees of a picture."""

    def __init__(self, picture):
        self.root = ET.fromstring(str(picture))
        self.grids = [group for group in self.root if group.get("class") == "grid"]
        self.legend = next(group for group in self.root if group.get("class") == "legend")

    def cells(self, grid=0):
        """(row, column) → (texts of each line, classes of the bands and marks, tooltip)."""
        return {
            tuple(map(int, cell.get("data-at").split(","))): (
                [text.text for text in cell.iter(SVG + "text")],
                [rect.get("class") for rect in cell.iter(SVG + "rect")],
                cell.find(SVG + "title").text,
            )
            for cell in self.grids[grid].iter(SVG + "g")
            if cell.get("class") == "cell"
        }

    def numbers(self, grid=0):
        cells = self.cells(grid)
        table = np.zeros(np.max(list(cells), axis=0) + 1, int)
        for at, ([text], _, _) in cells.items():
            table[at] = int(text)
        assert len(cells) == table.size
        return table

    def legend_texts(self):
        return [text.text for text in self.legend.iter(SVG + "text")]

    def texts(self):
        """Left, top, right, bottom and text of everything written, in the picture's coordinates."""
        for group in (self.root, *self.grids, self.legend):
            x0, y0 = map(float, re.findall(r"[\d.]+", group.get("transform", "0,0")))
            for text in group.findall(SVG + "text") if group is self.root else group.iter(SVG + "text"):
                width = 0.602 * 11 * len(text.text)  # DejaVu Sans Mono, as wide as any
                x, y = x0 + float(text.get("x")), y0 + float(text.get("y"))
                left = x - width / 2 if "mid" in text.get("class", "").split() else x
                yield left, y - 8, left + width, y + 2, text.text


def boxes(of, grid):
    """x, y, width, height of the first rectangle of each cell, or of each frame of a level."""
    if of == "cells":
        found = {
            cell.get("data-at"): cell.find(SVG + "rect")
            for cell in grid.iter(SVG + "g")
            if cell.get("data-at")
        }
    else:
        found = dict(enumerate(r for r in grid.iter(SVG + "rect") if of in r.get("class").split()))
    return {key: [float(rect.get(k)) for k in ("x", "y", "width", "height")] for key, rect in found.items()}


@pytest.fixture(params=PICTURES, scope="module")
def picture(request):
    return PICTURES[request.param]()


def test_is_accessible_svg(picture):
    root = ET.fromstring(str(picture))
    assert root.tag == SVG + "svg" and root.get("role") == "img" and root.get("aria-label") == picture.title
    assert [child.tag for child in root[:2]] == [SVG + "title", SVG + "desc"]
    assert root[0].text == picture.title and len(root[1].text) > 20
    assert picture._repr_svg_() == str(picture) and len(repr(picture)) < 200


def test_every_colour_is_in_the_legend(picture):
    read = Read(picture)
    named = {kind for rect in read.legend.iter(SVG + "rect") for kind in rect.get("class").split()}
    used = {kind for n in range(len(read.grids)) for _, kinds, _ in read.cells(n).values() for kind in kinds}
    assert used <= named
    assert {kind for kind in named if kind.startswith("k")} >= {kind for kind in used if kind.startswith("k")}
    several = any(
        len([kind for kind in kinds if kind.startswith("k")]) > 1
        for n in range(len(read.grids))
        for _, kinds, _ in read.cells(n).values()
    )
    assert any("several lines in a cell" in text for text in read.legend_texts()) == several
    assert len(list(read.legend.iter(SVG + "text"))) >= len(list(read.legend.iter(SVG + "rect")))


def test_every_cell_has_a_tooltip(picture):
    read = Read(picture)
    assert all(tip for n in range(len(read.grids)) for _, _, tip in read.cells(n).values())


def test_no_text_is_clipped_or_overlaps(picture):
    _, _, width, height = map(float, ET.fromstring(str(picture)).get("viewBox").split())
    texts = [text for text in Read(picture).texts() if text[4].strip()]
    left, top, right, bottom = np.array([text[:4] for text in texts]).T
    assert left.min() >= 0 and top.min() >= 0 and right.max() <= width and bottom.max() <= height
    overlap = (
        (left[:, None] < right) & (left < right[:, None]) & (top[:, None] < bottom) & (top < bottom[:, None])
    )
    np.fill_diagonal(overlap, False)
    pairs = [(texts[i][4], texts[j][4]) for i, j in np.argwhere(overlap)]
    assert pairs == []


def test_text_stays_in_its_cell(picture):
    for grid in Read(picture).grids:
        for cell in (group for group in grid.iter(SVG + "g") if group.get("class") == "cell"):
            width = float(cell.find(SVG + "rect").get("width"))
            assert all(0.602 * 11 * len(text.text) <= width for text in cell.iter(SVG + "text"))


def luminance(colour):
    channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


def contrast(one, other):
    """The WCAG's: 21 for black on white."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def fills(css, theme):
    """Selector → colour, of what the theme adds to the rules for all."""
    rules = re.findall(r"svg\.cutelab(\S*) ([^{},]+)\{[^}]*fill:(#\w+)", css)
    return {selector: colour for of, selector, colour in rules if of in ("", f".{theme}")}


@pytest.mark.parametrize("theme", svg.THEMES)
def test_text_contrasts_with_what_is_behind_it(theme):
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21)
    fill = fills(draw.offsets(parse_layout("(8,8):(8,1)")).themed(theme).__str__(), theme)
    assert {selector for selector in fill if selector.startswith(".k")} == {f".k{i}" for i in range(8)}
    for text, behind in [("text", ".panel"), ("text", ".empty"), ("text.alarm", ".panel")]:
        assert contrast(fill[text], fill[behind]) >= 4.5, (text, behind)
    for i in range(8):
        assert contrast(fill["text.on"], fill[f".k{i}"]) >= 4.5, i
    assert len({fill[f".k{i}"] for i in range(8)}) == 8


def test_themes():
    picture = draw.offsets(parse_layout("(2,2):(2,1)"))
    light, dark, auto = (str(picture.themed(theme)) for theme in ("light", "dark", "auto"))
    assert fills(light, "light")[".panel"] != fills(dark, "dark")[".panel"]
    assert "@media" not in light + dark
    before, after = auto.split("@media (prefers-color-scheme:dark)")
    assert fills(before, "auto") == fills(light, "light") and fills(after, "auto")[".panel"] == "#16191D"
    with pytest.raises(PictureError, match="'auto', 'light' or 'dark'; got 'sepia'"):
        picture.themed("sepia")


def test_pictures_on_one_page_keep_their_themes():
    """A page applies every <style> to all of it: no rule that differs between themes may lack the theme."""
    picture = draw.offsets(parse_layout("(2,2):(2,1)"))
    selectors = [
        set(re.findall(r"svg\.cutelab[^{},]*\{[^}]*\}", str(picture.themed(theme))))
        for theme in ("light", "dark")
    ]
    assert all(re.match(r"svg\.cutelab\.(light|dark) ", rule) for rule in selectors[0] ^ selectors[1])


def test_escapes():
    text = 'a<b & "c" > d'
    root = ET.fromstring(str(Picture(text, text, 10, 10, "")))
    assert root.get("aria-label") == root[0].text == root[1].text == text
    swizzled = draw.offsets(parse_layout("S<2,0,3> o 0 o (8,8):(8,1)"))
    assert "S<2,0,3> o 0 o (8,8):(8,1)" in [text for *_, text in Read(swizzled).texts()]


def test_save(tmp_path):
    picture = draw.offsets(parse_layout("(2,2):(2,1)"))
    picture.save(tmp_path / "p.svg")
    assert (tmp_path / "p.svg").read_text(encoding="utf-8") == str(picture)


@pytest.mark.parametrize("text", OFFSETS.values(), ids=OFFSETS)
def test_offsets_are_those_of_the_layout(text):
    layout = parse_layout(text)
    table = as_numpy(layout)
    read = Read(draw.offsets(layout))
    drawn = [read.numbers(n) for n in range(len(read.grids))]
    panels = np.moveaxis(table.reshape(*table.shape[:2], -1), -1, 0) if table.ndim > 1 else table[None, None]
    assert np.array_equal(drawn, panels)


def test_tooltip_gives_the_nested_coordinate():
    layout = parse_layout("((2,2),(2,(2,3))):((1,4),(2,(8,16)))")
    for (i, j), (_, _, tip) in Read(draw.offsets(layout)).cells().items():
        coordinate, offset = tip.split(" → ")
        row, column = literal_eval(coordinate)
        assert cute.crd2idx((row, column), layout) == int(offset) == layout((i, j))
        assert len(row) == 2 and len(column[1]) == 2


def test_colours_are_runs_of_memory():
    layout = parse_layout("(8,8):(8,1)")
    for texts, kinds, _ in Read(draw.offsets(layout)).cells().values():
        assert kinds == [f"k{int(texts[0]) // 8}"]


def test_nested_modes_are_framed():
    read = Read(draw.offsets(parse_layout("((2,2),(2,(2,3))):((1,4),(2,(8,16)))")))
    cells = boxes("cells", read.grids[0])
    for level, blocks in [("level1", 2 * 6), ("level2", 3)]:
        frames = boxes(level, read.grids[0])
        assert len(frames) == blocks
        inside = [
            {
                at
                for at, (x, y, w, h) in cells.items()
                if fx < x and fy < y and x + w < fx + fw and y + h < fy + fh
            }
            for fx, fy, fw, fh in frames.values()
        ]
        side = 2 if level == "level1" else 4
        expected = [
            {f"{i},{j}" for i in range(r, r + side) for j in range(c, c + side)}
            for r in range(0, 4, side)
            for c in range(0, 12, side)
        ]
        assert sorted(map(sorted, inside)) == sorted(map(sorted, expected))
    steps = [round(b[0] - a[0], 3) for a, b in pairwise(cells[f"0,{j}"] for j in range(12))]
    assert len(set(steps)) == 3  # none, a small and a large gap
    assert steps[0] < steps[1] < steps[3]


def test_nested_modes_have_nested_ticks():
    read = Read(draw.offsets(parse_layout("((1,2),(2,3)):((0,1),(6,2))")))
    texts = read.grids[0].findall(SVG + "text")
    rows = {}
    for text in texts:
        rows.setdefault(text.get("y"), []).append(text.text)
    assert ["0", "1", "2"] in rows.values() and ["0", "1"] * 3 in rows.values()
    flat = Read(draw.offsets(parse_layout("(2,6):(1,2)")))
    assert not boxes("frame", flat.grids[0])


def test_tiles_are_drawn_where_they_were_cut():
    matrix = cute.make_layout((6, 8), stride=(8, 1))
    read = Read(draw.tiles(cute.zipped_divide(matrix, (3, 2))))
    assert np.array_equal(read.numbers(), as_numpy(matrix))
    assert len(boxes("level1", read.grids[0])) == 2 * 4


def owner_texts(texts):
    """(thread, value) of each owner in a cell of a thread-value map, from "T3", "V1" or "T3 V1"."""
    return [tuple(map(int, pair)) for pair in re.findall(r"T(\d+) V(\d+)", " ".join(texts))]


@pytest.mark.parametrize("n", range(5), ids=["A", "B", "C", "ldmatrix src", "ldmatrix dst"])
def test_each_value_of_each_thread_is_drawn_once(n):
    tiled, operand = two_maps()[n]
    coordinates = tv_map(tiled, operand)
    drawn = {
        tv: at
        for at, (texts, _, _) in Read(draw.tv(tiled, operand)).cells().items()
        for tv in owner_texts(texts)
    }
    assert drawn == {(t, v): tuple(coordinates[t, v]) for t, v in np.ndindex(coordinates.shape[:2])}


def test_an_element_of_several_threads_has_a_colour_for_each():
    mma = mma_of((2, 2))
    read = Read(draw.tv(mma, "A"))
    shared = owners(tv_map(mma, "A")).thread
    for at, (texts, kinds, tip) in read.cells().items():
        assert [t for t, _ in owner_texts(texts)] == shared[at].tolist()
        assert kinds == [f"k{t // 16}" for t in shared[at]] and len(kinds) == 2
        assert all(f"thread {t} " in tip for t in shared[at])
    assert any("its own copy" in text.text for text in read.legend.iter(SVG + "text"))


@pytest.mark.parametrize("warps", [(1, 1), (2, 2)])
def test_mma_lines_up_b_above_and_a_beside_c(warps):
    b, a, c = Read(draw.mma(mma_of(warps))).grids
    origins = [tuple(map(float, re.findall(r"[\d.]+", grid.get("transform")))) for grid in (b, a, c)]
    assert origins[0][0] == origins[2][0] > origins[1][0] and origins[1][1] == origins[2][1] > origins[0][1]
    at_b, at_a, at_c = (boxes("cells", grid) for grid in (b, a, c))
    assert all(at_b[f"0,{j}"][0] == at_c[f"0,{j}"][0] for j in range(16 * warps[1]))  # columns
    assert all(abs(at_a[f"{i},0"][1] - at_c[f"{i},0"][1]) <= 1 for i in range(16 * warps[0]))  # rows


def test_mma_draws_each_operand():
    mma = mma_of()
    read = Read(draw.mma(mma))
    for n, operand in enumerate("BAC"):
        coordinates = tv_map(mma, operand)
        for at, (texts, _, _) in read.cells(n).items():
            [(t, v)] = owner_texts(texts)
            assert tuple(coordinates[t, v]) == (at[::-1] if operand == "B" else at)


def test_copy_shows_both_sides():
    copy = ldmatrix((1, 1))
    read = Read(draw.copy(copy))
    for n, side in enumerate(("src", "dst")):
        held = owners(tv_map(copy, side))
        for at, (texts, _, _) in read.cells(n).items():
            assert owner_texts(texts) == [(held.thread[at][0], held.value[at][0])]


VECTORS = {  # copy, cells of its two sides
    "rows": (cp_async, [32 * 4, 32 * 4]),
    "columns": (lambda: cp_async("mn"), [8 * 16, 8 * 16]),
    "ldmatrix": (ldmatrix, [32 * 2, 32 * 8]),
}


@pytest.mark.parametrize(("make", "sizes"), VECTORS.values(), ids=VECTORS)
def test_vectors_are_runs_of_the_same_threads(make, sizes):
    copy = make()
    read = Read(draw.copy(copy, vectors=True))
    for n, side in enumerate(("src", "dst")):
        coordinates, seen = tv_map(copy, side), 0
        for texts, _, tip in read.cells(n).values():
            spans = [
                [int(x) for x in re.split("–", span)] for span in tip.split(":")[0].strip("()").split(", ")
            ]
            elements = [
                (i, j)
                for i in range(spans[0][0], spans[0][-1] + 1)
                for j in range(spans[1][0], spans[1][-1] + 1)
            ]
            for t, first, last in re.findall(r"T(\d+) V(\d+)–(\d+)", " ".join(texts)):
                run = coordinates[int(t), int(first) : int(last) + 1]
                assert [tuple(x) for x in run.tolist()] == elements
                seen += len(run)
        assert seen == coordinates.shape[0] * coordinates.shape[1]
        assert len(read.cells(n)) == sizes[n]


@pytest.mark.parametrize("major", ["k", "mn"])
@pytest.mark.parametrize("bits", [16, 32])
def test_swizzle_shows_banks_before_and_after(major, bits):
    shape = (32, 64, 2) if major == "k" else (64, 32, 2)
    layout = operand_tile(shape, major, bits)
    read = Read(draw.swizzle(layout, element_bits=bits))
    per = 128 // bits
    step = (1, per) if major == "k" else (per, 1)
    for n, table in enumerate((as_numpy(layout.outer)[..., 0], as_numpy(layout)[..., 0])):
        assert np.array_equal(read.numbers(n), table[:: step[0], :: step[1]])
        for texts, kinds, _ in read.cells(n).values():
            assert kinds == [f"k{int(texts[0]) * bits // 8 // 4 % 32 // 4}"]


def test_swizzle_says_how_far_a_column_is_spread():
    notes = [
        text
        for *_, text in Read(draw.swizzle(parse_layout("(8,64):(64,1)"), cute.make_swizzle(3, 3, 3))).texts()
    ]
    assert "rows 0–7 of a column: 1 of 8 bank groups" in notes
    assert "rows 0–7 of a column: 8 of 8 bank groups" in notes


def test_granules_of_unaligned_rows_are_single_elements():
    read = Read(draw.granules(parse_layout("(4,12):(12,1)")))
    assert read.numbers().shape == (4, 12)


def test_granules_outline_what_a_thread_touches():
    layout, copy = operand_tile((64, 32, 2), "k", 16), cp_async()
    cells = Read(draw.granules(layout, copy, "dst", thread=9, stage=1)).cells()
    marked = {at for at, (_, kinds, _) in cells.items() if "followed" in kinds}
    assert marked == {(int(r), int(c) // 8) for r, c in tv_map(copy, "dst")[9]}
    assert int(cells[0, 0][0][0]) == as_numpy(layout)[0, 0, 1]


def swizzled_rows():
    row_of = as_numpy(operand_tile((64, 32, 2), "k", 16))[..., 0]
    return BankReport("ldmatrix.x4", row_of[LANE % 16, LANE // 16 * 8] * 2)


BANK_REPORTS = {
    "ldmatrix": (ROWS_OF_64_BYTES, 0),
    "ldmatrix, swizzled": (swizzled_rows(), 0),
    "a row": (COLUMN, 0),
    "a column": (COLUMN, 1),
    "broadcast to eight": (COLUMN, 2),
    "bytes": (BankReport("ld.shared.b8", LANE), 0),
    "vectors, two lanes to each": (BankReport("ld.shared.b128", LANE // 2 * 256), 0),
    "cp.async into one word": (BankReport("cp.async.4", 0 * LANE), 0),
}


@pytest.mark.parametrize(("report", "instruction"), BANK_REPORTS.values(), ids=BANK_REPORTS)
def test_banks_show_words_phases_and_collisions(report, instruction):
    read = Read(draw.banks(report, instruction))
    lines = [int(text.text) for text in read.grids[0].findall(SVG + "text") if text.text.isdigit()][32:]
    phases, colliding = report.phases(instruction), report.collisions(instruction)
    touched, marked = set(), set()
    for (i, bank), (texts, kinds, tip) in read.cells().items():
        assert tip.startswith(f"byte {lines[i] * 128 + bank * 4}, bank {bank}: ")
        for n, lanes in re.findall(r"lanes \[([\d, ]+)\] in phase (\d+)", tip):
            touched |= {(lines[i] * 32 + bank, int(lane)) for lane in n.split(", ")}
            assert {int(lane) for lane in n.split(", ")} <= set(phases[int(lanes)]) and f"k{lanes}" in kinds
            marked |= {(int(lanes), bank)} if "collision" in kinds else set()
        assert all(texts) and len(texts) == len([kind for kind in kinds if kind.startswith("k")])
    assert touched == {
        (w, lane) for lanes in phases for lane in lanes for w in report.words(instruction, lane)
    }
    assert {(phase, bank) for phase, bank, _ in colliding} == marked
    alarms = [text.text for text in read.grids[0].iter(SVG + "text") if "alarm" in text.get("class", "")]
    assert sorted(map(int, alarms)) == sorted({bank for _, bank, _ in colliding})
    assert ("collision" in str(read.legend_texts())) == bool(colliding)


def test_collisions_are_where_words_of_a_phase_share_a_bank():
    """Rows of 64 bytes: the eight rows of a matrix start in two groups of four banks; all are marked."""
    cells = Read(draw.banks(ROWS_OF_64_BYTES)).cells()
    marked = {at for at, (_, kinds, _) in cells.items() if "collision" in kinds}
    assert marked == {(i, 16 * half + bank) for i in range(8) for half in range(2) for bank in range(8)}
    assert not any("collision" in kinds for _, kinds, _ in Read(draw.banks(swizzled_rows())).cells().values())


@pytest.mark.parametrize("major", ["k", "mn"])
@pytest.mark.parametrize("operand", ["A", "B"])
def test_registers_are_followed_step_by_step(major, operand):
    thread = 77  # lane 13 of warp 2, the second along N
    copy, mma, shared = (
        ldmatrix(major=major, operand="AB".index(operand)),
        mma_of((2, 2)),
        operand_tile((64, 32, 2), major, 16),
    )
    held = [tuple(at) for at in tv_map(mma, operand)[thread].tolist()]
    read = Read(followed(major, operand, thread))
    columns = sorted({c for _, c in held_by_warp(mma, operand, 2)})
    rows = sorted({r for r, _ in held_by_warp(mma, operand, 2)})

    def coloured(grid):
        return {
            (rows[i], columns[j]): (texts, kinds)
            for (i, j), (texts, kinds, _) in read.cells(grid).items()
            if any(kind.startswith("k") for kind in kinds)
        }

    writer, loaded = owners(tv_map(cp_async(major), "dst")), coloured(0)
    assert set(loaded) == set(held)
    size = writer.thread.shape
    for at, (texts, kinds) in loaded.items():
        here = at[0] % size[0], at[1] % size[1]
        assert owner_texts(texts) == [(writer.thread[here][0], writer.value[here][0])]
        assert kinds == [f"k{held.index(at) // 2}"]  # the register that it ends up in

    granules = {texts[0] for texts, kinds, _ in read.cells(1).values() if kinds != ["empty"]}
    table = as_numpy(shared)[..., 0]
    assert granules == {str(table[at] // 8 * 8) for at in held}

    points = tv_map(copy, "src")
    pointed = coloured(2)
    assert {at for at, (_, kinds) in pointed.items() if "followed" in kinds} == set(held)
    for at, (texts, _) in pointed.items():
        [lane] = map(int, re.findall(r"T(\d+)", texts[0]))
        assert lane // 32 == 2 and list(at) in points[lane].tolist()

    register = {at: texts for at, (texts, _, _) in read.cells(3).items()}
    for i, at in enumerate(held):
        assert register[i, 3] == [f"{operand}{at}"] and register[i, 2] == [f"V{i}"]
        [copied] = map(int, re.findall(r"V(\d+)", register[i, 1][0]))
        assert tuple(tv_map(copy, "dst")[thread, copied]) == at
        assert register[i, 0] == [f"R{copied // 2}.{copied % 2}"]


def test_registers_of_several_threads_keep_their_colours():
    threads = (69, 70)
    held = tv_map(mma_of((2, 2)), "B")[list(threads)].tolist()
    read = Read(followed(operand="B", threads=threads))
    rows = sorted({r for r, _ in held_by_warp(mma_of((2, 2)), "B", 2)})
    for grid in (0, 2):
        for (i, j), (_, kinds, _) in read.cells(grid).items():
            owner = [f"k{n}" for n in range(2) if [rows[i], j] in held[n]]
            if owner:
                assert [kind for kind in kinds if kind.startswith("k")] == owner
    shared = {tuple(kinds) for _, kinds, _ in read.cells(2).values()}
    assert ("k0", "k1") in shared  # the rest of a row that both threads need


def held_by_warp(mma, operand, warp):
    return [tuple(at) for at in tv_map(mma, operand)[32 * warp : 32 * warp + 32].reshape(-1, 2).tolist()]


def test_registers_agree_with_the_ptx_isa():
    """Fragments of mma.m16n8k16: a0 … a7 of lane 13, whose group is 3 and whose place in it is 1."""
    cells = Read(followed(threads=13, warps=(1, 4))).cells(3)
    expected = [(3, 2), (3, 3), (11, 2), (11, 3), (3, 10), (3, 11), (11, 10), (11, 11)]
    assert [cells[i, 3][0] for i in range(8)] == [[f"A{at}"] for at in expected]


def test_tf32_registers():
    mma = mma_of((2, 2), cutlass.TFloat32)
    copy, _ = operand_copies(mma, cutlass.Float32, "k", "k")
    loader = tile_copy(cutlass.Float32, (64, 32), 1, 16, 128, True)
    cells = Read(draw.registers(loader, operand_tile((64, 32, 2), "k", 32), copy, mma, "A", 6)).cells(3)
    assert [cells[i, 0][0] for i in range(4)] == [["R0"], ["R1"], ["R2"], ["R3"]]


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: draw.offsets(parse_layout("(128,128):(128,1)")), "16384 elements, but at most 4096"),
        (lambda: draw.offsets(operand_tile((64, 64, 2), "k", 16)), "8192 elements"),
        (lambda: draw.offsets(parse_layout("(65536,65536):(65536,1)")), "4294967296 elements"),
        (lambda: draw.granules(parse_layout("(65536,65536):(65536,1)")), "4294967296 elements"),
        (lambda: draw.tv(tile_copy(cutlass.Float16, (128, 128), 1, 16, 1024), "src"), "8192 cells.*4096"),
        (lambda: draw.tiles(parse_layout("(4,4):(4,1)")), r"\(\(rows, columns\), \(tiles, tiles\)\)"),
        (lambda: draw.tv(mma_of(), "src"), "operands A, B, C; got 'src'"),
        (lambda: draw.swizzle(parse_layout("(8,64):(64,1)")), "has no swizzle"),
        (
            lambda: draw.swizzle(operand_tile((64, 32, 2), "k", 16), cute.make_swizzle(3, 3, 3)),
            "plain layout",
        ),
        (lambda: draw.granules(parse_layout("8:1")), "a tile is"),
        (lambda: draw.granules(operand_tile((64, 32, 2), "k", 16), stage=2), "stage 2 of .* which has 2"),
        (
            lambda: draw.granules(operand_tile((64, 32, 2), "k", 16), cp_async(), thread=128),
            "thread 128 .* 128",
        ),
        (lambda: draw.granules(operand_tile((64, 32, 2), "k", 16), flat_copy()), "tile has 1 modes"),
        (lambda: draw.banks(COLUMN, 4), "instruction 4 of a report on 4"),
        (lambda: draw.banks(COLUMN, 3), "no lane takes part in instruction 3"),
        (lambda: followed(threads=()), "1 to 8 threads of one warp"),
        (lambda: followed(threads=(5, 40)), "one warp"),
        (lambda: followed(threads=128), "threads 0 to 127; got"),
        (lambda: registers_with(operand="C"), "'A' or 'B'; got 'C'"),
        (lambda: registers_with(copy=ldmatrix(operand=1, warps=(1, 4))), "doesn't load operand A"),
        (lambda: registers_with(shared=operand_tile((16, 32, 2), "k", 16)), "doesn't hold"),
    ],
)
def test_errors_say_what_is_wrong(attempt, message):
    with pytest.raises(ValueError, match=message):
        attempt()


def registers_with(copy=None, shared=None, operand="A"):
    shared = operand_tile((64, 32, 2), "k", 16) if shared is None else shared
    return draw.registers(cp_async(), shared, ldmatrix() if copy is None else copy, mma_of((2, 2)), operand)


def test_explorer_redraws_as_its_sliders_move():
    pytest.importorskip("ipywidgets")
    layout = operand_tile((32, 32, 3), "k", 16)
    explorer = widget.explore(layout, ldmatrix())
    *sliders, shown = explorer.box.children
    assert [(s.description, s.value, s.max) for s in sliders] == [
        ("thread", 0, 127),
        ("stage", 0, 2),
        ("bits", 2, 3),
    ]
    assert shown.value == str(explorer.picture())
    for slider, value in zip(sliders, (5, 1, 0), strict=True):
        slider.value = value
    assert shown.value == str(explorer.picture(5, 1, 0))
    cells = Read(explorer.picture(5, 1, 0))
    assert np.array_equal(cells.numbers(), as_numpy(layout.outer)[:, ::8, 1])
    assert [at for at, (_, kinds, _) in cells.cells().items() if "followed" in kinds] == [(5, 0)]


def test_explorer_carries_a_still_picture():
    pytest.importorskip("ipywidgets")
    bundle = widget.explore(parse_layout("(8,64):(64,1)"))._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    ET.fromstring(bundle["image/svg+xml"])


def test_explorer_is_a_still_picture_without_ipywidgets(monkeypatch):
    monkeypatch.setattr(widget, "ipywidgets", None)
    explorer = widget.explore(operand_tile((64, 32, 3), "k", 16))
    assert explorer.box is None and set(explorer._repr_mimebundle_()) == {"text/plain", "image/svg+xml"}
    assert np.array_equal(
        Read(explorer.picture()).numbers(), as_numpy(operand_tile((64, 32, 3), "k", 16))[:, ::8, 0]
    )


def test_explorer_varies_only_swizzles():
    with pytest.raises(PictureError, match="only a swizzle"):
        widget.explore(parse_layout("(4,8):(8,1) o 0 o (8,2):(1,16)"))
    with pytest.raises(PictureError, match="4 bits can't be swizzled by a shift of 3"):
        widget.explore(operand_tile((64, 32, 3), "k", 16)).picture(bits=4)
