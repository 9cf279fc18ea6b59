"""Findings, checks and differences for programs: codes and fields; each code has its words."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import dflash_bench
from dflash_bench.analysis.cells import summarise
from dflash_bench.analysis.comparable import Difference, differences, require_comparable
from dflash_bench.analysis.findings import _CODE as CODE_KINDS
from dflash_bench.analysis.gate import checks as gate_checks
from dflash_bench.analysis.gate.baselines import Baseline
from dflash_bench.core.errors import DraftProblem, UserError
from dflash_bench.core.types import Answer
from dflash_bench.diagnose.doctor import _misfit
from dflash_bench.report import RESULTS, ROUNDS
from dflash_bench.report.findings import WORDS, fields_of, findings
from dflash_bench.results import table
from helpers.rows import pair
from helpers.runs import answers, changed, frame_of, known, stored

PACKAGE = Path(dflash_bench.__file__).parent
Main = Callable[..., tuple[int, str, str]]
LOW = [0, 0, 1, 0, 0, 2, 0]


def slow(method: str) -> list[Answer]:
    rows = []
    for number in range(24):
        plain, own = pair(f"p{number}", LOW, order=2 * number)
        rows += [plain, replace(own, method=method, generation=replace(own.generation, decode_s=9.0))]
    return rows


def test_a_finding_says_in_json_which_it_is_where_and_by_what(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "run", changed(answers(), exactness="near_tie", first=2))
    made = json.loads(main("report", "run", "--format", "json")[1])["findings"]
    (tie,) = [one for one in made if one["kind"] == "near_tie"]
    assert tie["remedy_code"] is None
    (place,) = tie["places"]
    assert (place["method"], place["values"]) == ("dflash", {"num_answers": 2, "num_all": 24, "gap": 0.001})


def test_findings_are_grouped_by_the_code_of_their_remedy() -> None:
    """Both methods are slow; of the lookup nobody can say that its draft was trained for something else."""
    rows = frame_of([*slow("dflash"), *[row for row in slow("ngram:4") if row.method != "ar"]])
    cells = summarise(rows, known())
    found = [one for one in findings(rows, cells) if one.kind == "unknown_text"]
    assert {(one.remedy_code, tuple(place.method for place in one.places)) for one in found} == {
        ("check_texts", ("dflash",)),
        ("trained_draft", ("ngram:4",)),
    }


def test_runs_differ_in_kinds_names_and_values(tmp_path: Path, main: Main) -> None:
    one, other = stored(tmp_path / "a", answers()), stored(tmp_path / "b", answers(), dtype="bfloat16")
    expected = Difference("dtype", "dtype", "float32", "bfloat16")
    read = [table.read_run(folder) for folder in (one, other)]
    assert list(differences(*read)) == require_comparable(*read, ["dtype"]) == [expected]
    with pytest.raises(UserError, match="dtype float32 and bfloat16"):
        require_comparable(*read, [])
    made = json.loads(main("compare", "a", "b", "--allow", "dtype", "--json")[1])
    assert made["differences"] == [{"kind": "dtype", "name": "dtype", "before": "float32", "after": "bfloat16"}]


def test_another_machine_is_known_by_the_kind_and_not_by_how_a_note_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = table.read_run(stored(tmp_path / "a", answers()))
    odd = [Difference("draft", "device of the draft", "x", "y")]
    monkeypatch.setattr(gate_checks.comparable, "require_comparable", lambda *_: odd)
    monkeypatch.setattr(Difference, "__str__", lambda self: self.words)
    baseline = Baseline("base", run.info, False, {}, {}, {})
    assert gate_checks.difference_notes([run], baseline, ["draft"]) == ["device of the draft x and y"]


def test_a_check_that_fails_says_why_by_a_code(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "run", answers())
    assert main("baseline", "run", "-o", "base.json", "--time-free")[0] == 0
    stored(tmp_path / "failed", changed(answers(), exactness="mismatch", first=1))
    status, out, _ = main("check", "failed", "--baseline", "base.json", "--json")
    checks = json.loads(out)["checks"]
    assert status == 1
    assert {check["code"] for check in checks if check["failed"]} == {"mismatch", "below_baseline"}
    assert {check["code"] for check in checks if not check["failed"] and not check["reason"]} == {""}


def test_a_draft_that_does_not_fit_keeps_what_and_remedy_apart() -> None:
    """Whatever stands in either: a semicolon in a name ends nothing."""
    told = _misfit(DraftProblem("missing_tensor", "missing tensor a; b", "copy it again; or not"))
    assert (told.evidence, told.remedy) == ("missing tensor a; b", "copy it again; or not")
    error = UserError("it is wrong", "mend it")
    assert (str(error), error.what, error.remedy) == ("it is wrong; mend it", "it is wrong", "mend it")
    assert UserError("it is wrong").remedy == ""


def test_columns_are_known_by_ids() -> None:
    for columns in (RESULTS, ROUNDS):
        assert len({column.id for column in columns}) == len(columns)
    assert [column.id for column in RESULTS if column.in_paper] == [
        "num_prompts",
        "al.pooled",
        "tps.decode",
        "speedup.decode",
        "exact",
        "passed",
        "cut",
    ]
    assert [column.id for column in (*RESULTS, *ROUNDS) if column.is_spare] == [
        "num_prompts",
        "num_tokens",
        "al.request_mean",
        "tps.decode",
        "speedup.e2e",
        "bandwidth_share",
        "other_ms",
        "num_errors",
        "num_near_ties",
    ]


TREES = [ast.parse(path.read_text(encoding="utf-8")) for path in (PACKAGE / "analysis/findings").glob("*.py")]
CONSTANTS = {
    node.value for tree in TREES for node in ast.walk(tree) if isinstance(node, ast.Constant) and str(node.value)
}
FUNCTIONS = {node.name: node for tree in TREES for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def observed() -> dict[str, set[str]]:
    """The fields that checks give, by the code of the finding."""
    given: dict[str, set[str]] = {}
    for function in FUNCTIONS.values():
        for node in ast.walk(function):
            match node:
                case ast.Call(func=ast.Attribute(attr="observe" | "observe_suite"), args=[kind, *_], keywords=several):
                    kinds = [kind.value] if isinstance(kind, ast.Constant) else [*CODE_KINDS.values()]
                    assert isinstance(kind, ast.Constant) or ast.unparse(kind) == "_CODE[how]"
                    fields = {name for one in several for name in ([one.arg] if one.arg else keys(one.value, function))}
                    given |= dict.fromkeys(kinds, fields)
    return given


def keys(node: ast.AST | None, function: ast.FunctionDef) -> Iterator[str]:
    """The keys of a dictionary: as it stands there, by its name, or as a function returns it."""
    match node:
        case ast.Dict(keys=names, values=values):
            for name, value in zip(names, values, strict=True):
                yield from [name.value] if isinstance(name, ast.Constant) else keys(value, function)
        case ast.Name(id=name):
            assigned = [one for one in ast.walk(function) if isinstance(one, ast.Assign)]
            (made,) = [one.value for one in assigned if name in ast.unparse(one.targets[0])]
            yield from keys(made, function)
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            for one in ast.walk(FUNCTIONS[name]):
                yield from keys(one.value, FUNCTIONS[name]) if isinstance(one, ast.Return) else ()
        case _:
            raise AssertionError(f"cannot tell the fields of {node}")


def test_every_finding_has_words_of_fields_that_its_check_gives() -> None:
    given = observed()
    assert given.keys() == WORDS.keys()
    for kind, (text, remedies) in WORDS.items():
        several = remedies if isinstance(remedies, dict) else {"": remedies}
        used = {name for words in (text, *several.values()) for name in fields_of(words)}
        of_all = {"cell", "remedy", "how"} | ({"tally"} if "num_all" in given[kind] else set())
        assert used <= given[kind] | of_all, kind
        assert {code for code in several if not code.startswith("cost_of_")} <= CONSTANTS | {""}, kind


def test_no_words_are_made_where_findings_are_looked_for() -> None:
    nodes = [node.value for tree in TREES for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    docstrings = {node.value for node in nodes if isinstance(node, ast.Constant)}
    assert {text for text in CONSTANTS - docstrings if " " in str(text).strip()} == {"no message", "not run"}
