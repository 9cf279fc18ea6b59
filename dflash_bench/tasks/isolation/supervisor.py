"""The supervisor: builds the sandbox, forks the runner into it, watches it, and reports how it ended.

Its reply is two lines: the runner's process id, then the verdict. At the end it kills its process group and itself.
"""

from __future__ import annotations

import marshal
import os
import signal
import sys
import time
from contextlib import suppress

from dflash_bench.tasks.isolation import child as isolation_child
from dflash_bench.tasks.isolation import last_line, restrictions
from dflash_bench.tasks.isolation.restrictions import SandboxRequest

TICK_S = 0.05
"""Interval of checks for which the kernel has no limit."""
_REPORT_BYTES = 4096


def main() -> None:
    request = SandboxRequest(marshal.loads(sys.stdin.buffer.read()))
    sys.path.remove(sys.argv[1])  # where this package was found
    if sys.platform == "linux":
        restrictions.die_with_parent()
    if os.getppid() != request.parent:  # the caller died before the line above
        sys.exit("the caller is gone")
    answer = _watch(request)
    os.write(sys.stdout.fileno(), f"{answer}\n".encode())
    os.killpg(0, signal.SIGKILL)  # whatever is left of the group, this process included


def _watch(request: SandboxRequest) -> str:
    null = os.open(os.devnull, os.O_RDWR)
    tasks = os.open("/proc", os.O_RDONLY) if os.path.isdir("/proc/self/task") else null
    folder = restrictions.enter(request, os.getcwd()) if request.namespaces else os.getcwd()
    report_out, report_in = os.pipe()
    known_out, known_in = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(known_in)
        os.read(known_out, 1)  # wait until the caller can read our process id, or the supervisor has ended
        os.dup2(null, 0)
        os.dup2(null, 1)
        for fd in (null, tasks, known_out, report_out):
            if fd > 2:
                os.close(fd)
        isolation_child.run(request, folder, report_in)
    os.write(sys.stdout.fileno(), f"{child}\n".encode())
    # The ends of the link are closed here so that the other side notices when the runner is gone.
    for fd in (known_out, known_in, report_in, request.receiving, request.sending):
        os.close(fd)
    failure = Watch(request, child, tasks).wait()
    os.set_blocking(report_out, False)
    report = os.read(report_out, _REPORT_BYTES)
    if not report.startswith(isolation_child.READY):
        return f"failed did not start: {last_line(2)}"
    if failure is not None:
        return f"failed {failure}"
    return report.removeprefix(isolation_child.READY).decode() or "failed did not finish"


class Watch:
    """Watches one runner from start to end."""

    def __init__(self, request: SandboxRequest, child: int, proc: int) -> None:
        self.request, self.child, self.proc = request, child, proc
        self.deadline = time.monotonic() + request.wall_s
        self.excess: str | None = None

    def wait(self) -> str | None:
        """Wait until the runner and all its threads are dead. Return why it failed, or None."""
        signal.signal(signal.SIGALRM, self._look)
        signal.setitimer(signal.ITIMER_REAL, TICK_S)
        _, status, usage = os.wait4(self.child, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            # The kernel counts whole ticks against the limit; on a busy machine the real usage is less than that.
            used_up = code == -signal.SIGKILL and usage.ru_utime + usage.ru_stime > self.request.cpu_s / 2
            return self.excess or ("timed out" if used_up else f"killed by {signal.Signals(-code).name}")
        return f"exit status {code}: {last_line(2)}" if code else None

    def _look(self, *_: object) -> None:
        self.excess = self._excess()
        if self.excess:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self.child, signal.SIGKILL)
            return
        signal.setitimer(signal.ITIMER_REAL, max(TICK_S / 10, min(TICK_S, self.deadline - time.monotonic())))

    def _excess(self) -> str | None:
        if time.monotonic() >= self.deadline:
            return "timed out"
        if self._num_threads() > self.request.num_threads:
            return "too many threads"
        return None

    def _num_threads(self) -> int:
        try:
            return os.stat(f"{self.child}/task", dir_fd=self.proc).st_nlink - 2
        except (FileNotFoundError, NotADirectoryError):  # it has just ended, or the system has no /proc
            return 0
