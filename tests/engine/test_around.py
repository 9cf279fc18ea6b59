"""Every mistake around the engine is found: `around.py` lists them, `scripts/study faults` tries them in all ways."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.faults import in_loading, matrix, outside_engine
from helpers.faults.matrix import Part, Way
from helpers.faults.outside_engine import AROUND, Around

FEW = Part(most=12, suites=matrix.SUITES[:1], methods=("dflash",))
"""Faults around the engine do not depend on suite and method, so the study takes all of them."""
HERE = [one for one in AROUND if one.name not in in_loading.PLANTS]
"""`test_planted_loading.py` has the others."""


@pytest.mark.parametrize("one", HERE, ids=lambda one: one.name)
def test_a_mistake_around_the_engine_is_found(one: Around, tmp_path: Path) -> None:
    """In one way each: files of their own try those that are usual."""
    told = outside_engine.outcome(one, one.ways()[:2][-1], tmp_path / "run", FEW)
    assert not told.is_missed and told.who


@pytest.mark.parametrize("engine", outside_engine.ENGINES)
def test_nobody_objects_to_a_sound_run(engine: str, tmp_path: Path) -> None:
    told = outside_engine.outcome(None, Way(engine, concurrency=outside_engine.TOGETHER), tmp_path / "run", FEW)
    assert told.is_missed and not told.who
