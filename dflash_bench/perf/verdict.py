"""Verdicts on a profile: a round's cost in steps of plain decoding, break-even acceptance length, and bottleneck."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dflash_bench.analysis.findings import last_part
from dflash_bench.analysis.peers.paper import load_figures
from dflash_bench.analysis.roofline import WELL_ABOVE, WidthCurve, bound, curve, least_s, least_s_of_draft, work
from dflash_bench.core.forwards import DraftTiming, ForwardTiming, LinearCost, ProfileData, Size, fit
from dflash_bench.core.methods import name_of

Binding = Literal["acceptance", "draft", "verify", "host", "launch overhead", "unclear"]


@dataclass(frozen=True, slots=True)
class Reading:
    """A timed pass of the target, with its roofline."""

    forward: ForwardTiming
    num_bytes: float
    flops: float
    roofline_s: float
    bound: str


@dataclass(frozen=True, slots=True)
class RoundCost:
    """The cost of drafting and verifying `width` - 1 tokens with a method, in seconds per round."""

    method: str
    width: int
    plain_s: float
    """Seconds of a step of plain decoding, including the loop around it."""
    draft_s: float
    verify_s: float
    host_s: float
    draft_roofline_s: float | None = None
    """None if the draft's time at this width is interpolated."""
    verify_roofline_s: float | None = None

    @property
    def cost(self) -> float:
        """Return the cost of a round, in plain steps."""
        return (self.draft_s + self.verify_s + self.host_s) / self.plain_s

    @property
    def break_even_al(self) -> float:
        """Return the acceptance length at which a round breaks even, (t_draft + t_verify) / t_plain."""
        return (self.draft_s + self.verify_s) / self.plain_s

    def speedup(self, al: float) -> float:
        return al / self.cost

    def without(self, part: Binding, al: float) -> float:
        """Return the speed-up if this part were free; verification would still cost a plain step."""
        shares = self.excess()
        return al / (self.cost - shares[part])

    def excess(self) -> dict[Binding, float]:
        """Return the cost of each part beyond the one plain step that a round always needs, in plain steps."""
        return {
            "draft": self.draft_s / self.plain_s,
            "verify": self.verify_s / self.plain_s - 1,
            "host": self.host_s / self.plain_s,
        }


@dataclass(frozen=True, slots=True)
class RoundVerdict:
    """The verdict on a method's full round; without an acceptance no speed-up is predicted."""

    round: RoundCost
    binding: Binding
    al: float | None
    al_source: str
    speedup: float | None


@dataclass(frozen=True, slots=True)
class ProfiledBatch:
    """The verdicts for one batch size and context."""

    rows: int
    context: int
    readings: tuple[Reading, ...]
    curve: WidthCurve
    rounds: tuple[RoundCost, ...]
    verdicts: tuple[RoundVerdict, ...]


def places(measured: ProfileData, acceptance: dict[str, tuple[float, str]]) -> list[ProfiledBatch]:
    """Judge every batch and context. `acceptance` maps methods to acceptance lengths and their sources."""
    known = dict.fromkeys((forward.rows, forward.context) for forward in measured.forwards)
    return [_place(measured, *place, acceptance) for place in known]


def _place(measured: ProfileData, rows: int, context: int, acceptance: dict[str, tuple[float, str]]) -> ProfiledBatch:
    forwards = [timing for timing in measured.forwards if (timing.rows, timing.context) == (rows, context)]
    through = curve(forwards, measured.size, measured.rates)
    drafts = [timing for timing in measured.drafts if (timing.rows, timing.context) == (rows, context)]
    methods = list(dict.fromkeys(draft.method for draft in drafts))
    rounds = [
        cost
        for method in methods
        for cost in _rounds(measured, forwards, [draft for draft in drafts if draft.method == method])
    ]
    whole = [max((cost for cost in rounds if cost.method == method), key=lambda cost: cost.width) for method in methods]
    verdicts = [verdict(cost, through, *acceptance.get(cost.method, (None, ""))) for cost in whole]
    readings = [_reading(measured, forward) for forward in forwards]
    return ProfiledBatch(rows, context, tuple(readings), through, tuple(rounds), tuple(verdicts))


def _reading(measured: ProfileData, forward: ForwardTiming) -> Reading:
    done = work(measured.size, forward.rows, forward.width, forward.context)
    rates = measured.rates
    return Reading(forward, done.num_bytes, done.flops, least_s(done, rates), bound(done, rates))


