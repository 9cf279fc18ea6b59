"""lmdeploy: /generate with token ids, or its OpenAI path where we have no tokenizer; its counters have the rounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_bench.servers.dialects import openai
from dflash_bench.servers.dialects.base import About, Ask, Dialect, Pages, owner
from dflash_bench.servers.stream import StreamState, ids_of, table, text_of, whole

NAME = "lmdeploy"


def identify(pages: Pages) -> About | None:
    return About() if owner(pages.get(openai.MODELS)) == NAME else None


def call(ask: Ask) -> tuple[str, dict[str, Any]]:
    """All settings are said: what it does by itself is top_k 40 and a temperature of 0.7. /generate takes no seed."""
    settings = ask.settings
    sampling = {
        "temperature": settings.temperature, "top_p": settings.top_p, "min_p": settings.min_p,
        # Of one token it can only draw the best, whatever it makes of temperature 0.
        "top_k": 1 if settings.greedy else settings.top_k, "repetition_penalty": settings.repetition_penalty,
    }  # fmt: skip
    if ask.prompt_ids is None:
        body = openai.common(ask) | sampling | openai.thinking(ask)
        return "/v1/chat/completions", body | {"messages": ask.chat, "seed": ask.seed % 2**31}
    return "/generate", sampling | {
        "input_ids": list(ask.prompt_ids), "max_tokens": ask.max_new_tokens, "stream": True,
        # Otherwise it neither names nor counts the token that ends an answer.
        "include_stop_str_in_output": True,
    }  # fmt: skip


def read(event: Mapping[str, Any], heard: StreamState) -> None:
    if event.get("error") is not None or "choices" in event:
        openai.read(event, heard)
        return
    meta = table(event.get("meta_info"))
    finish = table(meta.get("finish_reason")).get("type")
    # With a stop comes the token that ends the answer, alone; its text is no part of it.
    text = "" if finish == "stop" else text_of(event.get("text"))
    heard.delta(text, ids_of(event.get("output_ids")), None if finish is None else str(finish))
    if (num := whole(meta.get("completion_tokens"))) is not None:
        heard.num_tokens = num
    if (num := whole(meta.get("prompt_tokens"))) is not None:
        heard.num_prompt_tokens = num


LMDEPLOY = Dialect(NAME, (openai.MODELS,), identify, call, read)
