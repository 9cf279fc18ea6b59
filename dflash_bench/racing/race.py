"""Races: which method is fastest under a load, decided by intervals over the prompts that the rivals share.

A race consists of rounds, each an ordinary run of plain decoding and the remaining methods, on prompts that no earlier
round had. After a round a method drops out if its interval shows that it is slower than the leader, or at most `WORTH`
faster, which is not worth the time of telling them apart. At most half of the methods continue (successive halving):
telling several level methods apart would take all prompts. All speed-ups are ratios within one run, to plain decoding
of the same prompts, so that rounds measured at different times can be combined prompt by prompt.

The remaining methods are chosen by the figures that the table shows, so that the leader's own speed-up is, if anything,
a little too high.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from dflash_bench.analysis import stats
from dflash_bench.analysis.cells import mismatched, summarise, without_errors
from dflash_bench.analysis.compare import ratio_of
from dflash_bench.analysis.concurrency import own_s, paying
from dflash_bench.analysis.findings import forbidding
from dflash_bench.analysis.gate.checks import FORBIDDEN
from dflash_bench.analysis.metrics import BASELINE, COLUMN, METRICS, columns_of, prompt_sums, statistic_of
from dflash_bench.analysis.stats import FEWEST, Floats, Interval
from dflash_bench.core.measurement import measurements
from dflash_bench.results.table import RunTable

SPEEDUP, LENGTH, BREAK_EVEN, PLAIN_MS = "speedup.decode", "al.pooled", "break_even_al", "plain_ms"
WORTH = 0.03
"""A smaller gain is not worth more measuring: a method that is at most this much faster drops out, too."""

ROUNDING = 1e-6
ONE_WAVE = 0.85
"""With concurrency, a method's answers to a round's prompts are decoded together, so that a disturbance hits all of
them. After the first round only methods with an upper bound below this drop out."""

DRIFT = 0.1
"""A round takes at least as long as a step of plain decoding, within this tolerance. A speed-up above the acceptance
length therefore shows that the machine's speed drifted between the two."""
ENOUGH = 32
"""With fewer prompts, at least two methods continue whose intervals do not separate them."""

Verdict = Literal[
    "leads",
    "level",
    "behind",
    "slower",
    "no_gain",
    "below_plain",
    "wrong",
    "failed",
    "drifted",
    "no_time",
    "waiting",
    "baseline",
]
"""`level`: not told apart from the leader; `behind`: the same, but not in the faster half of a round; `no_gain`: at
most `WORTH` faster than the leader; `drifted`: faster than its acceptance length allows (`DRIFT`); `waiting`: not yet
measured."""
Parts = Mapping[str, tuple[Sequence[str], Floats]]
"""The ids of prompts or sessions in order, and their sums [prompts, sums], by suite."""


@dataclass(frozen=True, slots=True, order=True)
class Load:
    """Concurrency, and the tokens that prompts are padded to (0: no padding)."""

    context: int = 0
    concurrency: int = 1

    @property
    def id(self) -> str:
        return f"c{self.concurrency}" + (f"-{self.context}" if self.context else "")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A method's result in a race; None for a figure that could not be measured."""

    method: str
    verdict: Verdict
    rounds: int = 0
    """Number of rounds measured."""
    num_prompts: int = 0
    speedup: Interval | None = None
    beside: Interval | None = None
    """Its speed-up divided by the leader's, on shared prompts."""
    length: Interval | None = None
    break_even: float | None = None
    tokens_per_s: float | None = None
    """Throughput of all answers: plain decoding's over the whole race, times the ratio to plain in the method's
    runs."""
    ms_per_token: float | None = None
    """Time of a single answer: plain decoding's over the whole race, divided by the speed-up."""
    error: str = ""
    """Error message if the method failed."""
    num_drafts: int | None = None
    """Most tokens drafted per round."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Metrics of measurements: plain decoding's over the whole race, times the ratio to plain in the method's runs."""


