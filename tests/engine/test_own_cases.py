"""Cases that no publisher's code made are what our books say of their files."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.golden_drafts import golden
from helpers.own_cases import DFLASH, KINDS, golden_of


@pytest.mark.parametrize("name", KINDS)
def test_an_own_case_is_what_the_book_says_of_its_files(name: str) -> None:
    stored = golden(name)
    said = golden_of(name, [case["prompt"] for case in stored["cases"]])
    assert {key: value for key, value in said.items() if key not in ("least_gap", "sampled")} == {
        key: value for key, value in stored.items() if key not in ("least_gap", "sampled")
    }
    assert said["least_gap"] > 1e-3 and stored["source"]["repository"].startswith("dflash-bench")
    drawn: list[Any] = [one["slots"] for case in (said, stored) for block in case.get("sampled", ()) for one in [block]]
    for ours, theirs in zip(drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :], strict=True):
        for slot, other in zip(ours, theirs, strict=True):
            assert [slot[key] for key in ("token", "q_support", "p_support")] == [
                other[key] for key in ("token", "q_support", "p_support")
            ]
            assert slot["q"] == pytest.approx(other["q"], rel=1e-4) and slot["p"] == pytest.approx(other["p"], rel=1e-4)
    assert bool(drawn) == (name == DFLASH)
