"""Hostile servers, addresses and keys: none causes a traceback, a hang, or a number.

The inputs stand in `tests/data/hostile/servers.json` by kind. One is a text, {"repeat": [what, times, ...]} where it
is long, or what its kind says.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dflash_bench.core.dialects import DIALECTS, AcceptanceCounts, contradiction
from dflash_bench.core.errors import UserError
from dflash_bench.core.labels import visible
from dflash_bench.core.types import Generation
from dflash_bench.runner import served
from dflash_bench.runner.config import RunRequest
from dflash_bench.servers import client
from dflash_bench.servers.address import key_of, parse
from dflash_bench.servers.backend import ServerBackend
from helpers.each import each
from helpers.servers.fake_server import FakeServer
from helpers.servers.one_server import CHAT, backend, named

INPUTS: dict[str, list[Any]] = json.loads((Path(__file__).parents[1] / "data/hostile/servers.json").read_text())
SECRET = "hunter2secret"
LONGEST_S = 240.0
"""For one input, on a machine that is busy with others."""
TRUE = 10
"""Tokens of each answer, in three rounds of two accepted drafts of four."""


def long(one: Any) -> str:
    """An input as a text, of {"repeat": [what, times, ...]} too."""
    if not isinstance(one, dict):
        return str(one)
    parts = one["repeat"]
    return "".join(part * times for part, times in zip(parts[::2], parts[1::2], strict=True))


def encoded(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogatepass")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test waits for what does not come; and none takes long."""
    monkeypatch.setattr(client, "WAITS_S", ())
    monkeypatch.setattr("dflash_bench.servers.requests.SETTLES_S", (0.0,))
    begin_s = time.monotonic()
    yield
    assert time.monotonic() - begin_s < LONGEST_S


def said(error: BaseException) -> str:
    """The user's output: a single line without control characters or secrets."""
    text = str(error)
    assert len(text.splitlines()) == 1 and visible(text) == text, text
    assert SECRET not in text
    return text


def test_there_are_enough_of_them() -> None:
    assert sum(map(len, INPUTS.values())) >= 400


@each("text", INPUTS["address"] + INPUTS["address with a secret"])
def test_an_address(text: str) -> None:
    with pytest.raises(UserError) as refused:
        parse([f"plain={text}"])
    assert said(refused.value).startswith("--server plain: ")


@each("text", INPUTS["name"])
def test_a_name(text: str) -> None:
    with pytest.raises(UserError) as refused:
        parse([text])
    assert len(visible(str(refused.value))) < 1000
    assert SECRET not in str(refused.value)


@each("text", INPUTS["key"])
def test_a_key(text: str) -> None:
    with pytest.raises(UserError) as refused:
        key_of(text, "the variable K")
    assert text not in said(refused.value)


@each("name", INPUTS["name of a key's variable"])
def test_the_name_of_a_keys_variable(name: str) -> None:
    with pytest.raises(UserError) as refused:
        served.access_of(RunRequest(servers=("plain=http://a",), api_key_env=name))
    said(refused.value)


@pytest.mark.parametrize(
    ("words", "variable"),
    [
        (("--server", "plain=http://0177.0.0.1"), "k"),
        (("--server", "plain=http://" + "é" * 70), "k"),
        (("--server", "plain=http://a\u202eb"), "k"),
        (("--server", "plain=http://a"), "ä"),
        (("--server", "plain=http://a"), f"{SECRET}\n{SECRET}"),
    ],
)
def test_a_command_ends_in_one_line(main: Any, monkeypatch: pytest.MonkeyPatch, words: Any, variable: str) -> None:
    monkeypatch.setenv("KEY_OF_TEST", variable)
    code, out, err = main("run", "--suite", "gsm8k", *words, "--api-key-env", "KEY_OF_TEST", "--out", "run")
    assert (code, out, len(err.splitlines()), visible(err, keep="\n")) == (2, "", 1, err)
    assert SECRET not in err
    assert not Path("run").exists()


def answered(server: FakeServer, **changes: Any) -> Generation | str:
    """One answer, or why there is none."""
    try:
        with backend(server, **{"access": {"timeout_s": 10.0}, **changes}) as opened:
            json.dumps(opened.describe()).encode()
            return opened.generate("ar", CHAT)
    except UserError as error:
        assert len(visible(str(error))) < 3000
        return str(error)


def check(found: Generation | str) -> None:
    """No number that is not true."""
    if isinstance(found, str) or found.error is not None:
        return
    assert found.num_tokens == TRUE
    assert (found.total_rounds, found.total_accepted) in ((None, None), (3, 6))


def server(dialect: str = "vllm", **changes: Any) -> FakeServer:
    return FakeServer(dialect=dialect, accepts=(2,), block=4, answer=lambda *_: range(10, 10 + TRUE), **changes)


PAGES = [kind for kind in INPUTS if kind.startswith("page ")]


