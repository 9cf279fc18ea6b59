"""Programs that reach out, stay, or pretend to have finished, in every sandbox."""

from __future__ import annotations

import os
import re
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_bench.tasks import sandbox
from dflash_bench.tasks.isolation import restrictions
from dflash_bench.tasks.sandbox import ProgramLimits
from helpers.each import each
from helpers.sandboxes import REFUSED, RIGHT, Box, attacking, num_processes

BRIEF = ProgramLimits(cpu_s=1, wall_s=0.5)
NUMBERS = restrictions.X86_64 if os.uname().machine == "x86_64" else restrictions.AARCH64
LIBC = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    result = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, args))
    if result == -1: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
"""


def test_an_attack_that_is_not_refused_is_found() -> None:
    refused = "raise PermissionError(1, 'Operation not permitted')"
    for attack, said in (
        ("open('/etc/passwd')", "not refused"),
        ("1 / 0", "ZeroDivisionError"),
        ("os._exit(0)", "finish"),
    ):
        let = sandbox.run_tests(attacking([refused, attack, refused], setup="import os\n"), sandbox.UNSAFE)
        assert let.passed is False and said in let.reason and "Permission" not in let.reason
    assert sandbox.run_tests(attacking([refused]), sandbox.UNSAFE).passed


# ---- a second process, or another program ----------------------------------------------------------------


PROCESSES = [
    "os.fork()",
    "os.forkpty()",
    "import subprocess; subprocess.run([sys.executable, '-c', ''])",
    "import subprocess; subprocess._USE_VFORK = subprocess._USE_POSIX_SPAWN = False; subprocess.run(['true'])",
    "os.posix_spawn(sys.executable, [sys.executable, '-c', ''], {})",
    "import multiprocessing as m; m.get_context('spawn').Process(target=print).start()",
    "import multiprocessing as m; m.get_context('fork').Process(target=print).start()",
    "from concurrent.futures import ProcessPoolExecutor as P; list(P(2).map(len, [[1]]))",
    "os.execv(sys.executable, [sys.executable, '-c', ''])",
    "os.environ['LD_PRELOAD'] = './mine.so'; os.execve('/bin/true', ['true'], os.environ)",
    "open('x', 'w').write('#!/bin/sh'); os.execv('x', ['x'])",
    "assert os.system('true') == 0, os.strerror(1)",
    "import pty; pty.spawn('true')",
    "os.setsid()",
    "os.setpgid(0, 0)",
    "os.chroot('.')",
]


def test_no_second_process_and_no_other_program(box: Box) -> None:
    assert box.refuses(PROCESSES, setup="import os, sys\n")


DAEMON = """
import os, signal, time
def fork():
    try: return os.fork()
    except OSError: return None
if fork() in (None, 0):
    try: os.setsid()
    except OSError: pass
    fork(), fork()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
"""


@each("end", ["assert False", "os.kill(os.getpid(), signal.SIGSTOP)\nassert False", "os._exit(0)"])
def test_no_daemon_stays(box: Box, end: str) -> None:
    box.fails(DAEMON + end)
    assert num_processes() == 0


def test_threads_end_with_their_program(box: Box) -> None:
    stay = "import threading, time\nthreading.Thread(target=time.sleep, args=[1000], daemon=True).start()\n"
    assert box.passes(stay + RIGHT)
    assert num_processes() == 0


def test_a_fork_bomb_fizzles(box: Box) -> None:
    assert box.fails("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n", BRIEF) == "timed out"


# ---- system calls by number ------------------------------------------------------------------------------


def test_every_system_call_that_is_not_listed_is_refused(box: Box) -> None:
    """Numbers of x32 too; `clone3` and what is newer than the list do not exist."""
    unfiltered = (
        {335, 336} if os.uname().machine == "x86_64" else set()
    )  # uretprobe and uprobe: the kernel kills at once
    numbers = sorted(set(range(512)) - set(NUMBERS.values()) - unfiltered) + [
        2**30 + n for n in (0, 57, 59, 101, 520, 547)
    ]
    attack = f"""
for number in {numbers}:
    try: call(number, 0, 0, 0, 0, 0, 0)
    except OSError as error: assert error.errno == (38 if number == 435 or number > 450 else 1), (number, error)
    else: raise AssertionError(number)
