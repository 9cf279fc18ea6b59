"""Which server is where: addresses, dialects, models, keys; and what is said of those that cannot be measured."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dflash_bench.core.dialects import DIALECTS, AcceptanceCounts
from dflash_bench.core.errors import UserError
from dflash_bench.core.secrets import Secret
from dflash_bench.core.types import GREEDY, Message, Settings
from dflash_bench.servers import prometheus
from dflash_bench.servers.address import Access, parse
from dflash_bench.servers.backend import ServerBackend
from dflash_bench.servers.prometheus import CounterPage
from helpers.each import each
from helpers.servers.fake_server import FakeServer

CHAT = (Message("user", "What is 6 times 7?"),)
SECRET = "sk-very-secret"


def opened(server: FakeServer, access: Access | None = None, **changes: Any) -> ServerBackend:
    return ServerBackend(parse([f"plain={server.url}/v1/"]), access or Access(20.0), 16, **changes)


def test_names_are_methods_and_plain_comes_first() -> None:
    addresses = parse(["dflash@a=https://Host:8/x/v1", "plain=http://127.0.0.1:8000", "dflash=http://[::1]:9/"])
    assert [(one.method.label, one.url) for one in addresses] == [
        ("ar", "http://127.0.0.1:8000"),
        ("dflash@a", "https://host:8/x"),
        ("dflash", "http://[::1]:9"),
    ]
    assert parse(["ar=http://a"])[0].method.label == "ar"


REFUSED = {
    "http://a:1": "takes NAME=URL",
    "plain": "takes NAME=URL",
    "plain=a:1": "begins with http:// or https://",
    "plain=http://": "names a host",
    "plain=ftp://a": "begins with http:// or https://",
    "plain=http://a:99999": "not an address",
    "plain=http://me:sk-very-secret@a": "holds a password, which would be stored",
    "plain=http://a?key=sk-very-secret": "leave out '?'",
    "dflash:15=http://a": "a server decides itself how many tokens it drafts; write dflash=URL",
    "plane=http://a": "unknown method 'plane' (did you mean 'plain'?); known: block-diffusion,",
}


@each("text", REFUSED)
def test_an_address_that_cannot_be_asked_is_refused_and_no_password_shown(text: str) -> None:
    with pytest.raises(UserError) as refused:
        parse([text])
    assert REFUSED[text] in str(refused.value)
    assert SECRET not in str(refused.value)


def test_several_servers_need_a_plain_one_and_a_single_one_does_not() -> None:
    with pytest.raises(UserError, match="plain"):
        parse(["dflash=http://a", "eagle3=http://b"])
    assert [one.method.label for one in parse(["dflash=http://a:1"])] == ["dflash"]


def test_a_method_is_given_once() -> None:
    with pytest.raises(UserError, match="twice"):
        parse(["plain=http://a", "ar=http://b"])


@each(
    ("dialect", "version"),
    [
        ("vllm", "0.32.0"),
        ("sglang", "0.5.9"),
        ("llamacpp", "b9-abc"),
        ("tensorrt_llm", "0.32.0"),
        ("lmdeploy", None),
        ("openai", None),
    ],
)
def test_a_server_is_known_by_its_pages(dialect: str, version: str | None) -> None:
    with FakeServer(dialect=dialect) as server, opened(server) as backend:
        about = backend.describe()
    assert about["servers"]["ar"] | {"facts": {}} == {
        "address": server.url,
        "dialect": dialect,
        "version": version,
        "model": "fake-model",
        "prompts": "chat",
        "prefix_cache": {"vllm": "flushed", "sglang": "flushed", "llamacpp": "off"}.get(dialect, "unknown"),
        "facts": {},
    }
    assert about["dtype"] == ("float32" if dialect == "sglang" else "unknown")
    assert {path for path, body, _ in server.asked if body} == set()


def test_a_dialect_that_is_named_is_spoken() -> None:
    with FakeServer(dialect="openai") as server:
        with opened(server, dialect="vllm") as backend:
            assert backend.generate("ar", CHAT).error is None
        assert "cache_salt" in server.asked[-1][1] | server.asked[-2][1]
        with pytest.raises(UserError, match="'trt'; known: llamacpp, lmdeploy, mlx, openai, sglang"):
            opened(server, dialect="trt")


@each(
    ("does", "changes", "message"),
    [
        ({"is_loading": True}, {}, "HTTP 503: Loading model"),
        ({"key": "k"}, {}, "--api-key-env"),
        ({"models": ("a", "b")}, {}, "--served-model: a, b"),
        ({"models": ("a", "b")}, {"model": "c"}, "'c'.* a, b"),
    ],
)
def test_a_server_that_cannot_be_measured_is_refused_with_what_to_do(
    does: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with FakeServer(**does) as server, pytest.raises(UserError, match=message):
        opened(server, **changes)


def test_what_is_no_such_server_is_refused() -> None:
    with FakeServer(dialect="openai") as server:
        server._page = lambda *_: (200, "hello")  # type: ignore[method-assign]
        with pytest.raises(UserError, match="/v1/models"):
            opened(server)


def test_one_of_several_models_is_asked_for_by_its_name() -> None:
    with FakeServer(models=("a", "b")) as server:
        with opened(server, model="b") as backend:
            backend.generate("ar", CHAT)
        assert next(body["model"] for _, body, _ in server.asked if body) == "b"


def test_a_key_is_sent_and_never_told() -> None:
    with FakeServer(key=SECRET) as server:
        with opened(server, Access(20.0, Secret(SECRET))) as backend:
            assert backend.generate("ar", CHAT).error is None
            assert SECRET not in json.dumps(backend.describe()) + repr(Access(20.0, Secret(SECRET)))
            server.does.key = "another"
            answer = backend.generate("ar", CHAT)
            assert "HTTP 401: no such key: Bearer ***" in (answer.error or "")
        with pytest.raises(UserError) as refused:
            opened(server, Access(20.0, Secret(SECRET)))
    # The server repeats the key that it was sent.
    assert "no such key: Bearer ***" in str(refused.value)
    assert SECRET not in str(refused.value)


def test_no_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeServer(dialect="openai") as proxy, FakeServer() as server:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        with opened(server) as backend:
            assert backend.generate("ar", CHAT).error is None
        assert proxy.asked == []
        with pytest.raises(UserError):
            opened(server, Access(20.0, uses_proxies=True))
        assert proxy.asked != []


def test_settings_without_words_in_a_dialect_are_refused() -> None:
    with FakeServer(dialect="openai") as server, opened(server) as backend:
        backend.check_chats([], [GREEDY, Settings(temperature=1.0, top_p=0.9)])
        with pytest.raises(UserError, match=r"openai .*--top-k"):
            backend.check_chats([], [Settings(temperature=1.0, top_k=5)])


ALL = list(DIALECTS.values())
METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="a b"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a b"} 2.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="a b"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a b"} 1.5e+02
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a b"} 40
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="12"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 1.0
vllm:generation_tokens_total{engine="0",model_name="a b"} 55.0
vllm:num_requests_running{engine="0"} 1.0
"""


