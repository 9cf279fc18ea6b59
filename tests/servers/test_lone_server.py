"""`run` with a single server that drafts: nothing to compare it with, and all else is measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflash_bench.analysis.cells import summarise
from dflash_bench.core.types import Message, Prompt
from dflash_bench.models import chat, targets
from dflash_bench.models.presets import NANO
from dflash_bench.results import run_info, store
from dflash_bench.results import table as results_table
from dflash_bench.tasks import scorers
from helpers.each import each
from helpers.refusals import assert_refused
from helpers.runs import listed
from helpers.servers.fake_server import FakeServer
from helpers.servers.nano_words import nano_text

Main = Callable[..., tuple[int, str, str]]
PROMPTS = 4


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "p.jsonl"
    turns = [[f"What is {n} times 7?", "And twice that?"] for n in range(PROMPTS)]
    path.write_text("".join(json.dumps({"turns": of_prompt}) + "\n" for of_prompt in turns))
    return path


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(accepts=(2, 0, 4), block=5, round_s=0.002, counts_by_request=True) as one:
        yield one


def words(server: FakeServer, prompts: Path, out: str, *more: object) -> list[object]:
    return [
        "run",
        "--server",
        f"dflash={server.url}",
        "--prompts",
        prompts,
        "--max-new-tokens",
        24,
        "--out",
        out,
        *more,
    ]


@pytest.mark.parametrize("more", [(), ("--concurrency", 3)], ids=["alone", "together"])
def test_acceptance_and_speed_are_told_and_no_speedup(
    main: Main, prompts: Path, server: FakeServer, more: tuple[object, ...]
) -> None:
    assert main(*words(server, prompts, "run", *more))[0] == 0
    out = main("report", "run")[1]
    read = results_table.read_run(Path("run"))
    (cell,) = summarise(read.rows, read.info.identity)
    assert (cell.method, cell.num_prompts, cell.num_errors) == ("dflash", PROMPTS, 0)
    rows = store.load(Path("run"))[1]
    rounds, accepted = (sum(getattr(row.generation, name) or 0 for row in rows) for name in TOTALS)
    assert cell.value("al.pooled") == pytest.approx(1 + accepted / rounds)
    assert cell.value("tps.decode")
    assert cell.value("speedup.decode") is None
    assert cell.exact is None
    assert cell.audit is None
    assert "--server plain=URL" in " ".join(out.split())


TOTALS = ("total_rounds", "total_accepted")


def test_a_later_turn_goes_on_from_its_own_earlier_answers(main: Main, prompts: Path, server: FakeServer) -> None:
    main(*words(server, prompts, "run"))
    rows = store.load(Path("run"))[1]
    assert len(rows) == 2 * PROMPTS
    first = {row.prompt_id: row.generation.text for row in rows if row.turn == 0}
    chats = [body["messages"] for _, body, _ in server.asked if len((body or {}).get("messages", ())) == 3]
    assert [messages[1]["content"] for messages in chats] == [first[str(n)] for n in range(PROMPTS)]


def test_all_commands_read_such_a_run(main: Main, prompts: Path, server: FakeServer) -> None:
    for out in ("one", "two"):
        assert main(*words(server, prompts, out, "--concurrency", "1,2"))[0] == 0
    for command in (
        ("compare", "one"),
        ("compare", "one", "two"),
        ("report", "one", "-o", "page.html"),
        ("card", "one"),
        ("baseline", "one", "-o", "base.json"),
        ("check", "one"),
    ):
        code, _, err = main(*command)
        assert code == 0, (command, err)
    _, out, _ = main("check", "two", "--baseline", "base.json", "--all")
    judged = [line.split() for line in out.splitlines() if "al.pooled" in line or "failed" in line]
    assert len(judged) >= 4
    assert {line[0] for line in judged} == {"ok"}, out


def test_answers_that_are_lost_are_asked_for_again_with_what_hangs_on_them(
    main: Main, prompts: Path, server: FakeServer
) -> None:
    assert main(*words(server, prompts, "run"))[0] == 0
    before = {(row.prompt_id, row.turn) for row in store.load(Path("run"))[1]}
    _drop(Path("run"), prompt="2", turn=0)
    num = server.num_answers
    code, _, err = main(*words(server, prompts, "run", "--resume"))
    assert code == 0, err
    rows = store.load(Path("run"))[1]
    assert {(row.prompt_id, row.turn) for row in rows} == before
    assert len(rows) == len(before)
    # One to warm up, the one that was lost, and the one after it.
    assert server.num_answers == num + 3


def _drop(folder: Path, prompt: str, turn: int) -> None:
    from pyarrow import compute, parquet

    for part in folder.glob("part-*.parquet"):
        table = parquet.read_table(part)
        is_it = compute.and_(compute.equal(table["prompt_id"], prompt), compute.equal(table["turn"], turn))
        kept = table.filter(compute.invert(is_it))
        part.unlink()
        if len(kept):
            parquet.write_table(kept, part)
    listed(folder)


def test_with_the_same_weights_here_its_answers_are_judged(main: Main) -> None:
    question = "--suite gsm8k --model nano --limit 3 --max-new-tokens 24".split()
    assert main("run", *question, "--method", "dflash", "--out", "engine")[0] == 0
    tokenizer = targets.tokenizer_of(NANO / "target", False)
    turns = {prompt["prompt_id"]: prompt["turns"][0] for prompt in run_info.read_prompts(Path("engine"))}
    right = {
        json.dumps(chat.encode(tokenizer, [Message("user", turns[row.prompt_id])], False)): [*row.generation.token_ids]
        for row in store.load(Path("engine"))[1]
        if row.method == "ar"
    }
    ends = frozenset(tokens[-1] for tokens in right.values() if len(tokens) < 24)
    for wrong, status, verdict in ((0, 0, "exact"), (1, 1, "mismatch")):
        said = {prompt: [*tokens[:5], tokens[5] ^ wrong, *tokens[6:]] for prompt, tokens in right.items()}
        with FakeServer(
            answer=lambda prompt, _, said=said: said[prompt], ends=ends, accepts=(2,), block=3, text=nano_text
        ) as server:
            words = ("run", *question, "--server", f"dflash={server.url}", "--out", verdict)
            assert main(*words)[0] == status
            code, _, err = main(*words[:-1], "other", "--audit", "divergent")
        rows = store.load(Path(verdict))[1]
        assert {(row.exactness, row.audit) for row in rows} == {(None, verdict)}
        assert (code, "--audit divergent" in err and "--server plain=URL" in err) == (2, True)
    assert main("compare", "engine", "exact", *"--allow engine --allow dtype --allow device".split())[0] == 0


def test_without_ids_and_counts_a_drafting_server_has_no_decode_speed(main: Main, prompts: Path) -> None:
    with (
        FakeServer(dialect="openai", round_s=5e-3) as plain,
        FakeServer(dialect="openai", accepts=(2,), block=3) as drafting,
    ):
        words = ("run", "--server", f"plain={plain.url}", "--server", f"dflash={drafting.url}", "--prompts", prompts)
        main(*words, "--max-new-tokens", 24, "--out", "run")
    read = results_table.read_run(Path("run"))
    by_method = {cell.method: cell for cell in summarise(read.rows, read.info.identity)}
    assert by_method["ar"].value("tps.decode")
    own = by_method["dflash"]
    assert [own.value(name) for name in ("tps.decode", "speedup.decode", "speedup.decode.geometric")] == [None] * 3
    assert own.value("tps.e2e") and own.value("speedup.e2e")
    found = json.loads(main("report", "run", "--format", "json")[1])["findings"]
    assert [one["places"][0]["method"] for one in found if one["kind"] == "no_decode_speed"] == ["dflash"]


# Prefixes that prompts share


def test_prefixes_are_reused_only_where_it_is_asked_for(main: Main, prompts: Path, server: FakeServer) -> None:
    for out, more, salted in (("whole", (), True), ("shared", ("--prefix-reuse",), False)):
        server.asked.clear()
        assert main(*words(server, prompts, out, *more))[0] == 0
        bodies = [body for path, body, _ in server.asked if path.endswith("completions")]
        assert len(bodies) >= PROMPTS and all(("cache_salt" in body) is salted for body in bodies)
        num_flushes = sum(path == "/reset_prefix_cache" for path, _, _ in server.asked)
        assert num_flushes <= 1 if not salted else num_flushes >= PROMPTS
        found = json.loads(Path(out, "run.json").read_text())["identity"]["servers"]
        assert {one["prefix_cache"] for one in found.values()} == {"flushed" if salted else "reused"}
    code, _, err = main("compare", "whole", "shared")
    assert code == 2 and "prefix cache flushed" in err and "prefix cache reused" in err


# Constrained output


def test_servers_are_told_the_schema_and_their_answers_are_held_to_it(
    main: Main, prompts: Path, server: FakeServer
) -> None:
    Path("s.json").write_text(json.dumps({"type": "integer"}))
    assert main(*words(server, prompts, "run", "--json-schema", "s.json"))[0] == 0
    asked = [body for path, body, _ in server.asked if path.endswith("/chat/completions")]
    assert len(asked) >= PROMPTS
    for body in asked:
        assert body["response_format"]["type"] == "json_schema"
        assert body["response_format"]["json_schema"]["schema"] == {"type": "integer"}
    rows = store.load(Path("run"))[1]
    assert [row.passed for row in rows if row.passed is not None] == [False] * PROMPTS  # it says " t5 t7"
    assert json.loads(Path("run/run.json").read_text())["identity"]["json_schema"]
    assert main(*words(server, prompts, "plain"))[0] == 0
    code, _, err = main("compare", "plain", "run")
    assert code == 2 and "JSON schema none" in err


@each(
    ("text", "right"),
    [('{"a": 1}', True), (' {"a": 2, "b": null}\n', True), ('{"a": "1"}', False), ("{", False), ("", False)],
)
def test_an_answer_is_right_if_the_schema_allows_it(text: str, right: bool) -> None:
    told = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    prompt = Prompt("prompts", "0", ("?",), row={"json_schema": told})
    assert scorers.score("json_schema", prompt, text).passed is right


@pytest.mark.parametrize("content", ["[]", '{"type": "no such type"}', "{"])
def test_a_file_that_is_no_schema_is_refused(main: Main, prompts: Path, content: str) -> None:
    Path("s.json").write_text(content)
    asked = ("--server", "dflash=http://127.0.0.1:9", "--prompts", prompts, "--json-schema", "s.json")
    assert_refused(main("run", *asked), "s.json")


def test_a_schema_is_for_servers_that_are_not_judged_here(main: Main, prompts: Path) -> None:
    assert_refused(main("run", "--prompts", prompts, "--json-schema", "s.json"), "--json-schema", "--server")
