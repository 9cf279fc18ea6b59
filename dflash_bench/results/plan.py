"""The answers that a run must contain: one for each prompt, turn, repeat, settings and method.

`run.json` stores it as {"methods": [...], "repeats": R, "prompts": {suite: [[id, number of turns, hash], ...]}}; the
settings are in the identity, as {"settings": [{"temperature": 0.0, "top_k": 0, ...}, ...]}.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import BASELINE as BASELINE
from dflash_bench.core.types import GREEDY, Settings
from dflash_bench.results.identity import settings_of

if TYPE_CHECKING:
    from dflash_bench.results.run_info import RunInfo

MOST_ANSWERS = 20_000_000
DRAWN = "drawn"
"""The order of prompts under a time limit: any leading part of it is a sample."""


class PromptRef(NamedTuple):
    """A prompt of the plan, with the hash of its text."""

    prompt_id: str
    num_turns: int
    prompt_hash: str


class AnswerPlace(NamedTuple):
    """The place of an answer in a plan; `settings` is an index into the plan's settings."""

    suite: str
    prompt_id: str
    turn: int
    repeat: int
    settings: int
    method: str


@dataclass(frozen=True)
class Plan:
    """Answers are numbered by suite, prompt, turn, repeat, settings and method; the method varies fastest."""

    methods: tuple[str, ...]
    repeats: int
    prompts: Mapping[str, Sequence[PromptRef]]
    """Prompts of each suite."""
    settings: tuple[Settings, ...] = (GREEDY,)

    @cached_property
    def prompt_refs(self) -> list[tuple[str, PromptRef]]:
        return [(suite, prompt) for suite, prompts in self.prompts.items() for prompt in prompts]

    @cached_property
    def first_turns(self) -> list[int]:
        """Return the number of turns before each prompt, and last the number of all turns, [prompts + 1]."""
        return [*accumulate((prompt.num_turns for _, prompt in self.prompt_refs), initial=0)]

    @property
    def num_answers(self) -> int:
        return self.first_turns[-1] * self.repeats * len(self.settings) * len(self.methods)

    def place(self, answer: int) -> AnswerPlace:
        rest, method = divmod(int(answer), len(self.methods))
        rest, settings = divmod(rest, len(self.settings))
        turn, repeat = divmod(rest, self.repeats)
        prompt = bisect_right(self.first_turns, turn) - 1
        suite, ref = self.prompt_refs[prompt]
        turn_of_prompt = turn - self.first_turns[prompt]
        return AnswerPlace(suite, ref.prompt_id, turn_of_prompt, repeat, settings, self.methods[method])


def recorded(info: RunInfo, where: str) -> Plan:
    """Return the plan in the `run.json` at `where`. Raises UserError if it was edited or is missing."""
    if info.plan is None or sha256(info.plan.to_json()) != info.identity.plan:
        raise UserError(f"{where}: the plan is not the one the run was started with; restore the original file")
    methods = tuple(info.plan.methods)
    prompts = {suite: [PromptRef(*entry) for entry in some] for suite, some in info.plan.prompts.items()}
    repeated = [suite for suite, some in prompts.items() if len({prompt.prompt_id for prompt in some}) < len(some)]
    if repeated or len(set(methods)) < len(methods):
        raise UserError(f"{where}: the plan lists a prompt or a method twice; restore the original file")
    plan = Plan(methods, info.plan.repeats, prompts, settings_of(info.identity, where))
    if info.measured is None:
        return plan
    if info.identity.order != DRAWN or info.options.entry("budget") is None:
        raise UserError(
            f"{where}: `measured` is of a run with a time limit, which this is not; restore the original file"
        )
    return _cut(plan, info.measured, where)


def _cut(plan: Plan, measured: Mapping[str, int], where: str) -> Plan:
    """Return the part of the plan measured by a run with a time limit: the first prompts of each suite."""
    if measured.keys() != plan.prompts.keys() or any(
        not 0 <= number <= len(plan.prompts[suite]) for suite, number in measured.items()
    ):
        raise UserError(f"{where}: `measured` does not fit the plan; restore the original file")
    prompts = {suite: all_of[: measured[suite]] for suite, all_of in plan.prompts.items() if measured[suite]}
    return replace(plan, prompts=prompts)


def refuse_size(plan: Plan, where: str) -> None:
    if plan.repeats < 1 or not 0 < plan.num_answers <= MOST_ANSWERS:
        num = max(plan.num_answers, 0)
        raise UserError(f"{where}: the run would have {num:,} answers, but a run can have 1 to {MOST_ANSWERS:,}")


def sha256(stored: Mapping[str, Any]) -> str:
    """Return the hash of a plan in JSON, independent of formatting."""
    return hashlib.sha256(json.dumps(stored, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def differences(then: Mapping[str, Any], now: Mapping[str, Any], is_ordered: bool = False) -> Iterator[str]:
    """Yield how the JSON of two plans differs, with one differing prompt per suite as an example.

    `is_ordered`: whether the order counts, as where a time limit leaves only the first prompts.
    """
    for name in ("methods", "repeats"):
        if then[name] != now[name]:
            yield f"{name} were {json.dumps(then[name])}, now {json.dumps(now[name])}"
    for suite in sorted(then["prompts"].keys() | now["prompts"].keys()):
        old, new = ([tuple(prompt) for prompt in plan["prompts"].get(suite, [])] for plan in (then, now))
        if other := {*old} ^ {*new}:
            yield f"{len(other)} prompts of {suite} differ, such as {min(other)[0]}"
        elif is_ordered and old != new:
            yield f"the prompts of {suite} come in another order"
