"""Figures that the authors published (results/published.csv), each with its source and its formula."""

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
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.methods import name_of
from dflash_bench.core.types import Settings
from dflash_bench.results.identity import full_names, settings_of
from dflash_bench.results.run_info import RunIdentity

SOURCES = ("paper",)
EMBEDDED = "embedded"
MAX_NEW_TOKENS = 2048
"""In the paper's main tables."""
NUM_PROMPTS = 128
"""Per suite, in the evaluation whose command the authors publish; a smaller suite is used in full."""
NUM_ROWS = {"aime24": 30, "aime25": 30, "gsm8k": 1319, "humaneval": 164, "math500": 500, "mbpp": 257, "mt_bench": 80}
SAME_TEXTS = ("gsm8k", "math500", "mt_bench")
"""Suites whose prompts have the same wording in the authors' harness as here."""
OTHER_TEXTS = ("humaneval", "mbpp")
"""Suites whose prompts are worded differently there; for the remaining suites the wording is not published."""
FORMULAS = {
    "al.served": "acceptance length as the server counts it",
    "speedup.served": "output tokens/s of the server, with drafting / without",
    "tps.served": "output tokens/s of the server",
    "al.unstated": "acceptance length of EAGLE-3; the authors do not say by which formula or harness",
    "speedup.unstated": "speed-up of EAGLE-3; the authors do not say by which formula or harness",
}
"""Formulas that only published figures have; `zlab.FORMULAS` has the others."""


MODES: dict[bool | None, tuple[str, ...]] = {True: ("on", "not stated"), False: ("off", "not stated")}
MODES[None] = MODES[False]
"""By a run's thinking (None: the model has no switch), the `thinking` of published figures to compare it with."""
LENGTHS = re.compile(r"(block|used|tree|chain of) (\d+)|(\d+) drafts")
"""How a configuration states its tokens a round; blocks and trees count the anchor too."""


@dataclass(frozen=True, slots=True)
class PaperFigure:
    """`method` has our name: what the authors call EAGLE-3 is a tree, unless they say chain."""

    formula: str
    value: float
    target_model: str
    method: str
    config: str
    num_drafts: int | None
    dataset: str
    temperature: float
    thinking: str
    concurrency: int
    hardware: str
    source: str


@dataclass(frozen=True, slots=True)
class Beside:
    """A published figure, and the run's by the same formula; None where our rows cannot give that."""

    published: PaperFigure
    suite: str
    settings_id: str
    method: str
    num_drafts: int | None
    own: float | None

    @property
    def is_as_long(self) -> bool:
        """Do both draft equally many tokens a round? True if that is not published."""
        return self.published.num_drafts in (None, self.num_drafts)


@cache
def load_figures() -> tuple[PaperFigure, ...]:
    """All published figures. Raises UserError if the file is missing."""
    folder = Path(__file__).parents[2]
    packed, checkout = folder / "_results" / "published.csv", folder.parent / "results" / "published.csv"
    path = packed if packed.exists() else checkout
    if not path.exists():
        raise UserError(f"no published figures: {path} is missing; reinstall dflash-bench")
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(map(_parsed, csv.DictReader(file)))


def _parsed(row: Mapping[str, str]) -> PaperFigure:
    length = LENGTHS.search(row["config"])
    kind = length[1] if length else None
    values: dict[str, Any] = {
        "method": "eagle3-tree" if (row["method"], kind) == ("eagle3", "tree") else row["method"],
        "num_drafts": int(length[2] or length[3]) - (kind in ("block", "used", "tree")) if length else None,
        "value": float(row["value"]),
        "temperature": float(row["temperature"]),
        "concurrency": int(row["concurrency"]),
    }
    return PaperFigure(**{**row, **values})


def model_of(identity: RunIdentity) -> str:
    """The model that a run measured: its target, which may have replaced that of the preset."""
    return str(identity.target or identity.model)


