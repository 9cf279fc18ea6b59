"""Comparing: known ratios, every refusal, slices, imports and the official harness's own numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_bench.analysis.peers import paper, zlab
from dflash_bench.core.types import SCHEMA_VERSION
from dflash_bench.results import parts, run_info, store
from helpers.each import each
from helpers.golden import assert_golden
from helpers.refusals import SERVED, assert_refused
from helpers.rows import drafted, pair, plain
from helpers.runs import SUITES, answers, asked, changed, frame_of, in_time, slower, stored

Main = Callable[..., tuple[int, str, str]]


def found(main: Main, *words: object) -> Any:
    code, out, err = main("compare", *words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


# Within a run, and between runs


def test_methods_are_compared_with_plain_decoding_and_with_each_other(tmp_path: Path, main: Main) -> None:
    rows = answers()
    other = [replace(row, method="eagle3") for row in slower(rows, 2) if row.method == "dflash"]
    stored(tmp_path / "run", [*rows, *other])
    shown = found(main, "run")
    assert [cell["method"] for cell in shown["cells"]] == ["ar", "dflash", "eagle3"]
    pairs = {(each["before"], each["after"]): each["ratios"] for each in shown["changes"]}
    assert list(pairs) == [("ar", "dflash"), ("ar", "eagle3"), ("dflash", "eagle3")]
    last = pairs["dflash", "eagle3"]
    assert (last["tps.decode"]["ratio"][0], last["tps.decode"]["verdict"]) == (0.5, "worse")
    assert (last["al.pooled"]["ratio"], last["al.pooled"]["verdict"]) == ([1, 1, 1], "same")


def test_the_same_cells_before_and_after(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "then", answers())
    lost = changed(slower(answers(seed=1), 1.1), first=4, passed=False)
    stored(tmp_path / "now", lost)
    shown = {each["method"]: each for each in found(main, "then", "now")["changes"]}
    assert shown.keys() == {"ar", "dflash"} and {each["suite"] for each in shown.values()} == {"gsm8k"}
    ratios = shown["dflash"]["ratios"]
    assert ratios["tps.decode"]["ratio"][0] == pytest.approx(1 / 1.1, abs=0.01)
    assert {name: each["verdict"] for name, each in ratios.items()} == {
        "al.pooled": "same",
        "forwards_per_token": "same",
        "tps.decode": "worse",
        "tps.e2e": "worse",
        "speedup.decode": "worse",
        "speedup.e2e": "worse",
    }
    assert (shown["dflash"]["lost"], shown["dflash"]["gained"]) == (2, 0)
    assert {each["verdict"] for each in shown["ar"]["ratios"].values()} == {"same"}


def test_the_page_says_what_changed_first(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "before", answers(30))
    stored(tmp_path / "after", slower(answers(30), 1.5))
    assert main("compare", "before", "after", "-o", "out/page.html") == (0, "", "wrote out/page.html\n")
    page = Path("out/page.html").read_text()
    headline = page[page.index("<h1>") :].partition("</h1>")[0]
    verdicts = found(main, "before", "after")["verdicts"]
    assert headline == f"<h1>{verdicts[0]}" and verdicts[0].startswith("WORSE: gsm8k")
    worse = [row for row in page.split("<tr")[1:] if 'data-method="dflash"' in row and "var(--lost)" in row]
    assert worse and all("speedup.decode" in row or "tps.decode" in row for row in worse)
    assert main("compare", "before", "after", "-o", "x.html", "--json")[0] == 2
    # The methods of one run as well.
    assert main("compare", "before", "-o", "methods.html")[0] == 0
    assert "dflash / plain" in Path("methods.html").read_text()


def test_the_geometric_mean_over_suites_is_shown_for_several(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "one", answers())
    stored(tmp_path / "two", [*answers(), *answers(suite="math500", seed=2)])
    assert "geometric mean over suites" not in main("compare", "one")[1]
    assert "geometric mean over suites" in main("compare", "two")[1]


def test_the_text_is_as_stored(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "then", answers())
    stored(tmp_path / "now", slower(answers(seed=1), 1.1), dtype="bfloat16")
    assert_golden("compare_within.txt", main("compare", "then")[1])
    assert_golden("compare_between.txt", main("compare", "then", "now", "--allow", "dtype")[1])


# Slices


@each(
    "by, slices",
    [
        ("suite", [None]),
        ("category", ["algebra", "none"]),
        ("turn", ["turn 1", "turn 2"]),
        ("prompt-length", ["1-32", "33-64", "129-256"]),
        ("output-position", ["1-32", "33-64"]),
        ("context-position", ["1-32", "33-64", "65-128", "129-256"]),
    ],
)
def test_slices(tmp_path: Path, main: Main, by: str, slices: list[str | None]) -> None:
    rows = [
        *pair("a", [4] * 8, category="algebra"),
        *pair("a", [1, 1], turn=1),
        *[
            replace(row, generation=replace(row.generation, num_prompt_tokens=length))
            for length, prompt in ((33, "b"), (64, "c"), (200, "d"))
            for row in pair(prompt, [2, 2])
        ],
    ]
    stored(tmp_path / "run", rows)
    shown = found(main, "run", "--by", by)
    assert [cell["slice"] for cell in shown["cells"] if cell["method"] == "dflash"] == slices
    assert any("belong to no stretch" in note for note in shown["notes"]) == by.endswith("-position")


def sliced_run(folder: Path, **slices: dict[str, str]) -> Path:
    rows = [row for prompt in "abcd" for row in pair(prompt, [4] * 8, category="none" if prompt == "a" else None)]
    stored(folder, rows)
    prompts = []
    for prompt in "abcd":
        own = [{"column": name, "value": values[prompt]} for name, values in slices.items() if prompt in values]
        place = {"suite": "gsm8k", "prompt_id": prompt, "slices": own}
        prompts.append(dict.fromkeys(run_info.PROMPTS_COLUMNS) | place)
    run_info.write_prompts(folder, prompts)
    return folder


def test_a_column_of_the_prompts_is_a_slice(tmp_path: Path, main: Main) -> None:
    languages, levels = {"a": "sw", "b": "da", "c": "sw"}, {"a": "10", "b": "9", "c": "x", "d": "100"}
    sliced_run(tmp_path / "run", language=languages, level=levels)
    shown = found(main, "run", "--by", "language")
    sizes = {cell["slice"]: cell["num_prompts"] for cell in shown["cells"] if cell["method"] == "dflash"}
    assert sizes == {"da": 1, "sw": 2, "none": 1}
    assert list(sizes) == ["da", "sw", "none"]
    shown = found(main, "run", "--by", "level")
    assert list(dict.fromkeys(cell["slice"] for cell in shown["cells"])) == ["9", "10", "100", "x"]
    code, out, _ = main("report", "run", "--by", "language")
    assert code == 0 and "gsm8k" in out and "sw" in out
    assert_refused(main("compare", "run", "--by", "langauge"), "'langauge'", "'language'", "category")
    # A category may have the name of those that have none.
    assert [cell["slice"] for cell in found(main, "run", "--by", "category")["cells"]] == ["none", "none"]


def test_slices_of_a_prompts_file_that_was_edited_are_safe_to_show(tmp_path: Path, main: Main) -> None:
    sliced_run(tmp_path / "run", language={"a": "\x1b[31m", "b": "\u202e"})
    out = main("compare", "run", "--by", "language")[1]
    assert "\\u001b[31m" in out and "\x1b" not in out and "\u202e" not in out
    stored(tmp_path / "bare", pair("a", [4] * 8))
    assert_refused(main("compare", "bare", "--by", "language"), "'language'", "category")


def test_a_round_belongs_to_the_stretch_in_which_it_begins() -> None:
    # Rounds begin after 1, 6, ... 31 and 36 tokens; the eighth is the first beyond 32.
    rows = frame_of(pair("a", [4] * 8), by="output-position")
    own = rows[rows["method"] == "dflash"]
    assert own["slice"].tolist() == ["1-32", "33-64"]
    assert own["num_rounds"].tolist() == [7, 1]
    assert own["decode_tokens"].tolist() == [35, 5]
    assert own["decode_s"].tolist() == pytest.approx([0.14, 0.02])
    assert rows["num_emitted"].sum() == 80
    # Behind a prompt of 5 tokens the seventh is the first beyond 32.
    rows = frame_of(pair("a", [4] * 8), by="context-position")
    own = rows[rows["method"] == "dflash"]
    assert own["num_rounds"].tolist() == [6, 2]


def test_the_context_from_which_on_a_draft_does_not_pay(tmp_path: Path, main: Main) -> None:
    rows = []
    for number in range(16):
        length, times = ((40, 1.0), (300, 4.0))[number % 2]
        for row in pair(f"p{number}", [4, 4, number % 3]):
            own = replace(row.generation, num_prompt_tokens=length)
            scaled = in_time(own, own.decode_s * times) if row.method == "dflash" else own
            rows.append(replace(row, generation=scaled))
    stored(tmp_path / "run", rows)
    (limit,) = found(main, "run", "--by", "context-position")["contexts"]
    stops = limit["stops_paying_at"]
    assert 64 < stops["low"] < stops["value"] < stops["high"] < 512
    for command in ("compare", "report"):
        out = main(command, "run", "--by", "context-position")[1]
        assert f" {stops['value']:.0f} tokens" in out
    stored(tmp_path / "short", [row for row in rows if row.generation.num_prompt_tokens == 40])
    (limit,) = found(main, "short", "--by", "context-position")["contexts"]
    assert limit["stops_paying_at"] is None


# Refusals


@each(
    "changes, kind, name, before, after",
    [
        ({"suites": {"gsm8k": SUITES["gsm8k"] | {"version": 2}}}, "suite", "version of gsm8k", "1", "2"),
        ({"revisions": {"target": "t2", "dflash": "d1"}}, "model", "revision of target", "t1", "t2"),
        ({"revisions": {"target": "t1", "dflash": "d2"}}, "draft", "revision of dflash", "d1", "d2"),
        ({"methods": {"dflash": {"name": "dflash", "num_drafts": 7}}}, "draft", "tokens dflash drafts", "4", "7"),
        ({"seed": 1}, "sampling", "seed", "0", "1"),
        ({"max_new_tokens": 5}, "limits", "max_new_tokens", "192", "5"),
        ({"dtype": "float16"}, "dtype", "dtype", "float32", "float16"),
        ({"device": "cuda"}, "device", "device", "cpu", "cuda"),
        ({"environment": {"gpus": [{"name": "H200"}]}}, "device", "GPUs", "[]", "['H200']"),
    ],
)
def test_unlike_runs_are_refused_and_allowed_by_name(
    tmp_path: Path, main: Main, changes: dict[str, Any], kind: str, name: str, before: str, after: str
) -> None:
    stored(tmp_path / "then", answers())
    stored(tmp_path / "now", answers(), **changes)
    assert_refused(main("compare", "then", "now"), name, before, after, f"--allow {kind}")
    allowed = found(main, "then", "now", "--allow", kind)
    assert allowed["differences"] == [{"kind": kind, "name": name, "before": before, "after": after}]
    assert [name in note for note in allowed["notes"] if note.startswith("allowed")] == [True]


def test_a_damaged_part_is_named_and_left_out_only_when_allowed(tmp_path: Path, main: Main) -> None:
    part = stored(tmp_path / "run", answers(), in_parts=True) / "part-000001.parquet"
    part.write_bytes(part.read_bytes()[:-20])
    shown = found(main, "run", "--allow", "damaged")
    assert "run/part-000001.parquet" in shown["notes"][0]
    assert shown["cells"][0]["num_prompts"] == 24 - 5


def test_a_newer_schema_is_refused_even_with_damaged_allowed(
    tmp_path: Path, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as newer:
        for module in (store, parts, run_info):
            newer.setattr(module, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
        stored(tmp_path / "run", answers())
    assert_refused(main("compare", "run", "--allow", "damaged"), f"run.json has schema {SCHEMA_VERSION + 1}")
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps(info | {"schema": SCHEMA_VERSION}))
    assert_refused(main("compare", "run", "--allow", "damaged"), ".parquet has schema")


# Notes above the table


def test_wrong_and_missing_answers_are_told_and_every_run_is_shown(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "then", answers())
    stored(tmp_path / "now", changed(answers(), exactness="mismatch", passed=False))
    told = found(main, "then", "now")
    assert "24" in told["notes"][0] and "gsm8k (embedded) dflash" in told["notes"][0]
    exact = {(cell["run"], cell["method"]): cell["exact"] for cell in told["cells"]}
    assert (exact["then", "dflash"], exact["now", "dflash"]) == ([24, 24], [0, 24])
    info = json.loads((tmp_path / "now" / "run.json").read_text())
    (tmp_path / "now" / "run.json").write_text(json.dumps(info | {"state": "running"}))
    assert found(main, "then", "now", "--allow", "unfinished")["notes"][0] == "now is not finished"


def test_runs_that_are_repeated_bring_their_noise_into_the_intervals(tmp_path: Path, main: Main) -> None:
    """Three runs alike but for 3 % of each run's speed: none may call another faster for that."""
    for name, times in (("a", 1.0), ("b", 1.03), ("c", 0.97)):
        stored(tmp_path / name, slower(answers(), times))
    pair = found(main, "a", "b")
    assert "over_runs" not in pair and any("no run is repeated" in note for note in pair["notes"])
    told = found(main, "a", "b", "c")
    assert any("noise between runs: " in note and "2 degrees of freedom" in note for note in told["notes"])
    alone = {change["method"]: change["ratios"]["tps.decode"]["ratio"] for change in pair["changes"]}
    with_noise = {
        change["method"]: change["ratios"]["tps.decode"] for change in told["changes"] if change["after"] == "b"
    }
    low, high = alone["dflash"][1:]
    assert high < 1, "over the prompts alone, b is surely slower"
    assert with_noise["dflash"]["ratio"][1] < low and with_noise["dflash"]["ratio"][2] > 1
    assert with_noise["dflash"]["verdict"] == "unclear"
    (pooled,) = told["over_runs"]
    assert pooled["of"] == "over 3 runs: a, b, c"
    figures = {cell["method"]: cell["timings"]["speedup.decode"] for cell in pooled["cells"]}
    single = next(cell for cell in told["cells"] if (cell["run"], cell["method"]) == ("a", "dflash"))
    assert (
        figures["dflash"][2] - figures["dflash"][1]
        > single["timings"]["speedup.decode"][2] - single["timings"]["speedup.decode"][1]
    )
    # Another code is no repetition.
    other = {"git": {"commit": "c" * 40, "dirty": False}}
    stored(tmp_path / "d", answers(), environment=other)
    assert "over_runs" not in found(main, "a", "d")


