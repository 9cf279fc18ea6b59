"""Findings: weak numbers and faults of a run, each with the numbers that show it and the code of a remedy.

`CHECKS` is the complete list. A check looks at one cell, or at one suite if all methods share the fault, and returns an
observation or None. Checks read the rows again, because a cell no longer holds what makes its numbers weak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isnan
from typing import Any

from dflash_bench.analysis.cells import Cell, by_cell, has_baseline, mismatched, summarise, without_errors
from dflash_bench.analysis.findings import servers, speed, timing
from dflash_bench.analysis.findings.base import CellContext, Observation, place_of
from dflash_bench.analysis.findings.speed import DEAD_AL, never_drafts
from dflash_bench.analysis.metrics import BASELINE
from dflash_bench.analysis.stats import MIN_PROMPTS
from dflash_bench.core.measurement import measurements
from dflash_bench.core.methods import has_draft, is_imposed, is_lossy, is_probe, is_tree
from dflash_bench.core.types import CODE_SCORERS
from dflash_bench.results.run_info import RunIdentity, RunInfo
from dflash_bench.results.table import RunTable

__all__ = ["CHECKS", "DEAD_AL", "cells_of", "forbidding", "last_part", "observe"]

SATURATED = 0.5
"""Share of rounds that keep the whole draft."""
TRUNCATED = 0.10
"""Share of answers cut at the limit."""
UNKNOWN = RunIdentity(model="", dtype="", settings=[])


def cells_of(results: RunTable) -> list[Cell]:
    """Summarise a run; cells whose speed-up a finding forbids have no speed-up."""
    cells = summarise(results.rows, results.info.identity)
    seen = forbidding(results, cells)
    codes = [next((one.kind for one in seen if one.forbids_speedup_of(cell)), "") for cell in cells]
    return [cell.without_speedup(code) if code else cell for cell, code in zip(cells, codes, strict=True)]


def forbidding(results: RunTable, cells: Sequence[Cell]) -> list[Observation]:
    """Return the observations that forbid speed-ups of a run."""
    return [
        seen for seen in _seen(_FORBIDDING, results.rows, cells, results.info.identity, results.info) if seen.forbids
    ]


def observe(
    rows: Any, cells: Sequence[Cell], identity: RunIdentity | None = None, info: RunInfo | None = None
) -> list[Observation]:
    """Return the observations of all checks on a run, faults before weaknesses.

    `identity` is the identity of `info`, which holds the rest of `run.json`.
    """
    return _seen(CHECKS, rows, cells, identity, info)


def _seen(
    checks: Sequence[Check], rows: Any, cells: Sequence[Cell], identity: RunIdentity | None, info: RunInfo | None
) -> list[Observation]:
    plain = {(cell.suite, cell.settings) for cell in cells if cell.method == BASELINE and cell.num_prompts}
    first = tuple(rows[["suite", "settings_id"]].iloc[int(rows["order"].to_numpy().argmin())])
    of_cells = by_cell(rows)
    succeeded = {key: without_errors(of_cell) for key, of_cell in of_cells.items()}
    contexts = [
        CellContext(
            cell,
            of_cells[cell.key],
            succeeded[cell.key],
            identity or UNKNOWN,
            rows,
            succeeded,
            (cell.suite, cell.settings) in plain,
            (cell.suite, cell.settings.id) == first,
            info,
        )
        for cell in cells
    ]
    return [seen for check in checks for context in contexts if (seen := check(context))]


def _mismatch(context: CellContext) -> Observation | None:
    is_wrong = mismatched(context.succeeded)
    if not is_wrong.any():
        return None
    wrong = context.succeeded[is_wrong]
    audited = wrong[wrong["audit"] == "mismatch"]
    if len(audited):
        return context.observe("mismatch", "engine", **context.tally(wrong), **_departure(audited.iloc[0], "audit"))
    remedy = "control" if context.is_baseline else "method"
    return context.observe("mismatch", remedy, **context.tally(wrong), **_departure(wrong.iloc[0], "divergence"))


def _departure(row: Any, kind: str) -> dict[str, Any]:
    """Return the answer, the index of its first departing token, and the gap; `kind` is divergence or audit."""
    index = row["first_divergence" if kind == "divergence" else "audit_index"]
    gap, tolerance = (None if isnan(row[name]) else float(row[name]) for name in (f"{kind}_gap", f"{kind}_tolerance"))
    return {**place_of(row), "index": None if isnan(index) else int(index), "gap": gap, "tolerance": tolerance}


def _failed(context: CellContext) -> Observation | None:
    errors = context.rows["error"].dropna()
    if not len(errors):
        return None
    first = (errors.iloc[0].splitlines() or ["no message"])[0]
    return context.observe("failed", num_answers=len(errors), num_all=len(context.rows), error=first)


def _no_baseline(context: CellContext) -> Observation | None:
    if context.has_plain or not context.cell.num_prompts:
        return None
    if has_baseline(context.identity):
        return context.observe("no_baseline", "unfinished")
    is_judged = context.succeeded["audit"].notna().any()
    return context.observe("no_baseline", "plain_server" if is_judged else "plain_server_and_judge")


def _near_ties(context: CellContext) -> Observation | None:
    good = context.succeeded
    is_tie = (good["exactness"] == "near_tie") | (good["audit"] == "near_tie")
    if not is_tie.any():
        return None
    ties = good[is_tie]
    gap = ties[["divergence_gap", "audit_gap"]].max(axis=None)
    return context.observe("near_tie", **context.tally(ties), gap=None if isnan(gap) else float(gap))


def _lossy(context: CellContext) -> Observation | None:
    if not is_lossy(context.cell.method) or not context.cell.num_prompts:
        return None
    return _imposed(context) if is_imposed(context.cell.method) else context.observe("lossy")


def _imposed(context: CellContext) -> Observation:
    method = context.identity.methods.get(context.cell.method)
    length = 1 + sum(method.imposed) if method else None
    return context.observe("imposed", length=length, al_pooled=context.cell.value("al.pooled"))


def _nothing_drafted(context: CellContext) -> Observation | None:
    if context.is_baseline or not never_drafts(context):
        return None
    num_rounds = int(context.succeeded["num_rounds"].sum())
    remedy = "trained_draft"
    if has_draft(context.cell.method):
        remedy = "draft_of_server" if context.identity.servers else "more_tokens"
    counts = {"num_answers": len(context.succeeded), "num_rounds": num_rounds}
    return context.observe("nothing_drafted", remedy, **counts)


def _other_mode(context: CellContext) -> Observation | None:
    """Look for the most common cause of low acceptance: a draft trained only with, or only without, thinking."""
    trained, thinking = context.draft.trained_thinking, context.cell.settings.thinking
    if trained is None or thinking is None or trained == thinking:
        return None
    remedy = "thinking_on" if trained else "thinking_off"
    return context.observe("other_mode", remedy, thinking=thinking, trained_thinking=trained)


def _unpinned(context: CellContext) -> Observation | None:
    parts = context.identity.unpinned
    if not context.is_baseline or not parts:
        return None
    return context.observe_suite(
        "unpinned", commits={part: str(context.identity.revisions.get(part)) for part in parts}
    )


def _other_target(context: CellContext) -> Observation | None:
    verifier, target = context.draft.verifier, context.identity.target
    if not verifier or not target or last_part(verifier) == last_part(target):
        return None
    return context.observe("other_target", "other_target", verifier=verifier, target=target)


def last_part(name: str) -> str:
    """Return the part of a name that identifies the model: "Qwen/Qwen3-8B" and a folder qwen3-8b/ are the same."""
    return name.rstrip("/").rpartition("/")[2].lower()


def _saturated(context: CellContext) -> Observation | None:
    # No round accepts all nodes of a tree, which are alternatives; every round of a lossy method accepts everything.
    if is_tree(context.cell.method) or is_probe(context.cell.method) or is_lossy(context.cell.method):
        return None
    # A backend that hides rounds does not report which drafts were accepted as a whole.
    num_drafting, num_whole = (int(context.succeeded[name].fillna(0).sum()) for name in ("num_drafting", "num_whole"))
    if not num_drafting or num_whole <= SATURATED * num_drafting:
        return None
    remedy = "more_tokens_if_trained" if has_draft(context.cell.method) else "more_tokens"
    return context.observe("saturated", remedy, num_whole=num_whole, num_rounds=num_drafting)


def _truncated(context: CellContext) -> Observation | None:
    is_cut = context.succeeded["finish_reason"] == "length"
    if not context.represents_suite or is_cut.sum() <= TRUNCATED * len(context.succeeded):
        return None
    return context.observe_suite("truncated", **context.tally(context.succeeded[is_cut]))


def _few_prompts(context: CellContext) -> Observation | None:
    number = context.cell.num_units
    if not context.represents_suite or not 0 < number < MIN_PROMPTS:
        return None
    return context.observe_suite("few_prompts", num_prompts=number)


def _code(context: CellContext) -> Observation | None:
    suite, how = context.identity.suites.get(context.cell.suite), context.identity.code
    if not context.represents_suite or how not in _CODE or suite is None or suite.scorer not in CODE_SCORERS:
        return None
    return context.observe_suite(_CODE[how])


_CODE = {"not run": "code_not_run", "unsafe": "code_unsafe", "caged": "code_by_heart"}
"""Codes by the results of `sandbox.how_run`."""


Check = Callable[[CellContext], Observation | None]
_FORBIDDING: tuple[Check, ...] = (_mismatch, servers.plain_drafts, _nothing_drafted, timing.hidden_time)
CHECKS: tuple[Check, ...] = (
    _mismatch,
    timing.hidden_time,
    timing.clock_doubt,
    timing.slow_plain,
    timing.launch_bound,
    servers.worse_answers,
    servers.plain_drafts,
    _failed,
    _no_baseline,
    servers.unjudged,
    _lossy,
    _near_ties,
    _nothing_drafted,
    timing.loops,
    _other_mode,
    _other_target,
    speed.dead_draft,
    speed.unknown_text,
    speed.slower_than_plain,
    speed.unclear,
    _saturated,
    timing.first_is_slow,
    timing.outliers,
    timing.drift,
    _truncated,
    _few_prompts,
    speed.wide_interval,
    _code,
    servers.other_servers,
    servers.compared_by_text,
    servers.reused_prompts,
    servers.uncounted,
    servers.no_decode_speed,
    servers.derived_rounds,
    timing.shared_machine,
    timing.unlike_machines,
    _unpinned,
    timing.shared_weights,
    timing.fallback,
    timing.torch_kernels,
    timing.slow_paths,
    *(check for one in measurements() for check, _, _ in one.findings.values()),
)
