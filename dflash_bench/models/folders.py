"""A model's folder before it is loaded: its settings, and whether its parts are files at all. Needs no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dflash_bench import reading
from dflash_bench.errors import UserError

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ENDINGS = (".json", ".safetensors", ".bin", ".pt", ".txt", ".jinja", ".model", ".tiktoken")
"""Of what is read of a folder, by us or by transformers."""
VOCABULARIES = ("tokenizer.json", "vocab.json")
"""Large, and read where they are used."""


def read_config(folder: Path) -> dict[str, Any]:
    return read_json(folder / "config.json")


def read_json(path: Path) -> dict[str, Any]:
    if not os.path.lexists(path):
        raise UserError(f"no model in {path.parent}: {path.name} is missing")
    config = reading.json_of(path)
    if not isinstance(config, dict):
        raise UserError(f"{path} holds no JSON object")
    return config


def require_files(folder: Path) -> None:
    """Raises UserError for a folder whose parts are no files, or whose settings nobody can read.

    Libraries would wait for a pipe's writer for ever, and end in a traceback over JSON that is nested a thousand deep.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise reading.cannot_read(folder, error) from error
    for path in (folder / name for name in names if name.endswith(ENDINGS)):
        reading.require_file(path)
        if path.suffix == ".json" and path.name not in VOCABULARIES:
            reading.json_of(path)