"""
    assert box.passes(LIBC + attack)


CALLS = [
    ("kill", "os.getppid(), 9"), ("kill", "-1, 9"), ("kill", "0, 9"), ("tgkill", "os.getppid(), os.getppid(), 9"),
    ("clone", "17, 0, 0, 0, 0"), ("clone", "0x4111, 0, 0, 0, 0"), ("clone", "0x10000000, 0, 0, 0, 0"),
    ("clone", "0x10010900, 0, 0, 0, 0"), ("prlimit64", "os.getppid() or 2, 7, 0, 0"), ("prctl", "1, 0"),
    ("prctl", "4, 0"), ("prctl", "38, 0"), ("prctl", "22, 2"), ("fcntl", "2, 8, os.getppid()"),
    ("fcntl", "2, 10, 9"), ("ioctl", "2, 0x5412, 0"), ("ioctl", "2, 0x8901, 0"), ("socketpair", "2, 1, 0, 0"),
    ("socketpair", "1, 2, 0, 0"), ("openat", "-100, 0, 0o1000, 0"),
    ("openat", "-100, 0, 0o1003, 0"), ("openat", "-100, 0, 3, 0"),
]  # fmt: skip


def test_listed_system_calls_are_refused_with_dangerous_arguments(box: Box) -> None:
    """Signals to others, processes, their limits, death with the keeper, signals by descriptor, typing, emptying."""
    assert box.refuses([f"call({NUMBERS[name]}, {args})" for name, args in CALLS], "Operation not permitted", LIBC)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="there is only one kind of system call here")
def test_a_system_call_of_another_architecture_kills(box: Box) -> None:
    attack = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes([0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3]))  # mov eax, getpid; int 0x80; ret
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
"""
    assert box.fails(attack) == "killed by SIGSYS"


# ---- the keeper and the caller ---------------------------------------------------------------------------


AT_THE_KEEPER = [
    "os.kill(os.getppid() or -1, 9)",
    "os.killpg(0, 9)",
    "os.pidfd_open(os.getppid() or 1)",
    "signal.pidfd_send_signal(0, 9)",
    "import ctypes; open(f'/proc/{os.getppid()}/mem', 'r+b')",
    "open('/proc/self/mem', 'r+b')",
    "open(f'/proc/{os.getppid()}/fd/1', 'w')",
    "[open(f'/proc/self/fd/{fd}', 'w') for fd in range(4096)]",
    "os.listdir('/proc')",
    "open(f'/proc/{os.getppid()}/environ')",
    "import resource; resource.prlimit(os.getppid() or 2, resource.RLIMIT_CPU, (0, 0))",
    "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "os.sched_setaffinity(os.getppid(), [0])",
    "import fcntl; fcntl.fcntl(2, fcntl.F_SETOWN, os.getppid() or 1)",
    "import fcntl, termios; fcntl.ioctl(2, termios.TIOCSTI, b'x')",
]


def test_the_keeper_is_out_of_reach(box: Box) -> None:
    assert box.refuses(AT_THE_KEEPER, setup="import os, signal\n")


def test_limits_cannot_be_raised(box: Box) -> None:
    raised = [f"resource.setrlimit(resource.RLIMIT_{name}, (2**40,) * 2)" for name in ("CPU", "AS", "FSIZE", "NOFILE")]
    assert box.refuses(raised, "^(ValueError|PermissionError)", "import resource\n")


# ---- files -----------------------------------------------------------------------------------------------


@pytest.fixture
def secret(box: Box) -> Iterator[Path]:
    """A file that belongs to the user who asks and is open to all, beside the sandbox's own folder."""
    folder = Path("/tmp") / f"dflash-bench-{uuid.uuid4().hex}"
    folder.mkdir()
    folder.chmod(0o777)
    path = folder / "secret"
    path.write_text("secret")
    path.chmod(0o666)
    box.give(path)
    box.give(folder)
    before = path.stat()
    yield path
    assert [child.name for child in folder.iterdir()] == ["secret"]
    assert path.read_text() == "secret"
    after = path.stat()
    for name in ("st_mode", "st_uid", "st_mtime_ns", "st_nlink", "st_ino"):
        assert getattr(before, name) == getattr(after, name), name
    path.unlink()
    folder.rmdir()


