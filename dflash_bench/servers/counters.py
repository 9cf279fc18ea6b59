"""Prometheus counters of a server, and what an answer that was alone there adds to them.

vLLM, lmdeploy and llama.cpp count rounds under the same names, each with a prefix of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from dflash_bench.servers.heard import Counts

METRICS = "/metrics"
PREFIXES = ("vllm", "lmdeploy", "llamacpp")
ROUNDS, DRAFTED, ACCEPTED = (f"spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens"))
TOKENS = ("generation_tokens", "tokens_predicted")
"""What these servers call the tokens of all answers."""
LINE = re.compile(r"^([a-z]+):([a-z_]+?)(?:_total)?(?:\{[^}]*\})? ([-+0-9.eE]+|[+-]?Inf|NaN)(?: -?[0-9]+)?$")


@dataclass(frozen=True, slots=True)
class Counters:
    """What a server has counted since it started; summed over its engines."""

    prefix: str
    values: Mapping[str, float]

    @property
    def count_rounds(self) -> bool:
        return {ROUNDS, DRAFTED, ACCEPTED} <= self.values.keys()

    @property
    def tokens(self) -> float | None:
        return next((self.values[name] for name in TOKENS if name in self.values), None)


def parse(text: str) -> Counters | None:
    """None where no prefix is one that we know."""
    by_prefix: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        if (match := LINE.match(line)) and match[1] in PREFIXES and match[2] in (ROUNDS, DRAFTED, ACCEPTED, *TOKENS):
            values = by_prefix.setdefault(match[1], {})
            values[match[2]] = values.get(match[2], 0.0) + float(match[3])
    for prefix in PREFIXES:
        if prefix in by_prefix:
            return Counters(prefix, by_prefix[prefix])
    return None


def lag(before: Counters, after: Counters, num_tokens: int) -> float:
    """Tokens of the answer that are not counted yet: a server may count after it has answered."""
    if before.tokens is None or after.tokens is None:
        return 0.0
    return num_tokens - (after.tokens - before.tokens)


def difference(before: Counters | None, after: Counters | None, num_tokens: int) -> Counts | str:
    """What an answer of so many tokens added, or why that cannot be told."""
    if before is None or after is None or not after.count_rounds:
        return "the server counts no rounds, neither in its answers nor in its metrics"
    added = {name: value - before.values.get(name, 0.0) for name, value in after.values.items()}
    if any(value < 0 or not math.isfinite(value) for value in added.values()):
        return "the server's counters went back: it was started anew"
    counted = next((added[name] for name in TOKENS if name in added), None)
    if counted is not None and counted != num_tokens:
        return f"the server counted {counted:.0f} tokens for an answer of {num_tokens}: others use it, too"
    rounds, drafted, accepted = (round(added[name]) for name in (ROUNDS, DRAFTED, ACCEPTED))
    longest = math.ceil(drafted / rounds) if rounds else 0
    if accepted > drafted or (rounds == 0 and drafted):
        return "the server's counters contradict each other"
    # A last round may accept more than there was room for.
    if accepted + rounds > max(num_tokens - 1, 0) + longest + 1:
        return f"the server counted {accepted + rounds} tokens of rounds for an answer of {num_tokens}: others use it"
    return Counts(f"{after.prefix}.counters", rounds, drafted, accepted)
