"""Two runs, or two methods, side by side: as text and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dflash_bench.analysis.compare import (
    EQUAL,
    INCOMPATIBILITIES,
    JUDGED_BY,
    MIN_EFFECT,
    Agreement,
    Comparison,
    agreements,
    check_allowed,
    comparable_cells,
    compare_methods,
    compare_runs,
    over_runs,
    over_suites,
    repeats,
    require_comparable,
    verdict,
)
from dflash_bench.analysis.findings import MIN_PROMPTS, last_part
from dflash_bench.analysis.metrics import METRICS, Cell, mismatched
from dflash_bench.analysis.peers import paper, vllm, zlab
from dflash_bench.analysis.peers.zlab import HarnessVersion
from dflash_bench.analysis.stats import FEWEST, Interval
from dflash_bench.core import labels
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.files import write_output
from dflash_bench.core.methods import is_lossy
from dflash_bench.core.types import CellKey
from dflash_bench.report import charts, columns, render
from dflash_bench.report.data import cells_json, versus_json
from dflash_bench.report.tables import ABSENT, ReportTable, Section, Value, bounds, number, p_value, with_interval
from dflash_bench.results import rounds, table
from dflash_bench.results.identity import settings_of, short_names
from dflash_bench.results.rounds import STRETCHES
from dflash_bench.results.table import RunTable

# The verdict, above everything else.


MOST_SENTENCES = 8


class ChangeSentence(NamedTuple):
    kind: Literal["worse", "better", "rest"]
    text: str


def verdicts(comparisons: Sequence[Comparison]) -> list[ChangeSentence]:
    """Return what changed for the better or worse, worst first, and how much else did not, in a sentence each."""
    found: dict[str, list[str]] = {"worse": [], "better": [], "unclear": [], "same": []}
    for versus in comparisons:
        *where, before, after = _sides(versus, bool(versus.key.slice))
        place = f"{' '.join(where)}, {after} against {before}"
        name = next((name for name in JUDGED_BY if name in versus.changes), None)
        if name is not None:
            change = versus.changes[name]
            found.setdefault(verdict(name, change), []).append(f"{place}: {name} {_times(change.ratio)}")
        if versus.passed_verdict in ("worse", "better"):
            found[versus.passed_verdict].append(f"{place}: {points(versus.passed)} points answered right")
    told = [
        *(ChangeSentence("worse", f"WORSE: {text}") for text in found.pop("worse")),
        *(ChangeSentence("better", f"better: {text}") for text in found.pop("better")),
    ]
    rest = [f"and {len(told) - MOST_SENTENCES} more, below"] if len(told) > MOST_SENTENCES else []
    counts = ", ".join(f"{len(texts)} {name}" for name, texts in found.items() if texts)
    rest += [f"{'others' if told else 'no change is shown'}: {counts}"] if counts else []
    return [*told[:MOST_SENTENCES], *(ChangeSentence("rest", text) for text in rest)]


def _times(ratio: Interval) -> str:
    within = bounds(ratio)
    return f"{number(ratio.value)} times{f' ({within})' if within else ''}"


# The sections and the JSON of `compare`. Time-free metrics stand apart from timings, and ids above every column.


SHOWN = {name: metric.is_timing for name, metric in METRICS.items() if metric.in_comparison}
TIME_FREE = tuple(name for name, is_timing in SHOWN.items() if not is_timing)
TIMINGS = tuple(name for name, is_timing in SHOWN.items() if is_timing)
SHARES = ("exact", "passed")
NO_CHANGE = (
    "better, worse = p < 0.05 (Holm, over all lines), the interval does not contain 1, and the change is at least "
    f"{MIN_EFFECT:.0%}",
    f"same = the whole interval is within {EQUAL:.0%} of 1; unclear = neither",
    "ratios are always over the same prompts",
)


def cell_sections(cells: Sequence[Cell], *, with_means: bool = True) -> list[Section]:
    """The metrics of one run, and the geometric mean over its suites."""
    made = [
        Section("time_free", "time-free", _cell_table(cells, TIME_FREE, SHARES)),
        Section("timings", "timings", _cell_table(cells, TIMINGS)),
    ]
    means = over_suites(cells, "speedup.decode") if with_means and not any(cell.slice for cell in cells) else []
    if means:
        title = "speedup.decode, geometric mean over suites"
        rows: list[list[Value]] = [[labels.with_settings(first.method, first.setting), mean] for first, mean in means]
        made.append(Section("means", title, ReportTable.of(["method", "speedup.decode [95 %]"], rows)))
    return made


def _cell_table(cells: Sequence[Cell], ids: Sequence[str], shares: Sequence[str] = ()) -> ReportTable:
    known_ids = [name for name in ids if any(name in cell.figures for cell in cells)]
    is_sliced = any(cell.slice for cell in cells)
    names = _names(is_sliced, "method")
    rows: list[list[Value]] = [
        [
            *(labels.with_settings(cell.label, cell.setting), *([cell.slice or "-"] if is_sliced else []), cell.method),
            cell.num_prompts,
            *(cell.figures.get(name) for name in known_ids),
            *("lossy" if name == "exact" and is_lossy(cell.method) else getattr(cell, name) for name in shares),
        ]
        for cell in cells
    ]
    keys = [cell.key for cell in cells]
    table = ReportTable.of([*names, "prompts", *known_ids, *shares], rows, len(names), keys)
    kept = (*names, *JUDGED_BY, *shares)
    return replace(table, columns=[replace(column, is_spare=column.id not in kept) for column in table.columns])


def _names(is_sliced: bool, *methods: str) -> list[str]:
    """The heads of the columns that name a row; with slices only where there are any."""
    return ["suite", *(["slice"] if is_sliced else []), *methods]


def change_sections(comparisons: Sequence[Comparison]) -> list[Section]:
    """After over before: a row for each metric, the time-free ones first."""
    is_sliced = any(versus.key.slice for versus in comparisons)
    names = _names(is_sliced, "before", "after")
    made = []
    for title, is_timing in (("time-free, after / before", False), ("timings, after / before", True)):
        shown = [
            (versus, name, change)
            for versus in comparisons
            for name, change in versus.changes.items()
            if METRICS[name].is_timing == is_timing
        ]
        rows = [
            [*_sides(versus, is_sliced), name, with_interval(change.ratio, 3), p_value(change.p), verdict(name, change)]
            for versus, name, change in shown
        ]
        if rows:
            heads = [*names, "figure", "ratio [95 %]", "p (Holm)", ""]
            keys = [charts.key_of(versus) for versus, *_ in shown]
            made.append(Section("changes", title, ReportTable.of(heads, rows, len(names) + 1, keys, ["p (Holm)"])))
    return [*made, *_answered_right(comparisons, is_sliced), Section("legend", sentences=NO_CHANGE)]


def _answered_right(comparisons: Sequence[Comparison], is_sliced: bool) -> Iterator[Section]:
    """Whether answers got worse: a row where any changed between right and wrong, and a sentence on the others."""
    scored = [versus for versus in comparisons if versus.num_scored]
    changed = [versus for versus in scored if versus.lost or versus.gained]
    names = _names(is_sliced, "before", "after")
    rows: list[list[Value]] = [
        [*_sides(v, is_sliced), v.num_scored, v.lost, v.gained, points(v.passed), p_value(v.p_passed), v.passed_verdict]
        for v in changed
    ]
    if rows:
        heads = [*names, "scored", "lost", "gained", "points [95 %]", "p (McNemar, Holm)", ""]
        yield Section("answered_right", "prompts answered right", ReportTable.of(heads, rows, left=len(names)))
    unchanged = [versus for versus in scored if versus not in changed and not versus.is_exact]
    if unchanged:
        fewest = min(unchanged, key=lambda versus: versus.num_scored)
        where = f"in {len(unchanged)} {'other ' if changed else ''}comparison{'s' * (len(unchanged) > 1)}"
        yield Section("unchanged", sentences=[
            f"{where} the same prompts were answered right; {fewest.num_scored:,} scored prompts do not rule out a "
            f"change of {points(fewest.passed)} points"
        ])  # fmt: skip


def points(change: Interval | None) -> str:
    """`-2.5 [-6.1, +1.1]`: a difference of percentages."""
    if change is None:
        return ABSENT
    if change.low is None or change.high is None:
        return f"{100 * change.value:+.1f} (n = {change.too_few})"
    return f"{100 * change.value:+.1f} [{100 * change.low:+.1f}, {100 * change.high:+.1f}]"


def _sides(versus: Comparison, is_sliced: bool) -> list[str]:
    where = labels.with_settings(labels.suite_label(versus.key.suite, *versus.sources), versus.setting)
    place = [" ".join(filter(None, [where, versus.key.method])), *([versus.key.slice or "-"] if is_sliced else [])]
    return [*place, versus.before, versus.after]


def _agreement_section(agreements: Sequence[Agreement]) -> Section:
    """How far the target's own answers are the same in two runs."""
    rows: list[list[Value]] = [
        [
            labels.with_settings(labels.suite_label(one.suite, *one.sources), one.setting),
            one.before,
            one.after,
            (one.num_equal, one.num_answers),
            number(one.in_common, 1),
        ]
        for one in agreements
    ]
    table = ReportTable.of(["suite", "before", "after", "equal", "tokens in common"], rows, left=3)
    meaning = (
        "equal = token for token; tokens in common = before the first difference, mean over the answers that differ"
    )
    return Section("agreements", "plain decoding's answers to first turns", table, sentences=[meaning])


