"""The fixture of pytest: an engine's own test measures, judges and gates."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import dflash_bench
from helpers.forked import forked

LIGHT = """
import sys


def test_nothing_heavy_is_loaded_before_it_is_needed(dflash_bench):
    assert not {"torch", "transformers", "pandas", "numpy"} & {*sys.modules}
"""
TEST = """
from pathlib import Path

OPTIONS = {"suite": "gsm8k", "methods": ["ngram"], "limit": 2, "max_new_tokens": 8}


def test_a_good_run_passes(dflash_bench):
    run = dflash_bench.run(**OPTIONS)
    assert run.methods == ["ngram"]
    assert dflash_bench.check(run)


def test_one_that_fell_short_fails(dflash_bench):
    dflash_bench.run(**OPTIONS)
    limits = Path(dflash_bench.folder / "limits.toml")
    limits.write_text('["al.pooled"]\\nat_least = 100\\n')
    dflash_bench.check(limits=limits)


def test_an_answer_of_another_model_fails(dflash_bench, monkeypatch):
    from dflash_bench.engine import loop

    chosen = loop.verify_chain

    def wrong(tokens, choices, padding=None):
        return chosen(tokens, choices ^ 1, padding)

    monkeypatch.setattr(loop, "verify_chain", wrong)
    dflash_bench.run(**OPTIONS)
"""

QUICK = """
import pytest


@pytest.fixture
def dflash_bench(dflash_bench, monkeypatch):
    monkeypatch.setattr("dflash_bench.runner.session.forwards_of", lambda _: None)
    return dflash_bench
"""
"""This machine is not measured, which takes most of the time of such a run."""


def words() -> list[str]:
    """pytest finds it by itself, except in an environment that was set up before the package had it."""
    known = {point.value for point in entry_points(group="pytest11")}
    by_hand = [] if "dflash_bench.api.testing" in known else ["-p", "dflash_bench.api.testing"]
    return [*by_hand, *"-p no:cacheprovider -p no:xdist -p no:random_order --import-mode=importlib -q".split()]


def test_nothing_heavy_is_loaded_by_it(tmp_path: Path) -> None:
    (tmp_path / "test_light.py").write_text(LIGHT)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words(), "test_light.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.in_full
def test_an_engines_own_tests_measure_judge_and_gate(tmp_path: Path) -> None:
    # Of a name that no module of this process has, which would be run in its place.
    (tmp_path / "test_measured.py").write_text(QUICK + TEST.replace("\\\\n", "\\n"))

    def act() -> None:
        os.chdir(tmp_path)
        sys.exit(pytest.main([*words(), "test_measured.py"]))

    done = forked(act)
    assert "2 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "al.pooled" in done.stdout and "FAILED: 1 of" in done.stdout
    assert "are not the published model's own output" in done.stdout
    assert "to see what was measured:" in done.stdout and "dflash-bench report " in done.stdout


def test_pytest_finds_it_by_itself() -> None:
    declared = (Path(dflash_bench.__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points.pytest11]\ndflash_bench = "dflash_bench.api.testing"' in declared
