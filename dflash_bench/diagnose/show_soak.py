"""A soak on one screen and as a page: requests, figures of the first and last third, and what changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median

from dflash_bench.core.labels import clipped, wrapped
from dflash_bench.diagnose.soak import Soak
from dflash_bench.diagnose.soak_findings import KINDS, SoakAnswer, references
from dflash_bench.report.tables import ABSENT, aligned, markdown, number

WIDTH = 80
HEADS = ["reference", "answers", "same", "tokens per round", "tokens/s"]


def text(found: Soak, width: int = WIDTH) -> str:
    """Return the result; the first line names the server, the last ones what changed."""
    parts = [
        clipped(_head(found), width),
        *(wrapped(line, width) for line in _asked(found)),
        aligned(HEADS, _rows(found)),
        *(wrapped(line, width, others="  ") for line in _ends(found)),
    ]
    return "\n".join(parts)


def page(found: Soak, command: str, machine: str) -> str:
    """Return the page in Markdown, with the command that made it."""
    parts = [
        "# A soak of " + (found.model or found.dialect),
        f"```\n{command}\n```",
        f"{machine}. {_head(found)}.",
        *_asked(found),
        markdown(HEADS, _rows(found), 1),
        "Figures are medians over the first and the last third of the answers.",
        "\n".join(f"- {line}" for line in _ends(found)),
    ]
    return "\n\n".join(parts) + "\n"


def _head(found: Soak) -> str:
    version = f" {found.version}" if found.version else ""
    return f"{found.dialect}{version} serves {found.model or 'a model without a name'}"


def _asked(found: Soak) -> list[str]:
    counts = Counter(one.kind for one in found.answers)
    minutes = found.answers[-1].seconds / 60 if found.answers else 0.0
    kinds = ", ".join(f"{counts[kind]:,} {kind}" for kind in KINDS if counts[kind])
    judged = [one.fits for one in found.answers if one.fits is not None]
    matching = [f"{sum(judged):,} of {len(judged):,} constrained answers match their schema"] if judged else []
    return [f"{len(found.answers):,} requests in {minutes:.0f} minutes: {kinds}", *matching, *found.notes]


def _rows(found: Soak) -> list[list[str]]:
    return [
        [
            name,
            str(len(several)),
            f"{sum(one.is_same is True for one in several)}/{len(several)}",
            _ends_of(several, lambda one: one.tokens_per_round, 2),
            _ends_of(several, lambda one: one.tokens_per_s, 1),
        ]
        for name, several in references(found.answers).items()
    ]


def _ends_of(several: Sequence[SoakAnswer], figure: Callable[[SoakAnswer], float | None], digits: int) -> str:
    """Return the medians of the first and the last third."""
    third = max(1, len(several) // 3)
    ends = [
        [value for one in part if (value := figure(one)) is not None] for part in (several[:third], several[-third:])
    ]
    return " to ".join(number(median(values), digits) if values else ABSENT for values in ends)


def _ends(found: Soak) -> list[str]:
    memory = [one.resident_bytes for one in found.answers if one.resident_bytes]
    told = (
        f"memory{found.memory_of}: {memory[0] / 1e9:.2f} GB at the start, {memory[-1] / 1e9:.2f} GB at the end"
        if memory
        else "memory: not reported by the server; --pid reads that of a process on this machine"
    )
    faults = [f"! answer {one.number:,}: {one.what} ({one.code})" for one in found.findings]
    return [told, *(faults or ["no change in answers, tokens per round, speed or memory"])]
