"""SGLang: /generate with token ids, or its OpenAI path where we have no tokenizer; counts of rounds in meta_info."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_bench.servers.client import AnswerError
from dflash_bench.servers.dialects import openai
from dflash_bench.servers.dialects.base import About, Ask, Dialect, Pages
from dflash_bench.servers.stream import AcceptanceCounts, StreamState, at_of_histogram, ids_of, table, text_of, whole

INFO = ("/server_info", "/get_server_info")
"""The new name and the old one."""
FACTS = (
    "model_path", "dtype", "quantization", "kv_cache_dtype", "attention_backend", "tp_size", "speculative_algorithm",
    "speculative_draft_model_path", "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens",
    "disable_radix_cache",
)  # fmt: skip
PROPOSED = ("spec_proposed_drafts", "spec_num_proposed_drafts", "spec_draft_token_num")
ACCEPTED = ("spec_accepted_drafts", "spec_num_correct_drafts", "spec_accept_token_num")
"""By version, newest first."""


def identify(pages: Pages) -> About | None:
    for path in INFO:
        info = table(pages.get(path))
        if "model_path" in info and ("internal_states" in info or "tokenizer_path" in info):
            version = info.get("version")
            facts = {name: info[name] for name in FACTS if isinstance(info.get(name), str | int | bool)}
            return About(version if isinstance(version, str) else None, facts)
    return None


def call(ask: Ask) -> tuple[str, dict[str, Any]]:
    settings = ask.settings
    sampling = {
        "temperature": settings.temperature, "top_p": settings.top_p, "top_k": settings.top_k or -1,
        "min_p": settings.min_p, "repetition_penalty": settings.repetition_penalty,
    }  # fmt: skip
    if ask.prompt_ids is None:
        body = openai.common(ask) | sampling | openai.thinking(ask)
        return "/v1/chat/completions", body | {"messages": ask.chat, "return_meta_info": True}
    sampling["max_new_tokens"] = ask.max_new_tokens
    return "/generate", {"input_ids": list(ask.prompt_ids), "sampling_params": sampling, "stream": True}


def read(event: Mapping[str, Any], heard: StreamState) -> None:
    if event.get("error") is not None or "choices" in event:
        openai.read(event, heard)
        choices = event.get("choices")
        of_choice = table(choices[0]).get("meta_info") if isinstance(choices, list) and choices else None
        _read_meta(table(event.get("meta_info") or of_choice), heard)
        return
    meta = table(event.get("meta_info"))
    given, num, before = ids_of(event.get("output_ids")), whole(meta.get("completion_tokens")), len(heard.token_ids)
    ids, text = _new_ids(given, num, before), text_of(event.get("text"))
    # By version and option of the server, ids and text each are all so far, or what is new.
    if text.startswith(heard.text) or (given is not None and len(given) == num):
        heard.text = ""
    finish = table(meta.get("finish_reason")).get("type")
    heard.delta(text, ids, None if finish is None else str(finish))
    _read_meta(meta, heard)


def _new_ids(ids: list[int] | None, num: int | None, before: int) -> list[int] | None:
    """Of what may repeat all tokens so far, or be only the new ones, which the server's count tells."""
    if ids is None or num is None or before + len(ids) == num:
        return ids
    if len(ids) == num and num >= before:
        return ids[before:]
    raise AnswerError(f"{len(ids)} ids came after {before}, but the server counts {num} tokens")


def _read_meta(meta: Mapping[str, Any], heard: StreamState) -> None:
    for name, key in (
        ("num_tokens", "completion_tokens"),
        ("num_prompt_tokens", "prompt_tokens"),
        ("num_cached_tokens", "cached_tokens"),
    ):
        if (value := whole(meta.get(key))) is not None:
            setattr(heard, name, value)
    rounds = whole(meta.get("spec_verify_ct"))
    if rounds is None or heard.finish is None:
        return
    proposed, accepted = (
        next((value for name in names if (value := whole(meta.get(name))) is not None), None)
        for names in (PROPOSED, ACCEPTED)
    )
    if accepted is not None:
        at = at_of_histogram(meta.get("spec_accept_histogram"))
        heard.counts = AcceptanceCounts("sglang.request", rounds, proposed, accepted, at)
    elif heard.num_tokens is not None:
        # Below 0 it is no count, and is found to be none.
        derived = heard.num_tokens - 1 - rounds if rounds else 0
        heard.counts = AcceptanceCounts("sglang.derived", rounds, proposed, derived)


SGLANG = Dialect("sglang", INFO, identify, call, read, flush="/flush_cache", repeats=True)
