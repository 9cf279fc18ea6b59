"""Programs that try to pass without finishing, to get out, to stay, or to take the machine down."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from dflash_bench import sandbox
from dflash_bench.sandbox import Cage, CageError, Limits, Outcome, isolation, run_tests

SHORT = Limits(cpu_s=1, wall_s=2.0)
RIGHT = "def add(a, b):\n    return a + b\n\nassert add(1, 2) == 3\n"


def works(cage: Cage) -> bool:
    with suppress(CageError):
        return sandbox._run_in(cage, sandbox._PROBE, SHORT).passed
    return False


CAGES = [cage for cage in dict.fromkeys(sandbox._cages()) if works(cage)]


@pytest.fixture(params=CAGES, ids=str, autouse=True)
def cage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cage]:
    """Every test runs in every cage this machine grants, and a right program passes after it."""
    monkeypatch.setattr(sandbox, "_strongest_cage", lambda: request.param)
    yield request.param
    assert run_tests(RIGHT) == Outcome(True, "passed")


def fails(program: str, reason: str = "", limits: Limits = SHORT) -> bool:
    outcome = run_tests(program, limits)
    assert re.search(reason, outcome.reason), outcome.reason
    return not outcome.passed


def passes(program: str) -> bool:
    outcome = run_tests(program)
    assert outcome.reason == "passed", outcome.reason
    return outcome.passed


def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """Give the cage's processes an argument to find them by."""
    marker = uuid.uuid4().hex
    monkeypatch.setattr(sandbox, "_KEEPER", (*sandbox._KEEPER, marker))
    return marker


def num_processes(marker: str) -> int:
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found += marker.encode() in path.read_bytes()
    return found


needs_proc = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="no /proc to look for processes")


# ---- what a program may do -------------------------------------------------------------------------------


def test_a_right_program_passes() -> None:
    assert passes(RIGHT)


def test_the_cage_is_named() -> None:
    assert re.fullmatch(r"(namespaces \(.*mount, pid, network\)|audit hook), rlimits(, as \w+)?", isolation())


def test_the_standard_library_and_a_temporary_folder_are_there() -> None:
    assert passes(
        "import asyncio, collections, dataclasses, decimal, heapq, json, os, pickle, random, re, tempfile\n"
        "@dataclasses.dataclass\n"
        "class Point:\n    x: int\n"
        "assert pickle.loads(pickle.dumps(Point(1))) == Point(1)\n"
        "asyncio.run(asyncio.sleep(0))\n"
        "with tempfile.NamedTemporaryFile(dir=os.environ['HOME']) as file: file.write(b'x')\n"
        "open('here', 'w').close(); os.rename('here', 'there'); os.remove('there')\n"
        "open(os.devnull, 'w').write('x')\n"
    )


def test_a_main_guard_stays_shut() -> None:
    assert passes(RIGHT + "if __name__ == '__main__':\n    raise SystemExit(input('which test? '))\n")


def test_the_order_of_a_set_is_the_same_each_time() -> None:
    reasons = {run_tests("raise ValueError(list({'a', 'b', 'c', 'd', 'e', 'f'}))").reason for _ in range(4)}
    assert len(reasons) == 1


def test_cages_stand_side_by_side() -> None:
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(passes, [RIGHT] * 8))


def test_a_flood_of_output_is_discarded() -> None:
    assert passes("for _ in range(200): print('x' * 2**20)")


def test_what_atexit_raises_comes_too_late_to_matter() -> None:
    assert passes("import atexit\natexit.register(lambda: 1 / 0)")
    assert fails("import atexit\natexit.register(print, 'passed')\natexit.register(lambda: 1 / 0)\nassert False")


# ---- programs that are wrong -----------------------------------------------------------------------------


def test_a_wrong_program_fails_with_the_last_line_of_its_error() -> None:
    assert fails("print('passed')\nassert 1 + 1 == 3, 'sum'", "^exit status 1: AssertionError: sum$")


def test_a_syntax_error_fails() -> None:
    assert fails("def f(:\n    pass", "SyntaxError")


def test_text_that_is_no_source_fails() -> None:
    assert fails("x = '\0'", "null bytes")
    assert fails("x = '\ud800'", "UnicodeEncodeError")


def test_a_recursion_without_end_fails() -> None:
    assert fails("def f(): f()\nf()", "RecursionError")
    assert fails("import sys\nsys.setrecursionlimit(10**8)\ndef f(): f()\nf()", "SIGSEGV|MemoryError|timed out")


