"""Request answers from a server, time and count them: one alone, in a closed loop, or in an open loop.

Any failure of an answer becomes its error.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dflash_bench.core.dialects import (
    AcceptanceCounts,
    AnswerError,
    ServerRequest,
    contradiction,
    emitted_in_order,
    rule_of,
)
from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Generation
from dflash_bench.servers import prometheus
from dflash_bench.servers.client import Bounds, StatusError
from dflash_bench.servers.connect import Server
from dflash_bench.servers.dialects.openai import COUNTS
from dflash_bench.servers.prometheus import CounterPage
from dflash_bench.servers.stream import StreamState

REFUSABLE = {
    COUNTS: COUNTS,
    "stream_options": "stream_options",
    "max_tokens": "max_completion_tokens",
    "return_meta_info": "return_meta_info",
}
"""Fields that a server may refuse, with the name in its error: a missing option, or the new name of the limit."""
SETTLES_S = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Waits in seconds for a server to count an answer it has already sent."""
TICK_S = 0.01
STALLED = 0.25
"""The share of an answer's time limit that may pass without a new token."""
WRONG_REQUEST = (400, 404, 405, 415, 422)
CONCURRENT = "the server counts no rounds in its answers, and several answers ran at once"

Clock = Callable[[], float]
Ask = Callable[[Server, ServerRequest], Coroutine[Any, Any, Generation]]
"""Requests one answer of a load."""


async def ask(server: Server, request: ServerRequest, clock: Clock) -> Generation:
    """Request an answer, regardless of concurrent requests. Times are on `clock`, in seconds.

    Raises UserError if the server is gone, or rejects every request.
    """
    state = StreamState(clock, request.max_new_tokens)
    state.start()
    num_prompt = None if request.prompt_ids is None else len(request.prompt_ids)
    try:
        await _read_answer(server, request, state)
        generation = state.generation(num_prompt)
        whole = replace(generation, start_s=state.start_s, end_s=state.now_s, pieces=tuple(state.pieces))
        answer = _count(whole, state.acceptance or CONCURRENT)
        server.has_answered = True
    except AnswerError as error:
        _refuse_wrong_dialect(server, error)
        failed = state.failed(num_prompt, server.client.shown(str(error)))
        answer = replace(failed, start_s=state.start_s, end_s=clock())
    return _without_secrets(server, answer)


def _refuse_wrong_dialect(server: Server, error: AnswerError) -> None:
    """Raise UserError if the server rejects the first request: it would reject them all."""
    if isinstance(error, StatusError) and error.status in WRONG_REQUEST and not server.has_answered:
        raise UserError(
            f"--server {server.client.name}: {server.client.url} refuses the request ({error}); give another --dialect "
            f"than {server.dialect.name}, or correct what the server names"
        ) from error


async def sequential(server: Server, request: ServerRequest, clock: Clock) -> Generation:
    """Request a single answer, with an empty prefix cache. If it does not report its rounds, use the counters."""
    try:
        await server.flush()
    except AnswerError as error:
        state = StreamState(clock, request.max_new_tokens)
        failed = state.failed(None, f"the server's prefix cache could not be emptied: {error}")
        return replace(failed, start_s=clock(), end_s=clock())
    before = await server.counters()
    answer = await ask(server, request, clock)
    rule = rule_of(answer.counted_by or "")
    if answer.error is not None or (rule is not None and not rule.is_derived):
        return answer
    counts = await _count_difference(server, before, answer.num_tokens)
    # Prefer the answer's own report to unusable counters.
    if isinstance(counts, str) and answer.uncounted != CONCURRENT:
        return answer
    return _count(answer, counts)


def _without_secrets(server: Server, generation: Generation) -> Generation:
    """Hide the API key, which a server may echo in its answers."""
    hidden = server.client.access.hidden
    return replace(
        generation, text=hidden(generation.text), uncounted=generation.uncounted and hidden(generation.uncounted)
    )


async def _read_answer(server: Server, request: ServerRequest, state: StreamState) -> None:
    """Read an answer into `state`. Raises AnswerError, also for an answer that stalls or does not end in time."""
    most_s = server.client.access.timeout_s
    stalled_s = STALLED * most_s
    try:
        async with asyncio.timeout(most_s), asyncio.timeout(None) as stalled:
            loop = asyncio.get_running_loop()
            await _read_stream(server, request, state, lambda: stalled.reschedule(loop.time() + stalled_s))
    except TimeoutError as error:
        if stalled.expired():
            raise AnswerError(f"no token came for {stalled_s:g} s after {state.progress}; see --timeout") from error
        raise AnswerError(f"no complete answer within {most_s:g} s, after {state.progress}; see --timeout") from error


async def _read_stream(
    server: Server, request: ServerRequest, state: StreamState, on_token: Callable[[], object]
) -> None:
    path, body = server.dialect.call(request)
    while True:
        accepted = _without(body, server.refused)
        sent = json.dumps(accepted).encode()
        bounds = Bounds.of(request.max_new_tokens, len(sent), server.dialect.repeats)
        num_arrivals = 0
        try:
            async for event in server.client.events(path, sent, bounds, state.start, state.mark_arrival):
                server.dialect.read(event, state)
                if len(state.arrivals) > num_arrivals:
                    num_arrivals = len(state.arrivals)
                    on_token()
        except StatusError as error:
            refused = _refused(error, accepted, server)
            if refused is None:
                raise
            server.refused.add(refused)
        else:
            return