def test_of_many_lines_without_a_change_none_looks_like_one(tmp_path: Path, main: Main) -> None:
    """Noise alone: one line in twenty would have p < 0.05."""
    suites = [f"suite{number}" for number in range(12)]
    for name, seed in (("then", 100), ("now", 200)):
        rows = [row for n, suite in enumerate(suites) for row in answers(8, 0.1, seed + n, suite=suite)]
        stored(tmp_path / name, rows)
    ratios = [each for change in found(main, "then", "now")["changes"] for each in change["ratios"].values()]
    assert len(ratios) == 12 * 8
    assert {each["verdict"] for each in ratios} <= {"same", "unclear"}


# The official harness, and published figures


def test_the_official_harness_means_over_responses_and_forgets_the_first_draft() -> None:
    rows = [
        plain("a", 10),
        drafted("a", [4, 4], changes={"decode_s": 0.055, "draft_prefill_s": 0.015}),
        plain("b", 6),
        drafted("b", [0, 0, 1, 1], changes={"decode_s": 0.085, "draft_prefill_s": 0.005}),
    ]
    ar, dflash = zlab.official(frame_of(rows))
    assert dflash.al == pytest.approx((5 + 1.5) / 2)
    # Left out: draft prefill, and the first draft of 5 ms. Tokens: 11 and 7, the first one included.
    own = ((0.055 - 0.02) / 11 + (0.085 - 0.01) / 7) / 2
    assert dflash.tps == pytest.approx(1 / own)
    assert ar.tps == pytest.approx(1 / ((0.1 / 11 + 0.06 / 7) / 2))
    assert dflash.speedup == pytest.approx(((0.1 / 11 + 0.06 / 7) / 2) / own)


