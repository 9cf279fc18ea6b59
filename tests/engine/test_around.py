"""Every mistake around the engine is found: `around.py` lists them, `scripts/study faults` tries them in all ways."""

from __future__ import annotations

from pathlib import Path

import around
import matrix
import pytest
import test_planted_loading as loaded
from around import AROUND, Around
from matrix import Part, Way

FEW = Part(most=12, suites=matrix.SUITES[:1], methods=("dflash",))
"""What is around the engine is the same for every suite and method, which the study takes."""
HERE = [one for one in AROUND if one.name not in loaded.PLANTS]
"""`test_planted_loading.py` has the others."""


@pytest.mark.parametrize("one", HERE, ids=lambda one: one.name)
def test_a_mistake_around_the_engine_is_found(one: Around, tmp_path: Path) -> None:
    """In one way each: files of their own try those that are usual."""
    told = around.outcome(one, one.ways()[-1], tmp_path / "run", FEW)
    assert not told.is_missed and told.who


@pytest.mark.parametrize("engine", around.ENGINES)
def test_nobody_objects_to_a_sound_run(engine: str, tmp_path: Path) -> None:
    told = around.outcome(None, Way(engine, concurrency=around.TOGETHER), tmp_path / "run", Part(most=12))
    assert told.is_missed and not told.who
