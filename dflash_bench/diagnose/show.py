"""What doctor, crosscheck and verify-distribution show: text, Markdown and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any, NamedTuple

from dflash_bench.core.types import COUNTED, Draws, Settings
from dflash_bench.diagnose import examine
from dflash_bench.diagnose.compare_counts import (
    CauseTrial,
    CountComparison,
    CrosscheckResult,
    drafts_a_round,
    named,
    nearest,
)
from dflash_bench.diagnose.doctor import Diagnosis
from dflash_bench.diagnose.examine import Sample
from dflash_bench.diagnose.goodness_of_fit import LEVEL, FitTest, FitVerdict, Kind, decided
from dflash_bench.report.tables import ABSENT, Rows, aligned, in_markdown, markdown, number, p_value, with_interval

# A diagnosis, for people and for programs.


SHOWN = 5
"""Of what was tried, the highest."""


def diagnosis_text(diagnosis: Diagnosis) -> str:
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
    for place, finding in enumerate(diagnosis.findings, start=1):
        kind = "" if finding.is_cause else "note: "
        yield f"{place}. {kind}{finding.cause}"
        yield f"   seen   {finding.evidence}"
        yield f"   to do  {finding.remedy}"
    if diagnosis.tried:
        yield ""
        yield f"The highest of {len(diagnosis.tried)} changes that were tried, one at a time:"
        for one in sorted(diagnosis.tried, key=lambda one: -one.al)[:SHOWN]:
            yield f"  {one.al:5.2f}  {one.gain:4.2f}x  {one.change.name}"


def _line_of(sample: Sample) -> str:
    interval = examine.interval(sample)
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


def diagnosis_as_json(diagnosis: Diagnosis) -> dict[str, Any]:
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


# `crosscheck` as text, as Markdown and as JSON; `sentence` says in one what it comes to.


"""Of the causes that do not fit, the nearest."""
REMEDIES = {
    "llamacpp": "start llama.cpp's server with --metrics",
    "vllm": "start vLLM without --disable-log-stats, or with --per-request-spec-decode-metrics summary",
    "sglang": "use a version of SGLang that counts verified drafts in meta_info",
    "tensorrt_llm": "put 'per_request_spec_decode_stats: true' into the file for trtllm-serve --extra_llm_api_options",
    "lmdeploy": "start lmdeploy with --enable-metrics",
    "mlx": "mlx_lm.server tells nobody what it accepts",
    "openai": "name the server's own --dialect, if it has one here",
}


class Table(NamedTuple):
    title: str
    heads: Sequence[str]
    rows: Rows


def crosscheck_text(all_checked: Sequence[CrosscheckResult]) -> str:
    blocks = []
    for checked in all_checked:
        blocks += ["\n".join(_about(checked))]
        blocks += [f"{table.title}\n{aligned(table.heads, table.rows)}" for table in tables(checked)]
        blocks += ["\n".join([*_notes(checked), sentence(checked)])]
    return "\n\n".join(blocks)


def page(all_checked: Sequence[CrosscheckResult], command: str) -> str:
    """Markdown."""
    blocks = ["# Crosscheck: a server and this engine", f"```\n{command}\n```"]
    for checked in all_checked:
        blocks += [f"## {in_markdown(checked.method)}", in_markdown(sentence(checked))]
        blocks += ["\n".join(f"- {in_markdown(line)}" for line in [*_about(checked), *_notes(checked)])]
        for table in tables(checked):
            blocks += [f"### {table.title}", markdown(table.heads, table.rows)]
    return "\n\n".join(blocks) + "\n"


def _about(checked: CrosscheckResult) -> Iterator[str]:
    about = checked.about
    yield f"{checked.method} at {about['server']} ({about['dialect']}), which gets prompts as {about['prompts']}"
    yield f"here: {about['target']} with draft {about['draft']}, {about['dtype']} on {about['device']}"
    yield f"{len(checked.base.pairs)} prompts of {about['suites']}, temperature 0"


def _notes(checked: CrosscheckResult) -> Iterator[str]:
    if checked.counted_by is not None:
        yield f"counted by {checked.counted_by}: {COUNTED[checked.counted_by]}"
    if checked.rule is not None:
        yield f"our counts are put its way: {checked.rule.description}"
    if checked.num_prompt_tokens is not None:
        ours, theirs = checked.num_prompt_tokens
        yield f"its prompts have {theirs} tokens, as it rendered them, and ours {ours}"
    for number_of, pair in enumerate(checked.base.pairs, start=1):
        if pair.departure is not None:
            yield f"answer {number_of}: {pair.departure.verdict} at {pair.departure}"
    for error in checked.failed:
        yield f"an answer of the server failed: {error}"


def tables(checked: CrosscheckResult) -> Iterator[Table]:
    yield Table("Answers that are the same", ["", "here", "server"], list(_totals(checked.base)))
    if positions := checked.base.positions():
        rows = [
            [str(p.place), number(p.ours, 4), number(p.theirs, 4), f"{p.theirs - p.ours:+.4f}", number(p.allowed, 4)]
            for p in positions
        ]
        title = "Share of rounds that accept the draft at a position"
        yield Table(title, ["position", "here", "server", "difference", "allowed"], rows)
    if checked.tried:
        fitting = named(checked.tried)
        others = sorted((one for one in checked.tried if one not in fitting), key=_order)[:SHOWN]
        heads = ["cause, in our engine", "same answers", "same counts", "al.pooled", "fits"]
        title = f"Causes that were tried ({len(checked.tried)}): those that fit, and the nearest others"
        yield Table(title, heads, [_cause(one, one in fitting) for one in [*fitting, *others]])


def _totals(base: CountComparison) -> Iterator[list[str]]:
    num = len(base.pairs)
    yield ["answers", str(num), f"{base.num_equal} the same"]
    sides = list(zip(*base.counted, strict=True))
    if not sides:
        return
    for name in ("rounds", "drafted", "accepted"):
        yield [name, *(_total([getattr(one, name) for one in side]) for side in sides)]
    yield ["tokens drafted a round, at most", *(ABSENT if n is None else str(n) for n in drafts_a_round(base))]
    yield ["al.pooled", *(number(_pooled(side)) for side in sides)]
    yield ["its al.pooled over ours", "", with_interval(base.ratio(), 4)]
    yield ["answers with the same counts", "", f"{base.num_identical} of {len(base.counted)}"]


def _total(values: Sequence[int | None]) -> str:
    known = [value for value in values if value is not None]
    return str(sum(known)) if len(known) == len(values) else ABSENT


def _pooled(side: Sequence[Any]) -> float | None:
    rounds = sum(one.rounds for one in side)
    return 1 + sum(one.accepted for one in side) / rounds if rounds else None


def _order(one: CauseTrial) -> tuple[int, int, int]:
    return -one.comparison.num_equal, -one.comparison.num_identical, one.comparison.distance


def _cause(one: CauseTrial, fits: bool) -> list[str]:
    its, counted = one.comparison, one.comparison.counted
    pooled = number(_pooled([ours for ours, _ in counted])) if counted else ABSENT
    same = f"{its.num_identical} of {len(counted)}"
    return [one.cause.name, f"{its.num_equal} of {len(its.pairs)}", same, pooled, str(one.how) if fits else "no"]


def sentence(checked: CrosscheckResult) -> str:
    """What it comes to, and why."""
    base = checked.base
    if checked.verdict == "cannot tell":
        return f"It cannot be told whether the server drafts as this engine does: {_why_not(checked)}."
    if checked.verdict == "agree":
        counts = f"{base.num_identical} of {len(base.counted)} have the same counts of rounds and accepted drafts"
        if base.state == "same":
            return f"The server and this engine agree: {_equal(base)}, and {counts}."
        rest = f", and none of {len(checked.tried)} causes that were tried gives its counts" if checked.tried else ""
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
        return f"only {len(base.counted)} equal answers have counts, which are not the same; raise --limit"
    if checked.uncounted is None:
        return f"{_equal(base)}, and acceptance is compared on those; raise --limit"
    dialect = checked.about["dialect"].partition(" ")[0]
    return f"{checked.uncounted} ({_equal(base)}); {REMEDIES[dialect]}"


def _differences(checked: CrosscheckResult) -> Iterator[str]:
    base = checked.base
    ours, theirs = drafts_a_round(base)
    if checked.failed:
        yield f"{len(checked.failed)} of its answers failed"
    if base.mismatches:
        yield f"{len(base.mismatches)} of {len(base.pairs)} answers are not what the model answers here"
    if theirs is not None and ours != theirs:
        yield f"it drafts {theirs} tokens a round, and this engine {ours}"
    sides = list(zip(*base.counted, strict=True))
    if sides and not any(one.rounds for one in sides[1]):
        yield "it counts no rounds, so it drafts nothing"
    elif sides and base.state in ("differ", "alike"):
        mine, other = (number(_pooled(side)) for side in sides)
        yield (
            f"its al.pooled is {other}, and ours {mine}, on the same answers, and the counts are the same in "
            f"{base.num_identical} of {len(base.counted)}"
        )


def _explanation(checked: CrosscheckResult) -> str:
    if not checked.tried:
        return "" if checked.failed else "No cause can be emulated for this method."
    fitting = named(checked.tried)
    if not fitting:
        near = nearest(checked.tried)
        told = "" if near is None else f" (nearest: {near.cause.name})"
        return (
            f"None of {len(checked.tried)} known causes fits{told}: its weights are others, or what it does "
            "otherwise is not known here."
        )
    by_meaning: dict[str, list[str]] = {}
    for one in fitting:
        by_meaning.setdefault(one.cause.means, []).append(one.cause.name)
    named_causes = ", or ".join(f"{' or '.join(some)} ({means})" for means, some in by_meaning.items())
    apart = "; these prompts do not tell them apart" if len(fitting) > 1 else ""
    return f"What fits is {named_causes}: {_fit(fitting[0])}{apart}."


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
        "method": checked.method, "about": dict(checked.about), "verdict": checked.verdict,
        "sentence": sentence(checked), "counted_by": checked.counted_by,
        "rule": checked.rule and {"id": checked.rule.id, "description": checked.rule.description},
        "uncounted": checked.uncounted, "failed": list(checked.failed),
        "num_prompt_tokens": checked.num_prompt_tokens, **_numbers(base),
        "positions": [asdict(position) for position in base.positions()],
        "answers": [
            {
                "same": pair.is_equal,
                "here": pair.ours.counts and asdict(pair.ours.counts),
                "server": pair.theirs.counts and asdict(pair.theirs.counts),
                "verdict": pair.departure.verdict if pair.departure else None,
            }
            for pair in base.pairs
        ],
        "tried": [
            {"cause": one.cause.name, "means": one.cause.means, "fits": one.how, **_numbers(one.comparison)}
            for one in checked.tried
        ],
        "named": [one.cause.name for one in named(checked.tried)],
    }  # fmt: skip


def _numbers(comparison: CountComparison) -> dict[str, Any]:
    ratio, sides = comparison.ratio(), list(zip(*comparison.counted, strict=True))
    pooled = [_pooled(side) for side in sides] or [None, None]
    return {
        "num_answers": len(comparison.pairs), "num_same_answers": comparison.num_equal,
        "num_counted": len(comparison.counted), "num_same_counts": comparison.num_identical,
        "al_pooled": {"here": pooled[0], "server": pooled[1]}, "ratio": ratio and asdict(ratio),
    }  # fmt: skip


# `verify-distribution` as text and as JSON.


NAMES = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Settings that are said where they are not these, which change nothing."""
VIEWS: dict[Kind, str] = {"by_id": "{}, by id", "pairs": "steps to the next"}
HEADS = ["method", "tested", "tokens", "log p", "due", "p", "draft", "due", "p", "off by", "chance", "p", ""]
LEGEND = (
    "tokens = those of which the model was not certain; draft place = so deep in a draft that did not know the token\n"
    "log p = mean log-probability, draft = agreement with the draft (0 to 1), each beside what the model makes it;\n"
    "off by = largest difference in the share of tokens up to some place in the model's order; p = adjusted"
)


