"""Values that nobody means, for every option of every command: one line, exit status 2, nothing written, no wait."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import readers, runs
from helpers.each import each
from helpers.fake_backend import FakeBackend, install

Main = Callable[..., tuple[int, str, str]]
COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    "run": (
        ["--prompts", "p.jsonl", "--method", "dflash", "--out", "new"],
        ["--suite", "--prompts", "--score", "--data", "--limit", "--method", "--model", "--target", "--draft",
         "--max-new-tokens", "--temperature", "--top-k", "--top-p", "--min-p", "--thinking",
         "--seed", "--block-size", "--repeats", "--device", "--device-map",
         "--dtype", "--attention", "--audit", "--threads", "--out"],
    ),
    "verify-distribution": (
        ["--method", "ar", "--draws", "100"],
        ["--method", "--model", "--target", "--draft", "--temperature", "--top-k", "--top-p", "--min-p",
         "--repetition-penalty", "--draws", "--length", "--seed", "--device", "--dtype"],
    ),
    "compare": (["run"], ["RUN", "--by", "--against", "--compat", "--allow"]),
    "baseline": (["run", "--out", "new"], ["RUN", "--out", "--limits"]),
    "check": (["run"], ["RUN", "--baseline", "--limits", "--allow"]),
    "report": (["run"], ["RUN", "--format", "--answers", "--tokenizer", "--by", "--allow"]),
    "card": (["run"], ["RUN", "--allow"]),
    "plot": (["run", "--out", "new"], ["RUN", "--format", "--allow"]),
    "methods": (["dflash"], ["[NAME]"]),
    "inspect": (["model/dflash"], ["CHECKPOINT", "--target"]),
    "convert": (["model/dflash", "new", "--to", "speculators"], ["SRC", "--to", "--target"]),
}  # fmt: skip
CASES = [(command, option) for command, (_, options) in COMMANDS.items() for option in options]
LOADED = ("--model", "--target", "--draft", "--device")
"""Options of `run` that are looked at where the models are loaded."""
MEANT_BY_NOBODY = ["", "x" * 300, "9" * 5000, "\u0663", "\x1b[31m", "[/]", "absent\\", "\x7f/\u202e"]
"""No option takes any of them; a folder for results may have such a name all the same."""


@pytest.fixture
def here(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A prompt, a finished run and a model in the current folder; a backend that loads none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "no cache"))
    install(monkeypatch, FakeBackend())
    Path("p.jsonl").write_text('{"prompt": "Hi"}\n')
    runs.stored(Path("run"), runs.answers(4))
    shutil.copytree(model, "model")
    return tmp_path


def words(command: str, option: str, value: object) -> list[object]:
    """The command as it would work, with this option at this value; what is no option is the first argument."""
    given = list(COMMANDS[command][0])
    if not option.startswith("--"):
        return [command, value, *given[1:]]
    if option in given:
        given[given.index(option) + 1] = str(value)
        return [command, *given]
    return [command, *given, option, value]


def refused(main: Main, *asked: object) -> str:
    before = sorted(Path().rglob("*"))
    code, out, told = main(*asked)
    err = "".join(f"{line}\n" for line in readers.without_progress(told))
    assert (code, out, err.count("\n")) == (2, "", 1), (asked, out, told)
    assert err.startswith("dflash-bench: ") and err[:-1].isprintable() and len(err) < 1500
    assert sorted(Path().rglob("*")) == before
    return err


@each("command, option", CASES)
def test_a_value_that_nobody_means_is_one_line(command: str, option: str, here: Path, main: Main) -> None:
    for value in MEANT_BY_NOBODY[: 3 if option in ("--out",) else None]:
        if command == "run" and option in LOADED and value in MEANT_BY_NOBODY[3:]:
            continue  # the backend of this test loads nothing; `test_a_model_of_no_such_name` does
        refused(main, *words(command, option, value))


@each("value", MEANT_BY_NOBODY)
@each("option", LOADED)
def test_a_model_of_no_such_name(
    option: str, value: str, here: Path, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(here)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(here / "no cache"))
    draft = ["--draft", "dflash=model/dflash"] if option == "--target" else []
    refused(main, *words("run", option, f"dflash={value}" if option == "--draft" else value), *draft)


FILES = [
    ("run", "--prompts"),
    ("run", "--config"),
    ("report", "--tokenizer"),
    ("check", "--baseline"),
    ("baseline", "--limits"),
]


@pytest.mark.parametrize("kind", ["pipe", "folder", "absent", "unreadable", "deep", "digits", "bytes"])
@pytest.mark.parametrize(("command", "option"), FILES)
def test_a_file_that_is_none_is_one_line(kind: str, command: str, option: str, here: Path, main: Main) -> None:
    contents = {
        "deep": b"[" * 100_000,
        "digits": b'{"prompt": ' + b"9" * 10_000 + b"}",
        "bytes": b"\xff\xfe\0",
        "unreadable": b"",
    }
    path = here / "odd"
    if kind == "unreadable" and os.geteuid() == 0:
        pytest.skip("root reads every file")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind != "absent":
        path.write_bytes(contents[kind])
    if kind == "unreadable":
        path.chmod(0)
    html = ["-o", "page.html"] if command == "report" else []
    refused(main, *words(command, option, path), *html)


def test_rows_in_a_pipe_are_one_line(here: Path, main: Main) -> None:
    for name in ("data/gsm8k/test.jsonl", "more/gsm8k/test.parquet"):
        Path(name).parent.mkdir(parents=True)
        os.mkfifo(name)
        folder = name.split("/")[0]
        told = refused(main, "run", "--suite", "gsm8k", "--data", folder, "--method", "dflash", "--out", "new")
        assert "pipe" in told


@each(
    "command, twice",
    [
        ("run", ["--limit", "3", "--limit", "4"]),
        ("run", ["--resume", "--resume"]),
        ("run", ["--thinking", "on", "--thinking", "both"]),
        ("compare", ["--by", "turn", "--by", "turn"]),
        ("check", ["--junit", "a", "--junit", "b"]),
        ("report", ["--format", "csv", "--format", "csv"]),
        ("plot", ["-o", "a", "--out", "b"]),
        ("inspect", ["--target", "nano", "--target", "nano"]),
        ("convert", ["--to", "zlab"]),
        ("models", ["--json", "--json"]),
    ],
)
def test_an_option_that_takes_one_value_is_given_once(command: str, twice: list[str], here: Path, main: Main) -> None:
    told = refused(main, command, *COMMANDS.get(command, ([], []))[0], *twice)
    assert " times" in told


def test_an_option_that_may_be_repeated_may_be(here: Path, main: Main) -> None:
    assert main("compare", "run", "--allow", "device", "--allow", "dtype")[0] in (0, 2)
    code, _, err = main(
        "run", "--suite", "gsm8k", "--suite", "aime24", "--limit", "1", "--out", "new", "--data", "embedded"
    )
    assert (code, err) == (0, "")


@pytest.mark.parametrize("threads", [10**11, 99_999_999])
def test_more_threads_than_processors_are_one_line(threads: int, here: Path, main: Main) -> None:
    told = refused(main, "run", "--prompts", "p.jsonl", "--threads", threads, "--out", "new")
    assert f"--threads {threads} " in told


def test_a_word_that_is_not_utf8_is_one_line(here: Path, main: Main) -> None:
    told = refused(main, "run", "--prompts", "p.jsonl", "--out", "new\udcff")
    assert "'new\\udcff'" in told and "UTF-8" in told


def test_a_result_for_a_pipe_that_nobody_reads_is_one_line(here: Path, main: Main) -> None:
    os.mkfifo("pipe")
    assert refused(main, "check", "run", "--junit", "pipe").startswith("dflash-bench: cannot write pipe: ")


def test_prompts_are_scored_and_what_nothing_reads_is_told(here: Path, main: Main) -> None:
    Path("mine.jsonl").write_text('{"prompt": "1 + 6?", "reference": ["7"], "id": "a", "sourc": ["b"]}\n')
    asked = ("run", "--model", "nano", "--prompts", "mine.jsonl", "--score", "gsm8k_number", "--out", "new")
    code, out, err = main(*asked)
    assert code == 0 and err.startswith("note: mine.jsonl") and " sourc " in err and err.count("\n") == 1
    assert "per round" in out
    out = main("report", "new")[1]
    assert next(line.split()[-1] for line in out.splitlines() if line.startswith("  plain ")) == "0.0"


KNOWN = "aime_integer, choice, evaluate:FOLDER, gsm8k_number, humaneval, json_schema, livecodebench, math, "


@each(
    "asked, named",
    [
        (("--suite", "gsm8k", "--score", "math"), ("--score", "--prompts")),
        (("--prompts", "p.jsonl", "--score", "bleu"), ("'bleu'", f"{KNOWN}mbpp, mrcr, none")),
        (("--prompts", "p.jsonl", "--score", "math"), ("prompt 0", "reference")),
    ],
)
def test_a_score_needs_prompts_with_references(
    asked: tuple[str, ...], named: tuple[str, ...], here: Path, main: Main
) -> None:
    told = refused(main, "run", *asked, "--out", "new")
    assert all(name in told for name in named)
