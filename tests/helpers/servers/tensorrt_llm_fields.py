"""The fields that TensorRT-LLM's requests may have, as its source declared them in September 2026.

They are in tensorrt_llm/serve/openai_protocol.py. Its models forbid all others, so that one field too many makes it
refuse every request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHARED = frozenset(
    """
    best_of conversation_params disaggregated_params echo frequency_penalty lora_request logit_bias logprobs model n
    presence_penalty priority prompt_ignore_length response_format seed stop stream stream_options temperature
    thinking_token_budget top_p user

    add_special_tokens early_stopping ignore_eos include_stop_str_in_output length_penalty min_p min_tokens
    repetition_penalty skip_special_tokens spaces_between_special_tokens stop_token_ids top_k top_p_min
    truncate_prompt_tokens use_beam_search
    """.split()
)
FIELDS = {
    "/v1/completions": SHARED | {"prompt", "max_tokens", "detokenize", "return_context_logits"},
    "/v1/chat/completions": SHARED
    | frozenset(
        """
        add_generation_prompt agent_hierarchy cache_salt chat_template chat_template_kwargs documents
        max_completion_tokens max_tokens media_io_kwargs messages mm_processor_kwargs parallel_tool_calls
        prompt_token_ids prompt_token_ids_b64 reasoning_effort thinking tool_choice tools top_logprobs
        """.split()
    ),
}
STREAM_OPTIONS = frozenset({"include_usage", "continuous_usage_stats"})


def forbidden(path: str, body: Mapping[str, Any]) -> set[str]:
    """Return the fields of a request that TensorRT-LLM would refuse."""
    return {*body} - FIELDS[path] | {*body.get("stream_options", ())} - STREAM_OPTIONS
