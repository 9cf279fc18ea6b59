"""Findings about servers: what they do not report, prompts they had cached, and answers that could not be judged."""

from __future__ import annotations

from typing import Any

from dflash_bench.analysis import metrics, stats
from dflash_bench.analysis.findings.base import CellContext, Observation, Remedy
from dflash_bench.core import dialects
from dflash_bench.core.types import CellKey
from dflash_bench.results.run_info import ServerEntry

WORSE_P = 0.01
"""Below this p, answers got worse; p is not adjusted for the methods and suites of a run, which may be a dozen."""


def plain_drafts(context: CellContext) -> Observation | None:
    drafted = context.succeeded["total_drafted"].sum()
    if not context.is_baseline or not drafted:
        return None
    text = f"the server for plain decoding drafted {int(drafted)} tokens, so it does not decode plainly"
    remedy = "start that server without speculation and run again; do not use these speed-ups"
    return context.observe("plain_drafts", text, remedy, num_drafted=int(drafted))


def other_servers(context: CellContext) -> Observation | None:
    """Look for a method and a baseline on different servers, so that part of the speed-up is the server's."""
    plain, own = (_server(context, method) for method in ("ar", context.cell.method))
    if context.is_baseline or not plain or not own:
        return None
    then, now = (f"{server.dialect} {server.version or ''}".rstrip() for server in (plain, own))
    if then == now:
        return None
    text = f"plain decoding was measured on {then}, but this method on {now}: part of the speed-up is the server's"
    return context.observe("other_servers", text, "measure both on the same version of one server", plain=then, own=now)


def unjudged(context: CellContext) -> Observation | None:
    differing = context.succeeded[context.succeeded["exactness"] == "differs"]
    if not len(differing):
        return None
    (tally, counts), first = context.tally(differing), differing.iloc[0]
    whose = "another plain answer to the same prompt" if context.is_baseline else "the plain answer"
    text = (
        f"{tally} differ from {whose}, first prompt {first['prompt_id']} turn {first['turn']}, and nothing here could "
        "judge whether rounding explains it"
    )
    remedy = Remedy("judge", "give --model or --target with the same weights, and --dtype as the server computes")
    if first["num_hidden_tokens"] == first["num_hidden_tokens"]:  # not NaN
        remedy = Remedy("token_ids", "use a server that returns token ids, which can be judged")
    return context.observe("unjudged", text, remedy, **counts)


def worse_answers(context: CellContext) -> Observation | None:
    """Compare right answers on prompts that both answered: a lossless method may lose some only by chance."""
    if context.is_baseline:
        return None
    by_question = _right(context.run, context.cell.key._replace(method="ar")), _right(context.run, context.cell.key)
    plain, own = by_question[0].align(by_question[1], join="inner")
    lost, gained = int((own < plain).sum()), int((own > plain).sum())
    p = stats.mcnemar(lost, gained)
    if p >= WORSE_P or lost <= gained:
        return None
    change = stats.paired_difference(lost, gained, len(own))
    low, high = 100 * (change.low or 0), 100 * (change.high or 0)
    text = (
        f"answers got worse: {lost} of {len(own)} prompts that plain decoding gets right are wrong, and {gained} the "
        f"other way ({100 * change.value:+.1f} points [{low:+.1f}, {high:+.1f}], McNemar p = {p:.2g})"
    )
    remedy = Remedy(
        "judge",
        "give --model or --target with the same weights, so that a judge says where its tokens depart from the model's",
    )
    if not context.identity.servers:
        exactness = "see exactness in 'compare': a lossless method gives the target's own answers"
        remedy = Remedy("exactness", exactness)
    return context.observe("worse_answers", text, remedy, lost=lost, gained=gained, num_prompts=len(own), p=p)


def _right(rows: Any, key: CellKey) -> Any:
    """Return the number of right answers of each scored prompt, as a series by prompt."""
    cell = metrics.without_errors(metrics.select(rows, key))
    scored = cell[cell["passed"].notna()]
    return scored.groupby(scored["prompt_id"].astype(str))["passed"].sum()


def compared_by_text(context: CellContext) -> Observation | None:
    hidden = context.succeeded[context.succeeded["num_hidden_tokens"].notna() & context.succeeded["exactness"].notna()]
    if not len(hidden):
        return None
    tally, counts = context.tally(hidden)
    text = f"{tally} were compared by their text, because the server does not report token ids"
    return context.observe(
        "compared_by_text", text, "different tokens can make the same text; only token ids show it", **counts
    )


def reused_prompts(context: CellContext) -> Observation | None:
    hits = context.succeeded[context.succeeded["num_cached_tokens"].fillna(0) > 0]
    server = context.identity.servers.get(context.cell.method)
    if not len(hits) or (server is not None and server.prefix_cache == dialects.REUSED):
        return None
    (tally, counts), tokens = context.tally(hits), int(hits["num_cached_tokens"].sum())
    text = (
        f"{tally} reused {tokens} tokens of prompts that the server had cached: its time to the first token, and "
        "tps.e2e, are too good"
    )
    remedy = _remedy(context, "reused_prompts", "switch the server's prefix cache off")
    return context.observe("reused_prompts", text, remedy, **counts, num_tokens=tokens)


def uncounted(context: CellContext) -> Observation | None:
    missing = context.succeeded["uncounted"].dropna()
    if context.is_baseline or not len(missing):
        return None
    tally, counts = context.tally(missing)
    text = f"acceptance is not available for {tally}: {missing.iloc[0]}"
    remedy = _remedy(context, "uncounted", "speed and exactness need no counts; use a server that reports its rounds")
    return context.observe("uncounted", text, remedy, **counts)


def derived_rounds(context: CellContext) -> Observation | None:
    """Look for derived rounds, which are off by one where the limit cut the last round."""
    ways = context.succeeded["counted_by"].dropna().unique()
    derived_ways = [way for way in ways if (rule := dialects.rule_of(way)) and rule.is_derived]
    derived = context.succeeded[context.succeeded["counted_by"].isin(derived_ways)]
    if context.is_baseline or not len(derived):
        return None
    num_cut = int((derived["finish_reason"] == "length").sum())
    by = derived["counted_by"].iloc[0]
    tally, counts = context.tally(derived)
    text = (
        f"rounds of {tally} were derived ({by}), which is off by one where the limit cut the last round; it cut "
        f"{num_cut} of them"
    )
    remedy = _remedy(context, "uncounted", "use a version of the server that reports its rounds")
    return context.observe("derived_rounds", text, remedy, counted_by=str(by), **counts, num_cut=num_cut)


def _remedy(context: CellContext, code: str, otherwise: str) -> Remedy:
    """Return what the cell's dialect declares for this code."""
    server = _server(context, context.cell.method)
    dialect = str(server.dialect) if server else ""
    text = dialects.remedy(dialect, code)
    return Remedy("other_server", otherwise) if text is None else Remedy(dialect, text)


def _server(context: CellContext, method: str) -> ServerEntry | None:
    return context.identity.servers.get(method)
