"""Prometheus counters of a server, and what an answer that was alone there adds to them.

vLLM, lmdeploy and llama.cpp count rounds under the same names, each with a prefix of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dflash_bench.servers.heard import Counts

METRICS = "/metrics"
PREFIXES = ("vllm", "lmdeploy", "llamacpp")
ROUNDS, DRAFTED, ACCEPTED = (f"spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens"))
BY_POSITION = f"{ACCEPTED}_per_pos"
TOKENS = ("generation_tokens", "tokens_predicted")
"""What these servers call the tokens of all answers."""
LINE = re.compile(r"^([a-z]+):([a-z_]+?)(?:_total)?(?:\{([^}]*)\})? ([-+0-9.eE]+|[+-]?Inf|NaN)(?: -?[0-9]+)?$")
POSITION = re.compile(r'(?:^|,) *position="([0-9]{1,3})"')


@dataclass(frozen=True, slots=True)
class Counters:
    """What a server has counted since it started; summed over its engines."""

    prefix: str
    values: Mapping[str, float]
    at: Mapping[int, float] = field(default_factory=dict)
    """By position in the draft, counted from 0: how many rounds accepted it."""

    @property
    def count_rounds(self) -> bool:
        return {ROUNDS, DRAFTED, ACCEPTED} <= self.values.keys()

    @property
    def tokens(self) -> float | None:
        return next((self.values[name] for name in TOKENS if name in self.values), None)


def parse(text: str) -> Counters | None:
    """None where no prefix is one that we know."""
    by_prefix: dict[str, dict[str, float]] = {}
    at: dict[str, dict[int, float]] = {}
    for line in text.splitlines():
        if not (match := LINE.match(line)) or match[1] not in PREFIXES:
            continue
        prefix, name, labels, value = match.groups()
        if name in (ROUNDS, DRAFTED, ACCEPTED, *TOKENS):
            values = by_prefix.setdefault(prefix, {})
            values[name] = values.get(name, 0.0) + float(value)
        elif name == BY_POSITION and (position := POSITION.search(labels or "")):
            places = at.setdefault(prefix, {})
            places[int(position[1])] = places.get(int(position[1]), 0.0) + float(value)
    for prefix in PREFIXES:
        if prefix in by_prefix:
            return Counters(prefix, by_prefix[prefix], at.get(prefix, {}))
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
    drafting, drafted, accepted = (round(added[name]) for name in (ROUNDS, DRAFTED, ACCEPTED))
    # A step that drafts nothing is a forward of the target for one token, and in no counter.
    rounds = max(drafting, num_tokens - 1 - accepted)
    longest = math.ceil(drafted / drafting) if drafting else 0
    if accepted > drafted or (drafting == 0 and drafted):
        return "the server's counters contradict each other"
    # A last round may accept more than there was room for.
    if accepted + drafting > max(num_tokens - 1, 0) + longest + 1:
        return f"the server counted {accepted + drafting} tokens of rounds for an answer of {num_tokens}: others use it"
    return Counts(f"{after.prefix}.counters", rounds, drafted, accepted, _at(before, after))


def _at(before: Counters, after: Counters) -> tuple[int, ...] | None:
    """How many rounds accepted each position; None for a server that does not tell."""
    added = {place: value - before.at.get(place, 0.0) for place, value in after.at.items()}
    if not added or not all(map(math.isfinite, added.values())):
        return None
    return tuple(round(added.get(place, 0.0)) for place in range(max(added) + 1))
