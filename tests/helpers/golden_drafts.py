"""Drafts in publishers' formats, and what the publishers' own code drafts with them (`dflash_bench/conformance`)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import dflash_bench as db

CASES = Path(db.__file__).parent / "conformance"


@cache
def golden(name: str) -> dict[str, Any]:
    return json.loads((CASES / name / "golden.json").read_text())  # type: ignore[no-any-return]


def assert_drafts_as_published(
    name: str, method: str, draft: Path | None = None, target: Path | None = None, **settings: Any
) -> None:
    """Decode a case's prompts in float32: text, and what each round drafts, verifies and accepts must be equal.

    `draft` and `target` are folders that are read in place of the case's own, `settings` are those of the engine.
    """
    case = golden(name)
    kind, _, _ = method.partition(":")
    drafts = {} if kind == "mtp" else {kind: draft or CASES / name / "draft"}
    home = target or (CASES / name / case["target"]).resolve()
    with db.Engine(target=home, drafts=drafts, dtype="float32", **settings) as engine:
        for expected in case["cases"]:
            answer = engine.generate(
                expected["prompt"],
                method=method,
                max_new_tokens=expected["max_new_tokens"],
                stop_ids=expected.get("stop_token_ids") or (),
            )
            assert list(answer.token_ids) == expected["tokens"]
            # Some loops draft once more behind the last token that the limit allows.
            end = len(expected["prompt"]) + len(expected["tokens"]) - 1
            rounds = [step for step in expected["rounds"] if step["anchor_at"] < end]
            assert len(answer.rounds) == len(rounds)
            for ours, theirs in zip(answer.rounds, rounds, strict=True):
                if len(theirs["drafted"]) < len(ours.drafted):
                    # z-lab's last blocks shrink to what the limit leaves: a smaller block may draft other tokens.
                    assert min(ours.accepted, len(theirs["drafted"])) == theirs["accepted"], theirs["anchor_at"]
                    continue
                assert (list(ours.drafted), ours.accepted) == (theirs["drafted"], theirs["accepted"])
                assert ours.verified == theirs.get("verified", len(ours.drafted)), theirs["anchor_at"]
