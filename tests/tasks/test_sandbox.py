"""Programs that are right, wrong, or too greedy, in every sandbox; and supervisors that break down."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dflash_bench.tasks import sandbox
from dflash_bench.tasks.sandbox import Isolation, ProgramLimits, ProgramOutcome
from helpers import forked_supervisors
from helpers.each import each
from helpers.sandboxes import ASKED_BY_US, MARKER, RIGHT, SHORT, Box, num_processes, wait_until

Patch = pytest.MonkeyPatch
needs_a_sandbox = pytest.mark.skipif(not ASKED_BY_US, reason="no sandbox is granted here")


STATE = """
import hashlib, os, resource, signal, stat, sys, threading
def kind(fd):
    try: return stat.S_IFMT(os.fstat(fd).st_mode), os.get_inheritable(fd)
    except OSError: return None
state = {
    "modules": sorted(sys.modules), "path": sys.path, "flags": sys.flags, "words": sys.argv, "environment": os.environ,
    "files": [kind(fd) for fd in range(256)], "folder": os.path.dirname(os.getcwd()), "users": os.getresuid(),
    "session": os.getsid(0) in (0, os.getppid()), "group": os.getpgrp() in (0, os.getppid()),
    "limits": [resource.getrlimit(which) for which in range(16)], "threads": threading.active_count(),
    "signals": [signal.getsignal(number) for number in range(1, 32)], "umask": os.umask(0), "order": hash("order"),
}
home = os.environ["HOME"]
found = {name: hashlib.sha256(repr(value).replace(home, "HOME").encode()) for name, value in state.items()}
raise ValueError(" ".join(f"{name[:6]}={digest.hexdigest()[:5]}" for name, digest in found.items()))
"""


def test_a_warm_start_is_as_a_cold_one(box: Box, monkeypatch: Patch) -> None:
    """In all that a program finds, apart from names that are new each time."""
    said = []
    for how in (forked_supervisors.SUBPROCESS, subprocess):
        monkeypatch.setattr(sandbox, "subprocess", how)
        said.append(box.fails(STATE))
    assert said[0] == said[1] and re.fullmatch(r"exit status 1: ValueError: (\w+=\w{5} ?){15}", said[0])


# ---- what a program may do -------------------------------------------------------------------------------


@pytest.mark.usefixtures("cold")
def test_a_right_program_passes(box: Box) -> None:
    assert box.passes(RIGHT)


USED = [
    "import asyncio\nasync def three():\n    await asyncio.sleep(0)\n    return 3\nassert asyncio.run(three()) == 3",
    "import dataclasses, pickle\n@dataclasses.dataclass\nclass Point:\n    x: int\n"
    "assert pickle.loads(pickle.dumps(Point(1))) == Point(1)",
    "import bisect, collections, copy, datetime, decimal, fractions, functools, heapq, itertools, json, math\n"
    "import random, re, statistics, string, textwrap, typing, unittest, zlib\n"
    "assert decimal.Decimal('0.1') * 3 == decimal.Decimal('0.3') and re.sub('a+', 'b', 'caat') == 'cbt'\n"
    "assert random.Random(0).random() and zlib.decompress(zlib.compress(b'x')) == b'x' and math.gcd(4, 6) == 2",
    "import random, secrets, hashlib, uuid\nassert random.random() and secrets.token_hex() and uuid.uuid4()\n"
    "assert hashlib.sha256(b'').hexdigest().startswith('e3b0')",
    "import sqlite3\nbase = sqlite3.connect(':memory:')\nassert base.execute('select 1 + 1').fetchone() == (2,)",
    "def depth(n): return n and 1 + depth(n - 1)\nassert depth(900) == 900",
    "print('naïve 東京 🙂 ' * 1000)\nassert '🙂'.encode() == b'\\xf0\\x9f\\x99\\x82'",
    "x = bytearray(100 * 2**20)\nx[::4096] = bytes(len(x) // 4096)\nassert sum(x) == 0",
    "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(16) as pool:\n"
    "    assert sum(pool.map(len, [[1]] * 64)) == 64",
    "import queue, threading\nq = queue.Queue()\nthreading.Thread(target=q.put, args=[1]).start()\n"
    "assert q.get(timeout=5)",
    "import signal, time\nclass Late(Exception): pass\ndef ring(*_): raise Late\n"
    "signal.signal(signal.SIGALRM, ring)\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.01)\ntry: time.sleep(5)\nexcept Late: late = True\nassert late",
    "import datetime, platform, time\nassert datetime.datetime.now() and time.localtime() and platform.machine()",
]


def test_what_right_answers_use_is_there(box: Box) -> None:
    assert box.passes("\n".join(USED))


@each(
    "program",
    [
        "import os, tempfile\nwith tempfile.TemporaryDirectory() as folder:\n    path = os.path.join(folder, 'file')\n"
        "    open(path, 'w').write('x'); assert open(path).read() == 'x'\n"
        "with tempfile.NamedTemporaryFile(dir=os.environ['HOME']) as file: file.write(b'x')",
        "import os\nos.makedirs('a/b'); open('a/b/here', 'w').close(); os.rename('a/b/here', 'there')\n"
        "open('there', 'a').truncate(0); os.remove('there'); os.removedirs('a/b')\nopen(os.devnull, 'w').write('x')",
    ],
)
def test_small_files_can_be_written_where_there_is_a_folder_in_memory(box: Box, program: str) -> None:
    """Without namespaces an answer that writes a file does not pass, and its error says why."""
    if box.isolation.namespaces:
        assert box.passes(program)
    else:
        assert re.search("No usable temporary directory|PermissionError", box.fails(program))


@pytest.mark.usefixtures("cold")
def test_a_main_guard_stays_shut(box: Box) -> None:
    assert box.passes(RIGHT + "if __name__ == '__main__':\n    raise SystemExit(input('which test? '))\n")


@pytest.mark.usefixtures("cold")
def test_the_order_of_a_set_is_the_same_each_time(box: Box) -> None:
    assert len({box.fails("raise ValueError(list({'a', 'b', 'c', 'd', 'e', 'f'}))") for _ in range(4)}) == 1


@needs_a_sandbox
def test_sandboxes_stand_side_by_side() -> None:
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ASKED_BY_US[0].passes, [RIGHT] * 8))


def test_a_flood_of_output_is_discarded(box: Box) -> None:
    assert box.passes("for _ in range(200): print('x' * 2**20)")


def test_what_atexit_raises_comes_too_late_to_matter(box: Box) -> None:
    assert box.passes("import atexit\natexit.register(lambda: 1 / 0)")
    box.fails("import atexit\natexit.register(print, 'passed')\natexit.register(lambda: 1 / 0)\nassert False")


# ---- programs that are wrong -----------------------------------------------------------------------------


@each(
    ("program", "reason"),
    [
        ("print('passed')\nassert 1 + 1 == 3, 'sum'", "exit status 1: AssertionError: sum"),
        ("def f(:\n    pass", "did not start: SyntaxError: .*"),
        ("x = '\0'", "did not start: .*null bytes"),
        ("x = '\ud800'", "did not start: UnicodeEncodeError: .*"),
        ("def f(): f()\nf()", "exit status 1: RecursionError: .*"),
        (
            "import sys\nsys.setrecursionlimit(10**8)\ndef f(): f()\nf()",
            ".*(SIGSEGV|MemoryError|timed out|Recursion).*",
        ),
        ("input()", "exit status 1: EOFError: .*"),
        ("raise ValueError('two\\nlines, \\x1b[1m')", "exit status 1: lines, .*"),
    ],
)
def test_a_wrong_program_fails_with_the_last_line_of_its_error(box: Box, program: str, reason: str) -> None:
    assert re.fullmatch(reason, box.fails(program))


# ---- programs that take too much -------------------------------------------------------------------------


def test_an_endless_loop_is_stopped(box: Box) -> None:
    assert box.fails("while True: pass") == "timed out"


def test_a_long_sleep_is_stopped(box: Box) -> None:
    assert box.fails("import time\ntime.sleep(1000)", ProgramLimits(wall_s=0.2)) == "timed out"


def test_ten_gigabytes_are_refused(box: Box) -> None:
    assert "MemoryError" in box.fails("x = bytearray(10 * 2**30)")


def test_a_huge_file_is_refused(box: Box) -> None:
    refusal = "File too large" if box.isolation.namespaces else "Permission denied"
    assert refusal in box.fails("with open('big', 'wb') as file:\n    while True: file.write(bytes(2**20))")
    assert "exit status 1" in box.fails("import sys\nwhile True: sys.stderr.write('x' * 2**20)")


def test_a_thousand_open_files_are_refused(box: Box) -> None:
    assert "Too many open files" in box.fails("files = [open('/dev/null', 'w') for _ in range(1000)]")


PATIENT = "\nimport time\nwhile True: time.sleep(1)"
TOO_MUCH = "No space left on device|Permission denied|Operation not permitted"


@each(
    "greed",
    [
        "for n in range(1000): open(str(n), 'w').close()",
        "for n in range(16): open(str(n), 'wb').write(bytes(2**20))",
        "for n in range(16):\n    file = open(str(n), 'wb'); os.posix_fallocate(file.fileno(), 0, 2**20)",
        "for n in range(1000): os.mkdir('d'); os.chdir('d')",
        "os.mkdir('closed', 0o300)\nfor n in range(16): open(f'closed/{n}', 'wb').write(bytes(2**20))",
    ],
)
def test_filling_the_disk_is_stopped(box: Box, greed: str) -> None:
    """In memory of the sandbox's own there is no more room; on a disk nothing may be written."""
    reason = box.fails("import os\n" + greed, ProgramLimits(folder_bytes=2**23, num_files=500))
    assert re.search(TOO_MUCH, reason), reason


