"""llama.cpp's server: how it is asked, what it counts, and how it is launched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_bench.servers.client import AnswerError
from dflash_bench.servers.dialects import openai
from dflash_bench.servers.dialects.base import FAR, About, Ask, Dialect, Pages, Program, Serving
from dflash_bench.servers.stream import AcceptanceCounts, StreamState, ids_of, table, text_of, whole

# llama.cpp's server: /completion with token ids, or its OpenAI path where we have no tokenizer; counts in timings.


PROPS = "/props"
STOPS = {"eos": "stop", "word": "stop", "limit": "length"}


def identify(pages: Pages) -> About | None:
    props = table(pages.get(PROPS))
    if "default_generation_settings" not in props:
        return None
    build = props.get("build_info")
    facts = {name: props[name] for name in ("total_slots", "model_path") if isinstance(props.get(name), str | int)}
    return About(build if isinstance(build, str) else None, facts)


def call(ask: Ask) -> tuple[str, dict[str, Any]]:
    """All settings are said: what it does by itself is top_k 40, top_p 0.95 and min_p 0.05."""
    settings = ask.settings
    body: dict[str, Any] = {
        "temperature": settings.temperature, "top_k": settings.top_k, "top_p": settings.top_p,
        "min_p": settings.min_p, "repeat_penalty": settings.repetition_penalty,
        "seed": ask.seed % 2**31, "cache_prompt": False, "stream": True, "return_tokens": True,
    }  # fmt: skip
    if settings.repetition_penalty != 1:
        body["repeat_last_n"] = FAR
    if ask.prompt_ids is None:
        return "/v1/chat/completions", openai.common(ask) | body | openai.thinking(ask) | {"messages": ask.chat}
    return "/completion", body | {"prompt": list(ask.prompt_ids), "n_predict": ask.max_new_tokens}


def read(event: Mapping[str, Any], heard: StreamState) -> None:
    if event.get("error") is not None or "choices" in event:
        openai.read(event, heard)
    else:
        finish = STOPS.get(str(event.get("stop_type"))) if event.get("stop") is True else None
        # The last event repeats no token, and those before name what they bring.
        heard.delta(text_of(event.get("content")), ids_of(event.get("tokens")), finish)
        heard.num_prompt_tokens = whole(event.get("tokens_evaluated")) or heard.num_prompt_tokens
    timings = table(event.get("timings"))
    if (num := whole(timings.get("predicted_n"))) is not None:
        heard.num_tokens = num
    if (cached := whole(timings.get("cache_n"))) is not None:
        heard.num_cached_tokens = cached
    if heard.finish is None or heard.num_tokens is None:
        return
    # A token of half a character is not sent by itself, and its id never.
    if (missing := heard.num_tokens - len(heard.token_ids)) > 0:
        if heard.token_ids and missing > 3 * (1 + sum(not letter.isascii() for letter in heard.text)):
            raise AnswerError(f"{len(heard.token_ids)} ids came, but the server counts {heard.num_tokens} tokens")
        heard.ids_missing = True
    drafted, accepted = whole(timings.get("draft_n")), whole(timings.get("draft_n_accepted"))
    if drafted is not None and accepted is not None:
        # What was drafted was drafted in a round, even if the end cut all but its drafts.
        rounds = max(heard.num_tokens - 1 - accepted, 1 if drafted else 0)
        heard.counts = AcceptanceCounts("llamacpp.timings", rounds, drafted, accepted)


LLAMACPP = Dialect("llamacpp", (PROPS,), identify, call, read, prefix_cache="off")


# `llama-server`: options as in llama.cpp's documentation of its server and of speculation (docs/speculative.md).


EXACT = (
    "--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32",
)  # fmt: skip
"""Flash attention computes in float16 on a CPU, and the cache holds float16, whatever the weights are."""
EXACT_DRAFT = ("--cache-type-k-draft", "f32", "--cache-type-v-draft", "f32")


def words(serving: Serving, port: int) -> list[str]:
    exact = serving.dtype == "float32"
    return [
        "--model", serving.target, "--alias", serving.model, "--host", "127.0.0.1", "--port", str(port),
        # It divides its context between the answers at a time.
        "--ctx-size", str(serving.length * serving.slots), "--parallel", str(serving.slots), "--metrics",
        *(EXACT if exact else ()),
        *(_speculation(serving) + list(EXACT_DRAFT if exact else ()) if serving.draft is not None else ()),
    ]  # fmt: skip


def _speculation(serving: Serving) -> list[str]:
    return [
        "--model-draft", str(serving.draft), "--spec-type", f"draft-{serving.method.name}",
        "--spec-draft-n-max", str(serving.num_drafts),
    ]  # fmt: skip


LLAMACPP_PROGRAM = Program("llama.cpp", "llama-server", True, ("dflash", "eagle3"), "LLAMA_API_KEY", words)
