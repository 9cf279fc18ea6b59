"""lmdeploy's command line, checks of drafts, HTTP server and counters, over an engine that answers from a table.

lmdeploy's engines need CUDA; all else of it runs here. The table is our engine's answers with DFlash, so that tokens
and counts are known.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from dflash_bench.core.environment import describe, one_line
from dflash_bench.core.types import Generation, Message
from dflash_bench.models import chat, presets
from dflash_bench.report.tables import markdown
from dflash_bench.results import store
from dflash_bench.tasks import suites
from studies._study import bench

pytestmark = pytest.mark.lmdeploy
PROGRAM = Path(__file__).parent / "servers" / "lmdeploy_here"
LIMIT, MAX_NEW_TOKENS, METHOD = 8, 64, "dflash:7"
ASKED = ["--model", "nano", "--suite", "gsm8k", "--limit", LIMIT, "--max-new-tokens", MAX_NEW_TOKENS]
AS_PUBLISHED = """
import sys
from lmdeploy.pytorch.config import CacheConfig, SpecDecodeConfig
cache = CacheConfig(max_batches=1, block_size=64, num_cpu_blocks=0, num_gpu_blocks=0)
SpecDecodeConfig.from_config("dflash", 7, sys.argv[1], cache, target_model=sys.argv[2], dtype="bfloat16")
"""


@dataclass(frozen=True, slots=True)
class Told:
    """Our engine's answers, and what the client made of lmdeploy's, by prompt."""

    table: dict[str, Generation]
    plain: dict[str, Generation]
    drafted: dict[str, Generation]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, server_environment: Callable[[str], Path]) -> Told:
    folder = tmp_path_factory.mktemp("lmdeploy")
    server_environment("lmdeploy")
    bench("run", *ASKED, "--method", METHOD, "--dtype", "bfloat16", "--out", folder / "engine")
    table = answers(folder / "engine", METHOD)
    tokenizer = AutoTokenizer.from_pretrained(presets.NANO / "target")
    loaded = suites.load_prompts(suites.expand(["gsm8k"])[0], "embedded", LIMIT)
    ids = {one.prompt_id: chat.encode(tokenizer, [Message("user", one.turns[0])], False) for one in loaded.prompts}
    written = {" ".join(map(str, ids[prompt])): (answer.token_ids, answer.accepted) for prompt, answer in table.items()}
    (folder / "answers.json").write_text(json.dumps(written))
    words = [*ASKED, "--launch", "lmdeploy", "--launch-with", PROGRAM, "--method", METHOD, "--dtype", "bfloat16"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANSWERS", str(folder / "answers.json"))
        bench("run", *words, "--out", folder / "run", shown=True)
    return Told(table, answers(folder / "run", "ar"), answers(folder / "run", METHOD))


def answers(run: Path, method: str) -> dict[str, Generation]:
    return {one.prompt_id: one.generation for one in store.load(run)[1] if one.method == method}


def test_it_takes_our_flags_and_drafts_and_gives_its_tokens(told: Told) -> None:
    """The server starts only if its own parser and its own check of drafts take what `--launch` gives."""
    for served in (told.plain, told.drafted):
        assert {prompt: one.error for prompt, one in served.items()} == dict.fromkeys(told.table)
        assert {prompt: one.token_ids for prompt, one in served.items()} == {
            prompt: one.token_ids for prompt, one in told.table.items()
        }


def test_its_counters_are_read_as_the_engine_told_them(told: Told) -> None:
    for prompt, answer in told.drafted.items():
        accepted = told.table[prompt].accepted or ()
        assert answer.counted_by == "lmdeploy.counters", answer.uncounted
        assert (answer.total_rounds, answer.total_accepted) == (len(accepted), sum(accepted))
        assert answer.total_drafted == 7 * len(accepted)


def test_it_refuses_a_draft_as_published(server_environment: Callable[[str], Path]) -> None:
    """If this fails, lmdeploy reads z-lab's files, and `convert --to lmdeploy` is not needed any more."""
    python = server_environment("lmdeploy") / "bin" / "python"
    done = subprocess.run(
        [python, "-c", AS_PUBLISHED, str(presets.NANO / "dflash"), str(presets.NANO / "target")],
        capture_output=True,
        text=True,
    )
    assert done.returncode and "block_size" in done.stderr.splitlines()[-1]


def test_page(
    told: Told,
    write_page: Callable[[str, Sequence[str]], None],
    command: Callable[[str], str],
    server_environment: Callable[[str], Path],
) -> None:
    code = "from importlib.metadata import version; print(version('lmdeploy'))"
    python = server_environment("lmdeploy") / "bin" / "python"
    version = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    rows = [
        [prompt, str(one.num_tokens), str(one.total_rounds), str(one.total_drafted), str(one.total_accepted)]
        for prompt, one in told.drafted.items()
    ]
    blocks = [
        "# This client and lmdeploy's own server",
        f"```\n{command('lmdeploy')}\n```",
        f"{one_line(describe())}. lmdeploy {version}: its command line, its check of drafts, its HTTP server and its "
        "counters. Its engines need CUDA; in their place a table answers, which holds our engine's answers with "
        f"`{METHOD}`, nano and gsm8k (embedded).",
        "The client received exactly the table's tokens and counts. z-lab's files are rejected as published, because "
        "their block size is not in `dflash_config`; files from `convert --to lmdeploy` are accepted.",
        markdown(["prompt", "tokens", "rounds", "drafted", "accepted"], rows, left=1),
    ]
    write_page("servers/contract-lmdeploy.md", blocks)
