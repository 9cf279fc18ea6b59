"""Prompts written for this project, to train a draft where there are none at hand: chat, code and mathematics.

Each is a form with its gaps filled at random (`starter.toml`), so that thousands of different ones come of little text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from dflash_bench import reading
from dflash_bench.errors import UserError

KINDS = ("chat", "code", "mathematics")
ENDINGS = ("", "", " Show your work.", "\nPlease reason step by step, and put your final answer within \\boxed{}.")
"""Of mathematics."""
TRIES = 1000
"""Draws in a row that give nothing new: then all there is has been drawn, or nearly."""
NUMBERS = {"a": (4, 60), "b": (2, 9), "c": (3, 12)}


@cache
def _texts() -> dict[str, Any]:
    return reading.toml_of(Path(__file__).with_suffix(".toml"))


def prompts(kind: str, count: int, seed: int = 0) -> Iterator[str]:
    """So many different prompts of a kind; the same ones for the same seed. Raises UserError where there are fewer."""
    rng, known, forms, known_in_a_row = Random(f"{kind} {seed}"), set[str](), _texts()["forms"][kind], 0
    while len(known) < count:
        text = _filled(rng.choice(forms), rng) + (rng.choice(ENDINGS) if kind == "mathematics" else "")
        known_in_a_row = known_in_a_row + 1 if text in known else 0
        if known_in_a_row > TRIES:
            raise UserError(f"there are only about {len(known):,} different prompts of {kind}; lower --written")
        if not known_in_a_row:
            known.add(text)
            yield text


def _filled(form: str, rng: Random) -> str:
    words = {name: str(rng.randint(low, high)) for name, (low, high) in NUMBERS.items()}

    def fill(gap: re.Match[str]) -> str:
        name = gap[1]
        # A name stands for one person throughout; topics, which a form may ask for twice, differ.
        if name not in words or name == "topic":
            words[name] = rng.choice([word for word in _texts()["gaps"][name] if word not in words.values()])
        return words[name]

    return re.sub(r"\{([a-z]+)\}", fill, form)
