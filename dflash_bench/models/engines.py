"""Which kinds of drafts load on which engine, as the dialects of servers declare, with version and month."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dflash_bench.core.dialects import DIALECTS, Dialect, Support
from dflash_bench.core.draft_kinds import KINDS, name_of_kind
from dflash_bench.core.labels import wrapped
from dflash_bench.models import presets
from dflash_bench.models.presets import Preset

NOT = "not known to load"
SERVED = tuple(kind for kind in KINDS if kind != "block-diffusion")
"""Kinds that a server can draft with."""


def supports() -> Iterator[tuple[Dialect, Support]]:
    for dialect in DIALECTS.values():
        if dialect.support is not None:
            yield dialect, dialect.support


def as_json() -> list[dict[str, Any]]:
    """Return for each engine the kinds that it computes, and how they load."""
    return [
        {
            "engine": dialect.name,
            "version": found.version,
            "date": found.date,
            "tested": found.tested,
            "kinds": {kind: found.kinds.get(kind) for kind in SERVED},
        }
        for dialect, found in supports()
    ]


def text(width: int) -> str:
    """Return each engine with the kinds that it computes, and those that it does not."""
    lines: list[str] = []
    for dialect, found in supports():
        lines.append(f"{dialect.name} {found.version} ({found.date}; {found.tested})")
        longest = max(len(name_of_kind(kind)) for kind in SERVED)
        for kind in (kind for kind in SERVED if kind in found.kinds):
            line = f"  {name_of_kind(kind):<{longest}}  {found.kinds[kind]}"
            lines += wrapped(line, width, others=" " * (longest + 4)).splitlines()
        left = [name_of_kind(kind) for kind in SERVED if kind not in found.kinds]
        lines += [*wrapped(f"  {NOT}: {', '.join(left)}", width, others="      ").splitlines(), ""]
    return "\n".join([*lines, "This project's engine computes all of them, as published."])


def of_preset(name: str, width: int) -> str:
    """Return each draft of a model with the engines that load it, and how. Raises UserError for an unknown model."""
    preset = presets.preset(name)
    lines = [f"{name}: {preset.target}"]
    for draft, kind in served(preset):
        lines += ["", f"{draft}  {preset.drafts[draft]}, {name_of_kind(kind)}"]
        for dialect, found in supports():
            line = f"  {dialect.name:<14}{found.kinds.get(kind, NOT)}"
            lines += wrapped(line, width, others=" " * 18).splitlines()
    return "\n".join(lines)


def preset_json(name: str) -> list[dict[str, Any]]:
    preset = presets.preset(name)
    return [
        {
            "draft": draft,
            "id": preset.drafts[draft],
            "kind": kind,
            "engines": {dialect.name: found.kinds.get(kind) for dialect, found in supports()},
        }
        for draft, kind in served(preset)
    ]


def served(preset: Preset) -> list[tuple[str, str]]:
    """Return a model's drafts, with their kinds, but those that no server drafts with."""
    return [(draft, kind) for draft in preset.drafts if (kind := preset.kind(draft)) in SERVED]
