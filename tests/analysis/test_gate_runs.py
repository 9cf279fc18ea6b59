"""The gate over several runs: what lies between them is no loss, and what is lost in one of them is."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import xmlschema

from dflash_bench.analysis.cells import summarise
from dflash_bench.analysis.gate import checks
from dflash_bench.analysis.gate.baselines import Limit
from dflash_bench.analysis.stats import Interval
from dflash_bench.core.types import Answer
from helpers.each import each
from helpers.golden import assert_golden
from helpers.refusals import assert_refused
from helpers.runs import answers, changed, failing, frame_of, known, slower, stored

Main = Callable[..., tuple[int, str, str]]


def drafting(factor: float, seed: int) -> list[Answer]:
    """A run whose drafting takes `factor` times as long as it should."""
    return slower(answers(seed=seed), factor)


def _three(name: str, factors: Sequence[float], seed: int) -> dict[str, Callable[[], list[Answer]]]:
    return {f"{name}{n}": partial(drafting, factor, seed + n) for n, factor in enumerate(factors)}


QUIET, LOUD = (1.0, 1.01, 0.99), (1.0, 1.12, 0.88)
RUNS = {
    **_three("quiet", QUIET, 0),
    **_three("again", QUIET, 10),
    **_three("lost", [1.12 * factor for factor in QUIET], 10),
    **_three("loud", LOUD, 0),
    **_three("loud-again", LOUD, 10),
    **_three("loud-lost", [1.12 * factor for factor in LOUD], 10),
    **_three("below", (2.05, 2.07, 2.04), 0),
    "nearby": lambda: drafting(1.06, 10),
    "both-slower": lambda: slower(slower(answers(seed=5), 1.3), 1.3, "ar"),
    "inexact": lambda: changed(answers(), first=1, exactness="near_tie"),
    "inexact-lost": lambda: changed(drafting(1.12, 10), first=1, exactness="near_tie"),
    "mismatch": lambda: changed(answers(), first=1, exactness="mismatch"),
    "wrong": lambda: changed(answers(), first=6, passed=False),
    "failed": lambda: failing(answers()),
}
"""Written when a test first asks for them, and linked into its folder."""


def three(name: str) -> list[str]:
    return [f"{name}{n}" for n in range(3)]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def linked(tmp_path: Path, shelf: Path) -> Callable[..., list[str]]:
    """Puts these of `RUNS` into the test's folder."""

    def link(names: Sequence[str]) -> list[str]:
        for name in names:
            if not (shelf / name).exists():
                stored(shelf / name, RUNS[name]())
            if not (tmp_path / name).exists():
                (tmp_path / name).symlink_to(shelf / name)
        return list(names)

    return link


@pytest.fixture
def gate(main: Main, linked: Callable[..., list[str]], shelf: Path) -> Callable[..., tuple[int, Any]]:
    """`check` of some runs against a baseline of others: its exit status and its JSON."""

    def check(before: Sequence[str], after: Sequence[str], *words: object) -> Any:
        base = shelf / f"{'+'.join(before)}.json"
        assert base.exists() or main("baseline", *linked(before), "-o", base)[0] == 0
        code, shown, err = main("check", *linked(after), "--baseline", base, "--json", *words)
        assert not err
        return code, json.loads(shown)

    return check


def failures(found: Any) -> set[str]:
    return {
        " ".join(filter(None, (each["method"], each["kind"], each["run"])))
        for each in found["checks"]
        if each["failed"]
    }


SPEED = {"dflash speedup.decode", "dflash speedup.e2e"}
NOT_SURE = "below the baseline, but not significantly"
"""The reason of a figure that may be lower by chance; scripts read it."""


# Timings


def test_a_tenth_lost_is_seen_by_three_runs_and_not_by_one(gate: Any) -> None:
    code, found = gate(three("quiet"), three("lost"))
    assert (code, failures(found)) == (1, SPEED)
    code, found = gate(["quiet0"], ["lost0"])
    assert (code, failures(found)) == (0, set())
    short = [each for each in found["checks"] if each["reason"] == NOT_SURE]
    assert {each["kind"] for each in short} == {"speedup.decode", "speedup.e2e"}


def test_what_lies_between_runs_is_no_loss(gate: Any) -> None:
    """The same fall as above, where each run differs as much from the next."""
    code, found = gate(three("loud"), three("loud-lost"))
    assert (code, failures(found)) == (0, set())


def test_runs_without_a_change_pass(gate: Any) -> None:
    assert gate(three("quiet"), three("again"))[0] == 0
    assert gate(three("loud"), three("loud-again"))[0] == 0
    assert gate(["quiet0"], ["nearby"])[0] == 0


