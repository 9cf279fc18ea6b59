"""Where a number is weak or a run went wrong: what was seen, in numbers, and what to do about it.

`CHECKS` is the complete list. A check looks at one cell, or at one suite if all methods share the fault, and returns
what it saw or None. It reads the rows again, because a cell no longer holds what made its numbers weak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isnan
from typing import Any

from dflash_bench.analysis import metrics
from dflash_bench.analysis.findings import repetition, servers, speed, timing, witnesses
from dflash_bench.analysis.findings.case import MIN_PROMPTS, Case, Finding, Remedy, Seen, answers
from dflash_bench.analysis.findings.speed import DEAD_AL, REPEATS, never_drafts, option_of, tokens_a_round
from dflash_bench.analysis.metrics import BASELINE, Cell
from dflash_bench.core.methods import has_draft, is_lossy, is_probe, is_tree
from dflash_bench.core.types import CODE_SCORERS, Divergence
from dflash_bench.results.run_info import RunIdentity, RunInfo
from dflash_bench.tasks import sandbox

__all__ = ["CHECKS", "DEAD_AL", "MIN_PROMPTS", "Finding", "findings", "last_part"]

SATURATED = 0.5
"""Share of rounds that keep the whole draft."""
TRUNCATED = 0.10
"""Share of answers cut at the limit."""
UNKNOWN = RunIdentity(model="", dtype="", settings=[])


def findings(
    rows: Any, cells: Sequence[Cell], identity: RunIdentity | None = None, info: RunInfo | None = None
) -> list[Finding]:
    """First what is wrong, then what is weak; cells with the same kind and remedy, by their codes, share one finding.

    `identity` is that of `info`, which has what `run.json` holds besides.
    """
    plain = {(cell.suite, cell.settings) for cell in cells if cell.method == BASELINE and cell.num_prompts}
    first = tuple(rows[["suite", "settings_id"]].iloc[int(rows["order"].to_numpy().argmin())])
    cases = [
        _case(
            rows, cell, identity or UNKNOWN, (cell.suite, cell.settings) in plain,
            (cell.suite, cell.settings.id) == first, info,
        ) for cell in cells
    ]  # fmt: skip
    alike: dict[tuple[object, ...], list[Seen]] = {}
    for seen in (check(case) for check in CHECKS for case in cases):
        if seen is not None:
            remedy = seen.remedy.code, seen.remedy.about
            alike.setdefault((seen.kind, *remedy, seen.place if seen.is_own else None), []).append(seen)
    return [_finding(group) for group in alike.values()]


def _finding(alike: Sequence[Seen]) -> Finding:
    first, *others = alike
    also = f"; also {_wheres(others)}" if others else ""
    places = tuple(seen.place for seen in alike)
    return Finding(
        first.kind, f"{_wheres([first])}: {first.text}{also}", first.remedy.text, places,
        first.remedy.code, tuple(seen.values for seen in alike),
    )  # fmt: skip


def _wheres(others: Sequence[Seen]) -> str:
    """`gsm8k (hub) eagle3, math500 (hub) dflash and eagle3`: a suite's methods together."""
    by_suite: dict[tuple[str, str], tuple[str, list[str]]] = {}
    for seen in others:
        by_suite.setdefault((seen.place.suite, seen.place.settings_id), (seen.label, []))[1].append(seen.place.method)
    return ", ".join(" ".join(filter(None, [label, " and ".join(methods)])) for label, methods in by_suite.values())


def _case(rows: Any, cell: Cell, identity: RunIdentity, has_plain: bool, opens_run: bool, info: RunInfo | None) -> Case:
    of_cell = metrics.select(rows, cell.key)
    return Case(cell, of_cell, metrics.without_errors(of_cell), identity, rows, has_plain, opens_run, info)


def _mismatch(case: Case) -> Seen | None:
    wrong = case.good[metrics.mismatched(case.good)]
    if not len(wrong):
        return None
    tally = f"{len(wrong)} of {answers(case.good)}"
    counts = {"num_answers": len(wrong), "num_all": len(case.good)}
    audited = wrong[wrong["audit"] == "mismatch"]
    if len(audited):
        text = f"{tally} are not the published model's own output; the first is {_departure(audited.iloc[0], 'audit')}"
        remedy = "rounding does not explain this: it is a bug in the engine; do not use these numbers"
        return case.seen("mismatch", text, Remedy("engine", remedy), **counts)
    at = _departure(wrong.iloc[0], "divergence")
    if case.is_baseline:
        text = f"plain decoding disagrees with itself in {tally}; the first is {at}"
        remedy = "the control failed: use --dtype float32, or find out what makes plain decoding random"
        return case.seen("mismatch", text, Remedy("control", remedy), **counts)
    text = f"{tally} differ from the plain answer; the first is {at}"
    remedy = "rounding does not explain this: it is a bug; do not use these numbers"
    return case.seen("mismatch", text, Remedy("method", remedy), **counts)


