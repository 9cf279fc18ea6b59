"""Findings about speed: the draft does not know the text, rounds cost too much, or there are too few prompts."""

from __future__ import annotations

from dflash_bench.analysis.findings.base import CellContext, Observation, Remedy
from dflash_bench.analysis.metrics import Cell
from dflash_bench.core.methods import METHODS, has_draft, is_probe, name_of

DEAD_AL = 1.05
FIRST_KEPT = 0.5
"""Below this accept_at[1], most rounds lose their very first drafted token, and drafting fewer of them cannot help."""
WIDE = 0.10
"""The half-width of an interval, as a share of its value, from which on it is called wide."""
SPEED_REMEDIES = {
    "draft": "{fewer}, or use a smaller draft",
    "verify": "{fewer}: on this device, verifying so many tokens at once costs too much",
    "other": "the time is not spent in the models: try --threads 1, and keep the machine free of other work",
}
SERVED = Remedy(
    "fewer_tokens_of_server",
    "start its server with fewer draft tokens, or measure the same draft here to see where a round spends its time",
)
TRAINED = Remedy(
    "check_training", "check that the draft was trained for this model: revision, chat template, tapped layers"
)
TRAINED_ON_THIS = Remedy(
    "check_texts",
    "check that it was trained for exactly this target, chat template and thinking mode, and on texts like these "
    "prompts; drafting fewer tokens per round will not help",
)
REPEATS = Remedy(
    "trained_draft",
    "this method drafts repetitions, and these answers repeat little: use a method with a trained draft",
)
KNOWS_NOT = Remedy(
    "other_texts", "drafting fewer tokens per round will not help: use a draft trained on text like this"
)


def dead_draft(context: CellContext) -> Observation | None:
    al = context.cell.value("al.pooled")
    if context.is_baseline or al is None or al >= DEAD_AL or never_drafts(context) or is_probe(context.cell.method):
        return None
    text = f"al.pooled is {al:.2f}: almost no draft token is accepted"
    return context.observe("dead_draft", text, TRAINED if has_draft(context.cell.method) else REPEATS, al_pooled=al)


def unknown_text(context: CellContext) -> Observation | None:
    """Look for a draft that is alive but wrong from its first token on, so that its length is not the cause."""
    al, first_kept = context.cell.value("al.pooled"), context.first_kept
    if context.is_baseline or al is None or al < DEAD_AL or first_kept is None or first_kept >= FIRST_KEPT:
        return None
    if is_probe(context.cell.method):
        return None
    text = (
        f"the draft does not fit this text: its first token is rejected in {1 - first_kept:.0%} of rounds "
        f"(accept_at[1] {first_kept:.2f}, al.pooled {al:.2f})"
    )
    remedy = TRAINED_ON_THIS if has_draft(context.cell.method) else REPEATS
    return context.observe("unknown_text", text, remedy, first_kept=first_kept, al_pooled=al)


def slower_than_plain(context: CellContext) -> Observation | None:
    """Look for a speed-up whose whole interval lies below 1."""
    speedup = context.cell.figures.get("speedup.decode")
    if context.is_baseline or speedup is None or (speedup.value if speedup.high is None else speedup.high) >= 1:
        return None
    text = f"speedup.decode is {speedup.value:.2f}: {_why_slow(context.cell)}"
    return context.observe("slower", text, _how_faster(context), speedup_decode=speedup.value)


def unclear(context: CellContext) -> Observation | None:
    speedup = context.cell.figures.get("speedup.decode")
    if context.is_baseline or speedup is None or not speedup.contains(1) or never_drafts(context):
        return None
    within = f"its interval, {speedup.low:.2f} to {speedup.high:.2f}, contains 1"
    why = "its interval is too wide to tell" if speedup.is_vague else within
    text = f"speedup.decode {speedup.value:.2f} may be faster or slower than plain decoding: {why}"
    bounds = {"low": speedup.low, "high": speedup.high}
    return context.observe("unclear", text, "raise --limit, or leave it out", speedup_decode=speedup.value, **bounds)


