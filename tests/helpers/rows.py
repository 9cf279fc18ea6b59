"""Records made by hand, with times and counts that can be added up in the head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dflash_bench.core import measurement
from dflash_bench.core.types import Answer, Generation


def generation(accepted: Sequence[int] | None, block: int = 0, **changes: Any) -> Generation:
    """Rounds that draft `block` tokens and keep all that verify accepts, after a token from prefill.

    A plain step costs 10 ms: 9 in verify, 1 outside. A round with a draft costs 20: 5 to draft, 12 to verify,
    3 outside. `accepted` None hides the rounds of an answer of 11 tokens in 0.1 s.
    """
    if accepted is None:
        shown: dict[str, Any] = {"token_ids": tuple(range(11)), "decode_s": 0.1}
    else:
        draft_s, verify_s, round_s = (0.005, 0.012, 0.02) if block else (0.0, 0.009, 0.01)
        num_rounds = len(accepted)
        shown = {
            "token_ids": tuple(range(1 + sum(accepted) + num_rounds)),
            "decode_s": num_rounds * round_s,
            "drafted": (block,) * num_rounds,
            "accepted": tuple(accepted),
            "emitted": tuple(kept + 1 for kept in accepted),
            "draft_s": (draft_s,) * num_rounds,
            "verify_s": (verify_s,) * num_rounds,
            "round_s": (round_s,) * num_rounds,
        }
    common = {"text": "", "finish_reason": "stop", "num_prompt_tokens": 5, "prefill_s": 0.02}
    return Generation(**{**common, **shown, **changes})


def record(method: str, prompt_id: str, generated: Generation, /, **changes: Any) -> Answer:
    common: dict[str, Any] = {
        "suite": "gsm8k",
        "suite_version": 1,
        "prompt_hash": f"hash of {prompt_id}",
        "category": None,
        "turn": 0,
        "repeat": 0,
        "order": 0,
    }
    measured = {name: changes.pop(name) for name in measurement.columns() if name in changes}
    common |= {"method": method, "prompt_id": prompt_id, "generation": generated, "measured": measured}
    return Answer(**{**common, **changes})


def plain(prompt_id: str, num_steps: int, changes: dict[str, Any] | None = None, **place: Any) -> Answer:
    return record("ar", prompt_id, generation([0] * num_steps, **(changes or {})), **place)


def drafted(
    prompt_id: str,
    accepted: Sequence[int],
    block: int = 4,
    changes: dict[str, Any] | None = None,
    **place: Any,
) -> Answer:
    return record("dflash", prompt_id, generation(accepted, block, **(changes or {})), **place)


def failed(method: str, prompt_id: str, error: str, **place: Any) -> Answer:
    generated = generation([], finish_reason="error", error=error, token_ids=(), decode_s=9.0)
    return record(method, prompt_id, generated, **place)


def pair(prompt_id: str, accepted: Sequence[int], block: int = 4, **place: Any) -> list[Answer]:
    """The same answer by plain decoding and in rounds, both exact."""
    steps = sum(accepted) + len(accepted)
    return [
        plain(prompt_id, steps, **place),
        drafted(prompt_id, accepted, block, exactness="exact", **place),
    ]


def compared(prompt_id: str, accepted: Sequence[int]) -> list[Answer]:
    """An answer by each method, as a run stores them."""
    first, other = pair(prompt_id, accepted)
    return [first, replace(other, exactness="exact")]
