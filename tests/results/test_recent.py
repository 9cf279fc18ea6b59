"""RUN left out is the newest run, and @2 the one before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dflash_bench.core.errors import UserError
from dflash_bench.results import store
from dflash_bench.results.store import find, find_all, is_older, newest_first
from helpers.each import each


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders of runs, the newest first; their names say nothing of their age."""
    monkeypatch.chdir(tmp_path)
    folders = [store.RUNS / name for name in ("b", "c", "a")]
    for age, folder in enumerate(folders):
        folder.mkdir(parents=True)
        (folder / "run.json").write_text("{}")
        os.utime(folder / "run.json", (1000 - age, 1000 - age))
    (store.RUNS / "no run").mkdir()
    return folders


def test_runs_are_found_by_age(three: list[Path]) -> None:
    assert newest_first() == three
    assert find(None) == find(Path("@1")) == three[0]
    assert find(Path("@3")) == three[2]
    assert find_all([]) == [three[0]]
    assert find_all([Path("@2"), Path("elsewhere")]) == [three[1], Path("elsewhere")]


def test_a_run_that_goes_on_is_the_newest(three: list[Path]) -> None:
    os.utime(three[2] / "run.json", (2000, 2000))
    assert find(None) == three[2]


@each("name", ["@0", "@4", "@999999"])
def test_a_run_that_is_not_there_is_refused(name: str, three: list[Path]) -> None:
    with pytest.raises(UserError, match=f"there is no run {name}: results/runs holds 3"):
        find(Path(name))


@each("name", ["@", "@x", "@-1", "@1234567", "a@1", "results/@1"])
def test_other_names_are_paths(name: str, three: list[Path]) -> None:
    assert find(Path(name)) == Path(name)


def test_without_a_run_it_is_said_how_to_start_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"results/runs.*'dflash-bench run --suite"):
        find(None)


def test_a_page_is_older_than_a_run_that_went_on(three: list[Path]) -> None:
    run, page = three[0], three[0] / "report.html"
    assert is_older(page, run)
    page.write_text("")
    assert not is_older(page, run)
    (run / "part-0-0.parquet").write_text("")
    os.utime(page, (1500, 1500))
    assert is_older(page, run)
