"""The first wall, where the kernel allows it: no network, no other processes, and only a new temporary file tree."""

from __future__ import annotations

import ctypes
import os

from dflash_bench.tasks.cage import kernel
from dflash_bench.tasks.cage.order import Order, readable

# <sched.h> and <sys/mount.h>
_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 1 << 12, 1 << 14, 1 << 18
_WORK = "/cage"  # not /tmp or /home, which may lead to the interpreter


def enter(order: Order, folder: str) -> str:
    """Move this process, and all that it forks later, into new namespaces. Returns the folder the program may write."""
    _unshare()
    _mount(None, "/", None, _REC | _PRIVATE)
    size = f"size={order.folder_bytes},nr_inodes={order.num_files},mode=755"
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
        kernel.call("unshare", flags)
        return
    kernel.call("unshare", flags | _NEWUSER)
    # The kernel wants "deny" before a gid_map.
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _mount_read_only(source: str, target: str) -> None:
    _mount(source, target, None, _BIND | _REC)
    # A user namespace may add restrictions, but must repeat those that the source is mounted with.
    inherited = os.statvfs(target).f_flag & (_NOSUID | _NODEV | _NOEXEC)
    _mount(None, target, None, _REMOUNT | _BIND | _RDONLY | inherited)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    source_, target_, kind_, options_ = (text and text.encode() for text in (source, target, kind, options))
    kernel.call("mount", source_, target_, kind_, ctypes.c_ulong(flags), options_)
