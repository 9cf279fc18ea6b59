"""Was this draft made for this target? What its own files say about tokenizer and verifier."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_bench.errors import UserError


def check_tokenizer(folder: Path, vocabulary: Mapping[str, int]) -> None:
    """Raise UserError where the draft's own tokenizer gives an id of the target's `vocabulary` to another token.

    A draft without a tokenizer reads the target's. Tokens that only one of them has do no harm: drafts were published
    with a mask token added, and targets are fine-tuned with a few more.
    """
    own = _vocabulary(folder)
    tokens = {index: token for token, index in vocabulary.items()}
    differing = {index: token for token, index in own.items() if tokens.get(index, token) != token}
    if differing:
        first = min(differing)
        raise UserError(
            f"{folder} was made for another tokenizer: {len(differing)} of {len(own)} ids differ; {first} is "
            f"{differing[first]!r} to the draft and {tokens[first]!r} to the target; use the target's own draft"
        )


def _vocabulary(folder: Path) -> dict[str, int]:
    """Token to id, from tokenizer.json or else vocab.json; empty where the draft ships neither."""
    for name in ("tokenizer.json", "vocab.json"):
        path = folder / name
        if not path.exists():
            continue
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return _tokens(content) if name == "tokenizer.json" else {str(t): int(i) for t, i in content.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is not a vocabulary ({error}); copy it again, or remove it") from error
    return {}


def _tokens(content: Mapping[str, Any]) -> dict[str, int]:
    """A model holds token to id, or, if it is a unigram model, a list of [token, score]."""
    listed = content["model"]["vocab"]
    pairs = listed.items() if isinstance(listed, dict) else ((token, i) for i, (token, _) in enumerate(listed))
    added = ((token["content"], token["id"]) for token in content.get("added_tokens") or ())
    return {str(token): int(index) for token, index in (*pairs, *added)}


def verifier(config: Mapping[str, Any]) -> str | None:
    """The target that a speculators config says it was trained for."""
    match config.get("speculators_config"):
        case {"verifier": {"name_or_path": str(name)}} if name:
            return name
    return None
