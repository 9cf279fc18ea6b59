"""The gate: it fails for each kind of loss, passes without one, never for want of something to judge."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import xmlschema

from dflash_bench.core.types import Answer
from helpers.each import each
from helpers.golden import assert_golden
from helpers.refusals import assert_refused
from helpers.runs import answers, changed, failing, slower, stored

Main = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of `answers()`, and its baseline once a test has written it."""
    return stored(tmp_path_factory.mktemp("then") / "then", answers()).parent


@pytest.fixture
def gate(tmp_path: Path, main: Main, shelf: Path) -> Callable[..., tuple[int, str, str]]:
    """`check` of these records against a baseline of `answers()`."""
    (tmp_path / "then").symlink_to(shelf / "then")
    if not (shelf / "base.json").exists():
        assert main("baseline", "then", "-o", "base.json") == (0, "wrote base.json\n", "")
        shutil.copy(tmp_path / "base.json", shelf)
    shutil.copy(shelf / "base.json", tmp_path)

    def check(records: list[Answer], *words: object) -> tuple[int, str, str]:
        shutil.rmtree(tmp_path / "now", ignore_errors=True)
        stored(tmp_path / "now", records)
        return main("check", "now", "--baseline", "base.json", *words)

    return check


def failures(shown: str) -> set[str]:
    return {f"{one['method']} {one['kind']}" for one in json.loads(shown)["checks"] if one["failed"]}


# Passing


def test_the_run_itself_and_one_with_other_noise_pass(main: Main, gate: Main) -> None:
    code, shown, _ = gate(answers(seed=1), "--json")
    assert (code, failures(shown)) == (0, set())
    assert main("check", "then", "--baseline", "base.json")[0] == 0


def test_fewer_prompts_are_compared_with_the_same_ones(gate: Main) -> None:
    code, shown, _ = gate(answers()[:24], "--json")
    kinds = {each["kind"]: each for each in json.loads(shown)["checks"] if each["method"] == "dflash"}
    assert code == 0
    assert kinds["al.pooled"]["expected"] == kinds["al.pooled"]["found"]


def test_too_few_of_the_prompts_are_refused_or_told(main: Main, gate: Main) -> None:
    few = "gsm8k plain 2 of 24, gsm8k dflash 2 of 24"
    assert_refused(gate(answers()[:4]), "now", few, "--allow prompts")
    code, shown, _ = main("check", "now", "--baseline", "base.json", "--allow", "prompts", "--json")
    assert code == 0
    assert any(few in note for note in json.loads(shown)["notes"])


def test_speed_ups_are_compared_where_both_runs_have_the_plain_answer(gate: Main) -> None:
    code, shown, _ = gate(failing(answers(), "ar", first=10), "--allow", "failed", "--json")
    found = {each["kind"]: each for each in json.loads(shown)["checks"] if not each["is_floor"]}
    assert code == 0
    # A baseline keeps ten digits of a second.
    assert found["speedup.decode"]["found"] == pytest.approx(found["speedup.decode"]["expected"], rel=1e-9)
    for told in ("gsm8k plain 14 of 24, gsm8k dflash 14 of 24", "gsm8k (embedded) plain: 10 answers failed"):
        assert any(told in note for note in json.loads(shown)["notes"])


# Each kind of loss


def _one_less(row: Answer) -> tuple[int, ...]:
    accepted = row.generation.accepted or ()
    return (*accepted[:-1], accepted[-1] - 1)


