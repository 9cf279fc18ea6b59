"""llama.cpp's server: /completion with token ids, or its OpenAI path without a tokenizer here; counts in timings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_bench.core.dialects import (
    GGUF,
    IMPOSED,
    AcceptanceCounts,
    AnswerError,
    Conversion,
    CountingRule,
    DecodedAnswer,
    Dialect,
    LaunchSpec,
    Pages,
    Program,
    ServerInfo,
    ServerRequest,
    Support,
)
from dflash_bench.servers.dialects import openai
from dflash_bench.servers.stream import StreamState, as_count, as_ids, as_object, as_text

PROPS = "/props"
STOPS = {"eos": "stop", "word": "stop", "limit": "length"}


def identify(pages: Pages) -> ServerInfo | None:
    props = as_object(pages.get(PROPS))
    if "default_generation_settings" not in props:
        return None
    build = props.get("build_info")
    facts = {**props, "n_ctx": as_object(props["default_generation_settings"]).get("n_ctx")}
    known = {
        name: facts[name] for name in ("total_slots", "model_path", "n_ctx") if isinstance(facts.get(name), str | int)
    }
    return ServerInfo(build if isinstance(build, str) else None, known)


def call(request: ServerRequest) -> tuple[str, dict[str, Any]]:
    """Send every setting: the server's defaults are top_k 40, top_p 0.95 and min_p 0.05."""
    settings = request.settings
    body = openai.filters(settings, temperature=settings.temperature) | openai.seeded(request)
    body |= {
        "repeat_penalty": body.pop("repetition_penalty"),
        "cache_prompt": request.salt is None,
        "stream": True,
        "return_tokens": True,
        "timings_per_token": True,
    }
    if settings.repetition_penalty != 1:
        body["repeat_last_n"] = openai.FAR
    if request.prompt_ids is None:
        return openai.CHAT, openai.chat_body(request) | body
    return "/completion", body | {"prompt": list(request.prompt_ids), "n_predict": request.max_new_tokens}


def read(event: Mapping[str, Any], state: StreamState) -> None:
    timings = as_object(event.get("timings"))
    state.set_counts(num_tokens=timings.get("predicted_n"), num_cached_tokens=timings.get("cache_n"))
    if event.get("error") is not None or "choices" in event:
        openai.read(event, state)
    else:
        finish = STOPS.get(str(event.get("stop_type"))) if event.get("stop") is True else None
        # The last event repeats no token, and earlier events name only new tokens.
        state.add_delta(as_text(event.get("content")), as_ids(event.get("tokens")), finish)
        state.set_counts(num_prompt_tokens=as_count(event.get("tokens_evaluated")) or None)
    if state.finish is None or state.num_tokens is None:
        return
    # A token of half a character is not sent by itself, and its id is never sent.
    if (missing := state.num_tokens - len(state.token_ids)) > 0:
        if state.token_ids and missing > 3 * (1 + sum(not letter.isascii() for letter in state.text)):
            num_ids = len(state.token_ids)
            raise AnswerError(f"received {num_ids} token ids, but the server counts {state.num_tokens} tokens")
        state.ids_missing = True
    drafted, accepted = as_count(timings.get("draft_n")), as_count(timings.get("draft_n_accepted"))
    if drafted is not None and accepted is not None:
        rounds = _derived_rounds(state.num_tokens, accepted, drafted)
        state.acceptance = AcceptanceCounts(rounds, accepted, drafted, by="llamacpp.timings")


def _derived_rounds(num_tokens: int, accepted: int, drafted: int | None) -> int:
    """Return the rounds needed for the tokens that are no accepted drafts; at least 1 if anything was drafted."""
    return max(num_tokens - 1 - accepted, 1 if drafted else 0)


def _convert(answer: DecodedAnswer) -> AcceptanceCounts:
    kept, drafted = [], 0
    for left, accepted, emitted in answer.rounds():
        room = min(answer.num_drafts, left - 1)
        if room > 0:
            kept.append(emitted if accepted >= emitted == room else emitted - 1)
            drafted += room
    return answer.counts(kept, drafted)


def _convert_timings(answer: DecodedAnswer) -> AcceptanceCounts:
    counts = _convert(answer)
    rounds = _derived_rounds(answer.num_tokens, counts.accepted, counts.drafted)
    return AcceptanceCounts(rounds, counts.accepted, counts.drafted)


