"""The inside of the sandbox: a supervisor builds it, and runners execute an answer's program and its tests in it.

A supervisor is started for every program, so it only imports modules that Python has loaded anyway or that load in a
few milliseconds: no dataclasses, json, subprocess or pathlib here. The caller's side is `dflash_bench.tasks.sandbox`.
"""

from __future__ import annotations

import os

VERDICTS = PASSED, FAILED, REFUSED, UNTESTABLE = "passed", "failed", "refused", "untestable"
ENDED = "its program ended"
"""The reason if the answer's program has ended; its own supervisor reports why."""
REASON_CHARS = 200


def last_line(file: int) -> str:
    """Return the last line that a process wrote to this file descriptor, truncated to fit the reply."""
    tail = os.pread(file, 4096, max(0, os.fstat(file).st_size - 4096)).decode(errors="replace")
    lines = tail.strip().splitlines() or [""]
    return lines[-1].strip()[:REASON_CHARS]
