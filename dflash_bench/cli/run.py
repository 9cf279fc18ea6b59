"""The commands run, sweep, suites and methods."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Context, Option

from dflash_bench.cli import net, options
from dflash_bench.cli.command import BriefHelp, Command, config_text
from dflash_bench.core.errors import UserError
from dflash_bench.core.files import json_text, write_text
from dflash_bench.core.labels import WIDTH, wrapped
from dflash_bench.core.option import check_options, options_of
from dflash_bench.core.secrets import command
from dflash_bench.core.terminal import Stages, note, say, show, status, terminal_width, wide
from dflash_bench.runner.config import DEMO, OutputOptions, RunRequest, with_demo

app = typer.Typer()


@app.command(cls=BriefHelp)
@options.with_options()
def run(
    ctx: Context,
    request: RunRequest,
    output: OutputOptions,
    as_json: options.AsJson = False,
) -> None:
    """Measure methods against plain decoding.

    Answers the prompts of suites with each method and with plain decoding, and saves every answer.

    Exit status 1: an answer failed, or is not the model's own output, or a finding forbids a speed-up.
    """
    request = _with_prompts(request)
    if ctx.info_name == "sweep" and not request.over:
        from dflash_bench.runner import plan

        raise UserError(f"nothing to sweep over: give {plan.EXAMPLE}")
    check_options(output)
    if output.save_config is not None:
        write_text(output.save_config, config_text(ctx))
        note(f"wrote {output.save_config}")
    with Stages() as stages:
        # Importing torch takes seconds on a slow disk.
        stages.begin("starting")
        from dflash_bench.api import measuring
        from dflash_bench.runner.session import Progress

        folder = output.out or measuring.default_folder(request)
        try:
            measuring.measure(request, folder, output.resume, note, progress=Progress, stages=stages)
        except KeyboardInterrupt:
            stages.end()
            note(_stopped(folder))
            sys.exit(net.stopped_status())
    from dflash_bench import report

    document = report.read_document(folder)
    rows = document.results.rows
    if as_json:
        say(json_text(report.as_json(document)))
    else:
        say(f"{report.named(document, terminal_width())}\n")
        show(report.screen(document, terminal_width()))
        say(next_commands(folder))
        if len(request.servers) == 1:
            url = request.servers[0].partition("=")[2]
            say(f"which draft fits this server's model, and what turns it on: dflash-bench try {url}")
    if any(finding.forbids for finding in document.findings):
        sys.exit(1)
    num_failed = int(rows["error"].notna().sum())
    if num_failed and not output.allow:
        note(f"dflash-bench: {num_failed} of {len(rows)} answers failed; give --allow failed to accept that")
        sys.exit(1)


def _with_prompts(request: RunRequest) -> RunRequest:
    """Return the request; if it names no prompts, with a few embedded ones."""
    if request.suites or request.prompts is not None:
        return request
    request = with_demo(request)
    named = f"{', '.join(DEMO)} (embedded)"
    note(f"no prompts are named, so {request.limit} of each of {named} are measured: name yours with --prompts")
    return request


app.command(
    "sweep",
    cls=BriefHelp,
    help="Find the best value of an option.\n\n"
    "Measures several values of options or settings (--over) and names the fastest on this machine. All other options "
    "are those of 'run'.",
)(run)


@app.command(cls=BriefHelp)
@options.with_options(
    " ".join([*(name for name, spec in options_of(RunRequest).items() if spec.in_race), "out as_json"]),
    helps={
        "budget": "Measure for about this long, such as 30m: no round of a race is begun that is expected to take "
        "longer. Default: until the races are decided, or the prompts are used up.",
        "methods": "The methods to race, from 'dflash-bench methods'; each is tried with several lengths unless it "
        "names one. Default: all that have what they need.",
        "concurrency": "The loads: answers decoded at the same time, such as 1,8,32, each with a race of its own.",
        "context": "Pad every prompt to about N tokens, such as 1k; several, such as 1k,8k, are loads of their own.",
    },
)
def recommend(
    request: RunRequest,
    out: Annotated[
        Path | None,
        options.under("Results")(
            "-o",
            "--out",
            metavar="DIR",
            help="Folder for the runs, recommendation.md, recommendation.json and frontier.svg. Default: one in "
            "results/runs, the same for the same options.",
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Race methods under your loads, and say which to serve with.

    Each round of a race is a run of its own that 'report' can read. Methods leave as soon as intervals say that they
    are slower; the rest goes on with more prompts. Stopped at any time, the same command goes on.

    Exit status 1: a method gave answers that are not the model's own. It is out of the race.
    """
    from dflash_bench.racing import rounds
    from dflash_bench.racing.screen import screen

    try:
        made = rounds.decide(request, out, note)
    except KeyboardInterrupt:
        note("stopped; finished rounds are saved, and the same command goes on")
        sys.exit(net.stopped_status())
    if as_json:
        say(json_text(made.data))
    else:
        say(screen(made, terminal_width(80)), end="")
    if made.is_wrong:
        sys.exit(1)


