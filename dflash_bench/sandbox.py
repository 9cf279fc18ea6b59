"""Runs model-written Python in a cage and says whether it ran to its very end.

Three processes: the caller; a *keeper*, which builds the cage and holds the wall clock; and the *runner*,
forked by the keeper, which executes the program and then hands in a one-time token. The cage is Linux
namespaces where the kernel grants them, else (other systems, locked-down containers) an audit hook that
refuses network, processes, and files outside the standard library and a temporary folder.
It holds sloppy and mischievous programs, not an attacker: C code passes the hook, a hunt through raw memory
can find the token, and a program may cheat its own tests (override `__eq__`). As root or without namespaces
the limit on processes is shared by all of that user's; macOS neither bounds memory nor ends the cage with
the caller.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

# The keeper runs this very file, hence only the standard library above. -P keeps this package's folder off
# the path, -S the installed packages; a fixed hash seed repeats verdicts that depend on the order of sets.
_KEEPER = (sys.executable, "-P", "-s", "-S", "-B", os.path.abspath(__file__))
_KEEPER_ENV = {"PYTHONHASHSEED": "0"}
_GRACE_S = 10.0  # for building the cage, on top of the program's wall clock
_NOBODY = 65534
_READY = b"ready"
_PROBE = "import decimal, random, zlib; open('file', 'w').close()"
_MIB = 2**20

_ROOTS = (sys.base_prefix, "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo")
_SECRET_EVENTS = ("ctypes.", "gc.get_")  # ways to the token
_OUTSIDE_EVENTS = (
    "os.exec", "os.fork", "os.kill", "os.posix_spawn", "os.spawn", "os.system",
    "pty.", "signal.pthread_kill", "socket.", "sqlite3.", "subprocess.",
)  # fmt: skip
_READING_EVENTS = ("os.chdir", "os.listdir", "os.scandir")
_WRITING_EVENTS = ("os.chmod", "os.chown", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.utime")
_NUM_PATHS = dict.fromkeys(("open", *_READING_EVENTS, *_WRITING_EVENTS), 1) | dict.fromkeys(
    ("os.link", "os.rename", "os.symlink"), 2
)
_WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

# From <sched.h>, <sys/mount.h>, <sys/prctl.h> and <linux/capability.h>; Python 3.11 wraps none of them.
_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 1 << 12, 1 << 14, 1 << 18
_PDEATHSIG, _NO_NEW_PRIVS, _CAPABILITY_VERSION_3 = 1, 38, 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


class CageError(RuntimeError):
    """The cage could not be built; this says nothing about the program."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Per process, but for the wall clock. Standard output is discarded, standard error counts as a file."""

    cpu_s: int = 5
    wall_s: float = 10.0
    memory_bytes: int = 512 * _MIB
    file_bytes: int = _MIB
    num_processes: int = 16
    num_open_files: int = 64


@dataclass(frozen=True, slots=True)
class Outcome:
    passed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Cage:
    namespaces: bool
    as_nobody: bool

    def __str__(self) -> str:
        spaces = "mount, pid, network" if os.geteuid() == 0 else "user, mount, pid, network"
        user = ", as nobody" if self.as_nobody else ", as root" if os.geteuid() == 0 else ""
        return f"namespaces ({spaces}), rlimits{user}" if self.namespaces else f"audit hook, rlimits{user}"


def run_tests(program: str, limits: Limits = Limits()) -> Outcome:
    """Run a complete program, solution and tests together; it passes when it gets past its last line."""
    return _run_in(_strongest_cage(), program, limits)


def isolation() -> str:
    """The cage in use, in a few words, to be recorded with results."""
    return str(_strongest_cage())


@functools.cache
def _strongest_cage() -> Cage:
    for cage in _cages():
        with suppress(CageError):
            if _run_in(cage, _PROBE, Limits()).passed:
                return cage
    raise CageError("this system grants no cage to run model-written code in")


def _cages() -> tuple[Cage, ...]:
    """Strongest first. The last is for an interpreter in root's home, which nobody cannot read."""
    is_root = os.geteuid() == 0
    return Cage(True, is_root), Cage(False, is_root), Cage(False, False)


