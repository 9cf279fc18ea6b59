"""The text scorers as metrics of the evaluate library; `evaluate.load` takes this file's path and a scorer's name.

    metric = evaluate.load(dflash_bench.tasks.scorers.METRIC, "gsm8k_number")
    metric.compute(predictions=["so it is 7"], references=["#### 7"])    # {"accuracy": 1.0}

evaluate copies this file elsewhere and reads its imports line by line. So there is one import per line, with the full
package name.
"""

from typing import Any

import datasets
import evaluate

import dflash_bench.core.types
import dflash_bench.tasks.scorers


class Accuracy(evaluate.Metric):  # type: ignore[misc]
    """The share of correct answers. Raises UserError for a name that is not a text scorer."""

    def _info(self) -> Any:
        dflash_bench.tasks.scorers.require_text_scorer(self.config_name)
        string = datasets.Value("string")
        return evaluate.MetricInfo(
            description=f"Share of answers that dflash-bench's scorer {self.config_name} finds correct.",
            citation="",
            inputs_description="predictions: whole answers. references: what the suite's reference says, as text.",
            features=datasets.Features({"predictions": string, "references": string}),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        pairs = zip(predictions, references, strict=True)
        prompts = [(dflash_bench.core.types.Prompt("metric", "", (), reference=right), text) for text, right in pairs]
        scores = [dflash_bench.tasks.scorers.score(self.config_name, prompt, text) for prompt, text in prompts]
        return {"accuracy": sum(score.passed is True for score in scores) / len(scores)}
