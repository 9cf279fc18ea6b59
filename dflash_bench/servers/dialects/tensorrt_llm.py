"""TensorRT-LLM (`trtllm-serve`): the OpenAI paths, with prompts and answers as token ids.

Counts come in the choices, from builds that have `per_request_spec_decode_stats`. 1.3.0rc27 and older have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_bench.core.dialects import (
    PUBLISHED,
    UNMEASURED,
    CountingRule,
    Dialect,
    Pages,
    ServerInfo,
    ServerRequest,
    Support,
)
from dflash_bench.servers.dialects import openai
from dflash_bench.servers.stream import StreamState, as_object, version_of

NAME = "tensorrt_llm"
VERSION = "/version"


def identify(pages: Pages) -> ServerInfo | None:
    return ServerInfo(version_of(pages.get(VERSION))) if openai.owner(pages) == NAME else None


def call(request: ServerRequest) -> tuple[str, dict[str, Any]]:
    """Send only known fields: the server refuses others."""
    sampling = openai.filters(request.settings) | openai.seeded(request)
    if request.prompt_ids is None:
        return openai.CHAT, openai.chat_body(request) | sampling
    # Token ids come only in place of text, and some stop tokens only on request.
    return "/v1/completions", openai.common_body(request) | sampling | {
        "prompt": list(request.prompt_ids),
        "detokenize": False,
        "include_stop_str_in_output": True,
    }


def read(event: Mapping[str, Any], state: StreamState) -> None:
    openai.read(event, state)
    counts = as_object(openai.first_choice(event).get("speculative_decoding"))
    state.set_acceptance(
        "tensorrt_llm.request",
        counts.get("num_spec_steps"),
        counts.get("total_draft_tokens"),
        counts.get("total_accepted_draft_tokens"),
        counts.get("acceptance_histogram"),
    )


DIALECT = Dialect(
    NAME,
    (VERSION, openai.MODELS),
    identify,
    call,
    read,
    rules=(
        CountingRule(
            "tensorrt_llm.request",
            "speculative_decoding of the answer's choice: S is num_spec_steps, with total_draft_tokens and "
            "total_accepted_draft_tokens",
            UNMEASURED,
            beyond=None,
            may_omit_stop=True,
        ),
    ),
    remedies={
        "uncounted": "TensorRT-LLM 1.3.0rc27 and older report no rounds; newer ones, if they know it, with "
        "'per_request_spec_decode_stats: true' in the file for trtllm-serve --extra_llm_api_options"
    },
    own_support=Support(
        "1.4.0rc1",
        "2026-11",
        {
            "dflash": PUBLISHED,
            "dflash2": PUBLISHED,
            "dspark": f"{PUBLISHED}, with the vanilla Markov head",
            "eagle3": PUBLISHED,
            "mtp": "in the target's checkpoint",
        },
    ),
)
