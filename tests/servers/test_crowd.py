"""Client processes give the answers, counts and times of a single client; a client that exits stops the run."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dflash_bench.core.errors import UserError
from dflash_bench.core.types import GREEDY, Generation, Message, Settings
from dflash_bench.servers import crowd
from dflash_bench.servers.address import is_loopback
from dflash_bench.servers.backend import ServerBackend
from dflash_bench.servers.crowd import Call, RayMember
from helpers.each import each
from helpers.servers.fake_server import FakeServer
from helpers.servers.one_server import backend

NUM, TOGETHER, LENGTH = 24, 6, 16
REQUESTS = [((Message("user", f"What is {number} times 7?"),), 0) for number in range(NUM)]
DOES = {"accepts": (2, 0), "block": 4, "counts_by_request": True, "has_metrics": False}
LOADS = (replace(GREEDY, concurrency=TOGETHER), replace(GREEDY, rate=200.0))


def served(opened: ServerBackend, settings: Settings, ended: Callable[[], object] = lambda: None) -> list[Generation]:
    return opened.serve("ar", REQUESTS, settings, ended)


def facts(answers: Sequence[Generation]) -> list[tuple[object, ...]]:
    return [(one.token_ids, one.text, one.total_rounds, one.total_accepted, one.pieces) for one in answers]


@pytest.mark.parametrize("settings", LOADS, ids=("concurrency", "rate"))
def test_three_clients_give_what_one_gives(settings: Settings) -> None:
    ended: list[None] = []
    with FakeServer(**DOES) as server:
        with backend(server, max_new_tokens=LENGTH) as one:
            alone = served(one, settings)
        with backend(server, max_new_tokens=LENGTH, num_clients=3) as three:
            shared = served(three, settings, lambda: ended.append(None))
            again = served(three, settings)
    assert [one.error for one in shared] == [None] * NUM
    assert facts(alone) == facts(shared) == facts(again)
    assert (len(ended), server.num_answers) == (NUM, 3 * NUM)
    assert all(one.total_rounds for one in shared)


def test_together_they_keep_the_concurrency() -> None:
    with (
        FakeServer(**DOES, waits_for=TOGETHER) as server,
        backend(server, max_new_tokens=LENGTH, num_clients=4) as opened,
    ):
        answers = served(opened, LOADS[0])
    assert (server.most_at_once, [one.error for one in answers]) == (TOGETHER, [None] * NUM)


def test_times_are_on_the_clock_of_the_run() -> None:
    """The clock of the run is an hour ahead of its clients'; their times still lie within the call."""
    with (
        FakeServer(**DOES) as server,
        backend(server, max_new_tokens=LENGTH, num_clients=2, clock=lambda: time.perf_counter() + 3600) as opened,
    ):
        began_s = time.perf_counter()
        answers = served(opened, LOADS[0])
        took_s = time.perf_counter() - began_s
        assert opened.crowd is not None
        offsets_s = [member.offset_s for member in opened.crowd.members]
    assert all(0 <= one.start_s < one.end_s <= took_s for one in answers)
    assert offsets_s == pytest.approx([-3600.0] * 2, abs=1.0)


def test_clocks_that_agree_are_left_alone() -> None:
    with FakeServer(**DOES) as server, backend(server, max_new_tokens=LENGTH, num_clients=2) as opened:
        served(opened, LOADS[0])
        assert opened.crowd is not None
        assert [member.offset_s for member in opened.crowd.members] == [0.0, 0.0]


def test_a_client_that_ends_stops_the_run_with_a_remedy() -> None:
    with (
        FakeServer(**DOES, round_s=0.05) as server,
        backend(server, max_new_tokens=LENGTH, num_clients=2) as opened,
        pytest.raises(UserError, match=r"status -9; continue the run with --resume"),
    ):
        served(opened, LOADS[0], lambda: _kill(opened))


