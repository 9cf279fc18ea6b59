"""A target that the engine's own forward pass leaves to transformers' code: run, table and findings say so, and why."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from dflash_bench.engine import selection
from dflash_bench.engine.forward.native import COVERED
from dflash_bench.models.presets import NANO
from dflash_bench.report import words as report_words
from dflash_bench.results.run_info import read_info
from helpers.faults import matrix
from helpers.runs import known
from helpers.tiny import TOKENIZER, VOCABULARY
from helpers.toy import tiny

REASON = f"does not cover this target: gpt2 is not among {', '.join(COVERED)}"


@pytest.fixture(scope="module")
def uncovered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=2048, eos_token_id=2, bos_token_id=2
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(NANO / "target" / name, folder / name)
    return folder


def words(folder: Path, out: Path, *more: str) -> list[object]:
    asked = ["run", "--target", folder, "--method", "ngram", "--suite", "gsm8k", "--data", "embedded", "--limit", 1]
    return [*asked, "--max-new-tokens", 8, "--out", out, *more]


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_a_target_that_is_not_covered_says_so_and_why(uncovered: Path, tmp_path: Path) -> None:
    status, _, noted = matrix.command(*words(uncovered, tmp_path / "run"))
    assert status == 0
    _, said, _ = matrix.command("report", tmp_path / "run")
    assert "note: " in noted and REASON in one_line(noted)
    identity = read_info(tmp_path / "run").to_json()["identity"]
    assert (identity["network"], identity["fallback"]) == ("transformers", REASON)
    assert REASON in one_line(said)
    _, made, _ = matrix.command("report", tmp_path / "run", "--format", "json")
    (finding,) = [one for one in json.loads(made)["findings"] if one["kind"] == "fallback"]
    assert finding["places"][0]["values"]["reason"] == REASON
    (engine,) = [text for text in report_words._settings(known(**identity)) if text.startswith("engine ")]
    assert "transformers" in engine and REASON in engine


def test_where_it_is_asked_for_nothing_is_said(uncovered: Path, tmp_path: Path) -> None:
    status, said, noted = matrix.command(*words(uncovered, tmp_path / "run", "--engine", "transformers"))
    assert status == 0 and "the engine's own" not in said + noted
    assert read_info(tmp_path / "run").to_json()["identity"]["fallback"] is None


def test_one_that_is_computed_differently_says_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_disagreement", lambda *_: "by 1e-02 of its largest logit over 24 tokens")
    said = selection.target_of(tiny("llama")).fallback
    assert said is not None and "(by 1e-02 of its largest logit over 24 tokens)" in said
    assert selection.target_of(tiny("llama"), "transformers").fallback is None
    monkeypatch.undo()
    assert selection.target_of(tiny("llama")).fallback is None
