"""`reproduce`: each published figure has an item, an item runs, and a verdict says what the figures say."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_bench.analysis.cells import summarise
from dflash_bench.analysis.peers.paper import PUBLISHED, PaperFigure, _figures
from dflash_bench.analysis.stats import Interval
from dflash_bench.core.errors import UserError
from dflash_bench.report import read_document
from dflash_bench.reproduction import drafting, estimate, items, parts, verdict, words
from dflash_bench.runner.config import RunRequest
from dflash_bench.training import session
from helpers import runs
from helpers.each import each
from helpers.refusals import assert_refused
from helpers.rows import pair
from helpers.runs import answers, asked, frame_of, stored

Main = Callable[..., tuple[int, str, str]]
ITEMS = list(items.items())
RUNS = [name for name in ITEMS if not items.item(name).profile]
TRAINED = [name for name in ITEMS if any(arm.train for arm in items.item(name).arms)]


def test_each_published_figure_belongs_to_an_item() -> None:
    figures = [one for item in items.items().values() if not item.figures_in for one in item.figures]
    assert [one for one in _figures(PUBLISHED) if one not in figures] == []
    assert len(figures) == len(set(figures)) == 821
    assert {*items.item("figure1").figures} < {*items.item("table1").figures}


@each("name", RUNS)
def test_each_arm_was_published_and_its_options_are_a_runs(name: str) -> None:
    item = items.item(name)
    if name != "long-context":  # of which the paper gives two values and a sentence
        assert all(any(arm.holds(figure) for figure in item.figures) for arm in item.arms)
    with pytest.raises(UserError, match="raise --limit") if name == "table11" else nullcontext():
        parts.parts(item, RunRequest(limit=4))
    for part in parts.parts(item, RunRequest(limit=8)):
        assert (
            part.request.limit == 8
            and max(part.request.concurrency, default=1) <= 8
            and part.request.launch in (None, item.engine)
        )
        assert {arm.method for arm in item.arms_of(part.target or "")} == dict(part.methods).keys()
    for claim in item.claims:
        assert claim.above in [arm.method for arm in item.arms]


@each("name", [name for name in RUNS if name not in TRAINED])
def test_each_item_runs_with_nano(name: str, tmp_path: Path, main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = "gsm8k" if name == "long-context" else "math500"
    monkeypatch.setitem(items.item(name).run, "suite", [suite])  # type: ignore[arg-type]
    limit = 1 if items.item(name).engine == "own" else 8
    words_of = ("reproduce", name, "--model", "nano", "--limit", limit, "--max-new-tokens", 4, "-o", tmp_path / "out")
    code, said, _ = main(*words_of)
    assert code == 0 and "stands in" in said
    page = (tmp_path / "out" / words.PAGE).read_text()
    assert "(embedded) | dflash" in page and "reproduced" not in page.partition("\n## ")[2]
    run = tmp_path / "out" / "nano"
    drawn = "load" if items.item(name).run.get("concurrency", [1]) != [1] else "speedup"
    picture = f"plots/nano/{drawn}.svg"
    assert f"![{drawn}]({picture})" in page and (tmp_path / "out" / picture).exists()
    before = {path: path.stat().st_mtime_ns for path in run.iterdir()}
    assert main(*words_of)[:2] == (0, said)
    assert {path: path.stat().st_mtime_ns for path in run.iterdir()} == before


@each("name", TRAINED)
def test_each_item_that_trains_runs_with_nano(
    name: str, tmp_path: Path, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shortened: a single learning rate, and few tokens to measure acceptance after training."""
    monkeypatch.setattr(session, "RATES", session.RATES[:1])
    monkeypatch.setattr(session, "MEASURED_TOKENS", 4)
    words_of = ("reproduce", name, "--model", "nano", "--limit", 1, "--max-new-tokens", 4, "-o", tmp_path / "out")
    assert_refused(main(*words_of[:2], "--model", "qwen3-4b"), "name prompts with --train-prompts")
    code, said, _ = main(*words_of, "--written", 2, "--epochs", 0.01)
    assert code == 0 and "stands in" in said
    drafts = {path.name for path in (tmp_path / "out" / "drafts" / "nano").iterdir()}
    assert len(drafts) == len({arm.method.partition(":")[0] for arm in items.item(name).arms})


