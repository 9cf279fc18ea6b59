"""Finished runs: the commands runs, index, open, compare, import, baseline and check."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from dflash_bench.cli import options
from dflash_bench.cli.command import Command
from dflash_bench.core.errors import UserError
from dflash_bench.core.files import io_error, json_text, require_output, write_output
from dflash_bench.core.labels import visible
from dflash_bench.core.terminal import note, say, show, terminal_width, wide, with_bar

app = typer.Typer()


def found(names: Sequence[Path] | None) -> list[Path]:
    """Return the folders of the named runs; without names the newest run, with a note."""
    from dflash_bench.results import store

    folders = store.find_all(names or [])
    if not names:
        note(f"the newest run: {folders[0]}")
    return folders


def kind_of(out: Path | None, kinds: Mapping[str, str]) -> str | None:
    """Return the kind of file by its ending; None if nothing is written.

    Raises UserError for an ending that no kind has.
    """
    if out is None:
        return None
    if out.suffix not in kinds:
        raise UserError(f"cannot tell what to write to {out}; let its name end in {', '.join(kinds)}")
    return kinds[out.suffix]


def give(text: str, out: Path | None) -> None:
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
def merge(
    shards: Annotated[list[Path], Argument(metavar="SHARD...", help="Folders of all shards, in any order.")],
    out: Annotated[Path, Option("-o", "--out", metavar="DIR", help="New folder for the merged run.")],
) -> None:
    """Merge the shards of a run, measured with 'run --shard I/N'.

    The result is the run that a single machine would have written; each answer names its shard. Shards of different
    prompts, models or package versions are refused.
    """
    from dflash_bench import report
    from dflash_bench.results import merge

    merge.merge(shards, out)
    document = report.read_document(out)
    say(f"{report.named(document, terminal_width())}\n")
    show(report.screen(document, terminal_width()))
    say(f"saved in {out}")


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

    kind = kind_of(out, {".html": "page", ".txt": "text", ".json": "json"})
    if out is not None and as_json:
        raise UserError("--json has no effect with --out FILE, whose ending says what to write")
    width = wide() if out is None else None
    compared = comparison(found(runs), by=by, against=against, compat=compat, allow=tuple(allow or ()), width=width)
    if out is not None and kind == "page":
        note(f"wrote {compared.report(out)}")
        return
    is_json = as_json or kind == "json"
    give(f"{json_text(compared.data)}\n" if is_json else str(compared), out)


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
    every: Annotated[
        bool, Option("--all", help="List every check, failures first, in place of a line per method.")
    ] = False,
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