def test_rounds_past_the_stop_token_count_for_the_official_harness() -> None:
    cut = [plain("a", 6), drafted("a", [4, 4], changes={"emitted": (5, 1), "token_ids": tuple(range(7))})]
    assert zlab.official(frame_of(cut))[1].al == 5


def test_the_newer_harness_cuts_rounds_at_the_end_and_times_the_first_draft() -> None:
    cut = {"emitted": (5, 1), "token_ids": tuple(range(7)), "decode_s": 0.055, "draft_prefill_s": 0.015}
    rows = [plain("a", 6), drafted("a", [4, 4], changes=cut)]
    ar, dflash = zlab.official(frame_of(rows), zlab.AUGUST)
    assert dflash.al == pytest.approx((5 + 1) / 2)
    assert dflash.tps == pytest.approx(7 / 0.055) and dflash.tps < zlab.official(frame_of(rows))[1].tps
    assert dflash.speedup == pytest.approx((0.06 / 7) / (0.055 / 7)) and ar.speedup == 1


def test_compat_shows_both(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "run", answers())
    for name, golden in (("zlab", "compare_zlab.txt"), ("zlab-2026-08", "compare_zlab_2026_08.txt")):
        printed = found(main, "run", "--compat", name)
        shown = printed["cells"][1]
        assert printed["compat"] == name and shown["speedup"] > 1 and shown["speedup.decode"] > 1
        # Only the older one leaves the first draft out of its time.
        assert name == "zlab-2026-08" or shown["speedup"] > shown["speedup.decode"]
        assert_golden(golden, main("compare", "run", "--compat", name)[1])