def _run_in(cage: Cage, program: str, limits: Limits) -> Outcome:
    request = json.dumps([os.getpid(), asdict(cage), asdict(limits), program]).encode()
    with (
        tempfile.TemporaryDirectory(prefix="dflash-bench-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            _KEEPER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            cwd=folder, env=_KEEPER_ENV, start_new_session=True,
        ) as keeper,
    ):  # fmt: skip
        try:
            reply, _ = keeper.communicate(request, limits.wall_s + _GRACE_S)
        finally:
            if keeper.returncode is None:  # interrupted, or it hangs
                os.killpg(keeper.pid, signal.SIGKILL)
        if not reply:
            raise CageError(f"{cage}: {_last_line(errors.fileno()) or 'the keeper was killed'}")
    return Outcome(**json.loads(reply))


def _last_line(file: int) -> str:
    tail = os.pread(file, 4096, max(0, os.fstat(file).st_size - 4096)).decode(errors="replace")
    return tail.strip().rpartition("\n")[2].strip()[:200]


def _keep() -> None:
    """The keeper: build the cage, run the program in it, reply with the outcome."""
    parent, cage, limits, program = json.loads(sys.stdin.buffer.read())
    _die_with_parent()
    if os.getppid() != parent:  # it died before the line above
        sys.exit("the caller is gone")
    outcome = _watch(Cage(**cage), Limits(**limits), program)
    os.write(sys.stdout.fileno(), json.dumps(asdict(outcome)).encode())
    os.killpg(0, signal.SIGKILL)  # whatever is left of the cage, this process included


def _watch(cage: Cage, limits: Limits, program: str) -> Outcome:
    null = os.open(os.devnull, os.O_RDWR)
    folder = _enter_namespaces(os.getcwd()) if cage.namespaces else os.getcwd()
    token_out, token_in = os.pipe()
    report_out, report_in = os.pipe()
    runner = os.fork()
    if runner == 0:
        os.dup2(null, 0)
        os.dup2(null, 1)
        for fd in (null, token_in, report_out):
            os.close(fd)
        _confine(cage, limits, folder)
        _run_program(program, token_out, report_in)
    os.close(report_in)
    token = os.urandom(16)  # after the fork, so that no frame of the runner ever held it
    os.write(token_in, token)
    outcome = _wait(runner, limits)
    os.set_blocking(report_out, False)
    report = os.read(report_out, 64)
    if not report.startswith(_READY):
        raise CageError(f"the runner was not confined: {_last_line(2)}")
    return Outcome(False, "did not finish") if outcome.passed and report != _READY + token else outcome


