"""Figures that the authors published (results/published.csv), each with its source and the formula it was made by."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from dflash_bench.errors import UserError, unknown
from dflash_bench.peers.zlab import Official

SOURCES = ("paper",)
FORMULAS = {
    "al.served": "acceptance length as the server counts it",
    "speedup.served": "output tokens/s of the server, with drafting / without",
    "tps.served": "output tokens/s of the server",
}
"""Of published figures only; those of `zlab` besides."""


@dataclass(frozen=True, slots=True)
class Published:
    formula: str
    value: float
    target_model: str
    method: str
    config: str
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
    own: float | None


def load() -> list[Published]:
    folder = Path(__file__).parent.parent
    packed, checkout = folder / "_results" / "published.csv", folder.parent / "results" / "published.csv"
    path = packed if packed.exists() else checkout
    if not path.exists():
        raise UserError(f"no published figures: {path} is missing; reinstall dflash-bench")
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    kinds = {"value": float, "temperature": float, "concurrency": int}
    return [Published(**{f.name: kinds.get(f.name, str)(row[f.name]) for f in fields(Published)}) for row in rows]


def target_of(model: str) -> str:
    """What the paper calls a model: "qwen3-8b" and "Qwen/Qwen3-8B" are Qwen3-8B. Raises UserError otherwise."""
    known = list(dict.fromkeys(each.target_model for each in load()))
    wanted = model.rstrip("/").rpartition("/")[2].lower()
    for name in known:
        if name.lower() == wanted:
            return name
    raise unknown("target of published figures", model, known)


def beside(own: Sequence[Official], target: str, temperature: float) -> list[Beside]:
    """Raises UserError where none of the run's cells was published."""
    found = []
    for cell in own:
        values = {"al.zlab": cell.al, "speedup.zlab": cell.speedup, "tps.zlab": cell.tps}
        found += [
            Beside(each, cell.suite, cell.method, values.get(each.formula))
            for each in load()
            if (each.target_model, each.dataset, each.temperature) == (target, cell.suite, temperature)
            and each.method == cell.method.partition(":")[0]
            and each.thinking != "on"
        ]
    if not found:
        cells = ", ".join(f"{cell.suite} {cell.method}" for cell in own)
        raise UserError(f"nothing was published for {target} at temperature {temperature:g} on {cells}")
    return found