def next_commands(folder: Path) -> str:
    """Return commands for a run that has ended. They take it by default if it is in results/runs."""
    from dflash_bench.results.store import RUNS

    run = "" if folder.parent == RUNS else f" {folder}"
    by_suite, whole = f"by suite: dflash-bench report{run}", f"all figures: dflash-bench report{run} --full"
    between = "   " if len(f"{by_suite}   {whole}") <= 80 else "\n"
    return f"saved in {folder}\n{by_suite}{between}{whole}\nthe page: dflash-bench open{run}"


def _stopped(folder: Path) -> str:
    """Return the message after Ctrl-C, with the command that continues the run."""
    if not (folder / "run.json").exists():
        return "stopped; nothing was written yet"
    words = sys.argv[1:]
    if not any(word in ("-o", "--out") or word.startswith("--out=") for word in words):
        words = [*words, "--out", str(folder)]
    if "--resume" not in words:
        words = [*words, "--resume"]
    return f"stopped; finished answers are saved. To continue: {command(words)}"


@app.command(cls=Command)
def suites(
    action: Annotated[
        list[str] | None,
        Argument(
            metavar="[NAME | prepare NAME]",
            help="Show one suite or group, or lay out your own copy of a data set as the suite NAME reads it.",
        ),
    ] = None,
    source: Annotated[
        Path | None, Option("--from", metavar="FOLDER", help="With prepare: the publisher's files, or one of them.")
    ] = None,
    out: Annotated[
        Path | None, Option("-o", "--out", metavar="DIR", help="With prepare: the folder for --data. Default: data.")
    ] = None,
) -> None:
    """List the suites of prompts, or prepare one.

    Shows where they come from, how many prompts are embedded, and how answers are scored. What is prepared stays on
    this disk: several licences forbid redistribution.
    """
    if action is not None and action[0] == "prepare":
        _prepare(action, source, out or Path("data"))
        return
    if source is not None or out is not None:
        raise UserError(f"{'--from' if source is not None else '--out'} has no effect without prepare NAME")
    from dflash_bench import report
    from dflash_bench.tasks import sandbox
    from dflash_bench.tasks.suites import expand, known_groups, listings

    if action is not None:
        named = {suite.name for suite in expand(action)}
        say(report.suites_text([one for one in listings() if one.suite.name in named], {}, wide()))
        return
    say(report.suites_text(listings(), known_groups(), wide()))
    isolation = sandbox.strongest()
    nowhere = "is not run here, where it cannot be sandboxed; see 'run --unsafe-code'"
    here = f"runs here in: {isolation}" if isolation else nowhere
    say(f"\n{wrapped(f'model-written code {here}', wide())}")


def _prepare(action: list[str], source: Path | None, out: Path) -> None:
    from dflash_bench.tasks.prepare import prepare

    if len(action) != 2 or action[0] != "prepare" or source is None:
        raise UserError("write: dflash-bench suites prepare NAME --from FOLDER -o DIR")
    with status() as tell:
        made = prepare(action[1], source, out, tell)
    counts = ", ".join(f"{name} {number}" for name, number in made.by_category.items())
    say(f"wrote {made.path}: {made.num_prompts:,} prompts{f' ({counts})' if counts else ''}")
    if made.revision:
        note(f"revision: {made.revision}")
    note(f"measure them with: dflash-bench run --suite {action[1]} --data {out}")


@app.command(cls=Command)
def methods(
    name: Annotated[str | None, Argument(metavar="[NAME]", help="A method, to see all its options.")] = None,
) -> None:
    """List the methods, or one with its options.

    Shows what each drafts, which weights it needs, and whether it is lossless.
    """
    from dflash_bench.report import terminal as listed

    width = terminal_width(WIDTH)
    say(listed.methods_text(width) if name is None else listed.text_of(name, width))
