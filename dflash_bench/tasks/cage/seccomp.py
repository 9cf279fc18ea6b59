"""A seccomp filter of system calls, which needs no privilege: a short list is allowed, everything else refused.

So the program cannot start a process, execute another program, open a socket (except a connected pair), signal any
process but itself, or reach rarely used parts of the kernel. Threads are allowed: correct answers use them, and they
end with their process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterable, Mapping, Sequence

from dflash_bench.tasks.cage import kernel, syscalls

_SET_SECCOMP, _FILTER = 22, 2  # <sys/prctl.h>, <linux/seccomp.h>
_KILL_PROCESS, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_LOAD, _AND, _JUMP_EQUAL, _JUMP_GREATER, _RETURN = 0x20, 0x54, 0x15, 0x25, 0x06  # <linux/filter.h>
_ARCHITECTURES = {"x86_64": (0xC000003E, syscalls.X86_64), "aarch64": (0xC00000B7, syscalls.AARCH64)}
_CLONE3, _NEWEST = 435, 450
"""The same on every architecture."""

# <sched.h>: flags that make a thread, flags that make new namespaces, and those of a thread that we check
_THREAD, _NEW_NAMESPACES, _OF_CLONE = 0x00010900, 0x7E020000, 0x00012900
_PLAIN_OPENS = (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_RDWR | os.O_TRUNC)
_ANY = 0xFFFFFFFF
Condition = tuple[int, int, Sequence[int]]
"""Number of an argument, a mask, and the values allowed for the masked argument. Such arguments have 32 bits."""


def _conditions(pid: int) -> Mapping[str, Sequence[Condition]]:
    """System calls that process `pid` may make with some arguments only."""
    opens = os.O_ACCMODE | os.O_TRUNC
    return {
        "clone": [(0, _OF_CLONE | _NEW_NAMESPACES, [_THREAD])],
        "kill": [(0, _ANY, [pid])],
        "tgkill": [(0, _ANY, [pid])],
        "prlimit64": [(0, _ANY, [0, pid])],
        # Before Landlock 3, opening a file for reading with O_TRUNC would empty it, even if it may only be read.
        "open": [(1, opens, _PLAIN_OPENS)],
        "openat": [(2, opens, _PLAIN_OPENS)],
        "renameat2": [(4, _ANY, [0, 1])],  # none or RENAME_NOREPLACE; RENAME_WHITEOUT would make a device
        # Flags and locks; F_SETOWN and F_SETSIG would send signals to others.
        "fcntl": [(1, _ANY, [0, 1, 2, 3, 4, 5, 6, 7, 1030])],
        # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, TCGETS2
        "ioctl": [(1, _ANY, [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A])],
        "prctl": [(0, _ANY, [15, 16, 0x53564D41])],  # names of threads and of memory
        # AF_UNIX and SOCK_STREAM: such a pair stays connected to each other, datagram sockets need not
        "socketpair": [(0, _ANY, [1]), (1, 0xFF, [1])],
    }


def restrict() -> None:
    """Restrict this process for good; it must have renounced privileges. Raises OSError where we have no filter."""
    machine = os.uname().machine
    if machine not in _ARCHITECTURES or ctypes.sizeof(ctypes.c_void_p) != 8:
        raise OSError(errno.ENOSYS, f"no filter of system calls for {machine}")
    code = ctypes.create_string_buffer(program(machine, os.getpid()))
    num_instructions = (len(code) - 1) // 8
    # struct sock_fprog: a short, padding, an address
    fprog = struct.pack("HxxxxxxQ", num_instructions, ctypes.addressof(code))
    kernel.prctl(_SET_SECCOMP, _FILTER, fprog)


def program(machine: str, pid: int) -> bytes:
    """The filter of one architecture as the kernel reads it."""
    architecture, numbers = _ARCHITECTURES[machine]
    conditions = _conditions(pid)
    refuse = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    absent = (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)
    instructions = [
        (_LOAD, 0, 0, _ARCHITECTURE), (_JUMP_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
    ]  # fmt: skip
    for name, number in numbers.items():
        body = [*_checks(conditions.get(name, ())), (_RETURN, 0, 0, _ALLOW)]
        instructions += [(_JUMP_EQUAL, 0, len(body), number), *body]
    # Calls newer than this list get "no such call", which C libraries are prepared for. So does `clone3`, whose
    # arguments a filter cannot see: C libraries then use `clone`. The numbers of x32 are above the newest, too.
    instructions += [(_JUMP_EQUAL, 1, 0, _CLONE3), (_JUMP_GREATER, 0, 1, _NEWEST), absent, refuse]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)


def _checks(conditions: Iterable[Condition]) -> list[tuple[int, int, int, int]]:
    """Refuse unless all of them hold; fall through to what follows if they do."""
    checks = []
    for argument, mask, values in conditions:
        checks += [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), (_AND, 0, 0, mask)]
        checks += [(_JUMP_EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
        checks.append((_RETURN, 0, 0, _ERRNO | errno.EPERM))
    return checks
