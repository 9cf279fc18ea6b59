"""A finding that forbids a speed-up: no screen shows the number, its run exits with 1, and its check fails."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dflash_bench as db
from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Answer
from dflash_bench.report import read_document, screen
from helpers.each import each
from helpers.runs import answers, changed, failing, stored
from helpers.servers.fake_server import FakeServer

Main = Callable[..., tuple[int, str, str]]
DRAFTING: dict[str, Any] = {"accepts": (2, 0, 4), "block": 5}


@pytest.fixture
def serve() -> Iterator[Callable[..., FakeServer]]:
    with ExitStack() as stack:
        yield lambda **changes: stack.enter_context(FakeServer(round_s=0.002, **changes))


def asked(plain: FakeServer, dflash: FakeServer, out: str = "run") -> list[object]:
    rows = [{"prompt": f"What is {n} times 7?"} for n in range(6)]
    Path("p.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    servers = ["--server", f"plain={plain.url}", "--server", f"dflash={dflash.url}"]
    return ["run", *servers, "--prompts", "p.jsonl", "--max-new-tokens", 32, "--out", out]


def speedups_of(shown: dict[str, Any]) -> list[Any]:
    """Every value in JSON whose key names a speed-up or a ratio over plain decoding, at any depth."""
    found = []
    for name, value in shown.items():
        if isinstance(value, dict):
            found += speedups_of(value) if name != "formulas" else []
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            found += [one for item in value for one in speedups_of(item)]
        elif name.startswith(("speedup", "over_plain")) and value is not None:
            found.append(value)
    return found


def assert_no_speedup(main: Main, code: str) -> None:
    """Of `run`: not in Python, not in JSON, and the check fails by this code."""
    run = db.load("run")
    with pytest.raises(UserError, match="has no speed-up of dflash"):
        run.speedup("dflash")
    named = run.metrics()
    assert not named[(named["method"] == "dflash") & named["metric"].str.startswith("speedup")].size
    (finding,) = [one for one in run.findings if one.kind == code]
    assert finding.forbids
    shown = json.loads(main("report", "run", "--format", "json")[1])
    drafted = [cell for cell in shown["cells"] if cell["method"] == "dflash"]
    assert drafted and not [one for cell in drafted for one in speedups_of(cell)]
    assert [one["forbids_speedup"] for one in shown["findings"] if one["kind"] == code] == [True]
    status, out, _ = main("check", "run", "--json")
    assert status == 1
    assert code in [one["code"] for one in json.loads(out)["checks"] if one["failed"]]


def assert_in_no_form(main: Main) -> None:
    """Of `run`, in every other form that shows a speed-up."""
    with pytest.raises(UserError):
        db.load("run").plot("speedup")
    table = list(csv.DictReader(io.StringIO(main("report", "run", "--format", "csv")[1])))
    values = [row[name] for row in table if row["method"] == "dflash" for name in row if name.startswith("speedup")]
    assert not any(values)
    for form in ("table", "markdown", "latex"):
        lines = [line for line in main("report", "run", "--format", form)[1].splitlines() if "dflash " in line]
        assert any("n/a" in line for line in lines), lines
    assert "dflash n/a (" in " ".join(main("card", "run")[1].split())
    text = " ".join(screen(read_document(Path("run")), 80).plain.split())
    assert "times as fast" not in text and "No measurable speed-up" not in text and "slower" not in text
    assert main("report", "run", "-o", "page.html")[0] == 0
    page = Path("page.html").read_text()
    assert "times as fast" not in page.partition("<nav>")[0] and "<small>×</small>" not in page
    assert main("movie", "run", "-o", "film.svg")[0] == 2
    assert main("baseline", "run", "-o", "base.json")[0] == 2
    compared = json.loads(main("compare", "run", "--json")[1])
    assert not [one for cell in compared["cells"] if cell["method"] == "dflash" for one in speedups_of(cell)]
    assert not any("tps.decode" in one["ratios"] for one in compared["changes"])


def test_servers_given_the_wrong_way_round(main: Main, serve: Callable[..., FakeServer]) -> None:
    status, out, err = main(*asked(serve(**DRAFTING), serve()))
    assert status == 1, out + err
    assert "times as fast" not in out and "speculating" in out
    assert_no_speedup(main, "plain_drafts")
    # One number for one cell: the tokens per round of the arm that is called plain.
    rows = [line.split() for line in out.splitlines()]
    (plain,) = [row for row in rows if row and row[0] == "plain"]
    cells = {cell.method: cell for cell in read_document(Path("run")).cells}
    assert f"{cells['ar'].value('al.pooled'):.2f}" in plain and "1.00" not in plain


@pytest.mark.parametrize("changes", [{}, {"gives_ids": False}])
def test_the_same_plain_server_given_twice(
    main: Main, serve: Callable[..., FakeServer], changes: dict[str, Any]
) -> None:
    server = serve(**changes)
    status, out, err = main(*asked(server, server))
    assert status == 1 and "times as fast" not in out, out + err
    assert_no_speedup(main, "nothing_drafted")


@pytest.mark.parametrize("gives_ids", [True, False])
def test_answers_compared_as_text_are_not_said_to_be_the_same_tokens(
    main: Main, serve: Callable[..., FakeServer], gives_ids: bool
) -> None:
    status, out, _ = main(*asked(serve(gives_ids=gives_ids), serve(gives_ids=gives_ids, **DRAFTING)))
    row = next(line for line in out.splitlines() if line.split()[:1] == ["dflash"])
    assert status == 0 and row.endswith("6/6 ✓" if gives_ids else "6/6 as text")
    assert ("✓" in out) == gives_ids
    assert main("report", "run", "-o", "page.html")[0] == 0
    page = Path("page.html").read_text().partition("<footer")[0]
    lead, card = page[page.index('<section id="lead">') :].partition("</section>")[0], main("card", "run")[1]
    for shown in (lead, card):
        assert ("token for token" in shown, "as text" in shown) == (gives_ids, not gives_ids)
    assert ("✓" in lead) == gives_ids
    (cell,) = [
        one for one in json.loads(main("report", "run", "--format", "json")[1])["cells"] if one["method"] != "ar"
    ]
    assert (cell["exact"], cell["exact_as_text"]) == ([6, 6], 0 if gives_ids else 6)


def test_a_plain_and_a_drafting_server_the_right_way_round(main: Main, serve: Callable[..., FakeServer]) -> None:
    assert main(*asked(serve(), serve(**DRAFTING)))[0] == 0
    assert db.load("run").speedup("dflash").value > 0
    assert not any(finding.forbids for finding in db.load("run").findings)
    assert main("check", "run")[0] == 0


@each("method, first", [("dflash", 2), ("ar", 1)])
def test_wrong_answers_and_a_baseline_that_is_wrong(main: Main, method: str, first: int) -> None:
    stored(Path("run"), changed(answers(24), method, first=first, exactness="mismatch"))
    assert_no_speedup(main, "mismatch")


def clocked(method: str, beside_s: float, often: int = 1) -> Callable[[list[Answer]], list[Answer]]:
    """Give every answer a call of 2 ms more than its times, and each `often`-th of a method some seconds on top."""

    def change(rows: list[Answer]) -> list[Answer]:
        numbers = {id(row): number for number, row in enumerate(row for row in rows if row.method == method)}
        return [
            replace(
                row,
                clock_s=row.generation.prefill_s
                + row.generation.decode_s
                + 0.002
                + beside_s * (numbers.get(id(row), 1) % often == 0 if often > 1 else row.method == method),
            )
            for row in rows
        ]

    return change


def test_work_that_is_in_no_figure(main: Main) -> None:
    """A round of dflash takes 20 ms, and an answer of it 100 ms with its prefill: 5 % and 1 ms are 6 ms."""
    stored(Path("run"), clocked("dflash", 0.0065)(answers(24)))
    assert_no_speedup(main, "hidden_time")
    assert_in_no_form(main)


@each("method, beside_s, often", [("dflash", 0.0055, 1), ("dflash", 0.5, 3), ("ar", 0.5, 1)])
def test_calls_that_take_long_now_and_then_hide_no_work(main: Main, method: str, beside_s: float, often: int) -> None:
    stored(Path("run"), clocked(method, beside_s, often)(answers(24)))
    assert not any(finding.forbids for finding in db.load("run").findings)


def test_a_wrong_method_takes_the_speed_up_of_no_other(main: Main) -> None:
    wrong = changed(answers(24), "dflash", first=2, exactness="mismatch")
    other = [row for row in answers(24) if row.method == "dflash"]
    methods = {name: {"name": name, "num_drafts": 4} for name in ("ar", "dflash", "eagle3")}
    rows = [*wrong, *(replace(row, method="eagle3") for row in other)]
    run = db.load(stored(Path("run"), rows, methods=methods))
    assert run.speedup("eagle3").value > 1
    with pytest.raises(UserError, match="dflash"):
        run.speedup("dflash")
    text = " ".join(screen(run.document, 80).plain.split())
    assert "dflash is NOT exact" in text and "eagle3 is" in text and "times as fast" in text


def test_failed_answers_forbid_no_speed_up(main: Main) -> None:
    assert db.load(stored(Path("run"), failing(answers(24)))).speedup("dflash").value > 1
