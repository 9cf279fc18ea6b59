"""TensorRT-LLM (`trtllm-serve`): the OpenAI paths, with prompts and answers as token ids; counts in its choices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_bench.servers.dialects import openai
from dflash_bench.servers.dialects.base import About, Ask, Dialect, Pages, owner
from dflash_bench.servers.dialects.vllm import VERSION
from dflash_bench.servers.stream import AcceptanceCounts, StreamState, at_of_histogram, table, whole

NAME = "tensorrt_llm"


def identify(pages: Pages) -> About | None:
    if owner(pages.get(openai.MODELS)) != NAME:
        return None
    version = table(pages.get(VERSION)).get("version")
    return About(version if isinstance(version, str) else None)


def call(ask: Ask) -> tuple[str, dict[str, Any]]:
    """It refuses fields that it does not know."""
    settings = ask.settings
    body = openai.common(ask) | {
        "top_p": settings.top_p, "top_k": settings.top_k, "min_p": settings.min_p,
        "repetition_penalty": settings.repetition_penalty, "seed": ask.seed % 2**31,
    }  # fmt: skip
    if ask.prompt_ids is None:
        return "/v1/chat/completions", body | {"messages": ask.chat} | openai.thinking(ask)
    # It names tokens only in place of text; and of several that end an answer, some only if asked to.
    return "/v1/completions", body | {
        "prompt": list(ask.prompt_ids), "detokenize": False, "include_stop_str_in_output": True,
    }  # fmt: skip


def read(event: Mapping[str, Any], heard: StreamState) -> None:
    openai.read(event, heard)
    choices = event.get("choices")
    choice = table(choices[0]) if isinstance(choices, list) and choices else {}
    counts = table(choice.get("speculative_decoding"))
    names = ("num_spec_steps", "total_draft_tokens", "total_accepted_draft_tokens")
    rounds, drafted, accepted = (whole(counts.get(name)) for name in names)
    if rounds is not None and accepted is not None:
        at = at_of_histogram(counts.get("acceptance_histogram"))
        heard.counts = AcceptanceCounts("tensorrt_llm.request", rounds, drafted, accepted, at)


TENSORRT_LLM = Dialect(NAME, (VERSION, openai.MODELS), identify, call, read)
