"""Findings about servers: what they do not report, prompts they had cached, and answers that could not be judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_bench.analysis import metrics, stats
from dflash_bench.analysis.findings.base import CellContext, Observation, Remedy
from dflash_bench.core.types import CellKey

DERIVED = frozenset(("llamacpp.timings", "sglang.derived"))
"""Ways of counting rounds that the server does not report, so that they are derived."""
WORSE_P = 0.01
"""Below this p, answers got worse; p is not adjusted for the methods and suites of a run, which may be a dozen."""
CACHE_REMEDIES = {
    "vllm": "start vLLM with VLLM_SERVER_DEV_MODE=1, so that its cache can be emptied, or with "
    "--no-enable-prefix-caching",
    "sglang": "start SGLang with --disable-radix-cache",
}
COUNT_REMEDIES = {
    "vllm": "start vLLM with --per-request-spec-decode-metrics summary, or measure one answer at a time and keep "
    "others away",
    "llamacpp": "start llama.cpp with --metrics, and keep others away",
    "tensorrt_llm": "put 'per_request_spec_decode_stats: true' into the file for trtllm-serve --extra_llm_api_options",
    "lmdeploy": "start lmdeploy with --enable-metrics, measure one answer at a time, and keep others away",
}


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
    then, now = (f"{server.get('dialect')} {server.get('version') or ''}".rstrip() for server in (plain, own))
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
    if not context.identity.get("servers"):
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
    if not len(hits):
        return None
    (tally, counts), tokens = context.tally(hits), int(hits["num_cached_tokens"].sum())
    text = (
        f"{tally} reused {tokens} tokens of prompts that the server had cached: its time to the first token, and "
        "tps.e2e, are too good"
    )
    remedy = CACHE_REMEDIES.get(_dialect(context), "switch the server's prefix cache off")
    remedy_of_dialect = _for_dialect(context, remedy, CACHE_REMEDIES)
    return context.observe("reused_prompts", text, remedy_of_dialect, **counts, num_tokens=tokens)


def uncounted(context: CellContext) -> Observation | None:
    missing = context.succeeded["uncounted"].dropna()
    if context.is_baseline or not len(missing):
        return None
    tally, counts = context.tally(missing)
    text = f"acceptance is not available for {tally}: {missing.iloc[0]}"
    remedy = COUNT_REMEDIES.get(
        _dialect(context),
        "speed and exactness need no counts; vLLM, SGLang, llama.cpp, TensorRT-LLM and lmdeploy report them",
    )
    return context.observe("uncounted", text, _for_dialect(context, remedy, COUNT_REMEDIES), **counts)


def derived_rounds(context: CellContext) -> Observation | None:
    """Look for derived rounds, which are off by one where the limit cut the last round."""
    derived = context.succeeded[context.succeeded["counted_by"].isin(DERIVED)]
    if context.is_baseline or not len(derived):
        return None
    num_cut = int((derived["finish_reason"] == "length").sum())
    by = derived["counted_by"].iloc[0]
    tally, counts = context.tally(derived)
    text = (
        f"rounds of {tally} were derived ({by}), which is off by one where the limit cut the last round; it cut "
        f"{num_cut} of them"
    )
    remedy = COUNT_REMEDIES.get(_dialect(context), "a newer version of the server reports them")
    remedy_of_dialect = _for_dialect(context, remedy, COUNT_REMEDIES)
    return context.observe("derived_rounds", text, remedy_of_dialect, counted_by=str(by), **counts, num_cut=num_cut)


def _for_dialect(context: CellContext, text: str, known: Mapping[str, str]) -> Remedy:
    dialect = _dialect(context)
    return Remedy(dialect if dialect in known else "other_server", text)


def _server(context: CellContext, method: str) -> Mapping[str, Any]:
    servers: Mapping[str, Mapping[str, Any]] = context.identity.get("servers") or {}
    return servers.get(method, {})


def _dialect(context: CellContext) -> str:
    return str(_server(context, context.cell.method).get("dialect"))