# The `compare` command, from its arguments to text and JSON: read runs, refuse unlike ones, set them side by side.


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
    is_sliced = any(versus.key.slice for versus in compared.changes)
    rows = charts.changes([(_heading_of(versus, is_sliced), versus) for versus in compared.changes])
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


def _heading_of(versus: Comparison, is_sliced: bool) -> str:
    *where, before, after = _sides(versus, is_sliced)
    return f"{' · '.join(where)}: {after} / {before}"


@dataclass(frozen=True, slots=True)
class _Found:
    """The result of a comparison, before the notes on its runs are added."""

    sections: Sequence[Section]
    json: dict[str, Any]
    notes: Sequence[str] = ()
    verdicts: Sequence[ChangeSentence] = ()
    changes: Sequence[Comparison] = ()


def compared(
    paths: Sequence[Path], *, by: str = "suite", against: str | None = None, compat: str | None = None,
    allow: Sequence[str] = (), width: int | None = None,
) -> ComparisonText:  # fmt: skip
    """Compare runs (folders) and results of vllm bench serve (files), as text for a terminal of this width.

    Raises UserError if they cannot be compared.
    """
    check_allowed(allow)
    idle = [name for name in allow if name in INCOMPATIBILITIES]
    if idle and sum(path.is_dir() for path in paths) < 2:
        raise UserError(f"--allow {idle[0]} has no effect on a single run")
    _refuse_what_has_no_effect(paths, by, against, compat)
    served = [vllm.read_result(path) for path in paths if path.is_file()]
    runs = [table.read_run(path, by=by, allow=allow) for path in paths if not path.is_file()]
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
    alike = [one for after in runs[1:] for one in agreements(runs[0], after)] if by == "suite" else []
    pooled = {
        f"over {len(places)} runs: {', '.join(runs[place].name for place in places)}": over_runs(cells)
        for places, cells in zip(groups, repeated, strict=True)
    }
    shown = changes if others else compare_methods(cells_of[first])
    made = _cells_and_changes(cells_of, pooled, shown, alike)
    allowed = {"differences": [asdict(difference) for difference in unlike]} if others else {}
    told = verdicts(shown)
    found = replace(
        made, json={"verdicts": [one.text for one in told]} | made.json | allowed, verdicts=told, changes=shown
    )
    return _with_notes(runs, notes, found, width)


