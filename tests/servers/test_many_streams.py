"""A thousand answers at a time: none is lost, none counted twice, and none mixed up with another."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dflash_bench.core.types import GREEDY, Message
from helpers.servers.fake_server import FakeServer, tokens_of
from helpers.servers.one_server import Tokenizer, backend

MANY, LENGTH = 1000, 16
FILES = 3 * MANY
"""Both ends of each connection are in this process."""


@pytest.fixture
def many_files() -> Iterator[None]:
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FILES:
        pytest.skip(f"this system allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, FILES), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.in_full
def test_a_thousand_streams_at_a_time(many_files: None) -> None:
    chats = [(Message("user", f"What is {number} times 7?"),) for number in range(MANY)]
    ended: list[None] = []
    does = {"waits_for": MANY, "accepts": (2, 0), "block": 4, "counts_by_request": True, "has_metrics": False}
    with FakeServer(**does) as server, backend(server, access={"timeout_s": 300.0}, max_new_tokens=LENGTH) as opened:
        requests = [(chat, 0) for chat in chats]
        served = opened.serve("ar", requests, replace(GREEDY, concurrency=MANY), lambda: ended.append(None))
    assert (server.most_at_once, server.num_answers, len(served), len(ended)) == (MANY,) * 4
    for chat, answer in zip(chats, served, strict=True):
        tokens = tokens_of(json.dumps(Tokenizer().encode(chat, GREEDY)), LENGTH)
        rounds = server._rounds(len(tokens))
        assert (answer.error, answer.token_ids) == (None, tuple(tokens))
        assert (answer.total_rounds, answer.total_accepted) == (len(rounds), sum(rounds))
