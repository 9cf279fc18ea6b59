"""Confinement of a program under test: seccomp, Landlock and namespaces, by plain system calls."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence

# System calls that a Python program needs, by name and number; all others are refused.
#
# Omitted on purpose, besides what is obviously dangerous: changing mode, owner, times or attributes of a file or
# truncating it by name (Landlock covers none of these), links and special files, anything that affects another process
# (signals, limits, priorities), sessions, sockets (except a connected pair), `execve`, and `fallocate`, which reserves
# space beyond the end of a file, where the limit on its size does not apply (ext4, standard error on disk).


# fmt: off
X86_64: Mapping[str, int] = {
    # files
    "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "lseek": 8, "ioctl": 16,
    "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "access": 21, "dup": 32, "dup2": 33, "sendfile": 40,
    "fcntl": 72, "fsync": 74, "fdatasync": 75, "ftruncate": 77, "getcwd": 79, "chdir": 80, "fchdir": 81, "rename": 82,
    "mkdir": 83, "rmdir": 84, "unlink": 87, "symlink": 88, "readlink": 89, "umask": 95, "getdents64": 217,
    "fadvise64": 221, "openat": 257, "mkdirat": 258, "newfstatat": 262, "unlinkat": 263, "renameat": 264,
    "symlinkat": 266, "readlinkat": 267, "faccessat": 269, "dup3": 292, "preadv": 295,
    "pwritev": 296, "renameat2": 316, "copy_file_range": 326, "preadv2": 327, "pwritev2": 328, "statx": 332,
    "close_range": 436, "faccessat2": 439,
    # waiting, pipes and a pair of sockets
    "poll": 7, "pipe": 22, "select": 23, "sendto": 44, "recvfrom": 45, "shutdown": 48, "getsockname": 51,
    "socketpair": 53, "getsockopt": 55, "epoll_create": 213, "epoll_wait": 232, "epoll_ctl": 233, "pselect6": 270,
    "ppoll": 271, "epoll_pwait": 281, "eventfd2": 290, "epoll_create1": 291, "pipe2": 293, "epoll_pwait2": 441,
    # memory
    "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "mremap": 25, "madvise": 28,
    # threads, and process exit
    "sched_yield": 24, "clone": 56, "exit": 60, "prctl": 157, "gettid": 186, "futex": 202, "sched_getaffinity": 204,
    "set_tid_address": 218, "exit_group": 231, "set_robust_list": 273, "membarrier": 324, "rseq": 334,
    # signals
    "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "pause": 34, "kill": 62, "rt_sigpending": 127,
    "rt_sigtimedwait": 128, "rt_sigsuspend": 130, "sigaltstack": 131, "restart_syscall": 219, "tgkill": 234,
    # time, randomness, and process identity
    "nanosleep": 35, "getitimer": 36, "alarm": 37, "setitimer": 38, "getpid": 39, "uname": 63, "gettimeofday": 96,
    "getrlimit": 97, "getrusage": 98, "sysinfo": 99, "times": 100, "getuid": 102, "getgid": 104, "geteuid": 107,
    "getegid": 108, "getppid": 110, "getpgrp": 111, "getgroups": 115, "getresuid": 118, "getresgid": 120,
    "getpgid": 121, "getsid": 124, "time": 201, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230,
    "prlimit64": 302, "getrandom": 318,
}
AARCH64: Mapping[str, int] = {
    # files
    "read": 63, "write": 64, "close": 57, "fstat": 80, "lseek": 62, "ioctl": 29, "pread64": 67, "pwrite64": 68,
    "readv": 65, "writev": 66, "dup": 23, "sendfile": 71, "fcntl": 25, "fsync": 82, "fdatasync": 83, "ftruncate": 46,
    "getcwd": 17, "chdir": 49, "fchdir": 50, "umask": 166, "getdents64": 61, "fadvise64": 223, "openat": 56,
    "mkdirat": 34, "newfstatat": 79, "unlinkat": 35, "renameat": 38, "symlinkat": 36, "readlinkat": 78,
    "faccessat": 48, "dup3": 24, "preadv": 69, "pwritev": 70, "renameat2": 276,
    "copy_file_range": 285, "preadv2": 286, "pwritev2": 287, "statx": 291, "close_range": 436, "faccessat2": 439,
    # waiting, pipes and a pair of sockets
    "sendto": 206, "recvfrom": 207, "shutdown": 210, "getsockname": 204, "socketpair": 199, "getsockopt": 209,
    "epoll_ctl": 21, "pselect6": 72, "ppoll": 73, "epoll_pwait": 22, "eventfd2": 19, "epoll_create1": 20, "pipe2": 59,
    "epoll_pwait2": 441,
    # memory
    "mmap": 222, "mprotect": 226, "munmap": 215, "brk": 214, "mremap": 216, "madvise": 233,
    # threads, and process exit
    "sched_yield": 124, "clone": 220, "exit": 93, "prctl": 167, "gettid": 178, "futex": 98, "sched_getaffinity": 123,
    "set_tid_address": 96, "exit_group": 94, "set_robust_list": 99, "membarrier": 283, "rseq": 293,
    # signals
    "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139, "kill": 129, "rt_sigpending": 136,
    "rt_sigtimedwait": 137, "rt_sigsuspend": 133, "sigaltstack": 132, "restart_syscall": 128, "tgkill": 131,
    # time, randomness, and process identity
    "nanosleep": 101, "getitimer": 102, "setitimer": 103, "getpid": 172, "uname": 160, "gettimeofday": 169,
    "getrlimit": 163, "getrusage": 165, "sysinfo": 179, "times": 153, "getuid": 174, "getgid": 176, "geteuid": 175,
    "getegid": 177, "getppid": 173, "getgroups": 158, "getresuid": 148, "getresgid": 150, "getpgid": 155,
    "getsid": 156, "clock_gettime": 113, "clock_getres": 114, "clock_nanosleep": 115, "prlimit64": 261,
    "getrandom": 278,
}
# fmt: on


# System calls that Python does not wrap.


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
    """Make a system call by number. Integers are passed as longs: the C library cannot know their width."""
    words = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    return call("syscall", ctypes.c_long(number), *words)


def prctl(option: int, *args: int | bytes) -> int:
    words = [ctypes.c_ulong(arg) if isinstance(arg, int) else arg for arg in args]
    return call("prctl", option, *words, *[ctypes.c_ulong(0)] * (4 - len(words)))


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; a change of user or capabilities reverts this."""
    prctl(_PDEATHSIG, signal.SIGKILL)


