"""Every sandbox that this machine grants, asked for by this user and, where that is root, by nobody too."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dflash_bench.tasks import sandbox
from dflash_bench.tasks.sandbox import Isolation, ProgramLimits, ProgramOutcome
from helpers import forked_supervisors

USUAL = ProgramLimits()
SHORT = ProgramLimits(cpu_s=1, wall_s=2.0)
RIGHT = "def add(a, b):\n    return a + b\n\nassert add(1, 2) == 3\n"
MARKER = uuid.uuid4().hex
"""An argument of every supervisor, to find the sandbox's processes by."""
NOBODY = 65534
REFUSED = (
    "Operation not permitted|Permission denied|No such file|Read-only file system|Function not implemented"
    "|Is a directory|out of pty devices"
)
_SERVER = """
import json, subprocess, sys
import forked_supervisors
from dflash_bench.tasks import sandbox
sandbox._SUPERVISOR += (json.loads(sys.stdin.readline()),)
for line in sys.stdin:
    isolation, limits, program, tests, asked, is_warm = json.loads(line)
    sandbox.subprocess = forked_supervisors.SUBPROCESS if is_warm else subprocess
    if program is None: said = [sandbox.holds(sandbox.Isolation(**isolation)), "", True]
    else:
        asked_for = sandbox.Isolation(**isolation), sandbox.ProgramLimits(**limits)
        outcome = sandbox.run_tests(program, *asked_for, tests, asked)
        said = [outcome.passed, outcome.reason, outcome.by_value]
    print(json.dumps([said, [*forked_supervisors.waiting()]]), flush=True)
"""
_WAITING: set[int] = set()
"""The process that the user nobody's supervisors are forked from."""


def attacking(attacks: Sequence[str], words: str = REFUSED, setup: str = "") -> str:
    """A program that passes if each attack, behind `setup`, raises an error with one of these words.

    They run in one process, each in a folder of its own where the sandbox has any.
    """
    return f"""
import os, re
home, let = os.getcwd(), []
for number, attack in enumerate({attacks!r}):
    try: os.mkdir(str(number)), os.chdir(str(number))
    except OSError: pass
    try: exec({setup!r} + attack, {{}})
    except BaseException as error: said = f"{{type(error).__name__}}: {{error}}"
    else: said = "not refused"
    if not re.search({words!r}, said): let.append((attack, said))
    os.chdir(home)
assert not let, let
"""


@dataclass(frozen=True)
class Box:
    """A sandbox, and whose process asks for it."""

    isolation: Isolation
    is_nobody: bool

    def __str__(self) -> str:
        return f"{self.isolation}".replace("as root", "asked by nobody") if self.is_nobody else f"{self.isolation}"

    def run(
        self, program: str, limits: ProgramLimits = USUAL, tests: str = "", asked: Sequence[str] = ()
    ) -> ProgramOutcome:
        if self.is_nobody:
            return ProgramOutcome(*_ask(self.isolation, limits, program, tests, asked))
        return sandbox.run_tests(program, self.isolation, limits, tests, asked)

    def fails(self, program: str, limits: ProgramLimits = SHORT, tests: str = "", asked: Sequence[str] = ()) -> str:
        """The reason."""
        outcome = self.run(program, limits, tests, asked)
        assert outcome.passed is False, program
        return outcome.reason

    def passes(self, program: str, limits: ProgramLimits = USUAL) -> bool:
        outcome = self.run(program, limits)
        assert outcome == ProgramOutcome(True, "passed"), outcome.reason
        return True

    def refuses(self, attacks: Sequence[str], words: str = REFUSED, setup: str = "") -> bool:
        """Each attack raises an error with one of these words, and leaves the process alive."""
        return self.passes(attacking(attacks, words, setup))

    def give(self, path: Path) -> None:
        """To the user who asks, as far as ownership goes."""
        if self.is_nobody:
            os.chown(path, NOBODY, NOBODY)


def _ask(
    isolation: Isolation, limits: ProgramLimits, program: str | None, tests: str = "", asked: Sequence[str] = ()
) -> tuple[bool | None, str, bool]:
    server = _server()
    assert isinstance(server, subprocess.Popen)
    assert server.stdin
    assert server.stdout
    is_warm = sandbox.subprocess is forked_supervisors.SUBPROCESS
    server.stdin.write(json.dumps([asdict(isolation), asdict(limits), program, tests, asked, is_warm]) + "\n")
    server.stdin.flush()
    (passed, reason, by_value), waiting = json.loads(server.stdout.readline())
    _WAITING.update(waiting)
    return passed, reason, by_value


@cache
def _server() -> Any:
    """A process of nobody's that runs programs for us; or the reason why there is none."""
    if os.geteuid() != 0:
        return "only root can become another user"
    home = Path(tempfile.mkdtemp(prefix="dflash-bench-tests-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    home.chmod(0o755)
    package = Path(sandbox.__file__).parent
    copy = home / "dflash_bench" / "tasks"
    shutil.copytree(package / "isolation", copy / "isolation", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(package.parent / "__init__.py", copy.parent)
    for name in ("__init__.py", "sandbox.py"):
        shutil.copy(package / name, copy)
    shutil.copy(forked_supervisors.__file__, home)
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        with suppress(OSError, subprocess.CalledProcessError):
            _as_nobody(subprocess.check_call, [python, "-c", "import sys; assert sys.version_info >= (3, 11)"], home)
            server = _as_nobody(subprocess.Popen, [python, "-s", "-c", _SERVER], home)
            server.stdin.write(json.dumps(MARKER) + "\n")
            return server
    return "nobody can read no Python of 3.11 or newer here"


def _as_nobody(start: Callable[..., Any], words: list[str], home: Path) -> Any:
    pipe = subprocess.PIPE if start is subprocess.Popen else None
    return start(
        words,
        cwd=home,
        env={"PYTHONPATH": str(home), "PATH": os.defpath},
        stdin=pipe,
        stdout=pipe,
        stderr=subprocess.DEVNULL,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        text=True,
    )


def _boxes() -> list[Any]:
    params = []
    for is_nobody in (False, True):
        if is_nobody and isinstance(_server(), str):
            params.append(pytest.param(None, id="asked by nobody", marks=pytest.mark.skip(reason=_server())))
            continue
        for isolation in sandbox.isolations():
            if is_nobody and isolation.as_nobody:
                continue  # only root can choose
            isolation_holds = _ask(isolation, ProgramLimits(), None)[0] if is_nobody else sandbox.holds(isolation)
            box = Box(isolation, is_nobody)
            # The user nobody gets no sandbox if the interpreter is in root's home, which it cannot read.
            marks = (
                () if isolation_holds else (pytest.mark.skip(reason=f"this system does not grant the sandbox {box}"),)
            )
            params.append(pytest.param(box, id=str(box), marks=marks))
    return params


BOXES = _boxes()
ASKED_BY_US = [box for param in BOXES if (box := param.values[0]) and not box.is_nobody and not param.marks]


def num_processes(marker: str = MARKER) -> int:
    """Without those that supervisors are forked from."""
    count = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        if int(path.parent.name) not in (*forked_supervisors.waiting(), *_WAITING):
            with suppress(FileNotFoundError, ProcessLookupError):
                count += marker.encode() in path.read_bytes()
    return count


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
