"""Live servers held against our engine by the project's own commands: `run --server` beside a run of our engine,
`compare` of both, and `crosscheck`; and what of it must hold.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_bench.analysis.comparable import Difference
from dflash_bench.core.dialects import LaunchSpec, Program
from dflash_bench.core.secrets import Arguments
from dflash_bench.core.types import Settings
from dflash_bench.diagnose import conform_server, show_conform
from dflash_bench.diagnose import show as diagnose_show
from dflash_bench.diagnose.compare_counts import CrosscheckResult
from dflash_bench.diagnose.conform import Conformance
from dflash_bench.report import render
from dflash_bench.report.tables import ABSENT, Rows, in_markdown, markdown, number
from dflash_bench.results import table
from dflash_bench.results.identity import settings_of
from dflash_bench.runner import launch
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.plan import methods_and_model, plan_run
from dflash_bench.servers.launch import LaunchedServers
from studies._study import bench

CONCURRENCY = (1, 4)
OTHERWISE = ("engine", "dtype", "device")
"""Differences between a run over servers and a run of our engine, which `compare` must allow."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts for both; `limit` is per suite."""

    model: str
    limit: int
    max_new_tokens: int
    suites: tuple[str, ...] = ("paper",)

    def request(self, *methods: str) -> RunRequest:
        return RunRequest(
            suites=self.suites,
            methods=methods,
            model=self.model,
            data="embedded",
            limit=self.limit,
            max_new_tokens=self.max_new_tokens,
        )

    @property
    def words(self) -> list[str]:
        suites = [word for suite in self.suites for word in ("--suite", suite)]
        asked = [*suites, "--data", "embedded", "--limit", self.limit, "--max-new-tokens", self.max_new_tokens]
        return ["--model", self.model, *map(str, asked)]


@dataclass(frozen=True, slots=True)
class Line:
    """A method of a run under one setting, over all suites."""

    engine: str
    method: str
    concurrency: int
    num_answers: int
    num_failed: int
    num_exact: int
    """Answers whose every token is the published model's own choice."""
    rounds: int
    drafted: int
    accepted: int
    counted_by: tuple[str, ...]

    @property
    def al_pooled(self) -> float | None:
        return 1 + self.accepted / self.rounds if self.rounds else None


@dataclass(frozen=True, slots=True)
class Measured:
    lines: tuple[Line, ...]
    command: str
    differences: tuple[str, ...]
    """Differences that `compare` names."""
    problems: tuple[str, ...]


def servings(program: Program, path: Path, asked: Prompts, methods: Sequence[str]) -> list[LaunchSpec]:
    """The servers that `run --launch` would start at this path: plain decoding first, then one per method."""
    request = replace(
        asked.request(*methods), concurrency=CONCURRENCY, launch=program.name, launch_with=str(path), dtype="float32"
    )
    return launch.launch_specs(program, plan_run(*methods_and_model(request)), print)


@contextmanager
def started(
    program: Program, path: Path, wanted: Sequence[LaunchSpec], logs: Path, more: Sequence[str] = ()
) -> Iterator[dict[str, str]]:
    """The addresses of servers by their labels; they are stopped at the end of the `with`."""
    with LaunchedServers(program, str(path), Arguments(more), logs) as launched:
        yield {address.method.label: address.url for address in launched.start(wanted)}


def measured(asked: Prompts, urls: Mapping[str, str], ours: Sequence[str], folder: Path) -> Measured:
    """The servers by their labels, one answer and four at a time, beside `ours`, the methods of our own engine."""
    bench("run", *asked.words, *(word for name in ours for word in ("--method", name)), "--out", folder / "engine")
    servers = [word for label, url in urls.items() for word in ("--server", f"{label}={url}")]
    levels = ",".join(map(str, CONCURRENCY))
    # 1: an answer is wrong, which the table then shows.
    bench("run", *asked.words, *servers, "--concurrency", levels, "--out", folder / "server", allowed=(0, 1))
    lines = (*lines_of(folder / "engine", "here", ours), *lines_of(folder / "server", "server", ()))
    shown = [*asked.words, *(word for label in urls for word in ("--server", f"{label}=URL")), "--concurrency", levels]
    return Measured(
        lines,
        shlex.join(["dflash-bench", "run", *shown]),
        differences(folder / "engine", folder / "server"),
        tuple(wrong(lines)),
    )


