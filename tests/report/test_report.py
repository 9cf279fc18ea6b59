"""What a user reads: each finding when, and only when, it is due, and the whole text against stored text.

DFLASH_BENCH_UPDATE_GOLDEN=1 rewrites the stored text; read the difference before it is committed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_bench import report
from dflash_bench.analysis import metrics
from dflash_bench.analysis.metrics import FORMULAS, Cell
from dflash_bench.core.types import GREEDY, Answer, CellKey, Divergence, Settings
from dflash_bench.report import FORMATS, Document
from dflash_bench.report.findings import Finding
from dflash_bench.report.findings import findings as find
from dflash_bench.results.identity import settings_to_json
from dflash_bench.results.table import RunTable
from helpers.golden import assert_golden
from helpers.rows import drafted, failed, generation, pair, plain, record
from helpers.runs import ENVIRONMENT, about, frame_of, known

INFO = about(command="dflash-bench run --suite gsm8k --data 'my data'", environment=ENVIRONMENT)


def steady(num_prompts: int = 24, **place: Any) -> list[Answer]:
    """A run in which nothing is weak: every prompt is 2 times faster in rounds."""
    rows = [pair(f"p{number}", [3, 2, 4], order=number, **place) for number in range(num_prompts)]
    return [replace(row, passed=True) for both in rows for row in both]


def summarise(records: Sequence[Answer]) -> list[Cell]:
    identity = known(settings=settings_to_json(list(dict.fromkeys(row.settings for row in records))))
    return metrics.summarise(frame_of(records), identity)


def findings(records: Sequence[Answer], cells: Sequence[Cell], identity: dict[str, Any] | None = None) -> list[Finding]:
    return find(frame_of(records), cells, known(**(identity or {})))


def shown(kind: str, cells: Sequence[Cell], findings: Sequence[Finding] = ()) -> str:
    return FORMATS[kind](document(cells, findings))


def document(cells: Sequence[Cell], findings: Sequence[Finding] = ()) -> Document:
    return Document(Path("results/runs/r1"), RunTable("results/runs/r1", INFO, None), cells, findings)


def found(records: Sequence[Answer], identity: dict[str, Any] | None = None) -> list[Finding]:
    return findings(records, summarise(records), identity)


def only(records: Sequence[Answer], kind: str) -> Finding:
    (finding,) = [finding for finding in found(records) if finding.kind == kind]
    return finding


def changed(records: Sequence[Answer], method: str, number: int, **changes: Any) -> list[Answer]:
    """The first `number` rows of a method with other values in their generation."""
    chosen = [row for row in records if row.method == method][:number]
    return [replace(row, generation=replace(row.generation, **changes)) if row in chosen else row for row in records]


# Findings


def made_with(**draft: Any) -> dict[str, Any]:
    return {"target": "Qwen/Qwen3-8B", "drafts": {"dflash": draft}}


@pytest.mark.parametrize("thinking", [True, False])
def test_a_draft_trained_in_the_other_mode_is_named_with_the_flag_that_helps(thinking: bool) -> None:
    rows = steady(settings=Settings(thinking=thinking))
    (finding,) = found(rows, made_with(trained_thinking=not thinking))
    assert finding.kind == "other_mode" and "gsm8k dflash: thinking is o" in finding.text
    assert finding.remedy.startswith(f"add --thinking {'off' if thinking else 'on'}")


@pytest.mark.parametrize(("thinking", "trained"), [(True, True), (False, False), (None, True), (True, None)])
def test_the_same_mode_or_one_that_is_not_known_is_no_finding(thinking: bool | None, trained: bool | None) -> None:
    assert found(steady(settings=Settings(thinking=thinking)), made_with(trained_thinking=trained)) == []


@pytest.mark.parametrize(("label", "draft"), [("dflash@b:block=8", "dflash@b"), ("eagle3-tree:60", "eagle3")])
def test_what_is_known_of_a_draft_is_said_of_the_methods_that_use_it(label: str, draft: str) -> None:
    records = steady(settings=Settings(thinking=False))
    rows = [replace(row, method=label) if row.method == "dflash" else row for row in records]
    drafts = {"dflash": {"trained_thinking": False}, draft: {"trained_thinking": True}}
    (finding,) = found(rows, {"drafts": drafts})
    assert finding.kind == "other_mode" and label in finding.text


def test_a_draft_that_names_another_target_is_doubted() -> None:
    (finding,) = found(steady(), made_with(verifier="Qwen/Qwen3-8B-Thinking"))
    assert finding.kind == "other_target"
    assert finding.text.endswith(
        "the draft was made for Qwen/Qwen3-8B-Thinking, but this run's target is Qwen/Qwen3-8B"
    )
    assert found(steady(), made_with(verifier="/models/qwen3-8b/")) == []
    assert found(steady(), made_with(verifier=None)) == []


def test_a_steady_run_has_no_findings() -> None:
    assert found(steady()) == []


def test_few_prompts() -> None:
    assert found(steady(19)) == [
        Finding(
            "few_prompts",
            "gsm8k: only 19 prompts, too few to trust the interval",
            "raise --limit to 20 or more, or leave it out",
            (CellKey("gsm8k", "", GREEDY.id, ""),),
            values=({"num_prompts": 19},),
        )
    ]
    assert found(steady(20)) == []


def test_a_wide_interval() -> None:
    rows = [*steady(), *(row for number in range(24) for row in pair(f"q{number}", [0, 0, 0]))]
    finding = only(rows, "wide_interval")
    assert finding.text.startswith("gsm8k dflash: speedup.decode 1.25 is only known to ± 0.2")
    assert "--limit" in finding.remedy


NEEDED, LARGEST = "break_even_al", "is the largest part of a round (draft"
LEFT_OUT = "which leaves out other ms and the draft's prefill"


@pytest.mark.parametrize(
    ("changes", "why", "remedy"),
    [
        (
            {"verify_s": (0.04,) * 3, "round_s": (0.048,) * 3, "decode_s": 0.144},
            f"is below {NEEDED} 4.50; verify {LARGEST} 5, verify 40, other 3 ms)",
            "draft fewer tokens per round (--method dflash:N): on this device",
        ),
        (
            {"draft_s": (0.04,) * 3, "round_s": (0.055,) * 3, "decode_s": 0.165},
            f"is below {NEEDED} 5.20; draft {LARGEST} 40, verify 12, other 3 ms)",
            "draft fewer tokens per round (--method dflash:N), or use a smaller draft",
        ),
        (
            {"round_s": (0.05,) * 3, "decode_s": 0.15},
            f"is not below {NEEDED} 1.70, {LEFT_OUT}; other {LARGEST} 5, verify 12, other 33 ms)",
            "the time is not spent in the models: try --threads 1",
        ),
        (
            {"draft_s": None, "decode_s": 0.15},
            "the backend does not report rounds, so the reason is unknown",
            "draft fewer tokens per round (--method dflash:N), and run a local model",
        ),
    ],
)
def test_no_speedup_says_where_the_time_went(changes: dict[str, Any], why: str, remedy: str) -> None:
    finding = only(changed(steady(), "dflash", 24, **changes), "slower")
    assert finding.text.startswith("gsm8k dflash: speedup.decode is 0.")
    assert finding.text.endswith(why)
    assert finding.remedy.startswith(remedy)


def test_an_interval_that_contains_1_is_neither_faster_nor_slower() -> None:
    """Half of the prompts gain, half of them lose; over all a little is lost."""
    steady_rows = steady()
    rows = []
    for row in steady_rows:
        loses = row.method == "dflash" and int(row.prompt_id[1:]) % 2
        rows.append(replace(row, generation=replace(row.generation, decode_s=0.21)) if loses else row)
    (cell,) = [cell for cell in summarise(rows) if cell.method == "dflash"]
    speedup = cell.figures["speedup.decode"]
    assert speedup.value < 1 < (speedup.high or 0)
    kinds = [finding.kind for finding in found(rows)]
    assert "slower" not in kinds and "wide_interval" not in kinds
    finding = only(rows, "unclear")
    assert finding.text.startswith(
        f"gsm8k dflash: speedup.decode {speedup.value:.2f} may be faster or slower than plain decoding"
    )
    assert finding.text.endswith("contains 1")


def test_a_draft_whose_first_token_is_rejected_does_not_know_the_text() -> None:
    """accept_at[1] is 1/3; whoever drafts one token less a round loses what is left of it."""
    rows = [row for number in range(24) for row in pair(f"p{number}", [0, 2, 0, 0, 1, 0])]
    finding = only(rows, "unknown_text")
    assert finding.text == (
        "gsm8k dflash: the draft does not fit this text: its first token is rejected in 67% of rounds "
        "(accept_at[1] 0.33, al.pooled 1.50)"
    )
    for cause in ("target", "chat template", "thinking mode", "texts like these prompts"):
        assert cause in finding.remedy
    assert only(rows, "slower").remedy.startswith("drafting fewer tokens per round will not help")
    assert not any("draft fewer tokens" in each.remedy for each in found(rows))


def test_a_draft_that_is_right_at_first_and_wrong_later_is_told_to_draft_less() -> None:
    rows = [row for number in range(24) for row in pair(f"p{number}", [1, 1, 0, 1])]
    slow = changed(rows, "dflash", 24, verify_s=(0.04,) * 4, round_s=(0.048,) * 4, decode_s=0.192)
    assert "draft fewer tokens per round" in only(slow, "slower").remedy
    assert "unknown_text" not in [each.kind for each in found(slow)]


def test_rounds_that_do_not_draft_say_nothing_of_the_first_token() -> None:
    bare = generation([0, 0, 0, 3], 4, drafted=(0, 0, 0, 4))
    rows = [row for n in range(24) for row in (plain(f"p{n}", 7), record("dflash", f"p{n}", bare))]
    assert "unknown_text" not in [each.kind for each in found(rows)]


# Badges beside the headline figure


def lines_of(records: Sequence[Answer]) -> list[str]:
    cells = summarise(records)
    return shown("table", cells, findings(records, cells)).splitlines()


def test_a_strong_figure_has_no_mark_and_the_table_no_legend() -> None:
    lines = lines_of(steady())
    assert lines[lines.index("gsm8k") + 2].split()[6:8] == ["2.00", "1.75"]
    assert not any(line.startswith(("? =", "n =", "d =")) for line in lines)


def test_few_prompts_are_marked_beside_the_speedup_and_explained_below_the_table() -> None:
    lines = lines_of(steady(8))
    assert lines[lines.index("gsm8k") + 2].split()[6:8] == ["2.00", "n"]
    assert lines[lines.index("gsm8k") + 1].split()[6:8] == ["1.00", "1.00"]
    assert lines[lines.index("gsm8k") + 3] == "n = fewer than 20 prompts, too few to trust the interval."


def test_drift_marks_every_method_of_its_suite_and_no_other_suite() -> None:
    drifted = changed(steady(), "ar", 6, decode_s=0.14)
    rows = [*drifted, *steady(suite="math500")]
    lines = [line.split() for line in lines_of(rows) if line.startswith("  dflash")][:2]
    assert ["d" in words for words in lines] == [True, False]


def test_markdown_and_latex_carry_the_marks_and_their_meaning() -> None:
    rows = steady(8)
    cells = summarise(rows)
    text = shown("markdown", cells, findings(rows, cells))
    assert "| 2.00 n |" in text and "n = fewer than 20 prompts" in text
    table = shown("latex", cells, findings(rows, cells))
    assert "2.00 n &" in table and "n = fewer than 20 prompts" in table


def test_a_dead_draft() -> None:
    rows = [row for number in range(24) for row in pair(f"p{number}", [0] * 30)]
    assert only(rows, "dead_draft").text.startswith("gsm8k dflash: al.pooled is 1.00")
    assert {finding.kind for finding in found(rows)} == {"dead_draft", "slower"}


def as_method(label: str, rows: Sequence[Answer]) -> list[Answer]:
    return [replace(row, method=label) if row.method == "dflash" else row for row in rows]


def test_a_method_without_a_trained_draft_is_not_told_to_check_its_draft() -> None:
    dead = [row for number in range(24) for row in pair(f"p{number}", [0] * 30)]
    poor = [row for number in range(24) for row in pair(f"p{number}", [0, 2, 0, 0, 1, 0])]
    idle = [row for number in range(24) for row in pair(f"p{number}", [0] * 3, block=0)]
    for rows, kind in ((dead, "dead_draft"), (poor, "unknown_text"), (idle, "nothing_drafted")):
        assert "repeat little" in only(as_method("ngram:4", rows), kind).remedy
    whole = [row for number in range(24) for row in pair(f"p{number}", [4, 4, 1])]
    assert only(as_method("ngram:4", whole), "saturated").remedy == "draft more tokens per round (--method ngram:N)"


def test_what_measures_the_engine_has_no_bad_draft() -> None:
    for accepted in ([0] * 30, [0, 2, 0, 0, 1, 0], [4, 4, 1]):
        rows = [row for number in range(24) for row in pair(f"p{number}", accepted)]
        for label in ("random", "oracle:15", "synthetic:rates=0.9"):
            kinds = {finding.kind for finding in found(as_method(label, rows))}
            assert not kinds & {"dead_draft", "unknown_text", "saturated"}


def test_nothing_drafted_is_told_once() -> None:
    rows = [row for number in range(24) for row in pair(f"p{number}", [0] * 3, block=0)]
    assert [finding.text for finding in found(rows)] == ["gsm8k dflash: no token was drafted in 72 rounds"]


@pytest.mark.parametrize(
    ("label", "typed"),
    [
        ("eagle3:7", " (--method eagle3:N)"),
        ("dflash@mine:block=8", " (--method dflash@mine:N)"),
        ("eagle3-tree@b:depth=4", " (--method eagle3-tree@b:nodes=N)"),
        ("eagle3-tree:60", " (--method eagle3-tree:nodes=N)"),
        ("somebody else's", ""),
    ],
)
def test_a_remedy_names_the_method_as_it_is_typed(label: str, typed: str) -> None:
    records = steady(settings=Settings(thinking=False))
    rows = [replace(row, method=label) if row.method == "dflash" else row for row in records]
    slow = changed(rows, label, 24, verify_s=(0.04,) * 3, decode_s=0.144)
    remedy = only(slow, "slower").remedy
    assert f"draft fewer tokens per round{typed}" in remedy and ("--method" in remedy) == bool(typed)


def test_a_saturated_block() -> None:
    rows = [row for number in range(24) for row in pair(f"p{number}", [4, 4, 1])]
    finding = only(rows, "saturated")
    assert finding.text == "gsm8k dflash: 48 of 72 rounds (67%) accept the whole draft"
    assert finding.remedy == "draft more tokens per round (--method dflash:N), if the draft was trained for more"


def test_a_tree_is_not_saturated_by_a_way_as_long_as_its_number_of_nodes() -> None:
    """Two nodes, one below the other, both kept: that the tree was small cannot be told from the counts."""
    rows = [row for number in range(24) for row in pair(f"p{number}", [2, 2, 1], block=2)]
    trees = [replace(row, method="eagle3-tree:3") if row.method == "dflash" else row for row in rows]
    assert only(rows, "saturated")
    assert "saturated" not in [finding.kind for finding in found(trees)]


def test_failed_answers_with_the_first_error_on_one_line() -> None:
    rows = [*steady(), failed("dflash", "x", "NaN logits\nin layer 3"), failed("dflash", "y", "later")]
    expected = "gsm8k dflash: 2 of 26 answers failed and are left out of all numbers; the first error: NaN logits"
    assert only(rows, "failed").text == expected


def test_near_ties_and_mismatches_are_told_apart() -> None:
    rows = steady()
    at = next(number for number, row in enumerate(rows) if row.method == "dflash")
    tie = replace(rows[at], exactness="near_tie", divergence=Divergence(7, 0.001, 0.002))
    assert only([*rows[:at], tie, *rows[at + 1 :]], "near_tie").text.startswith("gsm8k dflash: 1 of 24 answers")
    wrong = replace(tie, exactness="mismatch", divergence=Divergence(7, 1.5, 0.002))
    finding = only([*rows[:at], wrong, *rows[at + 1 :]], "mismatch")
    assert finding.text == (
        "gsm8k dflash: 1 of 24 answers differ from the plain answer; the first is prompt p0 turn 0 token 7, "
        "1.5 logits behind the model's choice where rounding explains 0.002"
    )
    assert "bug" in finding.remedy


def test_answers_that_are_not_the_published_models_are_told_though_all_methods_agree() -> None:
    rows = [replace(row, audit="mismatch", departure=Divergence(5, 0.75, 1e-5)) for row in steady()]
    finding = next(finding for finding in found(rows) if finding.kind == "mismatch")
    assert finding.text == (
        "gsm8k ar: 24 of 24 answers are not the published model's own output; the first is prompt p0 turn 0 token 5, "
        "0.75 logits behind the model's choice where rounding explains 1e-05; also gsm8k dflash"
    )


def test_a_baseline_that_disagrees_with_itself_is_told_as_such() -> None:
    rows = [replace(row, exactness="mismatch") if row.method == "ar" else row for row in steady()]
    finding = only(rows, "mismatch")
    assert finding.text.startswith("gsm8k ar: plain decoding disagrees with itself in 24 of 24 answers")


def test_truncated_answers() -> None:
    assert found(changed(steady(), "ar", 2, finish_reason="length")) == []
    finding = only(changed(steady(), "ar", 3, finish_reason="length"), "truncated")
    assert (finding.text, finding.remedy) == (
        "gsm8k: 3 of 24 answers were cut at the token limit",
        "raise --max-new-tokens",
    )


def test_a_slow_first_answer() -> None:
    slow = {"round_s": (0.06,) * 3, "decode_s": 0.18}
    finding = only(changed(steady(), "dflash", 1, **slow), "slow_first")
    assert finding.text == "gsm8k dflash: the first answer took 60 ms per step, 3.0 times the median"
    by_token = changed(changed(steady(), "ar", 24, round_s=None), "ar", 1, decode_s=0.36)
    assert only(by_token, "slow_first").text.startswith("gsm8k ar: the first answer took 30 ms per step")


def test_only_the_first_answers_of_the_run_can_be_a_warm_up() -> None:
    slow = {"round_s": (0.06,) * 3, "decode_s": 0.18}
    later = [replace(row, suite="math500", order=row.order + 24) for row in changed(steady(), "dflash", 1, **slow)]
    (finding,) = [each for each in found([*steady(), *later]) if each.kind in ("slow_first", "outliers")]
    assert finding.kind == "outliers"
    assert finding.text.startswith("math500 dflash: 1 of 24 answers took far longer per step; worst prompt p0 turn 0")
    (finding,) = [each for each in found([*later, *steady()]) if each.kind in ("slow_first", "outliers")]
    assert finding.kind == "outliers"


def test_a_suite_without_plain_answers_says_why_it_has_no_speedup() -> None:
    alone = [replace(row, suite="math500", order=row.order + 24) for row in steady() if row.method == "dflash"]
    finding = only([*steady(), *alone], "no_baseline")
    assert finding.text == ("math500 dflash: there are no answers of plain decoding (ar), so there is no speed-up")
    broken = [failed("ar", row.prompt_id, "boom", order=row.order) for row in steady() if row.method == "ar"]
    assert only([*broken, *(row for row in steady() if row.method == "dflash")], "no_baseline").text.startswith("gsm8k")


def test_a_long_answer_in_few_rounds_does_not_look_slow() -> None:
    rows = [*pair("first", [0, 0, 0], order=-1), *steady()]
    assert [finding.kind for finding in found(rows)] == []


def test_drift_over_the_run() -> None:
    finding = only(changed(steady(), "ar", 6, decode_s=0.14), "drift")
    assert finding.text.startswith("gsm8k: the machine's speed drifted from the first to the last quarter, ")
    assert finding.text.endswith("from 11.7 to 10 ms per token (-14%)")
    assert found(changed(steady(), "ar", 6, decode_s=0.13)) == []


def test_what_is_wrong_comes_before_what_is_weak() -> None:
    rows = [*steady(5, suite="b"), *steady(24, suite="a"), failed("dflash", "x", "boom", suite="a")]
    assert [(each.kind, each.text.split(":")[0]) for each in found(rows)] == [
        ("failed", "a dflash"),
        ("few_prompts", "b"),
    ]


def test_cells_that_share_a_fault_and_its_remedy_share_a_finding() -> None:
    rows = [row for suite in "bac" for row in steady(5, suite=suite)]
    assert [each.text for each in found(rows)] == ["b: only 5 prompts, too few to trust the interval; also a, c"]
    slow = changed(rows, "dflash", 15, verify_s=(0.04,) * 3, round_s=(0.048,) * 3, decode_s=0.144)
    by_another = [replace(row, method="eagle3") for row in slow if row.method == "dflash"]
    texts = [each.text for each in found([*slow, *by_another]) if each.kind == "slower"]
    assert [(text[:8], text.split("; ")[-1]) for text in texts] == [
        ("b dflash", "also a dflash, c dflash"),
        ("b eagle3", "also a eagle3, c eagle3"),
    ]


# The whole text


def full_run() -> list[Answer]:
    """Three methods; one loses, one hides its rounds; two suites, one of them unscored; every kind of gap."""
    rows = []
    for number in range(24):
        accepted = [number % 5, 3, (7 * number) % 5, 4][: 2 + number % 3]
        steps = sum(accepted) + len(accepted)
        rows += pair(f"p{number}", accepted, order=number)
        rounds = len(accepted)
        slow = generation(accepted, 7, decode_s=0.04 * rounds, verify_s=(0.025,) * rounds, round_s=(0.04,) * rounds)
        rows.append(record("eagle3", f"p{number}", slow, order=number, exactness="exact"))
        rows.append(plain(f"p{number}", 90 * steps, suite="mt_bench", order=number))
        hidden = generation(None, token_ids=tuple(range(90 * steps + 1)), decode_s=0.3 * steps)
        rows.append(record("server", f"p{number}", hidden, suite="mt_bench", order=number))
    rows = [replace(row, passed=int(row.prompt_id[1:]) % 3 > 0) if row.suite == "gsm8k" else row for row in rows]
    return [*rows, failed("eagle3", "p99", "out of memory: [red]2 GiB[/red]")]


def test_the_text_is_as_stored_and_fits_a_hundred_columns() -> None:
    cells = summarise(full_run())
    text = shown("table", cells, findings(full_run(), cells))
    assert max(map(len, text.splitlines())) <= 100
    assert_golden("report.txt", text)


def test_the_largest_suite_fits_a_hundred_columns() -> None:
    (cell,) = summarise([drafted("a", [4, 4], suite="humaneval")])
    big = replace(cell, num_prompts=1319, num_tokens=412_345, exact=(1319, 1319), passed=(1319, 1319))
    text = shown("table", [big])
    assert "1,319 412,345" in text
    assert "1319/1319  100.0" in text


def test_the_markdown_is_as_stored() -> None:
    cells = summarise(full_run())
    assert_golden("report.md", shown("markdown", cells, findings(full_run(), cells)))


def test_the_json_is_as_stored() -> None:
    cells = summarise(full_run())
    made = report.as_json(document(cells, findings(full_run(), cells)))
    assert_golden("report.json", json.dumps(made, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def test_the_json_has_null_for_what_cannot_be_had() -> None:
    rows = [*pair("a", [1]), failed("eagle3", "a", "boom")]
    cells = report.as_json(document(summarise(rows)))["cells"]
    assert cells[1]["speedup_decode"] == [1, None, None]
    assert cells[1]["passed"] is None
    assert cells[0]["source"] is None
    texts_and_counts = {"suite", "settings_id", "settings", "method", "num_prompts", "num_tokens"}
    assert {cells[2][name] for name in cells[2].keys() - texts_and_counts} == {None}


def test_every_figure_of_a_column_has_its_formula_below_the_markdown() -> None:
    cells = summarise(full_run())
    _, formulas = shown("markdown", cells).split("## Formulas")
    ids = {column.id for column in (*report.RESULTS, *report.ROUNDS)}
    for formula_id in FORMULAS:
        assert (f"`{formula_id}`" in formulas) == (formula_id in ids)


def test_a_judge_without_weights_of_its_own_is_found_and_stands_in_the_settings() -> None:
    judge = {"target": "Qwen/Qwen3-8B", "dtype": "float32", "weights": "shared weights"}
    (finding,) = found(steady(), {"judge": judge})
    assert finding.kind == "shared_weights" and "the judge read the engine's" in finding.text
    assert found(steady(), {"judge": {**judge, "weights": "separate"}}) == []
    assert found(steady(), {"judge": None}) == []


def test_a_target_that_was_left_to_transformers_is_found_with_the_reason() -> None:
    (finding,) = found(steady(), {"network": "transformers", "fallback": "does not cover this target: why not"})
    assert finding.kind == "fallback"
    assert finding.text.endswith("because the engine's own does not cover this target: why not")
    assert found(steady(), {"network": "transformers", "fallback": None}) == []
    (finding,) = found(steady(), {"network": "native", "why_torch": "it has experts"})
    assert finding.kind == "torch_kernels" and "numba's kernels could not: it has experts" in finding.text
    assert "--kernels torch" in finding.remedy


def test_nothing_found_is_said() -> None:
    cells = summarise(steady())
    assert "\n\nfindings: none\n" in shown("table", cells)
    assert "## Findings\n\nNone.\n" in shown("markdown", cells)


def test_importing_the_report_loads_nothing_heavy() -> None:
    code = "import sys, dflash_bench.report, dflash_bench.results.store; print(*sys.modules)"
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root}
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert not {"torch", "pyarrow", "pandas", "scipy", "rich"} & set(loaded.stdout.split())
