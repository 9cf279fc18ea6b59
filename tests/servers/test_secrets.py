"""After a run with each kind of secret, its text is nowhere: not under the run's folder, nor in what is printed."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_bench.core.secrets import Arguments, Secret, command, hidden, of_environment
from dflash_bench.servers import launch, supervisor
from helpers.each import each
from helpers.servers.fake_server import FakeServer
from helpers.servers.fake_words import text_of

Main = Callable[..., tuple[int, str, str]]
SECRET = "hunter2-very-secret"
PROGRAM = Path(__file__).parents[1] / "helpers/servers/fake_program.py"


def test_a_secret_prints_as_stars_and_is_stored_nowhere() -> None:
    secret = Secret(SECRET)
    for text in (str(secret), repr(secret), f"{secret}", f"{[secret]}"):
        assert SECRET not in text
    assert copy.deepcopy(secret).reveal() == SECRET
    with pytest.raises(TypeError):
        pickle.dumps(secret)
    with pytest.raises(TypeError):
        json.dumps(secret)


WORDS = [
    ["--api-key", SECRET],
    [f"--api-key={SECRET}"],
    ["--api-key", "other", SECRET],
    ["--hf-token", SECRET],
    ["--admin-api-key", SECRET],
    ["--ssl-keyfile-password", SECRET],
    ["--header", f"Authorization: Bearer {SECRET}"],
    ["--header", f"X-Api-Key: {SECRET}"],
    ["--config", json.dumps({"a": {"api_key": SECRET}})],
    ["--server", f"plain=http://me:{SECRET}@host:8000/v1"],
    ["--server", f"plain=http://{SECRET}@host"],
    ["--server", f"plain=http://host/v1?a=b&token={SECRET}"],
    ["--env", f"HF_TOKEN={SECRET}"],
    ["--launch-args", f"--a b --api-key {SECRET} --c d"],
    ["--launch-args", f"--api-key '{SECRET}"],
    [f"--launch-args=--api-key={SECRET}"],
    ["-k", SECRET],
    [f"-k={SECRET}"],
    ["--launch-args", f"--a b -k {SECRET} -c d"],
]


@each("words", WORDS)
def test_words_of_a_command_are_shown_without_secrets(words: list[str]) -> None:
    given = Arguments(["run", "--suite", "gsm8k", *words, "--limit", "3"])
    for text in (str(given), repr(given), command(given.reveal()), f"{given.shown}"):
        assert SECRET not in text
        assert "gsm8k" in text and "limit" in text
    assert given.reveal()[3:-2] == words
    assert any(SECRET in secret.reveal() for secret in given.secrets)


def test_words_that_only_look_like_secrets_are_shown() -> None:
    words = shlex.split(
        "run --max-new-tokens 24 --tokenizer x --api-key-env NAME --mask-token '<mask>' --cache-type-k f32 --seed 3 "
        "--max-num-batched-tokens 8192 --server plain=http://host:8000/v1 --num-speculative-tokens 15 --limit -1 "
        """--speculative-config '{"method": "dflash", "num_speculative_tokens": 15}' --ssl-keyfile /k.pem"""
    )
    assert command(words) == f"dflash-bench {shlex.join(words)}"
    assert Arguments(words).secrets == ()


def test_a_secret_is_found_however_it_is_written() -> None:
    secret = Secret('a"b\\c/d e')
    for text in (secret.reveal(), json.dumps(secret.reveal()), repr(secret.reveal()), "a%22b%5Cc/d%20e"):
        assert secret.reveal() not in hidden(text, [secret]) and "***" in hidden(text, [secret])
    assert hidden("ab", [Secret("")]) == "ab"
    found = of_environment(
        {"HF_TOKEN": SECRET, "PATH": "/bin:/usr/bin", "PWD": "/bin:/usr/bin", "HTTPS_PROXY": f"http://me:{SECRET}@p:1"}
    )
    assert SECRET in {one.reveal() for one in found}
    assert hidden(f"at {SECRET} in /bin:/usr/bin", found) == "at *** in /bin:/usr/bin"


def nowhere(*texts: str) -> None:
    """Nor in any file here, whole or as a part of another."""
    for text in texts:
        assert SECRET not in text
    files = [path for path in Path().rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path


@pytest.mark.parametrize("fault", ["", "401", "text", "error_event"])
def test_a_key_of_a_server_that_repeats_it_is_nowhere(main: Main, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setenv("KEY_OF_TEST", SECRET)
    Path("p.jsonl").write_text("".join(json.dumps({"prompt": f"What is {n} times 7?"}) + "\n" for n in range(2)))
    does: dict[str, Any] = {"key": SECRET, "models": (f"model {SECRET}",) if fault == "" else ("m",)}
    if fault == "401":
        does["key"] = "another"
    if fault == "text":
        does["text"] = lambda piece: text_of(piece) + f" {SECRET}"
    if fault == "error_event":
        event = {"error": {"message": f"no, {SECRET}"}}
        does["between"] = b"data: " + json.dumps(event).encode() + b"\n\n"
    with FakeServer(dialect="openai", **does) as server:
        code, out, err = main(
            "run",
            "--server",
            f"plain={server.url}",
            "--prompts",
            "p.jsonl",
            "--api-key-env",
            "KEY_OF_TEST",
            "--max-new-tokens",
            32,
            "--out",
            "run",
        )
    assert code == {"": 0, "401": 2, "text": 0, "error_event": 1}[fault], err
    nowhere(out, err)
    if fault != "401":
        for kind in ("markdown", "html"):
            _, out, err = main("report", "run", *(("--format", kind) if kind == "markdown" else ("-o", "p.html")))
            nowhere(out, err)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    def make(**does: Any) -> Path:
        path = tmp_path.parent / f"{tmp_path.name}-fake"
        path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(PROGRAM))} "$@"\n')
        path.chmod(0o755)
        monkeypatch.setenv("FAKE_PROGRAM", json.dumps(does))
        return path

    return make


@pytest.mark.parametrize("exits", [None, 3])
def test_secrets_of_launched_servers_are_nowhere(
    main: Main, program: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, exits: int | None
) -> None:
    """It prints its words and its variables, and its answers are none of the target's."""
    monkeypatch.setenv("HF_TOKEN", f"hf-{SECRET}")
    monkeypatch.setenv("LLAMA_API_KEY", SECRET)
    code, out, err = main(
        *"run --suite gsm8k --model nano --limit 1 --max-new-tokens 8".split(),
        "--launch",
        "llama.cpp",
        "--launch-with",
        program(exits=exits),
        "--launch-args",
        f"--api-key {SECRET} -k {SECRET} --more 7",
        "--out",
        "run",
        "--method",
        "dflash:3",
    )
    assert code == (1 if exits is None else 2), err
    nowhere(out, err)
    if exits is None:
        info = json.loads(Path("run/run.json").read_text())
        assert info["options"]["launch_args"] == "--api-key *** -k *** --more 7"
        assert "--api-key *** -k *** --more 7" in info["command"]
        log = next(Path("run").glob("servers-*/ar.log")).read_text()
        assert "args:" in log and "--more" in log and log.count("***") >= 4
        _, out, err = main("report", "run", "-o", "page.html")
        nowhere(out, err)


