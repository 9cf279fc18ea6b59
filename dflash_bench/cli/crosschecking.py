"""`crosscheck`: is it the weights or the engine?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from dflash_bench.cli import options
from dflash_bench.cli.command import GroupedHelp
from dflash_bench.cli.options import under
from dflash_bench.cli.output import note, say
from dflash_bench.errors import UserError
from dflash_bench.run.request import Request, ServerOptions
from dflash_bench.secrets import command

app = typer.Typer()
STATUS = {"agree": 0, "differ": 1, "cannot tell": 2}


@app.command(cls=GroupedHelp)
@options.with_options(
    "suites", "prompts", "data", "limit", "thinking", *options.MODELS, "trust_remote_code", "servers", "dialect",
    "served_model", "chats", "api_key_env", "timeout", "env_proxy", "max_new_tokens", "device", "device_map", "dtype",
    "attention", "engine", "quantize", "threads",
    helps={
        "methods": "How our engine drafts, if not as the NAME of --server says: dflash:n=7 for --server dflash=URL.",
        "servers": "The server to check, by its method: dflash=URL. May be repeated.",
    },
)  # fmt: skip
def crosscheck(
    request: Request,
    chats: Annotated[
        bool,
        under("Servers")(
            "--chats",
            help="Send chats, as most clients do, for the server to render by its own template. Default: token ids, "
            "where the server takes them.",
        ),
    ] = False,
    output: Annotated[
        Path | None, under("Results")("--output", "-o", metavar="FILE", help="Also write a page of Markdown to FILE.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare a live server with our own engine.

    Sends the same prompts (only the first of several turns) to both, which need the same weights, and compares answers
    and accepted drafts. If they differ, known causes are emulated here, and those that give the server's counts are
    named.

    Exit status 1: they differ. Exit status 2: this cannot be determined, because the server hides its counts.
    """
    from dflash_bench.bars import status
    from dflash_bench.crosscheck import session
    from dflash_bench.crosscheck.request import Asked
    from dflash_bench.report import crosscheck as report

    if output is not None and not output.parent.is_dir():
        raise UserError(f"there is no folder {output.parent} to write {output.name} to; make it, or name another")
    with status() as tell:
        checked = session.perform(Asked(request.without(ServerOptions), request.only(ServerOptions), chats), tell)
    if output is not None:
        _write(output, report.page(checked, command(sys.argv[1:])))
    say(json.dumps(report.as_json(checked), indent=1, allow_nan=False) if as_json else report.text(checked))
    if output is not None:
        note(f"wrote {output}")
    if code := max((STATUS[one.verdict] for one in checked), key=[0, 2, 1].index):
        sys.exit(code)


def _write(path: Path, text: str) -> None:
    from dflash_bench.atomic import write_whole

    write_whole(path, lambda file: file.write(text.encode()))
