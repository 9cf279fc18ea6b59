"""A profile as text and JSON, and the cost of forward passes by width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dflash_bench.analysis import roofline
from dflash_bench.analysis.roofline import WidthCurve
from dflash_bench.core.forwards import ProfileData
from dflash_bench.core.labels import WIDTH
from dflash_bench.perf.verdict import ProfiledBatch, RoundCost, RoundVerdict
from dflash_bench.report import render
from dflash_bench.report.tables import ABSENT, Column, Entry, ReportTable, Section, TableRow, Value, number
from dflash_bench.results.run_info import RunInfo

# The cost of a forward by its width, in words: one line for each run, and its meaning for the speed-ups.


CROOKED = 0.25
"""Misfit from which on the line is not reliable between the measured widths."""


def line_of(info: RunInfo) -> str:
    """Return the curve measured when the run started; "n/a" if it was not measured."""
    curve = roofline.stored(info)
    return f"{ABSENT} (not measured in this run)" if curve is None else f"{formula(curve)}; {curve.regime}"


def formula(curve: WidthCurve) -> str:
    c0, c1 = (_milliseconds(seconds) for seconds in curve.line)
    rows = "one row" if curve.rows == 1 else f"{curve.rows} rows"
    off = f", off by up to {curve.misfit:.0%}" if curve.misfit > CROOKED else ""
    return f"C(n) = {c0} + {c1} n ms ({rows}, context {curve.context}, n to {curve.widest}{off})"


def _milliseconds(seconds: float) -> str:
    """Format with three digits, or with all digits before the point."""
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:,.0f}"


def sentences(info: RunInfo) -> list[str]:
    """Return the line, and its meaning for the speed-ups."""
    curve = roofline.stored(info)
    return [f"width curve: {line_of(info)}", *([meaning(curve)] if curve else [])]


def meaning(curve: WidthCurve) -> str:
    times = f"{curve.over_roofline:.1f} times what reading the weights takes"
    wide = f"one of {curve.widest} tokens costs {curve.line.at(curve.widest) / curve.line.at(1):.2f} times one of 1"
    match curve.regime:
        case "fixed cost":
            return (
                f"A forward of one token takes {times}: most of it is fixed cost, and {wide}. The speed-up "
                "comes mostly from making fewer forwards, whatever they compute. A larger model, whose forwards are "
                "not mostly fixed cost, says more."
            )
        case "bandwidth":
            return (
                f"A forward of one token takes {times}, so that is mostly what binds it, and {wide}. That is what "
                "speculative decoding lives on."
            )
        case "unclear":
            return (
                f"A forward of one token takes {times}, and {wide}: what binds it is unclear, as the passes that were "
                f"measured are off their line by up to {curve.off:.0%}. Measure again on a quiet machine."
            )
    return (
        f"A forward of one token takes {times}, and {wide}: wide forwards are bound by arithmetic, so every drafted "
        "token costs, kept or not."
    )


def curve_as_json(info: RunInfo) -> dict[str, Any] | None:
    """Return the curve in seconds; None if the run did not measure it."""
    curve = roofline.stored(info)
    return None if curve is None else asdict(curve) | {"line": curve.line._asdict()}


# A profile as tables and sentences, and as JSON.


FACTORS = {
    "draft": "a draft for nothing",
    "verify": "verifying at the price of a plain step",
    "host": "a loop that takes no time",
}


@dataclass(frozen=True, slots=True)
class Profiled:
    """A profile to show. `estimated` are the same batches for the whole target, if some of its layers were cut."""

    about: Mapping[str, Any]
    measured: ProfileData
    places: Sequence[ProfiledBatch]
    estimated: Sequence[ProfiledBatch] = ()
    notes: Sequence[str] = ()

    @property
    def judged(self) -> Sequence[ProfiledBatch]:
        """Batches of the whole target, if they could be estimated."""
        return self.estimated or self.places


def estimate_note(profile: Profiled) -> str:
    about = profile.about
    if about["layers"] == about["all_layers"]:
        return ""
    return f" ({'estimated from' if profile.estimated else 'only'} {about['layers']} of {about['all_layers']} layers)"


def text(profile: Profiled, width: int | None = WIDTH) -> str:
    return "\n\n".join(render.terminal(section, width) for section in sections(profile)) + "\n"


def sections(profile: Profiled) -> Iterator[Section]:
    about, rates = profile.about, profile.measured.rates
    is_cut = about["layers"] != about["all_layers"]
    depth = f"{about['layers']} of {about['all_layers']} layers" if is_cut else f"{about['layers']} layers"
    weights = "random weights" if about["random_weights"] else "its own weights"
    paths = about.get("paths", {})
    used = "".join(f", {path['used']}" for path in paths.values())
    yield Section(
        "about",
        sentences=[
            f"{about['model']}: {depth}, {weights}, {about['dtype']} on {about['device']}{used}. The device copies "
            f"{rates.bandwidth / 1e9:,.1f} GB/s (read and written) and multiplies {rates.products / 1e9:,.0f} GFLOP/s.",
            *(f"Not the fastest {part}: {path['why_slow']}." for part, path in paths.items() if path["why_slow"]),
        ],
    )
    yield from _passes(profile.places, "measured")
    if not profile.estimated:
        yield Section("meaning", sentences=[meaning(profile.places[0].curve)])
    if not is_cut:
        yield from _rounds(profile.places, "")
    elif profile.estimated:
        yield Section(
            "estimate",
            sentences=[
                f"An estimate, not a measurement: all {about['all_layers']} layers, if each takes as long as the "
                f"{about['layers']} measured here; the output head is counted once."
            ],
        )
        yield from _passes(profile.estimated, "estimated")
        yield Section("meaning", sentences=[meaning(profile.estimated[0].curve)])
        yield from _rounds(profile.estimated, ", estimated")
    if profile.notes:
        yield Section("notes", sentences=[f"note: {note}" for note in profile.notes])


def _title(place: ProfiledBatch) -> str:
    return f"batch {place.rows}, context {place.context}"


PASS_COLUMNS = (
    Column("width", "tokens"),
    Column("ms", "ms"),
    Column("roofline_ms", "roofline\nms"),
    Column("over_roofline", "times", digits=1),
    Column("bound", "bound by"),
    Column("megabytes", "MB\nread", digits=1),
    Column("gflop", "GFLOP"),
    Column("plain_steps", "in plain\nsteps"),
)


def _passes(places: Sequence[ProfiledBatch], how: str) -> Iterator[Section]:
    for place in places:
        plain = place.readings[0].forward.seconds
        rows = [
            TableRow(
                [
                    one.forward.width,
                    1000 * one.forward.seconds,
                    1000 * one.roofline_s,
                    one.forward.seconds / one.roofline_s,
                    one.bound,
                    one.num_bytes / 1e6,
                    one.flops / 1e9,
                    one.forward.seconds / plain,
                ]
            )
            for one in place.readings
        ]
        legend = [f"{formula(place.curve)}; {place.curve.regime}"]
        yield Section(
            "passes", f"{_title(place)}: passes of the target, {how}", ReportTable(PASS_COLUMNS, rows), legend
        )


ROUND_COLUMNS = (
    Column("method", "method", "left"),
    Column("width", "width"),
    Column("draft_ms", "draft\nms"),
    Column("draft_roofline_ms", "roofline\nms"),
    Column("verify_ms", "verify\nms"),
    Column("verify_roofline_ms", "roofline\nms"),
    Column("host_ms", "host\nms"),
    Column("cost", "cost in\nplain steps"),
    Column("break_even_al", "break_even_al"),
)


def _rounds(places: Sequence[ProfiledBatch], how: str) -> Iterator[Section]:
    for place in places:
        if place.rounds:
            table = ReportTable(ROUND_COLUMNS, [TableRow(_round(one)) for one in place.rounds])
            yield Section("rounds", f"{_title(place)}: rounds{how}", table, [*map(sentence, place.verdicts)])


def _round(one: RoundCost) -> list[Value]:
    seconds = (one.draft_s, one.draft_roofline_s, one.verify_s, one.verify_roofline_s, one.host_s)
    draft, *others = (None if s is None else 1000 * s for s in seconds)
    about = "" if one.draft_roofline_s is not None else "~"
    return [one.method, one.width, Entry(draft, about + number(draft)), *others, one.cost, one.break_even_al]


def sentence(verdict: RoundVerdict) -> str:
    """Name what limits a method's round, and the speed-up without that limit."""
    whole, al = verdict.round, verdict.al
    price = f"a round of {whole.width} tokens costs {whole.cost:.2f} plain steps"
    if al is None or verdict.speedup is None:
        return (
            f"{whole.method}: {price}, so it needs more than {whole.cost:.2f} tokens per round to gain. Of that price, "
            f"{_binds(verdict)}; --acceptance says how much is gained."
        )
    gain = (
        f"{al:g} tokens per round ({verdict.al_source}) make it {verdict.speedup:.2f} times as fast as plain decoding"
    )
    if verdict.binding == "acceptance":
        then = f"with all {whole.width} kept it would be {whole.speedup(whole.width):.1f} times as fast"
    elif verdict.binding == "unclear":
        then = "the passes that were measured do not fit their line well enough to say more; measure again, undisturbed"
    elif verdict.binding == "launch overhead":
        then = "draft and target wait for work to be launched, far from what the device can do"
    else:
        then = f"with {FACTORS[verdict.binding]} it would be {whole.without(verdict.binding, al):.2f} times as fast"
    return f"{whole.method}: {_binds(verdict)}: {price}, and {gain}; {then}."