def _wait(runner: int, limits: Limits) -> Outcome:
    deadline = time.monotonic() + limits.wall_s
    signal.signal(signal.SIGALRM, lambda *_: os.kill(runner, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, limits.wall_s)
    _, status, usage = os.wait4(runner, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        is_late = time.monotonic() >= deadline or usage.ru_utime + usage.ru_stime > limits.cpu_s - 0.1
        return Outcome(False, "timed out" if is_late else f"killed by {signal.Signals(-code).name}")
    return Outcome(False, f"exit status {code}: {_last_line(2)}") if code else Outcome(True, "passed")


def _enter_namespaces(folder: str) -> str:
    """Leave the network, and see no files but a new temporary folder and, read-only, the standard library."""
    uid, gid = os.geteuid(), os.getegid()
    flags = _NEWNS | _NEWPID | _NEWNET | _NEWIPC
    if uid == 0:
        _call("unshare", flags)
    else:
        _call("unshare", flags | _NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")  # the kernel wants this before a gid_map
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("tmpfs", folder, "tmpfs", _NOSUID | _NODEV, "size=64m,nr_inodes=4k,mode=755")
    for root in filter(os.path.isdir, _ROOTS):
        os.makedirs(folder + root, exist_ok=True)
        _mount_read_only(root, folder + root)
    os.mkdir(folder + "/dev")
    os.mknod(folder + os.devnull)  # a plain file, for the device to be mounted on
    _mount(os.devnull, folder + os.devnull, None, _BIND)
    os.mkdir(folder + "/cage")  # not /tmp or /home, which may lead to the interpreter
    os.chroot(folder)
    os.chdir("/cage")
    return "/cage"


def _mount_read_only(source: str, target: str) -> None:
    _mount(source, target, None, _BIND | _REC)
    # A user namespace may add restrictions to those the source is mounted with, but must repeat them.
    kept = os.statvfs(target).f_flag & (_NOSUID | _NODEV | _NOEXEC)
    _mount(None, target, None, _REMOUNT | _BIND | _RDONLY | kept)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    source_, target_, kind_, options_ = (text and text.encode() for text in (source, target, kind, options))
    _call("mount", source_, target_, kind_, ctypes.c_ulong(flags), options_)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        _prctl(_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    _call("prctl", option, *map(ctypes.c_ulong, (value, 0, 0, 0)))


def _call(name: str, *args: Any) -> None:
    if getattr(_libc, name)(*args) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _confine(cage: Cage, limits: Limits, folder: str) -> None:
    """Take from the runner, which calls this, all that the program must not have."""
    os.environ.update(HOME=folder, TMPDIR=folder)
    if cage.namespaces:
        os.setsid()  # a signal to the group would cross the border and kill the keeper
    if cage.as_nobody:
        os.chown(folder, _NOBODY, _NOBODY)
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
    _set_rlimits(limits)
    if sys.platform == "linux":
        _prctl(_NO_NEW_PRIVS, 1)
        _call("capset", (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), bytes(24))
        _die_with_parent()  # again: a change of user or capabilities clears it
    sys.addaudithook(_audit_hook(cage, folder))
    for name in ("ctypes", "_ctypes"):  # so that an import asks the hook
        del sys.modules[name]


def _set_rlimits(limits: Limits) -> None:
    for which, value in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.num_open_files),
        (resource.RLIMIT_NPROC, limits.num_processes),
    ):
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with suppress(ValueError):  # macOS cannot limit memory
            resource.setrlimit(which, (value, value))


def _real(path: Any) -> str:
    return os.path.realpath(os.fsdecode(path))


def _audit_hook(cage: Cage, folder: str) -> Callable[[str, tuple[Any, ...]], None]:
    """Keeps the token from prying code, and stands in for the namespaces where there are none."""
    refused = _SECRET_EVENTS if cage.namespaces else _SECRET_EVENTS + _OUTSIDE_EVENTS
    num_paths = {} if cage.namespaces else _NUM_PATHS
    writable = tuple(_real(path) + "/" for path in (folder, os.devnull))
    readable = writable + tuple(_real(path) + "/" for path in _ROOTS)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "import" and args[0] in {"ctypes", "_ctypes"}:
            raise ImportError(f"no {args[0]} in the cage")
        if event.startswith(refused) and event != "socket.__new__":  # a pair of sockets is harmless
            raise PermissionError(f"no {event} in the cage")
        reads = event in _READING_EVENTS or (event == "open" and not args[2] & _WRITING_FLAGS)
        for path in args[: num_paths.get(event, 0)]:
            is_open = isinstance(path, int | None)  # a descriptor; or the current folder
            if not (is_open or (_real(path) + "/").startswith(readable if reads else writable)):
                raise PermissionError(f"no {event} of {path!r} in the cage")

    return hook


def _run_program(program: str, token: int, report: int) -> NoReturn:
    module = types.ModuleType("solution")  # not __main__: a model's main guard stays shut
    sys.modules["solution"] = module
    os.write(report, _READY)
    # While the program runs, the token is on the evaluation stack only: no name or frame leads to it.
    # An exception, SystemExit included, ends the runner as it ends any script.
    _receipt(report, os.read(token, 16))(eval(compile(program, "<program>", "exec"), vars(module)))
    os._exit(0)


def _receipt(report: int, token: bytes) -> Callable[[None], None]:
    write, get_pid, runner = os.write, os.getpid, os.getpid()

    def hand_in(_: None) -> None:
        if get_pid() == runner:  # not a copy that the program has forked
            write(report, token)

    return hand_in


if __name__ == "__main__":
    _keep()
