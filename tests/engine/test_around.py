"""Every mistake around the engine is found: `around.py` lists them, `scripts/study faults` tries them in all ways."""

from __future__ import annotations

from pathlib import Path

import around
import matrix
import pytest
from around import AROUND, Around
from matrix import Way

FEW = 24
"""Tokens of an answer at most: half of what the study takes, and too few for answers to end at stops."""


@pytest.mark.parametrize("one", AROUND, ids=lambda one: one.name)
def test_a_mistake_around_the_engine_is_found(one: Around, tmp_path: Path) -> None:
    """In one way each: files of their own try those that are usual."""
    most = matrix.MOST if one.where == "stop ids" else FEW
    told = around.outcome(one, one.ways()[-1], tmp_path / "run", most)
    assert not told.is_missed and told.who


@pytest.mark.parametrize("engine", around.ENGINES)
def test_nobody_objects_to_a_sound_run(engine: str, tmp_path: Path) -> None:
    told = around.outcome(None, Way(engine, concurrency=around.TOGETHER), tmp_path / "run", FEW)
    assert told.is_missed and not told.who