def _binds(verdict: RoundVerdict) -> str:
    names = {"draft": "the draft", "verify": "verifying", "host": "the host"}
    if verdict.binding == "unclear":
        return "it is unclear what binds"
    return f"{names.get(verdict.binding, verdict.binding)} binds"


def as_json(profile: Profiled) -> dict[str, Any]:
    """Return the content of `--json` and profile.json: measurements first, then the figures made from them."""
    return {
        **profile.about,
        "measured": asdict(profile.measured),
        "places": [_place(place) for place in profile.places],
        **({"estimated": [_place(place) for place in profile.estimated]} if profile.estimated else {}),
        "notes": list(profile.notes),
    }


def _place(place: ProfiledBatch) -> dict[str, Any]:
    through = asdict(place.curve) | {"line": place.curve.line._asdict()}
    rounds = [asdict(one) | {"cost": one.cost, "break_even_al": one.break_even_al} for one in place.rounds]
    verdicts = [
        {
            "method": one.round.method,
            "width": one.round.width,
            "binding": one.binding,
            "al": one.al,
            "al_source": one.al_source or None,
            "speedup": one.speedup,
            "sentence": sentence(one),
        }
        for one in place.verdicts
    ]
    return {
        "rows": place.rows,
        "context": place.context,
        "curve": through,
        "passes": [asdict(one.forward) | _without(asdict(one), "forward") for one in place.readings],
        "rounds": rounds,
        "verdicts": verdicts,
    }


def _without(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}