def wide_interval(context: CellContext) -> Observation | None:
    speedup = context.cell.figures.get("speedup.decode")
    half = speedup.half_width if speedup else None
    if context.is_baseline or speedup is None or half is None or half <= WIDE * speedup.value or speedup.contains(1):
        return None
    text = f"speedup.decode {speedup.value:.2f} is only known to ± {half:.2f} ({half / speedup.value:.0%})"
    values = {"speedup_decode": speedup.value, "half_width": half}
    return context.observe("wide_interval", text, "raise --limit, or add suites", **values)


def _why_slow(cell: Cell) -> str:
    parts, al, needed = _parts(cell), cell.value("al.pooled"), cell.value("break_even_al")
    if al is not None and cell.counted_by:
        return f"al.pooled is {al:.2f}, and a server does not report the cost of a round"
    if al is None or needed is None or not parts:
        return "the backend does not report rounds, so the reason is unknown"
    compared = "below" if al < needed else "not below"
    besides = "" if al < needed else ", which leaves out other ms and the draft's prefill"
    round_ms = ", ".join(f"{name} {part_ms:.3g}" for name, part_ms in parts.items())
    largest = f"{max(parts, key=lambda name: parts[name])} is the largest part of a round ({round_ms} ms)"
    return f"al.pooled {al:.2f} is {compared} break_even_al {needed:.2f}{besides}; {largest}"


def _how_faster(context: CellContext) -> Remedy:
    cell = context.cell
    parts, al, needed = _parts(cell), cell.value("al.pooled"), cell.value("break_even_al")
    if (
        context.first_kept is not None
        and context.first_kept < FIRST_KEPT
        and (needed is None or al is None or al < needed)
    ):
        return KNOWS_NOT
    if context.identity.servers:
        return SERVED
    if not parts or al is None or needed is None:
        fewer = f"{tokens_per_round(cell, 'fewer')}, and run a local model to see where a round spends its time"
        return Remedy("fewer_tokens", fewer, option_of(cell.method))
    part = max(parts, key=lambda name: parts[name]) if al < needed else "other"
    text = SPEED_REMEDIES[part].format(fewer=tokens_per_round(cell, "fewer"))
    return Remedy(f"cost_of_{part}", text, () if part == "other" else option_of(cell.method))


def tokens_per_round(cell: Cell, how_many: str) -> str:
    return f"draft {how_many} tokens per round{_how(cell.method)}"


def option_of(label: str) -> tuple[str, ...]:
    """Return the method and its option for the number of draft tokens, which is empty if that is its plain count.

    Empty for a method that is not in the table, or that chooses the number itself.
    """
    kind = METHODS.get(name_of(label))
    is_tree = kind is not None and any(option.name == "nodes" for option in kind.options)
    if kind is None or not (kind.count or is_tree):
        return ()
    return label.partition(":")[0], "" if kind.count else "nodes"


def _how(label: str) -> str:
    """Return how a user sets the number, in parentheses; empty where nobody can."""
    if not (known := option_of(label)):
        return ""
    method, option = known
    return f" (--method {method}:{f'{option}=N' if option else 'N'})"


def _parts(cell: Cell) -> dict[str, float]:
    """Return the parts of a round in milliseconds; empty unless all are known."""
    parts = {name: cell.value(f"{name}_ms") for name in ("draft", "verify", "other")}
    known = {name: value for name, value in parts.items() if value is not None}
    return known if len(known) == len(parts) else {}


def never_drafts(context: CellContext) -> bool:
    """Return whether nothing was drafted, although there was something to draft and the backend reports the number."""
    drafted = context.succeeded["num_drafted"].sum(min_count=1)
    return bool(context.succeeded["decode_tokens"].sum()) and bool(drafted == 0)
