"""One answer from one server: asked, timed, counted. What goes wrong becomes the error of the answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Generation
from dflash_bench.servers import prometheus
from dflash_bench.servers.client import AnswerError, Bounds, StatusError
from dflash_bench.servers.connect import Server
from dflash_bench.servers.dialects.base import Ask
from dflash_bench.servers.prometheus import Counters
from dflash_bench.servers.stream import AcceptanceCounts, StreamState

OPTIONAL = "stream_options"
"""A field of the specification that some servers refuse, and then behave as if it had been there."""
SETTLES_S = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Waits until a server has counted an answer that it has given."""
TICK_S = 0.01
STALLED = 0.25
"""Of the time for a whole answer, what may pass without a token of it once there is one."""
WRONGLY_ASKED = (400, 404, 405, 415, 422)
EXACT = frozenset(("vllm.request", "sglang.request", "tensorrt_llm.request"))
"""Counts in an answer that need no others."""
TOGETHER = "the server counts no rounds in its answers, and several answers ran at a time"


@dataclass(frozen=True, slots=True)
class Timed:
    """`begin_s` and `end_s` are on the clock that was given.

    `at` says by position of the draft how many rounds accepted it; None where the server does not.
    """

    generation: Generation
    begin_s: float
    end_s: float
    at: tuple[int, ...] | None = None


async def answer(server: Server, ask: Ask, clock: Callable[[], float]) -> Timed:
    """Beside whatever else is being asked. Raises UserError if the server has gone."""
    heard = StreamState(clock, ask.max_new_tokens)
    heard.begin()
    num_prompt = None if ask.prompt_ids is None else len(ask.prompt_ids)
    at = None
    try:
        await _listen(server, ask, heard)
        generation = _counted(heard.generation(num_prompt), heard.counts)
        at = heard.counts.by_position if heard.counts is not None and generation.uncounted is None else None
        server.has_answered = True
    except AnswerError as error:
        _refuse_if_never_right(server, error)
        generation = heard.failed(num_prompt, server.client.shown(str(error)))
    generation = _without_secrets(server, generation)
    end_s = heard.now_s if generation.error is None else clock()
    return Timed(generation, heard.begin_s, end_s, at)


def _refuse_if_never_right(server: Server, error: AnswerError) -> None:
    """What a server does not understand from the first answer on would fail all of them."""
    if isinstance(error, StatusError) and error.status in WRONGLY_ASKED and not server.has_answered:
        raise UserError(
            f"--server {server.client.name}: {server.client.url} refuses what it is asked ({error}); name another "
            f"--dialect than {server.dialect.name}, or correct what it names"
        ) from error


async def answer_alone(server: Server, ask: Ask, clock: Callable[[], float]) -> Timed:
    """With nothing kept of earlier prompts, and counted by the server's counters where the answer does not say."""
    try:
        await server.flush()
    except AnswerError as error:
        failed = StreamState(clock, ask.max_new_tokens).failed(None, f"its prefix cache could not be emptied: {error}")
        return Timed(failed, clock(), clock())
    before = await server.counters()
    timed = await answer(server, ask, clock)
    generation = timed.generation
    if generation.error is not None or generation.counted_by in EXACT:
        return timed
    counts = await _difference(server, before, generation.num_tokens)
    # What the answer itself says comes before what its counters do not.
    if isinstance(counts, str) and generation.uncounted != TOGETHER:
        return timed
    generation = _counted(generation, counts)
    at = counts.by_position if isinstance(counts, AcceptanceCounts) and generation.uncounted is None else None
    return replace(timed, generation=generation, at=at)


def _without_secrets(server: Server, generation: Generation) -> Generation:
    """A server may write the key that it was sent into its answers."""
    hidden = server.client.access.hidden
    return replace(
        generation, text=hidden(generation.text), uncounted=generation.uncounted and hidden(generation.uncounted)
    )


