"""The runner: gives up every right that the program must not have, runs it, and reports that it got to the end.

Nothing inside one process can prove that the program really ended. The token stops a program from passing by leaving
early, or by searching its frames, modules and the garbage collector's lists. A program that reads raw memory can find
it, but then it can also cheat its tests in simpler ways (answers that equal everything). All it gains is a verdict.
"""

from __future__ import annotations

import os
import resource
import sys
import types
from contextlib import suppress
from typing import TYPE_CHECKING

from dflash_bench.tasks.cage import kernel, landlock, seccomp
from dflash_bench.tasks.cage.order import Order

if TYPE_CHECKING:
    from typing import NoReturn

NOBODY = 65534
READY = b"ready"
TOKEN_BYTES = 16


def run(order: Order, folder: str, token: int, report: int) -> NoReturn:
    """`token` and `report` are pipes to the keeper: the first is read once, the second written twice."""
    _confine(order, folder)
    module = types.ModuleType("solution")  # not __main__, so that `if __name__ == "__main__"` is skipped
    sys.modules["solution"] = module
    sys.argv[:] = ["solution"]
    code = compile(order.program, "<program>", "exec")
    os.write(report, READY)
    # While the program runs, the token is only on the evaluation stack: no name, frame or object leads to it.
    # An exception, even SystemExit, ends the runner as it would end any script.
    _finish(os.getpid(), report, os.read(token, TOKEN_BYTES), eval(code, vars(module)))
    os._exit(0)


def _finish(runner: int, report: int, token: bytes, _: None) -> None:
    if os.getpid() == runner:  # not a copy that the program has forked, where it can
        os.write(report, token)


def _confine(order: Order, folder: str) -> None:
    os.environ.update(HOME=folder, TMPDIR=folder)
    sys.dont_write_bytecode = True
    if order.as_nobody:
        os.chown(folder, NOBODY, NOBODY)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    _set_rlimits(order)
    if sys.platform == "linux":
        kernel.renounce_privileges()
        kernel.die_with_parent()
    if order.landlock:
        landlock.restrict(folder)
    if order.seccomp:
        seccomp.restrict()


def _set_rlimits(order: Order) -> None:
    limits = {
        resource.RLIMIT_AS: order.memory_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: order.cpu_s,
        resource.RLIMIT_FSIZE: order.file_bytes,
        resource.RLIMIT_NOFILE: order.num_open_files,
    }
    if not order.seccomp:  # the limit counts all processes and threads of the user, not only the program's
        limits[resource.RLIMIT_NPROC] = order.num_threads
    for which, value in limits.items():
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with suppress(ValueError):  # macOS cannot limit memory
            resource.setrlimit(which, (value, value))
