"""One self-contained page: no network, works from a file, and runs no script but its own.

Whatever comes from a run is hostile: the template escapes all text, and what its script shows comes as JSON and is
only ever set as text. A content security policy names the script by its hash.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_bench.analysis.stats import Interval
from dflash_bench.core import labels
from dflash_bench.core.files import require_output, write_text
from dflash_bench.core.labels import visible
from dflash_bench.core.terminal import with_bar
from dflash_bench.report import answers, charts, plots, render, screen, sections
from dflash_bench.report.document import Document, MethodLine
from dflash_bench.report.tables import Section, number
from dflash_bench.report.words import bandwidth_note, facts, sentences, speedups, tally
from dflash_bench.results.rounds import RunRounds, read_rounds

MOST_ANSWERS = 300


def write_page(document: Document, path: Path, most_answers: int = MOST_ANSWERS, tokenizer: Path | None = None) -> None:
    """Raises UserError where the file cannot be written, or `tokenizer` is none."""
    require_output(path)
    read = read_page(document, most_answers)
    listed = answers.page_answers(document, read.answers, tokenizer)
    figures = {}
    material = plots.Material(document, read)
    for name in with_bar(plots.names_for(material), "drawing plots"):
        with suppress(plots.NothingToPlotError):  # `plot` says why
            figures[name] = plots.svg(material, name), plots.CAPTIONS[name]
    with suppress(OSError):  # writing says why
        path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page(document, figures, listed, read))


def read_page(document: Document, most_answers: int = MOST_ANSWERS) -> RunRounds:
    """The rounds of a run for its plots, and the answers that the page shows, in one pass."""
    rows = document.results.rows
    chosen = answers.first_prompts(rows, most_answers)
    read = read_rounds(document.results.stored, chosen, answers.COLUMNS)
    counts = rows.loc[chosen, answers.COUNTS].to_dict("records")
    return replace(read, answers=[row | own for row, own in zip(read.answers, counts, strict=True)])


def escape(text: str) -> str:
    import markupsafe

    return str(markupsafe.escape(visible(text, keep="\n\t")))


def page(
    document: Document, figures: Mapping[str, tuple[str, str]], listed: answers.PageAnswers, read: RunRounds
) -> str:
    """`figures` by name: the SVG, and a caption."""
    from markupsafe import Markup

    info = document.results.info
    *shown, found = sections.of_document(document)
    reached = charts.positions(document, read)
    values = {
        "title": _title(document),
        "verdict": _verdict(document),
        "sub": f"{str(info.started or '')[:10]} · {facts(info)['machine']}".strip(" ·"),
        "notes": document.notes,
        "known": [line.name for line in document.lines if screen.is_known_text(document, line.method)],
        "why_known": f"{labels.EMBEDDED_NOTE}.",
        "lead": sentences(document),
        "tiles": _tiles(document),
        "filters": charts.filters((c.key for c in document.cells), {c.settings.id: c.setting for c in document.cells}),
        "forest": charts.groups(charts.forest(document)),
        "waterfalls": charts.groups(charts.waterfalls(document)),
        "positions": charts.groups(reached),
        "num_positions": max((len(row.shares) for row in reached), default=0),
        "sections": shown,
        "formulas": sections.formulas(),
        "findings": found,
        "figures": {name: (Markup(svg.replace("<svg", "", 1)), caption) for name, (svg, caption) in figures.items()},
        "extent": _extent(listed),
        "facts": facts(info),
        "reproduce": _reproduce(document),
        "data": Markup(_data(listed)),
    }
    return render.scripted("page.html", ("common.js", "page.js"), values)


def excerpt(document: Document) -> str:
    """What a notebook shows of a run: its verdict, the first table and the findings."""
    shown = {section.id: section for section in sections.of_document(document)}
    parts = [
        Section("title", _title(document), sentences=[*document.notes, *sentences(document)]),
        shown["results"],
        *([shown["findings"]] if document.findings else []),
    ]
    return "".join(map(render.html, parts))


def _title(document: Document) -> str:
    model = document.results.info.identity.model
    return (
        f"{Path(str(model)).name}: {' and '.join(document.methods) or 'plain decoding'} on "
        f"{labels.suite_list(dict.fromkeys((cell.suite, cell.source) for cell in document.cells))}"
    )


def _verdict(document: Document) -> list[str]:
    """What the run says: the last sentence is the headline, and those before it that outputs are not the target's."""
    said = screen.answers(document, document.means())
    return [_title(document)] if document.sweeps or document.loads or not said else said


def _tiles(document: Document) -> list[dict[str, Any]]:
    """Each method's speed-up over all suites, and what must stand beside it."""
    means = document.means()
    bounds = [speedup.high or speedup.value for _, speedup, _ in means if speedup]
    most = 1.04 * max([1.0, *bounds])
    return [_tile(document, line, speedup, al, most) for line, speedup, al in means]


def _tile(
    document: Document, line: MethodLine, speedup: Interval | None, al: float | None, most: float
) -> dict[str, Any]:
    interval = f"95 %: {number(speedup.low)} to {number(speedup.high)}" if speedup and speedup.low is not None else ""
    few = f"n = {speedup.too_few}, no interval" if speedup and speedup.too_few else ""
    rows = [speedups(document, speedup is not None), interval or few, bandwidth_note(document)]
    rows += [f"al.pooled {number(al)}"] if al else []
    shares = [(name, tally(document, share, line)) for name, share in (("exact", "exact"), ("judged", "audit"))]
    is_exact = not screen.num_wrong(document, line.method, line.settings.id)
    return {
        "name": line.name, "value": f"{speedup.value:.2f}" if speedup else "", "badges": document.badges(line),
        "lines": [row for row in rows if row], "series": document.methods.index(line.method) % 7,
        "shares": [(f"{name} {share[0]:,}/{share[1]:,}", share[0] == share[1]) for name, share in shares if share],
        "is_exact": is_exact,
        "dots": [round(100 * min(one, most) / most, 2) for one in (speedup.low, speedup.value, speedup.high, 1.0)]
        if speedup and speedup.low is not None and speedup.high is not None else [],
    }  # fmt: skip


def _extent(listed: answers.PageAnswers) -> str:
    some = f"{len(listed.rows):,} of {listed.num_all:,} answers: those to the first prompts of each suite."
    shown = f"All {listed.num_all:,} answers." if len(listed.rows) == listed.num_all else some
    return f"{shown} {listed.why_plain}" if listed.why_plain else shown


def _reproduce(document: Document) -> str:
    info = document.results.info
    git = info.environment.git
    lines = [f"git checkout {git.commit}"] if git else []
    lines += ["# the working tree had uncommitted changes"] if git and git.dirty else []
    return "\n".join([*lines, info.command])


def _data(listed: answers.PageAnswers) -> str:
    """Inside a script element only "</" and "<!--" mean anything, and without "<" there is neither."""
    stored = {"rows": listed.rows, "texts": listed.texts, "prompts": listed.prompts}
    return json.dumps(stored, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
