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


@app.command(cls=Command, name="build-datastore")
def build_datastore(
    model: Annotated[str, Option(metavar="M", help="Whose tokenizer: nano, a preset, or a folder with a model.")],
    out: Annotated[Path, Option(metavar="FILE", help="The datastore, a file that does not exist yet.")],
    data: Annotated[
        Path | None,
        Option(metavar="PATH", help="Texts: .txt, or .jsonl or .parquet with text or messages; a file or a folder."),
    ] = None,
    runs: Annotated[
        list[Path] | None, Option(metavar="RUN", help="A run whose answers are the texts; may be given several times.")
    ] = None,
) -> None:
    """Make a datastore for the method rest, from texts or from the answers of runs.

    Do not measure it on prompts whose answers it holds.
    """
    from dflash_bench.run import datastores

    built = datastores.build(model, data, runs or [], out)
    say(f"{built.num_texts:,} texts of {built.num_tokens:,} tokens, saved in {out}")
    if runs:
        say("it holds answers to the prompts of these runs: measure rest on others, or it looks up what it predicts")
