"""Our own experiments: each can be called, and every page of `results/` names the command that makes it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import pytest

from dflash_bench.analysis.stats import Interval
from studies import _study
from studies._study import Known, Made, StudyError, Work

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
OWN = re.compile(r"^dflash-bench \w+ -o results/([\w/-]+\.md)$", re.MULTILINE)
"""A page that a command writes for anybody."""
COMMAND = re.compile(r"^`?(?:scripts/study (\w+)|nox -s (\w+))|`(?:scripts/study (\w+)|nox -s (\w+))", re.MULTILINE)
PAGES = sorted(path for path in RESULTS.glob("*/*.md") if path.parent.name != "example")
INDEX = RESULTS / "index.md"
FILES = sorted(
    path.relative_to(RESULTS).as_posix()
    for path in RESULTS.rglob("*")
    if path.is_file() and "runs" not in path.relative_to(RESULTS).parts and path not in (INDEX, *PAGES)
)
STUDIES = {name: _study.known(name) for name in _study.names()}


def sessions() -> set[str]:
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list}


def makes(name: str, file: str) -> bool:
    return any(fnmatch(file, pattern) for pattern in STUDIES[name].pages)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_page_names_the_command_that_makes_it(page: Path) -> None:
    text, name = page.read_text(encoding="utf-8"), page.relative_to(RESULTS).as_posix()
    if (own := OWN.search(text)) is not None:
        assert own[1] == name
        return
    found = COMMAND.search(text)
    assert found is not None, "no command of this project"
    study, session = found[1] or found[3], found[2] or found[4]
    if session is None:
        assert study in STUDIES and makes(study, name)
        return
    written = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "external").glob("test_*.py"))
    start = page.name.partition("-")[0]
    assert session in sessions() and re.search(rf'write_page\(\s*f?"{page.parent.name}/({start}|\{{name)', written)


@pytest.mark.parametrize("file", FILES)
def test_every_other_file_of_results_is_made_by_a_study(file: str) -> None:
    assert [name for name in STUDIES if makes(name, file)]


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_says_what_it_is_and_parses_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    known = STUDIES[name]
    assert known.title.endswith((".", "?")) and known.takes and len(known.title) <= 120
    with pytest.raises(SystemExit) as stopped:
        _study.main([name, "--help"])
    assert stopped.value.code == 0
    assert "--fresh" in capsys.readouterr().out


def test_the_list_needs_nothing_but_python() -> None:
    listed = subprocess.run(
        [sys.executable, "-S", "-m", "studies"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "scripts")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(re.search(rf"^{name} ", listed.stdout, re.MULTILINE) for name in STUDIES)


def test_the_marks_of_external_tests_are_those_that_nox_runs() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    marks = set(re.findall(r"nox -s (\w+)\)", text))
    # Neither the package nor builds of torch have external tests: their sessions say themselves what they run.
    assert marks == sessions() - {"package", "torch"} and len(marks) == 9


def test_advice_is_chosen_by_the_figures_alone() -> None:
    from studies import which_when

    fast, slow = Interval(2.0, 1.8, 2.2), Interval(0.8, 0.7, 0.9)
    wide = which_when.Figures("A", 6.0, 16.0, 16.0, 4.0, 8.0, 14.0, False, fast, slow, "1/1")
    narrow = which_when.Figures("B", 3.0, 4.0, 4.0, 2.0, 3.2, 3.4, True, slow, fast, "1/1")
    said = which_when.advice([wide, narrow], {})
    assert "At concurrency 1, **A** is the fastest, 2.00 [1.80, 2.20]" in said and "B is slower than no draft" in said
    assert "At concurrency 4, **B** is the fastest" in said and "A is slower than no draft" in said
    assert "A has most to gain" in said and "8.00 tokens per round, 80%" in said and "(rerank) first" in said
    hopeless = which_when.advice([replace(wide, sixteen=7.0), narrow], {})
    assert "train it more first" in hopeless


# The framework of studies, tested with a study that counts its measurements.


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Calls a made-up study with these words: its exit status."""
    module = ModuleType("studies.tried", "Tries something.")

    def options(parser: ArgumentParser) -> None:
        parser.add_argument("--limit", type=int, default=2)
        _study.add_data(parser, "a.jsonl")
        parser.add_argument("--name", default="tried.md")
        parser.add_argument("--wrong", action="append", default=[])

    def make(work: Work, chosen: Namespace) -> Made:
        with (tmp_path / "measured").open("a") as log:
            work.once("one.json", lambda: str(log.write("x")))
        return Made({chosen.name: f"{work.command}\n"}, chosen.wrong)

    module.options, module.make = options, make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "studies.tried", module)
    monkeypatch.setattr(_study, "names", lambda: ["tried"])
    monkeypatch.setattr(_study, "known", lambda name: Known(name, "Tries.", "a moment", ("tried.md", "*.svg")))
    (tmp_path / "out").mkdir()
    return lambda *words: _study.main(["tried", str(tmp_path / "work"), "--output", str(tmp_path / "out"), *words])