def test_a_program_that_reads_standard_input_finds_it_empty() -> None:
    assert fails("input()", "EOFError")


# ---- programs that pretend to have finished --------------------------------------------------------------


@pytest.mark.parametrize("leave", ["os._exit(0)", "sys.exit(0)", "sys.exit()", "raise SystemExit"])
def test_leaving_early_is_not_passing(leave: str) -> None:
    assert fails(f"import os, sys\n{leave}\nassert False", "^did not finish$")


def test_saying_the_expected_words_everywhere_is_not_passing() -> None:
    shout = (
        "import os\n"
        "for fd in range(64):\n"
        "    for word in (b'ready', b'passed', b'{\"passed\": true, \"reason\": \"passed\"}'):\n"
        "        try: os.write(fd, word)\n"
        "        except OSError: pass\n"
    )
    assert fails(shout + "os._exit(0)", "^did not finish$")
    assert fails(shout, "^did not finish$")


def test_a_forked_copy_cannot_finish_in_place_of_the_original() -> None:
    assert fails("import os, time\nif os.fork():\n    time.sleep(0.5)\n    os._exit(0)", "did not finish|os.fork")


def test_closing_every_descriptor_is_not_passing() -> None:
    assert fails("import os\nos.closerange(0, 256)")


def test_the_token_is_not_found_through_frames_modules_and_names() -> None:
    hunt = (
        "import collections, os, sys\n"
        "seen, found = {}, []\n"
        "queue = collections.deque([sys._getframe(1), sys.modules['__main__'].__dict__])\n"
        "while queue and len(seen) < 100_000:\n"
        "    thing = queue.popleft()\n"
        "    if id(thing) in seen: continue\n"
        "    seen[id(thing)] = thing\n"
        "    if isinstance(thing, bytes) and len(thing) == 16: found.append(thing)\n"
        "    if getattr(thing, '__name__', '') == 'hand_in': thing(None), os._exit(0)\n"
        "    if isinstance(thing, dict): queue += thing.values()\n"
        "    elif isinstance(thing, (list, tuple, set)): queue += thing\n"
        "    else:\n"
        "        for name in 'f_back f_locals f_globals __dict__ __closure__ cell_contents'.split():\n"
        "            try: queue.append(getattr(thing, name))\n"
        "            except (AttributeError, OSError, ValueError): pass\n"
        "for fd in range(3, 16):\n"
        "    for token in found:\n"
        "        try: os.write(fd, token)\n"
        "        except OSError: pass\n"
        "os._exit(0)\n"
    )
    assert fails(hunt, "^did not finish$", Limits())


@pytest.mark.parametrize("way", ["gc.get_objects()", "gc.get_referents(sys._getframe(1))", "gc.get_referrers(0)"])
def test_the_garbage_collector_does_not_tell(way: str) -> None:
    assert fails(f"import gc, sys\n{way}", "PermissionError")


def test_there_is_no_way_into_raw_memory() -> None:
    assert fails("import ctypes", "ImportError")
    assert fails("import _ctypes", "ImportError")
    assert fails("import __main__\n__main__.ctypes.string_at(id(0), 8)", "PermissionError")
    assert fails("open('/proc/self/mem', 'rb')", "PermissionError|FileNotFoundError")


# ---- programs that take too much -------------------------------------------------------------------------


def test_an_endless_loop_is_stopped() -> None:
    assert fails("while True: pass", "^timed out$")


def test_a_long_sleep_is_stopped() -> None:
    start = time.monotonic()
    assert fails("import time\ntime.sleep(1000)", "^timed out$", Limits(wall_s=0.5))
    assert time.monotonic() - start < 5


def test_ten_gigabytes_are_refused() -> None:
    assert fails("x = bytearray(10 * 2**30)", "MemoryError")


def test_a_huge_file_is_refused() -> None:
    assert fails("with open('big', 'wb') as file:\n    while True: file.write(bytes(2**20))", "File too large")
    assert fails("import sys\nwhile True: sys.stderr.write('x' * 2**20)", "exit status 1")


def test_a_thousand_open_files_are_refused() -> None:
    assert fails("files = [open('file', 'w') for _ in range(1000)]", "Too many open files")


