"""Plain decoding beside the forward pass that its rounds consist of: what is slower flatters every method."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_bench.analysis import roofline
from dflash_bench.analysis.cells import summarise
from dflash_bench.core.forwards import Size
from dflash_bench.core.types import Answer
from dflash_bench.engine.drafter import NoDrafter
from dflash_bench.report.findings import findings
from dflash_bench.results import table
from helpers.each import each
from helpers.runs import about, answers, stored

pytestmark = pytest.mark.usefixtures("measured_in_full")
Main = Callable[..., tuple[int, str, str]]
FLATTERED = "plain decoding is slower than its own forward passes allow, which flatters speed-ups"


def forwards(least_s: float, **changes: Any) -> dict[str, Any]:
    """Reading a token of the cache takes a microsecond."""
    attention = {"num_layers": 1, "window": None, "query_size": 8, "cache_bytes": 1000}
    size = {"weight_bytes": 1_000_000, "matrix_elements": 250_000, "attention": [attention]}
    seconds = {"1": least_s, "16": least_s}
    known = {"rows": 1, "context": 5, "seconds": seconds, "bandwidth": 1e9, "products": 1e15, "size": size}
    return known | {"least_s": least_s} | changes


def run_with(folder: Path, rows: Sequence[Answer] = (), **info: Any) -> table.RunTable:
    """A plain round takes 10 ms, behind some ten tokens."""
    path = stored(folder, rows or answers(noise=0))
    where = path / "run.json"
    where.write_text(json.dumps(json.loads(where.read_text()) | info))
    return table.read_run(path)


def kinds(results: table.RunTable) -> set[str]:
    identity = results.info.identity
    found = findings(results.rows, summarise(results.rows, identity), identity, results.info)
    assert all(FLATTERED in one.text for one in found if one.kind == "slow_plain")
    return {one.kind for one in found}


@each(
    "info, is_found, fails",
    [
        ({}, False, False),
        ({"forwards": forwards(0.009)}, False, False),
        ({"forwards": forwards(0.0078)}, False, False),
        ({"forwards": forwards(0.0076)}, True, False),
        ({"forwards": forwards(0.0051)}, True, False),
        ({"forwards": forwards(0.0049)}, True, True),
        ({"forwards": forwards(0.0024), "pass_at_end_s": 0.009}, False, False),
        ({"forwards": forwards(0.009), "pass_at_end_s": 0.001}, False, False),
        ({"forwards": {name: value for name, value in forwards(0.001).items() if name != "least_s"}}, False, False),
    ],
)
def test_a_round_of_more_than_its_pass_is_found_and_one_of_twice_fails_a_check(
    main: Main, tmp_path: Path, info: dict[str, Any], is_found: bool, fails: bool
) -> None:
    assert ("slow_plain" in kinds(run_with(tmp_path / "run", **info))) == is_found
    status, shown, err = main("check", "run", "--json")
    checks = json.loads(shown)["checks"]
    assert (status == 1) == fails, shown + err
    assert [one["failed"] for one in checks if one["kind"] == "pass/round"] == (
        [fails] if "least_s" in str(info) else []
    )


@each("launch_s, is_found", [(None, False), (4e-6, False), (6e-6, True)])
def test_a_pass_that_waits_for_launches_is_found(tmp_path: Path, launch_s: float | None, is_found: bool) -> None:
    launched = {} if launch_s is None else {"num_launches": 1000, "launch_s": launch_s}
    assert ("launch_bound" in kinds(run_with(tmp_path / "run", forwards=forwards(0.009, **launched)))) == is_found


def test_what_a_longer_context_takes_to_read_is_no_slowness() -> None:
    info = about(forwards=forwards(0.003))
    of_short = roofline.pace(info, np.array([0.01]), np.array([5]))
    of_long = roofline.pace(info, np.array([0.01]), np.array([4005]))
    assert of_short is not None and of_short.ratio == pytest.approx(10 / 3)
    assert of_long is not None and of_long.pass_s == pytest.approx(0.007)


@each("pass_s, is_found, fails", [(0.0079, False, False), (0.0076, True, False), (0.0049, True, True)])
def test_passes_timed_in_the_same_turns_tell_a_slow_loop_from_a_busy_machine(
    main: Main, tmp_path: Path, pass_s: float, is_found: bool, fails: bool
) -> None:
    """Passes at the run's beginning took a third of a round: the machine was idle then."""
    rows = [replace(row, pass_s=pass_s) if row.method == "ar" else row for row in answers(noise=0)]
    results = run_with(tmp_path / "run", rows, forwards=forwards(0.0033))
    assert ("slow_plain" in kinds(results)) == is_found
    assert (main("check", "run")[0] == 1) == fails


def test_plain_answers_of_a_run_have_their_own_passes(main: Main) -> None:
    asked = (
        "run --suite gsm8k --limit 2 --max-new-tokens 8 --method dflash --temperature 0,1 --concurrency 1,2 --out run"
    )
    assert main(*asked.split())[0] == 0
    rows = table.read_run(Path("run"), allow=()).rows
    alone = (rows["method"] == "ar") & rows["quick_round_s"].notna()
    assert alone.sum() == 4 and (rows.loc[alone, "pass_s"] > 0).all() and rows.loc[~alone, "pass_s"].isna().all()


def test_half_of_the_answers_held_up_says_nothing_of_the_loop() -> None:
    info = about(forwards=forwards(0.009))
    pace = roofline.pace(info, np.array([0.01, 0.01, 0.01, 0.1, 0.1, np.nan]), np.full(6, 5))
    assert pace is not None and pace.ratio == pytest.approx(10 / 9)
    assert roofline.pace(info, np.array([np.nan]), np.array([5])) is None


def test_a_quarter_of_the_rounds_is_quicker_than_what_stands_for_an_answer(tmp_path: Path) -> None:
    rows = run_with(tmp_path / "run").rows
    plain = rows[rows["method"] == "ar"]
    assert plain["quick_round_s"].to_numpy() == pytest.approx(0.01)
    assert rows[rows["method"] != "ar"]["quick_round_s"].isna().all()


def test_size_is_what_a_run_stores() -> None:
    assert Size.read(forwards(1)["size"]).attention[0].cache_bytes == 1000


def test_plain_decoding_that_sleeps_is_found_in_a_run_of_nano(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NoDrafter, "propose", lambda _: time.sleep(0.03))
    asked = "run --suite gsm8k --limit 2 --max-new-tokens 24 --method dflash --out run".split()
    status, shown, err = main(*asked)
    assert status == 0 and FLATTERED in " ".join(shown.split()), shown + err
    status, shown, _ = main("check", "run", "--json")
    (check,) = [one for one in json.loads(shown)["checks"] if one["kind"] == "pass/round"]
    assert status == 1 and check["failed"] and check["reason"] == FLATTERED
