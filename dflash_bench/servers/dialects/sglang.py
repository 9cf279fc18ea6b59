"""SGLang: /generate with token ids, or its OpenAI path without a tokenizer here; counts of rounds in meta_info."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_bench.core.dialects import (
    PUBLISHED,
    AcceptanceCounts,
    AnswerError,
    Conversion,
    CountingRule,
    DecodedAnswer,
    Dialect,
    LaunchSpec,
    Pages,
    Program,
    ServerInfo,
    ServerRequest,
    Support,
)
from dflash_bench.core.draft_kinds import FAMILY
from dflash_bench.servers.dialects import openai
from dflash_bench.servers.stream import StreamState, as_count, as_ids, as_object, as_text, version_of

INFO = ("/server_info", "/get_server_info")
"""The new and the old name."""
PROPERTIES = tuple(
    """
    model_path context_length dtype quantization kv_cache_dtype attention_backend tp_size speculative_algorithm
    speculative_draft_model_path speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens
    disable_radix_cache
    """.split()
)
PROPOSED = ("spec_proposed_drafts", "spec_num_proposed_drafts", "spec_draft_token_num")
ACCEPTED = ("spec_accepted_drafts", "spec_num_correct_drafts", "spec_accept_token_num")
HISTOGRAM = ("spec_accept_histogram", "spec_correct_drafts_histogram")
"""Names by version; 0.5.23 (November 2026) has `spec_num_proposed_drafts` and what goes with it."""


def identify(pages: Pages) -> ServerInfo | None:
    for path in INFO:
        info = as_object(pages.get(path))
        if "model_path" in info and ("internal_states" in info or "tokenizer_path" in info):
            known = {name: info[name] for name in PROPERTIES if isinstance(info.get(name), str | int | bool)}
            return ServerInfo(version_of(info), known)
    return None


def call(request: ServerRequest) -> tuple[str, dict[str, Any]]:
    settings = request.settings
    sampling = openai.filters(settings, top_k=settings.top_k or -1, temperature=settings.temperature)
    if request.prompt_ids is None:
        # Newer versions refuse `return_meta_info` in a stream, and give counts in `sglext`; older ones ignore that.
        counts = {"return_meta_info": True, "return_spec_tokens_details": True}
        return openai.CHAT, openai.chat_body(request) | sampling | counts
    sampling["max_new_tokens"] = request.max_new_tokens
    return "/generate", {"input_ids": list(request.prompt_ids), "sampling_params": sampling, "stream": True}


def read(event: Mapping[str, Any], state: StreamState) -> None:
    if event.get("error") is not None or "choices" in event:
        openai.read(event, state)
        meta = as_object(event.get("meta_info") or openai.first_choice(event).get("meta_info"))
        _read_meta({**meta, **as_object(as_object(event.get("sglext")).get("spec_tokens_details"))}, state)
        return
    meta = as_object(event.get("meta_info"))
    given, num, before = as_ids(event.get("output_ids")), as_count(meta.get("completion_tokens")), len(state.token_ids)
    ids, text = _new_ids(given, num, before), as_text(event.get("text"))
    # Depending on version and options, ids and text are cumulative or only the new part, independently.
    if text.startswith(state.text) or (given is not None and len(given) == num):
        state.text = ""
    finish = as_object(meta.get("finish_reason"))
    if finish.get("type") == "abort" and "message" in finish:
        # The scheduler's errors; earlier ones, such as a prompt beyond the context, are events of their own.
        openai.read({"error": finish}, state)
    state.add_delta(text, ids, as_text(finish.get("type")))
    _read_meta(meta, state)


def _new_ids(ids: list[int] | None, num: int | None, before: int) -> list[int] | None:
    """Return the new ids; the server's count `num` decides whether `ids` repeats all tokens so far."""
    if ids is None or num is None or before + len(ids) == num:
        return ids
    if len(ids) == num and num >= before:
        return ids[before:]
    raise AnswerError(f"{len(ids)} ids came after {before}, but the server counts {num} tokens")


def _read_meta(meta: Mapping[str, Any], state: StreamState) -> None:
    state.set_counts(
        num_tokens=meta.get("completion_tokens"),
        num_prompt_tokens=meta.get("prompt_tokens"),
        num_cached_tokens=meta.get("cached_tokens"),
    )
    rounds = as_count(meta.get("spec_verify_ct"))
    if rounds is None or state.finish is None:
        return
    proposed, accepted = (
        next((value for name in names if (value := as_count(meta.get(name))) is not None), None)
        for names in (PROPOSED, ACCEPTED)
    )
    if accepted is not None:
        histogram = next((meta[name] for name in HISTOGRAM if name in meta), None)
        state.set_acceptance("sglang.request", rounds, proposed, accepted, histogram)
    elif state.num_tokens is not None:
        # A negative count is refused later.
        derived = state.num_tokens - 1 - rounds if rounds else 0
        state.acceptance = AcceptanceCounts(rounds, derived, proposed, by="sglang.derived")