def renounce_privileges() -> None:
    """Drop all capabilities, and gain none from any program started later."""
    prctl(_NO_NEW_PRIVS, 1)
    call("capset", (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), bytes(24))


# A seccomp filter of system calls, which needs no privilege: a short list is allowed, everything else refused.
#
# The program cannot start a process, execute another program, open a socket (except a connected pair), signal any
# process but itself, or reach rarely used parts of the kernel. Threads are allowed: correct answers use them, and they
# end with their process.


_SET_SECCOMP, _FILTER = 22, 2  # <sys/prctl.h>, <linux/seccomp.h>
_KILL_PROCESS, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_LOAD, _AND, _JUMP_EQUAL, _JUMP_GREATER, _RETURN = 0x20, 0x54, 0x15, 0x25, 0x06  # <linux/filter.h>
_ARCHITECTURES = {"x86_64": (0xC000003E, X86_64), "aarch64": (0xC00000B7, AARCH64)}
_CLONE3, _NEWEST = 435, 450
"""The same on every architecture."""

# <sched.h>: flags of a new thread, flags of new namespaces, and the thread flags that the filter checks
_THREAD, _NEW_NAMESPACES, _OF_CLONE = 0x00010900, 0x7E020000, 0x00012900
_PLAIN_OPENS = (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_RDWR | os.O_TRUNC)
_ANY = 0xFFFFFFFF
Condition = tuple[int, int, Sequence[int]]
"""Index of an argument, a mask, and the values allowed for the masked argument. Such arguments have 32 bits."""


