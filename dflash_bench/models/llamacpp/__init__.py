"""Targets and drafts as GGUF files, so that llama.cpp runs the same weights that are measured here."""

from __future__ import annotations

import os
from pathlib import Path

from dflash_bench.errors import UserError
from dflash_bench.models import files, formats, gguf, hub, pairing, presets, targets
from dflash_bench.models.llamacpp import draft, file, target, vocabulary
from dflash_bench.models.llamacpp.networks import Network

ENDING = ".gguf"
OF_DRAFTS = "fc.weight"
"""A tensor of every DFlash and EAGLE-3 draft, which fuses the target's features; no target has it."""


def convert(reference: str, destination: Path, of_target: str | None) -> list[str]:
    """Write a target, or a draft of `of_target`, as a new file. Returns remarks; raises UserError."""
    if destination.suffix != ENDING:
        raise UserError(f"{destination} is to be a GGUF file; name one that ends in {ENDING}")
    if os.path.lexists(destination):
        raise UserError(f"{destination} exists already; name a new file")
    if not destination.parent.is_dir():
        raise UserError(f"{destination.parent} is not a folder; make it, or name another place")
    if gguf.is_file(reference):
        raise UserError(f"{reference} is a GGUF file already")
    if reference in presets.table():
        folder, is_draft = targets.find_target(reference), False
    else:
        folder = hub.folder_of(reference) or hub.fetch(reference, pickles=True).folder
        is_draft = OF_DRAFTS in files.read_tensors(folder, lambda _: False)
    if is_draft:
        network, home = _draft(folder, of_target)
    elif of_target is not None:
        raise UserError(f"{reference} is a target, and --target is for drafts; leave it out")
    else:
        network, home = target.read(folder), folder
    settings, remarks = vocabulary.read(home, targets.shape_of(home).vocab_size, with_template=not is_draft)
    file.write(destination, network, reference.rstrip("/").rpartition("/")[2], settings)
    return remarks


def _draft(folder: Path, of_target: str | None) -> tuple[Network, Path]:
    """The draft, and the folder of its target."""
    if of_target is None:
        raise UserError(f"{folder} is a draft, and its GGUF file holds its target's tokenizer; give --target")
    home = targets.find_target(of_target)
    shape = targets.shape_of(home)
    form, checkpoint = formats.read_checkpoint(folder, shape)
    problems = [*formats.problems(form, checkpoint, shape)]
    if other := pairing.other_tokenizer(folder, targets.tokenizer_of(home).get_vocab()):
        problems.append(other)
    for problem in problems:
        raise UserError(f"{folder}: {problem}")
    if checkpoint.target_head:
        checkpoint = checkpoint.with_head(targets.vocabulary_of(home)[targets.HEAD])
    try:
        return draft.describe(checkpoint, shape.num_layers), home
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error