MEASURED = tuple(metric for one in measurements() for metric in one.metrics if metric.shown)
"""Metrics of measurements that a race shows beside speed."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision of a race. `choice` is plain decoding's label where no draft pays."""

    load: Load
    choice: str
    verdict: Literal["faster", "plain", "unclear", "too_few", "drifted", "no_time"]
    """`unclear`: the interval of the best method, `choice`, contains 1; `drifted`: no run could be used."""
    speedup: Interval | None
    candidates: tuple[Candidate, ...]
    """Plain decoding first, then the others from the fastest."""
    more_prompts: int | None = None
    """If unclear: about how many more prompts should settle it."""
    slices: tuple[tuple[str, int, Interval], ...] = ()
    """Number of prompts and speed-up of the choice by category, if there are several."""
    loses_from: float | None = None
    """Concurrency from which the choice is no faster than plain decoding, if observed."""

    @property
    def level(self) -> list[Candidate]:
        """The methods that cannot be told apart from the leader."""
        return [candidate for candidate in self.candidates if candidate.verdict == "level"]

    @property
    def leader(self) -> str:
        return next((candidate.method for candidate in self.candidates if candidate.verdict == "leads"), self.choice)

    @property
    def rivals(self) -> list[Candidate]:
        """The methods that cannot be told apart from the choice."""
        return [one for one in self.candidates if one.verdict in ("leads", "level") and one.method != self.choice]

    def of(self, method: str) -> Candidate:
        return next(candidate for candidate in self.candidates if candidate.method == method)


@dataclass(frozen=True, slots=True)
class ContextFit:
    """Predicted longest context in tokens that fits, with a draft and without; the model has positions for `limit`."""

    with_draft: int
    without: int
    limit: int


