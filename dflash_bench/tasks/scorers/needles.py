"""MRCR: repeat one of several similar texts verbatim, after a random string that identifies it."""

from __future__ import annotations

from difflib import SequenceMatcher

from dflash_bench.core.types import Prompt
from dflash_bench.tasks.scorers.base import Score, Scorer, reference

PREFIX = "random_string_to_prepend"
"""The column of the string that the answer must begin with."""


def mrcr(prompt: Prompt, text: str) -> Score:
    """Return difflib's similarity of answer and reference after the prefix, from 0 to 1; 0 without the prefix.

    The rule is that of the data set card (openai/mrcr).
    """
    prefix, right = str(prompt.row[PREFIX]), reference(prompt)
    if not text.startswith(prefix):
        return Score(text or None, None, 0.0)
    answer = text.removeprefix(prefix)
    return Score(answer, None, SequenceMatcher(None, answer, right.removeprefix(prefix)).ratio())


SCORER = Scorer(mrcr, {PREFIX: str}, check=reference)