def differences(engine: Path, server: Path) -> tuple[str, ...]:
    """Differences that `compare` names between a run of our engine and a run over servers.

    It refuses a run in which an answer is missing, or there twice.
    """
    allowed = [word for name in OTHERWISE for word in ("--allow", name)]
    compared = json.loads(bench("compare", engine, server, *allowed, "--json"))
    return tuple(str(Difference(**difference)) for difference in compared["differences"])


def lines_of(folder: Path, engine: str, methods: Sequence[str]) -> Iterator[Line]:
    """Rows of these methods, or of all."""
    read = table.read_run(folder)
    by_id = {settings.id: settings for settings in settings_of(read.info.identity)}
    for (settings_id, method), rows in read.rows.groupby(["settings_id", "method"], observed=True, sort=False):
        if method in methods or not methods:
            yield _line(engine, method, by_id[settings_id], rows)


def _line(engine: str, method: str, settings: Settings, rows: Any) -> Line:
    good = rows[rows["error"].isna()]
    sums = [int(good[name].fillna(0).sum()) for name in ("num_rounds", "num_drafted", "num_accepted")]
    return Line(
        engine,
        method,
        settings.concurrency,
        len(rows),
        len(rows) - len(good),
        int((good["audit"] == "exact").sum()),
        *([0, 0, 0] if method == "ar" else sums),
        () if method == "ar" else tuple(good["counted_by"].dropna().unique()),
    )


def wrong(lines: Sequence[Line]) -> Iterator[str]:
    for line in lines:
        where = f"{line.engine}, {line.method}, concurrency {line.concurrency}"
        if line.num_failed:
            yield f"{where}: {line.num_failed} of {line.num_answers} answers failed"
        if line.num_exact < line.num_answers - line.num_failed:
            yield f"{where}: only {line.num_exact} of {line.num_answers} answers are the model's own"


def checked(asked: Prompts, urls: Mapping[str, str]) -> list[CrosscheckResult]:
    """Output of `dflash-bench crosscheck` for the servers that draft."""
    servers = tuple(f"{label}={url}" for label, url in urls.items())
    return conform_server.crosscheck(replace(asked.request(), servers=servers), show)


def show(doing: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{doing}", end="", file=sys.stderr, flush=True)


def lines_table(lines: Sequence[Line]) -> str:
    """Answers at each concurrency."""
    heads = [
        "engine",
        "concurrency",
        "method",
        "answers that are the model's own",
        "rounds",
        "drafted",
        "accepted",
        "al.pooled",
        "counted by",
    ]
    rows: Rows = [
        [
            line.engine,
            str(line.concurrency),
            line.method,
            f"{line.num_exact}/{line.num_answers}",
            *(str(count) if line.rounds else ABSENT for count in (line.rounds, line.drafted, line.accepted)),
            number(line.al_pooled, 4),
            ", ".join(line.counted_by) or "",
        ]
        for line in lines
    ]
    return markdown(heads, rows)


def section(measurement: Measured) -> list[str]:
    return [
        "## Measured as any run is",
        f"```\n{measurement.command}\n```",
        lines_table(measurement.lines),
        "`compare` beside a run of this engine names what the two differ in: "
        + "; ".join(map(in_markdown, measurement.differences))
        + ".",
    ]


def crosscheck_section(title: str, one: CrosscheckResult) -> list[str]:
    blocks = [f"## {title}", in_markdown(diagnose_show.sentence(one))]
    return [*blocks, *(render.markdown(part, level=3) for part in diagnose_show.sections(one))]


def conformance_page(found: Sequence[Conformance], server: str, command: str, *more: str) -> list[str]:
    """The page of `conform`, of one server; `more` stands before its table."""
    title, *blocks = show_conform.conform_page(found, command).rstrip().split("\n\n")
    return [title.replace("their publishers compute", f"{server} computes"), *blocks[:2], *more, *blocks[2:]]
