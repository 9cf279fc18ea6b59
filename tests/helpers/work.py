"""Work made by hand for the loop of a run, and what is then on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_bench.core.types import Answer, Prompt
from dflash_bench.results import store
from dflash_bench.results.identity import settings_to_json
from dflash_bench.runner import loop, work
from dflash_bench.runner.work import ProgressListener, WorkPlan
from dflash_bench.tasks.suites import Loaded, Suite
from helpers.fake_backend import FakeBackend
from helpers.runs import bare


def loaded(*prompts: Prompt, name: str = "gsm8k", scorer: str = "none") -> Loaded:
    suite = Suite(name=name, version=3, title="", source="", scorer=scorer)
    return Loaded(suite, prompts, "embedded", "sha", len(prompts))


def prompts(number: int, num_turns: int = 1, **fields: Any) -> list[Prompt]:
    turns = ["question", "and then?", "why?"][:num_turns]
    return [Prompt("gsm8k", f"p{i}", tuple(f"{turn} {i}" for turn in turns), **fields) for i in range(number)]


class Watch:
    """Notes down what it is told; `look` is called as well, when work begins."""

    def __init__(self, look: Callable[[], object] = lambda: None) -> None:
        self.told: list[str] = []
        self.look = look

    def begins(self, suite: str, doing: str) -> None:
        self.told.append(f"{suite} · {doing}")
        self.look()

    def measured(self, record: Answer, doing: str) -> None:
        self.told.append(doing)


def planned_info(plan: WorkPlan) -> dict[str, Any]:
    return bare(work.to_store(plan), identity={"settings": settings_to_json(plan.settings)})


class Runs:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, plan: WorkPlan, backend: FakeBackend, watcher: ProgressListener | None = None) -> list[Answer]:
        """Begins, or continues; what is then on disk."""
        with (store.resume if self.folder.exists() else store.create)(self.folder, planned_info(plan)) as run:
            loop.execute(plan, backend, run, watcher or Watch())
            stored = store.load(self.folder)[1]
            assert list(run.stored.values()) == [store.without_rounds(row) for row in stored]
            return stored


def what_matters(records: list[Answer]) -> list[tuple[object, ...]]:
    return [
        (
            *store.key(row)[:3],
            str(row.settings),
            row.method,
            row.turn,
            row.order,
            row.prompt_hash,
            row.generation.token_ids,
            row.generation.text,
            row.generation.accepted,
            row.generation.drafted_ids,
            row.exactness,
            row.divergence,
            row.audit,
            row.answer,
            row.passed,
            row.generation.error,
        )
        for row in sorted(records, key=lambda row: row.order)
    ]


WORDS = "--suite gsm8k --suite mt_bench --method dflash --method eagle3:2 --limit 3 --max-new-tokens 12".split()


def rows_of(folder: Path) -> list[tuple[object, ...]]:
    return what_matters(store.load(folder)[1])
