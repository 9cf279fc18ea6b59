"""One self-contained page: no network, works from a file, and runs no script but its own.

All that comes from a run is hostile: what stands in the page is escaped here, and what its script shows comes as
JSON and is only ever set as text. A content security policy names the script by its hash.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

from dflash_bench import __version__
from dflash_bench.analysis.findings import Finding
from dflash_bench.analysis.findings.base import Badge
from dflash_bench.analysis.metrics import Cell
from dflash_bench.core import labels
from dflash_bench.core.errors import UserError
from dflash_bench.core.files import require_output
from dflash_bench.core.labels import visible
from dflash_bench.core.terminal import with_bar
from dflash_bench.report import answers, perf, plots, sections
from dflash_bench.report.columns import RESULTS, ROUNDS, Column, badges_of, formulas, legend, notes
from dflash_bench.report.document import Document, MethodLine, over_all
from dflash_bench.report.tables import Rows, number
from dflash_bench.report.words import facts, sentences, speedups, tally

MOST_ANSWERS = 300
TEMPLATE = Path(__file__).parent
WRONG = (
    "mismatch",
    "failed",
    "no_baseline",
    "lossy",
    "near_tie",
    "nothing_drafted",
    "dead_draft",
    "unknown_text",
    "slower",
)
"""Findings that a reader must not miss; the others say that a number is weak."""


def write_page(document: Document, path: Path, most_answers: int = MOST_ANSWERS, tokenizer: Path | None = None) -> None:
    """Raises UserError where the file cannot be written, or `tokenizer` is none."""
    require_output(path)
    listed = answers.read_answers(document, most_answers, tokenizer)
    figures = {}
    material = plots.Material(document)
    for name in with_bar(plots.names_for(material), "drawing plots"):
        with suppress(plots.NothingToPlotError):  # `plot` says why
            figures[name] = plots.svg(material, name), plots.CAPTIONS[name]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(document, figures, listed), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def escape(text: str) -> str:
    return html.escape(visible(text, keep="\n\t"))


def page(document: Document, figures: Mapping[str, tuple[str, str]], listed: answers.PageAnswers) -> str:
    """`figures` by name: the SVG, and a caption."""
    template, style, script = (
        (TEMPLATE / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    )
    info = document.results.info
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "policy": f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        "title": escape(_title(document)),
        "sub": escape(f"{str(info.started or '')[:10]} · {facts(info)['machine']}".strip(" ·")),
        "notes": "".join(f'<p class="note">{escape(note)}</p>' for note in document.notes),
        "lead": "".join(f"<p>{escape(text)}</p>" for text in sentences(document)),
        "tiles": "".join(_tile(document, line) for line in document.lines),
        "results": _table(document, RESULTS),
        "legend": "".join(f"<p>{escape(line)}</p>" for line in _below(document)),
        "rounds": _table(document, ROUNDS),
        "formulas": _pairs(formulas(*RESULTS, *ROUNDS), code=True),
        "curve": "".join(f"<p>{escape(text)}</p>" for text in perf.sentences(info)),
        "swept": _contexts(document) + _swept(document),
        "findings": _findings(document),
        "figures": "".join(_figure(name, *figure) for name, figure in figures.items()),
        "extent": escape(_extent(listed)),
        "facts": _pairs(facts(info)),
        "reproduce": escape(_reproduce(document)),
        "version": escape(__version__),
        "data": _data(listed),
        "style": style,
        "script": script,
    }
    # In one pass, so that nothing is looked for inside what was put in.
    return re.sub(r"\{\{(\w+)\}\}", lambda placeholder: parts[placeholder[1]], template)


def excerpt(document: Document) -> str:
    """What a notebook shows of a run: its verdict, the first table and the findings, by the page's own parts."""
    said = "".join(f"<p>{escape(text)}</p>" for text in [*document.notes, *sentences(document)])
    below = "".join(f"<p><small>{escape(line)}</small></p>" for line in _below(document))
    found = f"<h4>Findings</h4>{_findings(document)}" if document.findings else ""
    return f"<h3>{escape(_title(document))}</h3>{said}{_table(document, RESULTS)}{below}{found}"


def _title(document: Document) -> str:
    model = document.results.info.identity.model
    return (
        f"{Path(str(model)).name}: {' and '.join(document.methods) or 'plain decoding'} on "
        f"{labels.listed(dict.fromkeys((cell.suite, cell.source) for cell in document.cells))}"
    )


def _tile(document: Document, line: MethodLine) -> str:
    speedup, al = over_all(document.cells, line)
    interval = f"95 %: {number(speedup.low)} to {number(speedup.high)}" if speedup and speedup.low is not None else ""
    few = f"n = {speedup.too_few}, no interval" if speedup and speedup.too_few else ""
    exact = tally(document, "exact", line)
    rows = [speedups(document, speedup is not None), interval or few]
    rows += [f"al.pooled {number(al)}"] if al else []
    rows += [f"exact {exact[0]:,}/{exact[1]:,}"] if exact else []
    value = f"{speedup.value:.2f}<small>×</small>" if speedup else "n/a"
    at = document.methods.index(line.method) % 7
    lines = "".join(f"<span>{escape(row)}</span>" for row in rows if row)
    weak = _pills(document.badges(line), in_words=True)
    head = f"<h3>{escape(line.name)}</h3><b>{value}</b>{weak}"
    return f'<div class="tile" style="--own: var(--series-{at})">{head}{lines}</div>'


