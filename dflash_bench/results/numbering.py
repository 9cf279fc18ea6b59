"""Rows matched with the numbered answers of the plan: which are not in it, which are duplicates, which are plain."""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash_bench.results.plan import BASELINE, Plan
from dflash_bench.results.witness import Rows


class Answers:
    """A place is a turn, repeat and settings; an answer is a place and a method."""

    def __init__(self, plan: Plan, rows: Rows) -> None:
        prompt = self._prompts(plan, rows)
        prompts = [asked for _, asked in plan.asked]
        hashes = {text: code for code, text in enumerate(rows.names["prompt_hash"])}
        wanted = np.array([hashes.get(asked.prompt_hash, -2) for asked in prompts] or [-2])
        turns = np.array([asked.num_turns for asked in prompts] or [0])
        codes = [plan.methods.index(name) if name in plan.methods else -1 for name in rows.names["method"]]
        method = np.array([*codes, -1])[rows.codes["method"]]
        known = (prompt >= 0) & (method >= 0) & (rows.repeat >= 0) & (rows.repeat < plan.repeats) & (rows.turn >= 0)
        known &= (rows.turn < turns[prompt]) & (rows.codes["prompt_hash"] == wanted[prompt]) & (rows.settings >= 0)
        self.foreign = np.flatnonzero(~known)
        """Rows that are not in the plan."""
        place = (plan.first_turns[prompt] + rows.turn) * plan.repeats + rows.repeat
        self.place = np.where(known, place * len(plan.settings) + rows.settings, -1)
        self.is_last_turn = known & (rows.turn == turns[prompt] - 1)
        answer = np.where(known, self.place * len(plan.methods) + method, -1)
        self.counts = np.bincount(answer[known], minlength=plan.num_answers)
        self.second = self._second(answer)
        """Rows whose answer an earlier row already holds."""
        self.is_plain = rows.codes["method"] == rows.code("method", BASELINE)
        self.plain = np.full(plan.num_answers // len(plan.methods) + 1, -1)
        """The row of each place's plain answer; -1 where there is none, and in the extra entry at the end."""
        (plain,) = np.nonzero(self.is_plain & known)
        self.plain[self.place[plain[::-1]]] = plain[::-1]

    @staticmethod
    def _prompts(plan: Plan, rows: Rows) -> Any:
        """The number of each row's prompt in the plan; -1 if the plan has no such prompt."""
        ids = {text: code for code, text in enumerate(rows.names["prompt_id"])}
        numbers = np.full((len(plan.prompts) + 1, len(ids) + 1), -1)
        before = 0
        for suite, prompts in enumerate(plan.prompts.values()):
            present = [(ids[asked.prompt_id], before + n) for n, asked in enumerate(prompts) if asked.prompt_id in ids]
            if present:
                codes, in_plan = np.array(present).T
                numbers[suite, codes] = in_plan
            before += len(prompts)
        suites = list(plan.prompts)
        of_suite = np.array([*(suites.index(s) if s in plan.prompts else -1 for s in rows.names["suite"]), -1])
        return numbers[of_suite[rows.codes["suite"]], rows.codes["prompt_id"]]

    def _second(self, answer: Any) -> Any:
        twice: Any = np.zeros(0, dtype=np.int64)
        if self.counts.max(initial=0) > 1:
            twice = np.flatnonzero((answer >= 0) & (self.counts[answer] > 1))
        _, first = np.unique(answer[twice], return_index=True)
        return np.delete(twice, first)
