"""What a folder's `conftest.py` takes for all of its tests."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def with_shared_models(shared_models: None) -> None:
    """As if each file had asked for it."""
