"""`--for`: measure prompts until the time is up, where intervals are widest.

The next prompt comes from the suite that has the cell with the least certain speed-up, by the relative standard error
of its mean over prompts. This hardly biases a suite's figures: its prompts keep the order in which they were drawn, so
a longer run only extends a shorter one. Only the clock stops the run. Stopping once an interval is narrow would bias
it: the run would stop where prompts are alike by chance.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, variance

from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Answer, Settings
from dflash_bench.results.plan import BASELINE
from dflash_bench.results.store import Key, RunStore
from dflash_bench.runner.work import WorkItem, WorkPlan
from dflash_bench.tasks.suites import Loaded

FIRST = 3
"""The first prompts of each suite, measured before suites are compared."""
CONTROLS = (0, 3, 15)
"""The prompts of a suite that the baseline decodes twice; which prompt will be the last is not known."""
PRIOR = 4
"""The weight, in prompts, of the variance pooled over all suites: a few prompts that agree prove little."""
UNITS = {"s": 1, "m": 60, "h": 3600}
Cell = tuple[str, Settings]


def seconds(text: str) -> float:
    """Parse `90s`, `5m` or `1.5h`. Raises UserError for anything else, and for zero."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)([smh])", text)
    if match is None or float(match[1]) == 0:
        raise UserError(f"--for takes a time above 0 with its unit, such as 90s, 5m or 1.5h, not '{text[:40]}'")
    return float(match[1]) * UNITS[match[2]]


@dataclass(slots=True)
class Spent:
    """The measurements of a suite so far."""

    loaded: Loaded
    num: int = 0
    """The number of prompts begun."""
    logs: dict[Cell, list[float]] = field(default_factory=dict)
    """For each cell, the logarithm of each prompt's speed-up."""
    seconds: list[float] = field(default_factory=list)
    """The time of each prompt, over all methods."""

    @property
    def is_left(self) -> bool:
        return self.num < len(self.loaded.prompts)


@dataclass(frozen=True, slots=True)
class BegunPrompt:
    """A prompt that is being measured, under all settings and repeats."""

    spent: Spent
    items: tuple[WorkItem, ...]


class PromptChooser:
    """Chooses the next prompt of a run with a time limit, until all are started or the time is up.

    A prompt runs through all methods, settings and repeats, and is begun only if there is likely time for all of it; at
    least one prompt is measured. The suites of `plan` hold prompts in the order in which they were drawn. Several
    prompts may be begun before the first of them is measured.
    """

    def __init__(self, plan: WorkPlan, run: RunStore, budget_s: float) -> None:
        self.plan, self.run = plan, run
        self._began = run.seconds()
        self._deadline = self._began + budget_s - run.spent_s
        self._suites = [Spent(loaded) for loaded in plan.suites]
        self._begun = deque(_begun(run, self._suites))
        self._next_order = run.next_order

    def begin(self) -> BegunPrompt | None:
        """Return the next prompt; None if none is left or fits the time. Interrupted prompts come first."""
        if self._begun:
            return self._items(*self._begun.popleft())
        left_s = self._deadline - self.run.seconds() if any(spent.num for spent in self._suites) else math.inf
        chosen = next_suite(self._suites, left_s)
        return None if chosen is None else self._items(chosen, chosen.num)

    def _items(self, spent: Spent, number: int) -> BegunPrompt:
        def of_prompt(first: int) -> tuple[WorkItem, ...]:
            return tuple(self.plan.of_prompt(spent.loaded, number, number in CONTROLS, first))

        spent.num += 1
        first = _stored_order(self.run, of_prompt(0))
        first = self._next_order if first is None else first
        self._next_order = max(self._next_order, first + sum(len(_keys(item)) for item in of_prompt(0)))
        return BegunPrompt(spent, of_prompt(first))

    def end(self, prompt: BegunPrompt) -> None:
        """Record the results of a prompt whose answers are stored."""
        records = [self.run.stored[key] for item in prompt.items for key in _keys(item)]
        prompt.spent.seconds.append(_seconds(records, self._began))
        for cell in dict.fromkeys((record.method, record.settings) for record in records if record.method != BASELINE):
            if (log := _log_ratio(records, *cell)) is not None:
                prompt.spent.logs.setdefault(cell, []).append(log)


def items(chooser: PromptChooser) -> Iterator[WorkItem]:
    """Yield the items of one prompt after another; each is measured when the next is asked for."""
    while (prompt := chooser.begin()) is not None:
        yield from prompt.items
        chooser.end(prompt)


