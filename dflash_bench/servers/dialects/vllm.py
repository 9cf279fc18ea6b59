"""vLLM: the OpenAI paths, with prompts and answers as token ids, and vLLM's additional fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dflash_bench.core.dialects import (
    IMPOSED,
    PUBLISHED,
    CountingRule,
    Dialect,
    LaunchSpec,
    Pages,
    Program,
    ServerInfo,
    ServerRequest,
    Support,
)
from dflash_bench.servers.dialects import openai
from dflash_bench.servers.stream import StreamState, as_count, as_object, version_of

VERSION = "/version"


def identify(pages: Pages) -> ServerInfo | None:
    version = version_of(pages.get(VERSION))
    models = as_object(pages.get(openai.MODELS)).get("data")
    listed = [as_object(model) for model in models] if isinstance(models, list) else []
    if version is None or not any(model.get("owned_by") == "vllm" for model in listed):
        return None
    lengths = [model["max_model_len"] for model in listed if as_count(model.get("max_model_len"))]
    return ServerInfo(version, {"max_model_len": lengths[0]} if lengths else {})


def call(request: ServerRequest) -> tuple[str, dict[str, Any]]:
    """Send every setting: the server takes missing settings from the model's generation_config."""
    own = openai.filters(request.settings, top_k=request.settings.top_k or -1) | openai.seeded(request)
    own["return_token_ids"] = True
    if request.salt is not None:
        own["cache_salt"] = request.salt
    if request.prompt_ids is not None:
        return "/v1/completions", openai.common_body(request) | own | {"prompt": list(request.prompt_ids)}
    return openai.CHAT, openai.chat_body(request) | own


def read(event: Mapping[str, Any], state: StreamState) -> None:
    openai.read(event, state)
    counts = as_object(as_object(event.get("metrics")).get("speculative_decoding"))
    state.set_acceptance(
        "vllm.request",
        counts.get("num_spec_steps"),
        counts.get("num_draft_tokens"),
        counts.get("num_accepted_draft_tokens"),
        counts.get("acceptance_histogram"),
        (counts.get("per_step_accepted"), counts.get("per_step_drafted")),
    )


def argv(spec: LaunchSpec, port: int) -> list[str]:
    """Return options as in vLLM's documentation of speculative decoding (docs/features/speculative_decoding)."""
    return [
        *("serve", spec.target, "--served-model-name", spec.model, "--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", str(spec.length), "--dtype", spec.dtype),
        *("--gpu-memory-utilization", f"{spec.memory_share:.2f}"),
        *(["--trust-remote-code"] if spec.trust_remote_code else []),
        *_speculation(spec),
    ]


METHODS: dict[str, dict[str, Any]] = {
    "DSpark": {"method": "dspark"},
    "p-eagle": {"method": "eagle3", "parallel_drafting": True},
}
"""vLLM's names for kinds and methods; it reads the kind of other drafts from their files, as `dflash`."""


COUNTING = ("--per-request-spec-decode-metrics", "detailed")
"""`summary` reports totals, `detailed` also each round."""


def _speculation(spec: LaunchSpec) -> list[str]:
    if spec.num_drafts is None:
        return []
    name = spec.drafter.name
    # The number excludes the anchor of a block.
    speculation = {
        **METHODS.get(spec.kind, METHODS.get(name, {"method": name})),
        # The heads of MTP are in the target's checkpoint.
        **({} if spec.draft is None else {"model": spec.draft}),
        "num_speculative_tokens": spec.num_drafts,
    }
    if name == "ngram":
        speculation |= {f"prompt_lookup_{bound}": spec.method.number(bound) for bound in ("min", "max")}
    if spec.method.options.get("cut") == "auto":
        speculation["enable_adaptive_verification"] = True
    if spec.rates:
        speculation |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [*spec.rates]}
    # Counters cannot distinguish concurrent answers; answers can report their own rounds.
    return ["--speculative-config", json.dumps(speculation), *COUNTING]


SUPPORT = Support(
    "0.32.0",
    "2026-11",
    {
        "dflash": PUBLISHED,
        "dflash2": f"{PUBLISHED}, on a GPU",
        "dspark": f"{PUBLISHED}, on a GPU",
        "lilicorr": f"{PUBLISHED}, on a GPU",
        "jetspec": "read as DFlash, unless its config.json says is_causal",
        "eagle3": PUBLISHED,
        "p-eagle": "after convert --to speculators",
        "mtp": "in the target's checkpoint, its first module alone",
    },
    tested="golden cases tested",
    not_launched=("jetspec",),
)

DIALECT = Dialect(
    "vllm",
    (VERSION, openai.MODELS),
    identify,
    call,
    read,
    prefix_cache="salted",
    flush="/reset_prefix_cache",
    counters="vllm",
    rules=(
        CountingRule(
            "vllm.request",
            "metrics.speculative_decoding of the answer: S is num_spec_steps, with num_draft_tokens and "
            "num_accepted_draft_tokens, and in order per_step_drafted and per_step_accepted",
            beyond=None,
        ),
        CountingRule(
            "vllm.counters",
            "differences of vllm:spec_decode_num_drafts (S), _num_draft_tokens and _num_accepted_tokens around the "
            "answer; a step that drafts nothing is not in S",
            beyond=None,
        ),
    ),
    remedies={
        "uncounted": "start vLLM with --per-request-spec-decode-metrics detailed; or start it without "
        "--disable-log-stats, measure one answer at a time, and let nobody else use it",
        "reused_prompts": "start vLLM with VLLM_SERVER_DEV_MODE=1, so that its cache can be emptied, or with "
        "--no-enable-prefix-caching",
    },
    program=Program(
        "vllm",
        "vllm",
        None,
        {
            "dflash": ("n", "block", "cut=auto"),
            "eagle3": ("n",),
            "p-eagle": ("n",),
            "mtp": ("n",),
            "ngram": ("n", "max", "min"),
            "synthetic": IMPOSED,
        },
        SUPPORT,
        "VLLM_API_KEY",
        argv,
        COUNTING,
    ),
)
