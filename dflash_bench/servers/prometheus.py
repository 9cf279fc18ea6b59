"""Prometheus counters of a server, and what an answer that was alone there adds to them.

vLLM, lmdeploy and llama.cpp count rounds under the same names, each with a prefix of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dflash_bench.core.labels import shortened, visible
from dflash_bench.servers.stream import AcceptanceCounts

METRICS = "/metrics"
LONGEST = 1 << 24
"""Bytes of that page."""
PREFIXES = ("vllm", "lmdeploy", "llamacpp")
ROUNDS, DRAFTED, ACCEPTED = (f"spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens"))
BY_POSITION = f"{ACCEPTED}_per_pos"
TOKENS = ("generation_tokens", "tokens_predicted")
"""What these servers call the tokens of all answers."""
LINE = re.compile(rf"^({'|'.join(PREFIXES)}):([a-z_]{{1,80}}?)(?:_total)?(?![a-z0-9_:])(.*)$", re.MULTILINE)
VALUE = re.compile(r'(?:\{((?:[^"{}]|"(?:[^"\\]|\\.)*")*)\})?[ \t]+(\S+)(?:[ \t]+-?[0-9]+)?[ \t\r]*')
"""Labels and value of a line, and perhaps a time."""
NUMBER = re.compile(r"[+-]?(?:[0-9]{1,400}(?:\.[0-9]{0,400})?|\.[0-9]{1,400})(?:[eE][+-]?[0-9]{1,4})?")
MOST = 2.0**53
"""Above this, a number of this type has no unit's place, and differences are none."""
POSITION = re.compile(r'(?:^|,) *position="([0-9]{1,3})"')


@dataclass(frozen=True, slots=True)
class Counters:
    """What a server has counted since it started; summed over its engines."""

    prefix: str
    values: Mapping[str, float]
    at: Mapping[int, float] = field(default_factory=dict)
    """By position in the draft, counted from 0: how many rounds accepted it."""
    wrong: str | None = None
    """The first value that is no count, with its name: nothing of these counters can then be used."""

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
    wrong: dict[str, str] = {}
    for match in LINE.finditer(text):
        prefix, name, rest = match.groups()
        if name not in (ROUNDS, DRAFTED, ACCEPTED, BY_POSITION, *TOKENS):
            continue
        labels, said = found.groups() if (found := VALUE.fullmatch(rest)) else ("", rest.strip())
        value = _count(said)
        if value is None:
            wrong.setdefault(prefix, f"{prefix}:{name} is no count but '{shortened(visible(said), 40)}'")
        values = by_prefix.setdefault(prefix, {})
        position = POSITION.search(labels or "") if name == BY_POSITION else None
        if name == BY_POSITION and position is None:
            continue
        if position is None:
            values[name] = values.get(name, 0.0) + (value or 0.0)
        else:
            places = at.setdefault(prefix, {})
            places[int(position[1])] = places.get(int(position[1]), 0.0) + (value or 0.0)
    for prefix in PREFIXES:
        if by_prefix.get(prefix):
            return Counters(prefix, by_prefix[prefix], at.get(prefix, {}), wrong.get(prefix))
    return None


def unreadable(why: str) -> Counters:
    return Counters("", {}, wrong=why)


def _count(said: str) -> float | None:
    """A whole number from 0 up; None for anything else that a page may hold, such as NaN."""
    value = float(said) if NUMBER.fullmatch(said) else -1.0
    return value if 0 <= value <= MOST and value.is_integer() else None


def lag(before: Counters, after: Counters, num_tokens: int) -> float:
    """Tokens of the answer that are not counted yet: a server may count after it has answered."""
    if before.tokens is None or after.tokens is None:
        return 0.0
    return num_tokens - (after.tokens - before.tokens)


def difference(before: Counters | None, after: Counters | None, num_tokens: int) -> AcceptanceCounts | str:
    """What an answer of so many tokens added, or why that cannot be told; `counted.contradiction` checks what it is."""
    if wrong := next((one.wrong for one in (before, after) if one is not None and one.wrong), None):
        return f"the server's counters cannot be read: {wrong}"
    if before is None or after is None or not after.count_rounds:
        return "the server counts no rounds, neither in its answers nor in its metrics"
    added = {name: value - before.values.get(name, 0.0) for name, value in after.values.items()}
    if before.prefix != after.prefix or min(added.values()) < 0:
        return "the server's counters went back: it was started anew"
    counted = next((added[name] for name in TOKENS if name in added), None)
    if counted is not None and counted != num_tokens:
        return f"the server counted {counted:.0f} tokens for an answer of {num_tokens}: others use it, too"
    rounds, drafted, accepted = (int(added[name]) for name in (ROUNDS, DRAFTED, ACCEPTED))
    return AcceptanceCounts(f"{after.prefix}.counters", rounds, drafted, accepted, _at(before, after))


def _at(before: Counters, after: Counters) -> tuple[int, ...] | None:
    """How many rounds accepted each position; None for a server that does not tell."""
    added = {place: value - before.at.get(place, 0.0) for place, value in after.at.items()}
    return tuple(int(added.get(place, 0.0)) for place in range(max(added) + 1)) if added else None