def test_drafting_times_of_several_profiles_tell_claims(
    tmp_path: Path, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "REPEATS", 2)
    words_of = ("reproduce", "figure3", "--model", "nano", "-o", tmp_path / "out")
    code, said, _ = main(*words_of)
    assert code == 0 and "stands in" in said
    page = (tmp_path / "out" / words.PAGE).read_text()
    item = items.item("figure3")
    assert all(f"| {arm.config} | " in page for arm in item.arms) and "published, ms" not in page
    assert_refused(main(*words_of, "--limit", 3), "leave --limit out")
    assert_refused(main(*words_of, "--written", 3), "trains no draft")
    assert_refused(main("reproduce", "figure3", "--estimate"), "only times drafts")
    chain, five, one = "eagle3:16", "dflash@5layers:15", "dflash@1layers:15"
    for times, judged in (([9.0, 8.0], ["holds", "cannot be told"]), ([1.0, 2.0], ["fails", "cannot be told"])):
        made = drafting.DraftingTimes(item, "nano", False, "cpu", {chain: times, five: [4.0, 6.0], one: [5.0, 7.0]})
        assert [made.judgement(claim) for claim in item.claims] == judged


def test_other_options_and_unknown_items_are_refused(tmp_path: Path, main: Main) -> None:
    words_of = ("reproduce", "table2", "--model", "nano", "--limit", 1, "--max-new-tokens", 4, "-o", tmp_path / "out")
    assert main(*words_of)[0] == 0
    assert_refused(main(*words_of[:-2], "--seed", 3, *words_of[-2:]), "No such option")
    assert_refused(main(*words_of[:4], "--limit", 2, *words_of[-2:]), "use the same options")
    assert_refused(main("reproduce", "table4"), "unknown item")
    assert_refused(main(*words_of, "--written", 2), "trains no draft")
    code, said, _ = main("reproduce")
    assert code == 0 and all(f"{name}: " in said for name in ITEMS)


def test_an_estimate_names_hours_and_memory_of_two_gpus(main: Main) -> None:
    made = {
        limit: [estimate.estimate(item, part) for part in parts.parts(item, RunRequest(limit=limit))]
        for item in [items.item("table1")]
        for limit in (8, 16)
    }
    for few, more in zip(made[8], made[16], strict=True):
        assert 2 * few.num_answers == more.num_answers == 7 * 16 * 2 * 4
        assert all(0 < low < high for low, high in few.hours.values())
        assert few.hours["H100"][1] * 2 == pytest.approx(more.hours["H100"][1])
        assert more.hours["H100"][1] < more.hours["A100"][1]
    assert made[8][0].weights_bytes == 8e9 and made[8][0].num_gpus == 1
    code, said, _ = main("reproduce", "table11", "--estimate")
    assert code == 0 and {"A100,", "H100,", "gpt-oss-120b"} <= set(said.split())
    assert_refused(main("reproduce", "table11", "--estimate", "--model", "nano"), "is for the models of table11")
    assert_refused(main("reproduce", "table6", "--estimate", "--written", 2), "covers runs, not training")


def of_table2(folder: Path, value: float) -> verdict.ItemResult:
    """The verdict on a run of Qwen3-4B; `value` stands for what was published of MATH-500 at temperature 0."""
    item = items.item("table2")
    (part,) = parts.parts(item, RunRequest(model="qwen3-4b"))
    rows = answers(24, suite="math500")
    run = stored(folder, rows, target="Qwen/Qwen3-4B", thinking=True, **asked("math500"))
    made = verdict.judge(item, part, read_document(run))
    al = next(one for one in made.figures if one.own is not None and one.published.formula == "al.zlab")
    return replace(made, figures=(replace(al, published=replace(al.published, value=value)),))


