"""Runs model-written Python in a sandbox, and its tests in another sandbox.

The answer's program and the tests are two processes. The tests call the answer's functions through a pipe and get plain
values back, rebuilt from exact built-in types (`isolation.protocol`), so that the verdict is reached in a process
without the answer's program. A returned value that cannot be passed this way is rejected, and the answer fails.

Each of the two has a *supervisor* (`isolation.supervisor`), which builds a sandbox and enforces time limits, and a
*runner* forked from it (`isolation.child`), which executes the program. The kernel enforces the sandbox; where it
cannot, nothing is run. The layers:

- a system call filter (seccomp), always: no second process, no other program, no socket, no signal to others;
- namespaces, if granted: an empty network, no other processes, no files except read-only libraries and a small
  temporary folder in memory;
- Landlock, from Linux 5.13: no files except the libraries, to read, and that temporary folder, to write. Without
  namespaces there is no such folder, and writing any file raises PermissionError.

A sandbox has namespaces or Landlock or both, so it needs Linux on x86-64 or 64-bit ARM. It does not prevent

- answers that know the tests' inputs by heart, or that are correct only for the tests;
- keeping the processor busy up to the limits, and exploiting bugs of the kernel itself;
- reading any file in the library folders, including packages installed beside the standard library;
- without namespaces: seeing that a file or process exists, a file's size, owner and times, and where a link leads.

The number of threads is checked every 50 ms. Without any sandbox (`--unsafe-code`) none of this holds: the program
can do whatever its user can, including reading the tests and writing the verdict.
"""

from __future__ import annotations

import functools
import marshal
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_bench.tasks.isolation import ENDED, FAILED, PASSED, REFUSED, UNTESTABLE, VERDICTS, last_line

# -P keeps the current folder off the path, -S the installed packages.
_START = "import sys; sys.path.append(sys.argv[1]); from dflash_bench.tasks.isolation.supervisor import main; main()"
_SUPERVISOR: tuple[str, ...] = (sys.executable, "-P", "-s", "-S", "-c", _START, str(Path(__file__).parents[2]))
# A fixed hash seed makes verdicts that depend on the order of sets repeatable. With an arena per thread, the C library
# would reserve more address space than the limit allows.
_SUPERVISOR_ENV = {"PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1"}
_GRACE_S = 10.0  # for building the sandbox, on top of the program's wall clock
_PATIENCE_S = 2.0  # for the tests, on top of the program's wall clock, so that the program times out first
_ANSWER = re.compile(rf"(\d+)\n({'|'.join(VERDICTS)})(?: (.*))?\n", re.DOTALL)
_MIB = 2**20
NO_SANDBOX = "this system does not offer seccomp together with namespaces or Landlock"
REMEDY = "use Linux 5.13 or newer on x86-64 or 64-bit ARM; or, at your own risk, run it again with --unsafe-code"


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """Limits on the answer's program and on the tests. Standard output is discarded, standard error is a file."""

    cpu_s: int = 5
    wall_s: float = 10.0
    memory_bytes: int = 512 * _MIB
    file_bytes: int = _MIB
    folder_bytes: int = 64 * _MIB
    num_files: int = 4096
    num_open_files: int = 64
    num_threads: int = 64


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    passed: bool | None
    """None if the tests cannot run here, because they pass an argument that is not a plain value."""
    reason: str
    by_value: bool = True
    """False if a returned value or an argument is not a plain value; `reason` names it."""


@dataclass(frozen=True, slots=True)
class Isolation:
    """The layers of a sandbox, and whether root becomes the user `nobody` inside."""

    namespaces: bool = False
    landlock: bool = False
    seccomp: bool = True
    as_nobody: bool = False

    def __str__(self) -> str:
        if self == UNSAFE:
            return "unsafe: a plain process, rlimits"
        restrictions = ("namespaces", "landlock", "seccomp")
        user = ", as nobody" if self.as_nobody else ", as root" if os.geteuid() == 0 else ""
        return f"{', '.join(name for name in restrictions if getattr(self, name))}, rlimits{user}"


