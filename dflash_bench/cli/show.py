"""The commands report, replay, card, movie and plot: what a finished run shows."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from dflash_bench.cli import options
from dflash_bench.cli.command import Command
from dflash_bench.cli.results import found, found_one, give, kind_of
from dflash_bench.core import option
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.files import json_lines, json_text, write_output, write_text
from dflash_bench.core.labels import WIDTH
from dflash_bench.core.terminal import note, say, wide, with_bar

if TYPE_CHECKING:
    from dflash_bench.report.document import Document

app = typer.Typer()
ENDINGS = {".html": "page", ".md": "markdown", ".json": "json", ".csv": "csv", ".tex": "latex", ".txt": "table"}
"""Formats of `report`, by the ending of the file's name."""
LAYOUTS = ("rows", "paper")
"""Layouts of the LaTeX table."""


@app.command(cls=Command)
def report(
    run: options.Run = None,
    kind: Annotated[
        str | None, Option("--format", metavar="F", help="table (the default), markdown, json, csv or latex.")
    ] = None,
    out: Annotated[
        Path | None,
        Option(
            "-o",
            "--out",
            metavar="FILE",
            help="Write to FILE: a page with tables, plots and answers (.html), or .md, .json, .csv, .tex or .txt.",
        ),
    ] = None,
    answers: Annotated[
        int | None, Option(metavar="N", min=1, max=10**7, help="Of a page: show at most N answers. Default: 10,000.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        Option(
            metavar="PATH",
            help="Of a page: the target's tokenizer.json or its folder, to colour tokens. Default: found "
            "automatically where possible.",
        ),
    ] = None,
    by: Annotated[
        str | None,
        Option(
            metavar="WHAT",
            help="Split the table by category, turn, prompt-length, output-position, context-position, part, "
            "text-kind, or a column of the prompts, such as language.",
        ),
    ] = None,
    full: Annotated[
        bool, Option("--full", help="Also rounds, the width curve, memory, and the formulas of all columns.")
    ] = False,
    layout: Annotated[
        str | None,
        Option(
            metavar="L",
            help="Of LaTeX: rows (the default), or paper: methods by suites, the best in bold.",
        ),
    ] = None,
    allow: options.AllowParts = None,
) -> None:
    """Show a finished run.

    As a table, Markdown, JSON, CSV or LaTeX, or as an HTML page.
    """
    from dflash_bench import api
    from dflash_bench.report import FORMATS, printed, table_by, text

    if kind is not None and kind not in FORMATS:
        raise unknown("format", kind, list(FORMATS))
    if (written := kind_of(out, ENDINGS)) is not None:
        if kind not in (None, written):
            raise UserError(f"--format {kind} is not what {out} ends in; leave it out, or call the file otherwise")
        kind = written
    page = out if kind == "page" else None
    if page is None and (answers is not None or tokenizer is not None):
        raise UserError(f"--{'answers' if answers is not None else 'tokenizer'} has no effect without --out FILE.html")
    if by is not None and kind not in (None, "table"):
        raise UserError("--by splits the table; leave out --out and --format, or use compare --by --json")
    if full and (by is not None or kind not in (None, "table")):
        raise UserError("--full adds to the table for a terminal; every other form is complete without it")
    if layout is not None and kind != "latex":
        raise UserError("--layout has no effect without --format latex, or --out FILE.tex")
    if layout not in (None, *LAYOUTS):
        raise unknown("layout", str(layout), list(LAYOUTS))
    finished = api.load(found_one(run), allow or ())
    document = finished.document
    width = (wide() if out is None else None) or WIDTH
    if by is not None:
        give(table_by(document, by, width), out)
        return
    if page is not None:
        finished.report(page, answers, tokenizer)
        note(f"wrote {page}")
    elif layout == "paper":
        give(printed.latex(document), out)
    elif kind not in (None, "table"):
        give(FORMATS[str(kind)](document), out)
    else:
        give(text(document, width, full), out)


def _numbers(name: str, help: str) -> Any:  # noqa: A002
    return Option(f"--{name}", metavar="N[,N...]", help=help)


