"""How a server that hides its rounds counts them: what its totals are, by the id that a row names, and which of them
cannot be those of an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

COUNTED = {
    "vllm.request": "metrics.speculative_decoding of the answer: S is num_spec_steps, with num_draft_tokens and "
    "num_accepted_draft_tokens",
    "vllm.counters": "differences of vllm:spec_decode_num_drafts (S), _num_draft_tokens and _num_accepted_tokens "
    "around the answer; a step that drafts nothing is not in S",
    "tensorrt_llm.request": "speculative_decoding of the answer's choice: S is num_spec_steps, with total_draft_tokens "
    "and total_accepted_draft_tokens",
    "lmdeploy.counters": "differences of lmdeploy:spec_decode_num_drafts (S), _num_draft_tokens and "
    "_num_accepted_tokens around the answer",
    "llamacpp.counters": "differences of llamacpp:spec_decode_num_drafts (S), _num_draft_tokens and "
    "_num_accepted_tokens around the answer; what the last round accepts behind the end is not in them",
    "llamacpp.timings": "draft_n and draft_n_accepted of the answer's timings, without what the last round accepts "
    "behind the end; S = T - 1 - draft_n_accepted, as it is not told, which is too few where the limit cut that round",
    "sglang.request": "meta_info of the answer: S is spec_verify_ct, with the proposed and accepted drafts",
    "sglang.derived": "meta_info of the answer: S is spec_verify_ct, and sum(a_i) = T - 1 - S, without what the limit "
    "cut off the last round",
}
"""For an answer of T tokens in S rounds. All of these are totals; `al.pooled` is 1 + sum(a_i) / S."""


@dataclass(frozen=True, slots=True)
class Law:
    """How far rounds and accepted drafts of an answer may be from the tokens behind its first one.

    Every round but the last brings its accepted drafts and one token more, so that the sum differs only by what the end
    of the answer does to the last one.
    """

    short: int = 0
    """By so much less: tokens at the limit that come without a round."""
    beyond: int | None = 0
    """By so much more; None: by all that the last round accepted behind the end."""


LAWS: Mapping[str, Law] = {
    "vllm.request": Law(beyond=None),
    "vllm.counters": Law(beyond=None),
    "tensorrt_llm.request": Law(beyond=None),
    "lmdeploy.counters": Law(beyond=None),
    "sglang.request": Law(beyond=None),
    "sglang.derived": Law(),
    # With room for one token there is no round; drafts that fill the room are accepted without a bonus token.
    "llamacpp.counters": Law(short=1, beyond=1),
    "llamacpp.timings": Law(beyond=1),
}
MOST_DRAFTED = 256
"""Tokens a round: above the largest blocks and trees that any server drafts."""


def contradiction(
    by: str,
    num_tokens: int,
    rounds: int,
    drafted: int | None,
    accepted: int,
    *,
    most_accepted: int | None = None,
    at_limit: bool = False,
) -> str | None:
    """Why these totals cannot be those of an answer of so many tokens, the first from prefill; None if they can.

    `most_accepted`: in any one round, where that is told. `at_limit`: was the answer ended by its limit?
    """
    after, told = max(num_tokens - 1, 0), rounds + accepted
    if min(rounds, accepted, drafted or 0) < 0 or accepted > (accepted if drafted is None else drafted):
        return "it counts less than nothing, or more accepted drafts than drafts"
    if rounds == 0:
        return None if told == (drafted or 0) == 0 else "it counts drafts without a round"
    if rounds > after:
        return f"it counts {rounds} rounds for {after} tokens after the first, and each brings one at least"
    if drafted is not None and drafted > MOST_DRAFTED * rounds:
        return f"it counts {drafted} drafts in {rounds} rounds, more than {MOST_DRAFTED} each"
    law = LAWS[by]
    if law.beyond is None and drafted is None:
        return "it does not say how many tokens it drafts, so that its counts cannot be checked"
    if told < after - (law.short if at_limit else 0):
        return (
            f"its {rounds} rounds with {accepted} accepted drafts are {told} of the {after} tokens after the first: "
            "it leaves out rounds that draft nothing, or counts wrongly"
        )
    longest = min(one for one in (_ceil(drafted or 0, rounds), most_accepted) if one is not None)
    if told > after + min(longest if law.beyond is None else law.beyond, accepted):
        return (
            f"its {rounds} rounds with {accepted} accepted drafts are {told} tokens, more than the {after} after the "
            "first and what the end cut off: others use it, too, or it counts wrongly"
        )
    return None


def _ceil(whole: int, parts: int) -> int:
    return -(-whole // parts)