@dataclass(slots=True)
class Race:
    """A race under one load, round by round."""

    load: Load
    methods: tuple[str, ...]
    """All methods of the race, without plain decoding."""
    tables: list[RunTable] = field(default_factory=list)
    left: dict[str, tuple[Verdict, str]] = field(default_factory=dict)
    """Why a method dropped out, with the error if it failed."""
    rounds: dict[str, int] = field(default_factory=dict)
    has_time: bool = True
    _sums: dict[str, Parts] = field(default_factory=dict)
    _categories: dict[tuple[str, str], str] = field(default_factory=dict)
    """The category by suite and prompt, or session."""

    @property
    def racing(self) -> list[str]:
        return [method for method in self.methods if method not in self.left]

    @property
    def is_decided(self) -> bool:
        """Whether another round could change nothing that matters."""
        racing = self.racing
        if racing and self._is_wave:
            return False
        speedup = self.speedup(racing[0]) if len(racing) == 1 else None
        return not racing or (speedup is not None and speedup.low is not None and speedup.low > 1)

    @property
    def _is_wave(self) -> bool:
        """Whether all of a method's answers so far were decoded together."""
        return self.load.concurrency > 1 and self.num_rounds < 2

    @property
    def measured(self) -> list[str]:
        """The remaining methods with measurements."""
        return [method for method in self.racing if method in self._sums]

    @property
    def num_rounds(self) -> int:
        return max(self.rounds.values(), default=0)

    @property
    def num_prompts(self) -> int:
        """The number of prompts measured so far, over all suites."""
        return max(map(_num_prompts, self._sums.values()), default=0)

    def add(self, tables: Sequence[RunTable], failed: Mapping[str, str]) -> None:
        """Add a round's runs, and the errors of methods that could not be measured; drop methods."""
        num_before = len(self.racing)
        for method in self.racing:
            self.rounds[method] = self.rounds.get(method, 0) + 1
        self.left |= {method: ("failed", error) for method, error in failed.items()}
        off = [drifted(table) for table in tables]
        for table, methods in zip(tables, off, strict=True):
            self._leave_out_wrong(table)
            self.left |= {method: ("drifted", "") for method in methods if method not in self.left}
        # In a drifted run plain decoding was too slow for all methods, not only for those that show it.
        tables = [table for table, methods in zip(tables, off, strict=True) if not methods]
        self.tables += tables
        for table in tables:
            unit = "unit" if "unit" in table.rows else "prompt_id"
            known = table.rows[["suite", unit, "category"]].dropna().drop_duplicates()
            self._categories |= {(suite, prompt): name for suite, prompt, name in known.itertuples(index=False)}
        self._sums = _merged(tables, self._sums)
        for method, verdict in self._verdicts().items():
            if verdict not in ("leads", "level"):
                self.left[method] = (verdict, "")
        if not self._is_wave:
            most = max(1 if self.num_prompts >= ENOUGH else 2, math.ceil(num_before / 2))
            self.left |= dict.fromkeys(self.fastest_first()[most:], ("behind", ""))

    def leave(self, methods: Sequence[str]) -> None:
        """Drop methods for which no time is left."""
        self.left |= dict.fromkeys(methods, ("no_time", ""))

    def fastest_first(self) -> list[str]:
        """Return the remaining methods, the fastest first and those without a speed-up last."""
        values = {method: self.speedup(method) for method in self.racing}
        return sorted(values, key=lambda method: -value.value if (value := values[method]) else math.inf)

    def speedup(self, method: str) -> Interval | None:
        return _mean(self._sums.get(method, {}), SPEEDUP)

    def _leave_out_wrong(self, table: RunTable) -> None:
        """Drop methods that failed, have no speed-up, or gave answers that are not the model's own."""
        rows = table.rows
        for verdict, mask in (("wrong", mismatched(rows)), ("failed", rows["error"].notna())):
            for method, num in rows[mask]["method"].value_counts().items():
                if num and method != BASELINE and method not in self.left:
                    errors = rows[mask & (rows["method"] == method)]["error"].dropna()
                    self.left[str(method)] = (verdict, str(errors.iloc[0]) if len(errors) else "")  # type: ignore[assignment]
        for seen in forbidding(table, summarise(rows, table.info.identity)):
            if seen.cell.method != BASELINE and seen.cell.method not in self.left:
                self.left[seen.cell.method] = ("failed", FORBIDDEN[seen.kind])

    def _verdicts(self) -> dict[str, Verdict]:
        """Return the verdict on each remaining method, the leader's first."""
        order = self.fastest_first()
        found: dict[str, Verdict] = {}
        slow, most = (ONE_WAVE, ONE_WAVE) if self._is_wave else (1.0, 1 + WORTH)
        for method in order:
            over_plain, beside = _high(self.speedup(method)), _high(self.beside(method, order[0]))
            if over_plain < slow:
                found[method] = "below_plain"
            elif method == order[0]:
                found[method] = "leads"
            elif beside >= most:
                found[method] = "level"
            else:
                found[method] = "slower" if beside < 1 - ROUNDING else "no_gain"
        return found

    def beside(self, method: str, leader: str) -> Interval | None:
        """Return a method's speed-up over the leader's on common prompts, a geometric mean over suites."""
        of_both = []
        for suite, (ids, sums) in self._sums.get(method, {}).items():
            known = self._sums.get(leader, {}).get(suite)
            if known is None:
                return None
            place = {prompt: at for at, prompt in enumerate(known[0])}
            own = [at for at, prompt in enumerate(ids) if prompt in place]
            if not own:
                return None
            leaders = known[1][[place[ids[at]] for at in own]]
            of_both.append((np.concatenate([sums[own], leaders], axis=1), ratio_of(SPEEDUP)))
        return stats.geometric_mean(of_both) if of_both else None

    def slices(self, method: str) -> Iterator[tuple[str, int, Interval]]:
        """Yield the speed-up of a method by category, if there are several."""
        names = sorted(set(self._categories.values()))
        for name in names if len(names) > 1 else ():
            parts = {}
            for suite, (ids, sums) in self._sums[method].items():
                places = [at for at, prompt in enumerate(ids) if self._categories.get((suite, prompt)) == name]
                if places:
                    parts[suite] = ([ids[at] for at in places], sums[places])
            if (speedup := _mean(parts, SPEEDUP)) is not None:
                yield name, _num_prompts(parts), speedup

    def decision(self) -> Decision:
        """Return the decision of the race so far."""
        verdicts = self._verdicts()
        leader = next(iter(verdicts), None)
        # If no method is left, those that dropped out are compared with the best of them.
        best = leader or max(self._sums, key=lambda method: getattr(self.speedup(method), "value", 0.0), default=None)
        plain = self._plain()
        others = [self._candidate(method, verdicts.get(method), best, plain) for method in self.methods]
        others.sort(key=lambda one: (one.speedup is None, -one.speedup.value if one.speedup else 0.0))
        candidates = (plain, *others)
        speedup = None if leader is None else self.speedup(leader)
        if not self.tables:
            why: Literal["drifted", "no_time"] = "drifted" if self._has_drifted else "no_time"
            return Decision(self.load, BASELINE, why, None, candidates)
        if leader is None:
            measured = any(candidate.speedup for candidate in others)
            return Decision(self.load, BASELINE, "plain" if measured else "too_few", None, candidates)
        if speedup is None or speedup.low is None or speedup.high is None:
            return Decision(self.load, leader, "too_few", speedup, candidates)
        if speedup.low > 1:
            return Decision(self.load, leader, "faster", speedup, candidates)
        return Decision(self.load, leader, "unclear", speedup, candidates, self._more(leader, speedup))

    @property
    def _has_drifted(self) -> bool:
        return any(verdict == "drifted" for verdict, _ in self.left.values())

    def _more(self, leader: str, speedup: Interval) -> int | None:
        """Estimate how many more prompts would make the interval exclude 1; None if no number seems to."""
        assert speedup.low is not None and speedup.high is not None
        half, distance = math.log(speedup.high / speedup.low) / 2, abs(math.log(speedup.value))
        number = _num_prompts(self._sums[leader])
        wanted = number * (half / distance) ** 2 if distance > 0.001 else math.inf
        return None if wanted > 10_000 else max(1, math.ceil(wanted - number))

    def _plain(self) -> Candidate:
        """Return the candidate of plain decoding, over all runs of the race."""
        longest = max(self._sums.values(), key=_num_prompts, default=None)
        if longest is None:
            return Candidate(BASELINE, "waiting")
        ms, one = _mean(longest, PLAIN_MS), Interval(1.0, 1.0, 1.0)
        return Candidate(
            BASELINE,
            "baseline",
            self.num_rounds,
            _num_prompts(longest),
            one,
            None,
            one,
            tokens_per_s=_throughput(self.tables, BASELINE),
            ms_per_token=ms.value if ms else None,
            measured=_measured(self.tables, BASELINE),
        )

    def _candidate(self, method: str, racing: Verdict | None, best: str | None, plain: Candidate) -> Candidate:
        verdict, error = self.left.get(method, (racing or "waiting", ""))
        parts = self._sums.get(method)
        if not parts:
            shown = verdict if self.tables or verdict in ("drifted", "failed") else "no_time"
            return Candidate(method, shown, self.rounds.get(method, 0), error=error)
        speedup, even = self.speedup(method), _mean(parts, BREAK_EVEN)
        with_it = [table for table in self.tables if (table.rows["method"] == method).any()]
        return Candidate(
            method,
            verdict,
            self.rounds.get(method, 0),
            _num_prompts(parts),
            speedup,
            None if best is None or best == method else self.beside(method, best),
            _mean(parts, LENGTH),
            even.value if even else None,
            _scaled(plain.tokens_per_s, *(_throughput(with_it, name) for name in (method, BASELINE))),
            plain.ms_per_token / speedup.value if plain.ms_per_token and speedup and speedup.value else None,
            error,
            with_it[-1].info.identity.methods[method].num_drafts if with_it else None,
            _scaled_all(plain.measured, *(_measured(with_it, name) for name in (method, BASELINE))),
        )


