"""Render the results of `conform`: a table, a sentence per result that does not conform, a page and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from dflash_bench.core.draft_kinds import name_of_kind
from dflash_bench.core.labels import WIDTH, common_prefix_length, wrapped
from dflash_bench.diagnose.compare_rounds import DetailDifference, Explanation, How, RoundDifference
from dflash_bench.diagnose.conform import Conformance, State
from dflash_bench.report import render
from dflash_bench.report.tables import ABSENT, ReportTable, Section, in_markdown, number

HEADS = ["case", "kind", "forward", "rounds equal", "accepted", "verdict"]
VERDICTS: dict[State, str] = {
    "equal": "conforms",
    "differs": "differs",
    "unread": "not read",
    "failed": "failed",
    "inapplicable": "not computed by it",
    "untold": "cannot tell",
}
CONFIRMED: dict[How, str] = {
    "rounds": "decoded here with it, every round is the same",
    "counts": "with it, every count is the same",
    "totals": "the publisher's code accepts as much with it",
}
MOST_TOKENS = 12
TITLE = "Golden cases: what the publishers' own code drafts, and what is drafted here"
LEGEND = (
    "rounds equal = rounds with the publisher's drafts and accepted count, of all of the case; accepted = accepted "
    "drafts per round, and the publisher's where they differ"
)


def conform_text(found: Sequence[Conformance], width: int | None = WIDTH) -> str:
    notes = "\n".join(wrapped(line, width) for line in sentences(found))
    parts = [render.terminal(section(found), width), notes, wrapped(verdict(found), width)]
    return "\n\n".join(filter(None, parts))


def conform_page(found: Sequence[Conformance], command: str) -> str:
    """Render a page of Markdown."""
    what = {one.case.name: f"{one.case.what} ({one.case.source})" for one in found}
    blocks = ["# Conformance: drafts as their publishers compute them", f"```\n{command}\n```", verdict(found)]
    blocks += [render.markdown(section(found))]
    blocks += ["\n".join(f"- {in_markdown(line)}" for line in sentences(found))]
    blocks += ["## What the cases pin down", "\n".join(f"- {name}: {in_markdown(text)}" for name, text in what.items())]
    return "\n\n".join(filter(None, blocks)) + "\n"


def section(found: Sequence[Conformance]) -> Section:
    table = ReportTable.of(HEADS, [_row(one) for one in found], left=3)
    *columns, last = table.columns
    table = replace(table, columns=[*columns, replace(last, justify="left")])
    return Section("conform", TITLE, table, legend=[LEGEND])


def _row(one: Conformance) -> list[str]:
    equal = ABSENT if one.num_equal is None else f"{one.num_equal}/{one.num_rounds}"
    own, due = number(one.accepted, 3), number(one.expected, 3)
    accepted = own if own == due or one.expected is None else f"{own} ({due})"
    return [one.case.name, name_of_kind(one.case.kind), one.reader, equal, accepted, _verdict(one)]


def _verdict(one: Conformance) -> str:
    named = " or ".join(explained.reading for explained in one.explanations)
    return f"{VERDICTS[one.state]}: {named}" if named else VERDICTS[one.state]


def sentences(found: Sequence[Conformance]) -> Iterator[str]:
    """Yield why results do not conform, or what a server reports; a reason shared by several forwards comes once."""
    said: dict[str, list[str]] = {}
    for one in found:
        if (text := _sentence(one)) is not None:
            said.setdefault(f"{one.case.name}, {{}}: {text}", []).append(one.reader)
    for line, readers in said.items():
        before, _, after = line.partition("{}")
        yield f"{before}{' and '.join(readers)}{after}"


def _sentence(one: Conformance) -> str | None:
    if isinstance(one.difference, DetailDifference):
        return detail_text(one.difference)
    if one.state == "differs" and one.difference is not None:
        return f"{difference_text(one.difference)}; {_explained(one.explanations, one.difference.together)}"
    if one.why:
        return f"{VERDICTS[one.state]}: {one.why}"
    if one.compared:
        return f"compared {', '.join(one.compared)}: as far as the server tells"
    if one.details:
        what = {
            "trees": f"the first trees of {len(one.case.trees)} prompts, and the rounds that trees take",
            "drawn": f"q and p of {sum(len(block.slots) for block in one.case.drawn)} drawn slots",
        }
        return f"equal, too: {' and '.join(what[detail] for detail in one.details)}"
    return None


def detail_text(difference: DetailDifference) -> str:
    """State the first difference of a case's trees or drawn blocks."""
    own, due = difference.found, difference.expected
    if difference.part == "tree":
        return f"prompt {difference.number}: the first tree has the path {_path(own)}, and the publisher's {_path(due)}"
    if difference.part == "tree_rounds":
        return f"prompt {difference.number}: {own[0]:g} rounds with trees, and {due[0]:g} by the publisher's code"
    what = f"drawn block {difference.number}, slot {difference.slot}: {difference.part}"
    if difference.token is None:
        return f"{what} allows {own[0]:g} tokens, and the publisher's {due[0]:g}"
    return f"{what} of token {difference.token} is {own[0]:.6g}, and the publisher's {due[0]:.6g}"


