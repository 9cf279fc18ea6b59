"""Settings that print alike with six digits, in one run and in two: every reader tells them apart."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_bench.analysis.cells import summarise
from dflash_bench.analysis.comparable import Difference
from dflash_bench.core.labels import number_words
from dflash_bench.core.types import GREEDY, Answer, Settings
from dflash_bench.report import plots, read_document
from dflash_bench.report.plots.style import Material
from dflash_bench.results import store
from dflash_bench.results import table as results_table
from dflash_bench.results.identity import full_names, settings_of, settings_to_json, short_names
from helpers.each import each
from helpers.pages import data
from helpers.rows import drafted
from helpers.runs import answers, listed, stored
from helpers.servers.fake_server import FakeServer

Main = Callable[..., tuple[int, str, str]]
ONE, OTHER = Settings(0.7), Settings(0.7000001)
PENALISED = [replace(GREEDY, repetition_penalty=penalty) for penalty in (1.1, 1.1000001)]
"""Greedy, so that plain answers can be set side by side."""


def of(pair: Sequence[Settings], folder: Path, worse: bool = False, **identity: Any) -> Path:
    """Under the second settings, if they sample, rounds accept half as much."""
    rows: list[Answer] = []
    for number, settings in enumerate(pair):
        for row in answers(settings=settings):
            if number and row.method == "dflash" and not settings.greedy:
                short = drafted(row.prompt_id, [0, 1, 0, 2, 0, 0, 1] if not worse else [0] * 11)
                row = replace(row, generation=short.generation)
            kept = row if settings.greedy else replace(row, exactness=None)
            rows.append(replace(kept, order=row.order + 48 * number))
    return stored(folder, rows, settings=settings_to_json(pair), **identity)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return of((ONE, OTHER), tmp_path_factory.mktemp("both") / "run")


@pytest.fixture
def run(both: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(both, tmp_path / "run"))


@pytest.fixture(scope="module")
def material(both: Path) -> Material:
    return Material(read_document(both))


def apart(text: str) -> bool:
    """Are both there, and is neither written as the other?"""
    return bool(re.search(r"temperature 0\.7(?![0-9])", text)) and "temperature 0.7000001" in text


# Identity of settings


def test_an_id_is_the_same_everywhere_and_changes_with_any_bit_of_a_value() -> None:
    assert GREEDY.id == "44136fa355"
    assert Settings(0.7, top_p=0.9, thinking=False).id == "83ef4f026f"
    others = [ONE, OTHER, Settings(0.7, thinking=True), Settings(0.7, thinking=False), Settings(0.7, concurrency=2)]
    assert len({settings.id for settings in (GREEDY, *others)}) == 6
    # Settings are equal however a file spells their numbers.
    assert Settings(1, top_p=1).id == Settings(1.0).id and Settings(-0.0).id == GREEDY.id


def test_numbers_have_the_digits_that_tell_them_apart_and_no_others() -> None:
    assert number_words([0.7, 1.0, 0.123456789]) == {0.7: "0.7", 1.0: "1", 0.123456789: "0.123457"}
    assert number_words([0.7, 0.7000001, 2.0]) == {0.7: "0.7", 0.7000001: "0.7000001", 2.0: "2"}
    assert number_words([1.0, 0.99999999]) == {1.0: "1", 0.99999999: "0.99999999"}
    assert list(short_names([ONE, OTHER]).values()) == ["temperature 0.7", "temperature 0.7000001"]
    assert list(full_names(PENALISED).values())[1] == "temperature 0, repetition penalty 1.1000001"


def test_rows_carry_it_and_one_that_is_not_that_of_its_values_is_refused(run: Path, main: Main) -> None:
    from pyarrow import parquet

    assert set(results_table.read_run(run).rows["settings_id"]) == {ONE.id, OTHER.id}
    (part,) = run.glob("part-*")
    table = parquet.read_table(part)
    forged = table.column("settings_id").to_pylist()
    forged[forged.index(ONE.id)] = OTHER.id
    at = table.schema.get_field_index("settings_id")
    parquet.write_table(table.set_column(at, table.schema.field(at), [forged]), part)
    listed(run)
    assert "not in the plan" in main("report", "run")[2]


# Reports


@each("kind", ["table", "markdown", "latex", "csv"])
def test_a_report_tells_them_apart(kind: str, run: Path, main: Main) -> None:
    status, out, err = main("report", "run", "--format", kind)
    assert status == 0, err
    assert apart(out)


def test_json_has_both_keys_and_the_exact_values(run: Path, main: Main) -> None:
    made = json.loads(main("report", "run", "--format", "json")[1])
    cells = made["cells"]
    assert [cell["settings_id"] for cell in cells] == [ONE.id, ONE.id, OTHER.id, OTHER.id]
    assert [cell["settings"]["temperature"] for cell in cells] == [0.7, 0.7, 0.7000001, 0.7000001]
    assert cells[1]["al_pooled"] != cells[3]["al_pooled"]
    (curve,) = made["sweeps"][0]["curves"]
    assert [point["value"] for point in curve["points"]] == [0.7, 0.7000001]
    assert curve["best"] in (0.7, 0.7000001)
    keys = {place["settings_id"] for finding in made["findings"] for place in finding["places"]}
    assert keys <= {ONE.id, OTHER.id}


def test_the_card_and_the_page_tell_them_apart(run: Path, main: Main) -> None:
    card = main("card", "run")[1]
    assert apart(card) and "temperature 0.7 and 0.7000001" in card
    assert main("report", "run", "-o", "page.html")[0] == 0
    page = Path("page.html").read_text()
    assert apart(page) and "temperature 0.7 and 0.7000001" in page
    shown = data(page)
    assert len({row["suite"] for row in shown["rows"]}) == 2


def test_each_has_badges_and_findings_of_its_own(tmp_path: Path) -> None:
    """The second is slower than plain decoding, the first is not."""
    document = read_document(of((ONE, OTHER), tmp_path / "run", worse=True))
    slower = [finding for finding in document.findings if finding.kind in ("slower", "dead_draft")]
    assert slower and {place.settings_id for finding in slower for place in finding.places} == {OTHER.id}
    assert [line.setting for line in document.lines] == ["temperature 0.7", "temperature 0.7000001"]


@each("name", ["speedup", "acceptance", "positions", "output", "rounds", "prompts"])
def test_every_plot_has_a_place_for_each(name: str, material: Material) -> None:
    assert len(material.groups) == 2
    assert apart(plots.svg(material, name))


def test_the_axis_of_a_sweep_has_both(material: Material) -> None:
    svg = plots.svg(material, "sweep")
    assert "0.7000001" in svg and re.search(r"\b0\.7\b(?!0)", svg)


def test_acceptance_is_counted_by_their_keys(material: Material) -> None:
    for by_cell in (material.histograms, material.along):
        assert {key.settings_id for key in by_cell} == {ONE.id, OTHER.id}
    counts = [sum(material.histograms["gsm8k", "", one.id, "dflash"].values()) for one in (ONE, OTHER)]
    assert counts[0] != counts[1]


def test_a_trend_over_runs_of_one_each_names_them(tmp_path: Path) -> None:
    runs = [Material(read_document(of((settings,), tmp_path / name))) for name, settings in (("a", ONE), ("b", OTHER))]
    assert apart(
        plots.write_trend(
            runs, tmp_path, "svg", [Difference("sampling", "temperature", "0.7", "0.7000001")]
        ).read_text()
    )


# Comparisons and the gate


def test_a_comparison_of_methods_has_a_line_for_each(run: Path, main: Main) -> None:
    assert apart(main("compare", "run")[1])
    found = json.loads(main("compare", "run", "--json")[1])
    assert {change["settings_id"] for change in found["changes"]} == {ONE.id, OTHER.id}
    assert apart(main("compare", "run", "--compat", "zlab")[1])
    printed = json.loads(main("compare", "run", "--compat", "zlab", "--json")[1])["cells"]
    assert len({cell["settings_id"] for cell in printed}) == 2 and printed[1]["al"] != printed[3]["al"]


def test_cells_of_two_runs_are_paired_by_their_keys(run: Path, tmp_path: Path, main: Main) -> None:
    """In the other run the settings come the other way round, and dflash accepts what it did under each."""
    rows = [row for settings in (OTHER, ONE) for row in store.load(run)[1] if row.settings == settings]
    stored(tmp_path / "turned", rows, settings=settings_to_json([OTHER, ONE]))
    changes = json.loads(main("compare", "run", "turned", "--json")[1])["changes"]
    lengths = [one["ratios"]["al.pooled"]["ratio"] for one in changes if "al.pooled" in one["ratios"]]
    assert lengths == [[1, 1, 1], [1, 1, 1]]


def test_runs_of_one_each_are_no_repeats_of_each_other(tmp_path: Path, main: Main) -> None:
    of((ONE,), tmp_path / "a")
    of((OTHER,), tmp_path / "b")
    assert "temperature 0.7 and 0.7000001" in main("compare", "a", "b")[2]


def test_plain_answers_are_set_side_by_side_under_each(tmp_path: Path, main: Main) -> None:
    of(PENALISED, tmp_path / "a")
    of(PENALISED, tmp_path / "b")
    found = json.loads(main("compare", "a", "b", "--json")[1])["plain_answers"]
    assert len(found) == 2 and "1.1000001" in found[1]["setting"] and found[0]["setting"] != found[1]["setting"]


def test_the_gate_fails_the_one_that_fell_and_names_it(run: Path, tmp_path: Path, main: Main) -> None:
    assert main("baseline", "run", "-o", "base.json", "--time-free")[0] == 0
    assert main("check", "run", "--baseline", "base.json")[0] == 0
    of((ONE, OTHER), tmp_path / "worse", worse=True)
    status, out, _ = main("check", "worse", "--baseline", "base.json")
    failed = [line for line in out.splitlines() if line.startswith("FAIL ")]
    assert status == 1 and failed and all("temperature 0.7000001" in line for line in failed)
    checks = json.loads(main("check", "worse", "--baseline", "base.json", "--json")[1])["checks"]
    assert {check["settings_id"] for check in checks if check["failed"]} == {OTHER.id}


# From the command line


def test_a_run_over_both_ends_and_is_read(tmp_path: Path, main: Main) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"What is {n} times 7?"}) + "\n" for n in range(3)))
    with FakeServer() as plain, FakeServer(accepts=(2,), block=4) as other:
        status, out, err = main(
            "run",
            "--server",
            f"plain={plain.url}",
            "--server",
            f"dflash={other.url}",
            "--prompts",
            path,
            "--max-new-tokens",
            16,
            "--temperature",
            "0.7,0.7000001",
            "--out",
            "run",
        )
        assert status == 0, err
        assert apart(main("report", "run")[1])
        status, out, err = main(
            "run",
            "--server",
            f"plain={plain.url}",
            "--server",
            f"dflash={other.url}",
            "--prompts",
            path,
            "--max-new-tokens",
            16,
            "--rate",
            "50,50.000001",
            "--out",
            "rates",
        )
        assert status == 0, err
        out = main("report", "rates")[1]
        assert re.search(r"^ +50\.000001 ", out, re.MULTILINE) and re.search(r"^ +50 ", out, re.MULTILINE)
    read = results_table.read_run(Path("run"))
    cells = summarise(read.rows, read.info.identity)
    assert [cell.settings for cell in cells if cell.method == "ar"] == list(settings_of(read.info.identity))
