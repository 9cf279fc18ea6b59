"""`profile` on tiny models of random weights, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_bench.core import environment
from dflash_bench.models import mtp_heads, targets
from dflash_bench.models.nets.dflash import initialise
from dflash_bench.models.nets.mtp import MTPConfig, MTPDraft
from helpers import tiny
from helpers.each import each
from helpers.fake_backend import main
from helpers.refusals import names

SMALL = ("--context", "16", "--width", "1,2,4")


def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main(monkeypatch, "profile", *words, "--json") == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(monkeypatch, "profile", *words) == 2
    return capsys.readouterr().err


def test_its_own_weights_at_every_batch_and_context(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--model", model, "--method", "dflash", "--method", "eagle3:3", "--batch", "1,2", "--context", "16,32")
    printed = shown(monkeypatch, capsys, *words, "--width", "2,6", "--acceptance", "2", "--out", tmp_path / "out")
    assert (printed["layers"], printed["all_layers"], printed["random_weights"]) == (tiny.LAYERS, tiny.LAYERS, False)
    places = printed["places"]
    assert [(place["rows"], place["context"]) for place in places] == [(1, 16), (1, 32), (2, 16), (2, 32)]
    # Besides those asked for, a plain step and the whole round of both: 4 tokens.
    assert [[one["width"] for one in place["passes"]] for place in places] == [[1, 2, 4, 6]] * 4
    rounds = [(one["method"], one["width"]) for one in places[0]["rounds"]]
    assert rounds == [("dflash", 2), ("dflash", 4), ("eagle3:3", 2), ("eagle3:3", 4)]
    assert "estimated" not in printed
    for place in places:
        for verdict, whole in zip(place["verdicts"], (place["rounds"][1], place["rounds"][3]), strict=True):
            assert verdict["speedup"] == pytest.approx(2 / whole["cost"])
            taken = whole["draft_s"] + whole["verify_s"]
            assert whole["break_even_al"] == pytest.approx(taken / whole["plain_s"])
    assert json.loads((tmp_path / "out" / "profile.json").read_text()) == printed
    assert (tmp_path / "out" / "profile.svg").read_text().startswith("<?xml")


def test_random_weights_of_some_layers_are_estimated_for_all(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--target", model / "target", "--random-weights", "--layers", "2", "--method", "eagle3:3", *SMALL)
    printed = shown(monkeypatch, capsys, *words)
    assert (printed["layers"], printed["all_layers"]) == (2, tiny.LAYERS)
    (measured,), (estimated,) = printed["places"], printed["estimated"]
    for one, all_of_it in zip(measured["passes"], estimated["passes"], strict=True):
        assert all_of_it["seconds"] == pytest.approx(one["head_s"] + 2 * (one["seconds"] - one["head_s"]))
    assert estimated["verdicts"][0]["al"] is None
    assert main(monkeypatch, "profile", *words) == 0
    assert "An estimate" in capsys.readouterr().out


def test_random_drafts_of_several_layers_are_compared(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--target", model / "target", "--random-weights", "--random-draft", "layers=1,3", *SMALL)
    (place,) = shown(monkeypatch, capsys, *words)["places"]
    rounds = {one["method"]: one["draft_roofline_s"] for one in place["rounds"]}
    assert list(rounds) == ["dflash@1layers", "dflash@3layers"]
    assert rounds["dflash@1layers"] < rounds["dflash@3layers"]


@pytest.mark.parametrize("method", ["mtp:2", "p-eagle:3"])
def test_mtp_and_p_eagle_are_profiled_with_random_weights(
    method: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--target", model / "target", "--random-weights", "--method", method, *SMALL)
    (place,) = shown(monkeypatch, capsys, *words)["places"]
    # One token, and all of them: both are measured, as a shorter draft is cheaper.
    assert [(one["method"], one["width"]) for one in place["rounds"]] == [(method, 2), (method, int(method[-1]) + 1)]
    assert all(one["draft_s"] > 0 for one in place["rounds"])


def test_a_tree_is_a_block_and_a_pass_as_wide_as_the_tree(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place,) = shown(monkeypatch, capsys, "--model", model, "--method", "ddtree:6", *SMALL)["places"]
    (whole,) = [one for one in place["rounds"] if one["width"] == 7]
    assert whole["draft_roofline_s"] is not None and place["verdicts"][0]["width"] == 7


def test_heads_of_its_own_are_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny.build(tmp_path / "model")
    draft = MTPDraft(MTPConfig.of(targets.config_of(model / "target"))).to_empty(device="cpu")
    for parameter in draft.parameters():
        parameter.detach().fill_(1)  # `initialise` fills matrices alone
    initialise(draft, 0)
    mtp_heads.save(draft, model / "mtp", json.loads((model / "target/config.json").read_text()))
    (place,) = shown(monkeypatch, capsys, "--model", model, "--method", "mtp", *SMALL)["places"]
    assert [(one["method"], one["width"]) for one in place["rounds"]] == [("mtp", 2), ("mtp", 4)]


def test_bytes_and_operations_of_a_tiny_model(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place,) = shown(monkeypatch, capsys, "--model", model, *SMALL)["places"]
    plain = place["passes"][0]
    layer = 3 * 32 * 64 + 2 * 32 * 32 + 2 * 16 * 32
    matrices, norms = 1024 * 32 + 4 * layer, 4 * (2 * 32 + 2 * 16) + 32
    assert plain["num_bytes"] == 4 * (matrices + norms + 32 + 17 * 4 * 2 * 16)
    assert plain["flops"] == 2 * matrices + 4 * 4 * 32 * 17


@each(
    "words, named",
    [
        (("--layers", "2"), "--layers --random-weights"),
        (("--random-draft", "layers=1"), "--random-draft --random-weights"),
        (("--random-weights", "--random-draft", "width=1"), "width layers"),
        (("--random-weights", "--random-draft", "layers=99"), "32 99"),
        (("--random-weights", "--draft", "dflash=x"), "--draft --random-weights"),
        (("--random-weights", "--dtype", "auto"), "dtype"),
        (("--random-weights", "--layers", "99"), "--layers 99"),
        (("--random-weights", "--target", "org/unheard-of"), "org/unheard-of"),
        (("--acceptance", "0.5"), "al.pooled"),
        (("--acceptance", "40"), "`--acceptance 40` `dflash has: 4`"),
        (("--batch", "0"), "--batch 10,000,000 `not 0`"),
        (("--context", "a"), "--context"),
        (("--context", "9999999"), "`4 tokens` context"),
        (("--method", "ngram"), "'ngram' ddtree, dflash, eagle3, mtp, p-eagle"),
        (("--method", "dflash:block=auto"), "block=auto"),
        (("--method", "ddtree:nodes=auto"), "nodes=auto"),
        (("--method", "dflash:rule=rejection"), "rule="),
        (("--engine", "slow"), "engine 'slow'"),
    ],
)
def test_what_it_refuses(
    words: tuple[str, ...], named: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dflash_bench.perf.round_parts.measure", lambda *_: pytest.fail("measured all the same"))
    own = () if "--target" in words else ("--model", model)
    rest = SMALL if "--context" not in words else SMALL[2:]
    told = refused(monkeypatch, capsys, *own, *words, *rest)
    assert [name for name in names(named) if name not in told] == []


def test_memory_that_is_not_there_is_told_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "free_bytes", lambda: int(10e9))
    monkeypatch.setattr(
        "dflash_bench.models.random_weights.filled_target", lambda *_: pytest.fail("made it all the same")
    )
    error = refused(monkeypatch, capsys, "--model", "qwen3-8b", "--random-weights")
    assert all(name in error for name in ("qwen3-8b", "36 layers", "batch 1", "context 512", "10.0 GB", "--layers 2 "))
    error = refused(
        monkeypatch,
        capsys,
        "--model",
        "qwen3-8b",
        "--random-weights",
        "--layers",
        "2",
        "--batch",
        "64",
        "--context",
        "40000",
    )
    assert " fits" in error and "--batch " in error


def test_memory_of_a_container_is_what_its_limit_leaves(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    assert environment.free_bytes(tmp_path / "meminfo", tmp_path) == 5000 * 1024
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("2000000\n")
    (tmp_path / "memory.stat").write_text("anon 1000\ninactive_file 500000\n")
    assert environment.free_bytes(tmp_path / "meminfo", tmp_path) == 1_500_000
    (tmp_path / "memory.max").write_text("max\n")
    assert environment.free_bytes(tmp_path / "meminfo", tmp_path) == 5000 * 1024