def test_compat_says_where_the_official_harness_would_have_printed_something_else(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "run", answers())
    assert found(main, "run", "--compat", "zlab")["notes"] == []
    rows = [replace(row, method="eagle3-tree") if row.method == "dflash" else row for row in answers()]
    over = {"emitted": lambda row: (*row.generation.emitted[:-1], row.generation.emitted[-1] - 1)}
    rows = changed(rows, "eagle3-tree", 5, finish_reason="length")
    rows = changed(rows, "eagle3-tree", 2, **over)  # of these the last round overshot, and was cut
    absent, at_limit = zlab.notes(frame_of(rows))
    assert "eagle3-tree" in absent and "3 of 48" in at_limit
    assert list(zlab.notes(frame_of(rows), zlab.AUGUST)) == [absent]


def test_published_figures_stand_beside_the_run_formula_by_formula(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "run", answers(), model="qwen3-8b", **asked("gsm8k"))
    figures = found(main, "run", "--against", "paper")["figures"]
    assert {each["published"]["target_model"] for each in figures} == {"Qwen3-8B"}
    assert {each["published"]["dataset"] for each in figures} == {"gsm8k"}
    own = {each["published"]["formula"]: each["own"] for each in figures}
    (official,) = [each for each in zlab.official(frame_of(answers())) if each.method == "dflash"]
    assert own["al.zlab"] == pytest.approx(official.al)
    assert {name for name, value in own.items() if value is None} <= set(paper.FORMULAS)
    assert {each["published"]["concurrency"] for each in figures} <= {1, None}
    met = [
        abs(each["own"] - each["published"]["value"]) <= 0.05 * each["published"]["value"]
        for each in figures
        if each["own"]
    ]
    said = main("compare", "run", "--against", "paper")[1]
    assert f"{sum(met)} of {len(met)} published figures" in said
    table = [line for line in said.splitlines() if line.startswith(("method ", "  dflash "))]
    assert len(table) > 3 and max(map(len, table)) <= 100


