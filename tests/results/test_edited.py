"""JSON and TOML of any shape, and strays among the parts: one line that names the file, exit status 2, no traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dflash_bench import report
from dflash_bench.analysis.gate import baselines
from dflash_bench.analysis.gate.checks import check_runs
from dflash_bench.core import files
from dflash_bench.core.errors import UserError
from dflash_bench.results import parts, table
from dflash_bench.results.run_info import read_info
from helpers.each import each
from helpers.runs import answers, stored

Main = Callable[..., tuple[int, str, str]]
ODD: tuple[Any, ...] = (None, True, -1, 10**300, 1e300, float("nan"), "", "\x1b[31m", [], [[]], {}, {"": None})
TEXTS = {
    "deep lists": "[" * 100_000,
    "deep objects": '{"a":' * 50_000,
    "deep, and closed": "[" * 500 + "]" * 500,
    "deep inside": '{"identity": {"x": ' + "[" * 300 + "]" * 300 + '}, "schema": 1}',
    "a number of 10,000 digits": "9" * 10_000,
    "a number of 10,000 digits inside": '{"identity": {"temperature": ' + "9" * 10_000 + "}}",
    "half of a character": '{"identity": {"model": "\\ud800"}}',
    "no text": "\x00",
    "nothing": "",
}
READERS = (["compare"], ["check"], ["report"], ["card"], ["plot", "-o", "plots"], ["baseline", "-o", "base.json"])


def assert_one_line(result: tuple[int, str, str], name: str) -> None:
    code, out, err = result
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("dflash-bench: ") and name in err and len(err) < 500 and err[:-1].isprintable()


@each("what", TEXTS)
def test_text_that_is_no_json_is_one_line_whoever_reads_it(what: str, tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "run", answers(2))
    (tmp_path / "odd.json").write_text(TEXTS[what])
    assert_one_line(main("check", "run", "--baseline", "odd.json"), "odd.json")
    assert_one_line(main("compare", "run", "odd.json"), "odd.json")
    shutil.copy("odd.json", "run/run.json")
    for command, *options in READERS:
        assert_one_line(main(command, "run", *options), "run/run.json")


@each("text", ["x = " + "[" * 50_000, "x = " + "9" * 10_000, '["al.pooled"]\nfall = 1' + "0" * 400])
def test_limits_of_any_shape_are_one_line(text: str, tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "run", answers(2))
    (tmp_path / "limits.toml").write_text(text)
    code, out, err = main("check", "run", "--limits", "limits.toml")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "limits.toml" in err


def places(value: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """Every key of an object, however deep; of a list the first item."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, *path, key)


def with_changed(text: str, value: Any, *paths: tuple[Any, ...]) -> str:
    changed = json.loads(text)
    for path in paths:
        inside = changed
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = value
    return json.dumps(changed)


def read_by_all(run: Path) -> tuple[object, ...]:
    document = report.read_document(run)
    return report.card(document), report.FORMATS["latex"](document), check_runs([run], None, None, ()).outcome


def outcome(read: Callable[[Path], object], path: Path) -> object:
    """Its one-line error, or that it reads the run."""
    try:
        return bool(read(path))
    except UserError as error:
        assert len(str(error).splitlines()) == 1
        return str(error)


def assert_read_or_one_line(
    path: Path, odd: tuple[Any, ...], narrow: Callable[[Path], object], wide: Callable[[Path], object], share: int
) -> None:
    """Each value in places of a file, and what `narrow` allows of it in many places at once: of these, readers read
    all, or it is tried which one they refuse. Each value is tried in another one of `share` parts of the places."""
    sound = json.loads(text := path.read_text())
    seen: set[object] = set()

    def said(read: Callable[[Path], object], value: Any, *places: tuple[Any, ...]) -> object:
        path.write_text(with_changed(text, value, *places))
        return outcome(read, path)

    for number, value in enumerate(odd):
        allowed: dict[int, list[tuple[Any, ...]]] = {}
        for place in [*places(sound)][number % share :: share]:
            answer = said(narrow, value, place)
            seen.add(answer is True)
            if answer is True:
                allowed.setdefault(len(place), []).append(place)
            elif value in ("", None):
                # Every reader refuses an invalid file in the same words.
                assert said(wide, value, place) == answer, (place, value)
        for several in allowed.values():
            if said(wide, value, *several) is not True:
                assert any(said(wide, value, place) is not True for place in several), (several, value)
    assert seen == {True, False}


@pytest.fixture
def share(pytestconfig: pytest.Config) -> int:
    """By day a third of the places is enough."""
    return 1 if pytestconfig.getoption("in_full") else 3


def test_a_run_json_with_any_value_anywhere_is_read_or_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: int
) -> None:
    """Change a run and its parts alike, as if it had been measured so."""
    run = stored(tmp_path / "run", answers(2))
    info = json.loads((run / "run.json").read_text())
    info |= {"started": "2026-01-01", "sandbox": None, "options": {"model": "nano"}, "resumed": [{"sandbox": None}]}
    info["environment"] |= {"gpus": [{"name": "H"}], "git": {"commit": "c", "dirty": True}}
    (run / "run.json").write_text(json.dumps(info))
    monkeypatch.setattr(parts, "_refuse_other", lambda *_: None)
    assert_read_or_one_line(run / "run.json", ODD, lambda _: read_info(run), lambda _: read_by_all(run), share)


def test_a_baseline_with_any_value_anywhere_is_read_or_one_line(
    tmp_path: Path, main: Main, monkeypatch: pytest.MonkeyPatch, share: int
) -> None:
    run = stored(tmp_path / "run", answers(2))
    assert main("baseline", "run", "-o", "base.json")[0] == 0
    # The run stays the same.
    monkeypatch.setattr(table, "read_run", cache(table.read_run))
    base = tmp_path / "base.json"
    odd = (None, -1, 10**300, float("nan"), "", [], {})

    def checked(_: Path) -> object:
        return check_runs([run], base, None, ()).outcome.checks

    assert_read_or_one_line(base, odd, baselines.read, checked, share)


@each(
    "name",
    [
        "part-abc.parquet",
        "part-1.parquet",
        "part-000003-000001.parquet",
        "part-.parquet",
        "part-٣٣٣٣٣٣.parquet",
        "part-000001-000001.parquet",
        "part-000001 (copy).parquet",
        "part-000000-abc.parquet",
    ],
)
def test_a_stray_among_the_parts_is_named(name: str, tmp_path: Path, main: Main) -> None:
    run = stored(tmp_path / "run", answers(2))
    shutil.copy(run / "part-000000.parquet", run / name)
    for command, *options in READERS:
        code, out, err = main(command, "run", *options)
        assert (code, out, err.count("\n")) == (2, "", 1)
        problem = "does not have the name of a part of the run; move it out of the folder"
        assert err == f"dflash-bench: run/{name} {problem}\n"


def test_what_is_only_deep_or_long_enough_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for value in ([[[[[["deep"]]]]]], {"long": "x" * 100_000}, {"emoji": "🙂"}, list(range(1000))):
        path.write_text(json.dumps(value))
        assert files.json_of(path) == value
    with pytest.raises(UserError, match=r"cannot read .*absent\.json: No such file"):
        files.json_of(tmp_path / "absent.json")