def measured(plan: WorkPlan, run: RunStore) -> dict[str, int]:
    """Return how many prompts of each suite are complete, from the first in order."""
    counts = {}
    for loaded in plan.suites:
        whole = [_is_whole(plan, run, loaded, number) for number in range(len(loaded.prompts))]
        counts[loaded.suite.name] = whole.index(False) if False in whole else len(whole)
    return counts


def next_suite(suites: Sequence[Spent], left_s: float) -> Spent | None:
    """Choose the next suite among those with a prompt left that fits into `left_s`; None if there is none."""
    longest = max((median(spent.seconds) for spent in suites if spent.seconds), default=0.0)
    fitting = [
        spent for spent in suites if spent.is_left and (median(spent.seconds) if spent.seconds else longest) < left_s
    ]
    if not fitting:
        return None
    fewest = min(fitting, key=lambda spent: spent.num)
    if fewest.num < FIRST:
        return fewest
    pooled = _pooled(suites)
    return max(fitting, key=lambda spent: (_width(spent, pooled), -spent.num))


def _pooled(suites: Sequence[Spent]) -> dict[Cell, float]:
    """Return the variance of log speed-ups within suites, pooled over all suites, by method and settings."""
    pooled = {}
    for cell in dict.fromkeys(cell for spent in suites for cell in spent.logs):
        samples = [logs for spent in suites if len(logs := spent.logs.get(cell, [])) > 1]
        df = sum(len(logs) - 1 for logs in samples)
        pooled[cell] = sum(variance(logs) * (len(logs) - 1) for logs in samples) / df if df else 0.0
    return pooled


def _width(spent: Spent, pooled: Mapping[Cell, float]) -> float:
    """Return the largest standard error of a cell's mean log speed-up, which is a relative error."""
    widths = [0.0]
    for cell, logs in spent.logs.items():
        df = len(logs) - 1
        spread = variance(logs) if df > 0 else 0.0
        widths.append(math.sqrt((df * spread + PRIOR * pooled[cell]) / (df + PRIOR) / len(logs)))
    return max(widths)


def _begun(run: RunStore, suites: Sequence[Spent]) -> list[tuple[Spent, int]]:
    """Return the prompts with a stored answer, and those before them, in the order they were measured."""
    places: dict[tuple[str, str], int] = {}
    for key, record in run.stored.items():
        places[key[:2]] = min(record.order, places.get(key[:2], record.order))
    turns = []
    for spent in suites:
        name = spent.loaded.suite.name
        orders = [places.get((name, prompt.prompt_id)) for prompt in spent.loaded.prompts]
        last = max((number for number, order in enumerate(orders) if order is not None), default=-1)
        turns += [(math.inf if order is None else order, spent, n) for n, order in enumerate(orders[: last + 1])]
    return [(spent, number) for _, spent, number in sorted(turns, key=lambda turn: turn[0])]


def _is_whole(plan: WorkPlan, run: RunStore, loaded: Loaded, number: int) -> bool:
    return all(key in run.stored for item in plan.of_prompt(loaded, number, False, 0) for key in _keys(item))


def _keys(item: WorkItem) -> list[Key]:
    return [item.key(method, turn) for turn in range(len(item.prompt.turns)) for method in item.methods]


def _stored_order(run: RunStore, of_prompt: Sequence[WorkItem]) -> int | None:
    """Return the place in the run of a prompt's first answer, if any of its answers is stored."""
    for item in of_prompt:
        for place, key in enumerate(_keys(item)):
            if key in run.stored:
                return run.stored[key].order - item.order - place
    return None


def _seconds(records: Sequence[Answer], began: float) -> float:
    """Return the time from first start to last end; only the answers' sum if an earlier process started the prompt."""
    starts, ends = ([getattr(record, name) or 0.0 for record in records] for name in ("start_s", "end_s"))
    if min(starts) >= began:
        return max(ends) - min(starts)
    return sum(ends) - sum(starts)


def _log_ratio(records: Sequence[Answer], method: str, settings: Settings) -> float | None:
    """Return the log speed-up of a prompt; None if an answer failed or is too short to have one."""
    costs = []
    for name in (BASELINE, method):
        generations = [record.generation for record in records if (record.method, record.settings) == (name, settings)]
        tokens = sum(one.num_decoded for one in generations)
        decoded_s = sum(one.decode_s for one in generations if one.num_decoded)
        if any(one.error for one in generations) or decoded_s <= 0 or tokens <= 0:
            return None
        costs.append(decoded_s / tokens)
    return math.log(costs[0] / costs[1])
