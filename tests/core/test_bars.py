"""The bar of what takes a while: only in a terminal, and only once it does take a while; elsewhere a line at times."""

from __future__ import annotations

import io
import re
import time

import pytest

from dflash_bench.core import terminal
from dflash_bench.core.terminal import Stages, status, with_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_quick_shows_no_bar() -> None:
    stream = Terminal()
    assert list(with_bar("abc", "drawing", stream=stream)) == ["a", "b", "c"]
    assert stream.getvalue() == ""


def test_what_takes_longer_shows_how_far_it_is() -> None:
    stream = Terminal()
    assert list(with_bar("abc", "drawing [plots]", after_s=-1, stream=stream)) == ["a", "b", "c"]
    assert "0/3" in stream.getvalue()
    assert "2/3" in stream.getvalue()
    assert "drawing [plots]" in stream.getvalue()


def test_a_file_gets_no_bar() -> None:
    stream = io.StringIO()
    assert list(with_bar("abc", "drawing", after_s=-1, stream=stream)) == ["a", "b", "c"]
    assert stream.getvalue() == ""


def test_a_file_gets_a_line_at_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "LINE_EVERY_S", 0.0)
    stream = io.StringIO()
    assert list(with_bar("abc", "drawing", stream=stream)) == ["a", "b", "c"]
    assert stream.getvalue().splitlines() == ["drawing: 0/3", "drawing: 1/3", "drawing: 2/3"]


def waited(stream: io.StringIO, text: str) -> bool:
    """Whether the text comes at all; a busy machine takes its time."""
    until = time.monotonic() + 300
    while text not in stream.getvalue():
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


def test_a_status_in_a_file_goes_on_even_if_nothing_new_is_said() -> None:
    stream = io.StringIO()
    with status(every_s=0.01, stream=stream) as tell:
        tell("loading")
        assert stream.getvalue() == "loading\n"
        assert waited(stream, "loading (0 s)\n")
        tell("judging")
        assert waited(stream, "judging (0 s)\n")
    ended = stream.getvalue()
    time.sleep(0.05)
    assert stream.getvalue() == ended


def test_stages_in_a_terminal_leave_one_line_with_their_times() -> None:
    stream = Terminal()
    with Stages(stream) as stages:
        stages.begin("loading [nano]")
        assert waited(stream, "loading [nano]")
        stages.begin("loading the judge")
    last = stream.getvalue().splitlines()[-1]
    assert re.search(r"loading \[nano\] \d+\.\d s   loading the judge \d+\.\d s$", last)
    ended = stream.getvalue()
    time.sleep(0.2)
    assert stream.getvalue() == ended
    stages.end()
    assert stream.getvalue() == ended


def test_a_stage_in_a_terminal_tells_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "REDRAWN_EVERY_S", 0.01)
    stream = Terminal()
    with Stages(stream) as stages:
        stages.begin("loading")
        assert waited(stream, "loading ... 0 s")


def test_a_status_in_a_terminal_leaves_nothing() -> None:
    stream = Terminal()
    with status(stream=stream) as tell:
        tell("loading [nano]")
        assert "loading [nano]" in stream.getvalue()
    assert not stream.getvalue().endswith("s\n")


def test_quick_stages_write_nothing_to_a_file() -> None:
    stream = io.StringIO()
    with Stages(stream) as stages:
        stages.begin("loading")
        stages.begin("judging")
    assert stream.getvalue() == ""


def test_slow_stages_write_a_line_at_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "LINE_EVERY_S", 0.01)
    stream = io.StringIO()
    with Stages(stream) as stages:
        stages.begin("loading")
        assert waited(stream, "loading\n")
        assert waited(stream, "loading (0 s)\n")


def test_a_command_that_shows_nothing_yet_moves_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.Starting, "AFTER_S", 0.01)
    monkeypatch.setattr(terminal.Starting, "EVERY_S", 0.01)
    shown, starting = Terminal(), terminal.Starting()
    starting.begin(shown)
    while "..." not in shown.getvalue():
        time.sleep(0.001)
    starting.end()
    written = shown.getvalue()
    assert written.startswith("\rstarting .") and written.endswith("\r\x1b[K")
    starting.end()
    assert shown.getvalue() == written


def test_dots_are_for_terminals_and_for_commands_that_take_long() -> None:
    for stream in (io.StringIO(), Terminal()):
        starting = terminal.Starting()
        starting.begin(stream)
        starting.end()
        assert stream.getvalue() == ""