@needs_proc
def test_a_fork_bomb_fizzles(monkeypatch: pytest.MonkeyPatch) -> None:
    marker = mark(monkeypatch)
    assert fails("import os\nfor _ in range(200): os.fork()", "BlockingIOError|PermissionError")
    patient = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"
    assert fails(patient, "^timed out$")
    assert num_processes(marker) == 0


# ---- programs that reach out or stay ---------------------------------------------------------------------


def test_killing_its_parent_does_not_bring_the_caller_down() -> None:
    attack = "import os, signal\nfor pid in (os.getppid(), os.getpid()): os.kill(pid, signal.SIGKILL)\n"
    assert isinstance(run_tests(attack), Outcome)
    assert fails(attack + "assert False", "AssertionError|PermissionError")


def test_the_home_folder_is_out_of_sight() -> None:
    secret = Path.home() / f".dflash-bench-{uuid.uuid4().hex}"
    try:
        secret.write_text("secret")
    except OSError as error:
        pytest.skip(f"the home folder is not writable: {error}")
    try:
        assert fails(f"open({str(secret)!r}).read()", "FileNotFoundError|PermissionError")
        assert fails(f"import os\nos.remove({str(secret)!r})", "FileNotFoundError|PermissionError")
        assert fails(f"import os\nassert {secret.name!r} in os.listdir({str(Path.home())!r})")
        assert secret.read_text() == "secret"
    finally:
        secret.unlink()


def test_other_files_can_be_neither_read_nor_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "secret").chmod(0o666)
    for action in (
        "open({!r}).read()",
        "open({!r}, 'w')",
        "import os; os.remove({!r})",
        "import os; os.truncate({!r}, 0)",
    ):
        assert fails(action.format(str(tmp_path / "secret")), "FileNotFoundError|PermissionError")
    assert fails(f"import os; os.symlink({str(tmp_path)!r}, 'link'); open('link/secret').read()", "Error")
    assert fails(f"import os; os.mkdir({str(tmp_path / 'new')!r})", "FileNotFoundError|PermissionError")
    assert fails("open('/etc/passwd').read()", "FileNotFoundError|PermissionError")
    assert fails("import os; open(os.__file__, 'a')", "Read-only file system|PermissionError")
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    assert (tmp_path / "secret").read_text() == "secret"


def test_the_network_is_out_of_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        address = server.getsockname()
        assert fails(f"import socket\nsocket.create_connection({address}, 1).send(b'x')", "unreachable|PermissionError")
        with pytest.raises(TimeoutError):
            server.accept()


def test_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    assert passes("import os\nassert set(os.environ) <= {'HOME', 'TMPDIR', 'LC_CTYPE', 'PYTHONHASHSEED'}, os.environ")


def test_descriptors_are_not_inherited(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    with (tmp_path / "secret").open() as file:
        os.set_inheritable(file.fileno(), True)
        assert passes(
            "import os\n"
            "for fd in range(256):\n"
            "    try: assert b'secret' not in os.pread(fd, 100, 0)\n"
            "    except OSError: pass\n"
        )


@needs_proc
def test_a_daemon_dies_with_the_cage(cage: Cage, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = mark(monkeypatch)
    outcome = run_tests(
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0: time.sleep(1000)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    assert outcome.passed is cage.namespaces  # the hook refuses to fork in the first place
    assert num_processes(marker) == 0


@needs_proc
def test_the_cage_dies_with_the_caller(cage: Cage, tmp_path: Path) -> None:
    marker = uuid.uuid4().hex
    caller = (
        "from dflash_bench import sandbox\n"
        f"sandbox._KEEPER += ({marker!r},)\n"
        f"sandbox._run_in(sandbox.{cage!r}, 'import time; time.sleep(1000)', sandbox.Limits(wall_s=1000))\n"
    )
    root, environment = Path(sandbox.__file__).parents[1], os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", caller], cwd=root, env=environment)
    wait_until(lambda: num_processes(marker) == 3)  # the caller, the keeper and the runner
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: num_processes(marker) == 0)


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_nothing_is_left_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert passes("import os\nos.mkdir('locked')\nopen('locked/file', 'w').close()\nos.chmod('locked', 0)")
    assert list(tmp_path.iterdir()) == []


def test_a_cage_that_cannot_be_built_is_no_verdict_on_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "_KEEPER", (sys.executable, "-c", "raise SystemExit('no room')"))
        with pytest.raises(CageError, match="no room"):
            run_tests(RIGHT)
