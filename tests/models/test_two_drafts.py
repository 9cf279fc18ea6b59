"""Two drafts of one method in one run: each under its label, and neither in the other's place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dflash_bench.models.presets import NANO
from dflash_bench.report.words import facts as words_of
from dflash_bench.results import store
from helpers.each import each
from helpers.fake_backend import main

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def worse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nano's draft, made to guess badly."""
    folder = shutil.copytree(NANO / "dflash", tmp_path_factory.mktemp("drafts") / "worse")
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"fc.weight": -weights["fc.weight"]}, folder / "model.safetensors")
    return folder


def test_each_label_is_measured_with_its_draft(
    tmp_path: Path, worse: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    words = ["--suite", "gsm8k", "--limit", 2, "--max-new-tokens", 24, "--out", tmp_path / "run", "--json"]
    words += ["--draft", f"dflash@a={NANO / 'dflash'}", "--draft", f"dflash@b={worse}"]
    for method in ("dflash", "dflash@a", "dflash@b", "dflash@b:block=8"):
        words += ["--method", method]
    assert main(monkeypatch, "run", *words) == 0
    capsys.readouterr()
    info, records = store.load(tmp_path / "run")
    identity = info.to_json()["identity"]
    assert {label: (method["draft"], method["num_drafts"]) for label, method in identity["methods"].items()} == {
        "ar": (None, 0),
        "dflash": ("dflash", 15),
        "dflash@a": ("dflash@a", 15),
        "dflash@b": ("dflash@b", 15),
        "dflash@b:block=8": ("dflash@b", 7),
    }
    assert {key: draft["name"] for key, draft in identity["drafts"].items()} == {
        "dflash": "dflash",
        "dflash@a": "dflash",
        "dflash@b": "worse",
    }
    revisions = identity["revisions"]
    assert revisions["dflash"] == revisions["dflash@a"] != revisions["dflash@b"]
    rounds = {
        label: [record.generation.accepted for record in records if record.method == label]
        for label in identity["methods"]
    }
    assert rounds["dflash"] == rounds["dflash@a"]
    assert sum(map(len, rounds["dflash@b"])) > sum(map(len, rounds["dflash"]))
    assert main(monkeypatch, "report", tmp_path / "run") == 0
    assert "dflash@b:block=8" in capsys.readouterr().out
    drafts = words_of(info)["draft"].split(", ")
    assert drafts[1].startswith("dflash@a with 15 tokens per round from dflash (")
    assert drafts[3].startswith("dflash@b:block=8 with 7 tokens per round from worse (")


def test_a_trees_label_is_that_of_the_chains_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    words = ["--suite", "gsm8k", "--limit", 1, "--max-new-tokens", 8, "--out", tmp_path / "run", "--json"]
    words += ["--draft", f"eagle3@x={NANO / 'eagle3'}", "--method", "eagle3@x:3", "--method", "eagle3-tree@x:nodes=9"]
    assert main(monkeypatch, "run", *words) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert {cell["method"] for cell in cells} == {"ar", "eagle3@x:3", "eagle3-tree@x:nodes=9"}
    assert set(store.load(tmp_path / "run")[0].to_json()["identity"]["revisions"]) == {"target", "eagle3@x"}


REFUSED = {
    "--method dflash@a": (
        "comes with no draft for dflash@a (it has one for block-diffusion, dflash, dflash@2, dflash@dspark, "
        "draft-model, eagle3, medusa, mtp); give "
    ),
    "--draft dflash@a=x --method dflash": "--draft dflash@a= has no effect without --method dflash@a",
    "--draft eagle3@a=x --method eagle3": (
        "--draft eagle3@a= has no effect without --method eagle3@a or --method eagle3-tree@a"
    ),
    "--draft dflash=x --draft dflash=y": "label them: --draft dflash@a=PATH --draft dflash@b=PATH",
    "--draft dflash@a=x --draft dflash@a=y": "--draft dflash@a= is given twice; give each draft its own label",
    "--draft eagle3-tree@a=x": "eagle3-tree uses the draft of eagle3; write eagle3@a=",
    "--draft =x": "unknown draft ''; known: ",
    "--draft ar=x": "unknown draft 'ar'; known: ",
    "--draft dflash@=x": "--draft dflash@=x: after '@' comes a label of 1 to 32 letters",
    "--method dflash:n=7 --block-size 8": "--block-size has no effect without --method dflash",
}


@each("words", REFUSED)
def test_what_does_not_go_together_is_one_line(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    assert main(monkeypatch, "run", "--suite", "gsm8k", "--out", tmp_path / "run", *words.split()) == 2
    captured = capsys.readouterr()
    assert REFUSED[words] in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_a_draft_of_another_kind_is_told_with_its_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    eagle = NANO / "eagle3"
    given = f"dflash@a={eagle}"
    assert main(monkeypatch, "run", "--suite", "gsm8k", "--out", tmp_path / "run", "--draft", given) == 2
    expected = f"is a draft for eagle3, and dflash@a needs one for dflash; give it as --draft eagle3@a={eagle}"
    assert expected in capsys.readouterr().err


def test_a_folder_of_a_model_may_hold_several_drafts(
    tmp_path: Path, worse: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    for name in ("target", "dflash"):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / name).symlink_to(NANO / name)
    (tmp_path / "model/dflash@worse").symlink_to(worse)
    words = ["--suite", "gsm8k", "--limit", 1, "--max-new-tokens", 4, "--out", tmp_path / "run", "--json"]
    assert main(monkeypatch, "run", "--model", tmp_path / "model", "--method", "dflash@worse", *words) == 0
    assert set(store.load(tmp_path / "run")[0].to_json()["identity"]["drafts"]) == {"dflash@worse"}