_JUDGED = "judged from outside by what it returns: only tests known by heart can be cheated"
UNSAFE = Isolation(seccomp=False)
"""No sandbox: only a process with limits, killed together with its process group."""


def isolations() -> list[Isolation]:
    """Return all sandboxes, strongest first. The last is for an interpreter in root's home, closed to `nobody`."""
    is_root = os.geteuid() == 0
    restrictions = (True, True, is_root), (True, False, is_root), (False, True, is_root), (False, True, False)
    return [Isolation(spaces, files, as_nobody=nobody) for spaces, files, nobody in dict.fromkeys(restrictions)]


@functools.cache
def strongest() -> Isolation | None:
    """Return the strongest sandbox that works on this system; None without any."""
    return next(filter(holds, isolations()), None) if sys.platform == "linux" else None


def describe(isolation: Isolation | None) -> str:
    """Describe the sandbox for records and results: its layers, and who can still cheat."""
    if isolation is None:
        return f"none: not run ({NO_SANDBOX})"
    return f"{isolation}; {'it can forge its verdict' if isolation == UNSAFE else _JUDGED}"


def how_run(isolation: Isolation | None) -> str:
    """Return one word for how a run treats code, which must not change within a run: scores would not be comparable."""
    return "not run" if isolation is None else "unsafe" if isolation == UNSAFE else "caged"


def holds(isolation: Isolation) -> bool:
    """Return whether a harmless program passes in it, and the most common escapes are all blocked."""
    with tempfile.NamedTemporaryFile(prefix="dflash-bench-") as secret:
        os.chmod(secret.name, 0o666)
        program = _PROBE.format(private=_private_file(), secret=secret.name, has_folder=isolation.namespaces)
        return run_tests(program, isolation).passed is True


def _private_file() -> str:
    """Return a file in the home folder, if one is visible."""
    with suppress(OSError, RuntimeError):  # no home
        files = (path for path in sorted(Path.home().iterdir()) if path.is_file() and not path.is_symlink())
        return str(next(files, "/etc/hosts"))
    return "/etc/hosts"


_PROBE = """
import decimal, os, random, socket, zlib
private, secret, has_folder = {private!r}, {secret!r}, {has_folder}
if has_folder:
    open('file', 'w').close()
    os.remove('file')
ways_out = [
    (os.fork,), (os.execv, '/bin/true', ['true']), (socket.socket,), (os.kill, os.getppid(), 0),
    (open, '/etc/passwd'), (open, private), (os.open, os.__file__, os.O_WRONLY),
    (open, secret), (os.open, secret, os.O_WRONLY), (os.chmod, secret, 0o600), (os.open, secret + '2', os.O_CREAT),
]
if not has_folder: ways_out += [(os.open, 'file', os.O_CREAT | os.O_WRONLY), (os.mkdir, 'folder')]
for way, *args in ways_out:
    try: way(*args)
    except OSError: continue
    raise AssertionError(way)
"""


def run_tests(
    program: str,
    isolation: Isolation,
    limits: ProgramLimits = ProgramLimits(),
    tests: str = "",
    functions: Collection[str] = (),
) -> ProgramOutcome:
    """Run an answer's program to its end, then `tests`, which may call the answer's `functions`, given by name.

    All processes have ended when this returns. If a supervisor itself fails, the program has failed.
    """
    folder = tempfile.mkdtemp(prefix="dflash-bench-")
    terms = {"parent": os.getpid(), **asdict(isolation), **asdict(limits)}
    requests = {**terms, "program": program, "functions": None}, {**terms, "program": tests, "functions": [*functions]}
    requests[1]["wall_s"] = limits.wall_s + _PATIENCE_S
    try:
        with _start_both(requests, folder) as (answer, judge):
            verdict, reason = judge.verdict(limits.wall_s + _PATIENCE_S + _GRACE_S)
            if (verdict, reason) == (FAILED, ENDED):
                _, reason = answer.verdict(limits.wall_s + _GRACE_S)
    finally:
        _remove(folder)
    return ProgramOutcome(_PASSED[verdict], reason or verdict, verdict not in (REFUSED, UNTESTABLE))


