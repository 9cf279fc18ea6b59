"""`mlx_lm.server`: OpenAI's chats with additional fields. Streams carry no token ids, and drafts are not counted."""

from __future__ import annotations

from typing import Any

from dflash_bench.core.dialects import PUBLISHED, Dialect, ServerRequest, Support
from dflash_bench.servers.dialects import openai


def call(request: ServerRequest) -> tuple[str, dict[str, Any]]:
    """Send every setting: the server takes missing settings from its command line."""
    body = openai.filters(request.settings) | openai.seeded(request)
    if body["repetition_penalty"] == 1:
        del body["repetition_penalty"]
    else:
        body["repetition_context_size"] = openai.FAR
    return openai.CHAT, openai.chat_body(request) | body


DIALECT = Dialect(
    "mlx",
    (openai.MODELS,),
    None,
    call,
    openai.read,
    takes_ids=False,
    remedies={"uncounted": "mlx_lm.server reports nothing about what it accepts; speed and exactness need no counts"},
    own_support=Support("0.32.2", "2026-11", {"draft-model": PUBLISHED}),
)