AT_FILES = [
    "open(secret)",
    "open(secret, 'w')",
    "open(secret, 'a')",
    "open('/etc/passwd')",
    "open(os.path.expanduser('~root/.bashrc'))",
    "os.listdir(os.path.dirname(secret))",
    "os.open(secret[1:], os.O_RDONLY, dir_fd=os.open('/', os.O_PATH))",
    "os.open('../' * 20 + secret, os.O_RDONLY, dir_fd=os.open('.', os.O_RDONLY))",
    "os.remove(secret)",
    "os.remove('secret', dir_fd=os.open(os.path.dirname(secret), os.O_PATH))",
    "os.rename(secret, 'mine')",
    "open('mine', 'w').close(); os.rename('mine', secret)",
    "os.mkdir(os.path.dirname(secret) + '/new')",
    "os.truncate(secret, 0)",
    "os.open(secret, os.O_RDONLY | os.O_TRUNC)",
    "os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)",
    "os.open(os.__file__, os.O_WRONLY)",
    "os.open(os.path.dirname(os.__file__) + '/mine.py', os.O_CREAT | os.O_WRONLY)",
    "os.chmod(secret, 0)",
    "os.chmod(os.__file__, 0o777)",
    "os.fchmod(os.open(os.__file__, os.O_RDONLY), 0o777)",
    "os.chown(secret, os.getuid(), os.getgid())",
    "os.utime(secret, (0, 0))",
    "os.utime(os.open(os.__file__, os.O_RDONLY), (0, 0))",
    "os.setxattr(secret, 'user.mine', b'x')",
    "os.symlink(os.path.dirname(secret), 'link'); open('link/secret')",
    "os.symlink(secret, 'link'); open('link', 'w')",
    "os.link(secret, 'link')",
    "os.link(os.__file__, 'link')",
    "open('mine', 'w').close(); os.link('mine', os.path.dirname(secret) + '/mine')",
    "os.mkfifo('fifo')",
    "os.mkfifo(os.path.dirname(secret) + '/fifo')",
    "os.mknod('device', 0o600 | 0o020000, os.makedev(1, 1))",
    "import readline; readline.write_history_file(secret)",
    "import readline; readline.write_history_file(os.path.dirname(secret) + '/new')",
    "import shutil; shutil.copy(secret, 'mine')",
    "import sqlite3; sqlite3.connect(secret).execute('create table t (x)')",
    "import ctypes; libc = ctypes.CDLL(None); assert libc.fopen(secret.encode(), b'w'), 'Permission denied'",
    "open('/dev/shm/mine', 'w')",
    "open('/dev/zero', 'rb')",
    "open('/proc/1/cmdline')",
    "open('/sys/kernel/mm/transparent_hugepage/enabled')",
]


def test_other_files_can_be_neither_read_nor_changed(box: Box, secret: Path) -> None:
    words = f"{REFUSED}|unable to open database|readonly database|cross-device|No module named 'readline'"
    assert box.refuses(AT_FILES, words, f"import os\nsecret = {str(secret)!r}\n")


def test_a_second_interpreter_is_in_the_same_sandbox(box: Box, secret: Path) -> None:
    attack = f"""
import os
try: import _interpreters as interpreters
except ImportError: import _xxsubinterpreters as interpreters
attack = "open('stolen', 'w').write(open({str(secret)!r}).read())"
try: interpreters.run_string(interpreters.create(), attack)
except Exception: pass
assert os.path.getsize('stolen') == 0, 'Permission denied'
assert False, 'Permission denied'
"""
    assert re.search(REFUSED, box.fails(attack))


@pytest.mark.usefixtures("cold")
def test_the_home_folder_is_out_of_sight(box: Box) -> None:
    secret = Path.home() / f".dflash-bench-{uuid.uuid4().hex}"
    try:
        secret.write_text("secret")
    except OSError as error:
        pytest.skip(f"the home folder is not writable: {error}")
    try:
        assert box.refuses([f"open({str(secret)!r})", f"os.remove({str(secret)!r})"], setup="import os\n")
        box.fails(f"import os\nassert {secret.name!r} in os.listdir({str(Path.home())!r})")
        assert secret.read_text() == "secret"
    finally:
        secret.unlink()


