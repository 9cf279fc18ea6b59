"""Figures that the authors published (results/published.csv), each with its source and the formula it was made by."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dflash_bench import labels
from dflash_bench.analysis.findings import last_part
from dflash_bench.analysis.peers.zlab import Official
from dflash_bench.errors import UserError, unknown
from dflash_bench.methods import name_of
from dflash_bench.records import Settings
from dflash_bench.results.identity import settings_of

SOURCES = ("paper",)
EMBEDDED = "embedded"
MAX_NEW_TOKENS = 2048
"""Of the main tables."""
NUM_PROMPTS = 128
"""Of each suite in the evaluation that the authors publish the command of; all where there are fewer."""
NUM_ROWS = {"aime24": 30, "aime25": 30, "gsm8k": 1319, "humaneval": 164, "math500": 500, "mbpp": 257, "mt_bench": 80}
SAME_TEXTS = ("gsm8k", "math500", "mt_bench")
"""Suites whose prompts the authors' harness asks in the words that ours have."""
OTHER_TEXTS = ("humaneval", "mbpp")
"""Which it asks in other words; those of the rest are not published."""
FORMULAS = {
    "al.served": "acceptance length as the server counts it",
    "speedup.served": "output tokens/s of the server, with drafting / without",
    "tps.served": "output tokens/s of the server",
    "al.unstated": "acceptance length of EAGLE-3; the authors do not say by which formula or harness",
    "speedup.unstated": "speed-up of EAGLE-3; the authors do not say by which formula or harness",
}
"""Of published figures only; those of `zlab` besides."""


MODES: dict[bool | None, tuple[str, ...]] = {True: ("on", "not stated"), False: ("off", "not stated")}
MODES[None] = MODES[False]
"""What `thinking` of a published figure may be beside a run with it, without it, or of a model that has no switch."""
LENGTHS = re.compile(r"(block|used|tree|chain of) (\d+)|(\d+) drafts")
"""How a configuration tells its tokens a round; blocks and trees count the anchor too."""


@dataclass(frozen=True, slots=True)
class Published:
    """`method` as it is called here: what the authors call EAGLE-3 is a tree, unless they say chain."""

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

    published: Published
    suite: str
    settings: str
    """In words."""
    method: str
    num_drafts: int | None
    own: float | None

    @property
    def is_as_long(self) -> bool:
        """Do both draft as many tokens a round? Where that is not published, nothing says no."""
        return self.published.num_drafts in (None, self.num_drafts)


@cache
def load() -> tuple[Published, ...]:
    folder = Path(__file__).parents[2]
    packed, checkout = folder / "_results" / "published.csv", folder.parent / "results" / "published.csv"
    path = packed if packed.exists() else checkout
    if not path.exists():
        raise UserError(f"no published figures: {path} is missing; reinstall dflash-bench")
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(map(_parsed, csv.DictReader(file)))


def _parsed(row: Mapping[str, str]) -> Published:
    found = LENGTHS.search(row["config"])
    kind = found[1] if found else None
    known: dict[str, Any] = {
        "method": "eagle3-tree" if (row["method"], kind) == ("eagle3", "tree") else row["method"],
        "num_drafts": int(found[2] or found[3]) - (kind in ("block", "used", "tree")) if found else None,
        "value": float(row["value"]),
        "temperature": float(row["temperature"]),
        "concurrency": int(row["concurrency"]),
    }
    return Published(**{**row, **known})


def model_of(identity: Mapping[str, Any]) -> str:
    """What a run measured: its target, which may have been put in the place of the model's own."""
    return str(identity.get("target") or identity["model"])


def target_of(model: str) -> str:
    """What the paper calls a model: "qwen3-8b" and "Qwen/Qwen3-8B" are Qwen3-8B. Raises UserError otherwise."""
    known = list(dict.fromkeys(each.target_model for each in load()))
    for name in known:
        if is_target(model, name):
            return name
    raise unknown("target of published figures", model, known)