def _rounds(measured: ProfileData, forwards: Sequence[ForwardTiming], drafts: Sequence[DraftTiming]) -> list[RoundCost]:
    """Return the cost of a method's rounds at every width up to the method's width."""
    method, rows, context = drafts[0].method, drafts[0].rows, drafts[0].context
    hosts = {host.method: host.seconds for host in measured.hosts if host.rows == rows}
    seconds = {forward.width: forward.seconds for forward in forwards}
    between = _between(drafts)
    by_width = {draft.num_drafts + 1: draft for draft in drafts}
    rates = measured.rates
    return [
        RoundCost(
            method,
            width,
            seconds[1] + hosts["ar"],
            by_width[width].seconds if width in by_width else between.at(width - 1),
            seconds[width],
            hosts[method],
            least_s_of_draft(by_width[width].passes, rows, context, rates) if width in by_width else None,
            least_s(work(measured.size, rows, width, context), rates),
        )
        for width in sorted(seconds)
        if 1 < width <= max(by_width)
    ]


def _between(drafts: Sequence[DraftTiming]) -> LinearCost:
    """Fit a draft's seconds by its number of tokens: a line through the shortest and the longest, or a constant."""
    return fit([draft.num_drafts for draft in drafts], [draft.seconds for draft in drafts])


def verdict(whole: RoundCost, through: WidthCurve, al: float | None = None, source: str = "") -> RoundVerdict:
    return RoundVerdict(whole, what_binds(whole, through, al), al, source, None if al is None else whole.speedup(al))


def what_binds(whole: RoundCost, through: WidthCurve, al: float | None) -> Binding:
    """Return the bottleneck of a round, compared with the best case: all tokens accepted, at the cost of a plain step.

    The missing factor is the product of width / al, for acceptance, and the cost in plain steps; the larger one binds.
    Within the cost the part that adds most binds. If that part is dominated by fixed costs, well above its roofline on
    a target that also is, the bottleneck is the launch overhead.

    The relative deviation of timings from their line is their uncertainty: if two candidates differ by less, the result
    is "unclear", because the next measurement may well give the other.
    """
    off = through.off
    if al is not None and abs(whole.width / al - whole.cost) < off * whole.cost:
        return "unclear"
    if al is not None and whole.width / al >= whole.cost:
        return "acceptance"
    excess = whole.excess()
    largest, second = sorted(excess, key=lambda part: -excess[part])[:2]
    if excess[largest] - excess[second] < off * whole.cost:
        return "unclear"
    seconds = {"draft": (whole.draft_s, whole.draft_roofline_s), "verify": (whole.verify_s, whole.verify_roofline_s)}
    taken, least = seconds.get(largest, (0.0, None))
    if least is not None and through.regime in ("fixed cost", "unclear") and taken > WELL_ABOVE * least:
        return "launch overhead" if through.regime == "fixed cost" else "unclear"
    return largest


def at_full_depth(measured: ProfileData, full: Size) -> ProfileData:
    """Extrapolate from a target cut to some layers to its full depth: all layers take as long as the timed ones.

    Everything but the head counts as layers, embedding and masks, too.
    """
    times = full.num_layers / measured.size.num_layers
    forwards = [
        replace(forward, seconds=(forward.head_s or 0.0) + (forward.seconds - (forward.head_s or 0.0)) * times)
        for forward in measured.forwards
    ]
    return replace(measured, size=full, forwards=tuple(forwards))


def is_alike(part: Size, full: Size) -> bool:
    """Return True if a target cut to some layers has each kind of layer in the same share as the full one."""

    def shares(size: Size) -> list[tuple[int | None, int, float]]:
        return [(kind.window, kind.cache_bytes, kind.num_layers / size.num_layers) for kind in size.attention]

    return shares(part) == shares(full)


def published_acceptance(target: str, method: str, num_drafts: int) -> tuple[float, str] | None:
    """Return the median over suites of the pair's published acceptance at temperature 0, and its source, or None."""
    figures = [
        figure
        for figure in load_figures()
        if last_part(figure.target_model) == last_part(target.partition("@")[0])
        and (figure.method, figure.temperature, figure.concurrency) == (name_of(method), 0, 1)
        and figure.formula.startswith("al.")
        and figure.num_drafts in (None, num_drafts)
    ]
    if not figures:
        return None
    values, sources = sorted(figure.value for figure in figures), {figure.source for figure in figures}
    middle = values[len(values) // 2]
    spread = f"{values[0]:g} to {values[-1]:g} on {len({figure.dataset for figure in figures})} suites"
    return middle, f"published: median of {spread}; {'; '.join(sorted(sources))}"
