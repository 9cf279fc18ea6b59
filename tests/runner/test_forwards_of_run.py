"""The width curve of a run's own target: measured when it begins, kept beside its identity, never compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_bench.analysis import roofline
from dflash_bench.analysis.cells import Cell, summarise
from dflash_bench.results.run_info import read_info
from dflash_bench.results.table import read_run
from dflash_bench.runner import session
from dflash_bench.runner.config import RunRequest
from helpers import tiny

pytestmark = pytest.mark.usefixtures("measured_in_full")


def perform(model: Path, folder: Path, resume: bool = False) -> None:
    asked = RunRequest(suites=("gsm8k",), methods=(), model=str(model), limit=1, max_new_tokens=4)
    session.perform(asked, folder, resume=resume, caller=session.Caller(print))


def cells(folder: Path) -> list[Cell]:
    read = read_run(folder)
    return summarise(read.rows, read.info.identity)


def test_a_run_measures_its_target_and_resumes_under_other_numbers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    perform(model, folder)
    info = read_info(folder).to_json()
    assert list(info["forwards"]["seconds"]) == ["1", "2", "4", "5", "8", "9", "16"]
    assert info["forwards"]["size"]["num_layers"] == tiny.LAYERS
    plain = next(cell for cell in cells(folder) if cell.method == "ar")
    needed = info["forwards"]["size"]["weight_bytes"] / info["forwards"]["read_bandwidth"]
    assert plain.value("bandwidth_share") == pytest.approx(needed * (plain.value("tps.decode") or 0))
    through = roofline.stored(read_info(folder))
    assert through is not None and through.line.at(1) > 0
    assert "forwards" not in info["identity"] and "seconds" not in json.dumps(info["identity"])
    slower = {**info["forwards"], "bandwidth": 1.0, "seconds": {"1": 9.0, "16": 10.0}}
    monkeypatch.setattr(session, "forwards_of", lambda _: slower)
    for part in folder.glob("part-*.parquet"):
        part.unlink()
    perform(model, folder, resume=True)
    again = read_info(folder).to_json()
    assert again["forwards"] == info["forwards"] and again["resumed"][-1]["forwards"] == slower
    assert again["state"] == "complete"
