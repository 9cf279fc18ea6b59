"""Replays of a run's stored rounds with another draft length, cut, tree size, controller or load.

With drafts recorded at every position (`run --record every-position`), another length of the same draft is replayed
exactly: each round begins where it would have begun, and accepts what it would have accepted. From stored rounds alone
this is an estimate: a shorter draft is assumed to accept min(a_i, n) in the measured rounds, although its rounds would
begin elsewhere; a longer draft to continue at the rate of its last position. Their intervals reach from the least to
the most that the stored rounds allow (`_bounds`), each with the choice of prompts. Other estimates have no interval,
because nothing stored bounds their error.

Times are always estimates: the seconds of the measured rounds, adjusted by the cost of fewer tokens at the recorded
positions, or else by the run's width curve. The cost of a pass also depends on what ran before it, such as how much of
the target's weights a draft leaves in the processor's caches. Replayed speed-ups therefore have no interval: an
interval over prompts would not cover the error of the times.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dflash_bench.analysis import stats
from dflash_bench.analysis.roofline import stored as stored_curve
from dflash_bench.analysis.stats import Floats, Interval
from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import name_of
from dflash_bench.core.option import MOST_AT_A_TIME
from dflash_bench.core.types import CellKey, Settings
from dflash_bench.replay.controllers import Controller, Cut, ExpectedSpeed, Fixed, controller_of
from dflash_bench.replay.stored_answers import ReplayCell, StoredAnswer, cells_of
from dflash_bench.results.run_info import RunInfo
from dflash_bench.results.table import RunTable

STEPPING = ("eagle3", "mtp", "draft-model")
"""Methods that draft token by token: half as many tokens take half the time. Others fill a block in one pass."""
BLOCKS = ("dflash",)
"""Methods whose draft changes with the block size."""
ROUNDS, ACCEPTED, VERIFIED, SECONDS, TOKENS, PLAIN_S, PLAIN_TOKENS, OWN_S, OWN_TOKENS = range(9)


MOST_DRAFTED = 1024
"""Most tokens or nodes per round that a change may request."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A change to replay; one of its fields is set."""

    name: str
    """The requested change: n=4, cut=0.5, controller=average."""
    n: int | None = None
    block: int | None = None
    nodes: int | None = None
    controller: Controller | None = None


@dataclass(frozen=True, slots=True)
class Replayed:
    suite: str
    method: str
    settings: Settings
    change: str
    concurrency: int
    is_exact: bool
    """Whether accepted counts are those that a measured run would have; seconds are always estimates."""
    num_prompts: int
    length: Interval | None
    """al.pooled"""
    verified: float
    """Draft tokens verified per round."""
    speedup: Interval | None
    tokens_per_s: float | None
    """Throughput of all concurrent answers; None if the run measured no width curve."""


# Rounds that a change gives, with the tokens verified and accepted in each.


Walk = tuple[float, float, float]
"""Rounds, accepted tokens and verified tokens of an answer, scaled to all of its tokens."""


def walk(answer: StoredAnswer, controller: Controller) -> Walk:
    """Replay an answer: position by position if its drafts were recorded, else through its stored rounds."""
    scores, positions = answer.scores, answer.positions
    width = int(answer.drafted.max(initial=0)) if scores is None else scores.shape[1]
    controller.start(width)
    place, rounds, accepted, verified, emitted = 0, 0, 0, 0, 0
    is_exact = positions is not None
    counts = positions if is_exact else answer.accepted
    while place < len(counts):
        most = width if is_exact else int(answer.drafted[place])
        length = min(controller.choose(None if scores is None else scores[place].tolist()), most)
        kept = min(int(counts[place]), length)
        controller.learn(length, kept)
        rounds, accepted, verified, emitted = rounds + 1, accepted + kept, verified + length, emitted + kept + 1
        place += kept + 1 if is_exact else 1
    times = 1.0 if is_exact else answer.num_emittable / emitted
    return rounds * times, accepted * times, verified * times


