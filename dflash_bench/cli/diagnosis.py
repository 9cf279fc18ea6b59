"""`doctor`: why is acceptance low?"""

from __future__ import annotations

import json
import sys

import typer

from dflash_bench.cli import options
from dflash_bench.cli.command import GroupedHelp
from dflash_bench.cli.output import say
from dflash_bench.run.request import Request

app = typer.Typer()


@app.command(cls=GroupedHelp)
@options.with_options(
    "suites", "prompts", "data", "limit", "thinking", *options.MODELS, "trust_remote_code", "max_new_tokens", "device",
    "device_map", "dtype", "attention", "quantize", "threads",
)  # fmt: skip
def doctor(request: Request, as_json: options.AsJson = False) -> None:
    """Find out why few drafted tokens are accepted.

    Decodes your prompts (or ours, if you give none) with a DFlash or EAGLE-3 draft as it is, then with one thing
    changed at a time: the change that raises acceptance names the fault.

    Exit status 1: a cause was found.
    """
    from dflash_bench.api.tools import examine
    from dflash_bench.bars import status
    from dflash_bench.doctor import text

    with status() as tell:
        found = examine(request, tell)
    say(json.dumps(text.as_json(found), indent=1, allow_nan=False) if as_json else text.text(found))
    if found.has_cause:
        sys.exit(1)
