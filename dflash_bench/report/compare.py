"""The `compare` command, from its arguments to text, JSON and a page.

Reads runs, refuses incomparable ones, and compares them with each other or with figures from elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dflash_bench.analysis import scores
from dflash_bench.analysis.cells import Cell, mismatched
from dflash_bench.analysis.comparable import INCOMPATIBILITIES, Agreement, agreements, check_allowed, require_comparable
from dflash_bench.analysis.compare import (
    Comparison,
    comparable_cells,
    compare_methods,
    compare_runs,
    over_runs,
    repeats,
)
from dflash_bench.analysis.findings import cells_of as cells_of_run
from dflash_bench.analysis.findings import last_part
from dflash_bench.analysis.gate.checks import FORBIDDEN
from dflash_bench.analysis.metrics import BASELINE, FORMULAS
from dflash_bench.analysis.peers import benches, paper, zlab
from dflash_bench.analysis.peers.zlab import HarnessVersion
from dflash_bench.analysis.stats import FEWEST, MIN_PROMPTS
from dflash_bench.core import labels
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.files import write_output
from dflash_bench.core.labels import wrapped
from dflash_bench.core.methods import shown
from dflash_bench.core.types import CellKey
from dflash_bench.report import charts, columns, data, render
from dflash_bench.report.changes import (
    ChangeSentence,
    agreement_section,
    cell_sections,
    change_sections,
    headings_of,
    verdicts,
)
from dflash_bench.report.sections import paying_contexts
from dflash_bench.report.tables import ReportTable, Section, Value, number
from dflash_bench.results import rounds
from dflash_bench.results.identity import settings_of, short_names
from dflash_bench.results.rounds import STRETCHES
from dflash_bench.results.table import RunTable

MOST_NAMED = 6
IN_STRETCHES = "timings here cover rounds only: the draft's prefill and the time between rounds belong to no stretch"


@dataclass(frozen=True, slots=True)
class ComparisonText:
    """A comparison for a terminal and for programs, and the parts of its page."""

    text: str
    json: dict[str, Any]
    verdicts: Sequence[ChangeSentence]
    notes: Sequence[str]
    sections: Sequence[Section]
    changes: Sequence[Comparison]


def write_comparison(compared: ComparisonText, path: Path) -> None:
    """Write a comparison as a page. Raises UserError where the file cannot be written."""
    headings = headings_of(compared.changes, with_pair=True)
    rows = charts.changes(list(zip(headings, compared.changes, strict=True)))
    named = {versus.key.settings_id: versus.setting for versus in compared.changes}
    values = {
        "title": f"dflash-bench: {' and '.join(compared.json['runs'])}",
        "verdicts": compared.verdicts,
        "notes": compared.notes,
        "changes": charts.groups(rows),
        "filters": charts.filters((row.key for row in rows), named),
        "sections": compared.sections,
    }
    write_output(path, render.scripted("comparison.html", ("common.js",), values))


@dataclass(frozen=True, slots=True)
class _Found:
    """The result of a comparison, before the notes on its runs are added."""

    sections: Sequence[Section]
    json: dict[str, Any]
    notes: Sequence[str] = ()
    verdicts: Sequence[ChangeSentence] = ()
    changes: Sequence[Comparison] = ()


def compared(
    paths: Sequence[Path],
    *,
    by: str = "suite",
    against: str | None = None,
    compat: str | None = None,
    allow: Sequence[str] = (),
    width: int | None = None,
) -> ComparisonText:
    """Compare runs (folders) and result files of other benchmarks, as text for a terminal of this width.

    Raises UserError if they cannot be compared.
    """
    check_allowed(allow)
    idle = [name for name in allow if name in INCOMPATIBILITIES]
    if idle and sum(path.is_dir() for path in paths) < 2:
        raise UserError(f"--allow {idle[0]} has no effect on a single run")
    _refuse_what_has_no_effect(paths, by, against, compat)
    served = [one for path in paths if path.is_file() for one in benches.read_results(path)]
    runs = [scores.read_run(path, by=by, allow=allow) for path in paths if not path.is_file()]
    if not runs:
        raise UserError("compare needs the folder of at least one run")
    if against is not None:
        return _with_notes(runs, [], _against(runs[0], against), width)
    if compat is not None:
        return _with_notes(runs, [], _compat(runs[0], zlab.VERSIONS[compat]), width)
    if served:
        return _with_notes(runs, [], _beside_served(runs, served), width)
    unlike = [difference for after in runs[1:] for difference in require_comparable(runs[0], after, allow)]
    cells_of = {run.name: comparable_cells(run) for run in runs}
    first, *others = cells_of
    groups = repeats(runs) if by not in STRETCHES else []
    repeated = [[cells_of[runs[place].name] for place in places] for places in groups]
    changes = [
        versus for name in others for versus in compare_runs(cells_of[first], cells_of[name], (first, name), repeated)
    ]
    notes = [*(f"allowed although it differs: {text}" for text in unlike), *_caveats(cells_of.values(), by)]
    notes += _run_noise(changes) if others else []
    notes += [
        f"{name}: {cell.heading} {cell.method} has no speed-up: {FORBIDDEN[cell.forbidden]}"
        for name, cells in cells_of.items()
        for cell in cells
        if cell.forbidden and cell.method != BASELINE
    ]
    alike = [one for after in runs[1:] for one in agreements(runs[0], after)] if by == "suite" else []
    pooled = {
        f"over {len(places)} runs: {', '.join(runs[place].name for place in places)}": over_runs(cells)
        for places, cells in zip(groups, repeated, strict=True)
    }
    found = changes if others else compare_methods(cells_of[first])
    made = data.comparison_json(cells_of, found, pooled, alike)
    if by == "context-position":
        made["contexts"] = data.contexts_json(cells_of)
    if others:
        made["differences"] = [asdict(difference) for difference in unlike]
    short = _last_parts(cells_of)
    of_people = [
        replace(one, before=short.get(one.before, shown(one.before)), after=short.get(one.after, one.after))
        for one in found
    ]
    same = [replace(one, before=short[one.before], after=short[one.after]) for one in alike]
    told = verdicts(of_people)
    sections = _sections({short[name]: cells for name, cells in cells_of.items()}, pooled, of_people, same, by)
    return _with_notes(
        runs, notes, _Found(sections, {"verdicts": [t.text for t in told]} | made, (), told, of_people), width
    )


def _last_parts(names: Iterable[str]) -> dict[str, str]:
    """Return the names of runs for tables: only their folders' names, if these differ."""
    ends = {name: Path(name).name or name for name in names}
    return ends if len({*ends.values()}) == len(ends) else {name: name for name in ends}


