"""Findings about servers: missing reports, cached prompts, and answers that could not be judged."""

from __future__ import annotations

from math import isnan
from typing import Any

import numpy as np

from dflash_bench.analysis import metrics, stats
from dflash_bench.analysis.findings.base import CellContext, Observation, place_of
from dflash_bench.core import dialects
from dflash_bench.results.run_info import ServerEntry

WORSE_P = 0.01
"""Below this p, answers got worse; p is not adjusted for the methods and suites of a run, which may be a dozen."""


def plain_drafts(context: CellContext) -> Observation | None:
    drafted = context.succeeded["total_drafted"].sum()
    if not context.is_baseline or not drafted:
        return None
    return context.observe("plain_drafts", num_drafted=int(drafted))


def other_servers(context: CellContext) -> Observation | None:
    """Look for a method and a baseline on different servers, so that part of the speed-up is the server's."""
    plain, own = (_server(context, method) for method in ("ar", context.cell.method))
    if context.is_baseline or not plain or not own:
        return None
    then, now = (f"{server.dialect} {server.version or ''}".rstrip() for server in (plain, own))
    if then == now:
        return None
    return context.observe("other_servers", plain=then, own=now)


def unjudged(context: CellContext) -> Observation | None:
    differs = context.succeeded["exactness"] == "differs"
    if not differs.any():
        return None
    differing = context.succeeded[differs]
    first = differing.iloc[0]
    remedy = "judge" if isnan(first["num_hidden_tokens"]) else "token_ids"
    return context.observe("unjudged", remedy, **context.tally(differing), **place_of(first))


def worse_answers(context: CellContext) -> Observation | None:
    """Compare right answers on prompts that both answered: a lossless method may lose some only by chance."""
    if context.is_baseline:
        return None
    (plain, then), (own, now) = _right(context.succeeded_plain), _right(context.succeeded)
    both = then & now
    lost, gained = int((own < plain)[both].sum()), int((own > plain)[both].sum())
    p = stats.mcnemar(lost, gained)
    if p >= WORSE_P or lost <= gained:
        return None
    remedy = "judge" if context.identity.servers else "exactness"
    return context.observe("worse_answers", remedy, lost=lost, gained=gained, num_prompts=int(both.sum()), p=p)


def _right(succeeded: Any) -> tuple[Any, Any]:
    """Return the number of right answers to each prompt of the run, and whether any was scored, [prompts]."""
    passed, prompts = succeeded["passed"].to_numpy(), succeeded["prompt_id"].cat
    scored = ~np.isnan(passed)
    of, number = prompts.codes.to_numpy()[scored], len(prompts.categories)
    return np.bincount(of, passed[scored], number), np.bincount(of, minlength=number) > 0


def compared_by_text(context: CellContext) -> Observation | None:
    num = context.cell.as_text
    return context.observe("compared_by_text", num_answers=num, num_all=len(context.succeeded)) if num else None


def reused_prompts(context: CellContext) -> Observation | None:
    is_hit = context.succeeded["num_cached_tokens"] > 0
    server = context.identity.servers.get(context.cell.method)
    if not is_hit.any() or (server is not None and server.prefix_cache == dialects.REUSED):
        return None
    hits = context.succeeded[is_hit]
    tokens = int(hits["num_cached_tokens"].sum())
    remedy = _remedy(context, "reused_prompts")
    return context.observe("reused_prompts", remedy, **context.tally(hits), num_tokens=tokens)


def uncounted(context: CellContext) -> Observation | None:
    missing = context.succeeded["uncounted"].dropna()
    if context.is_baseline or not len(missing):
        return None
    remedy = _remedy(context, "uncounted")
    return context.observe("uncounted", remedy, **context.tally(missing), reason=str(missing.iloc[0]))


def no_decode_speed(context: CellContext) -> Observation | None:
    is_unknown = metrics.is_pace_unknown(context.succeeded)
    if not is_unknown.any():
        return None
    return context.observe("no_decode_speed", **context.tally(context.succeeded[is_unknown]))


def derived_rounds(context: CellContext) -> Observation | None:
    """Look for derived rounds, which are off by one where the limit cut the last round."""
    ways = context.succeeded["counted_by"].dropna().unique()
    derived_ways = [way for way in ways if (rule := dialects.rule_of(way)) and rule.is_derived]
    if context.is_baseline or not derived_ways:
        return None
    derived = context.succeeded[context.succeeded["counted_by"].isin(derived_ways)]
    num_cut = int((derived["finish_reason"] == "length").sum())
    by, remedy = str(derived["counted_by"].iloc[0]), _remedy(context, "uncounted")
    return context.observe("derived_rounds", remedy, counted_by=by, **context.tally(derived), num_cut=num_cut)


def _remedy(context: CellContext, code: str) -> str:
    """Return the cell's dialect if it declares a remedy for this code."""
    server = _server(context, context.cell.method)
    dialect = str(server.dialect) if server else ""
    return "other_server" if dialects.remedy(dialect, code) is None else dialect


def _server(context: CellContext, method: str) -> ServerEntry | None:
    return context.identity.servers.get(method)