def decisions(races: Sequence[Race]) -> list[Decision]:
    """Return the decision of each race, by context and concurrency.

    A choice is kept from one concurrency to the next where the best method cannot be told apart from it, because a
    server is started once for both.
    """
    made: list[Decision] = []
    for race in sorted(races, key=lambda race: race.load):
        own, before = race.decision(), made[-1] if made and made[-1].load.context == race.load.context else None
        if before and own.verdict == before.verdict == "faster" and before.choice != own.choice:
            same = next((level for level in own.level if level.method == before.choice), None)
            if same and same.speedup and same.speedup.low is not None and same.speedup.low > 1:
                own = replace(own, choice=same.method, speedup=same.speedup)
        if own.verdict in ("faster", "unclear"):
            own = replace(own, slices=tuple(race.slices(own.choice)))
        made.append(own)
    return [replace(one, loses_from=_loses_from(one, made)) for one in made]


def _loses_from(decision: Decision, made: Sequence[Decision]) -> float | None:
    """Return the concurrency, interpolated over this context's loads, where the choice's speed-up falls to 1."""
    same = [one for one in made if one.load.context == decision.load.context]
    if decision.verdict != "faster" or len(same) < 2:
        return None
    curve = [(one.load.concurrency, one.of(decision.choice).speedup) for one in same]
    # Only from this load on: the choice may not pay at lower loads.
    known = [(at, one.value) for at, one in curve if one is not None and at >= decision.load.concurrency]
    ranges = paying([at for at, _ in known], [value for _, value in known])
    return ranges[0][1] if ranges else None