def _departure(row: Any, kind: str) -> str:
    """Which answer leaves what it should be, where, and how far; `kind` names the columns, divergence or audit."""
    index = row["first_divergence" if kind == "divergence" else "audit_index"]
    gap, tolerance = (None if isnan(row[name]) else row[name] for name in (f"{kind}_gap", f"{kind}_tolerance"))
    place = "" if isnan(index) else f" {Divergence(int(index), gap, tolerance)}"
    return f"prompt {row['prompt_id']} turn {row['turn']}{place}"


def _failed(case: Case) -> Seen | None:
    errors = case.rows["error"].dropna()
    if not len(errors):
        return None
    first = (errors.iloc[0].splitlines() or ["no message"])[0]
    text = (
        f"{len(errors)} of {answers(case.rows)} failed and are left out of all numbers; the first error: {first[:160]}"
    )
    remedy = "fix the cause and run again with a new --out"
    return case.seen("failed", text, remedy, num_answers=len(errors), num_all=len(case.rows), error=first)


def _no_baseline(case: Case) -> Seen | None:
    if case.has_plain or not case.cell.num_prompts:
        return None
    text = "there are no plain answers (ar) to compare with, so there is no speed-up"
    remedy = Remedy("unfinished", "finish the run with --resume, or run it again")
    if not metrics.has_baseline(case.identity):
        remedy = Remedy("plain_server", "give a server that drafts nothing, too: --server plain=URL")
        if not case.good["audit"].notna().any():
            text += ", and nothing says whether these answers are the model's own"
            judge = f"{remedy.text}; and --model or --target with the same weights, so that a judge reads the answers"
            remedy = Remedy("plain_server_and_judge", judge)
    return case.seen("no_baseline", text, remedy)


def _near_ties(case: Case) -> Seen | None:
    ties = case.good[(case.good["exactness"] == "near_tie") | (case.good["audit"] == "near_tie")]
    if not len(ties):
        return None
    gap = ties[["divergence_gap", "audit_gap"]].max(axis=None)
    apart = "" if isnan(gap) else f", at most {gap:.2g} logits apart"
    text = f"{len(ties)} of {answers(case.good)} chose the other of two tokens that only rounding separates{apart}"
    remedy = "rounding explains this; --dtype float32 avoids it"
    return case.seen("near_tie", text, remedy, num_answers=len(ties), num_all=len(case.good), gap=_known(gap))


def _lossy(case: Case) -> Seen | None:
    if not is_lossy(case.cell.method) or not case.cell.num_prompts:
        return None
    text = "the method does not keep the target's output: its speed-up is for different answers, which were only scored"
    remedy = "compare its passed % with that of plain decoding, on suites with a scorer"
    return case.seen("lossy", text, remedy)


def _nothing_drafted(case: Case) -> Seen | None:
    if case.is_baseline or not never_drafts(case):
        return None
    num_rounds = int(case.good["num_rounds"].sum())
    where = f"{num_rounds} rounds" if num_rounds else answers(case.good)
    more = f"{tokens_a_round(case.cell, 'more')}, and check that the draft belongs to this model"
    remedy = Remedy("more_tokens", more, option_of(case.cell.method))
    if not has_draft(case.cell.method):
        remedy = REPEATS
    if case.identity.servers:
        remedy = Remedy("draft_of_server", "start its server with a draft, and read in its log whether it loaded it")
    return case.seen("nothing_drafted", f"no token was drafted in {where}", remedy, num_rounds=num_rounds)


def _other_mode(case: Case) -> Seen | None:
    """The first cause of low acceptance: a draft that has only seen answers that think, or only answers that do not."""
    trained, thinking = case.draft.trained_thinking, case.cell.settings.thinking
    if trained is None or thinking is None or trained == thinking:
        return None
    mode = {True: "on", False: "off"}
    text = f"thinking is {mode[thinking]} in this run, but the draft was trained with thinking {mode[trained]}"
    remedy = f"add --thinking {'on' if trained else 'off'}, or use another draft"
    code = "thinking_on" if trained else "thinking_off"
    return case.seen("other_mode", text, Remedy(code, remedy), thinking=thinking, trained_thinking=trained)


