"""Finished runs: the commands runs, index, open, compare, baseline, check, report, replay, card, movie and plot."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from dflash_bench.cli import options
from dflash_bench.cli.command import Command
from dflash_bench.core import option
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.files import io_error, json_lines, json_text, require_output, write_output, write_text
from dflash_bench.core.labels import WIDTH, visible
from dflash_bench.core.terminal import note, say, wide, with_bar

if TYPE_CHECKING:
    from dflash_bench.report.document import Document

app = typer.Typer()
ENDINGS = {".html": "page", ".md": "markdown", ".json": "json", ".csv": "csv", ".tex": "latex", ".txt": "table"}
"""Formats of `report`, by the ending of the file's name."""
LAYOUTS = ("rows", "paper")
"""Layouts of the LaTeX table."""


def found(names: Sequence[Path] | None) -> list[Path]:
    """Return the folders of the named runs; without names the newest run, with a note."""
    from dflash_bench.results import store

    folders = store.find_all(names or [])
    if not names:
        note(f"the newest run: {folders[0]}")
    return folders


def _kind_of(out: Path | None, kinds: Mapping[str, str]) -> str | None:
    """Return the kind of file by its ending; None if nothing is written.

    Raises UserError for an ending that no kind has.
    """
    if out is None:
        return None
    if out.suffix not in kinds:
        raise UserError(f"cannot tell what to write to {out}; let its name end in {', '.join(kinds)}")
    return kinds[out.suffix]


def _give(text: str, out: Path | None) -> None:
    """Print text, or write it to a file that the user named."""
    if out is None:
        say(text, end="")
        return
    write_output(out, visible(text, keep="\n\t"))
    note(f"wrote {out}")


def found_one(name: Path | None) -> Path:
    return found(None if name is None else [name])[0]


@app.command(cls=Command)
def runs(as_json: options.AsJson = False) -> None:
    """List the runs in results/runs, the newest first.

    Commands on finished runs take the newest by default, and others as @2, @3 and so on.
    """
    from dflash_bench.report.site import as_json as listed_json
    from dflash_bench.report.site import listings, runs_text

    several = listings()
    say(json_text(listed_json(several)) if as_json else runs_text(several, wide()))


@app.command(cls=Command)
def index(
    folder: Annotated[
        Path | None, Argument(metavar="[FOLDER]", help="A folder with runs in it or below it. Default: results/runs.")
    ] = None,
    out: Annotated[Path, Option("-o", "--out", metavar="DIR", help="Folder for the site.")] = Path("site"),
    allow: options.AllowParts = None,
) -> None:
    """Make a static site of several runs.

    A table that can be filtered by model, suites, method, machine and engine, and the page of each run.
    """
    from dflash_bench.report import site
    from dflash_bench.results.store import RUNS

    runs = site.runs_below(folder or RUNS)
    lines = site.write_site(with_bar(runs, "writing pages"), out, note, allow or ())
    say(f"wrote {out / 'index.html'}: {len(lines)} lines of {len({line.page for line in lines})} runs")


@app.command("open", cls=Command)
def open_page(run: options.Run = None, allow: options.AllowParts = None) -> None:
    """Open the page of a run in the browser.

    Writes RUN/report.html first, unless it is newer than the run.
    """
    import webbrowser

    from dflash_bench import api
    from dflash_bench.results import store

    folder = found_one(run)
    page = folder / "report.html"
    if allow or store.is_older(page, folder):
        api.load(folder, allow or ()).report(page)
    say(page)
    # Without a browser, or without a screen, the path is the answer.
    webbrowser.open(page.absolute().as_uri())


