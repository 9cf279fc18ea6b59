"""`train`: a draft for any target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from dflash_bench.cli import options
from dflash_bench.cli.command import Command
from dflash_bench.core.terminal import say

app = typer.Typer()


_prompts, _answers = options.under("Prompts"), options.under("Answers")
_draft, _training = options.under("Draft"), options.under("Training")


@app.command(cls=Command)
def train(
    target: Annotated[str, Option(metavar="PATH|ID|NAME", help="The target: a folder, a hub id, or a known model.")],
    out: Annotated[
        Path, Option(metavar="DIR", help="Folder for the draft, in DIR/METHOD, and for the work on it, in DIR/work.")
    ],
    method: Annotated[str, Option(metavar="NAME", help="What to train: dflash, eagle3 or medusa.")] = "dflash",
    prompts: Annotated[
        list[str] | None,
        _prompts(
            metavar="FILE|SUITE=FILE",
            help="Prompts to train on: a file as for 'run --prompts', or rows of a suite, worded as the suite words "
            "them; may be repeated.",
        ),
    ] = None,
    written: Annotated[
        int, _prompts(metavar="N", min=0, help="Add N of our own prompts each for chat, code and mathematics.")
    ] = 0,
    invented: Annotated[int, _prompts(metavar="N", min=0, help="Add N prompts made up by the target itself.")] = 0,
    opening: Annotated[
        list[str] | None,
        _prompts(metavar="TEXT", help="Opening words of the prompts that the target makes up; may be repeated."),
    ] = None,
    against: Annotated[
        Path | None,
        _prompts(
            metavar="FOLDER",
            help="Rows of test suites, as for 'run --data': prompts that occur in them are refused, as are those that "
            "occur in the embedded suites.",
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        _prompts(metavar="WHAT", help="overlap: train on prompts of a test suite anyway."),
    ] = None,
    sampled: Annotated[
        float, _answers(metavar="SHARE", min=0, max=1, help="Share of the prompts answered again at temperature 1.")
    ] = 0.25,
    max_new_tokens: Annotated[int, _answers(metavar="N", min=2, max=448, help="Stop answers after N tokens.")] = 256,
    batch_size: Annotated[int, _answers(metavar="N", min=1, help="Number of answers decoded together.")] = 64,
    max_disk: Annotated[
        float, _answers(metavar="GB", min=0, help="Most disk space that the target's states may take.")
    ] = 20.0,
    on_the_fly: Annotated[
        bool,
        _answers(
            "--on-the-fly",
            help="Store only the answers, and compute the target's states at each step: slower, but takes no disk.",
        ),
    ] = False,
    layers: Annotated[
        int | None, _draft(metavar="N", min=1, max=32, help="Number of layers of a DFlash draft. Default: 2.")
    ] = None,
    block_size: Annotated[
        int | None,
        _draft(metavar="N", min=2, max=64, help="Block size of a DFlash draft, including the anchor. Default: 16."),
    ] = None,
    draft_vocab: Annotated[
        int | None,
        _draft(
            metavar="N",
            min=16,
            help="Let the draft use only the N most frequent tokens: the head of EAGLE-3 (default 8192), and the "
            "tokens that DFlash learns to distinguish (default: all).",
        ),
    ] = None,
    slim: Annotated[
        bool,
        _draft(
            "--slim",
            help="Use rows of the target's head and leave them out of the file: it is smaller, and DFlash with "
            "--draft-vocab drafts faster, but only this tool reads it; 'convert --target' writes it in full.",
        ),
    ] = False,
    mask_token: Annotated[
        str | None,
        _draft(metavar="TOKEN", help="Token that stands for a masked position, if the target has no spare id."),
    ] = None,
    epochs: Annotated[
        float | None, _training(metavar="N", min=0.01, help="Number of passes over the answers. Default: 6.")
    ] = None,
    steps: Annotated[int | None, _training(metavar="N", min=1, help="Number of steps, instead of --epochs.")] = None,
    rate: Annotated[
        float | None, _training(metavar="X", min=0, help="Learning rate of matrices. Default: found by a search.")
    ] = None,
    distil: Annotated[
        float | None,
        _training(
            metavar="SHARE",
            min=0,
            max=1,
            help="Share of DFlash's loss that is about the target's distribution rather than its tokens. Default: 0.5.",
        ),
    ] = None,
    patience: Annotated[
        int | None,
        _training(
            metavar="N",
            min=1,
            help="Stop after N measurements without improvement, and keep the best weights. There are two per epoch, "
            "and at least eight in total.",
        ),
    ] = None,
    seed: Annotated[
        int, _training(metavar="N", min=0, help="Random seed for prompts, sampling, weights and order.")
    ] = 0,
    threads: Annotated[int | None, _training(metavar="N", min=1, help="CPU threads.")] = None,
    device: Annotated[
        str | None,
        _training(
            metavar="D", help="cpu, cuda or cuda:N. Default: cuda if there is one; 'accelerate launch' uses several."
        ),
    ] = None,
    estimate_only: Annotated[
        bool,
        _training("--estimate", help="Try a little, say how much time, disk and memory training will take, and stop."),
    ] = False,
    to: Annotated[
        str | None,
        _training(metavar="FORMAT", help="Format of the draft, as for convert. Default: zlab or safeailab."),
    ] = None,
) -> None:
    """Train a draft for your own target, on its own answers.

    The target answers the prompts, the draft learns from the answers, and decoding with it shows what it is worth. If
    interrupted, the same command continues.
    """
    from dflash_bench.core.terminal import status
    from dflash_bench.models.presets import table
    from dflash_bench.training import estimate, session
    from dflash_bench.training.config import TrainRequest

    request = TrainRequest(
        target=target, method=method, out=out, prompts=tuple(prompts or ()), written=written, invented=invented,
        openings=tuple(opening or ()), against=against, allow=tuple(allow or ()), sampled=sampled,
        max_new_tokens=max_new_tokens, batch_size=batch_size, max_disk_gb=max_disk, on_the_fly=on_the_fly,
        layers=layers, block_size=block_size, draft_vocab=draft_vocab, slim=slim, mask_token=mask_token,
        epochs=epochs, steps=steps, rate=rate, distil=distil, patience=patience, seed=seed,
        threads=threads, device=device, format=to,
    )  # fmt: skip
    if estimate_only:
        with status() as tell:
            expected = estimate.perform(request, tell)
        say(estimate.text(expected))
        return
    with status() as tell:
        folder = session.perform(request, tell)
    if folder is None:
        return
    flag = "--model" if target in table() else "--target"
    say(f"saved in {folder}; use it with {flag} {target} --draft {method}={folder}")
    say(_drawn(folder, method))


def _drawn(folder: Path, method: str) -> str:
    """Acceptance over the training, as a picture beside the card."""
    from dflash_bench.core import files
    from dflash_bench.report import plots
    from dflash_bench.training.cards import HISTORY

    try:
        path = plots.write_training({method: files.json_of(folder / HISTORY)}, folder / "training.svg")
        return f"how its acceptance grew: {path}"
    except plots.NothingToPlotError as error:
        return f"no picture of the training: {error}"
