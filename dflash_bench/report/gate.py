"""The result of `check` as text, JSON, JUnit XML, GitHub step summary, and for github-action-benchmark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from statistics import geometric_mean
from typing import Any
from xml.etree import ElementTree

from dflash_bench.analysis.cells import Cell
from dflash_bench.analysis.gate.baselines import Runs
from dflash_bench.analysis.gate.checks import Check, GateOutcome
from dflash_bench.analysis.metrics import BASELINE, METRICS
from dflash_bench.analysis.stats import Interval
from dflash_bench.core.labels import wrapped
from dflash_bench.core.methods import shown
from dflash_bench.report import render
from dflash_bench.report.tables import VAGUE, Column, ReportTable, Section, TableRow, in_markdown, p_value

COUNTS = ("mismatch", "failed", "plain_drafts", "nothing_drafted", "fallback", "ungated")
COLUMNS = (
    Column("result", "result", "left"),
    Column("suite", "suite", "left"),
    Column("method", "method", "left"),
    Column("metric", "figure", "left"),
    Column("found", "found"),
    Column("expected", "expected"),
    Column("change", "change"),
    Column("allowed", "allowed", is_spare=True),
    Column("p", "p (Holm)", is_spare=True),
    Column("why", "why"),
)
UNITS = {name: metric.unit for name, metric in METRICS.items() if metric.may_fall}
"""Units of the metrics that github-action-benchmark draws: those with a gate's tolerance."""
NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def section(outcome: GateOutcome, checks: Sequence[Check]) -> Section:
    """Return a table with a row for each of these checks, if there are any, and the notes below."""
    table = ReportTable(COLUMNS, [TableRow(_row(check)) for check in checks]) if checks else None
    return Section("check", table=table, sentences=[f"note: {note}" for note in outcome.notes])


def text(outcome: GateOutcome, every: bool = False, width: int | None = None) -> str:
    """Return the verdict, and a line for each method; with `every` a line for each check, failures first.

    In logs, which have no width, nothing is wrapped.
    """
    passed = [check for check in outcome.checks if not check.failed]
    of_checks = section(outcome, [*outcome.failures, *passed] if every else [])
    told = of_checks if every else _by_method(outcome)
    return "\n\n".join(filter(None, [wrapped(verdict(outcome), width), render.terminal(told, width)]))


SHOWN = {"speedup.decode": "speed-up", "al.pooled": "tokens/round", "exact": "exact", "passed": "passed"}
"""The figures of a method's line, and their heads."""


def _by_method(outcome: GateOutcome) -> Section:
    """Return a row for each suite and method, the baseline in parentheses, and why any of them failed."""
    checks: dict[tuple[str, str], list[Check]] = {}
    for check in outcome.checks:
        checks.setdefault((check.label, shown(check.method)), []).append(check)
    figures = {key: found for key, several in checks.items() if (found := _figures(several))}
    known = [name for name in SHOWN if any(name in found for found in figures.values())]
    columns = [
        Column("method", "method", "left"),
        Column("result", "result", "left"),
        *(Column(name, SHOWN[name]) for name in known),
    ]
    rows = [
        TableRow([method, _result(checks[label, method]), *(found.get(name, "") for name in known)], label)
        for (label, method), found in figures.items()
    ]
    has_baseline = any(check.kind in SHOWN and not check.is_floor for check in outcome.checks)
    whys = [line for (label, method), several in checks.items() for line in _whys(f"{label} {method}".strip(), several)]
    notes = section(outcome, ()).sentences
    below = [*(["in parentheses: the baseline"] if rows and has_baseline else []), *whys]
    table = ReportTable(columns, rows, "suite") if rows else None
    return Section("check", table=table, sentences=[*below, *notes])


def _result(checks: Sequence[Check]) -> str:
    return "FAIL" if any(check.failed for check in checks) else "ok"


def _whys(named: str, checks: Sequence[Check]) -> Iterator[str]:
    """Yield a line for each reason for which checks of a method failed."""
    whys: dict[str, list[str]] = {}
    for check in checks:
        if check.failed:
            whys.setdefault(check.reason, []).append(check.figure)
    for why, figures in whys.items():
        yield f"FAIL {f'{named}: ' if named else ''}{', '.join(figures)}: {why}"


def _figures(checks: Sequence[Check]) -> dict[str, str]:
    """Return a method's figures as text; of several runs' the worst one."""
    found: dict[str, Check] = {}
    for check in sorted(checks, key=lambda one: (not one.is_floor, -one.change)):
        if check.kind in SHOWN:
            found[check.kind] = check  # the baseline's rather than a floor's, and the lowest
    return {
        kind: f"{check.found:.4g}" if check.is_floor else f"{check.found:.4g} ({check.expected:.4g})"
        for kind, check in found.items()
    }


def verdict(outcome: GateOutcome) -> str:
    """Return whether all checks passed, and how many there were."""
    num_checks, num_failed = len(outcome.checks), len(outcome.failures)
    if not num_failed:
        return f"passed: {num_checks} checks{', but not speed, see below' if outcome.ungated else ''}"
    return f"FAILED: {num_failed} of {num_checks} checks"


