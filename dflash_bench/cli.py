"""The command line: options become dataclasses, the library works, text comes out. Only this file prints and exits."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from dflash_bench import __version__, options
from dflash_bench.errors import UserError, unknown

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Rich takes as long to load as all the rest of --help
    help="Measure speculative decoding honestly: acceptance, speed and token-for-token exactness.",
)


def main() -> None:
    """Entry point: a UserError is one line on stderr and exit status 2; anything else is a bug and a traceback."""
    try:
        app()
    except UserError as error:
        print(f"dflash-bench: {' '.join(str(error).splitlines())}", file=sys.stderr)
        sys.exit(2)


def _version(shown: bool) -> None:
    if shown:
        print(f"dflash-bench {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    pass


@app.command(cls=options.GroupedHelp)
def run(
    suite: options.Suites = None,
    prompts: options.Prompts = None,
    data: options.Data = None,
    limit: options.Limit = None,
    thinking: options.Thinking = None,
    method: options.Methods = None,
    model: options.Model = None,
    target: options.Target = None,
    draft: options.Drafts = None,
    trust_remote_code: options.TrustRemoteCode = False,
    max_new_tokens: options.MaxNewTokens = None,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    block_size: options.BlockSize = None,
    repeats: options.Repeats = 1,
    device: options.Device = None,
    device_map: options.DeviceMap = None,
    dtype: options.Dtype = None,
    attention: options.Attention = None,
    threads: options.Threads = None,
    out: options.Out = None,
    resume: options.Resume = False,
    as_json: options.AsJson = False,
) -> None:
    """Run suites under methods, side by side with plain decoding, and save every generation."""
    from dflash_bench import frame, metrics, presets, report, session
    from dflash_bench.findings import findings

    request = session.Request(
        suites=tuple(suite or ()), methods=tuple(method or ()), model=model, target=target, drafts=tuple(draft or ()),
        data=data, prompts=prompts, limit=limit, seed=seed, max_new_tokens=max_new_tokens, temperature=temperature,
        block_size=block_size, repeats=repeats, threads=threads, device=device, device_map=device_map, dtype=dtype,
        attention=attention, thinking=thinking, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    if resume and out is None:
        raise UserError("--resume needs --out FOLDER, the run to continue")
    folder = (
        out
        or Path("results/runs") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{presets.name(request.name).rpartition('/')[2]}"
    )
    try:
        session.perform(request, folder, resume)
    except KeyboardInterrupt:
        print(_stopped(folder), file=sys.stderr)
        sys.exit(130)
    results = frame.read(folder)
    rows, cells = results.rows, metrics.summarise(results.rows)
    notes = findings(rows, cells, results.info["identity"])
    if as_json:
        print(json.dumps(report.as_json(folder, cells, notes), indent=1, allow_nan=False))
    else:
        print(report.text(cells, notes))
        print(f"saved in {folder}")
    if (rows["exactness"] == "mismatch").any():
        sys.exit(1)


def _stopped(folder: Path) -> str:
    """Ctrl-C is no error: it says what is left, and the very command that goes on."""
    if not (folder / "run.json").exists():
        return "stopped; nothing was written yet"
    words = sys.argv[1:]
    if not any(word == "--out" or word.startswith("--out=") for word in words):
        words = [*words, "--out", str(folder)]
    if "--resume" not in words:
        words = [*words, "--resume"]
    return f"stopped; what was finished is saved. To continue: {shlex.join(['dflash-bench', *words])}"


@app.command()
def suites() -> None:
    """List the suites: where their rows come from, how many are shipped, how they are scored."""
    from dflash_bench import report
    from dflash_bench.suites import known_groups, table

    print(report.suites_text(table(), known_groups()))


@app.command()
def models(as_json: options.AsJson = False) -> None:
    """List the models: target, drafts, how they were trained, what is on this disk, what this machine can hold."""
    from dflash_bench import catalogue

    listed, machine = catalogue.listing(), catalogue.machine()
    if as_json:
        print(json.dumps(catalogue.as_json(listed, machine), indent=1, allow_nan=False))
    else:
        print(catalogue.text(listed, machine))


@app.command()
def inspect(
    checkpoint: Annotated[str, Argument(metavar="CHECKPOINT", help="A draft: a folder or a hub id.")],
    target: Annotated[
        str | None, Option(metavar="T", help="See whether it fits: nano, a preset, or a folder with a model.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Say what a draft is, in which format, and what does not fit (exit status 1). Reads headers, not weights."""
    from dflash_bench.models import inspection

    seen = inspection.inspect(checkpoint, target)
    print(json.dumps(inspection.as_json(seen), indent=1) if as_json else inspection.text(seen))
    if seen.problems:
        sys.exit(1)


@app.command()
def convert(
    source: Annotated[str, Argument(metavar="SRC", help="A draft: a folder or a hub id.")],
    destination: Annotated[Path, Argument(metavar="DST", help="A folder that does not exist yet.")],
    to: Annotated[str, Option(metavar="FORMAT", help="zlab, speculators, deepspec or safeailab.")],
    target: Annotated[
        str | None, Option(metavar="T", help="The draft's target, where a format carries its embedding and head.")
    ] = None,
) -> None:
    """Write a draft in another publisher's format, bit for bit; what the format cannot hold is refused by name."""
    from dflash_bench.models import conversion

    for note in conversion.convert(source, destination, to, target):
        print(note)
    print(f"saved in {destination}")


