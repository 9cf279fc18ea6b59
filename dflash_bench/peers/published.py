"""Figures that the authors published (results/published.csv), each with its source and the formula it was made by."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dflash_bench.errors import UserError, unknown
from dflash_bench.findings import last_part
from dflash_bench.peers.zlab import Official

SOURCES = ("paper",)
FORMULAS = {
    "al.served": "acceptance length as the server counts it",
    "speedup.served": "output tokens/s of the server, with drafting / without",
    "tps.served": "output tokens/s of the server",
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
    method: str
    num_drafts: int | None
    own: float | None

    @property
    def is_as_long(self) -> bool:
        """Do both draft as many tokens a round? Where that is not published, nothing says no."""
        return self.published.num_drafts in (None, self.num_drafts)


@cache
def load() -> tuple[Published, ...]:
    folder = Path(__file__).parent.parent
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

    Raises UserError where that is nothing.
    """
    temperature, modes = identity["temperature"], MODES[identity.get("thinking")]
    found = []
    for cell in own:
        values = {"al.zlab": cell.al, "speedup.zlab": cell.speedup, "tps.zlab": cell.tps}
        num_drafts = identity.get("methods", {}).get(cell.method, {}).get("num_drafts")
        found += [
            Beside(each, cell.suite, cell.method, num_drafts, values.get(each.formula))
            for each in load()
            if (each.target_model, each.dataset, each.temperature) == (target, cell.suite, temperature)
            and each.method == cell.method.partition(":")[0]
            and each.thinking in modes
        ]
    if not found:
        cells = ", ".join(f"{cell.suite} {cell.method}" for cell in own)
        thinking = "with thinking" if "on" in modes else "without thinking"
        raise UserError(f"nothing was published for {target} {thinking} at temperature {temperature:g} on {cells}")
    return found