def _refuse_what_has_no_effect(paths: Sequence[Path], by: str, against: str | None, compat: str | None) -> None:
    if against is not None and against.partition(":")[0] not in paper.SOURCES:
        raise unknown("source", against, ["paper", "paper:TARGET"])
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
        "\n".join(render.wrapped(line, width) for line in several)
        for several in ([one.text for one in found.verdicts], lines)
    ]
    blocks = [*filter(None, paragraphs), *(render.terminal(section, width) for section in found.sections)]
    about = {"runs": [run.name for run in runs], "notes": sentences}
    text = "\n\n".join(blocks) + "\n"
    return ComparisonText(text, about | found.json, found.verdicts, lines, found.sections, found.changes)


def _wrong(run: RunTable) -> list[str]:
    """Note answers that are not the target's own, which make a comparison meaningless."""
    wrong = run.rows[mismatched(run.rows)]
    named = {settings.id: name for settings, name in short_names(settings_of(run.info.identity)).items()}
    cells = wrong[["suite", "settings_id", "method"]].drop_duplicates().itertuples(index=False, name=None)
    where = ", ".join(f"{labels.with_settings(_label(run, suite), named[by])} {method}" for suite, by, method in cells)
    return [f"{run.name}: {len(wrong)} answers are not the target's own output ({where})"] if len(wrong) else []