def _longer(answer: StoredAnswer, n: int, most: int, rate: float) -> Walk:
    """Estimate a longer draft: where all `most` tokens were accepted, it continues at the rate of the last position.

    A round that drafted fewer tokens, such as an ngram round without a match, had no more to draft.
    """
    beyond = sum(rate**step for step in range(1, n - most + 1))
    accepted = answer.accepted + beyond * (answer.accepted == most)
    rounds = answer.num_emittable / float((accepted + 1).mean())
    return (
        rounds,
        rounds * float(accepted.mean()),
        rounds * float(np.where(answer.drafted == most, n, answer.drafted).mean()),
    )


def _bounds(answer: StoredAnswer, n: int, most: int) -> tuple[Walk, Walk]:
    """Return the least and the most that a draft of n tokens can accept in place of a draft of up to `most`.

    A shorter draft begins anew within a stored round, and is assumed to be right at least as far as the stored draft,
    which had less context; beyond that, all of it may be wrong, or right. A longer draft may be entirely wrong or right
    beyond a stored draft that was right.
    """
    accepted = answer.accepted
    num, tokens = float(len(accepted)), float((accepted + 1).sum())
    if n > most:
        found = [(num, tokens), (num, tokens + (n - most) * float((accepted == most).sum()))]
    else:
        # A stored round of a + 1 tokens in rounds of n + 1; the first of them begins as the stored round did.
        parts = -(-(accepted + 1) // (n + 1))
        more = np.where(parts > 1, parts * (n + 1) - accepted - 1, 0)
        found = [(float(parts.sum()), tokens), (float(parts.sum()), tokens + float(more.sum()))]
    rounds_of = [(tokens / all_tokens * rounds) for rounds, all_tokens in found]
    least, largest = ((rounds, tokens - rounds, rounds * n) for rounds in rounds_of)
    return least, largest


def _fewer_nodes(answer: StoredAnswer, nodes: int) -> Walk:
    accepted = np.array([sum(place < nodes for place in way) for way in answer.depths])
    rounds = answer.num_emittable / float((accepted + 1).mean())
    return rounds, rounds * float(accepted.mean()), rounds * float(np.minimum(answer.drafted, nodes).mean())


def _last_rate(cell: ReplayCell) -> float:
    """Return the share of the longest drafts accepted whole, among those accepted up to their last token but one."""
    accepted, drafted = (
        np.concatenate([getattr(one, name) for one in cell.answers]) for name in ("accepted", "drafted")
    )
    accepted = accepted[drafted == cell.most]
    reached = (accepted >= cell.most - 1).sum()
    return float((accepted == cell.most).sum() / reached) if reached else 0.0


def _round_seconds(cell: ReplayCell, costs: RoundCosts) -> Callable[[int], float]:
    """Return the mean seconds of a round of the cell, by how many drafted tokens it verifies."""
    rounds = sum(len(one.drafted) for one in cell.answers)
    fixed_s = sum(one.round_s - one.verify_s for one in cell.answers) / rounds
    verify_s = sum(one.verify_s for one in cell.answers) / rounds
    width = sum(float(one.verified.sum()) for one in cell.answers) / rounds + 1
    return lambda number: fixed_s + costs.reading(verify_s, width, number + 1)


def _walks(cell: ReplayCell, change: Alternative, costs: RoundCosts) -> list[Walk]:
    if change.name == MEASURED:
        return [
            (float(len(one.accepted)), float(one.accepted.sum()), float(one.verified.sum())) for one in cell.answers
        ]
    if change.nodes is not None:
        return [_fewer_nodes(answer, change.nodes) for answer in cell.answers]
    if change.controller is not None:
        if isinstance(change.controller, ExpectedSpeed):
            change.controller.seconds = _round_seconds(cell, costs)
        return [walk(answer, change.controller) for answer in cell.answers]
    n = cell.most if change.n is None else change.n
    if n > cell.most:
        rate = _last_rate(cell)
        return [_longer(answer, n, cell.most, rate) for answer in cell.answers]
    return [walk(answer, Fixed(n)) for answer in cell.answers]


# Costs: the measured seconds of a round, changed to what they would be with more or fewer tokens.


class WidthSeconds:
    """Seconds of a pass by its number of tokens: between measured widths by interpolation, beyond them by the line."""

    def __init__(self, info: RunInfo) -> None:
        curve = stored_curve(info)
        self.line = None if curve is None else curve.line
        times = {} if info.forwards is None else {int(w): float(s) for w, s in info.forwards.seconds.items()}
        self.widths = np.array(sorted(times))
        # A narrower pass takes no longer than a wider one, whatever disturbed it.
        self.seconds = np.minimum.accumulate([times[width] for width in self.widths[::-1].tolist()])[::-1]

    def __call__(self, width: float) -> float:
        assert self.line is not None
        if width <= self.widths[-1]:
            return float(np.interp(width, self.widths, self.seconds))
        return float(self.seconds[-1]) + self.line.c1 * (width - float(self.widths[-1]))


class RoundCosts:
    """The cost of drafting and verifying other numbers of tokens in the rounds of a cell."""

    def __init__(self, cell: ReplayCell, curve: WidthSeconds) -> None:
        self.curve = curve
        self.draft_s, self.verify_s = (
            float(np.median([getattr(one, name) for one in cell.answers]))
            for name in ("usual_draft_s", "usual_verify_s")
        )
        self.drafts = _recorded([one.recorded_draft_s for one in cell.answers], cell.most)
        self.passes = _recorded([one.recorded_verify_s for one in cell.answers], cell.most + 1)

    def drafting(self, seconds: float, own: float, n: int) -> float:
        """Return the seconds of drafting n tokens one by one, if drafting `own` tokens takes `seconds`."""
        drafts = self.drafts
        if drafts is not None and n <= len(drafts) == own:
            return seconds * _share(self.draft_s, float(drafts[-1]), float(drafts[n - 1]))
        # These seconds include reading the accepted tokens, several tokens wide: about two steps.
        return seconds * (n + 2) / (own + 2)

    def reading(self, seconds: float, own: float, width: float) -> float:
        """Return the seconds of verifying with a pass over `width` tokens, if a pass over `own` takes `seconds`."""
        passes = self.passes
        if passes is not None and max(own, width) <= len(passes):
            before, after = np.interp([own, width], np.arange(1, len(passes) + 1), passes).tolist()
        else:
            before, after = self.curve(own), self.curve(width)
        # The rest of a round, beyond its passes, is assumed to grow with the round.
        return seconds * _share(self.verify_s, before, after, width / own)


def _share(usual: float, before: float, after: float, kept: float = 1.0) -> float:
    """Return the factor on a part's seconds if passes that cost `before` cost `after` instead.

    Of the rest of the `usual` seconds the share `kept` remains: disturbances, such as other processes, take more from
    longer rounds.
    """
    return after / before if usual <= before else (after + kept * (usual - before)) / usual


def _recorded(found: Sequence[Any], size: int) -> Floats | None:
    """Return the medians over answers [size]; more tokens never cost less, whatever disturbed their passes."""
    known = [values for values in found if values is not None and len(values) == size]
    if not known:
        return None
    middle = np.median(np.array(known, dtype=np.float64), axis=0)
    rising: Floats = (np.maximum.accumulate(middle) + np.minimum.accumulate(middle[::-1])[::-1]) / 2
    return rising


def _seconds(answer: StoredAnswer, done: Walk, change: Alternative, method: str, costs: RoundCosts, load: int) -> float:
    """Estimate the seconds of an answer whose rounds are `done`, with `load` concurrent answers."""
    rounds, _, verified = done
    cost, num, width = costs.curve, len(answer.drafted), float(answer.verified.mean()) + 1
    block = float(answer.drafted.mean()) + 1
    draft_s = answer.draft_s / num
    if change.n is not None and name_of(method) in STEPPING:
        draft_s = costs.drafting(draft_s, block - 1, change.n)
    elif change.block is not None:
        draft_s *= cost(change.block) / cost(block)
    draft_s *= cost(load * block) / cost(block)
    read = verified / rounds + 1
    verify_s = costs.reading(answer.verify_s / num, width, read) * cost(load * read) / cost(read)
    other_s = (answer.round_s - answer.draft_s - answer.verify_s) / num
    return rounds * (draft_s + verify_s + other_s) + answer.decode_s - answer.round_s


# Results


def replay(cell: ReplayCell, change: Alternative, info: RunInfo, concurrency: int = 1) -> Replayed:
    """Replay a cell with a change that its rounds can answer (`why_not`)."""
    costs = RoundCosts(cell, WidthSeconds(info))
    is_exact = change.name == MEASURED or (
        cell.is_recorded
        and not cell.num_off
        and change.block is None
        and change.nodes is None
        and (change.n is None or change.n <= cell.most)
    )
    table, length, speedup = _figures(cell, change, costs, _walks(cell, change, costs), concurrency)
    if not is_exact and change.n is not None and change.block is None:
        for several in zip(*(_bounds(answer, change.n, cell.most) for answer in cell.answers), strict=True):
            length = _reaching(length, _figures(cell, change, costs, several, concurrency)[1])
    elif not is_exact:
        length = _bare(length)
    if change.name != MEASURED:
        speedup = _bare(speedup)
    total = table.sum(axis=0)
    has_times = costs.curve.line is not None
    speed = concurrency * float(total[TOKENS] / total[SECONDS]) if has_times and total[SECONDS] > 0 else None
    return Replayed(
        cell.suite,
        cell.method,
        cell.settings,
        change.name,
        concurrency,
        is_exact,
        len(table),
        length,
        float(total[VERIFIED] / total[ROUNDS]),
        speedup if total[PLAIN_S] > 0 else None,
        speed,
    )


def _figures(
    cell: ReplayCell, change: Alternative, costs: RoundCosts, walks: Sequence[Walk], concurrency: int
) -> tuple[Floats, Interval | None, Interval | None]:
    """Return the sums of prompts, al.pooled and the speed-up of these walks through the answers of a cell."""
    most = cell.most if change.n is None else change.n
    cost = costs.curve
    has_times = cost.line is not None
    sums: dict[str, Floats] = {}
    for answer, done in zip(cell.answers, walks, strict=True):
        seconds = _seconds(answer, done, change, cell.method, costs, concurrency) if has_times else 0.0
        own = sums.setdefault(answer.prompt_id, np.zeros(9))
        own[:PLAIN_S] += [*done, seconds, answer.decoded]
        own[OWN_S:] += np.array([seconds, answer.decoded]) * answer.is_paired
    for prompt_id, (seconds, tokens) in cell.plain.items():
        if prompt_id in sums and has_times:
            sums[prompt_id][PLAIN_S:OWN_S] = seconds * cost(concurrency) / cost(1), tokens
    # Draws are by row: use the order of a report.
    table = np.array([sums[prompt_id] for prompt_id in sorted(sums)])
    with_all = np.column_stack([table, table[:, ROUNDS] + table[:, ACCEPTED]])
    length, speedup = stats.intervals(
        with_all,
        [stats.ratio([9], [ROUNDS], at_most=most + 1), stats.ratio([PLAIN_S, OWN_TOKENS], [PLAIN_TOKENS, OWN_S])],
    )
    return table, length and length.within(1.0, most + 1), speedup


def _bare(own: Interval | None) -> Interval | None:
    return own and replace(own, low=None, high=None)


def _reaching(own: Interval | None, bound: Interval | None) -> Interval | None:
    """Return `own` extended to the bounds of another interval."""
    if own is None or bound is None or None in (own.low, own.high, bound.low, bound.high):
        return own
    return replace(own, low=min(own.low, bound.low), high=max(own.high, bound.high))  # type: ignore[type-var]


MEASURED = "as measured"


def why_not(cell: ReplayCell, change: Alternative, info: RunInfo) -> str | None:
    """Return why the rounds of a cell cannot answer a change; None if they can."""
    what = change.name.partition("=")[0]
    is_tree = any(one.depths is not None for one in cell.answers)
    if change.nodes is not None:
        if not is_tree or name_of(cell.method) != "ddtree" or "tree=expanded" in cell.method:
            return f"--nodes: {cell.method} stores no trees whose first nodes are the best; leave it out"
        if change.nodes > cell.most:
            return f"--nodes {change.nodes}: the stored trees have at most {cell.most} nodes; give fewer"
    elif is_tree:
        return f"--{what}: {cell.method} drafts trees; use --nodes"
    if change.block is not None and name_of(cell.method) not in BLOCKS:
        return f"--block: {cell.method} drafts no blocks; use --n"
    if isinstance(change.controller, ExpectedSpeed) and info.forwards is None:
        return "--controller ours: the run measured no width curve to choose by; leave it out"
    if change.controller is not None and change.controller.needs_scores and not cell.has_scores:
        return f"--{what}: the run holds no probabilities of {cell.method}; measure with --record every-position"
    return None


def changes_of(
    n: Sequence[int] = (),
    block: Sequence[int] = (),
    cut: Sequence[float] = (),
    nodes: Sequence[int] = (),
    controller: Sequence[str] = (),
) -> list[Alternative]:
    """Return a change for each value. Raises UserError for an impossible value or a broken controller."""
    for name, values, least in (("n", n, 1), ("block", block, 2), ("nodes", nodes, 1)):
        _require_between(name, values, least, MOST_DRAFTED)
    if any(not 0 <= value <= 1 for value in cut):
        raise UserError("--cut takes probabilities from 0 to 1")
    return [
        *(Alternative(f"n={number}", n=number) for number in n),
        *(Alternative(f"block={size}", n=size - 1, block=size) for size in block),
        *(Alternative(f"cut={threshold:g}", controller=Cut(threshold)) for threshold in cut),
        *(Alternative(f"nodes={number}", nodes=number) for number in nodes),
        *(Alternative(f"controller={text}", controller=controller_of(text)) for text in controller),
    ]


def _require_between(name: str, values: Sequence[int], least: int, most: int) -> None:
    if wrong := [value for value in values if not least <= value <= most]:
        raise UserError(f"--{name} takes numbers from {least} to {most:,}, not {wrong[0]}")


def replay_all(
    run: RunTable,
    changes: Sequence[Alternative],
    concurrency: Sequence[int] = (1,),
    method: str | None = None,
    forbidden: Collection[CellKey] = (),
) -> Iterator[Replayed]:
    """Yield each change of each cell, of one method or of all that it applies to, after the run as measured.

    Cells in `forbidden` get no speed-up. Raises UserError for a method that was not measured, and for a change that
    applies to no method.
    """
    _require_between("concurrency", concurrency, 1, MOST_AT_A_TIME)
    cells = [cell for cell in cells_of(run) if method in (None, cell.method)]
    if not cells:
        raise UserError(f"{run.name} has no rounds of {method}; give a method of the run, as it names it")
    for change in changes:
        reasons = [why for cell in cells if (why := why_not(cell, change, run.info))]
        if len(reasons) == len(cells):
            raise UserError(reasons[0])
    for cell in cells:
        if CellKey(cell.suite, "", cell.settings.id, cell.method) in forbidden:
            cell = replace(cell, plain={})
        for change in (
            Alternative(MEASURED),
            *(change for change in changes if why_not(cell, change, run.info) is None),
        ):
            for load in concurrency:
                yield replay(cell, change, run.info, load)
