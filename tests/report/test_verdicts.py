"""The first lines of `compare` and `check`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dflash_bench.analysis.compare import Comparison
from dflash_bench.core.types import Answer, CellKey
from dflash_bench.report.changes import verdicts
from helpers import runs

Main = Callable[..., tuple[int, str, str]]


def slower(rows: list[Answer], times: float) -> list[Answer]:
    return [
        replace(row, generation=runs.in_time(row.generation, row.generation.decode_s * times))
        if row.method == "dflash"
        else row
        for row in rows
    ]


def test_a_comparison_begins_with_what_got_worse(main: Main) -> None:
    rows = runs.answers(24)
    runs.stored(Path("then"), rows)
    runs.stored(Path("now"), slower(rows, 1.3))
    for pair, verdict, times in ((("then", "now"), "WORSE: ", "0.77"), (("now", "then"), "better: ", "1.30")):
        code, out, _ = main("compare", *pair)
        line = out.splitlines()[0]
        assert code == 0 and line.startswith(verdict)
        assert "gsm8k (embedded) dflash" in line and f"speedup.decode {times}x " in line


def test_nothing_is_called_a_change_that_may_be_none(main: Main) -> None:
    rows = runs.answers(24)
    runs.stored(Path("then"), rows)
    runs.stored(Path("now"), rows)
    line = main("compare", "then", "now")[1].splitlines()[0]
    assert "2 the same" in line and "WORSE" not in line and "better" not in line


def test_answers_that_are_right_no_more_are_said() -> None:
    key = CellKey("gsm8k", "", "s", "dflash")
    lost = Comparison(key, "", ("hub", "hub"), "then", "now", 48, {}, 24, 0, 48, is_exact=False, p_passed=0.001)
    (told,) = verdicts([lost])
    assert told.kind == "worse" and "gsm8k (hub) dflash" in told.text and " -50.0 [-" in told.text
    assert verdicts([replace(lost, lost=0, p_passed=1.0)]) == []


def test_a_check_begins_with_its_verdict_and_lists_failures_alone(main: Main) -> None:
    rows = runs.answers(24)
    runs.stored(Path("then"), rows)
    assert main("baseline", "then", "-o", "base.json")[0] == 0
    code, passed, _ = main("check", "then", "--baseline", "base.json")
    assert code == 0 and passed.startswith("passed: ") and "\n  ok" not in passed and "suite" not in passed
    assert "--all" not in passed
    runs.stored(Path("now"), slower(rows, 4.0))
    code, failed, _ = main("check", "now", "--baseline", "base.json", "--summary", "summary.md")
    assert code == 1 and failed.startswith("FAILED: ")
    rows_of = [line.split()[0] for line in failed.splitlines() if line.startswith(("FAIL ", "ok "))]
    assert rows_of and set(rows_of) == {"FAIL"}
    every = main("check", "now", "--baseline", "base.json", "--all")[1]
    listed = [line.split()[0] for line in every.splitlines() if line.startswith(("FAIL ", "ok "))]
    assert listed == sorted(listed) and set(listed) == {"FAIL", "ok"}
    summary = Path("summary.md").read_text()
    failures, _, folded = summary.partition("<details>")
    assert "| FAIL |" in failures and "| ok |" not in failures
    assert "| ok |" in folded and "| FAIL |" not in folded
