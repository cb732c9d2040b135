"""The arrows of the house: layouts <- copies, mmas <- kernels; the simulator knows none of them."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "layouts": {"layouts"},
    "copies": {"copies", "layouts"},
    "mmas": {"mmas", "layouts"},
    "kernels": {"kernels", "copies", "mmas", "layouts"},
    "simulator": {"simulator"},
}
OTHER_FOLDERS = {"benchmarks", "notebooks", "tests"}
ROOM_FILES = sorted(path for room in MAY_IMPORT for path in (ROOT / room).rglob("*.py"))


def imports(source: str) -> set[tuple[str, ...]]:
    """Every imported module or name, split at the dots; relative imports keep their leading dots."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            names |= {f"{prefix}.{alias.name}" for alias in node.names}
    return {tuple(name.split(".")) for name in names}


def forbidden(source: str, room: str) -> set[tuple[str, ...]]:
    """The imports that a file of `room` must not have."""
    others = set(MAY_IMPORT) - MAY_IMPORT[room]
    return {
        (head, *rest)
        for head, *rest in imports(source)
        # A relative import, a folder under its bare name, or a room that the arrows don't lead to.
        if head in {"", *MAY_IMPORT, *OTHER_FOLDERS} or (head == "cutelab" and others.intersection(rest[:1]))
    }


@pytest.mark.parametrize("path", ROOM_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_arrows(path):
    assert forbidden(path.read_text(), path.relative_to(ROOT).parts[0]) == set()


@pytest.mark.parametrize(
    "room, line",
    [
        ("layouts", "from cutelab.copies import tile_copy"),
        ("copies", "import cutelab.mmas"),
        ("mmas", "from cutelab import copies"),
        ("kernels", "from cutelab.simulator import run"),
        ("simulator", "from cutelab.kernels.runtime.arch import Arch"),
        ("kernels", "from tests.conftest import anything"),
        ("kernels", "import benchmarks.protocol"),
        ("kernels", "from layouts.tiles import smem_tile"),
        ("layouts", "from . import tiles"),
    ],
)
def test_the_scan_finds_what_is_forbidden(room, line):
    assert len(forbidden(f"def f():\n    {line}", room)) == 1


def test_top_level_folders_are_those_of_the_design():
    with_code = {p.parent.name for suffix in ("py", "ipynb") for p in ROOT.glob(f"[!.]*/*.{suffix}")}
    assert with_code <= set(MAY_IMPORT) | OTHER_FOLDERS
    assert {"layouts", "copies", "mmas", "kernels"} <= with_code
