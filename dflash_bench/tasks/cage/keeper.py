"""The keeper: builds the cage, forks the runner into it, watches it, and tells the caller how it ended.

Its answer is two lines: the runner's process id, then the verdict. At the end it kills its process group, itself too.
"""

from __future__ import annotations

import marshal
import os
import signal
import sys
import time
from contextlib import suppress

from dflash_bench.tasks.cage import kernel, namespaces, runner
from dflash_bench.tasks.cage.order import Order

TICK_S = 0.05
"""How often it checks what the kernel has no limit for."""
MOST_NESTED = 32
REASON_CHARS = 200


def main() -> None:
    order = Order(marshal.loads(sys.stdin.buffer.read()))
    sys.path.remove(sys.argv[1])  # where this package was found
    if sys.platform == "linux":
        kernel.die_with_parent()
    if os.getppid() != order.parent:  # the caller died before the line above
        sys.exit("the caller is gone")
    answer = _watch(order)
    os.write(sys.stdout.fileno(), f"{answer}\n".encode())
    os.killpg(0, signal.SIGKILL)  # whatever is left of the group, this process included


def _watch(order: Order) -> str:
    null = os.open(os.devnull, os.O_RDWR)
    tasks = os.open("/proc", os.O_RDONLY) if os.path.isdir("/proc/self/task") else null
    folder = namespaces.enter(order, os.getcwd()) if order.namespaces else os.getcwd()
    token_out, token_in = os.pipe()
    report_out, report_in = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(null, 0)
        os.dup2(null, 1)
        for fd in (null, tasks, token_in, report_out):
            if fd > 2:
                os.close(fd)
        runner.run(order, folder, token_out, report_in)
    os.close(report_in)
    os.write(sys.stdout.fileno(), f"{child}\n".encode())
    token = os.urandom(runner.TOKEN_BYTES)  # after the fork, so that no frame of the runner ever held it
    os.write(token_in, token)
    failure = Watch(order, child, folder, tasks).wait()
    os.set_blocking(report_out, False)
    report = os.read(report_out, 64)
    if not report.startswith(runner.READY):
        return f"failed did not start: {last_line(2)}"
    if failure is None and report != runner.READY + token:
        failure = "did not finish"
    return "passed" if failure is None else f"failed {failure}"


class Watch:
    """Watches one runner, from its start to its end."""

    def __init__(self, order: Order, child: int, folder: str, proc: int) -> None:
        self.order, self.child, self.folder, self.proc = order, child, folder, proc
        self.deadline = time.monotonic() + order.wall_s
        self.excess: str | None = None

    def wait(self) -> str | None:
        """Wait until it is dead with all its threads. Returns why it failed, or None."""
        signal.signal(signal.SIGALRM, self._look)
        signal.setitimer(signal.ITIMER_REAL, TICK_S)
        _, status, usage = os.wait4(self.child, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            # The kernel counts whole ticks against the limit; on a busy machine the real usage is less than that.
            used_up = code == -signal.SIGKILL and usage.ru_utime + usage.ru_stime > self.order.cpu_s / 2
            return self.excess or ("timed out" if used_up else f"killed by {signal.Signals(-code).name}")
        return f"exit status {code}: {last_line(2)}" if code else None

    def _look(self, *_: object) -> None:
        start = time.monotonic()
        self.excess = self._excess()
        if self.excess:
            with suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(self.child, signal.SIGKILL)
            return
        # Checking many files takes time; at most a fifth of ours goes there.
        pause = max(TICK_S, 4 * (time.monotonic() - start))
        signal.setitimer(signal.ITIMER_REAL, max(TICK_S / 10, min(pause, self.deadline - time.monotonic())))

    def _excess(self) -> str | None:
        if time.monotonic() >= self.deadline:
            return "timed out"
        if self._num_threads() > self.order.num_threads:
            return "too many threads"
        # With namespaces, the temporary file system has its own size limit.
        if self.order.namespaces or not overflows(self.folder, self.order.folder_bytes, self.order.num_files):
            return None
        return "too many files"

    def _num_threads(self) -> int:
        try:
            return os.stat(f"{self.child}/task", dir_fd=self.proc).st_nlink - 2
        except (FileNotFoundError, NotADirectoryError):  # it has just ended; or a system without /proc
            return 0


def overflows(folder: str, num_bytes: int, num_files: int) -> bool:
    """Is there more than this beneath `folder`? Also true if we cannot tell: nested too deep, or unreadable."""
    folders = [(folder, 0)]
    while folders:
        path, depth = folders.pop()
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    num_files -= 1
                    if entry.is_dir(follow_symlinks=False):
                        folders.append((entry.path, depth + 1))
                    else:
                        num_bytes -= _size(entry)
                    if num_files < 0 or num_bytes < 0:
                        return True
        except FileNotFoundError:
            continue
        except OSError:
            return True
        if depth > MOST_NESTED:
            return True
    return False


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_blocks * 512
    except FileNotFoundError:
        return 0


def last_line(file: int) -> str:
    """The last line that a process wrote to this file descriptor, cut to what fits into the answer."""
    tail = os.pread(file, 4096, max(0, os.fstat(file).st_size - 4096)).decode(errors="replace")
    lines = tail.strip().splitlines() or [""]
    return lines[-1].strip()[:REASON_CHARS]
