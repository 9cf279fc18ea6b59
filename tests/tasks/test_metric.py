"""The scorers as metrics: what a user types who has the evaluate library, with no network."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Prompt
from dflash_bench.tasks import scorers
from dflash_bench.tasks.scorers.base import Score
from helpers.fake_backend import metrics_kept_in

evaluate: Any = pytest.importorskip("evaluate")


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that evaluate keeps of a metric go into the test's own folder."""
    metrics_kept_in(tmp_path / "modules", monkeypatch)


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
    with pytest.raises(UserError, match=r"'.*'; known: aime_integer, choice, gsm8k_number, math$"):
        evaluate.load(scorers.METRIC, name, cache_dir=str(tmp_path))


# Metrics as scorers

LENGTHS = """
import datasets
import evaluate
{more}

class Lengths(evaluate.Metric):
    def _info(self):
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="", citation="", inputs_description="",
            features=datasets.Features({{"predictions": text, "references": {references}}}),
        )

    def _compute(self, predictions, references):
        {compute}
"""
SHARE = 'return {"share": len(set(predictions[0]) & set(references[0])) / len(set(references[0]))}'


def write_metric(folder: Path, compute: str = SHARE, references: str = "text", more: str = "") -> str:
    folder.mkdir()
    (folder / f"{folder.name}.py").write_text(LENGTHS.format(compute=compute, references=references, more=more))
    return f"evaluate:{folder}"


def prompt_of(*right: str) -> Prompt:
    return Prompt("prompts", "p1", ("Hi",), reference=right[0], alternatives=right[1:])


def test_a_metric_on_this_disk_scores_an_answer_by_its_best_alternative(tmp_path: Path) -> None:
    name = write_metric(tmp_path / "lengths")
    scorers.require([name])
    scorers.check_references(name, [prompt_of("ab")])
    assert scorers.score(name, prompt_of("abcd"), "ab") == Score(None, None, 0.5)
    assert scorers.score(name, prompt_of("xy", "abcd"), "abc").value == 0.75
    assert list(scorers.origin(name)) == ["sha256"] and scorers.origin("math") == {}
    with pytest.raises(UserError, match="no reference"):
        scorers.check_references(name, [Prompt("prompts", "p1", ("Hi",))])


def test_one_figure_of_several_is_named(tmp_path: Path) -> None:
    both = 'return {"num": len(references[0]), "share": 0.25, "text": "no"}'
    name = write_metric(tmp_path / "both", both, references="datasets.Sequence(text)")
    assert scorers.score(f"{name}#num", prompt_of("a", "b", "c"), "a").value == 3
    told = "both#num or .*both#share"
    with pytest.raises(UserError, match=told):
        scorers.score(name, prompt_of("a"), "a")
    with pytest.raises(UserError, match=r"both#.* 'mean'; known: num, share"):
        scorers.score(f"{name}#mean", prompt_of("a"), "a")


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no_such_package"):
        scorers.require([write_metric(tmp_path / "lacking", more="import no_such_package")])
    with pytest.raises(UserError, match=r"rouge/rouge.py .*--trust-remote-code"):
        scorers.require(["evaluate:rouge"])
    with pytest.raises(UserError, match=r"'rouge'; known: .*evaluate:FOLDER"):
        scorers.require(["rouge"])
    failing = write_metric(tmp_path / "failing", "return 1 / 0")
    with pytest.raises(UserError, match="the metric failed: ZeroDivisionError"):
        scorers.score(failing, prompt_of("a"), "a")


def test_a_metric_of_the_hub_is_loaded_at_a_recorded_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    text = SimpleNamespace(dtype="string")
    module = SimpleNamespace(features={"predictions": text, "references": text}, compute=lambda **_: {"f": 2})
    monkeypatch.setattr(evaluate, "load", lambda name, revision: asked.append((name, revision)) or module)
    monkeypatch.setattr("huggingface_hub.HfApi.space_info", lambda _, place: SimpleNamespace(sha=f"commit of {place}"))
    scorers.require(["evaluate:rouge_x"], is_trusted=True)
    assert asked == [("rouge_x", "commit of evaluate-metric/rouge_x")]
    assert scorers.origin("evaluate:rouge_x") == {"revision": "commit of evaluate-metric/rouge_x"}