def test_a_client_that_ends_between_two_loads_stops_the_next() -> None:
    """It is asked only after this process has seen that it ended."""

    async def asked() -> None:
        member = await crowd._start_process()
        member.process.kill()
        await member._reader
        await asyncio.wait_for(member.call(Call.CLOCK), 10)

    with pytest.raises(UserError, match=r"status -9; continue the run with --resume"):
        asyncio.run(asked())


def test_an_error_of_a_client_is_raised_here(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeServer(**DOES) as server, backend(server, max_new_tokens=LENGTH, num_clients=2) as opened:
        sound = crowd.ServerCall.of
        monkeypatch.setattr(crowd.ServerCall, "of", lambda *of: replace(sound(*of), dialect="unheard of"))
        with pytest.raises(ExceptionGroup) as raised:
            served(opened, LOADS[0])
    assert raised.group_contains(RuntimeError, match="(?s)in a client:.*KeyError: 'unheard of'")


def _kill(opened: ServerBackend) -> None:
    assert opened.crowd is not None
    os.kill(opened.crowd.members[0].process.pid, signal.SIGKILL)


def test_a_server_that_is_gone_stops_the_run() -> None:
    with FakeServer(**DOES) as server:
        opened = backend(server, max_new_tokens=LENGTH, num_clients=2)
    with opened, pytest.raises(UserError, match="cannot connect to the plain server"):
        served(opened, LOADS[0])


def test_clients_end_with_the_run() -> None:
    with FakeServer(**DOES) as server, backend(server, max_new_tokens=LENGTH, num_clients=2) as opened:
        served(opened, LOADS[0])
        assert opened.crowd is not None
        processes = [member.process for member in opened.crowd.members]
        assert [process.returncode for process in processes] == [None, None]
    assert [process.returncode for process in processes] == [0, 0]


def test_a_client_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def environment(_: Sequence[str]) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": "", "PYTHONHOME": os.devnull}

    monkeypatch.setattr(crowd, "_environment", environment)
    with (
        FakeServer(**DOES) as server,
        backend(server, max_new_tokens=LENGTH, num_clients=2) as opened,
        pytest.raises(UserError, match="--clients: a client process exited with status 1"),
    ):
        served(opened, LOADS[0])


def test_clients_on_other_machines_need_an_address_that_leads_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeServer(**DOES) as server, backend(server, max_new_tokens=LENGTH, num_clients=2) as opened:
        monkeypatch.setattr(crowd.environment, "boot_id", lambda: "of another machine")
        with pytest.raises(UserError, match=r"--server http://127\.0\.0\.1:\d+ leads to the machine that uses it"):
            served(opened, LOADS[0])


@each(
    "url, expected",
    [
        ("http://127.0.0.1:8000", True),
        ("http://[::1]:8000", True),
        ("http://localhost", True),
        ("http://10.0.0.7:8000", False),
        ("http://gpu-1:8000", False),
    ],
)
def test_an_address_of_the_machine_that_uses_it_is_known(url: str, expected: bool) -> None:
    assert is_loopback(url) is expected


class LostError(Exception):
    """In place of what Ray raises for an actor that is gone."""


class TaskError(Exception):
    """In place of what Ray raises for an error of an actor's."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause


@each(
    "error, raised, said",
    [
        (LostError("its node died"), UserError, "--clients: a client was lost: its node died; .*--resume"),
        (TaskError(UserError("cannot connect")), UserError, "^cannot connect$"),
        (TaskError(ValueError("a fault")), TaskError, "a fault"),
    ],
)
def test_what_a_client_on_another_machine_raises_is_raised_here(
    error: Exception, raised: type[Exception], said: str
) -> None:
    async def result(_: Call) -> None:
        raise error

    ray = SimpleNamespace(exceptions=SimpleNamespace(RayTaskError=TaskError, RayError=LostError))
    member = RayMember(ray, SimpleNamespace(result=SimpleNamespace(remote=result)))
    with pytest.raises(raised, match=said):
        asyncio.run(member.call(Call.CLOCK))
    assert member.num_pending == 0
