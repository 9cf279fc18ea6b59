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
from dflash_bench.secrets import command

app = typer.Typer()
_servers, _results = under("Servers"), under("Results")
STATUS = {"agree": 0, "differ": 1, "cannot tell": 2}


@app.command(cls=GroupedHelp)
def crosscheck(
    suite: options.Suites = None,
    prompts: options.Prompts = None,
    data: options.Data = None,
    limit: options.Limit = None,
    thinking: options.Thinking = None,
    method: Annotated[
        list[str] | None,
        under("Models")(
            metavar="NAME[@LABEL][:KEY=VALUE,...]",
            help="How our engine drafts, if not as the NAME of --server says: dflash:n=7 for --server dflash=URL.",
        ),
    ] = None,
    model: options.Model = None,
    target: options.Target = None,
    draft: options.Drafts = None,
    trust_remote_code: options.TrustRemoteCode = False,
    server: Annotated[
        list[str] | None,
        _servers(metavar="NAME=URL", help="The server to check, by its method: dflash=URL. May be repeated."),
    ] = None,
    dialect: options.Dialect = None,
    served_model: options.ServedModel = None,
    chats: Annotated[
        bool,
        _servers(
            "--chats",
            help="Send chats, as most clients do, for the server to render by its own template. Default: token ids, "
            "where the server takes them.",
        ),
    ] = False,
    api_key_env: options.ApiKeyEnv = None,
    timeout: options.Timeout = None,
    env_proxy: options.EnvProxy = False,
    max_new_tokens: options.MaxNewTokens = None,
    device: options.Device = None,
    device_map: options.DeviceMap = None,
    dtype: options.Dtype = None,
    attention: options.Attention = None,
    engine: options.Engine = None,
    quantize: options.Quantize = None,
    threads: options.Threads = None,
    output: Annotated[
        Path | None, _results("--output", "-o", metavar="FILE", help="Also write a page of Markdown to FILE.")
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
    from dflash_bench.run.request import Request

    ours = Request(
        suites=tuple(suite or ()), methods=tuple(method or ()), model=model, target=target, drafts=tuple(draft or ()),
        data=data, prompts=prompts, limit=limit, max_new_tokens=max_new_tokens, threads=threads, device=device,
        device_map=device_map, dtype=dtype, attention=attention, engine=engine, quantize=quantize, thinking=thinking,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    theirs = Request(
        suites=(), methods=(), servers=tuple(server or ()), dialect=dialect, served_model=served_model,
        api_key_env=api_key_env, timeout=timeout, env_proxy=env_proxy,
    )  # fmt: skip
    if output is not None and not output.parent.is_dir():
        raise UserError(f"there is no folder {output.parent} to write {output.name} to; make it, or name another")
    with status() as tell:
        checked = session.perform(Asked(ours, theirs, chats), tell)
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
