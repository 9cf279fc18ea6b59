"""`doctor`: why is acceptance low?"""

from __future__ import annotations

import json
import sys

import typer

from dflash_bench.cli import options
from dflash_bench.cli.command import GroupedHelp
from dflash_bench.cli.output import say

app = typer.Typer()


@app.command(cls=GroupedHelp)
def doctor(
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
    device: options.Device = None,
    device_map: options.DeviceMap = None,
    dtype: options.Dtype = None,
    attention: options.Attention = None,
    quantize: options.Quantize = None,
    threads: options.Threads = None,
    as_json: options.AsJson = False,
) -> None:
    """Find out why few drafted tokens are accepted.

    Looks at a DFlash or EAGLE-3 draft and its target, decodes your prompts (or ours, if you give none) with the draft
    as it is, then with one thing changed at a time: what raises acceptance names the fault.

    Exit status 1: a cause was found.
    """
    from dflash_bench.api.measuring import request_of
    from dflash_bench.api.tools import examine
    from dflash_bench.bars import status
    from dflash_bench.doctor import text

    request = request_of(
        suite=suite, method=method, model=model, target=target, draft=draft, data=data, prompts=prompts, limit=limit,
        max_new_tokens=max_new_tokens, threads=threads, device=device, device_map=device_map, dtype=dtype,
        attention=attention, quantize=quantize, thinking=thinking, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    with status() as tell:
        found = examine(request, tell)
    say(json.dumps(text.as_json(found), indent=1, allow_nan=False) if as_json else text.text(found))
    if found.has_cause:
        sys.exit(1)
