"""The command line: options become dataclasses, the library works, text comes out. Only here is printed and exited."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from typer import Option

from dflash_bench import __version__
from dflash_bench.cli import checkpoints, measuring, results
from dflash_bench.errors import UserError

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


for part in (measuring, checkpoints, results):  # as --help lists them
    app.add_typer(part.app)
