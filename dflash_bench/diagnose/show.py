"""Render the results of doctor, crosscheck and verify-distribution as text, Markdown and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

from dflash_bench.core import dialects
from dflash_bench.core.dialects import AcceptanceCounts
from dflash_bench.core.labels import WIDTH, wrapped
from dflash_bench.core.methods import shown
from dflash_bench.core.types import Settings
from dflash_bench.diagnose import doctor
from dflash_bench.diagnose.compare_counts import (
    CauseTrial,
    CountComparison,
    CrosscheckResult,
    drafts_per_round,
    fitting_causes,
    has_other_drafts,
)
from dflash_bench.diagnose.doctor import Diagnosis, Sample
from dflash_bench.diagnose.goodness_of_fit import (
    LEVEL,
    POWER,
    REPLACED,
    Draws,
    FitTest,
    FitVerdict,
    Kind,
    count_decisions,
)
from dflash_bench.report import render
from dflash_bench.report.tables import (
    ABSENT,
    Column,
    ReportTable,
    Section,
    TableRow,
    in_markdown,
    number,
    p_value,
    with_interval,
)

SHOWN = 5
"""The number of best trials to show."""


# `doctor`


def diagnosis_text(diagnosis: Diagnosis, width: int | None = WIDTH) -> str:
    """Render a page, likeliest cause first."""
    return "\n".join(wrapped(line, width, others=" " * _indent(line)) for line in _lines(diagnosis))


def _indent(line: str) -> int:
    """Return where a line goes on if it is too long: below its text, behind its label."""
    return 9 if line.startswith("   ") else 17


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    yield f"{diagnosis.method}: {diagnosis.draft}"
    yield f"on {diagnosis.target}"
    yield ""
    for sample in diagnosis.samples:
        yield _sample_line(sample)
    if diagnosis.card is not None:
        positions = _by_position(diagnosis.card.by_position)
        yield f"{'by its card':<16} {diagnosis.card.al_pooled:5.2f} tokens per round; {positions}"
    if diagnosis.samples:
        yield ""
    if not diagnosis.has_cause:
        yield "Nothing that was checked or tried explains low acceptance."
    for place, finding in enumerate(diagnosis.findings, start=1):
        kind = "" if finding.is_cause else "note: "
        yield f"{place}. {kind}{finding.cause}"
        yield f"   seen   {finding.evidence}"
        yield f"   to do  {finding.remedy}"
    if diagnosis.trials:
        yield ""
        yield f"The best of {len(diagnosis.trials)} changes that were tried, one at a time:"
        for one in sorted(diagnosis.trials, key=lambda one: -one.al)[:SHOWN]:
            yield f"  {one.al:5.2f}  {one.gain:4.2f}x  {one.change.name}"


def _sample_line(sample: Sample) -> str:
    interval, num = doctor.interval(sample), len(sample.answers)
    length, _, within = (with_interval(interval) if interval else f"{sample.al:.2f}").partition(" ")
    within = f" {within}" if within else ""
    prompts = "1 prompt" if num == 1 else f"{num} prompts"
    return f"{sample.name:<16} {length:>5} tokens per round{within} on {prompts}; {_by_position(sample.by_position)}"


def _by_position(shares: Sequence[float]) -> str:
    """Render the share of rounds that accept each drafted token and all before it."""
    if not shares:
        return "no drafted token was accepted"
    return "accepted by position: " + " ".join(f"{share:.0%}" for share in shares[:8])


def diagnosis_as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "method": diagnosis.method,
        "target": diagnosis.target,
        "draft": diagnosis.draft,
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "samples": [
            {
                "name": sample.name,
                "al_pooled": sample.al,
                "by_position": sample.by_position,
                "num_prompts": len(sample.answers),
                "num_loops": sample.num_loops,
            }
            for sample in diagnosis.samples
        ],
        "tried": [
            {"change": one.change.name, "al_pooled": one.al, "gain": one.gain, "p": one.p} for one in diagnosis.trials
        ],
        "card": None if diagnosis.card is None else asdict(diagnosis.card),
    }


# `crosscheck`


def crosscheck_text(all_checked: Sequence[CrosscheckResult]) -> str:
    blocks = []
    for checked in all_checked:
        blocks += ["\n".join(_about(checked))]
        blocks += map(render.terminal, sections(checked))
        blocks += ["\n".join([*_notes(checked), sentence(checked)])]
    return "\n\n".join(blocks)


def page(all_checked: Sequence[CrosscheckResult], command: str) -> str:
    """Render the results of a command in Markdown."""
    blocks = ["# Crosscheck: a server and this engine", f"```\n{command}\n```"]
    for checked in all_checked:
        blocks += [f"## {in_markdown(checked.method)}", in_markdown(sentence(checked))]
        blocks += ["\n".join(f"- {in_markdown(line)}" for line in [*_about(checked), *_notes(checked)])]
        blocks += [render.markdown(section, level=3) for section in sections(checked)]
    return "\n\n".join(blocks) + "\n"


def _about(checked: CrosscheckResult) -> Iterator[str]:
    about = checked.about
    yield f"{checked.method} at {about['server']} ({about['dialect']}), which gets prompts as {about['prompts']}"
    yield f"here: {about['target']} with draft {about['draft']}, {about['dtype']} on {about['device']}"
    yield f"{len(checked.base.pairs)} prompts of {about['suites']}, temperature 0"


def _notes(checked: CrosscheckResult) -> Iterator[str]:
    if checked.counted_by is not None:
        yield f"counted by {checked.counted_by}: {dialects.describe_rule(checked.counted_by)}"
    if checked.conversion is not None:
        yield f"our counts are converted to its way of counting: {checked.conversion.description}"
    if checked.num_prompt_tokens is not None:
        reference, server = checked.num_prompt_tokens
        yield f"its prompts have {server} tokens, as it rendered them, and ours {reference}"
    for number_of, pair in enumerate(checked.base.pairs, start=1):
        if pair.divergence is not None:
            yield f"answer {number_of}: {pair.divergence.verdict} at {pair.divergence}"
    for error in checked.failed:
        yield f"an answer of the server failed: {error}"


def sections(checked: CrosscheckResult) -> Iterator[Section]:
    totals = ReportTable.of(["", "here", "server"], list(_totals(checked.base)))
    yield Section("same_answers", "Answers that are the same", totals)
    if positions := checked.base.positions():
        rows = [
            [
                str(p.place),
                *(number(share, 4) for share in (p.reference, p.server)),
                f"{p.server - p.reference:+.4f}",
                number(p.allowed, 4),
            ]
            for p in positions
        ]
        table = ReportTable.of(["position", "here", "server", "difference", "allowed"], rows)
        yield Section("positions", "Share of rounds that accept the draft at a position", table)
    if checked.trials:
        fitting = fitting_causes(checked.trials)
        others = sorted((one for one in checked.trials if one not in fitting), key=_nearness)[:SHOWN]
        heads = ["cause, in our engine", "same answers", "same counts", "al.pooled", "fits"]
        title = f"Causes that were tried ({len(checked.trials)}): those that fit, and the nearest others"
        rows = [_cause(one, one in fitting) for one in [*fitting, *others]]
        yield Section("causes", title, ReportTable.of(heads, rows))


def _totals(base: CountComparison) -> Iterator[list[str]]:
    num = len(base.pairs)
    yield ["answers", str(num), f"{base.num_equal} the same"]
    sides = list(zip(*base.counted, strict=True))
    if not sides:
        return
    for name in ("rounds", "drafted", "accepted"):
        yield [name, *(_total([getattr(one, name) for one in side]) for side in sides)]
    yield ["tokens drafted per round, at most", *(ABSENT if n is None else str(n) for n in drafts_per_round(base))]
    yield ["al.pooled", *(number(_pooled(side)) for side in sides)]
    yield ["its al.pooled over ours", "", with_interval(base.ratio(), 4)]
    yield ["answers with the same counts", "", f"{base.num_identical} of {len(base.counted)}"]


def _total(values: Sequence[int | None]) -> str:
    known = [value for value in values if value is not None]
    return str(sum(known)) if len(known) == len(values) else ABSENT


def _pooled(side: Sequence[Any]) -> float | None:
    rounds = sum(one.rounds for one in side)
    return 1 + sum(one.accepted for one in side) / rounds if rounds else None


def _nearness(one: CauseTrial) -> tuple[int, int, int]:
    return one.comparison.nearness


def _cause(one: CauseTrial, fits: bool) -> list[str]:
    its, counted = one.comparison, one.comparison.counted
    pooled = number(_pooled([reference for reference, _ in counted])) if counted else ABSENT
    same = f"{its.num_identical} of {len(counted)}"
    return [one.cause.name, f"{its.num_equal} of {len(its.pairs)}", same, pooled, str(one.how) if fits else "no"]


def sentence(checked: CrosscheckResult) -> str:
    """State the verdict and its reason in a sentence."""
    base = checked.base
    if checked.verdict == "cannot tell":
        return f"Whether the server drafts as this engine does cannot be determined: {_why_not(checked)}."
    if checked.verdict == "agree":
        counts = f"{base.num_identical} of {len(base.counted)} have the same counts of rounds and accepted drafts"
        if base.state == "same":
            return f"The server and this engine agree: {_equal(base)}, and {counts}."
        rest = f", and none of {len(checked.trials)} causes that were tried gives its counts" if checked.trials else ""
        return (
            f"The server and this engine agree within chance: {_equal(base)}, and its al.pooled is "
            f"{with_interval(base.ratio(), 3)} of ours; {counts}{rest}."
        )
    return f"The server and this engine differ: {'; '.join(_differences(checked))}. {_explanation(checked)}"


def _equal(base: CountComparison) -> str:
    return f"{base.num_equal} of {len(base.pairs)} answers are the same"


def _why_not(checked: CrosscheckResult) -> str:
    base = checked.base
    if base.counted:
        return f"only {len(base.counted)} equal answers have counts, and those differ; raise --limit"
    if checked.uncounted is None:
        return f"{_equal(base)}, and acceptance is compared on those; raise --limit"
    dialect = checked.about["dialect"].partition(" ")[0]
    remedy = dialects.remedy(dialect, "uncounted") or "use a server that reports its rounds"
    return f"{checked.uncounted} ({_equal(base)}); {remedy}"


def _differences(checked: CrosscheckResult) -> Iterator[str]:
    base = checked.base
    if checked.failed:
        yield f"{len(checked.failed)} of its answers failed"
    if base.mismatches:
        yield f"{len(base.mismatches)} of {len(base.pairs)} answers are not what the model answers here"
    if base.server_drafts_nothing:
        yield "it counts no drafts, so it drafts nothing"
        return
    if has_other_drafts(base):
        reference, server = drafts_per_round(base)
        yield f"it drafts {server} tokens per round, and this engine {reference}"
    if base.counted and base.state in ("differ", "alike"):
        own, its = (number(_pooled(side)) for side in zip(*base.counted, strict=True))
        yield (
            f"its al.pooled is {its}, and ours {own}, on the same answers, and the counts are the same in "
            f"{base.num_identical} of {len(base.counted)}"
        )


def _explanation(checked: CrosscheckResult) -> str:
    if not checked.trials:
        if checked.base.server_drafts_nothing:
            return "Check that the server was started with a draft, and read its log."
        return "" if checked.failed else "No cause can be emulated for this method."
    fitting = fitting_causes(checked.trials)
    if not fitting:
        nearest = min(checked.trials, key=_nearness)
        return (
            f"None of {len(checked.trials)} known causes fits (nearest: {nearest.cause.name}): it has other weights, "
            "or does something that is not known here."
        )
    by_effect: dict[str, list[str]] = {}
    for one in fitting:
        by_effect.setdefault(one.cause.effect, []).append(one.cause.name)
    causes = ", or ".join(f"{' or '.join(names)} ({effect})" for effect, names in by_effect.items())
    apart = "; these prompts do not tell them apart" if len(fitting) > 1 else ""
    return f"The cause that fits is {causes}: {_fit(fitting[0])}{apart}."


def _fit(one: CauseTrial) -> str:
    its = one.comparison
    if one.how == "same answers":
        return f"{its.num_equal} of {len(its.pairs)} answers are then the same"
    if one.how == "same counts":
        return f"its counts are then the same in {its.num_identical} of {len(its.counted)} answers"
    return f"its al.pooled is then {with_interval(its.ratio(), 3)} of ours, which may be chance"


def crosscheck_as_json(all_checked: Sequence[CrosscheckResult]) -> list[dict[str, Any]]:
    return [_json(checked) for checked in all_checked]


def _json(checked: CrosscheckResult) -> dict[str, Any]:
    base = checked.base
    return {
        "method": checked.method,
        "about": dict(checked.about),
        "verdict": checked.verdict,
        "sentence": sentence(checked),
        "counted_by": checked.counted_by,
        "conversion": checked.conversion
        and {"id": checked.conversion.id, "description": checked.conversion.description},
        "uncounted": checked.uncounted,
        "failed": list(checked.failed),
        "num_prompt_tokens": checked.num_prompt_tokens,
        **_numbers(base),
        "positions": [asdict(position) for position in base.positions()],
        "answers": [
            {
                "same": pair.is_equal,
                "here": pair.reference.counts and _counts_json(pair.reference.counts),
                "server": pair.server.counts and _counts_json(pair.server.counts),
                "verdict": pair.divergence.verdict if pair.divergence else None,
            }
            for pair in base.pairs
        ],
        "tried": [
            {"cause": one.cause.name, "effect": one.cause.effect, "fits": one.how, **_numbers(one.comparison)}
            for one in checked.trials
        ],
        "named": [one.cause.name for one in fitting_causes(checked.trials)],
    }


def _counts_json(counts: AcceptanceCounts) -> dict[str, Any]:
    return {"rounds": counts.rounds, "accepted": counts.accepted, "drafted": counts.drafted, "at": counts.at}


def _numbers(comparison: CountComparison) -> dict[str, Any]:
    ratio, sides = comparison.ratio(), list(zip(*comparison.counted, strict=True))
    pooled = [_pooled(side) for side in sides] or [None, None]
    return {
        "num_answers": len(comparison.pairs),
        "num_same_answers": comparison.num_equal,
        "num_counted": len(comparison.counted),
        "num_same_counts": comparison.num_identical,
        "al_pooled": {"here": pooled[0], "server": pooled[1]},
        "ratio": ratio and asdict(ratio),
    }


# `verify-distribution`


NAMES = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Neutral values of settings, which are not shown."""
SIZES: dict[Kind, str] = {
    "likelihood": "log p off by {:.3f}",
    "leaning": "draft off by {:.3f}",
    "rank": "shares off by {:.1%}",
}
VIEWS: dict[Kind, str] = {"by_id": "{}, by id", "pairs": "steps to the next"}
COLUMNS = (
    Column("method", "method", "left"),
    Column("view", "tested", "left"),
    Column("tokens", "tokens", is_spare=True),
    Column("likelihood", "log p", is_spare=True),
    Column("likelihood_due", "due", is_spare=True),
    Column("likelihood_p", "p"),
    Column("leaning", "draft", is_spare=True),
    Column("leaning_due", "due", is_spare=True),
    Column("leaning_p", "p"),
    Column("rank", "off by", is_spare=True),
    Column("rank_due", "chance", is_spare=True),
    Column("rank_p", "p"),
    Column("verdict", "", "left"),
)
LEGEND = (
    "tokens = those of which the model was not certain; draft place = position in a draft that did not know the token\n"
    "log p = mean log-probability, draft = agreement with the draft (0 to 1), each with what the model expects (due);\n"
    "off by = largest difference in the share of tokens up to some place in the model's order; p = adjusted"
)


