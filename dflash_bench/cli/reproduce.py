"""`reproduce`: a table or figure of the DFlash paper."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from dflash_bench.cli import net, options
from dflash_bench.cli.command import Command
from dflash_bench.core.errors import UserError
from dflash_bench.core.labels import WIDTH
from dflash_bench.core.terminal import Stages, note, say, terminal_width
from dflash_bench.reproduction.options import OMIT, TrainingOptions
from dflash_bench.runner.config import RunRequest

if TYPE_CHECKING:
    from dflash_bench.reproduction.items import Item

app = typer.Typer()
OPTIONS = (
    "item model limit estimate out data max_new_tokens device device_map dtype attention engine kernels threads "
    "launch_with launch_args train_prompts written epochs train_seed"
)


@app.command(cls=Command)
@options.with_options(
    OPTIONS,
    helps={
        "model": "One of the item's models, by its name in 'dflash-bench models'; or another model, such as nano, to "
        "stand in for them: nothing is then compared with published figures. Default: all of the item's models.",
        "max_new_tokens": "Most tokens per answer. Default: as published.",
    },
)
def reproduce(
    request: RunRequest,
    training: TrainingOptions,
    item: Annotated[
        str | None, Argument(metavar="[ITEM]", help="A table or figure of the paper. Default: list them.")
    ] = None,
    estimate: Annotated[
        bool, Option("--estimate", help="Say how much memory and how many hours it takes on an A100 and an H100.")
    ] = False,
    out: Annotated[
        Path | None,
        options.under("Results")(
            "-o",
            "--out",
            metavar="DIR",
            help="Folder for the runs and reproduction.md. Default: one in results/runs, by the options.",
        ),
    ] = None,
) -> None:
    """Reproduce a table or figure of the DFlash paper.

    Measures what it shows, and says of each published figure whether it was reproduced, and of each claim whether it
    holds. Stopped at any time, the same command goes on.
    """
    from dflash_bench.models import catalogue
    from dflash_bench.reproduction import items, words

    if item is None:
        say(words.listed(list(items.items().values()), catalogue.machine(), terminal_width(WIDTH)))
        return
    chosen = items.item(item)
    if estimate:
        if training != TrainingOptions():
            raise UserError(f"--estimate covers runs, not training: {OMIT}")
        _estimate(chosen, request)
        return
    with Stages() as stages:
        stages.begin("starting")
        from dflash_bench.reproduction import drafting, perform
        from dflash_bench.runner.session import Caller

        try:
            if chosen.profile:
                timed = drafting.measure(chosen, request, training, stages)
                folder = out or perform.default_folder(chosen, request, training)
                drafting.write_page(timed, folder)
                stages.end()
                say(drafting.ended(timed, folder, terminal_width(80)), end="")
                return
            made = perform.perform(chosen, request, training, out, Caller(note, stages=stages))
        except KeyboardInterrupt:
            stages.end()
            note("stopped; finished answers are saved, and the same command goes on")
            sys.exit(net.stopped_status())
    say(words.ended(made.item, made.verdicts, made.refused, made.folder, terminal_width(80)), end="")


def _estimate(item: Item, request: RunRequest) -> None:
    from dflash_bench.reproduction import words
    from dflash_bench.reproduction.estimate import estimate
    from dflash_bench.reproduction.parts import parts

    if item.profile:
        raise UserError(f"--estimate is of decoding, and {item.name} only times drafts, in a minute: leave it out")
    made = parts(item, request)
    if made[0].target is None:
        raise UserError(f"--estimate is for the models of {item.name}: {', '.join(item.models.values())}")
    say(words.estimated(item, [estimate(item, part) for part in made], terminal_width(WIDTH)))
