"""Any OpenAI-compatible server: /v1/chat/completions with the fields of the specification only.

The exception is a mode of thinking chosen by the user, which the specification cannot express: it is sent in the field
that most servers support.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_bench.core.dialects import AnswerError, Dialect, Pages, ServerInfo, ServerRequest
from dflash_bench.core.types import Settings
from dflash_bench.servers.stream import StreamState, as_ids, as_object, as_text

MODELS = "/v1/models"
CHAT = "/v1/chat/completions"
COUNTS = "continuous_usage_stats"
"""The option that makes vLLM, SGLang and similar servers count tokens in each piece."""
FAR = 1 << 20
"""The window of a repetition penalty in tokens: all of them."""


def identify(pages: Pages) -> ServerInfo | None:
    return ServerInfo() if isinstance(as_object(pages.get(MODELS)).get("data"), list) else None


def owner(pages: Pages) -> str | None:
    """Return the owner of the first listed model; many servers name themselves there."""
    data = as_object(pages.get(MODELS)).get("data")
    name = as_object(data[0]).get("owned_by") if isinstance(data, list) and data else None
    return name if isinstance(name, str) else None


def call(request: ServerRequest) -> tuple[str, dict[str, Any]]:
    body = chat_body(request)
    if not request.settings.greedy:
        body |= {"top_p": request.settings.top_p, "seed": request.seed}
    return CHAT, body


def filters(settings: Settings, **changes: Any) -> dict[str, Any]:
    """Return the filters and the penalty, as vLLM named them and most servers after it; `changes` replaces some."""
    names = ("top_p", "top_k", "min_p", "repetition_penalty")
    return {name: getattr(settings, name) for name in names} | changes


def seeded(request: ServerRequest) -> dict[str, int]:
    return {"seed": request.seed % 2**31}


def common_body(request: ServerRequest) -> dict[str, Any]:
    """Return the fields that all OpenAI-compatible servers accept, for chats and for token ids."""
    return {
        "model": request.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": request.settings.temperature,
        "max_tokens": request.max_new_tokens,
    }


def chat_body(request: ServerRequest) -> dict[str, Any]:
    """Return the same with the chat, and the mode of thinking for the server's chat template."""
    thinking = request.settings.thinking
    told: dict[str, Any] = {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}
    # Answers to chats may come without token ids, so pieces hold an unknown number of tokens.
    counts = {"stream_options": {"include_usage": True, COUNTS: True}}
    return common_body(request) | counts | {"messages": request.chat} | told | {**request.in_chats}


def read(event: Mapping[str, Any], state: StreamState) -> None:
    if event.get("error") is not None:
        raise AnswerError(f"the server stopped with an error: {_message(event['error'])}")
    usage = as_object(event.get("usage"))
    state.set_counts(
        num_tokens=usage.get("completion_tokens"),
        num_prompt_tokens=usage.get("prompt_tokens"),
        num_cached_tokens=as_object(usage.get("prompt_tokens_details")).get("cached_tokens"),
        num_reasoning_tokens=as_object(usage.get("completion_tokens_details")).get("reasoning_tokens"),
    )
    if choice := first_choice(event):
        finish = choice.get("finish_reason")
        delta = as_object(choice.get("delta"))
        # The field's name depends on the version.
        reasoning = as_text(delta.get("reasoning") or delta.get("reasoning_content"))
        text = as_text(delta.get("content")) + as_text(choice.get("text")) + _called(delta.get("tool_calls"))
        state.add_delta(text, as_ids(choice.get("token_ids")), None if finish is None else str(finish), reasoning)


def first_choice(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the choice with index 0, or without one; empty if there is none."""
    choices = event.get("choices")
    several = [as_object(one) for one in choices] if isinstance(choices, list) else []
    return next((one for one in several if not one.get("index")), {})


def _called(calls: Any) -> str:
    """Return a piece of tool calls' names and arguments, which a server may remove from the text."""
    functions = [as_object(as_object(call).get("function")) for call in calls] if isinstance(calls, list) else []
    return "".join(as_text(one.get(key)) for one in functions for key in ("name", "arguments"))


def _message(error: Any) -> str:
    message = as_object(error).get("message", error)
    return " ".join(message.split())[:200] if isinstance(message, str) else "it gives no message"


DIALECT = Dialect(
    "openai",
    (MODELS,),
    identify,
    call,
    read,
    takes_ids=False,
    takes_thinking=False,
    is_general=True,
    unsupported=("top_k", "min_p", "repetition_penalty"),
    remedies={
        "uncounted": "OpenAI's specification has no counts of drafts; name the server's own --dialect, if it has "
        "one here"
    },
)
