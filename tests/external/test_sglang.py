"""SGLang's command line, HTTP server, tokenizer and counts, over a worker that answers from a table.

SGLang's workers need CUDA; see `servers/sglang_here.py` for what of it runs here. The table is our engine's answers
with DFlash, so that tokens and counts are known.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import contracts
import pytest
import served
from contracts import METHOD, Told

from dflash_bench.core import methods
from dflash_bench.core.dialects import LaunchSpec
from dflash_bench.core.types import Generation
from dflash_bench.results import store
from dflash_bench.servers.launch import program_named
from studies._study import bench

pytestmark = pytest.mark.sglang
RECIPES = Path(__file__).parents[2] / "docs" / "recipes.md"
PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
for words in json.loads(sys.argv[1]):
    parser.parse_args(words)
print(json.dumps([option for action in parser._actions for option in action.option_strings]))
"""
SERVED = "dflash"
CONTEXT = 256
"""Tokens that the server for chats has room for: enough for the suite."""
TOO_MUCH = {
    CONTEXT - 18: "exceeds the maximum allowed length",
    CONTEXT - 15: "exceeds the model's maximum context length",
    CONTEXT: "longer than the model's context length",
}
"""SGLang's errors, of its scheduler and its tokenizer, by the words of a prompt, whose chat takes 14 tokens more."""


def spec(text: str, num_drafts: int | None, **changes: object) -> LaunchSpec:
    draft = None if num_drafts is None or text in ("mtp:3", "ngram:4") else "D"
    given = {"dtype": "bfloat16", "memory_share": 0.4, "trust_remote_code": True, **changes}
    return LaunchSpec(methods.parse(text), "m", "T", draft, num_drafts, 4096, 8, **given)  # type: ignore[arg-type]


SPECS = (
    spec("ar", None),
    spec("dflash", 15, kind="DFlash"),
    spec("dflash", 15, kind="DFlash 2"),
    spec("dflash", 7, kind="DSpark", shifted=True),
    spec("dflash", 15, kind="Domino", shifted=True),
    spec("dflash", 6, kind="LiLiCorr"),
    spec("eagle3", 3),
    spec("eagle3-tree:nodes=59,depth=7,top_k=10", 59),
    spec("mtp:3", 3, kind="MTP"),
    spec("ngram:4", 4, dtype="float32"),
)
FOUND = (
    "The client received exactly the table's tokens and counts, for prompts as token ids (`/generate`) and for chats "
    "(`/v1/chat/completions`). SGLang counts all drafts that a worker accepts in the last round, including those after "
    "the token that ends the answer. Prompts beyond the context fail with SGLang's reason."
)


