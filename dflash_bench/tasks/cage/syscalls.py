"""System calls that a Python program needs, by name and number; all others are refused.

Left out on purpose, besides what is obviously dangerous: changing mode, owner, times or attributes of a file or
truncating it by name (Landlock covers none of these), links and special files, anything that affects another process
(signals, limits, priorities), sessions, sockets (except a connected pair), and `execve`. So is `fallocate`, which
reserves space beyond the end of a file, where the limit on its size does not count (ext4, standard error on the disk).
"""

from __future__ import annotations

from collections.abc import Mapping

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
    # threads, and this process's end
    "sched_yield": 24, "clone": 56, "exit": 60, "prctl": 157, "gettid": 186, "futex": 202, "sched_getaffinity": 204,
    "set_tid_address": 218, "exit_group": 231, "set_robust_list": 273, "membarrier": 324, "rseq": 334,
    # signals
    "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "pause": 34, "kill": 62, "rt_sigpending": 127,
    "rt_sigtimedwait": 128, "rt_sigsuspend": 130, "sigaltstack": 131, "restart_syscall": 219, "tgkill": 234,
    # time, chance, and who and where it is
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
    # threads, and this process's end
    "sched_yield": 124, "clone": 220, "exit": 93, "prctl": 167, "gettid": 178, "futex": 98, "sched_getaffinity": 123,
    "set_tid_address": 96, "exit_group": 94, "set_robust_list": 99, "membarrier": 283, "rseq": 293,
    # signals
    "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139, "kill": 129, "rt_sigpending": 136,
    "rt_sigtimedwait": 137, "rt_sigsuspend": 133, "sigaltstack": 132, "restart_syscall": 128, "tgkill": 131,
    # time, chance, and who and where it is
    "nanosleep": 101, "getitimer": 102, "setitimer": 103, "getpid": 172, "uname": 160, "gettimeofday": 169,
    "getrlimit": 163, "getrusage": 165, "sysinfo": 179, "times": 153, "getuid": 174, "getgid": 176, "geteuid": 175,
    "getegid": 177, "getppid": 173, "getgroups": 158, "getresuid": 148, "getresgid": 150, "getpgid": 155,
    "getsid": 156, "clock_gettime": 113, "clock_getres": 114, "clock_nanosleep": 115, "prlimit64": 261,
    "getrandom": 278,
}
# fmt: on
