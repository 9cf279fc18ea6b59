"""Contracts with servers whose engines need a GPU: their own HTTP servers, with answers from a table.

The table holds our engine's answers, so the client must report exactly its tokens and counts.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
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

LIMIT, MAX_NEW_TOKENS, METHOD, NUM_DRAFTS = 8, 64, "dflash:7", 7
PROMPTS = ["--suite", "gsm8k", "--data", "embedded", "--limit", LIMIT, "--max-new-tokens", MAX_NEW_TOKENS]
ASKED = ["--model", "nano", *PROMPTS, "--method", METHOD, "--dtype", "bfloat16"]
SERVERS = Path(__file__).parent / "servers"
ANSWERS = "answers.json"


@dataclass(frozen=True, slots=True)
class Told:
    """Our engine's answers, and those that the client read from the servers, by prompt."""

    table: dict[str, Generation]
    plain: dict[str, Generation]
    drafted: dict[str, Generation]


def answers(run: Path, method: str) -> dict[str, Generation]:
    return {one.prompt_id: one.generation for one in store.load(run)[1] if one.method == method}


def table(folder: Path) -> dict[str, Generation]:
    """Our engine's answers, also written to the file from which the servers answer, by the prompt's token ids."""
    bench("run", *ASKED, "--out", folder / "engine")
    found = answers(folder / "engine", METHOD)
    tokenizer = AutoTokenizer.from_pretrained(presets.NANO / "target")
    loaded = suites.load_prompts(suites.expand(["gsm8k"])[0], "embedded", LIMIT)
    ids = {one.prompt_id: chat.encode(tokenizer, [Message("user", one.turns[0])], False) for one in loaded.prompts}
    written = {" ".join(map(str, ids[prompt])): (answer.token_ids, answer.accepted) for prompt, answer in found.items()}
    (folder / ANSWERS).write_text(json.dumps(written))
    return found


def told_by(program: str, folder: Path) -> Told:
    """Measure the servers that `--launch` starts."""
    found = table(folder)
    words = [*ASKED, "--launch", program, "--launch-with", SERVERS / f"{program}_here"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANSWERS", str(folder / ANSWERS))
        bench("run", *words, "--out", folder / "run", shown=True)
    return Told(found, answers(folder / "run", "ar"), answers(folder / "run", METHOD))


def assert_same_tokens(served: Mapping[str, Generation], expected: Mapping[str, Generation]) -> None:
    assert {prompt: one.error for prompt, one in served.items()} == dict.fromkeys(expected)
    assert {prompt: one.token_ids for prompt, one in served.items()} == {
        prompt: one.token_ids for prompt, one in expected.items()
    }


def assert_same_counts(served: Mapping[str, Generation], expected: Mapping[str, Generation], counted_by: str) -> None:
    assert {*served} == {*expected}
    for prompt, answer in served.items():
        accepted = expected[prompt].accepted or ()
        assert answer.counted_by == counted_by, answer.uncounted
        assert (answer.total_rounds, answer.total_accepted) == (len(accepted), sum(accepted))
        assert answer.total_drafted == NUM_DRAFTS * len(accepted)


def version(environment: Path, package: str) -> str:
    """The package's version in a server's environment."""
    code = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
    command = [environment / "bin" / "python", "-c", code, package]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def blocks(name: str, command: str, parts: str, found: str, served: Mapping[str, Generation]) -> list[str]:
    """The page of a contract: `parts` names the server's own code that ran, `found` the result."""
    return [
        f"# This client and {name}'s own server",
        f"```\n{command}\n```",
        f"{one_line(describe())}. {parts} need CUDA; in their place a table answers, which holds our engine's answers "
        f"with `{METHOD}`, nano and gsm8k (embedded).",
        found,
        _counts(served),
    ]


def _counts(served: Mapping[str, Generation]) -> str:
    rows = [
        [prompt, str(one.num_tokens), str(one.total_rounds), str(one.total_drafted), str(one.total_accepted)]
        for prompt, one in served.items()
    ]
    return markdown(["prompt", "tokens", "rounds", "drafted", "accepted"], rows, left=1)
