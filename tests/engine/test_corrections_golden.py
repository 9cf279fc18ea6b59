"""Heads that correct a block's drafts, against what their publishers' own code drafts (`dflash_bench/conformance`)."""

from __future__ import annotations

import pytest
from golden_drafts import assert_drafts_as_published

CASES = {
    "deepspec-dspark-vanilla": "dflash",
    "deepspec-dspark-rnn-cut": "dflash:cut=0.5",
    "specforge-dspark-gated": "dflash",
    "speculators-dspark": "dflash",
    "specforge-domino-in-place": "dflash",
    "specforge-domino-shifted": "dflash",
    "speculators-xpress": "dflash",
    "nvidia-lilicorr": "dflash",
}


@pytest.mark.parametrize("name", CASES)
def test_a_head_drafts_what_its_publisher_drafts(name: str) -> None:
    assert_drafts_as_published(name, CASES[name])