def _label(run: RunTable, suite: str) -> str:
    return labels.suite_label(suite, run.info.identity.source_of(suite))


def _caveats(cells_of: Iterable[Sequence[Cell]], by: str) -> list[str]:
    cells = [cell for of_run in cells_of for cell in of_run]
    few = [cell for cell in cells if FEWEST <= cell.num_prompts < MIN_PROMPTS]
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


def _cells_and_changes(
    cells_of: Mapping[str, Sequence[Cell]],
    pooled: Mapping[str, Sequence[Cell]],
    changes: Sequence[Comparison],
    alike: Sequence[Agreement],
) -> _Found:
    """The cells of each run, then what changed, and last whether the target still gives the same answers."""
    sections = []
    for name, cells in cells_of.items():
        sections += [*([_heading(name)] if len(cells_of) > 1 else []), *cell_sections(cells)]
    for title, cells in pooled.items():
        sections += [_heading(title), *cell_sections(cells, with_means=False)] if cells else []
    sections += change_sections(changes) if changes else []
    sections += [_agreement_section(alike)] if alike else []
    named = [{"run": name, **cell} for name, cells in cells_of.items() for cell in cells_json(cells)]
    made: dict[str, Any] = {"cells": named, "changes": versus_json(changes)}
    if pooled:
        made["over_runs"] = [{"of": title, "cells": cells_json(cells)} for title, cells in pooled.items()]
    if alike:
        made["plain_answers"] = [asdict(one) for one in alike]
    return _Found(sections, made)


def _heading(text: str) -> Section:
    return Section("heading", sentences=[text])


def _compat(run: RunTable, version: HarnessVersion) -> _Found:
    cells = {cell.key: cell for cell in comparable_cells(run)}
    ids = ("al.pooled", "tps.decode", "speedup.decode")
    rows: list[list[Value]] = []
    figures = []
    for printed in zlab.official(run.rows, version):
        cell = cells[CellKey(printed.suite, "", printed.settings_id, printed.method)]
        ours = [cell.value(name) for name in ids]
        pairs = zip((printed.al, printed.tps, printed.speedup), ours, strict=True)
        values = [value for pair in pairs for value in pair]
        rows.append([cell.heading, printed.method, str(printed.num_responses), *values])
        figures.append(asdict(printed) | {"source": cell.source} | dict(zip(ids, ours, strict=True)))
    both = (head for name in ids for head in (f"{name.partition('.')[0]}.{version.name}", name))
    heads = ["suite", "method", "responses", *both]
    table = Section("zlab", table=ReportTable.of(heads, rows, left=2), terms=version.formulas)
    return _Found([table], {"compat": version.name, "cells": figures}, list(zlab.notes(run.rows, version)))


