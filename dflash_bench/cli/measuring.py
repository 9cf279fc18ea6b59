"""`run`, and the suites and methods that it knows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Context

from dflash_bench.cli import options
from dflash_bench.cli.command import Command, GroupedHelp
from dflash_bench.cli.output import note, say
from dflash_bench.errors import UserError, unknown
from dflash_bench.secrets import arguments, command

app = typer.Typer()


@app.command(cls=GroupedHelp)
def run(
    context: Context,
    suite: options.Suites = None,
    prompts: options.Prompts = None,
    score: options.Score = None,
    data: options.Data = None,
    limit: options.Limit = None,
    within: options.For = None,
    thinking: options.Thinking = None,
    no_thinking: options.NoThinking = False,
    context_length: options.ContextLength = None,
    method: options.Methods = None,
    model: options.Model = None,
    target: options.Target = None,
    draft: options.Drafts = None,
    trust_remote_code: options.TrustRemoteCode = False,
    server: options.Servers = None,
    dialect: options.Dialect = None,
    served_model: options.ServedModel = None,
    api_key_env: options.ApiKeyEnv = None,
    timeout: options.Timeout = None,
    env_proxy: options.EnvProxy = False,
    launch: options.Launch = None,
    launch_with: options.LaunchWith = None,
    launch_args: options.LaunchArgs = None,
    max_new_tokens: options.MaxNewTokens = None,
    temperature: options.Temperature = "0",
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    concurrency: options.Concurrency = None,
    rate: options.Rate = None,
    slo: options.Slo = None,
    seed: options.Seed = None,
    block_size: options.BlockSize = None,
    draft_steps: options.DraftSteps = None,
    repeats: options.Repeats = 1,
    audit: options.Audit = None,
    over: options.Over = None,
    one_at_a_time: options.OneAtATime = False,
    device: options.Device = None,
    device_map: options.DeviceMap = None,
    dtype: options.Dtype = None,
    attention: options.Attention = None,
    engine: options.Engine = None,
    graph: options.Graph = None,
    compiler: options.Compiler = None,
    quantize: options.Quantize = None,
    threads: options.Threads = None,
    workers: options.Workers = None,
    ray_address: options.RayAddress = None,
    unsafe_code: options.UnsafeCode = False,
    out: options.Out = None,
    resume: options.Resume = False,
    allow: options.AllowFailed = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure methods against plain decoding.

    Answers the prompts of suites with each method and with plain decoding, and saves every answer.

    Exit status 1: an answer failed, or is not the model's own output.
    """
    from dflash_bench import report
    from dflash_bench.analysis import metrics
    from dflash_bench.analysis.findings import findings, witnesses
    from dflash_bench.analysis.load import loads
    from dflash_bench.analysis.sweeps import sweeps
    from dflash_bench.api import measuring
    from dflash_bench.results import frame
    from dflash_bench.run import sweeping
    from dflash_bench.run.progress import Progress
    from dflash_bench.run.request import Request

    if no_thinking:
        raise UserError("--no-thinking is now written --thinking off")
    if context.info_name == "sweep" and not over:
        raise UserError(f"nothing to sweep over: give {sweeping.EXAMPLE}")
    request = Request(
        suites=tuple(suite or ()), methods=tuple(method or ()), model=model, target=target, drafts=tuple(draft or ()),
        data=data, prompts=prompts, score=score, limit=limit, budget=within, seed=seed,
        max_new_tokens=max_new_tokens, temperatures=sweeping.numbers(temperature, "--temperature"),
        top_k=sweeping.numbers(top_k, "--top-k", whole=True) if top_k else (),
        top_p=sweeping.numbers(top_p, "--top-p") if top_p else (),
        min_p=sweeping.numbers(min_p, "--min-p") if min_p else (),
        repetition_penalty=sweeping.numbers(repetition_penalty, "--repetition-penalty") if repetition_penalty else (),
        concurrency=sweeping.numbers(concurrency, "--concurrency", whole=True) if concurrency else (),
        rate=sweeping.numbers(rate, "--rate") if rate else (), slo=slo,
        context=sweeping.contexts(context_length, "--context") if context_length else (),
        block_size=block_size, draft_steps=draft_steps, over=tuple(over or ()), one_at_a_time=one_at_a_time,
        repeats=repeats, threads=threads, device=device, device_map=device_map, dtype=dtype, attention=attention,
        engine=engine, graph=graph, compiler=compiler, quantize=quantize, thinking=thinking,
        trust_remote_code=trust_remote_code, audit=audit, unsafe_code=unsafe_code, servers=tuple(server or ()),
        dialect=dialect, served_model=served_model, api_key_env=api_key_env, timeout=timeout, env_proxy=env_proxy,
        launch=launch, launch_with=launch_with,
        launch_args=None if launch_args is None else arguments(launch_args, "--launch-args"),
        workers=workers, ray_address=ray_address,
    )  # fmt: skip
    for name in allow or ():
        if name != "failed":
            raise unknown("thing to allow", name, ["failed"])
    if resume and out is None:
        raise UserError("--resume needs --out FOLDER, the run to continue")
    folder = out or measuring.default_folder(request)
    try:
        measuring.measure(request, folder, resume, note, progress=Progress)
    except KeyboardInterrupt:
        note(_stopped(folder))
        sys.exit(130)
    results = frame.read(folder)
    rows, identity = results.rows, results.info["identity"]
    cells = metrics.summarise(rows, identity)
    notes = findings(rows, cells, identity, results.info)
    swept, loaded = sweeps(cells, identity), loads(rows, cells, identity)
    if as_json:
        say(json.dumps(report.as_json(folder, cells, notes, swept, loaded), indent=1, allow_nan=False))
    else:
        say(report.text(cells, notes, swept, results.info, loaded))
        if memory := report.memory(results.info):
            say(f"memory, as predicted: {memory}")
        say(f"saved in {folder}")
    if metrics.mismatched(rows).any() or witnesses.silent(results.info):
        sys.exit(1)
    num_failed = int(rows["error"].notna().sum())
    if num_failed and not allow:
        note(f"dflash-bench: {num_failed} of {len(rows)} answers failed; give --allow failed to accept that")
        sys.exit(1)


