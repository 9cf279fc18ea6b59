"""Tokens of a method that is right, or off in a way that the test asks for, as `verify-distribution` sees them."""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash_bench.diagnose.goodness_of_fit import COLUMNS, Draws

LENGTH, DEEPEST = 15, 6


def draws(num_answers: int = 200, seed: int = 0, method: str = "dflash", **bend: Any) -> Draws:
    """At each place one token is right with its own probability; the draft favours that token, or another.

    `bend` says with what other probability it is drawn, and for which tokens.
    """
    rng = np.random.default_rng(seed)
    number = num_answers * LENGTH
    p = rng.uniform(0.1, 0.9, number)
    place = np.tile(np.arange(LENGTH), num_answers) + 1
    depth = np.where(place > 1, (place - 2) % (DEEPEST + 1) + 1, 0)
    columns: dict[str, Any] = {
        "place": place,
        "depth": depth,
        "is_bonus": depth == DEEPEST + 1,
        "is_forced": rng.random(number) < 0.2,
        "is_open": np.ones(number, dtype=bool),
        "is_impossible": np.zeros(number, dtype=bool),
    }
    columns["is_forced"] &= (depth > 0) & ~columns["is_bonus"]
    actual = bend["share"](p) if bend else p
    chance = np.where(bend["where"](columns), actual, p) if bend else p
    right = rng.random(number) < chance
    columns["is_kept"] = right
    columns["rank"] = columns["by_id"] = np.where(right, 0, p) + np.where(right, p, 1 - p) * rng.random(number)
    variance, third = p * (1 - p), p * (1 - p) * (1 - 2 * p)
    columns |= {"leaning": right.astype(float), "leaning_mean": p, "leaning_variance": variance, "leaning_third": third}
    scale = np.log(p / (1 - p))
    columns |= {
        "likelihood": np.where(right, np.log(p), np.log(1 - p)),
        "likelihood_mean": p * np.log(p) + (1 - p) * np.log(1 - p),
        "likelihood_variance": variance * scale**2,
        "likelihood_third": third * scale**3,
    }
    return Draws(method, num_answers, {name: columns[name] for name in COLUMNS})