def test_a_page_is_written_with_the_command_but_without_paths(study: Callable[..., int], tmp_path: Path) -> None:
    assert study("--limit", "3", "--data", str(tmp_path)) == 0
    assert (tmp_path / "out" / "tried.md").read_text() == "scripts/study tried --limit 3 --data FOLDER\n"


def test_what_is_finished_is_not_measured_again_until_a_fresh_beginning(
    study: Callable[..., int], tmp_path: Path
) -> None:
    assert [study(), study()] == [0, 0]
    assert (tmp_path / "measured").read_text() == "x"
    assert study("--fresh") == 0
    assert (tmp_path / "measured").read_text() == "xx"


def test_a_folder_of_other_options_or_of_something_else_is_refused(
    study: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert study() == 0
    assert study("--limit", "3") == 2
    assert "begun with other options; repeat those, or give --fresh" in capsys.readouterr().err
    assert study("--limit", "3", "--fresh") == 0
    (tmp_path / "work" / "study.json").unlink()
    assert study("--fresh") == 2
    assert "holds something else" in capsys.readouterr().err
    assert (tmp_path / "work" / "one.json").exists()


def test_a_problem_is_exit_status_1_and_a_file_that_is_not_announced_2(
    study: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert study("--wrong", "it is slow") == 1
    assert "wrong: it is slow" in capsys.readouterr().err
    assert study("--name", "other.md", "--fresh") == 2
    assert not (tmp_path / "out" / "other.md").exists()


def test_an_unknown_study_is_one_line_and_exit_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert _study.main(["nothing"]) == 2
    assert capsys.readouterr().err == (
        "scripts/study: there is no study 'nothing'; scripts/study without a name lists them\n"
    )


def test_a_command_that_fails_stops_the_study() -> None:
    with pytest.raises(StudyError, match="dflash-bench suites --nothing ended with exit status 2"):
        _study.bench("suites", "--nothing")


def test_published_figures_become_a_line_each(tmp_path: Path) -> None:
    columns = "target_model,method,config,dataset,temperature,thinking,concurrency,hardware,source,speedup,"
    table = tmp_path / "table.csv"
    table.write_text(f"{columns}acceptance_length,throughput_tok_s\nq,dflash,,gsm8k,0,,1,,paper,4.9,6.5,\n")
    assert _study.main(["published", str(tmp_path / "work"), "--table", str(table), "--output", str(tmp_path)]) == 0
    written = (tmp_path / "published.csv").read_text().splitlines()
    assert [line.split(",")[:2] for line in written[1:]] == [["speedup.zlab", "4.9"], ["al.zlab", "6.5"]]


def test_the_folders_that_scripts_study_lets_studies_import_from_are_there() -> None:
    """A folder that has moved was only noticed where a study imported from it."""
    (line,) = re.findall(
        r"^export PYTHONPATH=(.*)$", (ROOT / "scripts/study").read_text(encoding="utf-8"), re.MULTILINE
    )
    folders = re.findall(r"\$root(/\w+)?", line)
    assert len(folders) == 3 and all((ROOT / folder.removeprefix("/")).is_dir() for folder in folders)
