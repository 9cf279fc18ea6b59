"""Was this draft made for this target? What the draft's files say about its tokenizer and its target."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_bench import reading
from dflash_bench.errors import ANOTHER_DRAFT, DraftProblem, UserError


def other_tokenizer(folder: Path, vocabulary: Mapping[str, int]) -> DraftProblem | None:
    """The problem if the draft's tokenizer uses an id of the target's `vocabulary` for another token, else None.

    A draft without a tokenizer uses the target's. Tokens that only one of the two has do no harm: drafts were published
    with a mask token added, and targets are fine-tuned with a few more.
    """
    draft_vocabulary = vocabulary_in(folder)
    tokens = {index: token for token, index in vocabulary.items()}
    differing = {index: token for token, index in draft_vocabulary.items() if tokens.get(index, token) != token}
    if not differing:
        return None
    first = min(differing)
    return DraftProblem(
        "other_tokenizer",
        f"made for another tokenizer: {len(differing)} of {len(draft_vocabulary)} ids differ; {first} is "
        f"{differing[first]!r} in the draft and {tokens[first]!r} in the target",
        ANOTHER_DRAFT,
    )


def vocabulary_in(folder: Path) -> dict[str, int]:
    """Token to id, from tokenizer.json or else vocab.json; empty if there is neither. UserError for a damaged one."""
    for name in ("tokenizer.json", "vocab.json"):
        path = folder / name
        if not os.path.lexists(path):
            continue
        content = reading.json_of(path)
        try:
            return _tokens(content) if name == "tokenizer.json" else {str(t): int(i) for t, i in content.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is not a vocabulary ({error})", "copy it again, or remove it") from error
    return {}


def _tokens(content: Mapping[str, Any]) -> dict[str, int]:
    """A tokenizer's model maps token to id, or, if it is a unigram model, lists [token, score]."""
    vocab = content["model"]["vocab"]
    pairs = vocab.items() if isinstance(vocab, dict) else ((token, i) for i, (token, _) in enumerate(vocab))
    added = ((token["content"], token["id"]) for token in content.get("added_tokens") or ())
    return {str(token): int(index) for token, index in (*pairs, *added)}


def other_verifier(config: Mapping[str, Any], target: str) -> str | None:
    """A note if the draft's config names another target, else None. A doubt only: a folder may have any name."""
    trained_for = verifier(config)
    if trained_for is None or trained_for.rpartition("/")[2].lower() == target.rpartition("/")[2].lower():
        return None
    return f"its config names {trained_for} as its target, but this one is {target}"


def verifier(config: Mapping[str, Any]) -> str | None:
    """The target that a speculators config says the draft was trained for."""
    match config.get("speculators_config"):
        case {"verifier": {"name_or_path": str(name)}} if name:
            return name
    return None
