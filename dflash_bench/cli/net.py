"""The last resort for errors of files, disks and memory: they become one line, while bugs keep a traceback.

Readers report errors in their own input. These are the errors that no reader can foresee: a full disk, memory that the
system refuses, a file that disappears while it is read.
"""

from __future__ import annotations

import errno
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_bench.core.errors import UserError

PACKAGE = Path(__file__).resolve().parent.parent
LEAST_ADDRESSES = 12 * 10**8
"""Bytes of address space that numpy, torch and numba need to load; with less, some end the process silently."""
REFUSED = ("failed to map segment", "cannot allocate memory", "cannot apply additional memory protection")
"""Messages of the dynamic loader when a library does not fit in memory."""
NOT_ENOUGH = (
    "not enough memory",
    "out of memory",
    "defaultcpuallocator",
    "bad_alloc",
    "std::bad_alloc",
    "unable to allocate",
    "can't start new thread",
    "cannot allocate memory",
    "failed to allocate",
    "unable to mmap",
    "alloc_cpu",
    "status_alloc_failed",
)
"""Messages of torch, numpy and Python if memory, or a thread, is refused."""
FROM_OUTSIDE = (OSError, MemoryError, ImportError, RuntimeError, SystemError)
"""Types of errors of files, disks and memory; each may still be a bug, which `explain` decides."""
REMEDY = "close other programs, allow more memory (ulimit -v, -u), or use a smaller model, --limit or --concurrency"
REMEDY_ON_GPU = (
    "stop other processes on the GPU (nvidia-smi names them), or use a smaller model, --dtype or --concurrency"
)


_stopped_by = signal.SIGINT
"""The signal that ends this process."""


@contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a command as Ctrl-C does. An ignored signal, as by nohup, stays ignored."""
    global _stopped_by
    _stopped_by = signal.SIGINT
    usual = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in usual:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number in usual:
            signal.signal(number, signal.SIG_DFL)


def _interrupt(number: int, _: object) -> None:
    global _stopped_by
    _stopped_by = signal.Signals(number)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as for a shell's background command (&)
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


def stopped_status() -> int:
    """Return the exit status of a command that a signal ended, by the shell's convention: 130 after Ctrl-C."""
    return 128 + _stopped_by


def require_addresses() -> None:
    """Raise UserError if the shell allows less memory than the libraries need."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most != resource.RLIM_INFINITY and most < LEAST_ADDRESSES:
        raise UserError(
            f"this shell allows a process {most / 1e6:.0f} MB of memory (ulimit -v), and at least "
            f"{LEAST_ADDRESSES / 1e6:.0f} MB are needed; raise it"
        )


def explain(error: Exception) -> str | None:
    """Return the message for an error that is not our bug; None if it may be."""
    for one in _with_causes(error):
        if _is_of_memory(one):
            reason = _reason(one)
            return f"out of memory ({reason}); {REMEDY_ON_GPU if reason.startswith('CUDA') else REMEDY}"
    return _of_the_system(error) if isinstance(error, OSError) else None


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in seen:
        seen.append(following)
        yield following
        following = following.__cause__ or following.__context__


def _is_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    if isinstance(error, ImportError):
        return any(part in text for part in REFUSED)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(part in text for part in NOT_ENOUGH)
    )


def _reason(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["the system refused it"])[0]


def _of_the_system(error: OSError) -> str | None:
    """Return the message for an error of the operating system.

    An unreadable file of this package is a bug or a broken installation, which the traceback shows.
    """
    if error.errno is None or error.strerror is None:
        return None
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    if any(Path(name).is_relative_to(PACKAGE) for name in names):
        return None
    return f"{' -> '.join(names)}: {error.strerror}" if names else f"the system says: {error.strerror}"
