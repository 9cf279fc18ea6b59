"""Outcome of a planted fault in a run of nano: its exit status, the answers changed, and those found."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_bench import cli
from dflash_bench.api import measuring
from dflash_bench.core.methods import parse
from dflash_bench.core.types import Answer, Message
from dflash_bench.engine import backend as engine_backend
from dflash_bench.engine.backend import LocalBackend, open_backend
from dflash_bench.engine.drafter import Captures, Drafter
from dflash_bench.engine.forward import choice
from dflash_bench.engine.graphs import GraphCache
from dflash_bench.engine.rows import Limits
from dflash_bench.engine.target import Target
from dflash_bench.models import loading
from dflash_bench.models.presets import preset
from dflash_bench.perf import measure
from dflash_bench.results import store
from dflash_bench.runner import loop, setup
from dflash_bench.runner.loop import WarmUp
from dflash_bench.runner.plan import RunPlan
from dflash_bench.runner.requests import request_of
from dflash_bench.runner.work import WorkItem
from dflash_bench.tasks import suites
from helpers.faults.in_engine import Fault
from helpers.pretended_gpu.traced import traced

SUITES = ("gsm8k", "humaneval")
MOST = 48
"""Tokens of an answer."""
METHODS = ("dflash", "eagle3", "eagle3-tree:nodes=15")
LOAD = loading.load
MORE_THAN_ROUNDING = 1.0
"""Logits, in float32: a token so far behind the best one is wrong in any dtype."""


@dataclass(frozen=True)
class Way:
    """In which a run decodes: each axis has mistakes of its own."""

    engine: str = "native"
    dtype: str = "float32"
    concurrency: int = 1
    captured: bool = False
    """Are passes replayed? By `traced`, which bakes in what a CUDA graph does; only passes by torch can be."""
    kernels: str = "numba"

    @property
    def by_torch(self) -> bool:
        return self.engine == "native" and (self.captured or self.kernels == "torch")

    def __str__(self) -> str:
        parts = [
            self.engine,
            *["by torch"] * self.by_torch,
            self.dtype,
            f"concurrency {self.concurrency}",
            *["captured"] * self.captured,
        ]
        return ", ".join(parts)

    @property
    def limit(self) -> int:
        """Prompts of a suite: as many as are decoded together, and two where that is one."""
        return max(self.concurrency, 2)


WAYS = tuple(
    Way(engine, dtype, concurrency, captured, kernels)
    for engine, kernels, captured in (
        ("native", "numba", False),
        ("native", "torch", False),
        ("native", "torch", True),
        ("transformers", "", False),
    )
    for dtype in ("float32", "bfloat16")
    for concurrency in (1, 3)
)
"""All there are."""


ENGINES: dict[Way, LocalBackend] = {}
"""Those that are open for `decoded`, with all methods."""


@cache
def models(dtype: str) -> loading.Models:
    return LOAD(preset("nano"), ["dflash", "eagle3"], "cpu", getattr(torch, dtype))


def without_answer(_plan: Any, _backend: Any, item: WorkItem) -> WarmUp:
    """A warm-up that costs nothing, and gives no plain answer to compare with."""
    return WarmUp(item.suite, item.prompt.prompt_id, item.settings, None)  # type: ignore[arg-type]


@contextmanager
def planted(fault: Fault | None, way: Way, has_forwards: bool = False) -> Iterator[pytest.MonkeyPatch]:
    """Time no passes, unless the run `has_forwards`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load", lambda *_: models(way.dtype))
        # Others read the same models afterwards.
        patch.setattr(choice, "let_go", lambda _model: None)
        patch.setattr(loop, "_warm_up", without_answer)
        if not has_forwards:
            patch.setattr(measure, "forward_curve", lambda _target: None)
        if way.captured:
            patch.setattr(engine_backend, "capture_passes", traced_passes)
        if fault is not None:
            fault.plant(patch)
        yield patch


def traced_passes(target: Target, drafters: Iterable[Drafter], _how: str | None) -> str:
    for reader in (target, *(drafter for drafter in drafters if isinstance(drafter, Captures))):
        reader.graph_cache = GraphCache(traced)
    return "traced"


@dataclass(frozen=True)
class Part:
    """Work of a run: prompts per suite (None: as many as the way needs), tokens per answer, methods."""

    limit: int | None = None
    most: int = MOST
    suites: tuple[str, ...] = SUITES
    methods: tuple[str, ...] = METHODS


WHOLE = Part()


def run(fault: Fault | None, way: Way, out: Path, part: Part = WHOLE) -> tuple[int, list[Answer]]:
    """`dflash-bench run` in this process; its exit status and rows."""
    status, _, _ = ended(fault, way, out, part)
    return status, store.load(out)[1]


