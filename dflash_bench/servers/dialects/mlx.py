"""`mlx_lm.server`: OpenAI's chats with additional fields. Streams carry no token ids, and drafts are not counted."""

from __future__ import annotations

from typing import Any

from dflash_bench.core.dialects import Dialect, Pages, ServerInfo, ServerRequest
from dflash_bench.servers.dialects import openai


def identify(pages: Pages) -> ServerInfo | None:
    """Return None: its only page looks like other servers', so the user must name this dialect."""
    return None


def call(request: ServerRequest) -> tuple[str, dict[str, Any]]:
    """Send every setting: the server takes missing settings from its command line."""
    settings = request.settings
    body = openai.chat_body(request) | {
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "min_p": settings.min_p,
        "seed": request.seed % 2**31,
    }
    if settings.repetition_penalty != 1:
        body |= {"repetition_penalty": settings.repetition_penalty, "repetition_context_size": openai.FAR}
    return openai.CHAT, body


DIALECT = Dialect(
    "mlx",
    (openai.MODELS,),
    identify,
    call,
    openai.read,
    takes_ids=False,
    remedies={"uncounted": "mlx_lm.server reports nothing about what it accepts; speed and exactness need no counts"},
)
