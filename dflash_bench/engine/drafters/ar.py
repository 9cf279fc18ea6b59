"""Plain decoding: nothing is drafted, so a round is one token."""

from __future__ import annotations

from dflash_bench.core.methods import Method
from dflash_bench.engine.drafter import NoDrafter
from dflash_bench.engine.target import Target
from dflash_bench.models.loading import Models


def build(_models: Models, _target: Target, _method: Method) -> NoDrafter:
    return NoDrafter()