def ended(
    fault: Fault | None, way: Way, out: Path, part: Part = WHOLE, has_forwards: bool = False
) -> tuple[int, str, str]:
    """The same; exit status, output and errors."""
    words: list[object] = ["run", "--out", out, "--limit", part.limit or way.limit, "--max-new-tokens", part.most]
    words += ["--engine", way.engine, *["--kernels", "torch"] * way.by_torch]
    words += ["--dtype", way.dtype, "--concurrency", way.concurrency]
    words += [word for suite in part.suites for word in ("--suite", suite)]
    words += [word for method in part.methods for word in ("--method", method)]
    with planted(fault, way, has_forwards):
        return command(*words)


def decoded(fault: Fault | None, way: Way, out: Path, part: Part = WHOLE) -> list[Answer]:
    """Rows of the same run, by an engine that the first run of its way opened; nothing is timed or shown."""
    asked = request_of(
        suite=part.suites, methods=part.methods, limit=part.limit or way.limit, max_new_tokens=part.most,
        engine=way.engine, kernels="torch" if way.by_torch else None, dtype=way.dtype, concurrency=way.concurrency,
    )  # fmt: skip

    def opens(plan: RunPlan, begins: Callable[[str], object]) -> LocalBackend:
        if way not in ENGINES:
            ENGINES[way] = setup.open_local(replace(plan, methods=tuple(map(parse, ("ar", *METHODS)))), begins)
        opened = ENGINES[way].only([method.label for method in plan.methods])
        opened.limits = Limits(part.most, opened.limits.stop_ids)
        if way.captured:
            # Earlier captures hold what was planted then.
            traced_passes(opened.target, opened.drafters.values(), None)
        return opened

    with planted(fault, way):
        measuring.measure(asked, out, False, lambda _: None, opens=opens)
    return store.load(out)[1]


def command(*words: object) -> tuple[int, str, str]:
    """`dflash-bench` in this process; exit status, output and errors."""
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(StringIO()) as said,
        redirect_stderr(StringIO()) as errors,
    ):
        patch.setattr(sys, "argv", ["dflash-bench", *map(str, words)])
        try:
            cli.main()
            status: Any = 0
        except SystemExit as stopped:
            status = stopped.code or 0
    return int(status), said.getvalue(), errors.getvalue()


@dataclass(frozen=True)
class Outcome:
    """For a suite and method, how many answers the fault changed, and how many of these the run found."""

    suite: str
    method: str
    num_changed: int
    num_wrong: int
    """Changed by more than rounding can."""
    num_found: int


def outcomes(rows: Sequence[Answer], sound: Sequence[Answer], dtype: str, most: int = MOST) -> list[Outcome]:
    """`sound` may hold longer answers than the `most` tokens of these rows."""
    expected = {store.key(row): row.generation.token_ids[:most] for row in sound}
    made = []
    for suite in SUITES:
        for method in ("ar", *METHODS):
            cell = [row for row in rows if (row.suite, row.method) == (suite, method)]
            changed = [row for row in cell if row.generation.token_ids != expected[store.key(row)]]
            wrong = changed if dtype == "float32" else [row for row in changed if _is_wrong(row, dtype)]
            found = [row for row in wrong if row.generation.error or "mismatch" in (row.exactness, row.audit)]
            made.append(Outcome(suite, method, len(changed), len(wrong), len(found)))
    return made


def _is_wrong(row: Answer, dtype: str) -> bool:
    """Asked of a float32 copy of the same weights, without any judge; an answer that ends elsewhere is wrong too."""
    if row.divergence is not None and row.divergence.gap is None:
        return True
    tokens = torch.tensor(row.generation.token_ids)
    text = torch.cat([torch.tensor(_prompts(dtype)[row.suite, row.prompt_id]), tokens[:-1]])
    with torch.inference_mode():
        logits = _in_float32(dtype)(text[None]).logits[0, -len(tokens) :]
    gaps = logits.amax(dim=-1) - logits.gather(1, tokens[:, None])[:, 0]
    return float(gaps.max()) > MORE_THAN_ROUNDING


@cache
def _in_float32(dtype: str) -> Any:
    return copy.deepcopy(models(dtype).target).float()


@cache
def _prompts(dtype: str) -> dict[tuple[str, str], list[int]]:
    # Not by kernels: they would be compiled for this type, to encode a few words.
    backend = open_backend(models(dtype), preset("nano"), [parse("ar")], 1, engine="transformers")
    return {
        (suite.name, prompt.prompt_id): backend.encode([Message("user", prompt.turns[0])])
        for suite in suites.expand(SUITES)
        for prompt in suites.load_prompts(suite, "embedded", None).prompts
    }