def test_how_the_run_was_asked_otherwise_than_the_authors_ask_is_noted(tmp_path: Path, main: Main) -> None:
    stored(
        tmp_path / "alike",
        answers(),
        target="Qwen/Qwen3-8B",
        max_new_tokens=2048,
        **asked("gsm8k", prompts=128),
        methods={"dflash": {"name": "dflash", "num_drafts": 15}},
    )
    assert found(main, "alike", "--against", "paper")["notes"] == []
    suites = [*answers(suite="mbpp"), *answers(suite="aime25")]
    stored(
        tmp_path / "other",
        suites,
        target="Qwen/Qwen3-8B",
        max_new_tokens=192,
        methods={},
        **asked("mbpp", "aime25", source="folder data", prompts=30),
    )
    notes = found(main, "other", "--against", "paper")["notes"]
    told = [note for note in notes if "tokens per round" not in note]
    told_of = [("mbpp 30", "128"), ("192", "2,048"), ("mbpp, aime25", "folder"), ("mbpp",), ("aime25",)]
    assert len(told) == len(told_of)
    assert all(name in note for note, names in zip(told, told_of, strict=True) for name in names)
    assert "aime25" not in told[0] + told[3] and "mbpp" not in told[4]


def test_the_formula_of_published_eagle3_figures_is_not_stated() -> None:
    eagle = {each.formula for each in paper.load_figures() if each.method.startswith("eagle3")}
    assert eagle == {"al.unstated", "speedup.unstated", "al.served", "speedup.served"}
    assert {"al.zlab", "speedup.zlab"} <= {each.formula for each in paper.load_figures() if each.method == "dflash"}


