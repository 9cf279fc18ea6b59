"""Submitting runs, and verifying submitted ones: the commands submit and accept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from dflash_bench.cli import options
from dflash_bench.cli.command import Command
from dflash_bench.cli.results import found_one
from dflash_bench.core.terminal import note, say, status, wide

app = typer.Typer()


@app.command(cls=Command)
def submit(
    run: options.Run = None,
    out: Annotated[
        Path | None, Option("-o", "--out", metavar="FILE", help="The pack. Default: the run's name and .zip.")
    ] = None,
) -> None:
    """Pack a finished run into one file for others to verify.

    The pack contains answers, times, plan, command and machine description, but no prompts or weights.
    """
    from dflash_bench.results import pack

    folder = found_one(run)
    path = out or Path(f"{folder.resolve().name}.zip")
    size = pack.write(folder, path)
    say(f"wrote {path}: {size / 1e6:.1f} MB, sha256 {pack.sha256_of(path)}")
    note("it contains the machine description and the command, as 'dflash-bench report' shows them")


@app.command(cls=Command)
def accept(
    pack: Annotated[Path, Argument(metavar="PACK", help="A file of 'dflash-bench submit'.")],
    out: Annotated[
        Path | None, Option("-o", "--out", metavar="DIR", help="New folder for the run. Default: accepted/PACK.")
    ] = None,
    share: Annotated[
        float, Option(metavar="SHARE", min=0.0, max=1.0, help="Share of the answers to recompute, at least 20 answers.")
    ] = 0.05,
    seed: Annotated[
        int | None, Option(metavar="N", min=0, max=2**32 - 1, help="Seed of the sample. Default: random.")
    ] = None,
    by: Annotated[str | None, Option(metavar="NAME", help="Your name, shown on the site.")] = None,
    target: Annotated[
        str | None, Option(metavar="PATH|ID", help="The target on this machine. Default: as in the run.")
    ] = None,
    draft: Annotated[
        list[str] | None, Option(metavar="METHOD=PATH|ID", help="A draft on this machine; may be repeated.")
    ] = None,
    data: Annotated[
        str | None, Option(metavar="FROM", help="Where the suites' prompts come from, as for 'run --data'.")
    ] = None,
    prompts: Annotated[
        Path | None, Option(metavar="FILE", help="The prompts of a run with --prompts, on this machine.")
    ] = None,
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Let the target run code that comes with its weights.")
    ] = False,
) -> None:
    """Verify a submitted run by recomputing a random sample of it.

    Recomputes all arithmetic, texts and scores, and judges and regenerates a random sample of the answers. Exits with
    1 if a check is refuted. Lists what cannot be verified, such as times.
    """
    from dflash_bench.report import rechecks
    from dflash_bench.submissions.accept import accept as recheck
    from dflash_bench.submissions.request import AcceptRequest

    folder = out or Path("accepted") / pack.stem
    request = AcceptRequest(pack, share, seed, by, target, tuple(draft or ()), data, prompts, trust_remote_code)
    with status() as tell:
        record = recheck(request, folder, tell)
    say(rechecks.text(record, wide()))
    if not record.is_accepted:
        raise typer.Exit(1)
    say(f"saved in {folder}; 'dflash-bench index {folder.parent}' makes a site of all accepted runs")
