"""Models and drafts: what there is, what a checkpoint is, and how to write it in another format."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from dflash_bench.cli import options
from dflash_bench.cli.command import Command
from dflash_bench.cli.output import say

app = typer.Typer()


@app.command(cls=Command)
def models(as_json: options.AsJson = False) -> None:
    """List the models: target, drafts, how they were trained, what is on this disk, what this machine can hold."""
    from dflash_bench.models import catalogue

    listings, machine = catalogue.list_presets(), catalogue.machine()
    if as_json:
        say(json.dumps(catalogue.as_json(listings, machine), indent=1, allow_nan=False))
    else:
        say(catalogue.text(listings, machine))


@app.command(cls=Command)
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
    say(json.dumps(inspection.as_json(seen), indent=1) if as_json else inspection.text(seen))
    if seen.problems:
        sys.exit(1)


@app.command(cls=Command)
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

    for remark in conversion.convert(source, destination, to, target):
        say(remark)
    say(f"saved in {destination}")
