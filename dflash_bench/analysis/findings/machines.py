"""What this machine did to the run: workers that disturbed each other, too little memory for a judge of its own, and a
target for which the engine's own code would not do."""

from __future__ import annotations

from dflash_bench.analysis.findings.case import Case, Seen
from dflash_bench.records import SHARED_WEIGHTS


def shared_machine(case: Case) -> Seen | None:
    number = (case.identity.get("workers") or {}).get("on_one_machine", 1)
    if not case.is_baseline or number < 2:
        return None
    text = (
        f"{number} workers measured on one machine at the same time and shared its memory and caches: times are longer "
        "than alone, and not equally so for all methods; tokens, acceptance and verdicts are the same"
    )
    remedy = "for speeds leave --workers out, or use one worker a machine"
    return case.seen_in_suite("shared_machine", text, remedy, num_workers=number)


def unlike_machines(case: Case) -> Seen | None:
    kinds = (case.identity.get("workers") or {}).get("kinds", [])
    if not case.is_baseline or len(kinds) < 2:
        return None
    text = (
        f"workers ran on {len(kinds)} kinds of machines ({'; '.join(kinds)}): times and speeds are a mixture; each "
        "prompt's speed-up compares times of one machine"
    )
    return case.seen_in_suite(
        "unlike_machines", text, "for absolute speeds use machines of one kind", num_kinds=len(kinds)
    )


def shared_weights(case: Case) -> Seen | None:
    """Of the judge with the engine."""
    if not case.is_first or (case.identity.get("judge") or {}).get("weights") != SHARED_WEIGHTS:
        return None
    text = (
        "there was no memory for weights of the judge's own: it read the engine's, which were the same when they "
        "had been loaded, when they had been laid out and when the run ended"
    )
    remedy = "a fault in loading them is not found; free memory, or use a smaller --dtype or model"
    return case.seen_in_suite("shared_weights", text, remedy)


def fallback(case: Case) -> Seen | None:
    reason = case.identity.get("fallback")
    if not case.is_first or not reason:
        return None
    text = f"the target was computed by transformers' code, because the engine's own {reason}"
    remedy = (
        "plain decoding is slower in this way, and speed-ups over it are higher; --engine transformers if wanted so"
    )
    return case.seen_in_suite("fallback", text, remedy, reason=str(reason))
