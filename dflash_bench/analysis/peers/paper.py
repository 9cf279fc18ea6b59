"""Published figures, each with its source and formula.

Figures of DFlash's authors are in published.csv beside this file, figures of its successors in successors.csv.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dflash_bench.analysis.findings import last_part
from dflash_bench.analysis.peers.zlab import Official
from dflash_bench.core import labels
from dflash_bench.core.draft_kinds import DFLASH
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.labels import PromptSource
from dflash_bench.core.methods import name_of, shown
from dflash_bench.core.types import Settings
from dflash_bench.results.identity import full_names, settings_of
from dflash_bench.results.run_info import RunIdentity

SOURCES = ("paper", "published")
"""The names that users may write for these figures."""
PUBLISHED, SUCCESSORS = (Path(__file__).with_name(name) for name in ("published.csv", "successors.csv"))
EMBEDDED = "embedded"
TOLERANCE = 0.05
"""A figure within this share of the published one counts as met: published figures have no intervals."""
MAX_NEW_TOKENS = 2048
"""The limit of the paper's main tables."""
NUM_PROMPTS = 128
"""Prompts per suite in the evaluation whose command the authors publish; smaller suites are used in full."""
NUM_ROWS = {"aime24": 30, "aime25": 30, "gsm8k": 1319, "humaneval": 164, "math500": 500, "mbpp": 257, "mt_bench": 80}
SAME_TEXTS = ("gsm8k", "math500", "mt_bench")
"""Suites whose prompts have the same wording in the authors' harness as here."""
OTHER_TEXTS = ("humaneval", "mbpp")
"""Suites whose prompts are worded differently there; for the remaining suites the wording is not published."""
FORMULAS = {
    "al.served": "acceptance length as the server counts it",
    "speedup.served": "output tokens/s of the server, with drafting / without",
    "tps.served": "output tokens/s of the server",
    "al.unstated": "acceptance length; whoever published it does not say by which formula or harness",
    "speedup.unstated": "speed-up; whoever published it does not say by which formula or harness",
}
"""Formulas that only published figures have; `zlab.FORMULAS` has the others."""


MODES: dict[bool | None, tuple[str, ...]] = {True: ("on", "not stated"), False: ("off", "not stated")}
MODES[None] = MODES[False]
"""The `thinking` of comparable published figures by a run's thinking (None: the model has no switch)."""
LENGTHS = re.compile(r"(block|used|tree|chain of) (\d+)|(\d+) drafts")
"""The block size or draft length in a configuration; blocks and trees also count the anchor."""


@dataclass(frozen=True, slots=True)
class PaperFigure:
    """A published figure; `method` has this package's name: the authors' EAGLE-3 is a tree unless called a chain."""

    formula: str
    value: float
    target_model: str
    method: str
    config: str
    num_drafts: int | None
    dataset: str
    temperature: float
    thinking: str
    concurrency: int | None
    """None if it is not stated."""
    hardware: str
    source: str
    kind: str | None = None
    """The kind of draft of the method; None for methods of one kind."""

    @property
    def is_of_authors(self) -> bool:
        """Whether it is the DFlash authors' own, whose conditions are known."""
        return self.kind in (None, DFLASH) and self.concurrency is not None


@dataclass(frozen=True, slots=True)
class PaperComparison:
    """A published figure and the run's `own` by the same formula; None if the rows give no value."""

    published: PaperFigure
    suite: str
    settings_id: str
    method: str
    num_drafts: int | None
    own: float | None

    @property
    def is_met(self) -> bool | None:
        """Whether both differ by `TOLERANCE` at most; None if the rows give no value by the same formula."""
        known = self.published.value
        return None if self.own is None else abs(self.own - known) <= TOLERANCE * known

    @property
    def is_as_long(self) -> bool:
        """Whether both draft the same number of tokens per round; True if that is not published."""
        return self.published.num_drafts in (None, self.num_drafts)


@cache
def load_figures() -> tuple[PaperFigure, ...]:
    """Load all published figures."""
    return (*_figures(PUBLISHED), *_figures(SUCCESSORS))


def _figures(path: Path) -> list[PaperFigure]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(map(_parsed, csv.DictReader(file)))


def _parsed(row: Mapping[str, str]) -> PaperFigure:
    length = LENGTHS.search(row["config"])
    kind = length[1] if length else None
    values: dict[str, Any] = {
        "method": "eagle3-tree" if (row["method"], kind) == ("eagle3", "tree") else row["method"],
        "num_drafts": int(length[2] or length[3]) - (kind in ("block", "used", "tree")) if length else None,
        "value": float(row["value"]),
        "temperature": float(row["temperature"]),
        "concurrency": int(row["concurrency"]) if row["concurrency"] else None,
        "kind": row.get("kind") or (DFLASH if row["method"] == "dflash" else None),
    }
    return PaperFigure(**{**row, **values})


def model_of(identity: RunIdentity) -> str:
    """Return the model that a run measured: its target, which may have replaced the preset's."""
    return str(identity.target or identity.model)


def target_of(model: str) -> str:
    """Return the paper's name of a model: Qwen3-8B for "qwen3-8b" or "Qwen/Qwen3-8B". Raises UserError if none."""
    targets = list(dict.fromkeys(figure.target_model for figure in load_figures()))
    for name in targets:
        if is_target(model, name):
            return name
    raise unknown("target of published figures", model, targets)


