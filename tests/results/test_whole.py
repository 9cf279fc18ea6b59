"""Damage to a finished run: every reader reports it, `check` fails, and `--resume` mends it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from dflash_bench.analysis.gate.checks import check_runs
from dflash_bench.results import parts
from dflash_bench.results import table as results_table
from helpers.each import each
from helpers.refusals import refusal
from helpers.rows import generation, pair, plain, record
from helpers.runs import SUITES, answers, changed, failing, listed, rewritten, stored, without

Main = Callable[..., tuple[int, str, str]]
READERS = (["compare"], ["report"], ["card"], ["plot", "-o", "plots"], ["baseline", "-o", "base.json"])


def edited(run: Path, *path: str | int, to: Any) -> None:
    """A value of `run.json` was changed by hand."""
    info = json.loads((run / "run.json").read_text())
    place = info
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    (run / "run.json").write_text(json.dumps(info))


def assert_refused_by_all(main: Main, told: str) -> None:
    for command, *options in READERS:
        code, out, err = main(command, "run", *options)
        assert (code, out, err.count("\n")) == (2, "", 1), command
        assert told in err
    assert not Path("plots").exists() and not Path("base.json").exists()


def failed_checks(main: Main, *words: str) -> list[tuple[str, str, str]]:
    code, out, err = main("check", "run", *words, "--json")
    assert (code, err) == (1, "")
    return [(check["method"], check["kind"], check["reason"]) for check in json.loads(out)["checks"] if check["failed"]]


def problems_of(run: Path) -> list[tuple[str, str, str]]:
    """Return the failures named as in `check`: the method, the kind and the reason of each."""
    return [(one.method, one.kind, one.what) for one in results_table.read_run(run, judging=True).problems]


# The plan


def delete_a_part(run: Path) -> None:
    (run / "part-000001.parquet").unlink()


def copy_a_part(run: Path) -> None:
    copied(run, "part-000099.parquet")


def copied(run: Path, name: str) -> None:
    shutil.copy(run / "part-000000.parquet", run / name)
    listed(run)


def is_second(row: dict[str, Any]) -> bool:
    return (row["prompt_id"], row["method"]) == ("p000", "dflash")


def another_prompt(row: dict[str, Any]) -> dict[str, Any]:
    return row | ({"prompt_hash": "another"} if row["prompt_id"] == "p003" else {})


TAMPERED: dict[str, tuple[Callable[[Path], None], list[tuple[str, str, str]]]] = {
    "a deleted part": (
        delete_a_part,
        [
            ("ar", "unfinished", "5 of 24 answers missing, first p005"),
            ("dflash", "unfinished", "5 of 24 answers missing, first p005"),
        ],
    ),
    "a copied part": (
        copy_a_part,
        [("ar", "doubled", "5 answers twice, first p000"), ("dflash", "doubled", "5 answers twice, first p000")],
    ),
    "a merged part copied": (
        lambda run: copied(run, "part-000050-000060.parquet"),
        [("ar", "doubled", "5 answers twice, first p000"), ("dflash", "doubled", "5 answers twice, first p000")],
    ),
    "a part hidden by a bogus merged one": (
        lambda run: copied(run, "part-000001-000002.parquet"),
        [
            ("ar", "unfinished", "10 of 24 answers missing, first p005"),
            ("dflash", "unfinished", "10 of 24 answers missing, first p005"),
            ("ar", "doubled", "5 answers twice, first p000"),
            ("dflash", "doubled", "5 answers twice, first p000"),
        ],
    ),
    "a missing suite": (
        without(suite="math500"),
        [
            ("ar", "unfinished", "2 of 2 answers missing, first p000"),
            ("dflash", "unfinished", "2 of 2 answers missing, first p000"),
        ],
    ),
    "a missing method": (
        without(method="dflash"),
        [
            ("dflash", "unfinished", "24 of 24 answers missing, first p000"),
            ("dflash", "unfinished", "2 of 2 answers missing, first p000"),
        ],
    ),
    "a missing plain row": (
        without(method="ar", prompt_id="p007"),
        [("ar", "unfinished", "1 of 24 answers missing, first p007")],
    ),
    "a prompt of another text": (
        lambda run: rewritten(run / "part-000000.parquet", another_prompt),
        [
            ("ar", "unfinished", "1 of 24 answers missing, first p003"),
            ("dflash", "unfinished", "1 of 24 answers missing, first p003"),
            ("ar", "foreign", "1 answer not in the plan, first p003"),
            ("dflash", "foreign", "1 answer not in the plan, first p003"),
        ],
    ),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored(tmp_path_factory.mktemp("sound") / "run", [*answers(), *answers(2, suite="math500")], in_parts=True)


@pytest.fixture
def run(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "run"))


@each("what", TAMPERED)
def test_what_is_missing_or_double_is_refused_and_named(what: str, run: Path) -> None:
    tamper, expected = TAMPERED[what]
    tamper(run)
    assert problems_of(run) == expected
    kinds = list(dict.fromkeys(kind for _, kind, _ in expected))
    assert f"run is {kinds[0]}: " in refusal(results_table.read_run, run)
    (first, *_) = results_table.read_run(run, allow=kinds).missing
    assert f"run is {kinds[0]}: {'math500' if what == 'a missing suite' else 'gsm8k'} " in first


def test_every_command_reads_a_run_so(run: Path, main: Main) -> None:
    tamper, expected = TAMPERED["a part hidden by a bogus merged one"]
    tamper(run)
    assert failed_checks(main) == expected
    assert_refused_by_all(main, "run is unfinished: ")
    code, out, err = main("report", "run", "--allow", "unfinished", "--allow", "doubled")
    assert (code, err) == (0, "") and out.startswith("run is unfinished: gsm8k ")


def test_each_answer_counts_once_whatever_is_allowed(run: Path, main: Main) -> None:
    def numbers() -> Any:
        shown = json.loads(main("compare", "run", "--allow", "doubled", "--allow", "foreign", "--json")[1])
        return [{name: value for name, value in cell.items() if name != "run"} for cell in shown["cells"]]

    def lengths(*allow: str) -> list[int]:
        return [len(results_table.read_run(run, by=by, allow=allow).rows) for by in results_table.SLICES]

    before = numbers(), lengths()
    copy_a_part(run)
    assert (numbers(), lengths("doubled")) == before


def test_a_whole_run_passes_with_failed_hidden_short_and_sampled_answers(tmp_path: Path, main: Main) -> None:
    """Odd but legal rows: none may be refused."""
    rows = [
        *pair("a", [4, 0, 2]),
        *failing(pair("b", [1]), first=1),
        *failing(failing(pair("c", [1])), "ar"),
        *(
            record(method, "one", generation([], token_ids=(5,), decode_s=0.0, draft_prefill_s=0.0), exactness=exact)
            for method, exact in (("ar", None), ("dflash", "exact"))
        ),
        *(
            record(method, "none", generation([], token_ids=(), decode_s=0.0), exactness=exact)
            for method, exact in (("ar", None), ("dflash", "exact"))
        ),
        *(
            record(method, "hidden", generation(None), exactness=exact)
            for method, exact in (("ar", None), ("dflash", "exact"))
        ),
        plain("cut", 3),
        record(
            "dflash",
            "cut",
            generation([4], 4, token_ids=(0, 1, 2, 3), emitted=(3,), finish_reason="length"),
            exactness="exact",
        ),
        *changed(pair("tie", [4, 0]), exactness="near_tie"),
        *changed(pair("control", [4, 0]), "ar", exactness="mismatch"),
    ]
    stored(tmp_path / "greedy", rows)
    assert results_table.read_run(tmp_path / "greedy").problems == ()
    unlike = [
        replace(row, exactness=None, generation=replace(row.generation, token_ids=tuple(range(100, 109))))
        if row.method == "dflash"
        else row
        for row in pair("a", [4, 0, 1])
    ]
    stored(tmp_path / "sampled", unlike, temperature=1.0)
    assert results_table.read_run(tmp_path / "sampled").problems == ()
    again = [replace(row, repeat=1, order=row.order + 100) for row in pair("a", [4, 0, 2])]
    later = [replace(row, turn=1, order=row.order + 200) for row in [*pair("a", [1]), *pair("a", [1], repeat=1)]]
    stored(tmp_path / "long", [*pair("a", [4, 0, 2]), *again, *later], repeats=2)
    assert results_table.read_run(tmp_path / "long").problems == ()


# Checksums


UNLIKE: dict[str, tuple[Callable[[Path], object], str]] = {
    "an edited part": (
        lambda run: _renamed_category(run / "part-000000.parquet"),
        "000000.parquet: it was changed after it was written",
    ),
    "a copied part": (
        lambda run: shutil.copy(run / "part-000000.parquet", run / "part-000099.parquet"),
        "000099.parquet: parts.sha256 does not list it, so this run did not write it",
    ),
    "two parts that changed places": (
        lambda run: _swapped(run / "part-000000.parquet", run / "part-000001.parquet"),
        "000000.parquet: it was changed after it was written",
    ),
    "no checksums": (lambda run: (run / "parts.sha256").unlink(), "run has no parts.sha256"),
    "a checksum that is gone": (
        lambda run: _without_first_line(run / "parts.sha256"),
        "000000.parquet: parts.sha256 does not list it",
    ),
}


def _renamed_category(part: Path) -> None:
    """No check fails for that."""
    parquet = import_module("pyarrow.parquet")
    table = parquet.read_table(part)
    rows = [row | {"category": "another"} for row in table.to_pylist()]
    parquet.write_table(import_module("pyarrow").Table.from_pylist(rows, table.schema), part)


def _swapped(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def _without_first_line(path: Path) -> None:
    path.write_text(path.read_text().partition("\n")[2])


def assert_refused(run: Path, told: str) -> None:
    """`check`, which reads runs that others refuse, finds it too."""
    for judging in (False, True):
        assert told in refusal(results_table.read_run, run, judging=judging)


@each("what", UNLIKE)
def test_a_part_that_the_run_did_not_write_is_refused_by_name(what: str, run: Path) -> None:
    tamper, told = UNLIKE[what]
    tamper(run)
    assert_refused(run, told)


def test_the_checksums_are_those_of_sha256sum(run: Path) -> None:
    names = [line.split("  ")[1] for line in (run / "parts.sha256").read_text().splitlines()]
    assert names == sorted(part.name for part in run.glob("part-*"))
    before = (run / "parts.sha256").read_text()
    listed(run)
    assert (run / "parts.sha256").read_text() == before


# Settings that decide the answers


EDITED: dict[str, tuple[tuple[str | int, ...], Any, str]] = {
    "scorer": (("identity", "suites", "gsm8k", "scorer"), "none", 'suites.gsm8k.scorer was "gsm8k_number", now "none"'),
    "temperature": (("identity", "settings", 0, "temperature"), 1.0, "settings.temperature was 0.0, now 1.0"),
    "dtype": (("identity", "dtype"), "bfloat16", 'dtype was "float32", now "bfloat16"'),
    "methods": (("identity", "methods", "dflash", "num_drafts"), 15, "methods.dflash.num_drafts was 4, now 15"),
    "revision": (("identity", "revisions", "target"), "t2", 'revisions.target was "t1", now "t2"'),
    "plan": (("plan", "methods"), ["ar"], "the plan is not the one the run was started with"),
    "repeats": (("plan", "repeats"), 2, "the plan is not the one the run was started with"),
    "plan's hash": (("identity", "plan"), "0" * 64, "run.json says: plan was "),
}


@each("what", EDITED)
def test_an_edited_setting_is_refused_by_name(what: str, run: Path) -> None:
    path, value, told = EDITED[what]
    edited(run, *path, to=value)
    assert_refused(run, told)


def test_a_plan_cannot_be_taken_away_and_a_part_of_another_run_not_brought_in(run: Path, tmp_path: Path) -> None:
    other = stored(tmp_path / "other", answers(5), dtype="bfloat16")
    shutil.copy(other / "part-000000.parquet", run / "part-000007.parquet")
    assert_refused(run, 'run.json says: dtype was "bfloat16"')
    (run / "part-000007.parquet").unlink()
    info = json.loads((run / "run.json").read_text())
    del info["plan"]
    (run / "run.json").write_text(json.dumps(info))
    assert_refused(run, "the plan is not the one the run was started with")
    del info["identity"]["plan"]
    (run / "run.json").write_text(json.dumps(info))
    assert_refused(run, "run.json says: plan was ")


# Rows that no run writes


def first_round(name: str, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda row: {name: [value, *row[name][1:]]}


def set_to(**values: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda row: values


NAN, INFINITE = float("nan"), float("inf")
INVALID: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    **{
        f"{name} {value}": (set_to(**{name: value}), f"{name} is NaN, infinite, negative, or zero")
        for name in ("decode_s", "prefill_s")
        for value in (NAN, INFINITE, -1.0, 0.0, None)
    },
    "draft_prefill_s": (set_to(draft_prefill_s=NAN), "draft_prefill_s is NaN"),
    **{
        f"{name} {value}": (first_round(name, value), f"{name} is NaN, infinite, negative, or zero")
        for name in ("round_s", "verify_s")
        for value in (NAN, INFINITE, -1.0, 0.0)
    },
    **{f"draft_s {value}": (first_round("draft_s", value), "draft_s is NaN") for value in (NAN, -INFINITE, -1.0)},
    "accepted above drafted": (first_round("drafted", 0), "a round accepts more tokens than it drafts"),
    "accepted below nothing": (first_round("accepted", -1), "a round accepts more tokens than it drafts, or fewer"),
    "emitted above accepted + 1": (first_round("emitted", 6), "a round does not emit one token more than it accepts"),
    "emitted nothing": (first_round("emitted", 0), "a round does not emit one token more than it accepts"),
    "tokens that no round emitted": (
        lambda row: {"token_ids": [*row["token_ids"], 1]},
        "its rounds do not add up to its tokens",
    ),
    "a list that is shorter": (lambda row: {"draft_s": row["draft_s"][1:]}, "draft_s has more or fewer entries than"),
    "an unknown exactness": (set_to(exactness="fine"), "its exactness is unknown"),
    "no exactness": (set_to(exactness=None), "decoded greedily, but not compared with the plain answer"),
    "other tokens called exact": (
        lambda row: {"token_ids": [*row["token_ids"][:-1], 999]},
        "marked exact, but its tokens differ from the plain",
    ),
    "the same tokens called a near-tie": (
        set_to(exactness="near_tie", first_divergence=2, divergence_gap=0.0, divergence_tolerance=0.1),
        "not marked exact, but its tokens are the plain answer's",
    ),
    "a near-tie of no place": (set_to(exactness="near_tie"), "exactness is exact but has a place of divergence, or"),
    "a mismatch called a near-tie": (
        lambda row: {
            "token_ids": [*row["token_ids"][:-1], 999],
            "exactness": "near_tie",
            "first_divergence": 2,
            "divergence_gap": 1.0,
            "divergence_tolerance": 0.1,
        },
        "exactness contradicts its gap and tolerance",
    ),
    "a near-tie by a gap that is none": (
        lambda row: {
            "token_ids": [*row["token_ids"][:-1], 999],
            "exactness": "near_tie",
            "first_divergence": 2,
            "divergence_gap": NAN,
            "divergence_tolerance": 0.1,
        },
        "exactness contradicts its gap and tolerance",
    ),
    "no audit": (set_to(audit=None), "not judged, although the run was"),
    "an unknown audit": (set_to(audit="fine"), "its audit is unknown"),
    "an audit that departs nowhere": (set_to(audit="near_tie"), "audit is exact but has a place of divergence, or"),
    "an audit that is no near-tie": (
        set_to(audit="near_tie", audit_index=1, audit_gap=1.0, audit_tolerance=0.1),
        "audit contradicts its gap and tolerance",
    ),
    "too few kinds of text": (set_to(text_kinds=[0]), "its tokens have other kinds of text than there are, or not one"),
    "an unknown kind of text": (
        lambda row: {"text_kinds": [9] * len(row["token_ids"])},
        "its tokens have other kinds of text than there are",
    ),
    "no score": (set_to(passed=None), "not scored, although the suite has a scorer"),
    "an unknown end": (set_to(finish_reason="tired"), "its finish_reason is unknown"),
    "an error that is only an end": (set_to(finish_reason="error"), "error and finish_reason disagree about"),
    "an error that hides a slow answer": (set_to(error="boom"), "error and finish_reason disagree about"),
    "a failure with a verdict": (set_to(error="boom", finish_reason="error"), "it failed, yet it has a verdict"),
    "no order": (set_to(order=None), "order is missing or negative"),
}


ON_PAGES = (
    "decode_s nan",
    "prefill_s None",
    "round_s nan",
    "verify_s inf",
    "draft_s -inf",
    "accepted below nothing",
    "emitted nothing",
    "a list that is shorter",
    "an unknown exactness",
    "no order",
)
"""A disruptive value for each column that a plot reads; a page takes longer than all the rest."""


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that every reader reads."""
    records = [replace(row, audit="exact") for row in answers(len(ON_PAGES) + 1)]
    suites = {"gsm8k": SUITES["gsm8k"] | {"prompts": len(ON_PAGES) + 1}}
    folder = stored(tmp_path_factory.mktemp("audited") / "run", records, audit="all", suites=suites)
    assert not check_runs([folder], None, None, ()).outcome.failures
    return folder


