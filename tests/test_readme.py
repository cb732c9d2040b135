import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.gpu
@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippet_runs(snippet):
    exec(snippet, {})
    torch.cuda.synchronize()


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippet_is_right_in_shapes_and_dtypes(snippet):
    exec(snippet.replace('"cuda"', '"meta"'), {})


def test_every_file_that_is_named_exists():
    named = set(re.findall(r"`([\w./]+/[\w./]+)`", README + (ROOT / "CONTRIBUTING.md").read_text()))
    assert named
    assert {name for name in named if not (ROOT / name).exists()} == set()
