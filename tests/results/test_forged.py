"""A finished run without its witnesses: whoever takes them out of run.json has a run that nobody reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from helpers.each import each
from helpers.runs import answers, listed, stored

Main = Callable[..., tuple[int, str, str]]
SIZE = {"weight_bytes": 1.0, "matrix_elements": 1, "attention": []}
FORWARDS = {"rows": 1, "context": 128, "seconds": {"1": 1.0}, "bandwidth": 1e9, "products": 1e9, "size": SIZE}


def rewritten(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    info = json.loads((run / "run.json").read_text())
    change(info)
    (run / "run.json").write_text(json.dumps(info))


@each(
    "change, check",
    [
        (lambda info: info.pop("times"), 1),
        (lambda info: info["times"].pop("dflash"), 1),
        (lambda info: info.pop("span_s"), 1),
        (lambda info: info.update(measured={"gsm8k": 6}), 2),
        (lambda info: info.update(since_s=1e6, times={}), 1),
        (lambda info: info.update(since_s=1e6, times={}, resumed=[{"started": "2026-01-01T00:00:00"}]), 1),
        (lambda info: info.update(forwards=FORWARDS | {"least_s": 0.05}), 1),
        (lambda info: info["forwards"].update(least_s=0.01, wide_s={"5": 0.045}), 1),
    ],
)
def test_a_finished_run_holds_its_witnesses(
    main: Main, tmp_path: Path, change: Callable[[dict[str, Any]], object], check: int
) -> None:
    run = stored(tmp_path / "run", answers(12))
    rewritten(run, lambda info: info.update(forwards=FORWARDS | {"least_s": 0.03}))
    assert main("report", "run")[0] == 0
    rewritten(run, change)
    assert main("report", "run")[0] == 2
    assert main("check", "run")[0] == check


@each(
    "measured, quickest_s",
    [
        ({"5": 0.035}, 0.0),
        ({"5": 0.045, "16": 0.035}, 0.0),  # interrupted: wider passes took less
        ({"5": 0.07, "9": 0.09}, 0.002),  # the machine was five times as fast when the run ended
        ({"9": 0.09, "16": 0.09}, 0.0),  # wider than these answers' passes
    ],
)
def test_passes_are_held_to_the_quickest_that_measured_ones_allow(
    main: Main, tmp_path: Path, measured: dict[str, float], quickest_s: float
) -> None:
    run = stored(tmp_path / "run", answers(12))
    forwards = FORWARDS | {"least_s": 0.01, "wide_s": measured}
    rewritten(run, lambda info: info.update(forwards=forwards, pass_at_end_s=quickest_s))
    assert main("report", "run")[0] == 0
    rewritten(run, lambda info: info["forwards"].update(wide_s={"5": 0.045, "16": 0.045}, least_s=0.045))
    rewritten(run, lambda info: info.update(pass_at_end_s=0.0))
    assert main("report", "run")[0] == 2


def test_an_answer_that_the_runners_clock_says_nothing_of_is_refused(main: Main, tmp_path: Path) -> None:
    run = stored(tmp_path / "run", answers(12))
    for part in run.glob("part-*.parquet"):
        table = parquet.read_table(part)
        at = table.schema.get_field_index("clock_s")
        empty = pa.nulls(len(table), table.schema.field(at).type)
        parquet.write_table(table.set_column(at, table.schema.field(at), empty), part)
    listed(run)
    assert main("check", "run")[0] == 1
    status, _, err = main("report", "run")
    assert status == 2 and "24 answers" not in err and "the runner's own clock says nothing of it" in err


def test_a_part_that_the_run_wrote_is_missed_where_no_answer_is(main: Main, tmp_path: Path) -> None:
    run = stored(tmp_path / "run", answers(12))
    ledger = run / "parts.sha256"
    ledger.write_text(ledger.read_text() + f"{'0' * 64}  part-000009.parquet\n")
    status, _, err = main("report", "run")
    assert status == 2 and "part-000009.parquet is missing" in err
