"""Build nano: the program of `scripts/nano/train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from dflash_bench.models.presets import NANO
from nano.builder import Builder, NanoRecipe
from nano.data import write_samples

EMBEDDED = Path(__file__).parents[2] / "suites" / "embedded"


def train(
    work: Annotated[Path, typer.Option(help="Where checkpoints and the target's answers go (about 3 GB).")] = Path(
        "results/nano"
    ),
    output: Annotated[Path, typer.Option(help="Where the finished models go.")] = NANO,
    extra: Annotated[
        Path | None, typer.Option(help="Folder NAME/SPLIT.jsonl of suites with answers, mixed in.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="Folder NAME/SPLIT.jsonl of test suites; the cards say what is shared with them."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    sweep: Annotated[bool, typer.Option("--sweep", help="Try learning rates for both drafts and stop.")] = False,
) -> None:
    """Train the nano target and all its drafts."""
    from rich.console import Console

    torch.set_num_threads(threads)
    with Console(stderr=True).status("starting") as status:
        builder = Builder(NanoRecipe(), work, status.update, extra, against)
        if sweep:
            tokenizer = builder.tokenizer()
            builder.rows(builder.target(tokenizer)[0], tokenizer)
            typer.echo(builder.sweep((0.02, 0.04, 0.08, 0.16), 150))
            return
        write_samples(EMBEDDED)
        builder.build(output)


if __name__ == "__main__":
    typer.run(train)