def _refuse_what_has_no_effect(paths: Sequence[Path], by: str, against: str | None, compat: str | None) -> None:
    if against is not None and against.partition(":")[0] not in paper.SOURCES:
        raise unknown("source", against, ["published", "published:TARGET", "paper"])
    if compat is not None and compat not in zlab.VERSIONS:
        raise unknown("harness", compat, list(zlab.VERSIONS))
    alone = [name for name, value in (("--against", against), ("--compat", compat)) if value is not None]
    if len(alone) == 2:
        raise UserError("--against already recomputes the run as the official harness does; leave out --compat")
    if alone and (len(paths) > 1 or by != "suite"):
        raise UserError(f"{alone[0]} takes one run, and no --by")
    if len(set(paths)) < len(paths):
        raise UserError("comparing a run with itself says nothing; name each run once")
    if any(path.is_file() for path in paths) and by != "suite":
        raise UserError("--by has no effect on result files of a server, which hold no answers")


def _with_notes(runs: Sequence[RunTable], notes: Sequence[str], found: _Found, width: int | None) -> ComparisonText:
    """Add the verdicts and the notes on the runs, above the tables."""
    lines = [f"run {run.name}: {run.info.environment.one_line()}" for run in runs]
    sentences = [text for run in runs for text in [*run.missing, *_wrong(run)]]
    sentences += [*notes, *found.notes]
    lines += [f"note: {text}" for text in sentences]
    paragraphs = [
        "\n".join(wrapped(line, width) for line in several) for several in ([one.text for one in found.verdicts], lines)
    ]
    blocks = [*filter(None, paragraphs), *(render.terminal(section, width) for section in found.sections)]
    about = {"runs": [run.name for run in runs], "notes": sentences}
    text = "\n\n".join(blocks) + "\n"
    return ComparisonText(text, about | found.json, found.verdicts, lines, found.sections, found.changes)


def _wrong(run: RunTable) -> list[str]:
    """Note answers that are not the target's own and make a comparison meaningless."""
    wrong = run.rows[mismatched(run.rows)]
    named = {settings.id: name for settings, name in short_names(settings_of(run.info.identity)).items()}
    cells = wrong[["suite", "settings_id", "method"]].drop_duplicates().itertuples(index=False, name=None)
    where = ", ".join(
        f"{labels.with_settings(_label(run, suite), named[by])} {shown(method)}" for suite, by, method in cells
    )
    return [f"{run.name}: {len(wrong)} answers are not the target's own output ({where})"] if len(wrong) else []


def _label(run: RunTable, suite: str) -> str:
    return labels.suite_label(suite, run.info.identity.source_of(suite))


