"""`verify-distribution`: above temperature 0 no single token is right, but each has a probability."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Annotated

import typer
from typer import Option

from dflash_bench.cli import options
from dflash_bench.cli.command import Command
from dflash_bench.cli.output import say
from dflash_bench.run.request import Request

app = typer.Typer()


@app.command(cls=Command)
@options.with_options(
    "method", "model", "target", "drafts", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "draws",
    "length", "seed", "device", "dtype",
)  # fmt: skip
def verify_distribution(
    request: Request,
    method: Annotated[
        list[str] | None,
        Option(
            metavar="NAME[:KEY=VALUE]", help="Method to test; may be repeated. Default: dflash with each of its rules."
        ),
    ] = None,
    temperature: Annotated[float, Option(metavar="T", min=0.0, max=100.0, help="Sampling temperature, above 0.")] = 1.2,
    top_k: Annotated[int, Option(metavar="K", min=0, help="As for 'run'; 0 turns it off.")] = 0,
    top_p: Annotated[float, Option(metavar="P", min=0.0, max=1.0, help="As for 'run'; 1 turns it off.")] = 0.9,
    min_p: Annotated[float, Option(metavar="P", min=0.0, max=1.0, help="As for 'run'; 0 turns it off.")] = 0.0,
    repetition_penalty: Annotated[
        float, Option(metavar="R", min=0.01, max=100.0, help="As for 'run'; 1 turns it off.")
    ] = 1.0,
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
    seed: Annotated[int, Option(metavar="S", min=0, help="Random seed; another seed draws other answers.")] = 0,
    dtype: Annotated[
        str,
        Option(metavar="T", help="float32, bfloat16 or float16. Below float32, rounding shifts probabilities, too."),
    ] = "float32",
    as_json: options.AsJson = False,
) -> None:
    """Test sampling at a temperature above 0.

    Draws many answers and tests every token, at each position in the answer and in the draft, against its probability
    under the published model.

    Exit status 1: tokens do not come up as often as they should, or too few drafts were tested to tell.
    """
    from dflash_bench.analysis import distribution as analysis
    from dflash_bench.records import Settings
    from dflash_bench.report import distribution as report
    from dflash_bench.run import distribution

    settings = Settings(temperature, top_k, top_p, min_p, repetition_penalty)
    request = replace(request, methods=tuple(dict.fromkeys(method or distribution.METHODS)), dtype=dtype)
    draws_of_methods = distribution.perform(
        distribution.DrawRequest(request, settings, draws or distribution.NUM_DRAWS, length, seed)
    )
    tests = analysis.compared(draws_of_methods)
    verdicts = analysis.verdicts(draws_of_methods, tests)
    if as_json:
        say(json.dumps(report.as_json(draws_of_methods, tests, verdicts, settings), indent=1, allow_nan=False))
    else:
        say(report.text(draws_of_methods, tests, verdicts, settings))
    if any(verdict.state != "as the model" for verdict in verdicts):
        sys.exit(1)
