"""Findings: weak numbers and faults of a run, each with the numbers that show it and a remedy.

`CHECKS` is the complete list. A check looks at one cell, or at one suite if all methods share the fault, and returns an
observation or None. Checks read the rows again, because a cell no longer holds what makes its numbers weak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isnan
from typing import Any

from dflash_bench.analysis import metrics
from dflash_bench.analysis.findings import servers, speed, timing, witnesses
from dflash_bench.analysis.findings.base import MIN_PROMPTS, CellContext, Finding, Observation, Remedy, answers
from dflash_bench.analysis.findings.speed import DEAD_AL, REPEATS, never_drafts, option_of, tokens_per_round
from dflash_bench.analysis.metrics import BASELINE, Cell
from dflash_bench.core.methods import has_draft, is_imposed, is_lossy, is_probe, is_tree
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
    """Return the findings of a run, faults before weaknesses; observations with the same codes share a finding.

    `identity` is that of `info`, which has what `run.json` holds besides.
    """
    plain = {(cell.suite, cell.settings) for cell in cells if cell.method == BASELINE and cell.num_prompts}
    first = tuple(rows[["suite", "settings_id"]].iloc[int(rows["order"].to_numpy().argmin())])
    contexts = []
    for cell in cells:
        of_cell = metrics.select(rows, cell.key)
        contexts.append(CellContext(
            cell, of_cell, metrics.without_errors(of_cell), identity or UNKNOWN, rows,
            (cell.suite, cell.settings) in plain, (cell.suite, cell.settings.id) == first, info,
        ))  # fmt: skip
    alike: dict[tuple[object, ...], list[Observation]] = {}
    for found in (check(context) for check in CHECKS for context in contexts):
        if found is not None:
            remedy = found.remedy.code, found.remedy.about
            alike.setdefault((found.kind, *remedy, found.place if found.is_own else None), []).append(found)
    return [_finding(group) for group in alike.values()]


def _finding(alike: Sequence[Observation]) -> Finding:
    first, *others = alike
    also = f"; also {_wheres(others)}" if others else ""
    return Finding(
        first.kind, f"{_wheres([first])}: {first.text}{also}", first.remedy.text, tuple(seen.place for seen in alike),
        first.remedy.code, tuple(seen.values for seen in alike),
    )  # fmt: skip


def _wheres(others: Sequence[Observation]) -> str:
    """Return suites with their methods: `gsm8k (hub) eagle3, math500 (hub) dflash and eagle3`."""
    by_suite: dict[tuple[str, str], tuple[str, list[str]]] = {}
    for seen in others:
        by_suite.setdefault((seen.place.suite, seen.place.settings_id), (seen.label, []))[1].append(seen.place.method)
    return ", ".join(" ".join(filter(None, [label, " and ".join(methods)])) for label, methods in by_suite.values())


def _mismatch(context: CellContext) -> Observation | None:
    wrong = context.succeeded[metrics.mismatched(context.succeeded)]
    if not len(wrong):
        return None
    tally, counts = context.tally(wrong)
    audited = wrong[wrong["audit"] == "mismatch"]
    if len(audited):
        text = f"{tally} are not the published model's own output; the first is {_departure(audited.iloc[0], 'audit')}"
        remedy = "rounding does not explain this: the engine has a bug; do not use these numbers"
        return context.observe("mismatch", text, Remedy("engine", remedy), **counts)
    at = _departure(wrong.iloc[0], "divergence")
    if context.is_baseline:
        text = f"plain decoding disagrees with itself in {tally}; the first is {at}"
        remedy = "the control failed: use --dtype float32, or find out what makes plain decoding random"
        return context.observe("mismatch", text, Remedy("control", remedy), **counts)
    text = f"{tally} differ from the plain answer; the first is {at}"
    remedy = "rounding does not explain this: the method has a bug; do not use these numbers"
    return context.observe("mismatch", text, Remedy("method", remedy), **counts)


def _departure(row: Any, kind: str) -> str:
    """Name the answer, the token where it departs, and its gap; `kind` names the columns, divergence or audit."""
    index = row["first_divergence" if kind == "divergence" else "audit_index"]
    gap, tolerance = (None if isnan(row[name]) else row[name] for name in (f"{kind}_gap", f"{kind}_tolerance"))
    place = "" if isnan(index) else f" {Divergence(int(index), gap, tolerance)}"
    return f"prompt {row['prompt_id']} turn {row['turn']}{place}"


def _failed(context: CellContext) -> Observation | None:
    errors = context.rows["error"].dropna()
    if not len(errors):
        return None
    first = (errors.iloc[0].splitlines() or ["no message"])[0]
    tally = f"{len(errors)} of {answers(context.rows)}"
    text = f"{tally} failed and are left out of all numbers; the first error: {first[:160]}"
    remedy = "fix the cause and run again with a new --out"
    return context.observe("failed", text, remedy, num_answers=len(errors), num_all=len(context.rows), error=first)


def _no_baseline(context: CellContext) -> Observation | None:
    if context.has_plain or not context.cell.num_prompts:
        return None
    text = "there are no answers of plain decoding (ar), so there is no speed-up"
    remedy = Remedy("unfinished", "finish the run with --resume, or run it again")
    if not metrics.has_baseline(context.identity):
        remedy = Remedy("plain_server", "also give a server that drafts nothing: --server plain=URL")
        if not context.succeeded["audit"].notna().any():
            text += ", and nothing shows whether these answers are the model's own"
            judge = f"{remedy.text}; and --model or --target with the same weights, so that a judge reads the answers"
            remedy = Remedy("plain_server_and_judge", judge)
    return context.observe("no_baseline", text, remedy)


def _near_ties(context: CellContext) -> Observation | None:
    good = context.succeeded
    ties = good[(good["exactness"] == "near_tie") | (good["audit"] == "near_tie")]
    if not len(ties):
        return None
    (tally, counts), gap = context.tally(ties), ties[["divergence_gap", "audit_gap"]].max(axis=None)
    apart = "" if isnan(gap) else f", at most {gap:.2g} logits apart"
    text = f"{tally} chose the other of two tokens that only rounding separates{apart}"
    remedy = "rounding explains this; --dtype float32 avoids it"
    return context.observe("near_tie", text, remedy, **counts, gap=None if isnan(gap) else float(gap))


def _lossy(context: CellContext) -> Observation | None:
    if not is_lossy(context.cell.method) or not context.cell.num_prompts:
        return None
    if is_imposed(context.cell.method):
        return _imposed(context)
    text = "the method changes the target's output, so its speed-up is for different answers, which were only scored"
    remedy = "compare its passed % with that of plain decoding, on suites with a scorer"
    return context.observe("lossy", text, remedy)


def _imposed(context: CellContext) -> Observation:
    method, al = context.identity.methods.get(context.cell.method), context.cell.value("al.pooled")
    source = "from a profile" if "profile=" in context.cell.method else "at given rates"
    length = 1 + sum(method.imposed) if method else None
    told = "" if length is None else f", {length:.2f} tokens a round"
    counted = "" if al is None else f" (al.pooled {al:.2f}; the end of an answer cuts its last round)"
    text = (
        f"acceptance was imposed {source}{told}{counted}: its server accepted drafts right or wrong, so these are not "
        "the model's answers, and were neither judged nor scored"
    )
    remedy = "use its times alone; a draft's own acceptance is measured by its method"
    return context.observe("imposed", text, remedy, length=length, al_pooled=al)


def _nothing_drafted(context: CellContext) -> Observation | None:
    if context.is_baseline or not never_drafts(context):
        return None
    num_rounds = int(context.succeeded["num_rounds"].sum())
    where = f"{num_rounds} rounds" if num_rounds else answers(context.succeeded)
    more = f"{tokens_per_round(context.cell, 'more')}, and check that the draft belongs to this model"
    remedy = Remedy("more_tokens", more, option_of(context.cell.method))
    if not has_draft(context.cell.method):
        remedy = REPEATS
    if context.identity.servers:
        remedy = Remedy(
            "draft_of_server", "start its server with a draft, and check in its log that the draft was loaded"
        )
    return context.observe("nothing_drafted", f"no token was drafted in {where}", remedy, num_rounds=num_rounds)


def _other_mode(context: CellContext) -> Observation | None:
    """The most common cause of low acceptance: a draft trained only with, or only without, thinking."""
    trained, thinking = context.draft.trained_thinking, context.cell.settings.thinking
    if trained is None or thinking is None or trained == thinking:
        return None
    mode = {True: "on", False: "off"}
    text = f"thinking is {mode[thinking]} in this run, but the draft was trained with thinking {mode[trained]}"
    remedy = f"add --thinking {'on' if trained else 'off'}, or use another draft"
    code = "thinking_on" if trained else "thinking_off"
    return context.observe("other_mode", text, Remedy(code, remedy), thinking=thinking, trained_thinking=trained)


def _unpinned(context: CellContext) -> Observation | None:
    parts = context.identity.unpinned
    if not context.is_baseline or not parts:
        return None
    commits = [str(context.identity.revisions.get(part)) for part in parts]
    text = f"{' and '.join(parts)} came from the hub by names that can change; here they were {' and '.join(commits)}"
    remedy = "to measure the same again, name these commits: ID@COMMIT"
    return context.observe_suite("unpinned", text, remedy, commits=dict(zip(parts, commits, strict=True)))


def _other_target(context: CellContext) -> Observation | None:
    verifier, target = context.draft.verifier, context.identity.target
    if not verifier or not target or last_part(verifier) == last_part(target):
        return None
    text = f"the draft was made for {verifier}, but this run's target is {target}"
    remedy = Remedy("other_target", f"expect lower acceptance than with --target {verifier}", (str(verifier),))
    return context.observe("other_target", text, remedy, verifier=verifier, target=target)


def last_part(name: str) -> str:
    """Return what identifies a model however it is named: "Qwen/Qwen3-8B" and a folder qwen3-8b/ are the same."""
    return name.rstrip("/").rpartition("/")[2].lower()


def _saturated(context: CellContext) -> Observation | None:
    # No round accepts all nodes of a tree, which are alternatives; every round of a lossy method accepts everything.
    if is_tree(context.cell.method) or is_probe(context.cell.method) or is_lossy(context.cell.method):
        return None
    # A backend that hides rounds does not report which drafts were accepted as a whole.
    num_drafting, num_whole = (int(context.succeeded[name].fillna(0).sum()) for name in ("num_drafting", "num_whole"))
    if not num_drafting or num_whole <= SATURATED * num_drafting:
        return None
    text = f"{num_whole} of {num_drafting} rounds ({num_whole / num_drafting:.0%}) accept the whole draft"
    limit = ", if the draft was trained for more" if has_draft(context.cell.method) else ""
    code = "more_tokens_if_trained" if has_draft(context.cell.method) else "more_tokens"
    remedy = Remedy(code, tokens_per_round(context.cell, "more") + limit, option_of(context.cell.method))
    return context.observe("saturated", text, remedy, num_whole=num_whole, num_rounds=num_drafting)


def _truncated(context: CellContext) -> Observation | None:
    cut = context.succeeded[context.succeeded["finish_reason"] == "length"]
    if not context.represents_suite or len(cut) <= TRUNCATED * len(context.succeeded):
        return None
    tally, counts = context.tally(cut)
    return context.observe_suite(
        "truncated", f"{tally} were cut at the token limit", "raise --max-new-tokens", **counts
    )


def _few_prompts(context: CellContext) -> Observation | None:
    number = context.cell.num_units
    if not context.represents_suite or not 0 < number < MIN_PROMPTS:
        return None
    what = "sessions" if number < context.cell.num_prompts else "prompts"
    text = f"only {number} {what}, too few to trust the interval"
    remedy = f"raise --limit to {MIN_PROMPTS} or more, or leave it out"
    return context.observe_suite("few_prompts", text, remedy, num_prompts=number)


def _code(context: CellContext) -> Observation | None:
    suite, how = context.identity.suites.get(context.cell.suite), context.identity.code
    if not context.represents_suite or how not in _CODE or suite is None or suite.scorer not in CODE_SCORERS:
        return None
    kind, text, remedy = _CODE[how]
    return context.observe_suite(kind, f"the answers are code, {text}", remedy)


_CODE = {
    "not run": ("code_not_run", f"which was not run and so is not scored: {sandbox.NO_SANDBOX}", sandbox.REMEDY),
    "unsafe": (
        "code_unsafe", "which ran without a sandbox and can have forged its verdict",
        "run it on a system that has a sandbox",
    ),
    "caged": (
        "code_by_heart", "judged by what it returns: an answer that has memorised the tests also passes",
        "also score questions that are newer than the model",
    ),
}  # fmt: skip
"""By how code was run (`sandbox.how_run`)."""


CHECKS: tuple[Callable[[CellContext], Observation | None], ...] = (
    _mismatch, witnesses.proves_nothing, timing.slow_plain,
    servers.worse_answers, servers.plain_drafts, _failed, _no_baseline, servers.unjudged, _lossy,
    _near_ties, _nothing_drafted,
    timing.loops, _other_mode, _other_target, speed.dead_draft, speed.unknown_text, speed.slower_than_plain,
    speed.unclear, _saturated, timing.first_is_slow, timing.outliers, timing.drift, _truncated, _few_prompts,
    speed.wide_interval, _code, servers.other_servers, servers.compared_by_text, servers.reused_prompts,
    servers.uncounted, servers.derived_rounds, timing.shared_machine, timing.unlike_machines, _unpinned,
    timing.shared_weights, timing.fallback, timing.torch_kernels, witnesses.untried,
)  # fmt: skip