def _caveats(cells_of: Iterable[Sequence[Cell]], by: str) -> list[str]:
    cells = [cell for of_run in cells_of for cell in of_run]
    few = [cell for cell in cells if FEWEST <= cell.num_units < MIN_PROMPTS]
    warning = [
        f"{len(few)} of {len(cells)} cells have fewer than {MIN_PROMPTS} prompts: their intervals may be too narrow"
    ]
    stretches = [IN_STRETCHES] if by in STRETCHES else []
    return [*(warning if few else []), *stretches, *(note.removesuffix(".") for note in columns.notes(cells))]


def _run_noise(changes: Sequence[Comparison]) -> Iterator[str]:
    """Describe the noise between runs that the intervals between them include."""
    noises = [(name, noise) for versus in changes for name, noise in versus.noises.items()]
    if not noises:
        yield (
            "the intervals between runs are over prompts alone: no run is repeated here, so the noise between runs is "
            "not known, and a change as small as it may be chance; compare several runs of each"
        )
        return
    sds = [100 * noise.sd for _, noise in noises]
    least, most = f"{min(sds):.1f}", f"{max(sds):.1f}"
    share = least if least == most else f"{least} to {most}"
    df = max(noise.df for _, noise in noises)
    yield (
        f"noise between runs: {share} % (standard deviation) of {' and '.join(dict.fromkeys(n for n, _ in noises))}, "
        f"measured with {df:g} degree{'s' * (df > 1)} of freedom, is in the intervals of timings between runs"
    )


def _sections(
    cells_of: Mapping[str, Sequence[Cell]],
    pooled: Mapping[str, Sequence[Cell]],
    changes: Sequence[Comparison],
    alike: Sequence[Agreement],
    by: str,
) -> list[Section]:
    """Return the cells of each run, then the changes, and last whether the target still gives the same answers."""
    made = []
    for name, cells in cells_of.items():
        made += [*([_heading(name)] if len(cells_of) > 1 else []), *cell_sections(cells)]
        made += paying_contexts(cells) if by == "context-position" else []
    for title, cells in pooled.items():
        made += [_heading(title), *cell_sections(cells, with_means=False)] if cells else []
    made += change_sections(changes) if changes else []
    return [*made, *([agreement_section(alike)] if alike else [])]


def _heading(text: str) -> Section:
    return Section("heading", sentences=[text])


def _compat(run: RunTable, version: HarnessVersion) -> _Found:
    cells = {cell.key: cell for cell in comparable_cells(run)}
    ids = ("al.pooled", "tps.decode", "speedup.decode")
    official = zlab.official(run.rows, version, list(cells.values()))
    ours = [cells[CellKey(one.suite, "", one.settings_id, one.method)] for one in official]
    rows: list[list[Value]] = []
    for one, cell in zip(official, ours, strict=True):
        pairs = zip((one.al, one.tps, one.speedup), map(cell.value, ids), strict=True)
        rows.append([one.method, str(one.num_responses), *(value for pair in pairs for value in pair)])
    both = (head for name in ids for head in (f"{name.partition('.')[0]}.{version.name}", name))
    table = ReportTable.of(
        ["method", "responses", *both], rows, spare=["responses"], groups=[cell.heading for cell in ours]
    )
    section = Section("zlab", table=table, terms=version.formulas)
    made = data.compat_json(version.name, official, ours, ids)
    return _Found([section], made, list(zlab.notes(run.rows, version)))


PUBLISHED: Mapping[str, Callable[[paper.PaperComparison], Value]] = {
    "method": lambda one: one.method,
    "drafts": lambda one: number(one.num_drafts, 0),
    "formula": lambda one: one.published.formula,
    "this run": lambda one: one.own,
    "published": lambda one: one.published.value,
    "theirs": lambda one: number(one.published.num_drafts, 0),
    "published for": lambda one: re.sub(REPOSITORY, "", one.published.config),
    "in": lambda one: _short(one.published.source),
}
"""The columns beside published figures."""


REPOSITORY = r"^[\w.-]+/[\w.-]+, "
"""The draft that a published configuration begins with, which is in the JSON, too."""


def _short(source: str) -> str:
    return source.rpartition(", ")[2]


def _against(run: RunTable, against: str) -> _Found:
    identity = run.info.identity
    model = paper.model_of(identity)
    target = paper.target_of(against.partition(":")[2] or model)
    figures = paper.beside(zlab.official(run.rows, cells=cells_of_run(run)), target, identity)
    named = {settings.id: name for settings, name in short_names(settings_of(identity)).items()}
    spare = ("drafts", "theirs", "published for", "in")
    rows: list[list[Value]] = [[value(one) for value in PUBLISHED.values()] for one in figures]
    suites = [labels.with_settings(_label(run, one.suite), named[one.settings_id]) for one in figures]
    known = zlab.FORMULAS | paper.FORMULAS
    others = sum(one.is_met is None for one in figures)
    counted = [one.is_met for one in figures if one.is_met is not None]
    section = Section(
        "published",
        sentences=[
            f"{sum(counted)} of {len(counted)} published figures are met within {100 * paper.TOLERANCE:.0f} %"
            f"{f'; {others} others have a formula that is not computed here' if others else ''}."
        ],
        table=ReportTable.of([*PUBLISHED], rows, spare=spare, groups=suites),
        terms={name: formula for name, formula in known.items() if any(name in row for row in rows)}
        | {
            "drafts, theirs": "tokens drafted per round, here and as published",
            **{_short(one.published.source): one.published.source for one in figures},
            "n/a": "not published, or published by a formula that is not computed here",
        },
    )
    notes = [*_unlike_published(model, target, figures), *paper.unlike_conditions(figures, identity)]
    return _Found([section], data.published_json(target, figures, identity), notes)


