"""Prometheus counters of a server, and their increase by an answer that ran alone.

vLLM, lmdeploy and llama.cpp count rounds under the same names, with different prefixes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dflash_bench.core.dialects import AcceptanceCounts, Dialect
from dflash_bench.core.labels import shortened, visible

METRICS = "/metrics"
LONGEST = 1 << 24
"""Limit of that page in bytes."""
ROUNDS, DRAFTED, ACCEPTED = (f"spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens"))
BY_POSITION = f"{ACCEPTED}_per_pos"
TOKENS = ("generation_tokens", "tokens_predicted")
"""These servers' names for the total of answer tokens."""
LINE = re.compile(r"^([a-z0-9_]{1,80}):([a-z_]{1,80}?)(?:_total)?(?![a-z0-9_:])(.*)$", re.MULTILINE)
VALUE = re.compile(r'(?:\{((?:[^"{}]|"(?:[^"\\]|\\.)*")*)\})?[ \t]+(\S+)(?:[ \t]+-?[0-9]+)?[ \t\r]*')
"""Labels, value and optional timestamp of a line."""
NUMBER = re.compile(r"[+-]?(?:[0-9]{1,400}(?:\.[0-9]{0,400})?|\.[0-9]{1,400})(?:[eE][+-]?[0-9]{1,4})?")
MOST = 2.0**53
"""Above this a float cannot represent every integer, so differences mean nothing."""
POSITION = re.compile(r'(?:^|,) *position="([0-9]{1,3})"')


@dataclass(frozen=True, slots=True)
class CounterPage:
    """The counters of a server since it started, summed over its engines."""

    rule: str
    """The id of the counters' counting rule."""
    values: Mapping[str, float]
    at: Mapping[int, float] = field(default_factory=dict)
    """The number of rounds that accepted each position of the draft, from 0."""
    wrong: str | None = None
    """The first value that is not a count, with its name; if set, no counter of the page is usable."""

    @property
    def count_rounds(self) -> bool:
        return {ROUNDS, DRAFTED, ACCEPTED} <= self.values.keys()

    @property
    def tokens(self) -> float | None:
        return next((self.values[name] for name in TOKENS if name in self.values), None)


def parse(text: str, dialects: Sequence[Dialect]) -> CounterPage | None:
    """Read the counters of the first dialect whose prefix is on the page; None if there is none."""
    values: dict[str, dict[str, float]] = {}
    at: dict[str, dict[int, float]] = {}
    wrong: dict[str, str] = {}
    prefixes = {one.counters for one in dialects}
    for match in LINE.finditer(text):
        prefix, name, rest = match.groups()
        if prefix not in prefixes or name not in (ROUNDS, DRAFTED, ACCEPTED, BY_POSITION, *TOKENS):
            continue
        labels, text_value = found.groups() if (found := VALUE.fullmatch(rest)) else ("", rest.strip())
        value = _count(text_value)
        if value is None:
            wrong.setdefault(prefix, f"{prefix}:{name} is not a count but '{shortened(visible(text_value), 40)}'")
        known = values.setdefault(prefix, {})
        if name != BY_POSITION:
            known[name] = known.get(name, 0.0) + (value or 0.0)
        elif position := POSITION.search(labels or ""):
            places, place = at.setdefault(prefix, {}), int(position[1])
            places[place] = places.get(place, 0.0) + (value or 0.0)
    for dialect in dialects:
        prefix = dialect.counters or ""
        if values.get(prefix):
            return CounterPage(dialect.counters_rule, values[prefix], at.get(prefix, {}), wrong.get(prefix))
    return None


def unreadable(why: str) -> CounterPage:
    return CounterPage("", {}, wrong=why)


def _count(text: str) -> float | None:
    """Return a non-negative integer; None for anything else on the page, such as NaN."""
    value = float(text) if NUMBER.fullmatch(text) else -1.0
    return value if 0 <= value <= MOST and value.is_integer() else None


def lag(before: CounterPage, after: CounterPage, num_tokens: int) -> float:
    """Return the number of answer tokens not counted yet: a server may count after it has answered."""
    if before.tokens is None or after.tokens is None:
        return 0.0
    return num_tokens - (after.tokens - before.tokens)


def difference(before: CounterPage | None, after: CounterPage | None, num_tokens: int) -> AcceptanceCounts | str:
    """Return the counts added by an answer of `num_tokens`, or why they are unknown. `contradiction` checks them."""
    if wrong := next((page.wrong for page in (before, after) if page is not None and page.wrong), None):
        return f"the server's counters cannot be read: {wrong}"
    if before is None or after is None or not after.count_rounds:
        return "the server counts no rounds, neither in its answers nor in its metrics"
    added = {name: value - before.values.get(name, 0.0) for name, value in after.values.items()}
    if before.rule != after.rule or min(added.values()) < 0:
        return "the server's counters went back: it was restarted"
    counted = next((added[name] for name in TOKENS if name in added), None)
    if counted is not None and counted != num_tokens:
        return f"the server counted {counted:.0f} tokens for an answer of {num_tokens}: someone else uses it, too"
    rounds, drafted, accepted = (int(added[name]) for name in (ROUNDS, DRAFTED, ACCEPTED))
    at = {place: value - before.at.get(place, 0.0) for place, value in after.at.items()}
    by_place = tuple(int(at.get(place, 0.0)) for place in range(max(at) + 1)) if at else None
    return AcceptanceCounts(rounds, accepted, drafted, by_place, after.rule)
