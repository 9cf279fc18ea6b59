"""Findings about speed: text unknown to the draft, rounds that cost too much, or too few prompts."""

from __future__ import annotations

from dflash_bench.analysis.cells import Cell
from dflash_bench.analysis.findings.base import CellContext, Observation
from dflash_bench.core.methods import has_draft, is_probe

DEAD_AL = 1.05
FIRST_KEPT = 0.5
"""Below this accept_at[1], most rounds lose their very first drafted token, and drafting fewer of them cannot help."""
WIDE = 0.10
"""The half-width, as a share of the value, above which an interval is called wide."""


def dead_draft(context: CellContext) -> Observation | None:
    al = context.cell.value("al.pooled")
    if context.is_baseline or al is None or al >= DEAD_AL or never_drafts(context) or is_probe(context.cell.method):
        return None
    remedy = "check_training" if has_draft(context.cell.method) else "trained_draft"
    return context.observe("dead_draft", remedy, al_pooled=al)


def unknown_text(context: CellContext) -> Observation | None:
    """Look for a draft that is alive but wrong from its first token on, so that its length is not the cause."""
    al, first_kept = context.cell.value("al.pooled"), context.first_kept
    if context.is_baseline or al is None or al < DEAD_AL or first_kept is None or first_kept >= FIRST_KEPT:
        return None
    if is_probe(context.cell.method):
        return None
    remedy = "check_texts" if has_draft(context.cell.method) else "trained_draft"
    return context.observe("unknown_text", remedy, first_kept=first_kept, al_pooled=al)


def slower_than_plain(context: CellContext) -> Observation | None:
    """Look for a speed-up whose whole interval lies below 1."""
    speedup = context.cell.figures.get("speedup.decode")
    if context.is_baseline or speedup is None or (speedup.value if speedup.high is None else speedup.high) >= 1:
        return None
    return context.observe("slower", _how_faster(context), speedup_decode=speedup.value)


def unclear(context: CellContext) -> Observation | None:
    speedup = context.cell.figures.get("speedup.decode")
    if context.is_baseline or speedup is None or not speedup.contains(1) or never_drafts(context):
        return None
    return context.observe("unclear", speedup_decode=speedup.value, low=speedup.low, high=speedup.high)


def wide_interval(context: CellContext) -> Observation | None:
    speedup = context.cell.figures.get("speedup.decode")
    half = speedup.half_width if speedup else None
    if context.is_baseline or speedup is None or half is None or half <= WIDE * speedup.value or speedup.contains(1):
        return None
    return context.observe("wide_interval", speedup_decode=speedup.value, half_width=half)


def _how_faster(context: CellContext) -> str:
    """Return the code of what makes a slow method faster."""
    cell = context.cell
    parts, al, needed = parts_of(cell), cell.value("al.pooled"), cell.value("break_even_al")
    if (
        context.first_kept is not None
        and context.first_kept < FIRST_KEPT
        and (needed is None or al is None or al < needed)
    ):
        return "other_texts"
    if context.identity.servers:
        return "fewer_tokens_of_server"
    if not parts or al is None or needed is None:
        return "fewer_tokens"
    return f"cost_of_{max(parts, key=lambda name: parts[name]) if al < needed else 'other'}"


def parts_of(cell: Cell) -> dict[str, float]:
    """Return the parts of a round in milliseconds; empty unless all are known."""
    parts = {name: cell.value(f"{name}_ms") for name in ("draft", "verify", "other")}
    known = {name: value for name, value in parts.items() if value is not None}
    return known if len(known) == len(parts) else {}


def never_drafts(context: CellContext) -> bool:
    """Return whether nothing was drafted, although there was something to draft and the backend reports the number."""
    drafted = context.succeeded["num_drafted"].sum(min_count=1)
    return bool(context.succeeded["decode_tokens"].sum()) and bool(drafted == 0)
