"""`--concurrency`: rows, their times and verdicts, resuming, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from dflash_bench.results import parts
from helpers.refusals import assert_refused
from helpers.runs import listed

Main = Callable[..., tuple[int, str, str]]
ASKED = "--suite mt_bench --suite gsm8k --method dflash --method ngram --limit 4 --max-new-tokens 8".split()


def rows_of(folder: Path) -> pd.DataFrame:
    return pd.concat([pd.read_parquet(part) for part in parts.of(folder)])


def answers(rows: pd.DataFrame, concurrency: int) -> dict[tuple[object, ...], tuple[object, ...]]:
    chosen = rows[rows["concurrency"] == concurrency]
    keys = zip(*(chosen[name] for name in ("suite", "prompt_id", "turn", "method")), strict=True)
    values = zip(*(map(tuple, chosen[name]) for name in ("token_ids", "accepted", "drafted_ids")), strict=True)
    return dict(zip(keys, values, strict=True))


def test_answers_are_the_same_at_every_concurrency_and_overlap_as_many_as_asked(main: Main, tmp_path: Path) -> None:
    status, _, err = main("run", *ASKED, "--concurrency", "1,3", "--out", "run")
    assert status == 0, err
    shown = main("report", "run")[1]
    assert "concurrency" in shown and "sweep over" not in shown
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 2 * 3 * (4 * 2 + 4) and set(rows["exactness"].dropna()) <= {"exact", "near_tie"}
    assert set(rows["audit"]) <= {"exact", "near_tie"}
    assert answers(rows, 1) == answers(rows, 3)
    # Every plain answer beside others is compared with the one that was decoded alone.
    together = rows[(rows["concurrency"] == 3) & (rows["method"] == "ar") & (rows["turn"] == 0)]
    assert set(together["exactness"]) == {"exact"}
    for _, wave in rows[rows["concurrency"] == 3].groupby(["suite", "method", "turn"]):
        spans = list(zip(wave["start_s"], wave["end_s"], strict=True))
        most = max(sum(start <= at < end for start, end in spans) for at, _ in spans)
        assert most == 3, "never more, and as many where there are prompts"
    for _, alone in rows[rows["concurrency"] == 1].groupby("suite"):
        spans = sorted(zip(alone["start_s"], alone["end_s"], strict=True))
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_goodput_of_turns_and_repeats_is_over_the_methods_own_waves(main: Main, tmp_path: Path) -> None:
    """Between two waves of a method the other methods decode."""
    words = "--suite mt_bench --method ngram --limit 4 --max-new-tokens 8 --repeats 2 --concurrency 2".split()
    status, shown, err = main("run", *words, "--slo", "ttft=100s,tpot=100s", "--out", "run", "--json")
    assert status == 0, err
    rows = rows_of(tmp_path / "run")
    assert {(row.repeat, row.turn) for row in rows.itertuples()} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    span = rows["end_s"].max() - rows["start_s"].min()
    for load in json.loads(shown)["loads"]:
        own = rows[rows["method"] == load["method"]]
        waves = own.groupby(["repeat", "turn"])
        own_s = (waves["end_s"].max() - waves["start_s"].min()).sum()
        assert own_s < span
        (level,) = load["levels"]
        assert level["goodput"]["share"] == 1.0
        # At least: nothing is counted in which none of a wave's answers was being decoded.
        assert level["goodput"]["per_s"] >= len(own) / own_s * 0.999
        assert level["tps_total"] == pytest.approx(
            level["goodput"]["per_s"] * own["token_ids"].map(len).mean(), rel=1e-4
        )


def test_a_run_that_was_stopped_measures_a_wave_as_a_whole_again(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_bench.engine.backend import LocalBackend

    asked = [*ASKED[2:], "--concurrency", "2,4", "--out", "run"]
    served: list[tuple[str, int]] = []
    serve = LocalBackend.serve

    def counted(self: LocalBackend, method: str, requests: Any, settings: Any, *rest: Any, **more: Any) -> Any:
        if len(requests) > 1:  # else it is a warm-up
            served.append((method, settings.concurrency))
            if len(served) == 5:
                raise KeyboardInterrupt
        return serve(self, method, requests, settings, *rest, **more)

    monkeypatch.setattr(LocalBackend, "serve", counted)
    assert main("run", *asked)[0] == 130
    assert set(rows_of(tmp_path / "run")["concurrency"]) == {2}, "the second wave had not all its methods"
    served.clear()
    served += [("", 0)] * 5
    assert main("run", *asked, "--resume")[0] == 0
    assert sorted(served[5:]) == [("ar", 4), ("dflash", 4), ("ngram", 4)]
    assert len(rows_of(tmp_path / "run")) == 2 * 3 * 4


def test_a_wave_that_lost_a_row_is_measured_as_a_whole_again(main: Main, tmp_path: Path) -> None:
    """The remaining answers were measured beside more answers than the missing ones would be."""
    asked = "--suite mt_bench --method ngram --limit 3 --max-new-tokens 6 --concurrency 2 --out run".split()
    assert main("run", *asked)[0] == 0
    before = answers(rows_of(tmp_path / "run"), 2)
    prompt = max(prompt for _, prompt, *_ in before)
    for turn, num_dropped in (0, 11), (1, 5):
        part = next(part for part in parts.of(tmp_path / "run") if turn in set(pd.read_parquet(part)["turn"]))
        lost = (pc.field("turn") == turn) & (pc.field("method") == "ngram") & (pc.field("prompt_id") == prompt)
        pq.write_table(pq.read_table(part).filter(~lost), part)
        listed(tmp_path / "run")
        assert main("check", "run")[0] == 1
        status, _, err = main("run", *asked, "--resume")
        assert status == 0, err
        rows = rows_of(tmp_path / "run")
        assert len(rows) == 12 and answers(rows, 2) == before
        resumed = json.loads((tmp_path / "run" / "run.json").read_text())["resumed"][-1]
        assert resumed["dropped"] == num_dropped
        assert main("check", "run")[0] == 0


def test_json_and_compare_know_concurrency(main: Main) -> None:
    words = "--suite gsm8k --method ngram --limit 4 --max-new-tokens 8".split()
    status, shown, err = main("run", *words, "--concurrency", "2", "--out", "two", "--json")
    assert status == 0, err
    told = json.loads(shown)
    assert [load["method"] for load in told["loads"]] == ["ar", "ngram"]
    assert [level["concurrency"] for level in told["loads"][0]["levels"]] == [2]
    assert {cell["settings"]["concurrency"] for cell in told["cells"]} == {2}
    assert main("run", *words, "--out", "one")[0] == 0
    status, shown, err = main("compare", "one", "two")
    assert status == 2 and "concurrency" in err


def test_more_at_a_time_than_there_are_prompts_is_refused(main: Main) -> None:
    words = "run --suite gsm8k --method ngram --limit 4 --concurrency 5 --out run".split()
    assert_refused(main(*words), "--concurrency 5", " 4 ", "gsm8k")
