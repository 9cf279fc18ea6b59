"""A static site of runs: a table with a line for each method of each run, which links to the run's page.

Like a run's page, it works from a folder, loads nothing from elsewhere, and runs no script but its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_bench.analysis.metrics import BASELINE
from dflash_bench.core import labels
from dflash_bench.core.errors import UserError
from dflash_bench.core.files import write_output
from dflash_bench.core.labels import wrapped
from dflash_bench.report import rechecks, render
from dflash_bench.report.document import Document, MethodLine, over_all, read_document
from dflash_bench.report.html import write_page
from dflash_bench.report.screen import exact_text, speed_text
from dflash_bench.report.tables import ReportTable, Section, number, with_interval
from dflash_bench.report.words import facts
from dflash_bench.results import recheck, store
from dflash_bench.results.recheck import Recheck
from dflash_bench.results.run_info import FILE, read_info

FILTERS = ("model", "draft", "suites", "method", "machine", "engine", "checked")
"""Columns with a filter by value."""


@dataclass(frozen=True, slots=True)
class SiteLine:
    """A method of a run under settings, over all suites, as text; `page` is a file beside the table."""

    page: str
    started: str
    model: str
    draft: str
    suites: str
    method: str
    speedup: str
    al: str
    tps: str
    exact: str
    machine: str
    engine: str
    checked: str
    """Whether another machine recomputed a part of the run."""


def runs_below(folder: Path) -> list[Path]:
    """Return the folders of runs in a folder and below it. Raises UserError if there are none."""
    found = sorted(path.parent for path in folder.rglob(FILE))
    if not found:
        raise UserError(f"there is no run in {folder} or below it")
    return found


def write_site(
    folders: Iterable[Path], out: Path, tell: Callable[[str], object], allow: Sequence[str] = ()
) -> list[SiteLine]:
    """Write `index.html` and a page for each run into a folder, and return the lines of the table.

    A run that cannot be read is reported and left out. Raises UserError if none is left.
    """
    lines: list[SiteLine] = []
    records: dict[str, Recheck] = {}
    taken: set[str] = set()
    for folder in folders:
        try:
            document, record = read_document(folder, allow), recheck.read(folder)
        except UserError as error:
            tell(f"note: left out: {error}")
            continue
        page = _free(f"{folder.name}.html", taken)
        write_page(document, out / page)
        lines += [_line(document, line, page, record) for line in document.lines]
        if record is not None:
            records[page] = record
    if not lines:
        raise UserError("none of these runs has a method to show")
    lines.sort(key=lambda line: line.started, reverse=True)
    write_output(out / "index.html", _index(lines, records))
    return lines


def _free(name: str, taken: set[str]) -> str:
    """Return the name, or another if it is taken; no page may take the table's place."""
    stem, number_ = name.removesuffix(".html"), 1
    while name in taken or name == "index.html":
        number_ += 1
        name = f"{stem}-{number_}.html"
    taken.add(name)
    return name


def _line(document: Document, line: MethodLine, page: str, record: Recheck | None) -> SiteLine:
    info = document.results.info
    about = facts(info)
    method = info.identity.methods.get(line.method)
    draft = info.identity.drafts.get(method.draft or "") if method is not None else None
    speedup, al = over_all(document.cells, line)
    suites = labels.suite_list(dict.fromkeys((cell.suite, cell.source) for cell in document.cells if cell.num_prompts))
    return SiteLine(
        page,
        str(info.started or "")[:16].replace("T", " "),
        Path(str(info.identity.model)).name,
        Path(draft.name).name if draft is not None and draft.name else "none",
        suites,
        line.name,
        with_interval(speedup),
        number(al),
        speed_text(line.cells_of(document.cells)),
        "all failed" if document.why_empty else exact_text(document, line),
        about.get("machine", ""),
        str(info.identity.network or info.identity.engine or ""),
        rechecks.short(record),
    )


def _index(lines: Sequence[SiteLine], records: Mapping[str, Recheck]) -> str:
    embedded = any(labels.EMBEDDED in line.suites for line in lines)
    values = {
        "title": "dflash-bench: runs",
        "lines": lines,
        "filters": {name: sorted({getattr(line, name) for line in lines}) for name in FILTERS},
        "records": records,
        "verdict": rechecks.verdict,
        "note": labels.EMBEDDED_NOTE if embedded else "",
    }
    return render.scripted("site.html", ("site.js",), values)


# The list of runs in the default folder, read from their `run.json` alone.


LONGEST = 30
"""Characters of a list of suites in the table."""


@dataclass(frozen=True, slots=True)
class RunListing:
    folder: Path
    suites: str = ""
    methods: str = ""
    state: str = ""
    error: str = ""
    """Why it cannot be read; empty if it can."""

    @property
    def short_suites(self) -> str:
        """Return the suites for a table, or their number if they are many."""
        names, _, source = self.suites.partition(" (")
        is_long = len(self.suites) > LONGEST and source.count(" (") == 0
        return f"{names.count(',') + 1} suites{f' ({source}' if source else ''}" if is_long else self.suites


def listings() -> list[RunListing]:
    """Return the runs of this folder, the newest first."""
    return [_listing(run) for run in store.newest_first(store.RUNS)]


def _listing(folder: Path) -> RunListing:
    try:
        info = read_info(folder)
    except UserError as error:
        return RunListing(folder, error=error.what)
    suites = labels.suite_list((name, suite.source) for name, suite in info.identity.suites.items())
    methods = ", ".join(name for name in info.identity.methods if name != BASELINE)
    return RunListing(folder, suites, methods, info.state or "")


def runs_text(several: Sequence[RunListing], width: int | None = None) -> str:
    """Return a line for each run, with its name for commands, in a terminal of this width."""
    if not several:
        return wrapped(f"there is no run in {store.RUNS}; start one with 'dflash-bench run --suite gsm8k'", width)
    rows = [
        (f"@{number}", one.folder.name, one.short_suites, one.methods, one.state)
        if not one.error
        else (f"@{number}", one.folder.name, "cannot be read", "", "")
        for number, one in enumerate(several, start=1)
    ]
    heads = ("", f"run in {store.RUNS}", "suites", "methods", "state")
    return render.terminal(Section("runs", table=ReportTable.of(heads, rows, left=5, spare=["state"])), width)


def as_json(several: Sequence[RunListing]) -> list[dict[str, Any]]:
    return [
        {
            "run": f"@{number}",
            "folder": str(one.folder),
            "suites": one.suites,
            "methods": one.methods,
            "state": one.state,
            "error": one.error,
        }
        for number, one in enumerate(several, start=1)
    ]