@each(
    "changes, against, noted",
    [
        ({}, "qwen3-4b", ("nano", "Qwen3-4B")),
        ({"model": "qwen3-8b", "target": "my/Other-7B"}, "qwen3-8b", ("my/Other-7B", "Qwen3-8B")),
        ({"target": "Qwen/Qwen3-8B"}, "qwen3-8b", ()),
    ],
)
def test_published_figures_of_another_target_are_noted(
    tmp_path: Path, main: Main, changes: dict[str, Any], against: str, noted: tuple[str, ...]
) -> None:
    stored(tmp_path / "run", answers(), **changes, **asked("gsm8k"))
    notes = found(main, "run", "--against", f"paper:{against}")["notes"]
    about = [note for note in notes if "target" in note]
    assert len(about) == bool(noted) and all(name in about[0] for name in noted)
    assert all(f"note: {note}" in main("compare", "run", "--against", f"paper:{against}")[1] for note in about)


def test_a_target_is_known_by_the_name_that_was_published() -> None:
    assert paper.target_of("Qwen/Qwen3-Coder-30B-A3B-Instruct") == "Qwen3-Coder-30B-A3B"


@each("thinking, shown", [(True, {"on"}), (False, {"off"}), (None, {"off"})])
def test_published_figures_are_those_of_the_runs_thinking_mode(
    tmp_path: Path, main: Main, thinking: bool | None, shown: set[str]
) -> None:
    stored(tmp_path / "run", answers(suite="math500"), target="Qwen/Qwen3-8B", thinking=thinking, **asked("math500"))
    figures = found(main, "run", "--against", "paper")["figures"]
    assert {each["published"]["thinking"] for each in figures} == shown


@each(
    "method, configs",
    [
        ("eagle3", {"RedHatAI/Qwen3-8B-speculator.eagle3, chain of 7"}),
        ("eagle3-tree:60", {"tree 16, steps 7, top-k 10", "tree 60, steps 7, top-k 10"}),
        ("eagle3-tree@a:nodes=59", {"tree 16, steps 7, top-k 10", "tree 60, steps 7, top-k 10"}),
    ],
)
def test_chains_stand_beside_chains_and_trees_beside_trees(
    tmp_path: Path, main: Main, method: str, configs: set[str]
) -> None:
    rows = [replace(row, method=method) if row.method == "dflash" else row for row in answers()]
    number = 59 if "tree" in method else 7
    methods = {method: {"name": method, "num_drafts": number}}
    identity = {"methods": methods, "max_new_tokens": 2048} | asked("gsm8k", prompts=128)
    stored(tmp_path / "run", rows, target="Qwen/Qwen3-8B", **identity)
    shown = found(main, "run", "--against", "paper")
    figures = [each["published"] for each in shown["figures"] if each["method"] == method]
    assert {each["config"] for each in figures} == configs
    assert {each["num_drafts"] for each in figures} == ({15, 59} if "tree" in method else {7})
    assert [(method in note, "59" in note, "15" in note) for note in shown["notes"]] == (
        [(True, True, True)] if "tree" in method else []
    )


def test_figures_of_a_kind_of_draft_stand_beside_drafts_of_that_kind(tmp_path: Path, main: Main) -> None:
    rows = [replace(row, method="ddtree") if row.method == "dflash" else row for row in answers(suite="math500")]
    methods = {"ddtree": {"name": "ddtree", "num_drafts": 255, "draft": "dflash"}}
    for kind in ("JetSpec", "DFlash"):
        drafts = {"dflash": {"name": "org/draft", "kind": kind}}
        identity = {"methods": methods, "drafts": drafts} | asked("math500", prompts=128)
        stored(tmp_path / kind, rows, target="Qwen/Qwen3-8B", **identity)
    figures = [each["published"] for each in found(main, "JetSpec", "--against", "published")["figures"]]
    assert {(each["formula"], each["value"]) for each in figures if each["kind"] == "JetSpec"} == {
        ("speedup.unstated", 9.64),
        ("al.unstated", 10.76),
    }
    plain = [each["published"]["method"] for each in found(main, "DFlash", "--against", "published")["figures"]]
    assert "ddtree" not in plain
    assert any(
        "JetSpec" in note or "ddtree" in note for note in found(main, "JetSpec", "--against", "published")["notes"]
    )


