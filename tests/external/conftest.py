"""Tests against real servers and GPUs: each has a mark, and runs only where it is asked for, by `nox -s MARK`."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from studies import _study

MARKS = ("vllm", "llamacpp", "mlx", "transformers_serve", "lmdeploy", "sglang", "ray", "hosts", "gpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("external")
    group.addoption("--pages", type=Path, metavar="FOLDER", help="write what was measured there, such as results")
    group.addoption("--limit", type=int, help="number of prompts of each suite")
    group.addoption("--model", default="nano", choices=["nano", "smollm2"], help="of llamacpp")
    group.addoption("--soak", default="10m", metavar="TIME", help="how long servers are soaked")
    group.addoption("--toy", action="store_true", help="of gpu: the same at toy size, on the CPU")


def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Skipped unless `-m` names their mark, so that the usual run needs no server, whatever is installed."""
    for item in items:
        for mark in MARKS:
            if item.get_closest_marker(mark) and mark not in config.option.markexpr:
                item.add_marker(pytest.mark.skip(reason=f"needs what `nox -s {mark}` sets up"))


@pytest.fixture(scope="module", autouse=True)
def stopped_at_a_signal() -> None:
    """So that servers are stopped, too, when these tests are terminated."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


@pytest.fixture(scope="session")
def limit(pytestconfig: pytest.Config) -> Callable[[int, int], int]:
    """How many prompts of each suite: what was asked for, or the default, and at least so many."""

    def chosen(default: int, least: int) -> int:
        given: int | None = pytestconfig.getoption("--limit")
        if given is not None and given < least:
            raise pytest.UsageError(f"--limit must be at least {least}, as so many answers run at a time")
        return default if given is None else given

    return chosen


@pytest.fixture(scope="session")
def write_page(pytestconfig: pytest.Config) -> Callable[[str, Sequence[str]], None]:
    """Writes the file FOLDER/NAME of these blocks into --pages, if that was given."""

    def write(name: str, blocks: Sequence[str]) -> None:
        folder: Path | None = pytestconfig.getoption("--pages")
        if folder is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            _study.write(folder / name, "\n\n".join(blocks) + "\n")

    return write


@pytest.fixture(scope="session")
def command(pytestconfig: pytest.Config) -> Callable[[str], str]:
    """The command that a page names, with the options that say what was measured."""

    def named(mark: str) -> str:
        given = {name: pytestconfig.getoption(f"--{name}") for name in ("model", "limit")}
        words = [word for name, value in given.items() if value not in (None, "nano") for word in (f"--{name}", value)]
        toy = ["--toy"] * bool(pytestconfig.getoption("--toy"))
        return shlex.join(["nox", "-s", mark, "--", *map(str, words), *toy, "--pages", "results"])

    return named


@pytest.fixture(scope="session")
def server_environment() -> Callable[[str], Path]:
    """The folder of a server's own environment, which nox names in NAME_VENV."""

    def found(mark: str) -> Path:
        variable = f"{mark.upper()}_VENV"
        if variable not in os.environ:
            pytest.fail(f"{variable} must name the server's environment; `nox -s {mark}` sets it up")
        return Path(os.environ[variable]).resolve()

    return found
