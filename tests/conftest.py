"""Skips what needs a GPU where there is none."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0):
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU of compute capability 8.0 or higher")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
