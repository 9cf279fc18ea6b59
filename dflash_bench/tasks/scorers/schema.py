"""Scores whether an answer conforms to a JSON Schema, for servers that constrain their output."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_bench.core import files
from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Prompt
from dflash_bench.tasks.scorers.base import Score, Scorer, require_module

NAME = "json_schema"
"""The name of the scorer, and of the column that holds the schema."""


def read(path: Path) -> Mapping[str, Any]:
    """Read a schema. Raises UserError if the file holds none, or if the package that checks it is missing."""
    require_module("jsonschema")
    from jsonschema import SchemaError, validators

    schema = files.json_of(path)
    if not isinstance(schema, dict):
        raise UserError(f"{path} holds no JSON Schema, which is an object")
    try:
        validators.validator_for(schema).check_schema(schema)
    except SchemaError as error:
        raise UserError(f"{path} is not a JSON Schema: {error.message}") from error
    return schema


def fingerprint(schema: Mapping[str, Any]) -> str:
    """Return a hash that identifies a schema."""
    return hashlib.sha256(json.dumps(schema, sort_keys=True).encode()).hexdigest()[:16]


def json_schema(prompt: Prompt, text: str) -> Score:
    """Score whether the answer is JSON that conforms to the schema; truncated answers do not."""
    require_module("jsonschema")
    from jsonschema import validators

    schema = prompt.row[NAME]
    try:
        value = files.parse_json("", text)
    except UserError:
        return Score(text or None, False)
    return Score(json.dumps(value, ensure_ascii=False), validators.validator_for(schema)(schema).is_valid(value))


SCORER = Scorer(json_schema, {NAME: dict}, module="jsonschema")
