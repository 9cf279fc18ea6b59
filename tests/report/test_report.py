"""Reports: each finding exactly when it is due, and the whole text against stored text.

DFLASH_BENCH_UPDATE_GOLDEN=1 rewrites the stored text; read the difference before it is committed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dflash_bench import report
from dflash_bench.analysis.cells import Cell
from dflash_bench.analysis.metrics import FORMULAS
from dflash_bench.core.types import Answer, Divergence, Settings
from dflash_bench.report import FORMATS
from dflash_bench.report.findings import Finding
from helpers.each import each
from helpers.golden import assert_golden
from helpers.pages import cells_of, document, findings, found
from helpers.rows import drafted, failed, generation, pair, plain, record


def steady(num_prompts: int = 24, **place: Any) -> list[Answer]:
    """A run in which nothing is weak: every prompt is 2 times faster in rounds."""
    rows = [pair(f"p{number}", [3, 2, 4], order=number, **place) for number in range(num_prompts)]
    return [replace(row, passed=True) for both in rows for row in both]


def shown(kind: str, cells: Sequence[Cell], findings: Sequence[Finding] = ()) -> str:
    return FORMATS[kind](document(cells, findings))


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


def answers_of(accepted: Sequence[int], label: str = "dflash", block: int = 4) -> list[Answer]:
    """24 prompts with these rounds."""
    rows = [row for number in range(24) for row in pair(f"p{number}", accepted, block=block)]
    return as_method(label, rows)


def as_method(label: str, rows: Sequence[Answer]) -> list[Answer]:
    return [replace(row, method=label) if row.method == "dflash" else row for row in rows]


def first(method: str, **changes: Any) -> list[Answer]:
    """A steady run with another first answer of a method."""
    rows = steady()
    at = next(number for number, row in enumerate(rows) if row.method == method)
    return [*rows[:at], replace(rows[at], **changes), *rows[at + 1 :]]


def half_slow() -> list[Answer]:
    """Half of the prompts gain, half of them lose; over all a little is lost."""
    loses = {row.prompt_id for row in steady() if int(row.prompt_id[1:]) % 2}
    return [
        replace(row, generation=replace(row.generation, decode_s=0.21))
        if row.method == "dflash" and row.prompt_id in loses else row
        for row in steady()
    ]  # fmt: skip


def of_suite(suite: str, rows: Sequence[Answer]) -> list[Answer]:
    """The same rows, later in the run."""
    return [replace(row, suite=suite, order=row.order + 24) for row in rows]


SLOW = {"verify_s": (0.04,) * 3, "round_s": (0.048,) * 3, "decode_s": 0.144}
LATE = {"round_s": (0.06,) * 3, "decode_s": 0.18}
DEAD, POOR, WHOLE = [0] * 30, [0, 2, 0, 0, 1, 0], [4, 4, 1]
AT = {"prompt_id": "p0", "turn": 0}
JUDGE = {"target": "Qwen/Qwen3-8B", "dtype": "float32", "weights": "shared weights"}
THINKING = [steady(settings=Settings(thinking=thinking)) for thinking in (False, True)]
CASES: list[tuple[Sequence[Answer], dict[str, Any] | None, str, str, dict[str, Any]]] = [
    # (rows, identity, code[/code of the remedy], cells, values)
    (THINKING[1], made_with(trained_thinking=False), "other_mode/thinking_off", "gsm8k dflash",
     {"thinking": True, "trained_thinking": False}),
    (THINKING[0], made_with(trained_thinking=True), "other_mode/thinking_on", "gsm8k dflash",
     {"thinking": False, "trained_thinking": True}),
    *[(as_method(label, THINKING[0]), {"drafts": {"dflash": {"trained_thinking": False},
       draft: {"trained_thinking": True}}}, "other_mode/thinking_on", f"gsm8k {label}", {"trained_thinking": True})
      for label, draft in (("dflash@b:block=8", "dflash@b"), ("eagle3-tree:60", "eagle3"))],
    (steady(), made_with(verifier="Qwen/Qwen3-8B-Thinking"), "other_target/other_target", "gsm8k dflash",
     {"verifier": "Qwen/Qwen3-8B-Thinking", "target": "Qwen/Qwen3-8B"}),
    (steady(19), None, "few_prompts", "gsm8k", {"num_prompts": 19}),
    ([row for suite in "bac" for row in steady(5, suite=suite)], None, "few_prompts", "b, a, c", {"num_prompts": 5}),
    ([*steady(), *(row for n in range(24) for row in pair(f"q{n}", [0, 0, 0]))], None, "wide_interval", "gsm8k dflash",
     {"speedup_decode": 1.25}),
    (changed(steady(), "dflash", 24, **SLOW), None, "slower/cost_of_verify", "gsm8k dflash",
     {"speedup_decode": 120 / 144}),
    (changed(steady(), "dflash", 24, draft_s=(0.04,) * 3, round_s=(0.055,) * 3, decode_s=0.165), None,
     "slower/cost_of_draft", "gsm8k dflash", {"speedup_decode": 120 / 165}),
    (changed(steady(), "dflash", 24, round_s=(0.05,) * 3, decode_s=0.15), None, "slower/cost_of_other", "gsm8k dflash",
     {"speedup_decode": 0.8}),
    (changed(steady(), "dflash", 24, draft_s=None, decode_s=0.15), None, "slower/fewer_tokens", "gsm8k dflash",
     {"speedup_decode": 0.8}),
    (half_slow(), None, "unclear", "gsm8k dflash", {"speedup_decode": 120 / 135}),
    # accept_at[1] is 1/3; whoever drafts one token less a round loses what is left of it.
    (answers_of(POOR), None, "unknown_text/check_texts", "gsm8k dflash", {"first_kept": 1 / 3, "al_pooled": 1.5}),
    (answers_of(POOR), None, "slower/other_texts", "gsm8k dflash", {}),
    (changed(answers_of([1, 1, 0, 1]), "dflash", 24, verify_s=(0.04,) * 4, round_s=(0.048,) * 4, decode_s=0.192), None,
     "slower/cost_of_verify", "gsm8k dflash", {}),
    (answers_of(DEAD), None, "dead_draft/check_training", "gsm8k dflash", {"al_pooled": 1.0}),
    (answers_of([0] * 3, block=0), None, "nothing_drafted/more_tokens", "gsm8k dflash", {"num_rounds": 72}),
    (answers_of(WHOLE), None, "saturated/more_tokens_if_trained", "gsm8k dflash", {"num_whole": 48, "num_rounds": 72}),
    # Without a trained draft there is none to check.
    (answers_of(DEAD, "ngram:4"), None, "dead_draft/trained_draft", "gsm8k ngram:4", {}),
    (answers_of(POOR, "ngram:4"), None, "unknown_text/trained_draft", "gsm8k ngram:4", {}),
    (answers_of([0] * 3, "ngram:4", block=0), None, "nothing_drafted/trained_draft", "gsm8k ngram:4", {}),
    (answers_of(WHOLE, "ngram:4"), None, "saturated/more_tokens", "gsm8k ngram:4", {}),
    ([*steady(), failed("dflash", "x", "NaN logits\nin layer 3"), failed("dflash", "y", "later")], None, "failed",
     "gsm8k dflash", {"num_answers": 2, "num_all": 26, "error": "NaN logits"}),
    (first("dflash", exactness="near_tie", divergence=Divergence(7, 0.001, 0.002)), None, "near_tie", "gsm8k dflash",
     {"num_answers": 1, "num_all": 24, "gap": 0.001}),
    (first("dflash", exactness="mismatch", divergence=Divergence(7, 1.5, 0.002)), None, "mismatch/method",
     "gsm8k dflash", AT | {"num_answers": 1, "num_all": 24, "index": 7, "gap": 1.5, "tolerance": 0.002}),
    ([replace(row, audit="mismatch", departure=Divergence(5, 0.75, 1e-5)) for row in steady()], None,
     "mismatch/engine", "gsm8k ar, gsm8k dflash", AT | {"num_answers": 24, "index": 5, "gap": 0.75, "tolerance": 1e-5}),
    ([replace(row, exactness="mismatch") if row.method == "ar" else row for row in steady()], None, "mismatch/control",
     "gsm8k ar", {"num_answers": 24, "num_all": 24}),
    (changed(steady(), "ar", 3, finish_reason="length"), None, "truncated", "gsm8k", {"num_answers": 3, "num_all": 24}),
    (changed(steady(), "dflash", 1, **LATE), None, "slow_first", "gsm8k dflash", {"step_s": 0.06, "over_median": 3.0}),
    (changed(changed(steady(), "ar", 24, round_s=None), "ar", 1, decode_s=0.36), None, "slow_first", "gsm8k ar",
     {"step_s": 0.03}),
    # Only the first answers of the run can be a warm-up.
    ([*steady(), *of_suite("math500", changed(steady(), "dflash", 1, **LATE))], None, "outliers", "math500 dflash",
     AT | {"num_answers": 1, "num_all": 24, "over_median": 3.0}),
    ([*of_suite("math500", changed(steady(), "dflash", 1, **LATE)), *steady()], None, "outliers", "math500 dflash", {}),
    ([*steady(), *of_suite("math500", [row for row in steady() if row.method == "dflash"])], None,
     "no_baseline/unfinished", "math500 dflash", {}),
    ([replace(failed("ar", row.prompt_id, "boom"), order=row.order) if row.method == "ar" else row
      for row in steady()], None, "no_baseline/unfinished", "gsm8k dflash", {}),
    (changed(steady(), "ar", 6, decode_s=0.14), None, "drift", "gsm8k",
     {"first_s_per_token": 0.14 / 12, "last_s_per_token": 0.01}),
    (steady(), {"judge": JUDGE}, "shared_weights", "gsm8k", {}),
    (steady(), {"network": "transformers", "fallback": "does not cover this target: why not"}, "fallback/not_covered",
     "gsm8k", {"reason": "does not cover this target: why not"}),
    (steady(), {"network": "native", "why_torch": "it has experts"}, "torch_kernels", "gsm8k",
     {"reason": "it has experts"}),
    (steady(), {"paths": {"attention": {"used": "masked attention", "why_slow": "no kernel"},
     "passes": {"used": "CUDA graphs"}}}, "slow_paths", "gsm8k", {"reason": "attention: no kernel"}),
]  # fmt: skip


@cache
def found_in_case(number: int) -> list[Finding]:
    rows, identity, *_ = CASES[number]
    return found(rows, identity)


@each("number, code, cells, values", [(number, *case[2:]) for number, case in enumerate(CASES)])
def test_a_fault_is_found_by_its_code_where_it_is_with_its_values(
    number: int, code: str, cells: str, values: dict[str, Any]
) -> None:
    kind, _, remedy = code.partition("/")
    (finding,) = [one for one in found_in_case(number) if one.kind == kind]
    assert finding.remedy_code == remedy
    assert ", ".join(f"{place.suite} {place.method}".strip() for place in finding.places) == cells
    assert {name: finding.values[0][name] for name in values} == pytest.approx(values)


def test_the_words_of_findings_are_as_stored() -> None:
    texts = [f"{one.text}\n    -> {one.remedy}\n" for n in range(len(CASES)) for one in found_in_case(n)]
    assert_golden("findings.txt", "".join(dict.fromkeys(texts)))


@each(
    "rows, identity",
    [
        (steady(), None),
        (steady(20), None),
        ([*pair("first", [0, 0, 0], order=-1), *steady()], None),
        *[
            (steady(settings=Settings(thinking=thinking)), made_with(trained_thinking=trained))
            for thinking, trained in ((True, True), (False, False), (None, True), (True, None))
        ],
        (steady(), made_with(verifier="/models/qwen3-8b/")),
        (steady(), made_with(verifier=None)),
        (changed(steady(), "ar", 2, finish_reason="length"), None),
        (changed(steady(), "ar", 6, decode_s=0.13), None),
        (steady(), {"judge": JUDGE | {"weights": "separate"}}),
        (steady(), {"judge": None}),
        (steady(), {"network": "transformers", "fallback": None}),
    ],
)
def test_nothing_is_found_where_nothing_is_wrong(rows: Sequence[Answer], identity: dict[str, Any] | None) -> None:
    assert found(rows, identity) == []


FROM_AFAR = record("dflash", "p", generation([0, 0, 0, 3], 4, drafted=(0, 0, 0, 4)))


@each(
    "rows, kinds",
    [
        (half_slow(), {"unclear"}),
        (answers_of(DEAD), {"dead_draft", "slower"}),
        (answers_of([0] * 3, block=0), {"nothing_drafted"}),
        (
            changed(answers_of([1, 1, 0, 1]), "dflash", 24, verify_s=(0.04,) * 4, round_s=(0.048,) * 4, decode_s=0.192),
            {"slower"},
        ),
        # Rounds that do not draft say nothing of the first token.
        ([row for n in range(24) for row in (plain(f"p{n}", 7), replace(FROM_AFAR, prompt_id=f"p{n}"))], {"slower"}),
        # Probes of the engine have no bad draft.
        *[
            (answers_of(rounds, label), {"slower"} - ({"slower"} if rounds is WHOLE else set()))
            for rounds in (DEAD, POOR, WHOLE)
            for label in ("random", "oracle:15", "synthetic:rates=0.9")
        ],
        # Two nodes, one below the other, both kept: that the tree was small cannot be told from the counts.
        (as_method("eagle3-tree:3", answers_of([2, 2, 1], block=2)), set()),
    ],
)
def test_a_fault_brings_no_other(rows: Sequence[Answer], kinds: set[str]) -> None:
    assert {finding.kind for finding in found(rows)} - {"imposed"} == kinds


@each(
    "label, typed",
    [
        ("eagle3:7", " (--method eagle3:N)"),
        ("dflash@mine:block=8", " (--method dflash@mine:N)"),
        ("eagle3-tree@b:depth=4", " (--method eagle3-tree@b:nodes=N)"),
        ("eagle3-tree:60", " (--method eagle3-tree:nodes=N)"),
        ("somebody else's", ""),
    ],
)
def test_a_remedy_names_the_method_as_it_is_typed(label: str, typed: str) -> None:
    remedy = only(as_method(label, changed(steady(), "dflash", 24, **SLOW)), "slower").remedy
    assert typed in remedy and ("--method" in remedy) == bool(typed)


@pytest.mark.parametrize("thinking", [True, False])
def test_a_remedy_names_the_mode_that_the_draft_knows(thinking: bool) -> None:
    (finding,) = found(THINKING[thinking], made_with(trained_thinking=not thinking))
    assert f"--thinking {'off' if thinking else 'on'}" in finding.remedy


def test_what_is_wrong_comes_before_what_is_weak() -> None:
    rows = [*steady(5, suite="b"), *steady(24, suite="a"), failed("dflash", "x", "boom", suite="a")]
    assert [(one.kind, one.places[0].suite) for one in found(rows)] == [("failed", "a"), ("few_prompts", "b")]


def test_cells_that_share_a_fault_and_its_remedy_share_a_finding() -> None:
    rows = [row for suite in "bac" for row in steady(5, suite=suite)]
    slow = changed(rows, "dflash", 15, **SLOW)
    by_another = [replace(row, method="eagle3") for row in slow if row.method == "dflash"]
    places = [one.places for one in found([*slow, *by_another]) if one.kind == "slower"]
    assert [[(place.suite, place.method) for place in group] for group in places] == [
        [(suite, method) for suite in "bac"] for method in ("dflash", "eagle3")
    ]


# Badges beside the headline figure


def lines_of(records: Sequence[Answer]) -> list[str]:
    cells = cells_of(records)
    return shown("table", cells, findings(records, cells)).splitlines()


def test_a_strong_figure_has_no_mark_and_the_table_no_legend() -> None:
    lines = lines_of(steady())
    assert lines[lines.index("gsm8k") + 2].split()[6:8] == ["2.00", "1.75"]
    assert not any(line.startswith(("? =", "n =", "d =")) for line in lines)


def test_drift_marks_every_method_of_its_suite_and_no_other_suite() -> None:
    drifted = changed(steady(), "ar", 6, decode_s=0.14)
    rows = [*drifted, *steady(suite="math500")]
    lines = [line.split() for line in lines_of(rows) if line.startswith("  dflash")][:2]
    assert ["d" in words for words in lines] == [True, False]


def test_the_largest_suite_fits_a_hundred_columns() -> None:
    (cell,) = cells_of([drafted("a", [4, 4], suite="humaneval")])
    big = replace(cell, num_prompts=1319, num_tokens=412_345, exact=(1319, 1319), passed=(1319, 1319))
    text = shown("table", [big])
    assert "1,319 412,345" in text
    assert "1319/1319  100.0" in text


def test_the_json_has_null_for_what_cannot_be_had() -> None:
    rows = [*pair("a", [1]), failed("eagle3", "a", "boom")]
    cells = report.as_json(document(cells_of(rows)))["cells"]
    assert cells[1]["speedup_decode"] == [1, None, None]
    assert cells[1]["passed"] is None
    assert cells[0]["source"] is None
    texts_and_counts = {"suite", "settings_id", "settings", "method", "num_prompts", "num_tokens"}
    assert {cells[2][name] for name in cells[2].keys() - texts_and_counts} == {None}


def test_every_figure_of_a_column_has_its_formula_below_the_markdown() -> None:
    cells = cells_of(steady())
    _, formulas = shown("markdown", cells).split("## Formulas")
    ids = {column.id for column in (*report.RESULTS, *report.ROUNDS)}
    for formula_id in FORMULAS:
        assert (f"`{formula_id}`" in formulas) == (formula_id in ids)


def test_nothing_found_is_said() -> None:
    cells = cells_of(steady())
    assert "\n\nfindings: none\n" in shown("table", cells)
    assert "## Findings\n\nNone.\n" in shown("markdown", cells)


def test_importing_the_report_loads_nothing_heavy() -> None:
    code = "import sys, dflash_bench.report, dflash_bench.results.store; print(*sys.modules)"
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root}
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert not {"torch", "pyarrow", "pandas", "scipy", "rich"} & set(loaded.stdout.split())