def test_a_launched_server_is_sent_the_key_that_it_wants() -> None:
    llamacpp, vllm = launch.program_named("llama.cpp"), launch.program_named("vllm")
    given = Arguments(["--api-key", SECRET])
    assert launch.key_of(vllm, given, {"VLLM_API_KEY": "other"}) == Secret(SECRET)
    assert launch.key_of(vllm, Arguments([f"--api-key={SECRET}"]), {}) == Secret(SECRET)
    assert launch.key_of(vllm, None, {"VLLM_API_KEY": "other"}) == Secret("other")
    assert launch.key_of(llamacpp, None, {"VLLM_API_KEY": "other"}) is None


def kept(code: str, secrets: list[str], log: Path) -> bytes:
    """The keeper's log of a program."""
    with log.open("wb") as file:
        file.write(b"the command\n")
        file.flush()
        process = subprocess.Popen(
            [sys.executable, "-I", supervisor.__file__, sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=file,
            start_new_session=True,
            env={**os.environ, supervisor.TO_HIDE: json.dumps(secrets)},
        )
        assert process.wait(60) == 0
    return log.read_bytes()


def test_logs_hold_no_secret_that_is_written_in_pieces_and_programs_do_not_get_the_list(tmp_path: Path) -> None:
    code = (
        "import os, sys, time\n"
        f"for letter in 'see {SECRET} and {SECRET[:7]}':\n    os.write(1, letter.encode()); time.sleep(0.002)\n"
        f"os.write(2, b' err {SECRET}{SECRET} '"
        f" + str('{supervisor.TO_HIDE}' in os.environ).encode() + b' {SECRET[:5]}')\n"
    )
    log = kept(code, [SECRET], tmp_path / "log")
    assert log == f"the command\nsee *** and {SECRET[:7]} err ****** False {SECRET[:5]}".encode()


def test_a_log_without_end_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    code = (
        "import os\nfor n in range(700):\n    os.write(1, b'%06d ' % n + b'x' * 65536 + b'\\n')\nos.write(1, b'dead')"
    )
    log = kept(code, [], tmp_path / "log")
    assert len(log) <= supervisor.LONGEST + supervisor.PIECE
    assert log.startswith(b"the command\n000000 x") and log.endswith(b"x\ndead")
    assert log.count(b"bytes are left out ...]") == 1