@pytest.mark.parametrize("kind", PAGES)
def test_a_page(kind: str) -> None:
    path = kind.removeprefix("page ")
    for one in INPUTS[kind]:
        body = encoded(long(one))
        for dialect in ("vllm", "sglang", "llamacpp"):
            with server(dialect, raw=lambda asked, body=body: respond(body) if asked == path else None) as running:
                check(answered(running))


def respond(body: bytes, status: int = 200) -> list[bytes]:
    return [b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body)), body]


@pytest.mark.parametrize("dialect", ["vllm", "llamacpp", "lmdeploy"])
def test_a_value_or_a_line_of_metrics(dialect: str) -> None:
    values = [f'{dialect}:spec_decode_num_accepted_tokens_total{{engine="9"}} {value}' for value in INPUTS["metric"]]
    with server(dialect) as running, backend(running) as opened:
        metrics = running._metrics
        for line in values + INPUTS["lines of metrics"]:
            running._metrics = lambda line=line: metrics() + line + "\n"  # type: ignore[method-assign]
            answer = opened.generate("ar", CHAT)
            check(answer)
            assert answer.error is None
            if line in values and dialect == "llamacpp":
                # Its answers tell drafts, too.
                assert answer.counted_by == "llamacpp.timings", line
            elif line in values:
                assert (answer.total_rounds, bool(answer.uncounted)) == (None, True), line


ROLES = {
    "rounds": ("num_spec_steps", "spec_verify_ct"),
    "drafted": ("num_draft_tokens", "total_draft_tokens", "spec_proposed_drafts", "draft_n"),
    "accepted": (
        "num_accepted_draft_tokens",
        "total_accepted_draft_tokens",
        "spec_accepted_drafts",
        "draft_n_accepted",
    ),
    "tokens": ("completion_tokens", "predicted_n"),
}


def replaced(event: Any, names: tuple[str, ...], value: Any) -> Any:
    if isinstance(event, dict):
        return {name: value if name in names else replaced(of, names, value) for name, of in event.items()}
    return [replaced(one, names, value) for one in event] if isinstance(event, list) else event


def valued(one: Any) -> Any:
    return float("inf") if one["value"] == "1e999" else one["value"]


@pytest.mark.parametrize("role", ["rounds", "drafted", "accepted"])
@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llamacpp", "tensorrt_llm"])
def test_a_count(dialect: str, role: str) -> None:
    does = {"has_metrics": False, "counts_by_request": True, "counts_positions": False}
    with server(dialect, **does) as running, backend(running) as opened:
        assert opened.generate("ar", CHAT).total_rounds == 3
        for one in INPUTS["count"]:
            running.does.bent = lambda event, one=one: replaced(event, ROLES[role], valued(one))
            answer = opened.generate("ar", CHAT)
            assert answer.error is None
            if answer.total_rounds is None:
                assert answer.uncounted
                continue
            # It tells drafts alone: rounds are worked out, and fit by that. Old versions of SGLang tell rounds alone.
            by = answer.counted_by or ""
            assert by in ("llamacpp.timings", "sglang.derived"), one
            counts = AcceptanceCounts(answer.total_rounds, answer.total_accepted or 0, answer.total_drafted, by=by)
            assert contradiction(counts, TRUE) is None
            assert by != "sglang.derived" or answer.total_rounds == 3


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llamacpp", "lmdeploy", "tensorrt_llm"])
def test_a_number_of_tokens(dialect: str) -> None:
    with server(dialect) as running, backend(running, max_new_tokens=64) as opened:
        for one in INPUTS["tokens"]:
            running.does.bent = lambda event, one=one: replaced(event, ROLES["tokens"], valued(one))
            answer = opened.generate("ar", CHAT)
            # Ids of half characters may be missing, up to three.
            most = TRUE + (3 if dialect == "llamacpp" else 0)
            assert answer.error is not None or TRUE <= answer.num_tokens <= most, one


@pytest.mark.parametrize("dialect", DIALECTS.own)
def test_an_event(dialect: str) -> None:
    with server(dialect) as running, backend(running, **named(dialect)) as opened:
        for one in INPUTS["event"]:
            running.does.between = encoded(long(one)) + b"\n\n"
            answer = opened.generate("ar", CHAT)
            check(answer)
            assert len(answer.error or "") < 1000 and visible(answer.error or "") == (answer.error or "")


ANSWERING = ("/v1/completions", "/v1/chat/completions", "/generate", "/completion")


@pytest.mark.parametrize("dialect", DIALECTS.own)
@pytest.mark.parametrize("kind", ["status", "head"])
def test_a_status_or_a_head(dialect: str, kind: str) -> None:
    with server(dialect) as running, backend(running, **named(dialect)) as opened:
        assert opened.generate("ar", CHAT).error is None
        for one in INPUTS[kind]:
            raw = respond(encoded(one["body"]), one["status"]) if kind == "status" else [encoded(long(one))]
            running.does.raw = lambda path, raw=raw: raw if path in ANSWERING else None
            answer = opened.generate("ar", CHAT)
            assert answer.error is not None and visible(answer.error) == answer.error, one