def summary(outcome: GateOutcome) -> str:
    """Return Markdown for $GITHUB_STEP_SUMMARY, in which the checks that passed are folded."""
    sign = "❌" if outcome.failures else "✅"
    passed = [check for check in outcome.checks if not check.failed]
    blocks = [
        f"### dflash-bench check {sign}",
        in_markdown(headline(outcome)),
        render.markdown(section(outcome, outcome.failures)),
    ]
    if passed:
        table = render.markdown(section(replace(outcome, notes=()), passed))
        blocks.append(f"<details><summary>{len(passed)} checks passed</summary>\n\n{table}\n\n</details>")
    return "\n\n".join(filter(None, blocks)) + "\n"


def headline(outcome: GateOutcome) -> str:
    """Return the verdict, with the names of the checks that failed."""
    named = ", ".join(check.name for check in outcome.failures)
    return f"{verdict(outcome)}{f': {named}' if named else ''}"


def _row(check: Check) -> list[str]:
    counted = check.kind in COUNTS
    value = f"{check.found:g}" if counted else f"{check.found:.4g}"
    absolute = counted or check.is_floor
    change = "-" if absolute else f"{check.change:+.1%}".replace("-0.0%", "+0.0%")
    return [
        "FAIL" if check.failed else "ok",
        check.label,
        check.method,
        check.figure,
        value,
        f"{check.expected:.4g}",
        change,
        "-" if absolute else f"{check.tolerance:.1%}",
        "-" if check.p is None else p_value(check.p),
        check.reason or "-",
    ]


def as_json(outcome: GateOutcome) -> dict[str, Any]:
    checks = [asdict(check) | {"change": check.change} for check in outcome.checks]
    return {"passed": not outcome.failures, "checks": checks, "notes": list(outcome.notes), "ungated": outcome.ungated}


def junit(outcome: GateOutcome, name: str) -> str:
    """Return JUnit XML with a test case for each check, and a test suite for each suite of prompts."""
    root = ElementTree.Element("testsuites", _counts(outcome.checks) | {"name": "dflash-bench check"})
    for suite in dict.fromkeys(check.suite for check in outcome.checks):
        checks = [check for check in outcome.checks if check.suite == suite]
        inner = ElementTree.SubElement(root, "testsuite", _counts(checks) | {"name": _xml(suite)})
        for check in checks:
            place = ".".join(filter(None, [name, check.suite, check.setting, check.method]))
            at = {"classname": _xml(place), "name": check.figure}
            case = ElementTree.SubElement(inner, "testcase", at | {"time": "0"})
            if check.failed:
                why = outcome.ungated if check.kind == "ungated" else ""
                attributes = {"type": check.kind, "message": _xml(why or check.reason)}
                ElementTree.SubElement(case, "failure", attributes).text = _xml(why or _sentence(check))
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _counts(checks: Sequence[Check]) -> dict[str, str]:
    return {"tests": str(len(checks)), "failures": str(sum(check.failed for check in checks)), "errors": "0"}


def _xml(text: str) -> str:
    return NOT_XML.sub("?", text)


def _sentence(check: Check) -> str:
    row = dict(zip((column.id for column in COLUMNS), _row(check), strict=True))
    seen = f"{row['found']}, expected {row['expected']} (change {row['change']}, p (Holm) {row['p']})"
    return f"{check.name}: {seen}: {check.reason}"


def benchmark(cells: Runs) -> str:
    """Return JSON for `customBiggerIsBetter` of github-action-benchmark: metrics for which bigger is better."""
    entries = [
        {
            "name": " ".join(filter(None, (key.suite, runs[0].setting, key.slice, key.method, name))),
            "unit": UNITS[name],
            "value": float(f"{interval.value:.6g}"),
            "range": _range(interval),
            "extra": f"{runs[0].num_prompts} prompts" + (f", {len(runs)} runs" if len(runs) > 1 else ""),
        }
        for key, runs in cells.items()
        for name in runs[0].figures
        if name in UNITS and (key.method != BASELINE or name == "tps.decode") and (interval := _over(runs, name))
    ]
    return json.dumps(entries, indent=1, ensure_ascii=False) + "\n"


def _range(interval: Interval) -> str:
    """Return half of an interval's width; in words if it has no bounds, or is too wide."""
    if interval.half_width is None:
        return "n/a"
    return VAGUE if interval.is_vague else f"± {interval.half_width:.3g}"


def _over(runs: Sequence[Cell], name: str) -> Interval | None:
    """Return one run's interval over prompts, or the mean of several runs with the lowest and the highest of them."""
    intervals = [cell.figures[name] for cell in runs if name in cell.figures]
    if len(runs) == 1 or not intervals:
        return intervals[0] if intervals else None
    values = [interval.value for interval in intervals]
    return Interval(geometric_mean(values), min(values), max(values))
