"""What a longer context does to each method: a table by suite, method and context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dflash_bench import labels
from dflash_bench.analysis.metrics import BASELINE, Cell
from dflash_bench.records import CellKey, context_name
from dflash_bench.report.tables import markdown, number, with_interval
from dflash_bench.results.identity import short_names

TITLE = "By context"
LEGEND = (
    "prompt tokens: mean, with what stands before the prompt; draft prefill: the draft reads the prompt, once an "
    "answer; plain step: a token of plain decoding; below break_even_al speculation loses"
)
HEADS = (
    "context", "prompt\ntokens", "prompts", "al.\npooled [95 %]", "break_even_al", "draft\nprefill ms", "draft\nms",
    "verify\nms", "plain\nstep ms", "speedup.\ndecode [95 %]",
)  # fmt: skip
"""With line breaks where a narrow column needs them."""


@dataclass(frozen=True, slots=True)
class Series:
    """A method on one suite, with everything else equal: a cell for each context, the shortest first."""

    suite: str
    """For people, with what tells its other settings from those of the run."""
    method: str
    cells: tuple[Cell, ...]
    key: CellKey
    """With the id of the settings without a context."""

    @property
    def name(self) -> str:
        return f"{self.suite} · {self.method}"


def by_context(cells: Sequence[Cell]) -> list[Series]:
    """Those with answers at several contexts; none in a run of one."""
    answered = [cell for cell in cells if cell.num_prompts and cell.method != BASELINE]
    others = short_names(list(dict.fromkeys(replace(cell.settings, context=None) for cell in answered)))
    groups: dict[CellKey, list[Cell]] = {}
    names = {}
    for cell in answered:
        other = replace(cell.settings, context=None)
        key = cell.key._replace(settings_id=other.id)
        groups.setdefault(key, []).append(cell)
        names[key] = labels.under(cell.label, "; ".join(filter(None, [cell.slice, others[other]])))
    return [
        Series(names[key], key.method, tuple(sorted(members, key=lambda cell: cell.settings.context or 0)), key)
        for key, members in groups.items()
        if len(members) > 1
    ]


def table(cells: Sequence[Cell]) -> tuple[Sequence[str], list[list[str]]]:
    """The name of a suite and method once, and its contexts below it."""
    heads, rows = [head.replace(".\n", ".").replace("\n", " ") for head in HEADS], []
    for series in by_context(cells):
        rows.append([series.name, *[""] * (len(HEADS) - 1)])
        rows += [row(cell) for cell in series.cells]
    return heads, rows


def row(cell: Cell) -> list[str]:
    times = ("draft_prefill_ms", "draft_ms", "verify_ms", "plain_ms")
    return [
        f"  {context_name(cell.settings.context)}", number(cell.value("prompt_tokens"), 0), f"{cell.num_prompts:,}",
        with_interval(cell.figures.get("al.pooled")), number(cell.value("break_even_al")),
        *(number(cell.value(name)) for name in times), with_interval(cell.figures.get("speedup.decode")),
    ]  # fmt: skip


def paragraphs(cells: Sequence[Cell]) -> list[str]:
    """In Markdown; none in a run of one context."""
    return [f"## {TITLE}", markdown(*table(cells)), f"{LEGEND}."] if by_context(cells) else []