def _pills(badges: Sequence[Badge], *, in_words: bool) -> str:
    """In words where there is room, else as marks that are explained below the table."""
    pills = (
        f'<i class="badge" title="{escape(badge.meaning)}">{escape(badge.name if in_words else badge.mark)}</i>'
        for badge in badges
    )
    return f'<span class="badges">{"".join(pills)}</span>' if badges else ""


def _table(document: Document, columns: Sequence[Column]) -> str:
    heads = "".join(f"<th{_spare(column)}>{escape(column.one_line)}</th>" for column in columns)
    bodies = []
    for _, group in groupby(document.cells, key=lambda cell: cell.key[:3]):
        members = list(group)
        rows = "".join(_table_row(cell, columns, document.findings) for cell in members)
        head = f'<tr class="suite"><th colspan="{len(columns) + 1}">{escape(members[0].heading)}</th></tr>'
        bodies.append(f"<tbody>{head}{rows}</tbody>")
    table = f'<table class="figures"><thead><tr><th></th>{heads}</tr></thead>{"".join(bodies)}</table>'
    return f'<div class="wide">{table}</div>'


def _below(document: Document) -> list[str]:
    """What stands below the first table."""
    return [*legend(document.cells, document.findings), *notes(document.cells)]


def _contexts(document: Document) -> str:
    """What a longer context does, in a run of several."""
    if not sections.by_context(document.cells):
        return ""
    heads, rows = sections.context_table(document.cells)
    return (
        f"<h3>{escape(sections.CONTEXT_TITLE)}</h3>{_plain_table(heads, rows)}<p>{escape(sections.CONTEXT_LEGEND)}</p>"
    )


def _plain_table(heads: Sequence[str], rows: Rows) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(f"<tr>{_swept_row(row)}</tr>" for row in rows)
    return f'<div class="wide"><table class="figures"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _swept(document: Document) -> str:
    """Tables by concurrency, and by each option of which the run has several values, with what they say in words."""
    parts = []
    if document.loads:
        parts.append(
            f"<h3>{escape(sections.LOAD_TITLE.capitalize())}</h3>{_plain_table(*sections.load_table(document.loads))}"
        )
        parts += _plain_text([sections.LOAD_LEGEND, *sections.sentences(document.loads)])
    if document.sweeps:
        parts += [
            f"<h3>Sweep over {escape(sections.heading(one))}</h3>{_plain_table(*sections.sweep_table(one))}"
            for one in document.sweeps
        ]
        parts += _plain_text([sections.SWEEP_LEGEND, *sections.best_values(document.sweeps, document.results.info)])
    return "".join(parts)


def _plain_text(sentences: Sequence[str]) -> list[str]:
    return [f"<p>{escape(text)}</p>" for text in sentences]


def _swept_row(row: Sequence[str]) -> str:
    name, *figures = row
    return f"<th>{escape(name.strip())}</th>" + "".join(f"<td>{escape(text.strip())}</td>" for text in figures)


def _table_row(cell: Cell, columns: Sequence[Column], findings: Sequence[Finding]) -> str:
    figures = "".join(
        f"<td{_spare(column)}>{_pills(badges_of(column, cell, findings), in_words=False)}"
        f"{escape(column.text(cell))}</td>"
        for column in columns
    )
    return f"<tr><th>{escape(cell.method)}</th>{figures}</tr>"


def _spare(column: Column) -> str:
    return ' class="spare"' if column.is_spare else ""


def _findings(document: Document) -> str:
    if not document.findings:
        return "<p>None.</p>"
    return "".join(
        f'<li class="{"wrong" if finding.kind in WRONG else "weak"}"><b>{escape(finding.kind.replace("_", " "))}</b>'
        f"<p>{escape(finding.text)}.</p><p>→ {escape(finding.remedy)}.</p></li>"
        for finding in document.findings
    ).join(("<ul>", "</ul>"))


def _figure(name: str, svg: str, caption: str) -> str:
    labelled = svg.replace("<svg", f'<svg role="img" aria-label="{escape(name)}: {escape(caption)}"', 1)
    return f"<figure>{labelled}<figcaption>{escape(caption)}</figcaption></figure>"


def _pairs(pairs: Mapping[str, str], *, code: bool = False) -> str:
    tag = "code" if code else "span"
    return "".join(f"<dt><{tag}>{escape(name)}</{tag}></dt><dd>{escape(text)}</dd>" for name, text in pairs.items())


def _extent(listed: answers.PageAnswers) -> str:
    some = f"{len(listed.rows):,} of {listed.num_all:,} answers: those to the first prompts of each suite."
    cut = f"All {listed.num_all:,} answers." if len(listed.rows) == listed.num_all else some
    return f"{cut} {listed.why_plain}" if listed.why_plain else cut


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