@pytest.mark.parametrize("kind", ["status", "head"])
def test_a_status_or_a_head_of_pages(kind: str) -> None:
    for one in INPUTS[kind]:
        raw = respond(encoded(one["body"]), one["status"]) if kind == "status" else [encoded(long(one))]
        with server(raw=lambda path, raw=raw: None if path in ANSWERING else raw) as running:
            found = answered(running)
            assert isinstance(found, str), one


def test_proxies_of_the_environment_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("socks9://me:hunter2secret@a", "http://[", "socks5://me:hunter2secret@a", "http://a:hunter2secret"):
        monkeypatch.setenv("HTTP_PROXY", value)
        access = served.access_of(RunRequest(servers=("plain=http://127.0.0.1:9",), env_proxy=True))
        with pytest.raises(UserError) as refused:
            ServerBackend(parse(["plain=http://127.0.0.1:9"]), access, 16)
        assert SECRET not in str(refused.value)


def test_a_cookie_is_neither_kept_nor_sent() -> None:
    cookie = b"HTTP/1.1 200 X\r\nSet-Cookie: a=b\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
    with server(raw=lambda path: [cookie] if path == "/props" else None) as running, backend(running) as opened:
        opened.generate("ar", CHAT)
        assert not any("cookie" in headers for _, _, headers in running.asked)


PAGE_S, ANSWER_S = 2.0, 3.0
MOST_BYTES = 1 << 30
CLIENT = f"""
import asyncio, json, resource, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from dflash_bench.core.errors import UserError
from dflash_bench.servers import client
from helpers.servers.one_server import CHAT, Tokenizer, named
from dflash_bench.servers.address import Access, parse
from dflash_bench.servers.backend import ServerBackend
client.WAITS_S, client.PAGE_TIMEOUT_S, client.ERROR_TIMEOUT_S = (), {PAGE_S}, 1.0
idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for url in sys.argv[1:]:
    try:
        with ServerBackend(parse([f"plain={{url}}"]), Access({ANSWER_S}), 64) as opened:
            opened.local = Tokenizer()
            said = opened.generate("ar", CHAT)
            said = said.error or [said.num_tokens, said.total_rounds, said.uncounted]
    except UserError as error:
        said = str(error)
    print(json.dumps([said, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - idle) * 1024]), flush=True)
"""
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def forever(piece: bytes, head: bytes = HEAD) -> Iterator[bytes]:
    yield head
    while True:
        yield piece


def endless(kind: str) -> dict[str, Any]:
    """A server of which something does not end."""
    large = b"x" * (1 << 18)
    event = json.dumps({"choices": [{"text": large.decode(), "token_ids": [7]}]}).encode()
    streams = {
        "line": lambda: forever(large),
        "comments": lambda: forever(b": still here\n" * 1000),
        "empty events": lambda: forever(b"data: {}\n\n" * 1000),
        "events without tokens": lambda: forever(b'data: {"choices": [{"text": ""}]}\n\n' * 1000),
        "text in one event": lambda: forever(b"data: " + event + b"\n\n"),
        "tokens": lambda: forever(b'data: {"choices": [{"text": "x", "token_ids": [7]}]}\n\n' * 1000),
        "silence": lambda: forever(b""),
        "informational": lambda: forever(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
        "head": lambda: forever(b"X: y\r\n" * 1000, b"HTTP/1.1 200 OK\r\n"),
        "error": lambda: forever(large, b"HTTP/1.1 500 No\r\n\r\n"),
        "drip": lambda: (piece for _ in iter(int, 1) for piece in (b"", b"H")),
    }
    if kind.startswith("page "):
        path = kind.removeprefix("page ")
        start = {"/metrics": b"", "/v1/models": b"[" * 1000}.get(path, b"{")
        return {"raw": lambda asked: forever(large, HEAD + start) if asked == path else None}
    return {"raw": lambda asked: streams[kind]() if asked in ANSWERING else None}


def test_what_does_not_end_is_cut_in_time_and_takes_no_memory() -> None:
    assert [f"{one}" for one in INPUTS["endless"]] == ENDLESS
    with ExitStack() as stack:
        servers = [stack.enter_context(server(**endless(kind))) for kind in ENDLESS]
        words = [sys.executable, "-c", CLIENT, *(one.url for one in servers)]
        process = stack.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        assert process.stdout is not None
        lines = [json.loads(line) for line in process.stdout]
    found = dict(zip(ENDLESS, lines, strict=True))
    for kind, (said_of_it, num_bytes) in found.items():
        assert num_bytes < MOST_BYTES, kind
        # Counters that do not end are no counters; all else is an error.
        assert isinstance(said_of_it, str) or (kind == "page /metrics" and said_of_it[:2] == [TRUE, None]), kind
    assert "is longer than 4194304 bytes" in found["page /v1/models"][0]
    assert max(num_bytes for _, num_bytes in lines) < MOST_BYTES // 2


ENDLESS = [
    "page /v1/models",
    "page /metrics",
    "page /server_info",
    "error",
    "head",
    "informational",
    "line",
    "comments",
    "empty events",
    "events without tokens",
    "text in one event",
    "tokens",
    "silence",
    "drip",
]
