"""One self-contained page: no network, works from a file, and runs no script but its own.

Everything from a run is hostile: the template escapes all text, and the script's data comes as packed JSON and is only
ever set as text. A content security policy names the script by its hash.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_bench.core import labels
from dflash_bench.core.files import require_output, write_output
from dflash_bench.core.labels import visible
from dflash_bench.core.terminal import with_bar
from dflash_bench.core.types import CellKey
from dflash_bench.report import answers, charts, plots, render, screen, sections, words
from dflash_bench.report.document import Document, Mean
from dflash_bench.report.tables import Section, bounds, few, number, with_interval
from dflash_bench.report.words import bandwidth_note, facts, sentences, speedups, tally
from dflash_bench.results.rounds import RunRounds, read_rounds

MOST_ANSWERS = 10_000


def write_page(document: Document, path: Path, most_answers: int = MOST_ANSWERS, tokenizer: Path | None = None) -> None:
    """Write the page. Raises UserError if the file cannot be written, or `tokenizer` holds no tokenizer."""
    require_output(path)
    read = read_page(document, most_answers)
    listed = answers.page_answers(document, read.answers, tokenizer)
    figures = {}
    material = plots.Material(document, read)
    for name in with_bar(plots.names_for(material), "drawing plots"):
        with suppress(plots.NothingToPlotError):  # `plot` says why
            figures[name] = plots.svg(material, name), plots.CAPTIONS[name]
    write_output(path, page(document, figures, listed, read))


def read_page(document: Document, most_answers: int = MOST_ANSWERS) -> RunRounds:
    """Read the rounds of a run for its plots, and the answers that the page shows, in one pass."""
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
    """Return the page; `figures` maps names to the SVG and a caption."""
    from markupsafe import Markup

    info = document.results.info
    *shown, found = sections.of_document(document)
    reached, means = charts.positions(document, read), document.means()
    headline, wrong = _verdict(document, means)
    values = {
        "title": _title(document),
        "headline": headline,
        "sub": f"{str(info.started or '')[:10]} · {facts(info)['machine']}".strip(" ·"),
        "notes": [*(text for text in wrong if text != headline), *document.notes],
        "known": [line.name for line in document.lines if screen.is_known_text(document, line.method)],
        "why_known": f"{labels.EMBEDDED_NOTE}.",
        "lead": words.of_answers(document),  # the tiles have all else
        "is_empty": bool(document.why_empty),
        "tiles": _tiles(document, means),
        "filters": charts.filters((c.key for c in document.cells), {c.settings.id: c.setting for c in document.cells}),
        "forest": charts.groups(charts.forest(document, means)),
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
    """Return HTML of a run for a notebook: its verdict, the first table and the findings."""
    shown = {section.id: section for section in sections.of_document(document)}
    parts = [
        Section("title", _title(document), sentences=[*document.notes, *sentences(document)]),
        *([shown["results"]] if "results" in shown else []),
        *([shown["findings"]] if document.findings else []),
    ]
    return "".join(map(render.html, parts))


def _title(document: Document) -> str:
    model = document.results.info.identity.model
    return (
        f"{Path(str(model)).name}: {' and '.join(document.methods) or 'plain decoding'} on "
        f"{labels.suite_list(dict.fromkeys((cell.suite, cell.source) for cell in document.cells))}"
    )


def _verdict(document: Document, means: Sequence[Mean]) -> tuple[str, list[str]]:
    """Return the page's headline, and above all else the sentences on what forbids a speed-up."""
    said = screen.hero(document, means) or next(iter(screen.answers(document, means)), _title(document))
    return _title(document) if document.sweeps or document.loads else said, screen.faults(document)


def _tiles(document: Document, means: Sequence[Mean]) -> list[dict[str, Any]]:
    """Return each method's speed-up over all suites, with its caveats."""
    bars = {row.key: row for row in charts.placed(charts.overall(document, means))}
    return [_tile(document, mean, bars) for mean in means]


def _tile(document: Document, mean: Mean, bars: Mapping[CellKey, charts.ForestRow]) -> dict[str, Any]:
    line, speedup, al = mean
    has_interval = speedup is not None and speedup.low is not None
    interval = f"95 %: {bounds(speedup)}" if has_interval else ""
    own_range = few(speedup) if speedup and speedup.too_few else ""
    typical = document.typical(line)
    over_prompts = f"over prompts {with_interval(typical)}" if typical else ""
    rows = [speedups(document, speedup is not None), interval or own_range, over_prompts, bandwidth_note(document)]
    rows += [words.why_not_faster(document, line) or (f"al.pooled {number(al)}" if al else "")]
    shares = [(name, tally(document, share, line)) for name, share in (("exact", "exact"), ("judged", "audit"))]
    how = screen.standing(document, line)
    whole = {"exact": "text" if words.num_as_text(document, line) else "exact", "judged": "exact"}
    return {
        "name": line.name,
        "value": f"{speedup.value:.2f}" if speedup else "",
        "badges": document.badges(line),
        "lines": [row for row in rows if row],
        "colour": charts.colour_of(document, line.method),
        "shares": [
            (f"{name} {share[0]:,}/{share[1]:,}", whole[name] if share[0] == share[1] else how)
            for name, share in shares
            if share
        ],
        "marks": screen.MARKS,
        "bar": bars[CellKey("", "", line.settings.id, line.method)] if has_interval else None,
    }


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
    """Return JSON, deflated (zlib's form), in base64: nothing in it means anything inside a script element."""
    stored = {"rows": listed.rows, "texts": listed.texts, "lengths": listed.lengths, "prompts": listed.prompts}
    text = json.dumps(stored, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return b64encode(zlib.compress(text.encode("utf-8", "surrogatepass"), 9)).decode()
