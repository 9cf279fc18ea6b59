"""Start the servers of a run, wait for them and stop them. Their output goes to log files."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dflash_bench.core import environment
from dflash_bench.core.dialects import DIALECTS, LaunchSpec, Program
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.labels import visible
from dflash_bench.core.methods import shown
from dflash_bench.core.secrets import Arguments, Secret, hidden, of_environment
from dflash_bench.core.terminal import status
from dflash_bench.servers import supervisor
from dflash_bench.servers.address import Address
from dflash_bench.servers.address import key_of as checked_key

START_TIMEOUT_S = 3600.0
"""Loading large weights from a slow disk and compiling take many minutes."""
TICK_S = 0.1
READY_TIMEOUT_S = 10.0
LONGEST_STATUS = 4096
NUM_LINES = 8
TAIL_BYTES = 1 << 15
HINTS = {
    "out of memory": "it ran out of memory: use a smaller model, or fewer methods, as all servers run at once",
    "unrecognized arguments": "this version does not know an option: update the program",
    "invalid argument": "this version does not know an option: update the program",
}
"""Remedies by a text in the log (lower case)."""


def programs() -> Iterator[Program]:
    """Yield built-in programs first, so that a broken plug-in affects only its users."""
    return (dialect.program for dialect in DIALECTS.values() if dialect.program is not None)


def program_named(name: str) -> Program:
    """Return the program of this name. Raises UserError for an unknown name."""
    known = []
    for program in programs():
        known.append(program.name)
        if program.name == name:
            return program
    raise unknown("program to launch", name, known)


@dataclass(frozen=True, slots=True)
class ServerFlags:
    """The arguments that make a program draft, in addition to those for plain decoding."""

    program: str
    words: tuple[str, ...]
    first: tuple[str, ...] = ()
    """Arguments of the preceding `dflash-bench` command that converts the draft to the program's format."""


def added_by_draft(program: Program, plain: LaunchSpec, drafting: LaunchSpec) -> ServerFlags:
    """Return the arguments of `drafting` that `plain`, of the same target, lacks, without those for counting."""
    given, own = ([str(word) for word in program.argv(spec, 0)] for spec in (plain, drafting))
    own = own[: len(own) - len(program.counting)] if own[-len(program.counting) :] == [*program.counting] else own
    assert own[: len(given)] == given, f"{program.name} is told how to draft in the middle"
    return ServerFlags(program.name, tuple(own[len(given) :]))


def flags_of(
    program: Program, plain: LaunchSpec, drafting: LaunchSpec, reference: str | None, target: str
) -> ServerFlags:
    """Return the arguments of `drafting` with the draft at `reference`, after the command that converts it, if any.

    The converted draft has the name under which `convert` writes it into the current folder.
    """
    if reference is None or program.draft_format is None:
        return added_by_draft(program, plain, replace(drafting, draft=reference))
    bare = reference.partition("@")[0].rstrip("/").rpartition("/")[2]
    written = f"{bare}.gguf" if program.wants_gguf else f"{bare}-{program.draft_format}"
    flags = added_by_draft(program, plain, replace(drafting, draft=written))
    return replace(flags, first=("convert", reference, written, "--to", program.draft_format, "--target", target))


def executable(program: Program, given: str | None) -> str:
    """Return the path of the program. Raises UserError if it is missing."""
    path = shutil.which(os.path.expanduser(given or program.executable))
    if path is None:
        missing = "is not an executable file" if given else "is not on the PATH"
        raise UserError(f"--launch {program.name}: {given or program.executable} {missing}; give --launch-with PATH")
    return os.path.abspath(path)


def key_of(program: Program, given: Arguments | None, variables: Mapping[str, str]) -> Secret | None:
    """Return the API key that a launched server will require. Raises UserError for an invalid key."""
    if given is not None and (key := given.value_of(program.key_option)) is not None:
        return checked_key(key.reveal(), f"--launch-args: {program.key_option}")
    key_text = variables.get(program.key_variable, "")
    return checked_key(key_text, f"the variable {program.key_variable}") if key_text else None


