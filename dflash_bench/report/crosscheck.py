"""`crosscheck` as text, as Markdown and as JSON; `sentence` says in one what it comes to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from dflash_bench.analysis.crosscheck import Checked, Comparison, Tried, drafts_a_round, named, nearest
from dflash_bench.counted import COUNTED
from dflash_bench.report.tables import ABSENT, Rows, aligned, in_markdown, markdown, number, with_interval

SHOWN = 5
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


def text(all_checked: Sequence[Checked]) -> str:
    blocks = []
    for checked in all_checked:
        blocks += ["\n".join(_about(checked))]
        blocks += [f"{table.title}\n{aligned(table.heads, table.rows)}" for table in tables(checked)]
        blocks += ["\n".join([*_notes(checked), sentence(checked)])]
    return "\n\n".join(blocks)


def page(all_checked: Sequence[Checked], command: str) -> str:
    """Markdown."""
    blocks = ["# Crosscheck: a server and this engine", f"```\n{command}\n```"]
    for checked in all_checked:
        blocks += [f"## {in_markdown(checked.method)}", in_markdown(sentence(checked))]
        blocks += ["\n".join(f"- {in_markdown(line)}" for line in [*_about(checked), *_notes(checked)])]
        for table in tables(checked):
            blocks += [f"### {table.title}", markdown(table.heads, table.rows)]
    return "\n\n".join(blocks) + "\n"


def _about(checked: Checked) -> Iterator[str]:
    about = checked.about
    yield f"{checked.method} at {about['server']} ({about['dialect']}), which gets prompts as {about['prompts']}"
    yield f"here: {about['target']} with draft {about['draft']}, {about['dtype']} on {about['device']}"
    yield f"{len(checked.base.pairs)} prompts of {about['suites']}, temperature 0"


def _notes(checked: Checked) -> Iterator[str]:
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


def tables(checked: Checked) -> Iterator[Table]:
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


def _totals(base: Comparison) -> Iterator[list[str]]:
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


def _order(one: Tried) -> tuple[int, int, int]:
    return -one.comparison.num_equal, -one.comparison.num_identical, one.comparison.distance


def _cause(one: Tried, fits: bool) -> list[str]:
    its, counted = one.comparison, one.comparison.counted
    pooled = number(_pooled([ours for ours, _ in counted])) if counted else ABSENT
    same = f"{its.num_identical} of {len(counted)}"
    return [one.cause.name, f"{its.num_equal} of {len(its.pairs)}", same, pooled, str(one.how) if fits else "no"]


def sentence(checked: Checked) -> str:
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


def _equal(base: Comparison) -> str:
    return f"{base.num_equal} of {len(base.pairs)} answers are the same"


def _why_not(checked: Checked) -> str:
    base = checked.base
    if base.counted:
        return f"only {len(base.counted)} equal answers have counts, which are not the same; raise --limit"
    if checked.uncounted is None:
        return f"{_equal(base)}, and acceptance is compared on those; raise --limit"
    dialect = checked.about["dialect"].partition(" ")[0]
    return f"{checked.uncounted} ({_equal(base)}); {REMEDIES[dialect]}"


def _differences(checked: Checked) -> Iterator[str]:
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


def _explanation(checked: Checked) -> str:
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


def _fit(one: Tried) -> str:
    its = one.comparison
    if one.how == "same answers":
        return f"{its.num_equal} of {len(its.pairs)} answers are then the same"
    if one.how == "same counts":
        return f"its counts are then the same in {its.num_identical} of {len(its.counted)} answers"
    return f"its al.pooled is then {with_interval(its.ratio(), 3)} of ours, which may be chance"


def as_json(all_checked: Sequence[Checked]) -> list[dict[str, Any]]:
    return [_json(checked) for checked in all_checked]


def _json(checked: Checked) -> dict[str, Any]:
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


def _numbers(comparison: Comparison) -> dict[str, Any]:
    ratio, sides = comparison.ratio(), list(zip(*comparison.counted, strict=True))
    pooled = [_pooled(side) for side in sides] or [None, None]
    return {
        "num_answers": len(comparison.pairs), "num_same_answers": comparison.num_equal,
        "num_counted": len(comparison.counted), "num_same_counts": comparison.num_identical,
        "al_pooled": {"here": pooled[0], "server": pooled[1]}, "ratio": ratio and asdict(ratio),
    }  # fmt: skip
