"""vLLM: the OpenAI paths, with prompts as token ids, ids of what it answers, and its own fields beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_bench.servers.dialects import openai
from dflash_bench.servers.dialects.dialect import About, Ask, Dialect, Pages
from dflash_bench.servers.heard import Counts, Heard, at_of_histogram, table, whole

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


def read(event: Mapping[str, Any], heard: Heard) -> None:
    openai.read(event, heard)
    counts = table(table(event.get("metrics")).get("speculative_decoding"))
    names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    rounds, drafted, accepted = (whole(counts.get(name)) for name in names)
    if rounds is not None and accepted is not None:
        at = at_of_histogram(counts.get("acceptance_histogram"))
        heard.counts = Counts("vllm.request", rounds, drafted, accepted, at)


VLLM = Dialect(
    "vllm", (VERSION, openai.MODELS), identify, call, read, prefix_cache="salted", flush="/reset_prefix_cache"
)
