"""`try URL`: what one server is, whether it drafts, and what comes next, in twelve lines."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from dflash_bench.core.dialects import DIALECTS
from dflash_bench.core.errors import UserError
from dflash_bench.diagnose import tryout
from dflash_bench.diagnose.published import drafts_for, preset_of
from dflash_bench.diagnose.show_tryout import text
from dflash_bench.servers.address import Access
from helpers.each import each
from helpers.servers.fake_server import MODEL, FakeServer
from helpers.servers.fake_words import tokens_of

Main = Callable[..., tuple[int, str, str]]
QUICK = Access(timeout_s=5.0)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tryout, "MOST_PROMPTS", 2)


def tried(**behaviour: Any) -> tryout.Tryout:
    with FakeServer(**behaviour) as server:
        return tryout.try_out(server.url, QUICK)


@each("dialect", ["vllm", "sglang", "llamacpp"])
def test_a_server_that_drafts_is_known_by_its_counters(dialect: str) -> None:
    found = tried(dialect=dialect, accepts=(2,), block=4)
    assert found.dialect == dialect and found.drafts and found.tokens_per_round
    assert 2 < found.tokens_per_round <= 3
    assert (found.num_same, found.num_repeated, found.errors) == (3, 3, ())
    assert [(one.kind, one.num_answers) for one in found.kinds] == [("chat", 2), ("code", 2), ("mathematics", 2)]
    assert "it drafts: 2." in text(found) or "it drafts: 3." in text(found)


def test_a_plain_server_is_known_too() -> None:
    found = tried(dialect="vllm")
    assert found.drafts is not True and found.model == MODEL
    assert "drafts:" not in text(found)


def test_answers_that_differ_when_asked_again_are_told() -> None:
    calls = iter(range(1000))

    def fickle(prompt: str, most: int) -> list[int]:
        return [2 + next(calls) % 90, *tokens_of(prompt, most)]

    found = tried(answer=fickle)
    assert found.num_same == 0 and "0 of 3 greedy answers were the same; the others differ" in text(found)


def test_failed_answers_are_told_and_others_count() -> None:
    found = tried(faults={2: "500"})
    assert len(found.errors) == 1 and sum(one.num_answers for one in found.kinds) == 5
    assert "1 answers failed" in text(found)


def silent() -> Iterator[str]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_what_is_no_server_is_a_line(main: Main) -> None:
    for url, told in (("ftp://x", "begins with http://"), ("http://127.0.0.1:9", "cannot connect to the server at")):
        code, out, err = main("try", url)
        *_, last = err.splitlines()
        assert (code, out) == (2, "") and last.startswith("dflash-bench: ") and told in last and "plain" not in last


def test_a_server_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_bench.servers.connect.CONNECT_TIMEOUT_S", 0.2)
    for url in silent():
        with pytest.raises(UserError, match="takes more than"):
            tryout.try_out(url, QUICK)


def test_a_server_that_answers_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="answers nothing"):
        tried(faults=dict.fromkeys(range(20), "500"))


def test_the_command_prints_lines_or_json(main: Main) -> None:
    with FakeServer(accepts=(2,), block=4) as server:
        code, out, _ = main("try", server.url)
        assert code == 0 and len(out.splitlines()) <= 12 and f"dflash={server.url}" in out
        code, out, _ = main("try", server.url, "--json")
    assert code == 0 and json.loads(out)["drafts"] is True


# Published drafts.

NAMES = {
    "Qwen/Qwen3-8B": "qwen3-8b",
    "/models/Qwen3-8B-Q4_K_M.gguf": "qwen3-8b",
    "RedHatAI/Qwen3-8B-FP8-dynamic": "qwen3-8b",
    "Qwen3-8B-Base-of-mine": None,
    "nano": None,
    "": None,
}


@each("name", NAMES)
def test_a_served_model_is_recognised(name: str) -> None:
    found = preset_of(name)
    assert (found and found[0]) == NAMES[name]


def test_flags_are_those_of_its_program() -> None:
    vllm = next(drafts_for("Qwen/Qwen3-8B", DIALECTS["vllm"].program))
    assert vllm.flags and json.loads(vllm.flags.words[1])["num_speculative_tokens"] == 15
    llamacpp = next(drafts_for("Qwen/Qwen3-8B", DIALECTS["llamacpp"].program))
    assert llamacpp.flags and llamacpp.flags.first[0] == "convert" and "--spec-type" in llamacpp.flags.words
    assert all(one.flags is None for one in drafts_for("Qwen/Qwen3-8B", None))


@each("program", [None, "vllm", "llamacpp"])
def test_twelve_lines_are_enough(program: str | None) -> None:
    published = tuple(drafts_for("Qwen/Qwen3-8B", DIALECTS[program].program if program else None))
    found = replace(tried(), published=published, drafts=False, uncounted=None)
    shown = text(found).splitlines()
    assert len(shown) <= 12 + (program == "llamacpp")
    assert any("z-lab/Qwen3-8B-DFlash-b16" in line for line in shown)