def target_of(model: str) -> str:
    """The paper's name for a model: Qwen3-8B for "qwen3-8b" and "Qwen/Qwen3-8B". Raises UserError if it has none."""
    targets = list(dict.fromkeys(figure.target_model for figure in load_figures()))
    for name in targets:
        if is_target(model, name):
            return name
    raise unknown("target of published figures", model, targets)


def is_target(model: str, target: str) -> bool:
    """Does the paper call this model `target`? It leaves out "-Instruct"."""
    return last_part(model) in (target.lower(), f"{target.lower()}-instruct")


def beside(cells: Sequence[Official], target: str, identity: RunIdentity) -> list[Beside]:
    """What was published for the run's suites, methods, temperature and thinking, with drafts of any length.

    Raises UserError if there is nothing, and for embedded prompts, which are not those of the public suites.
    """
    embedded = [suite for suite in dict.fromkeys(cell.suite for cell in cells) if _is_embedded(identity, suite)]
    if embedded:
        label = labels.listed((suite, EMBEDDED) for suite in embedded)
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
        comparisons += [
            Beside(figure, cell.suite, cell.settings_id, cell.method, num_drafts, values.get(figure.formula))
            for figure in load_figures()
            if (figure.target_model, figure.dataset, figure.temperature) == (target, cell.suite, settings.temperature)
            and settings == Settings(settings.temperature, thinking=settings.thinking)
            and figure.method == name_of(cell.method)
            and figure.thinking in MODES[settings.thinking]
        ]
    if not comparisons:
        names = ", ".join(f"{labels.named(cell.suite, identity.source_of(cell.suite))} {cell.method}" for cell in cells)
        conditions = " or ".join(_conditions(settings, list(by_id.values())) for settings in by_id.values())
        raise UserError(f"nothing was published for {target} {conditions} on {names}")
    return comparisons


def _conditions(settings: Settings, run_settings: Sequence[Settings]) -> str:
    plain = Settings(settings.temperature, thinking=settings.thinking)
    others = "" if settings == plain else f" ({full_names(run_settings)[settings]})"
    temperature = labels.number_words(one.temperature for one in run_settings)[settings.temperature]
    return f"{'with' if settings.thinking else 'without'} thinking at temperature {temperature}{others}"


def _is_embedded(identity: RunIdentity, suite: str) -> bool:
    return identity.source_of(suite) == EMBEDDED


def unlike_conditions(comparisons: Sequence[Beside], identity: RunIdentity) -> Iterator[str]:
    """How the run's conditions differ from the authors', one sentence each."""
    suites = list(dict.fromkeys(comparison.suite for comparison in comparisons))
    yield from _counts(suites, identity)
    limit = identity.max_new_tokens
    if limit != MAX_NEW_TOKENS:
        yield f"answers end at {limit} tokens here, but at {MAX_NEW_TOKENS:,} in the paper's main tables"
    local = [suite for suite in suites if identity.source_of(suite).startswith("folder ")]
    if local:
        yield f"the rows of {', '.join(local)} are from a folder: we did not check that they are the hub's"
    other = [suite for suite in suites if suite in OTHER_TEXTS]
    if other:
        yield f"the prompts of {', '.join(other)} are worded differently in the authors' harness"
    unknown_texts = [suite for suite in suites if suite not in (*OTHER_TEXTS, *SAME_TEXTS)]
    if unknown_texts:
        yield f"the wording of the authors' prompts for {', '.join(unknown_texts)} is not published"


def _counts(suites: Sequence[str], identity: RunIdentity) -> Iterator[str]:
    counts = {suite: identity.suites[suite].prompts if suite in identity.suites else None for suite in suites}
    other = [
        f"{suite} {count} (theirs: {theirs})"
        for suite, count in counts.items()
        if count != (theirs := min(NUM_PROMPTS, NUM_ROWS.get(suite, NUM_PROMPTS)))
    ]
    if other:
        yield (
            f"the number of prompts differs from the authors' published command: {', '.join(other)}; "
            "the paper does not say how many its figures are based on"
        )
