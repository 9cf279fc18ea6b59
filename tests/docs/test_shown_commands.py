"""Every command that README and docs/ show is one that works: all are parsed, and the quick ones are run, shortened."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_bench import cli
from dflash_bench.core import methods
from dflash_bench.core.option import split_at_commas
from dflash_bench.models import presets
from dflash_bench.runner import session
from dflash_bench.tasks import suites
from helpers import shown
from helpers.each import each

Main = Callable[..., tuple[int, str, str]]

ENTRIES: dict[str, dict[str, Any]] = {
    entry["shown"]: entry
    for entry in tomllib.loads((Path(__file__).parent / "commands.toml").read_text(encoding="utf-8"))["command"]
}
SHOWN = {str(command): command for command in shown.commands()}
NEEDS = {"hub", "gpu", "server", "time", "extra"}
NANO = shown.ROOT / "dflash_bench" / "nano"
FOR_THE_READER = {"M", "MODEL"}
"""Where a page says MODEL, the reader fills in their own."""
OF_OTHER_PROGRAMS = {
    "--disable-metrics",
    "--enforce-eager",
    "--extra_llm_api_options",
    "--fresh",
    "--help-all",
    "--metrics",
    "--pages",
    "--per-request-spec-decode-metrics",
    "--speculative-config",
    "--spec-synth-rates",
}


def test_every_command_is_known_by_how_it_is_covered() -> None:
    assert set(SHOWN) == set(ENTRIES)


@each("text", SHOWN)
def test_a_command_is_parsed_and_its_names_are_known(text: str) -> None:
    words = SHOWN[text].words
    shown.parse(words)
    for several in shown.given(words, "--method"):
        for method in split_at_commas(several):
            methods.parse(method)
    suites.expand(shown.given(words, "--suite"))
    assert set(shown.given(words, "--model")) <= {*FOR_THE_READER, *presets.table()}


@each(
    "words",
    [
        ("run", "--sute", "gsm8k"),
        ("rnu", "--suite", "gsm8k"),
        ("run", "--limit", "many"),
        ("check",),
        ("convert", "SRC", "--to", "zlab"),
        ("card", "RUN", "RUN"),
    ],
)
def test_a_command_that_is_none_is_noticed(words: tuple[str, ...]) -> None:
    with pytest.raises(cli.USAGE_ERROR):
        shown.parse(words)


def test_options_and_commands_named_in_sentences_are_there() -> None:
    options = shown.option_names() | OF_OTHER_PROGRAMS
    for page, text in shown.inline():
        if text.startswith("dflash-bench "):
            assert text.split()[1] in {*shown.PROGRAM.commands, "COMMAND"}, f"{page}: {text}"
        if text.startswith(("-", "dflash-bench ")):
            named = set(re.findall(r"(?<!\S)--?[a-z][\w-]*", text)) - options
            unknown = {name for name in named if not name.startswith("--spec")}  # those are servers'
            assert not unknown, f"{page}: {text}"


@each("text", [text for text, entry in ENTRIES.items() if "runs" not in entry])
def test_what_is_not_run_here_names_what_covers_it(text: str) -> None:
    entry = ENTRIES[text]
    assert entry["needs"] in NEEDS and entry.keys() & {"tests", "study", "external"}
    for name in entry.get("tests", []):
        assert _tests()[name] == 1, f"{name} is there {_tests()[name]} times"
    for folder, kind, name in (("scripts/studies", "study", "{}.py"), ("tests/external", "external", "test_{}.py")):
        if kind in entry and (there := shown.ROOT / folder).exists():
            assert (there / name.format(entry[kind])).exists(), f"{kind} {entry[kind]}"


def _tests(found: Counter[str] = Counter()) -> Counter[str]:  # noqa: B006 - kept from call to call
    if not found:
        for path in (shown.ROOT / "tests").rglob("test_*.py"):
            found.update(re.findall(r"^def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE))
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with RUN and AFTER, two runs of nano by the first command of the README."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RUN", "AFTER"):
            words = "run --suite gsm8k --limit 2 --max-new-tokens 16 --method dflash --method eagle3".split()
            patch.setattr(sys, "argv", ["dflash-bench", *words, "--out", str(folder / name)])
            _exits_with_0(cli.main)
    return folder


def _exits_with_0(call: Callable[[], None]) -> None:
    try:
        call()
    except SystemExit as stopped:
        assert not stopped.code, f"exit status {stopped.code}"


@pytest.mark.parametrize("text", [text for text, entry in ENTRIES.items() if "runs" in entry])
@pytest.mark.in_full
def test_a_quick_command_works(
    text: str, runs: Path, tmp_path: Path, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    # RUN and AFTER were measured in full; the curve of passes takes a third of such a run.
    monkeypatch.setattr(session, "forwards_of", lambda _: None)
    for name in ("RUN", "AFTER"):
        shutil.copytree(runs / name, tmp_path / name)
    *before, last = ENTRIES[text]["runs"]
    for line in before:
        assert main(*_words(line))[0] == 0
    code, out, err = main(*_words(last))
    assert code in ENTRIES[text].get("status", [0]), err
    assert out or err


def _words(line: str) -> list[str]:
    return [word.replace("NANO", str(NANO)) for word in shlex.split(line)]
