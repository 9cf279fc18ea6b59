"""`mlx_lm.server`: OpenAI's chats and a few fields more. It names no tokens while it streams, and counts no drafts."""

from __future__ import annotations

from typing import Any

from dflash_bench.servers.dialects import openai
from dflash_bench.servers.dialects.base import FAR, About, Ask, Dialect, Pages


def identify(pages: Pages) -> About | None:
    """Its one page says nothing that other servers would not: it is spoken where a user names it."""
    return None


def call(ask: Ask) -> tuple[str, dict[str, Any]]:
    """All settings are said: it takes those that are not from its own command line."""
    settings = ask.settings
    body = openai.common(ask) | {
        "messages": ask.chat, "top_p": settings.top_p, "top_k": settings.top_k, "min_p": settings.min_p,
        "seed": ask.seed % 2**31,
    }  # fmt: skip
    if settings.repetition_penalty != 1:
        body |= {"repetition_penalty": settings.repetition_penalty, "repetition_context_size": FAR}
    return "/v1/chat/completions", body | openai.thinking(ask)


MLX = Dialect("mlx", (openai.MODELS,), identify, call, openai.read, takes_ids=False)
