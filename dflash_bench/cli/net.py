"""The outer net: what went wrong with others' files, disks and memory is one line; a bug of ours keeps its traceback.

Readers say themselves what is wrong with what they read. What gets here is what no reader can foresee: a disk that is
full, memory that the system refuses, a file that goes away while it is read.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from pathlib import Path

from dflash_bench.core.errors import UserError

PACKAGE = Path(__file__).resolve().parent.parent
LEAST_ADDRESSES = 10**9
"""Bytes of address space without which numpy and torch cannot even be loaded: some of their libraries then end the
process without a word."""
REFUSED = ("failed to map segment", "cannot allocate memory", "cannot apply additional memory protection")
"""What the dynamic loader says where there is no memory for a library."""
NOT_ENOUGH = (
    "not enough memory", "out of memory", "defaultcpuallocator", "bad_alloc", "std::bad_alloc", "unable to allocate",
    "can't start new thread", "cannot allocate memory", "failed to allocate", "unable to mmap", "alloc_cpu",
)  # fmt: skip
"""What torch, numpy and Python say where memory, or room for a thread, is refused."""
FROM_OUTSIDE = (OSError, MemoryError, ImportError, RuntimeError, SystemError)
"""What files, disks and memory bring about; each may be a bug all the same, and `said` tells."""
REMEDY = "close what else runs, allow more memory (ulimit -v, -u), or use a smaller model, --limit or --concurrency"


def require_addresses() -> None:
    """Raises UserError where the shell allows less memory than the libraries need."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most != resource.RLIM_INFINITY and most < LEAST_ADDRESSES:
        raise UserError(
            f"this shell allows a process {most / 1e6:.0f} MB of memory (ulimit -v), and at least "
            f"{LEAST_ADDRESSES / 1e6:.0f} MB are needed; raise it"
        )


def said(error: Exception) -> str | None:
    """What to tell the user of an error that is no bug of ours; None for one that may be."""
    for one in _with_causes(error):
        if _is_of_memory(one):
            return f"out of memory ({_reason(one)}); {REMEDY}"
    return _of_the_system(error) if isinstance(error, OSError) else None


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that brought it about."""
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
    """A file of ours that cannot be read is a bug, or a broken installation: its traceback says which."""
    if error.errno is None or error.strerror is None:
        return None
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    if any(Path(name).is_relative_to(PACKAGE) for name in names):
        return None
    return f"{' -> '.join(names)}: {error.strerror}" if names else f"the system says: {error.strerror}"