def _conditions(pid: int) -> Mapping[str, Sequence[Condition]]:
    """Return the system calls that process `pid` may make only with certain arguments."""
    opens = os.O_ACCMODE | os.O_TRUNC
    return {
        "clone": [(0, _OF_CLONE | _NEW_NAMESPACES, [_THREAD])],
        "kill": [(0, _ANY, [pid])],
        "tgkill": [(0, _ANY, [pid])],
        "prlimit64": [(0, _ANY, [0, pid])],
        # Before Landlock 3, opening a file for reading with O_TRUNC would empty it, even if it is read-only.
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


def restrict_calls() -> None:
    """Restrict this process for good; it must have renounced privileges. Raises OSError where we have no filter."""
    machine = os.uname().machine
    if machine not in _ARCHITECTURES or ctypes.sizeof(ctypes.c_void_p) != 8:
        raise OSError(errno.ENOSYS, f"no filter of system calls for {machine}")
    code = ctypes.create_string_buffer(program(machine, os.getpid()))
    num_instructions = (len(code) - 1) // 8
    # struct sock_fprog: a short, padding, an address
    fprog = struct.pack("HxxxxxxQ", num_instructions, ctypes.addressof(code))
    prctl(_SET_SECCOMP, _FILTER, fprog)


def program(machine: str, pid: int) -> bytes:
    """Return the filter for one architecture, as the kernel reads it."""
    architecture, numbers = _ARCHITECTURES[machine]
    conditions = _conditions(pid)
    refuse = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    absent = (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)
    instructions = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
    ]
    for name, number in numbers.items():
        body = [*_checks(conditions.get(name, ())), (_RETURN, 0, 0, _ALLOW)]
        instructions += [(_JUMP_EQUAL, 0, len(body), number), *body]
    # Calls newer than this list return "no such call", which C libraries handle. So does `clone3`, whose arguments a
    # filter cannot see: C libraries then use `clone`. The numbers of x32 are above the newest, too.
    instructions += [(_JUMP_EQUAL, 1, 0, _CLONE3), (_JUMP_GREATER, 0, 1, _NEWEST), absent, refuse]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)


