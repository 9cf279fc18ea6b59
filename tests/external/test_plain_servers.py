"""Our plain decoding against a real server that decodes plainly and answers with text: `transformers serve`, or MLX's.

It is measured by `run --server`, one answer and four at a time, beside a run of our engine on the same prompts. Every
answer must be there once, with our text; `compare` must name what the two runs differ in.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import served
from served import Prompts

from dflash_bench.core.dialects import LaunchSpec, Program, Support
from dflash_bench.core.environment import describe, one_line
from dflash_bench.core.types import Answer
from dflash_bench.report.tables import in_markdown, markdown
from dflash_bench.results import store
from studies._study import bench

PER_SUITE, MAX_NEW_TOKENS, MODEL = 8, 128, "nano"


@dataclass(frozen=True, slots=True)
class Kind:
    """A server program: how it is started, and what `run` must be told of it."""

    title: str
    program: Program
    told: tuple[str, ...]
    packages: tuple[str, ...]
    """Whose versions are shown."""


def transformers_words(serving: LaunchSpec, port: int) -> list[str]:
    return [
        "serve",
        serving.target,
        "--device",
        "cpu",
        "--dtype",
        serving.dtype,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]


def mlx_words(serving: LaunchSpec, port: int) -> list[str]:
    return ["--model", serving.target, "--host", "127.0.0.1", "--port", str(port)]


NOTHING = Support("", "", {})
KINDS = {
    "transformers_serve": Kind(
        "transformers serve",
        Program("transformers serve", "transformers", None, {}, NOTHING, "", transformers_words),
        # It is like any OpenAI-compatible server, and its template would think unless told otherwise.
        ("--thinking", "off"),
        ("transformers", "torch"),
    ),
    "mlx": Kind(
        "mlx_lm.server",
        Program("mlx_lm.server", "mlx_lm.server", None, {}, NOTHING, "", mlx_words),
        ("--dialect", "mlx"),
        ("mlx-lm", "mlx"),
    ),
}


@dataclass(frozen=True, slots=True)
class Found:
    """A server's answers at each concurrency, beside our engine's."""

    kind: Kind
    compared: tuple[Compared, ...]


@pytest.fixture(scope="module", params=[pytest.param(name, marks=getattr(pytest.mark, name)) for name in KINDS])
def found(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    limit: Callable[[int, int], int],
    write_page: Callable[[str, Sequence[str]], None],
    command: Callable[[str], str],
    server_environment: Callable[[str], Path],
) -> Found:
    name = request.param
    kind, folder = KINDS[name], tmp_path_factory.mktemp(name)
    program = server_environment(name) / "bin" / kind.program.executable
    asked = Prompts(MODEL, limit(PER_SUITE, max(served.CONCURRENCY)), MAX_NEW_TOKENS)
    words = ["run", *asked.words, "--concurrency", ",".join(map(str, served.CONCURRENCY)), *kind.told]
    # An empty cache of the hub, which both look through: only the folder that they are given is served.
    (folder / "hub").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HUB_CACHE", str(folder / "hub"))
        servings = served.servings(kind.program, program, asked, ())
        # A run needs a method, but only its plain answers are compared.
        bench("run", *asked.words, "--method", "ngram", "--out", folder / "engine")
        with served.started(kind.program, program, servings, folder / "servers") as urls:
            bench(*words, "--server", f"plain={urls['ar']}", "--out", folder / "server")
        differences = served.differences(folder / "engine", folder / "server")
    ours, theirs = (store.load(folder / run)[1] for run in ("engine", "server"))
    plain = [record for record in ours if record.method == "ar"]
    answers = tuple(compared(plain, theirs, concurrency) for concurrency in served.CONCURRENCY)
    shown = shlex.join(["dflash-bench", *map(str, words), "--server", "plain=URL"])
    blocks = page(kind, command(name), shown, versions(kind, program), answers, differences)
    write_page(f"servers/{name.replace('_', '-')}-{MODEL}-cpu.md", blocks)
    return Found(kind, answers)


def test_every_answer_is_there_with_our_text(found: Found) -> None:
    assert [problem for one in found.compared for problem in one.problems()] == []


@dataclass(frozen=True, slots=True)
class Compared:
    """The server's answers at a concurrency; `wrong` counts answers with another text or length than ours."""

    concurrency: int
    num_answers: int
    num_failed: int
    wrong: tuple[str, ...]
    num_cached: int

    def problems(self) -> list[str]:
        where = f"concurrency {self.concurrency}"
        failed = [f"{where}: {self.num_failed} answers failed"] * bool(self.num_failed)
        return [*failed, *(f"{where}: {one}" for one in self.wrong)]


def compared(ours: Sequence[Answer], theirs: Sequence[Answer], concurrency: int) -> Compared:
    place = {(one.suite, one.prompt_id, one.turn): one.generation for one in ours}
    given = [one for one in theirs if one.settings.concurrency == concurrency]
    good = [one for one in given if one.generation.error is None]
    wrong = []
    for one in good:
        mine, its = place[one.suite, one.prompt_id, one.turn], one.generation
        if (mine.text.strip(), mine.num_tokens) != (its.text.strip(), its.num_tokens):
            wrong.append(
                f"{one.suite} {one.prompt_id} turn {one.turn}: {its.num_tokens} tokens and ours {mine.num_tokens}, "
                f"text {'the same' if its.text.strip() == mine.text.strip() else 'another'}"
            )
    cached = sum(bool(one.generation.num_cached_tokens) for one in good)
    return Compared(concurrency, len(given), len(given) - len(good), tuple(wrong), cached)


def page(
    kind: Kind, command: str, shown: str, theirs: str, answers: Sequence[Compared], differences: Sequence[str]
) -> list[str]:
    env = describe()
    rows = [
        [
            str(one.concurrency),
            str(one.num_answers),
            str(one.num_failed),
            f"{len(one.wrong)}",
            f"{one.num_cached} of {one.num_answers}",
        ]
        for one in answers
    ]
    heads = ["concurrency", "answers", "failed", "other than ours", "reused a prompt it had kept"]
    return [
        f"# This engine and {kind.title}, nano, on the CPU",
        f"```\n{command}\n```",
        f"{one_line(env)}, transformers {env['packages']['transformers']}.\n"
        f"The server: {theirs}.\n"
        f"float32, temperature 0, {MAX_NEW_TOKENS} new tokens at most. Plain decoding: the server is given no draft.\n"
        "Times are not told: server and client share two cores.",
        f"```\n{shown}\n```",
        markdown(heads, rows),
        "An answer is other than ours if its text, but for white space at its ends, or its number of tokens is; the "
        "server names no tokens. `compare` "
        "beside a run of this engine names what the two differ in: " + "; ".join(map(in_markdown, differences)) + ".",
    ]


def versions(kind: Kind, server: Path) -> str:
    code = f"from importlib.metadata import version; print(', '.join(f'{{n}} {{version(n)}}' for n in {kind.packages}))"
    python = server.parent / "python"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
