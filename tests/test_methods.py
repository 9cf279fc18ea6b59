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


def test_a_tree_is_named_after_all_that_it_verifies() -> None:
    assert methods.parse("eagle3-tree:60") == Method("eagle3-tree:60", "eagle3-tree", 59)
    assert methods.parse("eagle3-tree:2").num_drafts == 1
    assert methods.parse("eagle3-tree:64").num_drafts == methods.MAX_DRAFTS
    assert methods.parse("eagle3-tree").num_drafts is None
    for count in ("0", "1", "65", "x", ""):
        with pytest.raises(UserError, match=r"tokens verified per round, the anchor among them, 2 to 64$"):
            methods.parse(f"eagle3-tree:{count}")


def test_a_tree_shares_the_draft_of_the_chain() -> None:
    assert [method.draft for method in methods.chosen(["eagle3", "eagle3-tree:16"])] == ["ar", "eagle3", "eagle3"]
    assert [methods.drafts_trees(label) for label in ("eagle3:7", "eagle3-tree", "eagle3-tree:16")] == [
        False,
        True,
        True,
    ]


def test_the_baseline_comes_first_and_each_method_once() -> None:
    chosen = methods.chosen(["eagle3:7", "ar", "dflash", "eagle3:07", "dflash"])
    assert [method.label for method in chosen] == ["ar", "eagle3:7", "dflash"]
    assert [method.label for method in methods.chosen([])] == ["ar"]


@pytest.mark.parametrize("text", ["medusa", "", "DFlash", " dflash", "medusa:4"])
def test_an_unknown_name_lists_the_known_ones(text: str) -> None:
    with pytest.raises(UserError, match=r"^unknown method '.*'; known: ar, dflash, eagle3, eagle3-tree$"):
        methods.parse(text)


@pytest.mark.parametrize("count", ["", "0", "64", "-1", "x", "1.5", "²"])
def test_a_number_of_tokens_out_of_range_is_refused(count: str) -> None:
    with pytest.raises(UserError, match=r"after the colon comes the number of tokens per round, 1 to 63$"):
        methods.parse(f"dflash:{count}")


def test_the_baseline_takes_no_number() -> None:
    with pytest.raises(UserError, match="ar drafts nothing"):
        methods.parse("ar:1")