def noise_told(found: Any, *named: str) -> bool:
    notes = [note for note in found["notes"] if note.startswith("noise")]
    return any(all(name in note for name in named) for note in notes)


def test_the_noise_that_was_reckoned_with_is_told(gate: Any) -> None:
    _, found = gate(three("quiet"), three("again"))
    assert noise_told(found, "0.8 to 1.0 %", "speedup.decode and speedup.e2e", "measured", "3 + 3 runs")
    _, found = gate(three("quiet"), ["again0"])
    assert noise_told(found, "4.2 %", "speedup.decode and speedup.e2e", "assumed", "3 + 1 runs")
    sure = {each["kind"]: each for each in found["checks"] if not each["is_floor"]}
    assert sure["speedup.decode"]["run_noise"] == pytest.approx(0.03 * 2**0.5)
    assert sure["speedup.decode"]["run_noise_source"] == "allowed"
    assert sure["al.pooled"]["run_noise"] is None


def test_limits_state_the_noise(tmp_path: Path, gate: Any) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text('["speedup.decode"]\nrun_noise = 0.005\n')
    code, found = gate(["quiet0"], ["lost0"], "--limits", limits)
    assert (code, failures(found)) == (1, {"dflash speedup.decode"})
    assert noise_told(found, "0.5 %", "speedup.decode,", "run_noise")
    limits.write_text('["speedup.decode"]\nrun_noise = 0.2\n["speedup.e2e"]\nrun_noise = 0.2\n')
    assert gate(three("quiet"), three("lost"), "--limits", limits)[0] == 0


def test_a_slower_machine_is_no_loss_unless_absolute_speed_is_asked_for(tmp_path: Path, gate: Any) -> None:
    code, found = gate(["quiet0"], ["both-slower"])
    assert (code, "tps.decode" in {each["kind"] for each in found["checks"]}) == (0, False)
    limits = tmp_path / "limits.toml"
    limits.write_text('["tps.decode"]\nfall = 0.05\n')
    code, found = gate(["quiet0"], ["both-slower"], "--limits", limits)
    assert (code, failures(found)) == (1, {"ar tps.decode", "dflash tps.decode"})
    (plain,) = [each for each in found["checks"] if each["method"] == "ar" and each["kind"] == "tps.decode"]
    assert plain["run_noise"] == 0.03


def test_a_baseline_that_was_written_with_a_limit_for_absolute_speed_gates_it(
    tmp_path: Path, main: Main, linked: Any
) -> None:
    linked(["quiet0", "both-slower"])
    (tmp_path / "limits.toml").write_text('["tps.decode"]\nfall = 0.1\n')
    main("baseline", "quiet0", "-o", "base.json", "--limits", "limits.toml")
    code, shown, _ = main("check", "both-slower", "--baseline", "base.json", "--json")
    assert (code, failures(json.loads(shown))) == (1, {"ar tps.decode", "dflash tps.decode"})


# Slower than plain decoding


@each(
    "records, noise, code",
    [
        (slower(answers(), 1.95), 0.0, 0),  # 0.95, and its interval goes beyond 1
        (slower(answers(), 2.2), 0.0, 1),  # 0.84, and its interval ends before
        (slower(answers(), 2.2), 0.1, 0),  # the same, and runs may differ as much
        (slower(answers(), 2.6), None, 1),
        (slower(answers(), 2.05), None, 0),  # 0.90 [0.84, 0.97], which 4 % of noise reaches
    ],
)
def test_a_method_is_slower_than_plain_decoding_only_where_that_is_sure(
    records: list[Answer], noise: float | None, code: int, tmp_path: Path, main: Main
) -> None:
    stored(tmp_path / "run", records)
    words: list[str] = []
    if noise is not None:
        (tmp_path / "limits.toml").write_text(f'["speedup.decode"]\nrun_noise = {noise}\n')
        words = ["--limits", "limits.toml"]
    found = main("check", "run", "--json", *words)
    assert (found[0], failures(json.loads(found[1]))) == (code, {"dflash speedup.decode"} if code else set())


@pytest.mark.parametrize(("high", "failed"), [(1.05, False), (0.95, True)])
def test_an_interval_that_contains_1_is_no_alarm_however_sure_the_test(high: float, failed: bool) -> None:
    cells = summarise(frame_of(slower(answers(), 3)), known())
    (drafted,) = [cell for cell in cells if cell.method == "dflash"]
    shown = replace(drafted, figures={"speedup.decode": Interval(0.9, 0.8, high)})
    (made,) = checks.slowdown_checks([shown], (), {"speedup.decode": Limit(run_noise=0.0)})
    assert (made.failed, (made.p or 0) < 0.001) == (failed, True)


