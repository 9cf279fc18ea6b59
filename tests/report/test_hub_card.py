"""Scores for a model's card: what they say is what the run measured, and no more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import yaml
from huggingface_hub import parse_eval_result_entries

from dflash_bench.report import read_document
from helpers.runs import SUITES, answers, changed, stored

Main = Callable[..., tuple[int, str, str]]
PUBLIC = {"gsm8k": SUITES["gsm8k"] | {"source": "hub openai/gsm8k@" + "a" * 40, "scorer": "gsm8k_number"}}


def test_a_public_suite_gives_a_score_and_a_note_that_the_hubs_own_reader_takes(tmp_path: Path, main: Main) -> None:
    rows = changed(answers(30), passed=True)
    stored(tmp_path / "run", changed(rows, first=6, passed=False), suites=SUITES | PUBLIC)
    code, out, err = main("card", "run", "--hub", "card")
    assert (code, err) == (0, "") and "card/.eval_results/dflash-bench.yaml" in out
    text = Path("card/.eval_results/dflash-bench.yaml").read_text()
    (entry,) = parse_eval_result_entries(yaml.safe_load(text))
    plain, own = read_document(Path("run")).cells
    assert (entry.dataset_id, entry.task_id, entry.dataset_revision) == ("openai/gsm8k", "gsm8k", "a" * 40)
    assert entry.value == round(100 * plain.passed[0] / plain.passed[1], 2) and 0 < entry.value < 100
    speedup = own.figures["speedup.decode"]
    assert f"dflash {speedup.value:.2f}x as fast" in entry.notes and "30 prompts" in entry.notes
