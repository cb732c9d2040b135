"""What `tune` has found: a JSON file beside the compiled kernels, so that other processes find it too."""

from __future__ import annotations

import json
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from cutelab.kernels.dense_gemm.config_sm90 import Size, Tiling, Work
from cutelab.kernels.runtime.cache import cache_directory, write_and_rename

__all__ = ["Problem", "recall", "remember"]


@dataclass(frozen=True)
class Problem:
    """What decides which tiling is the fastest."""

    gpu: str
    ab_dtype: str
    out_dtype: str
    a_major: str
    b_major: str
    plain: bool  # see `candidates`
    size: Size

    @property
    def key(self) -> str:
        return ", ".join(map(str, (*astuple(self)[:-1], *self.size)))


def recall(problem: Problem) -> Work | None:
    """The fastest that was measured for a problem; None if none was, or by a version with other fields."""
    fields = _load().get(problem.key)
    try:
        return None if fields is None else _work(**fields)
    except TypeError:
        return None


def remember(problem: Problem, work: Work) -> None:
    """Keeps what was found, if the disk cache is on. Raises OSError where it can't be written."""
    path = _path()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        content = _load() | {problem.key: asdict(work)}
        write_and_rename(path, json.dumps(content, indent=1).encode())


def _work(tiling: dict[str, Any], **others: Any) -> Work:
    lists_to_tuples: dict[str, Any] = {
        name: tuple(x) if isinstance(x, list) else x for name, x in tiling.items()
    }
    return Work(Tiling(**lists_to_tuples), **others)


def _load() -> dict[str, dict]:
    path = _path()
    try:
        return {} if path is None else json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _path() -> Path | None:
    directory = cache_directory()
    return None if directory is None else directory / "tuned_gemm.json"
