"""Fixtures that several files share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import fake
import pytest

from dflash_bench import cli
from dflash_bench.results import store


@pytest.fixture
def main(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """A command in a folder of its own: its status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dflash-bench", *map(str, words)])
        try:
            cli.main()
            code: object = 0
        except SystemExit as stopped:
            code = stopped.code or 0
        captured = capsys.readouterr()
        return int(str(code)), captured.out, captured.err

    return call


@pytest.fixture(autouse=True)
def clock_of_made_up_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that says that it took a second, and was there at once, lets a run's clock go on by a second."""
    fake.SPENT_S.clear()
    seconds = store.Run.seconds
    monkeypatch.setattr(store.Run, "seconds", lambda run: seconds(run) + sum(fake.SPENT_S))
