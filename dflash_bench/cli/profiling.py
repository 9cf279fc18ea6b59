"""`profile`: where would the time go?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dflash_bench.atomic import write_whole
from dflash_bench.cli import options
from dflash_bench.cli.command import GroupedHelp
from dflash_bench.cli.options import under
from dflash_bench.cli.output import note, say
from dflash_bench.run.option import whole_numbers
from dflash_bench.run.request import Request

app = typer.Typer()
_models, _shapes, _results = under("Models"), under("What is measured"), under("Results")


@app.command(cls=GroupedHelp)
@options.with_options(
    *options.MODELS, "random_weights", "layers", "batch", "context", "width", "acceptance", "device", "dtype",
    "attention", "engine", "graph", "compile", "threads",
)  # fmt: skip
def profile(
    request: Request,
    random_weights: Annotated[
        bool,
        _models("--random-weights", help="Use random weights of the model's published shape: nothing is downloaded."),
    ] = False,
    layers: Annotated[
        int | None,
        _models(
            metavar="N",
            min=1,
            help="With --random-weights: build only N of the target's layers, and estimate the cost of all of them.",
        ),
    ] = None,
    batch: Annotated[str, _shapes(metavar="B[,B...]", help="Batch size: sequences decoded together.")] = "1",
    context: Annotated[str, _shapes(metavar="C[,C...]", help="Context length: tokens already in the cache.")] = "512",
    width: Annotated[
        str, _shapes(metavar="N[,N...]", help="Tokens that a pass verifies; the widths of whole rounds are added.")
    ] = "1,2,4,8,16",
    acceptance: Annotated[
        float | None,
        _shapes(
            metavar="AL",
            help="Acceptance length for which to predict speed-ups. Default: the published one, if there is one.",
        ),
    ] = None,
    out: Annotated[Path | None, _results(metavar="DIR", help="Also write profile.json and profile.svg there.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure what a forward pass costs, and what limits the speed-up.

    Times a plain step, verifying n tokens, and drafting; compares them with the least time that this device would need;
    and says from which acceptance length drafting pays. Needs no prompts.
    """
    from dflash_bench import profiler
    from dflash_bench.bars import status
    from dflash_bench.report import plots
    from dflash_bench.report import profile as shown

    asked = profiler.Asked(
        request, random_weights, layers, whole_numbers(batch, "--batch"),
        whole_numbers(context, "--context"), whole_numbers(width, "--width"), acceptance,
    )  # fmt: skip
    profiler.check_out(out)
    with status() as tell:
        profiled = profiler.perform(asked, tell)
    text = json.dumps(shown.as_json(profiled), indent=1, allow_nan=False)
    if out is not None:
        title = f"Cost of a forward, {profiled.about['model']}{shown.estimate_note(profiled)}"
        plots.write_profile(profiled.judged, title, out / "profile.svg")
        write_whole(out / "profile.json", lambda file: file.write(f"{text}\n".encode()))
    say(text if as_json else shown.text(profiled), end="\n" if as_json else "")
    if out is not None:
        note(f"saved in {out}")
