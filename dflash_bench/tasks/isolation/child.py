"""The runner: drops every right that the program must not have, then runs an answer's program, or the tests.

An answer's program does not report its own success: its results are judged by the tests, in another runner under
another supervisor. So no output or exit status of this process can make a wrong answer pass.
"""

from __future__ import annotations

import os
import resource
import sys
import types
from contextlib import suppress
from typing import TYPE_CHECKING

from dflash_bench.tasks.isolation import PASSED, protocol, restrictions
from dflash_bench.tasks.isolation.protocol import Link
from dflash_bench.tasks.isolation.restrictions import SandboxRequest
from dflash_bench.tasks.isolation.testing import Tests

if TYPE_CHECKING:
    from typing import NoReturn

NOBODY = 65534
READY = b"ready\n"


def run(request: SandboxRequest, folder: str, report: int) -> NoReturn:
    """Run the program. `report` is a pipe to the supervisor: READY if it compiles and, from the tests, the verdict.

    An exception, even SystemExit, ends the runner as it would end any script.
    """
    _confine(request, folder)
    module = types.ModuleType("solution")  # not __main__, so that `if __name__ == "__main__"` is skipped
    sys.modules["solution"] = module
    sys.argv[:] = ["solution"]
    code = compile(request.program, "<program>", "exec")
    os.write(report, READY)
    link = Link(request.receiving, request.sending)
    if request.functions is None:
        os.close(report)
        process = os.getpid()
        eval(code, vars(module))
        protocol.serve(link, vars(module), process)
    else:
        tests = Tests(link, report)
        tests.wait_until_ready()
        vars(module).update((name, tests.stand_in(name)) for name in request.functions)
        eval(code, vars(module))
        tests.leave(PASSED)
    os._exit(0)


def _confine(request: SandboxRequest, folder: str) -> None:
    os.environ.update(HOME=folder, TMPDIR=folder)
    sys.dont_write_bytecode = True
    if request.as_nobody:
        os.chown(folder, NOBODY, NOBODY)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    _set_rlimits(request)
    if sys.platform == "linux":
        restrictions.renounce_privileges()
        restrictions.die_with_parent()
    if request.landlock:
        restrictions.restrict_files(folder, writable=request.namespaces)
    if request.seccomp:
        restrictions.restrict_calls()


def _set_rlimits(request: SandboxRequest) -> None:
    limits = {
        resource.RLIMIT_AS: request.memory_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: request.cpu_s,
        resource.RLIMIT_FSIZE: request.file_bytes,
        resource.RLIMIT_NOFILE: request.num_open_files,
    }
    if not request.seccomp:  # the limit covers all processes and threads of the user
        limits[resource.RLIMIT_NPROC] = request.num_threads
    for which, value in limits.items():
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with suppress(ValueError):  # macOS cannot limit memory
            resource.setrlimit(which, (value, value))
