"""lmdeploy: /generate with token ids, or its OpenAI path without a tokenizer here; rounds from its counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_bench.core.dialects import (
    UNMEASURED,
    CountingRule,
    Dialect,
    LaunchSpec,
    Pages,
    Program,
    ServerInfo,
    ServerRequest,
    Support,
)
from dflash_bench.servers.dialects import openai
from dflash_bench.servers.stream import StreamState, as_ids, as_object, as_text

NAME = "lmdeploy"


def identify(pages: Pages) -> ServerInfo | None:
    return ServerInfo() if openai.owner(pages) == NAME else None


def call(request: ServerRequest) -> tuple[str, dict[str, Any]]:
    """Send every setting: the server's defaults are top_k 40 and temperature 0.7. /generate takes no seed."""
    settings = request.settings
    # top_k 1 is greedy, however the server treats temperature 0.
    top_k = 1 if settings.greedy else settings.top_k
    sampling = openai.filters(settings, top_k=top_k, temperature=settings.temperature)
    if request.prompt_ids is None:
        return openai.CHAT, openai.chat_body(request) | sampling | openai.seeded(request)
    return "/generate", sampling | {
        "input_ids": list(request.prompt_ids),
        "max_tokens": request.max_new_tokens,
        "stream": True,
        # Otherwise the stop token is neither named nor counted.
        "include_stop_str_in_output": True,
    }


def read(event: Mapping[str, Any], state: StreamState) -> None:
    if event.get("error") is not None or "choices" in event:
        openai.read(event, state)
        return
    meta = as_object(event.get("meta_info"))
    finish = as_object(meta.get("finish_reason")).get("type")
    # The event of a stop holds only the stop token, whose text is not part of the answer.
    text = "" if finish == "stop" else as_text(event.get("text"))
    state.add_delta(text, as_ids(event.get("output_ids")), None if finish is None else str(finish))
    state.set_counts(num_tokens=meta.get("completion_tokens"), num_prompt_tokens=meta.get("prompt_tokens"))


def argv(spec: LaunchSpec, port: int) -> list[str]:
    """Return options as in lmdeploy 0.18 (lmdeploy/cli/serve.py); its other engine, turbomind, does not draft."""
    return [
        *("serve", "api_server", spec.target, "--model-name", spec.model, "--server-name", "127.0.0.1"),
        *("--server-port", str(port), "--backend", "pytorch", "--session-len", str(spec.length)),
        *("--max-batch-size", str(spec.slots), "--dtype", spec.dtype),
        *("--cache-max-entry-count", f"{spec.memory_share:.2f}"),
        *(["--trust-remote-code"] if spec.trust_remote_code else []),
        *_speculation(spec),
    ]


def _speculation(spec: LaunchSpec) -> list[str]:
    if spec.num_drafts is None or spec.draft is None:
        return []
    # A block includes the anchor.
    number = {
        "dflash": ("--speculative-dflash-block-size", str(spec.num_drafts + 1)),
        "eagle3": ("--speculative-num-draft-tokens", str(spec.num_drafts)),
    }[spec.method.name]
    return ["--speculative-algorithm", spec.method.name, "--speculative-draft-model", spec.draft, *number]


SUPPORT = Support(
    "0.18.0",
    "2026-11",
    {
        "dflash": "after convert --to lmdeploy, for Qwen3 and Qwen3.5",
        "eagle3": "after convert --to lmdeploy, for Llama",
        "mtp": "in the target's checkpoint, of DeepSeek, Qwen3.5 and others",
    },
    tested="its draft checks tested",
)

DIALECT = Dialect(
    NAME,
    (openai.MODELS,),
    identify,
    call,
    read,
    counters=NAME,
    rules=(
        CountingRule(
            "lmdeploy.counters",
            "differences of lmdeploy:spec_decode_num_drafts (S), _num_draft_tokens and _num_accepted_tokens around the "
            "answer",
            UNMEASURED,
            beyond=None,
            may_omit_stop=True,
        ),
    ),
    remedies={
        "uncounted": "start lmdeploy without --disable-metrics, measure one answer at a time, and let nobody else use "
        "it"
    },
    program=Program(
        NAME,
        NAME,
        NAME,
        {"dflash": ("n", "block"), "eagle3": ("n",)},
        SUPPORT,
        "",
        argv,
        lacks={
            "mtp": "its name of the method depends on the target (deepseek_mtp, qwen3_5_mtp, hy3_mtp); start the "
            "server yourself, and give it as --server"
        },
        # Other targets return no intermediate layers; an EAGLE-3 draft then silently reads the last layer only.
        targets={
            "dflash": ("Qwen3ForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
            "eagle3": ("LlamaForCausalLM",),
        },
        dtypes=("bfloat16", "float16", "auto"),
        key_option="--api-keys",
    ),
)