def _derive(answer: DecodedAnswer) -> AcceptanceCounts:
    rounds = len(answer.accepted)
    accepted = max(answer.num_tokens - 1 - rounds, 0) if rounds else 0
    return AcceptanceCounts(rounds, accepted, rounds * answer.num_drafts)


def argv(spec: LaunchSpec, port: int) -> list[str]:
    """Return options as in SGLang's documentation of server arguments and of speculative decoding."""
    return [
        *("serve", "--model-path", spec.target, "--served-model-name", spec.model, "--host", "127.0.0.1"),
        *("--port", str(port), "--context-length", str(spec.length), "--dtype", spec.dtype),
        *("--mem-fraction-static", f"{spec.memory_share:.2f}", "--max-running-requests", str(spec.slots)),
        *(["--trust-remote-code"] if spec.trust_remote_code else []),
        *([] if spec.num_drafts is None else _speculation(spec, spec.num_drafts)),
    ]


ALGORITHMS = {"dflash": "DFLASH", "eagle3": "EAGLE3", "eagle3-tree": "EAGLE3", "mtp": "NEXTN", "ngram": "NGRAM"}


def _speculation(spec: LaunchSpec, num_drafts: int) -> list[str]:
    """Return the options of speculation. SGLang's number of draft tokens includes the anchor, or its equivalent."""
    # DFLASH reads a Domino's labels, shifted or not, from its file.
    is_dspark = spec.shifted and spec.kind != FAMILY["domino"]
    algorithm = "DSPARK" if is_dspark else ALGORITHMS[spec.method.name]
    verified = ["--speculative-num-draft-tokens", str(num_drafts + 1)]
    numbers = {
        # DSpark's blocks hold only drafted tokens.
        "DSPARK": ["--speculative-dspark-block-size", str(num_drafts)],
        "DFLASH": verified,
        # A chain, as ours; the default is a tree.
        "NGRAM": [*verified, "--speculative-ngram-max-bfs-breadth", "1"],
    }
    is_tree = spec.method.name == "eagle3-tree"
    steps, top_k = (spec.method.number(name) for name in ("depth", "top_k")) if is_tree else (num_drafts, 1)
    levels = ["--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(top_k), *verified]
    # The heads of MTP are in the target's checkpoint.
    draft = [] if spec.draft is None else ["--speculative-draft-model-path", spec.draft]
    return ["--speculative-algorithm", algorithm, *draft, *numbers.get(algorithm, levels)]


SUPPORT = Support(
    "0.5.23",
    "2026-11",
    {
        "dflash": PUBLISHED,
        "dflash2": PUBLISHED,
        "dspark": PUBLISHED,
        "domino": f"{PUBLISHED}, if pure_draft_prefix_len is 1",
        "lilicorr": PUBLISHED,
        "eagle3": f"{PUBLISHED}, as a chain or a tree",
        "mtp": "in the target's checkpoint",
    },
    tested="its HTTP server tested",
)

DIALECT = Dialect(
    "sglang",
    INFO,
    identify,
    call,
    read,
    flush="/flush_cache",
    repeats=True,
    rules=(
        CountingRule(
            "sglang.request",
            "meta_info of the answer: S is spec_verify_ct, with the proposed and accepted drafts",
            beyond=None,
        ),
        CountingRule(
            "sglang.derived",
            "meta_info of the answer: S is spec_verify_ct, and sum(a_i) = T - 1 - S, without what the limit cut off "
            "the last round",
            (
                Conversion(
                    "sglang_derived",
                    "Rounds are reported; accepted drafts are what the rounds emitted besides one bonus token each.",
                    _derive,
                ),
            ),
            is_derived=True,
        ),
    ),
    remedies={
        "uncounted": "use a version of SGLang that counts verified drafts in meta_info",
        "reused_prompts": "start SGLang with --disable-radix-cache",
    },
    program=Program(
        "sglang",
        "sglang",
        None,
        {
            "dflash": ("n", "block"),
            "eagle3": ("n",),
            "eagle3-tree": ("nodes", "top_k", "depth"),
            "mtp": ("n",),
            "ngram": ("n",),
        },
        SUPPORT,
        "",
        argv,
        lacks={"synthetic": "it takes a mean length (SGLANG_SIMULATE_ACC_LEN), not a rate per token"},
    ),
)
