"""Was this draft made for this target? What its own files say about tokenizer and verifier."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_bench import reading
from dflash_bench.errors import UserError


def other_tokenizer(folder: Path, vocabulary: Mapping[str, int]) -> str | None:
    """What is wrong where the draft's own tokenizer gives an id of the target's `vocabulary` to another token.

    A draft without a tokenizer reads the target's. Tokens that only one of them has do no harm: drafts were published
    with a mask token added, and targets are fine-tuned with a few more.
    """
    own = vocabulary_in(folder)
    tokens = {index: token for token, index in vocabulary.items()}
    differing = {index: token for token, index in own.items() if tokens.get(index, token) != token}
    if not differing:
        return None
    first = min(differing)
    return (
        f"made for another tokenizer: {len(differing)} of {len(own)} ids differ; {first} is "
        f"{differing[first]!r} to the draft and {tokens[first]!r} to the target; use the target's own draft"
    )


def vocabulary_in(folder: Path) -> dict[str, int]:
    """Token to id, from tokenizer.json or else vocab.json; none where neither is there. UserError for a damaged one."""
    for name in ("tokenizer.json", "vocab.json"):
        path = folder / name
        if not os.path.lexists(path):
            continue
        content = reading.json_of(path)
        try:
            return _tokens(content) if name == "tokenizer.json" else {str(t): int(i) for t, i in content.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is not a vocabulary ({error}); copy it again, or remove it") from error
    return {}


def _tokens(content: Mapping[str, Any]) -> dict[str, int]:
    """A model holds token to id, or, if it is a unigram model, a list of [token, score]."""
    listed = content["model"]["vocab"]
    pairs = listed.items() if isinstance(listed, dict) else ((token, i) for i, (token, _) in enumerate(listed))
    added = ((token["content"], token["id"]) for token in content.get("added_tokens") or ())
    return {str(token): int(index) for token, index in (*pairs, *added)}


def other_verifier(config: Mapping[str, Any], target: str) -> str | None:
    """A line for a draft whose config names another target; the same model may lie in a folder of any name."""
    named = verifier(config)
    if named is None or named.rpartition("/")[2].lower() == target.rpartition("/")[2].lower():
        return None
    return f"its config names {named} as its target, this one is {target}"


def verifier(config: Mapping[str, Any]) -> str | None:
    """The target that a speculators config says it was trained for."""
    match config.get("speculators_config"):
        case {"verifier": {"name_or_path": str(name)}} if name:
            return name
    return None
