"""From records to numbers. Every number has an id, a formula under that id, and a function here.

A generation that failed enters no number. What a backend does not show (rounds, times) leaves the number out
(None), never 0. Functions take the records of one cell, or of several that are to be pooled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dflash_bench.methods import drafts_trees
from dflash_bench.records import Generation, Record
from dflash_bench.stats import Interval, geometric_mean_interval, ratio_interval

BASELINE = "ar"

FORMULAS = {
    "al.pooled": "sum(a_i + 1) / sum(S), over all rounds of all prompts",
    "al.request_mean": "mean over answers of the mean over rounds of (a_i + 1)",
    "al.emitted": "sum(e_i) / sum(S), after truncation",
    "accept_rate": "sum(a_i) / sum(d_i), of chains: the nodes of a tree are alternatives, of which most must fail",
    "accept_at[k]": "P(a >= k), and P(a >= k given a >= k-1), over rounds",
    "tps.decode": "sum(T - 1) / sum(decode_s)",
    "tps.e2e": "sum(T) / sum(prefill_s + decode_s)",
    "speedup.decode": "plain decode_s per token / the method's, over the same answers",
    "speedup.e2e": "plain (prefill_s + decode_s) per token / the method's, over the same answers",
    "break_even_al": "(t_draft + t_verify) / t_ar per round; below this al.pooled speculation loses",
}
"""Per answer: T tokens, the first from prefill; S rounds; round i drafts d_i, accepts a_i, emits e_i.

Of a tree d_i counts all nodes, and a_i the length of the way that was kept.
"""

Records = Sequence[Record]
Tally = tuple[int, int]
"""How many, of how many."""


@dataclass(frozen=True, slots=True)
class AcceptAt:
    """Of all rounds, the share that accepts at least `k`; and of those that accept at least `k - 1`."""

    k: int
    unconditional: float
    conditional: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The numbers of one suite and method; None is a number that cannot be had."""

    suite: str
    method: str
    num_prompts: int
    num_tokens: int
    num_errors: int
    num_near_ties: int
    al_pooled: float | None
    al_request_mean: float | None
    tps_decode: float | None
    speedup_decode: Interval | None
    speedup_decode_geometric: Interval | None
    speedup_e2e: Interval | None
    exact: Tally | None
    passed: Tally | None
    draft_ms: float | None
    verify_ms: float | None
    other_ms: float | None
    break_even_al: float | None


def summarise(records: Records) -> list[Cell]:
    """One cell per suite and method as they first appear, the baseline first in each suite."""
    groups: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        methods = groups.setdefault(record.suite, {BASELINE: []})
        methods.setdefault(record.method, []).append(record)
    return [_cell(rows, methods[BASELINE]) for methods in groups.values() for rows in methods.values() if rows]


def _cell(records: Records, baseline: Records) -> Cell:
    good = without_errors(records)
    suite, method = records[0].cell
    return Cell(
        suite=suite,
        method=method,
        num_prompts=len({record.prompt_id for record in good}),
        num_tokens=sum(len(record.generation.token_ids) for record in good),
        num_errors=len(records) - len(good),
        num_near_ties=sum(record.exactness == "near_tie" for record in good),
        al_pooled=al_pooled(good),
        al_request_mean=al_request_mean(good),
        tps_decode=tps_decode(good),
        speedup_decode=speedup_decode(baseline, good),
        speedup_decode_geometric=speedup_decode_geometric(baseline, good),
        speedup_e2e=speedup_e2e(baseline, good),
        exact=_tally(record.exactness == "exact" for record in good if record.exactness is not None),
        passed=_tally(record.passed for record in good if record.passed is not None),
        draft_ms=draft_ms(good),
        verify_ms=verify_ms(good),
        other_ms=other_ms(good),
        break_even_al=None if method == BASELINE else break_even_al(baseline, good),
    )


def without_errors(records: Records) -> list[Record]:
    return [record for record in records if record.generation.error is None]


def accepted_by_round(records: Records) -> list[tuple[int, ...]]:
    """Of each answer whose rounds are shown and not none."""
    return [record.generation.accepted for record in without_errors(records) if record.generation.accepted]


def al_pooled(records: Records) -> float | None:
    rounds = accepted_by_round(records)
    return _ratio(sum(sum(accepted) + len(accepted) for accepted in rounds), sum(map(len, rounds)))


def al_request_mean(records: Records) -> float | None:
    rounds = accepted_by_round(records)
    return _ratio(sum(sum(accepted) / len(accepted) + 1 for accepted in rounds), len(rounds))


def al_emitted(records: Records) -> float | None:
    rounds = [record.generation.emitted for record in without_errors(records) if record.generation.emitted]
    return _ratio(sum(map(sum, rounds)), sum(map(len, rounds)))


def accept_rate(records: Records) -> float | None:
    pairs = drafted_and_accepted(_chains(records))
    return _ratio(sum(accepted for _, accepted in pairs), sum(drafted for drafted, _ in pairs))