def _checks(conditions: Iterable[Condition]) -> list[tuple[int, int, int, int]]:
    """Return instructions that refuse a call unless all conditions hold."""
    checks = []
    for argument, mask, values in conditions:
        checks += [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), (_AND, 0, 0, mask)]
        checks += [(_JUMP_EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
        checks.append((_RETURN, 0, 0, _ERRNO | errno.EPERM))
    return checks


class SandboxRequest:
    """A caller's request to a supervisor: one program, and the sandbox and limits to run it under.

    A plain class: importing `dataclasses` would make the supervisor's start a third slower.
    """

    parent: int
    """Process id of the caller."""
    namespaces: bool
    landlock: bool
    seccomp: bool
    as_nobody: bool
    cpu_s: int
    wall_s: float
    memory_bytes: int
    file_bytes: int
    folder_bytes: int
    num_files: int
    num_open_files: int
    num_threads: int
    program: str
    functions: list[str] | None
    """The functions that the tests call; None in the request of the answer's program."""
    receiving: int
    sending: int
    """Ends of two pipes, whose other ends the other program's supervisor has."""

    def __init__(self, terms: Mapping[str, object]) -> None:
        vars(self).update(terms)


def readable() -> list[str]:
    """Return the folders that the program may read: the standard library, the interpreter's and the system's."""
    libraries = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo")
    folders = (os.path.dirname(os.__file__), os.path.join(sys.base_prefix, "lib"), *libraries)
    return [folder for folder in dict.fromkeys(folders) if os.path.isdir(folder)]


# File access limited by Landlock, which needs no privilege: read the libraries, write nothing, execute nothing.
#
# Where namespaces provide a size-limited folder in memory, the program may write there. It may not write to disk: no
# Landlock right limits the amount, and space held by open or mapped unnamed files is in no folder to be counted.
#
# Landlock does not hide that a file exists, nor its size, owner and times; and it does not protect owner, mode, times
# and attributes of files, nor (before version 3) their length. The system call filter refuses to change those.


# The same on every architecture. <linux/landlock.h>
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1
(
    _EXECUTE,
    _WRITE_FILE,
    _READ_FILE,
    _READ_DIR,
    _REMOVE_DIR,
    _REMOVE_FILE,
    _MAKE_CHAR,
    _MAKE_DIR,
    _MAKE_REG,
    _MAKE_SOCK,
    _MAKE_FIFO,
    _MAKE_BLOCK,
    _MAKE_SYM,
    _REFER,
    _TRUNCATE,
    _IOCTL_DEV,
) = (1 << bit for bit in range(16))
_NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Number of rights by version of Landlock; later versions have no new file rights."""
_TCP_BIND_AND_CONNECT, _ABSTRACT_SOCKETS_AND_SIGNALS = 3, 3

_READ = _READ_FILE | _READ_DIR
_WRITE = _READ | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _MAKE_SYM | _REFER | _TRUNCATE


def restrict_files(folder: str, writable: bool) -> None:
    """Restrict this process for good; it must have renounced privileges. Raises OSError where there is no Landlock."""
    version = system_call(_CREATE_RULESET, None, 0, _VERSION)
    handled = (1 << _NUM_RIGHTS.get(version, 16)) - 1
    # Later versions take a longer structure: files, from 4 on TCP, from 6 on signals and abstract sockets.
    words = (handled, _TCP_BIND_AND_CONNECT, _ABSTRACT_SOCKETS_AND_SIGNALS)[: 1 + (version >= 4) + (version >= 6)]
    attributes = struct.pack(f"={len(words)}Q", *words)
    ruleset = system_call(_CREATE_RULESET, attributes, len(attributes), 0)
    for path in readable():
        _allow(ruleset, path, _READ)
    _allow(ruleset, os.devnull, _READ_FILE | _WRITE_FILE)
    _allow(ruleset, folder, (_WRITE if writable else _READ) & handled)
    system_call(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    system_call(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, place), 0)
    os.close(place)


# Namespaces, where the kernel allows them: no network, no other processes, and only a new temporary file tree.


# <sched.h> and <sys/mount.h>
_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 1 << 12, 1 << 14, 1 << 18
_WORK = "/sandbox"  # not /tmp or /home, which may lead to the interpreter


def enter(request: SandboxRequest, folder: str) -> str:
    """Move this process and its future children into new namespaces. Return the folder the program may write to."""
    _unshare()
    _mount(None, "/", None, _REC | _PRIVATE)
    size = f"size={request.folder_bytes},nr_inodes={request.num_files},mode=755"
    _mount("tmpfs", folder, "tmpfs", _NOSUID | _NODEV | _NOEXEC, size)
    for root in readable():
        os.makedirs(folder + root, exist_ok=True)
        _mount_read_only(root, folder + root)
    os.mkdir(folder + "/dev")
    os.mknod(folder + os.devnull)  # a plain file, for the device to be mounted on
    _mount(os.devnull, folder + os.devnull, None, _BIND)
    os.mkdir(folder + _WORK)
    os.chroot(folder)
    os.chdir(_WORK)
    return _WORK


def _unshare() -> None:
    uid, gid = os.geteuid(), os.getegid()
    flags = _NEWNS | _NEWPID | _NEWNET | _NEWIPC
    if uid == 0:
        call("unshare", flags)
        return
    call("unshare", flags | _NEWUSER)
    # The kernel requires "deny" before a gid_map.
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _mount_read_only(source: str, target: str) -> None:
    _mount(source, target, None, _BIND | _REC)
    # A user namespace may add restrictions, but must repeat those of the source mount.
    inherited = os.statvfs(target).f_flag & (_NOSUID | _NODEV | _NOEXEC)
    _mount(None, target, None, _REMOUNT | _BIND | _RDONLY | inherited)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    source_, target_, kind_, options_ = (text and text.encode() for text in (source, target, kind, options))
    call("mount", source_, target_, kind_, ctypes.c_ulong(flags), options_)