def _without(body: Mapping[str, Any], refused: Collection[str]) -> dict[str, Any]:
    """Return a request with the fields that its server refuses removed or replaced."""
    kept = {name: value for name, value in body.items() if name not in refused}
    if COUNTS in refused and "stream_options" in kept:
        kept["stream_options"] = {name: value for name, value in kept["stream_options"].items() if name != COUNTS}
    if "max_tokens" in refused:
        kept["max_completion_tokens"] = body["max_tokens"]
    return kept


def _refused(error: StatusError, sent: Mapping[str, Any], server: Server) -> str | None:
    """Return the optional field that a server refuses; None if there is none."""
    if error.status not in (400, 422):
        return None
    there = [name for name in REFUSABLE if name in sent or name in sent.get("stream_options", ())]
    named = [name for name in there if REFUSABLE[name] in error.reason]
    # A server that names the whole object, or no field, most likely refuses the non-standard option.
    is_meant = "stream_options" in named or not (named or server.has_answered)
    return COUNTS if COUNTS in there and is_meant else next(iter(named), None)


async def _count_difference(server: Server, before: CounterPage | None, num_tokens: int) -> AcceptanceCounts | str:
    after = None
    for wait_s in SETTLES_S:
        await asyncio.sleep(wait_s)
        after = await server.counters()
        if before is None or after is None or prometheus.lag(before, after, num_tokens) <= 0:
            break
    return prometheus.difference(before, after, num_tokens)


def _count(generation: Generation, counts: AcceptanceCounts | str) -> Generation:
    """Add counts, or the reason why there are none; impossible counts also remove earlier ones."""
    why = counts if isinstance(counts, str) else None
    if not isinstance(counts, str):
        at_limit = generation.finish_reason != "stop"
        wrong = contradiction(counts, generation.num_tokens, at_limit=at_limit, hides_tokens=generation.hides_tokens)
        if wrong is None:
            return replace(
                _with_rounds(generation, counts),
                total_rounds=counts.rounds,
                total_drafted=counts.drafted,
                total_accepted=counts.accepted,
                counted_by=counts.by,
                uncounted=None,
                accepted_at=counts.by_position,
            )
        why = f"the server's counts cannot be right ({counts.by}): {wrong}"
        generation = replace(generation, total_rounds=None, total_drafted=None, total_accepted=None, counted_by=None)
    return replace(generation, uncounted=why, accepted_at=None)


def _with_rounds(generation: Generation, counts: AcceptanceCounts) -> Generation:
    """Add the rounds in order, if the server reports them and they are all that produced the answer."""
    accepted, drafted = counts.accepted_in_order, counts.drafted_in_order
    if accepted is None or drafted is None or generation.hides_tokens:
        return generation
    emitted = emitted_in_order(accepted, generation.num_tokens)
    return generation if emitted is None else replace(generation, accepted=accepted, drafted=drafted, emitted=emitted)


async def open_loop(
    server: Server, requests: Sequence[ServerRequest], ask: Ask, clock: Clock, due_s: Sequence[float]
) -> list[Generation]:
    """Send requests `due_s` seconds after the start, whether earlier answers have ended or not."""

    async def send(request: ServerRequest, due: float) -> Generation:
        await asyncio.sleep(max(0.0, start_s + due - clock()))
        return await ask(server, request)

    await server.flush()
    start_s = clock()
    return await _gather([send(one, due) for one, due in zip(requests, due_s, strict=True)])


async def closed_loop(
    server: Server, requests: Sequence[ServerRequest], ask: Ask, concurrency: int
) -> list[Generation]:
    """Keep `concurrency` requests in flight."""
    places = asyncio.Semaphore(concurrency)

    async def send(request: ServerRequest) -> Generation:
        async with places:
            return await ask(server, request)

    await server.flush()
    return await _gather([send(request) for request in requests])


async def _gather(answers: Sequence[Coroutine[Any, Any, Generation]]) -> list[Generation]:
    """Run all requests. Raises UserError as `ask` does."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer) for answer in answers]
    except BaseExceptionGroup as errors:
        if own := next((error for error in errors.exceptions if isinstance(error, UserError)), None):
            raise own from errors
        raise
    return [task.result() for task in tasks]


class LagWatch:
    """Measures the lag of this process: how much longer than requested a sleep takes is how long arrivals wait."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._lags: list[float] = []
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._lags = []
        self._task = asyncio.create_task(self._watch())

    def end(self) -> float:
        """Return the 95th percentile since `begin`, in seconds."""
        assert self._task is not None, "begin comes first"
        self._task.cancel()
        return sorted(self._lags)[int(0.95 * (len(self._lags) - 1))] if self._lags else 0.0

    async def _watch(self) -> None:
        while True:
            before = self.clock()
            await asyncio.sleep(TICK_S)
            self._lags.append(max(0.0, self.clock() - before - TICK_S))
