"""`--over`: which methods a grid or one option at a time makes, and what is refused."""

from __future__ import annotations

import pytest

from dflash_bench import methods
from dflash_bench.errors import UserError
from dflash_bench.run import sweeping


def laid_out(typed: str, *over: str, one_at_a_time: bool = False) -> list[str]:
    """Labels of the methods that are run, without the baseline."""
    chosen = methods.chosen(typed.split())
    of_methods, _ = sweeping.divided(sweeping.parse(over), chosen)
    return [method.label for method in sweeping.laid_out(chosen, of_methods, one_at_a_time)][1:]


def test_each_value_makes_a_method() -> None:
    assert laid_out("dflash", "block=4,8,16") == ["dflash:block=4", "dflash:block=8", "dflash:block=16"]


def test_several_options_make_a_grid() -> None:
    made = laid_out("eagle3-tree:depth=4", "nodes=16,32", "eagle3-tree:top_k=2,4")
    assert made == [f"eagle3-tree:nodes={n},top_k={k},depth=4" for n in (16, 32) for k in (2, 4)]


def test_one_at_a_time_varies_each_option_alone_and_measures_nothing_twice() -> None:
    made = laid_out("eagle3-tree:nodes=32", "nodes=16,32", "depth=4,8", one_at_a_time=True)
    # 32 nodes it has anyway, and 8 levels by default.
    assert made == ["eagle3-tree:nodes=32", "eagle3-tree:nodes=16", "eagle3-tree:nodes=32,depth=4"]


def test_methods_without_the_option_and_those_that_say_it_themselves_stay_as_they_are() -> None:
    made = laid_out("dflash dflash@mine:block=6 eagle3", "block=4,8")
    assert made == ["dflash:block=4", "dflash:block=8", "dflash@mine:block=6", "eagle3"]


def test_an_option_can_be_meant_for_one_method_alone() -> None:
    assert laid_out("dflash eagle3", "n=2,4") == ["dflash:2", "dflash:4", "eagle3:2", "eagle3:4"]
    assert laid_out("dflash eagle3", "eagle3:n=2,4") == ["dflash", "eagle3:2", "eagle3:4"]


def test_settings_are_told_from_options() -> None:
    axes = sweeping.parse(("temperature=0,1", "block=4,8", "setting:top_k=10,20"))
    of_methods, of_settings = sweeping.divided(axes, methods.chosen(["dflash", "eagle3-tree"]))
    assert [axis.name for axis in of_methods] == ["block"]
    assert [(axis.name, axis.values) for axis in of_settings] == [("temperature", ("0", "1")), ("top_k", ("10", "20"))]


@pytest.mark.parametrize(
    ("typed", "over", "refusal"),
    [
        ("dflash", ["block"], "--over takes NAME=VALUE,VALUE, not 'block'"),
        ("dflash", ["=4,8"], "--over takes NAME=VALUE,VALUE"),
        ("dflash", ["block=4,,8"], "--over block has an empty value"),
        ("dflash", ["block="], "--over block has an empty value"),
        ("dflash", ["block=4,8,4"], "--over block has the value 4 twice"),
        ("dflash", ["block=4,8", "block=16"], "--over names block twice"),
        ("dflash", ["block=4,huge"], "block of dflash must be 2 to 64 tokens, not 'huge'"),
        ("dflash", ["block=1,8"], "block of dflash must be 2 to 64 tokens, not '1'"),
        ("dflash", ["width=4,8"], "unknown option or setting to sweep over 'width'"),
        ("dflash", ["eagle3:n=4,8"], "--over eagle3:n has no effect without --method eagle3"),
        ("dflash:block=8", ["block=4,8"], "--over block has no effect: each method that has it already says its own"),
        ("dflash:7", ["block=4,8"], "--over block has no effect"),
        ("dflash", ["block=4,8", "n=3,7"], "block and n say the same"),
        ("eagle3-tree", ["top_k=4,8"], "write eagle3-tree:top_k= or setting:top_k="),
    ],
)
def test_what_makes_no_sense_is_refused(typed: str, over: list[str], refusal: str) -> None:
    with pytest.raises(UserError) as refused:
        laid_out(typed, *over)
    assert refusal in str(refused.value)