def test_counters_are_read_over_all_engines() -> None:
    assert prometheus.parse(METRICS, ALL) == CounterPage(
        "vllm.counters",
        {
            "spec_decode_num_drafts": 12,
            "spec_decode_num_draft_tokens": 150,
            "spec_decode_num_accepted_tokens": 40,
            "generation_tokens": 55,
        },
        {0: 10, 12: 3},
    )
    plain = prometheus.parse("llamacpp:tokens_predicted_total 7\nvllm 3\n", ALL)
    assert plain is not None
    assert not plain.count_rounds
    assert prometheus.parse("process_start_time_seconds 1.7e+09\nvllm:e2e 1", ALL) is None


def at(rounds: float, drafted: float, accepted: float, tokens: float | None = None) -> CounterPage:
    values = dict(
        zip((prometheus.ROUNDS, prometheus.DRAFTED, prometheus.ACCEPTED), (rounds, drafted, accepted), strict=True)
    )
    return CounterPage("vllm.counters", values | ({} if tokens is None else {"generation_tokens": tokens}))


@each(
    ("after", "num_tokens", "expected"),
    [
        (at(13, 46, 17), 11, AcceptanceCounts(3, 7, 16, by="vllm.counters")),
        (at(13, 46, 17, 111), 11, AcceptanceCounts(3, 7, 16, by="vllm.counters")),
        (at(10, 30, 10, 111), 11, AcceptanceCounts(0, 0, 0, by="vllm.counters")),
        (at(13, 46, 17, 112), 11, "12 tokens"),
        (at(9, 46, 17), 11, "went back"),
        (
            replace(at(13, 46, 17), wrong="vllm:generation_tokens is 'NaN'"),
            11,
            "vllm:generation_tokens is",
        ),
    ],
)
def test_what_an_answer_added_is_told_or_why_it_cannot_be(
    after: CounterPage, num_tokens: int, expected: AcceptanceCounts | str
) -> None:
    added = prometheus.difference(at(10, 30, 10, 100), after, num_tokens)
    if isinstance(expected, str):
        assert expected in str(added)
    else:
        assert added == expected
    assert "counts no rounds" in str(prometheus.difference(None, replace(after, wrong=None), num_tokens))
