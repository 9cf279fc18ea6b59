"""`--over`: which methods a grid or one option at a time makes, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_bench.core import methods
from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Settings
from dflash_bench.runner import plan
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.plan import settings_of
from helpers.each import each
from helpers.fake_backend import FakeBackend, install, main
from helpers.refusals import names


def laid_out(typed: str, *over: str, one_at_a_time: bool = False) -> list[str]:
    """Labels of the methods that are run, without the baseline."""
    chosen = methods.chosen(typed.split())
    of_methods, _ = plan.divided(plan.parse(over), chosen)
    return [method.label for method in plan.laid_out(chosen, of_methods, one_at_a_time)][1:]


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
    axes = plan.parse(("temperature=0,1", "block=4,8", "setting:top_k=10,20"))
    of_methods, of_settings = plan.divided(axes, methods.chosen(["dflash", "eagle3-tree"]))
    assert [axis.name for axis in of_methods] == ["block"]
    assert [(axis.name, axis.values) for axis in of_settings] == [("temperature", ("0", "1")), ("top_k", ("10", "20"))]


@each(
    "typed, over, named",
    [
        ("dflash", ["block"], "--over NAME=VALUE,VALUE 'block'"),
        ("dflash", ["=4,8"], "--over NAME=VALUE,VALUE"),
        ("dflash", ["block=4,,8"], "--over block empty"),
        ("dflash", ["block="], "--over block empty"),
        ("dflash", ["block=4,8,4"], "--over `block has the value 4 twice`"),
        ("dflash", ["block=4,8", "block=16"], "--over block twice"),
        ("dflash", ["block=4,huge"], "block dflash `2 to 64` 'huge'"),
        ("dflash", ["block=1,8"], "block dflash `2 to 64` '1'"),
        ("dflash", ["width=4,8"], "'width'"),
        ("dflash", ["eagle3:n=4,8"], "--over eagle3:n --method eagle3"),
        ("dflash:block=8", ["block=4,8"], "--over block already"),
        ("dflash:7", ["block=4,8"], "--over block"),
        ("dflash", ["block=4,8", "n=3,7"], "block n"),
        ("eagle3-tree", ["top_k=4,8"], "eagle3-tree:top_k= setting:top_k="),
    ],
)
def test_what_makes_no_sense_is_refused(typed: str, over: list[str], named: str) -> None:
    with pytest.raises(UserError) as refused:
        laid_out(typed, *over)
    assert [name for name in names(named) if name not in str(refused.value)] == []


# Through the command line


@pytest.fixture
def chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The methods that a command line runs, and the temperatures; no model is loaded."""
    monkeypatch.chdir(tmp_path)
    backend = FakeBackend()

    def run(*words: str) -> list[str]:
        backend.calls.clear()
        out = f"run{len(list(tmp_path.iterdir()))}"
        code = main(monkeypatch, *words, "--suite", "gsm8k", "--limit", "2", "--out", out)
        assert code == 0
        return list(dict.fromkeys(method for method, _ in backend.calls))

    install(monkeypatch, backend)
    return run


def test_lists_and_sweeps_are_one_run_of_all_their_methods(chosen: Callable[..., list[str]]) -> None:
    sizes = ["ar", "dflash:block=4", "dflash:block=8"]
    assert chosen("run", "--block-size", "4,8") == sizes
    assert chosen("sweep", "--over", "block=4,8") == sizes
    assert chosen("sweep", "--over", "block=4,8", "--one-at-a-time") == ["ar", "dflash", *sizes[1:]]


def test_the_answer_of_a_sweep_comes_last_and_in_the_json(
    chosen: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen("sweep", "--over", "n=2,4", "--method", "eagle3")
    assert "\neagle3: speedup.decode " in capsys.readouterr().out
    assert main(monkeypatch, "report", "run0") == 0
    told = capsys.readouterr().out
    assert "\neagle3: speedup.decode " in told[told.index("sweep over n (tokens)") :]
    chosen("sweep", "--over", "n=2,4", "--method", "eagle3", "--json")
    (sweep,) = json.loads(capsys.readouterr().out)["sweeps"]
    assert [point["value"] for point in sweep["curves"][0]["points"]] == [2, 4]


REFUSED = {
    "sweep": "nothing to sweep over: give --over",
    "run --one-at-a-time": "--one-at-a-time has no effect without --over",
    "sweep --over block=4,8 --over temperature=0,1 --one-at-a-time": "--one-at-a-time varies options of methods",
    "sweep --temperature 0.5 --over temperature=0,1": "--temperature and --over temperature both set it",
    "sweep --over temperature=0,warm": "--over temperature takes a number, or several",
    "sweep --over temperature=0,0.0": "--over temperature lists a value twice",
    "sweep --over thinking=on,maybe": "--over thinking takes on and off",
    "sweep --over top_p=0.5,0.9": "--top-p has no effect at temperature 0",
    "sweep --over top_k=5,0 --temperature 1": "--top-k is a number of tokens from 1 up",
    "sweep --over top_k=5,1.5 --temperature 1": "--over top_k takes a whole number",
    "run --block-size 4,8 --over block=4,8": "--over block has no effect",
    "sweep --over temperature=0,１": "--over temperature takes a number",
    "sweep --over top_k=9999999999 --temperature 1": "--over top_k takes a whole number",
    "run --block-size 4,": "--block-size has an empty value",
    "run --block-size 4,65": "--block-size: block of dflash must be 2 to 64 tokens, or auto, not '65'",
}


@each("words", REFUSED)
def test_nonsense_is_one_line_and_leaves_nothing(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(monkeypatch, *words.split(), "--suite", "gsm8k") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"dflash-bench: {REFUSED[words]}") and captured.err.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_settings_multiply_and_what_means_the_same_is_run_once() -> None:
    request = RunRequest(temperature=(0.0, 1.0), top_p=(0.5, 0.9))
    assert settings_of(request, [None]) == [Settings(), Settings(1.0, top_p=0.5), Settings(1.0, top_p=0.9)]
