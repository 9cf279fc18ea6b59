"""Findings about witnesses: whether they objected to the copies of answers that the run spoiled on purpose."""

from __future__ import annotations

from dflash_bench.analysis.findings.base import CellContext, Observation
from dflash_bench.results.run_info import RunInfo

WHO = {
    "judge": "the judge", "counter": "the counter", "clock": "the clock", "scorer": "the scorer",
    "text": "the tokenizer",
}  # fmt: skip
SPOILED = {
    "token": "an answer with another token", "end": "an answer that ends elsewhere", "count": "one round fewer",
    "time": "half the time", "numbers": "an answer with other numbers", "order": "a text backwards",
}  # fmt: skip
WHY = {
    "no_answer": "there was no answer to spoil",
    "not_asked": "it was not used",
    "sampled": "answers are sampled",
    "no_tokens": "the server does not report token ids",
    "short": "answers are too short",
    "served": "a server does not report its rounds",
    "no_scorer": "the suite has none",
    "code": "code is not run again for this",
    "no_verdict": "it finds no answer right or wrong",
    "none_passed": "no answer was right",
    "not_by_numbers": "other numbers do not make its answers wrong",
    "no_numbers": "right answers contain no numbers",
    "no_tokenizer": "the target's files are not here",
}
"""Why a kind of spoiled copy was not tried, by code."""


def silent(info: RunInfo | None) -> list[str]:
    """Return which witnesses accepted a spoiled copy, and of which kind."""
    return [
        f"{WHO.get(canary.witness, canary.witness)} passed {SPOILED.get(canary.spoiled, canary.spoiled)}"
        for canary in (info and info.canaries) or ()
        if canary.outcome == "silent"
    ]


def proves_nothing(context: CellContext) -> Observation | None:
    passed = silent(context.info)
    if not passed or not _represents_run(context):
        return None
    text = f"the run proves nothing: of deliberately spoiled copies of its answers, {', '.join(passed)}"
    return context.observe_suite(
        "proves_nothing", text, "a witness that cannot object is broken; do not use these numbers"
    )


def untried(context: CellContext) -> Observation | None:
    whys: dict[tuple[str, str], None] = {}
    for canary in (context.info and context.info.canaries) or ():
        if canary.outcome == "untried":
            whys[canary.witness, str(canary.why)] = None
    if not whys or not _represents_run(context):
        return None
    named = ", ".join(f"{WHO.get(witness, witness)} ({WHY.get(why, why)})" for witness, why in whys)
    text = f"it was not tested whether these can object: {named}"
    return context.observe_suite("untried_witnesses", text, "rely on them only as far as other runs have tested them")


def _represents_run(context: CellContext) -> bool:
    return context.is_first_suite and context.represents_suite