@app.command(cls=Command)
def replay(
    run: options.Run = None,
    method: Annotated[str | None, Option(metavar="NAME", help="A method of the run. Default: all.")] = None,
    n: Annotated[str | None, _numbers("n", "Verify the first N drafted tokens of each round.")] = None,
    block: Annotated[str | None, _numbers("block", "Draft blocks of this size; always an estimate.")] = None,
    cut: Annotated[
        str | None, Option(metavar="P[,P...]", help="Verify up to the first token that the draft holds less likely.")
    ] = None,
    nodes: Annotated[str | None, _numbers("nodes", "Verify the N best nodes of ddtree's trees.")] = None,
    controller: Annotated[
        list[str] | None,
        Option(
            metavar="NAME|FILE.py",
            help="Let a controller choose in each round: ours, average, fixed:N, or a file with a class Controller; "
            "may be repeated. Its code runs with your rights.",
        ),
    ] = None,
    concurrency: Annotated[str, _numbers("concurrency", "Answers decoded at the same time; an estimate.")] = "1",
    allow: options.AllowParts = None,
    as_json: options.AsJson = False,
) -> None:
    """Replay a run's rounds with other draft lengths, cuts, trees, controllers or loads, without a model.

    For runs recorded with --record every-position, acceptance is exact; for others it is an estimate, and marked so.
    """
    from dflash_bench import api
    from dflash_bench.replay import text as shown

    def read(flag: str, text: str | None, *, whole: bool = True) -> Any:
        return () if text is None else option.numbers(text, flag, whole=whole)

    replayed = api.load(found_one(run), allow or ()).replay(
        method,
        n=read("--n", n),
        block=read("--block", block),
        cut=read("--cut", cut, whole=False),
        nodes=read("--nodes", nodes),
        controller=controller or (),
        concurrency=read("--concurrency", concurrency),
    )
    say(json_text(shown.as_json(replayed)) if as_json else shown.text(replayed, wide()).rstrip("\n"))


