"""System calls by a seccomp filter, which takes no privilege: a short list is allowed, everything else refused.

So there is no second process, no program to execute, no socket but a pair, no signal but to itself, and nothing of the
kernel's rarer and weaker corners. Threads are allowed: right answers use them, and they end with their process.
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
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in what the filter sees
_LOAD, _AND, _JUMP_EQUAL, _JUMP_GREATER, _RETURN = 0x20, 0x54, 0x15, 0x25, 0x06  # <linux/filter.h>
_ARCHITECTURES = {"x86_64": (0xC000003E, syscalls.X86_64), "aarch64": (0xC00000B7, syscalls.AARCH64)}
_CLONE3, _NEWEST = 435, 450
"""The same on every architecture."""

# <sched.h>: what makes a thread, and all that would make more of it
_THREAD, _NEW_NAMESPACES, _OF_CLONE = 0x00010900, 0x7E020000, 0x00012900
_PLAIN_OPENS = (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_RDWR | os.O_TRUNC)
_ANY = 0xFFFFFFFF
Condition = tuple[int, int, Sequence[int]]
"""Number of an argument, a mask, and what the argument may be under it. Arguments so checked have 32 bits."""


def _conditions(pid: int) -> Mapping[str, Sequence[Condition]]:
    """What is allowed with some arguments only, by process `pid`."""
    opens = os.O_ACCMODE | os.O_TRUNC
    return {
        "clone": [(0, _OF_CLONE | _NEW_NAMESPACES, [_THREAD])],
        "kill": [(0, _ANY, [pid])],
        "tgkill": [(0, _ANY, [pid])],
        "prlimit64": [(0, _ANY, [0, pid])],
        # Opened for reading with O_TRUNC, a file that may only be read would be emptied before Landlock 3.
        "open": [(1, opens, _PLAIN_OPENS)],
        "openat": [(2, opens, _PLAIN_OPENS)],
        "renameat2": [(4, _ANY, [0, 1])],  # RENAME_NOREPLACE; a whiteout would be a device
        # Flags and locks; F_SETOWN and F_SETSIG would send signals to others.
        "fcntl": [(1, _ANY, [0, 1, 2, 3, 4, 5, 6, 7, 1030])],
        # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, TCGETS2
        "ioctl": [(1, _ANY, [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A])],
        "prctl": [(0, _ANY, [15, 16, 0x53564D41])],  # names of threads and of memory
        # AF_UNIX and SOCK_STREAM: connected for good, unlike datagrams
        "socketpair": [(0, _ANY, [1]), (1, 0xFF, [1])],
    }


def restrict() -> None:
    """This process for good, which must have renounced new privileges. Raises OSError where there is no filter."""
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
    # To calls newer than this list the kernel may as well have said "no such call", as C libraries expect; `clone3`,
    # whose arguments cannot be seen, they replace by `clone`. The numbers of x32 are beyond the newest, too.
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
