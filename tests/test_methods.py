"""What a user may type for a method."""

from __future__ import annotations

import pytest

from dflash_bench import methods
from dflash_bench.errors import UserError
from dflash_bench.methods import Method


def test_a_method_is_a_name_and_perhaps_a_number_of_tokens() -> None:
    assert methods.parse("dflash") == Method("dflash", "dflash")
    assert methods.parse("eagle3:7") == Method("eagle3:7", "eagle3", 7)
    assert methods.parse("dflash:63").num_drafts == methods.MAX_DRAFTS


def test_the_baseline_comes_first_and_each_method_once() -> None:
    chosen = methods.chosen(["eagle3:7", "ar", "dflash", "eagle3:07", "dflash"])
    assert [method.label for method in chosen] == ["ar", "eagle3:7", "dflash"]
    assert [method.label for method in methods.chosen([])] == ["ar"]


@pytest.mark.parametrize("text", ["medusa", "", "DFlash", " dflash", "medusa:4"])
def test_an_unknown_name_lists_the_known_ones(text: str) -> None:
    with pytest.raises(UserError, match=r"^unknown method '.*'; known: ar, dflash, eagle3$"):
        methods.parse(text)


@pytest.mark.parametrize("count", ["", "0", "64", "-1", "x", "1.5", "²"])
def test_a_number_of_tokens_out_of_range_is_refused(count: str) -> None:
    with pytest.raises(UserError, match=r"after the colon comes the number of tokens per round, 1 to 63$"):
        methods.parse(f"dflash:{count}")


def test_the_baseline_takes_no_number() -> None:
    with pytest.raises(UserError, match="ar drafts nothing"):
        methods.parse("ar:1")