@app.command(cls=Command)
def card(
    run: options.Run = None,
    hub: Annotated[
        Path | None,
        Option(
            "-o",
            "--out",
            "--hub",
            metavar="DIR",
            help="Write scores on public datasets as .eval_results, for a model's card on the hub.",
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        Option(
            "--profile",
            metavar="FILE",
            help="Write how often each drafted token is accepted, by category and temperature, as a "
            "speculation_profile.json to put beside the draft.",
        ),
    ] = None,
    curve: Annotated[
        Path | None,
        Option(
            "--curve",
            metavar="FILE",
            help="Write the acceptance length for 1 to 8 drafted tokens, as YAML, to impose it on a server.",
        ),
    ] = None,
    method: Annotated[
        str | None,
        Option(metavar="NAME", help="With --profile or --curve: the method, if the run has several that draft."),
    ] = None,
    allow: options.AllowParts = None,
) -> None:
    """Print a run's result in eleven lines, to share."""
    from dflash_bench import api, report
    from dflash_bench.report import hub_card

    if method is not None and profile is None and curve is None:
        raise UserError("--method has no effect without --profile FILE or --curve FILE")
    document = api.load(found_one(run), allow or ()).document
    if profile is not None:
        _write_profile(document, method, profile)
    if curve is not None:
        _write_curve(document, method, curve)
    if hub is None:
        if profile is None and curve is None:
            say(report.card(document, wide()), end="")
        return
    written = hub_card.write_hub_card(document, hub)
    if written is None:
        raise UserError("no scores were written: none of the prompts are scored ones of a public dataset")
    say(f"wrote {written}")


def _write_profile(document: Document, method: str | None, path: Path) -> None:
    from dflash_bench.analysis import speculation

    made = speculation.as_json(document.results, _one_method(document, method, "a profile"))
    write_output(path, f"{json_lines(made)}\n")
    note(f"wrote {path}: {made['num_rounds']:,} rounds of {made['num_prompts']:,} prompts")


def _write_curve(document: Document, method: str | None, path: Path) -> None:
    from dflash_bench.replay import curve

    one = _one_method(document, method, "a curve")
    curves = curve.curves_of(document.results, one)
    write_output(path, curve.text(curves, document.results, one))
    note(f"wrote {path}: 1 to {max(curves[0].lengths)} drafted tokens, {curves[0].num_prompts:,} prompts")


def _one_method(document: Document, method: str | None, what: str) -> str:
    """Return the given method, or the run's only one that drafts. Raises UserError if there are several."""
    if method is None and len(document.methods) != 1:
        listed = ", ".join(document.methods) or "none"
        raise UserError(f"{what} is of one method; give --method NAME, one that drafts in this run: {listed}")
    return method or document.methods[0]


@app.command(cls=Command)
def movie(
    run: options.Run = None,
    out: Annotated[
        Path | None, Option("-o", "--out", metavar="FILE", help="The SVG to write. Default: RUN/movie.svg.")
    ] = None,
    method: Annotated[str | None, Option(metavar="NAME", help="A method of the run. Default: the fastest.")] = None,
    answer: Annotated[
        str | None,
        Option(
            metavar="SUITE/PROMPT",
            help="Which answer to show. Default: the one whose speed-up is nearest to that of the run.",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        Option(metavar="PATH", help="The target's tokenizer.json or its folder. Default: found where possible."),
    ] = None,
    allow: options.AllowParts = None,
) -> None:
    """Animate an answer as an SVG.

    Plain and drafted, side by side, typed at their measured times, in a loop: for a README or a talk.
    """
    from dflash_bench import api
    from dflash_bench.report.movie import movie as filmed

    folder = found_one(run)
    svg = filmed(api.load(folder, allow or ()).document, method, answer, tokenizer)
    path = out or folder / "movie.svg"
    write_text(path, svg)
    say(f"wrote {path}")


@app.command(cls=Command)
def plot(
    runs: Annotated[
        list[Path] | None,
        Argument(
            metavar="[RUN]...", help=f"Folder of a finished run; several are plotted as a trend. {options.NEWEST}"
        ),
    ] = None,
    out: Annotated[
        Path | None, Option("-o", "--out", metavar="DIR", help="Folder for the plots. Default: RUN/plots.")
    ] = None,
    kind: Annotated[str, Option("--format", metavar="F", help="File format: png, svg, pdf or pgf.")] = "png",
    paper: Annotated[
        str | None,
        Option(
            metavar="WIDTH",
            help="For a paper, as wide as its column (3.3 inches) or page (6.9): type of 8 points, no title, words in "
            "place of ids.",
        ),
    ] = None,
    allow: options.Allow = None,
) -> None:
    """Draw the plots of a run, or a trend over runs.

    Runs in a trend must have the same settings, except for differences that --allow accepts.
    """
    from dflash_bench import api, report
    from dflash_bench.report import plots

    plots.check_kind(kind, paper)
    folders = found(runs)
    if len(folders) > 1:
        if paper is not None:
            raise UserError("--paper has no effect on a trend over several runs")
        _plot_trend(folders, out, kind, allow or [])
        return
    material = plots.Material(report.require_answers(api.load(folders[0], allow or ()).document))
    for name in with_bar(plots.names_for(material), "drawing plots"):
        try:
            say(plots.write_plot(material, name, out or folders[0] / "plots", kind, paper))
        except plots.NothingToPlotError as error:
            note(f"no plot '{name}': {error}")


def _plot_trend(runs: list[Path], out: Path | None, kind: str, allow: list[str]) -> None:
    from dflash_bench import api, report
    from dflash_bench.analysis.comparable import check_allowed, require_comparable
    from dflash_bench.report import plots

    if out is None:
        raise UserError("a trend over several runs belongs to no single run's folder; give -o DIR")
    check_allowed(allow)
    of_parts = [name for name in allow if name in report.ALLOWED]
    read = [
        plots.Material(report.require_answers(api.load(folder, of_parts).document))
        for folder in with_bar(runs, "reading runs")
    ]
    pairs = combinations([run.document.results for run in read], 2)
    unlike = list(dict.fromkeys(note for pair in pairs for note in require_comparable(*pair, allow)))
    for difference in unlike:
        note(f"note: allowed although it differs: {difference}")
    say(plots.write_trend(read, out, kind, unlike))
