"""What weakens the numbers of servers: what they do not tell, what they had kept, and what nobody could judge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_bench.analysis import metrics, stats
from dflash_bench.analysis.findings.case import Case, Remedy, Seen, answers
from dflash_bench.core.types import CellKey
from dflash_bench.results.run_info import ServerEntry

DERIVED = frozenset(("llamacpp.timings", "sglang.derived"))
"""Counts of rounds that are not told, but worked out."""
WORSE_P = 0.01
"""Below this p, answers got worse: a run may have a dozen methods and suites, which are not adjusted for."""
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


def plain_drafts(case: Case) -> Seen | None:
    drafted = case.good["total_drafted"].sum()
    if not case.is_baseline or not drafted:
        return None
    text = f"the server for plain decoding drafted {int(drafted)} tokens: it is no plain decoding"
    remedy = "start that server without speculation, and run again; use no speed-up here"
    return case.seen("plain_drafts", text, remedy, num_drafted=int(drafted))


def other_servers(case: Case) -> Seen | None:
    """Then a speed-up is partly that of one server over another."""
    plain, own = (_server(case, method) for method in ("ar", case.cell.method))
    if case.is_baseline or not plain or not own:
        return None
    then, now = (f"{server.dialect} {server.version or ''}".rstrip() for server in (plain, own))
    if then == now:
        return None
    text = f"plain decoding was measured on {then}, and this on {now}: the speed-up is partly one of the servers"
    return case.seen("other_servers", text, "measure both on the same version of one server", plain=then, own=now)


def unjudged(case: Case) -> Seen | None:
    others = case.good[case.good["exactness"] == "differs"]
    if not len(others):
        return None
    first = others.iloc[0]
    whose = "another plain answer to the same prompt" if case.is_baseline else "the plain answer"
    text = (
        f"{len(others)} of {answers(case.good)} differ from {whose}, first prompt {first['prompt_id']} turn "
        f"{first['turn']}, and nothing here could judge whether rounding explains it"
    )
    remedy = Remedy("judge", "give --model or --target with the same weights, and --dtype as the server computes")
    if first["num_hidden_tokens"] == first["num_hidden_tokens"]:  # not NaN
        remedy = Remedy("token_ids", "use a server that returns token ids, which can be judged")
    return case.seen("unjudged", text, remedy, num_answers=len(others), num_all=len(case.good))


def worse_answers(case: Case) -> Seen | None:
    """Right answers, of the prompts that both answered: a lossless method must not lose any but by chance."""
    if case.is_baseline:
        return None
    by_question = _right(case.run, case.cell.key._replace(method="ar")), _right(case.run, case.cell.key)
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
        "give --model or --target with the same weights, so that a judge says where its tokens leave the model's",
    )
    if not case.identity.servers:
        exactness = "read what 'compare' says of exactness: a lossless method gives the target's own answers"
        remedy = Remedy("exactness", exactness)
    return case.seen("worse_answers", text, remedy, lost=lost, gained=gained, num_prompts=len(own), p=p)


def _right(rows: Any, key: CellKey) -> Any:
    """Of each prompt that was scored how many answers are right, a series by prompt."""
    cell = metrics.without_errors(metrics.select(rows, key))
    scored = cell[cell["passed"].notna()]
    return scored.groupby(scored["prompt_id"].astype(str))["passed"].sum()


def compared_by_text(case: Case) -> Seen | None:
    hidden = case.good[case.good["num_hidden_tokens"].notna() & case.good["exactness"].notna()]
    if not len(hidden):
        return None
    text = f"{len(hidden)} of {answers(case.good)} were compared by their text, as the server names no tokens"
    remedy = "other tokens can make the same text; only token ids show it"
    return case.seen("compared_by_text", text, remedy, num_answers=len(hidden), num_all=len(case.good))


def reused_prompts(case: Case) -> Seen | None:
    hits = case.good[case.good["num_cached_tokens"].fillna(0) > 0]
    if not len(hits):
        return None
    tokens = int(hits["num_cached_tokens"].sum())
    text = (
        f"{len(hits)} of {answers(case.good)} reused {tokens} tokens of prompts that the server had kept: its time to "
        "the first token, and tps.e2e, are too good"
    )
    remedy = CACHE_REMEDIES.get(_dialect(case), "switch the server's prefix cache off")
    counts = {"num_answers": len(hits), "num_all": len(case.good), "num_tokens": tokens}
    return case.seen("reused_prompts", text, _for_dialect(case, remedy, CACHE_REMEDIES), **counts)


def uncounted(case: Case) -> Seen | None:
    missing = case.good["uncounted"].dropna()
    if case.is_baseline or not len(missing):
        return None
    text = f"acceptance is not available for {len(missing)} of {answers(case.good)}: {missing.iloc[0]}"
    remedy = COUNT_REMEDIES.get(
        _dialect(case),
        "speed and exactness need no counts; vLLM, SGLang, llama.cpp, TensorRT-LLM and lmdeploy have them",
    )
    counts = {"num_answers": len(missing), "num_all": len(case.good)}
    return case.seen("uncounted", text, _for_dialect(case, remedy, COUNT_REMEDIES), **counts)


def derived_rounds(case: Case) -> Seen | None:
    """Such rounds are off where the limit cut the last one."""
    derived = case.good[case.good["counted_by"].isin(DERIVED)]
    if case.is_baseline or not len(derived):
        return None
    num_cut = int((derived["finish_reason"] == "length").sum())
    by = derived["counted_by"].iloc[0]
    text = (
        f"rounds of {len(derived)} of {answers(case.good)} were worked out ({by}), which is wrong by one where the "
        f"limit cut the last round; {num_cut} were cut"
    )
    remedy = COUNT_REMEDIES.get(_dialect(case), "a newer version of the server tells them")
    counts = {"num_answers": len(derived), "num_all": len(case.good), "num_cut": num_cut}
    return case.seen("derived_rounds", text, _for_dialect(case, remedy, COUNT_REMEDIES), counted_by=str(by), **counts)


def _for_dialect(case: Case, text: str, known: Mapping[str, str]) -> Remedy:
    dialect = _dialect(case)
    return Remedy(dialect if dialect in known else "other_server", text)


def _server(case: Case, method: str) -> ServerEntry | None:
    return case.identity.servers.get(method)


def _dialect(case: Case) -> str:
    server = _server(case, case.cell.method)
    return server.dialect if server else ""