def with_rows(run: Path, **changes: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The dflash rows of these prompts are changed."""
    for part in parts.of(run):
        rewritten(
            part,
            lambda row: row | (changes.get(row["prompt_id"], dict)(row) if row["method"] == "dflash" else {}),
        )


@each("what", INVALID)
def test_a_row_that_no_run_writes_is_named(what: str, audited: Path, tmp_path: Path) -> None:
    change, told = INVALID[what]
    run = Path(shutil.copytree(audited, tmp_path / "run"))
    with_rows(run, p003=change)
    found = results_table.read_run(run, judging=True)
    assert {(one.method, one.kind) for one in found.problems} == {("dflash", "invalid")}
    assert any(told in one.what and one.what.endswith("first p003") for one in found.problems)
    assert found.rows["method"].value_counts().to_dict() == {"ar": 11, "dflash": 10}


def test_only_prompts_that_the_run_names_may_be_without_a_score(tmp_path: Path) -> None:
    suites = {"gsm8k": SUITES["gsm8k"] | {"prompts": 5, "unscored": ["p003", "p900"]}}
    rows = [replace(row, passed=None) if row.prompt_id == "p003" else row for row in answers(5)]
    run = stored(tmp_path / "run", rows, suites=suites)
    assert not check_runs([run], None, None, ()).outcome.failures
    with_rows(run, p002=set_to(passed=None))
    assert [(kind, why.endswith("first p002")) for _, kind, why in problems_of(run)] == [("invalid", True)]
    with_rows(run, p003=set_to(passed=True))
    assert any("no scorer could score it, first p003" in why for _, _, why in problems_of(run))


@each("scorer, is_found", [("none", True), ("gsm8k_number", False), (None, False)])
def test_a_suite_without_a_scorer_has_no_scores(tmp_path: Path, scorer: str | None, is_found: bool) -> None:
    """Older runs do not name their scorers."""
    about = {name: value for name, value in SUITES["gsm8k"].items() if name != "scorer"} | {"prompts": 5}
    suites = {"gsm8k": about | ({} if scorer is None else {"scorer": scorer})}
    run = stored(tmp_path / "run", answers(5), suites=suites)
    assert any("no scorer could score it" in why for _, _, why in problems_of(run)) == is_found


def test_a_page_shows_none_of_the_rows_that_would_upset_it(audited: Path, tmp_path: Path, main: Main) -> None:
    """All at once: none of them hides another, since a single one that came through would upset it."""
    run = Path(shutil.copytree(audited, tmp_path / "run"))
    with_rows(run, **{f"p{number:03}": INVALID[what][0] for number, what in enumerate(ON_PAGES)})
    assert main("report", "run", "--allow", "invalid", "-o", "page.html")[0] == 0
    rows = results_table.read_run(run, allow=["invalid"]).rows
    assert [*rows[rows["method"] == "dflash"]["prompt_id"]] == ["p010"]


@each("column", ["suite", "prompt_id", "prompt_hash", "method", "turn", "repeat"])
def test_a_row_of_no_place_is_foreign(column: str, run: Path) -> None:
    rewritten(run / "part-000000.parquet", lambda row: row | ({column: None} if is_second(row) else {}))
    assert "foreign" in {kind for _, kind, _ in problems_of(run)}