def _unlike_published(model: str, target: str, figures: Sequence[paper.PaperComparison]) -> Iterator[str]:
    if not paper.is_target(model, target):
        yield f"the run's target is {model}, but the published figures are for {target}"
    longer = dict.fromkeys((b.method, b.num_drafts, b.published.num_drafts) for b in figures if not b.is_as_long)
    for method, num_here, num_published in longer:
        here = f"{method} drafts {number(num_here, 0)} tokens per round in this run"
        yield f"{here}, {num_published} in some published figures"


def _beside_served(runs: Sequence[RunTable], served: Sequence[benches.BenchResult]) -> _Found:
    """Compare runs with results of servers, by formula id; only acceptance means the same on both sides."""
    ids = list(dict.fromkeys(("al.pooled", "accept_rate", *(name for bench in served for name in bench.figures))))
    ours = [
        (run.name, cell, reached.get(cell.key, {}))
        for run in runs
        for reached in (_accept_at(run),)
        for cell in comparable_cells(run)
    ]
    # This engine answers one prompt at a time.
    rows: list[list[Value]] = [
        [
            f"{name} {cell.heading} {shown(cell.method)}",
            f"{cell.num_prompts} prompts",
            cell.num_errors,
            "1",
            *(positions.get(of, cell.value(of)) for of in ids),
        ]
        for name, cell, positions in ours
    ]
    notes = [*_other_models(runs, served), *left_out(served)]
    return _Found([_served_section(rows, served, ids)], data.served_json(ours, served), notes)


def _served_section(rows: Sequence[list[Value]], served: Sequence[benches.BenchResult], ids: Sequence[str]) -> Section:
    """Return our rows, and a row for each result of another program, by formula."""
    theirs: list[list[Value]] = [
        [
            f"{bench.name} ({bench.model})",
            f"{bench.num_requests or 'some'} requests",
            bench.num_failed,
            "no limit" if bench.is_unlimited else bench.concurrency,
            *(bench.figures.get(name) for name in ids),
        ]
        for bench in served
    ]
    spare = ["answers", "failed", "conc.", *ids[1:]]
    shown = ReportTable.of(["what", "answers", "failed", "conc.", *ids], [*rows, *theirs], spare=spare)
    formulas = {name: text for name, text in {**FORMULAS, **benches.FORMULAS}.items() if name in ids}
    return Section("served", table=shown, terms={**formulas, "conc.": "most requests at once, if that is known"})


def imported(served: Sequence[benches.BenchResult], width: int | None) -> str:
    """Return results of other programs as a table for a terminal of this width."""
    ids = list(dict.fromkeys(name for bench in served for name in bench.figures))
    notes = [wrapped(f"note: {text}", width) for text in left_out(served)]
    return "\n\n".join([render.terminal(_served_section([], served, ids), width), *notes]) + "\n"


def left_out(served: Sequence[benches.BenchResult]) -> Iterator[str]:
    """Name the files' other fields, whose meaning is not known or not of interest here."""
    for bench in served:
        if bench.left_out:
            more = f" and {len(bench.left_out) - MOST_NAMED} more" if len(bench.left_out) > MOST_NAMED else ""
            yield f"left out of {bench.name} ({bench.kind}): {', '.join(bench.left_out[:MOST_NAMED])}{more}"


def _accept_at(run: RunTable) -> dict[CellKey, dict[str, float]]:
    """Return the share of all rounds that accept at least k tokens: vLLM's acceptance rate per position."""
    return {
        key: {f"accept_at[{position.k}]": position.unconditional for position in rounds.accept_at(counts, key.method)}
        for key, counts in rounds.read_rounds(run.stored).histograms.items()
    }


def _other_models(runs: Sequence[RunTable], served: Sequence[benches.BenchResult]) -> Iterator[str]:
    for run in runs:
        target = paper.model_of(run.info.identity)
        for bench in served:
            if bench.model != benches.UNSTATED and last_part(bench.model) != last_part(target):
                yield f"the target of {run.name} is {target}, but {bench.name} measured {bench.model}"