def distribution_text(
    draws: Sequence[Draws],
    tests: Sequence[FitTest],
    verdicts: Sequence[FitVerdict],
    settings: Settings,
    width: int | None = WIDTH,
) -> str:
    number = f"{len(tests)} tests" if len(tests) != 1 else "1 test"
    places = max(int(one.columns["place"].max()) for one in draws)
    head = (
        f"{draws[0].num_answers:,} answers of {places} tokens by each method, at {_settings(settings)}, against the "
        "published model"
    )
    table = ReportTable(COLUMNS, [TableRow(row) for row in _rows(tests)])
    by_chance = f"if every method is right, one or more of {number} fail by chance in {LEVEL:.1%} of cases"
    said = [*map(_sentence, verdicts), *_power_lines(tests), by_chance]
    legend = "\n".join(wrapped(line, width) for line in LEGEND.splitlines())
    shown_tests = render.terminal(Section("tests", table=table), width)
    return "\n\n".join([wrapped(head, width), shown_tests, legend, "\n".join(wrapped(one, width) for one in said)])


def distribution_as_json(
    draws: Sequence[Draws], tests: Sequence[FitTest], verdicts: Sequence[FitVerdict], settings: Settings
) -> dict[str, Any]:
    decisions = [(one.method, count_decisions(one) or (None, None)) for one in draws]
    return {
        "settings": {name: value for name, value in asdict(settings).items() if name in ("temperature", *NAMES)},
        "draws": draws[0].num_answers,
        "level": LEVEL,
        "tests": [
            {
                "method": test.method,
                "view": test.view,
                "kind": test.kind,
                "tokens": test.num_tokens,
                "impossible": test.num_impossible,
                "seen": test.seen if isfinite(test.seen) else None,
                "due": test.due,
                "p": test.p,
                "p_adjusted": test.adjusted,
                "finds": test.finds,
                "failed": test.failed,
            }
            for test in tests
        ],
        "drafted": [{"method": method, "kept": kept, "refused": refused} for method, (kept, refused) in decisions],
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }


