"""nano's acceptance on embedded prompts and on real text, as Markdown. Usage: python scripts/real_text.py EMBEDDED REAL

Timings are left out: acceptance is the same on every machine, and this is about the texts.
"""

import sys
from pathlib import Path

from dflash_bench import environment
from dflash_bench.analysis.metrics import BASELINE, FORMULAS
from dflash_bench.report import document
from dflash_bench.report.tables import markdown, with_interval

HEADS = ["suite", "method", "prompts", "tokens", "al.pooled [95 %]", "exact"]


def main(*folders: str) -> None:
    runs = [document.read_document(Path(folder)) for folder in folders]
    rows = [
        [cell.label, cell.method, str(cell.num_prompts), f"{cell.num_tokens:,}",
         with_interval(cell.figures.get("al.pooled")), "/".join(map(str, cell.exact or ()))]
        for run in runs for cell in run.cells if cell.method != BASELINE
    ]  # fmt: skip
    env = runs[0].results.info["environment"]
    print(
        "# nano on embedded prompts and on real text\n\n"
        "```\nscripts/real_text FOLDER\n```\n\n"
        f"{environment.one_line(env)}.\n\n"
        "Embedded prompts come from the same generator as the training text of nano and its drafts: other questions,\n"
        "the same templates. FOLDER holds the rows of the public suites, which nano has never seen. 16 prompts per\n"
        "suite, greedy, float32, at most 192 new tokens; one run, as acceptance is the same in every run.\n\n"
        f"{markdown(HEADS, rows, left=2)}\n\n"
        f"`al.pooled`: {FORMULAS['al.pooled']}. Intervals are 95 %, by bootstrap over\n"
        "prompts; with only 16 prompts they are probably too narrow."
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