@app.command(cls=Command)
def compare(
    runs: Annotated[
        list[Path] | None,
        Argument(
            metavar="[RUN]...",
            help=f"Folders of runs; also result files of other benchmarks, as 'import' reads them. {options.NEWEST}",
        ),
    ] = None,
    by: Annotated[
        str,
        Option(
            metavar="WHAT",
            help="Split the figures by suite, category, turn, prompt-length, output-position, context-position "
            "(where in the context a round begins), part (thinking or answer), text-kind (prose, code, json, tool-call "
            "or thinking), or a column of the prompts, such as language.",
        ),
    ] = "suite",
    against: Annotated[
        str | None,
        Option(
            metavar="published[:TARGET]", help="Show published figures beside those of the run, by the same formulas."
        ),
    ] = None,
    compat: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Show what the official harness would have printed for the same answers: zlab (that of April 2026) or "
            "zlab-2026-08.",
        ),
    ] = None,
    out: Annotated[
        Path | None, Option("-o", "--out", metavar="FILE", help="Write a page (.html), text (.txt) or .json instead.")
    ] = None,
    allow: options.Allow = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare the methods of a run, or several runs.

    Always on the same prompts. With several runs, the first is "before" and the others are "after".
    """
    from dflash_bench.api.judging import comparison

    kind = _kind_of(out, {".html": "page", ".txt": "text", ".json": "json"})
    if out is not None and as_json:
        raise UserError("--json has no effect with --out FILE, whose ending says what to write")
    width = wide() if out is None else None
    compared = comparison(found(runs), by=by, against=against, compat=compat, allow=tuple(allow or ()), width=width)
    if out is not None and kind == "page":
        note(f"wrote {compared.report(out)}")
        return
    is_json = as_json or kind == "json"
    _give(f"{json_text(compared.data)}\n" if is_json else str(compared), out)


@app.command("import", cls=Command)
def import_results(
    paths: Annotated[list[Path], Argument(metavar="FILE...", help="Result files of other benchmarks.")],
    as_json: options.AsJson = False,
) -> None:
    """Show result files of other benchmarks in one table.

    Of AIPerf, specdec_bench, SpecForge, SGLang's bench_serving and vllm bench serve, each figure under the name of its
    own formula. 'compare RUN FILE' sets them beside a run.
    """
    from dataclasses import asdict

    from dflash_bench.analysis.peers import benches
    from dflash_bench.report.compare import imported

    found = [one for path in paths for one in benches.read_results(path)]
    say(json_text([asdict(one) for one in found]) if as_json else imported(found, wide()).rstrip("\n"))


@app.command(cls=Command)
def baseline(
    runs: options.Runs,
    out: Annotated[Path, Option("-o", "--out", metavar="FILE", help="The JSON file to write and commit.")],
    limits: options.Limits = None,
    time_free: Annotated[
        bool, Option("--time-free", help="Leave timings out, so that any machine can check, however busy it is.")
    ] = False,
) -> None:
    """Save the figures of runs, for 'check'.

    Give several runs of the same command, so that the file also records how much runs vary. Baselines of other machines
    stay in the file, if they are of the same command.
    """
    from dflash_bench.analysis import scores
    from dflash_bench.analysis.gate import baselines

    folders = found(runs)
    baselines.require_distinct(folders)
    expectations = baselines.read_limits(limits) if limits else {}
    read = [scores.read_run(run) for run in folders]
    others = baselines.write(read, out, with_timings=not time_free, limits=expectations)
    say(f"wrote {out}{others}")


@app.command(cls=Command)
def check(
    runs: options.Runs,
    baseline: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="A file written by 'baseline'. Without it, only the minimum that every run must reach is checked.",
        ),
    ] = None,
    limits: options.Limits = None,
    allow: options.Allow = None,
    rescore: Annotated[
        bool | None,
        Option(
            "--rescore/--no-rescore",
            help="Score stored answers again, and fail if a score differs. Default: all except model-written code, "
            "which --rescore runs again in the sandbox.",
        ),
    ] = None,
    require_speed: Annotated[
        bool,
        Option("--require-speed", help="Fail if speed cannot be held to the baseline, as on another processor."),
    ] = False,
    junit: Annotated[Path | None, Option(metavar="FILE", help="Also write JUnit XML to FILE.")] = None,
    summary: Annotated[
        Path | None, Option(metavar="FILE", help="Also append Markdown to FILE, such as $GITHUB_STEP_SUMMARY.")
    ] = None,
    benchmark: Annotated[
        Path | None,
        Option(metavar="FILE", help="Also write JSON for github-action-benchmark (customBiggerIsBetter) to FILE."),
    ] = None,
    every: Annotated[bool, Option("--all", help="List the checks that passed, too.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Fail on regressions against a baseline.

    Exit status 1 also for drafts that are never accepted, wrong answers, and methods slower than plain decoding.

    Of the timings, only speed-ups are judged, and absolute speed if --limits names tps.decode. A single run does not
    show how much runs vary, so an allowance is made and small losses pass; three runs against a baseline of three
    detect a loss of 10 %.

    Of several baselines in the file, that of this processor is used. Speed is held only to one of the same processor
    and versions of torch, transformers and dflash-bench; acceptance, exactness and scores always are.

    Stored texts are compared with the decoded tokens if the target's tokenizer is on this disk.
    """
    from dflash_bench import api
    from dflash_bench.report import gate as formats

    result = api.check(found(runs), baseline, limits, allow or (), rescore, require_speed).found
    _save(junit, "w", lambda: formats.junit(result.outcome, "dflash-bench"))
    _save(summary, "a", lambda: formats.summary(result.outcome))
    _save(benchmark, "w", lambda: formats.benchmark(result.cells))
    say(json_text(formats.as_json(result.outcome)) if as_json else formats.text(result.outcome, every, wide()))
    if result.outcome.failures:
        sys.exit(1)


def _save(path: Path | None, mode: str, text_of: Callable[[], str]) -> None:
    if path is None:
        return
    require_output(path)
    try:
        with open(path, mode, encoding="utf-8") as file:
            file.write(visible(text_of(), keep="\n\t"))
    except OSError as error:
        raise io_error("write", path, error) from error


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
    if (written := _kind_of(out, ENDINGS)) is not None:
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
        _give(table_by(document, by, width), out)
        return
    if page is not None:
        finished.report(page, answers, tokenizer)
        note(f"wrote {page}")
    elif layout == "paper":
        _give(printed.latex(document), out)
    elif kind not in (None, "table"):
        _give(FORMATS[str(kind)](document), out)
    else:
        _give(text(document, width, full), out)


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
    method: Annotated[
        str | None, Option(metavar="NAME", help="With --profile: the method, if the run has several that draft.")
    ] = None,
    allow: options.AllowParts = None,
) -> None:
    """Print a run's result in eleven lines, to share."""
    from dflash_bench import api, report
    from dflash_bench.report import hub_card

    if method is not None and profile is None:
        raise UserError("--method has no effect without --profile FILE")
    document = api.load(found_one(run), allow or ()).document
    if profile is not None:
        _write_profile(document, method, profile)
        if hub is None:
            return
    if hub is None:
        say(report.card(document, wide()), end="")
        return
    written = hub_card.write_hub_card(document, hub)
    if written is None:
        raise UserError("no scores were written: none of the prompts are scored ones of a public dataset")
    say(f"wrote {written}")


def _write_profile(document: Document, method: str | None, path: Path) -> None:
    from dflash_bench.analysis import speculation

    if method is None and len(document.methods) != 1:
        listed = ", ".join(document.methods) or "none"
        raise UserError(f"a profile is of one method; give --method NAME, one that drafts in this run: {listed}")
    made = speculation.as_json(document.results, method or document.methods[0])
    write_output(path, f"{json_lines(made)}\n")
    note(f"wrote {path}: {made['num_rounds']:,} rounds of {made['num_prompts']:,} prompts")


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