def _power_lines(tests: Sequence[FitTest]) -> Iterator[str]:
    """Yield for each method the least errors that its widest views would have detected."""
    for method in dict.fromkeys(test.method for test in tests):
        for view in ("all tokens", REPLACED):
            found = {test.kind: test.finds for test in tests if test.method == method and test.view == view}
            sizes = [words.format(found[kind]) for kind, words in SIZES.items() if kind in found]
            if sizes:
                yield f"{shown(method)}, {view}: {POWER:.0%} of errors this large are found: {', '.join(sizes)}"


def _rows(tests: Sequence[FitTest]) -> list[list[str]]:
    """Return a row per view, with its two scores and its order; orders of a single view get separate rows."""
    by_row: dict[tuple[str, str], dict[Kind, FitTest]] = {}
    for test in tests:
        view = VIEWS.get(test.kind, "{}").format(test.view)
        kind: Kind = "rank" if test.kind in VIEWS else test.kind
        by_row.setdefault((test.method, view), {})[kind] = test
    return [[method, view, *_cells(found)] for (method, view), found in by_row.items()]


def _cells(found: dict[Kind, FitTest]) -> list[str]:
    cells = [f"{max(test.num_tokens for test in found.values()):,}"]
    kinds: tuple[Kind, ...] = ("likelihood", "leaning", "rank")
    for kind in kinds:
        test = found.get(kind)
        if test is None:
            cells += ["", "", ""]
        elif test.num_impossible:
            cells += ["impossible", f"{test.due:.3f}", p_value(test.adjusted)]
        else:
            form = "{:.1%}" if kind == "rank" else "{:.3f}"
            cells += [form.format(test.seen), form.format(test.due), p_value(test.adjusted)]
    return [*cells, "fails" if any(test.failed for test in found.values()) else ""]


def _sentence(verdict: FitVerdict) -> str:
    text = {
        "as the model": "draws as the published model does",
        "differs": "does NOT draw as the published model does",
        "not tested": "was not tested",
    }[verdict.state]
    text = f"{shown(verdict.method)} {text}" + (f": {verdict.why}" if verdict.why else "")
    return text + (f" (too few tokens to test: {', '.join(verdict.unreached)})" if verdict.unreached else "")


def _settings(settings: Settings) -> str:
    named_values = [("temperature", settings.temperature)]
    named_values += [
        (name, getattr(settings, name)) for name, plain in NAMES.items() if getattr(settings, name) != plain
    ]
    return ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in named_values)