def test_a_flood_of_threads_is_stopped(box: Box) -> None:
    flood = "import threading, time\nthreading.stack_size(2**15)\n"
    flood += "for _ in range(20): threading.Thread(target=time.sleep, args=[1000]).start()"
    assert box.fails(flood + PATIENT, ProgramLimits(num_threads=16)) == "too many threads"


@pytest.mark.parametrize("content", ["os.mkdir('locked', 0)", "for _ in range(1200): os.mkdir('d'); os.chdir('d')"])
def test_nothing_is_left_on_disk(content: str, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for isolation in (*(box.isolation for box in ASKED_BY_US), sandbox.UNSAFE):
        sandbox.run_tests(f"import os\nopen('file', 'w').close()\nos.symlink('/', 'link')\n{content}", isolation)
        assert list(tmp_path.iterdir()) == []


# ---- supervisors that break down -----------------------------------------------------------------------------


@each(
    ("script", "reason"),
    [
        ("raise SystemExit('no room')", "no room"),
        ("import os; os.kill(os.getpid(), 9)", "its supervisor was killed"),
        ("import time; time.sleep(1000)", "its supervisor was killed"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "its supervisor was killed"),
        ("print('\\0\\udcff passed' * 100)", ".*"),
        ("print('passed')", "its supervisor was killed"),
        ("print('12\\npassed', end='')", "its supervisor was killed"),
        ("print('x\\npassed')", "its supervisor was killed"),
        ("import os; print(os.getpid(), flush=True); os.kill(os.getpid(), 9)", "its supervisor was killed"),
    ],
)
def test_a_supervisor_that_breaks_down_is_a_failed_answer(script: str, reason: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(sandbox, "_SUPERVISOR", (sys.executable, "-S", "-c", script))
    monkeypatch.setattr(sandbox, "_GRACE_S", 0.5)
    outcome = sandbox.run_tests(RIGHT, Isolation(landlock=True), ProgramLimits(wall_s=0.1))
    assert not outcome.passed
    assert re.fullmatch(f"the sandbox broke down: {reason}", outcome.reason)


@needs_a_sandbox
@pytest.mark.parametrize("isolation", [box.isolation for box in ASKED_BY_US], ids=str)
def test_a_runner_dies_with_its_supervisor_before_the_verdict(isolation: Isolation, monkeypatch: Patch) -> None:
    monkeypatch.setattr(sandbox, "_SUPERVISOR", (*sandbox._SUPERVISOR, MARKER))

    def kill_supervisor() -> None:
        wait_until(lambda: num_processes() == 4)  # two supervisors and their runners
        children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
        for pid in " ".join(path.read_text() for path in children).split():
            if (
                int(pid) not in forked_supervisors.waiting()
                and MARKER.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
            ):
                os.kill(int(pid), signal.SIGKILL)

    killer = threading.Thread(target=kill_supervisor)
    killer.start()
    outcome = sandbox.run_tests("while True: pass", isolation, ProgramLimits(cpu_s=30, wall_s=30.0))
    assert num_processes() == 0
    assert not outcome.passed
    assert outcome.reason.startswith("the sandbox broke down: ")
    killer.join()


@needs_a_sandbox
@pytest.mark.parametrize("isolation", [box.isolation for box in ASKED_BY_US], ids=str)
def test_the_sandbox_dies_with_the_caller(isolation: Isolation, tmp_path: Path) -> None:
    caller = (
        "from dflash_bench.tasks import sandbox\nfrom dflash_bench.tasks.sandbox import Isolation\n"
        f"sandbox._SUPERVISOR += ({MARKER!r},)\n"
        f"sandbox.run_tests('import time; time.sleep(1000)', {isolation!r}, sandbox.ProgramLimits(wall_s=1000))\n"
    )
    root, environment = Path(sandbox.__file__).parents[2], os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", caller], cwd=root, env=environment)
    wait_until(lambda: num_processes() == 5)  # the caller, the supervisors and the runners
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: num_processes() == 0)


# ---- which sandbox ------------------------------------------------------------------------------------------


def test_a_sandbox_that_does_not_hold_is_not_used(monkeypatch: Patch) -> None:
    sandbox.strongest.cache_clear()
    monkeypatch.setattr(sandbox, "holds", lambda isolation: isolation.landlock and not isolation.namespaces)
    monkeypatch.setattr(sys, "platform", "linux")
    strongest = sandbox.strongest()
    assert strongest is not None
    assert (strongest.landlock, strongest.namespaces, strongest.seccomp) == (True, False, True)
    sandbox.strongest.cache_clear()
    monkeypatch.setattr(sandbox, "holds", lambda isolation: False)
    assert sandbox.strongest() is None
    sandbox.strongest.cache_clear()
    monkeypatch.setattr(sandbox, "holds", lambda isolation: True)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert sandbox.strongest() is None
    monkeypatch.undo()
    sandbox.strongest.cache_clear()


def test_restrictions_that_are_missing_are_noticed(monkeypatch: Patch) -> None:
    """Each sandbox has what the probe asks for; a plain process has not."""
    assert not sandbox.holds(sandbox.UNSAFE)
    for box in ASKED_BY_US:
        assert not sandbox.holds(Isolation(seccomp=True, as_nobody=box.isolation.as_nobody))


@each("version", range(1, 7))
@pytest.mark.parametrize("box", [box for box in ASKED_BY_US if not box.isolation.namespaces], ids=str)
def test_an_older_landlock_holds_with_the_filter(version: int, box: Box, monkeypatch: Patch) -> None:
    """It knows fewer rights; emptying a file that may be read, for one, is not among the first."""
    older = (
        "import sys; sys.path.append(sys.argv[1])\n"
        "from dflash_bench.tasks.isolation import restrictions as kernel, supervisor as supervisor\n"
        "call = kernel.system_call\n"
        f"kernel.system_call = lambda n, *args: {version} if (n, args[0]) == (444, None) else call(n, *args)\n"
        "supervisor.main()"
    )
    words = [older if word == sandbox._START else word for word in sandbox._SUPERVISOR]
    monkeypatch.setattr(sandbox, "_SUPERVISOR", tuple(words))
    assert sandbox.holds(box.isolation)
    for attack in ("os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)", "os.truncate(os.__file__, 0)"):
        assert "Operation not permitted" in box.fails(f"import os\n{attack}")


def test_sandboxes_are_named() -> None:
    restrictions = r"(namespaces, )?(landlock, )?seccomp, rlimits(, as (nobody|root))?"
    assert all(re.fullmatch(restrictions, str(isolation)) for isolation in sandbox.isolations())
    assert str(sandbox.UNSAFE) == "unsafe: a plain process, rlimits"
    assert sandbox.describe(None).startswith("none: not run")
    assert sandbox.describe(sandbox.UNSAFE) == "unsafe: a plain process, rlimits; it can forge its verdict"
    assert re.search("; judged from outside .* known by heart", sandbox.describe(Isolation(landlock=True)))


# ---- without any sandbox ------------------------------------------------------------------------------------


def test_a_plain_process_has_limits_and_ends_with_its_group(monkeypatch: Patch) -> None:
    monkeypatch.setattr(sandbox, "_SUPERVISOR", (*sandbox._SUPERVISOR, MARKER))
    run: Callable[..., ProgramOutcome] = lambda program: sandbox.run_tests(program, sandbox.UNSAFE, SHORT)  # noqa: E731
    assert run(RIGHT) == ProgramOutcome(True, "passed")
    assert run("assert False") == ProgramOutcome(False, "exit status 1: AssertionError")
    assert run("while True: pass") == ProgramOutcome(False, "timed out")
    assert run("import os\nos._exit(0)") == ProgramOutcome(False, "did not finish")
    assert "MemoryError" in run("x = bytearray(10 * 2**30)").reason
    copy = "import os\nif os.fork():\n    os.wait()\n    os._exit(0)"
    assert not run(copy).passed  # a forked copy cannot finish in place of the original
    # The limit on processes counts all of the user's.
    fork = "import os, time\ntry: child = os.fork()\nexcept OSError: child = None\nif child == 0: time.sleep(1000)"
    assert run(fork) == ProgramOutcome(True, "passed")
    wait_until(lambda: num_processes() == 0)