app.command(
    "sweep", cls=GroupedHelp,
    help="Find the best value of an option.\n\n"
    "Measures several values of options or settings (--over) and says which is the fastest on this machine. All other "
    "options are those of 'run'.",
)(run)  # fmt: skip


def _stopped(folder: Path) -> str:
    """Ctrl-C is no error: it says what is left, and the very command that goes on."""
    if not (folder / "run.json").exists():
        return "stopped; nothing was written yet"
    words = sys.argv[1:]
    if not any(word == "--out" or word.startswith("--out=") for word in words):
        words = [*words, "--out", str(folder)]
    if "--resume" not in words:
        words = [*words, "--resume"]
    return f"stopped; finished answers are saved. To continue: {command(words)}"


@app.command(cls=Command)
def suites() -> None:
    """List the suites of prompts.

    With where they come from, how many prompts are embedded, and how answers are scored.
    """
    from dflash_bench import report
    from dflash_bench.tasks import sandbox
    from dflash_bench.tasks.suites import known_groups, listings

    say(report.suites_text(listings(), known_groups()))
    cage = sandbox.strongest()
    here = f"runs here in: {cage}" if cage else "is not run here, where it cannot be sandboxed; see 'run --unsafe-code'"
    say(f"\nmodel-written code {here}")


@app.command(cls=Command)
def methods(
    name: Annotated[str | None, Argument(metavar="[NAME]", help="A method, to see all its options.")] = None,
) -> None:
    """List the methods, or one with its options.

    With what each drafts, which draft it needs, and whether it is lossless.
    """
    from dflash_bench.report import methods as listed

    say(listed.text() if name is None else listed.text_of(name))
