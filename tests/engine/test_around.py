"""Every mistake around the engine is found: `around.py` lists them, `scripts/study faults` tries them in all ways."""

from __future__ import annotations

from pathlib import Path

import around
import pytest
from around import AROUND, Around
from matrix import Way


@pytest.mark.parametrize("one", AROUND, ids=lambda one: one.name)
def test_a_mistake_around_the_engine_is_found(one: Around, tmp_path: Path) -> None:
    """In one way each: files of their own try those that are usual."""
    told = around.outcome(one, one.ways()[-1], tmp_path / "run")
    assert not told.is_missed and told.who


@pytest.mark.parametrize("engine", around.ENGINES)
def test_nobody_objects_to_a_sound_run(engine: str, tmp_path: Path) -> None:
    told = around.outcome(None, Way(engine, concurrency=around.TOGETHER), tmp_path / "run")
    assert told.is_missed and not told.who