def _against(run: RunTable, against: str) -> _Found:
    identity = run.info.identity
    model = paper.model_of(identity)
    target = paper.target_of(against.partition(":")[2] or model)
    figures = paper.beside(zlab.official(run.rows), target, identity)
    named = {settings.id: name for settings, name in short_names(settings_of(identity)).items()}
    heads = [
        "suite", "method", "drafts", "formula", "this run", "published", "published drafts", "published for",
        "thinking", "conc.", "hardware", "source",
    ]  # fmt: skip
    rows: list[list[Value]] = [
        [labels.with_settings(_label(run, b.suite), named[b.settings_id]), b.method, number(b.num_drafts, 0),
         b.published.formula, b.own, b.published.value, number(b.published.num_drafts, 0), b.published.config,
         b.published.thinking, str(b.published.concurrency), b.published.hardware, b.published.source] for b in figures
    ]  # fmt: skip
    known = zlab.FORMULAS | paper.FORMULAS
    section = Section(
        "published",
        table=ReportTable.of(heads, rows, left=2),
        terms={name: formula for name, formula in known.items() if any(name in row for row in rows)}
        | {
            "drafts": "tokens drafted per round, here and as published",
            "n/a": "not published, or published by a formula that is not computed here",
        },
    )
    figures_json = [asdict(figure) | {"source": identity.source_of(figure.suite)} for figure in figures]
    notes = [*_unlike_published(model, target, figures), *paper.unlike_conditions(figures, identity)]
    return _Found([section], {"against": "paper", "target": target, "figures": figures_json}, notes)


def _unlike_published(model: str, target: str, figures: Sequence[paper.PaperComparison]) -> Iterator[str]:
    if not paper.is_target(model, target):
        yield f"the run's target is {model}, but the published figures are for {target}"
    longer = dict.fromkeys((b.method, b.num_drafts, b.published.num_drafts) for b in figures if not b.is_as_long)
    for method, num_here, num_published in longer:
        here = f"{method} drafts {number(num_here, 0)} tokens per round in this run"
        yield f"{here}, {num_published} in some published figures"


def _beside_served(runs: Sequence[RunTable], served: Sequence[vllm.VllmBenchResult]) -> _Found:
    """By formula id; acceptance means the same on both sides, the rest has one side only."""
    ids = list(dict.fromkeys(("al.pooled", "accept_rate", *(name for bench in served for name in bench.figures))))
    rows: list[list[Value]] = []
    cells = []
    for run in runs:
        reached, cells_of_run = _accept_at(run), comparable_cells(run)
        for cell, cell_json in zip(cells_of_run, cells_json(cells_of_run), strict=True):
            positions = reached.get(cell.key, {})
            figures = (positions.get(name, cell.value(name)) for name in ids)
            what = f"{run.name} {cell.heading} {cell.method}"
            # This engine answers one prompt at a time.
            rows.append([what, f"{cell.num_prompts} prompts", cell.num_errors, "1", *figures])
            cells.append({"run": run.name, **cell_json, "accept_at": positions})
    rows += [
        [f"{bench.name} ({bench.model})", f"{bench.num_requests} requests", bench.num_failed,
         str(bench.concurrency or "no limit"), *(bench.figures.get(name) for name in ids)] for bench in served
    ]  # fmt: skip
    table = ReportTable.of(["what", "answers", "failed", "conc.", *ids], rows)
    section = Section("served", table=table, terms={**vllm.FORMULAS, "conc.": "most requests at once"})
    made = {"cells": cells, "served": [asdict(bench) for bench in served]}
    return _Found([section], made, list(_other_models(runs, served)))


def _accept_at(run: RunTable) -> dict[CellKey, dict[str, float]]:
    """The share of all rounds that accepts so many tokens or more, which is what vLLM calls its rate per position."""
    return {
        key: {f"accept_at[{position.k}]": position.unconditional for position in rounds.accept_at(counts, key.method)}
        for key, counts in rounds.read_rounds(run.stored).histograms.items()
    }


def _other_models(runs: Sequence[RunTable], served: Sequence[vllm.VllmBenchResult]) -> Iterator[str]:
    for run in runs:
        target = paper.model_of(run.info.identity)
        for bench in served:
            if last_part(bench.model) != last_part(target):
                yield f"the target of {run.name} is {target}, but {bench.name} measured {bench.model}"