def _path(tokens: Sequence[float]) -> str:
    return " ".join(f"{token:g}" for token in tokens) or "of no other node"


def difference_text(difference: RoundDifference) -> str:
    """State the first difference of a case."""
    place = f"prompt {difference.prompt}"
    if difference.round is not None:
        place += f", round {difference.round} (anchor at place {difference.anchor_at})"
    if difference.together:
        place += ", decoded together with others"
    own, due = difference.found, difference.expected
    if difference.part == "tokens":
        return f"{place}: the answer is another from token {common_prefix_length(own, due)} on"
    if difference.part == "drafted":
        return f"{place}: drafts {_ids(own)}, and the publisher's code {_ids(due)}"
    if difference.part == "counts":
        return f"{place}: {_counted(own)}, and the publisher's code {_counted(due)}"
    what = {"accepted": "accepted drafts", "verified": "verified drafts", "rounds": "rounds"}[difference.part]
    return f"{place}: {own[0] if own else 'no'} {what}, and {due[0] if due else 'no'} by the publisher's code"


def _ids(tokens: Sequence[int]) -> str:
    shown = " ".join(map(str, tokens[:MOST_TOKENS]))
    return f"{shown} ..." if len(tokens) > MOST_TOKENS else shown or "nothing"


def _counted(counts: Sequence[int]) -> str:
    rounds, accepted = counts
    return f"{accepted} accepted in {rounds} rounds"


def _explained(found: Sequence[Explanation], together: bool) -> str:
    if together:
        return "alone they are as they should be"
    if not found:
        return "no misreading that the case lists gives that"
    return "explained by " + ", or by ".join(f"'{one.reading}' ({CONFIRMED[one.how]})" for one in found)


def verdict(found: Sequence[Conformance]) -> str:
    """State in a sentence how many cases conform."""
    cases = list(dict.fromkeys(one.case.name for one in found))
    wrong = {one.case.name for one in found if one.state not in ("equal", "inapplicable")}
    right = {one.case.name for one in found if one.state == "equal"} - wrong
    return f"{len(right)} of {len(cases)} case{'s' * (len(cases) != 1)} conform{'s' * (len(cases) == 1)}."


def conform_as_json(found: Sequence[Conformance]) -> list[dict[str, Any]]:
    return [
        {
            "case": one.case.name,
            "kind": one.case.kind,
            "method": one.case.method,
            "reader": one.reader,
            "state": one.state,
            "why": one.why or None,
            "num_equal_rounds": one.num_equal,
            "num_rounds": one.num_rounds or one.case.num_rounds,
            "accepted_per_round": one.accepted,
            "expected_per_round": one.case.accepted_per_round if one.expected is None else one.expected,
            "difference": one.difference and asdict(one.difference),
            "compared": list(one.compared),
            "named": [asdict(explained) for explained in one.explanations],
            "details": list(one.details),
        }
        for one in found
    ]
