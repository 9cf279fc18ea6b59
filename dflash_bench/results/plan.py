"""What a run is to hold: each of its prompts, turn by turn and repeat by repeat, by every method and settings, once.

In `run.json` it is {"methods": [...], "repeats": R, "prompts": {suite: [[id, number of turns, hash], ...]}}; the
settings stand in the identity, as {"settings": [{"temperature": 0.0, "top_k": 0, ...}, ...]}.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from dflash_bench.errors import UserError
from dflash_bench.records import GREEDY, Settings
from dflash_bench.results.identity import settings_of

BASELINE = "ar"
"""The method that decodes plainly."""
MOST_ANSWERS = 20_000_000


class Asked(NamedTuple):
    """A prompt, by the hash of what the model is asked."""

    prompt_id: str
    num_turns: int
    prompt_hash: str


class Place(NamedTuple):
    """Of an answer in a plan; `settings` by their number."""

    suite: str
    prompt_id: str
    turn: int
    repeat: int
    settings: int
    method: str


@dataclass(frozen=True)
class Plan:
    """Its answers are numbered by suite, prompt, turn, repeat, settings and, fastest, method."""

    methods: tuple[str, ...]
    repeats: int
    prompts: Mapping[str, Sequence[Asked]]
    """By suite."""
    settings: tuple[Settings, ...] = (GREEDY,)

    @cached_property
    def asked(self) -> list[tuple[str, Asked]]:
        return [(suite, prompt) for suite, own in self.prompts.items() for prompt in own]

    @cached_property
    def first_turns(self) -> Any:
        """The number of turns before each prompt, and of all, [prompts + 1]."""
        return np.cumsum([0, *(prompt.num_turns for _, prompt in self.asked)])

    @property
    def num_answers(self) -> int:
        return int(self.first_turns[-1]) * self.repeats * len(self.settings) * len(self.methods)

    def place(self, answer: int) -> Place:
        rest, method = divmod(int(answer), len(self.methods))
        rest, settings = divmod(rest, len(self.settings))
        turn, repeat = divmod(rest, self.repeats)
        prompt = int(np.searchsorted(self.first_turns, turn, side="right")) - 1
        suite, asked = self.asked[prompt]
        own_turn = turn - int(self.first_turns[prompt])
        return Place(suite, asked.prompt_id, own_turn, repeat, settings, self.methods[method])


def recorded(info: Mapping[str, Any], where: str) -> Plan | None:
    """That of a `run.json`, which lies at `where`; None for an older one. Raises UserError for an edited one."""
    stored, expected = info.get("plan"), info["identity"].get("plan")
    if (None if stored is None else sha256(stored)) != expected:
        raise UserError(f"{where}: its plan is not the one that the run was started with; put back what was there")
    if stored is None:
        return None
    plan = of_json(stored, settings_of(info["identity"], where), where)
    return _cut(plan, info["measured"], where) if "measured" in info else plan


def _cut(plan: Plan, measured: Mapping[str, int], where: str) -> Plan:
    """What a run that had only so much time measured of its plan: of each suite the first so many prompts."""
    if measured.keys() != plan.prompts.keys() or any(
        not 0 <= number <= len(plan.prompts[suite]) for suite, number in measured.items()
    ):
        raise UserError(f"{where}: what it measured is not of its plan; put back what was there")
    prompts = {suite: own[: measured[suite]] for suite, own in plan.prompts.items() if measured[suite]}
    return replace(plan, prompts=prompts)


def of_json(stored: Mapping[str, Any], settings: tuple[Settings, ...], where: str) -> Plan:
    """Raises UserError for what `to_json` did not make; `where` is the file that it is from."""
    methods, repeats = tuple(stored["methods"]), stored["repeats"]
    prompts = {suite: [_asked(entry, where) for entry in own] for suite, own in stored["prompts"].items()}
    twice = [suite for suite, own in prompts.items() if len({prompt.prompt_id for prompt in own}) < len(own)]
    if twice or len(set(methods)) < len(methods) or not methods or repeats < 1:
        raise UserError(f"{where}: its plan names a prompt or a method twice, or nothing; put back what was there")
    return Plan(methods, repeats, prompts, settings)


def refuse_size(plan: Plan, where: str) -> None:
    if plan.repeats < 1 or not 0 < plan.num_answers <= MOST_ANSWERS:
        num = max(plan.num_answers, 0)
        raise UserError(f"{where}: the run would be of {num:,} answers, where a run has 1 to {MOST_ANSWERS:,}")


def _asked(entry: Any, where: str) -> Asked:
    match entry:
        case [str(), int(), str()] if not isinstance(entry[1], bool) and 0 < entry[1] < MOST_ANSWERS:
            return Asked(*entry)
    raise UserError(
        f"{where}: a prompt of its plan is not an id, a number of turns and a hash; put back what was there"
    )


def to_json(plan: Plan) -> dict[str, Any]:
    prompts = {
        suite: [[prompt.prompt_id, prompt.num_turns, prompt.prompt_hash] for prompt in own]
        for suite, own in plan.prompts.items()
    }
    return {"methods": list(plan.methods), "repeats": plan.repeats, "prompts": prompts}


def sha256(stored: Mapping[str, Any]) -> str:
    """Of its JSON, however that is written."""
    return hashlib.sha256(json.dumps(stored, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Between the JSON of two plans, what was first; of prompts the first of each suite."""
    for name in ("methods", "repeats"):
        if then[name] != now[name]:
            yield f"{name} were {json.dumps(then[name])}, now {json.dumps(now[name])}"
    for suite in sorted(then["prompts"].keys() | now["prompts"].keys()):
        old, new = ({tuple(prompt) for prompt in each["prompts"].get(suite, [])} for each in (then, now))
        if old != new:
            yield f"{len(old ^ new)} prompts of {suite} are not the same, such as {min(old ^ new)[0]}"
