"""A profile as text and JSON, and what forward passes cost by width."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dflash_bench.analysis import roofline
from dflash_bench.analysis.roofline import WidthCurve
from dflash_bench.core.forwards import ProfileData
from dflash_bench.perf.verdict import ProfiledBatch, RoundCost, RoundVerdict
from dflash_bench.report.tables import ABSENT, aligned, number
from dflash_bench.results.run_info import RunInfo

# The cost of a forward by its width, in words: one line for each run, and what its speed-ups mean by it.


CROOKED = 0.25
"""From this misfit on the line is not to be trusted in between."""


def line_of(info: RunInfo) -> str:
    """What a run measured at its start; "n/a" where it did not."""
    curve = roofline.stored(info)
    return f"{ABSENT} (not measured in this run)" if curve is None else f"{formula(curve)}; {curve.regime}"


def formula(curve: WidthCurve) -> str:
    c0, c1 = (_milliseconds(seconds) for seconds in curve.line)
    rows = "one row" if curve.rows == 1 else f"{curve.rows} rows"
    off = f", off by up to {curve.misfit:.0%}" if curve.misfit > CROOKED else ""
    return f"C(n) = {c0} + {c1} n ms ({rows}, context {curve.context}, n to {curve.widest}{off})"


def _milliseconds(seconds: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:,.0f}"


def sentences(info: RunInfo) -> list[str]:
    """The line, and what follows from it for the speed-ups beside it."""
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
    """In seconds; None where the run did not measure it."""
    curve = roofline.stored(info)
    return None if curve is None else asdict(curve) | {"line": curve.line._asdict()}


# A profile as tables and sentences, and as JSON.


WIDTH = 100
FACTORS = {
    "draft": "a draft for nothing",
    "verify": "verifying at the price of a plain step",
    "host": "a loop that takes no time",
}


@dataclass(frozen=True, slots=True)
class Profiled:
    """A profile to be shown. `estimated` are the same places for the whole target, of which some layers were cut."""

    about: Mapping[str, Any]
    measured: ProfileData
    places: Sequence[ProfiledBatch]
    estimated: Sequence[ProfiledBatch] = ()
    notes: Sequence[str] = ()

    @property
    def judged(self) -> Sequence[ProfiledBatch]:
        """Of the whole target, where that could be estimated."""
        return self.estimated or self.places


def estimate_note(profile: Profiled) -> str:
    about = profile.about
    if about["layers"] == about["all_layers"]:
        return ""
    return f" ({'estimated from' if profile.estimated else 'only'} {about['layers']} of {about['all_layers']} layers)"


def text(profile: Profiled) -> str:
    return "\n\n".join(_blocks(profile)) + "\n"


def _blocks(profile: Profiled) -> Iterator[str]:
    about, rates = profile.about, profile.measured.rates
    cut = about["layers"] != about["all_layers"]
    depth = f"{about['layers']} of {about['all_layers']} layers" if cut else f"{about['layers']} layers"
    weights = "random weights" if about["random_weights"] else "its own weights"
    yield _wrapped(
        f"{about['model']}: {depth}, {weights}, {about['dtype']} on {about['device']}. The device copies "
        f"{rates.bandwidth / 1e9:,.1f} GB/s (read and written) and multiplies {rates.products / 1e9:,.0f} GFLOP/s."
    )
    for place in profile.places:
        yield f"{_title(place)}: passes of the target, measured\n{_passes(place)}\n{_curve(place)}"
    if not profile.estimated:
        yield _wrapped(meaning(profile.places[0].curve))
    if not cut:
        yield from _rounds(profile.places, "")
    elif profile.estimated:
        yield _wrapped(
            f"An estimate, not a measurement: all {about['all_layers']} layers, if each takes as long as the "
            f"{about['layers']} measured here; the output head is counted once."
        )
        for place in profile.estimated:
            yield f"{_title(place)}: passes of the target, estimated\n{_passes(place)}\n{_curve(place)}"
        yield _wrapped(meaning(profile.estimated[0].curve))
        yield from _rounds(profile.estimated, ", estimated")
    if profile.notes:
        yield "\n".join(_wrapped(f"note: {note}") for note in profile.notes)


def _title(place: ProfiledBatch) -> str:
    return f"batch {place.rows}, context {place.context}"


def _passes(place: ProfiledBatch) -> str:
    heads = ("tokens", "ms", "roofline ms", "times", "bound by", "MB read", "GFLOP", "in plain steps")
    plain = place.readings[0].forward.seconds
    rows = [
        (
            str(one.forward.width), number(1000 * one.forward.seconds), number(1000 * one.roofline_s),
            number(one.forward.seconds / one.roofline_s, 1), one.bound, number(one.num_bytes / 1e6, 1),
            number(one.flops / 1e9), number(one.forward.seconds / plain),
        )
        for one in place.readings
    ]  # fmt: skip
    return aligned(heads, rows, left=0)


def _curve(place: ProfiledBatch) -> str:
    return _wrapped(f"{formula(place.curve)}; {place.curve.regime}")


def _rounds(places: Sequence[ProfiledBatch], how: str) -> Iterator[str]:
    for place in places:
        if place.rounds:
            lines = [_verdict_line(verdict) for verdict in place.verdicts]
            yield "\n".join([f"{_title(place)}: rounds{how}", _round_table(place), *lines])


def _round_table(place: ProfiledBatch) -> str:
    heads = (
        "method", "width", "draft ms", "roofline ms", "verify ms", "roofline ms", "host ms", "cost in plain steps",
        "break_even_al",
    )  # fmt: skip
    return aligned(heads, [_round_row(one) for one in place.rounds])


def _round_row(one: RoundCost) -> tuple[str, ...]:
    def milliseconds(seconds: float | None) -> str:
        return ABSENT if seconds is None else number(1000 * seconds)

    between = "" if one.draft_roofline_s is not None else "~"
    times = (one.draft_roofline_s, one.verify_s, one.verify_roofline_s, one.host_s)
    return (
        one.method, str(one.width), between + milliseconds(one.draft_s), *map(milliseconds, times), number(one.cost),
        number(one.break_even_al),
    )  # fmt: skip


def _verdict_line(verdict: RoundVerdict) -> str:
    return _wrapped(sentence(verdict))


def sentence(verdict: RoundVerdict) -> str:
    """What binds a method's whole round, and what it would bring if it did not."""
    whole, al = verdict.round, verdict.al
    price = f"a round of {whole.width} tokens costs {whole.cost:.2f} plain steps"
    if al is None or verdict.speedup is None:
        return (
            f"{whole.method}: {price}, so it needs more than {whole.cost:.2f} tokens a round to gain. Of that price, "
            f"{_binds(verdict)}; --acceptance says how much is gained."
        )
    gain = f"{al:g} tokens a round ({verdict.al_source}) make it {verdict.speedup:.2f} times as fast as plain decoding"
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


def _wrapped(line: str) -> str:
    return textwrap.fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def as_json(profile: Profiled) -> dict[str, Any]:
    """What `--json` prints and profile.json holds: measurements first, then what they come to."""
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
            "method": one.round.method, "width": one.round.width, "binding": one.binding, "al": one.al,
            "al_source": one.al_source or None, "speedup": one.speedup, "sentence": sentence(one),
        }
        for one in place.verdicts
    ]  # fmt: skip
    return {
        "rows": place.rows, "context": place.context, "curve": through,
        "passes": [asdict(one.forward) | _without(asdict(one), "forward") for one in place.readings],
        "rounds": rounds, "verdicts": verdicts,
    }  # fmt: skip


def _without(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}
