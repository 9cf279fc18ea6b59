"""A process that is forked from the tests: real enough to be killed or interrupted, and all it needs is loaded.

A new Python loads torch and more for seconds, measures the machine, and then stores what takes a tenth of one.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from tempfile import TemporaryDirectory

MOST_S = 300


def forked(act: Callable[[], object]) -> CompletedProcess[str]:
    """Output and exit status; an exception in `act` is exit status 1 with its traceback."""
    with TemporaryDirectory() as folder:
        said = [Path(folder) / name for name in ("stdout", "stderr")]
        sys.stdout.flush()
        sys.stderr.flush()
        if (pid := os.fork()) == 0:
            _child(act, said)
        ends = time.monotonic() + MOST_S
        while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
            if time.monotonic() > ends:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        out, err = (path.read_text() if path.exists() else "" for path in said)
    return CompletedProcess([], os.waitstatus_to_exitcode(ended[1]), out, err)


class Forked:
    """A process that is forked from the tests and goes on beside them, in a process group of its own."""

    def __init__(self, act: Callable[[], object]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.status: int | None = None
        if (pid := os.fork()) == 0:
            os.setsid()
            _child(act, [Path(os.devnull)] * 2)
        self.pid = pid

    def poll(self) -> int | None:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status

    def wait(self, timeout: float = MOST_S) -> int:
        """Return the exit status. Raises TimeoutExpired."""
        ends = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > ends:
                raise TimeoutExpired("a forked process", timeout)
            time.sleep(0.005)
        assert self.status is not None
        return self.status


def _child(act: Callable[[], object], said: list[Path]) -> None:
    """Never returns: nothing of the tests goes on here."""
    code: object = 1
    try:
        for fd, path in enumerate(said, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), fd)
        sys.stdout, sys.stderr = (os.fdopen(os.dup(fd), "w") for fd in (1, 2))
        act()
        code = 0
    except SystemExit as stopped:
        code = stopped.code or 0
    except BaseException:  # noqa: BLE001 - shown where its caller looks
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
