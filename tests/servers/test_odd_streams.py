"""Streams with an oddity that some server has: the answer is measured right, or refused, and no figure is wrong.

The healthy answer has eight tokens, the first after 0.3 s and each other one 50 ms later. Nothing here waits: the
stream's clock is the test's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dflash_bench.core.dialects import DIALECTS, AnswerError
from dflash_bench.core.types import Generation
from dflash_bench.servers import client
from dflash_bench.servers.client import Bounds
from dflash_bench.servers.dialects import openai
from dflash_bench.servers.stream import StreamState
from helpers.each import each
from helpers.servers.fake_server import FakeServer
from helpers.servers.one_server import CHAT, backend

TTFT_S, STEP_S, NUM = 0.3, 0.05, 8
Timed = list[tuple[float, Any]]
"""Seconds since the request, and an event."""


def chunk(text: str | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    delta = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}


def usage(num: Any = NUM, **more: Any) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": 5, "completion_tokens": num, **more}}


def pieces(finish: str | None = None, sizes: tuple[int, ...] = (1,) * NUM) -> Timed:
    """The role, and then pieces of so many tokens, each when its last token is there."""
    places = [sum(sizes[: number + 1]) - 1 for number in range(len(sizes))]
    texts = [(TTFT_S + STEP_S * place, "w " * size) for place, size in zip(places, sizes, strict=True)]
    return [(0.003, chunk("", finish)), *((at_s, chunk(text, finish)) for at_s, text in texts)]


def ending(finish: str = "stop", at_s: float = 0.7, **more: Any) -> Timed:
    return [(at_s, chunk(None, finish)), (at_s, {"choices": [], **(more or usage())})]


def answer(events: Timed, limit: int = 64) -> Generation:
    now_s = [0.0]
    state = StreamState(lambda: now_s[0], limit)
    state.start()
    for at_s, event in events:
        now_s[0] = at_s
        state.mark_arrival()
        openai.read(event, state)
    return state.generation(None)


def counted(events: Timed, sizes: tuple[int, ...]) -> Timed:
    """The same where each piece of text has the count so far, as vLLM's and SGLang's have if they are asked to."""
    totals = iter([0, *(sum(sizes[: number + 1]) for number in range(len(sizes)))])
    return [(at_s, event | usage(next(totals, sum(sizes)))) for at_s, event in events]


def without_index(events: Timed) -> Timed:
    other = {"index": 1, "delta": {"content": "other "}, "finish_reason": None}
    return [(at_s, event | {"choices": [other, *event["choices"]]}) for at_s, event in events]


REASONED: Timed = [
    (at_s, {"choices": [{"index": 0, "delta": {"reasoning_content": "w "} if at_s < 0.57 else {"content": "w "}}]})
    for at_s, _ in pieces()[1:]
]
CALLED: Timed = [
    (at_s, {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "w "}}]}}]})
    for at_s, _ in pieces()[1:]
]
HEALTHY: dict[str, Timed] = {
    "nothing odd": [*pieces(), *ending()],
    "an empty reason in every piece": [*pieces(""), *ending()],
    "the word null as reason in every piece": [*pieces("null"), *ending()],
    "an empty reason after the end": [*pieces(), *ending(), (0.7, chunk("", ""))],
    "the reason eos_token": [*pieces(), *ending("eos_token")],
    "the reason end_turn": [*pieces(), *ending("end_turn")],
    "tool calls": [*CALLED, *ending("tool_calls")],
    "counts as floats": [*pieces(), *ending(**usage(8.0))],
    "counts as texts": [*pieces(), *ending(**usage("8"))],
    "usage of zeros until the end": [*((at_s, event | usage(0)) for at_s, event in pieces()), *ending()],
    "usage with the reason": [*pieces(), (0.7, chunk(None, "stop", **usage()))],
    "usage without choices": [*pieces(), *ending()[:1], (0.7, usage())],
    "usage with choices that are null": [*pieces(), *ending()[:1], (0.7, {"choices": None, **usage()})],
    "another choice before it": [*without_index(pieces()), *ending()],
    "thinking": [*REASONED, *ending()],
    "thinking counted within": [*REASONED, *ending(**usage(8, completion_tokens_details={"reasoning_tokens": 6}))],
    "thinking counted apart": [*REASONED, *ending(**usage(2, completion_tokens_details={"reasoning_tokens": 6}))],
    "counts in each piece": [*counted(pieces(), (1,) * NUM), *ending()],
    "three at first, counted": [*counted(pieces(sizes=(3, *(1,) * 5)), (3, *(1,) * 5)), *ending()],
    "rounds of two and three, counted": [*counted(pieces(sizes=(1, 2, 3, 2)), (1, 2, 3, 2)), *ending()],
    "two at first, and a stop that is not counted": [*pieces(sizes=(2, *(1,) * 6)), *ending(at_s=0.651)],
    "a stop that is counted": [*pieces()[:-1], *ending(at_s=0.65)],
    "a stop that is counted, in each piece": [*counted(pieces()[:-1], (1,) * 7), *counted(ending(at_s=0.65), (8,))],
}


@each("events", HEALTHY.values())
def test_what_is_measured_is_what_was_sent(events: Timed) -> None:
    found = answer(events)
    assert (found.num_tokens, found.finish_reason, found.error) == (NUM, "stop", None)
    assert found.text.split()[-1] == "w"
    # Those that came with the first token came when the last of them was there.
    assert found.prefill_s == pytest.approx(TTFT_S + STEP_S * ((found.num_first_tokens or 1) - 1))
    assert found.num_decoded / found.decode_s == pytest.approx(1 / STEP_S)


@each(
    ("parts", "answer_text"),
    [
        ([("reasoning_content", "Maybe 41?"), ("content", "42")], "42"),
        ([("reasoning", "Maybe 41?"), ("content", "</think> closes it")], "</think> closes it"),
        ([("reasoning_content", "So 42, but")], ""),
        ([("content", "<think>41?</think>"), ("content", "42")], "42"),
        ([("content", "41?</think>"), ("content", "42")], "42"),
        ([("reasoning_content", "\n\n"), ("content", "42")], "42"),
        ([("content", "42")], "42"),
    ],
)
def test_thinking_is_told_from_the_answer(parts: list[tuple[str, str]], answer_text: str) -> None:
    events = [(0.3, {"choices": [{"delta": {name: text}}]}) for name, text in parts]
    found = answer([*events, *ending(**usage(len(parts)))])
    assert found.answer_text == answer_text


PACELESS = {
    "two at first": ((2, *(1,) * 6), "length"),
    "four at first": ((4, *(1,) * 4), "stop"),
    "rounds of several": ((1, 3, 2, 2), "stop"),
    "all in one piece": ((8,), "stop"),
}


@each(("sizes", "finish"), PACELESS.values())
def test_where_nobody_says_how_many_came_first_there_is_no_decode_speed(sizes: Any, finish: str) -> None:
    found = answer([*pieces(sizes=sizes), *ending(finish)])
    assert (found.num_tokens, found.num_decoded) == (NUM, 0)
    assert found.prefill_s == pytest.approx(TTFT_S + STEP_S * (sizes[0] - 1))


REFUSED = {
    "fewer tokens than pieces": ([*pieces(), *ending(**usage(2))], "8 pieces, but the server counts 2 tokens"),
    "no count": ([*pieces(), *ending(usage=None)], "neither token ids nor usage"),
    "text that is repeated": (
        [*((at_s, chunk("w " * number)) for number, (at_s, _) in enumerate(pieces()) if number), *ending()],
        "repeats the one before it",
    ),
    "a filter": ([*pieces(), *ending("content_filter")], "finish reason 'content_filter'"),
    "text in parts": ([(0.3, {"choices": [{"delta": {"content": [{"text": "w"}]}}]})], "not a string"),
}


@each(("events", "why"), REFUSED.values())
def test_what_cannot_be_measured_is_refused(events: Timed, why: str) -> None:
    with pytest.raises(AnswerError, match=why):
        answer(events)


# Bytes


BODY = b'data: {"n": 0}\n\ndata: {"n": 1}\n\ndata: [DONE]\n\n'
BYTES = {
    "plain": [BODY],
    "a mark of byte order": [b"\xef\xbb\xbf" + BODY],
    "returns": [BODY.replace(b"\n", b"\r")],
    "returns and new lines, cut between": [first + b"\r" for first in BODY.split(b"\n")[:1]]
    + [b"\n\r\n" + b"\r\n".join(BODY.split(b"\n")[2:])],
    "bare lines of JSON": [b'{"n": 0}\n{"n": 1}\n'],
    "null, empty and comments": [b"data: null\n\ndata:\n\n: ping\n\n" + BODY],
    "pings": [b"event: ping\ndata: 2026-01-01 10:00\n\n" + BODY],
    "pings, cut between": [b"event: ping\r", b"\ndata: 10:00\r\n\r", b"\n" + BODY],
    "a letter at a time": [BODY[at : at + 1] for at in range(len(BODY))],
}


@each("sent", BYTES.values())
def test_events_are_read_however_they_are_written(sent: list[bytes]) -> None:
    with FakeServer(raw=lambda path: [HEAD, *sent] if path == "/s" else None) as server, backend(server) as opened:
        found = opened._runner.run(read(opened.servers["ar"].client))
    assert found == [{"n": 0}, {"n": 1}]


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


async def read(of: client.Client) -> list[Any]:
    return [event async for event in of.events("/s", b"{}", Bounds.of(64, 2, False), lambda: None, lambda: None)]


def test_a_line_that_ends_in_a_return_is_not_read_one_event_late() -> None:
    async def sent() -> AsyncIterator[bytes]:
        yield b"data: 0\r\r"
        raise AssertionError("it waits for more")

    async def first() -> str:
        return await anext(client._lines(sent(), Bounds.of(64, 2, False), lambda: None))

    assert asyncio.run(first()) == "data: 0"


@each("dialect", ["vllm", "sglang", "llamacpp", "openai"])
def test_servers_are_asked_to_count_as_they_go(dialect: str) -> None:
    does: dict[str, Any] = {"gives_ids": False, "accepts": (2,), "block": 3, "answer": lambda *_: range(10, 20)}
    with FakeServer(dialect=dialect, **does) as server, backend(server, local=False) as opened:
        found = opened.answer("ar", CHAT)
    assert found.num_tokens == 10
    # OpenAI's specification has no such option, and this server ignores it.
    assert sum(found.pieces) == (10 if dialect != "openai" else len(found.pieces))


def test_an_answer_that_sglang_aborts_names_its_reason() -> None:
    reason = {"type": "abort", "message": "Input length (9 tokens) exceeds the maximum", "status_code": 400}
    event = {"text": "", "output_ids": [2], "meta_info": {"completion_tokens": 1, "finish_reason": reason}}
    with pytest.raises(AnswerError, match=r"stopped with an error: Input length \(9 tokens\) exceeds the maximum"):
        DIALECTS["sglang"].read(event, StreamState(lambda: 0.0, max_new_tokens=8))
