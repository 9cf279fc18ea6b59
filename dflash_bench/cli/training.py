"""`train`: a draft for any target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from dflash_bench.cli import options
from dflash_bench.cli.command import Command
from dflash_bench.cli.output import say

app = typer.Typer()


_prompts, _answers = options.under("Prompts"), options.under("Answers")
_draft, _training = options.under("Draft"), options.under("Training")


@app.command(cls=Command)
def train(
    target: Annotated[str, Option(metavar="PATH|ID|NAME", help="The target: a folder, a hub id, or a known model.")],
    out: Annotated[Path, Option(metavar="DIR", help="The draft goes into DIR/METHOD, what leads to it into DIR/work.")],
    method: Annotated[str, Option(metavar="NAME", help="What to train: dflash, eagle3 or medusa.")] = "dflash",
    prompts: Annotated[
        list[str] | None,
        _prompts(
            metavar="FILE|SUITE=FILE",
            help="Prompts to train on, as for run --prompts, or rows of a suite, asked as it asks; may be repeated.",
        ),
    ] = None,
    written: Annotated[
        int, _prompts(metavar="N", min=0, help="Add N prompts each of chat, code and mathematics, ours.")
    ] = 0,
    invented: Annotated[int, _prompts(metavar="N", min=0, help="Add N prompts that the target makes up itself.")] = 0,
    opening: Annotated[
        list[str] | None,
        _prompts(metavar="TEXT", help="How prompts begin that the target makes up; may be repeated."),
    ] = None,
    against: Annotated[
        Path | None,
        _prompts(
            metavar="FOLDER",
            help="Rows of test suites, as for run --data: prompts that stand in one are refused, as they are if they "
            "stand in the embedded ones.",
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        _prompts(metavar="WHAT", help="overlap: train on prompts of a test suite all the same."),
    ] = None,
    sampled: Annotated[
        float, _answers(metavar="SHARE", min=0, max=1, help="The share answered again, at temperature 1.")
    ] = 0.25,
    max_new_tokens: Annotated[int, _answers(metavar="N", min=2, max=448, help="Longest answer.")] = 256,
    batch_size: Annotated[int, _answers(metavar="N", min=1, help="Answers decoded together.")] = 64,
    max_disk: Annotated[
        float, _answers(metavar="GB", min=0, help="The most that the target's states may take.")
    ] = 20.0,
    on_the_fly: Annotated[
        bool,
        _answers(
            "--on-the-fly",
            help="Store answers alone, and compute the target's states in each step: slower, but takes no disk.",
        ),
    ] = False,
    layers: Annotated[
        int | None, _draft(metavar="N", min=1, max=32, help="Layers of a DFlash draft. Default: 2.")
    ] = None,
    block_size: Annotated[
        int | None,
        _draft(metavar="N", min=2, max=64, help="Block of a DFlash draft, the anchor included. Default: 16."),
    ] = None,
    draft_vocab: Annotated[
        int | None,
        _draft(
            metavar="N",
            min=16,
            help="Tokens that the draft may say, the most frequent: the head of EAGLE-3 (default 8192), and what "
            "DFlash learns to tell apart (default: all).",
        ),
    ] = None,
    slim: Annotated[
        bool,
        _draft(
            "--slim",
            help="Take the target's rows for a head and leave it out of the file: smaller, and DFlash with "
            "--draft-vocab drafts faster, but only this tool reads it; convert --target writes it in full.",
        ),
    ] = False,
    mask_token: Annotated[
        str | None,
        _draft(metavar="TOKEN", help="What stands for a masked token, if the target has no spare id."),
    ] = None,
    epochs: Annotated[
        float | None, _training(metavar="N", min=0.01, help="Times that each answer is read. Default: 6.")
    ] = None,
    steps: Annotated[int | None, _training(metavar="N", min=1, help="Steps, instead of epochs.")] = None,
    rate: Annotated[
        float | None, _training(metavar="X", min=0, help="Learning rate of matrices. Default: searched for.")
    ] = None,
    distil: Annotated[
        float | None,
        _training(
            metavar="SHARE",
            min=0,
            max=1,
            help="How much of DFlash's loss is the target's own distribution instead of its tokens. Default: 0.5.",
        ),
    ] = None,
    patience: Annotated[
        int | None,
        _training(
            metavar="N",
            min=1,
            help="Stop after N measurements without a gain, and keep the best weights. There are two an epoch, and "
            "eight at least in all.",
        ),
    ] = None,
    seed: Annotated[int, _training(metavar="N", min=0, help="Of prompts, sampling, weights and order.")] = 0,
    threads: Annotated[int | None, _training(metavar="N", min=1, help="CPU threads.")] = None,
    device: Annotated[
        str | None,
        _training(
            metavar="D", help="cpu, cuda or cuda:N. Default: cuda if there is one; 'accelerate launch' uses several."
        ),
    ] = None,
    estimate_only: Annotated[
        bool,
        _training(
            "--estimate", help="Say what it will take, in time, disk and memory, after trying a little; then stop."
        ),
    ] = False,
    to: Annotated[
        str | None,
        _training(metavar="FORMAT", help="Format of the draft, as for convert. Default: zlab or safeailab."),
    ] = None,
) -> None:
    """Train a draft for your own target, on its own answers.

    The target answers the prompts; the draft learns from that, and what it is worth is measured by decoding with it.
    Interrupted, the same command goes on where it was.
    """
    from dflash_bench.bars import status
    from dflash_bench.models.presets import table
    from dflash_bench.train import estimate, session
    from dflash_bench.train.request import Request

    request = Request(
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
    from dflash_bench import reading
    from dflash_bench.report import plots
    from dflash_bench.train.cards import HISTORY

    try:
        path = plots.write_training({method: reading.json_of(folder / HISTORY)}, folder / "training.svg")
        return f"how its acceptance grew: {path}"
    except plots.NothingToPlotError as error:
        return f"no picture of the training: {error}"