_PASSED = {PASSED: True, FAILED: False, REFUSED: False, UNTESTABLE: None}


@contextmanager
def _start_both(requests: Sequence[dict[str, Any]], folder: str) -> Iterator[list[_Supervisor]]:
    """Start two supervisors whose runners are connected by pipes. All processes have ended when the context exits."""
    with ExitStack() as stack:
        pipes = [os.pipe(), os.pipe()]
        try:
            supervisors = []
            for request, own, other in zip(requests, pipes, reversed(pipes), strict=True):
                ends = {"receiving": own[0], "sending": other[1]}
                supervisors.append(stack.enter_context(_start({**request, **ends}, folder)))
        finally:
            for end in (end for pipe in pipes for end in pipe):
                os.close(end)
        yield supervisors


@contextmanager
def _start(request: dict[str, Any], folder: str) -> Iterator[_Supervisor]:
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as file:
        file.write(marshal.dumps(request))  # a file, so as not to wait for a supervisor that does not read
        file.seek(0)
        with subprocess.Popen(
            _SUPERVISOR,
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=folder,
            env=_SUPERVISOR_ENV,
            pass_fds=(request["receiving"], request["sending"]),
            start_new_session=True,
        ) as process:
            supervisor = _Supervisor(process, errors.fileno())
            try:
                yield supervisor
            finally:
                supervisor.end(0)


class _Supervisor:
    def __init__(self, process: subprocess.Popen[bytes], errors: int) -> None:
        self.process, self.errors = process, errors
        self.answer: str | None = None

    def verdict(self, timeout_s: float) -> tuple[str, str]:
        """Return the verdict and its reason, ending the supervisor if it takes too long."""
        match = _ANSWER.fullmatch(self.end(timeout_s))
        if match is None:
            return FAILED, f"the sandbox broke down: {last_line(self.errors) or 'its supervisor was killed'}"
        return match[2], match[3] or ""

    def end(self, timeout_s: float) -> str:
        """Return its reply, complete or not. The supervisor and its runner are dead when this returns."""
        if self.answer is not None:
            return self.answer
        try:
            with suppress(subprocess.TimeoutExpired):
                self.process.communicate(timeout=timeout_s)
        finally:
            if self.process.returncode is None:  # it is no longer needed, hangs, or we are interrupted
                os.killpg(self.process.pid, signal.SIGKILL)
        self.answer = self.process.communicate()[0].decode(errors="replace")
        if runner := re.match(r"(\d{1,9})\n", self.answer):
            _wait_for_end(int(runner[1]))
        return self.answer


def _wait_for_end(runner: int) -> None:
    """Wait for a runner, which the kernel kills with its supervisor, but not immediately."""
    if hasattr(os, "pidfd_open"):
        with suppress(OSError):  # it is gone already
            runner_fd = os.pidfd_open(runner)
            select.select([runner_fd], [], [], _GRACE_S)
            os.close(runner_fd)


def _remove(folder: str) -> None:
    """Delete a folder, however deeply nested: inner folders are moved to the top, then emptied."""
    waiting = [folder]
    while waiting:
        path = waiting.pop()
        with suppress(OSError):
            os.chmod(path, 0o700)
            for entry in list(os.scandir(path)):
                if entry.is_dir(follow_symlinks=False):
                    os.chmod(entry.path, 0o700)  # else it cannot be moved
                    waiting.append(f"{folder}/{uuid.uuid4().hex}")
                    os.rename(entry.path, waiting[-1])
                else:
                    os.unlink(entry.path)
            if path != folder:
                os.rmdir(path)
    with suppress(OSError):
        os.rmdir(folder)
