"""Terminal output besides a report: the card of a run, and the lists of suites and methods."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from dflash_bench.analysis.metrics import FORMULAS
from dflash_bench.core.errors import unknown
from dflash_bench.core.labels import WIDTH, wrapped
from dflash_bench.core.methods import BASELINE, METHODS, PLAIN, MethodSpec, Option, shown
from dflash_bench.report import perf, tables
from dflash_bench.report.document import Document
from dflash_bench.report.findings import legend_of
from dflash_bench.report.tables import ABSENT, number
from dflash_bench.report.words import bandwidth_note, compared, cut_note, facts, speedups, tally, with_badges

if TYPE_CHECKING:
    from dflash_bench.tasks.suites import SuiteListing


def suites_text(listings: Sequence[SuiteListing], groups: Mapping[str, Sequence[str]], width: int | None = None) -> str:
    """Return one line per suite, with its title and source below; then the groups."""
    heads = ("suite", "embedded", "scored by", "licence")
    below = [[one.suite.title, _source(one)] for one in listings]
    lines = _list(heads, [_suite_row(listing) for listing in listings], below, width)
    named = (wrapped(f"group {name}: {', '.join(members)}", width) for name, members in groups.items())
    return "\n".join([*lines, "", *named])


def _suite_row(listing: SuiteListing) -> tuple[str, ...]:
    suite = listing.suite
    return suite.name, str(listing.num_embedded), suite.scorer, suite.licence


def _source(listing: SuiteListing) -> str:
    suite = listing.suite
    match suite.home:
        case "folder":
            return f"suites prepare {suite.name}: {suite.source}"
        case "shipped":
            return suite.source
    return "hub: " + " ".join(filter(None, [suite.source, suite.subset, suite.split]))


def _list(
    heads: Sequence[str], rows: Sequence[Sequence[str]], below: Sequence[Sequence[str]], width: int | None
) -> Iterator[str]:
    """Yield a table whose rows have paragraphs below them; its values are stacked if it does not fit."""
    head, *lines = tables.aligned(heads, rows, left=len(heads)).splitlines()
    if width is None or max(map(len, [head, *lines])) <= width:
        yield head
    else:
        named = [[f"{head}: {value}" for head, value in zip(heads[1:], rest, strict=True)] for _, *rest in rows]
        lines = [first for first, *_ in rows]
        below = [[*fields, *paragraphs] for fields, paragraphs in zip(named, below, strict=True)]
    for line, paragraphs in zip(lines, below, strict=True):
        yield line
        yield from (wrapped(text, width, "  ", "    ") for text in paragraphs)


# The result in eleven lines, to paste into an issue or a chat, plus one where the speed-up is weak.


def card(document: Document, width: int | None = None) -> str:
    """Return the card, a line for each fact, wrapped at `width`; n/a for facts that the run did not record."""
    info, about = document.results.info, facts(document.results.info)
    means = document.means()
    faster = ", ".join(f"{line.name} {with_badges(document, line, speedup)}" for line, speedup, _ in means)
    weak = legend_of([badge for line in document.lines for badge in document.badges(line)])
    is_known = any(speedup for _, speedup, _ in means)
    meaning = f"{speedups(document, is_known)}{', 95 %' if is_known else ''}"
    meaning += f"; {reached}" if (reached := bandwidth_note(document)) else ""
    lengths = ", ".join(f"{line.name} {number(al)}" for line, _, al in means)
    exact, audit, passed = (tally(document, name) for name in ("exact", "audit", "passed"))
    answers = f"{f'{exact[0]}/{exact[1]} match plain decoding, {compared(document)}' if exact else ABSENT}"
    answers += f"; {audit[0]}/{audit[1]} are the published model's own choice" if audit else ""
    answers += f"; {passed[0]}/{passed[1]} correct{cut_note(document)}" if passed else ""
    commit = f", commit {about['commit']}" if "commit" in about else ""
    if document.why_empty:
        answers = document.why_empty
    lines = {
        "model": about["model"],
        "draft": about.get("draft", ABSENT),
        "suite": about.get("suite", ABSENT),
        "machine": about["machine"],
        "settings": about["settings"],
        "acceptance": f"{lengths or ABSENT} (al.pooled = {FORMULAS['al.pooled']})",
        "speed-up": f"{faster or ABSENT} ({meaning})",
        "forward": perf.line_of(info),
        **({"weak": "; ".join(weak)} if weak else {}),
        "answers": answers,
        "versions": f"{about['versions']}{commit}",
        "command": " ".join(info.command.split()),
    }
    indent = " " * 12 if width is None or width >= NARROW else "  "
    told = [*document.notes, *(f"{name:<10}  {text}" for name, text in lines.items())]
    return "".join(f"{wrapped(text, width, others=indent)}\n" for text in told)


# The table of methods for people: all of them, one with its options, and the table of the documentation.


NARROW = 60
"""Width below which a card has no second column."""
DRAFTED = {"none": "nothing", "chain": "a chain", "tree": "a tree"}
FOOT = """To run one: --method NAME[@LABEL][:KEY=VALUE,...], or NAME:N for N drafted tokens per round.
Options of one method: dflash-bench methods NAME
Your own draft: --draft WEIGHTS=PATH; two of one kind: --draft WEIGHTS@a=PATH --draft WEIGHTS@b=PATH"""


def methods_text(width: int | None = WIDTH) -> str:
    """Return the list of methods, each with its summary below."""
    heads = ("method", "weights", "drafts", "output")
    kinds = METHODS.values()
    lines = _list(heads, [_row(kind) for kind in kinds], [[kind.summary] for kind in kinds], width)
    return "\n".join([*lines, "", *(wrapped(line, width) for line in FOOT.splitlines())])


def text_of(name: str, width: int | None = WIDTH) -> str:
    """Describe one method and all its options. Raises UserError for an unknown name."""
    kind = METHODS[label] if (label := BASELINE if name == PLAIN else name) in METHODS else None
    if kind is None:
        raise unknown("method", name, list(map(shown, METHODS)))
    told = [wrapped(line, width, others=" " * 9 if width is None or width >= NARROW else "  ") for line in _facts(kind)]
    return "\n".join([wrapped(f"{shown(kind.name)}: {kind.summary}", width), "", *told, *_options(kind, width)])


def markdown() -> str:
    """Return the tables of docs/methods.md: all methods, then the options of each."""
    heads = ("method", "what it is", "weights", "drafts", "lossless")
    rows = [
        (
            f"`{shown(kind.name)}{'[:N]' if kind.count else ''}`",
            tables.in_markdown(kind.summary),
            f"`{kind.weights}`" if kind.weights else "none",
            DRAFTED[kind.shape],
            "yes" if kind.lossless else "**no**",
        )
        for kind in METHODS.values()
    ]
    sections = (f"### {kind.name}\n\n{_options_in_markdown(kind)}" for kind in METHODS.values() if kind.options)
    return "\n\n".join([_table_methods(heads, rows), "## Options of each method", *sections])


def _table_methods(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _row(kind: MethodSpec) -> list[str]:
    return [shown(kind.name), kind.weights or "none", DRAFTED[kind.shape], "lossless" if kind.lossless else "lossy"]


def _facts(kind: MethodSpec) -> Iterator[str]:
    yield f"syntax   {_written(kind)}"
    yield f"weights  {_weights(kind)}"
    yield f"drafts   {DRAFTED[kind.shape]}"
    yield f"output   {'lossless: exactly' if kind.lossless else 'lossy: not'} what the target alone would generate"


def _written(kind: MethodSpec) -> str:
    head = f"{kind.name}[@LABEL]" if kind.weights else shown(kind.name)
    count = f", or {head}:N, the same as {kind.count}=N" if kind.count else ""
    return f"{head}[:KEY=VALUE,...]{count}" if kind.options else head


def _weights(kind: MethodSpec) -> str:
    if kind.weights is None:
        return "none"
    return f"the model's, or --draft {kind.weights}=PATH, or --draft {kind.weights}@LABEL=PATH"


def _options(kind: MethodSpec, width: int | None) -> Iterator[str]:
    if not kind.options:
        return
    yield ""
    rows = [[option.name, _default(option), option.range] for option in kind.options]
    yield from _list(("option", "default", "range"), rows, [[option.summary] for option in kind.options], width)
    yield from (f"\n{wrapped(alternative, width)}" for alternative in _alternatives(kind))


def _alternatives(kind: MethodSpec) -> Iterator[str]:
    for group in kind.alternatives:
        yield f"Only one of {', '.join(option.name for option in kind.options if option.name in group)} may be given."


def _default(option: Option) -> str:
    return "-" if option.default is None else str(option.default)


def _options_in_markdown(kind: MethodSpec) -> str:
    rows = [
        (f"`{option.name}`", _default(option), option.range, tables.in_markdown(option.summary))
        for option in kind.options
    ]
    return "\n\n".join([_table_methods(("option", "default", "range", "what it does"), rows), *_alternatives(kind)])
