"""Progress of a run: in a terminal a bar, elsewhere a line now and then, on stdout nothing."""

from __future__ import annotations

import io

import pytest

from dflash_bench.core.methods import shown
from dflash_bench.runner import session
from dflash_bench.runner.session import Progress
from helpers.each import each
from helpers.rows import drafted, failed, plain


@pytest.fixture(autouse=True)
def every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "LINE_EVERY_S", 10.0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_elsewhere_there_is_a_line_every_ten_seconds() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(8, 0, stream, clock) as progress:
        for number in range(4):
            progress.begins("gsm8k", "dflash")
            clock.now += 5.5
            progress.measured(drafted(f"p{number}", [3, 1]), "dflash")
    lines = [line.split(", ") for line in stream.getvalue().splitlines()]
    assert [(line[0], line[1], line[-1]) for line in lines] == [
        ("2/8 answers", "gsm8k · dflash 150.0 tok/s al 3.00", "0:00:33 left"),
        ("4/8 answers", "gsm8k · dflash 150.0 tok/s al 3.00", "0:00:22 left"),
    ]


def test_a_short_run_prints_nothing_elsewhere() -> None:
    stream = io.StringIO()
    with Progress(1, 0, stream) as progress:
        progress.measured(plain("p0", 3), "plain")
    assert stream.getvalue() == ""


def test_a_resumed_run_counts_what_is_stored_and_is_timed_by_what_is_new() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(100, 90, stream, clock)
    clock.now += 20
    progress.begins("gsm8k", "warming up")
    clock.now += 20
    progress.measured(plain("p0", 3), "plain")
    first, last = stream.getvalue().splitlines()
    assert first.startswith("90/100 ") and ":" not in first
    assert last.startswith("91/100 ") and "plain 100.0 tok/s al 1.00" in last and "0:06:00" in last


def test_each_cell_has_figures_of_its_own_and_a_failed_answer_is_in_none() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(9, 0, stream, clock)
    for record in (plain("p0", 3), drafted("p0", [4, 4]), failed("dflash", "p1", "NaN")):
        progress.measured(record, record.method)
    clock.now += 10
    progress.begins("gsm8k", "dflash")
    assert stream.getvalue().startswith("3/9 ") and "dflash 250.0 tok/s al 5.00" in stream.getvalue()


def test_each_suite_has_its_speedups_so_far() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(9, 0, stream, clock)
    for suite in ("gsm8k", "math500"):
        for record in (plain("p0", 3, suite=suite), drafted("p0", [4, 4], suite=suite)):
            progress.measured(record, f"{shown(record.method)} (temperature 1)")
        # Without plain answers under the same settings there is none.
        progress.measured(drafted("p0", [4, 4], suite=suite), "dflash")
    clock.now += 10
    progress.begins("math500", "dflash")
    first, *others = stream.getvalue().splitlines()
    assert first.startswith("6/9 ") and "math500 · dflash 250.0 tok/s al 5.00" in first
    assert others == [f"  {suite}: dflash (temperature 1) 2.50x so far" for suite in ("gsm8k", "math500")]


@each("is_terminal", [False, True])
@each("answer_s, number, said", [(10, 3000, "8 hours"), (10, 300, "50 minutes"), (10, 180, ""), (0.3, 300, "")])
def test_a_long_run_says_once_what_it_takes_and_how_to_shorten_it(
    answer_s: float, number: int, said: str, is_terminal: bool
) -> None:
    """The warm-up takes 1,000 s, and the first four answers come together."""
    stream, clock = Terminal() if is_terminal else io.StringIO(), Clock()
    with Progress(number, 0, stream, clock, num_methods=2, advice="--for 30m") as progress:
        clock.now += 1000
        for at in range(60):
            progress.measured(plain(f"p{at}", 3), "plain")
            clock.now += answer_s * (at >= 3)
    notes = [line for line in stream.getvalue().splitlines() if "--for 30m" in line]
    assert len(notes) == bool(said) and all(said in note for note in notes)


def test_in_a_terminal_there_is_a_bar_and_it_goes_away(capsys: pytest.CaptureFixture[str]) -> None:
    stream = Terminal()
    with Progress(4, 1, stream, Clock()) as progress:
        progress.begins("gsm8k", "[dflash]")
        progress.measured(drafted("p0", [3, 1]), "[dflash]")
        assert progress.bar is not None
        (task,) = progress.bar.tasks
        assert (task.completed, task.total) == (2, 4)
        assert (task.fields["doing"], task.fields["left"]) == (
            "gsm8k · [dflash] 150.0 tok/s al 3.00",
            "answers 0:00:00 left",
        )
    assert "2/4" in stream.getvalue()
    assert capsys.readouterr() == ("", "")