def accept_at(records: Records) -> list[AcceptAt]:
    """For k from 1 to the longest draft; of trees, whose depth is not recorded, to the longest way that was kept."""
    pairs = drafted_and_accepted(records)
    lengths = [drafted for drafted, _ in drafted_and_accepted(_chains(records))]
    longest = max([*lengths, *(accepted for _, accepted in pairs)], default=0)
    reached = [sum(accepted >= k for _, accepted in pairs) for k in range(longest + 1)]
    return [AcceptAt(k, reached[k] / len(pairs), _ratio(reached[k], reached[k - 1])) for k in range(1, longest + 1)]


def _chains(records: Records) -> list[Record]:
    return [record for record in records if not drafts_trees(record.method)]


def drafted_and_accepted(records: Records) -> list[tuple[int, int]]:
    """Of every round that is shown."""
    shown = [(row.generation.drafted, row.generation.accepted) for row in without_errors(records)]
    return [pair for drafted, accepted in shown for pair in zip(drafted or (), accepted or (), strict=True)]


Cost = Callable[[Generation], tuple[float, int]]
"""Seconds, and the tokens they bought."""


def decode_cost(generation: Generation) -> tuple[float, int]:
    # An answer can be empty: its first token was a stop.
    return generation.decode_s, max(len(generation.token_ids) - 1, 0)


def e2e_cost(generation: Generation) -> tuple[float, int]:
    return generation.prefill_s + generation.decode_s, len(generation.token_ids)


def seconds_per_token(records: Records, cost: Cost = decode_cost) -> float | None:
    costs = [cost(record.generation) for record in without_errors(records)]
    return _ratio(sum(seconds for seconds, _ in costs), sum(tokens for _, tokens in costs))


def tps_decode(records: Records) -> float | None:
    return _ratio(1, seconds_per_token(records) or 0)


def tps_e2e(records: Records) -> float | None:
    return _ratio(1, seconds_per_token(records, e2e_cost) or 0)


def speedup_decode(baseline: Records, records: Records) -> Interval | None:
    return _pooled_speedup(_paired_costs(baseline, records, decode_cost))


def speedup_e2e(baseline: Records, records: Records) -> Interval | None:
    return _pooled_speedup(_paired_costs(baseline, records, e2e_cost))


def speedup_decode_geometric(baseline: Records, records: Records) -> Interval | None:
    """The geometric mean of the prompts' own speed-ups: each prompt counts once, however long its answer."""
    costs = [cost for cost in _paired_costs(baseline, records, decode_cost) if all(cost)]
    ratios = [(plain_s / plain_n) / (own_s / own_n) for plain_s, plain_n, own_s, own_n in costs]
    return geometric_mean_interval(ratios) if ratios else None


def _pooled_speedup(costs: list[list[float]]) -> Interval | None:
    plain_s, plain_n, own_s, own_n = ([cost[column] for cost in costs] for column in range(4))
    if not all(map(sum, (plain_s, plain_n, own_s, own_n))):
        return None
    return ratio_interval(plain_s, plain_n, over=(own_s, own_n))


def _paired_costs(baseline: Records, records: Records, cost: Cost) -> list[list[float]]:
    """Per prompt: plain seconds and tokens, own seconds and tokens, over the answers that both sides have."""
    plain = {_place(record): cost(record.generation) for record in without_errors(baseline)}
    own = {_place(record): cost(record.generation) for record in without_errors(records)}
    by_prompt: dict[tuple[str, str], list[float]] = {}
    for place in own.keys() & plain.keys():
        sums = by_prompt.setdefault(place[:2], [0.0] * 4)
        by_prompt[place[:2]] = [a + b for a, b in zip(sums, plain[place] + own[place], strict=True)]
    # A set has no order of its own, and the bootstrap draws by position.
    return [by_prompt[prompt] for prompt in sorted(by_prompt)]


def _place(record: Record) -> tuple[str, str, int, int]:
    return record.suite, record.prompt_id, record.turn, record.repeat


def draft_ms(records: Records) -> float | None:
    return _mean_ms([row.generation.draft_s for row in without_errors(records)])


def verify_ms(records: Records) -> float | None:
    return _mean_ms([row.generation.verify_s for row in without_errors(records)])


def other_ms(records: Records) -> float | None:
    """What a round spends outside draft and verify."""
    rounds_ms = _mean_ms([row.generation.round_s for row in without_errors(records)])
    parts_ms = (draft_ms(records), verify_ms(records))
    if rounds_ms is None or parts_ms[0] is None or parts_ms[1] is None:
        return None
    return rounds_ms - parts_ms[0] - parts_ms[1]


def break_even_al(baseline: Records, records: Records) -> float | None:
    """As the formula says without the time outside draft and verify, which `other_ms` shows."""
    draft, verify, plain_s = draft_ms(records), verify_ms(records), seconds_per_token(baseline)
    return None if draft is None or verify is None or not plain_s else (draft + verify) / (1000 * plain_s)


def _mean_ms(times: Iterable[tuple[float, ...] | None]) -> float | None:
    shown = [time for each in times for time in each or ()]
    return _ratio(1000 * sum(shown), len(shown))


def _ratio(top: float, bottom: float) -> float | None:
    return top / bottom if bottom else None


def _tally(judged: Iterable[bool]) -> Tally | None:
    found = list(judged)
    return (sum(found), len(found)) if found else None