def is_target(model: str, target: str) -> bool:
    """Return whether the paper, which leaves out "-Instruct", calls this model `target`."""
    return last_part(model) in (target.lower(), f"{target.lower()}-instruct")


def beside(cells: Sequence[Official], target: str, identity: RunIdentity) -> list[PaperComparison]:
    """Return the figures published for the run's suites, methods, temperature and thinking, with any draft length.

    Raises UserError if there are none, and for embedded prompts, which differ from the public suites'.
    """
    embedded = [
        suite for suite in dict.fromkeys(cell.suite for cell in cells) if labels.is_embedded(identity.source_of(suite))
    ]
    if embedded:
        label = labels.suite_list((suite, EMBEDDED) for suite in embedded)
        raise UserError(
            f"{label}: embedded prompts are this project's own samples, so there are no published figures for them; "
            "run again with --data hub, or --data FOLDER with the hub's rows"
        )
    by_id = {settings.id: settings for settings in settings_of(identity)}
    comparisons = []
    for cell in cells:
        settings = by_id[cell.settings_id]
        values = {"al.zlab": cell.al, "speedup.zlab": cell.speedup, "tps.zlab": cell.tps}
        num_drafts = identity.methods[cell.method].num_drafts if cell.method in identity.methods else None
        kind = _kind_of(identity, cell.method)
        comparisons += [
            PaperComparison(figure, cell.suite, cell.settings_id, cell.method, num_drafts, values.get(figure.formula))
            for figure in load_figures()
            if (figure.target_model, figure.dataset, figure.temperature) == (target, cell.suite, settings.temperature)
            and settings == Settings(settings.temperature, thinking=settings.thinking)
            and figure.method == name_of(cell.method)
            and figure.kind in (None, kind)
            and figure.thinking in MODES[settings.thinking]
            and figure.concurrency in (None, settings.concurrency)
        ]
    if not comparisons:
        names = ", ".join(
            f"{labels.suite_label(cell.suite, identity.source_of(cell.suite))} {shown(cell.method)}" for cell in cells
        )
        conditions = " or ".join(_conditions(settings, list(by_id.values())) for settings in by_id.values())
        raise UserError(f"nothing was published for {target} {conditions} on {names}")
    return comparisons


def _kind_of(identity: RunIdentity, method: str) -> str:
    """Return the kind of a method's draft; without a recorded kind DFlash's, or that of a method with a single kind."""
    entry = identity.methods.get(method)
    draft = identity.drafts.get(entry.draft or "") if entry else None
    return (draft.kind if draft else None) or DFLASH


def _conditions(settings: Settings, run_settings: Sequence[Settings]) -> str:
    plain = Settings(settings.temperature, thinking=settings.thinking)
    others = "" if settings == plain else f" ({full_names(run_settings)[settings]})"
    temperature = labels.number_words(other.temperature for other in run_settings)[settings.temperature]
    return f"{'with' if settings.thinking else 'without'} thinking at temperature {temperature}{others}"


def unlike_conditions(comparisons: Sequence[PaperComparison], identity: RunIdentity) -> Iterator[str]:
    """Yield how the run's conditions differ from the authors', one sentence each."""
    others = [c for c in comparisons if not c.published.is_of_authors]
    if others:
        sources = dict.fromkeys(c.published.source for c in others)
        yield f"the prompts' wording is unknown for figures with these conditions: {'; '.join(sources)}"
    comparisons = [c for c in comparisons if c.published.is_of_authors]
    suites = list(dict.fromkeys(comparison.suite for comparison in comparisons))
    if not suites:
        return
    yield from _counts(suites, identity)
    limit = identity.max_new_tokens
    if limit != MAX_NEW_TOKENS:
        yield f"answers end at {limit} tokens here, but at {MAX_NEW_TOKENS:,} in the paper's main tables"
    local = [suite for suite in suites if PromptSource.read(identity.source_of(suite)).kind == "folder"]
    if local:
        yield f"the rows of {', '.join(local)} are from a folder: it was not checked that they are the hub's"
    bare = [suite for suite in suites if suite in identity.suites and identity.suites[suite].style != "paper"]
    if bare:
        yield f"the prompts of {', '.join(bare)} are verbatim, without the instructions of the authors' harness"
    other = [suite for suite in suites if suite in OTHER_TEXTS]
    if other:
        yield f"the prompts of {', '.join(other)} are worded differently in the authors' harness"
    unknown_texts = [suite for suite in suites if suite not in (*OTHER_TEXTS, *SAME_TEXTS)]
    if unknown_texts:
        yield f"the wording of the authors' prompts for {', '.join(unknown_texts)} is not published"


def _counts(suites: Sequence[str], identity: RunIdentity) -> Iterator[str]:
    counts = {suite: identity.suites[suite].prompts if suite in identity.suites else None for suite in suites}
    other = [
        f"{suite} {count} (theirs: {published})"
        for suite, count in counts.items()
        if count != (published := min(NUM_PROMPTS, NUM_ROWS.get(suite, NUM_PROMPTS)))
    ]
    if other:
        yield (
            f"the number of prompts differs from the authors' published command: {', '.join(other)}; "
            "the paper does not say how many its figures are based on"
        )
