"""The outer net: what others' files, disks and memory bring about is one line and exit status 2; bugs stay bugs."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_bench import cli
from dflash_bench.cli import net
from dflash_bench.core import terminal
from dflash_bench.core.errors import UserError
from dflash_bench.models import catalogue
from dflash_bench.training import prompts
from helpers import readers, runs
from helpers.each import each
from helpers.forked import forked
from helpers.refusals import assert_refused

Main = Callable[..., tuple[int, str, str]]


def one_line(main: Main, *words: object) -> str:
    told = main(*words)
    assert_refused(told)
    assert len(told[2]) < 1500
    return told[2]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    runs.stored(tmp_path / "run", runs.answers(4))
    return tmp_path / "run"


# Failures from outside.

MEMORY = {
    "Python's own": MemoryError(),
    "of the system": OSError(errno.ENOMEM, "Cannot allocate memory"),
    "a thread": RuntimeError("can't start new thread"),
    "torch's": RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
    "of a GPU": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    "of its library": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "a library": ImportError("libtorch_cpu.so: failed to map segment from shared object"),
}


@each("kind", MEMORY)
def test_memory_that_is_refused_is_one_line(kind: str, main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise MEMORY[kind]

    monkeypatch.setattr("dflash_bench.models.catalogue.machine", refuse)
    told = one_line(main, "models")
    assert "out of memory (" in told and ("nvidia-smi" in told) == ("CUDA" in str(MEMORY[kind]))


def test_memory_that_brought_another_error_about_is_found() -> None:
    try:
        try:
            raise MemoryError
        except MemoryError as cause:
            raise ImportError("Error importing numpy") from cause
    except ImportError as error:
        assert net.explain(error) is not None


@each("number", [errno.ENOSPC, errno.EACCES, errno.EIO, errno.EROFS, errno.EMFILE])
def test_a_disk_that_fails_is_one_line(number: int, main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(number, os.strerror(number), "/data/\x1b[31mfile")

    monkeypatch.setattr("dflash_bench.models.catalogue.machine", fail)
    assert one_line(main, "models") == f"dflash-bench: /data/\\u001b[31mfile: {os.strerror(number)}\n"


BUGS = {
    "a plain one": ValueError("a bug"),
    "of torch": RuntimeError("The size of tensor a (2) must match the size of tensor b (0)"),
    "an import": ImportError("cannot import name 'x' from 'dflash_bench.y'"),
    "a file of ours": FileNotFoundError(errno.ENOENT, "No such file", str(net.PACKAGE / "suites.toml")),
    "no error of the system's": OSError("what a library makes up"),
}


@each("kind", BUGS)
def test_a_bug_keeps_its_traceback(kind: str, main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise BUGS[kind]

    monkeypatch.setattr("dflash_bench.models.catalogue.machine", fail)
    with pytest.raises(type(BUGS[kind])):
        main("models")


@pytest.mark.skipif(sys.platform != "linux", reason="ulimit -v is Linux's")
@each("words", [["report", "run"], ["methods"], ["run", "--prompts", "p.jsonl", "--out", "new"]])
@each("megabytes", (200, 1000))
def test_a_shell_that_allows_little_memory_is_told_so(
    megabytes: int, words: list[str], run: Path, tmp_path: Path
) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "Hi"}\n')
    limit = megabytes * 10**6
    done = subprocess.run(
        [sys.executable, "-m", "dflash_bench.cli", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        check=False,
    )
    assert "Traceback" not in done.stderr
    if done.returncode:
        assert (done.returncode, len(readers.without_progress(done.stderr))) == (2, 1), done.stderr
        assert "memory" in done.stderr or "map segment" in done.stderr


# Output of libraries.


def test_what_libraries_log_and_warn_of_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    factory, formatted = logging.getLogRecordFactory(), warnings.formatwarning
    try:
        terminal.prepare()
        for name in ("transformers", "datasets", "huggingface_hub", "httpx", "torch"):
            record = logging.getLogger(name).makeRecord(name, 30, "f", 1, "rope_type=%s", ("\x1b[31m\u202e",), None)
            assert record.getMessage() == "rope_type=\\u001b[31m\\u202e"
        shown = warnings.formatwarning(UserWarning("\x1b[2J"), UserWarning, "a.py", 1)
        assert "\x1b" not in shown and "\\u001b[2J" in shown
    finally:
        logging.setLogRecordFactory(factory)
        warnings.formatwarning = formatted


def test_an_escape_in_a_rope_type_does_not_reach_the_terminal(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "m")
    edit(tmp_path / "m/target/config.json", rope_parameters={"rope_type": "\x1b[31mred", "rope_theta": 1e4})

    def inspect() -> None:
        os.chdir(tmp_path)
        sys.argv = ["dflash-bench", "inspect", "m/dflash", "--target", "m/target"]
        cli.main()

    done = forked(inspect)
    assert done.returncode == 0 and "\x1b" not in done.stderr + done.stdout


# Eleven tracebacks, and what hung.


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@each(
    "changes, named",
    [
        ({"seconds": {"1x": 0.1}}, "forwards.seconds.1x is '1x'"),
        ({"seconds": {}}, "forwards.seconds "),
        ({"seconds": {"1": 0}}, "forwards.seconds.1 is 0"),
        ({"seconds": {"1": 0.1}, "bandwidth": 0}, "forwards.bandwidth is 0"),
    ],
)
def test_a_width_in_run_json_that_is_none_is_one_line(
    changes: dict[str, Any], named: str, main: Main, run: Path
) -> None:
    size = {"weight_bytes": 1, "matrix_elements": 1, "attention": []}
    forwards = {"rows": 1, "context": 1, "bandwidth": 1.0, "products": 1.0, "size": size}
    edit(run / "run.json", forwards={**forwards, **changes})
    assert named in one_line(main, "report", run)


TARGETS: dict[str, tuple[dict[str, Any], str]] = {
    "heads of less than nothing": ({"head_dim": -8}, "head_dim in its config.json cannot be -8"),
    "heads of a word": ({"head_dim": "8"}, "head_dim"),
    "a context of three": ({"max_position_embeddings": 3}, "max_position_embeddings in its config.json is 3"),
    "sliding layers without a window": (
        {"layer_types": ["sliding_attention"] * 4, "use_sliding_window": True, "sliding_window": None},
        "sliding_window cannot be None",
    ),
    "sliding layers with a window of 0": (
        {"layer_types": ["sliding_attention"] * 4, "use_sliding_window": True, "sliding_window": 0},
        "sliding_window",
    ),
    "too few types of layers": ({"layer_types": ["full_attention"]}, "layer"),
    "heads that do not add up": ({"num_key_value_heads": 3}, "do not add up"),
    "a huge layer": ({"intermediate_size": 10**9}, "intermediate_size in its config.json cannot be 1000000000"),
}


@each("command", ["run", "inspect", "doctor", "profile", "convert"])
@each("kind", TARGETS)
def test_a_target_that_describes_no_network_is_one_line(
    kind: str, command: str, model: Path, main: Main, tmp_path: Path
) -> None:
    changes, said = TARGETS[kind]
    shutil.copytree(model, tmp_path / "m")
    edit(tmp_path / "m/target/config.json", **changes)
    (tmp_path / "p.jsonl").write_text('{"prompt": "Hi"}\n')
    words = {
        "run": ["--prompts", "p.jsonl", "--model", "m", "--max-new-tokens", "2", "--out", "new"],
        "inspect": ["m/dflash", "--target", "m/target"],
        "doctor": ["--model", "m"],
        "profile": ["--model", "m"],
        "convert": ["m/target", "new.gguf", "--to", "gguf"],
    }[command]
    code, out, err = main(command, *words)
    assert (code, out) == (2, "") and said in err
    assert not (tmp_path / "new").exists() and not (tmp_path / "new.gguf").exists()


TRAININGS = {
    "epochs without end": (["--epochs", "inf"], "--epochs takes at most"),
    "no number of epochs": (["--epochs", "nan"], "--epochs"),
    "an endless rate": (["--rate", "inf", "--estimate"], "--rate takes at most"),
    "a rate of nothing": (["--rate", "0"], "--rate"),
    "endless steps": (["--steps", str(10**30)], "--steps takes at most"),
    "endless prompts": (["--written", str(10**15)], "--written takes at most"),
    "endless ones that it makes up": (["--invented", str(10**15)], "--invented takes at most"),
    "an endless disk": (["--max-disk", "inf"], "--max-disk takes at most"),
    "all processors": (["--threads", "100000"], "--threads 100000 "),
    "a batch of everything": (["--batch-size", str(10**12)], "--batch-size takes at most"),
    "a seed without end": (["--seed", "9" * 40], "--seed takes at most"),
}


@each("kind", TRAININGS)
def test_a_training_without_end_is_refused_before_anything_is_loaded(kind: str, main: Main) -> None:
    words, said = TRAININGS[kind]
    written = [] if "--written" in words else ["--written", "2"]
    assert said in one_line(main, "train", "--target", "nano", "--out", "new", *written, *words)
    assert not Path("new").exists()


def test_prompts_that_are_all_written_end_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = {"forms": {"chat": ["Say {topic}."]}, "gaps": {"topic": ["yes", "no"]}}
    monkeypatch.setattr(prompts, "_texts", lambda: forms)
    with pytest.raises(UserError, match=r"about 2 .*chat.*--written"):
        list(prompts.from_templates("chat", 3))


@each(
    "rows, named",
    [("", "absent"), ("notes.txt", "against"), ("gsm8/test.jsonl", "gsm8,"), ("gsm8k/train.jsonl", "gsm8k ")],
)
def test_a_training_is_guarded_by_suites_that_are_there(rows: str, named: str, main: Main, tmp_path: Path) -> None:
    if rows:
        (tmp_path / "against" / rows).parent.mkdir(parents=True)
        (tmp_path / "against" / rows).write_text("{}\n")
    words = ("--target", "nano", "--out", "new", "--written", "2", "--against", "against" if rows else "absent")
    assert_refused(main("train", *words), named, "known: ")


@each("acceptance", ["nan", "inf", "-inf", "0.5"])
def test_an_acceptance_that_is_no_number_is_one_line(acceptance: str, main: Main) -> None:
    assert "al.pooled" in one_line(main, "profile", "--acceptance", acceptance)


def test_a_pipe_as_a_part_is_damage_and_never_waited_for(main: Main, run: Path) -> None:
    part = next(run.glob("part-*.parquet"))
    part.unlink()
    os.mkfifo(part)
    for words in (["report", run], ["card", run], ["check", run], ["compare", run], ["plot", run]):
        assert "a pipe" in one_line(main, *words)


def test_a_pipe_as_the_prompts_of_a_run_is_never_waited_for(main: Main, run: Path) -> None:
    (run / "prompts.parquet").unlink(missing_ok=True)
    os.mkfifo(run / "prompts.parquet")
    assert "a pipe" in one_line(main, "report", run, "-o", "page.html")


OUTPUTS = {
    "page": ["report", "run", "-o"],
    "junit": ["check", "run", "--junit"],
    "summary": ["check", "run", "--summary"],
    "benchmark": ["check", "run", "--benchmark"],
    "baseline": ["baseline", "run", "--out"],
}


@each("kind", ["a pipe", "a folder", "a device"])
@each("command", OUTPUTS)
def test_what_is_no_file_is_not_written_to(command: str, kind: str, main: Main, run: Path, tmp_path: Path) -> None:
    place = tmp_path / "place.html"
    if kind == "a pipe":
        os.mkfifo(place)
    elif kind == "a folder":
        place.mkdir()
    else:
        place.symlink_to("/dev/null")
    assert f"cannot write {place}: it is {kind}, not a file" in one_line(main, *OUTPUTS[command], place)


def test_a_pipe_as_a_plot_is_not_waited_for(main: Main, run: Path, tmp_path: Path) -> None:
    (tmp_path / "plots").mkdir()
    os.mkfifo(tmp_path / "plots/acceptance.png")
    assert "acceptance.png: it is a pipe" in main("plot", run, "--out", "plots")[2]


def test_nothing_is_downloaded_for_a_folder_that_cannot_be_written(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "_downloaded", lambda *_: pytest.fail("downloaded"))
    (tmp_path / "file").write_text("")
    assert "nothing was downloaded" in one_line(main, "fetch", "smollm2", "--cache", tmp_path / "file")


def test_the_entry_point_is_the_nets() -> None:
    assert cli.net is net


# Readers that go away, and signals.


def outcome(words: list[str], shell: str = "") -> tuple[int, str]:
    """Its own exit status, and what it said on stderr; `shell` says where its output goes."""
    line = f"{shlex.join([sys.executable, '-m', 'dflash_bench.cli', *words])} {shell}"
    done = subprocess.run(
        ["bash", "-c", f"{line}; exit ${{PIPESTATUS[0]}}"], stderr=subprocess.PIPE, text=True, check=False
    )
    return done.returncode, done.stderr


def test_a_reader_who_goes_away_changes_no_verdict(run: Path) -> None:
    """A run of a model that is not on this disk, so that no tokenizer is loaded."""
    rows = runs.changed(runs.answers(4), exactness="mismatch", first=1)
    wrong = ["check", str(runs.stored(run.parent / "wrong", rows, model="absent")), "--all"]
    gone = (">&-", "| true", "<&- >&- 2>&-", "2>&1 | true", "2>&-")
    assert {shell: outcome(["methods"], shell) for shell in gone} == dict.fromkeys(gone, (0, ""))
    assert outcome(wrong, "| true") == (1, "")
    assert outcome(["report", str(run), "--full"], "| head -c 1 >/dev/null") == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_under_stdout_is_one_line(run: Path) -> None:
    status, said = outcome(["report", str(run)], ">/dev/full")
    assert status == 2 and said.count("\n") == 1 and "No space left on device" in said


def test_a_process_that_ends_while_it_is_written_to_is_named(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    monkeypatch.setattr("dflash_bench.models.catalogue.machine", fail)
    one_line(main, "models")


@each("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_every_command_that_a_signal_ends_says_so(
    number: signal.Signals, status: int, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_bench.models.catalogue.machine", lambda: os.kill(os.getpid(), number))
    assert main("models") == (status, "", "stopped\n")


def test_a_command_in_the_background_of_a_shell_ends_on_sigterm(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_bench.models.catalogue.machine", lambda: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert main("models") == (143, "", "stopped\n")
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_that_is_ignored_stays_ignored(main: Main) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert main("methods")[0] == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