# `llama-server`: options as in llama.cpp's documentation of its server and of speculation (docs/speculative.md).


EXACT = ("--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32")
"""Flash attention computes in float16 on a CPU, and the cache holds float16, whatever the weights are."""
EXACT_DRAFT = ("--cache-type-k-draft", "f32", "--cache-type-v-draft", "f32")


def argv(spec: LaunchSpec, port: int) -> list[str]:
    exact = spec.dtype == "float32"
    return [
        *("--model", spec.target, "--alias", spec.model, "--host", "127.0.0.1", "--port", str(port)),
        # The server divides its context between concurrent answers.
        *("--ctx-size", str(spec.length * spec.slots), "--parallel", str(spec.slots), "--metrics"),
        *(EXACT if exact else ()),
        *(_speculation(spec) if spec.num_drafts is not None else ()),
        *(EXACT_DRAFT if exact and (spec.draft or spec.drafter.name == "mtp") else ()),
    ]


def _speculation(spec: LaunchSpec) -> list[str]:
    # `draft-dflash` always omits the anchor's slot, whatever the file says; `draft-dspark` is for drafts that use it,
    # with or without a Markov head. The heads of MTP are in the target's file.
    if spec.method.name == "ngram":
        # The server looks up n-grams of a single length, and drafts exactly this many tokens or none.
        size, number = str(spec.method.number("max")), str(spec.num_drafts)
        return ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", size, "--spec-ngram-simple-size-m", number]
    name = "dspark" if spec.shifted else spec.drafter.name
    return [
        *(() if spec.draft is None else ("--model-draft", spec.draft)),
        *("--spec-type", f"draft-{name}", "--spec-draft-n-max", str(spec.num_drafts)),
        *(("--spec-synth-rates", ",".join(map(str, spec.rates))) if spec.rates else ()),
    ]


AS_GGUF = "after convert --to gguf"


SUPPORT = Support(
    "b11549",
    "2026-11",
    {
        "dflash": f"{AS_GGUF}; not for Qwen2 targets",
        "jetspec": AS_GGUF,
        "dflash2": AS_GGUF,
        "dspark": f"{AS_GGUF}, with the vanilla head",
        "eagle3": f"{AS_GGUF}; not for Qwen2 targets",
        "mtp": "in the target's GGUF file, of Qwen3.5",
        "draft-model": "as a GGUF file",
    },
    tested="golden cases tested",
)

DIALECT = Dialect(
    "llamacpp",
    (PROPS,),
    identify,
    call,
    read,
    prefix_cache="off",
    counters="llamacpp",
    rules=(
        CountingRule(
            "llamacpp.counters",
            "differences of llamacpp:spec_decode_num_drafts (S), _num_draft_tokens and _num_accepted_tokens around the "
            "answer; what the last round accepts beyond the end is not in them",
            (
                Conversion(
                    "llamacpp",
                    "It drafts no more than may still be emitted besides the bonus token; with nothing left to draft "
                    "there is no round. A stop token that was drafted ends the round as if it were the bonus token, "
                    "unless it is the draft's last.",
                    _convert,
                ),
            ),
            # With one token left there is no round; drafts that reach the limit are accepted without a bonus token.
            short=1,
            beyond=1,
        ),
        CountingRule(
            "llamacpp.timings",
            "draft_n and draft_n_accepted of the answer's timings, without what the last round accepts beyond the end; "
            "S = T - 1 - draft_n_accepted, as it is not reported, which is too few where the limit cut that round",
            (
                Conversion(
                    "llamacpp_timings",
                    "As in its counters, but rounds are not reported: they are taken to be the tokens that no accepted "
                    "draft explains.",
                    _convert_timings,
                ),
            ),
            beyond=1,
            is_derived=True,
        ),
    ),
    remedies={"uncounted": "start llama.cpp's server with --metrics, and let nobody else use it"},
    program=Program(
        "llama.cpp",
        "llama-server",
        GGUF,
        {"dflash": ("n", "block"), "eagle3": ("n",), "mtp": ("n",), "ngram": ("n", "max"), "synthetic": IMPOSED},
        SUPPORT,
        "LLAMA_API_KEY",
        argv,
    ),
)