def test_several_runs_are_slower_together_and_a_baseline_helps_to_tell_their_noise(main: Main, linked: Any) -> None:
    names = linked(three("below"))
    assert main("check", names[0])[0] == 0
    assert _slower(main("check", *names, "--json")) == (1, True, pytest.approx(0.905, abs=0.001), "allowed")
    main("baseline", *linked(three("quiet")), "-o", "base.json")
    against = main("check", *names, "--baseline", "base.json", "--json")
    assert _slower(against) == (1, True, pytest.approx(0.905, abs=0.001), "measured")


def _slower(checked: tuple[int, str, str]) -> Any:
    """The exit status; of the alarm that a method is slower than plain decoding, what it says."""
    made = [each for each in json.loads(checked[1])["checks"] if each["is_floor"] and each["kind"] == "speedup.decode"]
    return checked[0], made[0]["failed"], made[0]["found"], made[0]["run_noise_source"]


# Losses that fail any run


@pytest.mark.parametrize(
    "name, told",
    [
        ("inexact", {"dflash exact inexact"}),
        ("mismatch", {"dflash exact mismatch", "dflash mismatch mismatch"}),
        ("wrong", {"dflash passed wrong"}),
        ("failed", {"dflash failed failed"}),
    ],
)
def test_without_a_clock_each_run_is_judged_by_itself(name: str, told: set[str], gate: Any) -> None:
    for after in (["again0", name], [name, "again0"]):
        code, found = gate(["quiet0"], after)
        assert (code, failures(found)) == (1, told)


@pytest.mark.parametrize("num_runs", [1, 2])
def test_accuracy_that_is_surely_lost_at_temperature_1_fails(num_runs: int, tmp_path: Path, main: Main) -> None:
    """All 10 right answers of 15 are lost, none is gained: by chance that is one in 512, times five figures."""
    names = [f"worse{n}" for n in range(num_runs)]
    for n, name in enumerate(names):
        stored(tmp_path / name, changed(answers(seed=n), first=15, passed=False), temperature=1.0)
    found = _against_one_good_run(tmp_path, main, names)
    assert failures(found) == {"dflash passed"}
    (lost,) = [each for each in found["checks"] if each["kind"] == "passed" and each["failed"]]
    assert 2 / 2**10 < lost["p"] < 8 * 2 / 2**10


def test_accuracy_that_falls_by_as_many_answers_as_it_may_by_chance_passes_at_temperature_1(
    tmp_path: Path, main: Main
) -> None:
    stored(tmp_path / "now", changed(answers(), first=5, passed=False), temperature=1.0)
    found = _against_one_good_run(tmp_path, main, ["now"])
    (lost,) = [each for each in found["checks"] if each["kind"] == "passed" and each["method"] == "dflash"]
    assert (failures(found), lost["reason"]) == (set(), NOT_SURE)


def test_an_answer_lost_in_one_run_and_won_in_another_is_neither_at_temperature_1(tmp_path: Path, main: Main) -> None:
    """Prompt by prompt the mean over runs counts, however many runs there are on a side."""
    stored(tmp_path / "now0", changed(answers(), first=15, passed=False), temperature=1.0)
    stored(tmp_path / "now1", changed(answers(seed=1), passed=True), temperature=1.0)
    found = _against_one_good_run(tmp_path, main, ["now0", "now1"])
    (judged,) = [each for each in found["checks"] if each["kind"] == "passed" and each["method"] == "dflash"]
    # Ten are lost by half, five of those that were wrong won by half, three more won in one of two.
    assert judged["found"] == pytest.approx((6 + 24) / 48)
    assert (failures(found), judged["p"]) == (set(), 1.0)


def test_acceptance_that_is_surely_lost_at_temperature_1_fails(tmp_path: Path, main: Main) -> None:
    fewer = changed(answers(), accepted=lambda row: (0, *row.generation.accepted[1:]))
    stored(tmp_path / "now", fewer, temperature=1.0)
    assert failures(_against_one_good_run(tmp_path, main, ["now"])) == {"dflash al.pooled"}


def _against_one_good_run(folder: Path, main: Main, names: Sequence[str]) -> Any:
    stored(folder / "good", answers(), temperature=1.0)
    assert main("baseline", "good", "-o", "base.json")[0] == 0
    code, shown, _ = main("check", *names, "--baseline", "base.json", "--json")
    found = json.loads(shown)
    assert code == (1 if failures(found) else 0)
    return found


# Runs that do not belong together


def test_runs_that_are_unlike_or_the_same_are_not_checked_together(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "one", answers())
    stored(tmp_path / "two", answers(seed=1), environment={"cpu": "another"})
    code, out, _ = main("check", "one", "two", "--allow", "device")
    assert code == 0 and any(line.startswith("note: ") and "processor" in line for line in out.splitlines())


