"""pytest plugin: a fixture for the bank conflicts of your own shared-memory tiles.

    def test_my_tile(assert_conflict_free):
        assert_conflict_free(my_layout, my_tiled_copy, "bf16", "dst")

A module by itself: pytest loads it at its start, when neither the DSL nor torch should be imported.
"""

from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def assert_conflict_free() -> Callable[..., None]:
    """`cutelab.layouts.testing.assert_conflict_free`: (layout, access, dtype, operand=None, *, allow=0)."""
    from cutelab.layouts import testing

    return testing.assert_conflict_free