def test_a_figure_is_reproduced_within_the_interval_or_five_percent(tmp_path: Path) -> None:
    result = of_table2(tmp_path / "run", 1.0)
    assert "Conditions that differ" in words.page(items.item("table2"), [result], [])
    (compared,) = result.figures
    own = compared.own
    assert own is not None and own.low is not None and own.high is not None and own.low < own.value < own.high

    def outcome(interval: Interval | None, value: float) -> str:
        return verdict.FigureResult(replace(compared.published, value=value), interval).outcome

    assert compared.outcome == "higher" and outcome(own, own.low) == outcome(own, own.high) == "reproduced"
    assert outcome(own, 2 * own.high) == "lower" and outcome(None, 2.0) == "not run"
    assert outcome(replace(own, num_prompts=19), own.value) == "over too few prompts"
    assert outcome(Interval(2.0, 0.1, 9.0), 2.0) == "over too few prompts"
    exact = Interval(2.0, 2.0, 2.0)
    assert [outcome(exact, value) for value in (1.88, 1.93, 2.09, 2.13)] == [
        "higher", "reproduced", "reproduced", "lower",
    ]  # fmt: skip


def test_a_mean_over_suites_is_that_of_the_suites_published_beside_it() -> None:
    item = items.item("table1")
    measured: Any = verdict._Measured.__new__(verdict._Measured)
    measured.item = item
    means = [one for one in item.figures if one.dataset == items.AVERAGE]
    assert len(means) == 24
    for missing in (None, "gsm8k"):

        def of_suite(one: PaperFigure, missing: str | None = missing) -> Interval | None:
            return None if one.dataset == missing else Interval(one.value, one.value - 0.1, one.value + 0.1)

        measured._of_suite = of_suite
        for published in means:
            own = measured.of(published)
            assert (own is None) == (missing is not None)
            # So published means follow from the published suites, as rounded.
            assert own is None or own.value == pytest.approx(published.value, abs=0.011)


def test_the_interval_of_a_mean_is_that_of_independent_suites() -> None:
    several = [Interval(2.0, 1.7, 2.3, num_prompts=30), Interval(4.0, 3.6, 4.4, num_prompts=24)]
    mean = verdict._mean(several, is_geometric=False)
    assert (mean.value, mean.low, mean.high) == (3.0, pytest.approx(2.75), pytest.approx(3.25))
    assert mean.num_prompts == 24
    logs = [Interval(math.log(one.value), math.log(one.low or 0), math.log(one.high or 0)) for one in several]
    plain, geometric = verdict._mean(logs, is_geometric=False), verdict._mean(several, is_geometric=True)
    for name in ("value", "low", "high"):
        assert getattr(geometric, name) == pytest.approx(math.exp(getattr(plain, name)))
    assert verdict._mean([*several, Interval(3.0, None, None)], is_geometric=True).low is None


def test_a_model_that_stands_in_is_compared_with_nothing(tmp_path: Path) -> None:
    item = items.item("table2")
    (part,) = parts.parts(item, RunRequest(model="nano"))
    assert part.target is None and part.left_out == ("gpqa",)
    run = stored(tmp_path / "run", answers(24, suite="math500"), thinking=True)
    assert verdict.judge(item, part, read_document(run)).figures == ()
    with pytest.raises(UserError, match="of which no prompts are embedded"):
        parts.parts(item.model_copy(update={"run": {"suite": ["gpqa"]}}), RunRequest(model="nano"))


@each(
    ("more", "judged"),
    [((1, 1, 1), "holds"), ((1, 0, -1), "cannot be told"), ((-1, -1, -1), "fails"), ((0, 0, 0), "cannot be told")],
)
def test_a_claim_is_about_the_same_prompts(more: tuple[int, ...], judged: str) -> None:
    """The lengths of prompts differ fourfold, and of methods by one token; only together can their order be seen."""
    rows = []
    for number in range(24):
        plain, drafted = pair(f"p{number:03}", [2 + 3 * (number % 4)] * 6, 16, order=3 * number)
        own = [2 + 3 * (number % 4) + more[number % 3]] * 6
        _, other = pair(f"p{number:03}", own, 16, order=3 * number)
        rows += [plain, drafted, replace(other, method="eagle3", order=3 * number + 2)]
    known = [cell for cell in summarise(frame_of(rows), runs.known()) if cell.method != "ar"]
    below, above = sorted(known, key=lambda cell: cell.method)
    ratio = verdict.claimed_ratio("al.request_mean", above, below)
    assert ratio is not None
    claim = items.item("table1").claims[0]
    against = ("gsm8k",) if ratio.high is not None and ratio.high < 1 else ()
    result = verdict.ClaimResult(claim, 1, int(ratio.low is not None and ratio.low > 1), against)
    assert result.judgement == judged