# Files


def test_a_baseline_keeps_the_sums_and_figures_of_every_run(tmp_path: Path, main: Main, linked: Any) -> None:
    names = linked(three("quiet"))
    main("baseline", *names, "-o", "base.json")
    kept = json.loads((tmp_path / "base.json").read_text())
    (cell,) = [each for each in kept["cells"] if each["method"] == "dflash"]
    assert (kept["schema"], kept["runs"]) == (1, names)
    assert {len(values) for values in cell["sums"].values()} == {3}
    assert {len(values) for runs in cell["sums"].values() for values in runs} == {24}
    assert cell["figures"]["speedup.decode"][1] < cell["figures"]["speedup.decode"][0]
    assert "tps.decode" not in kept["limits"]


@each(
    "damage",
    [
        lambda sums: sums["rounds"].append(sums["rounds"][0]),
        lambda sums: sums["rounds"].clear(),
        lambda sums: sums["rounds"][0].pop(),
        lambda sums: [runs.clear() for runs in sums.values()],
    ],
)
def test_a_baseline_whose_runs_do_not_match_is_damaged(damage: Any, tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "then", answers())
    main("baseline", "then", "-o", "base.json")
    kept = json.loads((tmp_path / "base.json").read_text())
    damage(kept["cells"][0]["sums"])
    (tmp_path / "base.json").write_text(json.dumps(kept))
    code, _, err = main("check", "then", "--baseline", "base.json")
    assert code == 2
    assert "base.json is damaged" in err


def _other_figure(cell: dict[str, Any]) -> None:
    cell["figures"]["al.pooled"][0] = 9.0


def _other_sum(cell: dict[str, Any]) -> None:
    cell["sums"]["rounds"][0][0] += 5


def _no_number(cell: dict[str, Any]) -> None:
    cell["figures"]["passed"] = ["all"]


def _unknown_figure(cell: dict[str, Any]) -> None:
    cell["figures"]["luck"] = [1.0]


@each(
    "edit, told",
    [
        (_other_figure, "'al.pooled' of gsm8k dflash is 9,"),
        (_other_sum, "gsm8k dflash is"),
        (_no_number, "cells[1].figures.passed[0] is 'all',"),
        (_unknown_figure, "'luck' of gsm8k dflash"),
    ],
)
def test_edited_figures_of_a_baseline_are_noticed(edit: Any, told: str, tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "then", answers())
    main("baseline", "then", "-o", "base.json")
    kept = json.loads((tmp_path / "base.json").read_text())
    (cell,) = [each for each in kept["cells"] if each["method"] == "dflash"]
    edit(cell)
    (tmp_path / "base.json").write_text(json.dumps(kept))
    assert_refused(main("check", "then", "--baseline", "base.json"), told)


def test_every_form_holds_several_runs(tmp_path: Path, main: Main, linked: Any) -> None:
    now = linked(["lost1", "lost2", "inexact-lost"])
    main("baseline", *linked(three("quiet")), "-o", "base.json")
    words = ["--baseline", "base.json", "--junit", "j.xml", "--summary", "s.md", "--benchmark", "b.json"]
    code, shown, _ = main("check", *now, *words)
    assert code == 1
    assert_golden("check_runs.txt", shown)
    assert_golden("check_runs.xml", (tmp_path / "j.xml").read_text())
    assert_golden("check_runs.md", (tmp_path / "s.md").read_text())
    assert_golden("check_runs_benchmark.json", (tmp_path / "b.json").read_text())
    xmlschema.XMLSchema(Path(__file__).parents[1] / "junit.xsd").validate((tmp_path / "j.xml").read_text())


@pytest.mark.parametrize("methods", [("ar", "dflash"), ("ar",)])
def test_a_run_without_an_answer_to_judge_fails_in_every_form(
    methods: tuple[str, ...], tmp_path: Path, main: Main
) -> None:
    rows = answers(8)
    for method in methods:
        rows = failing(rows, method, 8)
    stored(tmp_path / "run", rows)
    words = ["check", "run", "--junit", "j.xml", "--summary", "s.md", "--benchmark", "b.json"]
    for allowed in ([], ["--allow", "failed"]):
        code, out, _ = main(*words, "--json", *allowed)
        found = [(one["method"], one["kind"], one["found"], one["failed"]) for one in json.loads(out)["checks"]]
        assert (code, found) == (1, [(method, "failed", 8, True) for method in methods])
    xmlschema.XMLSchema(Path(__file__).parents[1] / "junit.xsd").validate((tmp_path / "j.xml").read_text())
    assert f'failures="{len(methods)}"' in (tmp_path / "j.xml").read_text()
    assert json.loads((tmp_path / "b.json").read_text()) == []
