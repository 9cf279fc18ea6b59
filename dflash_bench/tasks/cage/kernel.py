"""System calls that Python does not wrap."""

from __future__ import annotations

import ctypes
import os
import signal

_PDEATHSIG, _NO_NEW_PRIVS = 1, 38  # <sys/prctl.h>
_CAPABILITY_VERSION_3 = 0x20080522  # <linux/capability.h>
_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *args: object) -> int:
    """Call a C library function that returns -1 and sets `errno` when it fails; raises OSError then."""
    function = getattr(_libc, name)
    function.restype = ctypes.c_long if name == "syscall" else ctypes.c_int
    result: int = function(*args)
    if result == -1:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def system_call(number: int, *args: int | bytes | None) -> int:
    """Make a system call by number. Integers are passed as longs: the C library cannot know how wide they are."""
    words = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    return call("syscall", ctypes.c_long(number), *words)


def prctl(option: int, *args: int | bytes) -> int:
    words = [ctypes.c_ulong(arg) if isinstance(arg, int) else arg for arg in args]
    return call("prctl", option, *words, *[ctypes.c_ulong(0)] * (4 - len(words)))


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; a change of user or capabilities undoes this."""
    prctl(_PDEATHSIG, signal.SIGKILL)


def renounce_privileges() -> None:
    """Drop all capabilities, and gain none from any program started later."""
    prctl(_NO_NEW_PRIVS, 1)
    call("capset", (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), bytes(24))
