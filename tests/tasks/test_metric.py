"""The scorers as metrics: what a user types who has the evaluate library, with no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_bench.core.errors import UserError
from dflash_bench.tasks import scorers

evaluate: Any = pytest.importorskip("evaluate")


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What evaluate keeps of a metric goes into a folder of the test's own."""
    monkeypatch.setattr("evaluate.config.HF_EVALUATE_OFFLINE", True)
    monkeypatch.setattr("evaluate.config.HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.mark.parametrize(
    ("name", "predictions"),
    [
        ("gsm8k_number", ["so \\boxed{7}", "8.0", "9"]),
        ("aime_integer", ["007", "\\boxed{8}", "nine"]),
        ("math", ["\\boxed{7}", "\\boxed{\\frac{16}{2}}", "\\boxed{9}"]),
    ],
)
def test_a_scorer_is_loaded_by_the_path_of_the_file(name: str, predictions: list[str], tmp_path: Path) -> None:
    metric = evaluate.load(scorers.METRIC, name, cache_dir=str(tmp_path))
    assert metric.compute(predictions=predictions, references=["7", "8", "10"]) == {"accuracy": pytest.approx(2 / 3)}


@pytest.mark.parametrize("name", ["humaneval", "bleu", None])
def test_what_is_no_scorer_of_text_lists_those_that_are(name: str | None, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^unknown metric '.*'; known: aime_integer, gsm8k_number, math$"):
        evaluate.load(scorers.METRIC, name, cache_dir=str(tmp_path))