PLANTED: dict[str, tuple[Callable[[list[Answer]], list[Answer]], set[str]]] = {
    "acceptance": (
        lambda rows: changed(rows, accepted=lambda row: (0, *row.generation.accepted[1:])),
        {"dflash al.pooled"},
    ),
    "exactness": (lambda rows: changed(rows, first=1, exactness="near_tie"), {"dflash exact"}),
    "mismatch": (lambda rows: changed(rows, first=1, exactness="mismatch"), {"dflash exact", "dflash mismatch"}),
    "speed": (
        lambda rows: slower(rows, 1.3),
        {"dflash speedup.decode", "dflash speedup.e2e"},
    ),
    "accuracy": (lambda rows: changed(rows, first=4, passed=False), {"dflash passed"}),
    "failures": (lambda rows: failing(rows), {"dflash failed"}),
    "control": (lambda rows: changed(rows, "ar", first=1, exactness="mismatch"), {"ar mismatch"}),
    "plain failures": (lambda rows: failing(rows, "ar"), {"ar failed"}),
    "one token": (lambda rows: changed(rows, first=12, accepted=_one_less), {"dflash al.pooled"}),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_regression_of_each_kind_is_exit_status_1(kind: str, gate: Main) -> None:
    plant, expected = PLANTED[kind]
    code, shown, err = gate(plant(answers()), "--json")
    assert (code, err) == (1, "")
    assert failures(shown) == expected


def test_a_dead_and_slow_draft_alarms_without_a_baseline(tmp_path: Path, main: Main) -> None:
    dead = changed(answers(), accepted=lambda row: (0,) * len(row.generation.accepted))
    stored(tmp_path / "dead", slower(dead, 4))
    code, shown, _ = main("check", "dead", "--json")
    assert (code, failures(shown)) == (1, {"dflash al.pooled", "dflash speedup.decode"})
    stored(tmp_path / "well", answers())
    assert main("check", "well")[0] == 0


def test_a_loss_that_noise_explains_does_not_alarm_at_temperature_1(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "then", answers(), temperature=1.0)
    one_less = changed(answers(), first=1, passed=False, accepted=(0, 0, 0, 0))
    one_more = [replace(row, passed=True) for row in one_less[-4:]]
    stored(tmp_path / "now", [*one_less[:-4], *one_more], temperature=1.0)
    main("baseline", "then", "-o", "base.json")
    code, shown, _ = main("check", "now", "--baseline", "base.json", "--json")
    assert (code, failures(shown)) == (0, set())


# Limits


def test_a_limits_file_replaces_what_the_baseline_lets_pass(tmp_path: Path, gate: Main) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text('["speedup.decode"]\nfall = 0.25\n["speedup.e2e"]\nfall = 0.25\n')
    assert gate(slower(answers(), 1.3), "--limits", limits)[0] == 0
    assert gate(slower(answers(), 1.4), "--limits", limits)[0] == 1


def test_a_floor_holds_without_a_baseline(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "run", answers())
    (tmp_path / "limits.toml").write_text('["al.pooled"]\nat_least = 9\n')
    code, shown, _ = main("check", "run", "--limits", "limits.toml", "--json")
    assert (code, failures(shown)) == (1, {"dflash al.pooled"})


# Other machines, time-free baselines


def test_another_machine_gates_only_what_does_not_depend_on_it(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "then", answers())
    main("baseline", "then", "-o", "base.json")
    both_slower = slower(slower(answers(), 3), 3, "ar")
    stored(tmp_path / "now", both_slower, environment={"cpu": "another"})
    code, shown, _ = main("check", "now", "--baseline", "base.json", "--json")
    found = json.loads(shown)
    assert code == 0
    against = [each["kind"] for each in found["checks"] if not each["is_floor"]]
    assert {*against} == {"mismatch", "failed", "al.pooled", "exact", "passed"}
    assert "processor" in found["ungated"]
    stored(tmp_path / "less", changed(answers(), first=12, accepted=_one_less), environment={"cpu": "another"})
    code, shown, _ = main("check", "less", "--baseline", "base.json", "--json")
    assert (code, failures(shown)) == (1, {"dflash al.pooled"})


OTHERS = {
    "processor": {"cpu": "another"},
    "GPU": {"gpus": [{"name": "one"}]},
    "torch": {"packages": {"torch": "9.9"}},
    "transformers": {"packages": {"torch": "2.13.0", "transformers": "9.9"}},
    "version of ours": {"packages": {"torch": "2.13.0", "dflash-bench": "9.9"}},
}


@each("what", OTHERS)
def test_speed_is_held_only_to_a_baseline_of_the_same_machine_and_programs(
    what: str, tmp_path: Path, main: Main, gate: Main, shelf: Path
) -> None:
    stored(tmp_path / "there", slower(answers(), 1.3), environment=OTHERS[what])
    code, shown, _ = main("check", "there", "--baseline", shelf / "base.json", "--require-speed", "--json")
    assert (code, [one["code"] for one in json.loads(shown)["checks"] if one["failed"]]) == (1, ["speed_not_gated"])


def test_a_speed_that_is_not_held_to_a_baseline_is_said_so(tmp_path: Path, main: Main, gate: Main) -> None:
    lost = slower(answers(), 1.3)
    assert gate(lost)[0] == 1
    stored(tmp_path / "there", lost, environment=OTHERS["processor"])
    code, shown, _ = main("check", "there", "--baseline", "base.json")
    assert (code, "not speed" in shown.splitlines()[0]) == (0, True)
    lines = main("check", "there", "--baseline", "base.json", "--require-speed")[1].splitlines()
    (row,) = [line for line in lines if line.startswith("FAIL ")]
    assert len(row) <= 100 and any(line.startswith("note: ") and "baseline" in line for line in lines)
    assert main("check", "now", "--require-speed")[0] == 2


def test_a_server_is_timed_elsewhere_than_by_our_torch(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "then", answers(), engine="server")
    main("baseline", "then", "-o", "base.json")
    stored(tmp_path / "now", answers(), engine="server", environment={"packages": {"torch": "9.9"}})
    assert json.loads(main("check", "now", "--baseline", "base.json", "--json")[1])["ungated"] == ""


def test_a_file_holds_a_baseline_of_each_processor_and_a_run_is_held_to_its_own(tmp_path: Path, main: Main) -> None:
    fast, slow = answers(), slower(answers(), 1.3)
    stored(tmp_path / "a", fast)
    stored(tmp_path / "b", slow, environment={"cpu": "another"})
    stored(tmp_path / "b-slower", slower(slow, 1.3), environment={"cpu": "another"})
    stored(tmp_path / "a-slower", slow)
    main("baseline", "a", "-o", "base.json")
    alone = (tmp_path / "base.json").read_bytes()
    assert main("baseline", "b", "-o", "base.json")[0] == 0
    verdicts = {name: main("check", name, "--baseline", "base.json", "--require-speed") for name in ("a", "b")}
    assert {name: code for name, (code, _, _) in verdicts.items()} == {"a": 0, "b": 0}
    assert any("2 baselines" in line and "another" in line for line in verdicts["b"][1].splitlines())
    for name in ("a-slower", "b-slower"):
        assert main("check", name, "--baseline", "base.json")[0] == 1
    main("baseline", "b-slower", "-o", "base.json")  # in place of the other of its processor
    assert main("check", "b-slower", "--baseline", "base.json", "--require-speed")[0] == 0
    assert len(json.loads((tmp_path / "base.json").read_text())["others"]) == 1
    stored(tmp_path / "other", answers(), temperature=1.0)
    assert "dropped" in main("baseline", "other", "-o", "base.json")[1]
    assert "others" not in json.loads((tmp_path / "base.json").read_text())
    main("baseline", "a", "-o", "base.json")
    assert (tmp_path / "base.json").read_bytes() == alone


def test_a_time_free_baseline_holds_no_seconds_and_judges_none(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "then", answers())
    main("baseline", "then", "-o", "base.json", "--time-free")
    (cell,) = [each for each in json.loads((tmp_path / "base.json").read_text())["cells"] if each["method"] == "dflash"]
    assert set(cell["sums"]) == {"answers", "rounds", "emittable", "exact", "compared", "passed", "scored"}
    assert set(cell["figures"]) == {"al.pooled", "exact", "passed"}
    stored(tmp_path / "now", slower(answers(), 50))
    code, shown, _ = main("check", "now", "--baseline", "base.json", "--json")
    notes = json.loads(shown)["notes"]
    assert code == 0 and len(notes) == 3 and "--time-free" in notes[0]
    # The name of that sum in older baselines.
    (tmp_path / "former.json").write_text((tmp_path / "base.json").read_text().replace('"emittable"', '"verified"'))
    assert main("check", "now", "--baseline", "former.json", "--json")[1] == shown.replace("base.json", "former.json")


def test_other_cells_are_skipped_when_allowed_and_what_has_no_answer_is_not_passed(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "then", [*answers(), *answers(suite="math500")])
    main("baseline", "then", "-o", "base.json")
    stored(tmp_path / "now", answers())
    assert main("check", "now", "--baseline", "base.json", "--allow", "cells")[0] == 0
    stored(tmp_path / "lost", failing(answers(), first=24))
    assert main("check", "lost")[0] == 2


# Formats


def test_every_format_is_as_stored(tmp_path: Path, gate: Main) -> None:
    rows = changed(slower(answers(), 1.3), first=1, exactness="near_tie")
    code, shown, _ = gate(rows, "--junit", "j.xml", "--summary", "s.md", "--benchmark", "b.json")
    assert code == 1
    assert_golden("check.txt", shown)
    assert_golden("check.xml", (tmp_path / "j.xml").read_text())
    assert_golden("check.md", (tmp_path / "s.md").read_text())
    assert_golden("check_benchmark.json", (tmp_path / "b.json").read_text())


def test_the_json_is_as_stored(gate: Main) -> None:
    _, shown, _ = gate(slower(answers(), 1.3), "--json")
    assert_golden("check.json", shown)


def test_the_summary_is_appended(tmp_path: Path, gate: Main) -> None:
    (tmp_path / "s.md").write_text("before\n")
    gate(answers(), "--summary", "s.md")
    assert (tmp_path / "s.md").read_text().startswith("before\n### dflash-bench check ✅\n")


def test_the_junit_file_is_valid_and_counts_right(tmp_path: Path, gate: Main) -> None:
    schema = xmlschema.XMLSchema(Path(__file__).parents[1] / "junit.xsd")
    gate(slower(answers(), 1.3), "--junit", "j.xml")
    text = (tmp_path / "j.xml").read_text()
    schema.validate(text)
    assert not schema.is_valid(text.replace("testcase", "case"))
    root = ElementTree.fromstring(text)
    assert len(root.findall("testsuite/testcase")) == int(root.attrib["tests"])
    assert len(root.findall(".//failure")) == int(root.attrib["failures"]) == 2
    assert all(len(suite) == int(suite.attrib["tests"]) for suite in root)
