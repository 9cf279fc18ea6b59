"""Fixtures that several files share."""

from __future__ import annotations

import gc
import inspect
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.main

from dflash_bench import cli
from dflash_bench.core import terminal
from helpers.each import seed

TESTS = Path(__file__).parent
ASKING = {"core", "external", "nano", "perf", "tasks"}

# Whoever runs the tests in the background has them ignore what Ctrl-C sends, and some libraries stop ignoring it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Everything made while collecting tests stays; searching it for garbage takes a tenth of the time.
gc.disable()
# On a slow machine a line of progress would stand between a test and what it compares.
terminal.LINE_EVERY_S = 3600.0


def pytest_collection_finish() -> None:
    """Every process of the tests has loaded by now what it will; no later search for garbage need look at it."""
    # Typer makes its tree of options from the functions anew for each command line.
    typer.main.get_command = cache(typer.main.get_command)
    if "torch" in sys.modules:
        from helpers import shared_models

        shared_models.compile_once()
    gc.collect()
    gc.freeze()
    # Most of what tests make is gone before ten thousand objects are.
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--in-full", action="store_true", help="all tests; none shares nano's files or measures")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `--in-full` runs."""
    if config.getoption("in_full"):
        return
    left_out = [item for item in items if item.get_closest_marker("in_full")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("in_full")]


@pytest.fixture(scope="module")
def shared_models(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nano's files are read and the machine is measured once for all tests that ask for this; not with `--in-full`."""
    with pytest.MonkeyPatch.context() as patch:
        if "torch" in sys.modules and not request.config.getoption("in_full"):
            from helpers import shared_models

            shared_models.apply(patch)
        yield


@pytest.fixture(scope="module", autouse=True)
def shared_where_nano_runs(request: pytest.FixtureRequest) -> None:
    """Use `shared_models` in every folder but those whose tests ask for it themselves."""
    if request.path.parent != TESTS and request.path.parent.name not in ASKING:
        request.getfixturevalue("shared_models")


@pytest.fixture(scope="module", autouse=True)
def shared_models_stay_what_they_are() -> Iterator[None]:
    """Seed each test file, so that its fixtures draw the same random numbers whatever ran before."""
    seed()
    yield
    if "helpers.shared" in sys.modules:
        sys.modules["helpers.shared"].require_unchanged()


@pytest.fixture(autouse=True)
def random_numbers_of_its_own(shared_models_stay_what_they_are: None) -> None:
    """A test draws the same ones whatever ran before it."""
    seed()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, built once for each file that asks for it."""
    from helpers import tiny

    return tiny.build(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def measured_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes what `shared_models` does to it."""
    from dflash_bench.perf import measure

    for name in ("forward_curve", "least_s"):
        monkeypatch.setattr(measure, name, inspect.unwrap(getattr(measure, name)))


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