class LaunchedServers:
    """The running servers of a run, with their logs in `folder`, free of secrets."""

    def __init__(self, program: Program, path: str, more: Arguments, folder: Path) -> None:
        self.program, self.path, self.more, self.folder = program, path, more, folder
        self.secrets = (*more.secrets, *of_environment(os.environ))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.specs: dict[str, LaunchSpec] = {}
        self.free_bytes: int | None = None
        """The machine's free memory before the first server was started."""

    def __enter__(self) -> LaunchedServers:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, specs: Sequence[LaunchSpec]) -> list[Address]:
        """Start servers one after the other, as they measure the free memory. Raises UserError if one fails."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.free_bytes = environment.free_bytes()
        addresses = []
        with status() as tell:
            for spec in specs:
                port = _free_port()
                self._begin(spec, port)
                self._wait(spec.method.label, port, tell)
                # The port changes each time, so it is not part of the run's identity.
                url = f"http://127.0.0.1:{port}"
                addresses.append(Address(spec.method, url, f"launched: {self.program.name}", spec.rates))
        return addresses

    def memory(self) -> dict[str, Any]:
        """Return the machine's free bytes, and by method each server's peak resident bytes and its context in tokens.
        Ended servers are left out, and on systems other than Linux all of them."""
        found = {
            label: {"tokens": self.specs[label].length * self.specs[label].slots, "bytes": taken}
            for label, process in self.processes.items()
            if (taken := sum(_resident(one, "VmHWM") for one in _descendants(process.pid)))
        }
        return {"free_bytes": self.free_bytes, "servers": found}

    def _begin(self, spec: LaunchSpec, port: int) -> None:
        self.specs[spec.method.label] = spec
        argv = Arguments([self.path, *self.program.argv(spec, port), *self.more.reveal()])
        forms = sorted({form for secret in self.secrets for form in secret.forms})
        with self._log(spec.method.label).open("wb") as log:
            log.write(f"{hidden(str(argv), self.secrets)}\n".encode())
            log.flush()
            self.processes[spec.method.label] = subprocess.Popen(
                [sys.executable, "-I", supervisor.__file__, *argv.reveal()],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, supervisor.TO_HIDE: json.dumps(forms)},
            )

    def _wait(self, label: str, port: int, tell: Callable[[str], None]) -> None:
        begin_s = time.monotonic()
        while not _is_ready(port):
            waited_s = time.monotonic() - begin_s
            if self.processes[label].poll() is not None:
                raise UserError(f"{self.program.name} for {shown(label)} did not start; {self._ending(label)}")
            if waited_s > START_TIMEOUT_S:
                raise UserError(
                    f"{self.program.name} for {shown(label)} was not ready in {waited_s:.0f} s; {self._last(label)}"
                )
            if waited_s > 2:
                tell(f"{self.program.name} for {shown(label)} is starting, {waited_s:.0f} s")
            time.sleep(TICK_S)

    def _log(self, label: str) -> Path:
        # The label may contain a file name.
        return self.folder / f"{quote(label, safe=':,=@+')}.log"

    def move(self, folder: Path) -> None:
        """Move the logs while they are still being written."""
        os.replace(self.folder, folder)
        self.folder = folder

    def keep_logs(self, folder: Path) -> None:
        """Move logs into the run's folder, beside those of earlier processes of the run."""
        names = (f"servers-{number}" for number in range(1, 1_000_000))
        self.move(next(place for name in names if not (place := folder / name).exists()))

    def died(self) -> list[str]:
        """Return an explanation for each server that ended by itself."""
        return [
            f"{self.program.name} for {shown(label)} died; {self._ending(label)}"
            for label, process in self.processes.items()
            if process.poll() is not None
        ]

    def _ending(self, label: str) -> str:
        code = self.processes[label].returncode
        how = f"killed by signal {code - 128}" if code > 128 else f"exit status {code}"
        return f"{how}; {self._last(label)}"

    def _last(self, label: str) -> str:
        """Return the end of a server's log, after the remedy if one is known."""
        path = self._log(label)
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
        lines = [visible(line) for line in text.splitlines()[-NUM_LINES:] if line.strip()]
        hints = [hint for pattern, hint in HINTS.items() if pattern in text.lower()]
        return "; ".join([*hints[:1], f"{path} ends with: {' | '.join(lines)}"])

    def stop(self) -> None:
        """Stop all servers and their child processes."""
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


def _descendants(process: int) -> Iterator[int]:
    """Yield all descendants of a process."""
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, path.read_text().split()):
                yield child
                yield from _descendants(child)


def _resident(process: int, which: str) -> int:
    """Return the resident bytes of a process, VmRSS now or VmHWM at their peak; 0 if unknown."""
    with suppress(OSError):
        match = re.search(rf"^{which}:\s*(\d+) kB$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
        return int(match[1]) * 1024 if match else 0
    return 0


def resident_bytes(process: int) -> int:
    """Return the resident bytes of a process and its descendants; 0 if unknown."""
    return sum(_resident(one, "VmRSS") for one in (process, *_descendants(process)))


def _is_ready(port: int) -> bool:
    """Return whether /health responds with 200, as it does once the model is loaded. Only the status line is read."""
    end_s = time.monotonic() + READY_TIMEOUT_S
    received = b""
    try:
        with socket.create_connection(("127.0.0.1", port), READY_TIMEOUT_S) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            while b"\n" not in received and len(received) < LONGEST_STATUS and (left_s := end_s - time.monotonic()) > 0:
                connection.settimeout(left_s)
                piece = connection.recv(LONGEST_STATUS)
                if not piece:
                    break
                received += piece
    except OSError:
        return False
    return re.match(rb"HTTP/1\.[01] 200\b", received) is not None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