async def _listen(server: Server, ask: Ask, heard: StreamState) -> None:
    """Raises AnswerError, also for an answer that does not end in time, or of which nothing more comes."""
    most_s = server.client.access.timeout_s
    stalled_s = STALLED * most_s
    try:
        async with asyncio.timeout(most_s), asyncio.timeout(None) as stalled:
            await _hear(server, ask, heard, lambda: stalled.reschedule(asyncio.get_running_loop().time() + stalled_s))
    except TimeoutError as error:
        if stalled.expired():
            raise AnswerError(f"no token came for {stalled_s:g} s after {heard.sofar}; see --timeout") from error
        raise AnswerError(f"no whole answer within {most_s:g} s, after {heard.sofar}; see --timeout") from error


async def _hear(server: Server, ask: Ask, heard: StreamState, went_on: Callable[[], object]) -> None:
    path, body = server.dialect.call(ask)
    for _ in range(2):
        sent = json.dumps({name: value for name, value in body.items() if name not in server.refused}).encode()
        bounds = Bounds.of(ask.max_new_tokens, len(sent), server.dialect.repeats)
        num_deltas = 0
        try:
            async for event in server.client.events(path, sent, bounds, heard.begin, heard.arrived):
                server.dialect.read(event, heard)
                if heard.num_deltas > num_deltas:
                    num_deltas = heard.num_deltas
                    went_on()
        except StatusError as error:
            if error.status not in (400, 422) or OPTIONAL not in error.reason or OPTIONAL in server.refused:
                raise
            server.refused.add(OPTIONAL)
        else:
            return


async def _difference(server: Server, before: Counters | None, num_tokens: int) -> AcceptanceCounts | str:
    after = None
    for wait_s in SETTLES_S:
        await asyncio.sleep(wait_s)
        after = await server.counters()
        if before is None or after is None or prometheus.lag(before, after, num_tokens) <= 0:
            break
    return prometheus.difference(before, after, num_tokens)


def _counted(generation: Generation, counts: AcceptanceCounts | str | None) -> Generation:
    """With these counts, or why there are none."""
    if not isinstance(counts, AcceptanceCounts):
        return replace(generation, uncounted=counts or TOGETHER)
    if why := counts.contradiction(generation):
        # What it said before in another place is not believed either.
        return replace(
            generation, total_rounds=None, total_drafted=None, total_accepted=None, counted_by=None,
            uncounted=f"what the server counts cannot be right ({counts.by}): {why}",
        )  # fmt: skip
    return replace(
        generation, total_rounds=counts.rounds, total_drafted=counts.drafted, total_accepted=counts.accepted,
        counted_by=counts.by, uncounted=None,
    )  # fmt: skip


async def when_due(
    server: Server, asks: Sequence[Ask], clock: Callable[[], float], due_s: Sequence[float], ended: Callable[[], object]
) -> list[Timed]:
    """An open loop: each is sent so many seconds after the begin, whether others have ended or not."""

    async def one(ask: Ask, due: float) -> Timed:
        await asyncio.sleep(max(0.0, begin_s + due - clock()))
        timed = await answer(server, ask, clock)
        ended()
        return timed

    await server.flush()
    begin_s = clock()
    return await _together(server, [one(ask, due) for ask, due in zip(asks, due_s, strict=True)], clock)


async def in_turn(
    server: Server, asks: Sequence[Ask], clock: Callable[[], float], at_a_time: int, ended: Callable[[], object]
) -> list[Timed]:
    """A closed loop: so many are in flight, and when one has ended the next one is sent."""
    places = asyncio.Semaphore(at_a_time)

    async def one(ask: Ask) -> Timed:
        async with places:
            timed = await answer(server, ask, clock)
        ended()
        return timed

    await server.flush()
    return await _together(server, [one(ask) for ask in asks], clock)


async def _together(
    server: Server, answers: Sequence[Coroutine[Any, Any, Timed]], clock: Callable[[], float]
) -> list[Timed]:
    """All of them, and how late this process itself was while they ran."""
    lags: list[float] = []
    watch = asyncio.create_task(_watch(lags, clock))
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in answers]
    finally:
        watch.cancel()
    server.lag_s = sorted(lags)[int(0.95 * (len(lags) - 1))] if lags else 0.0
    return [task.result() for task in tasks]


async def _watch(lags: list[float], clock: Callable[[], float]) -> None:
    """A sleep that takes longer than it should shows how long arrivals waited to be noticed."""
    while True:
        before = clock()
        await asyncio.sleep(TICK_S)
        lags.append(max(0.0, clock() - before - TICK_S))
