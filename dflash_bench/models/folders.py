"""A model's folder before it is loaded: its settings, and whether its parts are really files. Needs no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dflash_bench import reading
from dflash_bench.errors import UserError

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ENDINGS = (".json", ".safetensors", ".bin", ".pt", ".txt", ".jinja", ".model", ".tiktoken")
"""Endings of the files that we or transformers read."""
VOCABULARIES = ("tokenizer.json", "vocab.json")
"""Large files, which are only read where they are used."""


def read_config(folder: Path) -> dict[str, Any]:
    return read_json(folder / "config.json")


def read_json(path: Path) -> dict[str, Any]:
    if not os.path.lexists(path):
        raise UserError(f"no model in {path.parent}: {path.name} is missing")
    config = reading.json_of(path)
    if not isinstance(config, dict):
        raise UserError(f"{path} does not hold a JSON object")
    return config


def require_files(folder: Path) -> None:
    """Raises UserError for a folder with parts that are not files, or settings that cannot be read.

    Libraries would wait forever for someone to write to a pipe, and crash on JSON nested a thousand levels deep.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise reading.cannot_read(folder, error) from error
    for path in (folder / name for name in names if name.endswith(ENDINGS)):
        reading.require_file(path)
        if path.suffix == ".json" and path.name not in VOCABULARIES:
            reading.json_of(path)
