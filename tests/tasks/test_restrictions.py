"""Namespaces and Landlock each without the filter of system calls, which would hide it if they did not hold."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from dflash_bench.tasks import sandbox
from dflash_bench.tasks.isolation import restrictions
from dflash_bench.tasks.sandbox import Isolation, ProgramOutcome
from helpers.sandboxes import ASKED_BY_US, MARKER, SHORT, num_processes

Run = Callable[[str], ProgramOutcome]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Run]:
    monkeypatch.setattr(sandbox, "_SUPERVISOR", (*sandbox._SUPERVISOR, MARKER))

    def choose(restriction: str) -> Run:
        granted = [box.isolation for box in ASKED_BY_US if getattr(box.isolation, restriction)]
        if not granted:
            pytest.skip(f"{restriction}: not granted here")
        isolation = Isolation(
            restriction == "namespaces", restriction == "landlock", seccomp=False, as_nobody=granted[-1].as_nobody
        )
        return lambda program: sandbox.run_tests(program, isolation, SHORT)

    return choose


@pytest.mark.parametrize("restriction", ["namespaces", "landlock"])
def test_files_are_out_of_reach(restriction: str, alone: Callable[[str], Run]) -> None:
    run = alone(restriction)
    assert run("open('here', 'w').close()").passed is (restriction == "namespaces")
    for attack in ("open('/etc/passwd')", "open('/proc/self/mem')", "os.open(os.__file__, os.O_WRONLY)"):
        reason = run(f"import os\n{attack}").reason
        assert any(words in reason for words in ("No such file", "Permission denied", "Read-only")), reason


def test_namespaces_have_no_network_and_end_with_all_their_processes(alone: Callable[[str], Run]) -> None:
    run = alone("namespaces")
    with socket.create_server(("127.0.0.1", 0)) as server:
        reason = run(f"import socket\nsocket.create_connection({server.getsockname()}, 1)").reason
        assert "Network is unreachable" in reason
    daemon = (
        "import os, signal, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(1000)\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\nos.waitpid(-1, os.WUNTRACED)\n"
    )
    assert run(daemon) == ProgramOutcome(True, "passed")
    assert num_processes() == 0
    assert not run("import os, signal\nos.kill(-1, signal.SIGKILL)\nassert False").passed


def test_landlock_ends_signals_and_connections_at_its_border(alone: Callable[[str], Run]) -> None:
    run = alone("landlock")
    version = restrictions.system_call(444, None, 0, 1)
    if version < 6:
        pytest.skip(f"version {version} of Landlock rules over neither")
    assert "Operation not permitted" in run("import os\nos.kill(os.getppid(), 9)").reason
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert "Permission denied" in run(f"import socket\nsocket.create_connection({server.getsockname()}, 1)").reason
    assert "Permission denied" in run("import os\nos.execv('/bin/true', ['true'])").reason
