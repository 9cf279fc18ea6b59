"""Diagnosis: the commands try, soak, verify-distribution, profile, doctor, crosscheck and conform."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Context, Option

from dflash_bench.cli import options
from dflash_bench.cli.command import Command, GroupedHelp
from dflash_bench.cli.options import under
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.files import json_text, write_text
from dflash_bench.core.option import MOST_TOKENS, options_of, whole_numbers
from dflash_bench.core.secrets import command
from dflash_bench.core.terminal import Stages, note, say, status, terminal_width, wide
from dflash_bench.core.types import Settings
from dflash_bench.runner.config import RunRequest

app = typer.Typer()


@app.command("try", cls=Command)
@options.with_options("served_model api_key_env")
def try_server(
    request: RunRequest,
    url: Annotated[str, Argument(metavar="URL", help="The server's address, such as http://localhost:8000.")],
    as_json: options.AsJson = False,
) -> None:
    """Show in a minute what a server is and whether it drafts.

    Asks it for short answers to chat, code and mathematics, and shows its tokens per round, its speed and its time to
    first token, whether it answers the same twice, and which published draft its model could use.
    """
    from dflash_bench.diagnose import show_tryout, tryout
    from dflash_bench.runner import served

    access = replace(served.access_of(request), timeout_s=tryout.ANSWER_S)
    with Stages(keeps_times=False) as stages:
        found = tryout.try_out(url, access, request.served_model, stages.begin)
    say(json_text(found.data) if as_json else show_tryout.text(found, terminal_width()))


@app.command(cls=Command)
@options.with_options(
    "served_model api_key_env budget seed",
    helps={
        "budget": "How long to query it, such as 90s, 5m or 1h. Default: 1h.",
        "seed": "Random seed of the traffic.",
    },
)
def soak(
    request: RunRequest,
    url: Annotated[str, Argument(metavar="URL", help="The server's address, such as http://localhost:8000.")],
    out: Annotated[
        Path | None, Option("-o", "--out", metavar="DIR", help="Folder of the answers. Default: soak in results/runs.")
    ] = None,
    at_a_time: Annotated[
        int, Option("--concurrency", metavar="N", min=1, max=1024, help="Concurrency of the mixed traffic.")
    ] = 4,
    pid: Annotated[
        int | None,
        Option(
            metavar="PID",
            min=1,
            max=1 << 22,
            help="The server's process on this machine, whose memory is read, with that of its children.",
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Query a server for hours and report what changes, and when.

    The same greedy reference prompts are repeated between mixed traffic with cancelled and constrained requests. Their
    answers, tokens per round and speed are compared with the first ones, and memory is watched. The exit status is 1
    if something changed. The same command resumes an interrupted soak.
    """
    from dflash_bench.core import environment
    from dflash_bench.diagnose import show_soak
    from dflash_bench.diagnose import soak as soaking
    from dflash_bench.results.store import RUNS
    from dflash_bench.runner import budget, served

    folder = out or RUNS / "soak"
    seconds = budget.seconds(request.budget or "1h")
    access = replace(served.access_of(request), timeout_s=soaking.ANSWER_S)
    with Stages(keeps_times=False) as stages:
        found = soaking.soak(
            url,
            folder,
            seconds,
            access,
            model=request.served_model,
            concurrency=at_a_time,
            seed=request.seed or 0,
            process=pid,
            tell=stages.begin,
        )
    command = f"dflash-bench soak URL --for {request.budget or '1h'} --concurrency {at_a_time}"
    machine = environment.one_line(environment.describe())
    write_text(folder / "soak.md", show_soak.page(found, command, machine))
    say(json_text(found.data) if as_json else show_soak.text(found, terminal_width()))
    if found.findings:
        sys.exit(1)