def drifted(table: RunTable) -> list[str]:
    """Return the methods of a run whose speed-up exceeds their acceptance length (`DRIFT`)."""
    sums = _merged([table], {})
    found = []
    for method, parts in sums.items():
        speedup, length = _mean(parts, SPEEDUP), _mean(parts, LENGTH)
        least = speedup and (speedup.low or speedup.value)
        if speedup and length and least and min(least, speedup.value / (1 + DRIFT)) > length.value:
            found.append(method)
    return found


def _merged(tables: Sequence[RunTable], known: Mapping[str, Parts]) -> dict[str, Parts]:
    """Return `known` with the prompts' sums of these runs added, by method and suite."""
    found = {method: dict(parts) for method, parts in known.items()}
    for table in tables:
        sums = prompt_sums(without_errors(table.rows))
        for (suite, method), frame in sums.groupby(level=["suite", "method"], observed=True):
            units = frame.groupby(level="unit", observed=True).sum()
            ids, values = units.index.astype(str), units.to_numpy(dtype=np.float64)
            before = found.setdefault(str(method), {}).get(str(suite))
            if before is not None:
                ids, values = [*before[0], *ids], np.concatenate([before[1], values])
            # Draws are by row: use the order of a report of the same prompts.
            order = sorted(range(len(ids)), key=ids.__getitem__)
            found[str(method)] = {**found[str(method)], str(suite): ([ids[at] for at in order], values[order])}
    found.pop(BASELINE, None)
    return found  # type: ignore[return-value]


def _mean(parts: Parts, metric_id: str) -> Interval | None:
    """Return a metric's mean over suites, each of which counts once; None if a suite lacks it."""
    top, bottom = columns_of(METRICS[metric_id])
    whole = [(sums, (top, bottom)) for _, sums in parts.values()]
    if not whole or any(not sums[:, COLUMN[METRICS[metric_id].bottom[0]]].any() for sums, _ in whole):
        return None
    found = stats.geometric_mean(whole)
    scale = METRICS[metric_id].scale
    return found and found.scaled(scale)


def _high(interval: Interval | None) -> float:
    return math.inf if interval is None or interval.high is None else interval.high


def _num_prompts(parts: Parts) -> int:
    return sum(len(ids) for ids, _ in parts.values())


def _throughput(tables: Sequence[RunTable], method: str) -> float | None:
    """Return the tokens per second of a method's own time, over all its answers in these runs."""
    tokens = seconds = 0.0
    for table in tables:
        answers = without_errors(table.rows[table.rows["method"] == method])
        tokens += float(answers["num_tokens"].sum())
        seconds += own_s(answers, is_open=False) if len(answers) else 0.0
    return tokens / seconds if seconds else None


def _measured(tables: Sequence[RunTable], method: str) -> dict[str, float]:
    """Return the metrics of measurements of a method in these runs."""
    rows = [without_errors(table.rows[table.rows["method"] == method]) for table in tables]
    sums: Any = sum(prompt_sums(one).to_numpy(dtype=np.float64).sum(axis=0) for one in rows if len(one))
    known = {one.id: statistic_of(one)(sums) for one in MEASURED if np.any(sums)}
    return {name: float(value) for name, value in known.items() if np.isfinite(value)}


def _scaled(plain: float | None, own: float | None, beside: float | None) -> float | None:
    """Return plain decoding's figure over the whole race, times the method's ratio to plain in the same runs."""
    return plain * own / beside if plain and own and beside else None


def _scaled_all(plain: Mapping[str, float], own: Mapping[str, float], beside: Mapping[str, float]) -> dict[str, float]:
    several = {name: _scaled(value, own.get(name), beside.get(name)) for name, value in plain.items()}
    return {name: value for name, value in several.items() if value is not None}


def first_size(concurrency: int) -> int:
    """Return the size of a race's first round: enough for an interval, and to keep all slots busy for a while."""
    return max(FEWEST, 2 * concurrency)


def slices(num_prompts: int, concurrency: int) -> list[tuple[int, int]]:
    """Divide prompts into rounds (start, end); the number measured doubles each time.

    No round has fewer prompts than the concurrency, nor fewer than an interval needs.
    """
    least, ends = max(FEWEST, concurrency), [min(first_size(concurrency), num_prompts)]
    while ends[-1] < num_prompts:
        end = min(2 * ends[-1], num_prompts)
        ends.append(num_prompts if num_prompts - end < least else end)
    if len(ends) > 1 and ends[-1] - ends[-2] < least:
        del ends[-2]
    return list(zip([0, *ends[:-1]], ends, strict=True))
