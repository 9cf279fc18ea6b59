"""nano's acceptance on embedded prompts and on real text.

Timings are left out: acceptance is the same on every machine, and this is about the texts.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from dflash_bench.analysis.metrics import BASELINE, FORMULAS
from dflash_bench.report import document
from dflash_bench.report.tables import markdown, with_interval
from studies._study import Made, Work, add_data

TAKES = "five minutes of one core"
PAGES = ("drafts/real-text-nano-cpu.md",)
RUN = "--suite gsm8k --suite humaneval --suite mt_bench --threads 1 --method dflash --method eagle3"
HEADS = ["suite", "method", "prompts", "tokens", "al.pooled [95 %]", "exact"]
PAGE = """# nano on embedded prompts and on real text

```
{command}
```

{machine}.

Embedded prompts come from the same generator as the training text of nano and its drafts: other questions,
the same templates. FOLDER holds the rows of the public suites, which nano has never seen. {limit} prompts per
suite, greedy, float32, at most 192 new tokens; one run, as acceptance is the same in every run.

{table}

`al.pooled`: {formula}. Intervals are 95 %, by bootstrap over
prompts; with only {limit} prompts they are probably too narrow.
"""


def options(parser: ArgumentParser) -> None:
    add_data(parser, "gsm8k/test.jsonl, humaneval/test.jsonl and mt_bench/train.jsonl")
    parser.add_argument("--limit", type=int, default=16, help="number of prompts of each suite")


def make(work: Work, options: Namespace) -> Made:
    sources = {"embedded": "embedded", "real": options.data}
    folders = [
        work.run(name, *RUN.split(), "--limit", options.limit, "--data", source) for name, source in sources.items()
    ]
    runs = [document.read_document(folder) for folder in folders]
    rows = [
        [
            cell.label,
            cell.method,
            str(cell.num_prompts),
            f"{cell.num_tokens:,}",
            with_interval(cell.figures.get("al.pooled")),
            "/".join(map(str, cell.exact or ())),
        ]
        for run in runs
        for cell in run.cells
        if cell.method != BASELINE
    ]
    page = PAGE.format(
        command=work.command,
        machine=runs[0].results.info.environment.one_line(),
        limit=options.limit,
        table=markdown(HEADS, rows, left=2),
        formula=FORMULAS["al.pooled"],
    )
    return Made({PAGES[0]: page})
