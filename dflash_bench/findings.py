"""Where a number is weak or a run went wrong: what was seen, in numbers, and what to do about it.

A closed list. A check looks at one cell, or at one suite where all methods share the fault, and returns what
it found or None. It reads the records again, because a cell no longer holds what made its numbers weak.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dflash_bench import metrics
from dflash_bench.methods import drafts_trees
from dflash_bench.metrics import BASELINE, Cell
from dflash_bench.records import Generation, Record

MIN_PROMPTS = 20
WIDE = 0.10
"""Half of an interval, as a share of its value."""
DEAD_AL = 1.05
SATURATED = 0.5
"""Share of rounds that keep the whole draft."""
TRUNCATED = 0.10
"""Share of answers cut at the limit."""
SLOW_FIRST = 1.5
DRIFT = 0.10
SPEED_REMEDIES = {
    "draft": "{fewer}, or use a smaller draft",
    "verify": "{fewer}: on this device a longer forward costs too much",
    "other": "the models are not the cost: try --threads 1, and keep the machine free of other work",
}
MIN_ANSWERS_OVER_TIME = 8
"""Fewer say nothing about the first of them, or about the first and last quarter."""


@dataclass(frozen=True, slots=True)
class Finding:
    kind: str
    text: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Seen:
    """What one check saw; `where` is a cell, or a suite whose methods share the fault."""

    kind: str
    where: str
    text: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Case:
    """A cell, its records (failed ones too), and the records that did not fail."""

    cell: Cell
    records: list[Record]
    good: list[Record]
    identity: Mapping[str, Any]
    """What the run was made with, as `run.json` has it; empty where that is not known."""

    @property
    def is_baseline(self) -> bool:
        return self.cell.method == BASELINE

    @property
    def draft(self) -> Mapping[str, Any]:
        """What is known of the method's draft; a draft's name begins that of every method that uses it."""
        drafts: Mapping[str, Mapping[str, Any]] = self.identity.get("drafts", {})
        return next((known for name, known in drafts.items() if self.cell.method.startswith(name)), {})

    def seen(self, kind: str, text: str, remedy: str) -> Seen:
        return Seen(kind, f"{self.cell.suite} {self.cell.method}", text, remedy)

    def seen_in_suite(self, kind: str, text: str, remedy: str) -> Seen:
        return Seen(kind, self.cell.suite, text, remedy)


def findings(
    records: Sequence[Record], cells: Sequence[Cell], identity: Mapping[str, Any] | None = None
) -> list[Finding]:
    """What is wrong comes before what is weak. Cells that share a kind and a remedy share one finding."""
    cases = [_case(records, cell, identity or {}) for cell in cells]
    alike: dict[tuple[str, str], list[Seen]] = {}
    for seen in (check(case) for check in CHECKS for case in cases):
        if seen is not None:
            alike.setdefault((seen.kind, seen.remedy), []).append(seen)
    return [_finding(group) for group in alike.values()]


def _finding(alike: Sequence[Seen]) -> Finding:
    first, *others = alike
    likewise = f"; likewise {', '.join(seen.where for seen in others)}" if others else ""
    return Finding(first.kind, f"{first.where}: {first.text}{likewise}", first.remedy)


def _case(records: Sequence[Record], cell: Cell, identity: Mapping[str, Any]) -> Case:
    own = [record for record in records if record.cell == (cell.suite, cell.method)]
    return Case(cell, own, metrics.without_errors(own), identity)


def _mismatch(case: Case) -> Seen | None:
    wrong = [record for record in case.good if record.exactness == "mismatch"]
    if not wrong:
        return None
    where = wrong[0].divergence
    seen = f", margin {where.margin:.3g} against drift {where.drift:.3g}" if where else ""
    at = f"prompt {wrong[0].prompt_id} turn {wrong[0].turn}" + (f" token {where.index}" if where else "")
    tally = f"{len(wrong)} of {_answers(case.good)}"
    if case.is_baseline:
        text = f"plain decoding disagrees with itself in {tally}; first at {at}{seen}"
        return case.seen("mismatch", text, "the control failed: use --dtype float32, or find what is random")
    text = f"{tally} are not the target's own output; first at {at}{seen}"
    return case.seen("mismatch", text, "rounding does not explain it: a bug, do not use these numbers")


def _failed(case: Case) -> Seen | None:
    errors = [record.generation.error for record in case.records if record.generation.error is not None]
    if not errors:
        return None
    first = (errors[0].splitlines() or ["no message"])[0]
    text = f"{len(errors)} of {_answers(case.records)} failed and are in no number; the first: {first[:160]}"
    return case.seen("failed", text, "remove the cause and run again with another --out")


def _near_ties(case: Case) -> Seen | None:
    if not case.cell.num_near_ties:
        return None
    text = f"{case.cell.num_near_ties} of {_answers(case.good)} leave the plain output at a near-tie"
    return case.seen("near_tie", text, "rounding explains them; --dtype float32 removes them")


def _nothing_drafted(case: Case) -> Seen | None:
    if case.is_baseline or not _never_drafts(case):
        return None
    num_rounds = sum(map(len, metrics.accepted_by_round(case.good)))
    remedy = f"{_tokens_a_round(case.cell, 'more')}, and check that the draft is the one for this model"
    return case.seen("nothing_drafted", f"no token was drafted in {num_rounds} rounds", remedy)


def _other_mode(case: Case) -> Seen | None:
    """The first cause of low acceptance: a draft that has only seen answers that think, or only answers that do not."""
    trained, thinking = case.draft.get("trained_thinking"), case.identity.get("thinking")
    if trained is None or thinking is None or trained == thinking:
        return None
    mode = {True: "with thinking", False: "without thinking"}
    text = f"this run is {mode[thinking]}, its draft was trained on answers {mode[trained]}"
    return case.seen("other_mode", text, f"add {'--thinking' if trained else '--no-thinking'}, or use another draft")


def _other_target(case: Case) -> Seen | None:
    verifier, target = case.draft.get("verifier"), case.identity.get("target")
    if not verifier or not target or _last_part(verifier) == _last_part(target):
        return None
    text = f"its draft names {verifier} as its target, this one is {target}"
    return case.seen("other_target", text, f"expect less than with --target {verifier}")


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()


def _dead_draft(case: Case) -> Seen | None:
    al = case.cell.al_pooled
    if case.is_baseline or al is None or al >= DEAD_AL or _never_drafts(case):
        return None
    text = f"al.pooled is {al:.2f}: almost nothing that the draft proposes is accepted"
    remedy = "check that the draft was trained for this model: revision, chat template, tapped layers"
    return case.seen("dead_draft", text, remedy)


def _slower_than_plain(case: Case) -> Seen | None:
    speedup = case.cell.speedup_decode
    if case.is_baseline or speedup is None or speedup.value >= 1:
        return None
    text = f"speedup.decode is {speedup.value:.2f}: {_why_slow(case.cell)}"
    return case.seen("slower", text, _how_faster(case.cell))


def _why_slow(cell: Cell) -> str:
    parts = _parts(cell)
    if cell.al_pooled is None or cell.break_even_al is None or not parts:
        return "the backend shows no rounds, so the reason is not available"
    below = cell.al_pooled < cell.break_even_al
    al, needed = f"al.pooled {cell.al_pooled:.2f}", f"break_even_al {cell.break_even_al:.2f}"
    compared = "below" if below else "not below"
    besides = "" if below else ", which leaves out other ms and draft prefill"
    round_ms = ", ".join(f"{name} {part_ms:.3g}" for name, part_ms in parts.items())
    largest = max(parts, key=lambda name: parts[name])
    return f"{al} is {compared} {needed}{besides}; {largest} is the largest part of a round ({round_ms} ms)"


def _how_faster(cell: Cell) -> str:
    parts = _parts(cell)
    if not parts or cell.al_pooled is None or cell.break_even_al is None:
        return f"{_tokens_a_round(cell, 'fewer')}, and see with a local model where a round spends its time"
    below = cell.al_pooled < cell.break_even_al
    remedy = SPEED_REMEDIES[max(parts, key=lambda name: parts[name]) if below else "other"]
    return remedy.format(fewer=_tokens_a_round(cell, "fewer"))


def _tokens_a_round(cell: Cell, how_many: str) -> str:
    return f"draft {how_many} tokens a round (--method {cell.method.partition(':')[0]}:N)"


def _parts(cell: Cell) -> dict[str, float]:
    """Milliseconds of a round; empty where not all are known."""
    parts = {"draft": cell.draft_ms, "verify": cell.verify_ms, "other": cell.other_ms}
    known = {name: value for name, value in parts.items() if value is not None}
    return known if len(known) == len(parts) else {}


def _saturated(case: Case) -> Seen | None:
    # No round keeps all nodes of a tree: they are alternatives.
    if drafts_trees(case.cell.method):
        return None
    drafted = [(drafted, kept) for drafted, kept in metrics.drafted_and_accepted(case.good) if drafted]
    num_whole = sum(drafted == kept for drafted, kept in drafted)
    if not drafted or num_whole <= SATURATED * len(drafted):
        return None
    text = f"{num_whole} of {len(drafted)} rounds ({num_whole / len(drafted):.0%}) keep the whole draft"
    remedy = f"{_tokens_a_round(case.cell, 'more')}, if the draft was trained for it"
    return case.seen("saturated", text, remedy)


def _first_is_slow(case: Case) -> Seen | None:
    steps = [_seconds_per_step(record.generation) for record in sorted(case.good, key=lambda row: row.order)]
    known = [step for step in steps if step is not None]
    if len(known) < MIN_ANSWERS_OVER_TIME or steps[0] is None or steps[0] <= SLOW_FIRST * median(known):
        return None
    times = steps[0] / median(known)
    text = f"the first answer took {1000 * steps[0]:.3g} ms a step, {times:.1f} times the median"
    return case.seen("slow_first", text, "warm-up was too short: a higher --repeats makes it weigh less")


def _seconds_per_step(generation: Generation) -> float | None:
    """Of a round where rounds are shown, because how many tokens a round makes differs between prompts."""
    if generation.round_s:
        return sum(generation.round_s) / len(generation.round_s)
    seconds, tokens = metrics.decode_cost(generation)
    return seconds / tokens if tokens else None


def _drift(case: Case) -> Seen | None:
    if not case.is_baseline or len(case.good) < MIN_ANSWERS_OVER_TIME:
        return None
    over_time = sorted(case.good, key=lambda row: row.order)
    quarter = len(over_time) // 4
    first = metrics.seconds_per_token(over_time[:quarter])
    last = metrics.seconds_per_token(over_time[-quarter:])
    if not first or not last or abs(last / first - 1) <= DRIFT:
        return None
    change = f"from {1000 * first:.3g} to {1000 * last:.3g} ms per token ({last / first - 1:+.0%})"
    text = f"the machine drifted from the first to the last quarter, {change}"
    return case.seen_in_suite("drift", text, "let the machine cool, stop other work, fix --threads, and run again")


def _truncated(case: Case) -> Seen | None:
    num_cut = sum(record.generation.finish_reason == "length" for record in case.good)
    if not case.is_baseline or num_cut <= TRUNCATED * len(case.good):
        return None
    text = f"{num_cut} of {_answers(case.good)} were cut at the token limit"
    return case.seen_in_suite("truncated", text, "raise --max-new-tokens")


def _few_prompts(case: Case) -> Seen | None:
    if not case.is_baseline or case.cell.num_prompts >= MIN_PROMPTS:
        return None
    text = f"only {case.cell.num_prompts} prompts, too few for an interval to be trusted"
    return case.seen_in_suite("few_prompts", text, f"raise --limit to {MIN_PROMPTS} or more, or leave it out")


def _wide_interval(case: Case) -> Seen | None:
    speedup = case.cell.speedup_decode
    half = speedup.half_width if speedup else None
    if case.is_baseline or speedup is None or half is None or half <= WIDE * speedup.value:
        return None
    text = f"speedup.decode {speedup.value:.2f} is known to ± {half:.2f} only ({half / speedup.value:.0%})"
    return case.seen("wide_interval", text, "raise --limit, or add suites")


CHECKS: tuple[Callable[[Case], Seen | None], ...] = (
    _mismatch, _failed, _near_ties, _nothing_drafted, _other_mode, _other_target, _dead_draft, _slower_than_plain,
    _saturated, _first_is_slow, _drift, _truncated, _few_prompts, _wide_interval,
)  # fmt: skip


def _never_drafts(case: Case) -> bool:
    drafted = [drafted for drafted, _ in metrics.drafted_and_accepted(case.good)]
    return bool(drafted) and not any(drafted)


def _answers(records: Sequence[Record]) -> str:
    return f"{len(records)} answer{'' if len(records) == 1 else 's'}"
