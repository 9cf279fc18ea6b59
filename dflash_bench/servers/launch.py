"""Servers that a run starts, waits for and stops. What they print goes to a file for each."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.labels import visible
from dflash_bench.core.secrets import Arguments, Secret, hidden, of_environment
from dflash_bench.core.terminal import status
from dflash_bench.servers import supervisor
from dflash_bench.servers.address import Address
from dflash_bench.servers.address import key_of as checked_key
from dflash_bench.servers.dialects.base import Program, Serving
from dflash_bench.servers.dialects.llamacpp import LLAMACPP_PROGRAM
from dflash_bench.servers.dialects.vllm import VLLM_PROGRAM

PROGRAMS: dict[str, Program] = {one.name: one for one in (VLLM_PROGRAM, LLAMACPP_PROGRAM)}
START_TIMEOUT_S = 3600.0
"""Large weights over a slow disk, and passes that are compiled, take many minutes."""
TICK_S = 0.1
READY_TIMEOUT_S = 10.0
LONGEST_STATUS = 4096
NUM_LINES = 8
TAIL_BYTES = 1 << 15
HINTS = {
    "out of memory": "it ran out of memory: use a smaller model, or fewer methods, as all servers run at a time",
    "unrecognized arguments": "this version does not know an option: update the program",
    "invalid argument": "this version does not know an option: update the program",
}
"""By what a log says, in small letters, what to do about it."""


def named(name: str) -> Program:
    if name not in PROGRAMS:
        raise unknown("program to launch", name, list(PROGRAMS))
    return PROGRAMS[name]


def executable(program: Program, given: str | None) -> str:
    """Raises UserError if it is not there."""
    path = shutil.which(os.path.expanduser(given or program.executable))
    if path is None:
        missing = "is no program that can be run" if given else "is not on the PATH"
        raise UserError(f"--launch {program.name}: {given or program.executable} {missing}; give --launch-with PATH")
    return os.path.abspath(path)


def key_of(program: Program, given: Arguments | None, variables: Mapping[str, str]) -> Secret | None:
    """What such a server will want as its key. Raises UserError for what is none."""
    if given is not None and (key := given.value_of("--api-key")) is not None:
        return checked_key(key.reveal(), "--launch-args: --api-key")
    key_text = variables.get(program.key_variable, "")
    return checked_key(key_text, f"the variable {program.key_variable}") if key_text else None


class Launched:
    """The servers of one run, until they are stopped; `folder` gets a log for each, without secrets."""

    def __init__(self, program: Program, path: str, more: Arguments, folder: Path) -> None:
        self.program, self.path, self.more, self.folder = program, path, more, folder
        self.secrets = (*more.secrets, *of_environment(os.environ))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, servings: Sequence[Serving]) -> list[Address]:
        """One after the other, as each looks how much memory is free. Raises UserError for one that does not start."""
        self.folder.mkdir(parents=True, exist_ok=True)
        addresses = []
        with status() as tell:
            for serving in servings:
                port = _free_port()
                self._begin(serving, port)
                self._wait(serving.method.label, port, tell)
                # The port is another one each time, so it is no part of what a run is resumed under.
                url = f"http://127.0.0.1:{port}"
                addresses.append(Address(serving.method, url, shown=f"launched: {self.program.name}"))
        return addresses

    def _begin(self, serving: Serving, port: int) -> None:
        words = Arguments([self.path, *self.program.words(serving, port), *self.more.reveal()])
        forms = sorted({form for secret in self.secrets for form in secret.forms})
        with self._log(serving.method.label).open("wb") as log:
            log.write(f"{hidden(str(words), self.secrets)}\n".encode())
            log.flush()
            self.processes[serving.method.label] = subprocess.Popen(
                [sys.executable, "-I", supervisor.__file__, *words.reveal()], stdin=subprocess.PIPE, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, supervisor.TO_HIDE: json.dumps(forms)},
            )  # fmt: skip

    def _wait(self, label: str, port: int, tell: Callable[[str], None]) -> None:
        begin_s = time.monotonic()
        while not _is_ready(port):
            waited_s = time.monotonic() - begin_s
            if self.processes[label].poll() is not None:
                raise UserError(f"{self.program.name} for {label} did not start; {self._ending(label)}")
            if waited_s > START_TIMEOUT_S:
                raise UserError(
                    f"{self.program.name} for {label} was not ready in {waited_s:.0f} s; {self._last(label)}"
                )
            if waited_s > 2:
                tell(f"{self.program.name} for {label} is starting, {waited_s:.0f} s")
            time.sleep(TICK_S)

    def _log(self, label: str) -> Path:
        return self.folder / f"{label}.log"

    def move(self, folder: Path) -> None:
        """The logs, which go on being written."""
        os.replace(self.folder, folder)
        self.folder = folder

    def died(self) -> list[str]:
        """For each server that has ended by itself: what is known of it."""
        return [
            f"{self.program.name} for {label} died; {self._ending(label)}"
            for label, process in self.processes.items()
            if process.poll() is not None
        ]

    def _ending(self, label: str) -> str:
        code = self.processes[label].returncode
        how = f"killed by signal {code - 128}" if code > 128 else f"exit status {code}"
        return f"{how}; {self._last(label)}"

    def _last(self, label: str) -> str:
        """The end of its log, and what to do if that says so."""
        path = self._log(label)
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
        lines = [visible(line) for line in text.splitlines()[-NUM_LINES:] if line.strip()]
        hints = [hint for said, hint in HINTS.items() if said in text.lower()]
        return "; ".join([*hints[:1], f"{path} ends with: {' | '.join(lines)}"])

    def stop(self) -> None:
        """All of them, with whatever they have started."""
        for process in self.processes.values():
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes.values():
            try:
                process.wait(3 * supervisor.GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.processes = {}


def _is_ready(port: int) -> bool:
    """Both answer /health with 200 once the model is loaded. Of the answer only its first line is read."""
    end_s = time.monotonic() + READY_TIMEOUT_S
    said = b""
    try:
        with socket.create_connection(("127.0.0.1", port), READY_TIMEOUT_S) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            while b"\n" not in said and len(said) < LONGEST_STATUS and (left_s := end_s - time.monotonic()) > 0:
                connection.settimeout(left_s)
                piece = connection.recv(LONGEST_STATUS)
                if not piece:
                    break
                said += piece
    except OSError:
        return False
    return re.match(rb"HTTP/1\.[01] 200\b", said) is not None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
