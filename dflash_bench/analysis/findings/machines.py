"""What several workers do to times: on one machine they disturb each other, on several they may differ."""

from __future__ import annotations

from dflash_bench.analysis.findings.case import Case, Seen


def shared_machine(case: Case) -> Seen | None:
    number = (case.identity.get("workers") or {}).get("on_one_machine", 1)
    if not case.is_baseline or number < 2:
        return None
    text = (
        f"{number} workers measured on one machine at the same time and shared its memory and caches: times are longer "
        "than alone, and not equally so for all methods; tokens, acceptance and verdicts are the same"
    )
    return case.seen_in_suite("shared_machine", text, "for speeds leave --workers out, or use one worker a machine")


def unlike_machines(case: Case) -> Seen | None:
    kinds = (case.identity.get("workers") or {}).get("kinds", [])
    if not case.is_baseline or len(kinds) < 2:
        return None
    text = (
        f"workers ran on {len(kinds)} kinds of machines ({'; '.join(kinds)}): times and speeds are a mixture; each "
        "prompt's speed-up compares times of one machine"
    )
    return case.seen_in_suite("unlike_machines", text, "for absolute speeds use machines of one kind")
