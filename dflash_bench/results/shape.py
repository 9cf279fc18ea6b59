"""What `run.json` and baselines must look like to be read, and where an edited file does not.

A shape is a type, POSITIVE, COUNT, None, a tuple of alternative shapes, a list with the one shape of all its items, or
a dict of shapes by key. The key ANY stands for all other keys; a key that ends in OPTIONAL may be absent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

ANY, OPTIONAL = "*", "?"
WIDTH = "<width>"
"""Stands, as ANY does, for all other keys: numbers of tokens from 1 on, in digits."""
DIGITS = "[1-9][0-9]{0,5}"
POSITIVE, COUNT = "positive", "count"
"""Shapes of numbers that are divided by, and of whole numbers from 0 on."""
MOST = 2**53
"""Larger numbers cannot be counts, and not every whole number above is exact as a float."""

MACHINE: dict[str, Any] = {
    "cpu": (str, None),
    "gpus": [{"name": str}],
    "machine": str,
    "packages": {"torch": (str, None), ANY: (str, None)},
    "python": str,
}
"""The part of the environment that a baseline keeps."""
ENVIRONMENT: dict[str, Any] = MACHINE | {
    "platform": str,
    "num_cores": (int, None),
    "num_usable_cores?": (int, None),
    "git?": ({"commit": str, "dirty?": (bool, None)}, None),
}
MEMORY: dict[str, Any] = {
    "free_bytes": (int, None),
    "target_weights_bytes": int,
    "target_cache_bytes": int,
    "draft_weights_bytes": int,
    "draft_cache_bytes": int,
    "largest_context": (int, None),
    "largest_context_without_drafts": (int, None),
}
"""What was predicted before the models were loaded."""
SETTINGS: dict[str, Any] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "thinking": (bool, None),
    "concurrency": int,
    "context": (int, None),
    "rate": (float, None),
}
IDENTITY: dict[str, Any] = {
    "model": str,
    "target?": (str, None),
    "settings": [SETTINGS],
    "dtype": str,
    "methods?": {ANY: {"name": str, "draft?": (str, None), "options?": dict, "num_drafts": (int, None)}},
    "drafts?": {ANY: {"name?": str, "trained_thinking?": (bool, None), "verifier?": (str, None)}},
    "revisions?": {ANY: (str, None)},
    "unpinned?": [str],
    "suites?": {ANY: {"version": int, "source": str, "prompts": int, "scorer?": str, "contexts?": {ANY: str}}},
    "max_new_tokens?": int,
    "stop_ids?": [int],
    "context_length?": int,
    "seed?": (int, None),
    "repeats?": int,
    "attention?": (str, None),
    "quantize?": (str, None),
    "device?": (str, None),
    "threads?": (int, None),
    "workers?": ({"number": int, "on_one_machine": int, "kinds": [str]}, None),
    "audit?": str,
    "code?": (str, None),
    "plan?": str,
    "servers?": {
        ANY: {
            "address": str,
            "dialect": str,
            "version": (str, None),
            "model": (str, None),
            "prompts": str,
            "prefix_cache": str,
            "facts": dict,
        }
    },
    "slo?": ({"ttft_s?": float, "tpot_s?": float}, None),
    "judge?": ({"target": str, "dtype": str, "weights?": str}, None),
    "fallback?": (str, None),
}
FORWARDS: dict[str, Any] = {
    "rows": COUNT,
    "context": COUNT,
    "seconds": {WIDTH: POSITIVE},
    "least_s?": POSITIVE,
    "bandwidth": POSITIVE,
    "products": POSITIVE,
    "size": {
        "weight_bytes": POSITIVE,
        "matrix_elements": COUNT,
        **{
            f"{name}?": COUNT
            for name in (
                "row_bytes",
                "stored_bytes",
                "num_experts",
                "experts_per_token",
                "expert_bytes",
                "expert_elements",
                "state_bytes",
                "num_layers",
                "vocab_size",
                "itemsize",
            )
        },
        "attention": [{"num_layers": COUNT, "window": (COUNT, None), "query_size": COUNT, "cache_bytes": COUNT}],
    },
}
"""What forwards of several widths took when the run began."""
STORED: dict[str, Any] = {
    "schema": int,
    "run_id?": str,
    "identity": dict,
    "state?": str,
    "started?": (str, None),
    "finished?": (str, None),
    "sandbox?": (str, None),
    "options?": {"target?": (str, None), "model?": (str, None)},
    "resumed?": [{"sandbox?": (str, None)}],
    "measured?": {ANY: int},
    "spoiled?": str,
    "objections?": {ANY: int},
    "canaries?": [{"witness": str, "spoiled": str, "outcome": str, "why?": (str, None)}],
    "span_s?": float,
    "times?": {ANY: {"answers": int, "between_s": float, "prefill_s": float, "decode_s": float}},
    "memory?": (MEMORY, None),
    "workers?": [{"machine": int}],
    "plan?": {"methods": [str], "repeats": int, "prompts": {ANY: [list]}},
}
"""The shape of `run.json` needed to continue the run."""
RUN: dict[str, Any] = STORED | {
    "identity": IDENTITY,
    "environment": ENVIRONMENT,
    "command": str,
    "forwards?": (FORWARDS, None),
    "pass_at_end_s?": float,
}
"""The shape of `run.json` needed to report on the run."""


def faults(shape: Any, value: Any, path: str) -> Iterator[str]:
    """Where the value does not have that shape, outermost first: "identity.temperature is 'x', not a number"."""
    if isinstance(shape, tuple):
        if all(any(faults(one, value, path)) for one in shape):
            yield from faults(shape[0], value, path)
    elif isinstance(shape, dict):
        yield from _in_object(shape, value, path)
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{path} is {_short(value)}, not a list"
        else:
            for number, item in enumerate(value):
                yield from faults(shape[0], item, f"{path}[{number}]")
    elif not _is(shape, value):
        yield f"{path} is {_short(value)}, not {_NAMES[shape]}"


def _in_object(shape: Mapping[str, Any], value: Any, path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{path} is {_short(value)}, not an object"
        return
    known = {key.removesuffix(OPTIONAL): one for key, one in shape.items()}
    for key in shape:
        if key not in value and key not in (ANY, WIDTH) and not key.endswith(OPTIONAL):
            yield f"{path}.{key} is missing"
    if WIDTH in known and not value:
        yield f"{path} is empty"
    for key, item in value.items():
        if key in known or ANY in known:
            name = key if key.isprintable() else repr(key)
            yield from faults(known[key] if key in known else known[ANY], item, f"{path}.{name}")
        elif WIDTH in known:
            if not re.fullmatch(DIGITS, key):
                yield f"{path} has {key!r}, not a number of tokens"
            yield from faults(known[WIDTH], item, f"{path}.{key!r}")


_NAMES = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    None: "null",
    POSITIVE: "a number above 0",
    COUNT: "a whole number from 0 on",
}


def _is(kind: Any, value: Any) -> bool:
    if kind is None:
        return value is None
    if kind in (POSITIVE, COUNT):
        return _is(float if kind == POSITIVE else int, value) and (value > 0 if kind == POSITIVE else value >= 0)
    if kind in (int, float):
        number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        return number and abs(value) < MOST  # False for NaN, too
    return isinstance(value, kind)


def _short(value: Any) -> str:
    match value:
        case dict():
            return "an object"
        case list():
            return "a list"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}..."
