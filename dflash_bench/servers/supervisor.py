"""Run a command, and end all its processes when standard input is closed.

This is a separate process, since a killed caller cannot clean up after itself. It uses the standard library only, and
is started by its path in a new session: `python supervisor.py COMMAND...`. On Linux it also ends processes that have
left the process group. The command's output is passed on without the texts in TO_HIDE, and shortened if too long.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

GRACE_S = 10.0
TICK_S = 0.1
TO_HIDE = "DFLASH_BENCH_TO_HIDE"
"""The environment variable with these texts as a JSON list; the command does not inherit it."""
STARS = b"***"
PIECE, HEAD, TAIL, LONGEST = 1 << 16, 1 << 20, 1 << 18, 1 << 24
"""Bytes read at a time, and kept of the beginning and the end of a log longer than LONGEST."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ON_LINUX = sys.platform == "linux"


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # A handler, unlike SIG_IGN, is not inherited by the command.
        signal.signal(number, lambda *_: None)
    if ON_LINUX:
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
    secrets = [text.encode() for text in json.loads(os.environ.pop(TO_HIDE, "[]"))]
    process = subprocess.Popen(
        sys.argv[1:],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=_die_with_parent if ON_LINUX else None,
    )
    assert process.stdout is not None
    log = threading.Thread(target=_copy, args=(process.stdout.fileno(), Log(), secrets), daemon=True)
    log.start()
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
    log.join(GRACE_S)
    return 0 if code is None else code if code >= 0 else 128 - code


class Log:
    """Our standard output. If it is a file that gets too long, only the beginning and the end are kept."""

    def __init__(self) -> None:
        self.is_file = stat.S_ISREG(os.fstat(1).st_mode)
        self.length = os.lseek(1, 0, os.SEEK_CUR) if self.is_file else 0
        self.last = b""
        self.num_cut = 0

    def write(self, text: bytes) -> None:
        """Write text. If the reader is gone, the text is lost, and the command continues."""
        self.last = (self.last + text)[-TAIL:]
        self.length += len(text)
        with suppress(OSError):
            if self.length <= LONGEST:
                _write_all(text)
            elif self.is_file:
                self.num_cut += self.length - HEAD - len(self.last)
                os.lseek(1, HEAD, os.SEEK_SET)
                _write_all(b"\n[... %d bytes are left out ...]\n" % self.num_cut + self.last)
                self.length = os.lseek(1, 0, os.SEEK_CUR)
                os.ftruncate(1, self.length)


def _write_all(text: bytes) -> None:
    while text:
        text = text[os.write(1, text) :]


def _copy(source: int, log: Log, secrets: list[bytes]) -> None:
    """Copy until all writers are closed; text that may be the beginning of a secret is held back."""
    # Longest first: a secret may be part of another.
    secrets = sorted(filter(None, secrets), key=len, reverse=True)
    rest = b""
    while piece := os.read(source, PIECE):
        rest += piece
        for secret in secrets:
            rest = rest.replace(secret, STARS)
        waiting = max((_overlap(rest, secret) for secret in secrets), default=0)
        log.write(rest[: len(rest) - waiting])
        rest = rest[len(rest) - waiting :]
    log.write(rest)


def _overlap(text: bytes, secret: bytes) -> int:
    """Return the length of the secret's longest proper prefix at the text's end, in bytes."""
    return next((size for size in range(min(len(secret) - 1, len(text)), 0, -1) if text.endswith(secret[:size])), 0)


def _has_ended() -> bool:
    """Wait a moment, and return whether our caller is gone or has closed our standard input."""
    readable, _, _ = select.select([0], [], [], TICK_S)
    return bool(readable) and not os.read(0, 1)


def _are_left(process: subprocess.Popen[bytes]) -> bool:
    process.poll()
    return process.returncode is None or bool(_others())


def _others() -> list[int]:
    """Return all processes of the command: those in our process group, and our descendants."""
    if not ON_LINUX:
        return []
    parents, groups = {}, {}
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            # The program's name in parentheses may hold any character.
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
