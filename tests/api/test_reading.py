"""Runs as Python has them: tables of answers, rounds and figures, and what is made of them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflash_bench import api as db
from dflash_bench.analysis import metrics
from dflash_bench.results import store
from helpers.each import each
from helpers.runs import answers, slower, stored


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored(tmp_path_factory.mktemp("reading") / "run", answers())


@pytest.fixture(scope="module")
def run(folder: Path) -> db.Run:
    return db.load(folder)


def test_answers_are_those_that_were_stored(run: db.Run, folder: Path) -> None:
    _, records = store.load(folder)
    table = run.answers
    assert len(table) == len(records) == 48
    for row, record in zip(table.itertuples(), sorted(records, key=lambda one: one.order), strict=True):
        assert (row.suite, row.prompt_id, row.method) == (record.suite, record.prompt_id, record.method)
        assert tuple(row.token_ids) == record.generation.token_ids
        assert row.passed == record.passed
        assert row.decode_s == record.generation.decode_s


def test_rounds_add_up_to_their_answers(run: db.Run, folder: Path) -> None:
    _, records = store.load(folder)
    rounds = run.rounds
    for record in records:
        said = record.generation
        own = rounds[(rounds["prompt_id"] == record.prompt_id) & (rounds["method"] == record.method)]
        assert tuple(own["accepted"]) == said.accepted
        assert tuple(own["drafted"]) == said.drafted
        assert said.drafted_ids is not None or own["drafted_ids"].isna().all()
        assert tuple(own["position"]) == tuple(1 + sum((said.emitted or ())[:number]) for number in own["round"])
        assert own["round_s"].sum() == pytest.approx(sum(said.round_s or ()), rel=1e-6)


def test_of_a_run_that_hides_its_rounds_there_are_none(tmp_path: Path) -> None:
    hidden = dict.fromkeys(("drafted", "drafted_ids", "accepted", "emitted", "draft_s", "verify_s", "round_s"))
    rows = [replace(row, generation=replace(row.generation, **hidden)) for row in answers()]
    table = db.load(stored(tmp_path / "run", rows)).rounds
    assert len(table) == 0 and "accepted" in table.columns


def test_metrics_are_tidy_and_those_of_the_table(run: db.Run) -> None:
    table = run.metrics()
    assert list(table.columns) == ["suite", "method", "settings", "metric", "value", "low", "high", "n"]
    assert not table.duplicated(["suite", "method", "settings", "metric"]).any()
    assert set(table["metric"]) <= set(metrics.METRICS)
    assert set(table["n"]) == {24}
    one = table[(table["method"] == "dflash") & (table["metric"] == "speedup.decode")].iloc[0]
    assert run.speedup("dflash", suite="gsm8k").value == one["value"]


def test_the_speedup_over_one_suite_is_that_suites(run: db.Run) -> None:
    pooled, alone = run.speedup("dflash"), run.speedup("dflash", suite="gsm8k")
    assert pooled.value == pytest.approx(alone.value)
    assert pooled.low is not None and pooled.high is not None and pooled.low < pooled.value < pooled.high


@each(
    "asked, said",
    [
        ({"method": "eagle3"}, "unknown method of this run 'eagle3'; known: dflash"),
        ({"method": "dflash", "suite": "math500"}, "unknown suite of this run 'math500'; known: gsm8k"),
        ({"method": "dflash", "settings": "temperature 1"}, "unknown settings of this run"),
    ],
)
def test_what_a_run_does_not_have_is_refused(run: db.Run, asked: dict[str, str], said: str) -> None:
    with pytest.raises(db.UserError, match=said):
        run.speedup(**asked)  # type: ignore[arg-type]


def test_it_shows_itself_as_the_command_does(run: db.Run, capsys: pytest.CaptureFixture[str]) -> None:
    from dflash_bench import report

    assert str(run) == report.FORMATS["table"](run.document)
    html = run._repr_html_()
    assert "<table" in html and "gsm8k" in html and "<script" not in html
    assert repr(run) == f"<dflash_bench.Run {run.folder.name!r}>"
    assert capsys.readouterr() == ("", "")


def test_what_a_notebook_shows_is_escaped(tmp_path: Path) -> None:
    rows = [replace(row, suite="<script>alert(1)</script>") for row in answers()]
    known = {"version": 1, "sha256": "s", "scorer": "gsm8k_number", "source": "embedded", "prompts": 24}
    folder = stored(tmp_path / "run", rows, suites={"<script>alert(1)</script>": known})
    assert "<script" not in db.load(folder)._repr_html_()


def test_findings_name_what_is_wrong(tmp_path: Path, folder: Path) -> None:
    found = db.load(stored(tmp_path / "run", slower(answers(), 9.0))).findings
    assert "slower" in [one.kind for one in found]
    assert all(one.text and one.remedy for one in found)


def test_a_plot_is_a_figure(run: db.Run) -> None:
    from matplotlib.figure import Figure

    figure = run.plot("speedup")
    assert isinstance(figure, Figure)
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_a_plot_goes_into_the_place_of_axes(run: db.Run) -> None:
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    left, right = figure.subplots(1, 2)
    drawn = run.plot("acceptance", ax=right)
    assert left in figure.axes and right not in figure.axes
    assert drawn in figure.subfigs and drawn.axes
    figure.canvas.draw()


def test_axes_outside_of_a_grid_are_refused(run: db.Run) -> None:
    from matplotlib.figure import Figure

    with pytest.raises(db.UserError, match="ax stands in no grid"):
        run.plot("speedup", ax=Figure().add_axes((0, 0, 1, 1)))


def test_unknown_plots_and_those_that_the_run_lacks_are_refused(run: db.Run) -> None:
    with pytest.raises(db.UserError, match=r"unknown plot 'speed' \(did you mean 'speedup'\?\); known: acceptance"):
        run.plot("speed")
    with pytest.raises(db.UserError, match="nothing to plot as 'sweep'"):
        run.plot("sweep")


def test_a_page_is_written(run: db.Run, tmp_path: Path) -> None:
    path = run.report(tmp_path / "page.html")
    assert path == tmp_path / "page.html"
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_comparison_has_its_table(run: db.Run, folder: Path, tmp_path: Path) -> None:
    after = db.load(stored(tmp_path / "after", slower(answers(), 1.5)))
    compared = db.compare(run, after)
    table = compared.table.set_index(["metric", "after"])
    (change,) = [
        row for row in compared.table.itertuples() if row.metric == "speedup.decode" and row.method == "dflash"
    ]
    assert change.value == pytest.approx(1 / 1.5, rel=1e-3)
    assert change.n == 24 and change.low <= change.value <= change.high
    assert len(table) and str(compared) == compared.text
    assert str(db.compare(folder, tmp_path / "after")) == str(compared)
    assert compared.notes == compared.data["notes"]


def test_a_run_is_checked(run: db.Run, tmp_path: Path) -> None:
    passed = db.check([run])
    assert passed.passed and passed and not passed.failures
    failed = db.check(stored(tmp_path / "slow", slower(answers(), 9.0)))
    assert not failed.passed
    assert [one.kind for one in failed.failures] == ["speedup.decode"]
    table = failed.table
    assert table[table["failed"]]["reason"].tolist() == ["slower than plain decoding"]
    assert np.isnan(table["p"]).any() and "slower than plain decoding" in str(failed)


def test_a_run_is_checked_against_a_baseline(run: db.Run, tmp_path: Path) -> None:
    from dflash_bench.analysis.gate import baselines

    baselines.write([run.document.results], tmp_path / "base.json", with_timings=True, limits={})
    assert db.check([run], baseline=tmp_path / "base.json").passed
    with pytest.raises(db.UserError, match="at least one run"):
        db.check([])


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(db.UserError, match="run"):
        db.load(tmp_path)


def test_reading_comparing_gating_and_drawing_load_no_torch_and_work_where_it_cannot_be_imported(
    tmp_path: Path,
) -> None:
    # Texts that the tokenizer of nano denies would be read once more, by transformers itself.
    for name, times in (("one", 1.0), ("two", 1.2), ("results/runs/newest", 1.0)):
        stored(tmp_path / name, slower(answers(8), times), model="mine", target="mine")
    commands = [
        "runs",
        "report one --full",
        "report one --format latex --layout paper",
        "compare one two",
        "compare one two -o both.html",
        "baseline one two -o base.json",
        "check one --baseline base.json",
        "plot one --format pdf --paper column -o paper",
        "card one",
        "index results -o site",
        "--help",
        "suites",
        "methods",
    ]
    code = f"""
import contextlib, io, json, sys
import dflash_bench as db
assert not {{"numpy", "pandas", "matplotlib", "torch", "dflash_bench.api"}} & sys.modules.keys()
said = io.StringIO()
with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
    run = db.load("one")
    run.answers, run.rounds, run.metrics(), run.speedup("dflash"), run.findings, str(run), run._repr_html_()
    run.plot(), run.report("page.html")
    db.compare(run, "two").table
    db.check([run]).table
loaded = sorted({{"torch", "transformers", "numba", "datasets", "IPython"}} & sys.modules.keys())
for name in ("torch", "transformers", "numba"):
    sys.modules[name] = None
from dflash_bench import cli
codes = {{}}
for words in {commands!r}:
    sys.argv = ["dflash-bench", *words.split()]
    try:
        codes[words] = cli.main() or 0
    except SystemExit as stopped:
        codes[words] = stopped.code or 0
json.dump([loaded, said.getvalue(), codes], open("told.json", "w"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "told.json").read_text())
    assert told == [[], "", dict.fromkeys(commands, 0)], done.stderr