def distribution_text(
    draws: Sequence[Draws], tests: Sequence[FitTest], verdicts: Sequence[FitVerdict], settings: Settings
) -> str:
    number = f"{len(tests)} tests" if len(tests) != 1 else "1 test"
    places = max(int(drawn.columns["place"].max()) for drawn in draws)
    return "\n".join(
        [
            f"{draws[0].num_answers:,} answers of {places} tokens by each method, at {_settings(settings)}, "
            "against the published model",
            "",
            aligned(HEADS, _rows(tests), left=2),
            "",
            LEGEND,
            "",
            *(_sentence(verdict) for verdict in verdicts),
            f"if every method is right, one or more of {number} fail by chance in {LEVEL:.1%} of cases",
        ]
    )


def distribution_as_json(
    draws: Sequence[Draws], tests: Sequence[FitTest], verdicts: Sequence[FitVerdict], settings: Settings
) -> dict[str, Any]:
    decisions = [(drawn.method, decided(drawn) or (None, None)) for drawn in draws]
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
                "failed": test.failed,
            }
            for test in tests
        ],
        "drafted": [{"method": method, "kept": kept, "refused": refused} for method, (kept, refused) in decisions],
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }


def _rows(tests: Sequence[FitTest]) -> list[list[str]]:
    """One for each view, with its two scores and its order; orders that one view alone has get a row of their own."""
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
    said = {
        "as the model": "draws as the published model does",
        "differs": "does NOT draw as the published model does",
        "not tested": "was not tested",
    }[verdict.state]
    said = f"{verdict.method} {said}" + (f": {verdict.why}" if verdict.why else "")
    return said + (f" (too few tokens to test: {', '.join(verdict.unreached)})" if verdict.unreached else "")


def _settings(settings: Settings) -> str:
    named_values = [("temperature", settings.temperature)]
    named_values += [
        (name, getattr(settings, name)) for name, plain in NAMES.items() if getattr(settings, name) != plain
    ]
    return ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in named_values)
