"""What plain decoding answered, token by token: the target's own answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dflash_bench.records import Settings
from dflash_bench.results import parts
from dflash_bench.results.identity import checked_settings, needed_for
from dflash_bench.results.plan import BASELINE

COLUMNS = ("suite", "prompt_id", "turn", "repeat", "method", "error", "num_hidden_tokens", "token_ids")


class Question(NamedTuple):
    suite: str
    settings_id: str
    prompt_id: str
    repeat: int


def plain_answers(folder: Path, run_settings: Sequence[Settings], left_out: Mapping[Path, Any]) -> dict[Question, Any]:
    """Token ids [T] of a run that `frame.read` has read; only of first turns, as later ones hang on earlier answers."""
    answers: dict[Question, Any] = {}
    for part in parts.of(folder):
        with suppress(parts.DamagedError):  # it was allowed to be, or the run would not have been read
            columns = [*COLUMNS, *needed_for(run_settings)]
            for batch in parts.batches(part, columns, left_out=left_out.get(part)):
                numbers = checked_settings(batch, run_settings)
                for number in np.flatnonzero(_is_plain(batch)).tolist():
                    suite, prompt_id, repeat, tokens = (
                        batch.column(name)[number] for name in ("suite", "prompt_id", "repeat", "token_ids")
                    )
                    settings_id = run_settings[numbers[number]].id
                    question = Question(suite.as_py(), settings_id, prompt_id.as_py(), repeat.as_py())
                    answers[question] = tokens.values.to_numpy()
    return answers


def _is_plain(batch: Any) -> Any:
    """The mask of good first answers by plain decoding whose tokens are known, [rows]."""
    from pyarrow import compute

    first = compute.equal(batch.column("turn"), 0)
    good = compute.and_(first, compute.is_null(batch.column("error")))
    good = compute.and_(good, compute.is_null(batch.column("num_hidden_tokens")))
    return compute.and_(good, compute.equal(batch.column("method"), BASELINE)).to_numpy(zero_copy_only=False)
