"""Supervisors forked from a process that has imported what each of them needs, in place of a new Python for each.

Such a supervisor has the code, environment, descriptors, session and parent of one that `sandbox` starts, and in its
memory nothing but what it would have imported itself; the sandbox and all that follows is its own. The start of two
Pythons is most of what a sandboxed program costs. What a sandbox gets from its start is tested with cold ones.
"""

from __future__ import annotations

import inspect
import marshal
import socket
import subprocess
from collections.abc import Collection
from functools import cache
from threading import Lock
from types import SimpleNamespace
from typing import Any

from dflash_bench.tasks import sandbox

# The flags are CLONE_PARENT and SIGCHLD: the caller is the copy's parent, as of a supervisor that it starts itself.
_FORKING = """
import _socket, marshal, os, struct, sys
sys.path.append(sys.argv[1])
from dflash_bench.tasks.isolation import supervisor, restrictions
link, clone = _socket.socket(fileno=os.dup(0)), {"x86_64": 56, "aarch64": 220}[os.uname().machine]
os.dup2(os.open(os.devnull, os.O_RDWR), 0)
while True:
    message, passed, *_ = link.recvmsg(2**16, 2**10)
    if not message: break
    given = struct.unpack(f"{len(passed[0][2]) // 4}i", passed[0][2])
    if restrictions.system_call(clone, 0x8000 | 17, 0, 0, 0, 0) == 0:
        folder, names = marshal.loads(message)
        os.setsid()
        link.send(b"%d" % os.getpid())  # From now on its group can be killed.
        os.chdir(folder)
        # Out of the way first: a name may be the number of another one, or of the link.
        above = max(*names, *given, link.detach()) + 1
        for place, fd in enumerate(given): os.dup2(fd, above + place)
        for place, name in enumerate(names): os.dup2(above + place, name)
        for fd in range(above + len(given)):
            try: fd in names or os.close(fd)
            except OSError: pass
        del sys.modules["_socket"], link, message, passed, given, folder, names, above
        supervisor.main()
    for fd in given: os.close(fd)
"""
_EXECUTE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
_ONE_AT_A_TIME = Lock()
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


class _Warm(subprocess.Popen[bytes]):
    """The supervisor's program; other programs start as usual."""

    def _execute_child(self, *words: Any, **named: Any) -> None:
        how = _EXECUTE.bind(self, *words, **named).arguments
        command, passed = tuple(how["args"]), list(how["pass_fds"])
        if sandbox._START not in command:
            super()._execute_child(*words, **named)  # type: ignore[misc]
            return
        assert how["env"] == sandbox._SUPERVISOR_ENV and how["close_fds"] and how["start_new_session"]
        given = [how["p2cread"], how["c2pwrite"], how["errwrite"], *passed]
        with _ONE_AT_A_TIME:
            _, link = _forking(command)
            socket.send_fds(link, [marshal.dumps((str(how["cwd"]), [0, 1, 2, *passed]))], given)
            self.pid = int(link.recv(20))
        self._child_created = True
        self._close_pipe_fds(*(how[pipe] for pipe in _PIPES))  # type: ignore[attr-defined]


@cache
def _forking(command: tuple[str, ...]) -> tuple[int, socket.socket]:
    """For each command line another process: by that supervisors are found."""
    ours, its = socket.socketpair()
    words = [_FORKING if word == sandbox._START else word for word in command]
    with its:
        process = subprocess.Popen(words, stdin=its, stdout=subprocess.DEVNULL, env=sandbox._SUPERVISOR_ENV)
    _WAITING[process.pid] = process
    return process.pid, ours


_WAITING: dict[int, Any] = {}
"""The processes that are forked from, which end with their caller."""
SUBPROCESS = SimpleNamespace(**{**vars(subprocess), "Popen": _Warm})
"""In place of the module, for `sandbox`."""


def waiting() -> Collection[int]:
    return _WAITING.keys()
