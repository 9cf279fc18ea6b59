"""File access limited by Landlock, which needs no privilege: read the libraries, write nothing, execute nothing.

Where namespaces give the program a folder in memory, of limited size, it may write there. It may not write on a disk:
no right of Landlock limits how much, and what is held open or mapped without a name is in no folder to be counted.

It does not hide that a file exists, nor its size, owner and times; and it does not protect owner, mode, times and
attributes of files, nor (before version 3) their length. The filter of system calls refuses to change those.
"""

from __future__ import annotations

import os
import struct

from dflash_bench.tasks.cage import kernel
from dflash_bench.tasks.cage.order import readable

# The same on every architecture. <linux/landlock.h>
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1
(
    _EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_DIR, _REMOVE_FILE, _MAKE_CHAR, _MAKE_DIR, _MAKE_REG,
    _MAKE_SOCK, _MAKE_FIFO, _MAKE_BLOCK, _MAKE_SYM, _REFER, _TRUNCATE, _IOCTL_DEV,
) = (1 << bit for bit in range(16))  # fmt: skip
_NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Number of rights by version of Landlock; later versions have no new rights over files."""
_TCP_BIND_AND_CONNECT, _ABSTRACT_SOCKETS_AND_SIGNALS = 3, 3

_READ = _READ_FILE | _READ_DIR
_WRITE = (
    _READ | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _MAKE_SYM | _REFER | _TRUNCATE
)  # fmt: skip


def restrict(folder: str, writable: bool) -> None:
    """Restrict this process for good; it must have renounced privileges. Raises OSError where there is no Landlock."""
    version = kernel.system_call(_CREATE_RULESET, None, 0, _VERSION)
    handled = (1 << _NUM_RIGHTS.get(version, 16)) - 1
    # Later versions take a longer structure: files, then TCP from 4 on, then signals and abstract sockets from 6 on.
    words = (handled, _TCP_BIND_AND_CONNECT, _ABSTRACT_SOCKETS_AND_SIGNALS)[: 1 + (version >= 4) + (version >= 6)]
    attributes = struct.pack(f"={len(words)}Q", *words)
    ruleset = kernel.system_call(_CREATE_RULESET, attributes, len(attributes), 0)
    for path in readable():
        _allow(ruleset, path, _READ)
    _allow(ruleset, os.devnull, _READ_FILE | _WRITE_FILE)
    _allow(ruleset, folder, (_WRITE if writable else _READ) & handled)
    kernel.system_call(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    kernel.system_call(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, place), 0)
    os.close(place)
