"""Fixtures for a folder's `conftest.py`."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def with_shared_models(shared_models: None) -> None:
    """Use `shared_models` in every test of the folder."""
