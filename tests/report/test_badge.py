"""The badge and the scores for a model's card: what they say is what the run measured, and no more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from huggingface_hub import parse_eval_result_entries
from runs import SUITES, answers, changed, slower, stored

from dflash_bench.report import read_document

Main = Callable[..., tuple[int, str, str]]
PUBLIC = {"gsm8k": SUITES["gsm8k"] | {"source": "hub openai/gsm8k@" + "a" * 40, "scorer": "gsm8k_number"}}


def said(path: Path) -> tuple[str, set[str]]:
    """The title of a badge, and its colours."""
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    return root[0].text or "", {found for element in root.iter() if (found := element.get("fill"))}


def test_a_public_suite_gives_a_score_and_a_note_that_the_hubs_own_reader_takes(tmp_path: Path, main: Main) -> None:
    rows = changed(answers(30), passed=True)
    stored(tmp_path / "run", changed(rows, first=6, passed=False), suites=SUITES | PUBLIC)
    code, out, err = main("card", "run", "--hub", "card")
    assert (code, out) == (0, "![run](dflash-bench.svg)\n") and "no scores" not in err
    text = Path("card/.eval_results/dflash-bench.yaml").read_text()
    (entry,) = parse_eval_result_entries(yaml.safe_load(text))
    plain, own = read_document(Path("run")).cells
    assert (entry.dataset_id, entry.task_id, entry.dataset_revision) == ("openai/gsm8k", "gsm8k", "a" * 40)
    assert entry.value == round(100 * plain.passed[0] / plain.passed[1], 2) and 0 < entry.value < 100
    speedup = own.figures["speedup.decode"]
    assert f"dflash {speedup.value:.2f}x as fast" in entry.notes and "30 prompts" in entry.notes
    title, colours = said(Path("card/dflash-bench.svg"))
    assert title == f"dflash: {speedup.value:.2f}x, 30/30 exact" and "#2e7d32" in colours


def test_embedded_prompts_are_no_public_dataset(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "run", answers(30))
    code, _, err = main("card", "run", "--hub", "card")
    assert code == 0 and "no scores were written" in err
    assert not Path("card/.eval_results").exists()
    assert said(Path("card/dflash-bench.svg"))[0].endswith(", embedded text")


@pytest.mark.parametrize(
    ("rows", "colour", "words"),
    [
        (slower(answers(30), 4), "#616161", "30/30 exact"),
        (answers(8), "#616161", "8/8 exact"),  # too few prompts
        (changed(answers(30), "dflash", first=3, exactness="mismatch"), "#b3261e", "27/30 exact"),
    ],
)
def test_a_badge_is_green_only_where_a_method_gains_and_is_exact(
    tmp_path: Path, main: Main, rows: list[object], colour: str, words: str
) -> None:
    stored(tmp_path / "run", rows)
    assert main("card", "run", "--hub", "card")[0] == 0
    title, colours = said(Path("card/dflash-bench.svg"))
    assert words in title and colour in colours and "#2e7d32" not in colours


def test_a_gain_that_nobody_judged_is_not_green(tmp_path: Path, main: Main) -> None:
    rows = changed(answers(30), exactness=None)
    stored(tmp_path / "run", rows, temperature=1.0)
    assert main("card", "run", "--hub", "card")[0] == 0
    title, colours = said(Path("card/dflash-bench.svg"))
    assert "not judged" in title and "#616161" in colours and "#2e7d32" not in colours


def test_a_folder_that_is_a_file_is_one_line(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "run", answers(6))
    Path("card").write_text("")
    code, out, err = main("card", "run", "--hub", "card")
    assert (code, out, err.count("\n")) == (2, "", 1) and "card" in err


def test_without_plain_answers_there_is_nothing_to_show(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "run", [row for row in answers(6) if row.method == "dflash"])
    code, _, err = main("card", "run", "--hub", "card", "--allow", "unfinished")
    assert code == 2 and "holds no answers of plain decoding" in err
