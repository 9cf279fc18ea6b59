"""Answers of servers in every dialect: what is counted equals what the server did, and every fault is a marked row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from dflash_bench.core.dialects import DIALECTS
from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Message, Settings
from dflash_bench.servers.stream import StreamState
from helpers.each import each
from helpers.servers.fake_server import END, FAULTS, FakeServer, tokens_of
from helpers.servers.one_server import CHAT, backend, named, one

OF_TEXTS = ("mlx", "openai")
"""Those that take chats, and answer with text."""


@pytest.fixture(params=DIALECTS.own)
def dialect(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def sent_prompt(server: FakeServer) -> Any:
    """The state of the last answer that was requested."""
    body = next(body for _, body, _ in reversed(server.asked) if body)
    return body.get("prompt") or body.get("input_ids") or body["messages"]


@pytest.mark.parametrize("local", [True, False])
def test_tokens_and_totals_are_those_of_the_server(dialect: str, local: bool) -> None:
    with FakeServer(dialect=dialect, accepts=(3, 0, 5), block=7) as server:
        answer = one(server, local=local, **named(dialect))
    sent = sent_prompt(server)
    sends_ids = local and dialect not in OF_TEXTS
    assert sent == ([*map(ord, CHAT[0].content)] if sends_ids else [{"role": "user", "content": CHAT[0].content}])
    tokens = tokens_of(json.dumps(sent), 64)
    rounds = server._rounds(len(tokens))
    assert answer.error is None
    assert answer.num_tokens == len(tokens)
    assert answer.token_ids == (tuple(tokens) if sends_ids or dialect == "vllm" else ())
    assert answer.text == "".join(f" t{token}" for token in tokens if token != END)
    assert answer.finish_reason == "stop"
    totals = answer.total_rounds, answer.total_drafted, answer.total_accepted
    if dialect in OF_TEXTS:
        assert totals == (None, None, None)
        assert "counts no rounds" in (answer.uncounted or "")
    elif dialect == "llamacpp":
        # The last token of every round counts as its bonus token.
        assert totals == (len(rounds), 7 * len(rounds), len(tokens) - 1 - len(rounds))
    else:
        assert totals == (len(rounds), 7 * len(rounds), sum(rounds))
    assert answer.prefill_s > 0
    assert answer.decode_s > 0


MARKED = {
    "hangup": "closed the connection on /v1/completions without an answer, 3 times",
    "reset": "the connection broke",
    "cut": "the stream ended before the answer did, after 2 tokens",
    "429": "HTTP 429: fault 429",
    "500": "HTTP 500: fault 500",
    "503": "HTTP 503: fault 503",
    "redirect": "HTTP 307: /v1/completions redirects to another address",
    "slow": "no complete answer within 1 s, after 0 pieces; see --timeout",
    "bad_json": "an event of the stream is not JSON",
    "bad_utf8": "the stream is not UTF-8",
    "no_object": "an event of the stream is not an object: [1, 2]",
    "endless": "it went on after 12 tokens",
    "duplicate": "the stream has 9 tokens, but the server counts 8",
    "one_piece": "in one piece instead of a stream",
    "error_event": "the server stopped with an error: out of blocks",
    "bad_ids": "token ids are not a list",
    "odd_finish": "finish reason 'abort'",
}


def test_every_fault_is_tried() -> None:
    assert {*MARKED} | {"no_usage", "others", "counters_back"} == {*FAULTS}


@each("fault", MARKED)
def test_a_fault_is_the_error_of_its_answer_and_of_no_other(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_bench.servers.client.WAITS_S", (0.0, 0.0))
    faults = dict.fromkeys((1, 2, 3) if fault == "hangup" else (1,), fault)
    timeout_s = 1.0 if fault == "slow" else 20.0
    with (
        FakeServer(faults=faults, answer=lambda *_: range(10, 18)) as server,
        backend(server, access={"timeout_s": timeout_s}, max_new_tokens=12) as opened,
    ):
        answers = [opened.generate("ar", CHAT) for _ in range(3)]
    assert [answer.error is None for answer in answers] == [True, False, True]
    bad = answers[1]
    assert MARKED[fault] in (bad.error or "")
    assert (bad.finish_reason, bad.prefill_s, bad.decode_s, bad.total_rounds) == ("error", 0.0, 0.0, None)
    assert answers[0].token_ids == answers[2].token_ids == tuple(range(10, 18))
    # Nothing was asked again but what ended before a single byte.
    assert server.num_answers == (5 if fault == "hangup" else 3)


def test_a_fault_is_an_error_in_every_dialect(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_bench.servers.client.WAITS_S", ())
    # A piece that comes twice shows only where ids can be counted, and does no harm where all of them come each time.
    hides = dialect in (*OF_TEXTS, "sglang")
    tried = [fault for fault in MARKED if fault != "slow" and not (fault == "duplicate" and hides)]
    with (
        FakeServer(dialect=dialect, faults=dict(enumerate(tried, start=1)), answer=lambda *_: range(10, 18)) as server,
        backend(server, max_new_tokens=12, **named(dialect)) as opened,
    ):
        answers = [opened.generate("ar", CHAT) for _ in range(len(tried) + 2)]
    assert [answer.error is None for answer in answers] == [True, *[False] * len(tried), True]
    assert {answer.num_tokens for answer in answers if answer.error is None} == {8}


def test_an_answer_whose_tokens_cannot_be_counted_failed_and_ids_need_no_usage() -> None:
    for dialect, error in (("vllm", None), ("openai", "usage")):
        with FakeServer(dialect=dialect, faults={0: "no_usage"}) as server:
            answer = one(server)
        assert (answer.error is None) == (error is None)
        assert (error or "") in (answer.error or "")


def test_a_server_that_has_gone_ends_the_run_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_bench.servers.client.WAITS_S", (0.0,))
    with FakeServer() as server:
        opened = backend(server)
        opened.generate("ar", CHAT)
    with opened, pytest.raises(UserError, match=r"plain .*http://127.*--resume"):
        opened.generate("ar", CHAT)
    with pytest.raises(UserError, match="--server plain="):
        backend(server)


def test_a_server_that_understands_nothing_is_refused_and_one_that_did_fails_answers() -> None:
    with FakeServer(refuses=("cache_salt",)) as server, backend(server) as opened:
        with pytest.raises(UserError, match=r"HTTP 422: Unsupported.*--dialect"):
            opened.generate("ar", CHAT)
        server.does.refuses = ()
        assert opened.generate("ar", CHAT).error is None
        server.does.refuses = ("cache_salt",)
        assert "HTTP 422" in (opened.generate("ar", CHAT).error or "")


def test_times_are_those_of_the_stream_and_of_tokens() -> None:
    """A round brings three tokens every 50 ms: 9 tokens after the first one take three rounds."""
    with FakeServer(ttft_s=0.1, round_s=0.05, accepts=(2,), block=2, answer=lambda *_: range(10, 20)) as server:
        answer = one(server)
    assert answer.num_decoded == 9
    assert answer.prefill_s >= 0.1
    assert answer.prefill_s + answer.decode_s >= 0.1 + 3 * 0.05


def test_what_arrives_in_one_piece_has_no_time_between() -> None:
    ticks = iter([1.0, 1.5, 2.0, 4.0])
    heard = StreamState(lambda: next(ticks), 20)
    heard.start()
    heard.mark_arrival()
    heard.add_delta("", None)  # the role, which is no token
    heard.mark_arrival()
    heard.add_delta("a", [1])
    heard.add_delta("bc", [2, 3])
    heard.mark_arrival()
    heard.add_delta("de", [4, 5], "stop")
    answer = heard.generation(7)
    assert (answer.prefill_s, answer.decode_s) == (1.0, 2.0)
    assert (answer.num_tokens, answer.num_first_tokens, answer.num_decoded) == (5, 3, 2)


@each(
    ("times", "num_first", "decode_s"),
    [
        ([2.0, 2.00003, 2.00007, 2.00012], 8, 0.0),  # a late server or a proxy held all of it
        ([2.0, 2.00003, 2.1, 2.2], 4, 0.2),  # or its beginning
        ([2.0, 2.1, 2.2, 2.20003], 2, 0.2),
    ],
)
def test_what_was_held_back_arrives_together(times: list[float], num_first: int, decode_s: float) -> None:
    heard = StreamState(iter([1.0, *times]).__next__, 20)
    heard.start()
    for number, _ in enumerate(times):
        heard.mark_arrival()
        heard.add_delta("ab", [number, number], "stop" if number == 3 else None)
    answer = heard.generation(7)
    assert (answer.num_first_tokens, answer.num_decoded) == (num_first, 8 - num_first)
    assert answer.decode_s == pytest.approx(decode_s, abs=2e-4)


def test_an_answer_in_a_single_piece_has_no_time_a_token() -> None:
    heard = StreamState(iter([1.0, 2.0]).__next__, 20)
    heard.start()
    heard.mark_arrival()
    heard.add_delta("all of it", None, "length")
    heard.num_tokens = 5
    answer = heard.generation(None)
    assert (answer.num_hidden_tokens, answer.num_first_tokens, answer.num_decoded) == (5, 5, 0)
    assert (answer.prefill_s, answer.decode_s) == (1.0, 0.0)


def test_settings_that_change_sampling_are_all_said(dialect: str) -> None:
    settings = Settings(temperature=0.7, top_p=0.9)
    with FakeServer(dialect=dialect) as server:
        one(server, settings, **named(dialect))
    body = next(body for _, body, _ in reversed(server.asked) if body)
    said = body.get("sampling_params", body)
    assert (said["temperature"], said["top_p"]) == (0.7, 0.9)
    if dialect != "openai":
        assert said["top_k"] in (0, -1)
        assert said["min_p"] == 0.0
    assert dialect != "llamacpp" or body["cache_prompt"] is False


def test_mlx_is_told_to_look_back_over_the_whole_answer_for_repetitions() -> None:
    """Left to itself it looks at the last 20 tokens."""
    with FakeServer(dialect="mlx") as server:
        one(server, **named("mlx"))
        one(server, Settings(repetition_penalty=1.1), **named("mlx"))
    plain, penalised = (body for _, body, _ in server.asked if body)
    assert "repetition_penalty" not in plain
    assert penalised["repetition_penalty"] == 1.1
    assert penalised["repetition_context_size"] >= 1 << 20


USAGE = {"include_usage": True}
COUNTING = {**USAGE, "continuous_usage_stats": True}


@each(
    ("refuses", "asked"),
    [
        (("continuous_usage_stats",), [COUNTING, USAGE, USAGE]),
        (("",), [COUNTING, USAGE, USAGE]),  # its error names nothing
        (("stream_options",), [COUNTING, USAGE, None, None]),
        (("max_tokens",), [COUNTING, COUNTING, COUNTING]),
    ],
)
def test_a_field_that_a_server_refuses_is_left_out_once_it_has_said_so(refuses: Any, asked: list[Any]) -> None:
    with FakeServer(dialect="openai", refuses=refuses) as server, backend(server) as opened:
        answers = [opened.generate("ar", CHAT) for _ in range(2)]
    assert [answer.error for answer in answers] == [None, None]
    bodies = [body for _, body, _ in server.asked if body]
    assert [body.get("stream_options") for body in bodies] == asked
    limits = ["max_completion_tokens" if "max_tokens" in refuses and number else "max_tokens" for number in range(9)]
    assert all(limit in body for limit, body in zip(limits, bodies, strict=False))


def test_several_that_are_refused_at_once_are_all_asked_again() -> None:
    with FakeServer(dialect="openai", refuses=("stream_options",)) as server, backend(server) as opened:
        served = opened.serve("ar", [(CHAT, number) for number in range(4)], Settings(concurrency=4))
    assert [one.error for one in served] == [None] * 4


@pytest.mark.parametrize("local", [True, False])
def test_tensorrt_llm_refuses_the_fields_of_vllm(local: bool) -> None:
    with (
        FakeServer(dialect="tensorrt_llm") as server,
        pytest.raises(UserError, match=r"not permitted: .*'return_token_ids'.*give another --dialect than vllm"),
    ):
        one(server, local=local, dialect="vllm")


@each(
    ("does", "how", "hits"),
    [
        ({"dialect": "vllm"}, "flushed", None),
        ({"dialect": "vllm", "resets_cache": False}, "salted", None),
        ({"dialect": "sglang"}, "flushed", 0),
        ({"dialect": "llamacpp"}, "off", None),
        ({"dialect": "tensorrt_llm"}, "unknown", "all"),
        ({"dialect": "lmdeploy"}, "unknown", None),
        ({"dialect": "mlx"}, "unknown", "all"),
        ({"dialect": "openai"}, "unknown", "all"),
    ],
)
def test_prompts_that_a_server_keeps_are_forgotten_or_seen(does: dict[str, Any], how: str, hits: int | None) -> None:
    keeps = does["dialect"] != "llamacpp"
    with (
        FakeServer(keeps_prompts=keeps, **does) as server,
        backend(server, **named(does["dialect"])) as opened,
    ):
        _, second = (opened.generate("ar", CHAT) for _ in range(2))
        assert opened.describe()["servers"]["ar"]["prefix_cache"] == how
    if hits == "all":
        assert second.num_cached_tokens == len(json.dumps(sent_prompt(server)))
    else:
        assert not second.num_cached_tokens


def test_several_at_a_time_are_as_many_as_asked_and_none_is_lost_or_doubled() -> None:
    chats = [((Message("user", f"question {number}"),), 0) for number in range(40)]
    with (
        FakeServer(round_s=0.005, faults={7: "500", 9: "reset"}, accepts=(1,), block=3) as server,
        backend(server) as opened,
    ):
        ended: list[int] = []
        served = opened.serve("ar", chats, Settings(concurrency=8), lambda: ended.append(1))
        alone = [opened.generate("ar", messages) for messages, _ in chats]
    assert (len(served), len(ended), server.most_at_once) == (40, 40, 8)
    assert sum(one.error is not None for one in served) == 2
    assert server.num_answers == 80
    for one_served, other in zip(served, alone, strict=True):
        assert one_served.start_s <= one_served.end_s
        if one_served.error is None:
            assert one_served.token_ids == other.token_ids
            # The server counts all of them together.
            assert one_served.total_rounds is None
            assert "several" in (one_served.uncounted or "")


@each(
    ("dialect", "asks", "is_said"),
    [("vllm", False, True), ("mlx", False, True), ("openai", False, False), ("openai", True, True)],
)
def test_thinking_is_said_where_every_server_takes_it_or_the_user_asks(dialect: str, asks: bool, is_said: bool) -> None:
    with FakeServer(dialect=dialect) as server, backend(server, **named(dialect)) as opened:
        assert not opened.has_thinking
        opened.local.has_thinking = True  # type: ignore[union-attr,misc]
        opened.asks_to_think = asks
        assert opened.has_thinking == is_said
        if is_said and dialect != "vllm":
            opened.generate("ar", CHAT, Settings(thinking=False))
            assert server.asked[-1][1]["chat_template_kwargs"] == {"enable_thinking": False}
        opened.local = None
        assert opened.has_thinking == asks


def test_an_empty_thought_that_a_server_repeats_is_none() -> None:
    heard = StreamState(iter([1.0]).__next__, 20, text="4", reasoning="\n\n")
    assert heard.whole_text == "4"
    assert StreamState(iter([1.0]).__next__, 20, text="4", reasoning="so").whole_text == "<think>so</think>4"
