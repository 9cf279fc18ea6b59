"""`train`: a draft for any target."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from dflash_bench.cli import net, options
from dflash_bench.cli.command import GroupedHelp
from dflash_bench.core.terminal import note, say, status
from dflash_bench.training.config import TrainRequest

app = typer.Typer()


@app.command(cls=GroupedHelp)
@options.with_options()
def train(
    request: TrainRequest,
    estimate_only: Annotated[
        bool,
        Option(
            "--estimate",
            help="Try a little, print how much time, disk and memory training takes, and stop: train --target MODEL "
            "--out DIR --estimate.",
        ),
    ] = False,
) -> None:
    """Train a draft for your own target, on its own answers.

    The target answers the prompts, the draft learns from the answers, and decoding held-out prompts with it, before and
    after, shows what it is worth. If interrupted, the same command continues.
    """
    from dflash_bench.models.presets import table
    from dflash_bench.training import cards, session
    from dflash_bench.training.estimate import estimate

    if estimate_only:
        with status() as tell:
            expected = estimate(request, tell)
        say(expected)
        return
    try:
        with status() if _is_first() else nullcontext(lambda _: None) as tell:
            folder = session.perform(request, tell)
    except KeyboardInterrupt:
        note("stopped; the same command continues")
        sys.exit(net.stopped_status())
    if folder is None:
        return
    flag = "--model" if request.target in table() else "--target"
    measured = cards.acceptance_of(folder)
    assert measured is not None  # written with the card
    say(str(measured))
    if measured.has_learnt:
        say(f"saved in {folder}; use it with {flag} {request.target} --draft {request.drafter}={folder}")
    else:
        say(f"saved in {folder}, but not worth using: it has learnt nothing, so drafting with it only costs time")
        note("train on more answers (--written, --prompts, --epochs), or leave out --rate to have it found by a search")
    say(_draw(folder, request.method))


def _draw(folder: Path, method: str) -> str:
    """Plot the growth of acceptance beside the card, and return a line with its path, or why there is no plot."""
    from dflash_bench.core import files
    from dflash_bench.report import plots
    from dflash_bench.training.cards import HISTORY

    try:
        path = plots.write_training({method: files.json_of(folder / HISTORY)}, folder / "training.svg")
        return f"how its acceptance grew: {path}"
    except plots.NothingToPlotError as error:
        return f"no picture of the training: {error}"


def _is_first() -> bool:
    """Whether this is the first of the processes that a launcher started, which alone reports progress."""
    return os.environ.get("RANK", "0") == "0"
