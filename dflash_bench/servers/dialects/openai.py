"""Any OpenAI-compatible server: /v1/chat/completions, and no more fields than the specification has.

But for a mode of thinking that the user asks for: the specification has no words for it, and most servers the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_bench.servers.client import AnswerError
from dflash_bench.servers.dialects.base import About, Ask, Dialect, Pages
from dflash_bench.servers.stream import StreamState, ids_of, table, text_of, whole

MODELS = "/v1/models"
USAGE = {"include_usage": True}


def identify(pages: Pages) -> About | None:
    return About() if isinstance(table(pages.get(MODELS)).get("data"), list) else None


def call(ask: Ask) -> tuple[str, dict[str, Any]]:
    body = common(ask) | {"messages": ask.chat} | thinking(ask)
    if not ask.settings.greedy:
        body |= {"top_p": ask.settings.top_p, "seed": ask.seed}
    return "/v1/chat/completions", body


def common(ask: Ask) -> dict[str, Any]:
    """What all of these servers take."""
    return {
        "model": ask.model, "stream": True, "stream_options": USAGE, "temperature": ask.settings.temperature,
        "max_tokens": ask.max_new_tokens,
    }  # fmt: skip


def thinking(ask: Ask) -> dict[str, Any]:
    """Said to the chat template, by a server that renders it."""
    switch = ask.settings.thinking
    return {} if switch is None else {"chat_template_kwargs": {"enable_thinking": switch}}


def read(event: Mapping[str, Any], heard: StreamState) -> None:
    if event.get("error") is not None:
        raise AnswerError(f"the server broke off: {_reason(event['error'])}")
    choices = event.get("choices")
    if isinstance(choices, list) and choices:
        _read_choice(table(choices[0]), heard)
    usage = table(event.get("usage"))
    heard.num_tokens = _or(whole(usage.get("completion_tokens")), heard.num_tokens)
    heard.num_prompt_tokens = _or(whole(usage.get("prompt_tokens")), heard.num_prompt_tokens)
    cached = whole(table(usage.get("prompt_tokens_details")).get("cached_tokens"))
    heard.num_cached_tokens = _or(cached, heard.num_cached_tokens)


def _or(value: int | None, before: int | None) -> int | None:
    return before if value is None else value


def _read_choice(choice: Mapping[str, Any], heard: StreamState) -> None:
    delta = table(choice.get("delta"))
    text = text_of(delta.get("content")) + text_of(choice.get("text"))
    # Two names for one field, by version.
    thought = text_of(delta.get("reasoning") or delta.get("reasoning_content"))
    finish = choice.get("finish_reason")
    heard.delta(text, ids_of(choice.get("token_ids")), None if finish is None else str(finish), thought)


def _reason(error: Any) -> str:
    said = table(error).get("message", error)
    return " ".join(said.split())[:200] if isinstance(said, str) else "it gives no message"


OPENAI = Dialect(
    "openai", (MODELS,), identify, call, read, takes_ids=False,
    lacks=("top_k", "min_p", "repetition_penalty"), takes_thinking=False,
)  # fmt: skip