def _unpinned(case: Case) -> Seen | None:
    parts = case.identity.unpinned
    if not case.is_baseline or not parts:
        return None
    commits = [str(case.identity.revisions.get(part)) for part in parts]
    text = f"{' and '.join(parts)} came from the hub by names that can move; here they were {' and '.join(commits)}"
    remedy = "to measure the same again, give these commits: ID@COMMIT"
    return case.seen_in_suite("unpinned", text, remedy, commits=dict(zip(parts, commits, strict=True)))


def _other_target(case: Case) -> Seen | None:
    verifier, target = case.draft.verifier, case.identity.target
    if not verifier or not target or last_part(verifier) == last_part(target):
        return None
    text = f"the draft was made for {verifier}, but this run's target is {target}"
    remedy = Remedy("other_target", f"expect lower acceptance than with --target {verifier}", (str(verifier),))
    return case.seen("other_target", text, remedy, verifier=verifier, target=target)


def last_part(name: str) -> str:
    """What tells models apart, however they are named: "Qwen/Qwen3-8B" and a folder qwen3-8b/ are one."""
    return name.rstrip("/").rpartition("/")[2].lower()


def _saturated(case: Case) -> Seen | None:
    # No round keeps all nodes of a tree, which are alternatives; every round of a lossy method keeps everything.
    if is_tree(case.cell.method) or is_probe(case.cell.method) or is_lossy(case.cell.method):
        return None
    # A backend that hides rounds tells of none which of its drafts were kept whole.
    num_drafting, num_whole = (int(case.good[name].fillna(0).sum()) for name in ("num_drafting", "num_whole"))
    if not num_drafting or num_whole <= SATURATED * num_drafting:
        return None
    text = f"{num_whole} of {num_drafting} rounds ({num_whole / num_drafting:.0%}) accept the whole draft"
    limit = ", if the draft was trained for more" if has_draft(case.cell.method) else ""
    code = "more_tokens_if_trained" if has_draft(case.cell.method) else "more_tokens"
    remedy = Remedy(code, tokens_a_round(case.cell, "more") + limit, option_of(case.cell.method))
    return case.seen("saturated", text, remedy, num_whole=num_whole, num_rounds=num_drafting)


def _truncated(case: Case) -> Seen | None:
    num_cut = int((case.good["finish_reason"] == "length").sum())
    if not case.is_first or num_cut <= TRUNCATED * len(case.good):
        return None
    text = f"{num_cut} of {answers(case.good)} were cut at the token limit"
    return case.seen_in_suite("truncated", text, "raise --max-new-tokens", num_answers=num_cut, num_all=len(case.good))


def _few_prompts(case: Case) -> Seen | None:
    if not case.is_first or case.cell.num_prompts >= MIN_PROMPTS:
        return None
    text = f"only {case.cell.num_prompts} prompts, too few to trust the interval"
    remedy = f"raise --limit to {MIN_PROMPTS} or more, or leave it out"
    return case.seen_in_suite("few_prompts", text, remedy, num_prompts=case.cell.num_prompts)


def _known(value: float) -> float | None:
    return None if isnan(value) else float(value)


def _code(case: Case) -> Seen | None:
    suite, how = case.identity.suites.get(case.cell.suite), case.identity.code
    if not case.is_first or how not in _CODE or suite is None or suite.scorer not in CODE_SCORERS:
        return None
    kind, text, remedy = _CODE[how]
    return case.seen_in_suite(kind, f"the answers are code, {text}", remedy)


_CODE = {
    "not run": ("code_not_run", f"which was not run and so is not scored: {sandbox.NO_CAGE}", sandbox.REMEDY),
    "unsafe": (
        "code_unsafe", "which ran without a cage and can have forged its verdict", "run it on a system that has a cage"
    ),
    "caged": (
        "code_by_heart", "judged by what it returns: an answer that knows the tests by heart has passed, too",
        "score questions that are younger than the model, too",
    ),
}  # fmt: skip
"""By how code was treated (`sandbox.how_run`)."""


CHECKS: tuple[Callable[[Case], Seen | None], ...] = (
    _mismatch, witnesses.proves_nothing, timing.slow_plain,
    servers.worse_answers, servers.plain_drafts, _failed, _no_baseline, servers.unjudged, _lossy,
    _near_ties, _nothing_drafted,
    repetition.loops, _other_mode, _other_target, speed.dead_draft, speed.unknown_text, speed.slower_than_plain,
    speed.unclear, _saturated, timing.first_is_slow, timing.outliers, timing.drift, _truncated, _few_prompts,
    speed.wide_interval, _code, servers.other_servers, servers.compared_by_text, servers.reused_prompts,
    servers.uncounted, servers.derived_rounds, timing.shared_machine, timing.unlike_machines, _unpinned,
    timing.shared_weights, timing.fallback, witnesses.untried,
)  # fmt: skip