@app.command()
def compare(
    runs: Annotated[
        list[Path], Argument(metavar="RUN...", help="Folders of runs; or result JSON of vllm bench serve.")
    ],
    by: Annotated[
        str, Option(metavar="WHAT", help="suite, category, turn, prompt-length or output-position.")
    ] = "suite",
    against: Annotated[
        str | None, Option(metavar="paper[:TARGET]", help="Set published figures beside the run, formula by formula.")
    ] = None,
    compat: Annotated[
        str | None, Option(metavar="zlab", help="What the official harness would have printed for the same rows.")
    ] = None,
    allow: options.Allow = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare methods within a run, or the same cells before and after, on the same prompts."""
    from dflash_bench.comparison import compared

    found = compared(runs, by=by, against=against, compat=compat, allow=tuple(allow or ()))
    print(json.dumps(found.json, indent=1, allow_nan=False) if as_json else found.text, end="\n" if as_json else "")


@app.command()
def baseline(
    run: options.Run,
    output: Annotated[Path, Option("--output", "-o", metavar="FILE", help="The JSON file to write, and to commit.")],
    limits: options.Limits = None,
    time_free: Annotated[
        bool, Option("--time-free", help="Leave timings out: then any machine, however busy, can check.")
    ] = False,
) -> None:
    """Write what a run reached as the expectation for later ones."""
    from dflash_bench import baselines, frame

    found = baselines.read_limits(limits) if limits else {}
    baselines.write(frame.read(run), output, with_timings=not time_free, limits=found)
    print(f"wrote {output}")


@app.command()
def check(
    run: options.Run,
    baseline: Annotated[
        Path | None, Option(metavar="FILE", help="What to hold it against; without one, only what any run must reach.")
    ] = None,
    limits: options.Limits = None,
    allow: options.Allow = None,
    junit: Annotated[Path | None, Option(metavar="FILE", help="Write JUnit XML as well.")] = None,
    summary: Annotated[
        Path | None, Option(metavar="FILE", help="Append Markdown to FILE as well, such as $GITHUB_STEP_SUMMARY.")
    ] = None,
    benchmark: Annotated[
        Path | None, Option(metavar="FILE", help="Write customBiggerIsBetter JSON for github-action-benchmark as well.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Exit 1 if a run falls short of its baseline, or is dead, wrong or slower than plain decoding."""
    from dflash_bench import gate_formats
    from dflash_bench.gate import checked

    found = checked(run, baseline, limits, tuple(allow or ()))
    _save(junit, "w", lambda: gate_formats.junit(found.outcome, "dflash-bench"))
    _save(summary, "a", lambda: gate_formats.summary(found.outcome))
    _save(benchmark, "w", lambda: gate_formats.benchmark(found.cells))
    if as_json:
        print(json.dumps(gate_formats.as_json(found.outcome), indent=1, allow_nan=False))
    else:
        print(gate_formats.text(found.outcome))
    if found.outcome.failures:
        sys.exit(1)


def _save(path: Path | None, mode: str, made: Callable[[], str]) -> None:
    if path is None:
        return
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(made())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


@app.command()
def report(
    run: options.Run,
    kind: Annotated[
        str | None, Option("--format", metavar="F", help="table (if absent), markdown, json, csv or latex.")
    ] = None,
    html: Annotated[
        Path | None, Option(metavar="FILE", help="Write one self-contained page with plots and answers.")
    ] = None,
    answers: Annotated[int | None, Option(metavar="N", min=1, help="Answers in the page; 300 if absent.")] = None,
    tokenizer: Annotated[
        Path | None, Option(metavar="PATH", help="tokenizer.json of the target, to colour tokens in the page.")
    ] = None,
    allow: options.AllowParts = None,
) -> None:
    """Show a finished run: as a table, Markdown, JSON, CSV or LaTeX, or as one HTML page."""
    from dflash_bench.report import FORMATS, MOST_ANSWERS, read, write_page

    if kind is not None and kind not in FORMATS:
        raise unknown("format", kind, list(FORMATS))
    if html is None and (answers is not None or tokenizer is not None):
        raise UserError(f"--{'answers' if answers is not None else 'tokenizer'} has no effect without --html FILE")
    document = read(run, allow or ())
    if html is not None:
        write_page(document, html, answers or MOST_ANSWERS, tokenizer)
        print(f"wrote {html}", file=sys.stderr)
    if html is None or kind is not None:
        print(FORMATS[kind or "table"](document), end="")


@app.command()
def card(
    run: options.Run,
    allow: options.AllowParts = None,
) -> None:
    """Print a run's result in ten lines, to share."""
    from dflash_bench import report

    print(report.card(report.read(run, allow or ())), end="")


@app.command()
def plot(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="A run's folder; several give their trend.")],
    out: Annotated[
        Path | None, Option("-o", "--out", metavar="DIR", help="Folder for the plots; RUN/plots if absent.")
    ] = None,
    kind: Annotated[str, Option("--format", metavar="F", help="png or svg.")] = "png",
    allow: options.AllowParts = None,
) -> None:
    """Draw the plots of a run, or with several runs their trend."""
    from dflash_bench import plots, report
    from dflash_bench.bars import late

    if len(runs) > 1 and out is None:
        raise UserError("the trend of several runs belongs to none of them: say where with -o DIR")
    plots.check_kind(kind)
    read = [plots.Material(report.read(folder, allow or ())) for folder in late(runs, "reading runs")]
    folder = out or runs[0] / "plots"
    if len(runs) > 1:
        print(plots.write_trend(read, folder, kind))
        return
    for name in late(list(plots.PLOTS), "drawing plots"):
        try:
            print(plots.write(read[0], name, folder, kind))
        except plots.NothingToPlotError as error:
            print(f"no plot '{name}': {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