@app.command(cls=Command)
@options.with_options(
    "method model target drafts temperature top_k top_p min_p repetition_penalty draws length seed device dtype"
)
def verify_distribution(
    request: RunRequest,
    method: Annotated[
        list[str] | None,
        Option(
            metavar="NAME[:KEY=VALUE]", help="Method to test; may be repeated. Default: dflash with each of its rules."
        ),
    ] = None,
    temperature: Annotated[float, Option(metavar="T", min=0.0, max=100.0, help="Sampling temperature, above 0.")] = 1.2,
    top_k: Annotated[int, Option(metavar="K", min=0, max=MOST_TOKENS, help="As for 'run'; 0: off.")] = 0,
    top_p: Annotated[float, Option(metavar="P", min=0.0, max=1.0, help="As for 'run'; 1: off.")] = 0.9,
    min_p: Annotated[float, Option(metavar="P", min=0.0, max=1.0, help="As for 'run'; 0: off.")] = 0.0,
    repetition_penalty: Annotated[float, Option(metavar="R", min=0.01, max=100.0, help="As for 'run'; 1: off.")] = 1.0,
    draws: Annotated[
        int | None,
        Option(metavar="N", min=20, max=10_000_000, help="Answers drawn per prompt and method. Default: 128."),
    ] = None,
    length: Annotated[
        int | None,
        Option(
            metavar="N",
            min=2,
            max=100_000,
            help="Tokens per answer. Default: 31, or more if a method drafts more.",
        ),
    ] = None,
    seed: Annotated[
        int, Option(metavar="S", min=0, max=2**63 - 1, help="Random seed; another seed draws other answers.")
    ] = 0,
    dtype: Annotated[
        str,
        Option(metavar="T", help="float32, bfloat16 or float16. Below float32, rounding shifts probabilities, too."),
    ] = "float32",
    as_json: options.AsJson = False,
) -> None:
    """Test sampling at a temperature above 0.

    Draws many answers and tests every token, at each position in the answer and in the draft, against its probability
    under the published model.

    Exit status 1: tokens are not drawn as often as they should be, or too few drafts were tested to decide.
    """
    from dflash_bench.diagnose import distribution
    from dflash_bench.diagnose import goodness_of_fit as analysis
    from dflash_bench.diagnose import show as report

    settings = Settings(temperature, top_k, top_p, min_p, repetition_penalty)
    request = replace(request, methods=tuple(dict.fromkeys(method or distribution.METHODS)), dtype=dtype)
    draw_request = distribution.DrawRequest(request, settings, draws or distribution.NUM_DRAWS, length, seed)
    with status() as tell:
        draws_of_methods = distribution.draw(draw_request, tell)
    tests = analysis.run_tests(draws_of_methods)
    verdicts = analysis.judge_methods(draws_of_methods, tests)
    found = draws_of_methods, tests, verdicts, settings
    say(json_text(report.distribution_as_json(*found)) if as_json else report.distribution_text(*found, wide()))
    if any(verdict.state != "as the model" for verdict in verdicts):
        sys.exit(1)


_models, _shapes, _results = under("Models"), under("Shapes"), under("Results")


