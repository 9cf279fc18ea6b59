"""Runs model-written Python in a cage, and reports whether it ran to the end.

Three processes: the caller; a *keeper* (`cage.keeper`), which builds the cage and watches the clock; and the
*runner* (`cage.runner`), forked by the keeper, which executes the program. The kernel enforces the cage; where it
cannot, the program is not run. The walls:

- a filter of system calls (seccomp), always: no second process, nothing executed, no socket, no signal to others;
- namespaces, where granted: an empty network, no other processes, no files but read-only libraries and a small
  temporary folder in memory;
- Landlock, from Linux 5.13: no files but the libraries to read and the temporary folder to write.

A cage has namespaces or Landlock or both, so it needs Linux on x86-64 or 64-bit ARM. What it does not prevent:

- programs that cheat their own tests (see `cage.runner`), keeping the processor busy up to the limits, and exploiting
  bugs of the kernel itself;
- reading any file in the library folders, including packages installed beside the standard library;
- without namespaces: seeing that a file or process exists, a file's size, owner and times, and where a link leads; and
  writing to the disk. Every 50 ms the keeper checks how many bytes and files are used (and, in any cage, threads).
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
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dflash_bench.tasks.cage.keeper import last_line

# -P keeps the current folder off the path, -S the installed packages.
_START = "import sys; sys.path.append(sys.argv[1]); from dflash_bench.tasks.cage.keeper import main; main()"
_KEEPER: tuple[str, ...] = (sys.executable, "-P", "-s", "-S", "-c", _START, str(Path(__file__).parents[2]))
# A fixed hash seed repeats verdicts that depend on the order of sets. With an arena for each thread, the C library
# would reserve more memory than the limit allows to be addressed.
_KEEPER_ENV = {"PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1"}
_GRACE_S = 10.0  # for building the cage, on top of the program's wall clock
_ANSWER = re.compile(r"(\d+)\n(?:passed|failed (.*))\n", re.DOTALL)
_MIB = 2**20
NO_CAGE = "this system does not offer seccomp together with namespaces or Landlock"
REMEDY = "use Linux 5.13 or newer on x86-64 or 64-bit ARM; or, at your own risk, run it again with --unsafe-code"


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """What one program may use. Standard output is discarded, standard error counts as a file."""

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
    passed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Cage:
    """Which walls it has, and whether root becomes the user `nobody` inside."""

    namespaces: bool = False
    landlock: bool = False
    seccomp: bool = True
    as_nobody: bool = False

    def __str__(self) -> str:
        if self == UNSAFE:
            return "unsafe: a plain process, rlimits"
        walls = ("namespaces", "landlock", "seccomp")
        user = ", as nobody" if self.as_nobody else ", as root" if os.geteuid() == 0 else ""
        return f"{', '.join(wall for wall in walls if getattr(self, wall))}, rlimits{user}"


UNSAFE = Cage(seccomp=False)
"""No cage at all: only a process with limits, killed together with its process group."""


def cages() -> list[Cage]:
    """All possible cages, strongest first. The last is for an interpreter in root's home, closed to user `nobody`."""
    is_root = os.geteuid() == 0
    walls = (True, True, is_root), (True, False, is_root), (False, True, is_root), (False, True, False)
    return [Cage(spaces, files, as_nobody=nobody) for spaces, files, nobody in dict.fromkeys(walls)]


@functools.cache
def strongest() -> Cage | None:
    """The best cage that this system offers and that holds when tried."""
    return next(filter(holds, cages()), None) if sys.platform == "linux" else None


def describe(cage: Cage | None) -> str:
    """In a few words, to be recorded with results."""
    return str(cage) if cage else f"none: not run ({NO_CAGE})"


def how_run(cage: Cage | None) -> str:
    """One word for how a run treats code. It must stay the same within a run, so that its scores are comparable."""
    return "not run" if cage is None else "unsafe" if cage == UNSAFE else "caged"


def holds(cage: Cage) -> bool:
    """Does a harmless program pass in it, and are the most common ways out all blocked?"""
    with tempfile.NamedTemporaryFile(prefix="dflash-bench-") as secret:
        os.chmod(secret.name, 0o666)
        return run_tests(_PROBE.format(private=_private_file(), secret=secret.name), cage).passed


def _private_file() -> str:
    """A file in the home folder, if there is one that we can see."""
    with suppress(OSError, RuntimeError):  # no home
        files = (path for path in sorted(Path.home().iterdir()) if path.is_file() and not path.is_symlink())
        return str(next(files, "/etc/hosts"))
    return "/etc/hosts"


_PROBE = """
import decimal, os, random, socket, zlib
open('file', 'w').close()
os.remove('file')
private, secret = {private!r}, {secret!r}
ways_out = [
    (os.fork,), (os.execv, '/bin/true', ['true']), (socket.socket,), (os.kill, os.getppid(), 0),
    (open, '/etc/passwd'), (open, private), (os.open, os.__file__, os.O_WRONLY),
    (open, secret), (os.open, secret, os.O_WRONLY), (os.chmod, secret, 0o600), (os.open, secret + '2', os.O_CREAT),
]
for way, *args in ways_out:
    try: way(*args)
    except OSError: continue
    raise AssertionError(way)
"""


def run_tests(program: str, cage: Cage, limits: ProgramLimits = ProgramLimits()) -> ProgramOutcome:
    """Run a complete program, solution and tests together; it passes if it gets past its last line.

    None of its processes is alive when this returns. If the keeper itself fails, the program has failed.
    """
    order = {"parent": os.getpid(), **asdict(cage), **asdict(limits), "program": program}
    folder = tempfile.mkdtemp(prefix="dflash-bench-")
    try:
        with tempfile.TemporaryFile() as errors:
            answer = _ask_keeper(marshal.dumps(order), folder, errors.fileno(), limits.wall_s + _GRACE_S)
            match = _ANSWER.fullmatch(answer)
            if match is None:
                return ProgramOutcome(
                    False, f"the cage broke down: {last_line(errors.fileno()) or 'its keeper was killed'}"
                )
    finally:
        _remove(folder)
    return ProgramOutcome(match[2] is None, match[2] or "passed")


def _ask_keeper(order: bytes, folder: str, errors: int, timeout_s: float) -> str:
    """Its answer, complete or not. It and its runner are dead when this returns."""
    with subprocess.Popen(
        _KEEPER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
        cwd=folder, env=_KEEPER_ENV, start_new_session=True,
    ) as keeper:  # fmt: skip
        try:
            with suppress(subprocess.TimeoutExpired):
                keeper.communicate(order, timeout_s)
        finally:
            if keeper.returncode is None:  # interrupted, or it hangs
                os.killpg(keeper.pid, signal.SIGKILL)
        answer = keeper.communicate()[0].decode(errors="replace")
    if runner := re.match(r"(\d{1,9})\n", answer):
        _wait_for_end(int(runner[1]))
    return answer


def _wait_for_end(runner: int) -> None:
    """The kernel kills a runner together with its keeper, but that may take a moment."""
    if hasattr(os, "pidfd_open"):
        with suppress(OSError):  # it is gone already
            runner_fd = os.pidfd_open(runner)
            select.select([runner_fd], [], [], _GRACE_S)
            os.close(runner_fd)


def _remove(folder: str) -> None:
    """Delete a folder, however deeply the program nested it: inner folders are moved to the top, then emptied."""
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
