"""Bodies of drafts in publishers' formats: what is drafted and accepted is what the publishers' own code drafts."""

from __future__ import annotations

import pytest
from golden_drafts import assert_drafts_as_published

CASES = (
    "zlab-sliding-default", "zlab-sliding-noncausal", "zlab-causal-full", "zlab-embedding-scale", "jetspec-causal-head",
    "angelslim-dflare", "zlab-dflash2", "zlab-dflash2-sliding",
)  # fmt: skip


@pytest.mark.parametrize("forward", [{}, {"kernels": "torch"}, {"engine": "transformers"}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_of_the_publishers_code(name: str, forward: dict[str, str]) -> None:
    assert_drafts_as_published(name, "dflash", **forward)