@app.command(cls=GroupedHelp)
@options.with_options(
    f"{options.MODELS} random_weights layers batch context width acceptance "
    "device dtype attention engine kernels graph compile threads",
    helps={"methods": "Method whose drafts to time, from 'dflash-bench methods'; may be repeated. Default: dflash."},
)
def profile(
    request: RunRequest,
    random_weights: Annotated[
        bool,
        _models("--random-weights", help="Use random weights of the model's published shape: nothing is downloaded."),
    ] = False,
    layers: Annotated[
        int | None,
        _models(
            metavar="N",
            min=1,
            max=1000,
            help="With --random-weights: build only N of the target's layers, and extrapolate to all of them.",
        ),
    ] = None,
    random_draft: Annotated[
        str | None,
        _models(
            "--random-draft",
            metavar="layers=N[,N...]",
            help="With --random-weights: compare DFlash drafts of N layers, as figure 3 of the paper does.",
        ),
    ] = None,
    batch: Annotated[str, _shapes(metavar="B[,B...]", help="Batch size: sequences decoded together.")] = "1",
    context: Annotated[str, _shapes(metavar="C[,C...]", help="Context length: tokens already in the cache.")] = "512",
    width: Annotated[
        str,
        _shapes(metavar="N[,N...]", help="Tokens verified per pass; the widths of the methods' rounds are added."),
    ] = "1,2,4,8,16",
    acceptance: Annotated[
        float | None,
        _shapes(
            metavar="AL",
            help="Acceptance length to predict speed-ups for. Default: the published one, if there is one.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        _results("-o", "--out", metavar="DIR", help="Also write profile.json and profile.svg to this folder."),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure the cost of a forward pass, and what limits the speed-up.

    Times plain steps, verification of n tokens, and drafting; compares them with the least time that this device would
    need; and prints the acceptance length from which on drafting pays. Needs no prompts.
    """
    from dflash_bench.diagnose import profile
    from dflash_bench.report import perf as shown
    from dflash_bench.report import plots

    profile_request = profile.ProfileRequest(
        request,
        random_weights,
        layers,
        whole_numbers(batch, "--batch"),
        whole_numbers(context, "--context"),
        whole_numbers(width, "--width"),
        acceptance,
        _draft_layers(random_draft),
    )
    profile.check_out(out)
    with status() as tell:
        profiled = profile.profile(profile_request, tell)
    text = json_text(shown.as_json(profiled))
    if out is not None:
        title = f"Cost of a forward, {profiled.about['model']}{shown.estimate_note(profiled)}"
        plots.write_profile(profiled.judged, title, out / "profile.svg")
        write_text(out / "profile.json", f"{text}\n")
    say(text if as_json else shown.text(profiled, wide()), end="\n" if as_json else "")
    if out is not None:
        note(f"saved in {out}")


def _draft_layers(text: str | None) -> tuple[int, ...]:
    """Read layers=N[,N...]. Raises UserError for anything else."""
    if text is None:
        return ()
    name, _, numbers = text.partition("=")
    if name != "layers":
        raise unknown("part of --random-draft", name, ["layers"])
    return whole_numbers(numbers, "--random-draft layers")


@app.command(cls=GroupedHelp)
@options.with_options(
    f"{options.PROMPTS} {options.MODELS} trust_remote_code max_new_tokens "
    "device device_map dtype attention quantize threads",
    helps={
        "methods": "The draft to examine: dflash or eagle3. Default: dflash.",
        "limit": "Use at most N prompts of each suite, the same ones on every machine. Default for our own prompts: 4.",
        "max_new_tokens": "Stop answers after N tokens. Default: 96.",
    },
)
def doctor(request: RunRequest, as_json: options.AsJson = False) -> None:
    """Find out why few draft tokens are accepted.

    Decodes your prompts (or ours, if you give none) with a DFlash or EAGLE-3 draft as it is, then with one thing
    changed at a time: the change that raises acceptance shows the fault.

    Exit status 1: a cause was found.
    """
    from dflash_bench.api.tools import examine
    from dflash_bench.diagnose import show

    with status() as tell:
        found = examine(request, tell)
    say(json_text(show.diagnosis_as_json(found)) if as_json else show.diagnosis_text(found, wide()))
    if found.has_cause:
        sys.exit(1)


def _require_folder(out: Path | None) -> None:
    """Raise UserError, before any slow work, if a page could not be written there."""
    if out is not None and not out.parent.is_dir():
        raise UserError(f"the folder {out.parent} for {out.name} does not exist; create it, or give another --out")


STATUS = {"agree": 0, "differ": 1, "cannot tell": 2}
OF_SERVER = "dialect served_model api_key_env timeout env_proxy"
OF_CASES = ("servers", *OF_SERVER.split(), "device", "threads")
"""The options that golden cases take; the others are those of prompts and of our engine's side."""


@app.command("crosscheck", cls=GroupedHelp, hidden=True)
@app.command(cls=GroupedHelp)
@options.with_options(
    f"cases forward {options.PROMPTS} {options.MODELS} trust_remote_code servers chats {OF_SERVER} max_new_tokens "
    "device device_map dtype attention engine kernels quantize threads out as_json",
    helps={
        "methods": "How our engine drafts, if not by the NAME of --server alone: dflash:n=7 for --server dflash=URL.",
        "servers": "NAME=URL: the server to compare with our engine, by its method; may be repeated. URL: the server "
        "that has loaded the CASE's target and draft.",
        "device": "cpu or cuda. Default: cuda if there is one; cpu for golden cases.",
    },
)
def conform(
    context: Context,
    request: RunRequest,
    cases: Annotated[
        list[str] | None,
        Argument(metavar="[CASE]...", help="Golden cases, as the package ships them. Default: all."),
    ] = None,
    forward: Annotated[
        list[str] | None,
        under("Machine")(metavar="NAME", help="numba, torch or transformers; may be repeated. Default: all three."),
    ] = None,
    chats: Annotated[
        bool,
        under("Servers")(
            "--chats",
            help="Send chats, as most clients do, and let the server apply its own template. Default: token ids, if "
            "the server accepts them.",
        ),
    ] = False,
    out: Annotated[
        Path | None, under("Results")("-o", "--out", metavar="FILE", help="Also write a page of Markdown to FILE.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Check that an engine or a live server drafts as the draft's publisher computes it.

    Decodes small drafts in publishers' formats (golden cases), in float32, and compares every round with what the
    publishers' own code drafted and accepted. A difference is named by its first round, and by the misreading that
    gives it.

    With --server NAME=URL (also called crosscheck), sends the same prompts (only the first of several turns) to the
    server and to our own engine, which need the same weights, and compares answers and accepted draft tokens. If they
    differ, known causes are emulated here, and those that reproduce the server's counts are named.

    Exit status 1: a case or a server differs, or a case is not read. Exit status 2: this cannot be determined, because
    the server hides its counts.
    """
    from dflash_bench.diagnose import conform, conform_server, golden_cases, show, show_conform

    _require_folder(out)
    typed, names = command(sys.argv[1:]), cases or ()
    # A URL alone, of a golden case, has no NAME= before it.
    by_name = any("=" in one.partition("://")[0] for one in request.servers)
    if not names and (by_name or context.info_name == "crosscheck"):
        if forward:
            raise UserError("--forward chooses how golden cases are decoded; leave it out, or name a CASE")
        with status() as tell:
            checked = conform_server.crosscheck(request, tell, chats)
        data, text = show.crosscheck_as_json(checked), show.crosscheck_text(checked)
        page, code = show.page(checked, typed), max((STATUS[one.verdict] for one in checked), key=[0, 2, 1].index)
    else:
        chosen, forwards = golden_cases.read_cases(names), conform.forwards_named(forward or ())
        _refuse_of_prompts(request, chats)
        if request.servers and forward:
            raise UserError("--forward has no effect with --server; leave it out")
        if request.servers and not len(chosen) == len(request.servers) == 1:
            raise UserError(
                "--server takes the one CASE whose target and draft it has loaded, as in conform zlab-dflash2"
            )
        with status() as tell:
            found = (
                [conform_server.check_server(chosen[0], request, tell)]
                if request.servers
                else conform.check_engine(chosen, forwards, request, tell)
            )
        data, text = show_conform.conform_as_json(found), show_conform.conform_text(found, wide())
        page, code = show_conform.conform_page(found, typed), conform.exit_status(found)
    if out is not None:
        write_text(out, page)
    say(json_text(data) if as_json else text)
    if out is not None:
        note(f"wrote {out}")
    if code:
        sys.exit(code)


def _refuse_of_prompts(request: RunRequest, chats: bool) -> None:
    """Raise UserError for options that golden cases, which have prompts of their own, would not use."""
    specs = options_of(RunRequest)
    given = [spec.flag for name, spec in specs.items() if name not in OF_CASES and spec.is_given(request)]
    if given := [*given, *["--chats"] * chats]:
        raise UserError(f"{given[0]} has no effect on golden cases; omit it, or give --server NAME=URL and no CASE")
