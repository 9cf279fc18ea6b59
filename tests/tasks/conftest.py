"""Cages, as tests of the sandbox ask for them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from dflash_bench.tasks import sandbox
from helpers import forked_supervisors
from helpers.sandboxes import BOXES, MARKER, Box, num_processes


@pytest.fixture(params=BOXES)
def box(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Box]:
    """Nothing of a program is alive afterwards. They start warm, which `test_sandbox.py` holds against a cold start."""
    monkeypatch.setattr(sandbox, "_SUPERVISOR", (*sandbox._SUPERVISOR, MARKER))
    monkeypatch.setattr(sandbox, "subprocess", forked_supervisors.SUBPROCESS)
    yield request.param
    assert num_processes() == 0


@pytest.fixture
def cold(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start every program anew, so that faults planted in the sandbox take effect."""
    monkeypatch.setattr(sandbox, "subprocess", subprocess)
