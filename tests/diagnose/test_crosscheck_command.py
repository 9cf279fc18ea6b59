"""The command: what it prints, writes and exits with, which options go together, and how each dialect counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from dflash_bench.core.dialects import UNMEASURED, Conversion, rule_of
from dflash_bench.diagnose import conform_server
from helpers.each import each
from helpers.servers.fake_server import FakeServer
from helpers.serving import LENGTH, PROMPTS, Said, decoded, engine, open_once, server

LLAMACPP_COUNTERS = rule_of("llamacpp.counters")
assert LLAMACPP_COUNTERS is not None
(LLAMACPP,) = LLAMACPP_COUNTERS.conversions
WHOLE, WITHIN_ANSWER, BONUS_IS_LAST = UNMEASURED

Main = Callable[..., tuple[int, str, str]]
WORDS = f"crosscheck --suite gsm8k --model nano --limit {PROMPTS} --max-new-tokens {LENGTH}".split()


@pytest.fixture(scope="module")
def answers() -> dict[str, Said]:
    return decoded(engine(), "dflash")


@pytest.fixture
def check(main: Main) -> Callable[..., tuple[int, str, str]]:
    def run(running: FakeServer, *more: object) -> tuple[int, str, str]:
        return main(*WORDS, "--server", f"dflash={running.url}", *more)

    return run


COUNTING: list[tuple[dict[str, Any], Conversion]] = [
    ({"dialect": "vllm"}, WHOLE),
    ({"dialect": "vllm", "counts_by_request": True}, WHOLE),
    ({"dialect": "vllm", "counts_positions": False}, WHOLE),
    ({"dialect": "llamacpp"}, LLAMACPP),
    ({"dialect": "llamacpp", "has_metrics": False}, LLAMACPP),
    ({"dialect": "sglang"}, WHOLE),
    ({"dialect": "tensorrt_llm"}, WITHIN_ANSWER),
    ({"dialect": "tensorrt_llm"}, BONUS_IS_LAST),
    ({"dialect": "sglang", "spec_names": "none"}, WHOLE),
]


@each("does, conversion", COUNTING)
def test_a_server_that_does_the_same_agrees_in_all_dialects(
    check: Main, answers: dict[str, Said], does: dict[str, Any], conversion: Conversion
) -> None:
    with server(answers, conversion, **does) as running:
        code, out, err = check(running)
    assert (code, err.replace("loading the models\n", "")) == (0, "")
    assert " agree: " in out and out.count(f"{PROMPTS} of {PROMPTS} ") == 2
    tells_positions = does.get("counts_positions", True) and does.get("has_metrics", True) and "spec_names" not in does
    assert ("at a position" in out) == tells_positions


def test_counts_are_not_put_another_servers_way(check: Main, answers: dict[str, Said]) -> None:
    """Answers of this length end in cut rounds, so that the way of counting shows."""
    with server(answers, LLAMACPP, dialect="vllm") as running:
        _, out, _ = check(running, "--json")
    (found,) = json.loads(out)
    assert found["num_same_answers"] == PROMPTS and found["num_same_counts"] < PROMPTS


@pytest.mark.parametrize(
    ("does", "remedy"),
    [
        ({"dialect": "vllm", "has_metrics": False}, "--disable-log-stats"),
        ({"dialect": "openai", "gives_ids": False}, "--dialect"),
    ],
)
def test_a_server_that_hides_its_counts_cannot_be_told(
    check: Main, answers: dict[str, Said], does: dict[str, Any], remedy: str
) -> None:
    # A server that renders chats also says texts, which are compared.
    tokenizer = engine("ngram").tokenizer
    text = lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=True)  # noqa: E731
    by_chat = does["dialect"] == "openai"
    with server(answers, by_chat=by_chat, text=text, **does) as running:
        code, out, _ = check(running)
    assert code == 2
    assert "cannot be determined" in out and "agree" not in out
    assert remedy in out and f"{PROMPTS} of {PROMPTS} answers" in out


def test_a_server_that_drafts_nothing_is_recognised_from_two_prompts(main: Main, answers: dict[str, Said]) -> None:
    plain = {prompt: replace(said, accepted=(), num_drafts=0) for prompt, said in answers.items()}
    with server(plain) as running:
        words = [2 if word == str(PROMPTS) else word for word in WORDS]
        code, out, _ = main(*words, "--server", f"dflash={running.url}")
    assert code == 1 and "drafts nothing" in out


def test_an_answer_that_is_not_the_models_is_judged(check: Main, answers: dict[str, Said]) -> None:
    prompt, said = next(iter(answers.items()))
    bent = {**answers, prompt: replace(said, tokens=(*said.tokens[:5], said.tokens[5] ^ 1, *said.tokens[6:]))}
    with server(bent, has_metrics=False) as running:
        code, out, _ = check(running, "--json")
    (found,) = json.loads(out)
    assert (code, found["verdict"], found["named"]) == (1, "differ", [])
    assert [one["verdict"] for one in found["answers"]] == ["mismatch", *[None] * (PROMPTS - 1)]
    assert f"1 of {PROMPTS} answers" in found["sentence"]


def test_a_failed_answer_is_said(check: Main, answers: dict[str, Said]) -> None:
    with server(answers, faults={2: "500"}) as running:
        code, out, _ = check(running)
    assert code == 1 and "HTTP 500: fault 500" in out and "differ: 1 of its answers" in out


def test_the_page_and_the_json_say_the_same(check: Main, answers: dict[str, Said], tmp_path: Path) -> None:
    with server(answers) as running:
        code, out, err = check(running, "--json", "--out", tmp_path / "page.md")
    (found,) = json.loads(out)
    page = (tmp_path / "page.md").read_text()
    assert code == 0 and found["verdict"] == "agree" and found["ratio"]["value"] == 1
    assert found["sentence"] in page and "| rounds |" in page and page.startswith("# Crosscheck")
    assert "dflash-bench crosscheck --suite gsm8k" in page and "wrote" in err


@pytest.mark.parametrize("command", ["crosscheck", "conform"])
def test_two_servers_are_checked_in_one_go(main: Main, answers: dict[str, Said], command: str) -> None:
    slow = {
        prompt: replace(said, num_drafts=4, accepted=(0,) * (len(said.tokens) - 1)) for prompt, said in answers.items()
    }
    with server(answers) as first, server(slow) as second:
        urls = [f"dflash={first.url}", f"ngram={second.url}"]
        servers = [word for url in urls for word in ("--server", url)]
        code, out, _ = main(command, *WORDS[1:], *servers, "--json")
    found = json.loads(out)
    assert code == 1 and [(one["method"], one["verdict"]) for one in found] == [
        ("dflash", "agree"),
        ("ngram", "differ"),
    ]


@each(
    "words, said",
    [
        (["--server", "plain=http://x"], "plain="),
        (["--server", "dflash=http://x", "--server", "dflash=http://y"], "dflash is given twice"),
        (["--server", "dflash:7=http://x"], "dflash=URL"),
        (["--server", "dflash=http://x", "--method", "eagle3"], "--method eagle3"),
        (["--server", "dflash=http://x", "--method", "dflash:n=3", "--method", "dflash:n=4"], "give --method once"),
        (["--server", "oracle=http://x"], "oracle"),
        (["--server", "dflash=http://x", "--thinking", "both"], "thinking"),
        (["--server", "dflash=http://x", "--dialect", "klingon"], "dialect 'klingon'"),
        (["--server", "dflash=http://x", "--timeout", "0"], "--timeout"),
        (["--server", "dflash=http://x", "--draft", "eagle3=x"], "--draft eagle3="),
        (["--server", "dflash=http://x", "--out", "no/such/page.md"], "no/such"),
        (["--server", "dflash=http://127.0.0.1:9"], "http://127.0.0.1:9"),
    ],
)
def test_what_makes_no_sense_is_refused(main: Main, words: list[str], said: str) -> None:
    for command in ("crosscheck", "conform"):
        code, _, err = main(command, *WORDS[1:], *words)
        assert code == 2 and said in err


def test_a_crosscheck_needs_a_server(main: Main) -> None:
    code, _, err = main(*WORDS)
    assert code == 2 and "server" in err


@pytest.fixture(autouse=True)
def few_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_planted_servers.py` tries all of them."""
    hypotheses = conform_server.hypotheses
    monkeypatch.setattr(conform_server, "hypotheses", lambda side: islice(hypotheses(side), 1))
    monkeypatch.setattr(conform_server, "open_local", open_once)
