"""vLLM: how it is asked, what it counts, and how it is launched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dflash_bench.servers.dialects import openai
from dflash_bench.servers.dialects.base import About, Ask, Dialect, Pages, Program, Serving
from dflash_bench.servers.stream import AcceptanceCounts, StreamState, at_of_histogram, table, whole

# vLLM: the OpenAI paths, with prompts as token ids, ids of what it answers, and its own fields beside them.


VERSION = "/version"


def identify(pages: Pages) -> About | None:
    version = table(pages.get(VERSION)).get("version")
    models = table(pages.get(openai.MODELS)).get("data")
    listed = [table(model) for model in models] if isinstance(models, list) else []
    if not isinstance(version, str) or not any(model.get("owned_by") == "vllm" for model in listed):
        return None
    lengths = [model["max_model_len"] for model in listed if whole(model.get("max_model_len"))]
    return About(version, {"max_model_len": lengths[0]} if lengths else {})


def call(ask: Ask) -> tuple[str, dict[str, Any]]:
    """All settings are said, as it takes those that are not from the model's generation_config."""
    settings = ask.settings
    body = openai.common(ask) | {
        "top_p": settings.top_p, "top_k": settings.top_k or -1, "min_p": settings.min_p,
        "repetition_penalty": settings.repetition_penalty, "seed": ask.seed % 2**31, "return_token_ids": True,
        "cache_salt": ask.salt,
    }  # fmt: skip
    if ask.prompt_ids is not None:
        return "/v1/completions", body | {"prompt": list(ask.prompt_ids)}
    return "/v1/chat/completions", body | {"messages": ask.chat} | openai.thinking(ask)


def read(event: Mapping[str, Any], heard: StreamState) -> None:
    openai.read(event, heard)
    counts = table(table(event.get("metrics")).get("speculative_decoding"))
    names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    rounds, drafted, accepted = (whole(counts.get(name)) for name in names)
    if rounds is not None and accepted is not None:
        at = at_of_histogram(counts.get("acceptance_histogram"))
        heard.counts = AcceptanceCounts("vllm.request", rounds, drafted, accepted, at)


VLLM = Dialect(
    "vllm", (VERSION, openai.MODELS), identify, call, read, prefix_cache="salted", flush="/reset_prefix_cache"
)


# `vllm serve`: options as in vLLM's documentation of speculative decoding (docs/features/speculative_decoding).


def words(serving: Serving, port: int) -> list[str]:
    return [
        "serve", serving.target, "--served-model-name", serving.model, "--host", "127.0.0.1", "--port", str(port),
        "--max-model-len", str(serving.length), "--dtype", serving.dtype,
        "--gpu-memory-utilization", f"{serving.memory_share:.2f}",
        *(["--trust-remote-code"] if serving.trust_remote_code else []),
        *_speculation(serving),
    ]  # fmt: skip


def _speculation(serving: Serving) -> list[str]:
    if serving.draft is None:
        return []
    # Its number is of drafted tokens, without the anchor that a block has besides.
    speculation = {
        "method": serving.method.name, "model": serving.draft, "num_speculative_tokens": serving.num_drafts,
    }  # fmt: skip
    # Its counters cannot tell several answers at a time apart; its answers can say their own rounds.
    return ["--speculative-config", json.dumps(speculation), "--per-request-spec-decode-metrics", "summary"]


VLLM_PROGRAM = Program("vllm", "vllm", False, ("dflash", "eagle3"), "VLLM_API_KEY", words)