@pytest.fixture(scope="module")
def parsed(server_environment: Callable[[str], Path]) -> Callable[[Sequence[Sequence[str]]], list[str]]:
    """Parses command lines without `serve`, and returns all options that the parser knows."""
    python = server_environment("sglang") / "bin" / "python"

    def parse(lines: Sequence[Sequence[str]]) -> list[str]:
        done = subprocess.run([python, "-c", PARSE, json.dumps(lines)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        known: list[str] = json.loads(done.stdout.splitlines()[-1])
        return known

    return parse


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, server_environment: Callable[[str], Path]) -> Path:
    server_environment("sglang")
    return tmp_path_factory.mktemp("sglang")


@pytest.fixture(scope="module")
def told(folder: Path) -> Told:
    return contracts.told_by("sglang", folder)


@pytest.fixture(scope="module")
def server(told: Told, folder: Path) -> Iterator[str]:
    """The option that names a drafting server, to be asked without the model's weights, or for too much."""
    program, path = program_named("sglang"), contracts.SERVERS / "sglang_here"
    asked = served.Prompts("nano", contracts.LIMIT, contracts.MAX_NEW_TOKENS, ("gsm8k",))
    wanted = served.servings(program, path, asked, [METHOD])[1:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANSWERS", str(folder / contracts.ANSWERS))
        with served.started(program, path, wanted, folder / "logs", ["--context-length", str(CONTEXT)]) as urls:
            yield f"--server={SERVED}={urls[METHOD]}"


@pytest.fixture(scope="module")
def chats(server: str, folder: Path) -> dict[str, Generation]:
    """Answers to chats, whose prompts SGLang's own template and tokenizer make."""
    bench("run", *contracts.PROMPTS, server, "--out", folder / "chats")
    return contracts.answers(folder / "chats", SERVED)


def test_its_parser_takes_what_launch_gives(parsed: Callable[..., list[str]]) -> None:
    program = program_named("sglang")
    lines = [program.argv(one, 30000) for one in SPECS]
    assert {line[0] for line in lines} == {"serve"}
    assert {one.method.name for one in SPECS[1:]} == {*program.methods}
    parsed([line[1:] for line in lines])


def test_its_parser_knows_the_options_of_the_recipe(parsed: Callable[..., list[str]]) -> None:
    section = RECIPES.read_text().partition("## SGLang")[2].partition("\n## ")[0]
    named = {*re.findall(r"--[a-z][a-z0-9-]+", section)} - {"--launch", "--method"}
    assert len(named) > 8
    assert named <= {*parsed([["--model-path", "T"]])}


def test_it_takes_our_flags_and_gives_its_tokens(told: Told) -> None:
    """The server starts only if its own check of arguments takes what `--launch` gives."""
    contracts.assert_same_tokens(told.plain, told.table)
    contracts.assert_same_tokens(told.drafted, told.table)


def test_its_counts_are_read_as_its_scheduler_counted_them(told: Told) -> None:
    contracts.assert_same_counts(told.drafted, told.table, "sglang.request")


def test_it_is_recognised_and_its_cache_emptied(
    told: Told, folder: Path, server_environment: Callable[[str], Path]
) -> None:
    version = contracts.version(server_environment("sglang"), "sglang")
    servers = store.read_info(folder / "run").identity.servers
    for name, found in servers.items():
        assert (found.dialect, found.version, found.prefix_cache) == ("sglang", version, "flushed")
        emptied = (folder / "run" / "servers-1" / f"{name}.log").read_text().count('"POST /flush_cache HTTP/1.1" 200')
        assert emptied >= len(told.table)
    assert servers[METHOD].facts["speculative_algorithm"] == "DFLASH"


def test_chats_have_its_text_and_its_counts(told: Told, chats: dict[str, Generation]) -> None:
    assert {prompt: one.error for prompt, one in chats.items()} == dict.fromkeys(told.table)
    for prompt, answer in chats.items():
        ours = told.table[prompt]
        assert (answer.num_tokens, answer.text) == (ours.num_tokens, ours.text)
    contracts.assert_same_counts(chats, told.table, "sglang.request")


@pytest.mark.parametrize("how", [[], ["--model", "nano"]], ids=["chats", "token ids"])
def test_too_much_fails_with_its_reason(server: str, tmp_path: Path, how: list[str]) -> None:
    """The first prompt fits: a server that refuses its first request is not asked again."""
    (tmp_path / "long.txt").write_text("\n".join(["Hi", *(" ".join(["a"] * num) for num in TOO_MUCH)]))
    words = ["--prompts", tmp_path / "long.txt", "--max-new-tokens", 2, *how]
    bench("run", *words, server, "--out", tmp_path / "run", allowed=(1,))
    fits, *others = contracts.answers(tmp_path / "run", SERVED).values()
    assert fits.error is None
    for failed, reason in zip(others, TOO_MUCH.values(), strict=True):
        assert reason in str(failed.error)


def test_page(
    told: Told,
    write_page: Callable[[str, Sequence[str]], None],
    command: Callable[[str], str],
    server_environment: Callable[[str], Path],
) -> None:
    version = contracts.version(server_environment("sglang"), "sglang")
    parts = (
        f"SGLang {version}: its command line, its HTTP server, its tokenizer, and of its scheduler the counts of each "
        "round, the ends of answers and the stream. Its workers"
    )
    blocks = contracts.blocks("SGLang", command("sglang"), parts, FOUND, told.drafted)
    write_page("servers/contract-sglang.md", blocks)
