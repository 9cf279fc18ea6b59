"""Shards: parts of a run that can be measured on different machines, each with prompts of every suite."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from dflash_bench.core.errors import UserError

MOST_SHARDS = 10_000
Prompted = TypeVar("Prompted")


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `number` of `of`, counted from 1: every `of`-th pair of prompts of each suite.

    The order of methods is reversed for every other prompt, so that a pair has both orders.
    """

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def holds(self, prompt: int) -> bool:
        """Return whether a prompt, by its index in its suite, belongs to this shard."""
        return prompt // 2 % self.of == self.number - 1

    def part(self, prompts: Sequence[Prompted]) -> list[Prompted]:
        return [prompt for number, prompt in enumerate(prompts) if self.holds(number)]


WHOLE = Shard(1, 1)


def parse(text: str) -> Shard:
    """Parse `2/8`, the second of eight shards. Raises UserError."""
    match = re.fullmatch(r"([0-9]{1,5})/([0-9]{1,5})", text)
    found = Shard(*map(int, match.groups())) if match else Shard(0, 0)
    if not 1 <= found.number <= found.of <= MOST_SHARDS:
        raise UserError(
            f"--shard takes I/N, such as 2/8 for the second of eight shards, at most {MOST_SHARDS:,}; not '{text[:40]}'"
        )
    return found


def whole(shards: Sequence[Sequence[Prompted]]) -> list[Prompted]:
    """Interleave the prompts of all shards of a suite, by number, into the order of the whole run.

    Raises ValueError if they cannot be the shards of one suite.
    """
    rest = [iter(prompts) for prompts in shards]
    merged: list[Prompted] = []
    while len(merged) < sum(map(len, shards)):
        taken = [*islice(rest[len(merged) // 2 % len(shards)], 2)]
        if not taken:
            raise ValueError("these are not the shards of one suite")
        merged += taken
    return merged
