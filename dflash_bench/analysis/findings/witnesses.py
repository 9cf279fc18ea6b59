"""Could the run's witnesses have objected? What came of the copies of its answers that it spoiled."""

from __future__ import annotations

from dflash_bench.analysis.findings.case import Case, Seen
from dflash_bench.results.run_info import RunInfo

WHO = {
    "judge": "the judge", "counter": "the counter", "clock": "the clock", "scorer": "the scorer",
    "text": "the tokenizer",
}  # fmt: skip
SPOILED = {
    "token": "an answer with another token", "end": "an answer that ends elsewhere", "count": "a round less",
    "time": "half the time", "numbers": "an answer with other numbers", "order": "a text backwards",
}  # fmt: skip
WHY = {
    "no_answer": "there was no answer to spoil",
    "not_asked": "it was not asked",
    "sampled": "answers are drawn",
    "no_tokens": "the server names no tokens",
    "short": "answers are too short",
    "served": "a server's rounds are not heard",
    "no_scorer": "the suite has none",
    "code": "code is not run again for this",
    "none_passed": "no answer was right",
    "no_numbers": "right answers hold no numbers",
    "no_tokenizer": "the target's files are not here",
}
"""Why a kind of spoiled copy was not tried."""


def silent(info: RunInfo | None) -> list[str]:
    """What each witness let pass that it should have denied."""
    return [
        f"{WHO.get(one.witness, one.witness)} passed {SPOILED.get(one.spoiled, one.spoiled)}"
        for one in (info and info.canaries) or ()
        if one.outcome == "silent"
    ]


def proves_nothing(case: Case) -> Seen | None:
    passed = silent(case.info)
    if not passed or not _speaks_for_the_run(case):
        return None
    text = f"the run proves nothing: of copies of its answers that were spoiled, {', '.join(passed)}"
    return case.seen_in_suite(
        "proves_nothing", text, "a witness that cannot object is broken; do not use these numbers"
    )


def untried(case: Case) -> Seen | None:
    whys: dict[tuple[str, str], None] = {}
    for one in (case.info and case.info.canaries) or ():
        if one.outcome == "untried":
            whys[one.witness, str(one.why)] = None
    if not whys or not _speaks_for_the_run(case):
        return None
    named = ", ".join(f"{WHO.get(witness, witness)} ({WHY.get(why, why)})" for witness, why in whys)
    text = f"whether these could object was not tried: {named}"
    return case.seen_in_suite("untried_witnesses", text, "their word is worth what it was worth in other runs")


def _speaks_for_the_run(case: Case) -> bool:
    return case.opens_run and case.is_first
