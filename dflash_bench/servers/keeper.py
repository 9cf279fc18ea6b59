"""Runs one command and outlives whoever asked for it: when its standard input ends, nothing of the command is left.

A process of its own, since one that is killed cannot clean up after itself. It uses the standard library alone, and is
started by its path: `python keeper.py COMMAND...`, in a session of its own. On Linux it also ends what has left the
process group.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

GRACE_S = 10.0
TICK_S = 0.1
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ON_LINUX = sys.platform == "linux"


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # A handler, unlike SIG_IGN, is not inherited by the command.
        signal.signal(number, lambda *_: None)
    if ON_LINUX:
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
    process = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent if ON_LINUX else None
    )
    while process.poll() is None and not _has_ended():
        pass
    code = process.poll()
    _end_all(signal.SIGTERM)
    end_s = time.monotonic() + GRACE_S
    while _are_left(process) and time.monotonic() < end_s:
        time.sleep(TICK_S / 2)
    _end_all(signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    return 0 if code is None else code if code >= 0 else 128 - code


def _has_ended() -> bool:
    """Has whoever started us gone, or closed our standard input? Waits a moment for it."""
    readable, _, _ = select.select([0], [], [], TICK_S)
    return bool(readable) and not os.read(0, 1)


def _are_left(process: subprocess.Popen[bytes]) -> bool:
    process.poll()
    return process.returncode is None or bool(_others())


def _others() -> list[int]:
    """Every process that comes from the command: of our process group, or a descendant of ours."""
    if not ON_LINUX:
        return []
    parents, groups = {}, {}
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            # What stands in brackets is the program's name, and may hold anything.
            state, parent, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if state != "Z":
                parents[int(folder.name)], groups[int(folder.name)] = int(parent), int(group)
    ours = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in ours} - ours:
        ours |= more
    ours |= {process for process, group in groups.items() if group == os.getpgrp()}
    return sorted(ours - {os.getpid()})


def _end_all(number: signal.Signals) -> None:
    if not ON_LINUX:
        os.killpg(os.getpgrp(), number)
        return
    for process in _others():
        with suppress(ProcessLookupError):
            os.kill(process, number)


def _die_with_parent() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