def test_every_published_figure_has_a_formula_and_a_source() -> None:
    figures = paper.load_figures()
    assert len(figures) > 500
    assert {each.formula for each in figures} == {*paper.FORMULAS, "al.zlab", "speedup.zlab"}
    assert all(each.source and each.value > 0 for each in figures)


# Results of vllm bench serve


def test_a_servers_result_stands_beside_a_run(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "run", answers())
    (tmp_path / "serve.json").write_text(json.dumps(SERVED))
    (served,) = found(main, "run", "serve.json")["served"]
    assert served["figures"] == pytest.approx(
        {
            "al.pooled": 6.46,
            "accept_rate": 0.364,
            "tps.served": 412.5,
            "tpot.mean_ms": 7.2,
            "ttft.mean_ms": 31.0,
            "accept_at[1]": 0.9,
            "accept_at[2]": 0.8,
        }
    )
    assert "serve.json (Qwen/Qwen3-8B)" in main("compare", "run", "serve.json")[1]


def columns_of(shown: str) -> list[dict[str, str]]:
    """The rows of the table that begins with `what`, by column; its names hold no two spaces."""
    lines = shown.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("what"))
    table = lines[start : lines.index("", start)]
    heads, *rows = ([text.strip() for text in line.split("  ") if text.strip()] for line in table)
    return [dict(zip(heads, row, strict=True)) for row in rows]


def test_how_a_server_was_loaded_and_what_failed_is_shown(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "run", answers())
    loaded = SERVED | {"max_concurrency": 8, "failed": 30}
    (tmp_path / "loaded.json").write_text(json.dumps(loaded))
    (tmp_path / "open.json").write_text(json.dumps(SERVED | {"max_concurrency": None}))
    (tmp_path / "unknown.json").write_text(json.dumps({key: SERVED[key] for key in SERVED if key != "max_concurrency"}))
    ar, _, *served = columns_of(main("compare", "run", "loaded.json", "open.json", "unknown.json")[1])
    assert [(row["failed"], row["conc."]) for row in (ar, *served)] == [
        ("0", "1"),
        ("30", "8"),
        ("n/a", "no limit"),
        ("n/a", "n/a"),
    ]
    assert [each["num_failed"] for each in found(main, "run", "loaded.json", "open.json")["served"]] == [30, None]


def test_acceptance_by_position_stands_beside_the_servers(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "run", [row for name in "ab" for row in pair(name, [4, 4, 0, 1])])
    (tmp_path / "serve.json").write_text(json.dumps(SERVED))
    _, own, theirs = columns_of(main("compare", "run", "serve.json")[1])
    assert [(row["accept_at[1]"], row["accept_at[2]"]) for row in (own, theirs)] == [("0.75", "0.50"), ("0.90", "0.80")]
    (_, cell) = found(main, "run", "serve.json")["cells"]
    assert cell["accept_at"] == {"accept_at[1]": 0.75, **{f"accept_at[{k}]": 0.5 for k in (2, 3, 4)}}


def test_a_server_without_speculation_does_not_hide_the_runs_acceptance(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "run", [row for name in "ab" for row in pair(name, [4, 4, 0, 1])])
    bare = {key: value for key, value in SERVED.items() if not key.startswith("spec_decode")}
    (tmp_path / "serve.json").write_text(json.dumps(bare))
    _, own, theirs = columns_of(main("compare", "run", "serve.json")[1])
    assert (own["al.pooled"], own["accept_rate"], theirs["al.pooled"]) == ("3.25", "0.56", "n/a")


def test_a_server_of_another_model_is_noted(tmp_path: Path, main: Main) -> None:
    (tmp_path / "serve.json").write_text(json.dumps(SERVED))
    stored(tmp_path / "run", answers())
    (note,) = found(main, "run", "serve.json")["notes"]
    assert all(name in note for name in ("run", "nano", "serve.json", "Qwen/Qwen3-8B"))
    stored(tmp_path / "same", answers(), target="Qwen/Qwen3-8B")
    assert found(main, "same", "serve.json")["notes"] == []
