"""Every notebook runs from top to bottom, and what is stored in it is what it prints."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
WIDGET = "application/vnd.jupyter.widget-view+json"  # not stored: who only reads is shown the still picture


def printed(cell):
    """The outputs of a cell: their kinds, and their text."""
    text = [output.get("text") or output.get("data", {}).get("text/plain") for output in cell.outputs]
    kinds = [sorted({*output.get("data", {})} - {WIDGET}) or output.output_type for output in cell.outputs]
    return kinds, text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path):
    stored, fresh = nbformat.read(path, as_version=4), nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": path.parent}}
    NotebookClient(
        fresh, timeout=60, kernel_name="python3", resources=resources, coalesce_streams=True
    ).execute()
    for before, after in zip(stored.cells, fresh.cells, strict=True):
        if after.cell_type == "code":
            assert printed(before) == printed(after), after.source
            assert not any(WIDGET in output.get("data", {}) for output in before.outputs)
