"""A diagnosis, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from dflash_bench.doctor import examination
from dflash_bench.doctor.diagnosis import Diagnosis
from dflash_bench.doctor.examination import Sample

SHOWN = 5
"""Of what was tried, the highest."""


def text(diagnosis: Diagnosis) -> str:
    """One page, the likeliest cause first."""
    return "\n".join(_lines(diagnosis))


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    yield f"{diagnosis.method}: {diagnosis.draft}"
    yield f"on {diagnosis.target}"
    yield ""
    for sample in diagnosis.samples:
        yield _line_of(sample)
    if diagnosis.card is not None:
        places = _places(diagnosis.card.by_position)
        yield f"{'by its card':<16} {diagnosis.card.al_pooled:5.2f} tokens a round; {places}"
    if diagnosis.samples:
        yield ""
    if not diagnosis.has_cause:
        yield "Nothing that was looked at or tried explains low acceptance."
    for number, finding in enumerate(diagnosis.findings, start=1):
        kind = "" if finding.is_cause else "note: "
        yield f"{number}. {kind}{finding.cause}"
        yield f"   seen   {finding.evidence}"
        yield f"   to do  {finding.remedy}"
    if diagnosis.tried:
        yield ""
        yield f"The highest of {len(diagnosis.tried)} changes that were tried, one at a time:"
        for one in sorted(diagnosis.tried, key=lambda one: -one.al)[:SHOWN]:
            yield f"  {one.al:5.2f}  {one.gain:4.2f}x  {one.change.name}"


def _line_of(sample: Sample) -> str:
    interval = examination.interval(sample)
    within = ""
    if interval is not None and interval.low is not None:
        within = f" [{interval.low:.2f}, {interval.high:.2f}]"
    elif interval is not None and interval.too_few:
        within = f" (n = {interval.too_few})"
    num = len(sample.answers)
    prompts = "1 prompt" if num == 1 else f"{num} prompts"
    return f"{sample.name:<16} {sample.al:5.2f} tokens a round{within} on {prompts}; {_places(sample.by_position)}"


def _places(shares: list[float] | tuple[float, ...], most: int = 8) -> str:
    """How often each drafted token is accepted, with all before it."""
    if not shares:
        return "no drafted token was accepted"
    return "accepted by place: " + " ".join(f"{share:.0%}" for share in shares[:most])


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "method": diagnosis.method,
        "target": diagnosis.target,
        "draft": diagnosis.draft,
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "samples": [
            {
                "name": sample.name, "al_pooled": sample.al, "by_position": sample.by_position,
                "num_prompts": len(sample.answers), "num_loops": sample.num_loops,
            }
            for sample in diagnosis.samples
        ],
        "tried": [
            {"change": one.change.name, "al_pooled": one.al, "gain": one.gain, "p": one.p} for one in diagnosis.tried
        ],
        "card": None if diagnosis.card is None else asdict(diagnosis.card),
    }  # fmt: skip