def is_target(model: str, target: str) -> bool:
    """Does the paper call this model `target`? It leaves out "-Instruct"."""
    return last_part(model) in (target.lower(), f"{target.lower()}-instruct")


def beside(own: Sequence[Official], target: str, identity: Mapping[str, Any]) -> list[Beside]:
    """What was published for the run's suites, methods, temperature and thinking, however long the drafts.

    Raises UserError where that is nothing, and for embedded prompts, which are not those that the suites are named for.
    """
    embedded = [suite for suite in dict.fromkeys(cell.suite for cell in own) if _is_embedded(identity, suite)]
    if embedded:
        label = labels.listed((suite, EMBEDDED) for suite in embedded)
        raise UserError(
            f"{label}: embedded prompts are samples of this project, and no published figure is of them; "
            "run again with --data hub, or --data FOLDER that holds the hub's rows"
        )
    several = {str(settings): settings for settings in settings_of(identity)}
    found = []
    for cell in own:
        settings = several[cell.settings]
        values = {"al.zlab": cell.al, "speedup.zlab": cell.speedup, "tps.zlab": cell.tps}
        num_drafts = identity.get("methods", {}).get(cell.method, {}).get("num_drafts")
        found += [
            Beside(each, cell.suite, cell.settings, cell.method, num_drafts, values.get(each.formula))
            for each in load()
            if (each.target_model, each.dataset, each.temperature) == (target, cell.suite, settings.temperature)
            and settings == Settings(settings.temperature, thinking=settings.thinking)
            and each.method == name_of(cell.method)
            and each.thinking in MODES[settings.thinking]
        ]
    if not found:
        cells = ", ".join(
            f"{labels.named(cell.suite, labels.source_of(identity, cell.suite))} {cell.method}" for cell in own
        )
        conditions = " or ".join(map(_conditions, several.values()))
        raise UserError(f"nothing was published for {target} {conditions} on {cells}")
    return found


def _conditions(settings: Settings) -> str:
    plain = Settings(settings.temperature, thinking=settings.thinking)
    others = "" if settings == plain else f" ({settings})"
    return f"{'with' if settings.thinking else 'without'} thinking at temperature {settings.temperature:g}{others}"


def _is_embedded(identity: Mapping[str, Any], suite: str) -> bool:
    return labels.source_of(identity, suite) == EMBEDDED


def unlike_conditions(found: Sequence[Beside], identity: Mapping[str, Any]) -> Iterator[str]:
    """How the run was asked otherwise than the authors ask, a sentence each."""
    suites = list(dict.fromkeys(each.suite for each in found))
    yield from _counts(suites, identity)
    limit = identity.get("max_new_tokens")
    if limit != MAX_NEW_TOKENS:
        yield f"answers end at {limit} tokens here, at {MAX_NEW_TOKENS:,} in the paper's main tables"
    local = [suite for suite in suites if labels.source_of(identity, suite).startswith("folder ")]
    if local:
        yield f"the rows of {', '.join(local)} are from a folder: whether they are the hub's was not looked at"
    other = [suite for suite in suites if suite in OTHER_TEXTS]
    if other:
        yield f"the prompts of {', '.join(other)} are in other words than the authors' harness asks"
    unknown_texts = [suite for suite in suites if suite not in (*OTHER_TEXTS, *SAME_TEXTS)]
    if unknown_texts:
        yield f"in which words the authors ask {', '.join(unknown_texts)} is not published"


def _counts(suites: Sequence[str], identity: Mapping[str, Any]) -> Iterator[str]:
    counts = {suite: identity.get("suites", {}).get(suite, {}).get("prompts") for suite in suites}
    other = [
        f"{suite} {count} (theirs: {theirs})"
        for suite, count in counts.items()
        if count != (theirs := min(NUM_PROMPTS, NUM_ROWS.get(suite, NUM_PROMPTS)))
    ]
    if other:
        yield (
            f"other numbers of prompts than in the authors' published command: {', '.join(other)}; "
            "how many the paper's figures are of is not stated"
        )