@pytest.mark.usefixtures("cold")
def test_the_environment_is_empty(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    names = {"HOME", "TMPDIR", "LC_CTYPE", "PYTHONHASHSEED", "MALLOC_ARENA_MAX"}
    assert box.passes(f"import os\nassert set(os.environ) <= {names}, os.environ")


KINDS = """
import os, stat
kinds = []
for fd in range(4096):
    try: kinds.append(stat.S_IFMT(os.fstat(fd).st_mode))
    except OSError: pass
assert kinds == [stat.S_IFCHR] * 2 + [stat.S_IFREG] + [stat.S_IFIFO] * 2, kinds
"""


@pytest.mark.usefixtures("cold")
def test_descriptors_are_not_inherited(box: Box, tmp_path: Path) -> None:
    """Besides three for the standard streams, two pipes to and from the tests."""
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        assert box.passes(KINDS)


# ---- the network -----------------------------------------------------------------------------------------


SOCKETS = [
    "socket.socket(socket.AF_INET)", "socket.socket(socket.AF_INET6)", "socket.socket(socket.AF_UNIX)",
    "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)", "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)", "socket.socket(socket.AF_VSOCK)",
    "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)", "socket.socketpair(type=socket.SOCK_SEQPACKET)",
    "socket.socketpair()[0].connect('\\0name')", "socket.socketpair()[0].sendmsg([b'x'])",
    "import asyncio; asyncio.run(asyncio.open_connection('127.0.0.1', 80))",
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1')"
]  # fmt: skip


def test_there_is_no_socket_but_a_pair(box: Box) -> None:
    assert box.refuses(SOCKETS, setup="import socket\n")


def test_a_listening_server_hears_nothing(box: Box) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        assert box.refuses([f"import socket; socket.create_connection({server.getsockname()}, 1).send(b'x')"])
        with pytest.raises(BlockingIOError):
            server.accept()


# ---- programs that pretend to have finished --------------------------------------------------------------


@each("leave", ["os._exit(0)", "sys.exit(0)", "sys.exit()", "raise SystemExit"])
def test_leaving_early_is_not_passing(box: Box, leave: str) -> None:
    assert box.fails(f"import os, sys\n{leave}\nassert False") == "did not finish"


SHOUT = (
    "import os\n"
    "for fd in range(4096):\n"
    "    for word in (b'ready', b'passed', b'12\\npassed\\n', bytes(16)):\n"
    "        try: os.write(fd, word)\n"
    "        except OSError: pass\n"
)


@pytest.mark.usefixtures("cold")
def test_saying_the_expected_words_everywhere_is_not_passing(box: Box) -> None:
    for end in ("os._exit(0)", ""):
        assert box.fails(SHOUT + end).startswith("its program sent something that is not a plain value: ")
    box.fails("import os\nos.closerange(0, 4096)")


@each(
    "override",
    [
        "import os; os._exit = print",
        "from dflash_bench.tasks.isolation import child, protocol; protocol.serve = child.os = print",
        "import builtins; builtins.eval = builtins.AssertionError = lambda *_: None",
        "import sys; sys.modules.clear()",
        "import sys; sys.excepthook = lambda *_: None",
        "import sys, os; sys.excepthook = lambda *_: os._exit(0)",
        "import atexit, os; atexit.register(os._exit, 0)",
        "import signal; signal.raise_signal = print",
    ],
)
def test_overriding_what_ends_a_program_is_not_passing(box: Box, override: str) -> None:
    box.fails(f"{override}\nraise ValueError")
    box.fails(f"{override}\nassert 1 + 1 == 3")


@pytest.mark.usefixtures("cold")
def test_what_a_program_inherits_in_memory_holds_nothing_of_the_caller(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads all of its own memory finds no secrets of the caller's."""
    secret = uuid.uuid4().hex
    monkeypatch.setenv("API_KEY", secret)
    read = (
        "import ctypes\nlibc = ctypes.CDLL(None)\nenviron = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, 'environ')\n"
    )
    read += "names = []\nwhile environ[len(names)]: names.append(environ[len(names)])\n"
    assert box.passes(
        read + f"assert not any(b'API' in name or {secret[:16]!r}.encode() in name for name in names), names"
    )
